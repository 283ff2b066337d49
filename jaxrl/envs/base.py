"""Interface of environments: tasks in, observations and rewards out, as text and image files."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from jaxrl.envs.images import Picture
from jaxrl.utils.errors import ToolError

Message = Mapping[str, Any]
"""One chat message: texts as `role` and `content`, and fields such as `tool_calls`."""


NO_INFORMATION = "No information found"
"""Text of a search that finds nothing."""


class Outcome(enum.StrEnum):
    """Reason for the end of an episode."""

    ANSWERED = "answered"
    ABSTAINED = "abstained"
    MALFORMED = "malformed"
    OUT_OF_BUDGET = "out_of_budget"
    ENVIRONMENT_ERROR = "environment_error"  # ours, not the policy's: never a reward of 0


class OutageError(ToolError):
    """The tool has answered nobody for longer than a run waits for it.

    Attributes:
        fallback: what the model is shown in place of an answer, in an episode that ends as an
            environment error; None: the run stops, as no episode can be played.
    """

    def __init__(self, message: str, *, fallback: str | None = None) -> None:
        super().__init__(message)
        self.fallback = fallback


SOURCES = ("tool", "cache", "shared", "replay", "fallback")
"""Answerers of a call: the tool itself; the cache; the same call of another episode under way at
that moment; the record of earlier calls; nobody, in an outage."""


@dataclass(frozen=True, kw_only=True)
class CallRecord:
    """Record of one call of a tool.

    All but `tool`, `call` and `result_index` may differ when a run is repeated.
    """

    call: str  # as it was sent
    tool: str | None = None  # which one; None for the search engine
    source: str = "tool"  # one of SOURCES
    attempts: int = 1  # how often the tool was asked for it
    waited_s: float = 0.0  # until there was an answer, or none was waited for any more
    error: str | None = None  # why there is no answer
    result_index: int = 0  # of its result among the results of the turn


@dataclass(frozen=True, kw_only=True)
class Task:
    """One question record.

    Exactly one of `question` and `messages` is set; `answers` holds every accepted answer. Where
    there are images, the texts hold as many marks `<image>`, in their order.
    """

    id: str
    question: str | None = None
    messages: tuple[Message, ...] | None = None
    answers: tuple[str, ...] = ()
    data_source: str = "default"
    metadata: Mapping[str, Any] = field(default_factory=dict)
    images: tuple[Picture, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """Chat that puts a question: a system message, examples, and the question in its template.

    Attributes:
        system: the system message; "" for none.
        template: the user message, with `{question}` where the question goes. Other braces are
            plain text.
        examples: messages between the two.
    """

    system: str
    template: str
    examples: tuple[Message, ...] = ()

    def __post_init__(self) -> None:
        """Checks the template."""
        if "{question}" not in self.template:
            raise ValueError(
                f"the prompt template {self.template!r} does not contain {{question}}."
            )

    def messages(self, task: Task) -> list[Message]:
        """The chat that opens an episode; a task that brings messages keeps just those."""
        if task.messages is not None:
            return list(task.messages)
        system = [{"role": "system", "content": self.system}] if self.system else []
        content = self.template.replace("{question}", task.question or "")
        return [*system, *self.examples, {"role": "user", "content": content}]


@dataclass(frozen=True, kw_only=True)
class Observation:
    """Text the environment inserts; only `body` may be shortened to fit a token budget.

    `prefix` and `suffix` carry the protocol's tags. `body` comes from outside: it is encoded with
    special tokens as plain text. Images are shown behind it, inside the tags, and never shortened.
    """

    prefix: str
    body: str
    suffix: str
    images: tuple[Picture, ...] = ()

    @property
    def text(self) -> str:
        """The whole block as it reads before any shortening."""
        return self.prefix + self.body + self.suffix


@dataclass(frozen=True, kw_only=True)
class ToolResults:
    """Results of the calls of one message, in their order.

    The model's chat template puts each into a message of the role `tool` and begins the model's
    next one. Each may be shortened to fit a token budget; all come from outside, as the body of an
    `Observation` does. Images of a result are shown behind its text.
    """

    bodies: tuple[str, ...]
    images: tuple[tuple[Picture, ...], ...] = ()  # of each body; () where none has any

    @property
    def images_of_each(self) -> tuple[tuple[Picture, ...], ...]:
        """`images`, one entry for each body."""
        return self.images or ((),) * len(self.bodies)


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The environment's reply to one model message.

    Either the episode is over (`outcome` is set) or the model goes on, after `observation` if
    there is one.
    """

    observation: Observation | ToolResults | None = None
    outcome: Outcome | None = None
    tool_call: str | None = None  # what was asked of the tool, as it was sent; the first call
    tool: str | None = None  # which one; None for the search engine
    latency_s: float = 0.0
    # Why the environment could not reply; without an outcome, the episode goes on with what stands
    # in for the reply, and ends as an environment error.
    error: str | None = None
    records: tuple[CallRecord, ...] = ()  # of all calls of tools for this reply


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One model message and the environment's reply to it."""

    text: str
    tool_call: str | None = None
    tool: str | None = None
    observation: str | None = None  # as inserted, after any shortening
    results: tuple[str, ...] = ()  # the same of each call, where the observation is `ToolResults`
    latency_s: float = 0.0
    error: str | None = None  # why the environment could not reply
    records: tuple[CallRecord, ...] = ()  # of the calls of tools to reply to it
    images: tuple[Picture, ...] = ()  # that the observation shows
    is_cut: bool = False  # the budget of tokens ended it

    def calls(self, tool: str | None) -> list[str]:
        """The calls of a tool in this turn; None is the search engine."""
        if self.records:
            return [record.call for record in self.records if record.tool == tool]
        return [self.tool_call] if self.tool_call is not None and self.tool == tool else []


@dataclass(kw_only=True)
class Episode:
    """One sample of one task while it runs; the rollout owns and fills it."""

    task: Task
    # Of the response, which the chat template has written: the prompt ends with it.
    opener: str = ""
    turns: list[Turn] = field(default_factory=list)
    outcome: Outcome | None = None

    @property
    def response(self) -> str:
        """The template's opener, and everything after the prompt, observations included."""
        written = "".join(turn.text + (turn.observation or "") for turn in self.turns)
        return self.opener + written

    @property
    def num_tool_calls(self) -> int:
        """Turns that called a tool."""
        return sum(turn.tool_call is not None for turn in self.turns)


@dataclass(frozen=True, kw_only=True)
class Reward:
    """Result of the environment for one episode.

    `parts` are what was measured, each without its weight. `total` is what training uses: the sum
    by the weights of a run, which `payment.Payment` puts in; an environment leaves it out.

    The verdicts are for what reads groups rather than rewards: pass@k advantages, filters and
    difficulties ask `is_correct`; abstention rewards ask the other two.

    A part that is earned turn by turn stands in `turn_parts` alone, with an amount for each turn of
    the episode, known by the end of that turn; its sum becomes one of the `parts`. Of `total`, and
    put in like it, `turn_totals` is what each turn has earned, and `rest` what no turn has.
    """

    parts: Mapping[str, float]
    final_answer: str
    total: float = 0.0
    turn_parts: Mapping[str, Sequence[float]] = field(default_factory=dict)
    turn_totals: tuple[float, ...] = ()
    rest: float = 0.0
    is_correct: bool = False
    is_abstention: bool = False  # the answer says that the model does not know
    is_well_formed: bool = True  # the response keeps to the protocol


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A finished episode: what the environment found in it, and the ids of its response.

    `records` is filled while it is paid, also where that fails: what calls of judges took.
    """

    episode: Episode
    reward: Reward
    completion_ids: Sequence[int] = ()  # all after the prompt, observations included
    records: list[CallRecord] = field(default_factory=list)


class Env(Protocol):
    """A batched environment: one call serves all rows that stopped together.

    What a method raises, a result of another type and, of `step`, no result within a deadline end
    the episodes concerned as environment errors, with type and text of what happened. An
    `OutageError` of `step` without a fallback ends the run.

    An environment that plays its episodes itself has a method `rollout` too, which returns a
    rollout. It takes the sampler, the further arguments of `sampling.episodes.EpisodePlayer` and,
    as `log`, a function that prints a line of the run. Such an environment may have an
    `engine_kind`, the class of its sampler. Nobody asks its `start` and `step`.
    """

    stop_strings: tuple[str, ...]
    """The model's turn ends where one of these ends; () where it has one turn and no tools."""

    reward_parts: tuple[str, ...]
    """Names of what `score` measures, whole or by turns, the same for every reward."""

    chat_tools: Sequence[Mapping[str, Any]] = ()
    """Functions that the chat template tells the model it may call, as JSON schemas."""

    def start(self, tasks: Sequence[Task]) -> list[list[Message]]:
        """Chat messages that open an episode of each task."""

    def step(self, episodes: Sequence[Episode], texts: Sequence[str]) -> list[StepResult]:
        """Replies to one finished turn of each episode.

        Called from threads, possibly from several at once; the episodes are not to be changed.
        Where it raises, the caller asks again for each episode alone.

        `texts[i]` is the new turn of `episodes[i]` (not yet in its `turns`). It ends exactly at a
        stop string, or, where the model ended its turn by itself, without one.
        """

    def score(self, group: Sequence[Episode]) -> list[Reward]:
        """Rewards of finished episodes of one task, environment errors left out by the caller.

        Where it raises, the caller asks again for each episode alone; one for which it raises then
        too ends as an environment error.
        """


ENVS: Mapping[str, str] = {
    "search": "jaxrl.envs.search_env.SearchEnv",
    "math": "jaxrl.envs.math_env.MathEnv",
    "agents": "jaxrl.extras.serve.agents.environment.AgentEnv",
}
"""Environments that a configuration can name, by where they are."""

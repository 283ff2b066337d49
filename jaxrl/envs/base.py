"""Interface of environments, in text and image files."""

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
    """A tool has not answered anyone for longer than the run waits.

    Attributes:
        fallback: Text to show instead, in an episode that ends as an environment error. None stops
            the run.
    """

    def __init__(self, message: str, *, fallback: str | None = None) -> None:
        super().__init__(message)
        self.fallback = fallback


SOURCES = ("tool", "cache", "shared", "replay", "fallback")
"""Sources of an answer: the tool; the cache; the same call of another episode, in flight at that
moment; a recording; nobody, during an outage."""


@dataclass(frozen=True, kw_only=True)
class CallRecord:
    """Record of one call of a tool. Only `tool`, `call` and `result_index` are reproducible."""

    call: str
    tool: str | None = None  # None for the search engine
    source: str = "tool"  # one of SOURCES
    attempts: int = 1
    waited_s: float = 0.0
    error: str | None = None  # reason for no answer
    result_index: int = 0  # of its result in the turn


@dataclass(frozen=True, kw_only=True)
class Task:
    """A question record, with either `question` or `messages`, and all accepted answers.

    The texts hold a mark `<image>` for each image, in order.
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
    """Chat that asks a question.

    Attributes:
        system: System message; "" for none.
        template: User message, with `{question}`. Other braces are plain text.
        examples: Messages between the two.
    """

    system: str
    template: str
    examples: tuple[Message, ...] = ()

    def __post_init__(self) -> None:
        if "{question}" not in self.template:
            raise ValueError(
                f"the prompt template {self.template!r} does not contain {{question}}."
            )

    def messages(self, task: Task) -> list[Message]:
        """Return the first messages of an episode; those of the task if it has some."""
        if task.messages is not None:
            return list(task.messages)
        system = [{"role": "system", "content": self.system}] if self.system else []
        content = self.template.replace("{question}", task.question or "")
        return [*system, *self.examples, {"role": "user", "content": content}]


@dataclass(frozen=True, kw_only=True)
class Observation:
    """Text that the environment inserts, with images behind `body`.

    Only `body` may be cut to fit a token budget. It is foreign text, so special tokens in it are
    encoded as plain text. `prefix` and `suffix` carry the protocol's tags.
    """

    prefix: str
    body: str
    suffix: str
    images: tuple[Picture, ...] = ()

    @property
    def text(self) -> str:
        """The whole block before it is cut."""
        return self.prefix + self.body + self.suffix


@dataclass(frozen=True, kw_only=True)
class ToolResults:
    """Results of the calls of one message, which the chat template renders.

    Each is foreign text that may be cut, like the body of an `Observation`, with images behind it.
    """

    bodies: tuple[str, ...]
    images: tuple[tuple[Picture, ...], ...] = ()  # of each body; () for none

    @property
    def images_of_each(self) -> tuple[tuple[Picture, ...], ...]:
        """`images`, one entry for each body."""
        return self.images or ((),) * len(self.bodies)


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The environment's reply to one model message.

    The episode ends if `outcome` is set. Otherwise the model continues, after an `observation` if
    there is one. With an `error` but no outcome, the observation stands in for the reply, and the
    episode ends as an environment error later.
    """

    observation: Observation | ToolResults | None = None
    outcome: Outcome | None = None
    tool_call: str | None = None  # the first call
    tool: str | None = None  # its tool; None for the search engine
    latency_s: float = 0.0
    error: str | None = None
    records: tuple[CallRecord, ...] = ()  # of all calls


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One model message and the environment's reply to it."""

    text: str
    tool_call: str | None = None
    tool: str | None = None
    observation: str | None = None  # as inserted, perhaps cut
    results: tuple[str, ...] = ()  # of each call, if the observation is `ToolResults`
    latency_s: float = 0.0
    error: str | None = None  # of the environment
    records: tuple[CallRecord, ...] = ()
    images: tuple[Picture, ...] = ()  # of the observation
    is_cut: bool = False  # by the token budget

    def calls(self, tool: str | None) -> list[str]:
        """Return the calls of a tool in this turn; None is the search engine."""
        if self.records:
            return [record.call for record in self.records if record.tool == tool]
        return [self.tool_call] if self.tool_call is not None and self.tool == tool else []


@dataclass(kw_only=True)
class Episode:
    """One sample of one task in progress, which the rollout fills."""

    task: Task
    opener: str = ""  # beginning of the response that the chat template writes
    turns: list[Turn] = field(default_factory=list)
    outcome: Outcome | None = None

    @property
    def response(self) -> str:
        """Everything after the prompt, including observations."""
        written = "".join(turn.text + (turn.observation or "") for turn in self.turns)
        return self.opener + written

    @property
    def num_tool_calls(self) -> int:
        """Turns that called a tool."""
        return sum(turn.tool_call is not None for turn in self.turns)


@dataclass(frozen=True, kw_only=True)
class Reward:
    """Result of the environment for one episode.

    `parts` are unweighted. `RewardCombiner` fills in `total`, their weighted sum, which training
    uses, and `turn_totals` and `rest`, the shares of turns and of the whole episode.

    Parts that are earned by turn are in `turn_parts` only, with an amount for each turn.
    Advantages, filters and shaping read the verdicts.
    """

    parts: Mapping[str, float]
    final_answer: str
    total: float = 0.0
    turn_parts: Mapping[str, Sequence[float]] = field(default_factory=dict)
    turn_totals: tuple[float, ...] = ()
    rest: float = 0.0
    is_correct: bool = False
    is_abstention: bool = False  # the answer is "I don't know"
    is_well_formed: bool = True  # by the protocol


@dataclass(frozen=True, kw_only=True)
class ScoredEpisode:
    """A finished episode with the environment's reward. `RewardCombiner` fills `records`."""

    episode: Episode
    reward: Reward
    completion_ids: Sequence[int] = ()  # all after the prompt, observations included
    records: list[CallRecord] = field(default_factory=list)


class Env(Protocol):
    """A batched environment.

    An exception, a result of another type or no `step` within a deadline ends the episodes
    concerned as environment errors. An `OutageError` of `step` without a fallback ends the run.

    An environment that plays its episodes itself also has a method `rollout`, which returns a
    rollout. It takes the sampler, the further arguments of `sampling.episodes.EpisodePlayer`, and
    `log`, a callback for lines of the run. It may have an `engine_kind`, the class of its sampler.
    Its `start` and `step` are not called.
    """

    stop_strings: tuple[str, ...]
    """Ends of a model's turn; () for one turn without tools."""

    reward_parts: tuple[str, ...]
    """Names of the parts that `score` measures, the same for every reward."""

    chat_tools: Sequence[Mapping[str, Any]] = ()
    """JSON schemas of the functions that the chat template describes."""

    def start(self, tasks: Sequence[Task]) -> list[list[Message]]:
        """Return the first messages of an episode of each task."""

    def step(self, episodes: Sequence[Episode], texts: Sequence[str]) -> list[StepResult]:
        """Reply to the new turn `texts[i]` of each episode, which is not in its `turns` yet.

        The text ends at a stop string, or the model ended its turn. Called from several threads.
        Must not change the episodes. After an exception it is called for each episode alone.
        """

    def score(self, group: Sequence[Episode]) -> list[Reward]:
        """Return the rewards of finished episodes of one task, without environment errors.

        After an exception it is called for each episode alone.
        """


ENVS: Mapping[str, str] = {
    "search": "jaxrl.envs.search_env.SearchEnv",
    "math": "jaxrl.envs.math_env.MathEnv",
    "agents": "jaxrl.extras.serve.agents.environment.AgentEnv",
}
"""Environments by the names that a config uses."""

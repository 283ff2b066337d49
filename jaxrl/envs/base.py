"""Environment interface and its data classes."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from jaxrl.envs.images import Picture
from jaxrl.utils.errors import ToolError

Message = Mapping[str, Any]
"""A chat message: strings `role` and `content`, and fields such as `tool_calls`."""


NO_INFORMATION = "No information found"
"""Search result when nothing matches."""


class Outcome(enum.StrEnum):
    """Reason an episode ended."""

    ANSWERED = "answered"
    ABSTAINED = "abstained"
    MALFORMED = "malformed"
    OUT_OF_BUDGET = "out_of_budget"
    ENVIRONMENT_ERROR = "environment_error"  # not the policy's fault, so no reward of 0


class OutageError(ToolError):
    """Error raised when a tool or judge has been down longer than the run allows.

    Attributes:
        fallback: Tool result to use instead of stopping the run; the episode then ends with an
            environment error. If None, the run stops.
    """

    def __init__(self, message: str, *, fallback: str | None = None) -> None:
        super().__init__(message)
        self.fallback = fallback


SOURCES = ("tool", "cache", "shared", "replay", "fallback")
"""Possible sources of a result: the tool, the cache, an identical call in flight for another
episode, a recording, or the fallback text of an outage."""


@dataclass(frozen=True, kw_only=True)
class CallRecord:
    """Record of one tool call. Only `tool`, `call` and `result_index` are reproducible."""

    call: str
    tool: str | None = None  # None for the search engine
    source: str = "tool"  # one of SOURCES
    attempts: int = 1
    waited_s: float = 0.0
    error: str | None = None  # error message if there is no result
    result_index: int = 0  # index of the result in the turn


@dataclass(frozen=True, kw_only=True)
class Task:
    """Task record: `question` or `messages`, and all accepted answers.

    The text contains an `<image>` placeholder for each image, in order.
    """

    id: str
    question: str | None = None
    messages: tuple[Message, ...] | None = None
    answers: tuple[str, ...] = ()
    data_source: str = "default"
    metadata: Mapping[str, Any] = field(default_factory=dict)
    images: tuple[Picture, ...] = ()
    environment: str = ""  # name in `config.environments`; "" in a run with one environment


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """Prompt template: system message, examples and user message.

    Attributes:
        system: System message; "" for none.
        template: User message that contains `{question}`. Other braces are literal.
        examples: Few-shot messages between the system and user messages.
        render: Function that renders a task's user message, instead of `template`.
    """

    system: str
    template: str
    examples: tuple[Message, ...] = ()
    render: Callable[[Task], str] | None = None

    def render_messages(self, task: Task) -> list[Message]:
        """Return the initial messages of an episode; `task.messages` replaces the template."""
        if task.messages is not None:
            return list(task.messages)
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [
            *system,
            *self.examples,
            {"role": "user", "content": self.render_user_message(task)},
        ]

    def render_user_message(self, task: Task) -> str:
        """Return the user message that contains the task's question."""
        if self.render is not None:
            return self.render(task)
        return self.template.replace("{question}", task.question or "")


@dataclass(frozen=True, kw_only=True)
class Observation:
    """Text that the environment inserts after a turn, with images after `body`.

    Only `body` may be truncated to fit a token budget. It is untrusted text, so special tokens in
    it are encoded as plain text. `prefix` and `suffix` contain the protocol's tags.
    """

    prefix: str
    body: str
    suffix: str
    images: tuple[Picture, ...] = ()

    @property
    def text(self) -> str:
        """Complete text before truncation."""
        return self.prefix + self.body + self.suffix


@dataclass(frozen=True, kw_only=True)
class ToolResults:
    """Results of the calls in one model message, rendered by the chat template.

    Each body is untrusted text that may be truncated, like `Observation.body`. Images follow it.
    """

    bodies: tuple[str, ...]
    images: tuple[tuple[Picture, ...], ...] = ()  # one entry per body; () for no images

    @property
    def images_per_body(self) -> tuple[tuple[Picture, ...], ...]:
        """Images of each body; () for a body without images."""
        return self.images or ((),) * len(self.bodies)


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Environment's reply to one model message.

    The episode ends if `outcome` is set. Otherwise, the model continues, after the `observation` if
    there is one. If `error` is set without an outcome, the observation is a fallback, and the
    episode later ends with an environment error.
    """

    observation: Observation | ToolResults | None = None
    outcome: Outcome | None = None
    tool_call: str | None = None  # the first call
    tool: str | None = None  # tool of that call; None for the search engine
    latency_s: float = 0.0
    error: str | None = None
    records: tuple[CallRecord, ...] = ()  # one per call


@dataclass(frozen=True, kw_only=True)
class Turn:
    """Model message and the environment's reply to it."""

    text: str
    tool_call: str | None = None
    tool: str | None = None
    observation: str | None = None  # as inserted, possibly truncated
    results: tuple[str, ...] = ()  # one per call, if the observation is `ToolResults`
    latency_s: float = 0.0
    error: str | None = None  # error message if the environment failed
    records: tuple[CallRecord, ...] = ()
    images: tuple[Picture, ...] = ()  # images of the observation
    is_cut: bool = False  # True if the token budget truncated the observation

    def get_calls(self, tool: str | None) -> list[str]:
        """Return this turn's calls to a tool, or to the search engine if None."""
        if self.records:
            return [record.call for record in self.records if record.tool == tool]
        return [self.tool_call] if self.tool_call is not None and self.tool == tool else []


@dataclass(kw_only=True)
class Episode:
    """Episode in progress: a sample of a task, filled in by the rollout."""

    task: Task
    opener: str = ""  # start of the response, written by the chat template
    turns: list[Turn] = field(default_factory=list)
    outcome: Outcome | None = None

    @property
    def response(self) -> str:
        """Text after the prompt, including observations."""
        written = "".join(turn.text + (turn.observation or "") for turn in self.turns)
        return self.opener + written

    @property
    def num_tool_calls(self) -> int:
        """Number of turns that called a tool."""
        return sum(turn.tool_call is not None for turn in self.turns)


@dataclass(frozen=True, kw_only=True)
class Reward:
    """Environment's score for an episode.

    `parts` are unweighted. `RewardCombiner` sets `total` to the weighted sum, which training uses,
    and splits it into one `turn_totals` value per turn and `rest`, which belongs to no turn.

    Parts with a value for each turn are in `turn_parts` only. Advantages, filters and shaping use
    the `is_*` flags.
    """

    parts: Mapping[str, float]
    final_answer: str
    total: float = 0.0
    turn_parts: Mapping[str, Sequence[float]] = field(default_factory=dict)
    turn_totals: tuple[float, ...] = ()
    rest: float = 0.0
    is_correct: bool = False
    is_abstention: bool = False  # the answer is "I don't know"
    is_well_formed: bool = True  # according to the protocol


@dataclass(frozen=True, kw_only=True)
class ScoredEpisode:
    """Finished episode with the environment's reward. `RewardCombiner` fills in `records`."""

    episode: Episode
    reward: Reward
    completion_ids: Sequence[int] = ()  # all tokens after the prompt, including observations
    records: list[CallRecord] = field(default_factory=list)


class Env(Protocol):
    """Environment interface. Methods handle a batch of episodes.

    If a method raises or returns the wrong type, or if `step` misses its deadline, the affected
    episodes end with an environment error. If `step` raises an `OutageError` without a fallback,
    the run ends.

    An environment with a custom rollout also has a `make_rollout` method, which builds the rollout
    from the sampler, the other arguments of `sampling.episodes.BaseRollout`, and `log`, a callback
    for log lines. Such an environment may set `engine_kind`, the class of its sampler. `start` and
    `step` of such an environment are not called.
    """

    stop_strings: tuple[str, ...]
    """Strings that end a model's turn, in addition to the end-of-turn token."""

    reward_parts: tuple[str, ...]
    """Names of the parts that `score` computes, the same for every episode."""

    chat_tools: Sequence[Mapping[str, Any]] = ()
    """JSON schemas of the tools, for the chat template."""

    def start(self, tasks: Sequence[Task]) -> list[list[Message]]:
        """Return the initial messages of one episode per task."""

    def step(self, episodes: Sequence[Episode], texts: Sequence[str]) -> list[StepResult]:
        """Return the reply to each episode's new turn `texts[i]`, which is not yet in `turns`.

        Each text ends with a stop string, unless the model ended its turn. Several threads may call
        this method, and it must not modify the episodes. If it raises, it is called again for each
        episode separately.
        """

    def score(self, group: Sequence[Episode]) -> list[Reward]:
        """Return one reward per finished episode of a task.

        `group` omits episodes that ended with an environment error. If this method raises, it is
        called again for each episode separately.
        """


ENVS: Mapping[str, str] = {
    "search": "jaxrl.envs.search_env.SearchEnv",
    "math": "jaxrl.envs.math_env.MathEnv",
    "agents": "jaxrl.extras.serve.agents.environment.AgentEnv",
}
"""Environments by config name."""

"""The data that travels between the parts: trajectories on the host, batches on the device."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any, Protocol

import jax
import numpy as np
from flax import struct

from jaxrl.envs.base import CallRecord, Outcome, Task, Turn
from jaxrl.envs.images import Picture

Params = dict[str, Any]
"""A plain nested dict of arrays; see `models.architecture`."""


@dataclass(frozen=True, kw_only=True)
class Draw:
    """A task to roll out, and where it stands in the task stream, which seeds its samples."""

    task: Task
    stream_index: int
    attempt: int = 0  # tries before this one to sample the same draw


@dataclass(frozen=True, kw_only=True)
class TokenStep:
    """One sampled token."""

    token_id: int
    token_text: str
    log_prob: float  # nats
    position: int  # in the trajectory's ids, observations counted


@dataclass(frozen=True, kw_only=True, eq=False)
class Divergence:
    """Divergence of the policy before the update from the reference, along one trajectory."""

    old_logprobs: np.ndarray  # float32 [L], nats; 0 where nothing is trained
    ref_logprobs: np.ndarray  # float32 [L], nats; likewise
    per_token: np.ndarray  # float32 [L], nats, by `kl.estimator`; 0 where nothing is trained
    num_tokens: int  # that are trained on

    @property
    def total(self) -> float:
        """The sum over the trajectory, in nats."""
        return float(self.per_token.sum())

    @property
    def mean(self) -> float:
        """Nats a token; NaN where none is trained on."""
        return self.total / self.num_tokens if self.num_tokens else math.nan


@dataclass(frozen=True, kw_only=True, eq=False)
class Windows:
    """Windows of entropy along one trajectory (ARES)."""

    values: np.ndarray  # float32 [L], nats; 0 where there is no whole window
    valid: np.ndarray  # bool [L]
    is_high: np.ndarray  # bool [L], at the threshold or above
    percentile: float  # of the values, nats; NaN without any
    excess: float  # the sum of what lies above the threshold, nats

    @property
    def count(self) -> int:
        """Tokens followed by a window of high entropy."""
        return int(self.is_high.sum())


class Attachment(Protocol):
    """An image, say, within a text, as a model reads it; equal by content."""

    @property
    def num_patches(self) -> int:
        """Into how many pieces it is cut."""
        ...

    def __hash__(self) -> int:
        """Hashes the content."""
        ...


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """One episode on the host: every token the model read or wrote."""

    token_ids: np.ndarray  # int32 [L]
    # bool [L], True where the policy sampled the token; `with_loss_mask` may add observations.
    loss_mask: np.ndarray
    rollout_logprobs: np.ndarray  # float32 [L], nats; 0 outside loss_mask
    rollout_entropies: np.ndarray  # float32 [L], nats; 0 outside loss_mask
    policy_versions: np.ndarray  # int32 [L], updates the sampling weights had seen; -1 outside
    attachments: tuple[Attachment, ...] = ()  # in the order of their runs of ids in `token_ids`
    # [L, ...] of `Architecture.recorded`, as the sampler's passes left them; {} where training is
    # not given them.
    token_arrays: Mapping[str, np.ndarray] = field(default_factory=dict)
    prompt_length: int
    sample_index: int  # within the group
    attempt: int = 0
    task: Task
    # Beginning of the response, which the chat template has written: the prompt ends with it.
    opener: str = ""
    turns: tuple[Turn, ...]
    turn_starts: tuple[int, ...] = ()  # where the tokens of each turn begin
    # Contexts after the first: where each begins in `token_ids`, and how many tokens it begins with
    # that stand in an earlier one. A token was drawn from those of its own context alone.
    contexts: tuple[tuple[int, int], ...] = ()
    outcome: Outcome
    reward: float = 0.0
    turn_rewards: tuple[float, ...] = ()  # of `reward`, what each turn has earned; () where none
    rest_reward: float = 0.0  # of `reward`, what no turn has earned, where there are turn_rewards
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    reward_records: tuple[CallRecord, ...] = ()  # of calls of judges, also where these failed
    final_answer: str = ""
    is_correct: bool = False  # this and the next two are the environment's verdicts
    is_abstention: bool = False  # declines to answer
    is_well_formed: bool = True
    # Of a model behind an endpoint: calls, attempts, prompt_tokens, completion_tokens.
    usage: Mapping[str, float] = field(default_factory=dict)
    # What a training step finds out about it; None until then, or where no term asks for it.
    divergence: Divergence | None = None
    windows: Windows | None = None
    advantage: float | None = None  # by turns: their mean over the sampled tokens
    turn_advantages: tuple[float, ...] | None = None  # of each turn, by `advantage.by_turn`

    @property
    def has_signal(self) -> bool:
        """True if an advantage of it is not 0."""
        if self.turn_advantages is not None:
            return any(self.turn_advantages)
        return self.advantage != 0

    @property
    def token_advantages(self) -> np.ndarray:
        """float32 [L], at each token that of its turn or, not by turns, of the trajectory."""
        if self.turn_advantages is None:
            return np.full(len(self.token_ids), self.required("advantage"), np.float32)
        return np.array(self.turn_advantages, np.float32)[self.token_turns]

    @property
    def token_turns(self) -> np.ndarray:
        """Int [L], each token's turn, observations after it included; of the prompt the first."""
        places = np.arange(len(self.token_ids))
        return np.maximum(np.searchsorted(self.turn_starts, places, side="right") - 1, 0)

    @property
    def is_repeated(self) -> np.ndarray:
        """Bool [L], True of tokens that stand in an earlier context too."""
        repeated = np.zeros(len(self.token_ids), bool)
        for start, count in self.contexts:
            repeated[start : start + count] = True
        return repeated

    @property
    def query(self) -> str:
        """The task's question, or the last message of the user that it brings."""
        if self.task.question is not None:
            return self.task.question
        asked = [m["content"] for m in self.task.messages or () if m["role"] == "user"]
        return asked[-1] if asked else ""

    @property
    def pictures(self) -> list[Picture]:
        """Images as they were given, in the order of `attachments`: the task's, then of tools."""
        return [*self.task.images, *(image for turn in self.turns for image in turn.images)]

    @property
    def task_id(self) -> str:
        """The task's id in its data set."""
        return self.task.id

    @property
    def is_scored(self) -> bool:
        """False for an environment error, which is in no statistics and no loss."""
        return self.outcome != Outcome.ENVIRONMENT_ERROR

    @property
    def error(self) -> str:
        """The environment's failure; "" where it did not fail."""
        texts = [turn.error for turn in self.turns if turn.error]
        return "" if self.is_scored else texts[-1] if texts else "it has no text"

    def required(self, name: str) -> Any:
        """A measure that a step has made of it: `divergence`, `windows` or `advantage`.

        Raises:
            RuntimeError: it was not measured.
        """
        value = getattr(self, name)
        if value is None:
            raise RuntimeError(
                f"a trajectory of task {self.task_id!r} has no {name}, which this step reads. This "
                "is a bug in jaxrl."
            )
        return value

    @property
    def num_sampled(self) -> int:
        """Tokens in `loss_mask`: those the policy sampled, unless `with_loss_mask` widened it."""
        return int(self.loss_mask.sum())

    @property
    def response_length(self) -> int:
        """Tokens after the prompt, observations included, each once."""
        repeated = sum(count for _, count in self.contexts)
        return len(self.token_ids) - self.prompt_length - repeated

    @property
    def mean_entropy(self) -> float:
        """Mean entropy of the sampled tokens, nats."""
        return float(self.rollout_entropies.sum()) / max(self.num_sampled, 1)

    @property
    def searches(self) -> list[str]:
        """Queries to the search engine."""
        return self.calls(None)

    @property
    def python_calls(self) -> list[str]:
        """Code given to the Python tool."""
        return self.calls("python")

    @property
    def records(self) -> list[CallRecord]:
        """Records of its calls of tools, in their order."""
        return [record for turn in self.turns for record in turn.records]

    def calls(self, tool: str | None) -> list[str]:
        """Calls of a tool; None is the search engine."""
        return [call for turn in self.turns for call in turn.calls(tool)]

    @property
    def generated_text(self) -> str:
        """The template's opener, and everything after the prompt, observations included."""
        written = "".join(turn.text + (turn.observation or "") for turn in self.turns)
        return self.opener + written

    def token_steps(self, token_text: Callable[[int], str]) -> list[TokenStep]:
        """Every sampled token by itself.

        The last token of a turn is whole here; `generated_text` ends at the stop string within it.

        Args:
            token_text: the text of one id.
        """
        return [
            TokenStep(
                token_id=int(self.token_ids[position]),
                token_text=token_text(int(self.token_ids[position])),
                log_prob=float(self.rollout_logprobs[position]),
                position=position,
            )
            for position in self.generated_positions
        ]

    @property
    def full_input_ids(self) -> list[int]:
        """Prompt, sampled and inserted ids, in order, context by context."""
        return [int(token) for token in self.token_ids]

    @property
    def generated_positions(self) -> list[int]:
        """Places of the sampled tokens in `full_input_ids`."""
        return [int(position) for position in np.flatnonzero(self.loss_mask)]


@dataclass(frozen=True, kw_only=True)
class Group:
    """All trajectories of one task, drawn once, in the order of `sample_index`."""

    trajectories: tuple[Trajectory, ...]  # at least one

    @property
    def task_id(self) -> str:
        """The task's id in its data set."""
        return self.trajectories[0].task_id

    @property
    def scored(self) -> list[Trajectory]:
        """Trajectories without an environment error."""
        return [t for t in self.trajectories if t.is_scored]

    @property
    def num_correct(self) -> int:
        """Scored trajectories that are correct."""
        return sum(t.is_correct for t in self.scored)


@dataclass(frozen=True, kw_only=True)
class GroupStats:
    """Outcome of one group; environment errors among its trajectories are left out."""

    task_id: str
    num_correct: int
    num_scored: int
    mean_entropy: float  # nats a token, the mean over trajectories; NaN without any
    error: str = ""  # what the environment first failed with

    @classmethod
    def of(cls, group: Group) -> GroupStats:
        """The numbers of a group as it was sampled last."""
        entropies = [t.mean_entropy for t in group.scored]
        return cls(
            task_id=group.task_id,
            num_correct=group.num_correct,
            num_scored=len(group.scored),
            mean_entropy=float(np.mean(entropies)) if entropies else math.nan,
            error=next((t.error for t in group.trajectories if not t.is_scored), ""),
        )

    @property
    def kind(self) -> str:
        """One of `GROUP_KINDS`."""
        if not self.num_scored:
            return "failed"
        if 0 < self.num_correct < self.num_scored:
            return "mixed"
        return "all_right" if self.num_correct else "all_wrong"


GROUP_KINDS = ("all_right", "all_wrong", "mixed", "failed")
"""Kinds of groups; in a failed one all trajectories had environment errors."""


def members(groups: Sequence[Group]) -> list[Trajectory]:
    """The trajectories of all groups, group by group."""
    return [trajectory for group in groups for trajectory in group.trajectories]


def with_fields(groups: Sequence[Group], **columns: Sequence[Any]) -> list[Group]:
    """Groups whose trajectories have other values in some fields.

    Args:
        groups: as they are.
        columns: by name of a field, its value in each trajectory, in the order of `members`.

    Raises:
        ValueError: a column has more or fewer values than there are trajectories.
    """
    trajectories = members(groups)
    for name, values in columns.items():
        if len(values) != len(trajectories):
            raise ValueError(
                f"{name}: {len(values)} values for {len(trajectories)} trajectories; expected one "
                "for each."
            )
    changed = (
        dataclasses.replace(trajectory, **{name: values[i] for name, values in columns.items()})
        for i, trajectory in enumerate(trajectories)
    )
    return [Group(trajectories=tuple(islice(changed, len(g.trajectories)))) for g in groups]


class Columns:
    """Columns over the trajectories of some groups, as objectives read them.

    A column has the name of the parameter that takes it. The trajectories of a group are
    contiguous; N counts those with environment errors too, which are in no group.
    """

    def __init__(self, groups: Sequence[Group]):
        """The columns of `groups`, in the order of `members`."""
        self._groups = groups
        self._members = members(groups)

    @cached_property
    def group_ids(self) -> np.ndarray:
        """int32 [N], the group's index; -1 for an environment error."""
        ids = [
            index if t.is_scored else -1
            for index, group in enumerate(self._groups)
            for t in group.trajectories
        ]
        return np.array(ids, np.int32)

    @cached_property
    def rewards(self) -> np.ndarray:
        """float32 [N]."""
        return np.array([t.reward for t in self._members], np.float32)

    @cached_property
    def is_correct(self) -> np.ndarray:
        """Bool [N], what the environment says; False for its errors."""
        return np.array([t.is_correct and t.is_scored for t in self._members], bool)

    @cached_property
    def is_abstention(self) -> np.ndarray:
        """Bool [N], the answer says that the model does not know."""
        return np.array([t.is_abstention for t in self._members], bool)

    @cached_property
    def is_well_formed(self) -> np.ndarray:
        """Bool [N], the response keeps to the protocol."""
        return np.array([t.is_well_formed for t in self._members], bool)

    @cached_property
    def token_counts(self) -> np.ndarray:
        """int32 [N], sampled tokens."""
        return np.array([t.num_sampled for t in self._members], np.int32)

    @cached_property
    def turn_rewards(self) -> np.ndarray:
        """float64 [N, K], what each turn has earned; 0 where there is no such turn.

        K is the most turns, up to the next power of two: few sizes have few programs.
        """
        most = max((len(t.turns) for t in self._members), default=1)
        width = 1 << max(most - 1, 0).bit_length()
        table = np.zeros((len(self._members), width))
        for row, t in zip(table, self._members, strict=True):
            row[: len(t.turn_rewards)] = t.turn_rewards
        return table

    @cached_property
    def rest_rewards(self) -> np.ndarray:
        """float32 [N], what no turn has earned."""
        rest = [t.rest_reward if t.turn_rewards else t.reward for t in self._members]
        return np.array(rest, np.float32)

    @cached_property
    def turn_token_counts(self) -> np.ndarray:
        """int32 [N, K], sampled tokens of each turn."""
        width = self.turn_rewards.shape[1]
        counts = [np.bincount(t.token_turns[t.loss_mask], minlength=width) for t in self._members]
        return np.array(counts, np.int32).reshape(len(counts), width)

    @cached_property
    def mean_entropies(self) -> np.ndarray:
        """float32 [N], nats a sampled token."""
        return np.array([t.mean_entropy for t in self._members], np.float32)


@struct.dataclass
class Batch:
    """Trajectories packed into rows of T. Index t of every row is about token t.

    The leading axes are A micro-batches of b rows; no trajectory crosses a row.
    """

    token_ids: jax.Array  # int32 [A, b, T]
    segment_ids: jax.Array  # int32 [A, b, T], trajectory index in the mini-batch + 1; 0 on padding
    # int32 [A, b, T], a token's place in its context; a shared beginning may stand earlier in the
    # row. Contexts of a trajectory lie one after another: the next begins where positions do not go
    # on by one.
    positions: jax.Array
    loss_mask: jax.Array  # bool [A, b, T], True where the token is trained on
    token_weights: jax.Array  # float32 [A, b, T], the aggregation, from the whole mini-batch
    advantages: jax.Array  # float32 [A, b, T], constant over a trajectory or a turn
    rollout_logprobs: jax.Array  # float32 [A, b, T], as the sampler reported them
    old_logprobs: jax.Array | None = None  # float32 [A, b, T]; None: the current ones are the old
    ref_logprobs: jax.Array | None = None  # float32 [A, b, T]; None without a KL term to them
    kl_weights: jax.Array | None = None  # float32 [A, b, T]; None where all tokens have kl.coef
    # [A, b, T, ...], the recorded arrays, and those of `Tower.arrays` where the mini-batch has
    # attachments
    token_arrays: Mapping[str, jax.Array] = field(default_factory=dict)
    # Of a micro-batch while it is computed: `patches` [S, P, values] in the compute dtype, `places`
    # int32 [S, P, W] on the S devices that share tokens, each with what its own rows have. What
    # several sequences of a device's rows begin with is there once.
    attached: Any = None
    rest: Any = None  # the Batch of what is measured and not learned from; None without any


@struct.dataclass
class TrainState:
    """Everything the update step changes."""

    params: Params  # float32 master weights
    opt_state: Any
    num_updates: jax.Array  # int32 scalar, optimizer steps taken
    num_skipped: jax.Array  # int32 scalar, optimizer steps skipped for a non-finite gradient

"""Shared data types: trajectories on the host, batches on the device."""

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
"""Nested dict of arrays; see `models.architecture`."""


@dataclass(frozen=True, kw_only=True)
class Draw:
    """Task to roll out, and the index in the task stream that seeds its samples."""

    task: Task
    stream_index: int
    attempt: int = 0  # number of earlier attempts to sample this draw
    max_response_tokens: int | None = None  # limit below `rollout.max_response_tokens`


@dataclass(frozen=True, kw_only=True)
class TokenStep:
    """Id, text, log-probability and position of a sampled token."""

    token_id: int
    token_text: str
    log_prob: float  # nats
    position: int  # index in the trajectory's ids, observations included


@dataclass(frozen=True, kw_only=True, eq=False)
class Divergence:
    """Divergence of the pre-update policy from the reference policy on one trajectory.

    Arrays are 0 at tokens that are not trained on.
    """

    old_logprobs: np.ndarray  # float32 [L], nats
    ref_logprobs: np.ndarray  # float32 [L], nats
    per_token: np.ndarray  # float32 [L], nats, by `kl.estimator`
    num_tokens: int  # number of tokens that are trained on

    @property
    def total(self) -> float:
        """Sum over the trajectory, in nats."""
        return float(self.per_token.sum())

    @property
    def mean(self) -> float:
        """Mean in nats per trained token; NaN if there are none."""
        return self.total / self.num_tokens if self.num_tokens else math.nan


@dataclass(frozen=True, kw_only=True, eq=False)
class EntropyWindows:
    """Window entropies of one trajectory, as in ARES; see `objectives.entropy`."""

    values: np.ndarray  # float32 [L], nats; 0 where no complete window follows
    valid: np.ndarray  # bool [L], True if the window is complete
    is_high: np.ndarray  # bool [L], True if the value reaches the threshold at a trigger token
    percentile: float  # `shaping.entropy_percentile` of the valid values, nats; NaN if none
    excess: float  # sum over the windows of the excess over the threshold, nats

    @property
    def num_high_entropy_windows(self) -> int:
        """Number of high-entropy windows."""
        return int(self.is_high.sum())


class Attachment(Protocol):
    """Preprocessed non-text input, such as an image, with a placeholder in the text."""

    @property
    def num_patches(self) -> int:
        """Number of patches."""
        ...

    def __hash__(self) -> int:
        """Return a hash of the content; attachments with equal content are equal."""
        ...


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """Episode on the host, with all L tokens that the model read or wrote."""

    token_ids: np.ndarray  # int32 [L]
    # bool [L], True for tokens that the policy sampled; `with_loss_mask` may add observations.
    loss_mask: np.ndarray
    rollout_logprobs: np.ndarray  # float32 [L], nats; 0 outside loss_mask
    rollout_entropies: np.ndarray  # float32 [L], nats; 0 outside loss_mask
    # int32 [L], optimizer steps taken before the token was sampled; -1 for tokens not sampled.
    policy_versions: np.ndarray
    attachments: tuple[Attachment, ...] = ()  # in the order of their placeholders in `token_ids`
    # [L, ...] arrays of `Architecture.recorded_specs` from the sampler's passes; {} if training
    # does not replay them.
    token_arrays: Mapping[str, np.ndarray] = field(default_factory=dict)
    prompt_length: int
    sample_index: int  # within the group
    attempt: int = 0
    task: Task
    opener: str = ""  # start of the response that the chat template writes into the prompt
    turns: tuple[Turn, ...]
    turn_starts: tuple[int, ...] = ()  # index of each turn's first token
    # For each context after the first: its start in `token_ids`, and the number of tokens at its
    # start that repeat an earlier context. Tokens attend only within their context.
    contexts: tuple[tuple[int, int], ...] = ()
    outcome: Outcome
    reward: float = 0.0
    turn_rewards: tuple[float, ...] = ()  # part of `reward` assigned to each turn; () if unused
    rest_reward: float = 0.0  # part of `reward` assigned to no turn, if there are turn_rewards
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    reward_reason: str = ""  # why shaping changed the reward of an abstention
    reward_records: tuple[CallRecord, ...] = ()  # calls to judges, failed ones included
    final_answer: str = ""
    is_correct: bool = False  # judged by the environment, as are the next two fields
    is_abstention: bool = False  # True if the model declines to answer
    is_well_formed: bool = True
    # With a model behind an endpoint: calls, attempts, prompt_tokens, completion_tokens.
    usage: Mapping[str, float] = field(default_factory=dict)
    # Computed by the training step; None before it, or if the method does not need the value.
    divergence: Divergence | None = None
    windows: EntropyWindows | None = None
    advantage: float | None = None  # with turn advantages: their mean over the sampled tokens
    turn_advantages: tuple[float, ...] | None = None  # one per turn, if `advantage.by_turn`
    custom_advantages: np.ndarray | None = None  # float32 [L], one per token; see set_advantages

    @property
    def has_signal(self) -> bool:
        """Return True if any advantage is nonzero."""
        if self.custom_advantages is not None:
            return bool(self.custom_advantages[self.loss_mask].any())
        if self.turn_advantages is not None:
            return any(self.turn_advantages)
        return self.advantage != 0

    @property
    def has_void_turn(self) -> bool:
        """Return True if a turn has neither a tool call nor the final answer."""
        *earlier, last = self.turns or (None,)
        if last is None or any(turn is None or turn.observation is None for turn in earlier):
            return True
        return self.outcome == Outcome.MALFORMED or last.is_cut

    @property
    def token_advantages(self) -> np.ndarray:
        """Advantage of each token, from the token, its turn or its trajectory: float32 [L]."""
        if self.custom_advantages is not None:
            return self.custom_advantages
        if self.turn_advantages is None:
            return np.full(len(self.token_ids), self.require_field("advantage"), np.float32)
        return np.array(self.turn_advantages, np.float32)[self.token_turns]

    @property
    def token_turns(self) -> np.ndarray:
        """Turn index of each token: int [L].

        The prompt belongs to the first turn, and an observation to the turn before it.
        """
        indices = np.arange(len(self.token_ids))
        return np.maximum(np.searchsorted(self.turn_starts, indices, side="right") - 1, 0)

    @property
    def is_repeated(self) -> np.ndarray:
        """Mask of tokens that repeat an earlier context: bool [L]."""
        repeated = np.zeros(len(self.token_ids), bool)
        for start, count in self.contexts:
            repeated[start : start + count] = True
        return repeated

    @property
    def query(self) -> str:
        """Question of the task; without one, the last user message of the task's chat."""
        if self.task.question is not None:
            return self.task.question
        user_messages = [m["content"] for m in self.task.messages or () if m["role"] == "user"]
        return user_messages[-1] if user_messages else ""

    @property
    def images(self) -> list[Picture]:
        """Original images in the order of `attachments`: those of the task, then those of tools."""
        return [*self.task.images, *(image for turn in self.turns for image in turn.images)]

    @property
    def task_id(self) -> str:
        """Id of the task in its dataset."""
        return self.task.id

    @property
    def is_scored(self) -> bool:
        """Return False after an environment error, which excludes a trajectory from training."""
        return self.outcome != Outcome.ENVIRONMENT_ERROR

    @property
    def error(self) -> str:
        """Message of the environment error; "" without one."""
        texts = [turn.error for turn in self.turns if turn.error]
        return "" if self.is_scored else texts[-1] if texts else "no error message"

    def require_field(self, name: str) -> Any:
        """Return a field that the step must have computed earlier, such as `divergence`."""
        value = getattr(self, name)
        assert value is not None, f"a trajectory of task {self.task_id!r} has no {name}"
        return value

    @property
    def num_sampled(self) -> int:
        """Number of tokens in `loss_mask`: sampled tokens, and any that `with_loss_mask` added."""
        return int(self.loss_mask.sum())

    @property
    def response_length(self) -> int:
        """Number of tokens after the prompt, including observations but not repeated tokens."""
        repeated = sum(count for _, count in self.contexts)
        return len(self.token_ids) - self.prompt_length - repeated

    @property
    def mean_entropy(self) -> float:
        """Mean entropy of the sampled tokens in nats."""
        return float(self.rollout_entropies.sum()) / max(self.num_sampled, 1)

    @property
    def searches(self) -> list[str]:
        """Queries to the search engine."""
        return self.get_calls(None)

    @property
    def python_calls(self) -> list[str]:
        """Code passed to the Python tool."""
        return self.get_calls("python")

    @property
    def call_records(self) -> list[CallRecord]:
        """Records of all tool calls, in order."""
        return [record for turn in self.turns for record in turn.records]

    def get_calls(self, tool: str | None) -> list[str]:
        """Return the calls to a tool, or to the search engine if None."""
        return [call for turn in self.turns for call in turn.get_calls(tool)]

    @property
    def generated_text(self) -> str:
        """Text of the response, including observations and the chat template's response prefix."""
        text = "".join(turn.text + (turn.observation or "") for turn in self.turns)
        return self.opener + text

    def token_steps(self, token_text: Callable[[int], str]) -> list[TokenStep]:
        """Return a `TokenStep` for each sampled token.

        Unlike in `generated_text`, a turn's last token is not cut at the stop string.

        Args:
            token_text: Function that decodes a token id.
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
        """Ids of all tokens: prompt, sampled and inserted, context by context."""
        return [int(token) for token in self.token_ids]

    @property
    def generated_positions(self) -> list[int]:
        """Indices of the sampled tokens in `full_input_ids`."""
        return [int(position) for position in np.flatnonzero(self.loss_mask)]


@dataclass(frozen=True, kw_only=True)
class Group:
    """All trajectories of one `Draw`, in the order of `sample_index`."""

    trajectories: tuple[Trajectory, ...]  # at least one

    @property
    def task_id(self) -> str:
        """Id of the task in its dataset."""
        return self.trajectories[0].task_id

    @property
    def scored_trajectories(self) -> list[Trajectory]:
        """Trajectories without an environment error."""
        return [t for t in self.trajectories if t.is_scored]

    @property
    def num_correct(self) -> int:
        """Number of scored trajectories that are correct."""
        return sum(t.is_correct for t in self.scored_trajectories)


@dataclass(frozen=True, kw_only=True)
class GroupStats:
    """Statistics of one group, excluding trajectories that ended in an environment error."""

    task_id: str
    num_correct: int
    num_scored: int
    mean_entropy: float  # nats per token, averaged over trajectories; NaN if there are none
    error: str = ""  # first environment error
    num_failed: int = 0  # trajectories that ended in an environment error
    environment: str = ""  # environment of the task; see `Task`

    @classmethod
    def from_group(cls, group: Group) -> GroupStats:
        """Compute the statistics of a group."""
        entropies = [t.mean_entropy for t in group.scored_trajectories]
        return cls(
            task_id=group.task_id,
            num_correct=group.num_correct,
            num_scored=len(group.scored_trajectories),
            mean_entropy=float(np.mean(entropies)) if entropies else math.nan,
            error=next((t.error for t in group.trajectories if not t.is_scored), ""),
            num_failed=len(group.trajectories) - len(group.scored_trajectories),
            environment=group.trajectories[0].task.environment,
        )

    @property
    def kind(self) -> str:
        """Kind of the group, one of `GROUP_KINDS`."""
        if not self.num_scored:
            return "failed"
        if 0 < self.num_correct < self.num_scored:
            return "mixed"
        return "all_right" if self.num_correct else "all_wrong"


GROUP_KINDS = ("all_right", "all_wrong", "mixed", "failed")
"""Kinds of groups. In a failed group, every trajectory had an environment error."""


def flatten_groups(groups: Sequence[Group]) -> list[Trajectory]:
    """Return the trajectories of all groups, in order."""
    return [trajectory for group in groups for trajectory in group.trajectories]


def replace_fields(groups: Sequence[Group], **columns: Sequence[Any]) -> list[Group]:
    """Return copies of the groups, with new values in the given fields of their trajectories.

    Args:
        groups: Groups to copy.
        columns: Values by field name, one per trajectory, in the order of `flatten_groups`.

    Raises:
        ValueError: The number of values differs from the number of trajectories.
    """
    trajectories = flatten_groups(groups)
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


def set_advantages(
    groups: Sequence[Group], advantages: Sequence[float | np.ndarray]
) -> list[Group]:
    """Return copies of the groups with the given advantages.

    Args:
        groups: Groups to copy.
        advantages: One number, or one number per token `[L]`, for each trajectory in the order of
            `flatten_groups`. Only sampled tokens are trained on.

    Raises:
        ValueError: An advantage is not finite, or the number of values is wrong.
    """
    trajectories, means, tokens = flatten_groups(groups), [], []
    if len(advantages) != len(trajectories):
        raise ValueError(
            f"set_advantages received {len(advantages)} advantages for {len(trajectories)} "
            "trajectories; expected one for each."
        )
    for trajectory, value in zip(trajectories, advantages, strict=True):
        array = np.asarray(value, np.float32)
        if array.shape not in ((), trajectory.token_ids.shape) or not np.isfinite(array).all():
            raise ValueError(
                f"an advantage of task {trajectory.task_id!r} is {value!r:.80}; expected a finite "
                f"number, or {len(trajectory.token_ids)} of them, one per token."
            )
        per_token = np.broadcast_to(array, trajectory.token_ids.shape)
        sampled = per_token[trajectory.loss_mask]
        means.append(
            float(array) if array.ndim == 0 else float(sampled.sum()) / max(len(sampled), 1)
        )
        tokens.append(None if array.ndim == 0 else per_token)
    return replace_fields(
        groups,
        advantage=means,
        turn_advantages=[None] * len(trajectories),
        custom_advantages=tokens,
    )


class Columns:
    """Arrays over the N trajectories of a list of groups, for objectives to take as arguments.

    Objectives request an array by naming a parameter after it. The trajectories of a group are
    contiguous. N includes trajectories with environment errors, whose group index is -1.
    """

    def __init__(self, groups: Sequence[Group]):
        """Prepare the columns of `groups`, in the order of `flatten_groups`."""
        self._groups = groups
        self._members = flatten_groups(groups)

    @cached_property
    def group_ids(self) -> np.ndarray:
        """Group index: int32 [N]; -1 for an environment error."""
        ids = [
            index if t.is_scored else -1
            for index, group in enumerate(self._groups)
            for t in group.trajectories
        ]
        return np.array(ids, np.int32)

    @cached_property
    def rewards(self) -> np.ndarray:
        """Rewards: float32 [N]."""
        return np.array([t.reward for t in self._members], np.float32)

    @cached_property
    def is_correct(self) -> np.ndarray:
        """Mask of correct answers, False after an environment error: bool [N]."""
        return np.array([t.is_correct and t.is_scored for t in self._members], bool)

    @cached_property
    def is_abstention(self) -> np.ndarray:
        """Mask of abstentions, in which the model declined to answer: bool [N]."""
        return np.array([t.is_abstention for t in self._members], bool)

    @cached_property
    def is_well_formed(self) -> np.ndarray:
        """Mask of responses that follow the protocol: bool [N]."""
        return np.array([t.is_well_formed for t in self._members], bool)

    @cached_property
    def token_counts(self) -> np.ndarray:
        """Number of sampled tokens: int32 [N]."""
        return np.array([t.num_sampled for t in self._members], np.int32)

    @cached_property
    def turn_rewards(self) -> np.ndarray:
        """Reward of each turn: float64 [N, K]; 0 for missing turns.

        K is the largest number of turns, rounded up to a power of two to limit recompilation.
        """
        max_turns = max((len(t.turns) for t in self._members), default=1)
        width = 1 << max(max_turns - 1, 0).bit_length()
        table = np.zeros((len(self._members), width))
        for row, t in zip(table, self._members, strict=True):
            row[: len(t.turn_rewards)] = t.turn_rewards
        return table

    @cached_property
    def outcome_rewards(self) -> np.ndarray:
        """Reward that is not assigned to any turn: float32 [N]."""
        rest = [t.rest_reward if t.turn_rewards else t.reward for t in self._members]
        return np.array(rest, np.float32)

    @cached_property
    def turn_token_counts(self) -> np.ndarray:
        """Number of sampled tokens of each turn: int32 [N, K]."""
        width = self.turn_rewards.shape[1]
        counts = [np.bincount(t.token_turns[t.loss_mask], minlength=width) for t in self._members]
        return np.array(counts, np.int32).reshape(len(counts), width)

    @cached_property
    def mean_entropies(self) -> np.ndarray:
        """Mean entropy in nats per sampled token: float32 [N]."""
        return np.array([t.mean_entropy for t in self._members], np.float32)


@struct.dataclass
class Batch:
    """Trajectories packed into rows of T tokens: A micro-batches of b rows.

    Index t of every array belongs to token t. No trajectory spans two rows.
    """

    token_ids: jax.Array  # int32 [A, b, T]
    segment_ids: jax.Array  # int32 [A, b, T], trajectory index in the mini-batch + 1; 0 for padding
    # int32 [A, b, T], position in the token's context. A shared prefix may be earlier in the row.
    # The contexts of a trajectory are adjacent: a new context starts where positions do not
    # increase by one.
    positions: jax.Array
    loss_mask: jax.Array  # bool [A, b, T], True for tokens that are trained on
    token_weights: jax.Array  # float32 [A, b, T], `loss.aggregation` over the complete mini-batch
    advantages: jax.Array  # float32 [A, b, T], constant within a trajectory or a turn
    rollout_logprobs: jax.Array  # float32 [A, b, T], from the sampler
    old_logprobs: jax.Array | None = None  # float32 [A, b, T]; None: equal to the current ones
    ref_logprobs: jax.Array | None = None  # float32 [A, b, T]; None if the loss does not use them
    kl_weights: jax.Array | None = None  # float32 [A, b, T]; None if all tokens have kl.coef
    # [A, b, T, ...]: recorded arrays and, if there are attachments, those of `Tower.input_arrays`.
    token_arrays: Mapping[str, jax.Array] = field(default_factory=dict)
    # Set only while a micro-batch is computed: `patches` [S, P, values] in the compute dtype and
    # `coords` int32 [S, P, W]. Each of the S devices that split the tokens has those of its rows.
    # Attachments in a prefix that a device's rows share are stored once.
    attached: Any = None
    rest: Any = None  # Batch of trajectories used for metrics but not for gradients, or None


@struct.dataclass
class TrainState:
    """Parameters, optimizer state and counters, which each update step replaces."""

    params: Params  # float32 master weights
    opt_state: Any
    num_updates: jax.Array  # int32 scalar, optimizer steps taken
    num_skipped: jax.Array  # int32 scalar, optimizer steps skipped for a non-finite gradient

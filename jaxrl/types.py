"""The data that travels between the parts: trajectories on the host, batches on the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from flax import struct

from jaxrl.envs.base import Outcome, Task, Turn

Params = dict[str, Any]
"""A plain nested dict of arrays; `models.qwen` documents the tree."""


@dataclass(frozen=True, kw_only=True)
class Draw:
    """A task to roll out, and where it stands in the task stream, which seeds its samples."""

    task: Task
    position: int
    attempt: int = 0  # of the same draw; another one is sampled anew


@dataclass(frozen=True, kw_only=True)
class TokenStep:
    """One sampled token."""

    token_id: int
    token_text: str
    log_prob: float  # nats
    position: int  # in the trajectory's ids, observations counted


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """One episode on the host: every token the model read or wrote."""

    token_ids: np.ndarray  # int32 [L]
    loss_mask: np.ndarray  # bool [L], True exactly where the policy sampled the token
    rollout_logprobs: np.ndarray  # float32 [L], nats; 0 outside loss_mask
    rollout_entropies: np.ndarray  # float32 [L], nats; 0 outside loss_mask
    policy_versions: np.ndarray  # int32 [L], updates the sampling weights had seen; -1 outside
    prompt_length: int
    group_id: int  # shared by all trajectories of one task drawn once; negative counts for nothing
    sample_index: int  # within the group
    attempt: int = 0
    task: Task
    opener: str = (
        ""  # of the response, which the chat template has written: the prompt ends with it
    )
    turns: tuple[Turn, ...]
    outcome: Outcome
    reward: float = 0.0
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    final_answer: str = ""
    is_correct: bool = False  # says the environment; these three are read by group logic
    is_abstention: bool = False  # declines to answer
    is_well_formed: bool = True
    advantage: float | None = None  # None until the step has it

    @property
    def query(self) -> str:
        """What was asked: the task's question, or the last message of the user that it brings."""
        if self.task.question is not None:
            return self.task.question
        asked = [m["content"] for m in self.task.messages or () if m["role"] == "user"]
        return asked[-1] if asked else ""

    @property
    def task_id(self) -> str:
        """The task's id in its data set."""
        return self.task.id

    @property
    def is_scored(self) -> bool:
        """False for an environment error, which is in no statistics and no loss."""
        return self.outcome != Outcome.ENVIRONMENT_ERROR

    @property
    def num_sampled(self) -> int:
        """Tokens the policy sampled."""
        return int(self.loss_mask.sum())

    @property
    def response_length(self) -> int:
        """Tokens after the prompt, observations included."""
        return len(self.token_ids) - self.prompt_length

    @property
    def mean_entropy(self) -> float:
        """Of the sampled tokens, in nats."""
        return float(self.rollout_entropies.sum()) / max(self.num_sampled, 1)

    @property
    def searches(self) -> list[str]:
        """What was asked of the search engine."""
        return self.calls(None)

    @property
    def python_calls(self) -> list[str]:
        """What code was given to the Python tool."""
        return self.calls("python")

    def calls(self, tool: str | None) -> list[str]:
        """What was asked of a tool; None is the search engine."""
        return [t.tool_call for t in self.turns if t.tool_call is not None and t.tool == tool]

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
        """Prompt, sampled and inserted ids, in order."""
        return [int(token) for token in self.token_ids]

    @property
    def generated_positions(self) -> list[int]:
        """Where in `full_input_ids` the sampled tokens stand."""
        return [int(position) for position in np.flatnonzero(self.loss_mask)]


@struct.dataclass
class Batch:
    """Trajectories packed into rows of T. Index t of every row is about token t.

    The leading axes are A micro-batches of b rows; no trajectory crosses a row.
    """

    token_ids: jax.Array  # int32 [A, b, T]
    segment_ids: jax.Array  # int32 [A, b, T], trajectory index in the mini-batch + 1; 0 on padding
    positions: jax.Array  # int32 [A, b, T], restarts with each trajectory
    loss_mask: jax.Array  # bool [A, b, T], True where the policy sampled the token
    token_weights: jax.Array  # float32 [A, b, T], the aggregation, from the whole mini-batch
    advantages: jax.Array  # float32 [A, b, T], constant over a trajectory
    rollout_logprobs: jax.Array  # float32 [A, b, T], as the sampler reported them
    old_logprobs: jax.Array | None = None  # float32 [A, b, T]; None: the current ones are the old
    ref_logprobs: jax.Array | None = None  # float32 [A, b, T]; None without a KL term to them
    kl_weights: jax.Array | None = None  # float32 [A, b, T]; None where all tokens have kl.coef


@struct.dataclass
class TrainState:
    """Everything the update step changes."""

    params: Params  # float32 master weights
    opt_state: Any
    num_updates: jax.Array  # int32 scalar, optimizer steps taken
    num_skipped: jax.Array  # int32 scalar, optimizer steps skipped for a non-finite gradient

"""Masks on whole trajectories, whose group statistics stay as they are."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from jaxrl.envs.base import Outcome
from jaxrl.objectives.segments import segment_sums
from jaxrl.types import Trajectory

Array = jax.Array | np.ndarray


def off_policy_gate(
    logprobs: Float[Array, "R T"],
    rollout_logprobs: Float[Array, "R T"],
    advantages: Float[Array, "R T"],
    loss_mask: Bool[Array, "R T"],
    segment_ids: Int[Array, "R T"],
    *,
    delta: float,
) -> Bool[jax.Array, "R T"]:
    """False where a trajectory that the policy has moved away from is to be made unlikelier still.

    DeepSeek-V3.2 (https://arxiv.org/abs/2512.02556): a trajectory with a negative advantage has no
    policy loss where the mean of `rollout - current` over its tokens is above `delta`. It adds the
    gap of the sampler to what updates of the same batch have moved.

    Args:
        logprobs: nats, under the parameters being trained.
        rollout_logprobs: nats, as the sampler reported them.
        advantages: one a token.
        loss_mask: True where the policy sampled the token.
        segment_ids: which trajectory a token belongs to; contiguous, 0 on padding.
        delta: nats a token.
    """
    moved = jnp.where(loss_mask, rollout_logprobs - jax.lax.stop_gradient(logprobs), 0.0)
    counts = segment_sums(loss_mask.astype(jnp.float32), segment_ids)
    mean = segment_sums(moved, segment_ids) / jnp.maximum(counts, 1.0)
    return (jnp.asarray(advantages) >= 0) | (mean <= delta)


def has_no_void_turn(trajectory: Trajectory) -> bool:
    """Return True if each turn has a call or the answer.

    SimpleTIR (https://arxiv.org/abs/2509.02479) leaves out of the loss what has a turn without
    either: text that broke off, or that ended too early, drawn from the tail of the distribution.
    There an action is a block of code, here a call of any tool; one that is wrong, or that nobody
    could answer any more, is a call too.
    """
    *before, last = trajectory.turns or (None,)
    if last is None or any(turn is None or turn.observation is None for turn in before):
        return False
    return trajectory.outcome != Outcome.MALFORMED and not last.is_cut

"""Masks that remove trajectories from the loss but not from group statistics."""

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
    """Return False for tokens with a negative advantage in far off-policy trajectories.

    DeepSeek-V3.2 (https://arxiv.org/abs/2512.02556): a trajectory with a negative advantage has no
    policy loss if the mean of `rollout - current` over its tokens is above `delta`. This difference
    includes both the sampler's gap and the updates of the same batch.

    Args:
        logprobs: Log-probabilities in nats under the parameters being trained.
        rollout_logprobs: Log-probabilities in nats as the sampler reported them.
        advantages: One value per token.
        loss_mask: True for tokens that the policy sampled.
        segment_ids: Trajectory of each token; contiguous, 0 on padding.
        delta: Threshold in nats per token.
    """
    moved = jnp.where(loss_mask, rollout_logprobs - jax.lax.stop_gradient(logprobs), 0.0)
    counts = segment_sums(loss_mask.astype(jnp.float32), segment_ids)
    mean = segment_sums(moved, segment_ids) / jnp.maximum(counts, 1.0)
    return (jnp.asarray(advantages) >= 0) | (mean <= delta)


def has_no_void_turn(trajectory: Trajectory) -> bool:
    """Return True if each turn has a call or the answer.

    SimpleTIR (https://arxiv.org/abs/2509.02479) removes trajectories with a void turn from the
    loss: truncated or prematurely ended text, sampled from the tail of the distribution. There a
    turn needs a block of code, here a call of any tool. A call that is invalid, or that got no
    answer, counts too.
    """
    *before, last = trajectory.turns or (None,)
    if last is None or any(turn is None or turn.observation is None for turn in before):
        return False
    return trajectory.outcome != Outcome.MALFORMED and not last.is_cut

"""Masks that exclude trajectories from the loss, but not from group statistics."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from jaxrl.objectives.segments import broadcast_segment_sums
from jaxrl.types import Trajectory

Array = jax.Array | np.ndarray


def off_policy_sequence_mask(
    logprobs: Float[Array, "R T"],
    rollout_logprobs: Float[Array, "R T"],
    advantages: Float[Array, "R T"],
    loss_mask: Bool[Array, "R T"],
    segment_ids: Int[Array, "R T"],
    *,
    delta: float,
) -> Bool[jax.Array, "R T"]:
    """Mask tokens with a negative advantage in trajectories that are far off-policy.

    DeepSeek-V3.2's sequence mask (https://arxiv.org/abs/2512.02556). Tokens with a negative
    advantage are masked if the trajectory's mean of rollout minus current logprobs exceeds `delta`.
    The mean includes both the sampler-trainer gap and the effect of updates on this batch.

    Args:
        logprobs: Log-probabilities in nats under the parameters being trained.
        rollout_logprobs: Log-probabilities in nats reported by the sampler.
        advantages: Advantage of each token.
        loss_mask: True for tokens that the policy sampled.
        segment_ids: Index of each token's trajectory; contiguous, 0 for padding.
        delta: Threshold on the mean difference, in nats per token.
    """
    difference = jnp.where(loss_mask, rollout_logprobs - jax.lax.stop_gradient(logprobs), 0.0)
    counts = broadcast_segment_sums(loss_mask.astype(jnp.float32), segment_ids)
    mean = broadcast_segment_sums(difference, segment_ids) / jnp.maximum(counts, 1.0)
    return (jnp.asarray(advantages) >= 0) | (mean <= delta)


def has_no_void_turn(trajectory: Trajectory) -> bool:
    """Return True if every turn has a tool call or the final answer.

    SimpleTIR (https://arxiv.org/abs/2509.02479) excludes trajectories with other ("void") turns
    from the loss. The paper requires a code block in each turn; here, any tool call counts, even an
    invalid or failed call.
    """
    return not trajectory.has_void_turn

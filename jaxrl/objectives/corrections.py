"""Importance weights that correct for the mismatch between the sampler and the trainer."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from jaxrl.objectives.segments import broadcast_segment_sums

Array = jax.Array | np.ndarray


def importance_weights(
    old_logprobs: Float[Array, "R T"],
    rollout_logprobs: Float[Array, "R T"],
    loss_mask: Bool[Array, "R T"],
    segment_ids: Int[Array, "R T"],
    *,
    level: str,
    mode: str,
    cap: float = 2.0,
    low: float = 0.5,
    high: float = 5.0,
) -> Float[jax.Array, "R T"]:
    """Compute policy loss weights from `q = exp(old_logprobs - rollout_logprobs)`.

    - `truncate`: `min(q, cap)`; TIS, https://fengyao.notion.site/off-policy-rl.
    - `mask`: `q` if it is within `[low, high]`, else 0; IcePop, https://arxiv.org/abs/2510.18855.
    - `reject`: 1 if `q` is within `[low, high]`, else 0; verl's rejection sampling.

    The log-ratio, its sum or its mean is clipped to [-20, 20] nats. Weights have no gradient and
    are 0 outside `loss_mask`.

    Args:
        old_logprobs: Log-probabilities in nats under the trainer's parameters before the update.
        rollout_logprobs: Log-probabilities in nats reported by the sampler.
        loss_mask: True for tokens that the policy sampled.
        segment_ids: Trajectory of each token; contiguous, 0 on padding. Unused at level `token`.
        level: `token`; `sequence`, where `q` is the product over the tokens of the trajectory; or
            `geometric`, where it is their geometric mean, which does not shrink with length.
        mode: `truncate`, `mask` or `reject`.
        cap: Largest weight; used by `truncate` only.
        low: Smallest accepted ratio; unused by `truncate`.
        high: Largest accepted ratio; unused by `truncate`.
    """
    log_ratio = jnp.where(loss_mask, jnp.asarray(old_logprobs) - rollout_logprobs, 0.0)
    if level != "token":
        log_ratio = broadcast_segment_sums(log_ratio, segment_ids)
    if level == "geometric":
        counts = broadcast_segment_sums(jnp.asarray(loss_mask, jnp.float32), segment_ids)
        log_ratio = log_ratio / jnp.maximum(counts, 1.0)
    ratio = jnp.exp(jnp.clip(log_ratio, -20.0, 20.0))
    if mode == "truncate":
        weights = jnp.minimum(ratio, cap)
    else:
        accepted_weight = 1.0 if mode == "reject" else ratio
        weights = jnp.where((ratio >= low) & (ratio <= high), accepted_weight, 0.0)
    return jax.lax.stop_gradient(jnp.where(loss_mask, weights, 0.0))

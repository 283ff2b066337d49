"""Importance weights that correct for the mismatch between sampler and trainer."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from jaxrl.objectives.segments import segment_sums

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
    """Weights of the policy loss, from `q = exp(old_logprobs - rollout_logprobs)`.

    Truncated, `min(q, cap)`: TIS, https://fengyao.notion.site/off-policy-rl. Masked, `q` within
    `[low, high]` and 0 beyond: IcePop, https://arxiv.org/abs/2510.18855. Rejected, 1 within and 0
    beyond: verl's rejection sampling, which changes no weight. The log-ratio, its sum or mean, is
    kept within 20 nats. Weights are constants without gradient, and 0 outside `loss_mask`.

    Args:
        old_logprobs: nats, under the trainer's parameters before the update.
        rollout_logprobs: nats, as the sampler reported them.
        loss_mask: True where the policy sampled the token.
        segment_ids: which trajectory a token belongs to; contiguous, 0 on padding. Read by the
            levels of trajectories only.
        level: `token`; `sequence`, where `q` is the product over the trajectory's tokens; or
            `geometric`, where it is their geometric mean, which does not shrink with length.
        mode: `truncate`, `mask` or `reject`.
        cap: the largest weight; read by `truncate` only.
        low: the smallest ratio that counts; not read by `truncate`.
        high: the largest ratio that counts; likewise.
    """
    log_ratio = jnp.where(loss_mask, jnp.asarray(old_logprobs) - rollout_logprobs, 0.0)
    if level != "token":
        log_ratio = segment_sums(log_ratio, segment_ids)
    if level == "geometric":
        counts = segment_sums(jnp.asarray(loss_mask, jnp.float32), segment_ids)
        log_ratio = log_ratio / jnp.maximum(counts, 1.0)
    ratio = jnp.exp(jnp.clip(log_ratio, -20.0, 20.0))
    if mode == "truncate":
        weights = jnp.minimum(ratio, cap)
    else:
        kept = 1.0 if mode == "reject" else ratio
        weights = jnp.where((ratio >= low) & (ratio <= high), kept, 0.0)
    return jax.lax.stop_gradient(jnp.where(loss_mask, weights, 0.0))

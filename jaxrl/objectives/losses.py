"""Per-token losses, to be summed with the weights of `aggregation.token_weights`."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from jaxrl.objectives.segments import broadcast_segment_sums

Array = jax.Array | np.ndarray


class PolicyLoss(NamedTuple):
    """Result of a policy loss. The loss and the metrics are zero outside `loss_mask`.

    Metrics are averaged over the sampled tokens and carry no gradient.
    """

    per_token: Float[jax.Array, "R T"]
    metrics: Mapping[str, Float[jax.Array, "R T"]]


def clipped_policy_loss(
    logprobs: Float[Array, "R T"],
    old_logprobs: Float[Array, "R T"],
    advantages: Float[Array, "R T"],
    loss_mask: Bool[Array, "R T"],
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float = 0.0,
) -> PolicyLoss:
    """Compute the per-token clipped surrogate loss; zero outside `loss_mask`.

    PPO equation 7 (https://arxiv.org/abs/1707.06347) with DAPO's asymmetric clip range
    (https://arxiv.org/abs/2503.14476) and, optionally, dual clip
    (https://arxiv.org/abs/1912.09729). The log-ratio is clipped to [-20, 20] nats.

    Args:
        logprobs: Log-probabilities in nats under the parameters being trained.
        old_logprobs: Log-probabilities in nats under the parameters before the update.
        advantages: One value per token, constant within a trajectory for group-relative estimators.
        loss_mask: True for tokens that the policy sampled.
        clip_low: The lower bound on the ratio is `1 - clip_low`.
        clip_high: The upper bound on the ratio is `1 + clip_high`.
        dual_clip: Dual-clip constant, greater than 1. Caps the loss at `dual_clip * |advantage|`
            where the advantage is negative. 0 disables dual clip.

    Returns:
        The loss, and metrics named and averaged as in verl. `pg_clipfrac`: 1 where the clipped
        ratio determined the surrogate. `pg_clipfrac_lower`: 1 where the dual clip then determined
        the loss. `ppo_kl`: `old_logprobs - logprobs` in nats, clipped to [-20, 20], which estimates
        KL(old || current).
    """
    log_ratio = _compute_log_ratio(logprobs, old_logprobs, loss_mask)
    unclipped, clipped = _compute_surrogates(log_ratio, advantages, clip_low, clip_high)
    loss = jnp.maximum(unclipped, clipped)
    limit = -dual_clip * advantages if dual_clip else jnp.inf
    is_dual = (advantages < 0) & (loss > limit)
    if dual_clip:
        loss = jnp.where(advantages < 0, jnp.minimum(loss, limit), loss)
    metrics = {
        "pg_clipfrac": jnp.where(loss_mask & (clipped > unclipped), 1.0, 0.0),
        "pg_clipfrac_lower": jnp.where(loss_mask & is_dual, 1.0, 0.0),
        "ppo_kl": -log_ratio,
    }
    return PolicyLoss(jnp.where(loss_mask, loss, 0.0), metrics)


def gspo_policy_loss(
    logprobs: Float[Array, "R T"],
    old_logprobs: Float[Array, "R T"],
    advantages: Float[Array, "R T"],
    loss_mask: Bool[Array, "R T"],
    segment_ids: Int[Array, "R T"],
    *,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """Compute the trajectory-level clipped surrogate per token; zero outside `loss_mask`.

    GSPO (https://arxiv.org/abs/2507.18071) uses the geometric mean of a trajectory's token ratios,
    `s = exp(mean(logprobs - old_logprobs))`. This is its token form, section 4.3:
    `stop_gradient(s) * exp(logprobs - stop_gradient(logprobs))`, with the value `s` at every token.
    If advantages are constant within each trajectory, aggregating with `seq-mean-token-mean` gives
    the mean trajectory loss and its gradient. The mean log-ratio is clipped to [-20, 20] nats.

    Args:
        logprobs: Log-probabilities in nats under the parameters being trained.
        old_logprobs: Log-probabilities in nats under the parameters before the update.
        advantages: One value per token, so that turns may have different advantages.
        loss_mask: True for tokens that the policy sampled.
        segment_ids: Trajectory of each token; contiguous, 0 on padding.
        clip_low: The lower bound on the ratio is `1 - clip_low`; 3e-4 in the paper.
        clip_high: The upper bound on the ratio is `1 + clip_high`; 4e-4 in the paper.

    Returns:
        The loss and two metrics. `pg_clipfrac`: 1 where the clipped ratio of the trajectory
        determined the surrogate. `ppo_kl`: see `clipped_policy_loss`.
    """
    # `mean` is the trajectory's log-ratio. Below, the gradient flows through the token's
    # log-probability.
    masked_logprobs = jnp.where(loss_mask, logprobs, 0.0)
    log_ratios = jax.lax.stop_gradient(masked_logprobs - jnp.where(loss_mask, old_logprobs, 0.0))
    counts = broadcast_segment_sums(loss_mask.astype(jnp.float32), segment_ids)
    mean = broadcast_segment_sums(log_ratios, segment_ids) / jnp.maximum(counts, 1.0)
    # Clip last, so that a ratio beyond 20 nats has no gradient, as in `_compute_log_ratio`.
    log_ratio = jnp.clip(
        mean + (masked_logprobs - jax.lax.stop_gradient(masked_logprobs)), -20.0, 20.0
    )
    unclipped, clipped = _compute_surrogates(log_ratio, advantages, clip_low, clip_high)
    metrics = {
        "pg_clipfrac": jnp.where(loss_mask & (clipped > unclipped), 1.0, 0.0),
        "ppo_kl": -_compute_log_ratio(logprobs, old_logprobs, loss_mask),
    }
    return PolicyLoss(jnp.where(loss_mask, jnp.maximum(unclipped, clipped), 0.0), metrics)


def cispo_policy_loss(
    logprobs: Float[Array, "R T"],
    old_logprobs: Float[Array, "R T"],
    advantages: Float[Array, "R T"],
    loss_mask: Bool[Array, "R T"],
    *,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """Compute the per-token REINFORCE loss with clipped ratios as weights; 0 outside `loss_mask`.

    CISPO (https://arxiv.org/abs/2506.13585):
    `-stop_gradient(clip(ratio, 1 - clip_low, 1 + clip_high)) * advantage * logprob`. If the ratio
    is out of range, the token's gradient is bounded; in `clipped_policy_loss` it would be zero. The
    value of the loss is not meaningful: it is nonzero even if the two policies are equal.

    Args:
        logprobs: Log-probabilities in nats under the parameters being trained.
        old_logprobs: Log-probabilities in nats under the parameters before the update.
        advantages: One value per token, constant within a trajectory for group-relative estimators.
        loss_mask: True for tokens that the policy sampled.
        clip_low: The lower bound on the weight is `1 - clip_low`; 1 disables it, as in the paper.
        clip_high: The upper bound on the weight is `1 + clip_high`.

    Returns:
        The loss and two metrics. `pg_clipfrac`: 1 where the ratio is out of range, regardless of
        the advantage. `ppo_kl`: see `clipped_policy_loss`.
    """
    log_ratio = _compute_log_ratio(logprobs, old_logprobs, loss_mask)
    ratio = jnp.exp(log_ratio)
    weight = jax.lax.stop_gradient(jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high))
    # Mask here too: otherwise a non-finite advantage at a masked token would reach the gradient.
    loss = -weight * advantages * jnp.where(loss_mask, logprobs, 0.0)
    is_clipped = (ratio < 1.0 - clip_low) | (ratio > 1.0 + clip_high)
    metrics = {
        "pg_clipfrac": jnp.where(loss_mask & is_clipped, 1.0, 0.0),
        "ppo_kl": -log_ratio,
    }
    return PolicyLoss(jnp.where(loss_mask, loss, 0.0), metrics)


def negative_log_likelihood(
    logprobs: Float[Array, "R T"], loss_mask: Bool[Array, "R T"]
) -> Float[jax.Array, "R T"]:
    """Compute the per-token cross-entropy in nats; zero outside `loss_mask`."""
    return -jnp.where(loss_mask, logprobs, 0.0)


def _compute_log_ratio(
    logprobs: Float[Array, "R T"],
    old_logprobs: Float[Array, "R T"],
    loss_mask: Bool[Array, "R T"],
) -> Float[jax.Array, "R T"]:
    # Mask before exp: an overflow at a masked token would turn its zero gradient into NaN.
    return jnp.clip(jnp.where(loss_mask, logprobs - old_logprobs, 0.0), -20.0, 20.0)


def _compute_surrogates(
    log_ratio: Float[Array, "R T"],
    advantages: Float[Array, "R T"],
    clip_low: float,
    clip_high: float,
) -> tuple[Float[Array, "R T"], Float[Array, "R T"]]:
    """Compute the unclipped and the clipped surrogate loss."""
    ratio = jnp.exp(log_ratio)
    return -ratio * advantages, -jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high) * advantages


LOSSES: dict[str, Callable[..., Any] | str] = {
    "clip": clipped_policy_loss,
    "gspo": gspo_policy_loss,
    "cispo": cispo_policy_loss,
    "dppo": "jaxrl.extras.stability.dppo:dppo_policy_loss",
}
"""Losses by `loss.name`. Arrays are bound by parameter name (`policy_loss`)."""

LOSS_TERMS: dict[str, str] = {"llds": "jaxrl.extras.stability.likelihood:likelihood_loss"}
"""Losses added to the policy loss, by `loss.term.name`."""

TOKEN_FILTERS: dict[str, str] = {
    "off_policy": "jaxrl.extras.stability.masks:off_policy_sequence_mask"
}
"""Token filters by name: True for tokens with a policy loss."""

ARRAYS = (
    *("logprobs", "old_logprobs", "rollout_logprobs", "entropies", "advantages"),
    *("loss_mask", "token_weights", "segment_ids", "positions"),
)
"""Arrays that a loss may request, `[R, T]` each; see `types.Batch`."""

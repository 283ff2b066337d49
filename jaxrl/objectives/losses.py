"""Per-token losses; `aggregation.token_weights` says how they add up."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from jaxrl.objectives.segments import segment_sums

Array = jax.Array | np.ndarray


class PolicyLoss(NamedTuple):
    """Result of a policy loss; both are zero outside `loss_mask`.

    Metrics are averaged over the sampled tokens; none has a part in the gradient.
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
    """Per-token clipped surrogate loss; zero outside `loss_mask`.

    PPO equation 7 (https://arxiv.org/abs/1707.06347) with the asymmetric range of
    DAPO (https://arxiv.org/abs/2503.14476) and, if asked for, the dual clip of
    https://arxiv.org/abs/1912.09729. The log-ratio is kept within 20 nats.

    Args:
        logprobs: nats, under the parameters being trained.
        old_logprobs: nats, under the parameters before the update.
        advantages: constant over a trajectory for group-relative estimators.
        loss_mask: True where the policy sampled the token.
        clip_low: the ratio's floor is `1 - clip_low`.
        clip_high: the ratio's ceiling is `1 + clip_high`.
        dual_clip: above 1; where the advantage is negative, the loss is at most this many times
            its size. 0 for no such limit.

    Returns:
        The loss; the means of its metrics are verl's of these names. `pg_clipfrac`: 1 where the
        clipped ratio set the surrogate. `pg_clipfrac_lower`: 1 where the dual clip then set the
        loss. `ppo_kl`: `old_logprobs - logprobs` in nats, within 20, which estimates
        KL(old || current).
    """
    log_ratio = _log_ratio(logprobs, old_logprobs, loss_mask)
    plain, clipped = _surrogates(log_ratio, advantages, clip_low, clip_high)
    loss = jnp.maximum(plain, clipped)
    limit = -dual_clip * advantages if dual_clip else jnp.inf
    is_dual = (advantages < 0) & (loss > limit)
    if dual_clip:
        loss = jnp.where(advantages < 0, jnp.minimum(loss, limit), loss)
    metrics = {
        "pg_clipfrac": jnp.where(loss_mask & (clipped > plain), 1.0, 0.0),
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
    """Clipped surrogate of whole trajectories, at each of their tokens; zero outside `loss_mask`.

    GSPO (https://arxiv.org/abs/2507.18071) compares trajectories by the geometric mean of their
    tokens' ratios, `s = exp(mean(logprobs - old_logprobs))`. This is its token form, section 4.3:
    `stop_gradient(s) * exp(logprobs - stop_gradient(logprobs))`, which at every token has the
    value `s`. Added up as `seq-mean-token-mean` it is the trajectories' mean loss and has its
    gradient, where advantages are constant over a trajectory. The mean log-ratio is kept within
    20 nats.

    Args:
        logprobs: nats, under the parameters being trained.
        old_logprobs: nats, under the parameters before the update.
        advantages: one a token, so that turns may be weighed by themselves.
        loss_mask: True where the policy sampled the token.
        segment_ids: which trajectory a token belongs to; contiguous, 0 on padding.
        clip_low: the ratio's floor is `1 - clip_low`; the paper has 3e-4.
        clip_high: the ratio's ceiling is `1 + clip_high`; the paper has 4e-4.

    Returns:
        The loss, and of its metrics: `pg_clipfrac`, 1 where the trajectory's clipped ratio set the
        surrogate; `ppo_kl` as of `clipped_policy_loss`.
    """
    # The mean log-ratio of each token's trajectory; as a function of `logprobs`, the token's own.
    own = jnp.where(loss_mask, logprobs, 0.0)
    log_ratios = jax.lax.stop_gradient(own - jnp.where(loss_mask, old_logprobs, 0.0))
    counts = segment_sums(loss_mask.astype(jnp.float32), segment_ids)
    mean = segment_sums(log_ratios, segment_ids) / jnp.maximum(counts, 1.0)
    # Clipped last, so that as with single tokens a ratio beyond 20 nats has no gradient.
    log_ratio = jnp.clip(mean + (own - jax.lax.stop_gradient(own)), -20.0, 20.0)
    plain, clipped = _surrogates(log_ratio, advantages, clip_low, clip_high)
    metrics = {
        "pg_clipfrac": jnp.where(loss_mask & (clipped > plain), 1.0, 0.0),
        "ppo_kl": -_log_ratio(logprobs, old_logprobs, loss_mask),
    }
    return PolicyLoss(jnp.where(loss_mask, jnp.maximum(plain, clipped), 0.0), metrics)


def cispo_policy_loss(
    logprobs: Float[Array, "R T"],
    old_logprobs: Float[Array, "R T"],
    advantages: Float[Array, "R T"],
    loss_mask: Bool[Array, "R T"],
    *,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """Per-token REINFORCE loss under a clipped importance weight; zero outside `loss_mask`.

    CISPO (https://arxiv.org/abs/2506.13585):
    `-stop_gradient(clip(ratio, 1 - clip_low, 1 + clip_high)) * advantage * logprob`. A ratio out
    of range bounds the token's gradient, where `clipped_policy_loss` would drop it. The loss's
    value says little: it is not zero where the policies coincide.

    Args:
        logprobs: nats, under the parameters being trained.
        old_logprobs: nats, under the parameters before the update.
        advantages: constant over a trajectory for group-relative estimators.
        loss_mask: True where the policy sampled the token.
        clip_low: the weight's floor is `1 - clip_low`; 1 for none, as in the paper.
        clip_high: the weight's ceiling is `1 + clip_high`.

    Returns:
        The loss, and of its metrics: `pg_clipfrac`, 1 where the ratio lay outside the range,
        whatever the advantage; `ppo_kl` as of `clipped_policy_loss`.
    """
    log_ratio = _log_ratio(logprobs, old_logprobs, loss_mask)
    ratio = jnp.exp(log_ratio)
    weight = jax.lax.stop_gradient(jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high))
    # Masked here too, or an advantage without a finite value would reach the gradient.
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
    """Per-token cross-entropy of supervised training, in nats; zero outside `loss_mask`."""
    return -jnp.where(loss_mask, logprobs, 0.0)


def _log_ratio(
    logprobs: Float[Array, "R T"],
    old_logprobs: Float[Array, "R T"],
    loss_mask: Bool[Array, "R T"],
) -> Float[jax.Array, "R T"]:
    # Mask before exp: an overflow at a masked token would turn its zero gradient into NaN.
    return jnp.clip(jnp.where(loss_mask, logprobs - old_logprobs, 0.0), -20.0, 20.0)


def _surrogates(
    log_ratio: Float[Array, "R T"],
    advantages: Float[Array, "R T"],
    clip_low: float,
    clip_high: float,
) -> tuple[Float[Array, "R T"], Float[Array, "R T"]]:
    """The surrogate loss with the ratio as it is and with the ratio clipped."""
    ratio = jnp.exp(log_ratio)
    return -ratio * advantages, -jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high) * advantages


LOSSES: dict[str, Callable[..., Any] | str] = {
    "clip": clipped_policy_loss,
    "gspo": gspo_policy_loss,
    "cispo": cispo_policy_loss,
    "dppo": "jaxrl.extras.stability.dppo:dppo_policy_loss",
}
"""Losses by `loss.name`. Arrays are bound by the names of their parameters (`policy_loss`)."""

TERMS: dict[str, str] = {"llds": "jaxrl.extras.stability.likelihood:likelihood_loss"}
"""By name in `loss.term.name`: losses that are added to the policy loss."""

GATES: dict[str, str] = {"off_policy": "jaxrl.extras.stability.masks:off_policy_gate"}
"""Token filters by name: True at each token whose policy loss counts."""

ARRAYS = (
    *("logprobs", "old_logprobs", "rollout_logprobs", "entropies", "advantages"),
    *("loss_mask", "token_weights", "segment_ids", "positions"),
)
"""Arrays that a loss may ask for, `[R, T]` each; see `types.Batch`."""

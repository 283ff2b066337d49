"""DPPO, a policy loss whose trust region bounds probabilities instead of ratios."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from jaxrl.objectives.losses import PolicyLoss

Array = jax.Array | np.ndarray

_EPSILON = 1e-8  # added to probabilities inside a logarithm


def dppo_policy_loss(
    logprobs: Float[Array, "R T"],
    old_logprobs: Float[Array, "R T"],
    rollout_logprobs: Float[Array, "R T"],
    advantages: Float[Array, "R T"],
    loss_mask: Bool[Array, "R T"],
    *,
    clip_low: float,
    clip_high: float,
    divergence: str,
    anchor: str,
    cap: float,
) -> PolicyLoss:
    """Compute the per-token DPPO loss; zero outside `loss_mask`.

    REINFORCE within a trust region (https://arxiv.org/abs/2602.04879). A ratio of 2 is a large
    change for a likely token but a negligible change for a token with probability 1e-5. DPPO
    therefore bounds the divergence between the binary distributions "this token or another", given
    the token's current probability p and its old probability q:

        tv   |p - q|
        kl   q log(q / p) + (1 - q) log((1 - q) / (1 - p))

    A token beyond the bound keeps its gradient only if the gradient reduces the divergence. All
    tokens with a gradient have the constant weight `min(p / q, cap)`. As in CISPO, only the
    gradient of the loss is meaningful.

    Args:
        logprobs: Log-probabilities in nats under the parameters being trained.
        old_logprobs: Log-probabilities in nats under the parameters before the update.
        rollout_logprobs: Log-probabilities in nats reported by the sampler.
        advantages: Advantage of each token.
        loss_mask: True for tokens that the policy sampled.
        clip_low: Bound on the divergence of tokens with a negative advantage.
        clip_high: Bound on the divergence of tokens with a positive advantage.
        divergence: `tv`, for which the paper uses bounds of 0.2, or `kl`, in nats.
        anchor: Source of q, `old` or `rollout`. With `rollout`, the divergence includes the
            sampler-trainer gap.
        cap: Maximum weight of a token.

    Returns:
        The loss and per-token metrics: `pg_clipfrac` is 1 where the bound removes the gradient;
        `ppo_kl` is `log q - log p` in nats, clipped to [-20, 20].
    """
    # Masked logprobs are arbitrary; zeros keep exponentials and gradients finite.
    previous = jnp.where(loss_mask, rollout_logprobs if anchor == "rollout" else old_logprobs, 0.0)
    masked_logprobs = jnp.where(loss_mask, logprobs, 0.0)
    now = jax.lax.stop_gradient(masked_logprobs)
    p, q = jnp.exp(now), jnp.exp(previous)
    if divergence == "tv":
        distance = jnp.abs(p - q)
    else:
        q_others, p_others = (jnp.maximum(1.0 - x, 0.0) + _EPSILON for x in (q, p))
        others_log_ratio = jnp.log(q_others / p_others)
        distance = q * (previous - now) + (1.0 - q) * others_log_ratio
    # Remove the gradient of tokens whose divergence it would increase.
    is_positive, is_negative = advantages > 0, advantages < 0
    is_beyond = (is_positive & (p > q) & (distance > clip_high)) | (
        is_negative & (p < q) & (distance > clip_low)
    )
    log_ratio = jnp.clip(now - previous, -20.0, 20.0)
    weights = jnp.where(is_beyond, 0.0, jnp.minimum(jnp.exp(log_ratio), cap))
    loss = -weights * advantages * masked_logprobs
    metrics = {
        "pg_clipfrac": jnp.where(loss_mask & is_beyond, 1.0, 0.0),
        "ppo_kl": -log_ratio,
    }
    return PolicyLoss(jnp.where(loss_mask, loss, 0.0), metrics)

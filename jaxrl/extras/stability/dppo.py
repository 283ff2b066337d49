"""DPPO: a trust region in probabilities in place of ratios."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from jaxrl.objectives.losses import PolicyLoss

Array = jax.Array | np.ndarray

_LEAST = 1e-8  # added to probabilities within a logarithm


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
    """Per-token REINFORCE loss within a trust region; zero outside `loss_mask`.

    DPPO (https://arxiv.org/abs/2602.04879). A ratio of 2 is much for a likely token and nothing for
    one of a probability of 1e-5, so what is bounded is the divergence of the two-valued
    distributions "this token or another", p now and q before:

        tv   |p - q|
        kl   q log(q / p) + (1 - q) log((1 - q) / (1 - p))

    A token beyond the bound keeps its gradient where that leads back. The others have the weight
    `min(p / q, cap)`, a constant, so the loss's value says little, as with CISPO.

    Args:
        logprobs: nats, under the parameters being trained.
        old_logprobs: nats, under the parameters before the update.
        rollout_logprobs: nats, as the sampler reported them.
        advantages: one a token.
        loss_mask: True where the policy sampled the token.
        clip_low: the largest divergence of a token with a negative advantage that is made less
            likely.
        clip_high: the largest divergence of a token with a positive one that is made likelier.
        divergence: `tv`, of which the paper has 0.2, or `kl`, in nats.
        anchor: `old`, or `rollout`: q is the sampler's, so that its gap to the trainer counts too.
        cap: the largest weight.

    Returns:
        The loss, and of its metrics: `pg_clipfrac`, 1 where the token is beyond the bound and has
        no gradient; `ppo_kl`, `log q - log p` in nats, within 20.
    """
    before = jnp.where(loss_mask, rollout_logprobs if anchor == "rollout" else old_logprobs, 0.0)
    own = jnp.where(loss_mask, logprobs, 0.0)
    now = jax.lax.stop_gradient(own)
    p, q = jnp.exp(now), jnp.exp(before)
    if divergence == "tv":
        distance = jnp.abs(p - q)
    else:
        q_others, p_others = (jnp.maximum(1.0 - x, 0.0) + _LEAST for x in (q, p))
        others = jnp.log(q_others / p_others)
        distance = q * (before - now) + (1.0 - q) * others
    is_raised, is_lowered = advantages > 0, advantages < 0
    is_beyond = (is_raised & (p > q) & (distance > clip_high)) | (
        is_lowered & (p < q) & (distance > clip_low)
    )
    log_ratio = jnp.clip(now - before, -20.0, 20.0)
    weights = jnp.where(is_beyond, 0.0, jnp.minimum(jnp.exp(log_ratio), cap))
    loss = -weights * advantages * own
    metrics = {
        "pg_clipfrac": jnp.where(loss_mask & is_beyond, 1.0, 0.0),
        "ppo_kl": -log_ratio,
    }
    return PolicyLoss(jnp.where(loss_mask, loss, 0.0), metrics)

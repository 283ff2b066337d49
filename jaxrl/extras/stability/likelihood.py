"""LLDS: a term that keeps up the likelihood of what is not to be unlearned."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from jaxrl.objectives.losses import PolicyLoss
from jaxrl.objectives.segments import segment_sums

Array = jax.Array | np.ndarray


def likelihood_loss(
    logprobs: Float[Array, "R T"],
    old_logprobs: Float[Array, "R T"],
    advantages: Float[Array, "R T"],
    loss_mask: Bool[Array, "R T"],
    segment_ids: Int[Array, "R T"],
    *,
    level: str,
    margin: float,
) -> PolicyLoss:
    """Nats of likelihood that tokens without blame have lost since before the update.

    LLDS (https://arxiv.org/abs/2512.04220): updates on wrong answers take likelihood from right
    ones, which share most tokens with them, until no answer is likely. With d = old - current and
    tokens of an advantage of at least 0, zero included, a token's loss is max(0, d) where its
    action as a whole has lost likelihood, Σ d > 0, and else 0.

    Zero, gradient included, where the policy is still the one before the update, so with one
    optimizer step a batch. The log-probabilities before it come from another program than those of
    the update, and differ by rounding, which would open some gates: hence `margin`, of which the
    paper's code has 0.

    Args:
        logprobs: nats, under the parameters being trained.
        old_logprobs: nats, under the parameters before the update.
        advantages: one a token.
        loss_mask: True where the policy sampled the token.
        segment_ids: which trajectory a token belongs to; contiguous, 0 on padding.
        level: `action`: neighbouring tokens without blame, so a turn; `response`: all of a
            trajectory.
        margin: nats; d and its sum over the action count where they are above it.

    Returns:
        The loss, zero where it does not apply, and its metrics: `llds_lost`, d where that is
        positive, and `llds_share`, 1 where the loss applies.
    """
    is_kept = loss_mask & (advantages >= 0)
    old = jax.lax.stop_gradient(jnp.where(is_kept, old_logprobs, 0.0))
    lost = old - jnp.where(is_kept, logprobs, 0.0)
    actions = segment_ids
    if level == "action":
        is_inner = is_kept[:, 1:] & is_kept[:, :-1] & (segment_ids[:, 1:] == segment_ids[:, :-1])
        is_first = is_kept & ~jnp.pad(is_inner, ((0, 0), (1, 0)))
        actions = jnp.where(is_kept, jnp.cumsum(is_first, axis=1), 0)
    totals = segment_sums(jax.lax.stop_gradient(lost), actions)
    is_lost = is_kept & (totals > margin) & (lost > margin)
    metrics = {
        "llds_lost": jax.lax.stop_gradient(jnp.maximum(lost, 0.0)),
        "llds_share": jnp.where(is_lost, 1.0, 0.0),
    }
    return PolicyLoss(jnp.where(is_lost, lost, 0.0), metrics)

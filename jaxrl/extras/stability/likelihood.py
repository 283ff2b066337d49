"""LLDS: a loss term that preserves the likelihood of tokens without a negative advantage."""

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
    """Compute the log-likelihood in nats that tokens have lost since the start of the update.

    LLDS (https://arxiv.org/abs/2512.04220): updates on wrong answers reduce the likelihood of
    correct ones, which share most tokens with them, until no answer is likely. Let d = old -
    current logprob of a token with advantage >= 0. Its loss is max(0, d) if its action as a whole
    has lost likelihood (Σ d > 0), else 0.

    Loss and gradient are zero while the policy has not changed, so always with one optimizer step
    per batch. The old logprobs come from a different program than the current ones and differ by
    rounding, which would activate some tokens. `margin` prevents that; the paper's code uses 0.

    Args:
        logprobs: Log-probabilities in nats under the parameters being trained.
        old_logprobs: Log-probabilities in nats under the parameters before the update.
        advantages: One value per token.
        loss_mask: True for tokens that the policy sampled.
        segment_ids: Trajectory of each token; contiguous, 0 on padding.
        level: `action` for runs of consecutive tokens with advantage >= 0 (a turn), or `response`
            for all such tokens of a trajectory.
        margin: Threshold in nats that both d and its sum over the action must exceed.

    Returns:
        The loss, zero for tokens to which it does not apply, and its metrics: `llds_lost` is
        max(0, d), and `llds_share` is 1 for tokens to which the loss applies.
    """
    # Zero d for tokens that do not count, so that they drop out of the sums.
    is_kept = loss_mask & (advantages >= 0)
    old = jax.lax.stop_gradient(jnp.where(is_kept, old_logprobs, 0.0))
    lost = old - jnp.where(is_kept, logprobs, 0.0)
    # An action is a run of adjacent tokens that count, numbered within its row.
    actions = segment_ids
    if level == "action":
        is_inner = is_kept[:, 1:] & is_kept[:, :-1] & (segment_ids[:, 1:] == segment_ids[:, :-1])
        is_first = is_kept & ~jnp.pad(is_inner, ((0, 0), (1, 0)))
        actions = jnp.where(is_kept, jnp.cumsum(is_first, axis=1), 0)
    # The gates are constants: the gradient flows only through each token's own loss.
    totals = segment_sums(jax.lax.stop_gradient(lost), actions)
    is_lost = is_kept & (totals > margin) & (lost > margin)
    metrics = {
        "llds_lost": jax.lax.stop_gradient(jnp.maximum(lost, 0.0)),
        "llds_share": jnp.where(is_lost, 1.0, 0.0),
    }
    return PolicyLoss(jnp.where(is_lost, lost, 0.0), metrics)

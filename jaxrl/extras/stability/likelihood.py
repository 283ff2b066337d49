"""LLDS, a loss term that preserves the likelihood of tokens with advantage >= 0."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from jaxrl.objectives.losses import PolicyLoss
from jaxrl.objectives.segments import broadcast_segment_sums

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
    """Compute the per-token LLDS loss, the decrease of log-likelihoods in nats.

    Updates on wrong answers also reduce the likelihood of correct answers, because both share most
    of their tokens (https://arxiv.org/abs/2512.04220). Let d be the old minus the current logprob
    of a token with advantage >= 0. The token's loss is max(0, d) if the sum of d over the token's
    action is positive, else 0.

    The loss and its gradient are zero before the first optimizer step on a batch. `margin` absorbs
    rounding differences between old and current logprobs, which are computed by different programs.
    The paper's code has no margin.

    Args:
        logprobs: Log-probabilities in nats under the parameters being trained.
        old_logprobs: Log-probabilities in nats under the parameters before the update.
        advantages: Advantage of each token.
        loss_mask: True for tokens that the policy sampled.
        segment_ids: Index of each token's trajectory; contiguous, 0 for padding.
        level: Extent of an action: `action` for consecutive tokens with advantage >= 0 (a turn), or
            `response` for all such tokens of a trajectory.
        margin: Threshold that d and the action's sum of d must exceed, in nats.

    Returns:
        The loss and per-token metrics: `llds_lost` is max(0, d); `llds_share` is 1 for tokens with
        a nonzero loss.
    """
    # Set d to 0 for other tokens, to exclude them from the sums.
    is_eligible = loss_mask & (advantages >= 0)
    old = jax.lax.stop_gradient(jnp.where(is_eligible, old_logprobs, 0.0))
    drop = old - jnp.where(is_eligible, logprobs, 0.0)
    # An action is a run of adjacent tokens with advantage >= 0, numbered within its row.
    actions = segment_ids
    if level == "action":
        continues_action = (
            is_eligible[:, 1:] & is_eligible[:, :-1] & (segment_ids[:, 1:] == segment_ids[:, :-1])
        )
        is_first = is_eligible & ~jnp.pad(continues_action, ((0, 0), (1, 0)))
        actions = jnp.where(is_eligible, jnp.cumsum(is_first, axis=1), 0)
    # The sums are constants: only each token's d has a gradient.
    totals = broadcast_segment_sums(jax.lax.stop_gradient(drop), actions)
    has_loss = is_eligible & (totals > margin) & (drop > margin)
    metrics = {
        "llds_lost": jax.lax.stop_gradient(jnp.maximum(drop, 0.0)),
        "llds_share": jnp.where(has_loss, 1.0, 0.0),
    }
    return PolicyLoss(jnp.where(has_loss, drop, 0.0), metrics)

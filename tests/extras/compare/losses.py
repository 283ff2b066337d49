"""Losses that a configuration names by their dotted names."""

from jaxrl.objectives.losses import PolicyLoss, clipped_policy_loss


def negated(logprobs, old_logprobs, advantages, loss_mask, *, clip_low=0.2, clip_high=0.2):
    """The clipped loss, of the other sign."""
    found = clipped_policy_loss(
        logprobs, old_logprobs, advantages, loss_mask, clip_low=clip_low, clip_high=clip_high
    )
    return PolicyLoss(-found.per_token, {"negated": found.per_token})

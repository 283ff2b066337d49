import jax.numpy as jnp

from jaxrl.objectives.losses import PolicyLoss


def floored(logprobs, advantages, loss_mask, *, floor: float = -5.0):
    """REINFORCE that ignores tokens below a log-probability of `floor`."""
    loss = -advantages * jnp.maximum(logprobs, floor)
    below_floor = jnp.where(loss_mask & (logprobs < floor), 1.0, 0.0)
    return PolicyLoss(jnp.where(loss_mask, loss, 0.0), {"below_floor": below_floor})

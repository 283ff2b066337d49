"""Advantage estimators: from one reward a trajectory to one advantage a trajectory."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

Array = jax.Array | np.ndarray


def grpo(
    rewards: Float[Array, "N"],
    group_ids: Int[Array, "N"],
    *,
    normalize_std: bool,
    ddof: int,
    epsilon: float,
) -> Float[Array, "N"]:
    """Group-relative advantages: `(reward - mean) / (std + epsilon)` within each group.

    DeepSeekMath section 4.1 (https://arxiv.org/abs/2402.03300); without the division it is
    Dr. GRPO (https://arxiv.org/abs/2503.20783). A group whose rewards are all equal gets exact
    zeros, where a rounded mean over a small `epsilon` would make advantages out of nothing. So
    does a group of one, whose raw reward other implementations keep.

    Args:
        rewards: one a trajectory.
        group_ids: trajectories with the same id are compared, wherever they stand. Those with a
            negative id count for nothing and get 0.
        normalize_std: divide by the group's standard deviation.
        ddof: 0 for the population's standard deviation, 1 for the sample's.
        epsilon: added to the standard deviation, in units of reward.
    """
    # N x N rather than segment sums: N is some thousands, and a GPU scatters in any order.
    same = (group_ids[:, None] == group_ids[None, :]) & (group_ids >= 0)
    count = jnp.maximum(same.sum(axis=1), 1)
    table = jnp.broadcast_to(rewards, same.shape)
    lowest = jnp.min(table, axis=1, where=same, initial=jnp.inf)
    highest = jnp.max(table, axis=1, where=same, initial=-jnp.inf)

    # Measured from the group's lowest, so that a large common offset costs no precision.
    gaps = jnp.where(same, table - lowest[:, None], 0.0)
    mean = gaps.sum(axis=1) / count
    advantages = rewards - lowest - mean
    if normalize_std:
        squares = jnp.where(same, (gaps - mean[:, None]) ** 2, 0.0)
        std = jnp.sqrt(squares.sum(axis=1) / jnp.maximum(count - ddof, 1))
        advantages = advantages / (std + epsilon)
    return jnp.where((lowest == highest) | (group_ids < 0), 0.0, advantages)

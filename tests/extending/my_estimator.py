import jax.numpy as jnp


def by_rank(rewards, group_ids, *, scale: float = 1.0):
    """Return the share of its group that a trajectory beats minus the share that beats it."""
    same = (group_ids[:, None] == group_ids[None, :]) & (group_ids >= 0)
    beaten = (same & (rewards[:, None] > rewards[None, :])).sum(axis=1)
    beating = (same & (rewards[:, None] < rewards[None, :])).sum(axis=1)
    return scale * (beaten - beating) / jnp.maximum(same.sum(axis=1), 1)

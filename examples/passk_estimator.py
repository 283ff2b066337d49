"""Custom advantage estimator: pass@k advantages by the paper's formula, from token rewards.

python -m examples.puzzle_world --out=data/puzzles
python -m jaxrl.launch --config=configs/passk_small.py --workdir=runs/passk_estimator \
    --config.advantage.name=examples.passk_estimator.estimate --config.advantage.settings="{'k': 4}"
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.scipy.special import gammaln


def compute_advantages(
    token_rewards: jax.Array, response_mask: jax.Array, group_indices: jax.Array, *, k: int
) -> jax.Array:
    """Return the advantage of each token, float [N, T] (https://arxiv.org/abs/2508.10751).

    Args:
        token_rewards: Rewards [N, T]; a response with a positive sum is correct.
        response_mask: True for tokens of the response [N, T].
        group_indices: Group of each response [N]; negative for none.
        k: Subset size.
    """
    is_correct = jnp.where(response_mask, token_rewards, 0.0).sum(axis=1) > 0
    same = (group_indices[:, None] == group_indices[None, :]) & (group_indices[:, None] >= 0)
    count, num_wrong = same.sum(axis=1), (same & ~is_correct).sum(axis=1)

    # Shares of the subsets that fail: of all, and of those with a given wrong response.
    failed = jnp.exp(_log_choose(num_wrong, k) - _log_choose(count, k))
    failed = jnp.where(num_wrong >= k, failed, 0.0)
    failed_with = jnp.exp(_log_choose(num_wrong - 1, k - 1) - _log_choose(count - 1, k - 1))
    mean, std = 1.0 - failed, jnp.sqrt(failed * (1.0 - failed))
    reward = jnp.where(is_correct, 1.0, 1.0 - failed_with)
    advantages = jnp.where(std > 0, (reward - mean) / jnp.where(std > 0, std, 1.0), 0.0)
    return jnp.where(response_mask, advantages[:, None], 0.0)


def _log_choose(n: jax.Array, k: int) -> jax.Array:
    return gammaln(n + 1.0) - gammaln(k + 1.0) - gammaln(n - k + 1.0)


def estimate(is_correct: jax.Array, group_ids: jax.Array, *, k: int) -> jax.Array:
    """Return one advantage per trajectory [N], as `advantage.name` expects."""
    rewards = is_correct[:, None].astype(jnp.float32)  # a response of one token
    return compute_advantages(rewards, jnp.ones_like(rewards, bool), group_ids, k=k)[:, 0]

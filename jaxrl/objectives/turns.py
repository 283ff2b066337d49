"""Turn-level advantages: the return from each turn onward, estimated turn by turn."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

Array = jax.Array | np.ndarray


def compute_turn_returns(
    outcome_rewards: Float[np.ndarray, " N"],
    turn_rewards: Float[np.ndarray, "N K"],
    *,
    discount: float,
) -> Float[np.ndarray, "N K"]:
    """Compute the return from each turn onward: `outcome_rewards + sum_{s >= t} d^(s - t) r_s`.

    This is the reward-to-go of the policy gradient theorem with turns as steps, as in GTPO
    (https://arxiv.org/abs/2511.14846): a turn cannot change the rewards of earlier turns. After the
    last turn, the rest of a row is filled with `outcome_rewards`, which are not discounted. Sums
    use float64, so that equal returns stay equal regardless of summation order.

    Args:
        outcome_rewards: Reward of each trajectory that belongs to no turn, such as correctness.
        turn_rewards: Reward of each turn, 0 for missing turns. It must depend only on that turn,
            its observation and earlier turns.
        discount: d, from 0 to 1. Below 1, the expected gradient differs from the gradient of the
            undiscounted return.
    """
    turns = np.arange(turn_rewards.shape[1])
    offsets = turns[None, :] - turns[:, None]  # [t, s]
    weights = np.where(offsets >= 0, float(discount) ** np.maximum(offsets, 0), 0.0)
    to_go = (turn_rewards.astype(np.float64)[:, None, :] * weights).sum(axis=2)
    return (outcome_rewards.astype(np.float64)[:, None] + to_go).astype(np.float32)


def estimate_by_turn(
    estimator: Callable[..., Any], array_names: Sequence[str], columns: Mapping[str, Array]
) -> Float[jax.Array, "N K"]:
    """Apply an estimator to the t-th turns of all trajectories, separately for each t.

    The return of a turn is compared with the returns of the group's trajectories from the t-th turn
    onward, including trajectories that have already ended. With `rloo`, the baseline is the mean
    over the other trajectories, so with undiscounted returns the expected gradient is the gradient
    of the expected reward. `grpo` without division by the standard deviation gives the same, scaled
    by (n - 1) / n. Division by the standard deviation of each turn's returns follows GTPO
    (https://arxiv.org/abs/2511.14846). MT-GRPO (https://arxiv.org/abs/2505.11821) instead
    normalizes turn rewards and final rewards separately, and gives a turn no credit for later
    turns.

    Args:
        estimator: Advantage estimator with its settings bound.
        array_names: Names of the arrays that the estimator takes, in order.
        columns: Arrays by name. Those of shape [N, K] have one column per turn.
    """
    num_turns = next(c.shape[1] for c in columns.values() if getattr(c, "ndim", 0) == 2)

    def estimate_turn_advantages(turn: jax.Array) -> jax.Array:
        inputs = [columns[name] for name in array_names]
        return estimator(*(jnp.asarray(c)[:, turn] if c.ndim == 2 else c for c in inputs))

    # Process turns sequentially: an estimator's comparisons are N x N.
    return jax.lax.map(estimate_turn_advantages, jnp.arange(num_turns)).T

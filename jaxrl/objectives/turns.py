"""Advantages by turns: what is earned from each turn on, and an estimator for each of them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

Array = jax.Array | np.ndarray


def turn_returns(
    rest_rewards: Float[np.ndarray, " N"],
    turn_rewards: Float[np.ndarray, "N K"],
    *,
    discount: float,
) -> Float[np.ndarray, "N K"]:
    """Return of each trajectory from each turn on: `rest + sum over s >= t of d^(s - t) r_s`.

    The reward to go of the policy gradient theorem, with turns for steps, as GTPO has it
    (https://arxiv.org/abs/2511.14846): what a turn writes cannot change what earlier turns have
    earned. A trajectory that has ended earns nothing more by turns; its row goes on with `rest`,
    which is not discounted. In float64 until the end: returns that are equal by other sums stay
    equal.

    Args:
        rest_rewards: of each trajectory, what belongs to no turn, as the answer's correctness.
        turn_rewards: what each turn has earned, 0 where there is no such turn. An amount must be
            known when its turn, with what the environment replied, is over.
        discount: d, from 0 to 1. Below 1 the expected gradient is no longer that of the sum.
    """
    turns = np.arange(turn_rewards.shape[1])
    ahead = turns[None, :] - turns[:, None]  # [t, s]
    weights = np.where(ahead >= 0, float(discount) ** np.maximum(ahead, 0), 0.0)
    to_go = (turn_rewards.astype(np.float64)[:, None, :] * weights).sum(axis=2)
    return (rest_rewards.astype(np.float64)[:, None] + to_go).astype(np.float32)


def by_turn(
    estimator: Callable[..., Any], arrays: Sequence[str], columns: Mapping[str, Array]
) -> Float[jax.Array, "N K"]:
    """An estimator applied to the t-th turns of all trajectories, for each t by itself.

    The return of a turn is compared with what the others of the group earn from their t-th turn
    on, those that have ended included. With `rloo` the baseline is the others' mean, which does not
    depend on the trajectory: with returns that are not discounted the expected gradient is that of
    the expected reward. Mean-only `grpo` gives the same, shortened by (n - 1) / n. Dividing by the
    deviation of each turn's returns is GTPO's choice (https://arxiv.org/abs/2511.14846). MT-GRPO
    (https://arxiv.org/abs/2505.11821) instead normalises rewards of turns and of the end apart, and
    pays a turn nothing for what later turns earn.

    Args:
        estimator: an advantage estimator, its settings bound.
        arrays: the names of its arrays.
        columns: by name; those of [N, K] have a column for each turn.
    """
    num_turns = next(c.shape[1] for c in columns.values() if getattr(c, "ndim", 0) == 2)

    def of_turn(turn: jax.Array) -> jax.Array:
        inputs = [columns[name] for name in arrays]
        return estimator(*(jnp.asarray(c)[:, turn] if c.ndim == 2 else c for c in inputs))

    # One turn after another: an estimator's comparisons are N x N.
    return jax.lax.map(of_turn, jnp.arange(num_turns)).T

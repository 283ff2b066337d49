"""Sums over the trajectories packed side by side in a row."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

Array = jax.Array | np.ndarray


def segment_sums(
    values: Float[Array, "R T"], segment_ids: Int[Array, "R T"]
) -> Float[jax.Array, "R T"]:
    """Sums of `values` over each token's segment, the same bits for all tokens of a segment.

    Two scans of logarithmic depth along the row: running sums that begin anew with each segment,
    then each segment's last one copied back over it. A GPU adds up a scatter in any order, and a
    T x T table of who belongs to whom would not fit beside long rows.

    Args:
        values: what is to be added up; tokens to leave out hold 0. A value that is not finite
            stays in its segment.
        segment_ids: which segment a token belongs to; one is contiguous and in one row. 0 on
            padding, where the result is 0.
    """
    changes = segment_ids[:, 1:] != segment_ids[:, :-1]
    is_start = jnp.pad(changes, ((0, 0), (1, 0)), constant_values=True)
    is_end = jnp.pad(changes, ((0, 0), (0, 1)), constant_values=True)
    pair = (jnp.asarray(values), is_start)
    running, _ = jax.lax.associative_scan(_add, pair, axis=1)
    totals, _ = jax.lax.associative_scan(_keep, (running, is_end), axis=1, reverse=True)
    return jnp.where(segment_ids != 0, totals, 0.0)


Pair = tuple[Float[Array, "..."], Bool[Array, "..."]]


def _add(left: Pair, right: Pair) -> Pair:
    """Sum of two neighbouring spans since the last start, and whether there was one."""
    value = jnp.where(right[1], right[0], left[0] + right[0])
    return value, left[1] | right[1]


def _keep(right: Pair, left: Pair) -> Pair:
    """Value of two neighbouring spans at the first end, and whether there was one."""
    return jnp.where(left[1], left[0], right[0]), left[1] | right[1]

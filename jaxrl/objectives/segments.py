"""Sums over the trajectories packed into a row."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

Array = jax.Array | np.ndarray


def broadcast_segment_sums(
    values: Float[Array, "R T"], segment_ids: Int[Array, "R T"]
) -> Float[jax.Array, "R T"]:
    """Sum `values` over each token's segment, bit-identically for all tokens of a segment.

    Uses two associative scans of logarithmic depth: running sums that restart at each segment, then
    a reverse scan that copies each segment's total to its tokens. A scatter on a GPU adds in
    nondeterministic order, and a T x T segment mask would not fit in memory for long rows.

    Args:
        values: Values to sum; 0 for tokens to exclude. A non-finite value stays within its segment.
        segment_ids: Segment of each token; each segment is contiguous within one row. 0 on padding,
            where the result is 0.
    """
    changes = segment_ids[:, 1:] != segment_ids[:, :-1]
    is_start = jnp.pad(changes, ((0, 0), (1, 0)), constant_values=True)
    is_end = jnp.pad(changes, ((0, 0), (0, 1)), constant_values=True)
    pair = (jnp.asarray(values), is_start)
    running, _ = jax.lax.associative_scan(_combine_segmented_sums, pair, axis=1)
    totals, _ = jax.lax.associative_scan(_combine_spans, (running, is_end), axis=1, reverse=True)
    return jnp.where(segment_ids != 0, totals, 0.0)


Pair = tuple[Float[Array, "..."], Bool[Array, "..."]]


def _combine_segmented_sums(left: Pair, right: Pair) -> Pair:
    """Combine two adjacent spans, as (sum since the last segment start, has a start)."""
    value = jnp.where(right[1], right[0], left[0] + right[0])
    return value, left[1] | right[1]


def _combine_spans(right: Pair, left: Pair) -> Pair:
    """Combine two adjacent spans, as (value at the first segment end, has an end)."""
    return jnp.where(left[1], left[0], right[0]), left[1] | right[1]

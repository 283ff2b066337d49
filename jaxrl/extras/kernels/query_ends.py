"""Compute the last query that reads each key, for kernels that loop over blocks of queries."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


def compute_query_ends(key_ranges: Int[Array, "R 3 T"]) -> Int[Array, "R T"]:
    """Return, for each token, the exclusive end of the tokens that attend to it.

    The last token that attends to a token is the last token of its segment or, for a token of a
    shared prompt, the last token of the last segment that shares the prompt.

    Args:
        key_ranges: Ranges of tokens that each token attends to; see `kernels.compute_key_ranges`.
    """
    starts, shared_starts, shared_ends = jnp.moveaxis(key_ranges, 1, 0)
    T = starts.shape[1]
    positions = jnp.arange(T)

    def find_next_start(is_start: jax.Array) -> jax.Array:
        next_index = jnp.pad(
            jnp.where(is_start, positions, T)[:, 1:], ((0, 0), (0, 1)), constant_values=T
        )
        return jax.lax.cummin(next_index, axis=1, reverse=True)

    ends = find_next_start(starts == positions)
    # Segments that share a prompt directly follow it, and share the same part of it.
    next_index = jnp.minimum(ends, T - 1)
    next_values = (jnp.take_along_axis(x, next_index, axis=1) for x in (shared_starts, shared_ends))
    next_start, next_end = next_values
    is_shared = (ends < T) & (next_start == starts) & (positions < next_end)
    # `shared_ends` is 0 without a shared prompt, even in padded and shifted rows.
    return jnp.where(is_shared, find_next_start((starts == positions) & (shared_ends == 0)), ends)

"""Recurrent layers: tokens interact through a state of fixed size instead of attention.

A layer passes its per-token inputs and a function `advance` to `run_recurrence`, which runs
`advance` over chunks of tokens: of packed rows in the full pass, or of the sampler's rows. The
sampler keeps the states of its rows between calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

State = Mapping[str, jax.Array]
"""State of b sequences in one layer, `[b, heads, ...]` by name."""

StateSpecs = Mapping[str, jax.ShapeDtypeStruct]
"""Shape `[heads, ...]` and dtype of each array in one sequence's state, for one layer."""

Advance = Callable[
    [State, Any, Int[Array, "b C"], Int[Array, " b"]], tuple[jax.Array, dict[str, jax.Array]]
]
"""Function that advances b sequences by a chunk of C tokens.

It has four arguments: the states before the chunk; the inputs, a tree of `[b, C, ...]`; the index
in the chunk at which each token's context begins (-1 if it began earlier); and the number n of
valid tokens, which come first. It returns outputs `[b, C, ...]`, whose values after the first n are
arbitrary, and the states after n tokens.
"""

CHUNK_TOKENS = 64
"""Default number of tokens per chunk."""

Recurrence = Callable[[Advance, Any], jax.Array]
"""Function from `advance` and its inputs, a tree of `[M, ...]`, to outputs `[M, ...]`."""


def init_state(specs: StateSpecs, *sizes: int) -> dict[str, jax.Array]:
    """Return the state before the first token, `[*sizes, heads, ...]`."""
    return {name: jnp.zeros((*sizes, *spec.shape), spec.dtype) for name, spec in specs.items()}


def make_recurrence(
    specs: StateSpecs, starts: Int[Array, "R T"], chunk_tokens: int = CHUNK_TOKENS
) -> Recurrence:
    """Return a function that runs a recurrence over packed rows, restarting at each context.

    The backward pass saves the state before each chunk and recomputes everything else, so its
    memory grows with the number of chunks.

    Args:
        specs: State of one sequence.
        starts: Index of the first token of each token's context.
        chunk_tokens: Number of tokens per chunk.
    """
    R, T = starts.shape
    size = min(chunk_tokens, T)
    num_chunks = -(-T // size)
    padding = num_chunks * size - T
    # Each padding token is its own context.
    ends = jnp.broadcast_to(jnp.arange(T, T + padding), (R, padding))
    starts = jnp.concatenate([starts, ends.astype(starts.dtype)], axis=1)

    def split_into_chunks(x: jax.Array) -> jax.Array:
        x = jnp.pad(x.reshape(R, T, *x.shape[1:]), ((0, 0), (0, padding), *[(0, 0)] * (x.ndim - 1)))
        return x.reshape(R, num_chunks, size, *x.shape[2:]).swapaxes(0, 1)

    chunk_starts = starts.reshape(R, num_chunks, size) - jnp.arange(num_chunks)[:, None] * size
    chunk_starts = jnp.maximum(chunk_starts, -1).swapaxes(0, 1)
    counts = jnp.full(R, size)

    def run_recurrence(advance: Advance, inputs: Any) -> jax.Array:
        @jax.checkpoint
        def step(state: State, chunk: Any) -> tuple[State, jax.Array]:
            chunk_inputs, starts = chunk
            out, state = advance(state, chunk_inputs, starts, counts)
            return state, out

        chunks = jax.tree.map(split_into_chunks, inputs), chunk_starts
        out = jax.lax.scan(step, init_state(specs, R), chunks)[1]
        return (
            out.swapaxes(0, 1).reshape(R, -1, *out.shape[3:])[:, :T].reshape(R * T, *out.shape[3:])
        )

    return run_recurrence

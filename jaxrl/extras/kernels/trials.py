"""Trials of attention kernels on small random arrays, for the startup self-test."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxrl.models.attention.kernels import compute_key_ranges
from jaxrl.models.attention.reference import XLA
from jaxrl.models.kernel_check import Trial

ROW_TOKENS = 1000  # several blocks of any kernel, the last one partial
ROWS = (
    # Length of each segment in a row, and of the shared prompt that the segment continues.
    ((300, 0), (200, 150), (3, 150), (260, 150), (129, 0)),
    ((ROW_TOKENS, 0),),
)


def make_packed_trial(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: DTypeLike,
    device: jax.Device,
    *,
    shares_prompts: bool,
) -> Trial:
    """Build a trial of the update's attention, forward and backward, on two packed rows.

    Args:
        num_heads: Number of query heads on one device.
        num_kv_heads: Number of KV heads on one device.
        head_dim: Head size.
        dtype: Compute dtype of the run.
        device: Device that runs the trial.
        shares_prompts: True if segments continue the prompt of an earlier segment.
    """
    rng = np.random.default_rng(0)
    shape = (len(ROWS), ROW_TOKENS)
    # Pack the segments. Positions of a segment with a shared prompt continue the prompt's.
    ids, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    for row, segments in enumerate(ROWS):
        start = 0
        for number, (length, shared) in enumerate(segments, 1):
            first = shared if shares_prompts else 0
            ids[row, start : start + length] = number
            positions[row, start : start + length] = first + np.arange(length)
            start += length
    q, gradient = rng.normal(size=(2, *shape, num_heads, head_dim)).astype(np.float32)
    k, v = rng.normal(size=(2, *shape, num_kv_heads, head_dim)).astype(np.float32)
    key_ranges = np.asarray(compute_key_ranges(jnp.asarray(ids), jnp.asarray(positions)))

    def run_attention(
        attend_packed: Callable[..., Any],
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        key_ranges: jax.Array,
        gradient: jax.Array,
        is_token: jax.Array,
    ) -> Sequence[jax.Array]:
        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return jnp.where(is_token[..., None, None], attend_packed(q, k, v, key_ranges), 0)

        out, backward = jax.vjp(attend, q, k, v)
        return out, *backward(gradient)

    return Trial(
        operation="attention of the update",
        names=("outputs", "gradient of queries", "gradient of keys", "gradient of values"),
        run=run_attention,
        arrays=(q, k, v, key_ranges, gradient, ids > 0),
        reference=XLA.attend_packed,
        dtype=dtype,
        device=device,
    )


def make_paged_trial(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: DTypeLike,
    device: jax.Device,
    *,
    page_tokens: int,
    num_queries: int,
) -> Trial:
    """Build a trial of attention in the sampler, with rows that end near page boundaries.

    Args:
        num_heads: Number of query heads on one device.
        num_kv_heads: Number of KV heads on one device.
        head_dim: Head size.
        dtype: Compute dtype of the run.
        device: Device that runs the trial.
        page_tokens: Number of tokens per page.
        num_queries: Number of queries per row: 1 in decode, more in prefill.
    """
    rng = np.random.default_rng(0)
    ends = np.array([0, 1, page_tokens - 1, page_tokens, page_tokens + 1, 5 * page_tokens + 7,
                     9 * page_tokens, 3 * page_tokens])  # fmt: skip
    num_pages, max_pages = 24, 10
    tables = np.full((len(ends), max_pages), num_pages, np.int32)  # "no page" past a row's pages
    for row, end in enumerate(ends):
        count = -(-end // page_tokens)
        tables[row, :count] = rng.permutation(num_pages)[:count]  # some rows share pages
    limits = np.maximum(ends[:, None] - np.arange(num_queries)[::-1], 0).astype(np.int32)
    q = rng.normal(size=(len(ends), num_queries, num_heads, head_dim)).astype(np.float32)
    pages = (2, num_pages, num_kv_heads, page_tokens, head_dim)
    keys, values = rng.normal(size=pages).astype(np.float32)

    def run_attention(
        attend_pages: Callable[..., Any], q: jax.Array, keys: jax.Array, values: jax.Array,
        tables: jax.Array, limits: jax.Array,
    ) -> Sequence[jax.Array]:  # fmt: skip
        out, lse = attend_pages(q, keys, values, tables, limits)
        # A mean of n random vectors has a norm of about n^-1/2, and n weights add up to about n.
        # Scale both. Otherwise, the queries with the fewest or the most keys would hide the errors
        # of others.
        count = jnp.maximum(limits, 1)[:, :, None]
        return out * jnp.sqrt(count)[..., None], (jnp.exp(lse) / count)[..., None]

    return Trial(
        operation="attention of the sampler, " + ("decoding" if num_queries == 1 else "prefill"),
        names=("outputs", "means of weights"),
        run=run_attention,
        arrays=(q, keys, values, tables, limits),
        reference=XLA.attend_pages,
        dtype=dtype,
        device=device,
    )

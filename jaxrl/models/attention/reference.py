"""Attention in XLA, on every platform: `train`, `extend` and `decode`.

Each computes scores and softmax in float32. Keys and values of the caches are head-major
`[rows, K, S, H]`, the layout in which a decoding step reads them without a transpose.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

LOWEST = float(jnp.finfo(jnp.float32).min) / 2
"""Stands for minus infinity in scores and logits: its exponential is 0, its products are finite."""

MAX_BLOCK = 96
"""Tokens of a block of queries or keys in `train`, at most."""

KeyValue = tuple[jax.Array, jax.Array]
"""Keys and values of one layer, `[rows, K, S, H]`."""


def train(
    q: Float[Array, "R T N H"],
    k: Float[Array, "R T K H"],
    v: Float[Array, "R T K H"],
    segment_ids: Int[Array, "R T"],
) -> Float[Array, "R T N H"]:
    """Causal attention within the segments of packed rows.

    Flash attention (https://arxiv.org/abs/2205.14135) in blocks of tokens: neither pass holds more
    scores than those of two blocks, and blocks that hold nothing to read are left out. Products
    take both operands in the dtype of the inputs and give float32.

    The query heads of a key head are merged with the tokens of a block, so that each product is
    one matrix by another for every row and key head, and no key is repeated.

    Args:
        q: queries.
        k: keys.
        v: values.
        segment_ids: a run of tokens with one id is a segment; 0 is padding, which reads itself.
    """
    R, T, N, H = q.shape
    K = k.shape[2]
    num_blocks = -(-T // MAX_BLOCK)
    size = -(-T // num_blocks)
    starts = segment_starts(segment_ids, num_blocks * size)
    pad = ((0, 0), (0, num_blocks * size - T), (0, 0), (0, 0))
    q, k, v = (jnp.pad(x, pad) for x in (q, k, v))
    q = q.reshape(R, num_blocks, size, K, N // K, H).transpose(1, 0, 3, 4, 2, 5)
    k, v = (x.reshape(R, num_blocks, size, K, H).transpose(1, 0, 3, 2, 4) for x in (k, v))
    starts = starts.reshape(R, num_blocks, size).swapaxes(0, 1)
    out = _attend(q.reshape(num_blocks, R, K, -1, H), k, v, starts)
    out = out.reshape(num_blocks, R, K, N // K, size, H).transpose(1, 0, 4, 2, 3, 5)
    return out.reshape(R, -1, N, H)[:, :T]


def segment_starts(segment_ids: Int[Array, "R T"], length: int) -> Int[Array, "R length"]:
    """The first token that each may read, of rows padded to `length`; of padding, itself."""
    segment_ids = jnp.pad(segment_ids, ((0, 0), (0, length - segment_ids.shape[1])))
    before = jnp.pad(segment_ids[:, :-1], ((0, 0), (1, 0)))
    begins = (segment_ids != before) | (segment_ids == 0)
    return jax.lax.cummax(jnp.where(begins, jnp.arange(length), 0), axis=1)


# Below, the first axis is over blocks of B tokens: queries and outputs `[blocks, R, K, G * B, H]`,
# G query heads a key head, keys and values `[blocks, R, K, B, H]`, starts `[blocks, R, B]`.

_product = partial(jnp.einsum, preferred_element_type=jnp.float32)


@jax.custom_vjp
def _attend(q: jax.Array, k: jax.Array, v: jax.Array, starts: jax.Array) -> jax.Array:
    return _forward(q, k, v, starts)[0]


def _forward(
    q: jax.Array, k: jax.Array, v: jax.Array, starts: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """The outputs, and what the backward pass needs: with them their log-sum-exp."""

    def one(block: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        index, first, q, starts = block
        return _forward_block(index, first, q, starts, k, v)

    blocks = (jnp.arange(len(q)), _first_blocks(starts), q, starts)
    out, lse = jax.lax.map(one, blocks)
    out, lse = checkpoint_name(out, "attended"), checkpoint_name(lse, "lse")
    return out, (q, k, v, starts, out, lse)


def _first_blocks(starts: jax.Array) -> jax.Array:
    """For each block of queries the first block of keys that any of them reads."""
    return starts.min(axis=(1, 2)) // starts.shape[2]


def _forward_block(
    index: jax.Array, first: jax.Array, q: jax.Array, starts: jax.Array, k: jax.Array, v: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Outputs of a block of queries and their log-sum-exp, by an online softmax over key blocks."""

    def average(weights: jax.Array, values: jax.Array) -> jax.Array:
        return _product("rkts,rksh->rkth", weights.astype(values.dtype), values)

    # The block itself comes first: each query reads itself there, so there is a finite maximum.
    scores = _scores(q, k[index], starts, index, is_diagonal=True)
    highest = scores.max(axis=-1, keepdims=True)
    weights = jnp.exp(scores - highest)
    sums = highest, weights.sum(axis=-1, keepdims=True), average(weights, v[index])

    def add(j: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        highest, total, out = sums
        scores = _scores(q, k[j], starts, j, is_diagonal=False)
        new = jnp.maximum(highest, scores.max(axis=-1, keepdims=True))
        weights, fade = jnp.exp(scores - new), jnp.exp(highest - new)
        total = total * fade + weights.sum(axis=-1, keepdims=True)
        return new, total, out * fade + average(weights, v[j])

    highest, total, out = sums if len(k) == 1 else jax.lax.fori_loop(first, index, add, sums)
    return (out / total).astype(q.dtype), highest + jnp.log(total)


def _scores(
    q: jax.Array, k: jax.Array, starts: jax.Array, key_block: jax.Array, *, is_diagonal: bool
) -> jax.Array:
    """Scaled products of a block of queries with one of keys, `[R, K, G * B, B]`, masked."""
    place = jnp.arange(k.shape[2])
    mask = key_block * len(place) + place >= starts[:, :, None]
    if is_diagonal:
        mask &= place <= place[:, None]
    mask = jnp.tile(mask[:, None], (1, 1, q.shape[2] // len(place), 1))
    return jnp.where(mask, _product("rkth,rksh->rkts", q, k) * q.shape[3] ** -0.5, LOWEST)


def _backward(
    saved: tuple[jax.Array, ...], gradient: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    q, k, v, starts, out, lse = saved
    scale = q.shape[4] ** -0.5
    delta = (out.astype(jnp.float32) * gradient.astype(jnp.float32)).sum(axis=-1, keepdims=True)

    def one(sums: Sums, block: tuple[Any, ...]) -> tuple[Sums, jax.Array]:
        index, first, given = block
        of_queries, *of_pair = _backward_pair(given, index, k, v, is_diagonal=True)
        sums = _add_at(sums, index, of_pair)

        def add(j: jax.Array, carry: tuple[jax.Array, Sums]) -> tuple[jax.Array, Sums]:
            of_queries, *of_pair = _backward_pair(given, j, k, v, is_diagonal=False)
            return carry[0] + of_queries, _add_at(carry[1], j, of_pair)

        if len(k) > 1:
            of_queries, sums = jax.lax.fori_loop(first, index, add, (of_queries, sums))
        return sums, (of_queries * scale).astype(q.dtype)

    # Transposed, as the products give them: a CPU is slow to turn a product's result.
    zeros = jnp.zeros(k.swapaxes(3, 4).shape, jnp.float32)
    blocks = (jnp.arange(len(q)), _first_blocks(starts), (q, starts, lse, gradient, delta))
    (of_keys, of_values), of_queries = jax.lax.scan(one, (zeros, zeros), blocks)
    of_keys, of_values = (of_keys * scale).swapaxes(3, 4), of_values.swapaxes(3, 4)
    return of_queries, of_keys.astype(k.dtype), of_values.astype(v.dtype), None


Sums = tuple[jax.Array, jax.Array]
"""Gradients of keys and values `[blocks, R, K, H, B]`, float32, as summed so far."""


def _backward_pair(
    given: tuple[jax.Array, ...], j: jax.Array, k: jax.Array, v: jax.Array, *, is_diagonal: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What a block of queries and key block `j` add to gradients of queries, keys and values."""
    q, starts, lse, gradient, delta = given
    weights = jnp.exp(_scores(q, k[j], starts, j, is_diagonal=is_diagonal) - lse)
    of_values = _product("rkth,rkts->rkhs", gradient, weights.astype(q.dtype))
    of_weights = _product("rkth,rksh->rkts", gradient, v[j])
    of_scores = (weights * (of_weights - delta)).astype(q.dtype)
    of_keys = _product("rkth,rkts->rkhs", q, of_scores)
    return _product("rkts,rksh->rkth", of_scores, k[j]), of_keys, of_values


def _add_at(sums: Sums, index: jax.Array, new: Sequence[jax.Array]) -> Sums:
    of_keys, of_values = (
        jax.lax.dynamic_update_index_in_dim(total, total[index] + one, index, axis=0)
        for total, one in zip(sums, new, strict=True)
    )
    return of_keys, of_values


_attend.defvjp(_forward, _backward)


def _softmax_average(
    parts: list[tuple[jax.Array, jax.Array]], dtype: jnp.dtype, equation: str
) -> jax.Array:
    """Softmax over the joined last axes of several score blocks, applied to their values."""
    highest = parts[0][0].max(axis=-1, keepdims=True)
    for scores, _ in parts[1:]:
        highest = jnp.maximum(highest, scores.max(axis=-1, keepdims=True))
    highest = jax.lax.stop_gradient(highest)
    total = average = jnp.zeros(())
    for scores, values in parts:
        weights = jnp.exp(scores - highest)
        total = total + weights.sum(axis=-1, keepdims=True)
        average = average + jnp.einsum(
            equation, weights.astype(dtype), values, preferred_element_type=jnp.float32
        )
    return (average / total).astype(dtype)


def extend(
    q: Float[Array, "R C N H"],
    k: Float[Array, "R K C H"],
    v: Float[Array, "R K C H"],
    past: KeyValue | None,
    start: Int[Array, " R"],
) -> Float[Array, "R C N H"]:
    """A chunk of queries over the cache's first `start` tokens and, causally, over the chunk."""
    R, C, N, H = q.shape
    K = k.shape[1]
    grouped = q.reshape(R, C, K, N // K, H)
    scale = H**-0.5

    def scores(keys: jax.Array) -> jax.Array:
        product = jnp.einsum("rckgh,rksh->rkgcs", grouped, keys, preferred_element_type=jnp.float32)
        return product * scale

    causal = jnp.arange(C)[:, None] >= jnp.arange(C)
    parts = [(jnp.where(causal, scores(k), LOWEST), v)]
    if past is not None:
        is_past = jnp.arange(past[0].shape[2]) < start[:, None]
        parts.append((jnp.where(is_past[:, None, None, None], scores(past[0]), LOWEST), past[1]))
    out = _softmax_average(parts, q.dtype, "rkgcs,rksh->rkgch")
    return out.transpose(0, 3, 1, 2, 4).reshape(R, C, N, H)


def decode(
    q: Float[Array, "B N H"],
    keys: Float[Array, "B K H W"],
    values: Float[Array, "B K W H"],
    valid: Bool[Array, "B W"],
) -> Float[Array, "B N H"]:
    """One query a row over the `valid` tokens of a window (`kv_cache.open_window`)."""
    B, N, H = q.shape
    K = keys.shape[1]
    grouped = q.reshape(B, K, N // K, H)
    product = jnp.einsum("bkgh,bkhw->bkgw", grouped, keys, preferred_element_type=jnp.float32)
    scores = jnp.where(valid[:, None, None], product * H**-0.5, LOWEST)
    return _softmax_average([(scores, values)], q.dtype, "bkgs,bksh->bkgh").reshape(B, N, H)

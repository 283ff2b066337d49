"""Attention in XLA, on every platform: `train`, `extend` and `decode`.

Each computes scores and softmax in float32. Keys and values of the caches are head-major
`[rows, K, S, H]`, the layout in which a decoding step reads them without a transpose.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

LOWEST = float(jnp.finfo(jnp.float32).min) / 2
"""Stands for minus infinity in scores and logits: its exponential is 0, its products are finite."""

KeyValue = tuple[jax.Array, jax.Array]
"""Keys and values of one layer, `[rows, K, S, H]`."""


def packed_mask(segment_ids: Int[Array, "R T"]) -> Bool[Array, "R 1 T T"]:
    """True where the token on the third axis may read the one on the last."""
    T = segment_ids.shape[1]
    causal = jnp.arange(T)[:, None] >= jnp.arange(T)
    return (causal & (segment_ids[:, :, None] == segment_ids[:, None, :]))[:, None]


def train(
    q: Float[Array, "R T N H"],
    k: Float[Array, "R T K H"],
    v: Float[Array, "R T K H"],
    segment_ids: Int[Array, "R T"],
) -> Float[Array, "R T N H"]:
    """Causal attention within the segments of packed rows; those of id 0 are padding.

    The query heads of a key head are merged with the tokens, so that each product is one matrix
    by another for every row and key head; `jax.nn.dot_product_attention` is half as fast on a CPU.
    """
    R, T, N, H = q.shape
    K = k.shape[2]
    merged = q.reshape(R, T, K, N // K, H).transpose(0, 2, 3, 1, 4).reshape(R, K, -1, H)
    k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
    product = jnp.einsum("rkth,rksh->rkts", merged, k, preferred_element_type=jnp.float32)
    mask = jnp.tile(packed_mask(segment_ids), (1, 1, N // K, 1))
    scores = jnp.where(mask, product * H**-0.5, LOWEST)
    out = _softmax_average([(scores, v)], q.dtype, "rkts,rksh->rkth")
    return out.reshape(R, K, N // K, T, H).transpose(0, 3, 1, 2, 4).reshape(R, T, N, H)


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

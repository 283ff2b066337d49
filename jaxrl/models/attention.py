"""The one place that knows attention kernels: `train`, `extend` and `decode`.

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
    mask: Bool[Array, "R 1 T T"],
) -> Float[Array, "R T N H"]:
    """Attention within the segments of packed rows."""
    return jax.nn.dot_product_attention(q, k, v, mask=mask)


def _softmax_average(
    parts: list[tuple[jax.Array, jax.Array]], dtype: jnp.dtype, equation: str
) -> jax.Array:
    """Softmax over the joined last axes of several score blocks, applied to their values."""
    highest = parts[0][0].max(axis=-1, keepdims=True)
    for scores, _ in parts[1:]:
        highest = jnp.maximum(highest, scores.max(axis=-1, keepdims=True))
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
    past: KeyValue,
    cached: Int[Array, " B"],
    chunk: KeyValue,
    index: Int[Array, ""],
) -> Float[Array, "B N H"]:
    """One query a row over its first `cached` tokens and the chunk's steps up to `index`."""
    B, N, H = q.shape
    K = past[0].shape[1]
    grouped = q.reshape(B, K, N // K, H)
    scale = H**-0.5

    def scores(keys: jax.Array, valid: jax.Array) -> jax.Array:
        product = jnp.einsum("bkgh,bksh->bkgs", grouped, keys, preferred_element_type=jnp.float32)
        return jnp.where(valid[:, None, None], product * scale, LOWEST)

    is_past = jnp.arange(past[0].shape[2]) < cached[:, None]
    is_written = jnp.broadcast_to(jnp.arange(chunk[0].shape[2]) <= index, (B, chunk[0].shape[2]))
    parts = [(scores(past[0], is_past), past[1]), (scores(chunk[0], is_written), chunk[1])]
    return _softmax_average(parts, q.dtype, "bkgs,bksh->bkgh").reshape(B, N, H)

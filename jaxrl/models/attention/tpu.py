"""Attention on TPUs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as splash,
)
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jaxtyping import Array, Float, Int

LANES = 128
"""Blocks and heads are multiples of these."""

MAX_BLOCK = 512
"""Tokens of a block of queries or keys, at most."""


def train(
    q: Float[Array, "R T N H"],
    k: Float[Array, "R T K H"],
    v: Float[Array, "R T K H"],
    segment_ids: Int[Array, "R T"],
    *,
    interpret: bool = False,
) -> Float[Array, "R T N H"]:
    """What `reference.train` computes, by JAX's splash attention.

    Tokens are padded to whole blocks and heads to lanes. Queries carry the scale. The backward pass
    is in two kernels: the one that does both writes a part of the queries' gradient for each block
    of keys.
    """
    T, N, H = q.shape[1:]
    num_blocks = -(-T // MAX_BLOCK)
    size = -(-T // (num_blocks * LANES)) * LANES
    length = num_blocks * size
    blocks = splash.BlockSizes(
        block_q=size,
        block_kv=size,
        block_kv_compute=size,
        block_q_dkv=size,
        block_kv_dkv=size,
        block_kv_dkv_compute=size,
        block_q_dq=size,
        block_kv_dq=size,
    )
    attend = splash.make_splash_mha(
        masks.MultiHeadMask([masks.CausalMask((length, length))] * N),
        block_sizes=blocks,
        head_shards=1,
        q_seq_shards=1,
        residual_checkpoint_name="attended",
        interpret=interpret,
    )
    pad = ((0, 0), (0, length - T), (0, 0), (0, -H % LANES))
    q = (q.astype(jnp.float32) * H**-0.5).astype(q.dtype)
    q, k, v = (jnp.pad(x, pad).swapaxes(1, 2) for x in (q, k, v))
    ids = jnp.pad(segment_ids, pad[:2])
    out = jax.vmap(attend)(q, k, v, splash.SegmentIds(ids, ids))
    return out.swapaxes(1, 2)[:, :T, :, :H]

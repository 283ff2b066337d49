"""Attention on TPUs."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as splash,
)
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jaxtyping import Array, Float, Int

from jaxrl.models.attention.reference import (
    FLOOR,
    LOWEST,
    by_key_head,
    by_query,
    in_blocks,
)

LANES = 128
"""Blocks and heads are multiples of these."""

MAX_BLOCK = 512
"""Tokens of a block of queries or keys, at most."""


def train(
    q: Float[Array, "R Q N H"],
    k: Float[Array, "R T K H"],
    v: Float[Array, "R T K H"],
    reads: Int[Array, "R 3 T"],
    *,
    interpret: bool = False,
) -> Float[Array, "R Q N H"]:
    """Computes `reference.train` by JAX's splash attention, of segments that share nothing.

    Tokens are padded to whole blocks and heads to lanes. Queries carry the scale. The backward pass
    is in two kernels: the one that does both writes a part of the queries' gradient for each block
    of keys.
    """
    Q, N, H = q.shape[1:]
    num_blocks = -(-Q // MAX_BLOCK)
    size = -(-Q // (num_blocks * LANES)) * LANES
    q, k, v, reads = in_blocks(q, k, v, reads, size)
    own, length = q.shape[1], k.shape[1]
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
        masks.MultiHeadMask([masks.CausalMask((own, length), offset=length - own)] * N),
        block_sizes=blocks,
        head_shards=1,
        q_seq_shards=1,
        residual_checkpoint_name="attended",
        interpret=interpret,
    )
    pad = ((0, 0), (0, 0), (0, 0), (0, -H % LANES))
    q = (q.astype(jnp.float32) * H**-0.5).astype(q.dtype)
    q, k, v = (jnp.pad(x, pad).swapaxes(1, 2) for x in (q, k, v))
    ids = reads[:, 0]  # a segment's tokens have one start
    out = jax.vmap(attend)(q, k, v, splash.SegmentIds(ids[:, -own:], ids))
    return out.swapaxes(1, 2)[:, :Q, :, :H]


SUBLANES = 16
"""Rows of a matrix are multiples of these, in bfloat16 and float32."""


def attend_pages(
    q: Float[Array, "B Q N H"],
    keys: Float[Array, "P K page H"],
    values: Float[Array, "P K page H"],
    tables: Int[Array, "B M"],
    limits: Int[Array, "B Q"],
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "B Q N H"], Float[Array, "B Q N"]]:
    """Computes `reference.attend_pages`, fetching no page beyond a block's highest limit.

    The steps go over blocks and pages, as many pages as the longest block has. Where a block is
    shorter, its last page is named again, which is there already, and nothing is computed.
    """
    B, Q, N, H = q.shape
    K, page = keys.shape[1:3]
    num_rows = -(-Q * N // K // SUBLANES) * SUBLANES
    merged, below = by_key_head(q, limits, K, num_rows)
    num_pages = -(-limits.max(axis=1) // page)

    def of_block(b: Any, j: Any, tables: Any, num_pages: Any) -> tuple[Any, ...]:
        return b, 0, 0, 0

    pages = pl.BlockSpec((1, K, page, H), page_of_step)
    queries = pl.BlockSpec((1, K, num_rows, H), of_block)
    numbers = pl.BlockSpec((1, K, num_rows, LANES), of_block)
    out, lse = pl.pallas_call(
        partial(_pages_kernel, scale=H**-0.5),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(B, jnp.maximum(num_pages.max(), 1)),
            in_specs=[
                queries,
                pl.BlockSpec((1, num_rows, 1), lambda b, j, *_: (b, 0, 0)),
                pages,
                pages,
            ],
            out_specs=[queries, numbers],
            scratch_shapes=[
                pltpu.VMEM((K, num_rows, LANES), jnp.float32),
                pltpu.VMEM((K, num_rows, LANES), jnp.float32),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(merged.shape, jnp.float32),
            jax.ShapeDtypeStruct((B, K, num_rows, LANES), jnp.float32),
        ],
        interpret=interpret,
        name="attention_pages",
    )(jnp.clip(tables, 0, keys.shape[0] - 1), num_pages, merged, below[:, :, None], keys, values)
    return by_query(out, lse[..., 0], q.shape)


def page_of_step(b: Any, j: Any, tables: Any, num_pages: Any) -> tuple[Any, ...]:
    """Place of a step's page; one that the step before had is not fetched again."""
    return tables[b, jnp.maximum(jnp.minimum(j, num_pages[b] - 1), 0)], 0, 0, 0


def _pages_kernel(
    tables_ref: Any, num_pages_ref: Any, q_ref: Any, limits_ref: Any, k_ref: Any, v_ref: Any,
    out_ref: Any, lse_ref: Any, highest_ref: Any, total_ref: Any, *, scale: float,
) -> None:  # fmt: skip
    """Adds a page to the softmax of a block; outputs hold the sums until the last page."""
    b, j = pl.program_id(0), pl.program_id(1)
    K, page = k_ref.shape[1:3]

    @pl.when(j == 0)
    def _() -> None:
        out_ref[...] = jnp.zeros(out_ref.shape, jnp.float32)
        highest_ref[...] = jnp.full(highest_ref.shape, FLOOR, jnp.float32)
        total_ref[...] = jnp.zeros(total_ref.shape, jnp.float32)

    @pl.when(j < num_pages_ref[b])
    def _() -> None:
        limits = limits_ref[0]
        places = j * page + jax.lax.broadcasted_iota(jnp.int32, (limits.shape[0], page), 1)
        for head in range(K):
            product = jax.lax.dot_general(
                q_ref[0, head],
                k_ref[0, head],
                (((1,), (1,)), ((), ())),
                preferred_element_type=jnp.float32,
            )
            scores = jnp.where(places < limits, product * scale, LOWEST)
            highest = highest_ref[head, :, :1]
            new = jnp.maximum(highest, scores.max(axis=1, keepdims=True))
            weights, fade = jnp.exp(scores - new), jnp.exp(highest - new)
            values = v_ref[0, head]
            added = jnp.dot(
                weights.astype(values.dtype), values, preferred_element_type=jnp.float32
            )
            out_ref[0, head] = out_ref[0, head] * fade + added
            total = total_ref[head, :, :1] * fade + weights.sum(axis=1, keepdims=True)
            highest_ref[head] = jnp.broadcast_to(new, highest_ref.shape[1:])
            total_ref[head] = jnp.broadcast_to(total, total_ref.shape[1:])

    @pl.when(j == pl.num_programs(1) - 1)
    def _() -> None:
        total = jnp.where(total_ref[...] > 0, total_ref[...], 1.0)
        out_ref[0] = out_ref[0] / total[:, :, :1]
        lse_ref[0] = highest_ref[...] + jnp.log(total)

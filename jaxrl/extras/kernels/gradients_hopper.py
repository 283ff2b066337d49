"""Attention gradients on Hopper GPUs: Pallas Mosaic kernels that skip fully masked blocks.

Library kernels either process all blocks before the diagonal in the backward pass, or support only
one range of keys per query. These kernels support two ranges and skip fully masked blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as mosaic
from jaxtyping import Array, Float, Int

from jaxrl.extras.kernels.query_ends import compute_query_ends
from jaxrl.models.attention.reference import find_key_blocks

GROUPS = 2
"""Number of compute warpgroups per program. One more copies operands to shared memory."""

BLOCK = 64
"""Tokens in a block of a warpgroup, and in each block of its loop."""

TILE = GROUPS * BLOCK
"""Tokens per program; array lengths are multiples of this number."""

STAGES = 2
"""Number of pipeline stages: blocks in shared memory or in flight."""

GRID = ("tile", "row", "head")
"""Grid axes; the last varies fastest.

Programs start in grid order, one at a time per multiprocessor. Their work depends on the tile: a
segment's last queries read the most keys, and its first keys have the most queries. In rows with
one segment, the tiles with the most work start first.
"""

ROWS, COLUMNS = mosaic.Layout.WGMMA.reduce(1), mosaic.Layout.WGMMA.reduce(0)
"""Register layouts of one value per row or per column of a product."""


load: Any = mosaic.load
"""`mosaic.load`, which can be called without an index since JAX 0.11."""


def compute_attention_gradients(
    q: Float[Array, "R Q N H"],
    k: Float[Array, "R T K H"],
    v: Float[Array, "R T K H"],
    key_ranges: Int[Array, "R 3 T"],
    out: Float[Array, "R Q N H"],
    lse: Float[Array, "R N Q"],
    gradient: Float[Array, "R Q N H"],
    *,
    scale: float,
) -> tuple[Float[Array, "R Q N H"], Float[Array, "R T K H"], Float[Array, "R T K H"]]:
    """Compute the gradients of `reference.attend_packed`, accumulating in float32.

    As in `attention_gpu`, a program processes a tile of queries of one head in a loop over key
    blocks, or a tile of keys of one KV head in a loop over query blocks. The mask is computed only
    for partially masked blocks.

    Args:
        q: Queries of the last Q tokens, a multiple of `TILE`; bfloat16 or float16.
        k: Keys of all T tokens, a multiple of `TILE`.
        v: Values of all T tokens.
        key_ranges: Ranges of tokens that each token attends to; see `kernels.compute_key_ranges`.
        out: Outputs of the forward pass.
        lse: Log-sum-exp of the scores, in nats.
        gradient: Gradient of the loss with respect to `out`.
        scale: Factor by which scores are multiplied.
    """
    # For heads wider than 128, a key block's two accumulators would exceed the registers.
    (R, Q, N), (T, K) = q.shape[:3], k.shape[1:3]
    config = GradientConfig(scale=scale, first=T - Q, num_queries=Q, groups=N // K)
    # Inputs of both kernels: log-sum-exp in base 2, dot products of outputs and gradients.
    delta = jnp.einsum("rqnh,rqnh->rnq", out, gradient, preferred_element_type=jnp.float32)
    arrays = q, k, v, gradient.astype(q.dtype), lse * math.log2(math.e), delta, key_ranges[..., -Q:]
    call = partial(
        mosaic.kernel,
        grid_names=GRID,
        num_threads=GROUPS + 1,
        thread_name="group",
        compiler_params=mosaic.CompilerParams(approx_math=True),
    )
    dq = call(
        partial(_dq_kernel, config=config),
        grid=(Q // TILE, R, N),
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        scratch_types=[
            _alloc_smem(q),
            _alloc_smem(q),
            mosaic.Barrier(num_barriers=GROUPS, num_arrivals=2),
        ],
        kernel_name="attention_backward_queries",
    )(*arrays, *_find_key_blocks(key_ranges, config))
    dk, dv = call(
        partial(_dkdv_kernel, config=config),
        grid=(T // TILE, R, K),
        out_type=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (k, v)],
        scratch_types=[
            _alloc_smem(k),
            _alloc_smem(k),
            mosaic.Barrier(num_barriers=GROUPS, num_arrivals=2),
        ],
        kernel_name="attention_backward_keys",
    )(*arrays, *_find_query_blocks(key_ranges, config))
    return dq, dk, dv


@dataclass(frozen=True, kw_only=True)
class GradientConfig:
    """Compile-time parameters of the kernels."""

    scale: float
    first: int  # index of the first query among the keys, a multiple of `TILE`
    num_queries: int
    groups: int  # query heads per KV head


def _get_smem_transforms(dtype: Any) -> tuple[Any, ...]:
    """Return the shared-memory layout of the matrix units: tiles of 8 x 128 bytes."""
    return (
        mosaic.TilingTransform((8, 128 // jnp.dtype(dtype).itemsize)),
        mosaic.SwizzleTransform(128),
    )


def _alloc_smem(x: jax.Array) -> Any:
    """Allocate shared memory for one block per warpgroup."""
    shape = GROUPS, BLOCK, x.shape[-1]
    return mosaic.SMEM(shape, x.dtype, transforms=_get_smem_transforms(x.dtype))


def _find_key_blocks(key_ranges: jax.Array, config: GradientConfig) -> tuple[jax.Array, jax.Array]:
    """Find the key blocks that each query tile reads, and the blocks without a mask.

    Returns:
        `blocks`, int32 `[R, Q / TILE, 4]`: for each query tile, the first key block and number of
        key blocks of the shared prompt, the first key block of the segment, and the total number of
        key blocks. `mask_bound`, int32 `[R, Q / BLOCK]`: for each query block, the first of the
        keys before the diagonal block that need no mask, because all of its queries read them.
    """
    R = len(key_ranges)
    query_ranges = key_ranges[..., config.first :].reshape(R, 3, -1, TILE)
    indices = config.first // BLOCK + jnp.arange(config.num_queries // TILE) * GROUPS
    find = jax.vmap(jax.vmap(partial(find_key_blocks, size=BLOCK), (1, 0)), (0, None))
    shared, num_shared, segment = find(query_ranges, indices)
    count = num_shared + indices + GROUPS - segment
    mask_bound = query_ranges[:, 0].reshape(R, -1, BLOCK).max(axis=2)
    return jnp.stack([shared, num_shared, segment, count], axis=2).astype(jnp.int32), mask_bound


def _find_query_blocks(
    key_ranges: jax.Array, config: GradientConfig
) -> tuple[jax.Array, jax.Array]:
    """Find the query blocks that read each key tile, and the blocks without a mask.

    Returns:
        `blocks`, int32 `[R, T / TILE, 2]`: for each key tile, the first query block and the number
        of query blocks (at least 1). `mask_bound`, int32 `[R, T / BLOCK]`: for each key block, the
        end of the queries after the diagonal block that need no mask, because they read all of its
        keys.
    """
    R, _, T = key_ranges.shape
    ends = compute_query_ends(key_ranges)
    tiles = jnp.arange(T // TILE) * TILE
    first = jnp.maximum(tiles - config.first, 0) // BLOCK
    last = -(-(ends.reshape(R, -1, TILE).max(axis=2) - config.first) // BLOCK)
    blocks = jnp.stack(jnp.broadcast_arrays(first, jnp.maximum(last - first, 1)), axis=2)
    starts = key_ranges[:, 0].reshape(R, -1, BLOCK)
    is_single_segment = starts.max(axis=2) <= jnp.arange(0, T, BLOCK)
    mask_bound = jnp.where(is_single_segment, ends.reshape(R, -1, BLOCK).min(axis=2), 0)
    return blocks.astype(jnp.int32), mask_bound


def _make_attention_mask(
    key_ranges: Any, keys: jax.Array, queries: jax.Array, broadcast: Callable[..., Any]
) -> Any:
    starts, shared_starts, shared_ends = (broadcast(x) for x in key_ranges)
    segment = (keys >= starts) & (keys <= queries)
    return segment | ((keys >= shared_starts) & (keys < shared_ends))


def _make_positions(first: Any, shape: tuple[int, int], axis: int) -> jax.Array:
    return first + mosaic.broadcasted_iota(jnp.int32, shape, axis, layout=mosaic.Layout.WGMMA)


def _load_with_layout(ref: Any, layout: Any) -> jax.Array:
    return load(ref, layout=layout, optimized=False)


SCORES = (BLOCK, BLOCK)
"""Shape of the scores of a query block and a key block."""


def _dq_kernel(
    q_ref: Any, k_ref: Any, v_ref: Any, gradient_ref: Any, lse_ref: Any, delta_ref: Any,
    ranges_ref: Any, blocks_ref: Any, bound_ref: Any, out_ref: Any, q_smem: Any, gradient_smem: Any,
    load_barriers: Any, *, config: GradientConfig,
) -> None:  # fmt: skip
    tile_index, row, head = (jax.lax.axis_index(name) for name in GRID)
    # The last tiles start first; see `GRID`.
    tile = config.num_queries // TILE - 1 - tile_index
    group = jax.lax.axis_index("group")
    kv_head = jax.lax.div(head, jnp.int32(config.groups))
    shared, num_shared, segment, count = (blocks_ref[row, tile, i] for i in range(4))
    block_slice = pl.ds(tile * TILE + group * BLOCK, BLOCK)
    query = config.first + tile * TILE + group * BLOCK

    def get_block_index(i: Any) -> Any:
        return jnp.where(i < num_shared, shared + i, segment - num_shared + i)

    # Load the warpgroup's queries and gradients, run the pipeline, and write the result.
    def compute_warpgroup(run_pipeline: Any) -> None:
        q_block, barrier = q_smem.at[group], load_barriers.at[group]
        mosaic.copy_gmem_to_smem(q_ref.at[row, block_slice, head], q_block, barrier)
        mosaic.copy_gmem_to_smem(
            gradient_ref.at[row, block_slice, head], gradient_smem.at[group], barrier
        )
        lse, delta = (
            _load_with_layout(ref.at[row, head, block_slice], ROWS) for ref in (lse_ref, delta_ref)
        )
        mask_bound = bound_ref[row, tile * GROUPS + group]
        mosaic.barrier_wait(barrier)
        total = pl.run_scoped(
            lambda total: (run_pipeline((total, lse, delta, mask_bound)), total[...])[1],
            mosaic.ACC(q_block.shape, jnp.float32),
        )
        q_block[...] = (total * config.scale).astype(q_block.dtype)
        mosaic.commit_smem()
        mosaic.copy_smem_to_gmem(q_block, out_ref.at[row, block_slice, head])
        mosaic.wait_smem_to_gmem(0, wait_read_only=True)

    # Add the contribution of one block of keys.
    def accumulate_block(index: Any, k: Any, v: Any, k_done: Any, v_done: Any, carry: Any) -> Any:
        total, lse, delta, mask_bound = carry
        key = get_block_index(index[0]) * BLOCK

        def compute_scores(scores: Any, d_weights: Any) -> Any:
            mosaic.wgmma(d_weights, gradient_smem.at[group], v.T)
            mosaic.wgmma(scores, q_smem.at[group], k.T)
            mosaic.wgmma_wait(1)
            mosaic.barrier_arrive(v_done)
            return scores[...], d_weights[...]

        acc = mosaic.ACC(SCORES, jnp.float32)
        scores, d_weights = pl.run_scoped(compute_scores, acc, acc)

        def broadcast(x: jax.Array) -> jax.Array:
            return jax.lax.broadcast_in_dim(x, SCORES, [0])

        weights = jnp.exp2(scores * (config.scale * math.log2(math.e)) - broadcast(lse))

        def mask_weights() -> jax.Array:
            key_ranges = [
                _load_with_layout(ranges_ref.at[row, i, block_slice], ROWS) for i in range(3)
            ]
            positions = _make_positions(key, SCORES, 1), _make_positions(query, SCORES, 0)
            return jnp.where(_make_attention_mask(key_ranges, *positions, broadcast), weights, 0.0)

        # Apply the mask only to partially masked blocks.
        is_unmasked = (key >= mask_bound) & (key + BLOCK <= query)
        weights = jax.lax.cond(is_unmasked, lambda: weights, mask_weights)
        d_scores = weights * (d_weights - broadcast(delta))
        mosaic.wgmma(total, d_scores.astype(k.dtype), k)
        mosaic.wgmma_wait(0)
        mosaic.barrier_arrive(k_done)
        return total, lse, delta, mask_bound

    spec = mosaic.BlockSpec(
        (BLOCK, q_ref.shape[-1]),
        lambda i: (get_block_index(i), 0),
        transforms=_get_smem_transforms(k_ref.dtype),
    )
    mosaic.emit_pipeline_warp_specialized(
        accumulate_block,
        grid=(count,),
        in_specs=[spec, spec],
        max_concurrent_steps=STAGES,
        num_compute_wgs=GROUPS,
        memory_registers=40,
        wg_axis="group",
        manual_consumed_barriers=True,
        compute_context=compute_warpgroup,
    )(k_ref.at[row, :, kv_head], v_ref.at[row, :, kv_head])


def _dkdv_kernel(
    q_ref: Any, k_ref: Any, v_ref: Any, gradient_ref: Any, lse_ref: Any, delta_ref: Any,
    ranges_ref: Any, blocks_ref: Any, bound_ref: Any, dk_ref: Any, dv_ref: Any,
    k_smem: Any, v_smem: Any, load_barriers: Any, *, config: GradientConfig,
) -> None:  # fmt: skip
    tile, row, kv_head = (jax.lax.axis_index(name) for name in GRID)
    group = jax.lax.axis_index("group")
    first, count = blocks_ref[row, tile, 0], blocks_ref[row, tile, 1]
    key = tile * TILE + group * BLOCK
    block_slice = pl.ds(key, BLOCK)

    # Load the warpgroup's keys and values, run the pipeline, and write both gradients.
    def compute_warpgroup(run_pipeline: Any) -> None:
        keys, values, barrier = k_smem.at[group], v_smem.at[group], load_barriers.at[group]
        mosaic.copy_gmem_to_smem(k_ref.at[row, block_slice, kv_head], keys, barrier)
        mosaic.copy_gmem_to_smem(v_ref.at[row, block_slice, kv_head], values, barrier)
        mask_bound = bound_ref[row, tile * GROUPS + group]
        mosaic.barrier_wait(barrier)

        def run_with_accumulators(dk: Any, dv: Any) -> Any:
            run_pipeline((dk, dv, mask_bound))
            return dk[...], dv[...]

        acc = mosaic.ACC(keys.shape, jnp.float32)
        dk, dv = pl.run_scoped(run_with_accumulators, acc, acc)
        keys[...] = (dk * config.scale).astype(keys.dtype)
        values[...] = dv.astype(values.dtype)
        mosaic.commit_smem()
        mosaic.copy_smem_to_gmem(keys, dk_ref.at[row, block_slice, kv_head])
        mosaic.copy_smem_to_gmem(values, dv_ref.at[row, block_slice, kv_head])
        mosaic.wait_smem_to_gmem(0, wait_read_only=True)

    # Add the contribution of one block of queries of one head.
    def accumulate_block(
        index: Any, q: Any, gradient: Any, lse: Any, delta: Any, *barriers_and_carry: Any
    ) -> Any:
        q_done, gradient_done, lse_done, delta_done, carry = barriers_and_carry
        dk, dv, mask_bound = carry
        queries = (first + index[1]) * BLOCK
        query = config.first + queries

        def broadcast(x: jax.Array) -> jax.Array:
            return jax.lax.broadcast_in_dim(x, SCORES, [1])

        def compute_scores(acc: Any) -> Any:
            mosaic.wgmma(acc, k_smem.at[group], q.T)
            row_values = load(lse, layout=COLUMNS), load(delta, layout=COLUMNS)
            mosaic.barrier_arrive(lse_done)
            mosaic.barrier_arrive(delta_done)
            return acc[...], *row_values

        acc = mosaic.ACC(SCORES, jnp.float32)
        scores, sums, deltas = pl.run_scoped(compute_scores, acc)
        weights = jnp.exp2(scores * (config.scale * math.log2(math.e)) - broadcast(sums))

        def mask_weights() -> jax.Array:
            key_ranges = [
                _load_with_layout(ranges_ref.at[row, i, pl.ds(queries, BLOCK)], COLUMNS)
                for i in range(3)
            ]
            positions = _make_positions(key, SCORES, 0), _make_positions(query, SCORES, 1)
            return jnp.where(_make_attention_mask(key_ranges, *positions, broadcast), weights, 0.0)

        # Apply the mask only to partially masked blocks.
        is_unmasked = (query >= key + BLOCK) & (query + BLOCK <= mask_bound)
        weights = jax.lax.cond(is_unmasked, lambda: weights, mask_weights)

        def compute_d_weights(acc: Any) -> jax.Array:
            mosaic.wgmma(acc, v_smem.at[group], gradient.T)
            mosaic.wgmma(dv, weights.astype(gradient.dtype), gradient)
            # The second product runs while the result of the first is used.
            return mosaic.wgmma_accumulator_load(acc, wait_n=1)

        d_scores = weights * (pl.run_scoped(compute_d_weights, acc) - broadcast(deltas))
        mosaic.wgmma(dk, d_scores.astype(q.dtype), q)
        mosaic.wgmma_wait(1)
        mosaic.barrier_arrive(gradient_done)
        mosaic.wgmma_wait(0)
        mosaic.barrier_arrive(q_done)
        return dk, dv, mask_bound

    head = kv_head * config.groups
    # Each block is visited once per query head that shares the KV head.
    tokens = mosaic.BlockSpec(
        (BLOCK, None, q_ref.shape[-1]),
        lambda g, i: (first + i, head + g, 0),
        transforms=_get_smem_transforms(q_ref.dtype),
    )
    row_values = mosaic.BlockSpec((None, BLOCK), lambda g, i: (head + g, first + i))
    mosaic.emit_pipeline_warp_specialized(
        accumulate_block,
        grid=(config.groups, count),
        in_specs=[tokens, tokens, row_values, row_values],
        max_concurrent_steps=STAGES,
        num_compute_wgs=GROUPS,
        memory_registers=40,
        wg_axis="group",
        manual_consumed_barriers=True,
        compute_context=compute_warpgroup,
    )(q_ref.at[row], gradient_ref.at[row], lse_ref.at[row], delta_ref.at[row])

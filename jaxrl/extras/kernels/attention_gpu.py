"""Attention on NVIDIA GPUs: Pallas kernels for the Triton backend."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxrl.extras.kernels.query_ends import compute_query_ends
from jaxrl.models.attention.reference import (
    EMPTY_LSE,
    MASK_VALUE,
    find_key_blocks,
    group_by_kv_head,
    make_attention_mask,
    pad_to_blocks,
    ungroup_queries,
)


def attend_packed(
    q: Float[Array, "R Q N H"],
    k: Float[Array, "R T K H"],
    v: Float[Array, "R T K H"],
    key_ranges: Int[Array, "R 3 T"],
    *,
    interpret: bool = False,
) -> Float[Array, "R Q N H"]:
    """Compute `reference.attend_packed` without writing scores to memory.

    A program processes a block of queries of one head in a loop over the key blocks of a shared
    prompt and of the segment, up to the diagonal. In the backward pass, another program processes a
    block of keys of one KV head in a loop over query blocks, from the diagonal to the last query
    that reads a key. Tokens are padded to full blocks, and heads to a power of two.
    """
    Q, H = q.shape[1], q.shape[3]
    configs = KernelConfigs.select(H, q.dtype, interpret)
    q, k, v, key_ranges = pad_to_blocks(q, k, v, key_ranges, configs.forward.block)
    pad = ((0, 0), (0, 0), (0, 0), (0, pl.next_power_of_2(H) - H))
    q, k, v = (jnp.pad(x, pad) for x in (q, k, v))
    return _attend(q, k, v, key_ranges, configs)[:, :Q, :, :H]


@dataclass(frozen=True, kw_only=True)
class KernelConfig:
    """Compile-time parameters of the kernels of one pass."""

    block: int  # tokens in a program's block
    step: int  # tokens in a block of the loop, a divisor of `block`
    num_warps: int
    num_stages: int
    scale: float  # factor of the scores, including log2(e): GPUs have exp2 and log2 instructions
    interpret: bool
    first_query: int = 0  # index of the first query among the keys, a multiple of `block`

    def with_first_query(self, q: jax.Array, k: jax.Array) -> KernelConfig:
        """Return a copy with `first_query` set for queries `q` of the last tokens of `k`."""
        return replace(self, first_query=k.shape[1] - q.shape[1])

    def get_query_positions(self, index: Any, size: int) -> jax.Array:
        """Return the positions of block `index` of `size` queries."""
        return self.first_query + _make_positions(index, size)

    def build_pallas_call(self, kernel: Any, name: str, **settings: Any) -> Any:
        """Build a `pallas_call` of the kernel with these parameters."""
        return pl.pallas_call(
            partial(kernel, config=self),
            compiler_params=triton.CompilerParams(
                num_warps=self.num_warps, num_stages=self.num_stages
            ),
            interpret=self.interpret,
            name=name,
            **settings,
        )


@dataclass(frozen=True)
class KernelConfigs:
    """Parameters of the forward and the backward kernels.

    The backward block size divides the forward block size.
    """

    forward: KernelConfig
    backward: KernelConfig

    @classmethod
    def select(cls, head_dim: int, dtype: DTypeLike, interpret: bool) -> KernelConfigs:
        """Select block sizes that fit in the shared memory and registers of a Hopper GPU."""
        scale = head_dim**-0.5 * math.log2(math.e)
        make = partial(KernelConfig, num_warps=8, num_stages=2, scale=scale, interpret=interpret)
        if jnp.dtype(dtype).itemsize == 2 and head_dim <= 128:
            return cls(make(block=128, step=64), make(block=64, step=64))
        return cls(make(block=64, step=32), make(block=32, step=32))


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(
    q: jax.Array, k: jax.Array, v: jax.Array, key_ranges: jax.Array, configs: KernelConfigs
) -> jax.Array:
    return _forward(q, k, v, key_ranges, configs)[0]


def _forward(
    q: jax.Array, k: jax.Array, v: jax.Array, key_ranges: jax.Array, configs: KernelConfigs
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Return the outputs and the residuals, which contain the log-sum-exp in base 2."""
    config = configs.forward.with_first_query(q, k)
    R, Q, N, _ = q.shape
    queries, keys, tokens, lse_spec = _make_query_specs(q, k, config)
    lse = jax.ShapeDtypeStruct((R, N, Q), jnp.float32)
    out, lse = config.build_pallas_call(
        _forward_kernel,
        "attention_forward",
        grid=(Q // config.block, N, R),
        in_specs=[queries, keys, keys, tokens],
        out_specs=[queries, lse_spec],
        out_shape=[jax.ShapeDtypeStruct(q.shape, q.dtype), lse],
    )(q, k, v, key_ranges[:, :, config.first_query :])
    out, lse = checkpoint_name(out, "attended"), checkpoint_name(lse, "lse")
    return out, (q, k, v, key_ranges, out, lse)


def _make_query_specs(q: jax.Array, k: jax.Array, config: KernelConfig) -> tuple[pl.BlockSpec, ...]:
    """Return block specs for a grid over (block of queries, query head, row).

    The specs are for queries, keys (the complete row), `key_ranges` [R, 3, Q] and arrays [R, N, Q].
    """
    N, H = q.shape[2:]
    T, groups = k.shape[1], N // k.shape[2]
    return (
        pl.BlockSpec((None, config.block, None, H), lambda i, n, r: (r, i, n, 0)),
        pl.BlockSpec((None, T, None, H), lambda i, n, r: (r, 0, n // groups, 0)),
        pl.BlockSpec((None, 3, config.block), lambda i, n, r: (r, 0, i)),
        pl.BlockSpec((None, None, config.block), lambda i, n, r: (r, n, i)),
    )


def _dot(a: jax.Array, b: jax.Array, contracted: tuple[int, int]) -> jax.Array:
    """Contract one axis of each operand; float32 operands are not rounded to TF32."""
    return jax.lax.dot_general(
        a,
        b,
        (((contracted[0],), (contracted[1],)), ((), ())),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def _make_positions(index: jax.Array, size: int) -> jax.Array:
    """Return the token positions in block `index`, for blocks of `size` tokens."""
    return index * size + jnp.arange(size)


def _forward_kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    ranges_ref: Any,
    out_ref: Any,
    lse_ref: Any,
    *,
    config: KernelConfig,
) -> None:
    q = q_ref[...]
    key_ranges = _load_key_ranges(ranges_ref)
    queries = config.get_query_positions(pl.program_id(0), config.block)
    count, block_index = _find_key_blocks(key_ranges, config)

    def accumulate(i: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        highest, total, out = sums
        j = block_index(i)
        keys, block = _make_positions(j, config.step), pl.ds(j * config.step, config.step)
        mask = make_attention_mask(_reshape_to_columns(key_ranges), keys) & (
            keys <= queries[:, None]
        )
        scores = jnp.where(mask, _dot(q, k_ref[block, :], (1, 1)) * config.scale, MASK_VALUE)
        # Sums over masked blocks before a query's segment are finite; `rescale` later sets them to
        # 0.
        new_highest = jnp.maximum(highest, scores.max(axis=1))
        weights, rescale = jnp.exp2(scores - new_highest[:, None]), jnp.exp2(highest - new_highest)
        values = v_ref[block, :]
        block_out = _dot(weights.astype(values.dtype), values, (1, 0))
        return (
            new_highest,
            total * rescale + weights.sum(axis=1),
            out * rescale[:, None] + block_out,
        )

    zeros = jnp.zeros(config.block, jnp.float32)
    sums = zeros + MASK_VALUE, zeros, jnp.zeros(q.shape, jnp.float32)
    highest, total, out = jax.lax.fori_loop(0, count, accumulate, sums)
    out_ref[...] = (out / total[:, None]).astype(out_ref.dtype)
    lse_ref[...] = highest + jnp.log2(total)


KeyRanges = tuple[jax.Array, ...]
"""The three rows of `kernels.compute_key_ranges`, for the tokens of a block."""


def _load_key_ranges(ref: Any, block: Any = slice(None)) -> KeyRanges:
    return tuple(ref[number, block] for number in range(3))


def _reshape_to_columns(key_ranges: KeyRanges) -> KeyRanges:
    return tuple(x[:, None] for x in key_ranges)


def _find_key_blocks(
    key_ranges: KeyRanges, config: KernelConfig
) -> tuple[jax.Array, Callable[[jax.Array], jax.Array]]:
    """Find the key blocks that a program reads.

    Returns:
        The number of blocks, and a function that maps a loop index to a block index.
    """
    first = config.first_query // config.step + pl.program_id(0) * (config.block // config.step)
    shared, num_shared, segment = find_key_blocks(key_ranges, first, config.step)
    count = num_shared + first + config.block // config.step - segment
    return count, lambda i: jnp.where(i < num_shared, shared + i, segment - num_shared + i)


def _backward(
    configs: KernelConfigs, residuals: tuple[jax.Array, ...], gradient: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    q, k, v, key_ranges, out, lse = residuals
    config = configs.backward.with_first_query(q, k)
    (R, Q, N, H), (T, K) = q.shape, k.shape[1:3]
    query_ranges = key_ranges[:, :, config.first_query :]
    delta = (out.astype(jnp.float32) * gradient.astype(jnp.float32)).sum(axis=-1).swapaxes(1, 2)
    queries, keys, tokens, lse_spec = _make_query_specs(q, k, config)
    dq = config.build_pallas_call(
        _dq_kernel,
        "attention_backward_queries",
        grid=(Q // config.block, N, R),
        in_specs=[queries, keys, keys, tokens, queries, lse_spec, lse_spec],
        out_specs=queries,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
    )(q, k, v, query_ranges, gradient, lse, delta)
    block = pl.BlockSpec((None, config.block, None, H), lambda j, k, r: (r, j, k, 0))
    tokens = pl.BlockSpec((None, config.block), lambda j, k, r: (r, j))
    heads = pl.BlockSpec((None, Q, N // K, H), lambda j, k, r: (r, 0, k, 0))
    lse_spec = pl.BlockSpec((None, N // K, Q), lambda j, k, r: (r, k, 0))
    row = pl.BlockSpec((None, 3, Q), lambda j, k, r: (r, 0, 0))
    dk, dv = config.build_pallas_call(
        _dkdv_kernel,
        "attention_backward_keys",
        grid=(T // config.block, K, R),
        in_specs=[heads, block, block, row, tokens, heads, lse_spec, lse_spec],
        out_specs=[block, block],
        out_shape=[jax.ShapeDtypeStruct(k.shape, k.dtype), jax.ShapeDtypeStruct(v.shape, v.dtype)],
    )(q, k, v, query_ranges, compute_query_ends(key_ranges), gradient, lse, delta)
    return dq, dk, dv, None


def _dq_kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    ranges_ref: Any,
    gradient_ref: Any,
    lse_ref: Any,
    delta_ref: Any,
    out_ref: Any,
    *,
    config: KernelConfig,
) -> None:
    q = q_ref[...]
    key_ranges = _load_key_ranges(ranges_ref)
    queries = config.get_query_positions(pl.program_id(0), config.block)
    gradient, lse, delta = gradient_ref[...], lse_ref[...], delta_ref[...]
    count, block_index = _find_key_blocks(key_ranges, config)

    def accumulate(i: jax.Array, total: jax.Array) -> jax.Array:
        j = block_index(i)
        keys, block = _make_positions(j, config.step), pl.ds(j * config.step, config.step)
        k = k_ref[block, :]
        mask = make_attention_mask(_reshape_to_columns(key_ranges), keys) & (
            keys <= queries[:, None]
        )
        scores = jnp.where(mask, _dot(q, k, (1, 1)) * config.scale, MASK_VALUE)
        d_weights = _dot(gradient, v_ref[block, :], (1, 1))
        d_scores = jnp.exp2(scores - lse[:, None]) * (d_weights - delta[:, None])
        return total + _dot(d_scores.astype(k.dtype), k, (1, 0))

    total = jax.lax.fori_loop(0, count, accumulate, jnp.zeros(q.shape, jnp.float32))
    # `config.scale` includes the base-2 conversion, which the gradient must not.
    out_ref[...] = (total * (config.scale * math.log(2))).astype(out_ref.dtype)


def _dkdv_kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    ranges_ref: Any,
    ends_ref: Any,
    gradient_ref: Any,
    lse_ref: Any,
    delta_ref: Any,
    dk_ref: Any,
    dv_ref: Any,
    *,
    config: KernelConfig,
) -> None:
    k, v, keys = k_ref[...], v_ref[...], _make_positions(pl.program_id(0), config.block)
    # Query blocks are numbered from the first query, which may follow these keys.
    before = config.first_query // config.step
    first = jnp.maximum(pl.program_id(0) * (config.block // config.step) - before, 0)
    count = jnp.maximum(pl.cdiv(ends_ref[...].max(), config.step) - before - first, 0)

    def accumulate(
        index: jax.Array, sums: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        head, i = index // count, first + index % count
        queries = config.get_query_positions(i, config.step)
        block = pl.ds(i * config.step, config.step)
        q, gradient = q_ref[block, head, :], gradient_ref[block, head, :]
        # Scores are transposed (keys by queries), so that neither sum needs a transpose.
        key_ranges = _load_key_ranges(ranges_ref, block)
        mask = make_attention_mask(key_ranges, keys[:, None]) & (keys[:, None] <= queries)
        scores = jnp.where(mask, _dot(k, q, (1, 1)) * config.scale, MASK_VALUE)
        weights = jnp.exp2(scores - lse_ref[head, block])
        d_scores = weights * (_dot(v, gradient, (1, 1)) - delta_ref[head, block])
        dk, dv = sums
        dk += _dot(d_scores.astype(q.dtype), q, (1, 0))
        return dk, dv + _dot(weights.astype(gradient.dtype), gradient, (1, 0))

    zeros = jnp.zeros(k.shape, jnp.float32)
    dk, dv = jax.lax.fori_loop(0, q_ref.shape[1] * count, accumulate, (zeros, zeros))
    dk_ref[...] = (dk * (config.scale * math.log(2))).astype(dk_ref.dtype)
    dv_ref[...] = dv.astype(dv_ref.dtype)


_attend.defvjp(_forward, _backward)


MAX_ROWS = 128
"""Maximum query rows of a paged program, limited by the registers for accumulators."""


def attend_pages(
    q: Float[Array, "B Q N H"],
    keys: Float[Array, "P K page H"],
    values: Float[Array, "P K page H"],
    tables: Int[Array, "B M"],
    limits: Int[Array, "B Q"],
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "B Q N H"], Float[Array, "B Q N"]]:
    """Compute `reference.attend_pages` without reading pages beyond a block's highest limit.

    A program processes up to `MAX_ROWS` queries of a block for one KV head, padded to the minimum
    tile, in a loop over the pages of the block table. Head sizes that are not powers of two are
    split into power-of-two parts, which costs less than a padded copy of the pages.
    """
    B, Q, N, H = q.shape
    P, K, page, _ = keys.shape
    grouped_q, row_limits = group_by_kv_head(q, limits, K, pl.next_power_of_2(max(Q * N // K, 16)))
    rows = min(grouped_q.shape[2], MAX_ROWS)
    pages = pl.BlockSpec((P, None, page, H), lambda b, k, i: (0, k, 0, 0))
    queries = pl.BlockSpec((None, None, rows, H), lambda b, k, i: (b, k, i, 0))
    out, lse = pl.pallas_call(
        partial(_pages_kernel, scale=H**-0.5 * math.log2(math.e)),
        grid=(B, K, grouped_q.shape[2] // rows),
        in_specs=[
            queries,
            pages,
            pages,
            pl.BlockSpec((None, tables.shape[1]), lambda b, k, i: (b, 0)),
            pl.BlockSpec((None, rows), lambda b, k, i: (b, i)),
        ],
        out_specs=[queries, pl.BlockSpec((None, None, rows), lambda b, k, i: (b, k, i))],
        out_shape=[
            jax.ShapeDtypeStruct(grouped_q.shape, jnp.float32),
            jax.ShapeDtypeStruct(grouped_q.shape[:3], jnp.float32),
        ],
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="attention_pages",
    )(grouped_q, keys, values, tables, row_limits)
    return ungroup_queries(out, lse, q.shape)


def _pages_kernel(
    q_ref: Any, k_ref: Any, v_ref: Any, tables_ref: Any, limits_ref: Any, out_ref: Any,
    lse_ref: Any, *, scale: float,
) -> None:  # fmt: skip
    page, limits = k_ref.shape[1], limits_ref[...]
    parts = _split_into_powers_of_two(q_ref.shape[1])
    queries = [q_ref[:, part] for part in parts]

    def accumulate(j: jax.Array, sums: tuple[Any, ...]) -> tuple[Any, ...]:
        highest, total, out = sums
        page_id, attention_mask = tables_ref[j], _make_positions(j, page) < limits[:, None]
        products = [
            _dot(q, k_ref[page_id, :, part], (1, 1)) for q, part in zip(queries, parts, strict=True)
        ]
        scores = jnp.where(attention_mask, sum(products[1:], products[0]) * scale, MASK_VALUE)
        new_highest = jnp.maximum(highest, scores.max(axis=1))
        weights, rescale = jnp.exp2(scores - new_highest[:, None]), jnp.exp2(highest - new_highest)
        out = tuple(
            x * rescale[:, None]
            + _dot(weights.astype(v_ref.dtype), v_ref[page_id, :, part], (1, 0))
            for x, part in zip(out, parts, strict=True)
        )
        return new_highest, total * rescale + weights.sum(axis=1), out

    zeros = jnp.zeros(limits.shape, jnp.float32)
    outs = tuple(jnp.zeros(x.shape, jnp.float32) for x in queries)
    sums = zeros + EMPTY_LSE, zeros, outs
    highest, total, outs = jax.lax.fori_loop(0, count_live_pages(limits, page), accumulate, sums)
    total = jnp.where(total > 0, total, 1.0)
    for x, part in zip(outs, parts, strict=True):
        out_ref[:, part] = x / total[:, None]
    lse_ref[...] = (highest + jnp.log2(total)) * math.log(2)


def count_live_pages(limits: jax.Array, page: int) -> jax.Array:
    """Return the number of leading block-table pages that a program reads."""
    return (limits.max() + page - 1) // page


def _split_into_powers_of_two(size: int) -> list[Any]:
    """Partition `size` values into slices of power-of-two lengths, longest first."""
    starts, lengths = [], [1 << bit for bit in range(size.bit_length()) if size >> bit & 1][::-1]
    for index in range(len(lengths)):
        starts.append(sum(lengths[:index]))
    return [pl.ds(start, length) for start, length in zip(starts, lengths, strict=True)]

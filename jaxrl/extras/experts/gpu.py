"""Grouped matmul on NVIDIA GPUs: sorted rows times the weights of their groups.

The Pallas kernels use the Triton backend. The host does not know the group sizes, so it launches
the maximum number of programs; programs without rows exit immediately.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxrl.extras.experts.products import (
    choose_tile_rows,
    cumsum,
    make_grouped_matmul,
    split_into_tiles,
)

MIN_TILE = 16
"""Minimum tile size of the tensor cores along each axis, to which arrays are padded."""


def grouped_matmul(
    rows: Float[Array, "A D"],
    weights: Float[Array, "G D F"],
    sizes: Int[Array, " G"],
    *,
    interpret: bool = False,
) -> Float[Array, "A F"]:
    """Implement `GroupedMatmul` with forward and backward kernels, accumulating in float32.

    Widths that are not multiples of 16 are padded, which copies the weights.
    """
    F = weights.shape[-1]
    rows = jnp.pad(rows, ((0, 0), (0, -rows.shape[-1] % MIN_TILE)))
    weights = jnp.pad(weights, ((0, 0), *((0, -size % MIN_TILE) for size in weights.shape[1:])))
    product = make_grouped_matmul(_multiply_tiles, _compute_weight_gradient, interpret=interpret)
    return product(rows, weights, sizes)[:, :F]


@dataclass(frozen=True, kw_only=True)
class BlockSizes:
    """Block sizes that let three pipeline stages fit in the shared memory of Ampere GPUs."""

    rows: int
    columns: int
    inner: int  # along the contracted axis

    @classmethod
    def select(cls, rows: int, columns: int, inner: int, dtype: DTypeLike) -> BlockSizes:
        """Select for each axis the largest power of two that divides it, up to a limit."""
        is_short = jnp.dtype(dtype).itemsize == 2
        limit, inner_limit = (128, 64) if is_short else (64, 32)
        return cls(
            rows=min(rows & -rows, limit),
            columns=min(columns & -columns, limit),
            inner=min(inner & -inner, inner_limit),
        )

    @property
    def compiler_params(self) -> triton.CompilerParams:
        """Compiler settings with enough warps to hold the output in registers."""
        num_warps = 8 if self.rows * self.columns >= 128 * 128 else 4
        return triton.CompilerParams(num_warps=num_warps, num_stages=3)


def _multiply_tiles(
    rows: jax.Array, weights: jax.Array, sizes: jax.Array, *, interpret: bool, is_transposed: bool
) -> jax.Array:
    """Multiply rows by the weights of their group, or by the transposed weights.

    Each program computes one output block for a tile of rows of one group.
    """
    (A, inner), (G, *shape) = rows.shape, weights.shape
    columns = shape[0 if is_transposed else 1]
    blocks = BlockSizes.select(
        choose_tile_rows(A, G, min_rows=MIN_TILE), columns, inner, rows.dtype
    )
    tiles = split_into_tiles(sizes, A, blocks.rows)
    if is_transposed:
        weights_spec = pl.BlockSpec((G, blocks.columns, inner), lambda c, t: (0, c, 0))
    else:
        weights_spec = pl.BlockSpec((G, inner, blocks.columns), lambda c, t: (0, 0, c))
    tile_spec = pl.BlockSpec(tiles.start.shape, lambda c, t: (0,))
    return pl.pallas_call(
        partial(_grouped_matmul_kernel, blocks=blocks, is_transposed=is_transposed),
        grid=(columns // blocks.columns, len(tiles.start)),
        in_specs=[
            tile_spec,
            tile_spec,
            tile_spec,
            pl.BlockSpec(rows.shape, lambda c, t: (0, 0)),
            weights_spec,
        ],
        out_specs=pl.BlockSpec((A, blocks.columns), lambda c, t: (0, c)),
        out_shape=jax.ShapeDtypeStruct((A, columns), rows.dtype),
        compiler_params=blocks.compiler_params,
        interpret=interpret,
        name="experts_rows_backward" if is_transposed else "experts_rows",
    )(tiles.start, tiles.group, tiles.size, rows, weights)


def _grouped_matmul_kernel(
    starts_ref: Any, groups_ref: Any, sizes_ref: Any, rows_ref: Any, weights_ref: Any,
    out_ref: Any, *, blocks: BlockSizes, is_transposed: bool,
) -> None:  # fmt: skip
    tile = pl.program_id(1)
    start, group, size = starts_ref[tile], groups_ref[tile], sizes_ref[tile]
    row_slice = pl.ds(start, blocks.rows)
    is_in_group = (jnp.arange(blocks.rows) < size)[:, None]

    def add(step: jax.Array, total: jax.Array) -> jax.Array:
        inner = pl.ds(step * blocks.inner, blocks.inner)
        x = triton.load(rows_ref.at[row_slice, inner], mask=is_in_group, other=0.0)
        if is_transposed:
            return total + _dot(x, weights_ref[group, :, inner], (1, 1))
        return total + _dot(x, weights_ref[group, inner, :], (1, 0))

    @pl.when(size > 0)
    def _() -> None:
        total = jnp.zeros((blocks.rows, blocks.columns), jnp.float32)
        total = jax.lax.fori_loop(0, rows_ref.shape[1] // blocks.inner, add, total)
        triton.store(out_ref.at[row_slice, :], total.astype(out_ref.dtype), mask=is_in_group)


def _compute_weight_gradient(
    rows: jax.Array, gradient: jax.Array, sizes: jax.Array, dtype: DTypeLike, *, interpret: bool
) -> jax.Array:
    """Compute the gradient of the weights; 0 for a group without rows.

    Each program computes a block of a group's gradient in a loop over the group's rows. The order
    of summation is therefore fixed, and the block is written once.
    """
    (A, D), F, G = rows.shape, gradient.shape[1], len(sizes)
    blocks = BlockSizes.select(D, F, 64, rows.dtype)
    group_spec = pl.BlockSpec((G,), lambda c, d, g: (0,))
    return pl.pallas_call(
        partial(_weight_gradient_kernel, blocks=blocks),
        grid=(F // blocks.columns, D // blocks.rows, G),
        in_specs=[
            group_spec,
            group_spec,
            pl.BlockSpec((A, blocks.rows), lambda c, d, g: (0, d)),
            pl.BlockSpec((A, blocks.columns), lambda c, d, g: (0, c)),
        ],
        out_specs=pl.BlockSpec((None, blocks.rows, blocks.columns), lambda c, d, g: (g, d, c)),
        out_shape=jax.ShapeDtypeStruct((G, D, F), dtype),
        compiler_params=blocks.compiler_params,
        interpret=interpret,
        name="experts_weights_backward",
    )(cumsum(sizes) - sizes, sizes, rows, gradient)


def _weight_gradient_kernel(
    starts_ref: Any, sizes_ref: Any, rows_ref: Any, gradient_ref: Any, out_ref: Any,
    *, blocks: BlockSizes,
) -> None:  # fmt: skip
    group = pl.program_id(2)
    start, size = starts_ref[group], sizes_ref[group]

    def add(step: jax.Array, total: jax.Array) -> jax.Array:
        first = step * blocks.inner
        row_slice = pl.ds(start + first, blocks.inner)
        is_in_group = (first + jnp.arange(blocks.inner) < size)[:, None]
        x, dy = (
            triton.load(ref.at[row_slice, :], mask=is_in_group, other=0.0)
            for ref in (rows_ref, gradient_ref)
        )
        return total + _dot(x, dy, (0, 0))

    total = jnp.zeros((blocks.rows, blocks.columns), jnp.float32)
    num_steps = (size + blocks.inner - 1) // blocks.inner
    out_ref[...] = jax.lax.fori_loop(0, num_steps, add, total).astype(out_ref.dtype)


def _dot(a: jax.Array, b: jax.Array, contracted: tuple[int, int]) -> jax.Array:
    """Contract one axis of each operand; float32 operands are not rounded to TF32."""
    return jax.lax.dot_general(
        a,
        b,
        (((contracted[0],), (contracted[1],)), ((), ())),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )

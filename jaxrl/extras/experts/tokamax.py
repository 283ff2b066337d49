"""Grouped matmul on Hopper GPUs, with Mosaic kernels from tokamax and JAX.

The forward pass and input gradients use tokamax. The weight gradient uses JAX, because tokamax's
kernel takes five times as long as a Triton kernel on an H100, according to timings shipped with
tokamax 0.0.17.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxrl.extras.experts.products import make_grouped_matmul
from jaxrl.models.kernel_check import import_tokamax

ROW_MULTIPLE = 8
"""Multiple to which rows are padded, the granularity of copies to shared memory."""

WIDTH_MULTIPLE = 64
"""Multiple to which widths are padded; padding copies the weights."""

TILE = 128
"""Multiple to which both widths are padded for the weight gradient."""


def grouped_matmul(
    rows: Float[Array, "A D"],
    weights: Float[Array, "G D F"],
    sizes: Int[Array, " G"],
    *,
    interpret: bool = False,
) -> Float[Array, "A F"]:
    """Implement `GroupedMatmul` with forward and backward kernels, accumulating in float32.

    Args:
        rows: Rows sorted by group.
        weights: Weights of each group.
        sizes: Number of rows of each group.
        interpret: True to use `jax.lax.ragged_dot` instead of the kernels, for tests.

    Raises:
        ImportError: tokamax is not installed, or has an unsupported version.
    """
    (A, D), F = rows.shape, weights.shape[2]
    rows = jnp.pad(rows, ((0, -A % ROW_MULTIPLE), (0, -D % WIDTH_MULTIPLE)))
    weights = jnp.pad(weights, ((0, 0), (0, -D % WIDTH_MULTIPLE), (0, -F % WIDTH_MULTIPLE)))
    product = make_grouped_matmul(_multiply_rows, _compute_weight_gradient, interpret=interpret)
    return product(rows, weights, sizes)[:A, :F]


def _multiply_rows(
    rows: jax.Array, weights: jax.Array, sizes: jax.Array, *, interpret: bool, is_transposed: bool
) -> jax.Array:
    """Multiply rows by the weights of their group, or by the transposed weights."""
    contracted = 2 if is_transposed else 1
    dimension_numbers = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(([1], [contracted]), ([], [])),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[0],
    )
    if interpret:
        summed = jax.lax.ragged_dot_general(
            rows, weights, sizes, dimension_numbers, preferred_element_type=jnp.float32
        )
        return summed.astype(rows.dtype)
    multiply = import_tokamax("ragged_dot.pallas_mosaic_gpu").PallasMosaicGpuRaggedDot(
        config=_make_kernel_config(len(rows) // len(weights))
    )
    product: jax.Array = multiply(
        rows, weights, group_sizes=sizes, ragged_dot_dimension_numbers=dimension_numbers
    )
    return product


def _make_kernel_config(rows_per_group: int) -> Any:
    """Return the fastest block sizes for these group sizes, by tokamax's H100 timings.

    If groups fill tiles, each program loops over several tiles; otherwise, each tile has its own
    program.
    """
    kernels = import_tokamax("ragged_dot.pallas_mosaic_gpu")
    has_tiles = rows_per_group >= 128
    return kernels.Config(
        block_m=128 if has_tiles else 64,
        block_n=64,
        block_k=128,
        num_stages=4,
        split_k=1,
        persistent=has_tiles,
        grid_minor_dim=kernels.common.MatmulDimension.N,
        grid_tile_width=8,
    )


def _compute_weight_gradient(
    rows: jax.Array, gradient: jax.Array, sizes: jax.Array, dtype: DTypeLike, *, interpret: bool
) -> jax.Array:
    """Compute the gradient of the weights; 0 for a group without rows."""
    # In the first and last block of a group, the kernel multiplies rows of other groups by 0, so
    # these rows must be finite.
    is_filled = (jnp.arange(len(rows)) < sizes.sum())[:, None]
    rows, gradient = (jnp.where(is_filled, x, 0) for x in (rows, gradient))
    if interpret:
        dimension_numbers = jax.lax.RaggedDotDimensionNumbers(
            dot_dimension_numbers=(([0], [0]), ([], [])),
            lhs_ragged_dimensions=[0],
            rhs_group_dimensions=[],
        )
        summed = jax.lax.ragged_dot_general(
            rows, gradient, sizes, dimension_numbers, preferred_element_type=jnp.float32
        )
        return summed.astype(rows.dtype).astype(dtype)
    # Import lazily: this module imports JAX modules for tests.
    from jax.experimental.pallas.ops.gpu import transposed_ragged_dot_mgpu

    D, F = rows.shape[1], gradient.shape[1]
    padded = (jnp.pad(x, ((0, 0), (0, -x.shape[1] % TILE))) for x in (rows, gradient))
    blocks = transposed_ragged_dot_mgpu.transposed_ragged_dot(
        *padded,
        group_sizes=sizes,
        block_m=TILE,
        block_n=TILE,
        block_k=64,
        max_concurrent_steps=4,
        # The data that the tiles of a group read fits in the L2 cache, so plain order is 6 to 8%
        # faster than snaking (measured in https://github.com/marin-community/marin/pull/6880).
        grid_block_n=1,
    )
    return blocks[:, :D, :F].astype(dtype)

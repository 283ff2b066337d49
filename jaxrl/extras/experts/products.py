"""Grouped matmul in XLA: sorted rows times the weights of their groups.

On CPUs and CUDA, `jax.lax.ragged_dot` multiplies every row by the weights of every group and
allocates an array of rows x groups x width. This implementation multiplies one tile of rows at a
time by the weights of the tile's group, so the cost is proportional to the number of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

GroupedMatmul = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""Function of rows `[A, D]` sorted by group, weights `[G, D, F]` and group sizes `[G]`.

The result is `[A, F]`. The sizes add up to at most A. Results and gradients of rows beyond all
groups are unspecified; these rows do not contribute to the gradient of the weights.
"""

MAX_TILE = 128
"""Maximum rows per tile. Larger tiles are mostly padding if groups are small."""


class Tiles(NamedTuple):
    """Tiles of rows, each within a group. Unused tiles come last and start after all rows."""

    start: jax.Array  # int32 [T]
    group: jax.Array  # int32 [T]
    size: jax.Array  # int32 [T], number of rows
    num_tiles: jax.Array  # int32 scalar


def choose_tile_rows(num_rows: int, num_groups: int, *, min_rows: int = 8) -> int:
    """Return the number of rows per tile: the mean group size, rounded up to a power of two.

    The result is at least `min_rows` and at most `MAX_TILE`.
    """
    return min(max(1 << max(num_rows // num_groups - 1, 0).bit_length(), min_rows), MAX_TILE)


def count_at_most(ordered: Int[Array, " A"], values: Int[Array, " G"]) -> Int[Array, " G"]:
    """For each value, count the sorted numbers that are at most as large.

    The search is unrolled because a GPU launches a kernel per loop iteration.
    """
    counts = jnp.searchsorted(ordered, values, side="right", method="scan_unrolled")
    return counts.astype(jnp.int32)


def cumsum(sizes: Int[Array, " G"]) -> Int[Array, " G"]:
    """Compute cumulative sums without a loop, unlike `jnp.cumsum` in JAX 0.12."""
    return jax.lax.associative_scan(jnp.add, sizes)


def split_into_tiles(sizes: Int[Array, " G"], num_rows: int, tile: int) -> Tiles:
    """Split groups with at most `num_rows` rows in total into tiles of `tile` rows."""
    max_nonempty = min(num_rows, len(sizes))  # maximum number of nonempty groups
    max_tiles = max_nonempty + (num_rows - max_nonempty) // tile
    tiles_per_group = -(-sizes // tile)
    ends = cumsum(tiles_per_group)
    tile_ids = jnp.arange(max_tiles)
    group = count_at_most(ends, tile_ids)
    group = jnp.minimum(group, len(sizes) - 1)
    offset = (tile_ids - (ends - tiles_per_group)[group]) * tile
    is_used = tile_ids < ends[-1]
    start = jnp.where(is_used, (cumsum(sizes) - sizes)[group] + offset, num_rows)
    size = jnp.where(is_used, jnp.clip(sizes[group] - offset, 0, tile), 0)
    return Tiles(start.astype(jnp.int32), group, size.astype(jnp.int32), ends[-1])


def grouped_matmul(
    rows: Float[Array, "A D"], weights: Float[Array, "G D F"], sizes: Int[Array, " G"]
) -> Float[Array, "A F"]:
    """Implement `GroupedMatmul` with a loop over nonempty tiles, accumulating in float32."""
    return make_grouped_matmul(_multiply_tiles, _compute_weight_gradient, has_static_length=False)(
        rows, weights, sizes
    )


def grouped_matmul_static(
    rows: Float[Array, "A D"], weights: Float[Array, "G D F"], sizes: Int[Array, " G"]
) -> Float[Array, "A F"]:
    """Implement `GroupedMatmul` with a fixed-length loop, which does not wait for the host."""
    return make_grouped_matmul(_multiply_tiles, _compute_weight_gradient, has_static_length=True)(
        rows, weights, sizes
    )


def make_grouped_matmul(
    multiply: Callable[..., Any], weights_gradient: Callable[..., Any], **settings: bool
) -> GroupedMatmul:
    """Build a differentiable `GroupedMatmul` from two kernels.

    Args:
        multiply: Function of rows, weights and sizes. `is_transposed=True` transposes the weights.
        weights_gradient: Function of rows, output gradient, sizes and a dtype that returns the
            gradient of the weights: for each group, the sum of outer products over its rows.
        settings: Additional keyword arguments of both functions.
    """
    multiply = partial(multiply, **settings)
    weights_gradient = partial(weights_gradient, **settings)

    @jax.custom_vjp
    def matmul(rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
        result: jax.Array = multiply(rows, weights, sizes, is_transposed=False)
        return result

    def forward(rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> tuple[jax.Array, Any]:
        return matmul(rows, weights, sizes), (rows, weights, sizes)

    def backward(saved: Any, gradient: jax.Array) -> tuple[jax.Array, jax.Array, None]:
        rows, weights, sizes = saved
        gradient = gradient.astype(rows.dtype)
        drows = multiply(gradient, weights, sizes, is_transposed=True)
        return drows, weights_gradient(rows, gradient, sizes, weights.dtype), None

    matmul.defvjp(forward, backward)
    return matmul


def _multiply_tiles(
    rows: jax.Array,
    weights: jax.Array,
    sizes: jax.Array,
    *,
    has_static_length: bool,
    is_transposed: bool,
) -> jax.Array:
    """Multiply rows by the weights of their group, or by the transposed weights."""
    tile = choose_tile_rows(len(rows), len(weights))
    tiles = split_into_tiles(sizes, len(rows), tile)
    padded = jnp.pad(rows, ((0, tile), (0, 0)))
    width = weights.shape[1 if is_transposed else 2]
    axes = "af,df->ad" if is_transposed else "ad,df->af"

    def step(index: jax.Array, out: jax.Array) -> jax.Array:
        block = jax.lax.dynamic_slice_in_dim(padded, tiles.start[index], tile)
        group_weights = jax.lax.dynamic_index_in_dim(weights, tiles.group[index], keepdims=False)
        product = jnp.einsum(axes, block, group_weights, preferred_element_type=jnp.float32)
        # Results for rows after the group are overwritten by the next group's tiles.
        return jax.lax.dynamic_update_slice_in_dim(
            out, product.astype(out.dtype), tiles.start[index], axis=0
        )

    out = jnp.zeros((len(padded), width), rows.dtype)
    length = len(tiles.start) if has_static_length else tiles.num_tiles
    return jax.lax.fori_loop(0, length, step, out)[: len(rows)]


def _compute_weight_gradient(
    rows: jax.Array,
    gradient: jax.Array,
    sizes: jax.Array,
    dtype: DTypeLike,
    *,
    has_static_length: bool,
) -> jax.Array:
    """Compute the gradient of the weights, accumulating in float32."""
    tile = choose_tile_rows(len(rows), len(sizes))
    tiles = split_into_tiles(sizes, len(rows), tile)
    padded, gradient = (jnp.pad(x, ((0, tile), (0, 0))) for x in (rows, gradient))

    def step(index: jax.Array, total: jax.Array) -> jax.Array:
        is_in_group = (jnp.arange(tile) < tiles.size[index])[:, None]
        block, gradient_block = (
            jnp.where(is_in_group, jax.lax.dynamic_slice_in_dim(x, tiles.start[index], tile), 0)
            for x in (padded, gradient)
        )
        update = jnp.einsum("ad,af->df", block, gradient_block, preferred_element_type=jnp.float32)
        group = tiles.group[index]
        update += jax.lax.dynamic_index_in_dim(total, group, keepdims=False)
        return jax.lax.dynamic_update_index_in_dim(total, update, group, axis=0)

    total = jnp.zeros((len(sizes), rows.shape[1], gradient.shape[1]), jnp.float32)
    length = len(tiles.start) if has_static_length else tiles.num_tiles
    return jax.lax.fori_loop(0, length, step, total).astype(dtype)

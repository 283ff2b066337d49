"""Grouped matrix products in XLA: sorted rows times the weights of their groups.

`jax.lax.ragged_dot` computes the same, but on CPUs and CUDA it multiplies every row with every
group's weights, through an array of rows x groups x width. The loop here multiplies one tile of
rows at a time with its group's weights, so the cost is proportional to the rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

Product = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""Function from rows `[A, D]`, sorted by group, weights `[G, D, F]` and sizes `[G]` to `[A, F]`.

The groups' sizes add up to at most A. Results and gradients of rows beyond the groups are
unspecified; these rows do not contribute to the gradient of the weights.
"""

MAX_TILE = 128
"""Maximum rows of a tile: larger tiles are mostly padding if groups are small."""


class Tiles(NamedTuple):
    """Runs of rows of one group each; only the first `number` exist, others start past all rows."""

    start: jax.Array  # int32 [T]
    group: jax.Array  # int32 [T]
    size: jax.Array  # int32 [T], at most the rows of a tile
    number: jax.Array  # int32 scalar


def tile_rows(num_rows: int, num_groups: int, *, least: int = 8) -> int:
    """Return the rows of a tile: about a group's, a power of two from `least` to `MAX_TILE`."""
    return min(max(1 << max(num_rows // num_groups - 1, 0).bit_length(), least), MAX_TILE)


def count_up_to(ordered: Int[Array, " A"], values: Int[Array, " G"]) -> Int[Array, " G"]:
    """Count the sorted numbers that are at most each value.

    Unrolled, because a GPU would launch every iteration of a loop, in every layer.
    """
    counts = jnp.searchsorted(ordered, values, side="right", method="scan_unrolled")
    return counts.astype(jnp.int32)


def sum_up(sizes: Int[Array, " G"]) -> Int[Array, " G"]:
    """Compute cumulative sums without a loop; JAX 0.12 lowers `jnp.cumsum` to one."""
    return jax.lax.associative_scan(jnp.add, sizes)


def find_tiles(sizes: Int[Array, " G"], num_rows: int, tile: int) -> Tiles:
    """Compute the tiles of groups with these sizes, `num_rows` rows at most in total."""
    filled = min(num_rows, len(sizes))  # maximum number of nonempty groups
    most = filled + (num_rows - filled) // tile
    needed = -(-sizes // tile)
    ends = sum_up(needed)
    numbers = jnp.arange(most)
    group = count_up_to(ends, numbers)
    group = jnp.minimum(group, len(sizes) - 1)
    inside = (numbers - (ends - needed)[group]) * tile
    exists = numbers < ends[-1]
    start = jnp.where(exists, (sum_up(sizes) - sizes)[group] + inside, num_rows)
    size = jnp.where(exists, jnp.clip(sizes[group] - inside, 0, tile), 0)
    return Tiles(start.astype(jnp.int32), group, size.astype(jnp.int32), ends[-1])


def grouped_product(
    rows: Float[Array, "A D"], weights: Float[Array, "G D F"], sizes: Int[Array, " G"]
) -> Float[Array, "A F"]:
    """Compute a `Product` in a loop over the existing tiles; float32 sums."""
    return differentiable(_by_tiles, _of_weights, has_known_length=False)(rows, weights, sizes)


def grouped_product_of_known_length(
    rows: Float[Array, "A D"], weights: Float[Array, "G D F"], sizes: Int[Array, " G"]
) -> Float[Array, "A F"]:
    """Compute a `Product` in a loop of the maximum length, without host sync; float32 sums."""
    return differentiable(_by_tiles, _of_weights, has_known_length=True)(rows, weights, sizes)


def differentiable(
    multiply: Callable[..., Any], sum_outer: Callable[..., Any], **settings: bool
) -> Product:
    """Build a differentiable `Product` from two kernels.

    Args:
        multiply: Function of rows, weights and sizes. With `is_transposed=True` it multiplies by
            the transposes of the weights.
        sum_outer: Function of rows, the product's gradient, sizes and a dtype. It returns the
            gradient of the weights: for each group the sum of outer products of its rows.
        settings: Further keyword arguments of both functions.
    """
    multiply, sum_outer = partial(multiply, **settings), partial(sum_outer, **settings)

    @jax.custom_vjp
    def product(rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
        result: jax.Array = multiply(rows, weights, sizes, is_transposed=False)
        return result

    def forward(rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> tuple[jax.Array, Any]:
        return product(rows, weights, sizes), (rows, weights, sizes)

    def backward(saved: Any, gradient: jax.Array) -> tuple[jax.Array, jax.Array, None]:
        rows, weights, sizes = saved
        gradient = gradient.astype(rows.dtype)
        of_rows = multiply(gradient, weights, sizes, is_transposed=True)
        return of_rows, sum_outer(rows, gradient, sizes, weights.dtype), None

    product.defvjp(forward, backward)
    return product


def _by_tiles(
    rows: jax.Array,
    weights: jax.Array,
    sizes: jax.Array,
    *,
    has_known_length: bool,
    is_transposed: bool,
) -> jax.Array:
    """Multiply rows by their group's weights, or by the transpose."""
    tile = tile_rows(len(rows), len(weights))
    tiles = find_tiles(sizes, len(rows), tile)
    padded = jnp.pad(rows, ((0, tile), (0, 0)))
    width = weights.shape[1 if is_transposed else 2]
    axes = "af,df->ad" if is_transposed else "ad,df->af"

    def one(index: jax.Array, out: jax.Array) -> jax.Array:
        block = jax.lax.dynamic_slice_in_dim(padded, tiles.start[index], tile)
        own = jax.lax.dynamic_index_in_dim(weights, tiles.group[index], keepdims=False)
        product = jnp.einsum(axes, block, own, preferred_element_type=jnp.float32)
        # Results for rows after the group are overwritten by the next group's tiles.
        return jax.lax.dynamic_update_slice_in_dim(
            out, product.astype(out.dtype), tiles.start[index], axis=0
        )

    out = jnp.zeros((len(padded), width), rows.dtype)
    length = len(tiles.start) if has_known_length else tiles.number
    return jax.lax.fori_loop(0, length, one, out)[: len(rows)]


def _of_weights(
    rows: jax.Array,
    gradient: jax.Array,
    sizes: jax.Array,
    dtype: DTypeLike,
    *,
    has_known_length: bool,
) -> jax.Array:
    """Return the gradient of the weights, summed in float32."""
    tile = tile_rows(len(rows), len(sizes))
    tiles = find_tiles(sizes, len(rows), tile)
    padded, gradient = (jnp.pad(x, ((0, tile), (0, 0))) for x in (rows, gradient))

    def one(index: jax.Array, total: jax.Array) -> jax.Array:
        is_own = (jnp.arange(tile) < tiles.size[index])[:, None]
        block, of_block = (
            jnp.where(is_own, jax.lax.dynamic_slice_in_dim(x, tiles.start[index], tile), 0)
            for x in (padded, gradient)
        )
        added = jnp.einsum("ad,af->df", block, of_block, preferred_element_type=jnp.float32)
        group = tiles.group[index]
        added += jax.lax.dynamic_index_in_dim(total, group, keepdims=False)
        return jax.lax.dynamic_update_index_in_dim(total, added, group, axis=0)

    total = jnp.zeros((len(sizes), rows.shape[1], gradient.shape[1]), jnp.float32)
    length = len(tiles.start) if has_known_length else tiles.number
    return jax.lax.fori_loop(0, length, one, total).astype(dtype)

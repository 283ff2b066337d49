"""Grouped matmul on TPUs: sorted rows times the weights of their groups."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox import ops
from jaxtyping import Array, Float, Int

TILE_ROWS = 128
"""Number of rows per tile; rows are padded to full tiles."""

MAX_TILE = 512
"""Maximum tile size along the other two axes, a multiple of the 128 lanes."""


def grouped_matmul(
    rows: Float[Array, "A D"],
    weights: Float[Array, "G D F"],
    sizes: Int[Array, " G"],
    *,
    interpret: bool = False,
) -> Float[Array, "A F"]:
    """Implement `GroupedMatmul` with JAX's megablox kernels, forward and backward."""
    padded = jnp.pad(rows, ((0, -len(rows) % TILE_ROWS), (0, 0)))
    inner, outer = (min(-(-size // 128) * 128, MAX_TILE) for size in weights.shape[1:])
    tiling = (TILE_ROWS, inner, outer)
    products = ops.gmm(padded, weights, sizes, rows.dtype, tiling, None, None, False, interpret)
    return jax.lax.slice_in_dim(products, 0, len(rows))

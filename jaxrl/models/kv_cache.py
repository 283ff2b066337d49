"""Paged key-value cache of the sampler: fixed-size, head-major pages on each shard.

Pages are split over the shards of the mesh (its data, fsdp, expert and context axes) and numbered
within each shard. All functions here work on one shard, without communication between devices. An
index equal to a shard's number of pages means "no page": reading it returns an arbitrary page, and
writing it has no effect.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxrl.models.architecture import Architecture

Pages = tuple[jax.Array, jax.Array]
"""Keys and values of n layers, `[P, n * K, page, H]`."""

Cache = tuple[Pages, ...]
"""Pages of each attention layer (n = 1), or one `Pages` for all layers if a loop is compiled."""


def allocate_pages(
    config: Architecture,
    num_pages: int,
    page_tokens: int,
    dtype: DTypeLike,
    *,
    scan_layers: bool = False,
) -> Cache:
    """Allocate zeroed pages: one pair of arrays per attention layer, or one pair for all layers."""
    num_layers = config.num_attention_layers
    num_arrays = 1 if scan_layers else num_layers
    heads = num_layers // num_arrays * config.num_kv_heads
    shape = (num_pages, heads, page_tokens, config.head_dim)
    return tuple((jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(num_arrays))


def view_layer(
    pages: Float[Array, "P nK page H"], tables: Int[Array, "B M"], layer: Any, num_layers: int
) -> tuple[Float[Array, "nP K page H"], Int[Array, "B M"]]:
    """View the pages of n layers as single-layer pages, and return the tables of `layer`.

    Nothing is copied, since the layers of a page are contiguous.
    """
    layer_pages = pages.reshape(-1, pages.shape[1] // num_layers, *pages.shape[2:])
    return layer_pages, tables * num_layers + layer


@jax.named_scope("cache")
def write_tokens(
    pages: Float[Array, "P K page H"],
    tables: Int[Array, "B M"],
    start: Int[Array, " B"],
    num_tokens: Int[Array, " B"],
    new: Float[Array, "B K C H"],
) -> Float[Array, "P K page H"]:
    """Write keys or values of consecutive tokens to the pages of their rows.

    Args:
        pages: Keys or values of one layer.
        tables: Page indices of each row, in order.
        start: Position of each row's first new token.
        num_tokens: Number of valid tokens in each row, at most C; other tokens are not written.
        new: Keys or values of the tokens.
    """
    P, K, page, H = pages.shape
    index = jnp.arange(new.shape[2])
    positions = start[:, None] + index
    page_ids = jnp.take_along_axis(tables, positions // page, axis=1, mode="clip")
    page_ids = jnp.where(index < num_tokens[:, None], page_ids, P)
    # Each head of each token is one row of a matrix: if a token's heads were written together, the
    # TPU compiler would relayout all pages to make them contiguous.
    heads = page_ids[:, None] * K + jnp.arange(K)[:, None]
    rows = heads * page + (positions % page)[:, None]
    table = pages.reshape(-1, H).at[rows.reshape(-1)].set(new.reshape(-1, H), mode="drop")
    return table.reshape(pages.shape)


def read_pages(
    pages: Float[Array, "P K page H"], indices: Int[Array, " n"]
) -> Float[Array, "n K page H"]:
    """Return a copy of the pages at `indices`."""
    return pages.at[indices].get(mode="clip")


def write_pages(
    pages: Float[Array, "P K page H"], indices: Int[Array, " n"], new: Float[Array, "n K page H"]
) -> Float[Array, "P K page H"]:
    """Overwrite the pages at `indices` with `new`."""
    return pages.at[indices].set(new, mode="drop")

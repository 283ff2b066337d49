"""The sampler's key-value cache: pages of a fixed number of tokens, head-major, split by shards.

Pages are split over S shards (the mesh's data and fsdp axes) and named by indices local to the
shard: what follows works on one shard's part, and nothing moves between devices. An index equal to
the number of pages of a shard stands for "no page": it reads any page and writes none.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxrl.models.architecture import Architecture

Pages = tuple[jax.Array, jax.Array]
"""Keys and values of one layer, `[P, K, page, H]`."""

Cache = tuple[Pages, ...]
"""Those of each layer."""


def allocate(config: Architecture, num_pages: int, page_tokens: int, dtype: DTypeLike) -> Cache:
    """Zeroed pages, a pair of arrays for each layer."""
    shape = (num_pages, config.num_kv_heads, page_tokens, config.head_dim)
    return tuple(
        (jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(config.num_layers)
    )


def write_tokens(
    pages: Float[Array, "P K page H"],
    tables: Int[Array, "B M"],
    start: Int[Array, " B"],
    counts: Int[Array, " B"],
    new: Float[Array, "B K C H"],
) -> Float[Array, "P K page H"]:
    """Writes consecutive tokens of some rows.

    Args:
        pages: keys or values of one layer.
        tables: the pages of each row, in order.
        start: position of each row's first new token.
        counts: how many of the C tokens count; the others are not written.
        new: of the tokens.
    """
    P, K, page, H = pages.shape
    index = jnp.arange(new.shape[2])
    positions = start[:, None] + index
    at = jnp.take_along_axis(tables, positions // page, axis=1, mode="clip")
    at = jnp.where(index < counts[:, None], at, P)
    by_token = new.swapaxes(1, 2).reshape(-1, K, H)
    return pages.at[at.reshape(-1), :, (positions % page).reshape(-1)].set(by_token, mode="drop")


def read_pages(
    pages: Float[Array, "P K page H"], sources: Int[Array, " n"]
) -> Float[Array, "n K page H"]:
    """The content of some pages."""
    return pages.at[sources].get(mode="clip")


def write_pages(
    pages: Float[Array, "P K page H"], targets: Int[Array, " n"], new: Float[Array, "n K page H"]
) -> Float[Array, "P K page H"]:
    """Whole pages replaced."""
    return pages.at[targets].set(new, mode="drop")

"""The sampler's key-value cache: contiguous per slot, head-major, split over the mesh by slots.

Slots are split over S shards (the mesh's data and fsdp axes), so rows are named by
`[shards, rows of the shard]` with indices local to the shard: picking rows moves nothing between
devices. An index equal to the number of slots of a shard stands for "no row": it reads any slot
and writes none.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxrl.models.architecture import Architecture, Cache


def allocate(config: Architecture, num_slots: int, capacity: int, dtype: DTypeLike) -> Cache:
    """Zeroed caches `[num_slots, K, capacity, H]`, a pair for each layer."""
    shape = (num_slots, config.num_kv_heads, capacity, config.head_dim)
    return tuple(
        (jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(config.num_layers)
    )


def take_rows(values: jax.Array, rows: jax.Array) -> jax.Array:
    """Rows of a slot array `[B, ...]`: `rows` `[shards, r]` gives `[shards * r, ...]`."""
    shards = values.reshape(rows.shape[0], -1, *values.shape[1:])
    picked = jax.vmap(lambda shard, index: shard.at[index].get(mode="clip"))(shards, rows)
    return picked.reshape(-1, *values.shape[1:])


def open_window(cache: Cache, rows: jax.Array, length: int, room: int) -> Cache:
    """A copy of some rows for a chunk of decoding steps, which write into it.

    Its first `length` positions are the cache's; `room` follows for what the chunk adds, at an
    index that all rows share: so a step writes one slice and scatters nothing. The keys are
    transposed once here rather than at every step, which reads them along the positions.

    Args:
        cache: of all slots.
        rows: `[shards, r]`, see the module.
        length: positions to copy; no row may hold more tokens.
        room: positions to add.

    Returns:
        For each layer keys `[shards * r, K, H, length + room]` and values
        `[shards * r, K, length + room, H]`.
    """

    def take(values: jax.Array) -> jax.Array:
        shards = values.reshape(rows.shape[0], -1, *values.shape[1:])
        pick = lambda shard, index: shard.at[index, :, :length].get(mode="clip")  # noqa: E731
        picked = jax.vmap(pick)(shards, rows).reshape(-1, values.shape[1], length, values.shape[3])
        return jnp.pad(picked, ((0, 0), (0, 0), (0, room), (0, 0)))

    return tuple((take(keys).swapaxes(2, 3), take(values)) for keys, values in cache)


def window_tail(window: Cache, room: int) -> Cache:
    """What a chunk added to a window, `[shards * r, K, room, H]`, for `write_window`."""
    return tuple(
        (keys[..., -room:].swapaxes(2, 3), values[:, :, -room:]) for keys, values in window
    )


def put_rows(values: jax.Array, rows: jax.Array, new: jax.Array) -> jax.Array:
    """The slot array with `new` `[shards * r, ...]` written to `rows`."""
    shards = values.reshape(rows.shape[0], -1, *values.shape[1:])
    new = new.reshape(*rows.shape, *new.shape[1:])
    written = jax.vmap(lambda shard, index, x: shard.at[index].set(x, mode="drop"))(
        shards, rows, new
    )
    return written.reshape(values.shape)


def write_window(cache: jax.Array, rows: jax.Array, start: jax.Array, new: jax.Array) -> jax.Array:
    """Writes C positions of some rows of a cache `[B, K, S, H]`.

    Args:
        cache: keys or values of one layer.
        rows: `[shards, r]`, see the module.
        start: `[shards * r]`, the first position to write; what passes the capacity is dropped.
        new: `[shards * r, K, C, H]`.
    """
    shards = cache.reshape(rows.shape[0], -1, *cache.shape[1:])
    positions = (start[:, None] + jnp.arange(new.shape[2])).reshape(*rows.shape, -1)
    new = new.swapaxes(1, 2).reshape(*rows.shape, new.shape[2], new.shape[1], new.shape[3])

    def write(shard: jax.Array, row: jax.Array, at: jax.Array, x: jax.Array) -> jax.Array:
        return shard.at[row[:, None], :, at].set(x, mode="drop")

    return jax.vmap(write)(shards, rows, positions, new).reshape(cache.shape)


def place_prefix(cache: jax.Array, prefix: jax.Array, source: jax.Array) -> jax.Array:
    """Copies prompts into slots.

    Args:
        cache: `[B, K, S, H]`.
        prefix: `[P, K, C, H]`, C at most S.
        source: `[B]`, the prompt that each slot gets, or -1 to leave it alone.
    """
    window = jax.lax.slice_in_dim(cache, 0, prefix.shape[2], axis=2)
    placed = jnp.where((source >= 0)[:, None, None, None], prefix[jnp.maximum(source, 0)], window)
    return jax.lax.dynamic_update_slice_in_dim(cache, placed, 0, axis=2)

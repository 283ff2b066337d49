"""The working copy of the cache that a chunk of decoding steps reads and writes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.models import kv_cache
from tests.helpers import TINY

pytestmark = pytest.mark.usefixtures("quick_compilation")

SLOTS, CAPACITY, ROOM = 6, 20, 3


def filled_cache():
    def fill(path, leaf):
        return jax.random.normal(
            jax.random.key(len(str(path)) + int(path[0].idx) * 2 + int(path[1].idx)), leaf.shape
        )

    empty = kv_cache.allocate(TINY, SLOTS, CAPACITY, jnp.float32)
    return jax.tree_util.tree_map_with_path(fill, empty)


def test_holds_the_rows_up_to_the_length():
    cache = filled_cache()
    rows = jnp.array([[2, 0, 3], [1, 2, 0]])  # two shards of three slots; 3 stands for no row
    slots = np.array([2, 0, 4, 5, 3])  # of the others, over both shards
    is_row = np.array([True, True, False, True, True, True])
    window = kv_cache.open_window(cache, rows, length=8, room=ROOM)
    for (keys, values), (old_keys, old_values) in zip(window, cache, strict=True):
        assert keys.shape == (6, TINY.num_kv_heads, TINY.head_dim, 8 + ROOM)
        assert values.shape == (6, TINY.num_kv_heads, 8 + ROOM, TINY.head_dim)
        np.testing.assert_array_equal(
            keys[is_row][..., :8], old_keys[slots][:, :, :8].swapaxes(2, 3)
        )
        np.testing.assert_array_equal(values[is_row][:, :, :8], old_values[slots][:, :, :8])


def test_tail_is_what_was_added():
    cache, rows = filled_cache(), jnp.arange(SLOTS)[None]
    window = kv_cache.open_window(cache, rows, length=CAPACITY - ROOM, room=ROOM)
    whole = kv_cache.open_window(cache, rows, length=CAPACITY, room=0)
    window = jax.tree.map(lambda _, x: x, window, whole)  # as if steps had written the rest
    for tail, layer in zip(kv_cache.window_tail(window, ROOM), cache, strict=True):
        for got, wanted in zip(tail, layer, strict=True):
            np.testing.assert_array_equal(got, wanted[:, :, -ROOM:])

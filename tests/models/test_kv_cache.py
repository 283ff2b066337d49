"""Cache operations against loops over slots, with slots split over two shards."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.models import kv_cache
from tests.helpers import TINY

SHARDS, SLOTS, PICKED = 2, 4, 3  # SLOTS and PICKED of each shard
K, S, H, C = 2, 7, 3, 4
NO_ROW = SLOTS

take_rows, put_rows, write_window, place_prefix = (
    jax.jit(f)
    for f in (
        kv_cache.take_rows,
        kv_cache.put_rows,
        kv_cache.write_window,
        kv_cache.place_prefix,
    )
)

open_window = jax.jit(kv_cache.open_window, static_argnums=(2, 3))

# Different slots of a shard, each possibly replaced by "no row".
shard_rows = st.permutations(range(SLOTS)).flatmap(
    lambda slots: st.tuples(*(st.sampled_from([slot, NO_ROW]) for slot in slots[:PICKED]))
)
some_rows = st.tuples(*[shard_rows] * SHARDS).map(lambda rows: np.array(rows, np.int32))
few = settings(deadline=None, max_examples=50)


def numbered(*shape, start=0.0):
    return (start + np.arange(np.prod(shape), dtype=np.float32)).reshape(shape)


def named(rows):
    """Where in `rows`, and which slot of the whole cache, for every index that is a row."""
    return [
        (shard * PICKED + index, shard * SLOTS + row)
        for shard, of_shard in enumerate(rows)
        for index, row in enumerate(of_shard)
        if row != NO_ROW
    ]


def test_layers_have_arrays_of_their_own():
    config = dataclasses.replace(TINY, num_layers=3)
    cache = kv_cache.allocate(config, 4, 9, jnp.bfloat16)
    leaves = jax.tree.leaves(cache)
    assert [len(layer) for layer in cache] == [2, 2, 2]
    assert {leaf.shape for leaf in leaves} == {(4, 2, 9, 16)}
    assert {leaf.dtype for leaf in leaves} == {jnp.dtype(jnp.bfloat16)}
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == 6  # each is donated alone
    assert not any(leaf.any() for leaf in leaves)


@few
@given(some_rows)
def test_take_rows(rows):
    values = numbered(SHARDS * SLOTS, 2)
    got = np.asarray(take_rows(values, rows))
    assert got.shape == (SHARDS * PICKED, 2)
    for index, slot in named(rows):
        np.testing.assert_array_equal(got[index], values[slot])
    assert np.isin(got, values).all()  # "no row" reads any slot


@few
@given(some_rows)
def test_put_rows(rows):
    values, new = numbered(SHARDS * SLOTS, 2), numbered(SHARDS * PICKED, 2, start=100)
    wanted = values.copy()
    for index, slot in named(rows):
        wanted[slot] = new[index]
    np.testing.assert_array_equal(put_rows(values, rows, new), wanted)


@few
@given(some_rows, st.lists(st.integers(0, S), min_size=6, max_size=6))
def test_write_window(rows, start):
    cache = numbered(SHARDS * SLOTS, K, S, H)
    new = numbered(SHARDS * PICKED, K, C, H, start=1000)
    wanted = cache.copy()
    for index, slot in named(rows):
        for c in range(C):
            if start[index] + c < S:
                wanted[slot, :, start[index] + c] = new[index, :, c]
    got = write_window(cache, rows, np.array(start, np.int32), new)
    np.testing.assert_array_equal(got, wanted)


@few
@given(some_rows, st.integers(0, 2))
def test_open_window_and_its_tail(rows, which):
    length, room = 5, 2
    keys = numbered(SHARDS * SLOTS, K, S, H)
    values = keys + 0.5
    ((got_keys, got_values),) = open_window(((keys, values),), rows, length, room)
    assert got_keys.shape == (SHARDS * PICKED, K, H, length + room)
    assert got_values.shape == (SHARDS * PICKED, K, length + room, H)
    for index, slot in named(rows):
        np.testing.assert_array_equal(
            got_keys[index, :, :, :length], keys[slot, :, :length].swapaxes(1, 2)
        )
        np.testing.assert_array_equal(got_values[index, :, :length], values[slot, :, :length])
    # What is written behind comes back head-major, as `write_window` takes it.
    window = got_keys.at[..., length + which % room].set(7.0), got_values.at[:, :, -1].set(8.0)
    ((new_keys, new_values),) = kv_cache.window_tail((window,), room)
    assert new_keys.shape == new_values.shape == (SHARDS * PICKED, K, room, H)
    np.testing.assert_array_equal(new_keys[:, :, which % room], 7.0)
    np.testing.assert_array_equal(new_values[:, :, -1], 8.0)


@few
@given(st.lists(st.integers(-1, 2), min_size=8, max_size=8))
def test_place_prefix(source):
    cache = numbered(SHARDS * SLOTS, K, S, H)
    prefix = numbered(3, K, C, H, start=1000)
    wanted = cache.copy()
    for slot, prompt in enumerate(source):
        if prompt >= 0:
            wanted[slot, :, :C] = prefix[prompt]
    np.testing.assert_array_equal(place_prefix(cache, prefix, np.array(source)), wanted)


def test_no_row_writes_nothing():
    rows = np.full((SHARDS, PICKED), NO_ROW, np.int32)
    values, cache = numbered(SHARDS * SLOTS, 2), numbered(SHARDS * SLOTS, K, S, H)
    np.testing.assert_array_equal(
        put_rows(values, rows, np.full((SHARDS * PICKED, 2), -1, np.float32)), values
    )
    start = np.zeros(SHARDS * PICKED, np.int32)
    new = np.full((SHARDS * PICKED, K, C, H), -1, np.float32)
    np.testing.assert_array_equal(write_window(cache, rows, start, new), cache)
    nobody = np.full(SHARDS * SLOTS, -1)
    np.testing.assert_array_equal(place_prefix(cache, new[:3], nobody), cache)


def test_everything_keeps_the_dtype():
    cache = jnp.zeros((SHARDS * SLOTS, K, S, H), jnp.bfloat16)
    rows = np.zeros((SHARDS, PICKED), np.int32)
    new = jnp.ones((SHARDS * PICKED, K, C, H), jnp.bfloat16)
    start = np.zeros(SHARDS * PICKED, np.int32)
    assert write_window(cache, rows, start, new).dtype == jnp.bfloat16
    assert take_rows(cache, rows).dtype == jnp.bfloat16

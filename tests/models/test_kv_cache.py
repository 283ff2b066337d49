"""Cache pages compared with loops over tokens."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.models import kv_cache
from tests.helpers import TINY

P, K, PAGE, H = 7, 2, 3, 4
B, M, C = 2, 3, 5

write_tokens, read_pages, write_pages = (
    jax.jit(f) for f in (kv_cache.write_tokens, kv_cache.read_pages, kv_cache.write_pages)
)
few = settings(deadline=None, max_examples=25)


def numbered(*shape, start=0.0):
    return (start + np.arange(np.prod(shape), dtype=np.float32)).reshape(shape)


def test_each_layer_has_its_own_arrays():
    config = dataclasses.replace(TINY, num_layers=3)
    cache = kv_cache.allocate_pages(config, 4, 9, jnp.bfloat16)
    leaves = jax.tree.leaves(cache)
    assert [len(layer) for layer in cache] == [2, 2, 2]
    assert {leaf.shape for leaf in leaves} == {(4, 2, 9, 16)}
    assert {leaf.dtype for leaf in leaves} == {jnp.dtype(jnp.bfloat16)}
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == 6  # each is donated separately
    assert not any(leaf.any() for leaf in leaves)


@few
@given(
    st.permutations(range(P)),
    st.lists(st.integers(0, M * PAGE - 1), min_size=B, max_size=B),
    st.lists(st.integers(0, C), min_size=B, max_size=B),
)
def test_write_tokens(order, start, counts):
    counts = [min(count, M * PAGE - first) for count, first in zip(counts, start, strict=True)]
    tables = np.array(order[: B * M], np.int32).reshape(B, M)
    pages, new = numbered(P, K, PAGE, H), numbered(B, K, C, H, start=1000)
    expected = pages.copy()
    for row in range(B):
        for c in range(counts[row]):
            position = start[row] + c
            expected[tables[row, position // PAGE], :, position % PAGE] = new[row, :, c]
    actual = write_tokens(pages, tables, np.array(start), np.array(counts), new)
    np.testing.assert_array_equal(actual, expected)


def test_no_page_writes_nothing():
    pages, new = numbered(P, K, PAGE, H), numbered(B, K, C, H, start=1000)
    tables, start, counts = np.full((B, M), P), np.zeros(B, int), np.full(B, C)
    np.testing.assert_array_equal(write_tokens(pages, tables, start, counts, new), pages)
    targets = np.array([P, 2, P])
    expected = pages.copy()
    expected[2] = new[1, :, :PAGE]
    actual = write_pages(pages, targets, np.stack([new[0, :, :PAGE], new[1, :, :PAGE]] * 2)[:3])
    np.testing.assert_array_equal(actual, expected)


@few
@given(st.lists(st.integers(0, P), min_size=4, max_size=4))
def test_read_pages(sources):
    pages = numbered(P, K, PAGE, H)
    actual = np.asarray(read_pages(pages, np.array(sources)))
    for index, page in enumerate(sources):
        if page < P:
            np.testing.assert_array_equal(actual[index], pages[page])
    assert np.isin(actual, pages).all()  # "no page" reads any page

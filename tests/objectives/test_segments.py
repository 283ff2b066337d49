import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.objectives.segments import broadcast_segment_sums

pytestmark = pytest.mark.usefixtures("quick_compilation")

ROWS, LENGTH = 3, 13  # one shape, so that jit compiles once; no power of two
sums_jit = jax.jit(broadcast_segment_sums)


def test_three_rows_by_hand():
    values = np.array([[1, 2, 3, 4], [5, 6, 7, 8], [9, 9, 9, 9]], np.float32)
    # The same id in two rows is two segments; a row may be padding alone.
    ids = np.array([[4, 4, 7, 0], [4, 0, 5, 5], [0, 0, 0, 0]])
    actual = sums_jit(values, ids)
    np.testing.assert_array_equal(actual, [[3, 3, 3, 0], [5, 0, 15, 15], [0, 0, 0, 0]])


@st.composite
def segments(draw):
    """Return contiguous segments with unique ids and gaps, and values with exact sums."""
    ids = np.zeros((ROWS, LENGTH), np.int32)
    numbers = iter(draw(st.permutations([*range(1, ROWS * LENGTH), 2**31 - 1])))
    for row in ids:
        start = 0
        for size in draw(st.lists(st.integers(1, 6), max_size=6)):
            start += draw(st.integers(0, 2))
            row[start : start + size] = next(numbers)
            start += size
    seed = draw(st.integers(0, 2**32 - 1))
    values = np.random.default_rng(seed).integers(-64, 64, ids.shape) / 8
    return values.astype(np.float32), ids


@settings(max_examples=30, deadline=None)
@given(batch=segments())
def test_agrees_with_a_slow_loop(batch):
    values, ids = batch
    expected = np.zeros(values.shape)
    for row in range(ROWS):
        for t in range(LENGTH):
            if ids[row, t] > 0:
                expected[row, t] = values[row, ids[row] == ids[row, t]].sum()
    np.testing.assert_array_equal(sums_jit(values, ids), expected)


def test_tokens_of_a_segment_get_the_same_bits():
    rng = np.random.default_rng(0)
    values = rng.normal(size=(ROWS, LENGTH)).astype(np.float32)
    ids = np.array([[1] * 9 + [2] * 4, [3] * 13, [4] * 2 + [5] * 11])
    actual = np.asarray(sums_jit(values, ids))
    assert all(len(set(actual[ids == id])) == 1 for id in range(1, 6))


@pytest.mark.parametrize("extreme", [np.inf, np.nan])
def test_values_that_are_not_finite_stay_in_their_segment(extreme):
    values = np.ones((ROWS, LENGTH), np.float32)
    ids = np.array([[1] * 5 + [0] * 3 + [2] * 5, [3] * 13, [4] * 7 + [5] * 6])
    values[0, [2, 6]] = values[1, 12] = values[2, 0] = extreme
    actual = np.asarray(sums_jit(values, ids))
    np.testing.assert_array_equal(actual[ids == 2], 5)
    np.testing.assert_array_equal(actual[ids == 5], 6)
    np.testing.assert_array_equal(actual[ids == 0], 0)
    assert not np.isfinite(actual[np.isin(ids, [1, 3, 4])]).any()


def test_no_table_and_no_scatter():
    T = 512
    arrays = jax.ShapeDtypeStruct((1, T), jnp.float32), jax.ShapeDtypeStruct((1, T), jnp.int32)
    lowered = jax.jit(
        jax.value_and_grad(lambda x, ids: broadcast_segment_sums(x, ids).sum())
    ).lower(*arrays)
    # Largest arrays of the program: the row itself, none of T x T.
    shapes = re.findall(r"tensor<((?:\d+x)+)", lowered.as_text())
    assert max(math.prod(map(int, shape[:-1].split("x"))) for shape in shapes) <= 2 * T
    assert "scatter" not in lowered.as_text()

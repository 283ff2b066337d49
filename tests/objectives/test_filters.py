import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.objectives.filters import (
    group_members,
    keep_in_accuracy_range,
    keep_informative,
    needs_resampling,
)

BOUNDS = {"low": 0.01, "high": 0.99}


def ids(*values):
    return np.array(values, np.int32)


def test_members_by_hand():
    groups = group_members(ids(7, -1, 3, 7, -5, 3, 0))
    assert [list(members) for members in groups] == [[6], [2, 5], [0, 3]]
    assert group_members(ids()) == group_members(ids(-1, -2)) == []


def test_informative_by_hand():
    # Group 5 differs, group 2 agrees, group 9 is alone, the rest is no group.
    metric = np.array([1, 0.5, 0, 0.5, 3, 8, 2], np.float32)
    got = keep_informative(metric, ids(5, 2, 5, 2, 9, -1, -1))
    np.testing.assert_array_equal(got, [True, False, True, False, True, False, False])


@pytest.mark.parametrize(
    ("right", "size", "kept"),
    [
        (0, 8, False),
        (1, 8, True),
        (7, 8, True),
        (8, 8, False),
        (1, 100, False),
        (2, 100, True),
        (99, 100, False),
        (0, 1, False),
        (1, 1, False),
    ],
)
def test_accuracy_limits_are_strict(right, size, kept):
    is_correct = np.arange(size) < right
    got = keep_in_accuracy_range(is_correct, np.full(size, 4), **BOUNDS)
    np.testing.assert_array_equal(got, [kept] * size)


def test_accuracy_limits_are_settings():
    is_correct = np.array([True, False, False, False, True])
    group_ids = ids(1, 1, 1, 1, -1)
    got = keep_in_accuracy_range(is_correct, group_ids, low=0.2, high=0.99)
    assert got.tolist() == [True] * 4 + [False]
    assert not keep_in_accuracy_range(is_correct, group_ids, low=0.25, high=0.99).any()
    assert not keep_in_accuracy_range(is_correct, group_ids, low=0.01, high=0.25).any()


@pytest.mark.parametrize(
    ("scores", "abstains", "again"),
    [
        ([0, -1, 0], [False, False, False], True),
        ([0, -1, 0], [False, False, True], False),
        ([0, -1, 0], [False, True, False], False),  # a malformed abstention is one too
        ([0, 0.4], [False, False], False),
        ([-1], [False], True),
    ],
)
def test_resampling(scores, abstains, again):
    size = len(scores)
    got = needs_resampling(np.array(scores, np.float32), np.array(abstains), np.full(size, 3))
    np.testing.assert_array_equal(got, [again] * size)


batches = st.lists(
    st.tuples(
        st.sampled_from([-1.0, 0.0, 0.5, 1.0]), st.booleans(), st.sampled_from([-4, 0, 1, 6])
    ),
    max_size=14,
)


@settings(max_examples=100, deadline=None)
@given(batches)
def test_agree_with_slow_loops(rows):
    scores = np.array([row[0] for row in rows], np.float32)
    flags = np.array([row[1] for row in rows], bool)
    group_ids = np.array([row[2] for row in rows], np.int32)
    for i, (_, _, id) in enumerate(rows):
        members = [row for row in rows if row[2] == id]
        values, rights = [row[0] for row in members], [row[1] for row in members]
        differs = len(members) == 1 or len(set(values)) > 1
        mixed = any(rights) and not all(rights)
        lost = all(value <= 0 for value in values) and not any(rights)
        assert keep_informative(scores, group_ids)[i] == (id >= 0 and differs)
        assert keep_in_accuracy_range(flags, group_ids, **BOUNDS)[i] == (id >= 0 and mixed)
        assert needs_resampling(scores, flags, group_ids)[i] == (id >= 0 and lost)

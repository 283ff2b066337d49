import numpy as np
import pytest

from jaxrl.objectives.filters import (
    keep_in_range,
    keep_informative,
    list_group_members,
    needs_resampling,
)

BOUNDS = {"low": 0.01, "high": 0.99}


def ids(*values):
    return np.array(values, np.int32)


def test_members_by_hand():
    groups = list_group_members(ids(7, -1, 3, 7, -5, 3, 0))
    assert [list(members) for members in groups] == [[6], [2, 5], [0, 3]]
    assert list_group_members(ids()) == list_group_members(ids(-1, -2)) == []


def test_informative_by_hand():
    # Group 5 differs, group 2 agrees, group 9 is alone, the rest is no group.
    metric = np.array([1, 0.5, 0, 0.5, 3, 8, 2], np.float32)
    actual = keep_informative(metric, ids(5, 2, 5, 2, 9, -1, -1))
    np.testing.assert_array_equal(actual, [True, False, True, False, True, False, False])


@pytest.mark.parametrize(
    ("num_correct", "size", "is_kept"),
    [
        (0, 8, False),
        (8, 8, False),
        (1, 100, False),
        (2, 100, True),
        (98, 100, True),
        (99, 100, False),
        (1, 1, False),
    ],
)
def test_accuracy_limits_are_strict(num_correct, size, is_kept):
    is_correct = np.arange(size) < num_correct
    actual = keep_in_range(is_correct, np.full(size, 4), **BOUNDS)
    np.testing.assert_array_equal(actual, [is_kept] * size)


def test_accuracy_is_that_of_the_group():
    is_correct = np.array([True, False, False, False, True])
    actual = keep_in_range(is_correct, ids(1, 1, 1, 1, -1), low=0.2, high=0.3)
    assert actual.tolist() == [True] * 4 + [False]


@pytest.mark.parametrize(
    ("scores", "abstains", "expected"),
    [
        ([0, -1, 0], [False, False, False], True),
        ([0, -1, 0], [False, False, True], False),
        ([0, -1, 0], [False, True, False], False),  # a malformed abstention is one too
        ([0, 0.4], [False, False], False),
        ([-1], [False], True),
    ],
)
def test_resampling(scores, abstains, expected):
    size = len(scores)
    actual = needs_resampling(np.array(scores, np.float32), np.array(abstains), np.full(size, 3))
    np.testing.assert_array_equal(actual, [expected] * size)

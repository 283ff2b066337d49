import functools

import jax
import numpy as np
import pytest

from jaxrl.objectives.advantages import grpo, reinforce_plus_plus, rloo
from jaxrl.objectives.turns import compute_turn_returns, estimate_by_turn

pytestmark = pytest.mark.usefixtures("quick_compilation")

POPULATION = {"normalize_std": True, "ddof": 0, "epsilon": 1e-8}
SAMPLE = {"normalize_std": True, "ddof": 1, "epsilon": 1e-6}
NO_STD = {"normalize_std": False, "ddof": 0, "epsilon": 1e-8}

grpo_jit = jax.jit(grpo, static_argnames=("normalize_std", "ddof", "epsilon"))
rloo_jit = jax.jit(rloo)
plain_jit = jax.jit(functools.partial(reinforce_plus_plus, baseline=False))
baseline_jit = jax.jit(functools.partial(reinforce_plus_plus, baseline=True))


@pytest.mark.parametrize(
    ("rewards", "settings", "expected"),
    [
        ([2.5, 0.5, -1, -1], POPULATION, [1.566699, 0.174078, -0.870388, -0.870388]),
        ([2.5, 0.5, -1, -1], SAMPLE, [1.3568, 0.150756, -0.753778, -0.753778]),
        ([1, 0, 0, 0], POPULATION, [1.732051, -0.57735, -0.57735, -0.57735]),
        ([1, 0, 0, 0], SAMPLE, [1.499997, -0.499999, -0.499999, -0.499999]),
        ([2.5, 0.5, -1, -1], NO_STD, [2.25, 0.25, -1.25, -1.25]),
    ],
)
def test_one_group_by_hand(rewards, settings, expected):
    actual = grpo_jit(np.array(rewards, np.float32), np.full(4, 7, np.int32), **settings)
    np.testing.assert_allclose(actual, expected, atol=1e-6)


def test_groups_are_identified_by_id():
    # Group 5 is 1, 0; group 2 is all right: nothing to learn; -1 and -7 are no groups at all.
    rewards = np.array([1, 3, 9, 0, 3, 8, 4], np.float32)
    ids = np.array([5, 2, -1, 5, 2, -1, -7], np.int32)
    np.testing.assert_allclose(grpo_jit(rewards, ids, **NO_STD), [0.5, 0, 0, -0.5, 0, 0, 0])


def test_no_variance_is_exactly_zero():
    # A mean of sixteen 2.99 is rounded; over an epsilon of 1e-8 the rest would be an advantage.
    rewards, ids = np.full(16, 2.99, np.float32), np.full(16, 3, np.int32)
    counts = np.full(16, 7)
    for actual in (
        grpo_jit(rewards, ids, **POPULATION),
        grpo_jit(rewards, ids, **NO_STD),
        plain_jit(rewards, ids, counts),
        plain_jit(rewards, ids, 0 * counts),
        baseline_jit(rewards, ids, counts),
        # The last has no tokens: its distance over sqrt(1e-8) would be -39900.
        plain_jit(np.append(rewards[:15], np.float32(-1)), ids, np.append(counts[:15], 0)),
    ):
        np.testing.assert_array_equal(actual, np.zeros(16))


def test_a_nan_reward_stays_in_its_group():
    rewards = np.array([np.nan, 1, 1, 0, np.nan], np.float32)
    actual = np.asarray(grpo_jit(rewards, np.array([0, 0, 1, 1, -1]), **POPULATION))
    assert np.isnan(actual[:2]).all()
    np.testing.assert_allclose(actual[2:], [1, -1, 0], atol=1e-6)


def test_rloo_by_hand():
    # 2.5 against the mean of .5, -1, -1 is 3; group 5 is alone, group 2 all right, -3 no group.
    rewards = np.array([2.5, 1, 0.5, 2.99, -1, np.nan, -1, 2.99], np.float32)
    ids = np.array([0, 5, 0, 2, 0, -3, 0, 2])
    expected = [3, 0, 0.333333, 0, -1.666667, 0, -1.666667, 0]
    np.testing.assert_allclose(rloo_jit(rewards, ids), expected, atol=1e-6)


def test_reinforce_plus_plus_by_hand():
    # The last is in no group.
    rewards = np.array([2.5, 0.5, -1, -1, np.nan], np.float32)
    counts = np.array([2, 3, 1, 4, 9])
    # Ten tokens: mean .15, variance 18.025 / 9.
    actual = plain_jit(rewards, np.array([0, 0, 0, 0, -1]), counts)
    np.testing.assert_allclose(actual, [1.660548, 0.247316, -0.812609, -0.812609, 0], atol=1e-6)
    # Less their group's means: 1, -1, 0, 0.
    actual = baseline_jit(rewards, np.array([0, 0, 1, 1, -1]), counts)
    np.testing.assert_allclose(actual, [1.490788, -1.219736, 0.135526, 0.135526, 0], atol=1e-6)


def test_turns_by_hand():
    # Two of a group: the first earns 1 by its second search and 0.5 by its answer; the second
    # answers at once, for 2. The third is an environment error.
    rest = np.array([0.5, 2.0, 9.0], np.float32)
    turns = np.array([[0.0, 1.0, 0.0], [0.0, 0.0, 0.0], [4.0, 0.0, 0.0]])
    returns = compute_turn_returns(rest, turns, discount=1.0)
    np.testing.assert_array_equal(returns, [[1.5, 1.5, 0.5], [2, 2, 2], [13, 9, 9]])
    columns = {"rewards": returns, "group_ids": np.array([4, 4, -1])}
    actual = estimate_by_turn(rloo, ("rewards", "group_ids"), columns)
    np.testing.assert_array_equal(actual, [[-0.5, -0.5, -1.5], [0.5, 0.5, 1.5], [0, 0, 0]])
    halved = compute_turn_returns(rest, turns, discount=0.5)
    np.testing.assert_array_equal(halved, [[1.0, 1.5, 0.5], [2, 2, 2], [13, 9, 9]])
    undiscounted = compute_turn_returns(rest, turns, discount=0.0)
    np.testing.assert_array_equal(undiscounted, rest[:, None] + turns)


def test_returns_that_are_equal_by_other_sums_have_no_advantage():
    # In float32 the sums of these differ in the last place; a deviation would make 0.7 of that.
    turns = np.array([[0.1, 0.2, 0.3], [0.3, 0.2, 0.1], [0.6, 0.0, 0.0]])
    returns = compute_turn_returns(np.full(3, 0.7, np.float32), turns, discount=1.0)
    columns = {"rewards": returns, "group_ids": np.zeros(3, int)}
    estimate = functools.partial(grpo, **POPULATION)
    actual = np.asarray(estimate_by_turn(estimate, ("rewards", "group_ids"), columns))
    assert not actual[:, 0].any()

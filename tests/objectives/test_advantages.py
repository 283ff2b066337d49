import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
    got = grpo_jit(np.array(rewards, np.float32), np.full(4, 7, np.int32), **settings)
    np.testing.assert_allclose(got, expected, atol=1e-6)


def test_groups_are_identified_by_id():
    # Group 5 is 1, 0; group 2 is all right: nothing to learn; -1 and -7 are no groups at all.
    rewards = np.array([1, 3, 9, 0, 3, 8, 4], np.float32)
    ids = np.array([5, 2, -1, 5, 2, -1, -7], np.int32)
    np.testing.assert_allclose(grpo_jit(rewards, ids, **NO_STD), [0.5, 0, 0, -0.5, 0, 0, 0])


def test_no_variance_is_exactly_zero():
    # A mean of sixteen 2.99 is rounded; over an epsilon of 1e-8 the rest would be an advantage.
    rewards, ids = np.full(16, 2.99, np.float32), np.full(16, 3, np.int32)
    counts = np.full(16, 7)
    for got in (
        grpo_jit(rewards, ids, **POPULATION),
        grpo_jit(rewards, ids, **NO_STD),
        plain_jit(rewards, ids, counts),
        plain_jit(rewards, ids, 0 * counts),
        baseline_jit(rewards, ids, counts),
        # The last has no tokens: its distance over sqrt(1e-8) would be -39900.
        plain_jit(np.append(rewards[:15], np.float32(-1)), ids, np.append(counts[:15], 0)),
    ):
        np.testing.assert_array_equal(got, np.zeros(16))


def test_a_nan_reward_stays_in_its_group():
    rewards = np.array([np.nan, 1, 1, 0, np.nan], np.float32)
    got = np.asarray(grpo_jit(rewards, np.array([0, 0, 1, 1, -1]), **POPULATION))
    assert np.isnan(got[:2]).all()
    np.testing.assert_allclose(got[2:], [1, -1, 0], atol=1e-6)


def test_rloo_by_hand():
    # 2.5 against the mean of .5, -1, -1 is 3; group 5 is alone, group 2 all right, -3 no group.
    rewards = np.array([2.5, 1, 0.5, 2.99, -1, 7, -1, 2.99], np.float32)
    ids = np.array([0, 5, 0, 2, 0, -3, 0, 2])
    expected = [3, 0, 0.333333, 0, -1.666667, 0, -1.666667, 0]
    np.testing.assert_allclose(rloo_jit(rewards, ids), expected, atol=1e-6)


def test_reinforce_plus_plus_by_hand():
    rewards = np.array([2.5, 0.5, -1, -1], np.float32)
    counts = np.array([2, 3, 1, 4])
    # Ten tokens: mean .15, variance 18.025 / 9.
    got = plain_jit(rewards, np.zeros(4, int), counts)
    np.testing.assert_allclose(got, [1.660548, 0.247316, -0.812609, -0.812609], atol=1e-6)
    # Less their group's means: 1, -1, 0, 0.
    got = baseline_jit(rewards, np.array([0, 0, 1, 1]), counts)
    np.testing.assert_allclose(got, [1.490788, -1.219736, 0.135526, 0.135526], atol=1e-6)


def slow_grpo(rewards, ids, *, normalize_std, ddof, epsilon):
    out = np.zeros(len(rewards))
    for i, id in enumerate(ids):
        group = rewards[ids == id].astype(np.float64)
        if id >= 0 and group.max() > group.min():
            out[i] = rewards[i] - group.mean()
            if normalize_std:
                out[i] /= group.std(ddof=ddof) + epsilon
    return out


def slow_rloo(rewards, ids):
    out = np.zeros(len(rewards))
    for i, id in enumerate(ids):
        others = [float(rewards[j]) for j in range(len(ids)) if ids[j] == id and j != i]
        if id >= 0 and others:
            out[i] = rewards[i] - sum(others) / len(others)
    return out


def slow_reinforce_plus_plus(rewards, ids, counts, *, baseline):
    x = [float(reward) for reward in rewards]
    if baseline:
        x = [
            x[i] - np.mean([x[j] for j in range(len(ids)) if ids[j] == ids[i]]) for i in range(SIZE)
        ]
    tokens = [x[i] for i in range(SIZE) if ids[i] >= 0 for _ in range(counts[i])]
    if len(tokens) < 2 or max(tokens) - min(tokens) < 1e-12:
        return np.zeros(SIZE), 1.0
    mean = sum(tokens) / len(tokens)
    var = sum((token - mean) ** 2 for token in tokens) / (len(tokens) - 1)
    deviation = (var + 1e-8) ** 0.5
    return np.array(
        [(x[i] - mean) / deviation if ids[i] >= 0 else 0 for i in range(SIZE)]
    ), deviation


SIZE = 12  # one shape, so that jit compiles once
batches = st.tuples(
    st.lists(st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.99]), min_size=SIZE, max_size=SIZE),
    st.lists(st.sampled_from([-(2**31), -1, 0, 3, 2**31 - 1]), min_size=SIZE, max_size=SIZE),
).map(lambda pair: (np.array(pair[0], np.float32), np.array(pair[1], np.int32)))
counts = st.lists(st.integers(0, 5), min_size=SIZE, max_size=SIZE).map(np.array)


@settings(max_examples=40, deadline=None)
@given(batch=batches, settings=st.sampled_from([POPULATION, SAMPLE, NO_STD]))
def test_grpo_agrees_with_a_slow_loop(batch, settings):
    expected = slow_grpo(*batch, **settings)
    got = grpo_jit(*batch, **settings)
    np.testing.assert_allclose(got, expected, atol=2e-6)
    np.testing.assert_array_equal(np.asarray(got) == 0, expected == 0)


@settings(max_examples=25, deadline=None)
@given(batch=batches, counts=counts)
def test_rloo_and_reinforce_plus_plus_agree_with_slow_loops(batch, counts):
    np.testing.assert_allclose(rloo_jit(*batch), slow_rloo(*batch), atol=2e-6)
    for run, baseline in [(plain_jit, False), (baseline_jit, True)]:
        expected, deviation = slow_reinforce_plus_plus(*batch, counts, baseline=baseline)
        # What float32 rounds of rewards of up to 3, and of their means, is divided likewise.
        rounding = 8 * np.finfo(np.float32).eps * 3 / deviation
        np.testing.assert_allclose(run(*batch, counts), expected, rtol=1e-5, atol=rounding)


@settings(max_examples=25, deadline=None)
@given(batch=batches, counts=counts, value=st.sampled_from([np.nan, np.inf, -1e30, 5.0]))
def test_members_of_no_group_change_nothing(batch, counts, value):
    rewards, ids = batch
    in_no_group = ids < 0
    changed = np.where(in_no_group, np.float32(value), rewards)
    changed_counts = np.where(in_no_group, 9, counts)
    np.testing.assert_array_equal(rloo_jit(changed, ids), rloo_jit(rewards, ids))
    for run in (plain_jit, baseline_jit):
        got = run(changed, ids, changed_counts)
        np.testing.assert_array_equal(got, run(rewards, ids, counts))


def test_turns_by_hand():
    # Two of a group: the first earns 1 by its second search and 0.5 by its answer; the second
    # answers at once, for 2. The third is an environment error.
    rest = np.array([0.5, 2.0, 9.0], np.float32)
    turns = np.array([[0.0, 1.0, 0.0], [0.0, 0.0, 0.0], [4.0, 0.0, 0.0]])
    returns = compute_turn_returns(rest, turns, discount=1.0)
    np.testing.assert_array_equal(returns, [[1.5, 1.5, 0.5], [2, 2, 2], [13, 9, 9]])
    columns = {"rewards": returns, "group_ids": np.array([4, 4, -1])}
    got = estimate_by_turn(rloo, ("rewards", "group_ids"), columns)
    np.testing.assert_array_equal(got, [[-0.5, -0.5, -1.5], [0.5, 0.5, 1.5], [0, 0, 0]])
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
    got = np.asarray(estimate_by_turn(estimate, ("rewards", "group_ids"), columns))
    assert not got[:, 0].any()

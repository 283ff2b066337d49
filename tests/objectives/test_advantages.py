import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.objectives.advantages import grpo

POPULATION = {"normalize_std": True, "ddof": 0, "epsilon": 1e-8}
SAMPLE = {"normalize_std": True, "ddof": 1, "epsilon": 1e-6}
NO_STD = {"normalize_std": False, "ddof": 0, "epsilon": 1e-8}


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
    ids = np.full(4, 7, np.int32)
    got = grpo(np.array(rewards, np.float32), ids, **settings)
    np.testing.assert_allclose(got, expected, atol=1e-6)


def test_groups_are_told_by_id_not_by_place():
    # Group 5 is 1, 0; group 2 is all right: nothing to learn; -1 and -7 are no groups at all.
    rewards = jnp.array([1.0, 3.0, 9.0, 0.0, 3.0, 8.0, 4.0])
    ids = jnp.array([5, 2, -1, 5, 2, -1, -7])
    np.testing.assert_allclose(grpo(rewards, ids, **NO_STD), [0.5, 0, 0, -0.5, 0, 0, 0])


@pytest.mark.parametrize("settings", [POPULATION, SAMPLE, NO_STD])
@pytest.mark.parametrize("size", [1, 2, 16])
def test_no_variance_is_exactly_zero(settings, size):
    # A mean of sixteen 2.99 is rounded; over an epsilon of 1e-8 the rest would be an advantage.
    rewards = np.full(size, 2.99, np.float32)
    assert not np.any(grpo(rewards, np.full(size, 3), **settings))


def test_a_reward_that_is_no_number_stays_in_its_group():
    rewards = np.array([np.nan, 1, 1, 0, np.nan], np.float32)
    got = np.asarray(grpo(rewards, np.array([0, 0, 1, 1, -1]), **POPULATION))
    assert np.isnan(got[:2]).all()
    np.testing.assert_allclose(got[2:], [1, -1, 0], atol=1e-6)


def slow_grpo(rewards, ids, *, normalize_std, ddof, epsilon):
    out = np.zeros(len(rewards))
    for i, id in enumerate(ids):
        group = rewards[ids == id].astype(np.float64)
        if id >= 0 and group.max() > group.min():
            out[i] = rewards[i] - group.mean()
            if normalize_std:
                out[i] /= group.std(ddof=ddof) + epsilon
    return out


SIZE = 12  # one shape, so that jit compiles once
grpo_jit = jax.jit(grpo, static_argnames=("normalize_std", "ddof", "epsilon"))
batches = st.tuples(
    st.lists(st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.99]), min_size=SIZE, max_size=SIZE),
    st.lists(st.sampled_from([-(2**31), -1, 0, 3, 2**31 - 1]), min_size=SIZE, max_size=SIZE),
).map(lambda pair: (np.array(pair[0], np.float32), np.array(pair[1], np.int32)))


@settings(max_examples=50, deadline=None)
@given(batch=batches, settings=st.sampled_from([POPULATION, SAMPLE, NO_STD]))
def test_agrees_with_a_slow_loop(batch, settings):
    expected = slow_grpo(*batch, **settings)
    got = grpo_jit(*batch, **settings)
    np.testing.assert_allclose(got, expected, atol=2e-6)
    np.testing.assert_array_equal(np.asarray(got) == 0, expected == 0)


@settings(max_examples=50, deadline=None)
@given(batch=batches, order=st.permutations(range(SIZE)))
def test_order_changes_nothing(batch, order):
    rewards, ids = batch
    order = np.array(order)
    got = grpo_jit(rewards[order], ids[order], **POPULATION)
    np.testing.assert_allclose(got, grpo_jit(rewards, ids, **POPULATION)[order], atol=1e-6)


@settings(max_examples=50, deadline=None)
@given(batch=batches, shift=st.floats(-100, 100, width=32))
def test_a_shift_of_all_rewards_changes_nothing(batch, shift):
    rewards, ids = batch
    run = functools.partial(grpo_jit, **POPULATION)
    before, after = run(rewards, ids), run(rewards + np.float32(shift), ids)
    np.testing.assert_allclose(after, before, atol=1e-4)  # the shifted rewards are rounded
    np.testing.assert_array_equal(np.asarray(after)[before == 0] == 0, True)

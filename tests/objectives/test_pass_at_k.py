import functools
import itertools
import math

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.objectives.advantages import (
    pass_at_k,
    pass_at_k_bootstrap,
    pass_at_k_combination,
    pass_at_k_entropy_guided,
    pass_at_k_exceeding,
    pass_at_k_full_sampling,
    subset_advantages,
)

pytestmark = pytest.mark.usefixtures("quick_compilation")

passk = jax.jit(pass_at_k, static_argnames="k")
combination = jax.jit(pass_at_k_combination, static_argnames="k")
exceeding = jax.jit(pass_at_k_exceeding, static_argnames="k")
full_sampling = jax.jit(pass_at_k_full_sampling, static_argnames="k")
bootstrap = jax.jit(pass_at_k_bootstrap, static_argnames="k")
guided = jax.jit(pass_at_k_entropy_guided, static_argnames="k")


def one_group(size, num_correct):
    return np.arange(size) < num_correct, np.full(size, 7, np.int32)


@pytest.mark.parametrize(
    ("k", "size", "num_correct", "right", "wrong"),
    [
        (4, 8, 2, 0.522233, -0.174078),
        (4, 8, 1, 1, -0.142857),
        (8, 16, 4, 0.2, -0.066667),
        (1, 8, 3, 1.290994, -0.774597),
        (2, 4, 1, 1, -0.333333),
    ],
)
def test_pass_at_k_by_hand(k, size, num_correct, right, wrong):
    got = passk(*one_group(size, num_correct), k=k)
    expected = [right] * num_correct + [wrong] * (size - num_correct)
    np.testing.assert_allclose(got, expected, atol=1e-6)


@pytest.mark.parametrize("run", [passk, combination, exceeding])
def test_nothing_to_compare_is_exactly_zero(run):
    # None correct, all correct, fewer than k, one alone.
    is_correct = np.concatenate([np.arange(n) < c for n, c in [(8, 0), (8, 8), (3, 1), (1, 1)]])
    ids = np.repeat([5, 2, 9, 0], [8, 8, 3, 1])
    np.testing.assert_array_equal(run(is_correct, ids, k=4), np.zeros(20))


def by_all_subsets(is_correct, k):
    """Every k-subset with its normalized reward; each trajectory's mean over its subsets."""
    subsets = list(itertools.combinations(range(len(is_correct)), k))
    rewards = np.array([float(any(is_correct[i] for i in subset)) for subset in subsets])
    if rewards.min() == rewards.max():
        return np.zeros(len(is_correct))
    advantages = (rewards - rewards.mean()) / rewards.std()
    return np.array(
        [
            np.mean([a for a, subset in zip(advantages, subsets, strict=True) if i in subset])
            for i in range(len(is_correct))
        ]
    )


@pytest.mark.parametrize("k", [1, 2, 4, 10])
def test_agrees_with_all_subsets_of_all_groups_up_to_ten(k):
    # One batch holds every group size and every number of correct ones, shuffled together.
    sizes = [(size, c) for size in range(1, 11) for c in range(size + 1)]
    is_correct = np.concatenate([np.arange(size) < c for size, c in sizes])
    ids = np.concatenate([np.full(size, 3 * i) for i, (size, _) in enumerate(sizes)])

    def compute_expected(k):
        of_groups = [
            by_all_subsets(np.arange(size) < c, k) if size >= k else np.zeros(size)
            for size, c in sizes
        ]
        return np.concatenate(of_groups)

    order = np.random.default_rng(k).permutation(len(ids))
    expected = compute_expected(k)
    got = passk(is_correct[order], ids[order], k=k)
    np.testing.assert_allclose(got, expected[order], atol=1e-6, rtol=1e-6)
    np.testing.assert_array_equal(np.asarray(got) == 0, expected[order] == 0)

    n = np.concatenate([np.full(size, size) for size, _ in sizes])
    c = np.concatenate([np.full(size, c) for size, c in sizes])
    mixed = np.where(n >= k, c / n * expected + (1 - c / n) * compute_expected(1), 0)
    got = combination(is_correct[order], ids[order], k=k)
    np.testing.assert_allclose(got, mixed[order], atol=2e-6)
    scaled = expected * 4 / (10 * np.log(np.maximum(c, 1) + 0.5))
    got = exceeding(is_correct[order], ids[order], k=k)
    np.testing.assert_allclose(got, scaled[order], atol=2e-6)


@pytest.mark.parametrize("k", [2, 128])
def test_large_groups_agree_with_exact_fractions_and_sum_to_zero(k):
    groups = [(n, c) for n in (16, 64, 255, 256) for c in range(0, n + 1, max(n // 16, 1))]
    groups += [(256, c) for c in (1, 2, 127, 128, 254, 255)]
    sizes, corrects = np.array(groups).T
    columns = np.arange(256)
    run = jax.jit(jax.vmap(functools.partial(pass_at_k, k=k)))
    ids = np.where(columns < sizes[:, None], 0, -1)
    got = np.asarray(run(columns < corrects[:, None], ids), np.float64)
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got.sum(axis=1), 0, atol=2e-6 * np.abs(got).sum(axis=1).max())
    for row, (n, c) in zip(got, groups, strict=True):
        right, wrong = 0.0, 0.0
        if n >= k and 0 < c <= n - k:
            failing = math.comb(n - c, k)
            right = math.sqrt(failing / (math.comb(n, k) - failing))
            wrong = -right * c / (n - c)
        np.testing.assert_allclose(row[:c], right, rtol=5e-6, atol=1e-18)
        np.testing.assert_allclose(row[c:n], wrong, rtol=5e-6, atol=1e-18)


def test_combination_by_hand():
    got = combination(*one_group(8, 2), k=4)
    np.testing.assert_allclose(got, [1.429596] * 2 + [-0.476532] * 6, atol=1e-6)


@pytest.mark.parametrize(("num_correct", "factor"), [(1, 0.986521), (2, 0.436543)])
def test_exceeding_by_hand(num_correct, factor):
    group = one_group(8, num_correct)
    expected = factor * np.asarray(passk(*group, k=4))
    np.testing.assert_allclose(exceeding(*group, k=4), expected, atol=1e-6)


def test_full_sampling_by_hand():
    got = full_sampling(*one_group(8, 1), k=4)
    np.testing.assert_allclose(got, [1, 1, 1, 1, -1, -1, -1, -1], atol=1e-6)


def test_full_sampling_cuts_in_the_order_of_the_batch():
    # Group 4, wherever it stands, is 0 1 | 0 0 | 0 0 and one left over: rewards 1, 0, 0.
    ids = np.array([4, 9, 4, -1, 4, 4, 9, 4, 4, 4])
    is_correct = np.array([0, 1, 1, 1, 0, 0, 0, 0, 0, 1], bool)
    root = math.sqrt(2)
    expected = [root, 0, root, 0, -1 / root, -1 / root, 0, -1 / root, -1 / root, 0]
    np.testing.assert_allclose(full_sampling(is_correct, ids, k=2), expected, atol=1e-6)


def test_bootstrap_by_hand():
    # Subsets 01, 12, 23, 03 are worth 1, 0, 0, 1, so 1, -1, -1, 1; each is in two of them.
    subsets = np.array([[0, 1], [1, 2], [2, 3], [0, 3]])
    got = jax.jit(subset_advantages)(*one_group(4, 1), subsets)
    np.testing.assert_allclose(got, [2, 0, -2, 0], atol=1e-6)


def test_subsets_of_a_group_that_is_too_small_are_not_read():
    ids, subsets = np.array([0, 0, -1, -1]), np.array([[0, 2, 3], [1, 2, 3], [0, 1, 2], [0, 1, 2]])
    got = jax.jit(subset_advantages)(np.array([True, False, False, False]), ids, subsets)
    np.testing.assert_array_equal(got, np.zeros(4))


@pytest.fixture(scope="module")
def bootstrap_draws():
    """Two thousand draws with k = 3 over the batch of the next two tests."""
    ids = np.array([0, 0, 0, 0, 8, 8, 8, 8, 8, 8, -1, 3, 3])
    is_correct = np.array([1, 0, 0, 0, 1, 1, 0, 0, 0, 0, 1, 1, 0], bool)
    draws = jax.jit(jax.vmap(lambda key: pass_at_k_bootstrap(is_correct, ids, key, k=3)))
    return np.asarray(draws(jax.random.split(jax.random.key(0), 2000)))


def test_bootstrap_draws_from_its_own_group_and_sums_to_zero(bootstrap_draws):
    got = bootstrap_draws
    np.testing.assert_array_equal(got[:, 10:], 0)  # no group; fewer than k
    np.testing.assert_allclose(got[:, :4].sum(axis=1), 0, atol=1e-5)
    np.testing.assert_allclose(got[:, 4:10].sum(axis=1), 0, atol=1e-5)
    # The correct one of group 0 is in all subsets that pass and in no other.
    assert (got[:, 0] >= 0).all()
    assert (got[:, 0] > 0).mean() > 0.5
    assert len(np.unique(got[:, 1].round(3))) > 4


def test_bootstrap_of_more_than_the_batch_is_zero():
    got = bootstrap(*one_group(3, 1), jax.random.key(0), k=4)
    np.testing.assert_array_equal(got, np.zeros(3))


def test_entropy_guided_lets_undecided_groups_exploit():
    # Mean entropies: group 2 has 1.0, group 5 has 2.0, group 7 has 1.5, group 9 has .5.
    ids = np.repeat([2, 5, 7, 9], 4)
    is_correct = np.tile([True, False, False, False], 4)
    entropies = np.array([1, 1, 1, 1, 0, 0, 0, 8, 1, 2, 1, 2, 0.5, 0.5, 0.5, 0.5])
    got = guided(is_correct, ids, entropies.astype(np.float32), k=2)
    of_one, of_two = passk(is_correct, ids, k=1), passk(is_correct, ids, k=2)
    exploits = np.isin(ids, [5, 7])
    np.testing.assert_array_equal(got, np.where(exploits, of_one, of_two))
    assert not np.allclose(of_one[:4], of_two[:4])


def test_entropy_guided_middle_and_ties_explore():
    for entropies, exploits in [
        ([3, -1, -1, -1], []),
        ([3, 1, 2, -1], [0]),
        ([2, 2, -1, -1], []),
        ([2, 2, 2, 3], [3]),
    ]:
        ids = np.repeat([i if entropy >= 0 else -1 for i, entropy in enumerate(entropies)], 4)
        is_correct = np.tile([True, False, False, False], 4)
        got = guided(is_correct, ids, np.repeat(entropies, 4).astype(np.float32), k=2)
        # One correct of four: sqrt(3) for one, 1 for pairs.
        expected = [math.sqrt(3) if i in exploits else e >= 0 for i, e in enumerate(entropies)]
        np.testing.assert_allclose(got[::4], expected, atol=1e-6)


SIZE = 16  # one shape, so that jit compiles once
batches = st.tuples(
    st.lists(st.booleans(), min_size=SIZE, max_size=SIZE).map(np.array),
    st.lists(st.sampled_from([-1, 0, 3, 2**31 - 1]), min_size=SIZE, max_size=SIZE).map(
        lambda ids: np.array(ids, np.int32)
    ),
    # Multiples of 1/8 are added without rounding, so that a tie stays one in any order.
    st.lists(st.integers(0, 16), min_size=SIZE, max_size=SIZE).map(
        lambda eighths: np.array(eighths, np.float32) / 8
    ),
)
RUNS = [
    lambda is_correct, ids, _: passk(is_correct, ids, k=3),
    lambda is_correct, ids, _: combination(is_correct, ids, k=3),
    lambda is_correct, ids, _: exceeding(is_correct, ids, k=3),
    lambda is_correct, ids, _: full_sampling(is_correct, ids, k=3),
    lambda is_correct, ids, entropies: guided(is_correct, ids, entropies, k=3),
]


@settings(max_examples=25, deadline=None)
@given(batch=batches)
def test_members_of_no_group_change_nothing(batch):
    is_correct, ids, entropies = batch
    outside = ids < 0
    changed = np.where(outside, np.float32(np.nan), entropies)
    for run in RUNS:
        before = run(is_correct, ids, entropies)
        np.testing.assert_array_equal(run(is_correct ^ outside, ids, changed), before)
        np.testing.assert_array_equal(np.asarray(before)[outside], 0)

import functools
import itertools
import math

import jax
import numpy as np
import pytest

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
    actual = passk(*one_group(size, num_correct), k=k)
    expected = [right] * num_correct + [wrong] * (size - num_correct)
    np.testing.assert_allclose(actual, expected, atol=1e-6)


def by_all_subsets(is_correct, k):
    """Normalize the rewards of all k-subsets; return each trajectory's mean over its subsets."""
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
    # One batch holds every group size and every number of correct ones, shuffled together, and a
    # correct one in no group.
    sizes = [(size, c) for size in range(1, 11) for c in range(size + 1)]
    is_correct = np.concatenate([*(np.arange(size) < c for size, c in sizes), [True]])
    ids = np.concatenate([*(np.full(size, 3 * i) for i, (size, _) in enumerate(sizes)), [-1]])
    n = np.concatenate([*(np.full(size, size) for size, _ in sizes), [0]])
    c = np.concatenate([*(np.full(size, c) for size, c in sizes), [0]])

    def compute_expected(k):
        of_groups = [
            by_all_subsets(np.arange(size) < c, k) if size >= k else np.zeros(size)
            for size, c in sizes
        ]
        return np.concatenate([*of_groups, [0.0]])

    order = np.random.default_rng(k).permutation(len(ids))
    expected = compute_expected(k)
    actual = passk(is_correct[order], ids[order], k=k)
    np.testing.assert_allclose(actual, expected[order], atol=1e-6, rtol=1e-6)
    np.testing.assert_array_equal(np.asarray(actual) == 0, expected[order] == 0)

    share = c / np.maximum(n, 1)
    mixed = np.where(n >= k, share * expected + (1 - share) * compute_expected(1), 0)
    actual = combination(is_correct[order], ids[order], k=k)
    np.testing.assert_allclose(actual, mixed[order], atol=2e-6)
    scaled = expected * 4 / (10 * np.log(np.maximum(c, 1) + 0.5))
    actual = exceeding(is_correct[order], ids[order], k=k)
    np.testing.assert_allclose(actual, scaled[order], atol=2e-6)
    np.testing.assert_array_equal(np.asarray(actual) == 0, expected[order] == 0)


@pytest.mark.parametrize("k", [2, 128])
def test_large_groups_agree_with_exact_fractions_and_sum_to_zero(k):
    groups = [(n, c) for n in (16, 64, 255, 256) for c in range(0, n + 1, max(n // 16, 1))]
    groups += [(256, c) for c in (1, 2, 127, 128, 254, 255)]
    sizes, corrects = np.array(groups).T
    columns = np.arange(256)
    run = jax.jit(jax.vmap(functools.partial(pass_at_k, k=k)))
    ids = np.where(columns < sizes[:, None], 0, -1)
    actual = np.asarray(run(columns < corrects[:, None], ids), np.float64)
    assert np.isfinite(actual).all()
    np.testing.assert_allclose(actual.sum(axis=1), 0, atol=2e-6 * np.abs(actual).sum(axis=1).max())
    for row, (n, c) in zip(actual, groups, strict=True):
        right, wrong = 0.0, 0.0
        if n >= k and 0 < c <= n - k:
            failing = math.comb(n - c, k)
            right = math.sqrt(failing / (math.comb(n, k) - failing))
            wrong = -right * c / (n - c)
        np.testing.assert_allclose(row[:c], right, rtol=5e-6, atol=1e-18)
        np.testing.assert_allclose(row[c:n], wrong, rtol=5e-6, atol=1e-18)


def test_combination_by_hand():
    actual = combination(*one_group(8, 2), k=4)
    np.testing.assert_allclose(actual, [1.429596] * 2 + [-0.476532] * 6, atol=1e-6)


@pytest.mark.parametrize(("num_correct", "factor"), [(1, 0.986521), (2, 0.436543)])
def test_exceeding_by_hand(num_correct, factor):
    group = one_group(8, num_correct)
    expected = factor * np.asarray(passk(*group, k=4))
    np.testing.assert_allclose(exceeding(*group, k=4), expected, atol=1e-6)


def test_full_sampling_by_hand():
    actual = full_sampling(*one_group(8, 1), k=4)
    np.testing.assert_allclose(actual, [1, 1, 1, 1, -1, -1, -1, -1], atol=1e-6)


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
    actual = jax.jit(subset_advantages)(*one_group(4, 1), subsets)
    np.testing.assert_allclose(actual, [2, 0, -2, 0], atol=1e-6)


def test_bootstrap_draws_from_its_own_group_and_sums_to_zero():
    ids = np.array([0, 0, 0, 0, 8, 8, 8, 8, 8, 8, -1, 3, 3])
    is_correct = np.array([1, 0, 0, 0, 1, 1, 0, 0, 0, 0, 1, 1, 0], bool)
    draws = jax.jit(jax.vmap(lambda key: pass_at_k_bootstrap(is_correct, ids, key, k=3)))
    actual = np.asarray(draws(jax.random.split(jax.random.key(0), 500)))
    np.testing.assert_array_equal(actual[:, 10:], 0)  # no group; fewer than k
    np.testing.assert_allclose(actual[:, :4].sum(axis=1), 0, atol=1e-5)
    np.testing.assert_allclose(actual[:, 4:10].sum(axis=1), 0, atol=1e-5)
    # The correct one of group 0 is in all subsets that pass and in no other.
    assert (actual[:, 0] >= 0).all()
    assert (actual[:, 0] > 0).mean() > 0.5
    assert len(np.unique(actual[:, 1].round(3))) > 4


def test_bootstrap_of_more_than_the_batch_is_zero():
    actual = bootstrap(*one_group(3, 1), jax.random.key(0), k=4)
    np.testing.assert_array_equal(actual, np.zeros(3))


def test_entropy_guided_lets_undecided_groups_exploit():
    # Mean entropies: group 2 has 1.0, group 5 has 2.0, group 7 has 1.5, group 9 has .5.
    ids = np.repeat([2, 5, 7, 9], 4)
    is_correct = np.tile([True, False, False, False], 4)
    entropies = np.array([1, 1, 1, 1, 0, 0, 0, 8, 1, 2, 1, 2, 0.5, 0.5, 0.5, 0.5])
    actual = guided(is_correct, ids, entropies.astype(np.float32), k=2)
    of_one, of_two = passk(is_correct, ids, k=1), passk(is_correct, ids, k=2)
    exploits = np.isin(ids, [5, 7])
    np.testing.assert_array_equal(actual, np.where(exploits, of_one, of_two))
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
        actual = guided(is_correct, ids, np.repeat(entropies, 4).astype(np.float32), k=2)
        # One correct of four: sqrt(3) for one, 1 for pairs.
        expected = [math.sqrt(3) if i in exploits else e >= 0 for i, e in enumerate(entropies)]
        np.testing.assert_allclose(actual[::4], expected, atol=1e-6)

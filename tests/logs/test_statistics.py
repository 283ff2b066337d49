import itertools
import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.logs.statistics import (
    bootstrap_means,
    compute_column_means,
    compute_percentile_interval,
    majority_at_k,
    pass_at_k,
)


def over_subsets(values, k, score):
    """The exact mean of a score over all subsets of k."""
    scores = [score(subset) for subset in itertools.combinations(values, k)]
    return float(Fraction(sum(scores), len(scores)))


def vote(subset):
    """The chance that a vote is right, tied answers drawn at random."""
    votes = Counter(answer for answer, _ in subset if answer)
    if not votes:
        return Fraction(0)
    winners = [answer for answer, count in votes.items() if count == max(votes.values())]
    rights = [Fraction(sum(r for a, r in subset if a == w), votes[w]) for w in winners]
    return sum(rights) / len(winners)


def test_pass_at_k_by_hand():
    assert pass_at_k(4, 1, 2) == 0.5  # 3 of the 6 pairs hold the one
    assert pass_at_k(5, 2, 3) == 0.9  # 1 of the 10 triples holds neither
    assert pass_at_k(3, 3, 1) == 1.0
    assert pass_at_k(3, 0, 3) == 0.0
    assert pass_at_k(4, 2, 3) == 1.0  # only two are wrong


@pytest.mark.parametrize("n", range(1, 7))
def test_pass_at_k_is_the_mean_over_subsets(n):
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        right = [True] * c + [False] * (n - c)
        assert pass_at_k(n, c, k) == over_subsets(right, k, lambda subset: Fraction(any(subset)))


def test_majority_by_hand():
    answers, right = ["paris", "paris", "rome", "oslo"], [True, True, False, False]
    assert majority_at_k(answers, right, 1) == 0.5
    # Of the six pairs one is all Paris, one has none, and four are tied.
    assert majority_at_k(answers, right, 2) == pytest.approx((1 + 4 / 2) / 6)
    # Of the four triples two hold Paris twice, two are tied between three.
    assert majority_at_k(answers, right, 3) == pytest.approx((2 + 2 / 3) / 4)
    assert majority_at_k(answers, right, 4) == 1.0
    assert majority_at_k(["rome", "rome", "paris"], [False, False, True], 3) == 0.0


def test_blank_answers_do_not_vote():
    assert majority_at_k(["", "", "paris"], [False, False, True], 3) == 1.0
    # Of the three pairs one has no vote at all.
    assert majority_at_k(["", "", "paris"], [False, False, True], 2) == pytest.approx(2 / 3)
    assert majority_at_k(["", ""], [False, False], 2) == 0.0


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["", "a", "b", "c", "d"]), st.booleans()), min_size=1, max_size=9
    )
)
def test_majority_is_the_mean_over_subsets(samples):
    answers = [answer for answer, _ in samples]
    right = [bool(answer) and is_right for answer, is_right in samples]
    pairs = list(zip(answers, right, strict=True))
    for k in range(1, len(samples) + 1):
        got = majority_at_k(answers, right, k)
        assert got == pytest.approx(over_subsets(pairs, k, vote), abs=1e-12)
        assert got <= pass_at_k(len(samples), sum(right), k) + 1e-12
    assert majority_at_k(answers, right, 1) == pytest.approx(np.mean(right))


@pytest.mark.filterwarnings("error")
def test_column_means():
    values = np.array([[1.0, math.nan, math.nan], [2.0, 5.0, math.nan]])
    np.testing.assert_array_equal(compute_column_means(values), [1.5, 5.0, math.nan])


def test_intervals_match_scipy():
    rng = np.random.default_rng(0)
    values = np.stack([rng.random(60) < 0.3, rng.exponential(5.0, 60)], axis=1).astype(float)
    means = bootstrap_means(values, num_resamples=20_000, rng=np.random.default_rng(1))
    for column, resampled in zip(values.T, means.T, strict=True):
        got = compute_percentile_interval(resampled)
        wanted = scipy.stats.bootstrap(
            (column,), np.mean, n_resamples=20_000, method="percentile", random_state=2
        ).confidence_interval
        # Two sets of draws: a quantile of 20,000 has an error of about 0.02 standard errors.
        error = column.std() / math.sqrt(60)
        np.testing.assert_allclose(got, wanted, atol=0.1 * error)


def test_resampling_draws_whole_rows():
    values = np.random.default_rng(0).standard_normal((20, 1))
    both = np.hstack([values, -2 * values])
    means = bootstrap_means(both, num_resamples=50, rng=np.random.default_rng(1))
    np.testing.assert_allclose(means[:, 1], -2 * means[:, 0])
    assert means[:, 0].std() > 0


def test_a_question_without_a_value_changes_no_interval_of_the_others():
    # The resample's mean is over those of its questions that have a value.
    values = np.array([[1.0], [math.nan], [3.0]])
    means = bootstrap_means(values, num_resamples=500, rng=np.random.default_rng(0))[:, 0]
    there = means[~np.isnan(means)]
    assert 0 < len(there) < 500
    assert there.min() == 1.0
    assert there.max() == 3.0
    assert compute_percentile_interval(means) == (1.0, 3.0)


def test_interval_by_hand():
    assert compute_percentile_interval(np.arange(101.0), confidence=0.9) == pytest.approx((5, 95))
    assert compute_percentile_interval(np.arange(1001.0)) == pytest.approx((25, 975))
    assert compute_percentile_interval(np.full(10, math.nan)) is None
    assert compute_percentile_interval(np.full(10, 0.5)) == (0.5, 0.5)

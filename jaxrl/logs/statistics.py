"""Pass@k and majority votes over samples of a question, and bootstrap intervals for means."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Sequence

import numpy as np


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Return the probability that k of n samples, without replacement, include a correct one.

    With c correct samples and k from 1 to n, this is 1 - C(n - c, k) / C(n, k), an unbiased
    estimate for the policy (https://arxiv.org/abs/2107.03374, equation 1). It is computed in
    integers until the final division, to avoid overflow and cancellation.
    """
    ways = math.comb(num_samples, k)
    return (ways - math.comb(num_samples - num_correct, k)) / ways


def majority_at_k(answers: Sequence[str], is_correct: Sequence[bool], k: int) -> float:
    """Return the probability that the plurality answer of k samples is correct.

    The plurality vote of https://arxiv.org/abs/2203.11171, averaged over all subsets of size k.
    Tied answers win with equal probability. A blank answer is not a vote; a subset without votes
    counts as wrong. (In verl, subsets are drawn with replacement, and the first tied answer wins.)

    Args:
        answers: The n normalized final answers.
        is_correct: Correctness of each sample. Identical answers count with their mean correctness.
        k: Number of voters, 1 to n.
    """
    votes = Counter(answer for answer in answers if answer)
    num_correct = Counter(
        answer for answer, right in zip(answers, is_correct, strict=True) if answer and right
    )
    num_blank = len(answers) - votes.total()
    total = 0.0
    for answer, count in num_correct.items():
        others = votes.copy()
        num_votes = others.pop(answer)
        other_counts = tuple(sorted(others.values()))
        total += count / num_votes * _compute_win_probability(num_votes, other_counts, num_blank, k)
    return total


@functools.lru_cache(maxsize=100_000)
def _compute_win_probability(
    num_votes: int, other_counts: tuple[int, ...], num_blank: int, k: int
) -> float:
    """Return the probability that an answer with `num_votes` samples wins the vote among k samples.

    `other_counts` contains the number of samples of each other answer, called a rival, and
    `num_blank` the number of samples without an answer. `ways[t, d]` counts the ways to draw d
    samples from the rivals processed so far such that t rivals tie with the answer and none has
    more votes. It is a coefficient of the product of one generating polynomial per rival, in which
    t and d are the exponents. All terms are positive, so there is no cancellation.
    """
    from scipy.signal import convolve2d  # a slow import that is rarely needed

    total = 0.0
    for votes in range(1, min(num_votes, k) + 1):
        num_remaining = k - votes
        max_ties = min(len(other_counts), num_remaining // votes)
        ways = np.ones((1, 1))
        for other_count in other_counts:
            polynomial = np.zeros((2, votes + 1))
            polynomial[0, :votes] = [math.comb(other_count, drawn) for drawn in range(votes)]
            polynomial[1, votes] = math.comb(other_count, votes)
            ways = convolve2d(ways, polynomial)[: max_ties + 1, : num_remaining + 1]
        blanks = np.array(
            [float(math.comb(num_blank, num_remaining - d)) for d in range(ways.shape[1])]
        )
        shares = 1.0 / np.arange(1, len(ways) + 1)
        total += math.comb(num_votes, votes) * float(shares @ ways @ blanks)
    return total / math.comb(num_votes + sum(other_counts) + num_blank, k)


def compute_column_means(values: np.ndarray) -> np.ndarray:
    """Return the column means, float [M], of `values` [Q, M], ignoring NaN; NaN if all are NaN."""
    return _divide_by_counts(_append_mask(values).sum(axis=0))


def bootstrap_means(
    values: np.ndarray, *, num_resamples: int, rng: np.random.Generator
) -> np.ndarray:
    """Compute the column means, float [B, M], of bootstrap resamples of the rows.

    Args:
        values: One row per question, float [Q, M]; NaN if a question has no value.
        num_resamples: Number of resamples B.
        rng: Random generator that draws the rows.
    """
    num_rows, masked_values = len(values), _append_mask(values)
    sums = np.empty((num_resamples, masked_values.shape[1]))
    for index in range(num_resamples):
        drawn = rng.integers(num_rows, size=num_rows)
        counts = np.bincount(drawn, minlength=num_rows).astype(float)
        sums[index] = counts @ masked_values
    return _divide_by_counts(sums)


def _append_mask(values: np.ndarray) -> np.ndarray:
    """Replace NaN with 0 and append a mask that is 1 where a value is present: [Q, 2M]."""
    is_present = ~np.isnan(values)
    return np.hstack([np.where(is_present, values, 0.0), is_present])


def _divide_by_counts(sums: np.ndarray) -> np.ndarray:
    totals, counts = np.split(sums, 2, axis=-1)
    return np.divide(totals, counts, out=np.full_like(totals, np.nan), where=counts > 0)


def compute_percentile_interval(
    resampled: np.ndarray, *, confidence: float = 0.95
) -> tuple[float, float] | None:
    """Return the percentile bootstrap interval of resampled means; None if all are NaN.

    Efron and Tibshirani, An Introduction to the Bootstrap, chapter 13.
    """
    values = resampled[~np.isnan(resampled)]
    if not len(values):
        return None
    tail = 100 * (1 - confidence) / 2
    low, high = np.percentile(values, [tail, 100 - tail])
    return float(low), float(high)

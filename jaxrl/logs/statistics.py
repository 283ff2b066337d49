"""Pass@k and votes over several samples of a question, and intervals of a mean over questions.

Plain numbers on the host; `evaluate` applies them.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Sequence

import numpy as np


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Chance that k of the samples, drawn without replacement, hold a correct one.

    1 - C(n - c, k) / C(n, k), the unbiased estimate of the chance that k samples of the policy
    hold one (https://arxiv.org/abs/2107.03374, equation 1). Whole numbers up to the one division:
    nothing overflows or cancels.

    Args:
        num_samples: n.
        num_correct: c, of them.
        k: 1 to n.
    """
    ways = math.comb(num_samples, k)
    return (ways - math.comb(num_samples - num_correct, k)) / ways


def majority_at_k(answers: Sequence[str], is_correct: Sequence[bool], k: int) -> float:
    """Chance that the majority's answer of k samples, drawn without replacement, is correct.

    The mean over all subsets of k, as in `pass_at_k`, of the plurality vote of
    https://arxiv.org/abs/2203.11171. Where several answers have the most votes, each wins with the
    same chance. A blank answer is no vote; a subset without votes counts as wrong. Of one sample
    it is the mean of `is_correct`. (verl draws with replacement and lets the first of the tied
    answers win.)

    Args:
        answers: n normalised final answers.
        is_correct: of each; where equal answers differ in it, the share of the correct ones counts.
        k: 1 to n.
    """
    votes = Counter(answer for answer in answers if answer)
    num_correct = Counter(
        answer for answer, right in zip(answers, is_correct, strict=True) if answer and right
    )
    num_blank = len(answers) - votes.total()
    total = 0.0
    for answer, count in num_correct.items():
        others = votes.copy()
        own = others.pop(answer)
        rivals = tuple(sorted(others.values()))
        total += count / own * _win_probability(own, rivals, num_blank, k)
    return total


@functools.lru_cache(maxsize=100_000)
def _win_probability(own: int, rivals: tuple[int, ...], num_blank: int, k: int) -> float:
    """Chance that an answer given `own` times wins the vote among k of all samples.

    Counts the subsets: `ways[t, d]` of them take d samples from the rivals seen so far, of which t
    have as many votes as the answer and none more. A rival is a polynomial in t and d, and rivals
    multiply. All terms are positive, so floats lose nothing.

    Args:
        own: samples that gave the answer.
        rivals: samples that gave each of the other answers.
        num_blank: samples without an answer.
        k: samples that are drawn.
    """
    from scipy.signal import convolve2d  # late: it takes a second, and few evaluations vote

    total = 0.0
    for votes in range(1, min(own, k) + 1):
        room = k - votes
        max_ties = min(len(rivals), room // votes)
        ways = np.ones((1, 1))
        for rival in rivals:
            taken = np.zeros((2, votes + 1))
            taken[0, :votes] = [math.comb(rival, drawn) for drawn in range(votes)]
            taken[1, votes] = math.comb(rival, votes)
            ways = convolve2d(ways, taken)[: max_ties + 1, : room + 1]
        blanks = np.array([float(math.comb(num_blank, room - d)) for d in range(ways.shape[1])])
        shares = 1.0 / np.arange(1, len(ways) + 1)
        total += math.comb(own, votes) * float(shares @ ways @ blanks)
    return total / math.comb(own + sum(rivals) + num_blank, k)


def column_means(values: np.ndarray) -> np.ndarray:
    """Means of the columns, float `[M]` of `[Q, M]`.

    NaN entries are left out; where nothing is left, the mean is NaN.
    """
    return _means_of_sums(_with_presence(values).sum(axis=0))


def bootstrap_means(
    values: np.ndarray, *, num_resamples: int, rng: np.random.Generator
) -> np.ndarray:
    """Means of the columns over questions drawn anew, with replacement, as many as there are.

    Every row is drawn as a whole, so what the columns have in common stays together.

    Args:
        values: float [Q, M], a row a question; NaN where a question has no value.
        num_resamples: B.
        rng: draws.

    Returns:
        float [B, M], as of `column_means`.
    """
    num_rows, with_presence = len(values), _with_presence(values)
    sums = np.empty((num_resamples, with_presence.shape[1]))
    for index in range(num_resamples):
        drawn = rng.integers(num_rows, size=num_rows)
        times = np.bincount(drawn, minlength=num_rows).astype(float)
        sums[index] = times @ with_presence
    return _means_of_sums(sums)


def _with_presence(values: np.ndarray) -> np.ndarray:
    """The values, 0 for NaN, and beside them, `[Q, 2M]`, whether they are there."""
    is_there = ~np.isnan(values)
    return np.hstack([np.where(is_there, values, 0.0), is_there])


def _means_of_sums(sums: np.ndarray) -> np.ndarray:
    totals, counts = np.split(sums, 2, axis=-1)
    return np.divide(totals, counts, out=np.full_like(totals, np.nan), where=counts > 0)


def percentile_interval(
    resampled: np.ndarray, *, confidence: float = 0.95
) -> tuple[float, float] | None:
    """Bounds that leave the same share of resampled means on either side; None if there are none.

    The percentile bootstrap (Efron and Tibshirani, An Introduction to the Bootstrap, chapter 13).
    """
    values = resampled[~np.isnan(resampled)]
    if not len(values):
        return None
    outside = 100 * (1 - confidence) / 2
    low, high = np.percentile(values, [outside, 100 - outside])
    return float(low), float(high)

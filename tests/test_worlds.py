"""The benchmark of the methods' worlds: what it runs and what it reads of a run."""

import pytest

from benchmarks import worlds
from benchmarks.worlds import mean_halfway, mean_of_first_fifth, mean_of_last_fifth


def samples(scores):
    return {"sampled": [{"task_id": name, "exact_match": score} for name, score in scores]}


def test_a_gain_is_that_of_the_same_questions(tmp_path):
    """Hand-worked: 12 of 16 questions gain 1 and 4 lose 1, whatever order they were asked in."""
    names = [f"q{i:02}" for i in range(16)]
    before = [(name, float(i >= 12)) for i, name in enumerate(names)]
    after = [(name, float(i < 12)) for i, name in enumerate(names)][::-1]
    records = [{"questions": samples(scores)} for scores in (before, after)]
    mean, low, high = worlds.compute_gain(*records, "sampled", "exact_match")
    assert mean == 0.5
    # In a resample n gain, binomial of 16 and 3 in 4: its 2.5% and 97.5% quantiles are 8 and 15.
    assert (low, high) == (2 * 8 / 16 - 1, 2 * 15 / 16 - 1)
    # Two samples of one question are one value of that question.
    records[0]["questions"]["sampled"] += samples([("q00", 1.0)])["sampled"]
    assert worlds.compute_gain(*records, "sampled", "exact_match")[0] == (0.5 * 16 - 0.5) / 16
    records[1]["questions"]["sampled"].pop()
    with pytest.raises(ValueError, match="asked different questions"):
        worlds.compute_gain(*records, "sampled", "exact_match")


def test_the_first_and_the_last_fifth_by_hand():
    assert (mean_of_first_fifth(range(10)), mean_of_last_fifth(range(10))) == (0.5, 8.5)
    assert (mean_of_first_fifth([7]), mean_halfway([7]), mean_of_last_fifth([7])) == (7, 7, 7)
    assert (mean_halfway(range(10)), mean_halfway(range(4))) == (3.5, 1)

"""Steps that teach nothing say why; a run in which everything fails stops."""

import dataclasses

import pytest

from jaxrl.objectives.metrics import Metric
from jaxrl.training.failures import (
    FailureCounter,
    NothingWorksError,
    explain_no_learning,
    first_error,
    has_learned,
)
from tests.episodes import FAILED, make_failure, make_trajectory

UPDATED = {"grad_norm": Metric(0.5), "skipped": Metric(0.0)}
STILL = {"grad_norm": Metric(0.0), "skipped": Metric(0.0)}
SKIPPED = {"grad_norm": Metric(float("nan")), "skipped": Metric(1.0)}
ENDLESS = {"grad_norm": Metric(float("inf")), "skipped": Metric(1.0)}


def failure(text):
    made = make_failure()
    return dataclasses.replace(made, turns=(dataclasses.replace(FAILED, error=text),))


def equal(**fields):
    return dataclasses.replace(make_trajectory(**fields), advantage=0.0)


def counted(limit):
    said = []
    return FailureCounter(limit=limit, log=said.append, num_batches=0), said


def test_the_first_error_is_one_short_printable_line():
    trajectories = [make_trajectory(), failure("no\n  such\x1b[31m host"), failure("other")]
    assert first_error(trajectories) == "no such\\x1b[31m host"
    assert len(first_error([failure("x" * 10_000)])) < 250
    assert first_error([dataclasses.replace(make_failure(), turns=())]) == "no error message"
    assert first_error([make_trajectory()]) == ""


class TestFailures:
    def test_the_run_stops_after_so_many_in_a_row(self):
        failures, said = counted(2)
        failures.record_batch([failure("down"), failure("too")])
        failures.record_batch([make_trajectory(), failure("down")])  # one that works
        failures.record_batch([failure("still down")])
        with pytest.raises(NothingWorksError, match=r"2 batches in a row .*: gone\. The policy"):
            failures.record_batch([failure("gone")])
        assert [line.rpartition(": ")[2] for line in said] == ["down", "still down", "gone"]
        assert said[0].startswith("warning: each of the 2 episodes of this batch ended in")
        with pytest.raises(NothingWorksError):  # as it is after a restart that mended nothing
            failures.record_batch([failure("gone")])

    def test_never(self):
        failures, said = counted(0)
        for _ in range(9):
            failures.record_batch([failure("down")])
        assert len(said) == 9

    def test_an_evaluation_without_any_score(self):
        failures, _ = counted(3)
        failures.check_suites({})
        with pytest.raises(
            NothingWorksError, match=r"evaluation \(greedy, sampled\) .*: down\. The"
        ):
            failures.check_suites({"greedy": "down", "sampled": "too"})
        counted(0)[0].check_suites({"greedy": "down"})  # never


def test_what_moved_the_weights():
    assert has_learned([STILL, UPDATED])
    assert not any(has_learned(m) for m in ([], [STILL], [SKIPPED], [ENDLESS]))


class TestWhy:
    def test_a_signal(self):
        member = dataclasses.replace(make_trajectory(reward=1.0), advantage=0.5)
        assert explain_no_learning([member, make_trajectory()], [UPDATED]) is None
        assert explain_no_learning([member, make_trajectory()], [SKIPPED, UPDATED]) is None

    def test_a_skipped_update(self):
        member = dataclasses.replace(make_trajectory(reward=1.0), advantage=0.5)
        assert explain_no_learning([member], [SKIPPED]).startswith("its update was skipped")
        assert explain_no_learning([member], []).startswith(
            "no trajectory has a loss (config.filter.tra"
        )

    def test_equal_rewards(self):
        got = explain_no_learning([equal(reward=-0.5)] * 3, [STILL])
        assert got == "no trajectory had a signal: all compared values were equal (rewards -0.5)"
        got = explain_no_learning([equal(reward=1.0), equal(reward=0.0)], [STILL])
        assert got.endswith("(rewards 0 to 1)")
        right = dataclasses.replace(equal(reward=1.0), is_correct=True)
        assert explain_no_learning([right, equal(reward=1.0)], [STILL]).endswith("(rewards 1)")
        assert explain_no_learning([right, right], [STILL]) is None

    def test_failures_beside_equal_rewards(self):
        got = explain_no_learning([equal(), failure("down"), failure("x")], [STILL])
        assert got.endswith("(rewards 0)")  # their number is told in any case

    def test_everything_failed_is_told_before(self):
        assert explain_no_learning([failure("down")], []) is None

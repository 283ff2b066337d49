"""A run in which everything fails stops and names the first error."""

import dataclasses

import pytest

from jaxrl.objectives.metrics import Metric
from jaxrl.training.failures import (
    AllEpisodesFailedError,
    FailureCounter,
    describe_first_error,
    has_updated_params,
)
from tests.episodes import FAILED, make_failure, make_trajectory

UPDATED = {"grad_norm": Metric(0.5), "skipped": Metric(0.0)}
STILL = {"grad_norm": Metric(0.0), "skipped": Metric(0.0)}
SKIPPED = {"grad_norm": Metric(float("nan")), "skipped": Metric(1.0)}


def fail_with(text):
    return dataclasses.replace(make_failure(), turns=(dataclasses.replace(FAILED, error=text),))


def make_counter(limit):
    lines = []
    return FailureCounter(limit=limit, log=lines.append, num_batches=0), lines


def test_the_first_error_is_one_short_printable_line():
    trajectories = [make_trajectory(), fail_with("no\n  such\x1b[31m host"), fail_with("down")]
    assert describe_first_error(trajectories) == "no such\\x1b[31m host"
    assert len(describe_first_error([fail_with("x" * 10_000)])) < 250
    assert (
        describe_first_error([dataclasses.replace(make_failure(), turns=())]) == "no error message"
    )
    assert describe_first_error([make_trajectory()]) == ""


def test_a_run_stops_after_batches_in_a_row_that_failed():
    failures, lines = make_counter(2)
    failures.record_batch([fail_with("down"), fail_with("too")])
    failures.record_batch([make_trajectory(), fail_with("down")])  # one works
    failures.record_batch([fail_with("still down")])
    for _ in range(2):  # as after a restart that mended nothing
        with pytest.raises(AllEpisodesFailedError, match=r"batches in a row .*: gone\. The policy"):
            failures.record_batch([fail_with("gone")])
    assert [line.rpartition(": ")[2] for line in lines[:3]] == ["down", "still down", "gone"]


def test_an_evaluation_without_any_score_stops_the_run():
    failures, _ = make_counter(3)
    failures.check_suites({})
    with pytest.raises(
        AllEpisodesFailedError, match=r"evaluation \(greedy, sampled\) .*: down\. The"
    ):
        failures.check_suites({"greedy": "down", "sampled": "too"})


def test_a_limit_of_zero_never_stops_the_run():
    failures, lines = make_counter(0)
    for _ in range(9):
        failures.record_batch([fail_with("down")])
    assert len(lines) == 9
    failures.check_suites({"greedy": "down"})


def test_a_step_has_learned_if_an_update_had_a_gradient():
    assert has_updated_params([STILL, UPDATED])
    assert not any(has_updated_params(metrics) for metrics in ([], [STILL], [SKIPPED]))

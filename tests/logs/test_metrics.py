import dataclasses
import math

import pytest

from jaxrl.envs.base import CallRecord, Outcome
from jaxrl.logs.metrics import (
    compute_environment_metrics,
    compute_rollout_metrics,
    compute_search_metrics,
)
from jaxrl.types import GroupStats
from tests.episodes import ANSWER, COMPUTE, SEARCH, grouped, make_failure, make_trajectory


class TestRolloutMetrics:
    def test_by_hand(self):
        members = [
            make_trajectory(reward=1.0, length=6, parts={"exact_match": 1.0}),
            make_trajectory(reward=0.0, length=10, turns=(ANSWER,), parts={"exact_match": 0.0}),
            make_trajectory(
                reward=-1.0, length=7, outcome=Outcome.MALFORMED, parts={"exact_match": 0.0}
            ),
            make_failure(length=50),
        ]
        got = compute_rollout_metrics(members, max_response_tokens=8)
        assert got == {
            "critic/rewards/mean": 0.0,
            "critic/rewards/max": 1.0,
            "critic/rewards/min": -1.0,
            "reward/exact_match/mean": pytest.approx(1 / 3),
            "response_length/mean": pytest.approx((4 + 8 + 5) / 3),
            "response_length/max": 8,
            "response_length/clip_ratio": pytest.approx(1 / 3),
            "num_turns/mean": pytest.approx(5 / 3),
            "num_searches/mean": pytest.approx(2 / 3),
            "outcome/answered": 0.5,
            "outcome/abstained": 0.0,
            "outcome/malformed": 0.25,
            "outcome/out_of_budget": 0.0,
            "outcome/environment_error": 0.25,
        }

    def test_python_calls_are_not_counted_as_searches(self):
        trajectory = make_trajectory(turns=(SEARCH, COMPUTE, COMPUTE, ANSWER))
        got = compute_rollout_metrics([trajectory], max_response_tokens=8, has_python=True)
        assert (got["num_searches/mean"], got["num_python_calls/mean"]) == (1, 2)

    @pytest.mark.filterwarnings("error")
    def test_environment_errors_are_no_reward_of_zero(self):
        got = compute_rollout_metrics([make_failure(), make_failure()], max_response_tokens=8)
        assert got["outcome/environment_error"] == 1.0
        numbers = {name: x for name, x in got.items() if not name.startswith("outcome/")}
        assert all(math.isnan(value) for value in numbers.values())


def test_search_metrics_by_hand():
    calls = [
        ("tool", 1, 0.2, None),
        ("tool", 4, 1.0, "busy"),
        ("cache", 0, 0.0, None),
        ("shared", 0, 0.4, None),
        ("replay", 0, 0.0, None),
        ("fallback", 2, 0.8, "down"),
    ]
    records = [
        CallRecord(call="q", source=source, attempts=attempts, waited_s=waited_s, error=error)
        for source, attempts, waited_s, error in calls
    ]
    python = CallRecord(call="1", tool="python", waited_s=99.0)
    assert compute_search_metrics([*records, python]) == {
        "perf/search/calls": 6,
        "perf/search/cache_hits": 1,
        "perf/search/shared": 1,
        "perf/search/replayed": 1,
        "perf/search/attempts": 7,
        "perf/search/retries": 4,
        "perf/search/failed": 2,
        "timing_s/search/mean": pytest.approx(0.4),
        "timing_s/search/max": 1.0,
    }
    assert compute_search_metrics([python]) == {}


def in_environment(name, trajectory):
    task = dataclasses.replace(trajectory.task, environment=name)
    return dataclasses.replace(trajectory, task=task)


class TestEnvironmentMetrics:
    def compute(self, trajectories, dropped=()):
        stats = map(GroupStats.from_group, grouped([*trajectories, *dropped]))
        return compute_environment_metrics(trajectories, [*stats], max_response_tokens=8)

    def test_by_hand(self):
        trained = [
            in_environment("search", make_trajectory(reward=1.0, parts={"exact_match": 1.0})),
            in_environment("search", make_trajectory(reward=0.0, parts={"exact_match": 0.0})),
            in_environment("math", make_trajectory(reward=-3.0, task_number=1)),
            in_environment("math", make_failure(task_number=1)),
        ]
        dropped = [in_environment("math", make_trajectory(task_number=2))]
        got = self.compute(trained, dropped)
        assert (got["env/search/share"], got["env/math/share"]) == (0.5, 0.5)
        assert got["env/search/critic/rewards/mean"] == 0.5
        assert got["env/search/reward/exact_match/mean"] == 0.5
        assert got["env/math/critic/rewards/mean"] == -3.0
        assert got["env/math/outcome/environment_error"] == 0.5
        assert "env/math/reward/exact_match/mean" not in got
        assert got["env/math/rollout/partial_groups"] == 1
        assert got["env/math/filter/all_wrong_share"] == 1.0  # also of the dropped group

    def test_nothing_is_nan(self):
        failed = [in_environment("math", make_failure()), in_environment("math", make_failure())]
        dropped = [in_environment("code", make_trajectory(task_number=1))]
        got = self.compute(failed, dropped)
        assert all(map(math.isfinite, got.values()))
        assert got["env/math/filter/failed_share"] == 1.0
        assert got["env/code/share"] == 0.0
        assert "env/math/critic/rewards/mean" not in got
        assert "env/code/critic/rewards/mean" not in got
        assert not any(name.startswith("env/search/") for name in got)  # no group in this step

    def test_a_run_with_one_environment_has_none(self):
        assert self.compute([make_trajectory()]) == {}

import math

import pytest

from jaxrl.envs.base import CallRecord, Outcome
from jaxrl.logs.metrics import compute_rollout_metrics, compute_search_metrics
from tests.episodes import ANSWER, COMPUTE, SEARCH, make_failure, make_trajectory


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

"""Usage counters of trajectories, their sums, and the budget."""

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.envs.base import SOURCES, CallRecord, Turn
from jaxrl.training.usage import BudgetSpentError, Usage, UsageStats, check_budget
from tests.episodes import ANSWER, COMPUTE, SEARCH, make_failure, make_trajectory

PRICES = {"search": 0.5, "python": 0.25}
CALLS = (
    CallRecord(call="a", attempts=3, waited_s=4.0),
    CallRecord(call="a", source="cache", attempts=0),
    CallRecord(call="a", source="shared", attempts=0, waited_s=1.0),
    CallRecord(call="b", source="replay", attempts=0),
    CallRecord(call="c", source="fallback", attempts=2, waited_s=8.0, error="down"),
    CallRecord(call="d", tool="python", waited_s=2.0),
)


def with_calls(*calls, length=9, inserted=3):
    """Return a trajectory with two prompt tokens, inserted tokens and sampled tokens."""
    turns = (Turn(text="x", tool_call="x", observation="y", records=calls), ANSWER)
    trajectory = make_trajectory(turns=turns, length=length)
    mask = trajectory.loss_mask.copy()
    mask[2 : 2 + inserted] = False
    return dataclasses.replace(trajectory, loss_mask=mask)


def test_usage_by_hand():
    actual = UsageStats.from_trajectories(
        [with_calls(*CALLS), make_failure(), make_trajectory(turns=(ANSWER,))], PRICES
    )
    assert actual.num_trajectories == 3
    assert actual.num_calls == {"search": 6, "python": 1}  # the failure's too
    assert (actual.observation_tokens, actual.sampled_tokens) == (3, 4 + 4 + 4)
    attempts = {"search": 3 + 2 + 1, "python": 1}
    assert actual.usage == Usage(attempts=attempts, cost=6 * 0.5 + 0.25)


def test_judges_are_counted_beside_tools():
    asked = CallRecord(call="p", tool="helpful", attempts=3, waited_s=2.0)
    cached = CallRecord(call="p", tool="helpful", source="cache", attempts=0)
    failure = dataclasses.replace(make_failure(), reward_records=(asked,))
    judged = dataclasses.replace(with_calls(*CALLS), reward_records=(asked, cached))
    actual = UsageStats.from_trajectories([judged, failure], {**PRICES, "helpful": 2.0})
    assert actual.num_calls == {"search": 6, "python": 1, "helpful": 3}  # the failure made a search
    assert actual.usage.attempts == {"search": 6, "python": 1, "helpful": 6}
    assert actual.usage.cost == 6 * 0.5 + 0.25 + 6 * 2.0
    check_budget(actual, max_cost=15.3, max_calls=14)


def test_the_searches_of_a_control_reach_no_engine():
    actual = UsageStats.from_trajectories(
        [make_trajectory(turns=(SEARCH, COMPUTE))], PRICES, is_control=True
    )
    assert actual.num_calls == {"python": 1}
    assert actual.usage.cost == 0.25
    assert actual.sampled_tokens == 4


def test_the_tokens_of_an_endpoint_are_counted_and_paid():
    usage = {"calls": 2, "attempts": 3, "prompt_tokens": 14, "completion_tokens": 6, "cost": 0.125}
    trajectory = dataclasses.replace(make_trajectory(turns=(SEARCH, ANSWER)), usage=usage)
    actual = UsageStats.from_trajectories([trajectory, trajectory], PRICES)
    assert actual.usage.policy == {name: 2 * value for name, value in usage.items()}
    assert actual.usage.cost == 2 * (0.125 + 0.5)
    assert actual.usage.attempts == {"search": 2}  # the model is no tool
    metrics = actual.metrics()
    assert metrics["perf/ledger/total/policy/prompt_tokens"] == 28
    assert metrics["perf/ledger/total/policy/cost"] == 0.25


calls = st.builds(
    CallRecord,
    call=st.just("q"),
    tool=st.sampled_from([None, "python"]),
    source=st.sampled_from(SOURCES),
    attempts=st.integers(0, 5),
    waited_s=st.floats(0, 100),
    error=st.sampled_from([None, "down"]),
)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(calls, max_size=4), max_size=6), st.integers(0, 6))
def test_usage_adds_up(groups, cut):
    trajectories = [with_calls(*group) for group in groups]
    whole = UsageStats.from_trajectories(trajectories, PRICES)
    first, second = trajectories[:cut], trajectories[cut:]
    total = UsageStats.from_trajectories(first, PRICES) + UsageStats.from_trajectories(
        second, PRICES
    )
    assert total.usage.cost == pytest.approx(whole.usage.cost)
    assert without_cost(total) == without_cost(whole)
    assert UsageStats.from_json(json.loads(json.dumps(total.to_json()))) == total


def without_cost(stats):
    """Return the usage without its float, because sums of floats are rounded."""
    return dataclasses.replace(stats, usage=dataclasses.replace(stats.usage, cost=0.0))


def test_a_run_ends_at_its_limits_and_not_before():
    spent = UsageStats.from_trajectories([with_calls(*CALLS)], PRICES)  # 2.75 in six attempts
    check_budget(spent, max_cost=0.0, max_calls=0)
    check_budget(spent, max_cost=2.76, max_calls=7)
    with pytest.raises(BudgetSpentError, match=r"spent 2.75 of config.ledger.max_cost=2.75; "):
        check_budget(spent, max_cost=2.75, max_calls=7)
    with pytest.raises(BudgetSpentError, match=r"spent 6 of config.ledger.max_calls=6; "):
        check_budget(spent, max_cost=0.0, max_calls=6)

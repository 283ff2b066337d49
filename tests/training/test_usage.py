"""Ledgers of trajectories made by hand, and that they add up."""

import dataclasses
import functools
import json
import math
import operator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl.envs.base import SOURCES, CallRecord, Turn
from jaxrl.logs.metrics import search_metrics
from jaxrl.training.usage import BudgetSpentError, Ledger, Usage, Waits, check_budget
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
    """Two tokens of the prompt, some inserted, the others sampled."""
    turns = (Turn(text="x", tool_call="x", observation="y", records=calls), ANSWER)
    made = make_trajectory(turns=turns, length=length)
    mask = made.loss_mask.copy()
    mask[2 : 2 + inserted] = False
    return dataclasses.replace(made, loss_mask=mask)


def test_a_ledger_by_hand():
    got = Ledger.of([with_calls(*CALLS), make_failure(), make_trajectory(turns=(ANSWER,))], PRICES)
    assert got.num_trajectories == 3
    assert got.num_calls == {"search": 6, "python": 1}  # the failure's too
    assert (got.observation_tokens, got.sampled_tokens) == (3, 4 + 4 + 4)
    usage = got.usage
    assert usage.attempts == {"search": 3 + 2 + 1, "python": 1}
    assert usage.sources == {"tool": 3, "cache": 1, "shared": 1, "replay": 1, "fallback": 1}
    assert (usage.num_retries, usage.num_failed) == (2 + 1, 1 + 1)
    assert usage.cost == 6 * 0.5 + 0.25
    assert (usage.waits.num_calls, usage.waits.max_s) == (7, 8.0)
    assert usage.waits.total_s == 4 + 1 + 8 + 2


def test_environments_without_records_are_counted_too():
    got = Ledger.of([make_trajectory(turns=(SEARCH, COMPUTE, ANSWER))], PRICES)
    assert got.num_calls == got.usage.attempts == {"search": 1, "python": 1}
    assert got.usage.cost == 0.75
    assert got.usage.waits.total_s == 0.5


def test_judges_are_counted_beside_tools_and_spend_the_budget():
    asked = CallRecord(call="p", tool="helpful", attempts=3, waited_s=2.0)
    kept = CallRecord(call="p", tool="helpful", source="cache", attempts=0)
    failure = dataclasses.replace(make_failure(), reward_records=(asked,))
    made = dataclasses.replace(with_calls(*CALLS), reward_records=(asked, kept))
    got = Ledger.of([made, failure], {**PRICES, "helpful": 2.0})
    assert got.num_calls == {"search": 6, "python": 1, "helpful": 3}  # the failure made a search
    assert got.usage.attempts == {"search": 6, "python": 1, "helpful": 6}
    assert got.usage.cost == 6 * 0.5 + 0.25 + 6 * 2.0
    assert got.usage.num_retries == 3 + 2 + 2
    assert got.used("")["perf/ledger/attempts/helpful"] == 6
    check_budget(got, max_cost=15.3, max_calls=14)
    with pytest.raises(BudgetSpentError, match=r"spent 13 of config\.ledger\.max_calls=13"):
        check_budget(got, max_cost=15.3, max_calls=13)


def test_the_searches_of_a_control_reach_no_engine():
    got = Ledger.of([make_trajectory(turns=(SEARCH, COMPUTE))], PRICES, is_control=True)
    assert got.num_calls == {"python": 1}
    assert got.usage.cost == 0.25
    assert got.sampled_tokens == 4


def test_its_metrics_by_hand():
    run = Ledger.of([with_calls(*CALLS)], PRICES)
    step = Ledger.of([make_trajectory(turns=(SEARCH, ANSWER))], PRICES)
    assert step.asked("", run) == {
        "ledger/trajectories": 1,
        "ledger/observation_tokens": 0,
        "ledger/sampled_tokens": 4,
        "ledger/calls/search": 1,
        "ledger/calls/python": 0,  # the run has called it
    }
    assert run.asked("total/")["ledger/total/calls/search"] == 5
    used = run.used("total/")
    assert used["timing_s/ledger/total/max"] == 8.0
    assert {name: value for name, value in used.items() if name.startswith("perf/")} == {
        "perf/ledger/total/cost": 2.75,
        "perf/ledger/total/attempts/python": 1,
        "perf/ledger/total/attempts/search": 5,
        "perf/ledger/total/cache_hits": 1,
        "perf/ledger/total/shared": 1,
        "perf/ledger/total/replayed": 1,
        "perf/ledger/total/retries": 3,
        "perf/ledger/total/failed": 1,
    }
    free = Ledger.of([make_trajectory(turns=(ANSWER,))], {})
    assert free.used("total/") == {}
    assert "ledger/total/calls/search" not in free.asked("total/")


def test_searches_are_told_as_a_step_tells_them():
    searches = [call for call in CALLS if call.tool is None]
    used, told = Ledger.of([with_calls(*searches)], PRICES).used(""), search_metrics(searches)
    for name in ("cache_hits", "shared", "replayed", "retries", "failed"):
        assert used[f"perf/ledger/{name}"] == told[f"perf/search/{name}"]
    assert used["perf/ledger/attempts/search"] == told["perf/search/attempts"]
    for name in ("mean", "max"):
        assert used[f"timing_s/ledger/{name}"] == told[f"timing_s/search/{name}"]


def test_waits_by_hand():
    waits = Waits.of([0.1] * 90 + [2.0] * 9 + [40.0])
    got = waits.metrics()
    assert got["p50"] == pytest.approx(0.1, rel=0.022)
    assert got["p95"] == pytest.approx(2.0, rel=0.022)
    assert got["max"] == 40.0
    assert got["mean"] == pytest.approx((9 + 18 + 40) / 100)
    assert Waits.of([]).metrics() == {}
    assert Waits.of([0.0, 0.0]).metrics() == {"p50": 0.0, "p95": 0.0, "mean": 0.0, "max": 0.0}


@given(st.lists(st.floats(1e-5, 1e4), min_size=1, max_size=60), st.floats(0.01, 1.0))
def test_percentiles_are_near_those_of_the_sorted_waits(waits, share):
    exact = sorted(waits)[math.ceil(share * len(waits) - 1e-12) - 1]
    assert Waits.of(waits).percentile(share) == pytest.approx(exact, rel=0.023)


calls = st.builds(
    CallRecord,
    call=st.just("q"),
    tool=st.sampled_from([None, "python"]),
    source=st.sampled_from(SOURCES),
    attempts=st.integers(0, 5),
    waited_s=st.floats(0, 100),
    error=st.sampled_from([None, "down"]),
)


@given(st.lists(st.lists(calls, max_size=4), max_size=6), st.integers(0, 6))
def test_ledgers_add_up(groups, cut):
    made = [with_calls(*group) for group in groups]
    whole = Ledger.of(made, PRICES)
    parts = Ledger.of(made[:cut], PRICES) + Ledger.of(made[cut:], PRICES)
    each = functools.reduce(operator.add, [Ledger.of([one], PRICES) for one in made], Ledger())
    for other in (parts, each):
        assert other.usage.cost == pytest.approx(whole.usage.cost)
        assert plain(other) == plain(whole)
        assert Ledger.from_json(json.loads(json.dumps(other.to_json()))) == other


def plain(ledger):
    """Without the floats, whose sums round, and without zeros."""
    waits = dataclasses.replace(ledger.usage.waits, total_s=0.0)
    usage = dataclasses.replace(ledger.usage, cost=0.0, waits=waits)
    return dataclasses.replace(ledger, usage=usage)


def test_only_what_the_tool_was_asked_is_paid():
    for source in ("cache", "shared", "replay"):
        assert Usage.of([CallRecord(call="a", source=source)], PRICES).cost == 0.0
    assert Usage.of([CallRecord(call="a", attempts=4)], {}).cost == 0.0


def test_a_run_ends_at_its_limits_and_not_before():
    spent = Ledger.of([with_calls(*CALLS)], PRICES)  # 2.75 in six attempts
    check_budget(spent, max_cost=0.0, max_calls=0)
    check_budget(spent, max_cost=2.76, max_calls=7)
    with pytest.raises(BudgetSpentError, match=r"spent 2.75 of config.ledger.max_cost=2.75; "):
        check_budget(spent, max_cost=2.75, max_calls=7)
    with pytest.raises(BudgetSpentError, match=r"spent 6 of config.ledger.max_calls=6; "):
        check_budget(spent, max_cost=0.0, max_calls=6)

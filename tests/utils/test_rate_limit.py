"""Limits and breaker with time as an argument."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl.utils.rate_limit import CircuitBreaker, RateLimiter, clip_wait_s


def test_a_rate_by_hand():
    limit = RateLimiter(2.5)  # two within 0.8 s
    assert limit.burst == 2
    assert [limit.reserve(1, 0.0) for _ in range(5)] == [0.0, 0.0, 0.8, 0.8, 1.6]
    assert limit.reserve(2, 1.7) == pytest.approx(2.4)  # one started at 1.6
    assert limit.reserve(1, 9.0) == 9.0
    assert RateLimiter(0.25).burst == 1
    slow = RateLimiter(0.25)
    assert [slow.reserve(1, 1.0) for _ in range(3)] == [1.0, 5.0, 9.0]


@given(
    rate=st.floats(0.1, 20.0),
    gaps=st.lists(st.tuples(st.floats(0.0, 3.0), st.integers(1, 20)), max_size=60),
)
def test_a_rate_is_never_exceeded_whatever_comes(rate, gaps):
    limit, now, starts, waited = RateLimiter(rate), 0.0, [], []
    for gap, count in gaps:
        now += gap
        start = limit.reserve(min(count, limit.burst), now)
        assert start >= now
        starts += [start] * min(count, limit.burst)
        waited.append(start - now)
    assert starts == sorted(starts)
    window_s = limit.burst / rate
    for first, after in zip(starts, starts[limit.burst :], strict=False):
        assert after - first >= window_s * (1 - 1e-9)
    # Nobody waits where there is room: the limit costs no more than the queries that it holds up.
    total_s = math.ceil(len(starts) / limit.burst) * window_s
    assert max(waited, default=0.0) <= total_s + 1e-9


def breaker(**settings):
    return CircuitBreaker(**{"max_failures": 3, "cooldown_s": 5.0, "patience_s": 60.0, **settings})


def test_a_breaker_opens_half_opens_and_closes():
    one = breaker()
    for now in (1.0, 2.0):
        assert one.allows_call(now)
        one.record_failure(now, started_at=now - 1)
    assert one.allows_call(2.0)  # two failures are not three
    one.record_failure(3.0, started_at=2.0)
    assert not one.allows_call(7.9)
    assert one.cooldown_s(4.0) == 4.0
    assert one.allows_call(8.0)  # one tries
    assert not one.allows_call(8.0)  # and only one
    one.record_failure(9.0, started_at=8.0)
    assert not one.allows_call(13.9)
    assert one.allows_call(14.0)
    assert one.outage_s(14.0) == 14.0  # since the first call that failed began
    one.record_success(15.0)
    assert one.allows_call(15.0)
    assert one.allows_call(15.0)
    assert one.outage_s(16.0) == 0.0
    one.record_failure(17.0, started_at=16.5)
    assert one.allows_call(17.0)  # it counts anew
    assert one.outage_s(18.0) == 1.5


def test_a_server_that_asks_to_wait_is_left_alone_for_so_long():
    one = breaker()
    one.record_failure(1.0, started_at=0.0, retry_after_s=7.0)
    assert not one.allows_call(7.9)
    assert one.allows_call(8.0)
    assert not one.allows_call(8.0)
    one.record_failure(9.0, started_at=8.0)
    one.record_failure(9.0, started_at=8.0)
    assert one.cooldown_s(9.0) == 5.0
    one.record_failure(9.0, started_at=8.0, retry_after_s=1.0)
    assert one.cooldown_s(9.0) == 5.0  # the longer one


def test_one_that_refuses_all_is_given_up_at_once():
    one = breaker()
    one.record_failure(1.0, started_at=0.0, num_permanent=2)
    one.record_failure(1.0, started_at=0.0)  # another try may help
    one.record_failure(1.0, started_at=0.0, num_permanent=2)
    assert not one.rejects_all
    one.record_failure(1.0, started_at=0.0, num_permanent=1)
    assert one.rejects_all
    assert one.remaining_patience_s(1.0) == 0.0
    one.record_success(2.0)
    assert not one.rejects_all


@given(st.lists(st.tuples(st.sampled_from(["fail", "answer"]), st.floats(0.01, 4.0)), max_size=60))
def test_an_open_breaker_lets_one_call_through_a_rest(events):
    """A plain reading of the rule, event by event."""
    one, now = breaker(), 0.0
    row, rests_until = 0, -math.inf
    for kind, gap in events:
        now += gap
        may = row < 3 or now >= rests_until
        assert one.allows_call(now) == may
        if not may:
            continue
        if row >= 3:
            assert not one.allows_call(now)
        if kind == "answer":
            one.record_success(now)
            row = 0
        else:
            one.record_failure(now, started_at=now - 0.01)
            row += 1
            rests_until = now + 5.0 if row >= 3 else -math.inf


@pytest.mark.parametrize(
    ("asked", "waited"),
    [(None, 0.0), (0.5, 0.5), (-1.0, 0.0), (math.nan, 0.0), (math.inf, 86_400.0), (-math.inf, 0.0)],
)
def test_a_wait_that_a_server_asks_for_is_bounded(asked, waited):
    assert clip_wait_s(asked) == waited

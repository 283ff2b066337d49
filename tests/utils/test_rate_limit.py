"""Rate limit and circuit breaker, with time as an argument."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.utils.rate_limit import CircuitBreaker, RateLimiter, clip_wait_s


def test_a_rate_by_hand():
    limit = RateLimiter(2.5)  # two within 0.8 s
    assert limit.burst == 2
    assert [limit.reserve(1, 0.0) for _ in range(5)] == [0.0, 0.0, 0.8, 0.8, 1.6]
    assert limit.reserve(2, 1.7) == pytest.approx(2.4)  # one started at 1.6
    assert limit.reserve(1, 9.0) == 9.0
    slow = RateLimiter(0.25)
    assert slow.burst == 1
    assert [slow.reserve(1, 1.0) for _ in range(3)] == [1.0, 5.0, 9.0]


@settings(max_examples=40)
@given(
    rate=st.floats(0.1, 20.0),
    gaps=st.lists(st.tuples(st.floats(0.0, 3.0), st.integers(1, 20)), max_size=60),
)
def test_a_rate_is_never_exceeded(rate, gaps):
    limit, now, starts, waits = RateLimiter(rate), 0.0, [], []
    for gap, count in gaps:
        now += gap
        start = limit.reserve(min(count, limit.burst), now)
        assert start >= now
        starts += [start] * min(count, limit.burst)
        waits.append(start - now)
    assert starts == sorted(starts)
    window_s = limit.burst / rate
    for first, after in zip(starts, starts[limit.burst :], strict=False):
        assert after - first >= window_s * (1 - 1e-9)
    # No call waits longer than all calls take at the full rate.
    total_s = math.ceil(len(starts) / limit.burst) * window_s
    assert max(waits, default=0.0) <= total_s + 1e-9


def make_breaker():
    return CircuitBreaker(max_failures=3, cooldown_s=5.0, patience_s=60.0)


def test_a_breaker_opens_half_opens_and_closes():
    breaker = make_breaker()
    for now in (1.0, 2.0):
        assert breaker.allows_call(now)
        breaker.record_failure(now, started_at=now - 1)
    assert breaker.allows_call(2.0)  # after two failures
    breaker.record_failure(3.0, started_at=2.0)
    assert not breaker.allows_call(7.9)
    assert breaker.get_cooldown_s(4.0) == 4.0
    assert breaker.allows_call(8.0)  # one probe
    assert not breaker.allows_call(8.0)  # and only one
    breaker.record_failure(9.0, started_at=8.0)
    assert not breaker.allows_call(13.9)
    assert breaker.allows_call(14.0)
    assert breaker.get_outage_s(14.0) == 14.0  # since the start of the first call that failed
    breaker.record_success(15.0)
    assert breaker.allows_call(15.0)
    assert breaker.allows_call(15.0)
    assert breaker.get_outage_s(16.0) == 0.0
    breaker.record_failure(17.0, started_at=16.5)
    assert breaker.allows_call(17.0)  # the count starts again
    assert breaker.get_outage_s(18.0) == 1.5


def test_a_wait_that_the_server_asks_for_opens_the_breaker():
    breaker = make_breaker()
    breaker.record_failure(1.0, started_at=0.0, retry_after_s=7.0)
    assert not breaker.allows_call(7.9)
    assert breaker.allows_call(8.0)
    assert not breaker.allows_call(8.0)
    breaker.record_failure(9.0, started_at=8.0)
    breaker.record_failure(9.0, started_at=8.0, retry_after_s=1.0)
    assert breaker.get_cooldown_s(9.0) == 5.0  # the longer one


def test_a_server_that_rejects_every_call_leaves_no_patience():
    breaker = make_breaker()
    breaker.record_failure(1.0, started_at=0.0, num_permanent=2)
    breaker.record_failure(1.0, started_at=0.0)  # a temporary failure starts the count again
    breaker.record_failure(1.0, started_at=0.0, num_permanent=2)
    assert not breaker.rejects_all
    breaker.record_failure(1.0, started_at=0.0, num_permanent=1)
    assert breaker.rejects_all
    assert breaker.get_remaining_patience_s(1.0) == 0.0
    breaker.record_success(2.0)
    assert not breaker.rejects_all


@pytest.mark.parametrize(
    ("requested", "clipped"),
    [(None, 0.0), (0.5, 0.5), (-1.0, 0.0), (math.nan, 0.0), (math.inf, 86_400.0)],
)
def test_a_wait_that_a_server_asks_for_is_bounded(requested, clipped):
    assert clip_wait_s(requested) == clipped

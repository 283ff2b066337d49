"""Rate limiter and circuit breaker for a service. Callers pass in the current time."""

from __future__ import annotations

import math
from collections import deque

MAX_WAIT_S = 86_400.0
"""Longest wait in seconds that a server may request."""


def clip_wait_s(wait_s: float | None) -> float:
    """Clip a wait in seconds to [0, `MAX_WAIT_S`]; return 0 for NaN and None."""
    return min(max(0.0, wait_s or 0.0), MAX_WAIT_S)  # for NaN, max returns its first argument


class RateLimiter:
    """Rate limiter for the number of queries that start per second.

    At rate r, at most b = max(1, floor(r)) queries start within any b / r seconds.
    """

    def __init__(self, per_second: float) -> None:
        self.burst = max(1, math.floor(per_second))
        """Number of queries that may start at once."""
        self._window_s = self.burst / per_second
        self._starts: deque[float] = deque(maxlen=self.burst)

    def reserve(self, count: int, now: float) -> float:
        """Reserve and return the time at which `count` queries, at most `burst`, may start."""
        start = max([now, *list(self._starts)[-1:]])
        last_before = len(self._starts) + count - self.burst - 1  # must leave the window first
        if last_before >= 0:
            start = max(start, self._starts[last_before] + self._window_s)
        self._starts.extend([start] * count)
        return start


class CircuitBreaker:
    """Circuit breaker that pauses calls to a failing service.

    A closed breaker admits all calls. Consecutive failures open the breaker for `cooldown_s`
    seconds. Then the breaker is half open: it admits one call, which closes it or opens it again.
    """

    def __init__(self, *, max_failures: int, cooldown_s: float, patience_s: float) -> None:
        """Create a closed breaker.

        Args:
            max_failures: Number of consecutive failures that open the breaker; 0 for never.
            cooldown_s: Seconds for which an open breaker admits no call.
            patience_s: Duration in seconds after which an outage counts as permanent.
        """
        self._max_failures, self._cooldown_s, self._patience_s = (
            max_failures,
            cooldown_s,
            patience_s,
        )
        self._num_failures = self._num_permanent = 0  # since the last success
        self._open_until = -math.inf
        self._is_open = self._is_half_open = False
        self._down_since = math.inf
        self.last_success_at = -math.inf
        """Time of the last success."""

    def allows_call(self, now: float) -> bool:
        """Return True if a call may start. A half-open breaker admits only the first caller."""
        if self._is_open:
            if self._is_half_open or now < self._open_until:
                return False
            self._is_half_open = True
        return True

    def record_success(self, now: float) -> None:
        """Record a successful call, which closes the breaker."""
        self._num_failures = self._num_permanent = 0
        self._is_open = self._is_half_open = False
        self._down_since, self.last_success_at = math.inf, now

    def record_failure(
        self, now: float, *, started_at: float, retry_after_s: float = 0.0, num_permanent: int = 0
    ) -> None:
        """Record a failed call.

        Args:
            now: Time of the failure.
            started_at: Time at which the call started.
            retry_after_s: Seconds to wait, as requested by the service.
            num_permanent: Number of queries that would fail again; 0 if a retry may succeed.
        """
        self._num_failures += 1
        self._num_permanent = self._num_permanent + num_permanent if num_permanent else 0
        self._is_half_open = False
        self._down_since = min(self._down_since, max(started_at, self.last_success_at))
        cooldown_s = self._cooldown_s if 0 < self._max_failures <= self._num_failures else 0.0
        if max(cooldown_s, retry_after_s) > 0:
            self._is_open = True
            self._open_until = max(self._open_until, now + max(cooldown_s, retry_after_s))

    def get_outage_s(self, now: float) -> float:
        """Return the duration of the current outage in seconds; 0 if there is none."""
        return max(now - self._down_since, 0.0)

    def get_remaining_patience_s(self, now: float) -> float:
        """Return the seconds left until the outage counts as permanent."""
        return 0.0 if self.rejects_all else self._patience_s - self.get_outage_s(now)

    def get_cooldown_s(self, now: float) -> float:
        """Return the number of seconds until a call may start."""
        return max(self._open_until - now, 0.0) if self._is_open else 0.0

    @property
    def rejects_all(self) -> bool:
        """True if the last `max_failures` queries failed permanently."""
        return self._num_permanent >= max(self._max_failures, 1)

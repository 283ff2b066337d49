"""Rate limits and circuit breakers of a service. Time is an argument here."""

from __future__ import annotations

import math
from collections import deque

MAX_WAIT_S = 86_400.0
"""Seconds that are waited at most because a server asks for it."""


def bounded_wait_s(asked_s: float | None) -> float:
    """Seconds to wait where a server asks for so many: 0 to `MAX_WAIT_S`, 0 for NaN and None."""
    return min(max(0.0, asked_s or 0.0), MAX_WAIT_S)  # of NaN, max takes its first argument


class RateLimit:
    """Limits queries to so many a second, counted when they are sent.

    Of a rate r it lets floor(r) queries, at least one, start within any floor(r) / r seconds.
    """

    def __init__(self, per_second: float) -> None:
        """`per_second` is above 0."""
        self.burst = max(1, math.floor(per_second))
        """Queries that may be sent at once."""
        self._window_s = self.burst / per_second
        self._starts: deque[float] = deque(maxlen=self.burst)

    def reserve(self, count: int, now: float) -> float:
        """Time at which `count` queries, `burst` at most, may be sent; they count from then on."""
        start = max([now, *list(self._starts)[-1:]])
        last_before = len(self._starts) + count - self.burst - 1  # of those `start` must leave
        if last_before >= 0:
            start = max(start, self._starts[last_before] + self._window_s)
        self._starts.extend([start] * count)
        return start


class Breaker:
    """A circuit breaker: it judges by its last calls if a service is up.

    Closed, it lets all calls through. Failures in a row open it: nobody asks while the service
    rests. Then one call tries (half open): an answer closes it, a failure opens it again.
    """

    def __init__(self, *, max_failures: int, rest_s: float, patience_s: float) -> None:
        """A breaker of a service that nobody has asked yet.

        Args:
            max_failures: in a row, which open it; 0: none do.
            rest_s: seconds for which nobody asks then.
            patience_s: seconds without any answer after which it is given up.
        """
        self._max_failures, self._rest_s, self._patience_s = max_failures, rest_s, patience_s
        self._num_failures = self._num_permanent = 0  # since the last answer
        self._rests_until = -math.inf
        self._is_open = self._is_tried = False
        self._down_since = math.inf
        self.answered_at = -math.inf
        """Time at which it last answered."""

    def may_try(self, now: float) -> bool:
        """Return True if a call may be made now; of a half-open breaker, it is then under way."""
        if self._is_open:
            if self._is_tried or now < self._rests_until:
                return False
            self._is_tried = True
        return True

    def answered(self, now: float) -> None:
        """Records that a call was answered."""
        self._num_failures = self._num_permanent = 0
        self._is_open = self._is_tried = False
        self._down_since, self.answered_at = math.inf, now

    def failed(
        self, now: float, *, began: float, retry_after_s: float = 0.0, num_permanent: int = 0
    ) -> None:
        """Records that a call failed.

        Args:
            now: when it did.
            began: when it was made.
            retry_after_s: that the service asked to wait.
            num_permanent: queries of it that would fail alike if they were made again; 0 where
                another try may help.
        """
        self._num_failures += 1
        self._num_permanent = self._num_permanent + num_permanent if num_permanent else 0
        self._is_tried = False
        self._down_since = min(self._down_since, max(began, self.answered_at))
        rest_s = self._rest_s if 0 < self._max_failures <= self._num_failures else 0.0
        if max(rest_s, retry_after_s) > 0:
            self._is_open = True
            self._rests_until = max(self._rests_until, now + max(rest_s, retry_after_s))

    def down_s(self, now: float) -> float:
        """Seconds for which nobody has got an answer; 0 where the last call did."""
        return max(now - self._down_since, 0.0)

    def patience_s(self, now: float) -> float:
        """Seconds that are left until it is given up."""
        return 0.0 if self.refuses_all else self._patience_s - self.down_s(now)

    def rest_s(self, now: float) -> float:
        """Seconds for which nobody may ask."""
        return max(self._rests_until - now, 0.0) if self._is_open else 0.0

    @property
    def refuses_all(self) -> bool:
        """True if so many queries in a row failed that would fail alike if made again."""
        return self._num_permanent >= max(self._max_failures, 1)

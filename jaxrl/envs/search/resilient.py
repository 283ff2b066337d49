"""Search engine wrapper with a cache, a rate limit, retries and outage handling.

A query goes through these stages in order:

1. Cache: results of earlier queries.
2. Sharing: a query that is already in flight for another episode is not sent again.
3. Recording: results of earlier runs, if searches are recorded or replayed.
4. Rate limit: queries per second and concurrent calls.
5. Deadline: a call that exceeds it fails.
6. Retries: with backoff, or after the wait that the server requests.
7. Circuit breaker: after consecutive failures, calls pause for a while; then one call is tried.
8. Outage: if no call succeeds for too long, the run stops or continues without results.

Failures are never cached. A batched engine receives all cache misses of a batch in one call.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

from cachetools import LRUCache

from jaxrl.envs.base import OutageError, ToolError
from jaxrl.envs.search.base import SearchEngine
from jaxrl.envs.tools.base import CallResult, Tool, run_as_batch, run_call
from jaxrl.utils.concurrency import parallel_map, run_in_thread
from jaxrl.utils.rate_limit import CircuitBreaker, RateLimiter, clip_wait_s

if TYPE_CHECKING:
    from jaxrl.envs.search.recording import Recording

MAX_BACKOFF_S = 30.0
"""Longest backoff in seconds. A server may request a longer wait."""

MAX_HANGING = 128
"""Maximum number of calls (one thread each) that have passed their deadline without returning."""

_OUTAGE_REMEDY = (
    "Finished work is saved; once it responds, run the same command again. With "
    "config.search.on_outage='empty', a run continues without results."
)

_ENTRY_OVERHEAD_BYTES = 200  # approximate overhead of a cache entry


@dataclass(frozen=True, kw_only=True)
class RetryConfig:
    """Limits and deadlines, in seconds and MiB. Each field is a key of `config.search`."""

    cache_mib: float
    cache_ttl_s: float
    queries_per_second: float
    max_concurrent: int
    deadline_s: float
    retries: int
    backoff_s: float
    breaker_failures: int
    breaker_rest_s: float
    outage_deadline_s: float
    on_outage: str


class ReplayOnly(Tool):
    """Placeholder for an engine that must not be called."""

    name, blank = "nobody", ""

    def run(self, call: str, /) -> str:
        """Raise a ToolError."""
        raise ToolError("only recorded results are available")


PROBE_QUERY = "test"
"""Query sent to a server before a run starts."""


def health_check(
    engine: Tool, config: RetryConfig, *, url_key: str, log: Callable[[str], None]
) -> None:
    """Send one query before any long work, so that a wrong URL fails immediately.

    With `on_outage="empty"`, make a single attempt and only log a failure.

    Args:
        engine: Client of the server.
        config: Limits and deadlines of the run.
        url_key: Config key of the server's URL, for messages.
        log: Callback for warnings.

    Raises:
        ValueError: The server rejects the query, for example because of a wrong path or key.
        OutageError: The server did not respond within `config.outage_deadline_s`.
    """
    probe_config = replace(config, cache_mib=0.0, breaker_failures=max(config.breaker_failures, 2))
    if config.on_outage == "empty":
        probe_config = replace(probe_config, outage_deadline_s=0.0, retries=0)
        search = ResilientSearch(engine, probe_config)
    else:
        search = ResilientSearch(
            engine, probe_config, log=lambda line: log(f"{line} ({url_key})"), warn_after_s=0.0
        )
    [result] = search.run_batch([PROBE_QUERY])
    if isinstance(result, OutageError) and result.fallback is None:
        raise OutageError(f"{result} The server is set by {url_key}.")
    if isinstance(result, OutageError):
        log(
            f"warning: a test query to the server in {url_key} failed: {result}. Episodes "
            "with a search end as environment errors until it responds"
        )
    elif isinstance(result, ToolError):
        raise ValueError(f"the server in {url_key} rejects a test query: {result}.")


@dataclass(eq=False, kw_only=True)
class _CacheMiss:
    """An in-flight query whose result is not in the cache."""

    query: str
    started_at: float
    future: Future[CallResult] = field(default_factory=Future)
    attempts: int = 0
    num_query_failures: int = 0  # failures while the engine answered other queries
    last_failure_at: float = 0.0  # time of the previous failure, or the start
    error: ToolError = field(default_factory=lambda: ToolError("no attempt was made"))


class ResilientSearch(SearchEngine):
    """Search engine wrapper with the stages listed in the module docstring."""

    label: ClassVar[str] = "the search engine"
    """Name of the engine in messages."""

    section: ClassVar[str] = "config.search"
    """Config section of its settings, for messages."""

    def __init__(
        self,
        engine: Tool,
        config: RetryConfig,
        *,
        recording: Recording | None = None,
        is_replay: bool = False,
        log: Callable[[str], None] = lambda _: None,
        warn_after_s: float = 10.0,
    ) -> None:
        """Wrap a search engine.

        Args:
            engine: Tool with the name `search`.
            config: Limits and deadlines.
            recording: Recorded results, to which new results are added; None to record nothing.
            is_replay: True to return recorded results only.
            log: Callback for warnings about outages.
            warn_after_s: Duration of an outage, in seconds, after which a warning is logged.
        """
        self.engine = engine
        self.blank = engine.blank
        self._config, self._log, self._warn_after_s = config, log, warn_after_s
        self._recording, self._is_replay = recording, is_replay
        self._max_running = config.max_concurrent or engine.max_threads
        self._takes_batches = type(engine).run_batch is not Tool.run_batch
        self._lock = threading.Lock()  # guards the cache and the queries in flight
        # Query to result, time and size in bytes.
        self._cache: LRUCache[str, tuple[str, float, int]] = LRUCache(
            config.cache_mib * 2**20, getsizeof=lambda entry: entry[2]
        )
        self._in_flight: dict[str, _CacheMiss] = {}
        self._condition = threading.Condition()  # guards everything below
        self._limit = RateLimiter(config.queries_per_second) if config.queries_per_second else None
        self._breaker = CircuitBreaker(
            max_failures=config.breaker_failures,
            cooldown_s=config.breaker_rest_s,
            patience_s=config.outage_deadline_s,
        )
        self._num_running = self._num_hanging = 0
        self._is_outage_logged = False  # True once the current outage is logged
        self._last_good_query: str | None = None  # the most recent one

    def run(self, query: str, /) -> str:
        """Search for one query and return the result text."""
        [result] = self.run_batch([query])
        if isinstance(result, ToolError):
            raise result
        return result

    def run_batch(self, queries: Sequence[str], /) -> list[str | ToolError]:
        """Search for each query and return its result text or error."""
        return [call_result.result for call_result in self.call_batch(queries)]

    def call_batch(self, calls: Sequence[str], /) -> list[CallResult]:
        """Search for each query and return its result text or error, with a record of the call."""
        # Sort the distinct queries into cached, in flight for another episode, and new.
        started_at = time.monotonic()
        cached: dict[str, str] = {}
        misses: dict[str, _CacheMiss] = {}
        shared: dict[str, _CacheMiss] = {}
        with self._lock:
            for query in dict.fromkeys(calls):
                text, cached_at, _ = self._cache.get(query, (None, started_at, 0))
                ttl_s = self._config.cache_ttl_s
                if text is not None and not (ttl_s and started_at - cached_at > ttl_s):
                    cached[query] = text
                elif query in self._in_flight:
                    shared[query] = self._in_flight[query]
                else:
                    miss = _CacheMiss(
                        query=query, started_at=started_at, last_failure_at=started_at
                    )
                    self._in_flight[query] = misses[query] = miss
        try:
            unresolved = [miss for miss in misses.values() if not self._replay_result(miss)]
            # Send queries one at a time, or in batches as large as the rate limit admits at once.
            size = max(len(unresolved) if self._takes_batches else 1, 1)
            size = min(size, self._limit.burst) if self._limit else size
            batches = [
                unresolved[start : start + size] for start in range(0, len(unresolved), size)
            ]
            if len(batches) == 1:
                self._send_with_retries(batches[0])
            elif batches:
                parallel_map(self._send_with_retries, batches, max_threads=self._max_running)
        finally:  # other threads may be waiting for the misses
            for miss in misses.values():
                self._set_result(miss, miss.error)
        wait_for([miss.future for miss in shared.values()])
        # Return results in the order of the calls. Of equal queries, only the first is a call.
        results = []
        for query in calls:
            if query in cached:
                results.append(self._make_result(query, cached[query], "cache", started_at))
            elif query in misses:
                results.append(misses[query].future.result())
                shared.setdefault(query, misses.pop(query))  # repeated queries share the result
            else:
                result = shared[query].future.result().result
                results.append(self._make_result(query, result, "shared", started_at))
        return results

    def _make_result(
        self, query: str, result: str | ToolError, source: str, started_at: float, attempts: int = 0
    ) -> CallResult:
        if isinstance(result, OutageError) and result.fallback is not None:
            source = "fallback"
        waited_s = time.monotonic() - started_at
        record = {"source": source, "waited_s": waited_s, "attempts": attempts}
        return CallResult.build(self, query, result, **record)

    def _set_result(self, miss: _CacheMiss, result: str | ToolError, source: str = "tool") -> None:
        """Set a query's result and cache its text, unless the query already has a result."""
        with self._lock:
            if miss.future.done():
                return
            if isinstance(result, str):
                size = len(miss.query) + len(result) + _ENTRY_OVERHEAD_BYTES
                if size <= self._cache.maxsize:
                    self._cache[miss.query] = (result, time.monotonic(), size)
            self._in_flight.pop(miss.query, None)
            call_result = self._make_result(
                miss.query, result, source, miss.started_at, miss.attempts
            )
            miss.future.set_result(call_result)

    def _replay_result(self, miss: _CacheMiss) -> bool:
        """Set the result of a query from the recording; return True if it was set."""
        if self._recording is None:
            return False
        result: str | ToolError | None = self._recording.get(miss.query)
        if result is None and self._is_replay:
            result = self._make_outage_error(
                miss,
                f"{self.section}.replay is 'only', and {self._recording.folder} has no result for "
                f"the query {miss.query!r:.200}",
                "This run differs from the recorded one; with replay='record', the engine is "
                "called for missing results.",
            )
        if result is not None:
            self._set_result(miss, result, "replay")
        return result is not None

    def _send_with_retries(self, misses: list[_CacheMiss]) -> None:
        """Send queries as a batch, retrying until each has a result.

        The last attempt sends each query separately, so that one query cannot fail the others.
        """
        while misses:
            results = self._try_call([miss.query for miss in misses], misses)
            if results is None:
                duration_s = self._breaker.get_outage_s(time.monotonic())
                for miss in misses:
                    reason = (
                        f"{self.label} has not answered for {duration_s:.1f} s "
                        f"({self.section}.outage_deadline_s); the last error: {miss.error}"
                    )
                    self._set_result(miss, self._make_outage_error(miss, reason))
                return
            misses = [
                m for m, r in zip(misses, results, strict=True) if not self._try_set_result(m, r)
            ]
            if not misses:
                return
            # Exponential backoff with jitter, capped at the outage deadline.
            max_attempts = max(miss.attempts for miss in misses)
            num_doublings = min(max_attempts - 1, self._config.retries, 10)
            wait_s = min(self._config.backoff_s * 2**num_doublings, MAX_BACKOFF_S)
            patience_s = self._breaker.get_remaining_patience_s(time.monotonic())
            time.sleep(max(min(wait_s * random.uniform(0.75, 1.25), patience_s), 0.0))
            if len(misses) > 1 and max_attempts >= self._config.retries:
                parallel_map(
                    lambda m: self._send_with_retries([m]), misses, max_threads=self._max_running
                )
                return

    def _try_set_result(self, miss: _CacheMiss, result: str | ToolError) -> bool:
        """Set a query's result unless the query must be retried; return True if it was set."""
        if isinstance(result, str):
            self._set_result(miss, self._record_result(miss.query, result))
            return True
        with self._condition:
            answered_others = self._breaker.last_success_at > miss.last_failure_at
            rejects_all = self._breaker.rejects_all
        miss.last_failure_at, miss.error = time.monotonic(), result
        miss.num_query_failures += answered_others
        if result.is_permanent and rejects_all and not self._probe_engine(miss, is_forced=True):
            reason = f"{self.label} rejects every call: {result}"
            self._set_result(miss, self._make_outage_error(miss, reason))
        elif result.is_permanent or miss.num_query_failures > self._config.retries:
            self._set_result(miss, result)
        elif not answered_others and miss.attempts > self._config.retries:
            # Determine whether the engine or this query fails. If the engine answers another query,
            # further failures of this query count as retries.
            self._probe_engine(miss)
        return miss.future.done()

    def _record_result(self, query: str, result: str) -> str | ToolError:
        """Record a result unless the query already has one; return the recorded result."""
        if self._recording is None:
            return result
        try:
            self._recording.add(query, result)
        except OSError as error:
            return OutageError(f"a result of {self.label} could not be recorded: {error}")
        return self._recording.get(query) or result

    def _probe_engine(self, miss: _CacheMiss, *, is_forced: bool = False) -> bool:
        """Repeat the last query that succeeded; return True if it succeeds again.

        `is_forced` bypasses the circuit breaker, but the breaker still records the outcome.
        """
        query = self._last_good_query
        if query is None:
            return False
        results = self._try_call([query], [miss], is_forced=is_forced)
        return results is not None and isinstance(results[0], str)

    def _try_call(
        self, queries: list[str], misses: list[_CacheMiss], *, is_forced: bool = False
    ) -> list[str | ToolError] | None:
        """Call the engine once; return None without a call if an outage has lasted too long."""
        is_new = not any(miss.attempts for miss in misses)
        if not self._acquire_slot(is_new=is_new, is_forced=is_forced):
            return None
        started_at = time.monotonic()
        results: list[str | ToolError] = []
        try:
            if self._limit:
                with self._condition:
                    start = self._limit.reserve(len(queries), started_at)
                time.sleep(max(start - started_at, 0.0))
                started_at = time.monotonic()
            for miss in misses:
                miss.attempts += 1
            results = self._call_engine(queries, started_at)
        finally:
            self._release_slot(queries, results, started_at)
        return results

    def _call_engine(self, queries: list[str], started_at: float) -> list[str | ToolError]:
        """Call the engine once and wait for the result until the deadline."""
        with self._condition:
            is_down = self._breaker.get_outage_s(started_at) > 0
            patience_s = self._breaker.get_remaining_patience_s(started_at)
            if self._num_hanging >= MAX_HANGING:
                text = f"{MAX_HANGING} calls to {self.label} hang; it needs a timeout"
                return [ToolError(text)] * len(queries)
        limit_s = self._config.deadline_s
        if is_down and 0 < patience_s < limit_s:
            limit_s = patience_s
        if len(queries) == 1 and not self._takes_batches:
            call = run_in_thread(lambda: [run_call(self.engine, queries[0])])
        else:
            call = run_in_thread(lambda: run_as_batch(self.engine, queries))
        if wait_for([call], timeout=limit_s).done:
            return call.result()

        def on_late_return(_: Future[list[str | ToolError]]) -> None:
            with self._condition:
                self._num_hanging -= 1

        with self._condition:
            self._num_hanging += 1
        call.add_done_callback(on_late_return)
        text = f"no answer within {limit_s:g} s ({self.section}.deadline_s)"
        return [ToolError(text)] * len(queries)

    def _acquire_slot(self, *, is_new: bool, is_forced: bool) -> bool:
        """Wait for a slot to call the engine; return False if the outage has lasted too long.

        Even after such an outage, a new query may be tried once if the circuit breaker allows it.
        """
        with self._condition:
            while True:
                now = time.monotonic()
                is_permanent_outage = (
                    self._breaker.get_remaining_patience_s(now) <= 0 and not is_forced
                )
                if is_permanent_outage and not is_new:
                    return False
                has_slot = self._num_running < self._max_running
                if has_slot and (is_forced or self._breaker.allows_call(now)):
                    self._num_running += 1
                    return True
                if is_permanent_outage:
                    return False
                is_new = False
                waits = [
                    self._breaker.get_cooldown_s(now) or 1.0,
                    self._breaker.get_remaining_patience_s(now),
                ]
                self._condition.wait(max(min(waits), 0.0) + 1e-3)

    def _release_slot(
        self, queries: list[str], results: list[str | ToolError], started_at: float
    ) -> None:
        """Free the slot of a call and record the outcome."""
        with self._condition:
            now = time.monotonic()
            self._num_running -= 1
            failed = [result for result in results if isinstance(result, ToolError)]
            if failed or not results:  # there are no results after an interrupt
                are_permanent = all(error.is_permanent for error in failed)
                self._breaker.record_failure(
                    now,
                    started_at=started_at,
                    retry_after_s=max([clip_wait_s(e.retry_after_s) for e in failed], default=0),
                    num_permanent=len(failed) if are_permanent else 0,
                )
                if (
                    not self._is_outage_logged
                    and self._breaker.get_outage_s(now) > self._warn_after_s
                ):
                    self._is_outage_logged = True
                    patience_s = max(self._breaker.get_remaining_patience_s(now), 0.0)
                    self._log(
                        f"warning: {self.label} does not answer; it is retried for "
                        f"{patience_s:.0f} s ({self.section}.outage_deadline_s). The last error: "
                        f"{failed[-1] if failed else 'none'}"
                    )
            texts = [q for q, r in zip(queries, results, strict=False) if isinstance(r, str)]
            if texts:
                if self._is_outage_logged:
                    self._is_outage_logged = False
                    self._log(
                        f"{self.label} answers again, after {self._breaker.get_outage_s(now):.1f} s"
                    )
                self._breaker.record_success(now)
                self._last_good_query = texts[-1]
            self._condition.notify_all()

    def _make_outage_error(
        self, miss: _CacheMiss, reason: str, remedy: str = _OUTAGE_REMEDY
    ) -> OutageError:
        """Build the error for a query during an outage, with fallback text if the run continues."""
        if self._config.on_outage == "stop":
            return OutageError(f"{reason}. {remedy}")
        with self._lock:
            stale = self._cache.get(miss.query)
        return OutageError(reason, fallback=stale[0] if stale else self.blank)

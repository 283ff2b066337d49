"""A guard around any search engine: neither its failures nor its limits reach a reward.

A query passes, in this order:

1. cache: what was found before, for a while.
2. calls in flight: a query that another episode is asking right now is not asked twice.
3. recording: what an earlier call found, where searches are recorded or replayed.
4. rate limit: queries a second and calls side by side; what is over waits in line.
5. deadline: a call that takes longer has failed.
6. retries: a call that failed is made again after a while, or when the server says.
7. breaker: after failures in a row nobody asks for a while, then one call tries.
8. outage: where nobody gets an answer for too long, the run stops or goes on without results.

Failures are never kept. Misses of a batch go to an engine that takes batches as one.
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
from jaxrl.envs.tools.base import Answer, Tool, run_one, run_together
from jaxrl.utils.concurrency import LateError, in_thread, in_time, side_by_side
from jaxrl.utils.rate_limit import Breaker, RateLimit, bounded_wait_s

if TYPE_CHECKING:
    from jaxrl.envs.search.recording import Recording

MAX_BACKOFF_S = 30.0
"""Seconds that a retry waits at most of itself; a server may ask for more."""

MAX_HANGING = 128
"""Calls that are past their deadline and have not ended, at most; a thread each."""

_TOLD_AFTER_S = 10.0  # seconds without any answer, after which a person is told

_WHAT_TO_DO = (
    "What was finished is saved; once it answers, run the same command again. With "
    "config.search.on_outage='empty' a run goes on without results."
)

_ENTRY = 200  # bytes that an entry of the cache takes beside its texts, about


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Limits and deadlines of an engine: the keys of `config.search` with the same names.

    Times are in seconds, sizes in MiB.
    """

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


class Nobody(Tool):
    """Stands for an engine that must not be asked."""

    name, blank = "nobody", ""

    def run(self, call: str, /) -> str:
        """Raises an error.

        Raises:
            ToolError: always.
        """
        raise ToolError("nobody is asked")


PROBE = "test"
"""Query that a server is asked before a run begins."""


def ask_first(engine: Tool, policy: Policy, *, place: str, log: Callable[[str], None]) -> None:
    """Probes a server with one query before any long work, so that a wrong address shows at once.

    Where it fails, a warning says so, and it is asked again for as long as a run would ask; with
    `on_outage="empty"` nobody waits, as a run would go on without it.

    Args:
        engine: asks the server.
        policy: of the run.
        place: key of the server's address, for messages.
        log: told of a failure.

    Raises:
        ValueError: the server refuses the query, as where there is no such path, or a key is wrong.
        OutageError: it has answered nobody for `policy.outage_deadline_s`.
    """
    try:
        result = in_time(policy.deadline_s, lambda: run_one(engine, PROBE))
    except LateError:
        result = ToolError(f"no answer within {policy.deadline_s:g} s (config.search.deadline_s)")
    if isinstance(result, ToolError) and not result.is_permanent:
        failed = f"warning: a first query of the server that {place} names failed: {result}"
        if policy.on_outage == "empty":
            log(f"{failed}. Episodes that search are environment errors until it answers")
            return
        log(
            f"{failed}. It is asked again for {policy.outage_deadline_s:g} s "
            "(config.search.outage_deadline_s)"
        )
        asked = ResilientSearch(engine, replace(policy, cache_mib=0.0), log=log)
        [result] = asked.run_batch([PROBE])
    if isinstance(result, OutageError):
        raise OutageError(f"{result} The server is the one that {place} names.")
    if isinstance(result, ToolError):
        raise ValueError(f"the server that {place} names refuses a first query: {result}.")


@dataclass(eq=False, kw_only=True)
class _Miss:
    """A query that the engine is asked."""

    query: str
    started: float  # on the clock, when it came
    settled: Future[Answer] = field(default_factory=Future)
    attempts: int = 0
    num_counted: int = 0  # failures while the engine answered others
    since: float = 0.0  # the failure before, or the start
    error: ToolError = field(default_factory=lambda: ToolError("no try was made"))


class ResilientSearch(SearchEngine):
    """Guard around a search engine; see the module."""

    what: ClassVar[str] = "the search engine"
    """Name of what is asked, in messages."""

    section: ClassVar[str] = "config.search"
    """Section of its settings, in messages."""

    def __init__(
        self,
        engine: Tool,
        policy: Policy,
        *,
        recording: Recording | None = None,
        is_replay: bool = False,
        log: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Asks nothing yet.

        Args:
            engine: a tool called `search`.
            policy: how it is asked.
            recording: knows results, and is told new ones; None: nothing is recorded.
            is_replay: the recording alone answers, never the engine.
            log: is told of outages.
        """
        self.engine = engine
        self.blank = engine.blank
        self._policy, self._log = policy, log
        self._recording, self._is_replay = recording, is_replay
        self._max_running = policy.max_concurrent or engine.max_threads
        self._takes_batches = type(engine).run_batch is not Tool.run_batch
        self._lock = threading.Lock()  # of the cache, of what is in flight
        # By query: its result, when that came, and bytes of both.
        self._cache: LRUCache[str, tuple[str, float, int]] = LRUCache(
            policy.cache_mib * 2**20, getsizeof=lambda entry: entry[2]
        )
        self._in_flight: dict[str, _Miss] = {}
        self._turn = threading.Condition()  # guards all below
        self._limit = RateLimit(policy.queries_per_second) if policy.queries_per_second else None
        self._breaker = Breaker(
            max_failures=policy.breaker_failures,
            rest_s=policy.breaker_rest_s,
            patience_s=policy.outage_deadline_s,
        )
        self._num_running = self._num_hanging = 0
        self._is_told = False  # of the outage under way
        self._answered_query: str | None = None  # the last one

    def run(self, query: str, /) -> str:
        """The text found for one query."""
        [result] = self.run_batch([query])
        if isinstance(result, ToolError):
            raise result
        return result

    def run_batch(self, queries: Sequence[str], /) -> list[str | ToolError]:
        """The text found for each query, or why there is none."""
        return [answer.found for answer in self.answer_all(queries)]

    def answer_all(self, calls: Sequence[str], /) -> list[Answer]:
        """Answers each query, with the text found or the reason for none, and what that took."""
        started = time.monotonic()
        cached: dict[str, str] = {}
        misses: dict[str, _Miss] = {}
        shared: dict[str, _Miss] = {}
        with self._lock:
            for query in dict.fromkeys(calls):
                text, kept_at, _ = self._cache.get(query, (None, started, 0))
                ttl_s = self._policy.cache_ttl_s
                if text is not None and not (ttl_s and started - kept_at > ttl_s):
                    cached[query] = text
                elif query in self._in_flight:
                    shared[query] = self._in_flight[query]
                else:
                    miss = _Miss(query=query, started=started, since=started)
                    self._in_flight[query] = misses[query] = miss
        try:
            unknown = [miss for miss in misses.values() if not self._is_recalled(miss)]
            # One by one, or in batches as large as the rate limit lets start at once.
            size = max(len(unknown) if self._takes_batches else 1, 1)
            size = min(size, self._limit.burst) if self._limit else size
            pieces = [unknown[start : start + size] for start in range(0, len(unknown), size)]
            if len(pieces) == 1:
                self._play(pieces[0])
            elif pieces:
                side_by_side(self._play, pieces, max_threads=self._max_running)
        finally:  # others may wait for them
            for miss in misses.values():
                self._settle(miss, miss.error)
        wait_for([miss.settled for miss in shared.values()])
        answers = []
        for query in calls:
            if query in cached:
                answers.append(self._answer(query, cached[query], "cache", started))
            elif query in misses:
                answers.append(misses[query].settled.result())
                shared.setdefault(query, misses.pop(query))  # and each that follows shares it
            else:
                result = shared[query].settled.result().found
                answers.append(self._answer(query, result, "shared", started))
        return answers

    def _answer(
        self, query: str, result: str | ToolError, source: str, started: float, attempts: int = 0
    ) -> Answer:
        if isinstance(result, OutageError) and result.fallback is not None:
            source = "fallback"
        waited_s = time.monotonic() - started
        took = {"source": source, "waited_s": waited_s, "attempts": attempts}
        return Answer.of(self, query, result, **took)

    def _settle(self, miss: _Miss, result: str | ToolError, source: str = "tool") -> None:
        """Gives a query its answer, once; only a result is kept."""
        with self._lock:
            if miss.settled.done():
                return
            if isinstance(result, str):
                size = len(miss.query) + len(result) + _ENTRY
                if size <= self._cache.maxsize:
                    self._cache[miss.query] = (result, time.monotonic(), size)
            self._in_flight.pop(miss.query, None)
            answer = self._answer(miss.query, result, source, miss.started, miss.attempts)
            miss.settled.set_result(answer)

    def _is_recalled(self, miss: _Miss) -> bool:
        """Settles a query from the recording, or because it is replayed and has none there."""
        if self._recording is None:
            return False
        recalled: str | ToolError | None = self._recording.get(miss.query)
        if recalled is None and self._is_replay:
            recalled = self._outage(
                miss,
                f"{self.section}.replay is 'only', and {self._recording.folder} has no result for "
                f"the query {miss.query!r:.200}",
                "This run is not the one that was recorded; with replay='record' the engine is "
                "asked for what is missing.",
            )
        if recalled is not None:
            self._settle(miss, recalled, "replay")
        return recalled is not None

    def _play(self, misses: list[_Miss]) -> None:
        """Asks for some queries at once, and again for those that failed.

        The last try is made for each alone, so that none is lost for another one's sake.
        """
        while misses:
            results = self._attempt([miss.query for miss in misses], misses)
            if results is None:
                for miss in misses:
                    with self._turn:
                        down_s = self._breaker.down_s(time.monotonic())
                    why = (
                        f"{self.what} has answered nobody for {down_s:.1f} s "
                        f"({self.section}.outage_deadline_s); the last error: {miss.error}"
                    )
                    self._settle(miss, self._outage(miss, why))
                return
            misses = [m for m, one in zip(misses, results, strict=True) if self._goes_on(m, one)]
            if not misses:
                return
            # Longer from try to try, but not beyond an outage's end.
            most = max(miss.attempts for miss in misses)
            doublings = min(most - 1, self._policy.retries, 10)
            wait_s = min(self._policy.backoff_s * 2**doublings, MAX_BACKOFF_S)
            wait_s *= random.uniform(0.75, 1.25)  # so that not all who failed come back together
            with self._turn:
                patience_s = self._breaker.patience_s(time.monotonic())
            time.sleep(max(min(wait_s, patience_s), 0.0))
            if len(misses) > 1 and most >= self._policy.retries:
                side_by_side(lambda m: self._play([m]), misses, max_threads=self._max_running)
                return

    def _goes_on(self, miss: _Miss, result: str | ToolError) -> bool:
        """Settles a query with its result, or returns True if it is to be asked again."""
        if isinstance(result, str):
            kept: str | ToolError = result
            if self._recording is not None:
                try:
                    self._recording.add(miss.query, result)
                except OSError as error:
                    text = f"an answer of {self.what} could not be recorded: {error}"
                    kept = OutageError(text)
                else:  # another call of it may have been first
                    kept = self._recording.get(miss.query) or result
            self._settle(miss, kept)
            return False
        with self._turn:
            answered_others = self._breaker.answered_at > miss.since
            refuses_all = self._breaker.refuses_all
        miss.since, miss.error = time.monotonic(), result
        miss.num_counted += answered_others
        if result.is_permanent and refuses_all and not self._answers_another(miss, is_forced=True):
            why = f"{self.what} refuses every call: {result}"
            self._settle(miss, self._outage(miss, why))
        elif result.is_permanent or miss.num_counted > self._policy.retries:
            self._settle(miss, result)
        elif not answered_others and miss.attempts > self._policy.retries:
            # Is it the engine, or the query? Of the latter, the tries that follow count.
            self._answers_another(miss)
        return not miss.settled.done()

    def _answers_another(self, miss: _Miss, *, is_forced: bool = False) -> bool:
        """Asks for `miss` what the engine has answered before; returns True if it still does.

        An answer counts for the breaker, as any does; with `is_forced` the breaker is not asked.
        """
        query = self._answered_query
        if query is None:
            return False
        results = self._attempt([query], [miss], is_forced=is_forced)
        return results is not None and isinstance(results[0], str)

    def _attempt(
        self, queries: list[str], misses: list[_Miss], *, is_forced: bool = False
    ) -> list[str | ToolError] | None:
        """Asks the engine once; None where it is given up."""
        is_new = not any(miss.attempts for miss in misses)
        if not self._enter(is_new=is_new, is_forced=is_forced):
            return None
        began = time.monotonic()
        results: list[str | ToolError] = []
        try:
            if self._limit:
                with self._turn:
                    start = self._limit.reserve(len(queries), began)
                time.sleep(max(start - began, 0.0))
                began = time.monotonic()
            for miss in misses:
                miss.attempts += 1
            results = self._call(queries, began)
        finally:
            self._leave(queries, results, began)
        return results

    def _call(self, queries: list[str], began: float) -> list[str | ToolError]:
        """Calls the engine once, up to its deadline."""
        with self._turn:
            is_down = self._breaker.down_s(began) > 0
            patience_s = self._breaker.patience_s(began)
            if self._num_hanging >= MAX_HANGING:
                text = f"{MAX_HANGING} calls of {self.what} hang; it needs a time-out"
                return [ToolError(text)] * len(queries)
        limit_s = self._policy.deadline_s
        if is_down and 0 < patience_s < limit_s:
            limit_s = patience_s  # an outage is to end when it was said to
        if len(queries) == 1 and not self._takes_batches:
            call = in_thread(lambda: [run_one(self.engine, queries[0])])
        else:
            call = in_thread(lambda: run_together(self.engine, queries))
        if not wait_for([call], timeout=limit_s).done:

            def came_late(_: Future[list[str | ToolError]]) -> None:
                with self._turn:
                    self._num_hanging -= 1

            with self._turn:
                self._num_hanging += 1
            call.add_done_callback(came_late)
            text = f"no answer within {limit_s:g} s ({self.section}.deadline_s)"
            return [ToolError(text)] * len(queries)
        return call.result()

    def _enter(self, *, is_new: bool, is_forced: bool) -> bool:
        """Waits for a turn to call the engine; False where the engine is given up instead.

        A new query may try what others have given up, where it is the one that tries.
        """
        with self._turn:
            while True:
                now = time.monotonic()
                is_given_up = self._breaker.patience_s(now) <= 0 and not is_forced
                if is_given_up and not is_new:
                    return False
                has_room = self._num_running < self._max_running
                if has_room and (is_forced or self._breaker.may_try(now)):
                    self._num_running += 1
                    return True
                if is_given_up:
                    return False
                is_new = False
                waits = [self._breaker.rest_s(now) or 1.0, self._breaker.patience_s(now)]
                self._turn.wait(max(min(waits), 0.0) + 1e-3)

    def _leave(self, queries: list[str], results: list[str | ToolError], began: float) -> None:
        """Ends a turn and records its outcome."""
        with self._turn:
            now = time.monotonic()
            self._num_running -= 1
            failed = [one for one in results if isinstance(one, ToolError)]
            if failed or not results:  # an interrupt leaves none
                permanent = [error.is_permanent for error in failed]
                self._breaker.failed(
                    now,
                    began=began,
                    retry_after_s=max([bounded_wait_s(e.retry_after_s) for e in failed], default=0),
                    num_permanent=len(failed) if all(permanent) else 0,
                )
                if not self._is_told and self._breaker.down_s(now) > _TOLD_AFTER_S:
                    self._is_told = True
                    patience_s = max(self._breaker.patience_s(now), 0.0)
                    self._log(
                        f"warning: {self.what} answers nobody; it is asked again for "
                        f"{patience_s:.0f} s ({self.section}.outage_deadline_s). The last error: "
                        f"{failed[-1] if failed else 'none'}"
                    )
            texts = [q for q, one in zip(queries, results, strict=False) if isinstance(one, str)]
            if texts:
                if self._is_told:
                    self._is_told = False
                    self._log(f"{self.what} answers again, after {self._breaker.down_s(now):.1f} s")
                self._breaker.answered(now)
                self._answered_query = texts[-1]
            self._turn.notify_all()

    def _outage(self, miss: _Miss, why: str, what_to_do: str = _WHAT_TO_DO) -> OutageError:
        """The error of a query that the engine does not answer; empty where a run goes on."""
        if self._policy.on_outage == "stop":
            return OutageError(f"{why}. {what_to_do}")
        with self._lock:
            stale = self._cache.get(miss.query)
        return OutageError(why, fallback=stale[0] if stale else self.blank)

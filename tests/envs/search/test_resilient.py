"""Cache, retries, rate limit and breaker of a search engine: each alone, then all together."""

import threading
import time
from collections import Counter

import pytest

from jaxrl.config import default_config
from jaxrl.envs.base import NO_INFORMATION, OutageError, ToolError
from jaxrl.envs.search.base import SearchEngine
from jaxrl.envs.search.http_retriever import HttpRetriever
from jaxrl.envs.search.recording import Recording
from jaxrl.envs.search.resilient import (
    MAX_HANGING,
    PROBE_QUERY,
    ResilientSearch,
    RetryConfig,
    health_check,
)
from jaxrl.utils.concurrency import parallel_map, run_in_thread
from tests.envs.fault_server import MIX, FaultServer, wait_until

QUICK = {"backoff_s": 0.01, "breaker_rest_s": 0.02, "deadline_s": 5.0, "outage_deadline_s": 5.0}
"""Short waits, for tests."""


def make_config(**changes):
    keys = default_config().search
    return RetryConfig(
        **{name: keys[name] for name in RetryConfig.__dataclass_fields__} | QUICK | changes
    )


class Engine(SearchEngine):
    """Answers with a function of the query and of how often it has arrived."""

    def __init__(self, reply=lambda query, count: f"about {query}"):
        self.reply, self.queries, self.lock = reply, [], threading.Lock()

    def run(self, query):
        with self.lock:
            self.queries.append(query)
            count = self.queries.count(query)
        result = self.reply(query, count)
        if isinstance(result, Exception):
            raise result
        return result


class BatchEngine(Engine):
    """Takes several queries per call."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.batches = []

    def run_batch(self, queries):
        with self.lock:
            self.batches.append([*queries])
            self.queries += queries
            counts = [self.queries.count(query) for query in queries]
        results = [self.reply(*pair) for pair in zip(queries, counts, strict=True)]
        for result in results:
            if isinstance(result, Exception) and not isinstance(result, ToolError):
                raise result
        return results


def fail_first(num_failures):
    """Return a reply function that fails so often for each query, then answers."""
    return lambda query, count: ToolError("busy") if count <= num_failures else f"about {query}"


def summarize(answers):
    """Return source, attempts and error of each answer."""
    return [(a.record.source, a.record.attempts, a.record.error) for a in answers]


def test_results_expire_and_the_least_recently_used_is_evicted():
    engine = Engine(lambda query, count: f"{query} {count} " + "x" * 1000)
    search = ResilientSearch(engine, make_config(cache_ttl_s=0.05))
    assert search.run("a") == search.run("a")
    time.sleep(0.06)
    assert search.run("a").startswith("a 2 ")
    # Two such results fit into 3,000 bytes.
    small = ResilientSearch(Engine(engine.reply), make_config(cache_mib=3000 / 2**20))
    for query in ("a", "b", "a", "c", "a", "b"):
        small.run(query)
    assert small.engine.queries == ["a", "b", "c", "b"]
    none = ResilientSearch(Engine(), make_config(cache_mib=0.0))
    assert [none.run("a") for _ in range(3)] == ["about a"] * 3
    assert none.engine.queries == ["a"] * 3


def test_a_failure_is_never_cached():
    wrong = ToolError("wrong", is_permanent=True)
    engine = Engine(lambda query, count: wrong if (query, count) == ("a", 1) else "about")
    search = ResilientSearch(engine, make_config(retries=0, breaker_failures=0))
    assert search.run("b") == "about"  # so that the engine is known to answer
    [failed], [answer] = search.call_batch(["a"]), search.call_batch(["a"])
    assert failed.result is wrong
    assert (answer.result, answer.record.source) == ("about", "tool")


def test_concurrent_equal_queries_share_one_call():
    started, release = threading.Event(), threading.Event()

    def reply(query, count):
        started.set()
        assert release.wait(5)
        return f"about {query}"

    search = ResilientSearch(Engine(reply), make_config())
    first = run_in_thread(lambda: search.call_batch(["a", "a"]))
    assert started.wait(5)
    second = run_in_thread(lambda: search.call_batch(["a", "a"]))
    time.sleep(0.02)
    release.set()
    assert summarize(first.result()) == [("tool", 1, None), ("shared", 0, None)]
    assert summarize(second.result()) == [("shared", 0, None)] * 2
    assert search.engine.queries == ["a"]
    assert {a.result for a in first.result() + second.result()} == {"about a"}


def test_a_batch_sends_its_misses_together_and_retries_failures_alone():
    engine = BatchEngine(
        lambda query, count: ToolError("x") if (query, count) == ("b", 1) else query
    )
    search = ResilientSearch(engine, make_config())
    search.run("a")
    assert search.run_batch(["a", "b", "c", "b"]) == ["a", "b", "c", "b"]
    assert engine.batches == [["a"], ["b", "c"], ["b"]]


def test_a_query_that_fails_its_batch_fails_no_other():
    """If the engine cannot tell which query fails, the last attempt sends each query alone."""
    engine = BatchEngine(lambda query, count: ConnectionError("no") if query == "bad" else query)
    search = ResilientSearch(engine, make_config(retries=2, breaker_failures=0))
    first, bad, last = search.call_batch(["a", "bad", "b"])
    assert [first.result, last.result] == ["a", "b"]
    assert str(bad.result) == "ConnectionError: no"
    assert engine.batches[:2] == [["a", "bad", "b"]] * 2
    assert all(len(batch) == 1 for batch in engine.batches[2:])
    assert summarize([first]) == [("tool", 3, None)]


def test_a_query_is_retried_while_the_engine_answers_others():
    search = ResilientSearch(Engine(fail_first(3)), make_config(retries=3))
    [answer] = search.call_batch(["a"])
    assert (answer.result, answer.record.attempts) == ("about a", 4)
    # A query that always fails is an error once another one has been answered in between.
    engine = Engine(lambda query, _: ToolError("wrong") if query == "bad" else query)
    search = ResilientSearch(engine, make_config(retries=2))
    assert search.run("good") == "good"
    started = time.monotonic()
    [answer] = search.call_batch(["bad"])
    assert str(answer.result) == "wrong"
    assert not isinstance(answer.result, OutageError)
    assert time.monotonic() - started < 4.0
    assert answer.record.attempts == len(engine.queries) - 1  # probes of the engine count too


@pytest.mark.parametrize("kind", [Engine, BatchEngine])
def test_a_rejected_key_is_an_outage_at_once(kind):
    engine = kind(lambda *_: ToolError("401: the key is not valid", is_permanent=True))
    search = ResilientSearch(engine, make_config(backoff_s=100.0, breaker_failures=4))
    started = time.monotonic()
    results = search.run_batch(list("abcdefgh"))
    assert time.monotonic() - started < 20.0  # without backoff
    outages = [result for result in results if isinstance(result, OutageError)]
    assert "rejects every call: 401: the key is not valid. Finished work" in str(outages[0])
    assert max(Counter(engine.queries).values()) == 1


def test_refused_queries_are_no_outage_after_an_answer():
    error = ToolError("400: too long", is_permanent=True)
    engine = Engine(lambda query, _: error if len(query) > 9 else query)
    search = ResilientSearch(engine, make_config(breaker_failures=2, max_concurrent=1))
    search.run("short")
    results = search.run_batch([f"a long query {i}" for i in range(6)])
    assert [str(result) for result in results] == ["400: too long"] * 6
    assert not any(isinstance(result, OutageError) for result in results)


def test_a_wait_that_the_server_asks_for_is_kept():
    times = []

    def reply(query, count):
        times.append(time.monotonic())
        return ToolError("429", retry_after_s=0.3) if len(times) == 1 else query

    search = ResilientSearch(Engine(reply), make_config(max_concurrent=1))
    assert search.run_batch(["a", "b", "c"]) == ["a", "b", "c"]
    assert all(0.3 <= later - times[0] < 5.0 for later in times[1:])


def test_calls_wait_for_an_engine_that_recovers():
    is_up, timers = threading.Event(), []

    def reply(query, _):
        if not timers:  # half a second after the first call, which is later than the start
            timers.append(threading.Timer(0.5, is_up.set))
            timers[0].start()
        return query if is_up.is_set() else ConnectionError("refused")

    engine = BatchEngine(reply)
    search = ResilientSearch(engine, make_config(retries=1, breaker_failures=2))
    answers = search.call_batch(["a", "b", "c"])
    assert [answer.result for answer in answers] == ["a", "b", "c"]
    assert all(answer.record.waited_s >= 0.5 for answer in answers)
    assert sum(answer.record.attempts for answer in answers) == len(engine.queries)


@pytest.mark.parametrize("kind", [Engine, BatchEngine])
def test_an_engine_that_stays_down_is_an_outage(kind):
    engine = kind(lambda *_: ConnectionError("refused"))
    search = ResilientSearch(engine, make_config(outage_deadline_s=0.4))
    started = time.monotonic()
    results = search.run_batch(list("abcd"))
    assert 0.4 <= time.monotonic() - started < 5.0
    assert all(isinstance(result, OutageError) for result in results)
    assert all(result.fallback is None for result in results)
    assert "has not answered for 0.4 s (config.search.outage_deadline_s)" in str(results[0])
    # Later calls fail at once, except for one that probes the engine.
    count = len(engine.queries)
    assert all(isinstance(result, OutageError) for result in search.run_batch(list("efgh")))
    assert len(engine.queries) - count <= 4


def test_during_an_outage_an_expired_or_empty_result_may_replace_the_answer():
    is_up = threading.Event()
    is_up.set()
    engine = Engine(lambda query, _: query if is_up.is_set() else ConnectionError("refused"))
    search = ResilientSearch(
        engine, make_config(outage_deadline_s=0.2, on_outage="empty", cache_ttl_s=0.01)
    )
    search.run("known")
    time.sleep(0.02)
    is_up.clear()
    known, new = search.call_batch(["known", "new"])
    assert (known.result.fallback, new.result.fallback) == ("known", NO_INFORMATION)
    assert [answer.record.source for answer in (known, new)] == ["fallback"] * 2
    is_up.set()
    wait_until(lambda: search.call_batch(["new"])[0].result == "new")


def test_deadlines_are_kept_and_hanging_threads_are_bounded():
    release = threading.Event()
    engine = Engine(lambda query, _: query if query == "good" else release.wait())
    search = ResilientSearch(
        engine, make_config(deadline_s=0.1, outage_deadline_s=0.6, retries=1, max_concurrent=64)
    )
    before = threading.active_count()
    started = time.monotonic()
    answers = search.call_batch([f"q{i}" for i in range(200)])
    assert time.monotonic() - started < 0.6 + 0.1 + 4.0
    assert all(isinstance(answer.result, OutageError) for answer in answers)
    assert threading.active_count() - before <= MAX_HANGING + 64
    release.set()
    wait_until(lambda: threading.active_count() <= before + 1)
    assert search._num_hanging == 0
    wait_until(lambda: isinstance(search.call_batch(["good"])[0].result, str))


@pytest.mark.parametrize("kind", [Engine, BatchEngine])
def test_the_rate_limit_holds_for_all_callers_together(kind):
    starts, lock = [], threading.Lock()

    def reply(query, count):
        with lock:
            starts.append(time.monotonic())
        return ToolError("busy") if count == 1 and query[0] == "f" else query

    search = ResilientSearch(kind(reply), make_config(queries_per_second=80.0, backoff_s=0.0))
    parts = [[f"{'fg'[i % 2]}{n} {i}" for i in range(22)] for n in range(3)]
    assert parallel_map(search.run_batch, parts, max_threads=3) == parts
    starts.sort()
    assert len(starts) == 66 + 33  # the first attempt of every second query fails
    # At most 80 per second, apart from delays on a busy machine.
    assert all(b - a > 0.9 for a, b in zip(starts, starts[80:], strict=False))


def test_the_number_of_concurrent_calls_is_bounded():
    slots = threading.Semaphore(3)

    def reply(query, _):
        if not slots.acquire(blocking=False):
            return ToolError("too many calls", is_permanent=True)
        time.sleep(0.01)
        slots.release()
        return query

    search = ResilientSearch(Engine(reply), make_config(max_concurrent=3))
    parts = [[f"{n}{i}" for i in range(8)] for n in range(3)]
    assert parallel_map(search.run_batch, parts, max_threads=3) == parts


def test_recordings_and_the_cache_spend_no_rate(tmp_path):
    recording = Recording(tmp_path, {"engine": "e", "settings": {}})
    recording.add("recorded", "from disk")
    engine = Engine(lambda query, count: ToolError("busy") if count == 1 else query)
    search = ResilientSearch(engine, make_config(queries_per_second=1000.0), recording=recording)
    reserved = []
    reserve = search._limit.reserve
    search._limit.reserve = lambda count, now: reserved.append(count) or reserve(count, now)
    answers = search.call_batch(["recorded", "recorded", "new", "new"])
    sources = [("replay", 0), ("shared", 0), ("tool", 2), ("shared", 0)]
    assert [(a.record.source, a.record.attempts) for a in answers] == sources
    assert summarize(search.call_batch(["recorded", "new"])) == [("cache", 0, None)] * 2
    assert reserved == [1, 1]  # the two attempts alone


def test_an_interrupt_leaves_no_caller_waiting():
    class Interrupted(BatchEngine):
        def run_batch(self, queries):
            raise KeyboardInterrupt

    search = ResilientSearch(Interrupted(), make_config())
    with pytest.raises(KeyboardInterrupt):
        search.run_batch(["a", "b"])
    search.engine = Engine()
    search._takes_batches = False
    assert search.run("a") == "about a"


def test_every_query_is_answered_by_a_server_with_every_fault():
    queries = [f"query {i % 90}" for i in range(120)]
    with FaultServer(MIX | {"hang": 0.02}, seed=0, late_s=0.05) as server:
        engine = HttpRetriever(server.url, timeout_s=0.4, batch_size=8)
        search = ResilientSearch(engine, make_config(retries=12, deadline_s=1.0))
        parts = (queries[:40], queries[40:80], queries[80:])
        lists = parallel_map(search.call_batch, parts, max_threads=3)
        answers = [answer for answers in lists for answer in answers]
        assert len(answers) == 120
        assert sum(answer.record.attempts for answer in answers) == sum(server.asked.values())
        assert sum(server.did.values()) > server.did["ok"]
        assert {*server.asked} == {*queries}
        assert all(answer.record.waited_s < 30 for answer in answers)
        for answer in answers:
            assert f"A document about {answer.record.call}" in answer.result


URL_KEY = "config.search.http.url"


def run_health_check(engine, **changes):
    """Return the lines that a health check logs."""
    lines = []
    health_check(engine, make_config(**changes), url_key=URL_KEY, log=lines.append)
    return lines


def test_the_health_check_waits_for_a_server_that_comes_up():
    engine = Engine(fail_first(3))
    down, up = run_health_check(engine)
    assert down.startswith("warning: the search engine does not answer; it is retried for ")
    assert up.startswith("the search engine answers again")
    assert engine.queries == [PROBE_QUERY] * 4


def test_the_health_check_refuses_a_server_that_stays_down():
    down = Engine(fail_first(10**9))
    with pytest.raises(OutageError, match=rf"has not answered.*busy.*set by {URL_KEY}"):
        run_health_check(down, outage_deadline_s=0.2)
    slow = Engine(lambda *_: time.sleep(5))
    with pytest.raises(OutageError, match=r"the last error: no answer within 0\."):
        run_health_check(slow, deadline_s=0.05, outage_deadline_s=0.2)
    # If outages are allowed, it only warns.
    [line] = run_health_check(Engine(fail_first(10**9)), on_outage="empty")
    assert "Episodes with a search end as environment errors until it responds" in line


def test_the_health_check_refuses_a_permanent_error_at_once():
    engine = Engine(lambda *_: ToolError("answers with status 404", is_permanent=True))
    for changes in ({}, {"on_outage": "empty"}):
        with pytest.raises(ValueError, match=rf"{URL_KEY} rejects a test query: .*404"):
            run_health_check(engine, **changes)
    assert engine.queries == [PROBE_QUERY] * 2

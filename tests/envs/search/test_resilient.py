"""What stands around a search engine: each of it alone, then all of it against a bad server."""

import itertools
import math
import random
import threading
import time
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
"""So that nothing here waits long."""


def policy(**changes):
    keys = default_config().search
    return RetryConfig(
        **{name: keys[name] for name in RetryConfig.__dataclass_fields__} | QUICK | changes
    )


class Engine(SearchEngine):
    """Answers as `reply` says, of a query and how often it was asked; keeps what it was asked."""

    def __init__(self, reply=lambda query, count: f"about {query}"):
        self.reply, self.asked, self.lock = reply, [], threading.Lock()

    def run(self, query):
        with self.lock:
            self.asked.append(query)
            count = self.asked.count(query)
        found = self.reply(query, count)
        if isinstance(found, Exception):
            raise found
        return found


class Batches(Engine):
    """Takes several queries at once."""

    def __init__(self, *given):
        super().__init__(*given)
        self.batches = []

    def run_batch(self, queries):
        with self.lock:
            self.batches.append([*queries])
            self.asked += queries
            counts = [self.asked.count(query) for query in queries]
        found = [self.reply(*one) for one in zip(queries, counts, strict=True)]
        for one in found:
            if isinstance(one, Exception) and not isinstance(one, ToolError):
                raise one
        return found


def first(count, error=None):
    """Fails so many times for each query, then answers."""
    error = error or ToolError("busy")
    return lambda query, asked: error if asked <= count else f"about {query}"


def told(answers):
    """Source, tries and error of each answer."""
    return [(a.record.source, a.record.attempts, a.record.error) for a in answers]


def test_the_cache_answers_what_was_found_before():
    engine = Engine()
    search = ResilientSearch(engine, policy())
    assert search.run("a") == search.run("a") == "about a"
    again = search.answer_all(["a", "b", "a"])
    assert [answer.result for answer in again] == ["about a", "about b", "about a"]
    assert told(again) == [("cache", 0, None), ("tool", 1, None), ("cache", 0, None)]
    assert engine.asked == ["a", "b"]


def test_a_result_is_forgotten_after_a_while_and_where_there_is_no_room():
    engine = Engine(lambda query, count: f"{query} {count} " + "x" * 1000)
    search = ResilientSearch(engine, policy(cache_ttl_s=0.05))
    assert search.run("a") == search.run("a")
    time.sleep(0.06)
    assert search.run("a").startswith("a 2 ")
    # Of 3,000 bytes two such results have room; the one that was asked for last stays.
    small = ResilientSearch(Engine(engine.reply), policy(cache_mib=3000 / 2**20))
    for query in ("a", "b", "a", "c", "a", "b"):
        small.run(query)
    assert small.engine.asked == ["a", "b", "c", "b"]
    none = ResilientSearch(Engine(), policy(cache_mib=0.0))
    assert [none.run("a") for _ in range(3)] == ["about a"] * 3
    assert none.engine.asked == ["a"] * 3


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abcd"), st.booleans()), min_size=1, max_size=12))
def test_a_failure_is_never_kept(calls):
    """Each call of a query that has not been answered yet reaches the engine."""
    outcomes = iter(())
    engine = Engine(lambda query, _: next(outcomes))
    search = ResilientSearch(engine, policy(retries=0, breaker_failures=0))
    known = set()
    for query, is_up in calls:
        before = len(engine.asked)
        wrong = ToolError("wrong", is_permanent=True)
        outcomes = iter([f"about {query}" if is_up else wrong] + ["again"] * 3)
        [answer] = search.answer_all([query])
        if query in known:
            assert (answer.record.source, len(engine.asked)) == ("cache", before)
        else:
            assert len(engine.asked) > before
            assert isinstance(answer.result, str) == is_up
            known |= {query} if is_up else set()


def test_the_same_query_is_asked_once_at_a_time():
    begun, go_on = threading.Event(), threading.Event()

    def reply(query, count):
        begun.set()
        assert go_on.wait(5)
        return f"about {query}"

    search = ResilientSearch(Engine(reply), policy())
    one = run_in_thread(lambda: search.answer_all(["a", "a"]))
    assert begun.wait(5)
    other = run_in_thread(lambda: search.answer_all(["a", "a"]))
    time.sleep(0.02)
    go_on.set()
    assert told(one.result()) == [("tool", 1, None), ("shared", 0, None)]
    assert told(other.result()) == [("shared", 0, None)] * 2
    assert search.engine.asked == ["a"]
    assert {a.result for a in one.result() + other.result()} == {"about a"}


def test_misses_of_a_batch_go_to_the_engine_as_one_and_failures_alone_again():
    engine = Batches(lambda query, count: ToolError("x") if (query, count) == ("b", 1) else query)
    search = ResilientSearch(engine, policy())
    search.run("a")
    assert search.run_batch(["a", "b", "c", "b"]) == ["a", "b", "c", "b"]
    assert engine.batches == [["a"], ["b", "c"], ["b"]]


def test_a_query_that_breaks_its_batch_costs_no_other():
    """Where the engine cannot tell which query fails it, the last try is of each alone."""
    engine = Batches(lambda query, count: ConnectionError("no") if query == "bad" else query)
    search = ResilientSearch(engine, policy(retries=2, breaker_failures=0))
    found = search.answer_all(["a", "bad", "b"])
    assert [f.result for f in found[::2]] == ["a", "b"]
    assert str(found[1].result) == "ConnectionError: no"
    assert engine.batches[:2] == [["a", "bad", "b"]] * 2
    assert sorted(map(len, engine.batches[2:])) == [1] * len(engine.batches[2:])
    assert told(found)[0] == ("tool", 3, None)


def test_a_query_is_asked_again_while_the_engine_answers_others():
    search = ResilientSearch(Engine(first(3)), policy(retries=3))
    [answer] = search.answer_all(["a"])
    assert (answer.result, answer.record.attempts) == ("about a", 4)
    # One that always fails ends after so many tries that another query was answered between.
    engine = Engine(lambda query, _: ToolError("wrong") if query == "bad" else query)
    search = ResilientSearch(engine, policy(retries=2))
    assert search.run("good") == "good"
    started = time.monotonic()
    [answer] = search.answer_all(["bad"])
    assert str(answer.result) == "wrong"
    assert not isinstance(answer.result, OutageError)
    assert time.monotonic() - started < 4.0
    # Each query that the engine got counts, also those that told whether it is up.
    assert answer.record.attempts == len(engine.asked) - 1
    assert search.run("good") == "good"


def test_what_would_fail_alike_is_told_at_once():
    error = ToolError("400", is_permanent=True)
    engine = Engine(lambda query, _: error if query == "bad" else query)
    search = ResilientSearch(engine, policy(backoff_s=100.0))
    search.run("good")
    assert [str(one) for one in search.run_batch(["bad", "fine"])] == ["400", "fine"]
    assert Counter(engine.asked) == {"good": 1, "bad": 1, "fine": 1}


@pytest.mark.parametrize("kind", [Engine, Batches])
def test_a_wrong_key_is_an_outage_at_once(kind):
    engine = kind(lambda *_: ToolError("401: the key is not valid", is_permanent=True))
    search = ResilientSearch(engine, policy(backoff_s=100.0, breaker_failures=4))
    started = time.monotonic()
    found = search.run_batch(list("abcdefgh"))
    assert time.monotonic() - started < 20.0  # no backoff was waited for
    outages = [one for one in found if isinstance(one, OutageError)]
    assert outages
    assert "rejects every call: 401: the key is not valid. Finished work" in str(outages[0])
    assert max(Counter(engine.asked).values()) == 1


def test_queries_that_are_refused_are_no_outage_while_others_are_answered():
    error = ToolError("400: too long", is_permanent=True)
    engine = Engine(lambda query, _: error if len(query) > 9 else query)
    search = ResilientSearch(engine, policy(breaker_failures=2, max_concurrent=1))
    search.run("short")
    found = search.run_batch([f"a long query {i}" for i in range(6)])
    assert [str(one) for one in found] == ["400: too long"] * 6
    assert not any(isinstance(one, OutageError) for one in found)


def test_a_server_that_asks_to_wait_is_waited_for():
    times = []

    def reply(query, count):
        times.append(time.monotonic())
        return ToolError("429", retry_after_s=0.3) if len(times) == 1 else query

    search = ResilientSearch(Engine(reply), policy(max_concurrent=1))
    assert search.run_batch(["a", "b", "c"]) == ["a", "b", "c"]
    assert all(0.3 <= later - times[0] < 5.0 for later in times[1:])


@pytest.mark.parametrize("wait_s", [math.inf, math.nan, -5.0])
def test_a_wait_without_end_is_an_outage_in_time(wait_s):
    def always(query, times):
        return ToolError("429", retry_after_s=wait_s)

    began = time.monotonic()
    search = ResilientSearch(Engine(always), policy(outage_deadline_s=0.2))
    [found] = search.run_batch(["q"])
    assert isinstance(found, OutageError)
    assert time.monotonic() - began < 5


def test_an_open_breaker_lets_one_call_try():
    is_up, times = threading.Event(), []

    def reply(query, count):
        if is_up.is_set():
            return query
        times.append(time.monotonic())
        return ToolError("down")

    search = ResilientSearch(Engine(reply), policy(breaker_failures=3, breaker_rest_s=0.2))
    threading.Timer(0.5, is_up.set).start()
    found = search.answer_all(list("abcdefgh"))
    assert [answer.result for answer in found] == list("abcdefgh")
    # At first as many as there are threads; then one after each rest.
    tries = [t for t in times if t > times[0] + 0.15]
    assert 1 <= len(tries) <= 3
    assert all(after - before > 0.19 for before, after in itertools.pairwise(tries))


def test_calls_wait_for_an_engine_that_comes_back():
    is_up, coming_back = threading.Event(), []

    def answer(query, _):
        if not coming_back:  # half a second from the first call on, which is later than the start
            coming_back.append(threading.Timer(0.5, is_up.set))
            coming_back[0].start()
        return query if is_up.is_set() else ConnectionError("refused")

    engine = Batches(answer)
    search = ResilientSearch(engine, policy(retries=1, breaker_failures=2))
    found = search.answer_all(["a", "b", "c"])
    assert [answer.result for answer in found] == ["a", "b", "c"]
    assert all(answer.record.waited_s >= 0.5 for answer in found)
    assert sum(answer.record.attempts for answer in found) == len(engine.asked)


@pytest.mark.parametrize("kind", [Engine, Batches])
def test_an_engine_that_stays_away_is_an_outage(kind):
    engine = kind(lambda *_: ConnectionError("refused"))
    search = ResilientSearch(engine, policy(outage_deadline_s=0.4))
    started = time.monotonic()
    found = search.run_batch(list("abcd"))
    assert 0.4 <= time.monotonic() - started < 5.0
    assert all(isinstance(one, OutageError) and one.fallback is None for one in found)
    assert "has not answered for 0.4 s (config.search.outage_deadline_s); the last error: " in str(
        found[0]
    )
    # Later ones fail at once, but for one that tries.
    count = len(engine.asked)
    assert all(isinstance(one, OutageError) for one in search.run_batch(list("efgh")))
    assert len(engine.asked) - count <= 4


def test_with_empty_an_old_result_or_none_stands_in():
    is_up = threading.Event()
    is_up.set()
    engine = Engine(lambda query, _: query if is_up.is_set() else ConnectionError("refused"))
    search = ResilientSearch(
        engine, policy(outage_deadline_s=0.2, on_outage="empty", cache_ttl_s=0.01)
    )
    search.run("known")
    time.sleep(0.02)
    is_up.clear()
    known, new = search.answer_all(["known", "new"])
    assert (known.result.fallback, new.result.fallback) == ("known", NO_INFORMATION)
    assert [answer.record.source for answer in (known, new)] == ["fallback"] * 2
    is_up.set()
    wait_until(lambda: search.answer_all(["new"])[0].result == "new")


def test_no_call_waits_beyond_its_deadline_and_hanging_threads_are_bounded():
    for_ever = threading.Event()
    engine = Engine(lambda query, _: query if query == "good" else for_ever.wait())
    search = ResilientSearch(
        engine, policy(deadline_s=0.1, outage_deadline_s=0.6, retries=1, max_concurrent=64)
    )
    before = threading.active_count()
    started = time.monotonic()
    found = search.answer_all([f"q{i}" for i in range(400)])
    waited_s = time.monotonic() - started
    assert waited_s < 0.6 + 0.1 + 4.0
    assert all(isinstance(answer.result, OutageError) for answer in found)
    assert threading.active_count() - before <= MAX_HANGING + 64
    for_ever.set()
    wait_until(lambda: threading.active_count() <= before + 1)
    assert search._num_hanging == 0
    wait_until(lambda: isinstance(search.answer_all(["good"])[0].result, str))


@pytest.mark.parametrize("kind", [Engine, Batches])
def test_a_rate_is_kept_by_queries_whoever_asks(kind):
    starts, lock = [], threading.Lock()

    def reply(query, count):
        with lock:
            starts.append(time.monotonic())
        return ToolError("busy") if count == 1 and query[0] == "f" else query

    search = ResilientSearch(kind(reply), policy(queries_per_second=80.0, backoff_s=0.0))
    rng = random.Random(0)
    queries = [f"{rng.choice('fg')}{i}" for i in range(70)]
    parts = [queries[:10], queries[10:60], queries[60:]]
    threads = [threading.Thread(target=search.run_batch, args=(part,)) for part in parts]
    for thread in threads:
        thread.start()
        time.sleep(rng.random() * 0.1)
    for thread in threads:
        thread.join()
    starts.sort()
    assert len(starts) == 70 + sum(query[0] == "f" for query in queries)
    # At most 80 within a second, but for what the clock of a busy machine shifts.
    assert all(b - a > 0.9 for a, b in zip(starts, starts[80:], strict=False))


def test_at_most_so_many_calls_are_under_way():
    running, most, lock = [], [], threading.Lock()

    def reply(query, _):
        with lock:
            running.append(query)
            most.append(len(running))
        time.sleep(0.01)
        with lock:
            running.remove(query)
        return query

    search = ResilientSearch(Engine(reply), policy(max_concurrent=3))
    parts = [[f"{n}{i}" for i in range(8)] for n in range(3)]
    assert parallel_map(search.run_batch, parts, max_threads=3) == parts
    assert max(most) == 3


def test_a_query_passes_each_in_their_order(tmp_path):
    """What is answered early spends nothing of what comes later."""
    asked = {"engine": "e", "settings": {}}
    Recording(tmp_path, asked).add("recorded", "from disk")
    engine = Engine(lambda query, count: ToolError("busy") if count == 1 else query)
    spent = policy(queries_per_second=1000.0)
    search = ResilientSearch(engine, spent, recording=Recording(tmp_path, asked))
    reserved = []
    reserve = search._limit.reserve
    search._limit.reserve = lambda count, now: reserved.append(count) or reserve(count, now)
    answers = search.answer_all(["recorded", "recorded", "new", "new"])
    assert told(answers) == [
        ("replay", 0, None),
        ("shared", 0, None),
        ("tool", 2, None),
        ("shared", 0, None),
    ]
    assert reserved == [1, 1]  # each try counts, and nothing else
    assert told(search.answer_all(["recorded", "new"])) == [("cache", 0, None)] * 2
    assert reserved == [1, 1]
    # While the breaker is open nothing is spent either.
    search._breaker.record_failure(time.monotonic(), started_at=time.monotonic(), retry_after_s=0.3)
    started = time.monotonic()
    threading.Thread(target=search.run, args=("later",)).start()
    time.sleep(0.1)
    assert reserved == [1, 1]
    wait_until(lambda: len(reserved) == 4)
    assert time.monotonic() - started >= 0.3


def test_an_interrupt_leaves_nobody_waiting():
    class Interrupted(Batches):
        def run_batch(self, queries):
            raise KeyboardInterrupt

    search = ResilientSearch(Interrupted(), policy())
    with pytest.raises(KeyboardInterrupt):
        search.run_batch(["a", "b"])
    search.engine = Engine()
    search._takes_batches = False
    assert search.run("a") == "about a"


def test_against_a_server_that_fails_in_every_way():
    queries = [f"query {i % 90}" for i in range(120)]
    with FaultServer(MIX | {"hang": 0.02}, seed=0, late_s=0.05) as server:
        engine = HttpRetriever(server.url, timeout_s=0.4, batch_size=8)
        search = ResilientSearch(engine, policy(retries=12, deadline_s=1.0))
        parts = (queries[:40], queries[40:80], queries[80:])
        found = parallel_map(search.answer_all, parts, max_threads=3)
        answers = [answer for part in found for answer in part]
        assert len(answers) == 120
        assert sum(answer.record.attempts for answer in answers) == sum(server.asked.values())
        assert sum(server.did.values()) > server.did["ok"]
        assert {*server.asked} == {*queries}
        assert all(answer.record.waited_s < 30 for answer in answers)
        for answer in answers:
            assert f"A document about {answer.record.call}" in answer.result


PLACE = "config.search.http.url"


def asked_first(engine, **changes):
    """What is told of a first query."""
    lines = []
    health_check(engine, policy(**changes), url_key=PLACE, log=lines.append)
    return lines


def test_a_server_that_comes_up_soon_is_waited_for():
    engine = Engine(first(3))
    down, up = asked_first(engine)
    assert down.startswith("warning: the search engine does not answer; it is retried for ")
    assert down.endswith(f" The last error: busy ({PLACE})")
    assert up.startswith("the search engine answers again")
    assert engine.asked == [PROBE_QUERY] * 4


def test_a_server_that_stays_away_ends_the_start():
    told = rf"has not answered.*busy.*on_outage='empty'.* The server is set by {PLACE}"
    with pytest.raises(OutageError, match=told):
        asked_first(Engine(first(10**9)), outage_deadline_s=0.2)
    slow = Engine(lambda *_: time.sleep(5))
    with pytest.raises(OutageError, match=r"the last error: no answer within 0\."):
        asked_first(slow, deadline_s=0.05, outage_deadline_s=0.2)


def test_a_server_that_refuses_a_first_query_is_not_waited_for():
    engine = Engine(lambda *_: ToolError("answers with status 404", is_permanent=True))
    for changes in ({}, {"on_outage": "empty"}):
        with pytest.raises(ValueError, match=rf"{PLACE} rejects a test query: .*404"):
            asked_first(engine, **changes)
    assert engine.asked == [PROBE_QUERY] * 2
    later = Engine(lambda _, count: ToolError("no such path", is_permanent=count > 2))
    with pytest.raises(ValueError, match="rejects a test query: no such path"):
        asked_first(later)


def test_with_empty_a_dead_server_is_told_and_not_waited_for():
    engine = Engine(first(10**9))
    [line] = asked_first(engine, on_outage="empty")
    assert line.endswith(
        "error: busy. Episodes with a search end as environment errors until it responds"
    )
    assert engine.asked == [PROBE_QUERY]


def test_an_outage_is_told_once_and_its_end():
    is_up, lines = threading.Event(), []
    engine = Engine(lambda query, _: query if is_up.is_set() else ConnectionError("refused"))
    search = ResilientSearch(engine, policy(), log=lines.append, warn_after_s=0.1)
    threading.Timer(0.4, is_up.set).start()
    assert search.run_batch(["a", "b", "c"]) == ["a", "b", "c"]
    assert len(lines) == 2
    assert lines[0].startswith("warning: the search engine does not answer; it is retried for ")
    assert lines[0].endswith(" s (config.search.outage_deadline_s). The last error: "
                             "ConnectionError: refused")  # fmt: skip
    assert lines[1].startswith("the search engine answers again, after ")

"""Rows that are drawn each in its own way, cut, resumed, cancelled; and the worker around them."""

import asyncio
import contextlib
import itertools
import math
import queue
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.extras.serve.engine import SamplingParams
from jaxrl.extras.serve.errors import RequestError
from jaxrl.extras.serve.generation import Completion, CompletionCache
from jaxrl.extras.serve.worker import (
    CANCELLED,
    FAILED,
    LENGTH,
    STOP,
    CompletionRequest,
    GenerationJob,
    Worker,
)
from jaxrl.sampling.engine import Request
from jaxrl.sampling.next_token import FULL, GREEDY, KINDS, TOP_P, sample, select_kind
from tests.extras.serve.served import TOKENIZER, make_engine

pytestmark = pytest.mark.usefixtures("quick_compilation")

DRAW = jax.jit(sample, static_argnames="kind")


@pytest.fixture(scope="module")
def engine(quick_compilation):
    return make_engine()


@pytest.fixture
def empty(engine):
    engine.clear()
    return engine


def key(number):
    return np.array([number, 7], np.uint32)


def play(engine, *requests, params=SamplingParams(0.0, 1.0)):
    """Ids of requests that run together until all have stopped."""
    numbers = engine.submit(requests, temperature=params.temperature, top_p=params.top_p)
    found = {number: [] for number in numbers}
    while engine.num_queued or engine.num_running:
        for event in engine.step():
            found[event.request] += event.token_ids.tolist()
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_drawn_as_alone(kind):
    """Each row's draw, log-probability and entropy are those of a call for it alone."""
    rng = np.random.default_rng(0)
    logits = jnp.asarray(3 * rng.standard_normal((6, 50)), jnp.float32)
    uniforms = jnp.asarray(rng.random(6), jnp.float32)
    temperatures, shares = {
        GREEDY: ([0] * 6, [1] * 6),
        FULL: ([0, 0.5, 1, 2, 0, 0.1], [1] * 6),
        TOP_P: ([0, 0.5, 1, 2, 0.7, 1], [0.5, 0.5, 1, 0.9, 0.1, 1e-6]),
    }[kind]
    got = DRAW(logits, uniforms, jnp.float32(temperatures), jnp.float32(shares), kind=kind)
    for row, (temperature, share) in enumerate(zip(temperatures, shares, strict=True)):
        alone = DRAW(
            logits[row : row + 1], uniforms[row : row + 1],
            jnp.float32(temperature), jnp.float32(share), kind=select_kind(temperature, share),
        )  # fmt: skip
        for one, other in zip(got, alone, strict=True):
            np.testing.assert_allclose(one[row], other[0], rtol=1e-6)
    greedy = np.array(temperatures) == 0
    np.testing.assert_array_equal(got[0][greedy], np.argmax(logits, axis=1)[greedy])


def test_a_row_that_was_cut_goes_on_as_one_that_never_was_longer(empty):
    prompt = tuple(TOKENIZER.encode("Who is Ada Kerr?"))
    request = Request(prompt_ids=prompt, sample_key=key(0), budget=22)
    [(number, ids)] = play(empty, request).items()
    kept = (*prompt, *ids[:9])
    empty.truncate(number, kept)
    new = TOKENIZER.encode("Then?")
    empty.resume_with(number, new, 8, sample_key=key(1), params=SamplingParams(1.0, 1.0))
    got = []
    while empty.num_running:
        got += [id for event in empty.step() for id in event.token_ids.tolist()]
    empty.finish(number)
    assert empty.is_idle
    fresh = Request(prompt_ids=(*kept, *new), sample_key=key(1), budget=8)
    [wanted] = play(empty, fresh, params=SamplingParams(1.0, 1.0)).values()
    assert got == wanted


def test_requests_are_cancelled_wherever_they_are(empty):
    prompts = [tuple(TOKENIZER.encode(f"number {n}")) for n in range(6)]
    requests = [Request(prompt_ids=p, sample_key=key(0), budget=40) for p in prompts]
    numbers = empty.submit(requests, temperature=0.0)
    empty.step()
    assert (empty.num_running, empty.num_queued) == (4, 2)
    empty.cancel(numbers[5])  # waits for a row
    empty.cancel(numbers[0])  # runs
    assert (empty.num_running, empty.num_queued) == (3, 1)
    empty.step()
    assert (empty.num_running, empty.num_queued) == (4, 0)
    for number in numbers[1:5]:
        empty.cancel(number)
    assert empty.is_idle
    assert empty.num_free_pages == empty.num_pages
    [ids] = play(empty, requests[0]).values()  # nothing of those is left
    assert len(ids) == 40 or ids[-1] in TOKENIZER.eos_ids


@pytest.fixture(params=[False, True], ids=["read_at_once", "one_ahead"])
def either(engine, request, monkeypatch):
    """The engine, whose worker leaves no chunk or one in flight."""
    monkeypatch.setattr(engine, "overlaps", request.param)
    return engine


class Asked:
    """A worker, and jobs whose pieces are put in a queue."""

    def __init__(self, engine, **settings):
        engine.clear()
        self.worker = Worker(engine, TOKENIZER.vocab_bytes, TOKENIZER.eos_ids, **settings)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.worker.shutdown(0.0)

    def job(self, prompt_ids, budget=6, sample_key=key(0), **settings):
        pieces = queue.Queue()
        settings = {"params": SamplingParams(0.0, 1.0), "seed": None, **settings}
        request = CompletionRequest(prompt_ids=tuple(prompt_ids), max_tokens=budget, **settings)
        return GenerationJob(
            request=request,
            sample_key=sample_key,
            deadline=time.monotonic() + 60,
            on_output=pieces.put,
        ), pieces

    def ask(self, prompt_ids, budget=6, **settings):
        """Ids of an answer, and its last piece."""
        job, pieces = self.job(prompt_ids, budget, **settings)
        self.worker.submit([job])
        return finished(pieces)


def finished(pieces):
    ids = []
    while True:
        piece = pieces.get(timeout=60)
        ids += piece.token_ids
        if piece.finish_reason:
            return ids, piece


PROMPT = TOKENIZER.encode("Who is Ada Kerr?")


def test_the_longest_that_fits_is_gone_on_from(either):
    with Asked(either) as asked:
        short, _ = asked.ask(PROMPT, 3)
        first = [*PROMPT, *short]
        second, _ = asked.ask([*first, 40, 41], 3)
        long = [*first, 40, 41, *second]
        # The first row is the second's, and a request behind the first alone has nothing.
        assert asked.worker.num_cached_rows == 1
        _, piece = asked.ask([*first, 50], 3)
        assert piece.num_cached == 0
        _, piece = asked.ask([*long, 50], 3)
        assert piece.num_cached == len(long) - 1
        # Of two that fit the longer: the row of `first` and 50 is there, and its own beginning.
        assert asked.worker.num_cached_rows == 2


def test_two_that_go_on_from_the_same_both_answer(either):
    with Asked(either) as asked:
        ids, _ = asked.ask(PROMPT, 4)
        behind = [*PROMPT, *ids, 40]
        jobs, outlets = zip(*(asked.job(behind, 5) for _ in range(2)), strict=True)
        asked.worker.submit(jobs)
        answers, pieces = zip(*map(finished, outlets), strict=True)
        assert answers[0] == answers[1]
        assert sorted(piece.num_cached for piece in pieces) == [0, len(behind) - 2]


def test_ends_and_counts(either):
    with Asked(either) as asked:
        ids, piece = asked.ask(PROMPT, 8)
        assert (len(ids), piece.finish_reason) == (8, LENGTH)
        cut, piece = asked.ask(PROMPT, 8, stop_ids=frozenset(ids[4:5]))
        assert (cut, piece.finish_reason) == (ids[: ids.index(ids[4]) + 1], STOP)
        text = b"".join(TOKENIZER.vocab_bytes[id] for id in cut[:-1])
        assert piece.text_bytes == len(text)
        # A string over the border of two tokens: the text ends before it, the ids behind it.
        pieces = [TOKENIZER.vocab_bytes[id] for id in ids]
        data, borders = b"".join(pieces), itertools.accumulate(map(len, pieces[:-1]))
        pairs = [(border - 1, data[border - 1 : border + 1]) for border in borders]
        stop = next(two for start, two in pairs if two.isascii() and data.index(two) == start)
        found, piece = asked.ask(PROMPT, 8, stops=("never", stop.decode()))
        assert piece.finish_reason == STOP
        assert piece.text_bytes == data.index(stop)
        assert stop in b"".join(TOKENIZER.vocab_bytes[id] for id in found)
        assert stop not in b"".join(TOKENIZER.vocab_bytes[id] for id in found[:-1])
        totals = asked.worker.stats
        assert tuple(
            totals[f"samples{name}_total"] for name in ("", "_finished", "_cancelled")
        ) == (3, 3, 0)


def test_sessions_that_are_stopped_on_the_host_go_on_alike_with_a_chunk_in_flight(
    engine, monkeypatch
):
    """Six sessions on four rows: ids, ends and what was read again are those without."""
    found = []
    for overlaps in (False, True):
        monkeypatch.setattr(engine, "overlaps", overlaps)
        with Asked(engine, max_cached_rows=6) as asked:
            prompts = [[*PROMPT, 40 + number] for number in range(6)]
            for turn in range(3):
                # Every second session ends at each id that is a multiple of three, within a chunk.
                settings = [
                    {"stop_ids": frozenset(range(0, 3000, 3))} if number % 2 else {}
                    for number in range(6)
                ]
                jobs, outlets = zip(
                    *(
                        asked.job(
                            prompt,
                            7,
                            sample_key=key(turn),
                            params=SamplingParams(1.0, 1.0),
                            **settings[number],
                        )
                        for number, prompt in enumerate(prompts)
                    ),
                    strict=True,
                )
                asked.worker.submit(jobs)
                for prompt, outlet in zip(prompts, outlets, strict=True):
                    ids, piece = finished(outlet)
                    found.append((ids, piece.finish_reason, piece.num_cached))
                    prompt += [*ids, 60 + turn]
            left, outlet = asked.job(prompts[0], 90)
            asked.worker.submit([left])
            outlet.get(timeout=60)  # it runs, and then nobody wants the rest
            asked.worker.cancel(left)
            assert finished(outlet)[1].finish_reason == CANCELLED
            found.append(asked.ask([*prompts[1], 61], 5))
    assert STOP in {end for _, end, _ in found[:18]}
    assert LENGTH in {end for _, end, _ in found[:18]}
    assert found[:19] == found[19:]


def test_a_job_that_was_cancelled_before_it_ran(either):
    with Asked(either) as asked:
        jobs, outlets = zip(*(asked.job(PROMPT, 30, sample_key=key(n)) for n in range(6)),
                            strict=True)  # fmt: skip
        for job in jobs:
            job.is_cancelled = True
        asked.worker.submit(jobs)
        assert [finished(one)[1].finish_reason for one in outlets] == [CANCELLED] * 6
        assert asked.worker.stats["samples_cancelled_total"] == 6
        assert asked.ask(PROMPT, 2)[1].finish_reason == LENGTH


def test_a_row_without_room_for_more_is_not_kept(either):
    most = either.max_total_tokens
    with Asked(either) as asked:
        ids, piece = asked.ask([5] * (most - 2), 2)
        assert (len(ids), piece.finish_reason) == (2, LENGTH)
        assert asked.worker.num_cached_rows == 0
        assert either.num_free_pages == either.num_pages


def test_only_so_many_rows_are_kept(either):
    with Asked(either, max_cached_rows=3) as asked:
        prompts = [[*PROMPT, 40 + n] for n in range(5)]
        answers = [asked.ask(prompt, 2)[0] for prompt in prompts]
        # The rows of the first two were released, which a request notices.
        cached = [
            asked.ask([*prompt, *ids, 60], 1)[1].num_cached
            for prompt, ids in zip(prompts[::-1], answers[::-1], strict=True)
        ]
        assert [count > 0 for count in cached] == [True, True, True, False, False]


@pytest.mark.parametrize("is_late", [False, True])
def test_who_goes_on_is_before_who_begins_unless_that_one_has_waited_for_long(engine, is_late):
    with Asked(engine) as asked:
        ids, _ = asked.ask(PROMPT, 4)
        ended, over = [], threading.Semaphore(0)

        def job(name, prompt, budget):
            made, _ = asked.job(prompt, budget)

            def tell(piece):
                if piece.finish_reason:
                    ended.append((name, piece.num_cached))
                    over.release()

            made.on_output = tell
            return made

        # Four rows, of which one is free after eight chunks and the others after twelve.
        first, *others = [job("long", [*PROMPT, 50 + n], 48 if n else 32) for n in range(4)]
        waiting = [job("new", [*PROMPT, 60], 3), job("going on", [*PROMPT, *ids, 40], 3)]
        tell = first.on_output

        def tell_and_ask(piece):  # these come when all rows are taken
            if not waiting[0].yields_until:
                asked.worker.submit(waiting)
                waiting[0].yields_until = -1.0 if is_late else math.inf
            tell(piece)

        first.on_output = tell_and_ask
        asked.worker.submit([first, *others])
        for _ in range(6):
            assert over.acquire(timeout=60)
    cached = len(PROMPT) + 3
    wanted = [("going on", cached), ("new", 0)]
    assert [one for one in ended if one[0] != "long"][:2] == (wanted[::-1] if is_late else wanted)


def test_sessions_on_few_pages_read_nothing_twice(quick_compilation):
    """Eight sessions of three turns fill 56 pages in the end; the cache has 40."""
    engine = make_engine(num_pages=40)
    lengths, reads = [], []
    over = threading.Semaphore(0)
    with Asked(engine) as asked:

        def turn(prompt, number):
            ids = []

            def tell(piece):  # as soon as a turn ends, the next one is asked for
                ids.extend(piece.token_ids)
                if piece.finish_reason and number < 2:
                    asked.worker.submit([turn([*prompt, *ids, 40, 41], number + 1)])
                elif piece.finish_reason:
                    lengths.append(len(prompt) + len(ids))
                    over.release()

            job, _ = asked.job(prompt, 32, params=SamplingParams(1.0, 1.0))
            job.on_output = tell
            reads.append(len(prompt) - 1 if number == 0 else 2)
            return job

        asked.worker.submit([turn([*PROMPT, 50 + n], 0) for n in range(8)])
        for _ in range(8):
            assert over.acquire(timeout=60)
        counts = engine.counts
        assert sum(-(-length // engine.page_tokens) for length in lengths) > engine.num_pages
        assert asked.worker.stats["rows_released_total"] > 0  # of sessions that were over
        assert counts.prefilled_prompt + counts.prefilled_resume == sum(reads)


def test_an_answer_that_was_waited_for_is_kept_from_its_end():
    """It is neither forgotten while it is read nor as the oldest when it has come."""

    class Nobody:
        submit = cancel = staticmethod(lambda jobs: None)

    cache = CompletionCache(Nobody(), deadline_s=60.0, max_size=2)
    request = CompletionRequest(
        prompt_ids=(1,), params=SamplingParams(0.0, 1.0), seed=0, max_tokens=1
    )

    def read(name, reading=contextlib.nullcontext):
        completion = Completion(None, request)
        with cache.attach_reader(completion, [name]):
            reading()

    async def ask():
        read("slow", lambda: [read(name) for name in "abc"])
        read("d")
        return [
            name
            for name in ("slow", *"abcd")
            if cache.find([name], is_retry=True, is_recorded=False)
        ]

    assert asyncio.run(ask()) == ["slow", "d"]


def test_a_pause_waits_for_the_chunk_under_way_however_long_it_takes(engine, monkeypatch):
    step, is_under_way = engine.step, threading.Event()

    def slow(**settings):  # as one whose program has to be compiled
        if not is_under_way.is_set():
            is_under_way.set()
            time.sleep(0.6)
        return step(**settings)

    monkeypatch.setattr(engine, "step", slow)
    monkeypatch.setattr("jaxrl.extras.serve.worker.JOIN_S", 0.1)
    with Asked(engine) as asked:
        job, outlet = asked.job(PROMPT, 60)
        asked.worker.submit([job])
        assert is_under_way.wait(60)
        asked.worker.pause()
        assert engine.is_idle
        asked.worker.resume(lambda _: True, version=1, deadline_s=60.0)
        assert len(finished(outlet)[0]) == 60


def faulty(*_, **__):
    raise RuntimeError("out of memory in /secret/place.py")


def test_an_engine_that_cannot_be_cleared_ends_and_all_who_wait_are_told(
    engine, monkeypatch, capsys
):
    with Asked(engine) as asked, monkeypatch.context() as patched:
        patched.setattr(engine, "step", faulty)
        patched.setattr(engine, "clear", faulty)
        jobs, outlets = zip(*(asked.job(PROMPT, 2) for _ in range(6)), strict=True)
        asked.worker.submit(jobs)  # four have rows, and two wait
        assert [finished(one)[1].finish_reason for one in outlets] == [FAILED] * 6
        asked.worker._thread.join(60)
        assert not asked.worker.is_alive
        with pytest.raises(
            RequestError,
            match="the engine has ended; see the server's log, then restart the server",
        ):
            asked.worker.submit([asked.job(PROMPT, 2)[0]])
    assert "could not be cleared after its failure: RuntimeError" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_whoever_waits_is_told_whatever_ends_the_thread(engine, monkeypatch):
    with Asked(engine) as asked, monkeypatch.context() as patched:
        patched.setattr(asked.worker, "_fail_running_jobs", lambda error: sys.exit())
        patched.setattr(engine, "step", faulty)
        assert asked.ask(PROMPT, 2)[1].finish_reason == FAILED
        asked.worker._thread.join(60)
        assert not asked.worker.is_alive

"""Engine rows with settings of their own, cut, resumed and cancelled; and their worker."""

import itertools
import queue
import threading
import time

import numpy as np
import pytest

from jaxrl.extras.serve.engine import SamplingParams
from jaxrl.extras.serve.worker import (
    CANCELLED,
    LENGTH,
    STOP,
    CompletionRequest,
    GenerationJob,
    Worker,
)
from tests.extras.serve.served import TOKENIZER, make_engine

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(scope="module")
def engine(quick_compilation):
    return make_engine()


def key(number):
    return np.array([number, 7], np.uint32)


@pytest.fixture(params=[False, True], ids=["no_overlap", "overlap"])
def either(engine, request, monkeypatch):
    """An engine whose worker keeps no chunk in flight, or one."""
    monkeypatch.setattr(engine, "overlaps", request.param)
    return engine


class WorkerClient:
    """A worker, with jobs whose output goes to queues."""

    def __init__(self, engine, **settings):
        engine.clear()
        self.worker = Worker(engine, TOKENIZER.vocab_bytes, TOKENIZER.eos_ids, **settings)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.worker.shutdown(0.0)

    def job(self, prompt_ids, budget=6, sample_key=key(0), **settings):
        chunks = queue.Queue()
        settings = {"params": SamplingParams(0.0, 1.0), "seed": None, **settings}
        request = CompletionRequest(prompt_ids=tuple(prompt_ids), max_tokens=budget, **settings)
        return GenerationJob(
            request=request,
            sample_key=sample_key,
            deadline=time.monotonic() + 60,
            on_output=chunks.put,
        ), chunks

    def ask(self, prompt_ids, budget=6, **settings):
        """Return the ids of a completion, and its last chunk."""
        job, chunks = self.job(prompt_ids, budget, **settings)
        self.worker.submit([job])
        return finish(chunks)


def finish(chunks):
    ids = []
    while True:
        chunk = chunks.get(timeout=60)
        ids += chunk.token_ids
        if chunk.finish_reason:
            return ids, chunk


PROMPT = TOKENIZER.encode("Who is Ada Kerr?")


def test_a_request_resumes_the_row_with_the_longest_prefix(either):
    with WorkerClient(either) as client:
        short, _ = client.ask(PROMPT, 3)
        first = [*PROMPT, *short]
        second, _ = client.ask([*first, 40, 41], 3)
        long = [*first, 40, 41, *second]
        # The second request took over the first one's row: for `first` alone nothing is cached.
        assert client.worker.num_cached_rows == 1
        assert client.ask([*first, 50], 3)[1].num_cached == 0
        assert client.ask([*long, 50], 3)[1].num_cached == len(long) - 1
        assert client.worker.num_cached_rows == 2


def test_two_requests_that_extend_the_same_row_are_both_answered(either):
    with WorkerClient(either) as client:
        ids, _ = client.ask(PROMPT, 4)
        prompt = [*PROMPT, *ids, 40]
        jobs, outlets = zip(*(client.job(prompt, 5) for _ in range(2)), strict=True)
        client.worker.submit(jobs)
        answers, chunks = zip(*map(finish, outlets), strict=True)
        assert answers[0] == answers[1]
        assert sorted(chunk.num_cached for chunk in chunks) == [0, len(prompt) - 2]


def test_completions_end_at_lengths_ids_and_strings(either):
    with WorkerClient(either) as client:
        ids, chunk = client.ask(PROMPT, 8)
        assert (len(ids), chunk.finish_reason) == (8, LENGTH)
        cut, chunk = client.ask(PROMPT, 8, stop_ids=frozenset(ids[4:5]))
        assert (cut, chunk.finish_reason) == (ids[: ids.index(ids[4]) + 1], STOP)
        assert chunk.text_bytes == len(b"".join(TOKENIZER.vocab_bytes[id] for id in cut[:-1]))
        # A string across the border of two tokens: the text ends before it, the ids after it.
        pieces = [TOKENIZER.vocab_bytes[id] for id in ids]
        data, borders = b"".join(pieces), itertools.accumulate(map(len, pieces[:-1]))
        pairs = [(border - 1, data[border - 1 : border + 1]) for border in borders]
        stop = next(two for start, two in pairs if two.isascii() and data.index(two) == start)
        ids, chunk = client.ask(PROMPT, 8, stops=("never", stop.decode()))
        assert (chunk.finish_reason, chunk.text_bytes) == (STOP, data.index(stop))
        assert stop in b"".join(TOKENIZER.vocab_bytes[id] for id in ids)
        assert stop not in b"".join(TOKENIZER.vocab_bytes[id] for id in ids[:-1])


def test_a_chunk_in_flight_changes_no_session(engine, monkeypatch):
    """Six sessions on four rows have the same ids, ends and cached prefixes with and without."""
    results = {}
    for overlaps in (False, True):
        monkeypatch.setattr(engine, "overlaps", overlaps)
        with WorkerClient(engine, max_cached_rows=6) as client:
            results[overlaps] = play_sessions(client)
    reasons = {reason for _, reason, _ in results[False][:18]}
    assert reasons == {STOP, LENGTH}
    assert results[True] == results[False]


def play_sessions(client):
    """Play three turns of six sessions, cancel a request and continue a session."""
    results = []
    prompts = [[*PROMPT, 40 + number] for number in range(6)]
    settings = {"params": SamplingParams(1.0, 1.0)}
    for turn in range(3):
        # Every second session ends at each id that is a multiple of three, within a chunk.
        stops = [frozenset(range(0, 3000, 3)) if n % 2 else frozenset() for n in range(6)]
        jobs, outlets = zip(
            *(
                client.job(prompt, 7, sample_key=key(turn), stop_ids=stop_ids, **settings)
                for prompt, stop_ids in zip(prompts, stops, strict=True)
            ),
            strict=True,
        )
        client.worker.submit(jobs)
        for prompt, outlet in zip(prompts, outlets, strict=True):
            ids, chunk = finish(outlet)
            results.append((ids, chunk.finish_reason, chunk.num_cached))
            prompt += [*ids, 60 + turn]
    job, outlet = client.job(prompts[0], 90)
    client.worker.submit([job])
    outlet.get(timeout=60)  # it runs
    client.worker.cancel(job)
    assert finish(outlet)[1].finish_reason == CANCELLED
    ids, chunk = client.ask([*prompts[1], 61], 5)
    return [*results, (ids, chunk.finish_reason, chunk.num_cached)]


def test_sessions_on_few_pages_prefill_nothing_twice(quick_compilation):
    """Eight sessions of three turns fill 56 pages in the end; the cache has 40."""
    engine = make_engine(num_pages=40)
    lengths, num_prefilled = [], []
    all_ended = threading.Semaphore(0)
    with WorkerClient(engine) as client:

        def make_job(prompt, turn):
            ids = []

            def submit_next(chunk):
                ids.extend(chunk.token_ids)
                if chunk.finish_reason and turn < 2:
                    client.worker.submit([make_job([*prompt, *ids, 40, 41], turn + 1)])
                elif chunk.finish_reason:
                    lengths.append(len(prompt) + len(ids))
                    all_ended.release()

            job, _ = client.job(prompt, 32, params=SamplingParams(1.0, 1.0))
            job.on_output = submit_next
            num_prefilled.append(2 if turn else len(prompt) - 1)
            return job

        client.worker.submit([make_job([*PROMPT, 50 + n], 0) for n in range(8)])
        for _ in range(8):
            assert all_ended.acquire(timeout=60)
        counts = engine.counts
        assert sum(-(-length // engine.page_tokens) for length in lengths) > engine.num_pages
        assert client.worker.stats["rows_released_total"] > 0  # of sessions that were over
        assert counts.prefilled_prompt + counts.prefilled_resume == sum(num_prefilled)


def test_a_pause_waits_for_the_current_chunk(engine, monkeypatch):
    step, is_under_way = engine.step, threading.Event()

    def step_slowly(**settings):  # as if its program had to be compiled
        if not is_under_way.is_set():
            is_under_way.set()
            time.sleep(0.6)
        return step(**settings)

    monkeypatch.setattr(engine, "step", step_slowly)
    monkeypatch.setattr("jaxrl.extras.serve.worker.JOIN_S", 0.1)
    with WorkerClient(engine) as client:
        job, outlet = client.job(PROMPT, 60)
        client.worker.submit([job])
        assert is_under_way.wait(60)
        client.worker.pause()
        assert engine.is_idle
        client.worker.resume(lambda _: True, version=1, deadline_s=60.0)
        assert len(finish(outlet)[0]) == 60

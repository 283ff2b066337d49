"""Engine thread: admits jobs between chunks and forwards the sampled tokens.

The row of a finished completion stays in the engine as a cached prefix. A request resumes the row
with the longest cached prefix of its ids and prefills only the rest. Cached rows are evicted, least
recently used first, when pages are needed or there are more than `max_cached_rows`. Jobs that
continue a cached row are admitted before others.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxrl.extras.serve.engine import SamplingParams, ServedEngine
from jaxrl.extras.serve.errors import RequestError
from jaxrl.sampling import decode
from jaxrl.sampling.engine import Event, Request
from jaxrl.utils.concurrency import format_error_report

STOP, LENGTH = "stop", "length"
LATE, CANCELLED, FAILED = "late", "cancelled", "failed"
"""Finish reasons. Only "stop" and "length" mark a complete completion."""

COUNTERS = (
    "samples_total",
    "samples_finished_total",
    "samples_cancelled_total",
    "samples_late_total",
    "samples_failed_total",
    "refused_busy_total",
    "prompt_tokens_total",
    "prompt_tokens_reused_total",
    "rows_released_total",
)
"""Counters in `/metrics`, counted since the start."""

DAMAGED = "the model gives NaN: its weights are damaged."

JOIN_S = 10.0
"""Seconds to wait for the current chunk at shutdown."""


@dataclass(frozen=True, kw_only=True)
class OutputChunk:
    """Tokens from one chunk of decoding steps.

    Attributes:
        token_ids: Sampled ids, including the stop id or the last token of the stop string.
        logprobs: Log-probabilities of `token_ids` in nats, at the sampling temperature.
        entropies: Entropies of the sampling distributions, in nats.
        versions: Weight version for each token; see `Worker.resume`.
        finish_reason: Finish reason in the last chunk of a completion, else "".
        text_bytes: Length of the completion's text so far, in bytes.
        num_cached: Number of prompt tokens that were cached and not prefilled again.
        error: Error message for the client.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    entropies: tuple[float, ...] = ()
    versions: tuple[int, ...] = ()
    finish_reason: str = ""
    text_bytes: int = 0
    num_cached: int = 0
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class CompletionRequest:
    """A request in any dialect.

    Attributes:
        prompt_ids: Token ids of the prompt.
        num_samples: Number of completions to sample.
        params: Sampling settings.
        seed: Sampling seed; None for a random one.
        max_tokens: Limit on each completion.
        stop_ids: Token ids that end a completion.
        stops: Strings that end a completion.
        body: Parsed body, which holds the output options.
    """

    prompt_ids: tuple[int, ...]
    num_samples: int = 1
    params: SamplingParams
    seed: int | None
    max_tokens: int
    stop_ids: frozenset[int] = frozenset()
    stops: tuple[str, ...] = ()
    body: Any = None


@dataclass(eq=False, kw_only=True)
class Job:
    """One sample of a request.

    Attributes:
        request: The request.
        sample_key: Random key, uint32 [2].
        deadline: Time on the monotonic clock.
        on_output: Callback for each chunk, called on the engine's thread.
        session: Name of the session; see `Worker.resume`.
    """

    request: CompletionRequest
    sample_key: np.ndarray
    deadline: float
    on_output: Callable[[OutputChunk], None]
    session: str = ""
    token_ids: list[int] = field(default_factory=list)
    data: bytearray = field(default_factory=bytearray)  # bytes of the tokens
    num_cached: int = 0
    is_cancelled: bool = False
    yields_until: float = 0.0  # monotonic time up to which other jobs may go first
    prefix: tuple[int, tuple[int, ...]] | tuple[()] | None = None  # cached row and ids; (): none

    @property
    def context_ids(self) -> tuple[int, ...]:
        """Return the ids before the next token."""
        return (*self.request.prompt_ids, *self.token_ids)


class Worker:
    """An engine, its thread and its queue."""

    def __init__(
        self,
        engine: ServedEngine,
        vocab_bytes: Sequence[bytes],
        eos_ids: Sequence[int],
        *,
        max_queue: int = 256,
        max_cached_rows: int = 0,
        is_paused: bool = False,
    ):
        """Start the thread.

        Args:
            engine: Engine with weights. Only the worker's thread uses it from now on.
            vocab_bytes: Bytes of each token id.
            eos_ids: Ids at which the engine stops.
            max_queue: Limit on waiting jobs, not counting those that fit in free rows.
            max_cached_rows: Limit on cached rows; 0 for eight per row.
            is_paused: True to accept jobs but start none before `resume`.
        """
        self.engine = engine
        self.stats = Counter(dict.fromkeys(COUNTERS, 0))
        self.version = 0  # of the weights
        self.is_damaged = False  # a log-probability was not finite
        self.failure: Exception | None = None  # latest engine error since `resume`
        self._vocab_bytes, self._eos_ids = vocab_bytes, frozenset(eos_ids)
        self._max_queue = max_queue
        self._max_cached_rows = max_cached_rows or 8 * engine.num_rows
        self._jobs: dict[int, Job] = {}  # by engine request
        self._cached: OrderedDict[int, tuple[int, ...]] = OrderedDict()  # ids by request
        # Everything below is shared with other threads, under `_changed`.
        self._changed = threading.Condition()
        self._queue: deque[Job] = deque()
        self._held: list[Job] = []  # jobs of sessions that are paused
        self._is_served: Callable[[str], bool] = lambda session: not is_paused
        self._is_paused = self._is_parked = is_paused
        self.is_ending = False  # no request is accepted
        self._must_wake = self._must_exit = self._has_ended = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def num_queued(self) -> int:
        """Return the number of jobs without a row."""
        return len(self._queue) + self.engine.num_queued

    @property
    def num_running(self) -> int:
        """Return the number of jobs with a row."""
        return len(self._jobs) - self.engine.num_queued

    @property
    def num_cached_rows(self) -> int:
        """Return the number of rows of finished completions."""
        return len(self._cached)

    @property
    def is_alive(self) -> bool:
        """Return False once the thread has ended for any reason."""
        return self._thread.is_alive() and not self._has_ended

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue all jobs, or none.

        Raises:
            RequestError: Too many jobs wait, the server is ending, or the engine has failed.
        """
        with self._changed:
            if self._has_ended:
                message = "the engine has ended; start the server again, its log says why."
                raise RequestError(503, message)
            if self.is_ending:
                raise RequestError(503, "the server is ending; use another one.")
            num_rows, max_queue = self.engine.num_rows, self._max_queue
            if len(jobs) > num_rows + max_queue:
                message = f"n is {len(jobs)}; expected at most {num_rows + max_queue}, rows and "
                raise RequestError(400, f"{message}queue of this server.", param="n")
            num_free = max(num_rows - len(self._jobs), 0)
            num_waiting = len(self._queue) + len(self._held)
            if num_waiting + len(jobs) > max_queue + num_free:
                self.stats["refused_busy_total"] += 1
                raise RequestError(
                    429,
                    f"{num_waiting} samples wait and this request has {len(jobs)}; expected at "
                    f"most {max_queue} to wait. Try again later, or raise --queue.",
                    headers={"Retry-After": "1"},
                )
            now = time.monotonic()
            for job in jobs:
                job.yields_until = (now + job.deadline) / 2
                (self._queue if self._is_served(job.session) else self._held).append(job)
            self.stats["samples_total"] += len(jobs)
            self._wake()

    def cancel(self, job: Job) -> None:
        """Cancel a job whose client has left."""
        with self._changed:
            job.is_cancelled = True
            self._wake()

    def resume(self, sessions: Callable[[str], bool], *, version: int, deadline_s: float) -> None:
        """Continue after a pause with the jobs of some sessions.

        Args:
            sessions: Predicate on session names; jobs of other sessions stay on hold.
            version: Version of the weights, reported in chunks.
            deadline_s: Minimum time left for jobs that were on hold.
        """
        with self._changed:
            self._is_served, self.version, self._is_paused = sessions, version, False
            self.failure = None
            now = time.monotonic()
            held, self._held = self._held, []
            for job in held:
                job.deadline, job.prefix = max(job.deadline, now + deadline_s), None
                job.yields_until = (now + job.deadline) / 2
                (self._queue if sessions(job.session) else self._held).append(job)
            self._is_parked = False
            self._wake()

    def pause(self) -> None:
        """Stop after the current chunk and clear the engine, so that others can use it.

        Unfinished jobs are put on hold. They resume with the same random key, after their tokens
        are prefilled again.
        """
        with self._changed:
            self._is_paused = True
            self._is_served = lambda session: False
            self._wake()
            # No timeout, because the current chunk may have to compile its program first.
            self._changed.wait_for(lambda: self._is_parked or self._has_ended)

    def shutdown(self, limit_s: float) -> bool:
        """Refuse new jobs, wait for accepted ones, and cancel the rest after `limit_s` seconds.

        Returns:
            True if all jobs ended in time.
        """
        with self._changed:
            self.is_ending = True
            self._wake()
        self._thread.join(limit_s)
        is_done = not self._thread.is_alive()
        with self._changed:
            self._must_exit = True
            self._wake()
        self._thread.join(JOIN_S)
        return is_done

    def _wake(self) -> None:
        self._must_wake = True
        self._changed.notify_all()

    def _run(self) -> None:
        reason = FAILED
        try:
            while self._wait():
                try:
                    self._step()
                except Exception as error:  # a device error or a bug: the next job may succeed
                    self._fail(error)
            reason = CANCELLED
        except Exception as error:
            _log("the engine has ended, as it could not be cleared after its failure: ", error)
        finally:  # no client may wait forever, whatever ended the thread
            with self._changed:
                self._has_ended = True
                jobs = [*self._queue, *self._jobs.values(), *self._held]
                self._queue.clear()
                self._jobs.clear()
                self._held.clear()
                self._changed.notify_all()
            for job in jobs:
                self._finish(job, reason, "" if reason == CANCELLED else "the engine has ended.")

    def _wait(self) -> bool:
        """Wait for work; return False when the thread must end."""
        with self._changed:
            while not (self._jobs or self._queue or self._must_wake):
                if self.is_ending and not self._held:
                    return False
                self._changed.wait()
            self._must_wake = False
            return not self._must_exit

    def _step(self) -> None:
        """Admit jobs and decode a chunk."""
        if self._is_paused:
            if not self._is_parked:  # else others use the engine
                self._park()
            return
        self._drop_jobs()
        self._admit()
        while self._cached and self.engine.lacks_pages:
            self._evict()
        for event in self.engine.step(ahead=int(self.engine.overlaps)):
            self._receive(event)

    def _park(self) -> None:
        """Put all jobs on hold and clear the engine."""
        running = [self._jobs[request] for request in sorted(self._jobs)]
        self._jobs.clear()
        self._cached.clear()
        self.engine.clear()
        with self._changed:
            self._held = [*running, *self._queue, *self._held]
            self._queue.clear()
            self._is_parked = True
            self._changed.notify_all()

    def _drop_jobs(self) -> None:
        """End jobs that are cancelled or past their deadline."""
        now = time.monotonic()

        def is_over(job: Job) -> bool:
            return job.is_cancelled or job.deadline <= now

        with self._changed:
            dropped = [job for job in self._queue if is_over(job)]
            dropped += [job for job in self._held if job.is_cancelled]  # no deadlines on hold
            self._queue = deque(job for job in self._queue if job not in dropped)
            self._held = [job for job in self._held if job not in dropped]
        for request, job in list(self._jobs.items()):
            if is_over(job):
                del self._jobs[request]
                self.engine.cancel(request)
                dropped.append(job)
        for job in dropped:
            self._finish(job, CANCELLED if job.is_cancelled else LATE)

    def _admit(self) -> None:
        """Move jobs from the queue into the engine while it has free rows."""
        while len(self._jobs) < self.engine.num_rows:
            with self._changed:
                if not self._queue:
                    return
                # The oldest job that continues a cached row goes first, unless the oldest of all
                # has waited for half of its time. So sessions end before others start. If all of
                # them ran at once, their rows would be evicted and prefilled on every turn.
                job = self._queue[0]
                if time.monotonic() <= job.yields_until:
                    job = next(filter(self._has_prefix, self._queue), job)
                self._queue.remove(job)
            self.stats["prompt_tokens_total"] += len(job.context_ids)
            try:
                self._jobs[self._start(job)] = job
            except Exception as error:
                self._finish(job, FAILED, _public_text(error))
                raise

    def _has_prefix(self, job: Job) -> bool:
        """Return True if the job's prefix, found at the first check, is still cached."""
        if job.prefix is None:
            request = self._find_prefix(job.context_ids)
            job.prefix = () if request is None else (request, self._cached[request])
        return bool(job.prefix) and self._cached.get(job.prefix[0]) is job.prefix[1]

    def _start(self, job: Job) -> int:
        """Pass a job to the engine; return the number of its request."""
        token_ids, budget = job.context_ids, job.request.max_tokens - len(job.token_ids)
        number = self._find_prefix(token_ids)
        if number is None:
            request = Request(prompt_ids=token_ids, sample_key=job.sample_key, budget=budget)
            temperature, top_p = job.request.params
            [number] = self.engine.submit([request], temperature=temperature, top_p=top_p)
            return number
        stored = self._cached.pop(number)
        job.num_cached = len(stored) - 1  # the last id is prefilled when the row resumes
        self.stats["prompt_tokens_reused_total"] += job.num_cached
        self.engine.resume_with(
            number,
            token_ids[len(stored) :],
            budget,
            sample_key=job.sample_key,
            params=job.request.params,
        )
        return number

    def _find_prefix(self, token_ids: tuple[int, ...]) -> int | None:
        """Return the cached request with the longest prefix of `token_ids`, if any."""
        matches = [
            (len(ids), request)
            for request, ids in self._cached.items()
            if len(ids) <= len(token_ids)
            and token_ids[len(ids) - 1] == ids[-1]  # a cheap check that rules out most rows
            and token_ids[: len(ids)] == ids
        ]
        return max(matches)[1] if matches else None

    def _evict(self) -> None:
        """Evict the least recently used row, if possible one that no job continues."""
        with self._changed:
            wanted = {job.prefix[0] for job in self._queue if self._has_prefix(job) and job.prefix}
        unwanted = (request for request in self._cached if request not in wanted)
        request = next(unwanted, next(iter(self._cached)))
        del self._cached[request]
        self.engine.finish(request)
        self.stats["rows_released_total"] += 1

    def _receive(self, event: Event) -> None:
        """Append sampled tokens to their job, and finish the job if it stops."""
        job = self._jobs[event.request]
        if not np.isfinite(event.logprobs).all():
            del self._jobs[event.request]
            self.engine.finish(event.request)
            if not self.is_damaged:
                _log(DAMAGED)
            self.is_damaged = True
            self._finish(job, FAILED, DAMAGED)
            return
        ids, reason, text_bytes = self._cut_at_stop(job, event)
        job.token_ids += ids
        if reason:
            del self._jobs[event.request]
            self._cache_row(event.request, job)
            self.stats["samples_finished_total"] += 1
        job.on_output(
            OutputChunk(
                token_ids=tuple(ids),
                logprobs=tuple(event.logprobs[: len(ids)].tolist()),
                entropies=tuple(event.entropies[: len(ids)].tolist()),
                versions=(self.version,) * len(ids),
                finish_reason=reason,
                text_bytes=text_bytes,
                num_cached=job.num_cached,
            )
        )

    def _cut_at_stop(self, job: Job, event: Event) -> tuple[list[int], str, int]:
        """Return a chunk's ids up to a stop, the finish reason, and the text's length in bytes."""
        stops = [stop.encode() for stop in job.request.stops]
        stop_ids = job.request.stop_ids | self._eos_ids
        longest = max(map(len, stops), default=1)
        ids: list[int] = []
        for token in event.token_ids.tolist():
            ids.append(token)
            start = len(job.data)
            if token in stop_ids:
                return ids, STOP, start
            job.data += self._vocab_bytes[token]
            # A stop string may have started in earlier tokens.
            starts = [job.data.find(stop, max(start - longest + 1, 0)) for stop in stops]
            if matches := [position for position in starts if position >= 0]:
                return ids, STOP, min(matches)
        reason = "" if event.status == decode.RUNNING else LENGTH
        return ids, reason, len(job.data)

    def _cache_row(self, request: int, job: Job) -> None:
        """Cache the row of a finished job, if it has room for another turn."""
        ids = job.context_ids
        if len(ids) >= self.engine.max_total_tokens:
            self.engine.finish(request)
            return
        self.engine.truncate(request, ids)
        self._cached[request] = ids
        if len(self._cached) > self._max_cached_rows:
            self._evict()

    def _finish(self, job: Job, reason: str, error: str = "") -> None:
        """Report the end of an incomplete job."""
        self.stats[f"samples_{reason}_total"] += 1
        job.on_output(
            OutputChunk(
                finish_reason=reason,
                text_bytes=len(job.data),
                num_cached=job.num_cached,
                error=error,
            )
        )

    def _fail(self, error: Exception) -> None:
        """Fail all jobs in the engine, and clear it."""
        self.failure = error
        jobs = list(self._jobs.values())
        self._jobs.clear()
        self._cached.clear()
        for job in jobs:
            self._finish(job, FAILED, _public_text(error))
        _log("the engine failed: ", error)
        self.engine.clear()


def _public_text(error: Exception) -> str:
    """Return an error message for clients, without the paths and data in the log."""
    return f"the engine failed with {type(error).__name__}; the server's log says why."


def _log(text: str, error: Exception | None = None) -> None:
    report = "" if error is None else format_error_report(error)
    with contextlib.suppress(OSError):  # standard error may be closed
        print(f"error: {text}{report}", file=sys.stderr, flush=True)

"""Engine thread that admits jobs between decoding chunks and forwards the sampled tokens.

The row of a finished completion stays in the engine as a cached prefix. A request resumes the row
with the longest cached prefix of its ids and prefills only the remaining ids. The least recently
used rows are evicted if pages run out or there are more than `max_cached_rows`. Jobs that continue
a cached row are admitted first.
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
TIMED_OUT, CANCELLED, FAILED = "late", "cancelled", "failed"
"""Finish reasons. A completion is complete only after "stop" or "length"."""

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
"""Counters in `/metrics`, counted from the start of the server."""

JOIN_S = 10.0
"""Seconds to wait at shutdown for the current chunk to finish."""


@dataclass(frozen=True, kw_only=True)
class OutputChunk:
    """Tokens of one sample from one decoding chunk.

    Attributes:
        token_ids: Sampled ids, up to and including the stop id or the end of the stop string.
        logprobs: Log-probabilities of `token_ids` in nats, at the sampling temperature.
        entropies: Entropies of the sampling distributions, in nats.
        versions: Weights version at each token; see `Worker.resume`.
        finish_reason: Finish reason if this chunk is the last, else "".
        text_bytes: Length of the sample's text so far, without the stop string, in bytes.
        num_cached: Number of prompt tokens read from the cache instead of prefilled.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    entropies: tuple[float, ...] = ()
    versions: tuple[int, ...] = ()
    finish_reason: str = ""
    text_bytes: int = 0
    num_cached: int = 0


@dataclass(frozen=True, kw_only=True)
class CompletionRequest:
    """Parsed request, independent of the API.

    Attributes:
        prompt_ids: Token ids of the prompt.
        num_samples: Number of completions to sample.
        params: Temperature and `top_p`.
        seed: Sampling seed; None for a random seed.
        max_tokens: Maximum number of tokens to sample per completion.
        stop_ids: Token ids that end a completion.
        stops: Strings that end a completion.
        body: Parsed body, which contains the output options.
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
class GenerationJob:
    """One sample of a request, queued for the engine.

    Attributes:
        request: Request that the sample belongs to.
        sample_key: Random key, uint32 [2].
        deadline: Monotonic time, in seconds, after which the job times out.
        on_output: Callback for each chunk, called on the engine's thread.
        session: Name of the session; see `Worker.resume`.
    """

    request: CompletionRequest
    sample_key: np.ndarray
    deadline: float
    on_output: Callable[[OutputChunk], None]
    session: str = ""
    token_ids: list[int] = field(default_factory=list)
    token_bytes: bytearray = field(default_factory=bytearray)  # text of `token_ids`
    num_cached: int = 0
    is_cancelled: bool = False
    yields_until: float = 0.0  # monotonic time until which other jobs have priority
    prefix: tuple[int, tuple[int, ...]] | tuple[()] | None = None  # cached row and ids; (): none

    @property
    def context_ids(self) -> tuple[int, ...]:
        """Prompt ids and the ids sampled so far."""
        return (*self.request.prompt_ids, *self.token_ids)


class Worker:
    """Job queue and the thread that runs an engine."""

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
            engine: Engine with weights, used only by the worker's thread from now on.
            vocab_bytes: Bytes of each token, indexed by id.
            eos_ids: Token ids at which the engine stops.
            max_queue: Maximum number of waiting jobs, not counting jobs that fit in free rows.
            max_cached_rows: Maximum number of cached rows; 0 for 8 times the engine's rows.
            is_paused: True to queue jobs without starting them until `resume`.
        """
        self.engine = engine
        self.stats = Counter(dict.fromkeys(COUNTERS, 0))
        self.version = 0  # version of the weights
        self.failure: Exception | None = None  # latest engine error since `resume`
        self._vocab_bytes, self._eos_ids = vocab_bytes, frozenset(eos_ids)
        self._max_queue = max_queue
        self._max_cached_rows = max_cached_rows or 8 * engine.num_rows
        self._jobs: dict[int, GenerationJob] = {}  # running jobs, by engine request
        self._cached: OrderedDict[int, tuple[int, ...]] = OrderedDict()  # token ids, by request
        # The attributes below are shared with other threads, guarded by `_condition`.
        self._condition = threading.Condition()
        self._queue: deque[GenerationJob] = deque()
        self._paused_jobs: list[GenerationJob] = []  # jobs of paused sessions
        self._is_active_session: Callable[[str], bool] = lambda session: not is_paused
        self._is_paused = self._is_released = is_paused
        self.is_shutting_down = False  # new jobs are rejected
        self._must_wake = self._must_exit = self._has_ended = False
        self._thread = threading.Thread(target=self._run_thread, name="engine", daemon=True)
        self._thread.start()

    @property
    def num_queued(self) -> int:
        """Number of jobs waiting for a row."""
        return len(self._queue) + self.engine.num_queued

    @property
    def num_running(self) -> int:
        """Number of jobs that have a row."""
        return len(self._jobs) - self.engine.num_queued

    @property
    def num_cached_rows(self) -> int:
        """Number of rows cached for later requests."""
        return len(self._cached)

    @property
    def is_alive(self) -> bool:
        """True until the thread ends."""
        return self._thread.is_alive() and not self._has_ended

    def submit(self, jobs: Sequence[GenerationJob]) -> None:
        """Queue the jobs of a request: all of them, or none if an error is raised.

        Raises:
            RequestError: The queue is full, the server is shutting down, or the engine has stopped.
        """
        with self._condition:
            if self._has_ended:
                message = "the engine has stopped; see the server's log, then restart the server."
                raise RequestError(503, message)
            if self.is_shutting_down:
                raise RequestError(503, "the server is shutting down; use another one.")
            num_free = max(self.engine.num_rows - len(self._jobs), 0)
            num_waiting = len(self._queue) + len(self._paused_jobs)
            if num_waiting + len(jobs) > self._max_queue + num_free:
                self.stats["refused_busy_total"] += 1
                raise RequestError(
                    429,
                    f"{num_waiting} samples wait and this request has {len(jobs)}; expected at "
                    f"most {self._max_queue} to wait. Try again later, or raise --queue.",
                    headers={"Retry-After": "1"},
                )
            now = time.monotonic()
            for job in jobs:
                job.yields_until = (now + job.deadline) / 2
                (self._queue if self._is_active_session(job.session) else self._paused_jobs).append(
                    job
                )
            self.stats["samples_total"] += len(jobs)
            self._wake_thread()

    def cancel(self, job: GenerationJob) -> None:
        """Cancel a job whose client has disconnected."""
        with self._condition:
            job.is_cancelled = True
            self._wake_thread()

    def resume(
        self, is_active_session: Callable[[str], bool], *, version: int, deadline_s: float
    ) -> None:
        """Resume the jobs of selected sessions after a pause.

        Args:
            is_active_session: Predicate on session names; jobs of other sessions stay on hold.
            version: Weights version to report in chunks.
            deadline_s: Minimum number of seconds until the deadline of a resumed job.
        """
        with self._condition:
            self._is_active_session = is_active_session
            self.version = version
            self._is_paused = False
            self.failure = None
            now = time.monotonic()
            paused_jobs, self._paused_jobs = self._paused_jobs, []
            for job in paused_jobs:
                job.deadline, job.prefix = max(job.deadline, now + deadline_s), None
                job.yields_until = (now + job.deadline) / 2
                (self._queue if is_active_session(job.session) else self._paused_jobs).append(job)
            self._is_released = False
            self._wake_thread()

    def pause(self) -> None:
        """Pause after the current chunk and clear the engine, so that other code can use it.

        Unfinished jobs are put on hold. A resumed job prefills its tokens again and continues
        sampling with the same random key.
        """
        with self._condition:
            self._is_paused = True
            self._is_active_session = lambda session: False
            self._wake_thread()
            # No timeout: the current chunk may have to compile a program first.
            self._condition.wait_for(lambda: self._is_released or self._has_ended)

    def shutdown(self, timeout_s: float) -> bool:
        """Reject new jobs, wait up to `timeout_s` seconds for accepted jobs, and cancel the rest.

        Returns:
            True if all jobs finished in time.
        """
        with self._condition:
            self.is_shutting_down = True
            self._wake_thread()
        self._thread.join(timeout_s)
        is_done = not self._thread.is_alive()
        with self._condition:
            self._must_exit = True
            self._wake_thread()
        self._thread.join(JOIN_S)
        return is_done

    def _wake_thread(self) -> None:
        self._must_wake = True
        self._condition.notify_all()

    def _run_thread(self) -> None:
        reason = FAILED
        try:
            while self._wait_for_work():
                try:
                    self._run_step()
                except Exception as error:  # a device error or a bug: the next job may succeed
                    self._fail_running_jobs(error)
            reason = CANCELLED
        except Exception as error:
            _log("the engine has stopped, because it could not be cleared after a failure: ", error)
        finally:  # clients must not wait forever, however the thread ended
            with self._condition:
                self._has_ended = True
                jobs = [*self._queue, *self._jobs.values(), *self._paused_jobs]
                self._queue.clear()
                self._jobs.clear()
                self._paused_jobs.clear()
                self._condition.notify_all()
            for job in jobs:
                self._abort_job(job, reason)

    def _wait_for_work(self) -> bool:
        """Wait for work; return False if the thread must exit."""
        with self._condition:
            while not (self._jobs or self._queue or self._must_wake):
                if self.is_shutting_down and not self._paused_jobs:
                    return False
                self._condition.wait()
            self._must_wake = False
            return not self._must_exit

    def _run_step(self) -> None:
        """Admit jobs and decode one chunk."""
        if self._is_paused:
            if not self._is_released:  # otherwise other code uses the engine
                self._release_engine()
            return
        self._drop_expired_jobs()
        self._admit_jobs()
        while self._cached and self.engine.is_out_of_pages:
            self._evict_row()
        for event in self.engine.step(ahead=int(self.engine.overlaps)):
            self._process_event(event)

    def _release_engine(self) -> None:
        """Put all jobs on hold and clear the engine."""
        running = [self._jobs[request] for request in sorted(self._jobs)]
        self._jobs.clear()
        self._cached.clear()
        self.engine.clear()
        with self._condition:
            self._paused_jobs = [*running, *self._queue, *self._paused_jobs]
            self._queue.clear()
            self._is_released = True
            self._condition.notify_all()

    def _drop_expired_jobs(self) -> None:
        """Drop queued and running jobs that are cancelled or past their deadline."""
        now = time.monotonic()

        def is_expired(job: GenerationJob) -> bool:
            return job.is_cancelled or job.deadline <= now

        with self._condition:
            dropped = [job for job in self._queue if is_expired(job)]
            dropped += [
                job for job in self._paused_jobs if job.is_cancelled
            ]  # no deadlines on hold
            self._queue = deque(job for job in self._queue if job not in dropped)
            self._paused_jobs = [job for job in self._paused_jobs if job not in dropped]
        for request, job in list(self._jobs.items()):
            if is_expired(job):
                del self._jobs[request]
                self.engine.cancel(request)
                dropped.append(job)
        for job in dropped:
            self._abort_job(job, CANCELLED if job.is_cancelled else TIMED_OUT)

    def _admit_jobs(self) -> None:
        """Move queued jobs into free rows of the engine."""
        while len(self._jobs) < self.engine.num_rows:
            with self._condition:
                if not self._queue:
                    return
                # Prefer the oldest job that continues a cached row, unless the oldest job overall
                # has waited for half of its time limit. Sessions then finish before new ones start.
                # If all ran at once, each turn would evict rows that must be prefilled again.
                job = self._queue[0]
                if time.monotonic() <= job.yields_until:
                    job = next(filter(self._has_prefix, self._queue), job)
                self._queue.remove(job)
            self.stats["prompt_tokens_total"] += len(job.context_ids)
            try:
                self._jobs[self._start_job(job)] = job
            except Exception:
                self._abort_job(job, FAILED)
                raise

    def _has_prefix(self, job: GenerationJob) -> bool:
        """Return True if a prefix of the job is cached. The search result is stored in the job."""
        if job.prefix is None:
            request = self._find_prefix(job.context_ids)
            job.prefix = () if request is None else (request, self._cached[request])
        return bool(job.prefix) and self._cached.get(job.prefix[0]) is job.prefix[1]

    def _start_job(self, job: GenerationJob) -> int:
        """Submit a job to the engine or resume its cached row; return the request's id."""
        token_ids, budget = job.context_ids, job.request.max_tokens - len(job.token_ids)
        number = self._find_prefix(token_ids)
        if number is None:
            request = Request(prompt_ids=token_ids, sample_key=job.sample_key, budget=budget)
            temperature, top_p = job.request.params
            [number] = self.engine.submit([request], temperature=temperature, top_p=top_p)
            return number
        cached_ids = self._cached.pop(number)
        job.num_cached = len(cached_ids) - 1  # the last id is prefilled again when the row resumes
        self.stats["prompt_tokens_reused_total"] += job.num_cached
        self.engine.resume_with_params(
            number,
            token_ids[len(cached_ids) :],
            budget,
            sample_key=job.sample_key,
            params=job.request.params,
        )
        return number

    def _find_prefix(self, token_ids: tuple[int, ...]) -> int | None:
        """Return the id of the request whose cached ids are the longest prefix, or None."""
        matches = [
            (len(ids), request)
            for request, ids in self._cached.items()
            if len(ids) <= len(token_ids)
            and token_ids[len(ids) - 1] == ids[-1]  # a cheap check that rules out most rows
            and token_ids[: len(ids)] == ids
        ]
        return max(matches)[1] if matches else None

    def _evict_row(self) -> None:
        """Evict the least recently used row, preferring rows that no queued job continues."""
        with self._condition:
            needed_rows = {
                job.prefix[0] for job in self._queue if self._has_prefix(job) and job.prefix
            }
        unneeded_rows = (request for request in self._cached if request not in needed_rows)
        request = next(unneeded_rows, next(iter(self._cached)))
        del self._cached[request]
        self.engine.finish(request)
        self.stats["rows_released_total"] += 1

    def _process_event(self, event: Event) -> None:
        """Append sampled tokens to their job and send them; cache the row of a finished job."""
        job = self._jobs[event.request]
        ids, reason, text_bytes = self._truncate_at_stop(job, event)
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

    def _truncate_at_stop(self, job: GenerationJob, event: Event) -> tuple[list[int], str, int]:
        """Return the ids up to the first stop, the finish reason, and the text's size in bytes."""
        stops = [stop.encode() for stop in job.request.stops]
        stop_ids = job.request.stop_ids | self._eos_ids
        longest = max(map(len, stops), default=1)
        ids: list[int] = []
        for token in event.token_ids.tolist():
            ids.append(token)
            start = len(job.token_bytes)
            if token in stop_ids:
                return ids, STOP, start
            job.token_bytes += self._vocab_bytes[token]
            # A stop string may have started in earlier tokens.
            starts = [job.token_bytes.find(stop, max(start - longest + 1, 0)) for stop in stops]
            if matches := [position for position in starts if position >= 0]:
                return ids, STOP, min(matches)
        reason = "" if event.status == decode.RUNNING else LENGTH
        return ids, reason, len(job.token_bytes)

    def _cache_row(self, request: int, job: GenerationJob) -> None:
        """Cache the row of a finished job if it can continue with another turn."""
        ids = job.context_ids
        is_full = len(ids) >= self.engine.max_total_tokens
        if is_full or not self.engine.can_truncate(request, len(ids)):
            self.engine.finish(request)
            return
        self.engine.truncate(request, ids)
        self._cached[request] = ids
        if len(self._cached) > self._max_cached_rows:
            self._evict_row()

    def _abort_job(self, job: GenerationJob, reason: str) -> None:
        """Send the final chunk of a job that was cancelled, timed out or failed."""
        self.stats[f"samples_{reason}_total"] += 1
        job.on_output(
            OutputChunk(
                finish_reason=reason, text_bytes=len(job.token_bytes), num_cached=job.num_cached
            )
        )

    def _fail_running_jobs(self, error: Exception) -> None:
        """Fail all running jobs and clear the engine."""
        self.failure = error
        jobs = list(self._jobs.values())
        self._jobs.clear()
        self._cached.clear()
        for job in jobs:
            self._abort_job(job, FAILED)
        _log("the engine failed: ", error)
        self.engine.clear()


def _log(text: str, error: Exception) -> None:
    with contextlib.suppress(OSError):  # standard error may be closed
        print(f"error: {text}{format_error_report(error)}", file=sys.stderr, flush=True)

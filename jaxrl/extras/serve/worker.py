"""The thread that owns the engine: what is asked goes in between chunks, what is sampled comes out.

A finished answer's row waits in the engine with all it has read and sampled. A request whose ids go
on exactly behind those resumes it, and reads only what is new; where several do, the longest. Rows
that wait are released, the one that was used least recently first, where pages are wanted, or where
there are more of them than `max_kept`. Who goes on from one comes before who begins.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxrl.extras.serve.engine import ServedEngine, Way
from jaxrl.sampling import decode
from jaxrl.sampling.engine import Event, Request
from jaxrl.utils.concurrency import failure_report

STOP, LENGTH, LATE, LEFT, FAILED = "stop", "length", "late", "left", "failed"
"""Ends of an answer: by an id or a string that stops it; no room or budget left; its deadline; its
client; the engine."""


DAMAGED = "the model gives NaN: its weights are damaged."

PATIENCE_S = 10.0
"""Seconds in which a chunk under way may end when the worker does."""


class BusyError(Exception):
    """The queue is full."""


class EndingError(Exception):
    """The server ends or its engine has, and nothing new is taken."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Tokens of a chunk, and with the last ones why the answer ends.

    Attributes:
        token_ids: with the id or the last token of the string that stops it.
        logprobs: of these, nats, under the temperature at which they were drawn.
        entropies: of the distributions they were drawn from, nats.
        version: of the weights that drew them; see `Worker.serve`.
        end: "" while it goes on.
        text_bytes: of the whole answer, that are its text; known at the end.
        num_cached: ids of the prompt that were not read again.
        why: what failed, in a sentence that a client may read.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    entropies: tuple[float, ...] = ()
    version: int = 0
    end: str = ""
    text_bytes: int = 0
    num_cached: int = 0
    why: str = ""


@dataclass(eq=False, kw_only=True)
class Job:
    """An answer that is asked for.

    Attributes:
        prompt_ids: what it goes on from.
        sample_key: uint32 [2], on which its draws depend.
        way: of its draws.
        budget: tokens it may have.
        stop_ids: end it, beside the model's own.
        stops: strings that end it, as UTF-8.
        deadline: on the monotonic clock.
        tell: called on the engine's thread with each piece.
        session: whose it is; see `Worker.serve`.
    """

    prompt_ids: tuple[int, ...]
    sample_key: np.ndarray
    way: Way
    budget: int
    stop_ids: frozenset[int] = frozenset()
    stops: tuple[bytes, ...] = ()
    deadline: float
    tell: Callable[[Piece], None]
    session: str = ""
    token_ids: list[int] = field(default_factory=list)
    data: bytearray = field(default_factory=bytearray)  # of the tokens
    num_cached: int = 0
    is_left: bool = False  # nobody waits for it any more
    patient_until: float = 0.0  # on the monotonic clock: others may go before
    found: tuple[int, tuple[int, ...]] | tuple[()] | None = None  # a row and its ids; (): none

    @property
    def read_ids(self) -> tuple[int, ...]:
        """Ids that the next token is drawn behind."""
        return (*self.prompt_ids, *self.token_ids)


@dataclass
class Totals:
    """Work since the start, as `/metrics` shows it."""

    requests: int = 0
    finished: int = 0
    cancelled: int = 0
    late: int = 0
    failed: int = 0
    refused_busy: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    released_rows: int = 0


class Worker:
    """An engine, its thread and its queue."""

    def __init__(
        self,
        engine: ServedEngine,
        vocab_bytes: Sequence[bytes],
        eos_ids: Sequence[int],
        *,
        max_queue: int = 256,
        max_kept: int = 0,
        is_paused: bool = False,
    ):
        """Starts the thread.

        Args:
            engine: with weights, which is this thread's from now on.
            vocab_bytes: of each id.
            eos_ids: at which the engine stops.
            max_queue: jobs that wait at most, beside those for which there is a row.
            max_kept: rows of finished answers that are kept; 0: eight for each row.
            is_paused: takes jobs and begins none of them before `serve`.
        """
        self.engine = engine
        self.totals = Totals()
        self._vocab_bytes, self._eos_ids = vocab_bytes, frozenset(eos_ids)
        self._max_queue = max_queue
        self._max_kept = max_kept or 8 * engine.num_rows
        self._queue: deque[Job] = deque()  # under `_changed`, as the flags
        self._changed = threading.Condition()
        self._is_ending = self._is_over = self._is_asked = self._has_ended = False
        self._sessions: Callable[[str], bool] = (lambda _: False) if is_paused else lambda _: True
        self._held: list[Job] = []  # of sessions that are not served now; under `_changed`
        self._is_paused = self._is_parked = is_paused
        self.version = 0  # of the engine's weights
        self.is_damaged = False  # some answer had probabilities that are no numbers
        self._is_broken = False  # after a fault that nothing could clear up
        self.failure: Exception | None = None  # of the engine, the newest since `serve`
        self._jobs: dict[int, Job] = {}  # in the engine, by request
        self._kept: OrderedDict[int, tuple[int, ...]] = (
            OrderedDict()
        )  # ids by request, oldest use first
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def max_total_tokens(self) -> int:
        """Tokens of prompt and answer."""
        return self.engine.max_total_tokens

    @property
    def max_jobs(self) -> int:
        """Jobs that are taken at once where nothing else is there."""
        return self.engine.num_rows + self._max_queue

    @property
    def num_queued(self) -> int:
        """Jobs without a row."""
        return len(self._queue) + self.engine.num_queued

    @property
    def num_running(self) -> int:
        """Jobs that have one."""
        return len(self._jobs) - self.engine.num_queued

    @property
    def num_kept(self) -> int:
        """Rows of finished answers."""
        return len(self._kept)

    @property
    def is_ending(self) -> bool:
        """True once nothing new is taken."""
        return self._is_ending

    @property
    def is_alive(self) -> bool:
        """False once the thread has ended, by itself too."""
        return self._thread.is_alive() and not self._has_ended

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queues jobs, all or none.

        Raises:
            ValueError: they are more than ever find a place.
            BusyError: too many wait.
            EndingError: the server ends, or the engine has.
        """
        with self._changed:
            if self._has_ended:
                raise EndingError("the engine has ended; start the server again, its log says why.")
            if self._is_ending:
                raise EndingError("the server is ending; ask another one.")
            if len(jobs) > self.max_jobs:
                raise ValueError(
                    f"n is {len(jobs)}; expected at most {self.max_jobs}, as many as this server "
                    "has rows and places in its queue for."
                )
            num_free = max(self.engine.num_rows - len(self._jobs), 0)
            num_waiting = len(self._queue) + len(self._held)
            if num_waiting + len(jobs) > self._max_queue + num_free:
                self.totals.refused_busy += 1
                raise BusyError(
                    f"{num_waiting} samples wait, and this request asks for {len(jobs)}; "
                    f"expected at most {self._max_queue} to wait. Ask again later, or start the "
                    "server with a longer --queue."
                )
            now = time.monotonic()
            for job in jobs:
                job.patient_until = (now + job.deadline) / 2
                (self._queue if self._sessions(job.session) else self._held).append(job)
            self.totals.requests += len(jobs)
            self._wake()

    def cancel(self, job: Job) -> None:
        """Ends a job for which nobody waits."""
        with self._changed:
            job.is_left = True
            self._wake()

    def serve(self, sessions: Callable[[str], bool], *, version: int, deadline_s: float) -> None:
        """Goes on after a pause, with the jobs of some sessions.

        Args:
            sessions: true of the names of those that are served; the jobs of others are held.
            version: of the weights that the engine has now, by which pieces name it.
            deadline_s: for jobs that were held, whose time did not run.
        """
        with self._changed:
            self._sessions, self.version, self._is_paused = sessions, version, False
            self.failure = None
            ends = time.monotonic() + deadline_s
            held, self._held = self._held, []
            for job in held:
                job.deadline, job.found = max(job.deadline, ends), None
                job.patient_until = (ends - deadline_s + job.deadline) / 2
                (self._queue if sessions(job.session) else self._held).append(job)
            self._is_parked = False
            self._wake()

    def pause(self) -> None:
        """Stops after the chunk under way, and leaves the engine empty for others to use.

        What is not finished is held: it goes on from the tokens it has, which are read again, and
        its draws depend on the same key.
        """
        with self._changed:
            self._is_paused = True
            self._sessions = lambda _: False
            self._wake()
            # However long: a chunk may have to compile its program first.
            self._changed.wait_for(lambda: self._is_parked or self._has_ended)

    def _park(self) -> None:
        """Holds all jobs, and forgets the engine's rows."""
        running = [self._jobs[request] for request in sorted(self._jobs)]
        self._jobs.clear()
        self._kept.clear()
        self.engine.clear()
        with self._changed:
            self._held = [*running, *self._queue, *self._held]
            self._queue.clear()
            self._is_parked = True
            self._changed.notify_all()

    def end(self, limit_s: float) -> bool:
        """Takes nothing new, and waits until all has ended; what is left then is cancelled.

        Returns:
            True where all had ended.
        """
        with self._changed:
            self._is_ending = True
            self._wake()
        self._thread.join(limit_s)
        is_done = not self._thread.is_alive()
        with self._changed:
            self._is_over = True
            self._wake()
        self._thread.join(PATIENCE_S)
        return is_done

    def _wake(self) -> None:
        self._is_asked = True
        self._changed.notify_all()

    def _run(self) -> None:
        end = FAILED
        try:
            while self._wait():
                try:
                    if self._is_paused:
                        if not self._is_parked:  # else the engine is in others' hands
                            self._park()
                        continue
                    self._drop()
                    self._admit()
                    while self._kept and self.engine.lacks_pages:  # others want those of kept rows
                        self._release()
                    for event in self.engine.step(ahead=int(self.engine.overlaps)):
                        self._take(event)
                except Exception as error:  # of the device, or a bug: the next may be answered
                    self._fail(error)
            end = FAILED if self._is_broken else LEFT
        finally:  # whatever ended it, nobody may wait for ever
            with self._changed:
                self._has_ended = True
                left = [*self._queue, *self._jobs.values(), *self._held]
                self._queue.clear()
                self._jobs.clear()
                self._held.clear()
                self._changed.notify_all()
            for job in left:
                self._tell_end(job, end, "" if end == LEFT else "the engine has ended.")

    def _wait(self) -> bool:
        """Waits until there is something to do; False: the end."""
        with self._changed:
            while not (self._jobs or self._queue or self._is_asked or self._is_broken):
                if self._is_ending and not self._held:
                    return False
                self._changed.wait()
            self._is_asked = False
            return not self._is_over and not self._is_broken

    def _drop(self) -> None:
        """Ends what nobody waits for, and what is late."""
        now = time.monotonic()
        with self._changed:
            gone = [job for job in self._queue if job.is_left or job.deadline <= now]
            gone += [job for job in self._held if job.is_left]  # whose time does not run
            if gone:
                self._queue = deque(job for job in self._queue if job not in gone)
                self._held = [job for job in self._held if job not in gone]
        for job in gone:
            self._tell_end(job, LEFT if job.is_left else LATE)
        for request, job in list(self._jobs.items()):
            if job.is_left or job.deadline <= now:
                del self._jobs[request]
                self.engine.cancel(request)
                self._tell_end(job, LEFT if job.is_left else LATE)

    def _admit(self) -> None:
        """Moves jobs from the queue into the engine while it has rows to decode them in."""
        while len(self._jobs) < self.engine.num_rows:
            with self._changed:
                if not self._queue:
                    return
                # The oldest that goes on from a row, unless the oldest of all has waited for half
                # its time. So sessions that have begun end before others begin: with all of them
                # side by side, their rows might not find pages, and be read again with every turn.
                job = self._queue[0]
                if time.monotonic() <= job.patient_until:
                    job = next(filter(self._goes_on, self._queue), job)
                self._queue.remove(job)
            self.totals.prompt_tokens += len(job.read_ids)
            try:
                self._jobs[self._place(job)] = job
            except Exception as error:
                self._tell_end(job, FAILED, _told(error))
                raise

    def _goes_on(self, job: Job) -> bool:
        """Return True if a row waits that had ids of the job's when it was first asked."""
        if job.found is None:
            request = self._longest(job.read_ids)
            job.found = () if request is None else (request, self._kept[request])
        return bool(job.found) and self._kept.get(job.found[0]) is job.found[1]

    def _place(self, job: Job) -> int:
        """Hands a job to the engine; the number of its request."""
        token_ids, budget = job.read_ids, job.budget - len(job.token_ids)
        number = self._longest(token_ids)
        if number is None:
            request = Request(prompt_ids=token_ids, sample_key=job.sample_key, budget=budget)
            temperature, top_p = job.way
            [number] = self.engine.submit([request], temperature=temperature, top_p=top_p)
            return number
        stored = self._kept.pop(number)
        job.num_cached = len(stored) - 1  # the last one is read when the turn goes on
        self.totals.reused_tokens += job.num_cached
        new = token_ids[len(stored) :]
        self.engine.go_on(number, new, budget, sample_key=job.sample_key, way=job.way)
        return number

    def _longest(self, prompt_ids: tuple[int, ...]) -> int | None:
        """The request with the most ids that waits and that the prompt goes on from."""
        fitting = [
            (len(ids), request)
            for request, ids in self._kept.items()
            if len(ids) <= len(prompt_ids)
            and prompt_ids[len(ids) - 1] == ids[-1]  # nearly none, and the rest may be long
            and prompt_ids[: len(ids)] == ids
        ]
        return max(fitting)[1] if fitting else None

    def _release(self) -> None:
        """Gives up the row that was used least recently, of those that no job goes on from."""
        with self._changed:
            wanted = {job.found[0] for job in self._queue if self._goes_on(job) and job.found}
        request = next((one for one in self._kept if one not in wanted), next(iter(self._kept)))
        del self._kept[request]
        self.engine.finish(request)
        self.totals.released_rows += 1

    def _take(self, event: Event) -> None:
        """Adds what was sampled to its job, and ends it where it stops."""
        job = self._jobs[event.request]
        if not np.isfinite(event.logprobs).all():
            del self._jobs[event.request]
            self.engine.finish(event.request)
            if not self.is_damaged:
                _log(DAMAGED)
            self.is_damaged = True
            self._tell_end(job, FAILED, DAMAGED)
            return
        ids, end, text_bytes = self._until_stop(job, event)
        job.token_ids += ids
        if end:
            del self._jobs[event.request]
            self._keep(event.request, job)
            self.totals.finished += 1
        job.tell(
            Piece(
                token_ids=tuple(ids),
                logprobs=tuple(event.logprobs[: len(ids)].tolist()),
                entropies=tuple(event.entropies[: len(ids)].tolist()),
                version=self.version,
                end=end,
                text_bytes=text_bytes,
                num_cached=job.num_cached,
            )
        )

    def _until_stop(self, job: Job, event: Event) -> tuple[list[int], str, int]:
        """The ids of a chunk that belong to an answer, why it ends, and the bytes of its text."""
        longest = max(map(len, job.stops), default=1)
        ids: list[int] = []
        for token in event.token_ids.tolist():
            ids.append(token)
            start = len(job.data)
            if token in job.stop_ids or token in self._eos_ids:
                return ids, STOP, start
            job.data += self._vocab_bytes[token]
            # A string that stops it may have begun in tokens before this one.
            starts = [job.data.find(stop, max(start - longest + 1, 0)) for stop in job.stops]
            if places := [place for place in starts if place >= 0]:
                return ids, STOP, min(places)
        end = "" if event.status == decode.RUNNING else LENGTH
        return ids, end, len(job.data)

    def _keep(self, request: int, job: Job) -> None:
        """Lets a row wait for what goes on from it, unless nothing can."""
        ids = job.read_ids
        if len(ids) >= self.engine.max_total_tokens:
            self.engine.finish(request)
            return
        self.engine.cut(request, ids)
        self._kept[request] = ids
        if len(self._kept) > self._max_kept:
            self._release()

    def _tell_end(self, job: Job, end: str, why: str = "") -> None:
        counted = {LEFT: "cancelled", LATE: "late", FAILED: "failed"}[end]
        setattr(self.totals, counted, getattr(self.totals, counted) + 1)
        job.tell(Piece(end=end, text_bytes=len(job.data), num_cached=job.num_cached, why=why))

    def _fail(self, error: Exception) -> None:
        """Tells all jobs in the engine that it has failed, and forgets them.

        An engine that cannot be cleared holds nobody knows what, and answers nothing more.
        """
        self.failure = error
        jobs = list(self._jobs.values())
        self._jobs.clear()
        self._kept.clear()
        for job in jobs:
            self._tell_end(job, FAILED, _told(error))
        _log("the engine failed: ", error)
        try:
            self.engine.clear()
        except Exception as second:
            self._is_broken = True
            _log("the engine has ended, as it could not be cleared after its failure: ", second)


def _told(error: Exception) -> str:
    """An error for a client: neither paths nor data, which the log has."""
    return f"the engine failed with {type(error).__name__}; the server's log says why."


def _log(text: str, error: Exception | None = None) -> None:
    # The reader of the log may be gone, or the error unable to tell what it is.
    with contextlib.suppress(Exception):
        report = "" if error is None else failure_report(error)
        print(f"error: {text}{report}", file=sys.stderr, flush=True)

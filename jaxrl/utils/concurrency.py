"""Threads, event loops and deadlines for code that is not ours and may fail or never return."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import queue
import threading
import traceback
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, TypeVar

from jaxrl.utils.secrets import redact

Item = TypeVar("Item")
Result = TypeVar("Result")

MAX_ERROR = 2000  # characters of an exception's text; a library may put a whole page into it

MAX_S = 1e9
"""Seconds that a setting may ask for; threads and locks take no more than 9 times as many."""

_ENDING_S = 1.0  # in which a coroutine ends that is cancelled, unless it refuses or blocks the loop


def error_text(error: BaseException) -> str:
    """Return type and text of an exception, redacted, in at most `MAX_ERROR` characters."""
    try:
        text = str(error)
    except Exception:  # exceptions are classes of the user's too
        text = ""
    return redact(f"{type(error).__name__}: {text}".removesuffix(": "))[:MAX_ERROR]


def failure_report(error: BaseException) -> str:
    """Return type, text and notes of an exception, and where it was raised, redacted.

    In at most `MAX_ERROR` characters. Where frames have to be left out, they are the outermost.
    """
    notes = " ".join([error_text(error), *getattr(error, "__notes__", ())])
    report = redact(notes)[:MAX_ERROR]
    frames: list[str] = []
    room = MAX_ERROR - len(report) - 1
    for frame in reversed(traceback.format_tb(error.__traceback__)):
        room -= len(frame)
        if room < 0:
            break
        frames.insert(0, frame.rstrip())
    return redact("\n".join([report, *frames]))


def in_thread(work: Callable[[], Result]) -> Future[Result]:
    """Runs `work` in a thread that no exit of the interpreter waits for; returns its future.

    A thread of an executor that hangs would keep the process from ending.
    """
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # SystemExit too: it ends a thread, not the process
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name="env").start()
    return future


class Threads:
    """Threads as of `in_thread` that take one piece of work after another, until `close`.

    Starting a thread takes as long as a short call, and the caller waits for it.
    """

    def __init__(self) -> None:
        self._lock, self._is_closed = threading.Lock(), False
        self._spare: list[tuple[threading.Thread, queue.SimpleQueue[Any]]] = []

    def start(self, work: Callable[[], Result]) -> Future[Result]:
        """Runs `work` in a thread that has nothing to do, or another one; returns its future."""
        future: Future[Result] = Future()
        with self._lock:
            _, works = self._spare.pop() if self._spare else self._another()
        works.put((future, work))
        return future

    def _another(self) -> tuple[threading.Thread, queue.SimpleQueue[Any]]:
        works: queue.SimpleQueue[Any] = queue.SimpleQueue()

        def run() -> None:
            while (assigned := works.get()) is not None:
                future, work = assigned
                try:
                    future.set_result(work())
                except BaseException as error:
                    future.set_exception(error)
                with self._lock:
                    if self._is_closed:
                        return
                    self._spare.append((thread, works))

        thread = threading.Thread(target=run, daemon=True, name="env")
        thread.start()
        return thread, works

    def close(self) -> None:
        """Ends the threads: those that work when they are done, for which nobody waits."""
        with self._lock:
            self._is_closed = True
        for _, works in self._spare:
            works.put(None)
        for thread, _ in self._spare:
            thread.join()


def side_by_side(
    work: Callable[[Item], Result], items: Sequence[Item], *, max_threads: int
) -> list[Result]:
    """Maps `work` over items in threads, as `in_thread` makes them; results in their order."""
    calls = [partial(work, item) for item in items]
    return [future.result() for future in started(calls, max_threads=max_threads)]


def started(calls: Sequence[Callable[[], Result]], *, max_threads: int) -> list[Future[Result]]:
    """Begins all calls in threads, as `in_thread` does; a cancelled one is not begun.

    A call that hangs keeps its thread; the others go on with the rest.
    """
    futures: list[Future[Result]] = [Future() for _ in calls]
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for index in range(len(calls)):
        waiting.put(index)

    def run() -> None:
        while True:
            try:
                index = waiting.get_nowait()
            except queue.Empty:
                return
            if not futures[index].set_running_or_notify_cancel():
                continue
            try:
                futures[index].set_result(calls[index]())
            except BaseException as error:
                futures[index].set_exception(error)

    for _ in range(min(len(calls), max_threads)):
        threading.Thread(target=run, daemon=True, name="env").start()
    return futures


def once(make: Callable[[], Result]) -> Callable[[], Result]:
    """Calls `make` once, also where several threads are the first to ask for its result."""
    lock, made = threading.Lock(), functools.cache(make)

    @functools.wraps(make)
    def make_or_wait() -> Result:
        with lock:
            return made()

    return make_or_wait


def new_loop(name: str) -> asyncio.AbstractEventLoop:
    """A loop that runs for as long as the process lives, in a thread that no exit waits for."""
    loop = asyncio.new_event_loop()

    def run() -> None:
        # A coroutine that calls `sys.exit` would end the loop, and whoever waits for another one
        # would wait for ever; its own task has failed by it.
        while True:
            with contextlib.suppress(SystemExit, KeyboardInterrupt):
                loop.run_forever()

    threading.Thread(target=run, daemon=True, name=name).start()
    return loop


@once
def event_loop() -> asyncio.AbstractEventLoop:
    """The event loop of tools and their servers."""
    return new_loop("event_loop")


class LateError(TimeoutError):
    """Raised where a call exceeds its deadline."""


def within(deadline_s: float, coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Runs a coroutine in `event_loop`, up to a deadline; cancels it then.

    One that does not end then, or blocks the loop, is left to itself.

    Raises:
        LateError: it took longer.
    """

    async def timed() -> Result:
        try:
            async with asyncio.timeout(deadline_s) as limit:
                return await coroutine
        except TimeoutError as error:
            if limit.expired():
                raise LateError from error
            raise

    done = asyncio.run_coroutine_threadsafe(timed(), event_loop())
    wait([done], timeout=deadline_s + _ENDING_S)
    if not done.done():
        done.cancel()
        raise LateError
    return done.result()


def in_time(deadline_s: float, work: Callable[[], Result]) -> Result:
    """Runs `work` in a thread, up to a deadline; leaves the thread to itself then.

    Raises:
        LateError: it took longer.
    """
    done = in_thread(work)
    wait([done], timeout=deadline_s)
    if not done.done():
        raise LateError
    return done.result()

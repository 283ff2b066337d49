"""Threads, event loops and deadlines for user code, which may fail or never return."""

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
from jaxrl.utils.text import MAX_ERROR_CHARS

Item = TypeVar("Item")
Result = TypeVar("Result")

MAX_TIMEOUT_S = 1e9
"""Maximum value of a timeout setting in seconds. Python's locks accept at most 9 times as much."""

_CANCEL_TIMEOUT_S = 1.0  # time for a canceled coroutine to end


def format_error(error: BaseException) -> str:
    """Return the type and text of an exception, redacted, in at most `MAX_ERROR_CHARS`."""
    return redact(f"{type(error).__name__}: {error}".removesuffix(": "))[:MAX_ERROR_CHARS]


def format_error_report(error: BaseException) -> str:
    """Return the type, text, notes and traceback of an exception, redacted.

    The outermost frames are dropped to stay within `MAX_ERROR_CHARS` characters.
    """
    notes = " ".join([format_error(error), *getattr(error, "__notes__", ())])
    report = redact(notes)[:MAX_ERROR_CHARS]
    frames: list[str] = []
    num_chars_left = MAX_ERROR_CHARS - len(report) - 1
    for frame in reversed(traceback.format_tb(error.__traceback__)):
        num_chars_left -= len(frame)
        if num_chars_left < 0:
            break
        frames.insert(0, frame.rstrip())
    return redact("\n".join([report, *frames]))


def _run_and_set_result(future: Future[Any], work: Callable[[], Any]) -> None:
    """Run `work` and set the future's result or exception, unless the future is canceled."""
    if not future.set_running_or_notify_cancel():  # from here on, it cannot be canceled
        return
    try:
        future.set_result(work())
    except BaseException as error:  # SystemExit too: it ends a thread, not the process
        future.set_exception(error)


def run_in_thread(work: Callable[[], Result]) -> Future[Result]:
    """Run `work` in a daemon thread.

    Unlike an executor's thread, a hanging daemon thread does not delay the interpreter's exit.
    """
    future: Future[Result] = Future()
    threading.Thread(
        target=_run_and_set_result, args=(future, work), daemon=True, name="env"
    ).start()
    return future


def parallel_map(
    work: Callable[[Item], Result], items: Sequence[Item], *, max_threads: int
) -> list[Result]:
    """Call `work` on each item in daemon threads; return the results in order."""
    calls = [partial(work, item) for item in items]
    return [future.result() for future in start_calls(calls, max_threads=max_threads)]


def start_calls(calls: Sequence[Callable[[], Result]], *, max_threads: int) -> list[Future[Result]]:
    """Start calls in daemon threads and return their futures.

    Calls canceled before they start are skipped. A call that hangs blocks only one thread.
    """
    futures: list[Future[Result]] = [Future() for _ in calls]
    pending: queue.SimpleQueue[int] = queue.SimpleQueue()
    for index in range(len(calls)):
        pending.put(index)

    def run_pending() -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                index = pending.get_nowait()
                _run_and_set_result(futures[index], calls[index])

    for _ in range(min(len(calls), max_threads)):
        threading.Thread(target=run_pending, daemon=True, name="env").start()
    return futures


def call_once(function: Callable[[], Result]) -> Callable[[], Result]:
    """Wrap `function` to run once, even if threads call it concurrently; cache the result."""
    lock, cached = threading.Lock(), functools.cache(function)

    def get_result() -> Result:
        with lock:
            return cached()

    return get_result


def start_event_loop(name: str) -> asyncio.AbstractEventLoop:
    """Start an event loop that runs in a daemon thread until the process ends."""
    loop = asyncio.new_event_loop()

    def run_forever() -> None:
        # `sys.exit` in a coroutine ends `run_forever`, so the other coroutines would hang.
        while True:
            with contextlib.suppress(SystemExit, KeyboardInterrupt):
                loop.run_forever()

    threading.Thread(target=run_forever, daemon=True, name=name).start()
    return loop


@call_once
def get_event_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop that tools and MCP servers share."""
    return start_event_loop("event_loop")


class DeadlineError(TimeoutError):
    """Error raised when a call exceeds its deadline."""


def run_with_deadline(deadline_s: float, coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine in the loop of `get_event_loop`; cancel it if it exceeds the deadline.

    Raises:
        DeadlineError: The coroutine exceeded the deadline. A coroutine that ignores cancellation
            keeps running.
    """

    async def run_with_timeout() -> Result:
        try:
            async with asyncio.timeout(deadline_s) as limit:
                return await coroutine
        except TimeoutError as error:
            if limit.expired():
                raise DeadlineError from error
            raise

    return _wait_for_result(
        asyncio.run_coroutine_threadsafe(run_with_timeout(), get_event_loop()),
        deadline_s + _CANCEL_TIMEOUT_S,
    )


def call_with_deadline(deadline_s: float, work: Callable[[], Result]) -> Result:
    """Run `work` in a thread; abandon the thread if it exceeds the deadline.

    Raises:
        DeadlineError: The call exceeded the deadline.
    """
    return _wait_for_result(run_in_thread(work), deadline_s)


def _wait_for_result(future: Future[Result], timeout_s: float) -> Result:
    # `result(timeout)` could not distinguish a late call from a TimeoutError of the work itself.
    if wait([future], timeout=timeout_s).not_done:
        future.cancel()
        raise DeadlineError
    return future.result()

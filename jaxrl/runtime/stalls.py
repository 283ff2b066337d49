"""Runs that do not move: they say what they wait for, and where their threads are."""

from __future__ import annotations

import contextlib
import faulthandler
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol


class Moving(Protocol):
    """Progress as `logs.display.Display` knows it."""

    moved_at: float
    """When it was last told of any, by `time.monotonic`."""

    doing: str
    """The text that it was told then."""

    def log(self, text: str) -> None:
        """Prints a line."""
        ...


@contextlib.contextmanager
def told_of_stalls(
    display: Moving, seconds: float, dump: Callable[[], None] | None = None
) -> Iterator[None]:
    """Watches progress from a thread while the body runs.

    Args:
        display: is told of all progress.
        seconds: without any after which a line says so, and the stack of every thread follows on
            stderr; again after twice as long. 0: never.
        dump: prints the stacks.
    """
    if not seconds:
        yield
        return
    over = threading.Event()
    dump = dump or _dump

    def watch() -> None:
        seen, since, limit = display.moved_at, display.moved_at, seconds
        while not over.wait(min(seconds / 4, 1.0)):
            if display.moved_at != seen:
                seen = since = display.moved_at
                limit = seconds
            silent_s = time.monotonic() - since
            if silent_s < limit:
                continue
            what = display.doing or "nothing yet"
            display.log(
                f"warning: nothing has moved for {silent_s:.0f} s (config.watch.stall_s); the last "
                f"was: {what}. Where the threads are:"
            )
            dump()
            seen, limit = display.moved_at, 2 * limit  # the warning itself is no progress
            display.doing = what

    thread = threading.Thread(target=watch, daemon=True, name="stalls")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def tell_on_signal() -> None:
    """Prints the stacks whenever SIGUSR1 arrives."""
    if sys.__stderr__ is not None:
        faulthandler.register(signal.SIGUSR1, file=sys.__stderr__, all_threads=True)


def _dump() -> None:
    """Prints the stacks to the process's own stderr: files, lines and names of functions."""
    stream = sys.__stderr__
    if stream is not None:
        stream.flush()
        faulthandler.dump_traceback(file=stream, all_threads=True)

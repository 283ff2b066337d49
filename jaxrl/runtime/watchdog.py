"""Watchdog: dump stack traces when a run stops making progress, and end it."""

from __future__ import annotations

import contextlib
import faulthandler
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Protocol

from jaxrl.runtime.preemption import EXIT_LOST


class Moving(Protocol):
    """A display that records progress, see `logs.display.Display`."""

    moved_at: float  # time of the last progress, from `time.monotonic`
    doing: str  # activity text of the last progress

    def log(self, text: str) -> None:
        """Print a line."""
        ...


@contextlib.contextmanager
def watchdog(
    display: Moving,
    seconds: float,
    deadline_s: float = 0.0,
    *,
    end: Callable[[int], None] = os._exit,
) -> Iterator[None]:
    """Watch progress from a thread while the body runs.

    Args:
        display: Display that receives all progress.
        seconds: Seconds without progress before a warning with the stacks of all threads. The
            next warning waits twice as long. 0 for no warnings.
        deadline_s: Seconds without progress before the process ends with `EXIT_LOST`; 0 for never.
        end: Function that ends the process with an exit code. Nothing is saved, because the state
            may be in use by what hangs.
    """
    limits = [one for one in (seconds, deadline_s) if one]
    if not limits:
        yield
        return
    over = threading.Event()

    def tell(silent_s: float, key: str, then: str) -> None:
        what = display.doing or "nothing yet"
        display.log(
            f"warning: nothing has moved for {silent_s:.0f} s (config.watch.{key}); the last was: "
            f"{what}. {then}Where the threads are:\n{_stacks()}"
        )
        display.doing = what  # the warning itself is no progress

    def watch() -> None:
        # A warning also updates `moved_at`. `seen` skips that, so `since` is the real progress.
        seen, since, limit = display.moved_at, display.moved_at, seconds or math.inf
        while not over.wait(min(min(limits) / 4, 1.0)):
            if display.moved_at != seen:
                seen = since = display.moved_at
                limit = seconds or math.inf
            silent_s = time.monotonic() - since
            if deadline_s and silent_s >= deadline_s:
                tell(
                    silent_s,
                    "deadline_s",
                    "The run ends; the same command resumes from its newest checkpoint. If the "
                    "work is only slow, raise the key. ",
                )
                end(EXIT_LOST)
                return
            if silent_s >= limit:
                tell(silent_s, "stall_s", "")
                seen, limit = display.moved_at, 2 * limit

    thread = threading.Thread(target=watch, daemon=True, name="stalls")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def tell_on_signal() -> None:
    """Print the stacks whenever SIGUSR1 arrives."""
    if sys.__stderr__ is not None:
        faulthandler.register(signal.SIGUSR1, file=sys.__stderr__, all_threads=True)


def _stacks() -> str:
    """Return the stack of every Python thread, under the thread's name."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"Thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    )

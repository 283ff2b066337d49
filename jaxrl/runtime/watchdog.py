"""Watchdog that dumps stack traces when a run stops making progress, and then ends the run."""

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
from typing import TYPE_CHECKING

from jaxrl.runtime.preemption import EXIT_LOST

if TYPE_CHECKING:
    from jaxrl.logs.display import Display


@contextlib.contextmanager
def watchdog(
    display: Display,
    stall_s: float,
    deadline_s: float = 0.0,
    *,
    exit_process: Callable[[int], None] = os._exit,
) -> Iterator[None]:
    """Watch the run's progress in a thread while the body runs.

    Args:
        display: Display that records all progress.
        stall_s: Seconds without progress before a warning with the stacks of all threads. The time
            is doubled after each warning. 0 for no warnings.
        deadline_s: Seconds without progress before the process ends with `EXIT_LOST`; 0 for never.
        exit_process: Function that ends the process with an exit code. Nothing is saved, because
            the hanging thread may be using the state.
    """
    limits = [timeout_s for timeout_s in (stall_s, deadline_s) if timeout_s]
    if not limits:
        yield
        return
    stop_event = threading.Event()

    def warn(silent_s: float, key: str, advice: str) -> None:
        activity = display.last_activity or "nothing yet"
        display.log(
            f"warning: no progress for {silent_s:.0f} s (config.watch.{key}); last activity: "
            f"{activity}. {advice}Stacks of all threads:\n{_format_stacks()}"
        )
        display.last_activity = activity  # the warning itself is not progress

    def watch() -> None:
        # A warning also updates `last_progress_at`. `last_seen_at` skips that, so `stalled_since`
        # is the time of real progress.
        last_seen_at, stalled_since, limit = (
            display.last_progress_at,
            display.last_progress_at,
            stall_s or math.inf,
        )
        while not stop_event.wait(min(min(limits) / 4, 1.0)):
            if display.last_progress_at != last_seen_at:
                last_seen_at = stalled_since = display.last_progress_at
                limit = stall_s or math.inf
            silent_s = time.monotonic() - stalled_since
            if deadline_s and silent_s >= deadline_s:
                warn(
                    silent_s,
                    "deadline_s",
                    "The run ends; the same command resumes from its newest checkpoint. If the "
                    "work is only slow, raise the key. ",
                )
                exit_process(EXIT_LOST)
                return
            if silent_s >= limit:
                warn(silent_s, "stall_s", "")
                last_seen_at, limit = display.last_progress_at, 2 * limit

    thread = threading.Thread(target=watch, daemon=True, name="stalls")
    thread.start()
    try:
        yield
    finally:
        stop_event.set()
        thread.join()


def dump_stacks_on_signal() -> None:
    """Print the stacks of all threads to stderr whenever SIGUSR1 arrives."""
    if sys.__stderr__ is not None:
        faulthandler.register(signal.SIGUSR1, file=sys.__stderr__, all_threads=True)


def _format_stacks() -> str:
    """Return the stack of every Python thread, headed by the thread's name."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"Thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    )

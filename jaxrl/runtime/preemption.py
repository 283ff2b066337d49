"""Early stopping of a run, on a signal or when evaluations no longer improve."""

from __future__ import annotations

import dataclasses
import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

EXIT_INTERRUPTED = 75
"""Exit code: a signal ended the run early. EX_TEMPFAIL in sysexits.h."""

EXIT_UNAVAILABLE = 69
"""Exit code: all episodes failed, or search was unavailable. EX_UNAVAILABLE in sysexits.h."""

EXIT_BUDGET_SPENT = 78
"""Exit code: the run has spent its budget. EX_CONFIG in sysexits.h."""

EXIT_LOST = 76
"""Exit code: a process of the job is lost, or the run hangs. EX_PROTOCOL in sysexits.h."""

EXIT_UNHEALTHY = 70
"""Exit code: `watch.action` ended the run. EX_SOFTWARE in sysexits.h."""

NOTHING_TO_SAVE = "ended before the first step; there is nothing to save"


class Interrupted(Exception):  # noqa: N818, nothing went wrong
    """Error raised when work stops early on request. The rollout and engine remain usable."""


_SHOW_CURSOR = "\x1b[?25h"  # shows the cursor, which a live line hides


def exit_on_signals(message: str = NOTHING_TO_SAVE, code: int | None = EXIT_INTERRUPTED) -> None:
    """Make SIGTERM and SIGINT end the process immediately.

    Args:
        message: Text to print after the signal's name.
        code: Exit code; None for 128 plus the signal's number.
    """

    def exit_process(number: int, _: object) -> None:
        _write_stderr(f"{signal.Signals(number).name}: {message}")
        os._exit(128 + number if code is None else code)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, exit_process)


def _write_stderr(line: str) -> None:
    """Write a line to stderr without `print`, whose buffer may be locked when a signal arrives."""
    os.write(2, f"{line}\n{_SHOW_CURSOR if os.isatty(2) else ''}".encode())


@contextmanager
def watch_stop_signals(
    has_started: Callable[[], bool] = lambda: True,
) -> Iterator[Callable[[], bool]]:
    """Yield a function that returns True once SIGTERM or SIGINT has arrived.

    The first signal requests a stop; the second signal ends the process immediately. A thread
    handles them, because the main thread may be compiling or waiting for other processes.

    Args:
        has_started: Function that returns False while there is nothing to save; a signal then ends
            the process immediately with `EXIT_INTERRUPTED`.
    """
    numbers = (signal.SIGTERM, signal.SIGINT)
    stop_requested = threading.Event()
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)

    def wait_for_signals() -> None:
        while received := os.read(read_fd, 1):
            if received[0] not in numbers:
                continue
            if stop_requested.is_set():
                os._exit(128 + received[0])
            name = signal.Signals(received[0]).name
            if not has_started():
                _write_stderr(f"{name}: {NOTHING_TO_SAVE}")
                os._exit(EXIT_INTERRUPTED)
            stop_requested.set()
            # Unlike a signal handler, this thread may wait for another print to finish. `print`
            # would write the newline separately, after lines of other threads.
            sys.stderr.write(f"{name}: stopping; send it again to exit immediately\n")
            sys.stderr.flush()

    old_handlers = {number: signal.signal(number, lambda *_: None) for number in numbers}
    wakeup = signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
    thread = threading.Thread(target=wait_for_signals, daemon=True, name="signals")
    thread.start()
    try:
        yield stop_requested.is_set
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in old_handlers.items():
            signal.signal(number, handler)
        os.close(write_fd)
        thread.join()
        os.close(read_fd)


@dataclasses.dataclass(frozen=True)
class BestEvaluation:
    """Best evaluation of a stage so far; higher values are better."""

    value: float | None = None  # None before the first evaluation
    step: int = 0  # step of the best evaluation
    mark: float | None = None  # value at the last restart of patience
    num_stale: int = 0  # evaluations since then


def update_best(
    best: BestEvaluation, step: int, value: float, *, min_delta: float
) -> BestEvaluation:
    """Return `best` updated with an evaluation. A value of NaN, for no score, changes nothing.

    Any higher value is the new best. Patience restarts when the value exceeds that of the last
    restart by more than `min_delta`, so several small improvements add up to one restart.
    """
    if math.isnan(value):
        return best
    if best.value is None or value > best.value:
        best = dataclasses.replace(best, value=value, step=step)
    if best.mark is None or value > best.mark + min_delta:
        return dataclasses.replace(best, mark=value, num_stale=0)
    return dataclasses.replace(best, num_stale=best.num_stale + 1)

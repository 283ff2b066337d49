"""Ends of a run before its last step: on a signal, or when evaluations no longer improve."""

from __future__ import annotations

import dataclasses
import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

EXIT_TRY_AGAIN = 75
"""A signal ended the run early; EX_TEMPFAIL of sysexits.h."""

EXIT_NOTHING_WORKS = 69
"""Every episode failed, or the search engine stayed away; EX_UNAVAILABLE of sysexits.h."""

EXIT_BUDGET_SPENT = 78
"""The run has spent its budget; EX_CONFIG of sysexits.h."""

EXIT_LOST = 76
"""The process waited for something that never came; EX_PROTOCOL of sysexits.h."""

EXIT_UNSOUND = 70
"""`watch.action` ended the run; EX_SOFTWARE of sysexits.h."""

ENDED_EARLY = "ended before the first step; there is nothing to save"


class Interrupted(Exception):  # noqa: N818, nothing went wrong
    """Work ended early because it was asked to. A rollout and its engine can be used again."""


_CURSOR = "\x1b[?25h"  # shows it again, which a live line hides


def end_on_signals(said: str = ENDED_EARLY, code: int | None = EXIT_TRY_AGAIN) -> None:
    """End the process at once on SIGTERM or SIGINT, from now on.

    Args:
        said: Text to print after the signal's name.
        code: Exit code; None for 128 plus the signal's number.
    """

    def end(number: int, _: object) -> None:
        _write(f"{signal.Signals(number).name}: {said}")
        os._exit(128 + number if code is None else code)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)


def _write(line: str) -> None:
    """Write to stderr; not by print, as a signal may come while another print holds the buffer."""
    os.write(2, f"{line}\n{_CURSOR if os.isatty(2) else ''}".encode())


@contextmanager
def stop_on_signals(
    is_begun: Callable[[], bool] = lambda: True,
) -> Iterator[Callable[[], bool]]:
    """Yield a function that returns True once SIGTERM or SIGINT has arrived.

    The first signal only asks; a second one ends the process at once. A thread handles them: the
    main one may be in a compilation, or wait for other processes, when they come.

    Args:
        is_begun: Returns False while there is nothing to save. A signal then ends the process at
            once with `EXIT_TRY_AGAIN`.
    """
    numbers = (signal.SIGTERM, signal.SIGINT)
    asked = threading.Event()
    reading, writing = os.pipe()
    os.set_blocking(writing, False)

    def listen() -> None:
        while received := os.read(reading, 1):
            if received[0] not in numbers:
                continue
            if asked.is_set():
                os._exit(128 + received[0])
            name = signal.Signals(received[0]).name
            if not is_begun():
                _write(f"{name}: {ENDED_EARLY}")
                os._exit(EXIT_TRY_AGAIN)
            asked.set()
            # Unlike a signal handler, this thread may wait until another has printed.
            print(f"{name}: stopping; once more to end at once", file=sys.stderr, flush=True)

    before = {number: signal.signal(number, lambda *_: None) for number in numbers}
    wakeup = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    thread = threading.Thread(target=listen, daemon=True, name="signals")
    thread.start()
    try:
        yield asked.is_set
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(writing)
        thread.join()
        os.close(reading)


@dataclasses.dataclass(frozen=True)
class Best:
    """The best evaluation of a stage so far; higher is better."""

    value: float | None = None  # None: there was none yet
    step: int = 0  # after which it was made
    mark: float | None = None  # the value since which patience counts
    num_stale: int = 0  # evaluations since then


def update_best(best: Best, step: int, value: float, *, min_delta: float) -> Best:
    """Return the best evaluation after one more; NaN, without a score, changes nothing.

    Any higher value is the new best. Patience restarts when the value is more than `min_delta`
    above the one at which it last did, so that many small improvements add up to one.
    """
    if math.isnan(value):
        return best
    if best.value is None or value > best.value:
        best = dataclasses.replace(best, value=value, step=step)
    if best.mark is None or value > best.mark + min_delta:
        return dataclasses.replace(best, mark=value, num_stale=0)
    return dataclasses.replace(best, num_stale=best.num_stale + 1)

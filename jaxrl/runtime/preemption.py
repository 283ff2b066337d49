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
"""Exit code of a run that a signal ended early; EX_TEMPFAIL of sysexits.h."""

EXIT_NOTHING_WORKS = 69
"""Exit code of a run that ended since every episode failed, or the search engine stayed away;
EX_UNAVAILABLE of sysexits.h."""

EXIT_BUDGET_SPENT = 78
"""Exit code of a run that has spent its budget and needs a higher one to go on; EX_CONFIG of
sysexits.h."""

EXIT_LOST = 76
"""Exit code of a process that waited for what never came, another process of its job say;
EX_PROTOCOL of sysexits.h."""

EXIT_UNSOUND = 70
"""Exit code of a run that `watch.action` has ended since it was about to fail; EX_SOFTWARE of
sysexits.h."""

ENDED_EARLY = "ended before the first step; there is nothing to save"


class Interrupted(Exception):  # noqa: N818, nothing went wrong
    """Raised where work under way ends early because it was asked to.

    A rollout that raises it leaves its engine empty, and both can be used again.
    """


_CURSOR = "\x1b[?25h"  # shows it again, which a live line hides


def end_on_signals(said: str = ENDED_EARLY, code: int | None = EXIT_TRY_AGAIN) -> None:
    """Ends the process at once on SIGTERM or SIGINT, from now on.

    Args:
        said: in one line with the signal's name.
        code: exit code; None: 128 and the signal's number.
    """

    def end(number: int, _: object) -> None:
        _write(f"{signal.Signals(number).name}: {said}")
        os._exit(128 + number if code is None else code)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)


def _write(line: str) -> None:
    """Writes to stderr; not by print, as a signal may come while another print holds the buffer."""
    os.write(2, f"{line}\n{_CURSOR if os.isatty(2) else ''}".encode())


@contextmanager
def stop_on_signals(
    is_begun: Callable[[], bool] = lambda: True,
) -> Iterator[Callable[[], bool]]:
    """Gives a function that tells whether SIGTERM or SIGINT has arrived.

    The first signal only asks; a second one ends the process at once. A thread answers them: the
    main one may be in a compilation, or wait for other processes, when they come.

    Args:
        is_begun: while it says no there is nothing to save, and a signal ends the process at once
            with `EXIT_TRY_AGAIN`. (An exception in its place would crash libraries that load.)
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
    """The best evaluation after one more.

    Any higher value is the new best. Patience begins anew when the value is more than `min_delta`
    above the one at which it last did, so that many small improvements add up to one. An
    evaluation that could not be scored (NaN) changes nothing.
    """
    if math.isnan(value):
        return best
    if best.value is None or value > best.value:
        best = dataclasses.replace(best, value=value, step=step)
    if best.mark is None or value > best.mark + min_delta:
        return dataclasses.replace(best, mark=value, num_stale=0)
    return dataclasses.replace(best, num_stale=best.num_stale + 1)

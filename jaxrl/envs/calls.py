"""Calls of code that is not ours and may fail in any way or never return."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

MAX_ERROR = 2000  # characters of an exception's text; a library may put a whole page into it


def error_text(error: BaseException) -> str:
    """Type and text of an exception, in at most `MAX_ERROR` characters."""
    try:
        text = str(error)
    except Exception:  # exceptions are classes of the user's too
        text = ""
    return f"{type(error).__name__}: {text}".removesuffix(": ")[:MAX_ERROR]


def in_thread(work: Callable[[], Result]) -> Future[Result]:
    """The result of `work`, done in a thread that no exit of the interpreter waits for.

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


def side_by_side(
    work: Callable[[Item], Result], items: Sequence[Item], *, max_threads: int
) -> list[Result]:
    """`work` of each item, in their order, in threads as `in_thread` makes them."""
    results: dict[int, Result] = {}
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for index in range(len(items)):
        waiting.put(index)

    def run() -> None:
        while True:
            try:
                index = waiting.get_nowait()
            except queue.Empty:
                return
            results[index] = work(items[index])

    for done in [in_thread(run) for _ in range(min(len(items), max_threads))]:
        done.result()
    return [results[index] for index in range(len(items))]

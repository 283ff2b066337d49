"""Worker processes that are bounded in time and memory, and replaced when they end."""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxrl.utils.child_process import Child, EndedError

_START_S = 120.0  # in which a worker has to be ready; it loads sympy, on a busy machine slowly
_BUSY_FACTOR, _BUSY_S = 20.0, 60.0  # how much longer than its computing time a question may wait


class WorkerLostError(RuntimeError):
    """A worker ended before it was ready."""


class WorkerPool:
    """Workers that start when there is something to ask, and are asked one question at a time."""

    def __init__(self, kind: str, *, deadline_s: float, memory_mib: int, size: int) -> None:
        """Starts no process yet.

        Args:
            kind: a name of `worker.KINDS`.
            deadline_s: computing time a question may take, in seconds.
            memory_mib: of each worker.
            size: at most so many processes.
        """
        self._kind = kind
        self._command = [
            *(sys.executable, "-P", str(Path(__file__).with_name("worker.py"))),
            *(kind, str(deadline_s), str(memory_mib)),
        ]
        self._patience_s = _BUSY_FACTOR * deadline_s + _BUSY_S
        # Of workers that nobody asks; None for one that is not started.
        self._idle: queue.LifoQueue[Child | None] = queue.LifoQueue()
        for _ in range(size):
            self._idle.put(None)
        self._all: list[Child] = []  # that were started and are not closed
        self._lock = threading.Lock()
        self._finalizer = weakref.finalize(self, _close_all, self._all)

    def ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Asks a worker; its answer has `error` where a limit or an exception ends it.

        A worker that is lost is replaced and asked once more, since the system may have ended it.

        Raises:
            WorkerLostError: a worker does not begin.
            TimeoutError: one got no processor for long.
        """
        status = 0
        for _ in range(2):
            worker, is_fit = self._idle.get(), False
            try:
                worker = worker or self._start()
                worker.tell(question)
                answer = worker.hear(self._patience_s)
                is_fit = "error" not in answer  # which may leave little memory behind
                return answer
            except EndedError as lost:
                status = lost.status
            finally:
                if not is_fit:
                    self._end(worker)
                self._idle.put(worker if is_fit else None)
            if status == -signal.SIGPROF:
                return {"error": "its time is over"}
        return {"error": f"it ended two workers, the second with {status}"}

    def _start(self) -> Child:
        names = ("PATH", "HOME", "LANG", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "PYTHONPATH")
        worker = Child(
            self._command,
            what=f"a worker ({self._kind})",
            env={name: os.environ[name] for name in names if name in os.environ},
        )
        with self._lock:
            self._all.append(worker)
        try:
            worker.hear(_START_S)
        except BaseException as error:
            self._end(worker)
            if not isinstance(error, EndedError):
                raise
            raise WorkerLostError(
                f"{error} before it was ready; for math, is the extra installed whole, and "
                "reward.math_verify.memory_mib enough?"
            ) from error
        return worker

    def _end(self, worker: Child | None) -> None:
        if worker is not None:
            worker.close()
            with self._lock:
                if worker in self._all:
                    self._all.remove(worker)

    def close(self) -> None:
        """Ends all workers; the end of the process does so too."""
        self._finalizer()


def _close_all(workers: list[Child]) -> None:
    for worker in list(workers):
        worker.close()

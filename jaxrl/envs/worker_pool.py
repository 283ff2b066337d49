"""Worker processes that are bounded in time and memory, and replaced when they end."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_START_S = 120.0  # in which a worker has to be ready; it loads sympy, on a busy machine slowly
_BUSY_FACTOR, _BUSY_S = 20.0, 60.0  # how much longer than its computing time a question may wait
_LOOK_S = 3600.0  # the system's call takes no more than 24 days


class WorkerLostError(RuntimeError):
    """A worker ended for another reason than its limit, or did not begin."""


class WorkerPool:
    """Workers that are started when there is something to ask, and asked one question at a time."""

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
        self._idle: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        for _ in range(size):
            self._idle.put(None)
        self._all: list[_Worker] = []  # that were started and are not closed
        self._lock = threading.Lock()
        self._finalizer = weakref.finalize(self, _close_all, self._all)

    def ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """What a worker answers; `error` where a limit or an exception ends it.

        A worker that is lost is replaced and asked once more, since the system may have ended it.

        Raises:
            WorkerLostError: a worker does not begin.
            TimeoutError: one got no processor for long.
        """
        for _ in range(2):
            found = self._ask_one(question)
            if "lost" not in found:
                return found
        return {"error": f"it ended two workers, the second with {found['lost']}"}

    def _ask_one(self, question: Mapping[str, Any]) -> dict[str, Any]:
        worker = self._idle.get()
        try:
            if worker is None:
                worker = self._start()
            found = worker.ask(question, self._patience_s)
        except BaseException:
            self._end(worker)
            self._idle.put(None)
            raise
        if "lost" in found or "error" in found:  # an error may leave little memory behind
            self._end(worker)
            worker = None
        self._idle.put(worker)
        return {"error": "its time is over"} if found.get("lost") == -signal.SIGPROF else found

    def _start(self) -> _Worker:
        worker = _Worker(self._kind, self._command)
        with self._lock:
            self._all.append(worker)
        try:
            worker.await_start()
        except BaseException:
            self._end(worker)
            raise
        return worker

    def _end(self, worker: _Worker | None) -> None:
        if worker is not None:
            worker.close()
            with self._lock:
                if worker in self._all:
                    self._all.remove(worker)

    def close(self) -> None:
        """Ends all workers; the end of the process does so too."""
        self._finalizer()


def _close_all(workers: list[_Worker]) -> None:
    for worker in list(workers):
        worker.close()


class _Worker:
    """A process that answers, and its two pipes."""

    def __init__(self, kind: str, command: Sequence[str]) -> None:
        self._kind = kind
        names = ("PATH", "HOME", "LANG", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "PYTHONPATH")
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in names if name in os.environ},
            start_new_session=True,  # Ctrl-C is for the run
        )
        self._read = b""

    def await_start(self) -> None:
        if "lost" in (found := self._line(_START_S)):
            raise WorkerLostError(
                f"a worker ({self._kind}) ended with {found['lost']} before it was ready; for "
                "math, is the extra installed whole, and reward.math_verify.memory_mib enough?"
            )

    def ask(self, question: Mapping[str, Any], patience_s: float) -> dict[str, Any]:
        """What the worker answers, or `lost` with how it ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            return {"lost": self._process.wait()}
        return self._line(patience_s)

    def _line(self, patience_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        ends, pipe = time.monotonic() + patience_s, self._process.stdout.fileno()
        (poll := select.poll()).register(pipe, select.POLLIN)
        while b"\n" not in self._read:
            left_s = max(ends - time.monotonic(), 0)
            if not poll.poll(1000 * min(left_s, _LOOK_S)):
                if left_s > _LOOK_S:
                    continue
                raise TimeoutError(f"a worker ({self._kind}) was silent for {patience_s:g} s")
            if not (more := os.read(pipe, 65536)):
                return {"lost": self._process.wait()}
            self._read += more
        line, _, self._read = self._read.partition(b"\n")
        return dict(json.loads(line))

    def close(self) -> None:
        """Kills it, and waits until it is gone."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # what was written is not wanted any more
                    pipe.close()

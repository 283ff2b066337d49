"""Mathematics by its meaning: math-verify, in worker processes that are bounded and replaced.

What value comparison (`math_answers`) decides, it decides. The rest, as roots, sets, intervals,
matrices and formulas, goes to a worker.
"""

from __future__ import annotations

import contextlib
import importlib.util
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
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from jaxrl.envs.base import Finished, Task
from jaxrl.envs.math_answers import join_thousands, last_boxed, value_equal
from jaxrl.envs.reward_functions import Call, Measured

MAX_CHARACTERS = 2000
"""A longer answer equals only what it equals by value; it is not sent to a worker."""

_START_S = 120.0  # in which a worker has to be ready; it loads sympy, on a busy machine slowly
_BUSY_FACTOR, _BUSY_S = 20.0, 60.0  # how much longer than its computing time a question may wait
_LOOK_S = 3600.0  # the system's call takes no more than 24 days
_CACHED = 20_000  # questions


class WorkerLostError(RuntimeError):
    """A worker ended for another reason than its limit, or did not begin."""


class MathVerify:
    """The reward part `math_verify`: 1 where the final answer equals an accepted one, else 0.

    Compared is what the environment found as the final answer. An abstention is 0. An answer that
    takes too long, or more memory than allowed, or that ends two workers, is not shown to be equal:
    it is 0 too and counted (`undecided`), as it is the answer that did so. Were it an environment
    error, a policy could leave the statistics of its group by writing what hangs. A worker that
    cannot start, or gets no processor for long, is our failure and an environment error.
    """

    is_async = False

    def __init__(self, *, deadline_s: float, memory_mib: int, workers: int) -> None:
        """Starts no process yet.

        Args:
            deadline_s: computing time a question may take, in seconds.
            memory_mib: of each worker.
            workers: at most so many processes.

        Raises:
            ImportError: math-verify is not installed.
        """
        if importlib.util.find_spec("math_verify") is None:
            raise ImportError("math-verify is not installed; pip install -e '.[math]'")
        self.pool = WorkerPool(deadline_s=deadline_s, memory_mib=memory_mib, size=workers)
        self._ask = lru_cache(maxsize=_CACHED)(self.pool.ask)

    def calls(self, group: Sequence[Finished]) -> list[Call]:
        """One for each episode."""
        return [
            Call(members=(index,), make=partial(self.measure, one), read=lambda found: [found])
            for index, one in enumerate(group)
        ]

    def lacks(self, task: Task) -> list[str]:
        """Accepted answers, where a task has none."""
        return [] if task.answers else ["answers"]

    def measure(self, one: Finished) -> Measured:
        """What an episode earns."""
        answer = "" if one.reward.is_abstention else one.reward.final_answer.strip()
        found = self.is_equal(answer, one.episode.task.answers) if answer else False
        return Measured(score=float(found is True), others={"undecided": float(found is None)})

    def is_equal(self, answer: str, truths: Sequence[str]) -> bool | None:
        """Whether an answer equals one of the accepted ones; None where limits end the comparison.

        Raises:
            WorkerLostError: no worker can be started.
            TimeoutError: a worker got no processor.
        """
        decided = [value_equal(answer, truth) for truth in truths]
        if True in decided:
            return True
        open_ = tuple(_inner(t) for t, known in zip(truths, decided, strict=True) if known is None)
        if not open_ or len(answer) > MAX_CHARACTERS:
            return False
        return self._ask(_inner(answer), open_)


def _inner(text: str) -> str:
    """An expression without what is around it."""
    boxed = last_boxed(text)
    text = (text if boxed is None else boxed).strip().rstrip(".")
    for mark in ("$$", "$"):
        if len(text) >= 2 * len(mark) and text.startswith(mark) and text.endswith(mark):
            text = text[len(mark) : -len(mark)].strip()
    return join_thousands(text)


class WorkerPool:
    """Workers that are started when there is something to ask, and asked one question at a time."""

    def __init__(self, *, deadline_s: float, memory_mib: int, size: int) -> None:
        """As `MathVerify`; `size` are its workers."""
        self._command = [
            *(sys.executable, "-P", str(Path(__file__).with_name("math_worker.py"))),
            *(str(deadline_s), str(memory_mib)),
        ]
        self._patience_s = _BUSY_FACTOR * deadline_s + _BUSY_S
        # Of workers that nobody asks; None for one that is not started.
        self._idle: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        for _ in range(size):
            self._idle.put(None)
        self._all: list[_Worker] = []  # that were started and are not closed
        self._lock = threading.Lock()
        self._finalizer = weakref.finalize(self, _close_all, self._all)

    def ask(self, answer: str, truths: Sequence[str]) -> bool | None:
        """Whether an answer is one of the truths; None where a limit ends the comparison.

        A worker that is lost is replaced and asked once more, since the system may have ended it.

        Raises:
            WorkerLostError: a worker does not begin.
            TimeoutError: one got no processor for long.
        """
        question = {"answer": answer, "truths": list(truths)}
        for _ in range(2):
            found = self._ask_one(question)
            if "lost" not in found:
                return bool(found["equal"]) if "equal" in found else None
        return None

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
        worker = _Worker(self._command)
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
    """A process that compares, and its two pipes."""

    def __init__(self, command: Sequence[str]) -> None:
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
                f"a worker of math-verify ended with {found['lost']} before it was ready; is the "
                "extra `math` installed whole, and reward.math_verify.memory_mib enough?"
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
                raise TimeoutError(f"a worker of math-verify was silent for {patience_s:g} s")
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

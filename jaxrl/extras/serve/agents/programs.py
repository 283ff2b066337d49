"""Processes in which agents play: started, replaced when they end or hang, and ended with the run.

An agent that does not end in its time is told to. A program is killed with all that it has started;
a function that is not async cannot be, so its thread stays behind, and a process with many of those
gets no more episodes and is ended after the last of its others.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxrl.extras.serve.agents.runner import FOLDER, kill_marked
from jaxrl.utils.child_process import Child, EndedError, SilentError
from jaxrl.utils.concurrency import side_by_side

START_S = 120.0
"""Seconds in which an agent's process has to have loaded it."""

REACTION_S = 15.0
"""Seconds in which it has to take note that an episode is given up, or it is ended."""

MAX_LEFT = 32
"""Episodes that a process may have left behind and get others still."""

_KEPT = 1 << 13
_ENDING_S = 5.0
_LISTENING_S = 5.0  # between looks for whether a silent process is still there

Ended = Callable[[str, Any, str], None]
"""Told the name of an episode, and what came of it or why nothing did."""


class _Child(Child):
    """A process of agents, and its folder. Writing to it never blocks."""

    def __init__(self, words: Sequence[str], *, what: str, env: Mapping[str, str]):
        """Starts it.

        Raises:
            OSError: it cannot be started.
        """
        self.folder = tempfile.mkdtemp(prefix="jaxrl-agents-")
        try:
            env = {**env, FOLDER: self.folder}
            super().__init__(words, what=what, stderr=subprocess.PIPE, env=env)
        except OSError:
            os.rmdir(self.folder)
            raise
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(target=self._write, name="agents", daemon=True).start()

    @property
    def has_ended(self) -> bool:
        """True once the process has, though what it left behind may hold its pipes."""
        return self._process.poll() is not None

    def tell(self, message: Mapping[str, Any]) -> None:
        """Queues a line, which is written when it reads; `hear` finds out that it has ended."""
        self._lines.put(json.dumps(message).encode() + b"\n")

    def read(self, is_enough: Callable[[], bool], patience_s: float) -> bool:
        """Reads, and keeps only the end of what is printed."""

        def is_read() -> bool:
            del self.reported[:-_KEPT]
            return is_enough()

        return super().read(is_read, patience_s)

    def close(self) -> None:
        """Kills it with all that it has started."""
        self.kill()
        kill_marked(self.folder)
        self._lines.put(b"")
        super().close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _write(self) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        with contextlib.suppress(OSError, ValueError):  # it has ended
            while line := self._lines.get():
                stdin.write(line)
                stdin.flush()


@dataclass(eq=False)
class _Process:
    child: _Child
    playing: dict[str, float] = field(default_factory=dict)  # names; when one was given up, or 0
    warned: set[str] = field(default_factory=set)  # of these, given up with the agent's notice
    num_threads: int = 0  # of episodes that were given up, which run on
    num_deaf: int = 0  # episodes that were given up, and go on though they know

    @property
    def num_left(self) -> int:
        """Episodes that it has left behind."""
        return self.num_threads + self.num_deaf


class Programs:
    """An agent, and the processes that play it."""

    def __init__(
        self,
        *,
        agent: str,
        command: Sequence[str],
        python: str,
        settings: Mapping[str, Any],
        processes: int,
        ended: Ended,
    ):
        """Starts no process yet.

        Args:
            agent: name of the function; "" where a program plays.
            command: the program's words; () where a function plays.
            python: interpreter of the function; "" for this one.
            settings: further arguments of the function.
            processes: among which episodes of a function are divided.
            ended: called from threads with each episode that has ended, also one that was given up.
        """
        played = {"agent": agent, "command": list(command), "settings": dict(settings)}
        # Run as a file, its folder would come first where modules are looked for.
        self._words = [
            *(python or sys.executable, "-c", _START, str(Path(__file__).with_name("runner.py"))),
            json.dumps(played),
        ]
        # Another interpreter has its own packages.
        left_out = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV") if python else ()
        self._environment = {k: v for k, v in os.environ.items() if k not in left_out}
        self._count, self._ended = processes, ended
        self._what = f"the agent {agent}" if agent else f"the program {command[0]}"
        self._lock = threading.Lock()
        self._is_starting = False
        self._processes: list[_Process] = []
        self._children: list[_Child] = []  # that are not gone
        self._finalizer = weakref.finalize(self, _close_all, self._children)

    def open(self) -> None:
        """Starts all processes, so that one that cannot load the agent shows at once.

        Raises:
            ValueError: it cannot.
        """
        with self._lock:
            if not self._processes:
                count = self._count  # an agent may take long to load
                self._processes += side_by_side(
                    lambda _: self._start(), range(count), max_threads=count
                )

    def play(self, episode: Mapping[str, Any]) -> None:
        """Has an episode played; it has a name `episode`, and what an agent is given.

        Raises:
            ValueError: no process can be started.
        """
        name = episode["episode"]
        with self._lock:
            fit = [one for one in self._processes if one.num_left < MAX_LEFT]
            if len(fit) < self._count and not (fit and self._is_starting):
                fit.append(self._start())
                self._processes.append(fit[-1])
            process = min(fit, key=lambda one: len(one.playing))
            process.playing[name] = 0.0
        process.child.tell(episode)

    def stop(self, name: str) -> None:
        """Gives an episode up: `ended` is called with it soon, if it was not before."""
        with self._lock:
            for process in self._processes:
                if name in process.playing and not process.playing[name]:
                    process.playing[name] = time.monotonic()
                    break
            else:
                return
        process.child.tell({"stop": name})

    def look(self) -> None:
        """Ends processes that do not react, and those that have nothing left to do."""
        now = time.monotonic()
        with self._lock:
            late = [
                (one, name)
                for one in self._processes
                for name, since in one.playing.items()
                if since and now - since > REACTION_S
            ]
            # A process that took note stays, though its agent is deaf; others are stuck.
            deaf = [(one, name) for one, name in late if name in one.warned]
            for process, name in deaf:
                del process.playing[name]
                process.num_deaf += 1
            stuck = [one for one, name in late if (one, name) not in deaf]
            stuck += [p for p in self._processes if p.num_left >= MAX_LEFT and not p.playing]
            fresh = sum(one.num_left < MAX_LEFT // 2 for one in self._processes)
            is_short = fresh < self._count and bool(self._processes) and not self._is_starting
            self._is_starting |= is_short
        for process in stuck:
            process.child.kill()
        for _, name in deaf:
            self._ended(name, None, "it was given up")
        if is_short:  # so that nobody waits for it later
            threading.Thread(target=self._start_another, name="agents", daemon=True).start()

    def close(self) -> None:
        """Ends all processes; the end of this one does so too."""
        self._finalizer()

    def _start_another(self) -> None:
        try:
            with contextlib.suppress(ValueError):  # told where it is needed
                process = self._start()
                with self._lock:
                    self._processes.append(process)
        finally:
            self._is_starting = False

    def _start(self) -> _Process:
        """Starts a process, which the caller adds to the others."""
        try:
            child = _Child(self._words, what=self._what, env=self._environment)
        except OSError as error:
            raise ValueError(
                f"config.env.agents: {self._what} cannot be started: {error}."
            ) from error
        self._children.append(child)
        try:
            first = child.hear(START_S)
        except (EndedError, SilentError, ValueError) as error:
            first = {"failed": f"{error}. {_words(child)}"}
        if "failed" in first:
            child.close()
            self._children.remove(child)
            raise ValueError(f"config.env.agents: {self._what} cannot be loaded: {first['failed']}")
        process = _Process(child)
        threading.Thread(target=self._listen, args=(process,), name="agents", daemon=True).start()
        return process

    def _listen(self, process: _Process) -> None:
        """Tells what comes of a process's episodes, up to its end."""
        child = process.child
        try:
            while True:
                try:
                    message = child.hear(_LISTENING_S)
                except SilentError:
                    if child.has_ended:
                        raise EndedError(self._what, child.wait()) from None
                    continue
                with self._lock:
                    if "stopped" in message:  # it reacts; the end itself may take a while
                        process.warned.add(message["stopped"])
                        continue
                    name = message["episode"]
                    process.num_threads = message["left"]
                    process.warned.discard(name)
                    if process.playing.pop(name, None) is None:  # it was deaf
                        process.num_deaf -= 1
                        continue
                self._ended(name, message.get("reward"), message.get("error", ""))
        except Exception as error:
            with self._lock:
                if process in self._processes:
                    self._processes.remove(process)
                left, process.playing = list(process.playing), {}
            why = f"{self._what}: its process is gone ({error}). {_words(child)}".strip()
            child.close()
            with contextlib.suppress(ValueError):
                self._children.remove(child)
            for name in left:
                self._ended(name, None, why)


_START = (
    "import runpy, sys; path = sys.argv.pop(1); sys.argv[0] = path; "
    "runpy.run_path(path, run_name='__main__')"
)


def _words(child: Child) -> str:
    """The end of what a process has printed."""
    return child.reported.decode(errors="replace").strip()[-1000:]


def _close_all(children: list[_Child]) -> None:
    """Ends processes, which then end the programs that they have started."""
    for child in list(children):
        child.tell({"end": True})
    for child in list(children):
        with contextlib.suppress(SilentError):
            child.wait(_ENDING_S)
        child.close()

"""Processes in which agents run: started, replaced when they end or hang, ended with the run.

An agent that exceeds its deadline is stopped. A program is killed with all that it has started. A
function that is not async cannot be: its thread stays behind, and a process with many of those gets
no more episodes and is killed after the last of its others.
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
"""Seconds for a process to load its agent."""

REACTION_S = 15.0
"""Seconds for a process to report a stopped episode, after which it is killed."""

MAX_LEFT = 32
"""Threads of stopped episodes with which a process gets no more."""

_OUTPUT = 1 << 13  # bytes of output that are kept
_ENDING_S = 5.0
_POLL_S = 5.0  # between checks whether a silent process is alive

_START = (
    "import runpy, sys; path = sys.argv.pop(1); sys.argv[0] = path; "
    "runpy.run_path(path, run_name='__main__')"
)

OnEnd = Callable[[str, Any, str], None]
"""Called with the name of an episode, its reward, and why it has none."""


class _Child(Child):
    """A process of agents and its folder. Writing to it never blocks."""

    def __init__(self, command: Sequence[str], *, what: str, env: Mapping[str, str]):
        """Start the process.

        Raises:
            OSError: It cannot be started.
        """
        self.folder = tempfile.mkdtemp(prefix="jaxrl-agents-")
        try:
            env = {**env, FOLDER: self.folder}
            super().__init__(command, what=what, stderr=subprocess.PIPE, env=env)
        except OSError:
            os.rmdir(self.folder)
            raise
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(target=self._write, name="agents", daemon=True).start()

    @property
    def has_ended(self) -> bool:
        """Return True once the process has, though what it started may hold its pipes."""
        return self._process.poll() is not None

    @property
    def output(self) -> str:
        """Return the end of what the process has printed."""
        return self.reported.decode(errors="replace").strip()[-1000:]

    def send(self, message: Mapping[str, Any]) -> None:
        """Queue a line for the process."""
        self._lines.put(json.dumps(message).encode() + b"\n")

    def read(self, is_enough: Callable[[], bool], patience_s: float) -> bool:
        """Read, and keep only the end of what the process prints."""

        def trim_and_check() -> bool:
            del self.reported[:-_OUTPUT]
            return is_enough()

        return super().read(trim_and_check, patience_s)

    def close(self) -> None:
        """Kill the process with all that it has started."""
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
    episodes: dict[str, float] = field(default_factory=dict)  # name: time of its stop, or 0
    num_left: int = 0  # stopped episodes that still run


class AgentProcesses:
    """An agent and the processes that run it."""

    def __init__(
        self,
        *,
        function: str,
        command: Sequence[str],
        python: str,
        settings: Mapping[str, Any],
        count: int,
        on_end: OnEnd,
    ):
        """Prepare the command line; no process starts yet.

        Args:
            function: Name of the function; "" for a program.
            command: The program and its arguments; () for a function.
            python: Interpreter of the function; "" for this one.
            settings: Further arguments of the function.
            count: Processes that share the episodes of a function.
            on_end: Called from threads for each episode that has ended, also if it was stopped.
        """
        agent = {"function": function, "command": list(command), "settings": dict(settings)}
        # If it ran as a file, its folder would be the first in which modules are searched.
        runner = str(Path(__file__).with_name("runner.py"))
        self._command = [python or sys.executable, "-c", _START, runner, json.dumps(agent)]
        # Another interpreter has its own packages.
        dropped = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV") if python else ()
        self._environment = {k: v for k, v in os.environ.items() if k not in dropped}
        self._count, self._on_end = count, on_end
        self._what = f"the agent {function}" if function else f"the program {command[0]}"
        self._lock = threading.Lock()
        self._processes: list[_Process] = []
        self._children: list[_Child] = []  # of all processes that may be alive
        self._finalizer = weakref.finalize(self, _close_all, self._children)

    def open(self) -> None:
        """Start all processes, so that an agent that cannot be loaded fails at once.

        Raises:
            ValueError: The agent cannot be loaded.
        """
        with self._lock:
            if not self._processes:
                count = self._count  # side by side, since an agent may take long to load
                self._processes += side_by_side(
                    lambda _: self._start(), range(count), max_threads=count
                )

    def play(self, episode: Mapping[str, Any]) -> None:
        """Start an episode: its name as `episode`, and what the agent receives.

        Raises:
            ValueError: No process can be started.
        """
        with self._lock:
            usable = [process for process in self._processes if process.num_left < MAX_LEFT]
            if len(usable) < self._count:
                usable.append(self._start())
                self._processes.append(usable[-1])
            process = min(usable, key=lambda process: len(process.episodes))
            process.episodes[episode["episode"]] = 0.0
        process.child.send(episode)

    def stop(self, name: str) -> None:
        """Stop an episode; `on_end` is called for it soon unless it was before."""
        with self._lock:
            for process in self._processes:
                if process.episodes.get(name) == 0.0:
                    process.episodes[name] = time.monotonic()
                    process.child.send({"stop": name})

    def check(self) -> None:
        """Kill processes that do not react, and those that have nothing left to do."""
        now = time.monotonic()
        with self._lock:
            for process in self._processes:
                is_full = process.num_left >= MAX_LEFT and not process.episodes
                since = [time for time in process.episodes.values() if time]
                if is_full or any(now - time > REACTION_S for time in since):
                    process.child.kill()

    def close(self) -> None:
        """End all processes; the end of this process does so too."""
        self._finalizer()

    def _start(self) -> _Process:
        """Start a process, which the caller adds to the others."""
        try:
            child = _Child(self._command, what=self._what, env=self._environment)
        except OSError as error:
            raise ValueError(
                f"config.env.agents: {self._what} cannot be started: {error}."
            ) from error
        self._children.append(child)
        try:
            first = child.hear(START_S)
        except (EndedError, SilentError, ValueError) as error:
            first = {"failed": f"{error}. {child.output}"}
        if "failed" in first:
            child.close()
            self._children.remove(child)
            raise ValueError(f"config.env.agents: {self._what} cannot be loaded: {first['failed']}")
        process = _Process(child)
        threading.Thread(target=self._listen, args=(process,), name="agents", daemon=True).start()
        return process

    def _listen(self, process: _Process) -> None:
        """Report the ends of a process's episodes, up to its own end."""
        child = process.child
        try:
            while True:
                try:
                    message = child.hear(_POLL_S)
                except SilentError:
                    if child.has_ended:
                        raise EndedError(self._what, child.wait()) from None
                    continue
                name = message["episode"]
                with self._lock:
                    process.num_left = message["num_left"]
                    process.episodes.pop(name, None)
                self._on_end(name, message.get("reward"), message.get("error", ""))
        except Exception as error:
            with self._lock:
                if process in self._processes:
                    self._processes.remove(process)
                names, process.episodes = list(process.episodes), {}
            why = f"{self._what}: its process is gone ({error}). {child.output}".strip()
            child.close()
            with contextlib.suppress(ValueError):
                self._children.remove(child)
            for name in names:
                self._on_end(name, None, why)


def _close_all(children: list[_Child]) -> None:
    """End processes, which then end the programs that they have started."""
    for child in list(children):
        child.send({"end": True})
    for child in list(children):
        with contextlib.suppress(SilentError):
            child.wait(_ENDING_S)
        child.close()

"""Pool of agent processes, in which processes that exit or hang are replaced.

Agents that exceed their deadline are stopped. A program is killed with all processes that it
started. A synchronous function cannot be killed, so its thread continues.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxrl.extras.serve.agents.runner import FOLDER_VARIABLE, kill_by_marker
from jaxrl.utils.child_process import ChildExitedError, ChildProcess, ChildTimeoutError
from jaxrl.utils.concurrency import parallel_map

LOAD_TIMEOUT_S = 120.0
"""Time limit for loading the agent, in seconds."""

STOP_TIMEOUT_S = 15.0
"""Seconds after which a process that has not reported a stopped episode is killed."""

_MAX_OUTPUT_BYTES = 1 << 13  # bytes of output to keep
_EXIT_TIMEOUT_S = 5.0
_POLL_S = 5.0  # seconds between checks that a silent process is alive

_LAUNCHER_CODE = (
    "import runpy, sys; path = sys.argv.pop(1); sys.argv[0] = path; "
    "runpy.run_path(path, run_name='__main__')"
)

BUILTIN_AGENTS = {"verifiers": "verifiers.py:play"}
"""File in this folder and function of each built-in agent in `env.agents.function`."""

EndCallback = Callable[[str, Any, str], None]
"""Callback with an episode's name, its reward, and the reason for a missing reward."""


@dataclass(frozen=True, kw_only=True)
class AgentSettings:
    """Settings in the config section `env.agents`."""

    function: str = ""
    command: tuple[str, ...] = ()
    python: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    processes: int = 1
    max_concurrent: int = 0
    deadline_s: float = 600.0
    host: str = "127.0.0.1"
    port: int = 0

    @property
    def function_path(self) -> str:
        """File or dotted path of the agent function, for `runner.load_function`."""
        file = BUILTIN_AGENTS.get(self.function)
        return str(Path(__file__).with_name(file)) if file else self.function


class AgentProcess(ChildProcess):
    """Process that runs agents. Sending a message never blocks.

    Attributes:
        folder: Temporary folder. Its name marks all processes that the agents start.
        episodes: Monotonic time at which each episode was stopped, by name; 0 for a running
            episode.
        is_ready: True if the agent is loaded and the process accepts episodes.
    """

    def __init__(self, command: Sequence[str], *, description: str, env: Mapping[str, str]):
        """Start the process.

        Args:
            command: Program and arguments.
            description: Name of the process in error messages.
            env: Environment variables of the process.

        Raises:
            OSError: The process cannot be started.
        """
        self.folder = tempfile.mkdtemp(prefix="jaxrl-agents-")
        self.episodes: dict[str, float] = {}
        self.is_ready = False
        env = {**env, FOLDER_VARIABLE: self.folder}
        super().__init__(command, description=description, stderr=subprocess.PIPE, env=env)
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(target=self._write_queued_messages, name="agents", daemon=True).start()

    @property
    def output(self) -> str:
        """Last 1000 characters of the process's output."""
        return self.stderr_buffer.decode(errors="replace").strip()[-1000:]

    def send(self, message: Mapping[str, Any]) -> None:
        """Queue a message for the process."""
        self._lines.put(json.dumps(message).encode() + b"\n")

    def readline(self, timeout_s: float = math.inf) -> dict[str, Any]:
        """Return the next message. An exit is detected even if other processes hold the pipes."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return super().readline(min(timeout_s, _POLL_S))
            except ChildTimeoutError:
                if self._process.poll() is not None:
                    raise ChildExitedError(self._description, self.wait()) from None
                if time.monotonic() > deadline:
                    raise

    def read_until(self, is_enough: Callable[[], bool], timeout_s: float) -> bool:
        """Read until `is_enough` returns True; discard all but the end of stderr."""

        def trim_and_check() -> bool:
            del self.stderr_buffer[:-_MAX_OUTPUT_BYTES]
            return is_enough()

        return super().read_until(trim_and_check, timeout_s)

    def close(self) -> None:
        """Kill the process and its descendants; delete its folder."""
        self.kill()
        kill_by_marker(self.folder)
        self._lines.put(b"")
        super().close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _write_queued_messages(self) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        with contextlib.suppress(OSError, ValueError):  # the process has ended
            while line := self._lines.get():
                stdin.write(line)
                stdin.flush()


class AgentProcesses:
    """Pool of processes that run an agent."""

    def __init__(self, settings: AgentSettings, on_end: EndCallback):
        """Prepare the command line without starting a process.

        Args:
            settings: Agent function or program, interpreter and number of processes.
            on_end: Callback for each episode that ended or was stopped, called on other threads.
        """
        function, command, python = settings.function_path, settings.command, settings.python
        agent = {"function": function, "command": command, "settings": dict(settings.settings)}
        # A script would have its folder first in `sys.path`.
        runner = str(Path(__file__).with_name("runner.py"))
        self._command = [python or sys.executable, "-c", _LAUNCHER_CODE, runner, json.dumps(agent)]
        # Another interpreter has its own packages.
        dropped = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV") if python else ()
        self._environment = {k: v for k, v in os.environ.items() if k not in dropped}
        self._num_processes, self._on_end = settings.processes, on_end
        self._description = f"the agent {function}" if function else f"the program {command[0]}"
        self._lock = threading.Lock()
        self._processes: list[AgentProcess] = []

    def open(self) -> None:
        """Start all processes, so that a broken agent fails immediately.

        Raises:
            OSError, ValueError: The agent cannot be loaded.
        """
        with self._lock:
            if not self._processes:  # in parallel, because agents may load slowly
                parallel_map(
                    lambda _: self._start_process(),
                    range(self._num_processes),
                    max_threads=self._num_processes,
                )

    def start_episode(self, episode: Mapping[str, Any]) -> None:
        """Start an episode from its name (key `episode`) and the agent's input.

        Raises:
            OSError, ValueError: A process that replaces one that exited cannot be started.
        """
        with self._lock:
            usable = [process for process in self._processes if process.is_ready]
            if len(usable) < self._num_processes:
                usable.append(self._start_process())
            process = min(usable, key=lambda process: len(process.episodes))
            process.episodes[episode["episode"]] = 0.0
        process.send(episode)

    def stop(self, name: str) -> None:
        """Stop an episode; `on_end` is called when the episode has ended."""
        with self._lock:
            for process in self._processes:
                if process.episodes.get(name) == 0.0:
                    process.episodes[name] = time.monotonic()
                    process.send({"stop": name})

    def kill_unresponsive(self) -> None:
        """Kill processes that have not reported a stopped episode."""
        now = time.monotonic()
        with self._lock:
            for process in self._processes:
                stop_times = [time for time in process.episodes.values() if time]
                if any(now - time > STOP_TIMEOUT_S for time in stop_times):
                    process.kill()

    def close(self) -> None:
        """Stop all processes, which then kill the programs that they started."""
        processes = list(self._processes)
        self._processes.clear()
        for process in processes:
            process.send({"end": True})
        for process in processes:
            with contextlib.suppress(ChildTimeoutError):
                process.wait(_EXIT_TIMEOUT_S)
            process.close()

    def _start_process(self) -> AgentProcess:
        """Start a process.

        Raises:
            OSError: The interpreter cannot be started.
            ValueError: The process cannot load the agent.
        """
        process = AgentProcess(self._command, description=self._description, env=self._environment)
        self._processes.append(process)
        try:
            first_message = process.readline(LOAD_TIMEOUT_S)
        except (ChildExitedError, ChildTimeoutError, ValueError) as error:
            first_message = {"failed": f"{error}. {process.output}"}
        if "failed" in first_message:
            process.close()
            self._processes.remove(process)
            raise ValueError(
                f"config.env.agents: {self._description} cannot be loaded: "
                f"{first_message['failed']}"
            )
        process.is_ready = True
        threading.Thread(
            target=self._report_ended_episodes, args=(process,), name="agents", daemon=True
        ).start()
        return process

    def _report_ended_episodes(self, process: AgentProcess) -> None:
        """Call `on_end` for each episode that a process reports, until the process exits."""
        try:
            while True:
                message = process.readline()
                name = message["episode"]
                with self._lock:
                    process.episodes.pop(name, None)
                self._on_end(name, message.get("reward"), message.get("error", ""))
        except Exception as error:
            reason = f"{self._description}: its process is gone ({error}). {process.output}".strip()
            with self._lock:
                process.is_ready = False
                names = list(process.episodes)
            process.close()
            with self._lock, contextlib.suppress(ValueError):
                self._processes.remove(process)
            for name in names:
                self._on_end(name, None, reason)

"""Child processes that exchange JSON lines.

A child has its own session, so Ctrl-C and signals to the run's process group do not reach it.
Killing a child also kills the processes in its group.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_MAX_SELECT_S = 3600.0  # the system call accepts at most 24 days
_EXIT_TIMEOUT_S = 5.0  # time for a process to end by itself, or after it is killed


class ChildExitedError(ChildProcessError):
    """Error raised when a child has ended. `status` is negative if a signal killed the child."""

    def __init__(self, description: str, status: int) -> None:
        super().__init__(f"{description} ended with {status}")
        self.status = status


class ChildTimeoutError(TimeoutError):
    """Error raised when a child does not respond or end in time."""


class ChildProcess(contextlib.AbstractContextManager):
    """Child process with pipes. As a context manager, it kills the child on exit."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        description: str,
        max_unread_bytes: float = math.inf,
        stderr: int | None = subprocess.DEVNULL,
        **options: Any,
    ) -> None:
        """Start the process.

        Args:
            command: Program and arguments.
            description: Name of the child in error messages.
            max_unread_bytes: Maximum size of unread output per stream in bytes; the rest is
                dropped.
            stderr: Argument of `subprocess.Popen`. With a pipe, `stderr_buffer` has the output.
            options: Other arguments of `subprocess.Popen`. By default, `stdin` is a pipe.

        Raises:
            OSError: The process cannot be started.
        """
        self._description, self._max_unread_bytes = description, max_unread_bytes
        self._process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=stderr,
            start_new_session=True,
            **{"stdin": subprocess.PIPE, **options},
        )
        self.pid = self._process.pid
        self.stdout_buffer, self.stderr_buffer = bytearray(), bytearray()  # unread output
        pipes = (
            (self._process.stdout, self.stdout_buffer),
            (self._process.stderr, self.stderr_buffer),
        )
        self._open = {pipe.fileno(): buffer for pipe, buffer in pipes if pipe is not None}
        self._write_lock = threading.Lock()

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message to the child as a JSON line. Thread-safe.

        Raises:
            ChildExitedError: The child no longer reads.
        """
        stdin = self._process.stdin
        assert stdin is not None
        try:
            with self._write_lock:
                stdin.write(json.dumps(message).encode() + b"\n")
                stdin.flush()
        except OSError:
            raise ChildExitedError(self._description, self._wait_or_kill()) from None

    def readline(self, timeout_s: float = math.inf) -> dict[str, Any]:
        """Read the next JSON line from the child.

        Raises:
            ChildExitedError: The child has closed its output.
            ChildTimeoutError: No line arrived within `timeout_s` seconds.
        """
        if not self.read_until(lambda: b"\n" in self.stdout_buffer, timeout_s):
            raise ChildExitedError(self._description, self._wait_or_kill())
        line = self.stdout_buffer[: self.stdout_buffer.index(b"\n") + 1]
        del self.stdout_buffer[: len(line)]
        return dict(json.loads(line))

    def read_until(self, is_enough: Callable[[], bool], timeout_s: float) -> bool:
        """Read stdout and stderr until `is_enough()`; return False if the child closes them first.

        Raises:
            ChildTimeoutError: Neither happened within `timeout_s` seconds.
        """
        deadline = time.monotonic() + timeout_s
        with selectors.PollSelector() as selector:
            for pipe in self._open:
                selector.register(pipe, selectors.EVENT_READ)
            is_late = False
            while not is_enough():
                if not self._open:
                    return False
                if is_late:
                    raise ChildTimeoutError(f"{self._description} was silent for {timeout_s:g} s")
                remaining_s = deadline - time.monotonic()
                is_late = remaining_s <= 0  # read data that has already arrived
                for key, _ in selector.select(min(max(remaining_s, 0), _MAX_SELECT_S)):
                    data = os.read(key.fd, 65536)
                    if not data:
                        selector.unregister(key.fd)
                        del self._open[key.fd]
                    elif len(self._open[key.fd]) <= self._max_unread_bytes:
                        self._open[key.fd] += data
        return True

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait for the child to end; return its status, which is negative if a signal killed it.

        Raises:
            ChildTimeoutError: The child is still running after `timeout_s` seconds.
        """
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise ChildTimeoutError(f"{self._description} did not end in {timeout_s:g} s") from None

    def _wait_or_kill(self) -> int:
        """Wait briefly for the child to exit after it closed its pipes, then kill it.

        Returns its status.
        """
        with contextlib.suppress(ChildTimeoutError):
            return self.wait(_EXIT_TIMEOUT_S)
        self.kill()
        return self.wait(_EXIT_TIMEOUT_S)

    def kill(self) -> None:
        """Kill the child's process group, unless the child was reaped: its PID may be reused."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill the child and close its pipes."""
        self.kill()
        with contextlib.suppress(ChildTimeoutError):
            self.wait(_EXIT_TIMEOUT_S)
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):  # unflushed data can no longer be written
                    pipe.close()

    def __exit__(self, *_: object) -> None:
        self.close()

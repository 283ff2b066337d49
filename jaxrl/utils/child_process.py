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
_ENDING_S = 5.0  # time for a killed process to end


class EndedError(ChildProcessError):
    """A child has ended and closed its output. `status` is negative for a signal."""

    def __init__(self, what: str, status: int) -> None:
        super().__init__(f"{what} ended with {status}")
        self.status = status


class SilentError(TimeoutError):
    """A child did not respond or end in time."""


class Child(contextlib.AbstractContextManager):
    """A process with pipes. As a context manager, it is killed at the end."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        what: str,
        most: float = math.inf,
        stderr: int | None = subprocess.DEVNULL,
        **options: Any,
    ) -> None:
        """Start the process.

        Args:
            command: Program and arguments.
            what: Name of the child in messages.
            most: Maximum size of unread output per stream in bytes; the rest is dropped.
            stderr: Argument of `subprocess.Popen`. The text of a pipe is in `reported`.
            options: Further arguments of `subprocess.Popen`. The default `stdin` is a pipe.

        Raises:
            OSError: The process cannot be started.
        """
        self._what, self._most = what, most
        self._process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=stderr,
            start_new_session=True,
            **{"stdin": subprocess.PIPE, **options},
        )
        self.pid = self._process.pid
        self.printed, self.reported = bytearray(), bytearray()  # unread stdout and stderr
        pipes = (self._process.stdout, self.printed), (self._process.stderr, self.reported)
        self._open = {pipe.fileno(): buffer for pipe, buffer in pipes if pipe is not None}
        self._write_lock = threading.Lock()

    def send(self, message: Mapping[str, Any]) -> None:
        """Write a JSON line to the child. Thread-safe.

        Raises:
            EndedError: The child no longer reads.
        """
        stdin = self._process.stdin
        assert stdin is not None
        try:
            with self._write_lock:
                stdin.write(json.dumps(message).encode() + b"\n")
                stdin.flush()
        except OSError:
            raise EndedError(self._what, self._end()) from None

    def readline(self, patience_s: float = math.inf) -> dict[str, Any]:
        """Read the next JSON line of the child.

        Raises:
            EndedError: The child has closed its output.
            SilentError: No line arrived for `patience_s` seconds.
        """
        if not self.read(lambda: b"\n" in self.printed, patience_s):
            raise EndedError(self._what, self._end())
        line = self.printed[: self.printed.index(b"\n") + 1]
        del self.printed[: len(line)]
        return dict(json.loads(line))

    def read(self, is_enough: Callable[[], bool], patience_s: float) -> bool:
        """Read stdout and stderr until `is_enough()`; return False if the child closes them first.

        Raises:
            SilentError: Neither happened within `patience_s` seconds.
        """
        deadline = time.monotonic() + patience_s
        with selectors.PollSelector() as selector:
            for pipe in self._open:
                selector.register(pipe, selectors.EVENT_READ)
            is_late = False
            while not is_enough():
                if not self._open:
                    return False
                if is_late:
                    raise SilentError(f"{self._what} was silent for {patience_s:g} s")
                left_s = deadline - time.monotonic()
                is_late = left_s <= 0  # data that has arrived is still read
                for key, _ in selector.select(min(max(left_s, 0), _MAX_SELECT_S)):
                    data = os.read(key.fd, 65536)
                    if not data:
                        selector.unregister(key.fd)
                        del self._open[key.fd]
                    elif len(self._open[key.fd]) <= self._most:
                        self._open[key.fd] += data
        return True

    def wait(self, patience_s: float | None = None) -> int:
        """Wait for the child to end; return its status, which is negative for a signal.

        Raises:
            SilentError: The child has not ended after `patience_s` seconds.
        """
        try:
            return self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            raise SilentError(f"{self._what} did not end in {patience_s:g} s") from None

    def _end(self) -> int:
        """End a child that has closed its pipes; return its status."""
        with contextlib.suppress(SilentError):
            return self.wait(_ENDING_S)
        self.kill()
        return self.wait(_ENDING_S)

    def kill(self) -> None:
        """Kill the process group, unless the child was reaped: its PID may be reused."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill the child and close its pipes."""
        self.kill()
        with contextlib.suppress(SilentError):
            self.wait(_ENDING_S)
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):  # unflushed data cannot be written any more
                    pipe.close()

    def __exit__(self, *_: object) -> None:
        self.close()

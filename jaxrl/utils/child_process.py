"""Starts another process, talks with it, and ends it: what is common to all that have a child.

A child has a session of its own, so that neither Ctrl-C nor a signal to the run's process group
reaches it, and so that what it starts ends with it. Lines are JSON objects. Whoever wants another
one in place of a child that ended starts it.
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

_LOOK_S = 3600.0  # the system's call takes no more than 24 days
_ENDING_S = 5.0  # in which a process that was killed is gone


class EndedError(ChildProcessError):
    """A child has ended with a `status`, which is negative for a signal, and prints no more."""

    def __init__(self, what: str, status: int) -> None:
        super().__init__(f"{what} ended with {status}")
        self.status = status


class SilentError(TimeoutError):
    """A child did not do in time what was waited for."""


class Child(contextlib.AbstractContextManager):
    """A process with pipes; as a context, one that is gone at its end."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        what: str,
        most: float = math.inf,
        stderr: int | None = subprocess.DEVNULL,
        **opening: Any,
    ) -> None:
        """Starts the process.

        Args:
            command: its words.
            what: names it in messages.
            most: bytes of what it prints, and of what it reports, beyond which no more is kept.
            stderr: as of `subprocess.Popen`; a pipe fills `reported`.
            opening: further arguments of `subprocess.Popen`; without `stdin` that is a pipe.

        Raises:
            OSError: it cannot be started.
        """
        self._what, self._most = what, most
        self._process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=stderr,
            start_new_session=True,
            **{"stdin": subprocess.PIPE, **opening},
        )
        self.pid = self._process.pid
        self.printed, self.reported = bytearray(), bytearray()  # and not taken yet
        pipes = (self._process.stdout, self.printed), (self._process.stderr, self.reported)
        self._open = {pipe.fileno(): taken for pipe, taken in pipes if pipe is not None}
        self._writing = threading.Lock()

    def tell(self, message: Mapping[str, Any]) -> None:
        """Writes a line to it; several threads may.

        Raises:
            EndedError: it reads no more.
        """
        stdin = self._process.stdin
        assert stdin is not None
        try:
            with self._writing:
                stdin.write(json.dumps(message).encode() + b"\n")
                stdin.flush()
        except OSError:
            raise EndedError(self._what, self._end()) from None

    def hear(self, patience_s: float = math.inf) -> dict[str, Any]:
        """Reads the next line that it prints.

        Raises:
            EndedError: there is none any more.
            SilentError: there is none for `patience_s` seconds.
        """
        if not self.read(lambda: b"\n" in self.printed, patience_s):
            raise EndedError(self._what, self._end())
        line = self.printed[: self.printed.index(b"\n") + 1]
        del self.printed[: len(line)]
        return dict(json.loads(line))

    def read(self, is_enough: Callable[[], bool], patience_s: float) -> bool:
        """Reads until `is_enough()`; False where the child has closed its outputs before.

        Raises:
            SilentError: neither is so after `patience_s` seconds.
        """
        ends = time.monotonic() + patience_s
        with selectors.PollSelector() as selector:
            for pipe in self._open:
                selector.register(pipe, selectors.EVENT_READ)
            is_over = False
            while not is_enough():
                if not self._open:
                    return False
                if is_over:
                    raise SilentError(f"{self._what} was silent for {patience_s:g} s")
                left_s = ends - time.monotonic()
                is_over = left_s <= 0  # but what is there already is taken
                ready = selector.select(min(max(left_s, 0), _LOOK_S))
                for key, _ in ready:
                    data = os.read(key.fd, 65536)
                    if not data:
                        selector.unregister(key.fd)
                        del self._open[key.fd]
                    elif len(self._open[key.fd]) <= self._most:
                        self._open[key.fd] += data
        return True

    def wait(self, patience_s: float | None = None) -> int:
        """Waits until it has ended; gives its status, negative for a signal.

        Raises:
            SilentError: it has not ended after `patience_s` seconds.
        """
        try:
            return self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            raise SilentError(f"{self._what} did not end in {patience_s:g} s") from None

    def _end(self) -> int:
        """Ends a child that has closed its pipes; gives its status.

        Raises:
            SilentError: it was killed, and has not ended.
        """
        with contextlib.suppress(SilentError):  # it may be at its end, or go on without them
            return self.wait(_ENDING_S)
        self.kill()
        return self.wait(_ENDING_S)

    def kill(self) -> None:
        """Kills its process group, but not after `wait`: the number may be another's then."""
        if self._process.returncode is None:
            signal_group(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kills it, and waits until it is gone; what does not die is left to itself."""
        self.kill()
        with contextlib.suppress(SilentError):
            self.wait(_ENDING_S)
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):  # what was written is not wanted any more
                    pipe.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def signal_group(leader: int, number: int) -> None:
    """Sends a signal to a process group, if it is still there and ours."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)

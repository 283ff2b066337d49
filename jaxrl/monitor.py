"""Watches one process of a job from outside it, since a stopped process cannot tell that it is.

Every process of a job starts one monitor, in a session of its own, and writes it a line a second.
The monitors are joined in a star around the first one. The first loss that reaches it, a process
that was killed, stopped, failed or cut off, is told to all: each monitor names the lost process on
its process's standard error and ends its own process, which would otherwise wait in a collective
operation for one that never comes. Neither JAX nor anything else of jaxrl is imported here.

Lines are JSON objects: `alive`, `finished` and `failed` (why) from the process; `lost` (why) with
the `index` of the process to it; all of these between monitors, after `hello` (the job's token).
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import sys
import time
from dataclasses import dataclass, field
from typing import Any

BEAT_S = 1.0
"""Seconds between two signs of life."""

GRACE_S = 5.0
"""Seconds a process has to end by itself once it was told that another is lost."""

FAILURE_WAIT_S = 2.0
"""Seconds in which a process that was killed is named rather than one that failed over it."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a monitor is told at its start.

    Attributes:
        index: of its process in the job.
        pid: of its process.
        names: of all processes of the job, for messages.
        hub: host and port of the first monitor.
        hub_fd: the first monitor's listening socket; -1 for the others.
        token: proves that a caller belongs to the job.
        deadline_s: seconds without a sign of life after which a process counts as lost.
    """

    index: int
    pid: int
    names: list[str]
    hub: tuple[str, int]
    hub_fd: int
    token: str
    deadline_s: float


@dataclass(kw_only=True)
class _Link:
    """Another end that writes lines: the own process, the hub, or a monitor at the hub."""

    index: int  # of the process it speaks for
    read_fd: int
    connection: socket.socket | None = None
    is_known: bool = True  # False until it has shown the token
    is_finished: bool = False
    heard: float = field(default_factory=time.monotonic)
    rest: bytes = b""

    def read(self) -> list[dict[str, Any]] | None:
        """The lines that have come; None when the other end is gone."""
        try:
            data = os.read(self.read_fd, 65536)
        except OSError:
            return None
        if not data:
            return None
        self.heard = time.monotonic()
        *lines, self.rest = (self.rest + data).split(b"\n")
        with contextlib.suppress(ValueError):
            return [dict(json.loads(line)) for line in lines]
        return [] if self.is_known else None

    def write(self, **line: Any) -> None:
        if self.connection is not None:
            with contextlib.suppress(OSError):
                self.connection.sendall(json.dumps(line).encode() + b"\n")


class Monitor:
    """One monitor: `run` returns once its process has finished or was ended."""

    def __init__(self, settings: Settings):
        """Takes its links: the process on standard input, and the hub."""
        self._settings = settings
        self._selector = selectors.DefaultSelector()
        self._own = _Link(index=settings.index, read_fd=0)
        self._links: list[_Link] = []
        self._add(self._own)
        self._listener: socket.socket | None = None
        if settings.hub_fd >= 0:
            self._listener = socket.socket(fileno=settings.hub_fd)
            self._selector.register(self._listener, selectors.EVENT_READ)
            self._missing = set(range(1, len(settings.names)))
        else:
            connection = socket.create_connection(settings.hub, timeout=settings.deadline_s)
            link = _Link(index=0, read_fd=connection.fileno(), connection=connection)
            link.write(hello=settings.token, index=settings.index)
            self._add(link)
            self._missing = set()
        self._started = self._beat = time.monotonic()
        self._failed: tuple[float, int, str] | None = None  # when, which and why, the first

    def _add(self, link: _Link) -> None:
        self._links.append(link)
        self._selector.register(link.read_fd, selectors.EVENT_READ, link)

    def _drop(self, link: _Link) -> None:
        self._links.remove(link)
        self._selector.unregister(link.read_fd)

    def run(self) -> None:
        """Watches until the process has finished, or any process is lost."""
        while not self._own.is_finished:
            loss = None
            for key, _ in self._selector.select(timeout=BEAT_S / 2):
                if key.data is None:
                    self._accept()
                else:
                    loss = loss or self._hear(key.data)
            loss = loss or self._overdue() or self._failure()
            if loss is not None:
                return self._end(*loss)
            if time.monotonic() - self._beat >= BEAT_S:
                self._beat = time.monotonic()
                self._tell(alive=True)
        self._tell(finished=True)

    def _accept(self) -> None:
        assert self._listener is not None
        connection, _ = self._listener.accept()
        self._add(
            _Link(index=-1, read_fd=connection.fileno(), connection=connection, is_known=False)
        )

    def _hear(self, link: _Link) -> tuple[int, str] | None:
        """Reads a link; the loss it tells of, if any."""
        lines = link.read()
        if lines is None:
            self._drop(link)
            if link.is_finished or not link.is_known:
                return None
            how = "it ended" if link is self._own else "its monitor ended"
            return link.index, f"{how} without a word, as one that is killed does"
        for line in lines:
            if not link.is_known:
                if line.get("hello") != self._settings.token:
                    self._drop(link)
                    return None
                link.index, link.is_known = int(line["index"]), True
                self._missing.discard(link.index)
            if "lost" in line:
                return int(line["index"]), str(line["lost"])
            if "failed" in line and self._failed is None:
                self._failed = (time.monotonic(), link.index, f"it failed: {line['failed']}")
            if "finished" in line:
                link.is_finished = True
        return None

    def _overdue(self) -> tuple[int, str] | None:
        """A process that has been silent for too long."""
        deadline_s = self._settings.deadline_s
        now = time.monotonic()
        for link in self._links:
            if link.is_known and not link.is_finished and now - link.heard > deadline_s:
                return link.index, f"it gave no sign of life for {deadline_s:g} s"
        if self._missing and now - self._started > deadline_s:
            return min(self._missing), f"its monitor did not come within {deadline_s:g} s"
        return None

    def _failure(self) -> tuple[int, str] | None:
        """A process that failed, once no other is known to have been lost before."""
        if self._failed is None or time.monotonic() - self._failed[0] < FAILURE_WAIT_S:
            return None
        return self._failed[1:]

    def _tell(self, **line: Any) -> None:
        for link in self._links:
            if link.is_known:
                link.write(**line)

    def _end(self, index: int, why: str) -> None:
        """Names the lost process everywhere and ends the own one."""
        settings = self._settings
        self._tell(lost=why, index=index)
        if settings.hub_fd < 0 and index == settings.index:
            # The first loss counts: that of another process may have caused this one.
            index, why = self._verdict() or (index, why)
        name = settings.names[index]
        text = f"process {index} of {len(settings.names)} ({name}) was lost: {why}."
        advice = "Start the job again: it goes on from the newest checkpoint."
        print(f"error: {text} {advice}", file=sys.stderr, flush=True)
        if self._own in self._links:
            self._end_own(index, why)

    def _verdict(self) -> tuple[int, str] | None:
        """What the hub answers to a report, if it does."""
        hub = next((link for link in self._links if link is not self._own), None)
        until = time.monotonic() + GRACE_S
        while hub is not None and time.monotonic() < until:
            for key, _ in self._selector.select(timeout=BEAT_S / 2):
                lines = key.data.read()
                if lines is None:
                    self._drop(key.data)
                    hub = None if key.data is hub else hub
                for line in lines or []:
                    if "lost" in line:
                        return int(line["index"]), str(line["lost"])
        return None

    def _end_own(self, index: int, why: str) -> None:
        """Asks the own process to end; kills it if it does not, or cannot since it was stopped."""
        is_silent = time.monotonic() - self._own.heard > self._settings.deadline_s
        until = time.monotonic() + (0 if is_silent else GRACE_S)
        with contextlib.suppress(OSError):
            os.write(1, json.dumps({"lost": why, "index": index}).encode() + b"\n")
        for link in [link for link in self._links if link is not self._own]:
            self._drop(link)
        while time.monotonic() < until:
            for _ in self._selector.select(timeout=BEAT_S / 2):
                if self._own.read() is None:
                    return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._settings.pid, signal.SIGKILL)


if __name__ == "__main__":
    values = json.loads(sys.argv[1])
    values["hub"] = tuple(values["hub"])
    Monitor(Settings(**values)).run()

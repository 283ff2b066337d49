"""Watches one process of a job from outside it, since a stopped process cannot tell that it is.

Every process of a job starts one monitor, in a session of its own, and writes it a line a second.
The monitors are joined in a star around the first one. The first loss that reaches it, a process
that was killed, stopped, failed or cut off, is told to all: each monitor names the lost process on
its process's standard error and ends its own process, which would otherwise wait in a collective
operation for one that never comes. Neither JAX nor anything else of jaxrl is imported here.

Lines are JSON objects. The first one on standard input holds the settings. Then come, from the
process, `alive`, `finished`, `failed` (why) and `stop`, when it was asked to stop; to the process
`stop` and `lost` (why, the `index` of the process, and whether it `failed` by itself); between
monitors `alive`, `finished`, `stop` and `lost`.

The first line that a monitor writes to the first one is the job's token and its index instead;
nothing that a caller sends is read as JSON before that. Once all have come, nobody else is let in.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import selectors
import signal
import socket
import sys
import time
from dataclasses import asdict, dataclass, field
from typing import Any

BEAT_S = 1.0
"""Seconds between two signs of life."""

GRACE_S = 5.0
"""Seconds a process has to end by itself once it was told that another is lost."""

FAILURE_WAIT_S = 2.0
"""Seconds in which a process that was killed is named rather than one that failed over it."""

MAX_STRANGERS = 64
"""Callers without the token at a time, beside those that are to come; the oldest make room."""

_LONGEST_LINE = 1 << 20  # bytes
_LONGEST_HELLO = 128  # bytes of a token and an index; only a stranger sends more


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings that a monitor is given at its start.

    Attributes:
        index: of its process in the job.
        pid: of its process.
        names: of all processes of the job, for messages.
        hub: host and port of the first monitor.
        hub_fd: the first monitor's listening socket; -1 for the others.
        token: proves that a caller belongs to the job.
        deadline_s: seconds without a sign of life after which a process counts as lost.
        hello_s: seconds in which a caller has to show the token.
    """

    index: int
    pid: int
    names: list[str]
    hub: tuple[str, int]
    hub_fd: int
    token: str
    deadline_s: float
    hello_s: float = 5.0


@dataclass(frozen=True, kw_only=True)
class Loss:
    """A process that does not take part any more.

    Attributes:
        index: of the process.
        lost: why it is thought lost.
        failed: it told an error of its own; others could not have prevented it.
    """

    index: int
    lost: str
    failed: bool = False

    @classmethod
    def from_line(cls, line: dict[str, Any]) -> Loss:
        """The inverse of `asdict`."""
        return cls(
            index=int(line["index"]), lost=str(line["lost"]), failed=bool(line.get("failed"))
        )


@dataclass(kw_only=True)
class _Link:
    """Another end that writes lines: the own process, the hub, or a monitor at the hub."""

    index: int | None  # of the process it speaks for; None until it has shown the token
    read_fd: int
    connection: socket.socket | None = None
    is_finished: bool = False
    began: float = field(default_factory=time.monotonic)
    heard: float = field(default_factory=time.monotonic)
    rest: bytes = b""

    def receive(self) -> bool:
        """Takes what has come to `rest`; False when the other end is gone."""
        try:
            data = os.read(self.read_fd, 65536)
        except OSError:
            return False
        self.heard = time.monotonic()
        self.rest += data
        return bool(data)

    def lines(self) -> list[dict[str, Any]] | None:
        """The whole lines of `rest`; None where they are nonsense."""
        *lines, self.rest = self.rest.split(b"\n")
        try:
            read = [json.loads(line) for line in lines]
        except (ValueError, RecursionError):
            return None
        is_sense = all(isinstance(line, dict) for line in read) and len(self.rest) <= _LONGEST_LINE
        return read if is_sense else None

    def read(self) -> list[dict[str, Any]] | None:
        """The lines that have come; None when the other end is gone, or talks nonsense."""
        return self.lines() if self.receive() else None

    def write(self, **line: Any) -> None:
        if self.connection is not None:
            with contextlib.suppress(OSError):
                self.connection.sendall(json.dumps(line).encode() + b"\n")


class Monitor:
    """One monitor: `run` returns once its process has finished or was ended."""

    def __init__(self, settings: Settings):
        """Takes its links: the process on standard input and output, and the hub."""
        self._settings = settings
        self._selector = selectors.DefaultSelector()
        self._own = _Link(index=settings.index, read_fd=0)
        self._links: list[_Link] = []
        self._add(self._own)
        self._listener: socket.socket | None = None
        self._missing: set[int] = set()  # monitors that have not come yet
        self._loss: Loss | None = None
        if settings.hub_fd >= 0:
            self._listener = socket.socket(fileno=settings.hub_fd)
            self._listener.setblocking(False)  # a caller may be gone again
            self._selector.register(self._listener, selectors.EVENT_READ)
            self._missing = set(range(1, len(settings.names)))
        else:
            self._join_hub()
        self._started = self._beat = time.monotonic()
        self._failed: tuple[float, Loss] | None = None  # the first that told so, and when
        self._is_stopping = False

    def _join_hub(self) -> None:
        settings = self._settings
        try:
            connection = socket.create_connection(settings.hub, timeout=settings.deadline_s)
        except OSError as error:
            host, port = settings.hub
            why = f"process {settings.index} cannot reach its monitor at {host}:{port}: {error}"
            self._loss = Loss(index=0, lost=why)
            return
        with contextlib.suppress(OSError):
            connection.sendall(f"{settings.token} {settings.index}\n".encode())
        self._add(_Link(index=0, read_fd=connection.fileno(), connection=connection))

    def _add(self, link: _Link) -> None:
        self._links.append(link)
        self._selector.register(link.read_fd, selectors.EVENT_READ, link)

    def _drop(self, link: _Link) -> None:
        self._links.remove(link)
        self._selector.unregister(link.read_fd)
        if link.connection is not None:
            link.connection.close()

    def run(self) -> None:
        """Watches until the process has finished, or any process is lost."""
        while not self._own.is_finished:
            loss = self._loss
            for key, _ in self._selector.select(timeout=BEAT_S / 2):
                if key.data is None:
                    self._accept()
                elif key.data in self._links:  # not dropped meanwhile
                    loss = loss or self._hear(key.data)
            self._drop_strangers()
            loss = loss or self._overdue() or self._failure()
            if loss is not None:
                return self._end(loss)
            if time.monotonic() - self._beat >= BEAT_S:
                self._beat = time.monotonic()
                self._tell_others(alive=True)
        self._tell_others(finished=True)

    def _accept(self) -> None:
        if self._listener is None:
            return
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            self._add(_Link(index=None, read_fd=connection.fileno(), connection=connection))

    def _drop_strangers(self) -> None:
        """Drops callers that have not shown the token in time, or are too many."""
        now, most = time.monotonic(), MAX_STRANGERS + len(self._missing)
        for place, link in enumerate(reversed(self._strangers())):
            if place >= most or now - link.began > self._settings.hello_s:
                self._drop(link)

    def _strangers(self) -> list[_Link]:
        """Callers that have not shown the token, oldest first."""
        return [link for link in self._links if link.index is None]

    def _hear(self, link: _Link) -> Loss | None:
        """Reads a link; the loss it tells of, if any."""
        is_there = link.receive()
        if link.index is None and not self._greet(link, is_there=is_there):
            return None
        assert link.index is not None
        lines = link.lines() if is_there else None
        if lines is None:
            self._drop(link)
            if link.is_finished:
                return None
            how = "it ended" if link is self._own else "its monitor ended"
            return Loss(index=link.index, lost=f"{how} without a word, as one that is killed does")
        for line in lines:
            if "lost" in line:
                return Loss.from_line(line)
            if "failed" in line and self._failed is None:
                why = f"it failed: {line['failed']}"
                loss = Loss(index=link.index, lost=why, failed=True)
                self._failed = (time.monotonic(), loss)
            if "stop" in line and not self._is_stopping:
                self._is_stopping = True
                self._tell_others(stop=True)
                self._tell_own(stop=True)
            if "finished" in line:
                link.is_finished = True
        return None

    def _greet(self, link: _Link, *, is_there: bool) -> bool:
        """Returns True if a caller's first line shows that it is of the job; drops liars."""
        hello, newline, rest = link.rest.partition(b"\n")
        token, _, index = hello.partition(b" ")
        if is_there and not newline and len(hello) <= _LONGEST_HELLO:
            return False  # to be continued
        is_ours = len(hello) <= _LONGEST_HELLO and hmac.compare_digest(
            token, self._settings.token.encode()
        )
        if not (is_ours and index.isdigit() and int(index) in self._missing):
            self._drop(link)
            return False
        link.index, link.rest = int(index), rest
        self._missing.remove(link.index)
        # All have come, and one that is lost does not come back: nobody else is let in.
        if not self._missing:
            assert self._listener is not None
            self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None
            for stranger in self._strangers():
                self._drop(stranger)
        return True

    def _overdue(self) -> Loss | None:
        """A process that has been silent for too long."""
        deadline_s = self._settings.deadline_s
        now = time.monotonic()
        for link in self._links:
            if link.index is None or link.is_finished:
                continue
            if now - link.heard > deadline_s:
                why = f"it gave no sign of life for {deadline_s:g} s"
                return Loss(index=link.index, lost=why)
        if self._missing and now - self._started > deadline_s:
            why = f"its monitor did not come within {deadline_s:g} s"
            return Loss(index=min(self._missing), lost=why)
        return None

    def _failure(self) -> Loss | None:
        """A process that failed, once no other is known to have been lost before."""
        if self._failed is None or time.monotonic() - self._failed[0] < FAILURE_WAIT_S:
            return None
        return self._failed[1]

    def _tell_others(self, **line: Any) -> None:
        """Writes a line to the other monitors that this one knows."""
        for link in self._links:
            if link.index is not None:
                link.write(**line)

    def _tell_own(self, **line: Any) -> None:
        """Writes a line to the own process."""
        with contextlib.suppress(OSError):
            os.write(1, json.dumps(line).encode() + b"\n")

    def _end(self, loss: Loss) -> None:
        """Names the lost process everywhere and ends the own one."""
        settings = self._settings
        self._tell_others(**asdict(loss))
        if settings.hub_fd < 0 and loss.index == settings.index:
            # The first loss counts: that of another process may have caused this one.
            loss = self._verdict() or loss
        name = settings.names[loss.index]
        text = f"process {loss.index} of {len(settings.names)} ({name}) was lost: {loss.lost}."
        advice = "" if loss.failed else " Start the job again: it goes on from its last checkpoint."
        print(f"error: {text}{advice}", file=sys.stderr, flush=True)
        if self._own not in self._links:
            return
        # The own process is asked to end, and killed if it does not, or cannot since it is stopped.
        is_silent = time.monotonic() - self._own.heard > settings.deadline_s
        until = time.monotonic() + (0 if is_silent else GRACE_S)
        self._tell_own(**asdict(loss))
        for link in [link for link in self._links if link is not self._own]:
            self._drop(link)
        if self._listener is not None:
            self._selector.unregister(self._listener)
        while time.monotonic() < until:
            for _ in self._selector.select(timeout=BEAT_S / 2):
                if self._own.read() is None:
                    return
        with contextlib.suppress(ProcessLookupError):
            os.kill(settings.pid, signal.SIGKILL)

    def _verdict(self) -> Loss | None:
        """The hub's answer to a report; None if it gives none."""
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
                        return Loss.from_line(line)
        return None


def main() -> None:
    """Reads the settings, then watches."""
    line = b""
    while not line.endswith(b"\n"):  # not a byte more: what follows is the monitor's to read
        byte = os.read(0, 1)
        if not byte:
            return
        line += byte
    settings = json.loads(line)
    Monitor(Settings(**{**settings, "hub": tuple(settings["hub"])})).run()


if __name__ == "__main__":
    main()

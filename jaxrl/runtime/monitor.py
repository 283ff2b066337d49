"""Watch one process of a job from outside, since a stopped process cannot report that it is.

Every process of a job starts one monitor and writes it a line per second. The monitors are joined
in a star around the first one, which tells all others of the first process that was killed,
stopped, failed or cut off. Each monitor then names the lost process on its process's standard error
and ends its process, which would otherwise wait in a collective operation forever. Nothing else of
jaxrl is imported here, nor is JAX.

Lines are JSON objects. The first one on standard input holds the settings. Then come, from the
process, `alive`, `finished`, `failed` (why) and `stop`, when it was asked to stop; to the process
`stop` and `lost` (why, the `index` of the process, and whether it `failed` by itself); between
monitors `alive`, `finished`, `stop` and `lost`.

The first line from a monitor to the first one is the job's token and its index instead; nothing
that a caller sends is parsed before that. Once all have come, nobody else is let in.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import queue
import signal
import socket
import sys
import threading
import time
from dataclasses import asdict, dataclass
from typing import Any, BinaryIO

BEAT_S = 1.0
"""Seconds between two signs of life."""

GRACE_S = 5.0
"""Seconds for a process to end by itself after the loss of another."""

FAILURE_WAIT_S = 2.0
"""Seconds in which a process that was killed is named rather than one that failed over it."""

MAX_STRANGERS = 64
"""Limit on simultaneous callers without the token, beside the missing monitors."""

_LONGEST_LINE = 1 << 20  # bytes
_LONGEST_HELLO = 128  # bytes of a token and an index; only a stranger sends more


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a monitor."""

    index: int  # process in the job
    pid: int
    names: list[str]  # names of all processes of the job, for messages
    hub: tuple[str, int]  # host and port of the first monitor
    hub_fd: int  # the first monitor's listening socket; -1 for the others
    token: str  # proves that a caller belongs to the job
    deadline_s: float  # silence after which a process counts as lost
    hello_s: float = 5.0  # time in which a caller has to show the token


@dataclass(frozen=True, kw_only=True)
class Loss:
    """A lost process."""

    index: int  # process
    lost: str  # reason
    # True if it reported an error, which no other process could have prevented.
    failed: bool = False

    @classmethod
    def from_line(cls, line: dict[str, Any]) -> Loss:
        """Restore what `asdict` returned."""
        return cls(index=line["index"], lost=line["lost"], failed=line["failed"])


class Monitor:
    """One monitor: `run` returns once its process has finished or was ended."""

    def __init__(self, settings: Settings, process: BinaryIO):
        """Start to read the watched process's lines, and connect to the other monitors."""
        self._settings, own = settings, settings.index
        self._started = self._beat = time.monotonic()
        # Process and line, None once its link has ended.
        self._events: queue.Queue[tuple[int, dict[str, Any] | None]] = queue.Queue()
        self._connections: dict[int, socket.socket] = {}  # to other monitors, by process
        self._heard = {own: self._started}  # time of the last line, by process
        self._finished: set[int] = set()
        self._ended: set[int] = set()  # links that have ended
        self._missing: set[int] = set()  # monitors that have not come yet
        self._strangers: set[socket.socket] = set()  # callers without the token
        self._lock = threading.Lock()  # for the two sets above
        self._loss: Loss | None = None
        self._failed: tuple[float, Loss] | None = None  # the first failure, and its time
        self._is_stopping = False
        self._start(self._read, own, process)
        if settings.hub_fd >= 0:
            self._missing = set(range(1, len(settings.names)))
            self._start(self._admit)
        else:
            self._join_hub()

    def _start(self, work: Any, *arguments: Any) -> None:
        threading.Thread(target=work, args=arguments, daemon=True).start()

    def _read(self, index: int, file: BinaryIO) -> None:
        """Queue the lines of a link until it ends or sends an invalid one."""
        with contextlib.suppress(OSError, ValueError, RecursionError):
            while line := file.readline(_LONGEST_LINE):
                record = json.loads(line)
                if not isinstance(record, dict):
                    break
                self._heard[index] = time.monotonic()
                self._events.put((index, record))
        self._ended.add(index)
        self._events.put((index, None))

    def _connect(self, index: int, connection: socket.socket) -> None:
        connection.settimeout(None)
        self._connections[index] = connection
        self._heard[index] = time.monotonic()
        self._start(self._read, index, connection.makefile("rb"))

    def _join_hub(self) -> None:
        settings = self._settings
        try:
            connection = socket.create_connection(settings.hub, timeout=settings.deadline_s)
            connection.sendall(f"{settings.token} {settings.index}\n".encode())
        except OSError as error:
            host, port = settings.hub
            why = f"process {settings.index} cannot reach its monitor at {host}:{port}: {error}"
            self._loss = Loss(index=0, lost=why)
            return
        self._connect(0, connection)

    def _admit(self) -> None:
        """Let the other monitors in. Once all have come, drop other callers and stop listening."""
        listener = socket.socket(fileno=self._settings.hub_fd)
        listener.settimeout(0.1)
        slots = threading.Semaphore(MAX_STRANGERS + len(self._missing))
        while self._missing:
            if slots.acquire(timeout=0.1):
                try:
                    connection, _ = listener.accept()
                except OSError:  # nobody called, or the caller is gone
                    slots.release()
                    continue
                with self._lock:
                    self._strangers.add(connection)
                self._start(self._greet, connection, slots)
        listener.close()
        with self._lock:
            for stranger in self._strangers:
                with contextlib.suppress(OSError):
                    stranger.shutdown(socket.SHUT_RDWR)

    def _greet(self, connection: socket.socket, slots: threading.Semaphore) -> None:
        """Let a caller in if its first line has the token and the index of a missing monitor."""
        hello, until = b"", time.monotonic() + self._settings.hello_s
        with contextlib.suppress(OSError):
            while not hello.endswith(b"\n") and len(hello) <= _LONGEST_HELLO:
                connection.settimeout(max(until - time.monotonic(), 0.01))
                byte = connection.recv(1)  # not more: what follows is not for this loop
                if not byte:
                    break
                hello += byte
        token, _, number = hello.removesuffix(b"\n").partition(b" ")
        is_ours = hmac.compare_digest(token, self._settings.token.encode())
        index = int(number) if number.isdigit() else -1
        with self._lock:
            is_let_in = is_ours and hello.endswith(b"\n") and index in self._missing
            self._strangers.remove(connection)
            if is_let_in:
                self._connect(index, connection)
                self._missing.remove(index)
            else:
                connection.close()
        slots.release()

    def run(self) -> None:
        """Watch until the process has finished or any process is lost."""
        while self._settings.index not in self._finished:
            loss = self._loss
            with contextlib.suppress(queue.Empty):
                event = self._events.get(timeout=BEAT_S / 2)
                loss = loss or self._handle(*event)
            loss = loss or self._overdue() or self._failure()
            if loss is not None:
                return self._end(loss)
            if time.monotonic() - self._beat >= BEAT_S:
                self._beat = time.monotonic()
                self._tell_others(alive=True)
        self._tell_others(finished=True)

    def _handle(self, index: int, line: dict[str, Any] | None) -> Loss | None:
        """Return the loss that a line, or the end of a link, reports."""
        if line is None:
            if index in self._finished:
                return None
            how = "it ended" if index == self._settings.index else "its monitor ended"
            return Loss(index=index, lost=f"{how} without a word, as one that is killed does")
        if "lost" in line:
            return Loss.from_line(line)
        if "failed" in line and self._failed is None:
            loss = Loss(index=index, lost=f"it failed: {line['failed']}", failed=True)
            self._failed = (time.monotonic(), loss)
        if "stop" in line and not self._is_stopping:
            self._is_stopping = True
            self._tell_others(stop=True)
            self._tell_own(stop=True)
        if "finished" in line:
            self._finished.add(index)
        return None

    def _overdue(self) -> Loss | None:
        """Return a process that has been silent for too long."""
        now, deadline_s = time.monotonic(), self._settings.deadline_s
        for index, heard in [*self._heard.items()]:
            if index not in self._finished and now - heard > deadline_s:
                return Loss(index=index, lost=f"it gave no sign of life for {deadline_s:g} s")
        missing = [*self._missing]
        if missing and now - self._started > deadline_s:
            return Loss(
                index=min(missing), lost=f"its monitor did not come within {deadline_s:g} s"
            )
        return None

    def _failure(self) -> Loss | None:
        """Return a process that failed, once no other is known to have been lost before."""
        if self._failed is None or time.monotonic() - self._failed[0] < FAILURE_WAIT_S:
            return None
        return self._failed[1]

    def _tell_others(self, **line: Any) -> None:
        """Write a line to the other monitors that this one knows."""
        for connection in [*self._connections.values()]:
            with contextlib.suppress(OSError):
                connection.sendall(json.dumps(line).encode() + b"\n")

    def _tell_own(self, **line: Any) -> None:
        """Write a line to the watched process."""
        with contextlib.suppress(OSError):
            os.write(1, json.dumps(line).encode() + b"\n")

    def _end(self, loss: Loss) -> None:
        """Name the lost process everywhere and end the watched one."""
        settings, own = self._settings, self._settings.index
        self._tell_others(**asdict(loss))
        if own != 0 and loss.index == own:
            # The first loss counts: that of another process may have caused this one.
            with contextlib.suppress(queue.Empty):
                verdict = self._wait_for(0, GRACE_S)
                loss = loss if verdict is None else Loss.from_line(verdict)
        text = f"process {loss.index} of {len(settings.names)} ({settings.names[loss.index]})"
        advice = "" if loss.failed else " Start the job again: it goes on from its last checkpoint."
        print(f"error: {text} was lost: {loss.lost}.{advice}", file=sys.stderr, flush=True)
        # The watched process is asked to end, and killed if it does not, or is stopped.
        is_silent = time.monotonic() - self._heard[own] > settings.deadline_s
        self._tell_own(**asdict(loss))
        try:
            self._wait_for(own, 0 if is_silent else GRACE_S)
        except queue.Empty:
            with contextlib.suppress(ProcessLookupError):
                os.kill(settings.pid, signal.SIGKILL)

    def _wait_for(self, index: int, seconds: float) -> dict[str, Any] | None:
        """Return the loss that a link reports, or None once the link has ended.

        Raises:
            queue.Empty: Neither happened in time.
        """
        until = time.monotonic() + seconds
        while index not in self._ended or not self._events.empty():
            source, line = self._events.get(timeout=max(until - time.monotonic(), 0.001))
            if source == index and line is not None and "lost" in line:
                return line
        return None


def main() -> None:
    """Read the settings, then watch."""
    with open(0, "rb", closefd=False) as process:
        if line := process.readline():
            settings = json.loads(line)
            Monitor(Settings(**{**settings, "hub": tuple(settings["hub"])}), process).run()
        os._exit(0)  # threads may still read


if __name__ == "__main__":
    main()

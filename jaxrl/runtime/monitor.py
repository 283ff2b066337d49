"""Monitor for one process of a job, run separately because a stopped process cannot report.

Each process of a job starts a monitor in a new session and sends it one line per second. The
monitor of process 0 is the hub, to which all others connect. A process is lost if it failed, or was
killed, stopped or cut off. The hub tells all monitors about the first lost process. Each monitor
prints a message to standard error and ends the monitored process, which would otherwise wait
forever in a collective operation. This module imports neither JAX nor the rest of jaxrl.

Lines are JSON objects. The first line on standard input has the settings. The process then sends
`alive`, `finished`, `failed` (the reason) and `stop` (it received a signal). It receives `stop` and
`lost` (the reason, with the `index` of the process and whether it `failed` on its own). Monitors
exchange `alive`, `finished`, `stop` and `lost`.

The first line from a monitor to the hub is not JSON: it is the job's token and the monitor's index.
The hub parses no JSON from a connection before that, and stops listening once all monitors have
joined.
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

HEARTBEAT_INTERVAL_S = 1.0
"""Seconds between two `alive` lines."""

GRACE_S = 5.0
"""Seconds that a process has to exit by itself after another process is lost."""

FAILURE_WAIT_S = 2.0
"""Seconds to wait after a failure for the report of a killed process that may have caused it."""

_MAX_LINE_BYTES = 1 << 20
_MAX_HELLO_BYTES = 128  # more than a token and an index need


@dataclass(frozen=True, kw_only=True)
class MonitorSettings:
    """Settings that a process sends to its monitor.

    Attributes:
        index: Index of the monitored process in the job.
        pid: Process id of the monitored process.
        names: Names of all processes of the job, for messages.
        hub: Host and port of the hub.
        hub_fd: File descriptor of the hub's listening socket; -1 for other monitors.
        token: Secret that proves that a connection comes from the job.
        deadline_s: Seconds of silence after which a process counts as lost.
    """

    index: int
    pid: int
    names: list[str]
    hub: tuple[str, int]
    hub_fd: int
    token: str
    deadline_s: float


@dataclass(frozen=True, kw_only=True)
class ProcessLoss:
    """Report of a lost process.

    Attributes:
        index: Index of the process in the job.
        lost: Reason the process counts as lost.
        failed: True if the process itself reported an error.
    """

    index: int
    lost: str
    failed: bool = False

    @classmethod
    def from_line(cls, line: dict[str, Any]) -> ProcessLoss:
        """Create a report from a received `lost` line."""
        return cls(
            index=int(line["index"]), lost=str(line["lost"]), failed=bool(line.get("failed"))
        )


@dataclass(kw_only=True)
class _Link:
    """Connection to the monitored process, to the hub, or from another monitor to the hub."""

    index: int | None  # index of the process it reports on; None until it has sent the token
    read_fd: int
    connection: socket.socket | None = None
    is_finished: bool = False
    last_received_at: float = field(default_factory=time.monotonic)
    buffer: bytes = b""

    def receive(self) -> bool:
        """Append received bytes to `buffer`; return False if the other end is closed."""
        try:
            data = os.read(self.read_fd, 65536)
        except OSError:
            return False
        self.last_received_at = time.monotonic()
        self.buffer += data
        return bool(data)

    def pop_lines(self) -> list[dict[str, Any]] | None:
        """Remove and parse the complete lines in `buffer`; return None if any is malformed."""
        *lines, self.buffer = self.buffer.split(b"\n")
        try:
            read = [json.loads(line) for line in lines]
        except (ValueError, RecursionError):
            return None
        is_valid = (
            all(isinstance(line, dict) for line in read) and len(self.buffer) <= _MAX_LINE_BYTES
        )
        return read if is_valid else None

    def read(self) -> list[dict[str, Any]] | None:
        """Receive lines; return None if the other end is closed or the lines are malformed."""
        return self.pop_lines() if self.receive() else None

    def write(self, **line: Any) -> None:
        if self.connection is not None:
            with contextlib.suppress(OSError):
                self.connection.sendall(json.dumps(line).encode() + b"\n")


class Monitor:
    """Monitor for one process; `run` returns once the process has finished or been terminated."""

    def __init__(self, settings: MonitorSettings):
        """Open the link to the process over standard input and output; join or become the hub."""
        self._settings = settings
        self._selector = selectors.DefaultSelector()
        self._process_link = _Link(index=settings.index, read_fd=0)
        self._links: list[_Link] = []
        self._add_link(self._process_link)
        self._listener: socket.socket | None = None
        self._missing: set[int] = set()  # monitors that have not joined yet
        self._loss: ProcessLoss | None = None
        if settings.hub_fd >= 0:
            self._listener = socket.socket(fileno=settings.hub_fd)
            self._listener.setblocking(False)  # a caller may be gone before accept()
            self._selector.register(self._listener, selectors.EVENT_READ)
            self._missing = set(range(1, len(settings.names)))
        else:
            self._join_hub()
        self._started = self._last_heartbeat_at = time.monotonic()
        self._first_failure: tuple[float, ProcessLoss] | None = (
            None  # time and report of the first failure
        )
        self._is_stopping = False

    def _join_hub(self) -> None:
        settings = self._settings
        try:
            connection = socket.create_connection(settings.hub, timeout=settings.deadline_s)
        except OSError as error:
            host, port = settings.hub
            why = f"process {settings.index} cannot reach its monitor at {host}:{port}: {error}"
            self._loss = ProcessLoss(index=0, lost=why)
            return
        with contextlib.suppress(OSError):
            connection.sendall(f"{settings.token} {settings.index}\n".encode())
        self._add_link(_Link(index=0, read_fd=connection.fileno(), connection=connection))

    def _add_link(self, link: _Link) -> None:
        self._links.append(link)
        self._selector.register(link.read_fd, selectors.EVENT_READ, link)

    def _drop_link(self, link: _Link) -> None:
        self._links.remove(link)
        self._selector.unregister(link.read_fd)
        if link.connection is not None:
            link.connection.close()

    def run(self) -> None:
        """Watch until the process has finished, or any process is lost."""
        while not self._process_link.is_finished:
            loss = self._loss
            for key, _ in self._selector.select(timeout=HEARTBEAT_INTERVAL_S / 2):
                if key.data is None:
                    self._accept()
                elif key.data in self._links:  # not dropped earlier in this loop
                    loss = loss or self._read_link(key.data)
            loss = loss or self._check_timeouts() or self._check_failure()
            if loss is not None:
                return self._terminate(loss)
            if time.monotonic() - self._last_heartbeat_at >= HEARTBEAT_INTERVAL_S:
                self._last_heartbeat_at = time.monotonic()
                self._broadcast(alive=True)
        self._broadcast(finished=True)

    def _accept(self) -> None:
        if self._listener is None:
            return
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            self._add_link(_Link(index=None, read_fd=connection.fileno(), connection=connection))

    def _read_link(self, link: _Link) -> ProcessLoss | None:
        """Read from a link; return the lost process that its data or end implies, if any."""
        is_open = link.receive()
        if link.index is None and not self._authenticate(link, is_open=is_open):
            return None
        assert link.index is not None
        lines = link.pop_lines() if is_open else None
        if lines is None:
            self._drop_link(link)
            if link.is_finished:
                return None
            cause = "it ended" if link is self._process_link else "its monitor ended"
            return ProcessLoss(
                index=link.index, lost=f"{cause} without a message, like a killed process"
            )
        for line in lines:
            if "lost" in line:
                return ProcessLoss.from_line(line)
            if "failed" in line and self._first_failure is None:
                why = f"it failed: {line['failed']}"
                loss = ProcessLoss(index=link.index, lost=why, failed=True)
                self._first_failure = (time.monotonic(), loss)
            if "stop" in line and not self._is_stopping:
                self._is_stopping = True
                self._broadcast(stop=True)
                self._send_to_process(stop=True)
            if "finished" in line:
                link.is_finished = True
        return None

    def _authenticate(self, link: _Link, *, is_open: bool) -> bool:
        """Return True if a connection's first line is complete and valid; drop it if invalid."""
        hello, newline, buffer = link.buffer.partition(b"\n")
        token, _, index = hello.partition(b" ")
        if is_open and not newline and len(hello) <= _MAX_HELLO_BYTES:
            return False  # the line is incomplete
        has_token = len(hello) <= _MAX_HELLO_BYTES and hmac.compare_digest(
            token, self._settings.token.encode()
        )
        if not (has_token and index.isdigit() and int(index) in self._missing):
            self._drop_link(link)
            return False
        link.index, link.buffer = int(index), buffer
        self._missing.remove(link.index)
        # Stop listening once all monitors have joined: a lost one never reconnects.
        if not self._missing:
            assert self._listener is not None
            self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None
            for stranger in [link for link in self._links if link.index is None]:
                self._drop_link(stranger)
        return True

    def _check_timeouts(self) -> ProcessLoss | None:
        """Return a process that counts as lost because it has been silent for too long, if any."""
        deadline_s = self._settings.deadline_s
        now = time.monotonic()
        for link in self._links:
            if link.index is None or link.is_finished:
                continue
            if now - link.last_received_at > deadline_s:
                why = f"it sent nothing for {deadline_s:g} s"
                return ProcessLoss(index=link.index, lost=why)
        if self._missing and now - self._started > deadline_s:
            why = f"its monitor did not join within {deadline_s:g} s"
            return ProcessLoss(index=min(self._missing), lost=why)
        return None

    def _check_failure(self) -> ProcessLoss | None:
        """Return the first failure once `FAILURE_WAIT_S` has passed since its report, else None.

        A process that is lost in the meantime takes precedence.
        """
        if (
            self._first_failure is None
            or time.monotonic() - self._first_failure[0] < FAILURE_WAIT_S
        ):
            return None
        return self._first_failure[1]

    def _broadcast(self, **line: Any) -> None:
        """Write a line to all other monitors that this monitor is connected to."""
        for link in self._links:
            if link.index is not None:
                link.write(**line)

    def _send_to_process(self, **line: Any) -> None:
        """Write a line to the monitored process."""
        with contextlib.suppress(OSError):
            os.write(1, json.dumps(line).encode() + b"\n")

    def _terminate(self, loss: ProcessLoss) -> None:
        """Report the lost process to all monitors and terminate the monitored process."""
        settings = self._settings
        self._broadcast(**asdict(loss))
        if settings.hub_fd < 0 and loss.index == settings.index:
            # The hub decides which loss came first: an earlier loss may have caused this one.
            loss = self._wait_for_hub() or loss
        name = settings.names[loss.index]
        text = f"process {loss.index} of {len(settings.names)} ({name}) was lost: {loss.lost}."
        advice = "" if loss.failed else " Start the job again: it resumes from its last checkpoint."
        print(f"error: {text}{advice}", file=sys.stderr, flush=True)
        if self._process_link not in self._links:
            return
        # Ask the process to exit, then kill it; kill it immediately if it is silent (stopped).
        is_silent = time.monotonic() - self._process_link.last_received_at > settings.deadline_s
        deadline = time.monotonic() + (0 if is_silent else GRACE_S)
        self._send_to_process(**asdict(loss))
        for link in [link for link in self._links if link is not self._process_link]:
            self._drop_link(link)
        if self._listener is not None:
            self._selector.unregister(self._listener)
        while time.monotonic() < deadline:
            for _ in self._selector.select(timeout=HEARTBEAT_INTERVAL_S / 2):
                if self._process_link.read() is None:
                    return
        with contextlib.suppress(ProcessLookupError):
            os.kill(settings.pid, signal.SIGKILL)

    def _wait_for_hub(self) -> ProcessLoss | None:
        """Wait for the hub to report the lost process; return None if it does not."""
        hub = next((link for link in self._links if link is not self._process_link), None)
        deadline = time.monotonic() + GRACE_S
        while hub is not None and time.monotonic() < deadline:
            for key, _ in self._selector.select(timeout=HEARTBEAT_INTERVAL_S / 2):
                lines = key.data.read()
                if lines is None:
                    self._drop_link(key.data)
                    hub = None if key.data is hub else hub
                for line in lines or []:
                    if "lost" in line:
                        return ProcessLoss.from_line(line)
        return None


def main() -> None:
    """Read the settings, then run the monitor."""
    line = b""
    while not line.endswith(b"\n"):  # byte by byte: the monitor reads the rest
        byte = os.read(0, 1)
        if not byte:
            return
        line += byte
    settings = json.loads(line)
    Monitor(MonitorSettings(**{**settings, "hub": tuple(settings["hub"])})).run()


if __name__ == "__main__":
    main()

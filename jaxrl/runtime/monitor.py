"""Monitor process, separate from the process that it monitors, since that process may hang.

Each process of a job starts a monitor in a new session and sends it one line per second. The
monitor of process 0 is the hub, to which all others connect. A process is lost if it failed, or was
killed, stopped or cut off. The hub tells all monitors about the first lost process. Each monitor
prints a message to standard error and ends the monitored process, which would otherwise wait
forever in a collective operation. This module imports neither JAX nor the rest of jaxrl.

Messages are JSON objects. The first line on standard input has the settings. The process then sends
`alive`, `finished`, `failed` (the reason) and `stop` (it received a signal). It receives `stop` and
`lost` (the reason, with the `index` of the process and whether it `failed` on its own). Monitors
exchange `alive`, `finished`, `stop` and `lost`.

The first message from a monitor to the hub is not JSON: it is the job's token and the monitor's
index. The hub reads nothing else from a connection before that, and stops listening once all
monitors have joined.
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
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Any

HEARTBEAT_INTERVAL_S = 1.0
"""Seconds between two `alive` lines."""

GRACE_S = 5.0
"""Seconds that a process has to exit by itself after another process is lost."""

FAILURE_WAIT_S = 2.0
"""Seconds to wait after a failure for the report of a killed process that may have caused it."""

_MAX_MESSAGE_BYTES = 1 << 20
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


class Monitor:
    """Monitor for one process; `run` returns once the process has finished or been terminated."""

    def __init__(self, settings: MonitorSettings):
        """Start reading from the process over standard input; join the hub or become the hub."""
        self._settings = settings
        # Index of a process, and a message about it, its monitor's connection, or None at the end.
        self._events: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self._connections: dict[int, Connection] = {}  # other monitors, by their process
        self._last_received_at: dict[int, float] = {}
        self._finished: set[int] = set()  # processes that reported their end
        self._gone: set[int] = set()  # processes and monitors that closed their end
        self._missing: set[int] = set()  # monitors that have not joined yet
        self._first_failure: tuple[float, ProcessLoss] | None = None  # with its time
        self._is_stopping = False
        self._started = self._last_heartbeat_at = time.monotonic()
        self._start_reader(settings.index, sys.stdin.buffer.readline)
        if settings.hub_fd >= 0:
            self._missing = set(range(1, len(settings.names)))
            self._listener = socket.socket(fileno=settings.hub_fd)
            threading.Thread(target=self._accept_monitors, daemon=True).start()
        else:
            self._join_hub()

    def _start_reader(self, index: int, read: Callable[[], bytes]) -> None:
        """Start a thread that turns the messages from `read` into events."""

        def read_events() -> None:
            with contextlib.suppress(OSError, EOFError, ValueError, TypeError, RecursionError):
                while data := read():
                    self._events.put((index, dict(json.loads(data))))
            self._events.put((index, None))

        self._last_received_at[index] = time.monotonic()
        threading.Thread(target=read_events, daemon=True).start()

    def _join_hub(self) -> None:
        settings = self._settings
        try:
            connection = socket.create_connection(settings.hub, timeout=settings.deadline_s)
        except OSError as error:
            host, port = settings.hub
            why = f"process {settings.index} cannot reach its monitor at {host}:{port}: {error}"
            self._events.put((0, {"lost": why, "index": 0}))
            return
        connection.settimeout(None)
        hub = Connection(connection.detach())
        with contextlib.suppress(OSError):
            hub.send_bytes(f"{settings.token} {settings.index}".encode())
        self._add_connection(0, hub)

    def _add_connection(self, index: int, connection: Connection) -> None:
        self._connections[index] = connection
        self._start_reader(index, lambda: connection.recv_bytes(_MAX_MESSAGE_BYTES))

    def _accept_monitors(self) -> None:
        """Accept connections until the listener is closed. Each authenticates in a thread."""
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                arguments = (Connection(connection.detach()),)
                threading.Thread(
                    target=self._authenticate_monitor, args=arguments, daemon=True
                ).start()

    def _authenticate_monitor(self, connection: Connection) -> None:
        """Queue the connection of a monitor that sends the token; close any other connection."""
        with contextlib.suppress(OSError, EOFError, ValueError):
            token, _, index = connection.recv_bytes(_MAX_HELLO_BYTES).partition(b" ")
            if hmac.compare_digest(token, self._settings.token.encode()):
                self._events.put((int(index), connection))
                return
        connection.close()

    def run(self) -> None:
        """Watch until the monitored process has finished or any process is lost."""
        while self._settings.index not in self._finished:
            loss = self._record_event(self._receive_event(HEARTBEAT_INTERVAL_S / 2))
            loss = loss or self._check_timeouts() or self._check_failure()
            if loss is not None:
                return self._terminate_process(loss)
            if time.monotonic() - self._last_heartbeat_at >= HEARTBEAT_INTERVAL_S:
                self._last_heartbeat_at = time.monotonic()
                self._send_to_monitors(alive=True)
        self._send_to_monitors(finished=True)

    def _receive_event(self, timeout_s: float) -> tuple[int, Any] | None:
        """Return the next event; None if there is none within `timeout_s` seconds."""
        try:
            index, event = self._events.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if event is None:
            self._gone.add(index)
        elif isinstance(event, dict):
            self._last_received_at[index] = time.monotonic()
        return index, event

    def _record_event(self, received: tuple[int, Any] | None) -> ProcessLoss | None:
        """Record an event; return the loss if the event means that a process is lost."""
        if received is None:
            return None
        index, event = received
        if isinstance(event, Connection):
            self._add_monitor(index, event)
            return None
        if event is None:
            if index in self._finished:
                return None
            cause = "it ended" if index == self._settings.index else "its monitor ended"
            return ProcessLoss(
                index=index, lost=f"{cause} without a message, like a killed process"
            )
        if "lost" in event:
            return ProcessLoss.from_line(event)
        if "failed" in event and self._first_failure is None:
            loss = ProcessLoss(index=index, lost=f"it failed: {event['failed']}", failed=True)
            self._first_failure = (time.monotonic(), loss)
        if "stop" in event and not self._is_stopping:
            self._is_stopping = True
            self._send_to_monitors(stop=True)
            self._send_to_process(stop=True)
        if "finished" in event:
            self._finished.add(index)
        return None

    def _add_monitor(self, index: int, connection: Connection) -> None:
        """Add a monitor that has authenticated. Stop listening after the last one."""
        if index not in self._missing:
            connection.close()
            return
        self._missing.remove(index)
        self._add_connection(index, connection)
        if not self._missing:  # a lost monitor never reconnects
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # ends `accept`
            self._listener.close()

    def _check_timeouts(self) -> ProcessLoss | None:
        """Return the loss of a process that was silent for too long; None if there is none."""
        deadline_s = self._settings.deadline_s
        now = time.monotonic()
        for index, received_at in self._last_received_at.items():
            if index not in self._finished and now - received_at > deadline_s:
                return ProcessLoss(index=index, lost=f"it sent nothing for {deadline_s:g} s")
        if self._missing and now - self._started > deadline_s:
            why = f"its monitor did not join within {deadline_s:g} s"
            return ProcessLoss(index=min(self._missing), lost=why)
        return None

    def _check_failure(self) -> ProcessLoss | None:
        """Return the first failure once `FAILURE_WAIT_S` has passed since its report, else None.

        A process that is lost in the meantime takes precedence.
        """
        if self._first_failure is None:
            return None
        reported_at, loss = self._first_failure
        return loss if time.monotonic() - reported_at >= FAILURE_WAIT_S else None

    def _send_to_monitors(self, **message: Any) -> None:
        """Send a message to all monitors that are connected to this monitor."""
        for connection in self._connections.values():
            with contextlib.suppress(OSError):
                connection.send_bytes(json.dumps(message).encode())

    def _send_to_process(self, **message: Any) -> None:
        """Send a message to the monitored process."""
        with contextlib.suppress(OSError):
            os.write(1, json.dumps(message).encode() + b"\n")

    def _terminate_process(self, loss: ProcessLoss) -> None:
        """Report the lost process to all monitors and terminate the monitored process."""
        settings = self._settings
        self._send_to_monitors(**asdict(loss))
        if settings.hub_fd < 0 and loss.index == settings.index:
            # The hub decides which loss came first: an earlier loss may have caused this one.
            loss = self._wait_for_hub() or loss
        name = settings.names[loss.index]
        text = f"process {loss.index} of {len(settings.names)} ({name}) was lost: {loss.lost}."
        advice = "" if loss.failed else " Start the job again: it resumes from its last checkpoint."
        print(f"error: {text}{advice}", file=sys.stderr, flush=True)
        # Ask the process to exit, then kill it; kill it immediately if it is silent (stopped).
        silent_s = time.monotonic() - self._last_received_at[settings.index]
        deadline = time.monotonic() + (0 if silent_s > settings.deadline_s else GRACE_S)
        self._send_to_process(**asdict(loss))
        while settings.index not in self._gone:
            if time.monotonic() >= deadline:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(settings.pid, signal.SIGKILL)
                return
            self._receive_event(HEARTBEAT_INTERVAL_S / 2)

    def _wait_for_hub(self) -> ProcessLoss | None:
        """Wait for the hub to report the lost process; return None if it does not."""
        deadline = time.monotonic() + GRACE_S
        while 0 not in self._gone and time.monotonic() < deadline:
            _, event = self._receive_event(HEARTBEAT_INTERVAL_S / 2) or (0, None)
            if isinstance(event, dict) and "lost" in event:
                return ProcessLoss.from_line(event)
        return None


def main() -> None:
    """Read the settings, then run the monitor."""
    if line := sys.stdin.buffer.readline():
        settings = json.loads(line)
        Monitor(MonitorSettings(**{**settings, "hub": tuple(settings["hub"])})).run()
    os._exit(0)  # a normal exit fails while a thread reads standard input


if __name__ == "__main__":
    main()

"""Startup of a job with one process per host, and detection of lost processes."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import queue
import secrets
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import jax

from jaxrl.runtime import monitor
from jaxrl.runtime.distributed import broadcast, gather
from jaxrl.runtime.job import Job
from jaxrl.runtime.preemption import EXIT_LOST
from jaxrl.utils.child_process import ChildExitedError, ChildProcess
from jaxrl.utils.secrets import redact
from jaxrl.utils.text import escape_control_chars

JOIN_TIMEOUT_S = 300.0
"""Seconds within which all processes of a job must join."""


class MonitorClient:
    """Connection of this process to its monitor, held as a context manager for the whole run."""

    def __init__(self, coordinator: str | None, deadline_s: float):
        """Start this process's monitor; every process of the job must call this.

        Args:
            coordinator: Host:port of process 0; None if JAX detected it.
            deadline_s: Seconds of silence after which a process counts as lost.
        """
        index, name = jax.process_index(), f"{socket.gethostname()}, pid {os.getpid()}"
        host, listener = find_main_address(coordinator), None
        if index == 0:
            is_dual = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if is_dual else socket.AF_INET
            listener = socket.create_server(("", 0), family=family, dualstack_ipv6=is_dual)
        port = listener.getsockname()[1] if listener else 0
        processes = gather([name, port, secrets.token_hex(16)])
        _, hub_port, token = processes[0]
        settings = {
            "index": index,
            "pid": os.getpid(),
            "names": [name for name, *_ in processes],
            "hub": (host, hub_port),
            "hub_fd": listener.fileno() if listener else -1,
            "token": token,
            "deadline_s": deadline_s,
        }
        # `ChildProcess` starts a new session, so a signal to the process group does not reach the
        # monitor.
        self._monitor = ChildProcess(
            [sys.executable, "-I", monitor.__file__],
            description="the monitor of this process",
            stderr=None,
            pass_fds=[listener.fileno()] if listener else [],
        )
        if listener:
            listener.close()
        self._reported_loss: queue.Queue[monitor.ProcessLoss] = queue.Queue()
        self._is_failing = False
        self._is_stopping = threading.Event()
        self._should_stop: Callable[[], bool] = lambda: False
        self._is_closed = threading.Event()
        self._send_to_monitor(**settings)
        for work in (self._send_heartbeats, self._read_monitor_messages):
            threading.Thread(target=work, daemon=True, name="jaxrl-peers").start()

    def _send_to_monitor(self, **line: Any) -> None:
        try:
            self._monitor.send(line)
        except ChildExitedError:
            self._is_closed.set()  # the monitor is gone: stop writing

    def _send_heartbeats(self) -> None:
        while not self._is_closed.wait(monitor.HEARTBEAT_INTERVAL_S):
            self._send_to_monitor(alive=True, **({"stop": True} if self._should_stop() else {}))

    def _read_monitor_messages(self) -> None:
        with contextlib.suppress(ChildExitedError):
            while True:
                line = self._monitor.readline()
                if "stop" in line:
                    self._is_stopping.set()
                    continue
                loss = monitor.ProcessLoss.from_line(line)
                self._reported_loss.put(loss)
                if not self._is_failing:
                    # The main thread may wait in a collective that never ends.
                    os._exit(1 if loss.failed else EXIT_LOST)
        if not (self._is_closed.is_set() or self._is_failing):
            os.write(2, b"error: the monitor of this process ended, so losses would go unnoticed\n")
            os._exit(EXIT_LOST)

    def make_global_should_stop(self, should_stop: Callable[[], bool]) -> Callable[[], bool]:
        """Return a function that returns True once `should_stop` returns True in any process."""
        self._should_stop = should_stop
        return lambda: should_stop() or self._is_stopping.is_set()

    def __enter__(self) -> MonitorClient:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Report this process's outcome to the monitor; after a failure, exit the process."""
        has_user_message = isinstance(error, SystemExit)  # its message is for the user
        if error is None or (isinstance(error, SystemExit) and not isinstance(error.code, str)):
            jax.distributed.shutdown()  # waits for the others; the monitor still detects a loss
            self._is_closed.set()
            self._send_to_monitor(finished=True)
            return
        self._is_failing = True
        reason = (
            str(error)
            if has_user_message
            else "".join(traceback.format_exception_only(error)).strip()
        )
        reason = redact(escape_control_chars(reason))  # the monitor, another process, prints it
        self._send_to_monitor(failed=reason)
        # Wait for the hub's report: the loss of another process may have caused this failure.
        index = jax.process_index()
        try:
            loss = self._reported_loss.get(timeout=monitor.FAILURE_WAIT_S + 2 * monitor.GRACE_S)
        except queue.Empty:
            loss = monitor.ProcessLoss(index=index, lost=reason, failed=True)
        if loss.index == index or not has_user_message:
            text = (
                reason
                if has_user_message
                else escape_control_chars(traceback.format_exc()).rstrip("\n")
            )
            sys.stderr.write(f"{text}\n")
        sys.stdout.flush()
        sys.stderr.flush()
        # A normal exit would wait for processes that are gone.
        os._exit(1 if loss.failed else EXIT_LOST)


def join_job(job: Job, *, deadline_s: float) -> MonitorClient | None:
    """Join the job before JAX uses any device; return None if the job has only one process.

    The process ends with `EXIT_LOST` if not all processes join within `JOIN_TIMEOUT_S` seconds.

    Raises:
        OSError: Process 0 cannot listen on the coordinator's port.
    """
    init_options: dict[str, Any] = {}
    if job.coordinator is not None:
        if job.process_id == 0:
            _check_port(job.coordinator)
        init_options = {
            "coordinator_address": job.coordinator,
            "num_processes": job.num_processes,
            "process_id": job.process_id,
            **_make_bind_options(job.coordinator),
            # This process uses all devices of its host; under Slurm JAX would give it only one.
            "cluster_detection_method": "deactivate",
        }
    # The service's handler would swallow SIGTERM, which `watch_stop_signals` handles.
    jax.config.update("jax_enable_preemption_service", False)
    # On a loss JAX ends processes without naming the lost one, so the monitors must be faster.
    with _report_waiting(job):
        jax.distributed.initialize(
            **init_options,
            heartbeat_timeout_seconds=int(2 * deadline_s + 60),
            initialization_timeout=int(
                JOIN_TIMEOUT_S + 60
            ),  # `_report_waiting` ends first; JAX dumps a stack
        )
    return MonitorClient(job.coordinator, deadline_s) if jax.process_count() > 1 else None


def _check_port(coordinator: str) -> None:
    """Check that the coordinator's port is free. JAX's error names neither the port nor a fix."""
    _, _, port = coordinator.rpartition(":")
    bind_host, _, _ = (
        _make_bind_options(coordinator).get("coordinator_bind_address", "").rpartition(":")
    )
    host = bind_host.strip("[]")
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        socket.create_server((host, int(port)), family=family).close()
    except OSError as error:
        why = os.strerror(error.errno or 0)
        raise OSError(
            f"process 0 cannot listen at {coordinator}: {why}. Name a free port in the "
            "--coordinator of every process (under Slurm: JAX_COORDINATOR_PORT)."
        ) from error


@contextlib.contextmanager
def _report_waiting(
    job: Job, *, silent_s: float = 10.0, limit_s: float = JOIN_TIMEOUT_S
) -> Iterator[None]:
    """Report a wait of `silent_s` seconds for other processes; exit after `limit_s` seconds."""
    has_joined = threading.Event()
    who = "" if job.process_id is None else f"process {job.process_id} of {job.num_processes}: "
    where = "" if job.coordinator is None else f" at {job.coordinator}, process 0's address,"

    def watch() -> None:
        # Do not use print: the main thread may hold the buffer while it blocks in JAX.
        if not has_joined.wait(silent_s):
            text = f"{who}waiting for the other processes{where} for {limit_s:.0f} s at most"
            os.write(2, f"{text}\n".encode())
            if not has_joined.wait(limit_s - silent_s):
                text = (
                    f"{who}not all processes joined{where} within {limit_s:.0f} s; see their logs"
                )
                os.write(2, f"error: {text}\n".encode())
                os._exit(EXIT_LOST)

    threading.Thread(target=watch, daemon=True, name="jaxrl-join").start()
    try:
        yield
    finally:
        has_joined.set()


def _make_bind_options(coordinator: str) -> dict[str, Any]:
    """Return the options that bind JAX's coordinator to its address if that is a loopback address.

    Returns {} for other addresses.
    """
    host = coordinator.rpartition(":")[0].strip("[]")
    with contextlib.suppress(ValueError):  # raised for a host name
        if ipaddress.ip_address(host).is_loopback:
            return {"coordinator_bind_address": coordinator}
    return {"coordinator_bind_address": coordinator} if host == "localhost" else {}


def find_main_address(coordinator: str | None) -> str:
    """Return an address of process 0 that all hosts can reach; all processes must call this."""
    if coordinator is not None:
        return coordinator.rpartition(":")[0].strip("[]")
    return broadcast(find_local_address())


def find_local_address() -> str:
    """Return this host's address on its default route, or its host name if it has none."""
    for family, remote in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((remote, 9))  # reserved for documentation; UDP sends nothing
            return str(probe.getsockname()[0])
    return socket.gethostname()

"""The coordinator's port, asked before a process joins a job: whether another program has it."""

from __future__ import annotations

import socket

from jaxrl.runtime.job import Job

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""With which a client of HTTP/2 begins, and empty settings (RFC 9113, sections 3.4 and 6.5)."""
_SETTINGS = 4  # the type of the frame with which a server answers


def check_coordinator(job: Job, *, timeout_s: float = 5.0) -> None:
    """Refuses a coordinator's address at which something else listens.

    JAX's coordinator speaks gRPC, so HTTP/2. Where nothing listens yet, process 0 has not come.
    Process 0 itself finds out when it listens.

    Args:
        job: of this process.
        timeout_s: for an answer.

    Raises:
        OSError: what listens there gives another answer, or none.
    """
    if not job.coordinator or job.process_id == 0:
        return
    host, _, port = job.coordinator.rpartition(":")
    try:
        connection = socket.create_connection((host.strip("[]"), int(port)), timeout_s)
    except OSError:
        return  # JAX waits for it, and says where
    with connection:
        try:
            connection.sendall(_PREFACE)
            answer = connection.recv(9)
        except OSError:
            answer = b""
    if answer[3:4] != bytes([_SETTINGS]):
        raise OSError(
            f"process {job.process_id} found another program than process 0 at {job.coordinator}: "
            "the port is taken. Name a free port in the --coordinator of every process (under "
            "Slurm: JAX_COORDINATOR_PORT)."
        )

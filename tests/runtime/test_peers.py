"""A process that cannot join its job."""

import queue
import socket

import pytest

from jaxrl.runtime import peers
from jaxrl.runtime.job import Job


@pytest.mark.parametrize("host", ["127.0.0.1", "host7"])
def test_process_0_cannot_use_a_taken_port(host):
    with socket.create_server(("", 0)) as taken:
        coordinator = f"{host}:{taken.getsockname()[1]}"
        job = Job(coordinator=coordinator, num_processes=2, process_id=0)
        with pytest.raises(OSError, match=f"process 0 cannot listen at {coordinator}: Address alr"):
            peers.join_job(job, deadline_s=10)
    peers._check_port(coordinator)  # free again


def test_a_process_reports_that_it_waits_and_gives_up(capfd, monkeypatch):
    exits = queue.Queue()
    monkeypatch.setattr("os._exit", exits.put)
    job = Job(coordinator="host7:1234", num_processes=4, process_id=3)
    with peers._report_waiting(job, silent_s=0.05, limit_s=0.1):
        assert exits.get(timeout=10) == peers.EXIT_LOST
    waiting, error = capfd.readouterr().err.splitlines()
    wanted = "waiting for the other processes at host7:1234, process 0's address, for"
    assert waiting.startswith(f"process 3 of 4: {wanted}")
    assert error.startswith("error: process 3 of 4: not all processes joined at host7:1234")

"""Checks of the coordinator before a process joins a job, and addresses of the processes."""

import http.server
import queue
import socket
import subprocess
import sys
import threading
import time

import pytest

from jaxrl.runtime import peers
from jaxrl.runtime.job import Job
from jaxrl.runtime.peers import check_coordinator
from tests.runs import free_port

COORDINATOR = "import jax, sys; jax.distributed.initialize(sys.argv[1], 2, 0)"


def job(port, index=1):
    return Job(coordinator=f"127.0.0.1:{port}", num_processes=2, process_id=index)


def test_the_coordinator_of_jax_is_recognized():
    port = free_port()
    check_coordinator(job(port))  # nothing listens yet
    started = subprocess.Popen([sys.executable, "-c", COORDINATOR, f"127.0.0.1:{port}"])
    try:
        for _ in range(600):
            with socket.socket() as client:
                if client.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        else:
            pytest.fail("JAX's coordinator did not start")
        check_coordinator(job(port))
    finally:
        started.kill()
        started.wait()


def test_another_program_at_the_port_is_refused():
    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler
    ) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port = server.server_address[1]
        with pytest.raises(
            OSError, match=f"process 1 found a program other .* at 127.0.0.1:{port}: the"
        ):
            check_coordinator(job(port))
        check_coordinator(job(port, index=0))  # process 0 fails when it listens
        server.shutdown()
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        pytest.raises(OSError, match="the port is taken"),
    ):
        check_coordinator(job(listener.getsockname()[1]), timeout_s=0.2)


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

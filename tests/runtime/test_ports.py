"""The coordinator's port before a process joins: JAX's coordinator is known, others are told."""

import http.server
import os
import socket
import subprocess
import sys
import threading
import time

import pytest

from jaxrl.runtime.job import Job
from jaxrl.runtime.ports import check_coordinator
from tests.helpers import ROOT

COORDINATOR = "import jax, sys; jax.distributed.initialize(sys.argv[1], 2, 0)"


def job(port, index=1):
    return Job(coordinator=f"127.0.0.1:{port}", num_processes=2, process_id=index)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def test_nothing_listens_yet():
    check_coordinator(job(free_port()))


def test_jaxs_own_coordinator_is_known():
    port = free_port()
    started = subprocess.Popen([sys.executable, "-c", COORDINATOR, f"127.0.0.1:{port}"])
    try:
        for _ in range(600):
            with socket.socket() as tried:
                if tried.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        else:
            pytest.fail("JAX's coordinator did not come")
        check_coordinator(job(port))
    finally:
        started.kill()
        started.wait()


def test_a_web_server_is_told():
    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler
    ) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port = server.server_address[1]
        with pytest.raises(OSError, match=f"process 1 found another .* at 127.0.0.1:{port}: the"):
            check_coordinator(job(port))
        check_coordinator(job(port, index=0))  # which finds out when it listens
        server.shutdown()


def test_a_silent_listener_is_told():
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        pytest.raises(OSError, match="the port is taken"),
    ):
        check_coordinator(job(listener.getsockname()[1]), timeout_s=0.2)


def test_every_process_of_a_job_ends_within_seconds(tiny_world, tmp_path):
    """Waiting for the others would take 300 seconds."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        started = time.monotonic()
        processes = [
            subprocess.Popen(
                [
                    *(sys.executable, "-m", "jaxrl.launch"),
                    *(f"--config=configs/debug_tiny.py:{tiny_world}", f"--workdir={tmp_path}/run"),
                    *(f"--coordinator={where}", "--num_processes=2", f"--process_id={index}"),
                ],
                cwd=ROOT,
                env=os.environ,
                stderr=subprocess.PIPE,
                text=True,
            )
            for index in range(2)
        ]
        try:
            said = [process.communicate(timeout=100)[1].strip() for process in processes]
        finally:
            for process in processes:
                process.kill()
    assert [process.returncode for process in processes] == [1, 1], said
    assert said[0].startswith(f"error: process 0 cannot listen at {where}: Address already in use")
    assert said[1].startswith(f"error: process 1 found another program than process 0 at {where}")
    assert time.monotonic() - started < 60  # of which most is loading JAX on a busy machine
    assert not (tmp_path / "run").exists()

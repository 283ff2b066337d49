"""The coordinator's port before a process joins, and addresses and ports of those that do."""

import http.server
import ipaddress
import queue
import socket
import subprocess
import sys
import threading
import time

import pytest

from jaxrl.runtime import peers as joining
from jaxrl.runtime.job import Job
from jaxrl.runtime.peers import check_coordinator

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
        with pytest.raises(
            OSError, match=f"process 1 found a program other .* at 127.0.0.1:{port}: the"
        ):
            check_coordinator(job(port))
        check_coordinator(job(port, index=0))  # which finds out when it listens
        server.shutdown()


def test_a_silent_listener_is_told():
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        pytest.raises(OSError, match="the port is taken"),
    ):
        check_coordinator(job(listener.getsockname()[1]), timeout_s=0.2)


@pytest.mark.parametrize("host", ["127.0.0.1", "host7"])
def test_a_port_that_is_taken(host):
    with socket.create_server(("", 0)) as taken:
        coordinator = f"{host}:{taken.getsockname()[1]}"
        job = Job(coordinator=coordinator, num_processes=2, process_id=0)
        with pytest.raises(OSError, match=f"process 0 cannot listen at {coordinator}: Address alr"):
            joining.join_job(job, deadline_s=10)
    joining._check_port(coordinator)  # which is free now


@pytest.mark.parametrize("comes", [True, False])
def test_what_a_process_waits_for(capfd, monkeypatch, comes):
    ended = queue.Queue()
    monkeypatch.setattr("os._exit", ended.put)
    job = Job(coordinator="host7:1234", num_processes=4, process_id=3)
    with joining._report_waiting(job, silent_s=0.05, limit_s=60 if comes else 0.1):
        if comes:
            time.sleep(0.2)
        else:
            assert ended.get(timeout=10) == joining.EXIT_LOST
    waiting, *error = capfd.readouterr().err.splitlines()
    wanted = "waiting for the other processes at host7:1234, process 0's address, for"
    assert waiting.startswith(f"process 3 of 4: {wanted}")
    assert [line.partition(",")[0] for line in error] == (
        [] if comes else ["error: process 3 of 4: not all processes joined at host7:1234"]
    )


def test_the_monitors_are_reached_where_the_coordinator_is():
    for host in ("127.0.0.1", "localhost"):
        assert ipaddress.ip_address(joining.find_reachable_address(host)).is_loopback
    assert joining.find_reachable_address("no-such-host.invalid") == "no-such-host.invalid"
    assert joining._make_bind_options("127.0.0.1:7") == {"coordinator_bind_address": "127.0.0.1:7"}
    assert joining._make_bind_options("host0:7") == joining._make_bind_options("10.0.0.1:7") == {}
    with joining.open_listener(["127.0.0.1"] * 3) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
    # Several routes, or one that is not this host's own: at all of its addresses.
    for routes in (["127.0.0.1", "192.0.2.1"], ["192.0.2.1"], ["no-such-host.invalid"]):
        with joining.open_listener(routes) as listener:
            assert ipaddress.ip_address(listener.getsockname()[0]).is_unspecified


def test_where_the_first_process_is_reached(monkeypatch):
    assert joining.find_main_address("host0:1234") == "host0"
    assert joining.find_main_address("[::1]:1234") == "::1"
    # Where JAX has found the coordinator by itself: an address that this host has.
    address = joining.find_main_address(None)
    with joining.open_listener([joining.find_reachable_address(address)] * 2) as listener:
        assert listener.getsockname()[0] in (address, joining.find_reachable_address(address))

    def no_network(*_):
        raise OSError("Network is unreachable")

    monkeypatch.setattr(joining.socket.socket, "connect", no_network)
    assert joining.find_local_address() == socket.gethostname()


def test_ipv6_loopback_is_listened_to():
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6) as listener:
            port = listener.getsockname()[1]
    except OSError:
        pytest.skip("this host has no IPv6")
    joining._check_port(f"[::1]:{port}")
    with joining.open_listener(["::1"]) as listener:
        assert listener.getsockname()[0] == "::1"

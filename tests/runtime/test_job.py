"""Flags, addresses and ports of a job, before its processes meet."""

import ipaddress
import queue
import socket
import time

import pytest

from jaxrl.runtime import job as joining
from jaxrl.runtime.job import Job, find_job, first_host

NOTHING = {"coordinator": None, "num_processes": None, "process_id": None, "cluster": None}


def test_a_process_on_its_own_has_no_job():
    assert find_job(**NOTHING) is None


def test_explicit_flags():
    flags = {"coordinator": "host7:1234", "num_processes": 4, "process_id": 3, "cluster": None}
    assert find_job(**flags) == Job(coordinator="host7:1234", num_processes=4, process_id=3)


@pytest.mark.parametrize("host", ["127.0.0.1", "host7"])
def test_a_port_that_is_taken(host):
    with socket.create_server(("", 0)) as taken:
        coordinator = f"{host}:{taken.getsockname()[1]}"
        job = Job(coordinator=coordinator, num_processes=2, process_id=0)
        with pytest.raises(OSError, match=f"process 0 cannot listen at {coordinator}: Address alr"):
            joining.join(job, deadline_s=10)
    joining._check_port(coordinator)  # which is free now


@pytest.mark.parametrize("comes", [True, False])
def test_what_a_process_waits_for(capfd, monkeypatch, comes):
    ended = queue.Queue()
    monkeypatch.setattr("os._exit", ended.put)
    job = Job(coordinator="host7:1234", num_processes=4, process_id=3)
    with joining._waiting(job, silent_s=0.05, limit_s=60 if comes else 0.1):
        if comes:
            time.sleep(0.2)
        else:
            assert ended.get(timeout=10) == joining.EXIT_LOST
    waiting, *error = capfd.readouterr().err.splitlines()
    wanted = "waiting for the other processes at host7:1234, process 0's address, for"
    assert waiting.startswith(f"process 3 of 4: {wanted}")
    assert [line.partition(",")[0] for line in error] == (
        [] if comes else ["error: process 3 of 4: not all processes came at host7:1234"]
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"num_processes": 2}, "--num_processes came without --coordinator, --process_id"),
        (
            {"coordinator": "a:1", "num_processes": 2, "process_id": 2},
            "--process_id=2 with --num_processes=2; expected 0 to 1",
        ),
        (
            {"coordinator": "a", "num_processes": 2, "process_id": 0},
            "--coordinator='a'; expected host:port",
        ),
        (
            {"coordinator": "a:65536", "num_processes": 2, "process_id": 0},
            "--coordinator='a:65536'; expected host:port of process 0, the port from 1 to 65535",
        ),
        ({"cluster": "slurm", "process_id": 0}, "--cluster=slurm and --process_id were both set"),
    ],
)
def test_flags_that_do_not_fit_are_refused(flags, message):
    with pytest.raises(ValueError, match=message):
        find_job(**NOTHING | flags)


def test_slurm(monkeypatch):
    variables = {
        "SLURM_JOB_ID": "70003",
        "SLURM_STEP_NODELIST": "gpu[017-020,031]",
        "SLURM_NTASKS": "5",
        "SLURM_PROCID": "2",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    job = find_job(**NOTHING | {"cluster": "slurm"})
    assert job == Job(coordinator=f"gpu017:{61_440 + 70_003 % 4096}", num_processes=5, process_id=2)
    monkeypatch.delenv("SLURM_PROCID")
    with pytest.raises(ValueError, match=r"lacks SLURM_PROCID; start the command with srun"):
        find_job(**NOTHING | {"cluster": "slurm"})


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("node[3-5]", "node3"),
        ("node[003,007-015],host2", "node003"),
        ("a1,node[3-5]", "a1"),
        ("rack[2-3]n,x", "rack2n"),
    ],
)
def test_first_host_of_a_node_list(nodes, first):
    assert first_host(nodes) == first


def test_the_monitors_are_reached_where_the_coordinator_is():
    for host in ("127.0.0.1", "localhost"):
        assert ipaddress.ip_address(joining.route_to(host)).is_loopback
    assert joining.route_to("no-such-host.invalid") == "no-such-host.invalid"
    assert joining._bound("127.0.0.1:7") == {"coordinator_bind_address": "127.0.0.1:7"}
    assert joining._bound("host0:7") == joining._bound("10.0.0.1:7") == {}
    with joining.listen_for(["127.0.0.1"] * 3) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
    # Several routes, or one that is not this host's own: at all of its addresses.
    for routes in (["127.0.0.1", "192.0.2.1"], ["192.0.2.1"], ["no-such-host.invalid"]):
        with joining.listen_for(routes) as listener:
            assert ipaddress.ip_address(listener.getsockname()[0]).is_unspecified


def test_where_the_first_process_is_reached(monkeypatch):
    assert joining.first_address("host0:1234") == "host0"
    assert joining.first_address("[::1]:1234") == "::1"
    # Where JAX has found the coordinator by itself: an address that this host has.
    address = joining.first_address(None)
    with joining.listen_for([joining.route_to(address)] * 2) as listener:
        assert listener.getsockname()[0] in (address, joining.route_to(address))

    def no_network(*_):
        raise OSError("Network is unreachable")

    monkeypatch.setattr(joining.socket.socket, "connect", no_network)
    assert joining.own_address() == socket.gethostname()


def test_ipv6_loopback_is_listened_to():
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6) as listener:
            port = listener.getsockname()[1]
    except OSError:
        pytest.skip("this host has no IPv6")
    joining._check_port(f"[::1]:{port}")
    with joining.listen_for(["::1"]) as listener:
        assert listener.getsockname()[0] == "::1"

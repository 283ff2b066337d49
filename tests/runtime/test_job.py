"""The place of a process in a job, from flags or the environment of a cluster."""

import pytest

from jaxrl.runtime.job import Job, find_job, parse_first_host

NOTHING = {"coordinator": None, "num_processes": None, "process_id": None, "cluster": None}


def test_a_single_process_has_no_job():
    assert find_job(**NOTHING) is None


def test_flags_describe_the_job():
    flags = {"coordinator": "host7:1234", "num_processes": 4, "process_id": 3, "cluster": None}
    assert find_job(**flags) == Job(coordinator="host7:1234", num_processes=4, process_id=3)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"num_processes": 2}, "--num_processes set without --coordinator, --process_id"),
        ({"coordinator": "a:1", "num_processes": 2, "process_id": 2}, "expected host:port"),
        ({"coordinator": "a", "num_processes": 2, "process_id": 0}, "expected host:port"),
        ({"cluster": "slurm", "process_id": 0}, "--cluster=slurm and --process_id were both set"),
    ],
)
def test_inconsistent_flags_are_refused(flags, message):
    with pytest.raises(ValueError, match=message):
        find_job(**NOTHING | flags)


def test_slurm_variables_describe_the_job(monkeypatch):
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
        ("node1,node2", "node1"),
        ("node[003,007-015],host2", "node003"),
        ("a1,node[3-5]", "a1"),
        ("rack[2-3]n,x", "rack2n"),
    ],
)
def test_first_host_of_a_node_list(nodes, first):
    assert parse_first_host(nodes) == first

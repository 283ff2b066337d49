"""Identity of this process in a multi-process job, read from flags or the cluster."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Job:
    """Identity of this process in its job, and the address of process 0."""

    # Host:port of process 0. JAX detects this field and the next two if they are None.
    coordinator: str | None
    num_processes: int | None
    process_id: int | None  # from 0


def find_job(
    *,
    coordinator: str | None,
    num_processes: int | None,
    process_id: int | None,
    cluster: str | None,
) -> Job | None:
    """Return the job that the flags describe; None for a single process.

    Raises:
        ValueError: The flags are incomplete or contradictory, or the cluster did not set its
            environment variables.
    """
    flags = {
        "--coordinator": coordinator,
        "--num_processes": num_processes,
        "--process_id": process_id,
    }
    given = [name for name, value in flags.items() if value is not None]
    if cluster is not None and given:
        raise ValueError(f"--cluster={cluster} and {given[0]} were both set; expected only one.")
    if cluster == "slurm":
        return _read_slurm_job()
    if cluster == "tpu":
        return Job(coordinator=None, num_processes=None, process_id=None)
    if not given:
        return None
    if len(given) < len(flags):
        missing = [name for name in flags if name not in given]
        raise ValueError(f"{', '.join(given)} set without {', '.join(missing)}; set all three.")
    assert coordinator is not None
    assert num_processes is not None
    assert process_id is not None
    host, _, port = coordinator.rpartition(":")
    if not (host and port.isdecimal() and 0 <= process_id < num_processes):
        raise ValueError(
            f"--coordinator={coordinator} --num_processes={num_processes} "
            f"--process_id={process_id}; expected host:port of process 0, and an id below the "
            "number of processes."
        )
    return Job(coordinator=coordinator, num_processes=num_processes, process_id=process_id)


def _read_slurm_job() -> Job:
    """Read the job from Slurm's environment variables; derive the port from the job id."""
    names = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID")
    missing = [name for name in names if name not in os.environ]
    if missing:
        raise ValueError(
            f"--cluster=slurm, but the environment lacks {', '.join(missing)}; start the command "
            "with srun, as launch/slurm.sh does."
        )
    job, nodes, count, index = (os.environ[name] for name in names)
    num_nodes = os.environ.get("SLURM_STEP_NUM_NODES", count)
    if count != num_nodes:
        raise ValueError(
            f"SLURM_NTASKS={count} on {num_nodes} nodes; expected one task per node, which uses "
            "all its devices: set --ntasks-per-node=1."
        )
    port = os.environ.get("JAX_COORDINATOR_PORT") or 61_440 + int(job) % 4096
    return Job(
        coordinator=f"{parse_first_host(nodes)}:{port}",
        num_processes=int(count),
        process_id=int(index),
    )


def parse_first_host(nodes: str) -> str:
    """Return the first host of a Slurm node list, such as `a12` for `a[12-15,20],b3`."""
    head, bracket, rest = nodes.partition("[")
    if not bracket or "," in head:
        return nodes.partition(",")[0]
    first = rest.partition("]")[0].replace(",", "-").partition("-")[0]
    suffix = rest.partition("]")[2].partition(",")[0]
    return head + first + suffix

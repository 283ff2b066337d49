r"""Measure scaling overhead: equal work per device on more devices and processes.

    python -m benchmarks.scaling [--jobs=1x1,1x2,1x4,1x8,2x1,2x2] [--model=...] [--new_tokens=...]

A job is written as processes x devices per process. The devices are virtual CPU devices of this
machine and the processes communicate over 127.0.0.1, so all of them share its cores, and more
devices are not faster. A rate equal to that of one device means that there is no overhead. Along
the mesh axis `data`, each device has the rows and sequences of the one-device job. Each process
samples on its local devices; updates use all devices.

Every job starts new processes. Rates are totals over all devices; `over one` is the ratio to the
first job.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental import multihost_utils

from benchmarks import common, rollout, update
from jaxrl.runtime.sharding import make_mesh


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """Work of each device; every field is a flag."""

    num_prompts: int
    group_size: int
    prompt_tokens: int
    new_tokens: int
    row_tokens: int  # length of packed rows in the update
    micro_rows: int


WORK = {
    "cpu": Work(
        num_prompts=2, group_size=4, prompt_tokens=64, new_tokens=64, row_tokens=256, micro_rows=2
    ),
    "h200": Work(
        num_prompts=16, group_size=8, prompt_tokens=512, new_tokens=512, row_tokens=2048,
        micro_rows=2,
    ),
}  # fmt: skip


def measure(model: common.ModelSizes, work: Work, warm_up: int, repetitions: int) -> dict[str, Any]:
    """Measure the tokens per second of sampling and of the update, over all devices."""
    mesh = make_mesh(data=-1, fsdp=1, tensor=1)
    num_devices, num_local = len(jax.devices()), len(jax.local_devices())
    # Sampling: each process has its own requests, on its own devices.
    sampling = rollout.Even(
        num_prompts=work.num_prompts * num_local,
        group_size=work.group_size,
        prompt_tokens=work.prompt_tokens,
        new_tokens=work.new_tokens,
        num_rows=work.num_prompts * work.group_size * num_local,
        chunk_tokens=16,
        tail_rows=0,
    )
    total = work.prompt_tokens + work.new_tokens
    engine = rollout.make_engine(model, sampling, mesh, max_total_tokens=total)
    engine.row_sizes = engine.row_sizes[-1:]
    engine.set_weights(common.init_random_params(model, mesh))

    def sample(number: int) -> None:
        number = number * jax.process_count() + jax.process_index()
        rollout.sample_all(engine, rollout.make_even_requests(model, sampling, number))

    sampled = num_devices * work.num_prompts * work.group_size * work.new_tokens
    figures = {"rollout": sampled / measure_seconds(sample, warm_up, repetitions)}
    engine.release()
    # Update: one batch over the devices of all processes.
    training = dataclasses.replace(
        update.WORK["cpu"],
        num_groups=work.num_prompts * num_devices,
        group_size=work.group_size,
        prompt_tokens=work.prompt_tokens,
        new_tokens=work.new_tokens,
        spread=0.0,
        row_tokens=work.row_tokens,
        micro_rows=work.micro_rows * num_devices,
    )
    packed, state, step = update.start(model, training, mesh, warm_up + repetitions)

    def train(_: int) -> None:
        nonlocal state
        state = step(state)

    return figures | {"update": packed.num_tokens / measure_seconds(train, warm_up, repetitions)}


def measure_seconds(run: Callable[[int], None], warm_up: int, repetitions: int) -> float:
    """Return the median seconds of a repetition, until the last process ends it."""

    def run_all(number: int) -> None:
        run(number)
        multihost_utils.sync_global_devices(f"end {number}")

    multihost_utils.sync_global_devices("start")
    timing = common.repeat(run_all, warm_up=warm_up, repetitions=repetitions)
    return common.summarize(timing.seconds)["median"]


def run_job(num_processes: int, num_devices: int, argv: Sequence[str]) -> dict[str, Any]:
    """Run a job; return the figures of its first process.

    Raises:
        RuntimeError: A process failed. The message ends with its output.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": str(num_devices), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "benchmarks.scaling", *argv, "--worker"]
    with contextlib.ExitStack() as stack:
        outputs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(num_processes)]
        processes = []
        for index, file in enumerate(outputs):
            worker = [*command, f"127.0.0.1:{port},{num_processes},{index}"]
            one = subprocess.Popen(worker, env=environment, stdout=file, stderr=subprocess.STDOUT)
            processes.append(one)
            stack.callback(one.wait)
            stack.callback(one.kill)
        codes = [process.wait() for process in processes]
        for file in outputs:
            file.seek(0)
        texts = [file.read() for file in outputs]
    for code, text in zip(codes, texts, strict=True):
        if code:
            raise RuntimeError(
                f"a process of {num_processes} x {num_devices} ended with {code}:\n{text[-2000:]}"
            )
    return json.loads(texts[0].splitlines()[-1])


def read_jobs(text: str) -> list[tuple[int, int]]:
    """Parse `--jobs` into pairs: number of processes, and devices per process."""
    jobs = []
    for job in text.split(","):
        processes, _, devices = job.partition("x")
        if not (processes.isdecimal() and devices.isdecimal()):
            raise argparse.ArgumentTypeError(f"{job!r}; expected processes x devices, like 2x4")
        jobs.append((int(processes), int(devices)))
    return jobs


def main(argv: Sequence[str] | None = None) -> dict[str, Any] | None:
    """Run the benchmark and return its record, or run a worker and return None."""
    argv = sys.argv[1:] if argv is None else list(argv)
    first = argparse.ArgumentParser(add_help=False)
    first.add_argument("--jobs", type=read_jobs, default="1x1,1x2,1x4,1x8,2x1,2x2")
    first.add_argument("--worker")
    worker_flags, rest = first.parse_known_args(argv)
    if worker_flags.worker:
        address, count, index = worker_flags.worker.split(",")
        if int(count) > 1:
            jax.distributed.initialize(address, int(count), int(index))
    flags, model, work, hardware = common.parse_flags(__doc__ or "", WORK, rest)
    if worker_flags.worker:
        print(json.dumps(measure(model, work, flags.warm_up, flags.repetitions)), flush=True)
        return None
    rates = {f"{p} x {d}": run_job(p, d, rest) for p, d in worker_flags.jobs}
    one = next(iter(rates.values()))
    figures = {
        name: {f"{part} tokens_per_s": rate for part, rate in by_part.items()}
        | {f"{part} over one": rate / one[part] for part, rate in by_part.items()}
        for name, by_part in rates.items()
    }
    return common.report_figures("scaling", flags, model, work, hardware, figures)


if __name__ == "__main__":
    main()

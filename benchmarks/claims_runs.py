"""Runs of the claims' benchmark: started side by side, resumed when killed, read when done.

A job is one command and one folder. Its arguments are written to the folder; found there again, a
finished job is kept and one that was killed goes on, since `jaxrl.launch` does. A job with other
arguments begins anew, and so does one that began before what it needs was last made.
"""

from __future__ import annotations

import concurrent.futures
import json
import math
import os
import queue
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxrl.envs.base import Outcome
from jaxrl.logs.statistics import pass_at_k

ROOT = Path(__file__).parents[1]
ARGUMENTS, FINISHED, OUTPUT = "arguments.json", "finished.json", "output.txt"

Answer = Mapping[str, Any]
"""One sample of one question, as `eval/*.json` has it."""

Measures = dict[str, float]


@dataclass(frozen=True)
class Job:
    """A command that fills a folder, and the jobs that must be done before."""

    folder: Path
    module: str
    arguments: tuple[str, ...]
    needs: tuple[Path, ...] = ()

    def is_finished(self) -> bool:
        """True where the folder was filled by just this command, from what it needs as it is."""
        return (self.folder / FINISHED).exists() and self._has_begun()

    def _has_begun(self) -> bool:
        """True where this very command began, and all that it needs was done before."""
        path = self.folder / ARGUMENTS
        if not path.exists() or json.loads(path.read_text()) != [self.module, *self.arguments]:
            return False
        ends = [need / FINISHED for need in self.needs]
        return all(e.exists() and e.stat().st_mtime <= path.stat().st_mtime for e in ends)

    def run(self, core: int | None, cache: Path | None) -> None:
        """Runs the command to its end.

        Args:
            core: that it keeps to; None leaves it to the system.
            cache: see `environment`; None runs it as from a user's shell.

        Raises:
            RuntimeError: it failed; names the file with its output.
        """
        if not self._has_begun():
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)
            (self.folder / ARGUMENTS).write_text(json.dumps([self.module, *self.arguments]))
        started = time.perf_counter()
        with open(self.folder / OUTPUT, "ab") as output:
            done = subprocess.run(
                [*pinned(core), sys.executable, "-m", self.module, *self.arguments],
                cwd=ROOT,
                env=None if cache is None else environment(cache),
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        if done.returncode != 0:
            raise RuntimeError(
                f"python -m {self.module} ended with {done.returncode}; its output is in "
                f"{self.folder / OUTPUT}. The same command of the benchmark goes on from there."
            )
        seconds = time.perf_counter() - started
        (self.folder / FINISHED).write_text(json.dumps({"seconds": seconds}))


def pinned(core: int | None) -> list[str]:
    """The beginning of a command that keeps a process on one core, where the system can."""
    if core is None or shutil.which("taskset") is None:
        return []
    return ["taskset", "--cpu-list", str(core)]


def environment(cache: Path) -> dict[str, str]:
    """One thread a process, for runs side by side; compiled programs are shared."""
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
        "OMP_NUM_THREADS": "1",
    }


def run_jobs(
    jobs: Sequence[Job], *, num_workers: int, cache: Path, log: Callable[[str], None] = print
) -> None:
    """Runs what is not finished, as soon as what it needs is, so many side by side.

    Raises:
        RuntimeError: a job failed. Those under way are waited for, nothing new begins.
    """
    cores: queue.SimpleQueue[int | None] = queue.SimpleQueue()
    for core in allowed_cores(num_workers):
        cores.put(core)
    done = finished(jobs)
    waiting = [job for job in jobs if job.folder not in done]
    log(f"{len(done)} of {len(jobs)} jobs are done")

    def run(job: Job) -> Job:
        core = cores.get()
        try:
            job.run(core, cache)
        finally:
            cores.put(core)
        return job

    with concurrent.futures.ThreadPoolExecutor(num_workers) as pool:
        running: set[concurrent.futures.Future[Job]] = set()
        while waiting or running:
            ready = [job for job in waiting if done.issuperset(job.needs)]
            for job in ready[: num_workers - len(running)]:
                waiting.remove(job)
                running.add(pool.submit(run, job))
            if not running:
                raise RuntimeError(f"{waiting[0].folder} needs {waiting[0].needs}, which none make")
            over, running = concurrent.futures.wait(
                running, return_when=concurrent.futures.FIRST_COMPLETED
            )
            for future in over:
                job = future.result()
                done.add(job.folder)
                log(f"{len(done)} of {len(jobs)}: {job.folder} {seconds_of(job.folder):.0f} s")


def finished(jobs: Sequence[Job]) -> set[Path]:
    """Folders of the jobs that are finished, and all that they need with them."""
    done = {job.folder for job in jobs if job.is_finished()}
    while lacking := {j.folder for j in jobs if j.folder in done and not done.issuperset(j.needs)}:
        done -= lacking
    return done


def allowed_cores(num_workers: int) -> list[int | None]:
    """One core for each worker; None where there are fewer cores than workers."""
    if not hasattr(os, "sched_getaffinity"):
        return [None] * num_workers
    cores = sorted(os.sched_getaffinity(0))
    return list(cores[:num_workers]) if len(cores) >= num_workers else [None] * num_workers


def seconds_of(folder: Path) -> float:
    """Seconds that a finished job took, the last time it was started."""
    return float(json.loads((folder / FINISHED).read_text())["seconds"])


@dataclass(frozen=True, kw_only=True)
class Record:
    """Measures that one run, one arm with one seed, left behind.

    Attributes:
        steps: of each metric of the training steps, step and value; steps count from 1.
        evaluations: measures at each evaluation while training, by training step.
        final: measures at the end, on the questions that are reported.
    """

    steps: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    evaluations: dict[int, Measures] = field(default_factory=dict)
    final: Measures = field(default_factory=dict)


def read_record(
    folder: Path, *, held_out: Path | None = None, before: Record | None = None
) -> Record:
    """Reads a workdir.

    Args:
        folder: of a run whose only stage is `train`.
        held_out: the workdir of the last evaluation, where that was a run of its own.
        before: of the run that this one went on from; its steps come first.
    """
    offset = max(before.evaluations) if before else 0
    steps = {name: list(values) for name, values in before.steps.items()} if before else {}
    for name, values in read_steps(folder).items():
        steps.setdefault(name, []).extend((offset + step, value) for step, value in values)
    evaluations = dict(before.evaluations) if before else {}
    for path in folder.glob("eval/train_*.json"):
        step = offset + int(path.stem.removeprefix("train_"))
        evaluations[step] = measure(read_answers(path))
    evaluations = dict(sorted(evaluations.items()))
    if held_out is not None:
        [path] = held_out.glob("eval/evaluate_*.json")
        final = measure(read_answers(path))
    else:
        final = evaluations[max(evaluations)]
    return Record(steps=steps, evaluations=evaluations, final=final)


def read_steps(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Reads step and value of each metric of a workdir's training steps."""
    steps: dict[str, list[tuple[int, float]]] = {}
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    for record in map(json.loads, lines):
        if record["stage"] != "train" or "actor/num_updates" not in record:
            continue
        for name, value in record.items():
            if isinstance(value, int | float):  # a switch too, as 0 or 1
                steps.setdefault(name, []).append((record["step"], float(value)))
    return steps


def read_answers(path: Path) -> list[Answer]:
    """Every sampled answer of an evaluation."""
    return json.loads(path.read_text(encoding="utf-8"))["questions"]["sampled"]


def measure(answers: Sequence[Answer]) -> Measures:
    """Everything that is reported of an evaluation: of all questions, and by data source.

    Environment errors are left out. A measure without anything to average is left out too.
    """
    answers = [a for a in answers if a["outcome"] != Outcome.ENVIRONMENT_ERROR]
    measures = {}
    for source in ("all", *sorted({a["data_source"] for a in answers})):
        own = [a for a in answers if source in ("all", a["data_source"])]
        for name, value in {**_shares(own), **_pass_at_ks(own)}.items():
            measures[f"{source}/{name}"] = value
    return measures | _reliability(answers)


def _shares(answers: Sequence[Answer]) -> Measures:
    return {
        "exact_match": mean(a["exact_match"] for a in answers),
        "tokens": mean(a["num_sampled"] for a in answers),
        "searches": mean(len(a["searches"]) for a in answers),
        "truncated": mean(a["outcome"] == Outcome.OUT_OF_BUDGET for a in answers),
        "abstained": mean(a["outcome"] == Outcome.ABSTAINED for a in answers),
    }


def _pass_at_ks(answers: Sequence[Answer]) -> Measures:
    """pass@k for powers of two up to the samples that every question has."""
    right: dict[str, list[bool]] = {}
    for answer in answers:
        right.setdefault(answer["task_id"], []).append(answer["exact_match"] == 1.0)
    most = min(map(len, right.values()))
    return {
        f"pass@{k}": mean(pass_at_k(len(own), sum(own), k) for own in right.values())
        for k in (2**exponent for exponent in range(most.bit_length()))
    }


UNANSWERABLE = ("unknown_person", "untold_fact")
"""Data sources of questions that nothing in the corpus answers."""


def _reliability(answers: Sequence[Answer]) -> Measures:
    """Measures of BAPO (https://arxiv.org/abs/2601.11037); nothing where all can be answered.

    Precision is correct over answered, accuracy correct over all, and reliability
    (1 - r) * precision + r * accuracy with r the share of questions that are declined.
    """
    can = [a for a in answers if a["data_source"] not in UNANSWERABLE]
    cannot = [a for a in answers if a["data_source"] in UNANSWERABLE]
    if not can or not cannot:
        return {}
    declined = mean(a["outcome"] == Outcome.ABSTAINED for a in answers)
    accuracy = mean(a["exact_match"] for a in answers)
    answered = [a for a in answers if a["outcome"] != Outcome.ABSTAINED]
    precision = mean(a["exact_match"] for a in answered) if answered else 0.0
    return {
        "answerable/exact_match": mean(a["exact_match"] for a in can),
        "answerable/abstained": mean(a["outcome"] == Outcome.ABSTAINED for a in can),
        "unanswerable/abstained": mean(a["outcome"] == Outcome.ABSTAINED for a in cannot),
        "precision": precision,
        "reliability": (1 - declined) * precision + declined * accuracy,
    }


def mean(values: Iterable[float]) -> float:
    """Mean of at least one value."""
    listed = list(values)
    return math.fsum(listed) / len(listed)

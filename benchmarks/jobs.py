"""Benchmark jobs: commands that each fill a folder.

A job writes its arguments to its folder. If the benchmark is restarted, finished jobs are skipped
and interrupted jobs resume, like runs of `jaxrl.launch`. A job starts over if its arguments have
changed or if a job that it depends on finished after it began.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
ARGUMENTS, FINISHED, OUTPUT = "arguments.json", "finished.json", "output.txt"


@dataclass(frozen=True)
class Job:
    """A command that fills a folder, and the folders of the jobs that it depends on."""

    folder: Path
    module: str
    arguments: tuple[str, ...]
    depends_on: tuple[Path, ...] = ()

    def is_finished(self) -> bool:
        """Return True if the command finished, after the jobs that it depends on."""
        return (self.folder / FINISHED).exists() and self._is_current()

    def _is_current(self) -> bool:
        path = self.folder / ARGUMENTS
        if not path.exists() or json.loads(path.read_text()) != [self.module, *self.arguments]:
            return False
        finish_files = [need / FINISHED for need in self.depends_on]
        return all(e.exists() and e.stat().st_mtime <= path.stat().st_mtime for e in finish_files)

    def run(self, cache: Path | None = None) -> None:
        """Run the command and wait for it.

        Args:
            cache: Folder of the compilation cache; if given, the process has one thread. None
                runs the command with the environment unchanged.

        Raises:
            RuntimeError: The command failed. The message names its output file.
        """
        if not self._is_current():
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)
            (self.folder / ARGUMENTS).write_text(json.dumps([self.module, *self.arguments]))
        started = time.perf_counter()
        with open(self.folder / OUTPUT, "ab") as output:
            process = subprocess.run(
                [sys.executable, "-m", self.module, *self.arguments],
                cwd=ROOT,
                env=None if cache is None else make_one_thread_environment(cache),
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        if process.returncode != 0:
            raise RuntimeError(
                f"python -m {self.module} ended with {process.returncode}; its output is in "
                f"{self.folder / OUTPUT}. Run the benchmark's command again to resume."
            )
        seconds = time.perf_counter() - started
        (self.folder / FINISHED).write_text(json.dumps({"seconds": seconds}))


def make_one_thread_environment(cache: Path) -> dict[str, str]:
    """Return environment variables for a one-thread process with a compilation cache."""
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
        "OMP_NUM_THREADS": "1",
    }


def run_jobs(jobs: Sequence[Job], *, cache: Path | None = None) -> None:
    """Run the unfinished jobs in order. Jobs must come after those that they depend on."""
    for number, job in enumerate(jobs, start=1):
        if not job.is_finished():
            print(f"{number} of {len(jobs)}: {job.module} {' '.join(job.arguments)}", flush=True)
            job.run(cache)


def read_duration_s(folder: Path) -> float:
    """Return the duration of a finished job's last run, in seconds."""
    return float(json.loads((folder / FINISHED).read_text())["seconds"])


def read_steps(workdir: Path) -> dict[str, list[tuple[int, float]]]:
    """Read the training metrics of a run as (step, value) pairs by name."""
    steps: dict[str, list[tuple[int, float]]] = {}
    lines = (workdir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    for record in map(json.loads, lines):
        if record["stage"] != "train" or "actor/num_updates" not in record:
            continue
        for name, value in record.items():
            if isinstance(value, int | float):  # booleans too, as 0 or 1
                steps.setdefault(name, []).append((record["step"], float(value)))
    return steps

"""Jobs of a benchmark: commands that each fill a folder.

A job writes its arguments to the folder. Started again, a finished job is kept, and one that was
killed goes on, since `jaxrl.launch` does. A job whose arguments changed begins anew, and so does
one that began before the last end of a job that it needs.
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
    """A command that fills a folder, and the folders of the jobs that it needs."""

    folder: Path
    module: str
    arguments: tuple[str, ...]
    needs: tuple[Path, ...] = ()

    def is_finished(self) -> bool:
        """Return True if this command has filled the folder after all that it needs was done."""
        return (self.folder / FINISHED).exists() and self._has_begun()

    def _has_begun(self) -> bool:
        path = self.folder / ARGUMENTS
        if not path.exists() or json.loads(path.read_text()) != [self.module, *self.arguments]:
            return False
        ends = [need / FINISHED for need in self.needs]
        return all(e.exists() and e.stat().st_mtime <= path.stat().st_mtime for e in ends)

    def run(self, cache: Path | None = None) -> None:
        """Run the command to its end.

        Args:
            cache: Folder of compiled programs, for a process of one thread; None runs the command
                as a user's shell does.

        Raises:
            RuntimeError: The command failed; the message names the file with its output.
        """
        if not self._has_begun():
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)
            (self.folder / ARGUMENTS).write_text(json.dumps([self.module, *self.arguments]))
        started = time.perf_counter()
        with open(self.folder / OUTPUT, "ab") as output:
            done = subprocess.run(
                [sys.executable, "-m", self.module, *self.arguments],
                cwd=ROOT,
                env=None if cache is None else one_thread(cache),
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


def one_thread(cache: Path) -> dict[str, str]:
    """Return the environment of a process with one thread, whose compiled programs are shared."""
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
        "OMP_NUM_THREADS": "1",
    }


def run_jobs(jobs: Sequence[Job], *, cache: Path | None = None) -> None:
    """Run each job that is not finished; a job comes after those that it needs."""
    for number, job in enumerate(jobs, start=1):
        if not job.is_finished():
            print(f"{number} of {len(jobs)}: {job.module} {' '.join(job.arguments)}", flush=True)
            job.run(cache)


def seconds_of(folder: Path) -> float:
    """Return the seconds that a finished job took, the last time it was started."""
    return float(json.loads((folder / FINISHED).read_text())["seconds"])


def read_steps(workdir: Path) -> dict[str, list[tuple[int, float]]]:
    """Return step and value of each metric of a run's training steps."""
    steps: dict[str, list[tuple[int, float]]] = {}
    lines = (workdir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    for record in map(json.loads, lines):
        if record["stage"] != "train" or "actor/num_updates" not in record:
            continue
        for name, value in record.items():
            if isinstance(value, int | float):  # a switch too, as 0 or 1
                steps.setdefault(name, []).append((record["step"], float(value)))
    return steps

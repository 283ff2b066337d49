"""Three hundred steps of agents: some tools hang for ever, and some clients vanish.

    python -m benchmarks.agent_faults --steps=300 --share=0.05

Trains twice: with sound agents, and with this share of tools that hang and of clients that are
gone; the second run is killed half way and started again. Prints both, and how many trained tokens
a second the second one has beside the first, times its share of episodes without a fault. Checks
that each rewarded trajectory is one that an agent has played, with its reward.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.claims_report import table
from examples import quickstart_world

ROOT = Path(__file__).parents[1]
COMPILED = "perf/num_compilations/update"
AGENT = Path(__file__).with_name("agent_faults_agent.py")
DEADLINE_S = 4.0


def values(world: Path, notes: Path, steps: int, share: float) -> dict[str, Any]:
    """Keys of a run."""
    return {
        "stages": ["train"],
        "num_steps": steps,
        "env.name": "agents",
        "env.agents.function": f"{AGENT}:play",
        "env.agents.settings": {"notes": str(notes), "hang": share, "gone": share},
        "env.agents.deadline_s": DEADLINE_S,
        "env.agents.max_concurrent": 640,
        "reward.weights": {"reward": 1.0},
        "rollout.max_turns": 4,
        "rollout.num_rows": 16,
        "rollout.max_total_tokens": 128,
        "rollout.tasks_per_step": 8,
        "rollout.group_size": 4,
        "rollout.max_failed_steps": 0,
        "filter.unfinished_tasks": 128,
        "loss.correction.level": "token",
        "eval.suites": [],
        "eval.every_steps": 0,
        "checkpoint.every_steps": 25,
        "log.trajectories": -1,
        "optimizer.lr": 3e-4,
    }


def start(world: Path, workdir: Path, settings: Mapping[str, Any]) -> subprocess.Popen[bytes]:
    """A run in a process of its own."""
    workdir.mkdir(parents=True, exist_ok=True)
    file = workdir.with_suffix(".json")
    file.write_text(json.dumps(settings))
    with (workdir.with_suffix(".log")).open("ab") as log:
        return subprocess.Popen(
            [
                *(sys.executable, "-m", "jaxrl.launch"),
                f"--config={ROOT / 'configs' / 'debug_tiny.py'}:{world}",
                *(f"--values={file}", f"--workdir={workdir}"),
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )


def steps_of(workdir: Path) -> list[dict[str, Any]]:
    """Records of the steps so far."""
    file = workdir / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.is_file() else []
    records = [json.loads(line) for line in lines if line.endswith("}")]
    return [record for record in records if "timing_s/step" in record]


def measure(workdir: Path, notes: Path) -> dict[str, Any]:
    """Numbers of a finished run.

    Raises:
        AssertionError: a trajectory was rewarded that no agent has played.
    """
    played = Counter(
        (one["task"], json.dumps(one["ids"]), one["reward"])
        for one in map(json.loads, notes.read_text().splitlines())
    )
    records = steps_of(workdir)
    errors, tokens, older, total = Counter[str](), 0, 0, 0
    for record in records:
        file = workdir / "trajectories" / f"step_{record['step']:06d}.jsonl"
        for trajectory in map(json.loads, file.read_text().splitlines()):
            total += 1
            if trajectory["outcome"] == "environment_error":
                error = next(turn["error"] for turn in trajectory["turns"] if turn["error"])
                errors[error.partition(" (")[0]] += 1
                continue
            ids, mask = trajectory["token_ids"], [*trajectory["loss_mask"], 0]
            runs, run = [], []
            for id, is_sampled in zip([*ids, 0], mask, strict=True):
                if is_sampled:
                    run.append(id)
                elif run:
                    runs.append(run)
                    run = []
            key = (trajectory["task_id"], json.dumps(runs), trajectory["reward"])
            assert played[key] > 0, f"nobody has played {key}"
            played[key] -= 1
            tokens += sum(mask)
            versions = [version for version in trajectory["policy_versions"] if version >= 0]
            older += min(versions) < record["step"] - 1
    # Without the steps in which a process compiles its programs.
    seconds = sum(
        record["timing_s/step"]
        for before, record in itertools.pairwise(records)
        if record[COMPILED] == before[COMPILED]
    )
    return {
        "steps": len(records),
        "trajectories": total,
        "errors": dict(errors),
        "tokens": tokens,
        "seconds": seconds,
        "older": older,
        "reward": [
            statistics.fmean(r["reward/reward/mean"] for r in some if "reward/reward/mean" in r)
            for some in (records[:20], records[-20:])
            if some
        ],
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Runs what is missing and prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--share", type=float, default=0.05)
    parser.add_argument("--workdir", type=Path, default=Path("runs/agent_faults"))
    args = parser.parse_args(argv)
    out = args.workdir.resolve()
    world = out / "world"
    if not world.is_dir():
        sizes = ["--num_people=40", "--num_held_out=8", "--num_demonstrations=40"]
        quickstart_world.main([f"--out={world}", *sizes])
    rows = []
    for name, share in (("sound", 0.0), ("faulty", args.share)):
        workdir, notes = out / name, out / f"{name}.notes"
        settings = values(world, notes, args.steps, share)
        if len(steps_of(workdir)) < args.steps:
            process = start(world, workdir, settings)
            while share and process.poll() is None:
                if len(steps_of(workdir)) >= args.steps // 2 + 7:  # between two checkpoints
                    process.send_signal(signal.SIGKILL)
                    process.wait()
                    print(f"killed after {len(steps_of(workdir))} steps", flush=True)
                    process = start(world, workdir, settings)
                    break
                time.sleep(0.2)
            if process.wait():
                sys.exit(f"the run {name} ended with {process.returncode}; see {workdir}.log")
        numbers = measure(workdir, notes)
        num_errors = sum(numbers["errors"].values())
        rows.append(
            (name, numbers["tokens"] / numbers["seconds"], 1 - num_errors / numbers["trajectories"])
        )
        print(name, json.dumps(numbers), flush=True)
    (_, sound, _), (_, faulty, share) = rows
    shown = [(name, f"{rate:.0f}", f"{sane:.3f}") for name, rate, sane in rows]
    print(table(("run", "trained tokens a second", "episodes without a fault"), shown))
    print(f"{faulty / (sound * share):.2f} of what sound episodes alone would give")


if __name__ == "__main__":
    main()

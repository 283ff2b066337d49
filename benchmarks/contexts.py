"""Episodes of four times the context, learned with each context policy and without any.

    python -m benchmarks.contexts --seeds=0,1,2

Makes the world of configs/trail.py and a warm start for each policy once, then trains each row of
`ROWS` with each seed, and prints a table. Curves go to `--figure`. Killed, it goes on when the same
command is given again.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.claims_report import table
from benchmarks.claims_runs import Job, run_jobs
from benchmarks.collapse import draw, read_curve
from configs import trail

CONFIG = Path(trail.__file__)

LAST, DROP = "last_turns", "drop_observations"
ROWS: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "none": (
        "one context, after which the episode ends",
        LAST,
        {
            **{"rollout.context.name": "none", "rollout.context.max_tokens": 0},
            "rollout.max_total_tokens": 196,
        },
    ),
    LAST: ("the last turn is kept", LAST, {}),
    DROP: ("old observations are dropped", DROP, {"rollout.context.name": DROP}),
}
"""By name: what it says, the policy of its warm start, and changes to configs/trail.py."""


def flags(settings: Mapping[str, Any]) -> list[str]:
    """Arguments of the command line."""
    return [f"--config.{key}={value}" for key, value in settings.items()]


def main(argv: Sequence[str] | None = None) -> None:
    """Runs what is missing and prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", nargs="*", default=list(ROWS), choices=list(ROWS))
    parser.add_argument(
        "--seeds", type=lambda text: [*map(int, text.split(","))], default=[0, 1, 2]
    )
    parser.add_argument("--workers", type=int, default=1, help="runs side by side, a core each")
    parser.add_argument("--workdir", type=Path, default=Path("runs/contexts"))
    parser.add_argument("--figure", type=Path, help="an SVG with the curves")
    args = parser.parse_args(argv)
    out = args.workdir.resolve()
    world = out / "world"
    config = f"--config={CONFIG}:{world}"
    jobs = [Job(world, "examples.trail_world", (f"--out={world}",))]
    for policy in dict.fromkeys(ROWS[name][1] for name in args.rows):
        own = flags({"rollout.context.name": policy})
        workdir = f"--workdir={out / f'warm_{policy}'}"
        command = (config, workdir, "--config.stages=('sft',)", *own)
        jobs.append(Job(out / f"warm_{policy}", "jaxrl.launch", command, (world,)))
    folders = {name: [out / f"{name}_{seed}" for seed in args.seeds] for name in args.rows}
    for name in args.rows:
        _, policy, settings = ROWS[name]
        warm = out / f"warm_{policy}"
        for seed, folder in zip(args.seeds, folders[name], strict=True):
            changes = {"seed": seed, "model.path": warm / "export", **settings}
            command = (config, f"--workdir={folder}", "--config.stages=('train',)", *flags(changes))
            jobs.append(Job(folder, "jaxrl.launch", command, (warm,)))
    run_jobs(jobs, num_workers=args.workers, cache=out / "cache")
    curves = {name: [read_curve(folder) for folder in own] for name, own in folders.items()}
    rows = [
        [
            ROWS[name][0],
            ", ".join(f"{curve.scores[0]:.2f}" for curve in own),
            ", ".join(f"{curve.scores[-1]:.2f}" for curve in own),
            f"{statistics.median(curve.step_s for curve in own):.2f}",
        ]
        for name, own in curves.items()
    ]
    print(f"\n{table(('context', 'before', 'after', 's a step'), rows)}")
    if args.figure:
        draw({ROWS[name][0]: own for name, own in curves.items()}, args.figure)


if __name__ == "__main__":
    main()

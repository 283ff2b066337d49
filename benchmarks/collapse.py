"""Train runs that collapse, with and without each remedy.

    python -m benchmarks.collapse --seeds=0,1,2

This generates the world of configs/collapse.py and its warm start once, trains each row of `ROWS`
with each seed, and prints a table: the step at which the score reaches 0.9, the best score and the
last scores. `--rows` selects rows and `--num_steps` sets the length of training. After an
interruption, the same command resumes.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.common import format_table
from benchmarks.jobs import Job, run_jobs
from configs import collapse, collapse_stable
from jaxrl.builders.components import build, build_run_settings
from jaxrl.builders.validation import validate
from jaxrl.logs.display import Display
from jaxrl.run import run

METRIC = "val-core/all/exact_match/mean@1"

TURN = "jaxrl.extras.stability.first_occurrence.first_occurrence"


@dataclass(frozen=True)
class Row:
    """A table row: changes to the run of configs/collapse.py."""

    label: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    lag: int = 1  # steps between weight updates in the sampler
    config: Any = collapse  # module with `get_config`


STALE = {"optimizer.lr": 1e-3}
MANY = {**STALE, "optimizer.num_minibatches": 1, "optimizer.num_epochs": 8}
ROWS = {
    "none": Row("no change"),
    "rate_1e-3": Row("learning rate 1e-3", {"optimizer.lr": 1e-3}),
    "rate_3e-4": Row("learning rate 3e-4", {"optimizer.lr": 3e-4}),
    "kl_0.05": Row("KL term to the warm start, k3, 0.05", {"kl.coef": 0.05}),
    "kl_0.01": Row("KL term, 0.01", {"kl.coef": 0.01}),
    "llds": Row("LLDS per action, 0.2", {"loss.term.name": "llds"}),
    "llds_response": Row(
        "LLDS per response, 0.2", {"loss.term.name": "llds", "loss.term.llds.level": "response"}
    ),
    "llds_1": Row("LLDS per action, 1.0", {"loss.term.name": "llds", "loss.term.coef": 1.0}),
    "llds_5": Row("LLDS per action, 5.0", {"loss.term.name": "llds", "loss.term.coef": 5.0}),
    "dppo_tv": Row("DPPO, total variation, 0.2", {"loss.name": "dppo"}),
    "dppo_kl": Row(
        "DPPO, KL, 0.05",
        {
            **{"loss.name": "dppo", "loss.dppo.divergence": "kl"},
            **{"loss.clip_low": 0.05, "loss.clip_high": 0.05},
        },
    ),
    "gspo": Row(
        "GSPO",
        {
            **{"loss.name": "gspo", "loss.clip_low": 3e-4, "loss.clip_high": 4e-4},
            "loss.aggregation": "seq-mean-token-mean",
        },
    ),
    "cispo": Row("CISPO", {"loss.name": "cispo", "loss.clip_low": 1.0, "loss.clip_high": 4.0}),
    "void": Row("void turns removed (SimpleTIR)", {"filter.trajectories": "void_turns"}),
    "gate": Row(
        "off-policy gate, 0.1",
        {"loss.token_filter.name": "off_policy", "loss.token_filter.off_policy.delta": 0.1},
    ),
    "turn_reward": Row(
        "turn reward where the answer first appears (TSPO), 0.3",
        {"reward.weights": {"exact_match": 1.0, TURN: 0.3}, "advantage.by_turn": True},
    ),
    "epsilon": Row("Adam epsilon 1e-2", {"optimizer.epsilon": 1e-2}),
    "stable": Row("the sentinel rolls back, with half the rate", config=collapse_stable),
    "stable_llds": Row(
        "the sentinel rolls back, and LLDS", {"loss.term.name": "llds"}, config=collapse_stable
    ),
    "many": Row("eight epochs: nothing", MANY),
    "many_llds": Row(
        "eight epochs: LLDS per action, 1.0",
        {**MANY, "loss.term.name": "llds", "loss.term.coef": 1.0},
    ),
    "many_dppo": Row("eight epochs: DPPO, total variation, 0.2", {**MANY, "loss.name": "dppo"}),
    "many_gate": Row(
        "eight epochs: off-policy gate, 0.1",
        {**MANY, "loss.token_filter.name": "off_policy", "loss.token_filter.off_policy.delta": 0.1},
    ),
    "late": Row("late weights: nothing", STALE, lag=20),
    "late_truncated": Row(
        "late weights: importance weights, at most 2",
        {**STALE, "loss.correction.level": "token"},
        20,
    ),
    "late_masked": Row(
        "late weights: tokens outside 0.5 to 5 removed",
        {**STALE, "loss.correction.level": "token", "loss.correction.mode": "mask"},
        20,
    ),
    "late_geometric": Row(
        "late weights: responses outside 0.9 to 1.1 removed, geometric mean",
        {
            **{**STALE, "loss.correction.level": "geometric", "loss.correction.mode": "reject"},
            **{"loss.correction.low": 0.9, "loss.correction.high": 1.1},
        },
        20,
    ),
    "late_dppo": Row(
        "late weights: DPPO against the sampler, 0.2",
        {**STALE, "loss.name": "dppo", "loss.dppo.anchor": "rollout"},
        20,
    ),
    "late_gate": Row(
        "late weights: off-policy gate, 0.1",
        {
            **STALE,
            "loss.token_filter.name": "off_policy",
            "loss.token_filter.off_policy.delta": 0.1,
        },
        20,
    ),
}
"""Rows of the table.

In `late` rows, the sampler gets new weights every 20 steps; `many` rows train for eight epochs per
batch. At their learning rate, most seeds are stable without these changes.
"""


def train_row(row: Row, world: Path, warm: Path, workdir: Path, seed: int, num_steps: int) -> None:
    """Train a row with one seed."""
    config = row.config.get_config(str(world))
    config.stages, config.model.path = ("train",), str(warm / "export")
    config.seed, config.num_steps = seed, num_steps
    config.watch.name = "sentinel"  # it only warns, so results do not change
    for key, value in row.settings.items():
        config.update_from_flattened_dict({key: value})
    resolved = validate(config)
    parts = build(resolved)
    if row.lag > 1:
        delay_weights(parts, row.lag)
    run(build_run_settings(resolved), workdir, parts, Display())


def delay_weights(parts: Any, lag: int) -> None:
    """Make the sampler's weights stale: update them only every `lag` steps."""
    count, weights_copy, set_weights = [0], [None], parts.engine.set_weights

    def set_delayed(weights: Any) -> None:
        if count[0] % lag == 0:
            weights_copy[0] = jax.tree.map(jnp.copy, weights)  # the update donates them
        count[0] += 1
        set_weights(jax.tree.map(jnp.copy, weights_copy[0]))

    parts.engine.set_weights = set_delayed


@dataclass(frozen=True)
class Curve:
    """Scores of a run on held-out questions, and its step time."""

    steps: Sequence[int]
    scores: Sequence[float]
    step_s: float  # median seconds per step

    def reaches(self, score: float) -> int | None:
        """Return the first evaluated step with at least this score, or None."""
        steps = (s for s, value in zip(self.steps, self.scores, strict=True) if value >= score)
        return next(steps, None)

    @property
    def collapse_step(self) -> int | None:
        """Return the step from which all scores are below half of the best, or None."""
        low = [value < max(self.scores) / 2 for value in self.scores]
        count = next((n for n, is_low in enumerate(reversed(low)) if not is_low), 0)
        return self.steps[len(low) - count] if count else None

    @property
    def last(self) -> float:
        """Return the mean score of the last five evaluations."""
        return statistics.fmean(self.scores[-5:])


def read_curve(workdir: Path) -> Curve:
    """Read the scores and step times of a run."""
    lines = (workdir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    scored = [record for record in records if METRIC in record]
    times = [record["timing_s/step"] for record in records if "timing_s/step" in record]
    return Curve(
        steps=[record["step"] for record in scored],
        scores=[record[METRIC] for record in scored],
        step_s=statistics.median(times),
    )


def format_rows(curves: Mapping[str, Sequence[Curve]]) -> list[list[str]]:
    """Format the rows of the table, with one number per seed in most cells."""

    def format_values(values: Sequence[float | int | None]) -> str:
        texts = ("–" if v is None else f"{v}" if isinstance(v, int) else f"{v:.2f}" for v in values)
        return ", ".join(texts)

    return [
        [
            ROWS[name].label,
            format_values([curve.reaches(0.9) for curve in curves_of_row]),
            format_values([max(curve.scores) for curve in curves_of_row]),
            format_values([curve.collapse_step for curve in curves_of_row]),
            format_values([curve.last for curve in curves_of_row]),
            f"{statistics.median(curve.step_s for curve in curves_of_row):.2f}",
        ]
        for name, curves_of_row in curves.items()
    ]


HEADS = (
    "changed",
    "0.9 at step",
    "best",
    "below half of the best from",
    "mean of the last five",
    "s a step",
)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", nargs="*", default=list(ROWS), choices=list(ROWS))
    parser.add_argument(
        "--seeds", type=lambda text: [*map(int, text.split(","))], default=[0, 1, 2]
    )
    parser.add_argument("--num_steps", type=int, default=150)
    parser.add_argument("--workdir", type=Path, default=Path("runs/collapse"))
    parser.add_argument(
        "--play", choices=list(ROWS), help="train one row with the first seed in this process"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the missing jobs and print the table."""
    args = parse_args(argv)
    out = args.workdir.resolve()
    world, warm = out / "world", out / "warm"
    if args.play:
        folder = out / f"{args.play}_{args.seeds[0]}_{args.num_steps}"
        return train_row(ROWS[args.play], world, warm, folder, args.seeds[0], args.num_steps)
    # All rows share one world and one warm start.
    config = f"--config={Path(collapse.__file__)}:{world}"
    start = [
        Job(world, "examples.quickstart_world", (f"--out={world}", "--max_hops=1")),
        Job(
            warm,
            "jaxrl.launch",
            (config, f"--workdir={warm}", "--config.stages=('sft',)"),
            (world,),
        ),
    ]
    folders = {
        name: [out / f"{name}_{seed}_{args.num_steps}" for seed in args.seeds] for name in args.rows
    }
    jobs = [
        Job(
            folder,
            "benchmarks.collapse",
            (
                f"--play={name}",
                f"--seeds={seed}",
                f"--num_steps={args.num_steps}",
                f"--workdir={out}",
            ),
            (warm,),
        )
        for name in args.rows
        for seed, folder in zip(args.seeds, folders[name], strict=True)
    ]
    run_jobs([*start, *jobs], cache=out / "cache")
    curves = {
        name: [read_curve(folder) for folder in curves_of_row]
        for name, curves_of_row in folders.items()
    }
    print(f"\n{format_table(HEADS, format_rows(curves))}")
    return None


if __name__ == "__main__":
    main()

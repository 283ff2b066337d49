"""Print a table of a run on real documents: before, after the warm start, after training.

    python -m benchmarks.real --run=runs/real

Reads the evaluations and metrics that `make real` writes to `RUN_as_it_is` and `RUN`.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import format_table
from benchmarks.jobs import read_steps
from benchmarks.worlds import compute_gain, load_evaluations

ROWS = {
    "exact match, sampled": ("sampled", "exact_match"),
    "exact match, greedy": ("greedy", "exact_match"),
    "exact match, search finds nothing": ("empty_search", "exact_match"),
    "exact match, random documents": ("random_search", "exact_match"),
    "F1, sampled": ("sampled", "f1"),
    "malformed, sampled": ("sampled", "malformed"),
    "out of budget, sampled": ("sampled", "out_of_budget"),
    "searched, sampled": ("sampled", "searched"),
    "searches per question, sampled": ("sampled", "searches"),
    "accepted answer in results, sampled": ("sampled", "answer_in_results"),
}
"""Suite and metric of each row, by title."""


def read_stages(run: Path) -> dict[str, Mapping[str, Any]]:
    """Load the evaluations by stage, merging those of the same stage.

    Raises:
        FileNotFoundError: An evaluation is missing.
    """
    base_run = run.with_name(f"{run.name}_as_it_is")
    base_files = sorted(base_run.glob("eval/evaluate_*.json"))
    count = len(base_files) + len(list(run.glob("eval/*.json")))
    if count != 4:
        raise FileNotFoundError(
            f"{base_run} and {run} contain {count} evaluations; expected one of the original "
            "model, one before and one after training, and one with the controls. Run `make real`."
        )
    before, after = load_evaluations(run)
    return {
        "before training": json.loads(base_files[0].read_text("utf-8")),
        "after the warm start": before,
        "after training": after,
    }


def format_cell(record: Mapping[str, Any], suite: str, measure: str) -> str:
    """Format a mean over all questions with its 95% interval, or a dash if it is missing."""
    if suite not in record["summary"]:
        return "–"
    mean = record["summary"][suite]["all"].get(measure)
    interval = record["intervals"][suite]["all"].get(measure)
    if mean is None:
        return "–"
    return f"{mean:.3f}" + (f" [{interval[0]:.2f}, {interval[1]:.2f}]" if interval else "")


def report(run: Path) -> str:
    """Return the table and a summary of training as text."""
    stages = read_stages(run)
    rows = [
        [head, *(format_cell(record, suite, measure) for record in stages.values())]
        for head, (suite, measure) in ROWS.items()
    ]
    steps = {name: [value for _, value in values] for name, values in read_steps(run).items()}
    rewards = " ".join(f"{value:.2f}" for value in steps["reward/exact_match/mean"])
    _, before, after = stages.values()
    mean, low, high = compute_gain(before, after, "sampled", "exact_match")
    return "\n".join(
        [
            format_table(["", *stages], rows),
            "",
            f"gain in sampled exact match from training, paired by question: {mean:.3f} "
            f"[{low:.3f}, {high:.3f}]",
            f"rewards of the {len(steps['reward/exact_match/mean'])} training steps: {rewards}",
            f"sampler vs. trainer, logprob_diff_max: at most "
            f"{max(steps['rollout_corr/logprob_diff_max']):.1e} nats",
            f"seconds per step: {statistics.median(steps['timing_s/step']):.0f} (median)",
        ]
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--run", type=Path, default=Path("runs/real"), help="the run's workdir")
    print(report(parser.parse_args(argv).run))


if __name__ == "__main__":
    main()

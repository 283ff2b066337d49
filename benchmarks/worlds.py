"""Train each method in a small world, and report scores and evidence that its parts have an effect.

    python -m benchmarks.worlds --world=search --seeds=0,1,2

For each seed, this generates a world and runs all stages of its small configuration with the user's
command, one run at a time on all cores. It prints the figures of `WORLDS` as a table and writes
them to `WORKDIR/WORLD/results.json`. After an interruption, the same command resumes.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import format_table
from benchmarks.jobs import ROOT, Job, read_duration_s, read_steps, run_jobs
from jaxrl.logs.statistics import bootstrap_means, compute_percentile_interval
from jaxrl.objectives.shaping import BUCKETS

Figures = dict[str, float]
"""Figures of a run by column title; NaN if missing."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Evidence that a part of a method had an effect: a metric, reduced over steps."""

    name: str  # column title, with the unit
    metric: str  # training metric in metrics.jsonl
    reduce: Callable[[Sequence[float]], float]  # reduces the values of one or more steps


@dataclass(frozen=True, kw_only=True)
class World:
    """A world: the script that generates it, its configuration, and the figures to report."""

    builder: str  # script module with the flags --out and --seed
    config: str  # config file, whose argument is the world's folder
    evidence: tuple[Evidence, ...]
    scores: tuple[str, ...] = ("exact_match",)  # evaluation scores over all questions
    suites: tuple[str, ...] = ("sampled", "greedy")  # suites of the scores
    # Report the first score's gain, paired by question, with its 95% interval.
    shows_gain: bool = False


def mean_of_first_fifth(values: Sequence[float]) -> float:
    """Return the mean over the first fifth of the steps."""
    return statistics.fmean(values[: max(len(values) // 5, 1)])


def mean_of_last_fifth(values: Sequence[float]) -> float:
    """Return the mean over the last fifth of the steps."""
    return statistics.fmean(values[-max(len(values) // 5, 1) :])


def last_value(values: Sequence[float]) -> float:
    """Return the value of the last step."""
    return values[-1]


def one_minus_mean(values: Sequence[float]) -> float:
    """Return 1 minus the mean over all steps."""
    return 1 - statistics.fmean(values)


def mean_halfway(values: Sequence[float]) -> float:
    """Return the mean over the fifth of the steps that ends halfway."""
    half, count = max(len(values) // 2, 1), max(len(values) // 5, 1)
    return statistics.fmean(values[max(half - count, 0) : half])


WORLDS = {
    "math": World(
        builder="examples.math_world",
        config="configs/dapo_small.py",
        evidence=(
            Evidence(
                name="overlong penalty, first fifth",
                metric="reward/overlong/mean",
                reduce=mean_of_first_fifth,
            ),
            Evidence(
                name="overlong penalty, last fifth",
                metric="reward/overlong/mean",
                reduce=mean_of_last_fifth,
            ),
            Evidence(
                name="tokens, first fifth",
                metric="response_length/mean",
                reduce=mean_of_first_fifth,
            ),
            Evidence(
                name="tokens, last fifth", metric="response_length/mean", reduce=mean_of_last_fifth
            ),
            Evidence(
                name="cut off, first fifth",
                metric="outcome/out_of_budget",
                reduce=mean_of_first_fifth,
            ),
            Evidence(
                name="cut off, last fifth",
                metric="outcome/out_of_budget",
                reduce=mean_of_last_fifth,
            ),
            Evidence(name="groups not kept", metric="filter/kept_share", reduce=one_minus_mean),
            Evidence(name="batches a step", metric="filter/num_batches", reduce=statistics.fmean),
            Evidence(name="clipped tokens", metric="actor/pg_clipfrac", reduce=statistics.fmean),
        ),
    ),
    "ares": World(
        builder="examples.math_world",
        config="configs/ares_small.py",
        evidence=(
            Evidence(
                name="easy tasks, first fifth",
                metric="difficulty/easy/share",
                reduce=mean_of_first_fifth,
            ),
            Evidence(
                name="easy tasks, last fifth",
                metric="difficulty/easy/share",
                reduce=mean_of_last_fifth,
            ),
            Evidence(
                name="hard tasks, first fifth",
                metric="difficulty/hard/share",
                reduce=mean_of_first_fifth,
            ),
            Evidence(
                name="hard tasks, last fifth",
                metric="difficulty/hard/share",
                reduce=mean_of_last_fifth,
            ),
            Evidence(name="entropy reward", metric="reward/entropy/mean", reduce=statistics.fmean),
            *(
                Evidence(
                    name=f"alpha, {name}, end",
                    metric=f"controller/coefficients/alphas/{name}",
                    reduce=last_value,
                )
                for name in BUCKETS
            ),
            *(
                Evidence(
                    name=f"KL multiplier, {name}, end",
                    metric=f"controller/kl/multipliers/{name}",
                    reduce=last_value,
                )
                for name in BUCKETS
            ),
            Evidence(name="groups not kept", metric="filter/kept_share", reduce=one_minus_mean),
        ),
    ),
    "bapo": World(
        builder="examples.bapo_world",
        config="configs/bapo_small.py",
        scores=("exact_match", "abstained", "precision", "reliability"),
        evidence=(
            Evidence(
                name="pay for abstaining, first fifth",
                metric="reward/abstention/mean",
                reduce=mean_of_first_fifth,
            ),
            Evidence(
                name="pay for abstaining, last fifth",
                metric="reward/abstention/mean",
                reduce=mean_of_last_fifth,
            ),
            Evidence(name="groups sampled again", metric="filter/resampled_groups", reduce=sum),
            Evidence(
                name="share of steps in the late stage",
                metric="controller/gate/is_late",
                reduce=statistics.fmean,
            ),
            Evidence(
                name="searches, last fifth", metric="num_searches/mean", reduce=mean_of_last_fifth
            ),
            Evidence(
                name="Python calls, first fifth",
                metric="num_python_calls/mean",
                reduce=mean_of_first_fifth,
            ),
            Evidence(
                name="Python calls, last fifth",
                metric="num_python_calls/mean",
                reduce=mean_of_last_fifth,
            ),
        ),
    ),
    "search": World(
        builder="examples.quickstart_world",
        config="configs/search_r1_small.py",
        evidence=(
            Evidence(
                name="searches, first fifth", metric="num_searches/mean", reduce=mean_of_first_fifth
            ),
            Evidence(
                name="searches, last fifth", metric="num_searches/mean", reduce=mean_of_last_fifth
            ),
            Evidence(
                name="KL to the start, last fifth",
                metric="actor/kl_loss",
                reduce=mean_of_last_fifth,
            ),
        ),
    ),
    "puzzles": World(
        builder="examples.puzzle_world",
        config="configs/passk_small.py",
        scores=("pass@8", "exact_match"),
        suites=("sampled",),
        evidence=(
            # The first half of the steps has k = 4, the second k = 1.
            Evidence(name="k, halfway", metric="advantage/k", reduce=mean_halfway),
            Evidence(name="k, last fifth", metric="advantage/k", reduce=mean_of_last_fifth),
            Evidence(
                name="pass@8, halfway",
                metric="val-core/all/exact_match/best@8/mean",
                reduce=mean_halfway,
            ),
            Evidence(
                name="exact_match, halfway",
                metric="val-core/all/exact_match/mean@8",
                reduce=mean_halfway,
            ),
            Evidence(
                name="with signal, first fifth",
                metric="rollout/informative_share",
                reduce=mean_of_first_fifth,
            ),
            Evidence(
                name="with signal, halfway", metric="rollout/informative_share", reduce=mean_halfway
            ),
            Evidence(
                name="with signal, last fifth",
                metric="rollout/informative_share",
                reduce=mean_of_last_fifth,
            ),
        ),
    ),
    "real": World(
        builder="examples.real_world",
        config="configs/real.py",
        suites=("sampled", "greedy", "empty_search", "random_search"),
        evidence=(
            Evidence(
                name="searches, first fifth", metric="num_searches/mean", reduce=mean_of_first_fifth
            ),
            Evidence(
                name="searches, last fifth", metric="num_searches/mean", reduce=mean_of_last_fifth
            ),
            Evidence(name="logprob_diff_max", metric="rollout_corr/logprob_diff_max", reduce=max),
        ),
        shows_gain=True,
    ),
}
"""Worlds by method."""


def make_jobs(name: str, seed: int, out: Path) -> tuple[Job, Job]:
    """Return the jobs that generate the world for a seed and train in it."""
    world = WORLDS[name]
    setup, run = out / name / f"world_{seed}", out / name / f"run_{seed}"
    return (
        Job(folder=setup, module=world.builder, arguments=(f"--out={setup}", f"--seed={seed}")),
        Job(
            folder=run,
            module="jaxrl.launch",
            arguments=(
                f"--config={ROOT / world.config}:{setup}",
                f"--config.seed={seed}",
                f"--workdir={run}",
            ),
            depends_on=(setup,),
        ),
    )


def read_figures(world: World, run: Path) -> Figures:
    """Read the scores before and after training, the time, and the evidence."""
    before, after = load_evaluations(run)
    figures = {
        f"{score}, {suite}, {when}": get_score(record, suite, score)
        for score in world.scores
        for suite in world.suites
        for when, record in (("before", before), ("after", after))
    }
    if world.shows_gain:
        score, suite = world.scores[0], world.suites[0]
        mean, low, high = compute_gain(before, after, suite, score)
        figures[f"gain, {suite}"] = mean
        figures |= {"95% from": low, "95% to": high}
    steps = read_steps(run)
    for evidence in world.evidence:
        values = [value for _, value in steps.get(evidence.metric, [])]
        figures[evidence.name] = evidence.reduce(values) if values else math.nan
    return figures | {"wall s": read_duration_s(run)}


def compute_gain(
    before: Mapping[str, Any], after: Mapping[str, Any], suite: str, score: str
) -> tuple[float, float, float]:
    """Return the mean paired difference and its 95% bootstrap interval.

    Raises:
        ValueError: The evaluations used different questions.
    """
    old, new = (
        _average_by_question(record["questions"][suite], score) for record in (before, after)
    )
    if old.keys() != new.keys():
        raise ValueError(f"the two evaluations of {suite} have different questions")
    difference = np.array([new[name] - old[name] for name in sorted(old)])
    resampled = bootstrap_means(
        difference[:, None], num_resamples=10_000, rng=np.random.default_rng(0)
    )
    low, high = compute_percentile_interval(resampled) or (math.nan, math.nan)
    return float(difference.mean()), low, high


def _average_by_question(samples: Sequence[Mapping[str, Any]], score: str) -> dict[str, float]:
    """Return the mean score of each question over its samples."""
    scores: dict[str, list[float]] = {}
    for sample in samples:
        scores.setdefault(sample["task_id"], []).append(float(sample[score]))
    return {name: statistics.fmean(values) for name, values in scores.items()}


def load_evaluations(run: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Load the first evaluation, and the evaluations of the last step, merged.

    Raises:
        FileNotFoundError: The run has fewer than two evaluations.
    """
    paths = {
        (int(path.stem.rpartition("_")[2]), path.stem.startswith("evaluate")): path
        for path in run.glob("eval/*.json")
    }
    if len(paths) < 2:
        raise FileNotFoundError(
            f"{run / 'eval'} contains {len(paths)} evaluations; expected one before training and "
            "one after. Delete the run's folder and run the command again."
        )
    keys = sorted(paths)
    records = {key: json.loads(paths[key].read_text(encoding="utf-8")) for key in keys}
    after: dict[str, Any] = {}
    for key in keys[1:]:
        if key[0] == keys[-1][0]:
            parts = ("summary", "intervals", "questions")
            after = {part: after.get(part, {}) | records[key].get(part, {}) for part in parts}
    return records[keys[0]], after


def get_score(record: Mapping[str, Any], suite: str, score: str) -> float:
    """Return the mean score of an evaluation over all questions; NaN if missing."""
    value = record["summary"].get(suite, {}).get("all", {}).get(score)
    return math.nan if value is None else float(value)


def format_figures(figures: Mapping[int, Figures]) -> str:
    """Format the figures as a table with one row per seed."""
    heads = list(next(iter(figures.values())))
    rows = [
        [str(seed), *map(_format_number, seed_figures.values())]
        for seed, seed_figures in figures.items()
    ]
    return format_table(["seed", *heads], rows)


def _format_number(value: float) -> str:
    if math.isnan(value):
        return "–"
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 3
    return f"{value:,.{digits}f}".replace("-", "−")


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--world", choices=tuple(WORLDS), required=True)
    parser.add_argument(
        "--seeds",
        type=lambda text: tuple(map(int, text.split(","))),
        default=(0, 1, 2),
        help="seeds of worlds and runs, separated by commas",
    )
    parser.add_argument("--workdir", type=Path, default=Path("runs/worlds"))
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    out = args.workdir.resolve()
    figures = {}
    for seed in args.seeds:
        setup, run = make_jobs(args.world, seed, out)
        run_jobs([setup, run])
        figures[seed] = read_figures(WORLDS[args.world], run.folder)
    path = out / args.world / "results.json"
    path.write_text(json.dumps({str(s): f for s, f in figures.items()}, indent=2) + "\n")
    print(f"\n{format_figures(figures)}\n\nwrote {path}")


if __name__ == "__main__":
    main()

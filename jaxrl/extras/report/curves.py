"""Charts of runs as plain data: their curves, steps and bands."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxrl.config.schema import default_config, flatten
from jaxrl.extras.report.facts import SUITES, Facts
from jaxrl.utils.json_io import number_of

NUM_COLORS = 6
MAX_POINTS = 400  # of a curve; beyond, neighbouring steps are put together
SMOOTH_FROM = 40  # points from which on a running mean is drawn over the steps


@dataclass(frozen=True, kw_only=True)
class Series:
    """One curve in one stage. Steps are global; `low` and `high` bound a band or error bars."""

    label: str
    stage: str
    color: int
    dash: int
    is_points: bool  # evaluations: markers and error bars; else a line and its band
    steps: np.ndarray
    values: np.ndarray
    low: np.ndarray | None = None
    high: np.ndarray | None = None
    smooth: np.ndarray | None = None  # running mean of the values


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Curves that share their axes; every stage gets a panel of its own."""

    name: str  # of the file in plots/
    title: str
    unit: str
    note: str
    scale: str  # rate: 0 to 1; zero: from 0 on; log; free
    series: list[Series]
    marks: Sequence[int] = ()  # steps of training at which a run had a sign of collapse

    @property
    def stages(self) -> list[str]:
        """The stages that have a panel, in the order of the run."""
        return [name for name in ("sft", "train") if any(s.stage == name for s in self.series)]


@dataclass(frozen=True, kw_only=True)
class Group:
    """Runs that differ in nothing but the seed, and what they have of the keys that differ."""

    label: str
    runs: list[Facts]
    config: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class _Spec:
    name: str
    title: str
    unit: str
    scale: str  # as of a chart, where the values allow it
    note: str
    lines: dict[str, tuple[str, ...]]  # label: the metric, under its name in each stage


SPECS = (
    _Spec(
        name="reward",
        title="Reward",
        unit="mean reward",
        scale="rate",
        note="Of the trajectories sampled for training.",
        lines={"reward": ("critic/rewards/mean",)},
    ),
    _Spec(
        name="searches",
        title="Searches per question",
        unit="searches",
        scale="zero",
        note="Of the trajectories sampled for training.",
        lines={"searches": ("num_searches/mean",)},
    ),
    _Spec(
        name="python_calls",
        title="Python calls per question",
        unit="calls",
        scale="zero",
        note="Of the trajectories sampled for training.",
        lines={"calls": ("num_python_calls/mean",)},
    ),
    _Spec(
        name="response_length",
        title="Response length",
        unit="sampled tokens",
        scale="zero",
        note="Tokens the model wrote, search results not counted.",
        lines={"mean": ("response_length/mean",), "longest": ("response_length/max",)},
    ),
    _Spec(
        name="outcomes",
        title="How episodes ended",
        unit="share of trajectories",
        scale="rate",
        note="Of the trajectories sampled for training.",
        lines={
            "answered": ("outcome/answered",),
            "abstained": ("outcome/abstained",),
            "malformed": ("outcome/malformed",),
            "out of budget": ("outcome/out_of_budget",),
            "environment error": ("outcome/environment_error",),
        },
    ),
    _Spec(
        name="signal",
        title="Trajectories with a signal",
        unit="share of trajectories",
        scale="rate",
        note="A group whose trajectories all earn the same teaches nothing.",
        lines={"advantage not 0": ("rollout/informative_share",)},
    ),
    _Spec(
        name="groups",
        title="Groups as they were sampled",
        unit="share of groups",
        scale="rate",
        note="All trajectories of a group right, all wrong, or some of each. Before any filter.",
        lines={
            "all right": ("filter/all_right_share",),
            "mixed": ("filter/mixed_share",),
            "all wrong": ("filter/all_wrong_share",),
            "failed": ("filter/failed_share",),
        },
    ),
    _Spec(
        name="difficulty",
        title="Response length by difficulty",
        unit="sampled tokens",
        scale="zero",
        note="Easy: two thirds of a group right; medium: one third; hard: fewer.",
        lines={
            name: (f"difficulty/{name}/response_length",) for name in ("easy", "medium", "hard")
        },
    ),
    _Spec(
        name="entropy",
        title="Entropy",
        unit="nats per token",
        scale="zero",
        note="How undecided the model is; 0 is certain.",
        lines={"entropy": ("actor/entropy", "sft/entropy")},
    ),
    _Spec(
        name="kl",
        title="KL divergence",
        unit="nats per token",
        scale="zero",
        note="How far the policy has moved.",
        lines={
            "from the start of the stage": ("actor/kl_loss",),
            "from before the update": ("actor/ppo_kl",),
            "from the start, before the update": ("actor/kl_measured",),
        },
    ),
    _Spec(
        name="kl_coef",
        title="KL coefficient",
        unit="coefficient, or multiplier by difficulty",
        scale="zero",
        note="As its controller has moved it.",
        lines={
            "coefficient": ("controller/kl/coef",),
            **{
                f"multiplier, {name}": (f"controller/kl/multipliers/{name}",)
                for name in ("easy", "medium", "hard")
            },
        },
    ),
    _Spec(
        name="gap",
        title="Sampler–trainer gap",
        unit="nats, log scale",
        scale="log",
        note="Log-probabilities of the same tokens by sampler and trainer: rounding in float32.",
        lines={
            "largest": ("rollout_corr/logprob_diff_max",),
            "mean": ("rollout_corr/logprob_diff_mean",),
        },
    ),
    _Spec(
        name="loss",
        title="Warm-start loss",
        unit="nats per token",
        scale="zero",
        note="Cross-entropy on the demonstrations.",
        lines={"loss": ("sft/loss",)},
    ),
    _Spec(
        name="grad_norm",
        title="Gradient norm",
        unit="before clipping",
        scale="zero",
        note="Global norm over all weights.",
        lines={"gradient": ("actor/grad_norm", "sft/grad_norm")},
    ),
    _Spec(
        name="throughput",
        title="Throughput",
        unit="tokens per second",
        scale="zero",
        note="Warm start: tokens trained on. Reinforcement learning: tokens of the "
        "trajectories over sampling and update.",
        lines={"throughput": ("perf/throughput",)},
    ),
)


def group_runs(runs: Sequence[Facts], ignore: Sequence[str] = ()) -> list[Group]:
    """Runs with the same configuration but the seed, together; in the order they came.

    Args:
        runs: in the order of the command line.
        ignore: keys or sections that may differ within a group, besides the seed.
    """
    defaults = flatten(default_config())

    def compared(run: Facts) -> dict[str, Any]:
        # A key younger than the run has its default: what the run did without it.
        config = {**defaults, **run.files.config} if run.files.config else {}
        ignored = ("seed", *ignore)
        return {
            key: value
            for key, value in config.items()
            if not any(key == name or key.startswith(f"{name}.") for name in ignored)
        }

    by_config: dict[str, list[Facts]] = {}
    for run in runs:
        # Of runs whose configuration is not known, none is a seed of another.
        alone = None if run.files.config else str(run.files.workdir.resolve())
        identity = json.dumps([alone, compared(run)], sort_keys=True, default=str)
        by_config.setdefault(identity, []).append(run)
    configs = [compared(members[0]) for members in by_config.values()]
    keys = list(dict.fromkeys(key for config in configs for key in config))
    differ = [key for key in keys if len({repr(config.get(key)) for config in configs}) > 1]
    grouped = []
    for members, config in zip(by_config.values(), configs, strict=True):
        names = [run.name for run in members]
        label = ", ".join(names) if len(names) <= 3 else f"{names[0]} … {names[-1]}"
        settings = {key: config.get(key) for key in differ}
        grouped.append(Group(label=label, runs=members, config=settings))
    return grouped


def charts_of(groups: Sequence[Group]) -> tuple[list[Chart], list[str]]:
    """Charts with something to see, and the titles of those that are 0 throughout."""
    rows = [row for group in groups for run in group.runs for row in run.rows]
    suites = [suite for suite in SUITES if suite in {row.suite for row in rows}]
    lines = [(SUITES[suite][0], suite, "all") for suite in suites]
    candidates = [_scored("exact_match", "Exact match on held-out questions", lines, groups)]
    sets = dict.fromkeys(row.data_set for row in rows if row.suite == "sampled")
    lines = [(name, "sampled", name) for name in sets if name not in ("all", "mean")]
    if len(groups) == 1 and 1 < len(lines) <= 6:  # more would be a tangle
        title = "Exact match by data set, sampled"
        candidates.append(_scored("exact_match_by_set", title, lines, groups))
    candidates += [_chart(spec, groups) for spec in SPECS]
    runs = [run for group in groups for run in group.runs]
    marks = sorted({sign["step"] for run in runs[:1] for sign in run.files.signs})
    if len(runs) == 1 and marks:
        note = " Vertical lines: signs of collapse."
        candidates = [
            replace(chart, marks=marks, note=chart.note + note)
            if "train" in chart.stages
            else chart
            for chart in candidates
        ]
    charts = [chart for chart in candidates if any(len(s.steps) > 1 for s in chart.series)]
    zero = [
        chart.title
        for chart in charts
        if not any(s.is_points or np.any(s.values) for s in chart.series)
    ]
    return [chart for chart in charts if chart.title not in zero], zero


CHART_NAMES = ("exact_match", "exact_match_by_set", *(spec.name for spec in SPECS))
"""Names that a report may give its pictures."""


def _chart(spec: _Spec, groups: Sequence[Group]) -> Chart:
    series, absent = [], _Absent()
    lines, title = list(spec.lines.items()), spec.title
    if len(groups) > 1 and len(lines) > 1:  # a colour is a group then
        lines, title = lines[:1], f"{title}: {lines[0][0]}"
    for color, group in enumerate(groups):
        for index, (label, metrics) in enumerate(lines):
            for stage in ("sft", "train"):
                curves: list[Curve] = [{} for _ in group.runs]
                for run, curve in zip(group.runs, curves, strict=True):
                    for record in run.files.records:
                        values = [number_of(record.get(name)) for name in metrics]
                        numbers = [value for value in values if value is not None]
                        if record["stage"] == stage and numbers:
                            curve[record["step"]] = (numbers[0], None, None)
                made = _over_runs(
                    group.runs,
                    curves,
                    absent,
                    label=group.label if len(groups) > 1 else label,
                    stage=stage,
                    color=color if len(groups) > 1 else index,
                    dash=color + color // NUM_COLORS if len(groups) > 1 else index,
                )
                if made is not None:
                    series.append(made)
    # Curves that are 0 throughout are named in place of lines on the axis, unless all are.
    note = spec.note
    zero = [s.label for s in series if not np.any(s.values)]
    if 0 < len(zero) < len(series):
        note += f" 0 throughout: {', '.join(zero)}."
        series = [s for s in series if np.any(s.values)]
    # Values that a scale has no room for get another scale.
    scale = spec.scale
    if scale == "log" and any(np.any(s.values <= 0) for s in series):
        scale = "zero"
    lowest = [s.values if s.low is None else s.low for s in series]
    if scale == "zero" and any(np.any(low < 0) for low in lowest):
        scale = "free"
    if scale == "rate" and any(np.any((s.values < 0) | (s.values > 1)) for s in series):
        scale = "free"
    unit = spec.unit.replace(", log scale", "") if scale != "log" else spec.unit
    note += absent.note()
    return Chart(name=spec.name, title=title, unit=unit, note=note, scale=scale, series=series)


Curve = dict[int, tuple[float, float | None, float | None]]
"""Value, low and high by global step."""


class _Absent:
    """Omissions of a chart, for its note: runs without any values, curves without a common step."""

    def __init__(self) -> None:
        self.runs: dict[str, list[str]] = {}  # labels of curves by the run that is not in them
        self.curves: list[str] = []

    def note(self) -> str:
        runs = [f"{name} ({', '.join(dict.fromkeys(of))})" for name, of in self.runs.items()]
        text = f" Without values and left out: {'; '.join(runs)}." if runs else ""
        curves = ", ".join(dict.fromkeys(self.curves))
        return text + (f" Not drawn, as its runs share no step: {curves}." if curves else "")


def _over_runs(
    runs: Sequence[Facts],
    curves: Sequence[Any],
    absent: _Absent,
    *,
    label: str,
    is_points: bool = False,
    **place: Any,
) -> Series | None:
    """The curve of a run, or the mean of several between the smallest and the largest.

    Runs without any values are left out, and steps that not every other run has: a mean over
    fewer runs would jump.
    """
    names = [run.name for run, curve in zip(runs, curves, strict=True) if not curve]
    curves = [curve for curve in curves if curve]
    if not curves:
        return None
    for name in names:
        absent.runs.setdefault(name, []).append(label)
    steps = sorted(set.intersection(*(set(curve) for curve in curves)))
    if not steps:
        absent.curves.append(label)
        return None
    values = np.array([[curve[step][0] for step in steps] for curve in curves])
    low = high = smooth = None
    if len(curves) > 1:
        low, high = values.min(0), values.max(0)
    elif all(curves[0][step][1] is not None for step in steps):
        low = np.array([curves[0][step][1] for step in steps], float)
        high = np.array([curves[0][step][2] for step in steps], float)
    series = Series(
        label=label,
        steps=np.array(steps, float),
        values=values.mean(0),
        low=low,
        high=high,
        is_points=is_points,
        **place,
    )
    if is_points:
        return series
    series = thin(series)
    if len(series.values) >= SMOOTH_FROM and len(curves) == 1:
        smooth = running_mean(series.values, max(5, len(series.values) // 20))
    return replace(series, smooth=smooth)


def thin(series: Series) -> Series:
    """Averages neighbours down to `MAX_POINTS` points, in the widest of their bands."""
    size = math.ceil(len(series.steps) / MAX_POINTS)
    if size == 1:
        return series
    starts = np.arange(0, len(series.steps), size)
    counts = np.diff([*starts, len(series.steps)])

    def averaged(values: np.ndarray) -> np.ndarray:
        return np.asarray(np.add.reduceat(values, starts) / counts)

    return replace(
        series,
        steps=averaged(series.steps),
        values=averaged(series.values),
        low=None if series.low is None else np.minimum.reduceat(series.low, starts),
        high=None if series.high is None else np.maximum.reduceat(series.high, starts),
    )


def running_mean(values: np.ndarray, size: int) -> np.ndarray:
    """The mean of up to `size` values around each.

    The first ones take as many on each side as they have before them: a steep start stays steep.
    """
    sums = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    before = np.minimum(size // 2, index)
    after = np.minimum(before, index[::-1])
    return np.asarray((sums[index + after + 1] - sums[index - before]) / (before + after + 1))


def _scored(
    name: str, title: str, lines: Sequence[tuple[str, str, str]], groups: Sequence[Group]
) -> Chart:
    """Exact match with error bars; each line has a label, a suite and a data set."""
    series, absent = [], _Absent()
    for color, group in enumerate(groups):
        for index, (label, suite, data_set) in enumerate(lines):
            # By the step whose weights they are of. Of two the first counts, made during training:
            # with early stopping the last evaluation is of the weights of an earlier step, and the
            # curve tells how they scored among the others.
            curves: list[Curve] = [{} for _ in group.runs]
            for run, curve in zip(group.runs, curves, strict=True):
                for evaluation in run.evaluations:
                    score = evaluation.scores.get(suite, {}).get(data_set)
                    if score is not None:
                        point = score.value, score.low, score.high
                        curve.setdefault(evaluation.weights_step, point)
            made = _over_runs(
                group.runs,
                curves,
                absent,
                label=f"{group.label}: {label}" if len(groups) > 1 else label,
                stage="train",
                color=color if len(groups) > 1 else index,
                dash=index + len(lines) * (color // NUM_COLORS),
                is_points=True,
            )
            if made is not None:
                series.append(made)
    is_single = all(len(group.runs) == 1 for group in groups)
    note = ("Bars: 95% interval." if is_single else "") + absent.note()
    unit = "share of questions"
    return Chart(name=name, title=title, unit=unit, note=note, scale="rate", series=series)


def spread(values: Sequence[float]) -> str:
    """The mean of numbers and their sample standard deviation, as text."""
    if not values:
        return ""
    text = f"{np.mean(values):.3f}"
    return f"{text} ± {np.std(values, ddof=1):.3f}" if len(values) > 1 else text

"""Conclusions of the claims' benchmark: tables, verdicts by a rule, pictures, and the page."""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.claims_runs import Record
from jaxrl.report.drawing import COLORS, DASHES, STYLE

NEARLY = 0.05
"""Loss of accuracy that still counts as nearly equal."""

RULE = f"""\
A difference *shows* when the means over seeds differ in the claimed direction by more than twice
the standard error of that difference, √(s₁²/n₁ + s₂²/n₂), and by at least the amount in the
column *at least*, which keeps seeds that agree by chance from deciding. It is *reversed* when the
same holds in the other direction, otherwise it is *not shown*. A condition *holds* when the mean is
worse by no more than its allowance ({NEARLY} for accuracy). A claim **shows** when all of its
differences show and all of its conditions hold, and **does not show** when no difference shows;
anything between is **mixed**."""

Arms = Mapping[str, Sequence[Record]]
"""The runs of each arm, one of each seed."""


@dataclass(frozen=True, kw_only=True)
class Measure:
    """One number of a run."""

    name: str  # as a column is headed
    of: Callable[[Record], float]  # NaN where the run does not have it
    digits: int = 3


@dataclass(frozen=True, kw_only=True)
class Criterion:
    """Claim about one number, against a baseline."""

    measure: Measure
    arm: str
    baseline: str
    is_higher_better: bool
    least: float = 0.0  # a smaller difference does not count
    allowance: float | None = None  # makes it a condition: worse by no more than this


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One chart: a curve of each arm over training steps."""

    title: str
    metric: str | None = None  # of the training steps
    measure: str | None = None  # of the evaluations
    window: int = 1  # steps over which a metric is averaged
    arms: tuple[str, ...] = ()  # of the claim's; all without


@dataclass(frozen=True, kw_only=True)
class Claim:
    """Claim, what is measured of it, and when it counts as shown."""

    name: str
    title: str
    says: str  # the claim, and how it is put to the test
    world: str
    arms: tuple[str, ...]
    measures: tuple[Measure, ...]
    criteria: tuple[Criterion, ...]
    panels: tuple[Panel, ...]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A criterion applied."""

    criterion: Criterion
    difference: float
    standard_error: float
    result: str  # shows, not shown, reversed; holds, fails

    @property
    def is_condition(self) -> bool:
        """Judged against an allowance rather than for a gain."""
        return self.criterion.allowance is not None


def final(name: str) -> Callable[[Record], float]:
    """A measure of the last evaluation."""
    return lambda record: record.final.get(name, math.nan)


def ratio(name: str, other: str) -> Callable[[Record], float]:
    """One measure of the last evaluation over another."""

    def of(record: Record) -> float:
        below = record.final.get(other, math.nan)
        return record.final.get(name, math.nan) / below if below else math.nan

    return of


def at_step(name: str, step: int) -> Callable[[Record], float]:
    """A measure of the evaluation after a training step."""
    return lambda record: record.evaluations.get(step, {}).get(name, math.nan)


def last_steps(metric: str, share: float = 1 / 3) -> Callable[[Record], float]:
    """The mean of a training metric over the last part of the steps."""

    def of(record: Record) -> float:
        values = [value for _, value in record.steps.get(metric, [])]
        tail = values[-max(round(len(values) * share), 1) :]
        return statistics.fmean(tail) if tail else math.nan

    return of


def total(metric: str) -> Callable[[Record], float]:
    """The sum of a training metric over all steps."""
    return lambda record: math.fsum(value for _, value in record.steps.get(metric, []))


def steps_to(name: str, threshold: float) -> Callable[[Record], float]:
    """Training steps until a measure reaches a threshold, on the line between two evaluations.

    Infinite where it never does.
    """

    def of(record: Record) -> float:
        before: tuple[int, float] | None = None
        for step, measures in sorted(record.evaluations.items()):
            value = measures[name]
            if value >= threshold:
                if before is None:
                    return float(step)
                share = (threshold - before[1]) / (value - before[1])
                return before[0] + share * (step - before[0])
            before = (step, value)
        return math.inf

    return of


def total_until(metric: str, steps: Callable[[Record], float]) -> Callable[[Record], float]:
    """The sum of a training metric over the steps until some point; infinite without one."""

    def of(record: Record) -> float:
        end = steps(record)
        if math.isinf(end):
            return math.inf
        values = dict(record.steps.get(metric, []))
        whole = math.fsum(value for step, value in values.items() if step <= end)
        return whole + (end - math.floor(end)) * values.get(math.floor(end) + 1, 0.0)

    return of


def judge(criterion: Criterion, arms: Arms) -> Finding:
    """Applies a criterion by `RULE`.

    Something never reached is infinite, and so is a mean that holds it: worse than any number.
    """
    values, others = (
        [criterion.measure.of(record) for record in arms[arm]]
        for arm in (criterion.arm, criterion.baseline)
    )
    sign = 1.0 if criterion.is_higher_better else -1.0
    ours, theirs = statistics.fmean(values), statistics.fmean(others)
    if math.isinf(ours) or math.isinf(theirs):
        gain = 0.0 if ours == theirs else sign * (math.copysign(1, ours - theirs)) * math.inf
        error = math.nan
    else:
        gain = sign * (ours - theirs)
        error = math.sqrt(_variance_of_mean(values) + _variance_of_mean(others))
    if math.isnan(gain):
        result = "not measured"
    elif criterion.allowance is not None:
        result = "holds" if gain >= -criterion.allowance else "fails"
    elif _exceeds(gain, error, criterion.least):
        result = "shows"
    else:
        result = "reversed" if _exceeds(-gain, error, criterion.least) else "not shown"
    return Finding(criterion=criterion, difference=sign * gain, standard_error=error, result=result)


def _exceeds(gain: float, error: float, least: float) -> bool:
    if math.isinf(gain):
        return gain > 0
    return gain > 2 * error and gain > 0 and gain >= least


def _variance_of_mean(values: Sequence[float]) -> float:
    return statistics.variance(values) / len(values) if len(values) > 1 else 0.0


def verdict(findings: Sequence[Finding]) -> str:
    """Shows, mixed or does not show, by `RULE`."""
    gains = [finding.result == "shows" for finding in findings if not finding.is_condition]
    conditions = [finding.result == "holds" for finding in findings if finding.is_condition]
    if all(gains) and all(conditions):
        return "shows"
    return "mixed" if any(gains) else "does not show"


def spread(values: Sequence[float], digits: int) -> str:
    """Mean ± standard deviation; how many never got there, where some did not."""
    finite = [value for value in values if math.isfinite(value)]
    if not values or any(map(math.isnan, values)):
        return "–"
    if len(finite) < len(values):
        reached = f"{min(finite):,.{digits}f} at best; " if finite else ""
        return f"{reached}{len(values) - len(finite)} of {len(values)} never"
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.fmean(values):,.{digits}f} ± {deviation:,.{digits}f}"


def measures_table(claim: Claim, arms: Arms) -> str:
    """A row of each arm, a column of each measure."""
    heads = ["", *(measure.name for measure in claim.measures)]
    rows = [
        [
            arm,
            *(
                spread([measure.of(record) for record in arms[arm]], measure.digits)
                for measure in claim.measures
            ),
        ]
        for arm in claim.arms
    ]
    return table(heads, rows)


def findings_table(findings: Sequence[Finding]) -> str:
    """A row of each criterion."""
    heads = ["criterion", "against", "difference", "standard error", "at least", "result"]
    rows = []
    for finding in findings:
        criterion = finding.criterion
        digits = criterion.measure.digits
        direction = "higher" if criterion.is_higher_better else "lower"
        least = f"{criterion.least:g}"
        if criterion.allowance is not None:
            direction, least = "nearly equal", f"−{criterion.allowance:g}"
        rows.append(
            [
                f"{criterion.measure.name} of {criterion.arm}: {direction}",
                criterion.baseline,
                _number(finding.difference, digits),
                _number(finding.standard_error, digits),
                least,
                finding.result,
            ]
        )
    return table(heads, rows)


def _number(value: float, digits: int) -> str:
    if not math.isfinite(value):
        return "–" if math.isnan(value) else ("∞" if value > 0 else "−∞")
    return f"{value:+.{digits}f}".replace("-", "−") if value < 0 else f"{value:.{digits}f}"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Renders a table as Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def draw(claim: Claim, arms: Arms, path: Path) -> None:
    """Curves of the claim's arms: means over seeds, and bands from the lowest to the highest."""
    settings = {**STYLE, "svg.hashsalt": claim.name}
    with mpl.rc_context(settings), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a browser has the characters a font lacks
        figure = Figure(figsize=(3.4 * len(claim.panels), 3.2), layout="constrained")
        for axes, panel in zip(
            figure.subplots(1, len(claim.panels), squeeze=False)[0], claim.panels, strict=True
        ):
            for number, arm in enumerate(claim.arms):
                if arm in (panel.arms or claim.arms):
                    _draw_arm(axes, number, arm, [curve(panel, record) for record in arms[arm]])
            axes.set_title(panel.title, fontsize=9.5)
            axes.set_xlabel("training step")
        lines = {line.get_label(): line for axes in figure.axes for line in axes.get_lines()}
        figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=3)
        metadata = {"Date": None, "Creator": None}
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="svg", metadata=metadata, facecolor="white")


def curve(panel: Panel, record: Record) -> list[tuple[int, float]]:
    """Steps and values of what a panel shows."""
    if panel.measure is not None:
        name = panel.measure
        return [(step, m[name]) for step, m in sorted(record.evaluations.items()) if name in m]
    assert panel.metric is not None
    points = [p for p in record.steps.get(panel.metric, []) if math.isfinite(p[1])]
    return [
        (
            points[i][0],
            statistics.fmean(value for _, value in points[max(i - panel.window + 1, 0) : i + 1]),
        )
        for i in range(len(points))
    ]


def _draw_arm(
    axes: Axes, number: int, arm: str, curves: Sequence[Sequence[tuple[int, float]]]
) -> None:
    """One line and its band, over the steps that all seeds have."""
    values = [dict(points) for points in curves]
    steps = sorted(set.intersection(*(set(points) for points in values))) if values else []
    if not steps:
        return
    grid = np.array([[points[step] for step in steps] for points in values])
    look = {"color": COLORS[number % len(COLORS)], "linestyle": DASHES[number % len(DASHES)]}
    axes.plot(steps, grid.mean(axis=0), label=arm, linewidth=1.6, **look)
    axes.fill_between(
        steps, grid.min(axis=0), grid.max(axis=0), color=look["color"], alpha=0.18, linewidth=0
    )


def section(claim: Claim, arms: Arms, image: str) -> str:
    """A claim with its verdict, tables and picture."""
    findings = [judge(criterion, arms) for criterion in claim.criteria]
    return "\n\n".join(
        [
            f"## {claim.title}: {verdict(findings)}",
            claim.says,
            measures_table(claim, arms),
            findings_table(findings),
            f"![{claim.title}: curves over training steps]({image})",
        ]
    )


def summary_row(claim: Claim, arms: Arms) -> str:
    """A row of the table of verdicts."""
    findings = [judge(criterion, arms) for criterion in claim.criteria]
    short = "; ".join(
        f"{finding.criterion.measure.name} of {finding.criterion.arm} "
        f"{_number(finding.difference, finding.criterion.measure.digits)}: {finding.result}"
        for finding in findings
    )
    return f"| {claim.title} | **{verdict(findings)}** | {short} |"

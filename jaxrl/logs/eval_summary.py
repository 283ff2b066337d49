"""Metrics of held-out evaluations with confidence intervals, as JSON and as text.

`docs/evaluate.md` defines every metric. Trajectories may come from any source, but must be in task
order.
"""

from __future__ import annotations

import io
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
from rich.table import Table
from rich.text import Text

from jaxrl.envs.base import Outcome
from jaxrl.envs.rewards.attribution import Attribution, attribute_answers
from jaxrl.envs.rewards.qa import normalize_answer
from jaxrl.logs.console import make_console
from jaxrl.logs.results import compute_weighted_reward
from jaxrl.logs.statistics import (
    bootstrap_means,
    compute_column_means,
    compute_percentile_interval,
    majority_at_k,
    pass_at_k,
)
from jaxrl.objectives.metrics import mean_or_nan
from jaxrl.types import Group, Trajectory, flatten_groups
from jaxrl.utils.text import escape_control_chars

COUNTS = ("num_questions", "unscored_questions", "environment_errors")
"""Metrics that are counts rather than means, and have no interval."""

OUTCOMES = tuple(outcome for outcome in Outcome if outcome != Outcome.ENVIRONMENT_ERROR)

RELIABILITY = ("precision", "reliability")
"""Metrics derived from the fractions of correct answers and of abstentions."""

TOTAL_REWARD = "reward"
"""Metric of the total reward of a run with several environments, whose reward parts differ."""

CONTROL_SUITES = ("empty_search", "random_search")
"""Suites in which a control engine replaces the search engine."""

ATTRIBUTION_METRICS = (
    "answer_in_results",
    "retrieved_but_ignored",
    "right_without_evidence",
    "redundant_searches",
)
"""Metrics that `compute_attribution` computes from the samples."""


@dataclass(frozen=True, kw_only=True)
class EvalSummary:
    """Metrics of one suite, by dataset and name.

    The dataset `all` contains every question. If there are several datasets, the dataset `mean` has
    the means over them.

    Attributes:
        num_samples: Number of samples per question.
        means: Means over questions; NaN if there is nothing to average.
        intervals: 95% bootstrap intervals of the means; None for NaN.
        weights: Weight of every reward part, nonzero weights first.
    """

    num_samples: int
    means: dict[str, dict[str, float]]
    intervals: dict[str, dict[str, tuple[float, float] | None]]
    weights: dict[str, float] = field(default_factory=dict)


def summarize_evaluation(
    questions: Sequence[Group],
    *,
    has_python: bool = False,
    tool_environments: Collection[str] = (),
    ks: Sequence[int] = (),
    num_resamples: int,
    seed: int,
    weights: Mapping[str, float] = MappingProxyType({}),
) -> EvalSummary:
    """Compute each dataset's means over questions, with confidence intervals.

    Samples with an environment error are counted but otherwise excluded. Means exclude questions
    without scored samples; pass@k and maj@k exclude questions with fewer than k scored samples.

    Args:
        questions: Samples of each question, the same number for every question.
        has_python: True to count Python calls.
        tool_environments: Environments whose answers are attributed to tool results.
        ks: Values of k for pass@k and maj@k; see `get_subset_sizes`.
        num_resamples: Number of bootstrap resamples.
        seed: Random seed for the bootstrap.
        weights: Weights of the reward parts.
    """
    [num_samples] = {len(question.trajectories) for question in questions}
    ks = get_subset_sizes(num_samples, ks)
    # One row of metrics per question; NaN for a metric that does not apply.
    measured = []
    for question in questions:
        metrics = _compute_question_metrics(question, ks, has_python)
        if question.trajectories[0].task.environment in tool_environments:
            samples = [compute_attribution(t) for t in question.scored_trajectories]
            metrics |= {
                name: mean_or_nan([s[name] for s in samples if name in s])
                for name in ATTRIBUTION_METRICS
            }
        measured.append(metrics)
    names = list(dict.fromkeys(name for metrics in measured for name in metrics))
    values = np.array([[m.get(name, math.nan) for name in names] for m in measured])
    # Means and bootstrap resamples of each dataset and of all questions.
    rows_by_source, rows_within_source = _group_questions(questions)
    rows_by_dataset = {"all": list(range(len(questions)))} | rows_by_source | rows_within_source
    rng = np.random.default_rng(seed)
    means = {
        name: _append_reliability(compute_column_means(values[rows]), names)
        for name, rows in rows_by_dataset.items()
    }
    resampled = {
        name: _append_reliability(
            bootstrap_means(values[rows], num_resamples=num_resamples, rng=rng), names
        )
        for name, rows in rows_by_dataset.items()
    }
    names += RELIABILITY if "exact_match" in names else ()
    counts = {
        name: _count_questions([questions[row] for row in rows])
        for name, rows in rows_by_dataset.items()
    }
    if len(rows_by_source) > 1:
        means["mean"] = np.mean([means[name] for name in rows_by_source], axis=0)
        resampled["mean"] = np.mean([resampled[name] for name in rows_by_source], axis=0)
        counts["mean"] = counts["all"]
    # All measured parts, first those with nonzero weight in the order of `weights`.
    parts = sorted(
        {part for t in flatten_groups(questions) if t.is_scored for part in _get_reward_parts(t)}
    )
    weighted_parts = [part for part, weight in weights.items() if weight and part in parts]
    return EvalSummary(
        num_samples=num_samples,
        means={
            name: dict(zip(names, map(float, row), strict=True)) | counts[name]
            for name, row in means.items()
        },
        intervals={
            name: dict(zip(names, map(compute_percentile_interval, columns.T), strict=True))
            for name, columns in resampled.items()
        },
        weights={part: weights.get(part, 0.0) for part in dict.fromkeys((*weighted_parts, *parts))},
    )


def get_subset_sizes(num_samples: int, ks: Sequence[int]) -> tuple[int, ...]:
    """Return `ks`; if it is empty, the powers of two below `num_samples`, plus `num_samples`.

    The default is that of verl. Returns () for a single sample.
    """
    if num_samples == 1:
        return ()
    powers = (2**exponent for exponent in range(1, num_samples.bit_length()))
    return tuple(ks) or (*(power for power in powers if power < num_samples), num_samples)


def _compute_question_metrics(
    question: Group, ks: Sequence[int], has_python: bool
) -> dict[str, float]:
    """Compute the metrics of a question. A metric that needs more scored samples is NaN."""
    scored = question.scored_trajectories
    parts = sorted({name for t in scored for name in _get_reward_parts(t)})
    formats = [t.is_well_formed for t in scored if "format" in t.reward_parts]
    is_correct = [t.reward_parts.get("exact_match") == 1.0 for t in scored]
    answers = [normalize_answer(t.final_answer) for t in scored]
    possible = [k for k in ks if k <= len(scored)] if "exact_match" in parts else []
    return {
        **{
            name: mean_or_nan([p[name] for p in map(_get_reward_parts, scored) if name in p])
            for name in parts
        },
        **({"format_rate": mean_or_nan(formats)} if formats else {}),
        "searches": mean_or_nan([len(t.searches) for t in scored]),
        "searched": mean_or_nan([bool(t.searches) for t in scored]),
        **(
            {"python_calls": mean_or_nan([len(t.python_calls) for t in scored])}
            if has_python
            else {}
        ),
        "sampled_tokens": mean_or_nan([t.num_sampled for t in scored]),
        **{str(name): mean_or_nan([t.outcome == name for t in scored]) for name in OUTCOMES},
        **dict.fromkeys((f"{name}@{k}" for name in ("pass", "maj") for k in ks), math.nan),
        **{f"pass@{k}": pass_at_k(len(is_correct), sum(is_correct), k) for k in possible},
        **{f"maj@{k}": majority_at_k(answers, is_correct, k) for k in possible},
    }


def _get_reward_parts(trajectory: Trajectory) -> Mapping[str, float]:
    """Return a trajectory's reward parts; with several environments, also the total reward."""
    parts = trajectory.reward_parts
    return {TOTAL_REWARD: trajectory.reward, **parts} if trajectory.task.environment else parts


def _group_questions(
    questions: Sequence[Group],
) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    """Group question indices by environment if there are several environments, else by data source.

    The second result groups the indices of an environment with several data sources under names
    such as `search/nq`.
    """
    tasks = [question.trajectories[0].task for question in questions]
    by_source: dict[str, list[int]] = {}
    within_source: dict[str, list[int]] = {}
    for index, task in enumerate(tasks):
        by_source.setdefault(task.environment or task.data_source, []).append(index)
        if task.environment:
            within_source.setdefault(f"{task.environment}/{task.data_source}", []).append(index)
    names = [name.partition("/")[0] for name in within_source]
    return by_source, {
        name: indices
        for name, indices in within_source.items()
        if names.count(name.partition("/")[0]) > 1
    }


def compute_attribution(trajectory: Trajectory) -> dict[str, float]:
    """Return the `ATTRIBUTION_METRICS` of a sample.

    Two of them require an exact-match score and are omitted if there is none.
    """
    origin: Attribution = attribute_answers(trajectory.turns, trajectory.task.answers)
    metrics: dict[str, float] = {"answer_in_results": origin.has_evidence}
    if (score := trajectory.reward_parts.get("exact_match")) is not None:
        is_right = score == 1.0
        metrics["retrieved_but_ignored"] = origin.has_evidence and not is_right
        metrics["right_without_evidence"] = is_right and not origin.has_evidence
    return metrics | {"redundant_searches": origin.num_redundant}


def _append_reliability(values: np.ndarray, names: Sequence[str]) -> np.ndarray:
    """Append the `RELIABILITY` metrics to means `[.., M]` if they include exact match.

    With accuracy a and abstention rate r, precision is a / (1 - r), or NaN if nothing was
    answered. Reliability is (1 - r) * precision + r * a = a + r * a.
    BAPO (https://arxiv.org/abs/2601.11037).
    """
    if "exact_match" not in names:
        return values
    accuracy = values[..., names.index("exact_match")]
    abstained = values[..., names.index("abstained")]
    answered = np.where(abstained < 1, 1 - abstained, math.nan)
    more = (accuracy / answered, accuracy + abstained * accuracy)
    return np.concatenate([values, np.stack(more, axis=-1)], axis=-1)


def _count_questions(questions: Sequence[Group]) -> dict[str, int]:
    num_scored = [len(question.scored_trajectories) for question in questions]
    num_samples = len(flatten_groups(questions))
    counts = (len(questions), num_scored.count(0), num_samples - sum(num_scored))
    return dict(zip(COUNTS, counts, strict=True))


def build_eval_metrics(suite: str, summary: EvalSummary) -> dict[str, float]:
    """Return the means under verl's metric names: `mean@N`, `best@K/mean`, `maj@K/mean`."""
    is_sampled = suite == "sampled"
    core = "exact_match" if is_sampled else f"exact_match/{suite}"
    metrics = {}
    for data_set, means in summary.means.items():
        for name, value in means.items():
            if name == "exact_match":
                key = f"val-core/{data_set}/{core}"
                key += f"/mean@{summary.num_samples}" if is_sampled else ""
            elif name.startswith(("pass@", "maj@")):
                key = f"val-core/{data_set}/{core}/{name.replace('pass@', 'best@')}/mean"
            else:
                key = f"val-aux/{data_set}/{name}/{suite}"
            metrics[key] = value
    return metrics


def is_unscored(summary: EvalSummary) -> bool:
    """Return True if no question could be scored."""
    counts = summary.means["all"]
    return counts["unscored_questions"] == counts["num_questions"]


def get_held_out_score(summary: EvalSummary) -> float | None:
    """Return exact match over all questions, or the reward if exact match is not measured."""
    means = summary.means["all"]
    score = means.get("exact_match", compute_weighted_reward(means, summary.weights))
    return None if score is None or math.isnan(score) else score


def format_suite_line(suite: str, summary: EvalSummary) -> str:
    """Format the scores of a suite as one line."""
    if is_unscored(summary):
        count = summary.means["all"]["environment_errors"]
        return f"{suite}: nothing could be scored ({count} environment errors)"
    scores = {name: m.get("exact_match", math.nan) for name, m in summary.means.items()}
    by_set = ", ".join(
        f"{name} {'-' if math.isnan(score) else f'{score:.3f}'}" for name, score in scores.items()
    )
    if "mean" not in scores:  # a single data set
        by_set = by_set.partition(", ")[0].removeprefix("all ")
    weighted_parts = [
        part for part, weight in summary.weights.items() if weight and part != "exact_match"
    ]
    means = summary.means["all"]
    parts = "".join(
        f"; {part} {means[part]:.3f}" for part in weighted_parts if part != TOTAL_REWARD
    )
    reward = compute_weighted_reward(means, summary.weights)
    paid = "" if reward is None or not weighted_parts else f"reward {reward:.3f}; "
    return f"{suite}: {paid}exact match {by_set}{parts}; searches {means['searches']:.2f}"


def format_tables(
    step: int, stage: str, summaries: Mapping[str, EvalSummary], *, weights_step: int | None = None
) -> str:
    """Format tables for all suites, 80 columns wide."""
    title = f"{stage}, step {step}: means over questions [95% bootstrap interval]"
    if weights_step not in (None, step):
        title += f"\nstopped early: the weights are those of step {weights_step}"
    text = "\n\n".join([title, *(_format_suite(*item) for item in summaries.items())])
    return escape_control_chars(text)  # users choose the names of datasets


SCORE_COLUMNS = {"exact_match": "exact match", "f1": "F1", "format_rate": "format"}
BEHAVIOR_COLUMNS = {
    **{str(name): str(name).replace("out_of_", "out of\n") for name in OUTCOMES},
    "searches": "searches",
    "sampled_tokens": "tokens",
    "environment_errors": "errors",
}
"""Metrics in the main tables, and their column headers."""

OPTIONAL_COLUMNS = {
    "searched": "searched",
    "python_calls": "Python calls",
    "precision": "precision",
    "reliability": "reliability",
}
"""Metrics in an additional table, each shown only if it adds information."""

EVIDENCE_COLUMNS = {
    "answer_in_results": "in results",
    "retrieved_but_ignored": "in results, wrong",
    "right_without_evidence": "right without",
    "redundant_searches": "redundant searches",
}
"""Attribution metrics, in a separate table."""

DECIMAL_PLACES = {
    "searches": 2,
    "redundant_searches": 2,
    "python_calls": 2,
    "sampled_tokens": 1,
    **dict.fromkeys(COUNTS, 0),
}
"""Decimal places of metrics that are not fractions; those have three."""


def _format_suite(suite: str, summary: EvalSummary) -> str:
    # With a single dataset, the row `all` is enough.
    names = list(summary.means) if "mean" in summary.means else ["all"]
    measured = summary.means["all"]

    def build_table(first: str, columns: Mapping[str, str]) -> str:
        rows = [
            (name, *(_format_cell(summary, name, metric) for metric in columns)) for name in names
        ]
        return _format_table((first, *columns.values()), rows)

    scores = {metric: header for metric, header in SCORE_COLUMNS.items() if metric in measured}
    tables = [build_table("", {"num_questions": "questions", **scores})]
    if not summary.weights.keys() <= scores.keys():
        rows = [
            (name, part, f"{weight:.3g}", _format_cell(summary, name, part))
            for name in names
            for part, weight in summary.weights.items()
        ]
        tables.append(_format_table(("", "reward part", "weight", "mean"), rows))
    tables.append(build_table("", BEHAVIOR_COLUMNS))
    # Without abstentions, precision and reliability equal the accuracy.
    depends_on = dict.fromkeys(RELIABILITY, "abstained")
    more = {
        name: header
        for name, header in OPTIONAL_COLUMNS.items()
        if name in measured and measured[depends_on.get(name, name)] > 0
    }
    if more:
        tables.append(build_table("", more))
    if "answer_in_results" in measured:
        tables.append(build_table("answer", EVIDENCE_COLUMNS))
    ks = [metric.removeprefix("pass@") for metric in measured if metric.startswith("pass@")]
    if ks:
        rows = [
            (
                name,
                k,
                *(_format_cell(summary, name, f"{metric}@{k}") for metric in ("pass", "maj")),
            )
            for name in names
            for k in ks
        ]
        tables.append(_format_table(("", "k", "pass@k", "maj@k"), rows))
    samples = f"{summary.num_samples} sample{'s' * (summary.num_samples > 1)} a question"
    return f"{suite}, {samples}\n" + "\n\n".join(tables)


def _format_cell(summary: EvalSummary, name: str, metric: str) -> str:
    """Format a metric, with its interval if it is a reward, pass@k, maj@k or in `RELIABILITY`."""
    value = summary.means[name][metric]
    if math.isnan(value):
        return "-"
    text = f"{value:.{DECIMAL_PLACES.get(metric, 3)}f}"
    interval = summary.intervals[name].get(metric)
    if interval and (
        metric in summary.weights or metric.startswith(("pass@", *RELIABILITY, "maj@"))
    ):
        text += f" [{interval[0]:.3f}, {interval[1]:.3f}]"
    return text


def _format_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="")
    table.add_column(headers[0], overflow="fold")
    for header in headers[1:]:
        is_name = header == "reward part"
        table.add_column(
            Text(header),
            justify="left" if is_name else "right",
            no_wrap=not is_name,
            overflow="fold",
        )
    for row in rows:
        table.add_row(*map(Text, row))
    out = io.StringIO()
    make_console(file=out, width=80, color_system=None).print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())

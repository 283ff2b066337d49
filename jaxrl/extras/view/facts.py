"""Summarize and compare runs as JSON values: scores, progress, costs and times."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from jaxrl.config.environments import expand_environments
from jaxrl.config.schema import default_config, flatten_config
from jaxrl.extras.view.reader import Evaluation, RunReader
from jaxrl.logs.results import SUITE_LABELS, compute_weighted_reward, is_exact_match_only
from jaxrl.training.settings import STAGES
from jaxrl.utils.json_io import to_finite_float

STAGE_LABELS = {"sft": "warm start", "train": "reinforcement learning", "evaluate": "evaluation"}

COUNTS = ("num_questions", "unscored_questions", "environment_errors")
"""Metrics of an evaluation that are counts instead of means."""

TIMINGS = {
    "compiling": "timing_s/compile",
    "generation": "timing_s/gen",
    "update": "timing_s/update_actor",
    "evaluation": "timing_s/testing",
    "checkpoint": "timing_s/save_checkpoint",
}
"""Timing metric of each part of a step, keyed by the part's label."""

TOTALS = {
    "ledger/total/trajectories": "trajectories",
    "ledger/total/sampled_tokens": "sampled tokens",
    "ledger/total/observation_tokens": "observation tokens",
    "perf/ledger/total/cost": "cost",
}
"""Labels of the metrics with a run's totals, keyed by metric name."""

Point = tuple[int, float, float | None, float | None, str]
"""Step of the weights, value, bounds of the 95% interval, and stage."""


def summarize_run(run: RunReader) -> dict[str, Any]:
    """Summarize a run, without curves, answers and trajectories."""
    return {
        "name": run.name,
        "folder": str(run.workdir.resolve()),
        "step": run.records[-1]["step"] if run.records else None,
        "offset": count_warm_start_steps(run),
        "stages": compute_progress(run),
        "is_finished": is_finished(run),
        "warnings": find_warnings(run),
        "problems": run.problems,
        "signs": [
            {name: sign.get(name) for name in ("step", "sign", "text", "action")}
            for sign in run.signs
        ],
        "scores": compute_scores(run),
        "suites": {suite: SUITE_LABELS.get(suite, suite) for suite in list_suites(run)},
        "failures": count_failures(run),
        "costs": list_costs(run),
        "times": compute_times(run),
        "metrics": list_metric_names(run),
        "config": list_config_rows(run),
        "changes": run.changes,
        "starts": run.starts,
        "num_trajectories": len(run.index.rows),
        "num_files": run.index.num_files,
        "num_indexed": run.index.num_indexed,
    }


def count_warm_start_steps(run: RunReader) -> int:
    """Return the number of warm-start steps, which global step numbers also count."""
    return next((r["step"] for r in reversed(run.records) if r["stage"] == "sft"), 0)


def format_step(run: RunReader, step: float) -> str:
    """Format a global step number as the step within its stage."""
    num_before = count_warm_start_steps(run)
    return f"warm-start step {step:.0f}" if step < num_before else f"step {step - num_before:.0f}"


def compute_progress(run: RunReader) -> list[dict[str, Any]]:
    """Compute the finished and planned steps of each stage; an evaluation is one step."""
    planned = {"sft": run.config.get("sft.num_steps"), "train": run.config.get("num_steps")}
    present = {record["stage"] for record in run.records}
    configured = run.config.get("stages") or ()
    rows = []
    for stage in (name for name in STAGES if name in configured or name in present):
        records = [record for record in run.records if record["stage"] == stage]
        num_done = sum("timing_s/step" in record for record in records)
        num_planned = to_finite_float(planned.get(stage))
        stopped = [record["step"] for record in records if record.get("stopped_early")]
        is_done = bool(stopped) or (num_planned is not None and num_done >= num_planned)
        is_done |= stage == "sft" and "train" in present
        if stage == "evaluate":
            num_done, num_planned, is_done = min(len(records), 1), 1, bool(records)
        counts = {"num_done": num_done, "num_planned": num_planned, "is_done": is_done}
        label = {"stage": STAGE_LABELS[stage], "stopped_early": stopped[-1] if stopped else None}
        rows.append(label | counts)
    return rows


def is_finished(run: RunReader) -> bool:
    """Return True if every configured stage has ended."""
    stages = compute_progress(run)
    return bool(stages) and all(stage["is_done"] for stage in stages)


def find_warnings(run: RunReader) -> list[tuple[bool, str]]:
    """Find problems with a run; return (is_serious, text) for each."""
    # Steps without a gradient, grouped by cause.
    steps = [r for r in run.records if r["stage"] == "train" and "timing_s/step" in r]
    failed = [step for step in steps if step.get("outcome/environment_error") == 1]
    uninformative = [step for step in steps if step.get("rollout/informative_share") == 0]
    skipped = [step for step in steps if step.get("actor/skipped") == 1]
    update_sizes = [step.get("actor/num_learned", step.get("actor/grad_norm")) for step in steps]
    measured = [value for value in map(to_finite_float, update_sizes) if value is not None]
    warnings = []
    if measured and not any(measured):
        warnings.append((True, "nothing learned: every gradient was zero"))
    for reason, ineffective in (
        ("every episode failed", failed),
        ("all compared rewards were equal", [s for s in uninformative if s not in failed]),
        ("the gradient was not finite", skipped),
    ):
        if ineffective:
            text = f"{len(ineffective)} of {len(steps)} steps had no effect: {reason}"
            warnings.append((2 * len(ineffective) >= len(steps), text))
    # Evaluations in which nothing was scored, and the first environment error.
    for evaluation in list_evaluations(run):
        for suite, by_data_set in evaluation.summary.items():
            num_questions, num_unscored, _ = map(by_data_set["all"].get, COUNTS)
            if num_questions and num_questions == num_unscored:
                step = format_step(run, evaluation.step)
                text = f"{STAGE_LABELS[evaluation.stage]}, {step}, {suite}"
                warnings.append((True, f"every episode failed in an evaluation: {text}"))
    answers = [rows for e in list_evaluations(run) for rows in e.answers.values()]
    errors = [run.index.error, *(row["error"] for rows in answers for row in rows)]
    if error := next(filter(None, errors), ""):
        warnings.append((True, f"an environment error: {error}"))
    # Config changes, after which the run is no longer a single experiment.
    for change in run.changes:
        if accepted := change.get("accepted"):
            keys = ", ".join(map(str, accepted))
            step = format_step(run, to_finite_float(change.get("step")) or 0)
            text = f"{keys} changed after {step}: not a single experiment"
            warnings.append((True, text))
    return warnings


def list_evaluations(run: RunReader) -> list[Evaluation]:
    """List the evaluations up to the last logged step; later files are from an interrupted run."""
    end = run.records[-1]["step"] if run.records else math.inf
    return [evaluation for evaluation in run.evaluations if evaluation.step <= end]


def list_suites(run: RunReader) -> list[str]:
    """List the suites of all evaluations in display order."""
    present = {
        suite: None
        for evaluation in list_evaluations(run)
        for suite in (*evaluation.summary, *evaluation.answers)
    }
    order = list(SUITE_LABELS)
    return sorted(present, key=lambda suite: order.index(suite) if suite in order else len(order))


def compute_scores(run: RunReader) -> list[dict[str, Any]]:
    """Compute the means of all evaluations, by suite, dataset and metric.

    The order is reward, its parts by weight, exact match, parts without a weight, and other
    metrics. `weight` is None for metrics that are not reward parts. The reward is omitted if it
    equals exact match.
    """
    points: dict[tuple[str, str, str], list[Point]] = {}
    weights: dict[str, float] = {}
    for evaluation in list_evaluations(run):
        for suite in (name for name in list_suites(run) if name in evaluation.summary):
            suite_weights = {
                part: to_finite_float(weight) or 0.0
                for part, weight in evaluation.weights.get(suite, {}).items()
            }
            weights |= suite_weights
            for data_set, means in evaluation.summary[suite].items():
                values = {name: to_finite_float(mean) for name, mean in means.items()}
                if not is_exact_match_only(suite_weights):
                    values = {"reward": compute_weighted_reward(values, suite_weights), **values}
                for metric, value in values.items():
                    if value is None or metric in COUNTS:
                        continue
                    intervals = evaluation.intervals.get(suite, {}).get(data_set, {})
                    low, high = map(to_finite_float, intervals.get(metric) or (None, None))
                    point = (evaluation.weights_step, value, low, high, evaluation.stage)
                    points.setdefault((suite, data_set, metric), []).append(point)

    def get_sort_key(key: tuple[str, str, str]) -> tuple[bool, ...]:
        metric = key[2]
        return (
            metric != "reward",
            not weights.get(metric),
            metric != "exact_match",
            metric not in weights,
        )

    return [
        {
            "suite": suite,
            "data_set": data_set,
            "measure": metric,
            "weight": weights.get(metric),
            "points": points[suite, data_set, metric],
        }
        for suite, data_set, metric in sorted(points, key=get_sort_key)
    ]


def get_held_out_scores(run: RunReader) -> dict[tuple[str, str], tuple[Point | None, Point]]:
    """Return each metric's first and last score over all held-out questions of a suite.

    The metrics are exact match, and the reward if it differs from exact match. The first score is
    None if there is only one evaluation.
    """
    rows = [row for row in compute_scores(run) if row["data_set"] == "all"]
    main = [row for row in rows if row["measure"] in ("reward", "exact_match")]
    return {
        (row["measure"], row["suite"]): (
            row["points"][0] if len(row["points"]) > 1 else None,
            row["points"][-1],
        )
        for row in main
    }


def count_failures(run: RunReader) -> dict[str, dict[str, int]]:
    """Count the last evaluation's answers by suite and kind of failure ("" for none)."""
    evaluations = [evaluation for evaluation in list_evaluations(run) if evaluation.answers]
    return {
        suite: dict(Counter(row["failure"] or "" for row in rows))
        for evaluation in evaluations[-1:]
        for suite, rows in evaluation.answers.items()
    }


def list_costs(run: RunReader) -> list[tuple[str, float]]:
    """List the run's total costs, with labels, including those of evaluations."""
    records = (r for r in reversed(run.records) if "ledger/total/trajectories" in r)
    record: dict[str, Any] = next(records, {})
    calls = "ledger/total/calls/"
    tools = [name.removeprefix(calls) for name in record if name.startswith(calls)]
    labels = TOTALS | {calls + tool: f"{tool} calls" for tool in tools}
    labels |= {f"perf/ledger/total/attempts/{tool}": f"{tool} requests sent" for tool in tools}
    totals = [(label, to_finite_float(record.get(name))) for name, label in labels.items()]
    return [(label, total) for label, total in totals if total]


def compute_times(run: RunReader) -> list[dict[str, Any]]:
    """Compute the seconds that each stage spent on each entry of `TIMINGS` and on other work.

    Time between two records, for example for a checkpoint, counts toward the later record.
    """
    rows = []
    for stage in dict.fromkeys(record["stage"] for record in run.records):
        records = [record for record in run.records if record["stage"] == stage]

        def sum_metric(name: str, records: Sequence[dict[str, Any]] = records) -> float:
            return sum(to_finite_float(record.get(name)) or 0.0 for record in records)

        parts = {part: sum_metric(name) for part, name in TIMINGS.items()}
        step_s = sum_metric("timing_s/step")
        if not parts["update"]:  # a supervised step consists only of its update
            parts["update"] = step_s - parts["generation"]
        measured = sum(parts.values())
        parts["other"] = max(sum_metric("timing_s/wall"), step_s, measured) - measured
        parts = {part: seconds for part, seconds in parts.items() if seconds >= 0.05}
        if parts:
            rows.append({"stage": STAGE_LABELS.get(stage, stage), "parts": parts})
    return rows


def list_metric_names(run: RunReader) -> dict[str, list[str]]:
    """List the names of numeric metrics by stage."""
    names: dict[str, dict[str, None]] = {}
    for record in run.records:
        by_stage = names.setdefault(record["stage"], {})
        for name, value in record.items():
            if name not in by_stage and name != "step" and to_finite_float(value) is not None:
                by_stage[name] = None
    return {stage: sorted(by_stage) for stage, by_stage in names.items()}


def compute_curve(run: RunReader, stage: str, name: str, max_points: int) -> list[list[float]]:
    """Compute the steps and values of a metric in a stage.

    Curves with more than `max_points` points are downsampled: neighbors are merged into their mean
    step and the mean, minimum and maximum value.
    """
    points = [
        [record["step"], value]
        for record in run.records
        if record["stage"] == stage and (value := to_finite_float(record.get(name))) is not None
    ]
    size = math.ceil(len(points) / max_points)
    if size <= 1:
        return points
    bins = [points[start : start + size] for start in range(0, len(points), size)]
    result = []
    for part in bins:
        steps, values = zip(*part, strict=True)
        means = statistics.fmean(steps), statistics.fmean(values)
        result.append([*means, min(values), max(values)])
    return result


def list_config_rows(run: RunReader) -> list[tuple[str, Any, Any, bool]]:
    """List (key, value, default, is_changed) for all config keys."""
    defaults = flatten_config(default_config())
    return [
        (
            key,
            value,
            defaults.get(key),
            _to_canonical_json(value) != _to_canonical_json(defaults.get(key)),
        )
        for key, value in expand_environments(run.config).items()
    ]


def _to_canonical_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)  # tuples are lists in files


def group_runs(runs: Sequence[RunReader], ignore: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Group runs whose configs differ only in the seed.

    Args:
        runs: Runs in the order of the command line.
        ignore: Additional keys or sections that may differ within a group.

    Returns:
        A dict per group: `runs` (indices in the argument), `label`, and `settings` (values of the
        keys that differ between groups).
    """
    defaults = flatten_config(default_config())

    def get_comparable_config(run: RunReader) -> dict[str, Any]:
        # Keys that are missing from the run's config had default values.
        config = expand_environments(defaults | run.config) if run.config else {}
        names = ("seed", *ignore)
        return {
            key: value
            for key, value in config.items()
            if not any(key == name or key.startswith(f"{name}.") for name in names)
        }

    members: dict[str, list[int]] = {}
    for number, run in enumerate(runs):
        # A run without a config forms a separate group.
        group_id = None if run.config else number
        key = _to_canonical_json([group_id, get_comparable_config(run)])
        members.setdefault(key, []).append(number)
    # Label each group with the settings in which groups differ.
    configs = [get_comparable_config(runs[numbers[0]]) for numbers in members.values()]
    keys = dict.fromkeys(key for config in configs for key in config)
    varying_keys = [
        key for key in keys if len({_to_canonical_json(config.get(key)) for config in configs}) > 1
    ]
    groups = []
    for numbers, config in zip(members.values(), configs, strict=True):
        names = [runs[number].name for number in numbers]
        label = names[0] if len(names) == 1 else f"{names[0]} ({len(names)} seeds)"
        settings = [f"{key}={_truncate_middle(repr(config.get(key)))}" for key in varying_keys]
        groups.append({"label": label, "runs": numbers, "settings": settings})
    return groups


def _truncate_middle(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:30]}…{text[-30:]}"


def compare_runs(runs: Sequence[RunReader], groups: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Build a table with a row per run, and a row of means for each group with several runs.

    Returns:
        `columns` and `rows`. A row has the indices of its `run` (None for means) and `group`, and
        `cells`, each a value and a note to show below the value.
    """
    results = [get_held_out_scores(run) for run in runs]
    names = list(dict.fromkeys(name for result in results for name in result))
    labels = [
        f"{metric.replace('_', ' ')}, {SUITE_LABELS.get(suite, suite)}" for metric, suite in names
    ]
    rows = []
    for number, group in enumerate(groups):
        for position in group["runs"]:
            run, result = runs[position], results[position]
            num_steps = run.records[-1]["step"] - count_warm_start_steps(run) if run.records else 0
            step = f"{num_steps:,}" if run.records else "–"
            sampled = dict(list_costs(run)).get("sampled tokens")
            seconds = sum(sum(row["parts"].values()) for row in compute_times(run))
            cells = [(step, "" if is_finished(run) else "not finished")]
            cells += [
                _format_score(*result[name]) if name in result else ("–", "") for name in names
            ]
            cells.append((f"{sampled:,.0f}" if sampled else "–", ""))
            cells.append((format_seconds(seconds) if seconds else "–", ""))
            title = (run.name, "\n".join(group["settings"]))
            rows.append({"run": position, "group": number, "cells": [title, *cells]})
        if len(group["runs"]) > 1:
            # Exclude unfinished runs: their last score is from an intermediate step.
            finished = [results[n] for n in group["runs"] if is_finished(runs[n])]
            cells = [_format_mean([r[name] for r in finished if name in r]) for name in names]
            title = ("mean ± sd", group["label"])
            cells = [title, ("", ""), *cells, ("", ""), ("", "")]
            rows.append({"run": None, "group": number, "cells": cells})
    return {"columns": ["run", "step", *labels, "tokens sampled", "time"], "rows": rows}


def _format_score(first: Point | None, last: Point) -> tuple[str, str]:
    _, value, low, high, _ = last
    before = "" if first is None else f"{first[1]:.3f} → "
    interval = "" if low is None or high is None else f"{low:.3f} to {high:.3f}"
    return f"{before}{value:.3f}", interval


def _format_mean(pairs: Sequence[tuple[Point | None, Point]]) -> tuple[str, str]:
    if not pairs:
        return "–", ""
    before = [first[1] for first, _ in pairs if first]
    text = _format_mean_std([last[1] for _, last in pairs])
    if len(before) == len(pairs):
        text = f"{_format_mean_std(before)} → {text}"
    return text, f"of {len(pairs)} finished"


def _format_mean_std(values: Sequence[float]) -> str:
    mean = f"{statistics.fmean(values):.3f}"
    return f"{mean} ± {statistics.stdev(values):.3f}" if len(values) > 1 else mean


def format_seconds(seconds: float) -> str:
    """Format a duration, such as 12.3 s, 4 min 05 s or 2 h 10 min."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    return f"{minutes // 60} h {minutes % 60:02} min"

"""Rollout metrics, and conversion of metrics to JSON numbers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl.envs.base import CallRecord
from jaxrl.objectives.metrics import mean_or_nan
from jaxrl.types import GROUP_KINDS, GroupStats, Trajectory


def compute_rollout_metrics(
    trajectories: Sequence[Trajectory], max_response_tokens: int, *, has_python: bool = False
) -> dict[str, float]:
    """Compute means over the scored trajectories, with verl's metric names where they exist.

    Without scored trajectories, the means are NaN, since an environment error is not a reward of 0.
    `has_python` adds a count of Python calls.
    """
    scored = [t for t in trajectories if t.is_scored]
    lengths = [t.num_sampled for t in scored]
    rewards = [t.reward for t in scored]
    outcomes = [str(t.outcome) for t in trajectories]
    metrics = {
        "critic/rewards/mean": mean_or_nan(rewards),
        "critic/rewards/max": max(rewards, default=math.nan),
        "critic/rewards/min": min(rewards, default=math.nan),
    }
    for name in sorted({name for t in scored for name in t.reward_parts}):
        values = [t.reward_parts[name] for t in scored if name in t.reward_parts]
        metrics[f"reward/{name}/mean"] = mean_or_nan(values)
    metrics |= {
        "response_length/mean": mean_or_nan(lengths),
        "response_length/max": max(lengths, default=math.nan),
        "response_length/clip_ratio": mean_or_nan([n >= max_response_tokens for n in lengths]),
        "num_turns/mean": mean_or_nan([len(t.turns) for t in scored]),
        "num_searches/mean": mean_or_nan([len(t.searches) for t in scored]),
    }
    if any(t.contexts for t in trajectories):
        metrics["num_contexts/mean"] = mean_or_nan([len(t.contexts) + 1 for t in scored])
    if has_python:
        metrics["num_python_calls/mean"] = mean_or_nan([len(t.python_calls) for t in scored])
    for name in ("answered", "abstained", "malformed", "out_of_budget", "environment_error"):
        metrics[f"outcome/{name}"] = outcomes.count(name) / max(len(outcomes), 1)
    return metrics


def compute_environment_metrics(
    trajectories: Sequence[Trajectory],
    sampled_stats: Sequence[GroupStats],
    max_response_tokens: int,
    *,
    has_python: bool = False,
) -> dict[str, float]:
    """Compute the metrics of each environment, if there are several, as `env/<name>/<metric>`.

    Metrics that would be NaN are omitted for an environment without trajectories or sampled groups.

    Args:
        trajectories: Trajectories to train on.
        sampled_stats: Statistics of all sampled groups, including those that the filter dropped.
        max_response_tokens: See `compute_rollout_metrics`.
        has_python: See `compute_rollout_metrics`.
    """
    metrics: dict[str, float] = {}
    names = [t.task.environment for t in trajectories] + [s.environment for s in sampled_stats]
    for name in filter(None, dict.fromkeys(names)):
        selected = [t for t in trajectories if t.task.environment == name]
        stats = [group for group in sampled_stats if group.environment == name]
        values = {"share": len(selected) / max(len(trajectories), 1)}
        if selected:
            values |= compute_rollout_metrics(selected, max_response_tokens, has_python=has_python)
        if stats:
            values |= compute_group_metrics(stats)
        metrics |= {f"env/{name}/{key}": x for key, x in values.items() if math.isfinite(x)}
    return metrics


def compute_group_metrics(sampled_stats: Sequence[GroupStats]) -> dict[str, float]:
    """Compute metrics of all groups that a step sampled; fractions are NaN without groups."""
    kinds = Counter(group.kind for group in sampled_stats)
    num_scored = sum(group.num_scored for group in sampled_stats)
    return {
        "rollout/partial_groups": sum(
            group.num_scored > 0 and group.num_failed > 0 for group in sampled_stats
        ),
        "filter/accuracy": sum(group.num_correct for group in sampled_stats)
        / (num_scored or np.nan),
        **{
            f"filter/{kind}_share": kinds[kind] / (len(sampled_stats) or np.nan)
            for kind in GROUP_KINDS
        },
    }


def compute_search_metrics(records: Sequence[CallRecord]) -> dict[str, float]:
    """Count searches by source and summarize their latency; return {} if there are none.

    The counts are not reproducible, because timing decides which of two identical calls runs and
    which reuses the result.
    """
    searches = [record for record in records if record.tool is None]
    if not searches:
        return {}
    sources = [record.source for record in searches]
    waited_s = [record.waited_s for record in searches]
    return {
        "perf/search/calls": len(searches),
        "perf/search/cache_hits": sources.count("cache"),
        "perf/search/shared": sources.count("shared"),
        "perf/search/replayed": sources.count("replay"),
        "perf/search/attempts": sum(record.attempts for record in searches),
        "perf/search/retries": sum(max(record.attempts - 1, 0) for record in searches),
        "perf/search/failed": sum(record.error is not None for record in searches),
        "timing_s/search/mean": mean_or_nan(waited_s),
        "timing_s/search/max": max(waited_s),
    }


def to_json_numbers(metrics: Mapping[str, Any]) -> dict[str, float | int | None]:
    """Convert metrics to JSON numbers. See `to_json_number`."""
    return {name: to_json_number(value) for name, value in metrics.items()}


def to_json_number(value: Any) -> float | int | None:
    """Convert a number or scalar array to a JSON number; None if it is None or not finite."""
    value = np.asarray(value).item()
    return value if value is not None and math.isfinite(value) else None


def count_unscored_suites(metrics: Mapping[str, float]) -> int:
    """Count the suites in `metrics` without a scored question; see `build_eval_metrics`."""
    head = "val-aux/all/unscored_questions/"
    suites = [name.removeprefix(head) for name in metrics if name.startswith(head)]
    return sum(metrics[head + s] == metrics[f"val-aux/all/num_questions/{s}"] for s in suites)

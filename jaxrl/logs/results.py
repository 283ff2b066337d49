"""Held-out scores of a run, read from the files in its `eval/` folder."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl.utils.json_io import to_finite_float

SUITE_LABELS = {
    "sampled": "sampled",
    "greedy": "greedy",
    "empty_search": "search finds nothing",
    "random_search": "search returns random documents",
    "blank_images": "images are blank",
}
"""Labels of evaluation suites, in display order. All after `greedy` are controls."""

STAGES = ("train", "evaluate")
_FILE = re.compile(rf"({'|'.join(STAGES)})_(\d+)\.json")

Scores = dict[str, float]
"""Means of one evaluation by name, such as `exact_match`; see `read_scores`."""


def compute_weighted_reward(
    means: Mapping[str, float | None], weights: Mapping[str, float]
) -> float | None:
    """Return the weighted sum of mean reward parts; None if a weighted part has no mean."""
    parts = [(means.get(part), weight) for part, weight in weights.items() if weight]
    total = 0.0
    for mean, weight in parts:
        if mean is None or math.isnan(mean):
            return None
        total += weight * mean
    return total if parts else None


def is_exact_match_only(weights: Mapping[str, float]) -> bool:
    """Return True if the reward always equals exact match and need not be shown as well."""
    return {part: weight for part, weight in weights.items() if weight} == {"exact_match": 1.0}


def read_scores(workdir: Path, last_step: int) -> list[Scores]:
    """Read the scores of evaluations up to global step `last_step`, oldest first.

    A score's name is `<metric>/<suite>` for all questions and `<dataset>/<metric>/<suite>` for the
    questions of one dataset. A name without a suite refers to the first suite. `reward` is the
    weighted sum of the reward parts. Unreadable files are skipped.
    """
    paths = {}
    for path in (workdir / "eval").glob("*.json"):
        if (match := _FILE.fullmatch(path.name)) and int(match[2]) <= last_step:
            paths[int(match[2]), STAGES.index(match[1])] = path
    evaluations = []
    for _, path in sorted(paths.items()):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            evaluations.append(
                _flatten_scores(content["summary"], content.get("reward_weights", {}))
            )
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            continue
    return evaluations


def _flatten_scores(
    suites: Mapping[str, Mapping[str, Mapping[str, Any]]],
    weights: Mapping[str, Mapping[str, float]],
) -> Scores:
    scores: Scores = {}
    order = [*SUITE_LABELS, *(suite for suite in suites if suite not in SUITE_LABELS)]
    for suite in (name for name in order if name in suites):
        is_first = not scores
        for dataset, means in suites[suite].items():
            prefix = "" if dataset == "all" else f"{dataset}/"
            numbers = {name: to_finite_float(value) for name, value in means.items()}
            numbers = {
                "reward": compute_weighted_reward(numbers, weights.get(suite, {})),
                **numbers,
            }
            for name, value in numbers.items():
                if value is not None:
                    scores[f"{prefix}{name}/{suite}"] = value
                    if is_first:
                        scores[f"{prefix}{name}"] = value
    return scores


def format_scores(evaluations: Sequence[Scores]) -> list[str]:
    """Format a line with the first and last scores, and a line with the control scores.

    The reward comes first, unless it always equals exact match. Returns [] if there are no
    evaluations.
    """
    first = evaluations[0] if len(evaluations) > 1 else {}
    last = evaluations[-1] if evaluations else {}
    is_same = all(
        scores.get(name.replace("reward/", "exact_match/")) == value
        for scores in evaluations
        for name, value in scores.items()
        if name.startswith("reward/")
    )
    lines = []
    suites = [*SUITE_LABELS]
    for prefix, group in (("", suites[:2]), ("controls, ", suites[2:])):
        parts = []
        for metric in ("exact_match",) if is_same else ("reward", "exact_match"):
            texts = []
            for suite in group:
                if (value := last.get(f"{metric}/{suite}")) is not None:
                    old = first.get(f"{metric}/{suite}")
                    arrow = "" if old is None else f"{old:.3f} -> "
                    texts.append(f"{SUITE_LABELS[suite]} {arrow}{value:.3f}")
            if texts:
                parts.append(f"{metric.replace('_', ' ')}: {', '.join(texts)}")
        lines += [prefix + "; ".join(parts)] if parts else []
    return lines

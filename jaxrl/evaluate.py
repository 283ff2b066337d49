"""Scores a policy on held-out tasks."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl.envs.base import Task
from jaxrl.metrics import mean, plain_number
from jaxrl.sampling.engine import Engine
from jaxrl.sampling.rollout import Rollout, Seeds
from jaxrl.types import Draw, Trajectory


def evaluate(
    engine: Engine, rollout: Rollout, tasks: Sequence[Task], *, temperature: float, seeds: Seeds
) -> list[Trajectory]:
    """One trajectory of each task under the engine's weights; temperature 0 is greedy."""
    usual = engine.temperature
    engine.temperature = temperature
    draws = [Draw(task=task, position=index) for index, task in enumerate(tasks)]
    trajectories = rollout(draws, group_size=1, seeds=seeds, policy_version=0)
    engine.temperature = usual
    return trajectories


def summarize(trajectories: Sequence[Trajectory]) -> dict[str, dict[str, float]]:
    """Means by data set, and over all questions under `all`.

    Environment errors are left out of the means and counted; with nothing else a mean is NaN.
    """
    by_set: dict[str, list[Trajectory]] = defaultdict(list)
    for trajectory in trajectories:
        for name in dict.fromkeys(("all", trajectory.task.data_source)):
            by_set[name].append(trajectory)
    return {name: _means(members) for name, members in by_set.items()}


def _means(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    scored = [t for t in trajectories if t.outcome != "environment_error"]
    parts = sorted({name for t in scored for name in t.reward_parts})
    return {
        **{name: mean([t.reward_parts[name] for t in scored]) for name in parts},
        "searches": mean([t.num_tool_calls for t in scored]),
        "sampled_tokens": mean([t.num_sampled for t in scored]),
        "answered": mean([float(t.outcome == "answered") for t in scored]),
        "num_questions": len(trajectories),
        "environment_errors": len(trajectories) - len(scored),
    }


def as_metrics(suite: str, summary: dict[str, dict[str, float]]) -> dict[str, float]:
    """The summary under verl's validation names; sampled accuracy is its `mean@1`."""
    names = {"exact_match": f"exact_match/{'mean@1' if suite == 'sampled' else suite}"}
    metrics = {}
    for data_set, means in summary.items():
        for name, value in means.items():
            kind = "val-core" if name in names else "val-aux"
            metrics[f"{kind}/{data_set}/{names.get(name, f'{name}/{suite}')}"] = value
    return metrics


def write_results(
    path: Path, step: int, suites: Mapping[str, Sequence[Trajectory]]
) -> dict[str, dict[str, dict[str, float]]]:
    """Writes `eval/*.json`: means of each suite, and every question's answer.

    Returns:
        The means, by suite and data set.
    """
    summaries = {suite: summarize(trajectories) for suite, trajectories in suites.items()}
    questions = {
        suite: [_question(trajectory) for trajectory in trajectories]
        for suite, trajectories in suites.items()
    }
    plain = {
        suite: {
            name: {key: plain_number(value) for key, value in means.items()}
            for name, means in summary.items()
        }
        for suite, summary in summaries.items()
    }
    content = {"step": step, "summary": plain, "questions": questions}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return summaries


def _question(trajectory: Trajectory) -> dict[str, Any]:
    return {
        "task_id": trajectory.task_id,
        "data_source": trajectory.task.data_source,
        "question": trajectory.task.question,
        "answers": list(trajectory.task.answers),
        "final_answer": trajectory.final_answer,
        "outcome": str(trajectory.outcome),
        "searches": [t.tool_call for t in trajectory.turns if t.tool_call is not None],
        "response": trajectory.generated_text,
        **trajectory.reward_parts,
    }

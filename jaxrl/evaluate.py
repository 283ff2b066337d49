"""Evaluation of a policy on held-out tasks: roll out, summarize, write results."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl.config.environments import split_environment_key
from jaxrl.logs.eval_summary import (
    CONTROL_SUITES,
    EvalSummary,
    build_eval_metrics,
    compute_attribution,
    format_suite_line,
    format_tables,
    get_held_out_score,
    is_unscored,
    summarize_evaluation,
)
from jaxrl.logs.metrics import to_json_number
from jaxrl.logs.records import build_question_record
from jaxrl.logs.steps import compute_memory_metrics
from jaxrl.logs.writers import write_images
from jaxrl.runtime import distributed
from jaxrl.runtime.compilation import interruptible
from jaxrl.sampling.interfaces import SamplingConfig, Seeds
from jaxrl.sampling.weights import donate
from jaxrl.training.failures import describe_first_error
from jaxrl.training.run_state import USER_CODE_SUFFIX, RunState
from jaxrl.training.settings import STAGES
from jaxrl.training.usage import UsageStats
from jaxrl.types import Draw, Group, Params, flatten_groups
from jaxrl.utils.files import open_atomic
from jaxrl.utils.json_io import read_object


def build_record(
    step: int,
    stage: str,
    settings: Mapping[str, Any],
    suites: Mapping[str, Sequence[Group]],
    summaries: Mapping[str, EvalSummary],
    *,
    weights_step: int | None = None,
    fingerprint: str = "",
    tool_environments: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the JSON record of an evaluation: summaries, and the answers to each question.

    Args:
        step: Global step, counted across all stages.
        stage: Stage that runs the evaluation.
        settings: The `eval` section of the config.
        suites: Evaluated groups, by suite name.
        summaries: Means and confidence intervals, by suite name.
        weights_step: Step that produced the weights; `step` by default.
        fingerprint: Hash of all other inputs of the evaluation, compared by `read_metrics`.
        tool_environments: Environments whose answers are attributed to tool results.
    """
    return {
        "step": step,
        "stage": stage,
        "weights_step": step if weights_step is None else weights_step,
        "made_with": fingerprint,
        "settings": dict(settings),
        "summary": {
            suite: {
                name: {metric: to_json_number(value) for metric, value in means.items()}
                for name, means in summary.means.items()
            }
            for suite, summary in summaries.items()
        },
        "intervals": {suite: summary.intervals for suite, summary in summaries.items()},
        "reward_weights": {suite: summary.weights for suite, summary in summaries.items()},
        "questions": {
            suite: [
                build_question_record(t, describe_first_error([t]))
                | (
                    compute_attribution(t)
                    if t.is_scored and t.task.environment in tool_environments
                    else {}
                )
                for t in flatten_groups(questions)
            ]
            for suite, questions in suites.items()
        },
    }


def write_results(path: Path, record: Mapping[str, Any], text: str) -> None:
    """Write the record to `path` and the text to the `.txt` file next to it, each atomically."""
    content = json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False)
    for name, written in ((path.with_suffix(".txt"), text), (path, content)):
        with open_atomic(name) as file:
            file.write(written + "\n")


def read_metrics(path: Path, weights_step: int, fingerprint: str) -> dict[str, float] | None:
    """Return the metrics of an evaluation on disk, or None if the evaluation must be repeated.

    It must be repeated if its file is missing or damaged, if `weights_step` or `fingerprint`
    differs, or if the environment failed, because a failure may be temporary.
    """
    try:
        record = read_object(path)
        if (record["weights_step"], record["made_with"]) != (weights_step, fingerprint):
            return None
        metrics: dict[str, float] = {}
        for suite, means in record["summary"].items():
            if means["all"]["environment_errors"]:
                return None
            numbers = {
                name: {k: math.nan if v is None else v for k, v in metrics.items()}
                for name, metrics in means.items()
            }
            num_samples = 1 if suite == "greedy" else record["settings"]["samples"]
            metrics |= build_eval_metrics(
                suite, EvalSummary(num_samples=num_samples, means=numbers, intervals={})
            )
        return metrics
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def read_usage(path: Path) -> UsageStats:
    """Return the usage recorded in an evaluation file; zero if it is missing or damaged."""
    try:
        return UsageStats.from_json(read_object(path)["ledger"])
    except (OSError, ValueError, KeyError, TypeError):
        return UsageStats()


def evaluate(run_state: RunState, params: Params) -> Params:
    """Evaluate the parameters on the final suites, or reuse a matching result on disk.

    Evaluation is the last stage, so the sampler may free the parameters.
    """
    # Reuse an evaluation on disk. The main process decides for all processes.
    progress, workdir = run_state.progress, run_state.workdir
    file = workdir / "eval" / f"evaluate_{progress.step}.json"
    saved_metrics, saved_usage = None, UsageStats()
    if distributed.is_main():
        saved_metrics = read_metrics(
            file, progress.effective_weights_step, compute_fingerprint(run_state)
        )
        saved_usage = read_usage(file)
    errors: dict[str, str] = {}
    metrics = distributed.broadcast(saved_metrics)
    # Otherwise load the weights and roll out. A model behind an endpoint has no sampler.
    if metrics is None:
        run_state.check_budget()
        sampler = run_state.components.sampler
        if sampler is not None:
            run_state.compile_sampler()
            with interruptible(run_state.should_stop):
                sampler.set_weights(donate(run_state.components.model.merge(params)))
        metrics, errors = run_suites(
            run_state, "evaluate", run_state.settings.evaluation.final_suites
        )
        if sampler is not None:
            sampler.release()
    else:
        progress.ledger += UsageStats.from_json(distributed.broadcast(saved_usage.to_json()))
        text = file.with_suffix(".txt")
        run_state.display.log(f"already evaluated with the same settings: {text}")
    metrics |= progress.ledger.metrics()
    metrics["weights_step"] = progress.effective_weights_step
    run_state.metrics_log.write(progress.step, "evaluate", metrics)
    run_state.failures.check_suites(errors)
    return params


def compute_fingerprint(run_state: RunState) -> str:
    """Hash the inputs of an evaluation except the weights: settings, tasks, corpus, user code."""
    settings = run_state.settings.evaluation.depends_on
    prefixes = ["model.path/", "search.local.corpus", "search.dense.", "search.mock."]
    environments = settings.get("environments", {"": settings}).values()
    holds_out = any("tasks" in environment for environment in environments)
    prefixes += ["tasks.eval.source", *(["tasks.train.source"] if holds_out else [])]
    content = {
        name: value
        for name, value in run_state.origin["contents"].items()
        if split_environment_key(name)[1].startswith(tuple(prefixes))
        or name.endswith(USER_CODE_SUFFIX)
    }
    return hashlib.sha256(json.dumps([settings, content], sort_keys=True).encode()).hexdigest()


def run_suites(
    run_state: RunState, stage: str, suites: Sequence[str]
) -> tuple[dict[str, float], dict[str, str]]:
    """Evaluate the engine's weights on `suites`; write `eval/<stage>_<step>.json` and `.txt`.

    Returns:
        Metrics, and the first error of each suite in which every episode failed.

    Raises:
        BudgetSpentError: The policy is behind an endpoint, and the run has spent its budget.
    """
    step, display, settings = (
        run_state.progress.step,
        run_state.display,
        run_state.settings.evaluation,
    )
    started = time.perf_counter()
    groups_by_suite: dict[str, list[Group]] = {}
    ledger = UsageStats()
    for suite in suites:
        # Earlier suites may have spent the budget of an endpoint model. Its responses are recorded,
        # and the next start reuses them.
        if run_state.components.external:
            run_state.check_budget()
        groups = groups_by_suite[suite] = roll_out_suite(run_state, suite)
        prices, is_control = run_state.settings.ledger.prices, suite in CONTROL_SUITES
        ledger += UsageStats.from_trajectories(
            flatten_groups(groups), prices, is_control=is_control
        )
        run_state.pending_usage = ledger
    # Summarize, and free the cache for the update.
    summaries = {
        suite: summarize_evaluation(
            groups,
            has_python=settings.has_python,
            tool_environments=settings.tool_environments,
            ks=settings.ks,
            num_resamples=settings.resamples,
            seed=run_state.settings.seed,
            weights=run_state.components.reward_weights,
        )
        for suite, groups in groups_by_suite.items()
    }
    if run_state.components.sampler is not None:
        run_state.components.sampler.clear()  # the next rollout still needs the weights
    # Write the results. Every process has them; the main process writes.
    effective_weights_step = run_state.progress.effective_weights_step
    record = build_record(
        step,
        stage,
        settings.section,
        groups_by_suite,
        summaries,
        weights_step=effective_weights_step,
        fingerprint=compute_fingerprint(run_state),
        tool_environments=settings.tool_environments,
    )
    record["ledger"] = ledger.to_json()
    text = format_tables(step, stage, summaries, weights_step=effective_weights_step)
    if distributed.is_main():
        write_results(run_state.workdir / "eval" / f"{stage}_{step}.json", record, text)
        write_images(
            run_state.workdir,
            (t for groups in groups_by_suite.values() for t in flatten_groups(groups)),
        )
        count = run_state.settings.num_logged_trajectories
        for suite, groups in groups_by_suite.items():
            trajectories = flatten_groups(groups)
            run_state.metrics_log.add_samples(suite, trajectories[: count if count >= 0 else None])
    # Report. `jaxrl evaluate` prints the tables; a training run prints a line per suite.
    label = run_state.progress.label if stage == "train" else stage
    unscored = [suite for suite, summary in summaries.items() if is_unscored(summary)]
    errors = {
        suite: describe_first_error(flatten_groups(groups_by_suite[suite])) for suite in unscored
    }
    for suite, error in errors.items():
        display.log(
            f"warning: {label} {suite}: no question could be scored, because every "
            f"episode ended in an environment error; the first: {error}"
        )
    is_only_stage = run_state.settings.stages == ("evaluate",)
    lines = [f"{label} {format_suite_line(suite, summary)}" for suite, summary in summaries.items()]
    for line in [text] if is_only_stage else lines:
        display.log(line)
    run_state.held_out = next(map(get_held_out_score, summaries.values()), None)
    metrics = {"timing_s/testing": time.perf_counter() - started, **compute_memory_metrics()}
    run_state.progress.ledger += ledger
    run_state.pending_usage = UsageStats()
    for suite, summary in summaries.items():
        metrics |= build_eval_metrics(suite, summary)
    return metrics, errors


def roll_out_suite(run_state: RunState, suite: str) -> list[Group]:
    """Roll out the held-out tasks of a suite with the engine's weights."""
    settings, components = run_state.settings.evaluation, run_state.components
    is_greedy = suite == "greedy"
    rollout = components.rollout if suite in ("sampled", "greedy") else components.controls[suite]
    groups = rollout(
        [
            Draw(task=task, stream_index=i)
            for i, task in enumerate(components.eval_tasks)
            if task.environment in components.control_environments.get(suite, (task.environment,))
        ],
        SamplingConfig(
            group_size=1 if is_greedy else settings.samples,
            temperature=0.0 if is_greedy else settings.temperature,
            top_p=settings.top_p,
            seeds=Seeds(
                seed=run_state.settings.seed,
                stage=STAGES.index("evaluate"),
                step=run_state.progress.step,
            ),
        ),
        should_stop=run_state.should_stop,
        progress=run_state.display.make_progress_callback(f"evaluating {suite}, trajectories"),
    )
    return [group for group in groups if group is not None]  # evaluations finish every group

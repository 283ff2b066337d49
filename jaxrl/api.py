"""Train and evaluate from Python, for example in a notebook.

    from jaxrl.api import evaluate, train
    from jaxrl.config import default_config

    config = default_config().lock()
    config.model.path = "models/Qwen3-0.6B"
    ...
    run = train(config, "runs/first")
    run.metrics.to_pandas().plot(x="step", y="critic/rewards/mean")

The workdir has the same contents as with `jaxrl train`. Calling `train` again resumes the run, and
`jaxrl train`, `chat` and `report` work with the same workdir.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import html
import math
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from ml_collections import ConfigDict

from jaxrl import launch
from jaxrl.builders import validation
from jaxrl.builders.components import FrozenModel, list_sampling_methods, load_frozen_model
from jaxrl.builders.probe import probe_loss
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.envs.base import Message, Task
from jaxrl.logs.display import Display
from jaxrl.logs.results import SUITE_LABELS, Scores, format_scores, read_scores
from jaxrl.logs.writers import parse_record
from jaxrl.run import (
    load_initial_params,
    load_run_state,
    open_checkpointer,
    roll_back,
    write_report,
)
from jaxrl.runtime import distributed
from jaxrl.runtime.checkpoint import filter_orbax_logs, list_steps, rank_steps, read_score
from jaxrl.runtime.job import find_job
from jaxrl.runtime.peers import join_job
from jaxrl.runtime.preemption import Interrupted
from jaxrl.runtime.resume import add_code_folders
from jaxrl.runtime.watchdog import watchdog
from jaxrl.sampling.interfaces import SamplingConfig, Seeds
from jaxrl.sampling.next_token import FULL, TOP_P, select_sampling_method
from jaxrl.train import Learner
from jaxrl.training.collect import FATAL_ERRORS
from jaxrl.training.reference_kl import compute_logprobs
from jaxrl.training.run_state import RunState
from jaxrl.training.update import ScoreStep
from jaxrl.training.usage import UsageStats
from jaxrl.training.watch import CollapseError, Rollback
from jaxrl.types import (
    Draw,
    Group,
    TokenStep,
    Trajectory,
    flatten_groups,
    set_advantages,
)
from jaxrl.utils.hub import download_model
from jaxrl.utils.secrets import redact_output

__all__ = ["Run", "Scorer", "Trainer", "evaluate", "load_run", "set_advantages", "train"]


@dataclass(frozen=True, kw_only=True, repr=False)
class Run:
    """Results of a run.

    Attributes:
        workdir: Folder of the run.
        metrics: Table with one row per record of `metrics.jsonl`, null for missing metrics. The
            `step` column counts across all stages; `stage` is the stage's name.
        scores: Means of the last evaluation, such as `scores["reward"]`, `scores["exact_match"]`,
            `scores["exact_match/greedy"]` or `scores["two_hop/exact_match"]`.
        scores_before: Means of the first evaluation, if there are several.
        best_checkpoint: Checkpoint with the highest `eval.best_metric`; the latest checkpoint if
            none was evaluated; None if there are no checkpoints.
        report: HTML report of the run, if it exists.
    """

    workdir: Path
    metrics: pa.Table
    scores: Scores
    scores_before: Scores
    best_checkpoint: Path | None
    report: Path | None

    def __str__(self) -> str:
        """Return a five-line summary: steps, scores, controls, checkpoint and report."""
        steps = [stage for stage, _, _ in self._get_points("timing_s/step")]
        counts = (f"{stage} {steps.count(stage)}" for stage in dict.fromkeys(steps))
        evaluations = [scores for scores in (self.scores_before, self.scores) if scores]
        scores, controls = (*format_scores(evaluations), "", "")[:2]
        return "\n".join(
            (
                f"{self.workdir}: {', '.join(counts) or 'no'} steps",
                scores or "not evaluated",
                controls or "controls: none",
                f"best checkpoint: {self.best_checkpoint or 'none'}",
                f"report: {self.report or 'none'}",
            )
        )

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Return a table of the scores, and curves of the train stage, for notebooks."""
        rows = []
        for measure in ("reward", "exact_match"):
            for suite, label in SUITE_LABELS.items():
                if (score := self.scores.get(f"{measure}/{suite}")) is not None:
                    before = self.scores_before.get(f"{measure}/{suite}")
                    cells = (label, "" if before is None else f"{before:.3f}", f"{score:.3f}")
                    name = f"<td>{measure.replace('_', ' ')}</td>"
                    rows.append(name + "".join(f"<td>{cell}</td>" for cell in cells))
        head = "<tr><th></th><th></th><th>before</th><th>after</th></tr>"
        table = f"<table>{head}{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"
        curves = []
        for title, name in CURVES.items():
            points = [(step, y) for stage, step, y in self._get_points(name) if stage == "train"]
            curves.append(_draw_curve(title, points))
        return f"<div><code>{html.escape(str(self.workdir))}</code>{table}{''.join(curves)}</div>"

    def _get_points(self, name: str) -> list[tuple[str, int, float]]:
        """Return (stage, step, value) for each record that has the metric `name`."""
        if name not in self.metrics.column_names:
            return []
        columns = (self.metrics[column].to_pylist() for column in ("stage", "step", name))
        return [
            (stage, step, value)
            for stage, step, value in zip(*columns, strict=True)
            if value is not None
        ]


CURVES = {
    "reward": "critic/rewards/mean",
    "entropy": "actor/entropy",
    "searches": "num_searches/mean",
}
"""Titles and metrics of the curves that a notebook shows."""


def _draw_curve(title: str, points: Sequence[tuple[int, float]]) -> str:
    """Return an SVG image of a curve, 220 by 110 pixels; "" for fewer than two points."""
    if len(points) < 2:
        return ""
    steps, values = zip(*points, strict=True)
    low, high = min(values), max(values)
    path = " ".join(
        f"{10 + 200 * (step - steps[0]) / (steps[-1] - steps[0]):.1f},"
        f"{90 - 60 * (value - low) / ((high - low) or 1.0):.1f}"
        for step, value in points
    )
    return (
        '<svg width="220" height="110" font-size="11" fill="currentColor">'
        f'<text x="10" y="16">{title}: {values[0]:.3g} → {values[-1]:.3g}</text>'
        f'<polyline points="{path}" fill="none" stroke="currentColor"/>'
        f'<text x="10" y="106">{low:.3g} to {high:.3g}, {len(points)} steps</text></svg>'
    )


def train(
    config: ConfigDict,
    workdir: str | Path,
    *,
    accept_changes: bool = False,
    ignore_memory_plan: bool = False,
) -> Run:
    """Run the configured stages in this process; resume from the latest checkpoint, if any.

    Args:
        config: `jaxrl.config.default_config()` with changes. It is copied.
        workdir: Folder of the run; created if missing.
        accept_changes: True to resume even if data, rewards or the method differ from the start of
            the run.
        ignore_memory_plan: True to start even if the plan needs more memory than a device has.

    Raises:
        ValueError, KeyError, AttributeError, TypeError, OSError: The configuration, a file or the
            workdir is invalid.
        KeyboardInterrupt: The user interrupted the run. Completed steps are saved, and the same
            call resumes. A second interrupt stops immediately, without saving.
        OutageError, AllEpisodesFailedError, BudgetSpentError, CollapseError, NotEnoughGroupsError,
            UserCodeError, UnreadableImageError, CheckpointError: See `jaxrl.run.run`.
    """
    return _build_and_run(
        config, Path(workdir), accept_changes=accept_changes, ignore_memory_plan=ignore_memory_plan
    )


def evaluate(config: ConfigDict, workdir: str | Path, *, step: int | None = None) -> Run:
    """Evaluate a run on its held-out tasks and export its model.

    If the workdir has no checkpoints, evaluate the model at `config.model.path`.

    Args:
        config: Configuration of the run. `eval.*` and `tasks.eval` may differ; `stages` is ignored.
        workdir: Folder of the run.
        step: Step of the checkpoint to evaluate. Results are written to
            `eval/evaluate_<step>.json` and `steps/<step>/`; the run itself is not changed.

    Raises:
        Exception: See `train`.
    """
    config = config.copy_and_resolve_references()
    config.stages = ("evaluate",)
    return _build_and_run(config, Path(workdir), step=step)


def load_run(workdir: str | Path) -> Run:
    """Read the results of a finished or running run.

    Raises:
        FileNotFoundError: The folder has no `metrics.jsonl`.
    """
    workdir = Path(workdir)
    file, report = workdir / "metrics.jsonl", workdir / "report.html"
    if not file.is_file():
        raise FileNotFoundError(f"{workdir} holds no metrics.jsonl; expected a run's workdir.")
    lines = file.read_bytes().splitlines()
    # A running job may have written only part of the last line.
    records = [record for record in map(parse_record, lines) if record is not None]
    evaluations = read_scores(workdir, records[-1]["step"] if records else 0)
    names = dict.fromkeys(name for record in records for name in record)
    columns = {name: [record.get(name) for record in records] for name in names}
    checkpoints = workdir / "checkpoints"
    steps = list_steps(checkpoints)
    ranked = rank_steps({step: read_score(checkpoints / str(step)) for step in steps}) or steps[-1:]
    return Run(
        workdir=workdir,
        metrics=pa.table(columns),
        scores=evaluations[-1] if evaluations else {},
        scores_before=evaluations[0] if len(evaluations) > 1 else {},
        best_checkpoint=checkpoints / str(ranked[0]) if ranked else None,
        report=report if report.is_file() else None,
    )


def _build_and_run(config: ConfigDict, workdir: Path, **settings: Any) -> Run:
    """Build the run, execute its stages, and return its results."""
    # A copy, because the memory plan sets micro-batch sizes in it.
    config = config.copy_and_resolve_references()
    add_code_folders(workdir)
    resolved = validation.validate(config)
    with contextlib.ExitStack() as stack:
        stack.enter_context(redact_output())
        stack.enter_context(filter_orbax_logs())
        display = Display()
        stack.callback(display.stop)
        run_stages = launch.prepare_run(resolved, workdir, display, stack, **settings)
        should_stop = stack.enter_context(_stop_on_interrupt())
        stack.enter_context(watchdog(display, config.watch.stall_s))
        is_interrupted = False
        try:
            run_stages(should_stop)
        except Interrupted:
            is_interrupted = True
        del run_stages
    # Raise here: a notebook keeps an error's frames alive, including the weights in them.
    if is_interrupted:
        raise KeyboardInterrupt(f"completed steps are saved in {workdir}")
    return load_run(workdir)


class Trainer:
    """RL training as separate calls: sample, compute advantages, update, evaluate, save.

    A step consists of `collect` (or `rollout`), `compute_advantages`, `update` and `finish_step`;
    `step` makes these calls, as `train` does. `Trainer` and `train` write the same steps, records
    and checkpoints, and each can resume runs of the other. In a multi-process job, every process
    makes the same calls.

    Use it in a `with` block, or call `close`: both save steps taken since the newest checkpoint.
    """

    def __init__(
        self,
        config: ConfigDict,
        workdir: str | Path,
        *,
        accept_changes: bool = False,
        ignore_memory_plan: bool = False,
        coordinator: str | None = None,
        num_processes: int | None = None,
        process_id: int | None = None,
        cluster: str | None = None,
    ):
        """Build the run; restore its newest checkpoint, or evaluate the initial policy.

        Args:
            config: Configuration of the run. It is copied, and `stages` is ignored: only the train
                stage runs here. For a warm start, call `train` with `stages=("sft",)` first.
            workdir: Folder of the run; created if missing.
            accept_changes: See `train`.
            ignore_memory_plan: See `train`.
            coordinator: Address of process 0 as host:port, for a multi-process job.
            num_processes: Number of processes in the job.
            process_id: Index of this process, from 0.
            cluster: Cluster environment that provides the previous three arguments: `slurm` or
                `tpu`.

        Raises:
            Exception: See `train`.
        """
        config, self._workdir = config.copy_and_resolve_references(), Path(workdir)
        config.stages = ("train", "evaluate")
        add_code_folders(self._workdir)
        self._config = validation.validate(config)
        self._run_state: RunState | None = None
        self._learner: Learner | None = None
        self._num_generated = 0
        self._should_stop: Callable[[], bool] = lambda: False
        with contextlib.ExitStack() as stack:
            job = find_job(
                coordinator=coordinator,
                num_processes=num_processes,
                process_id=process_id,
                cluster=cluster,
            )
            peers = join_job(job, deadline_s=launch.PEER_DEADLINE_S) if job else None
            self._peers = stack.enter_context(peers) if peers else None
            display = Display(is_enabled=distributed.is_main())
            stack.callback(display.stop)
            with redact_output(), filter_orbax_logs():
                self._prepared = launch.prepare_run(
                    self._config,
                    self._workdir,
                    display,
                    stack,
                    accept_changes=accept_changes,
                    ignore_memory_plan=ignore_memory_plan,
                )
            checkpointer = open_checkpointer(self._prepared.settings, self._workdir, display)
            self._checkpointer = stack.enter_context(contextlib.closing(checkpointer))
            with self._save_on_stop():
                self._restore_or_start_stage(self._prepared.record_start)
            self._resources = stack.pop_all()
        atexit.register(self._warn_if_unsaved)

    def _restore_or_start_stage(self, record_start: Callable[[], None] | None) -> None:
        """Restore the newest checkpoint, or start the stage."""
        prepared = self._prepared
        run_state = self._run_state = load_run_state(
            prepared.settings,
            prepared.workdir,
            components=prepared.components,
            checkpointer=self._checkpointer,
            display=prepared.display,
            should_stop=lambda: self._should_stop(),
            contents=prepared.contents,
            record_start=record_start,
            restores_finished_stage=True,
        )
        params = load_initial_params(run_state)
        run_state.begin_stage("train")
        self._learner = Learner(run_state, params)
        self._learner.start_stage()

    @contextlib.contextmanager
    def _save_on_stop(self) -> Iterator[None]:
        """Save completed steps if the block is interrupted or an error ends the run."""
        with redact_output(), filter_orbax_logs(), _stop_on_interrupt() as should_stop:
            peers = self._peers
            self._should_stop = peers.make_global_should_stop(should_stop) if peers else should_stop
            is_interrupted = False
            try:
                yield
                is_interrupted = self._should_stop()
            except (*FATAL_ERRORS, CollapseError, Interrupted) as error:
                self._save_completed_steps()
                if not isinstance(error, Interrupted):
                    raise
                is_interrupted = True
            finally:
                self._should_stop = lambda: False
            if is_interrupted:
                self._save_completed_steps()
        # Raise here: a notebook keeps an error's frames alive, including the weights in them.
        if is_interrupted:
            raise KeyboardInterrupt(f"completed steps are saved in {self._workdir}")

    def _save_completed_steps(self) -> None:
        """Save the completed steps, unless the newest checkpoint has them."""
        run_state, learner = self._run_state, self._learner
        if run_state is None or learner is None or learner.is_partial:
            return
        if run_state.progress.stage_step > 0 and run_state.progress != run_state.saved:
            run_state.save()
        try:
            self._checkpointer.wait()
        except Exception:
            run_state.saved = None  # for example, the disk is full: the next call saves again
            raise

    def _warn_if_unsaved(self) -> None:
        """Warn about unsaved steps at exit, when JAX can no longer save them."""
        learner = self._learner
        if learner is not None and learner.run_state.progress != learner.run_state.saved:
            print(
                f"warning: the Trainer of {self._workdir} was not closed: steps after its newest "
                "checkpoint are lost. Use it in a with block, or call close().",
                file=sys.stderr,
            )

    @property
    def _open_learner(self) -> Learner:
        """Return the learner; raise a ValueError if the trainer is closed or a step has failed."""
        if self._learner is None:
            raise ValueError("the trainer is closed; create another one for the same workdir.")
        if self._learner.is_partial:
            raise ValueError(
                "an error ended a step halfway; close this trainer, and create another one, "
                "which resumes from the newest checkpoint."
            )
        return self._learner

    def _finish_previous_step(self) -> Learner:
        """Finish the previous step if it is unfinished; return the learner."""
        learner = self._open_learner
        if learner.run_state.progress.record is not None:
            self._finish_or_roll_back(learner.finish_step)
        return self._open_learner

    def _check_groups(self, groups: Sequence[Group]) -> None:
        """Validate groups, which the caller may have built or changed.

        Raises:
            ValueError: The arrays of a trajectory differ in length, a token id is unknown, or an
                advantage is not finite.
        """
        num_tokens = self.tokenizer.num_tokens
        for trajectory in flatten_groups(groups):
            ids, custom = trajectory.token_ids, trajectory.custom_advantages
            arrays = [trajectory.loss_mask, trajectory.rollout_logprobs]
            arrays += [trajectory.rollout_entropies, trajectory.policy_versions]
            arrays += [] if custom is None else [custom]
            advantages = [trajectory.advantage, *(trajectory.turn_advantages or ())]
            name = f"a trajectory of task {trajectory.task_id!r}"
            if any(array.shape != ids.shape for array in arrays):
                shapes = ", ".join(str(list(array.shape)) for array in arrays)
                raise ValueError(
                    f"{name} has {len(ids)} token_ids, and other arrays of shapes {shapes}; "
                    "expected one value per token."
                )
            if len(ids) and not 0 <= ids.min() <= ids.max() < num_tokens:
                raise ValueError(
                    f"{name} has token ids from {ids.min()} to {ids.max()}; expected ids of this "
                    f"run's tokenizer, 0 to {num_tokens - 1}."
                )
            if not all(math.isfinite(x) for x in advantages if x is not None) or not (
                custom is None or np.isfinite(custom).all()
            ):
                raise ValueError(f"{name} has an advantage that is not finite; see set_advantages.")

    @property
    def tasks(self) -> Sequence[Task]:
        """Training tasks."""
        return self._prepared.components.tasks

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the policy."""
        return self._prepared.components.tokenizer

    @property
    def num_steps_done(self) -> int:
        """Number of completed steps of the train stage."""
        return self._open_learner.run_state.progress.stage_step

    @property
    def is_done(self) -> bool:
        """Return True after `num_steps` steps or once evaluations no longer improve."""
        return self._open_learner.is_done

    def generate(
        self,
        query: str | Sequence[Message] | Task,
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
    ) -> Trajectory:
        """Sample one trajectory, with the tools of the environment.

        Repeated calls return different samples. The same sequence of calls in another process
        returns the same samples. A query without accepted answers has a reward of 0.

        Args:
            query: Question, a chat as dicts with `role` and `content`, or a task. With several
                environments, pass a task that names one of them.
            max_tokens: Maximum number of sampled tokens, at most `rollout.max_response_tokens`,
                which is the default.
            temperature: Sampling temperature; 0 is greedy. Default: `rollout.temperature`.
            top_p: Nucleus sampling probability. Default: `rollout.top_p`.

        Raises:
            ValueError: A setting is invalid, or the sampler is not compiled for it.
        """
        learner, settings = self._open_learner, self._prepared.settings
        if not query or (isinstance(query, str) and not query.strip()):
            raise ValueError(f"generate received {query!r}; expected a question, a chat or a task.")
        if isinstance(query, str):
            query = Task(id="generate", question=query)
        elif not isinstance(query, Task):
            query = Task(id="generate", messages=tuple(query))
        temperature = learner.method.temperature if temperature is None else temperature
        top_p = learner.method.top_p if top_p is None else top_p
        if not (0 <= temperature < math.inf and 0 < top_p <= 1):
            raise ValueError(
                f"generate received temperature={temperature} and top_p={top_p}; expected a "
                "finite temperature of at least 0, and top_p in (0, 1]."
            )
        kinds = list_sampling_methods(self._config)
        kind = select_sampling_method(temperature, top_p)
        if kind not in kinds and not (kind == FULL and TOP_P in kinds):
            raise ValueError(
                f"generate received temperature={temperature} and top_p={top_p}, which sample by "
                f"{kind!r}; the sampler was built for {', '.join(kinds)}. For 'greedy', add it to "
                "config.eval.final_suites; for 'top_p', set config.eval.top_p below 1."
            )
        sampling = SamplingConfig(
            group_size=1,
            temperature=temperature,
            top_p=top_p,
            seeds=Seeds(seed=settings.seed, stage=GENERATE_STAGE, step=self._num_generated),
        )
        self._num_generated += 1
        # Environments reject a task without answers, so give it one that is never compared.
        task = query if query.answers else dataclasses.replace(query, answers=("",))
        draw = Draw(task=task, stream_index=0, max_response_tokens=max_tokens)
        with self._save_on_stop():
            [group] = learner.sample([draw], sampling)
        trajectory = dataclasses.replace(group.trajectories[0], task=query)
        if not query.answers:
            trajectory = dataclasses.replace(
                trajectory, reward=0.0, reward_parts={}, is_correct=False
            )
        return trajectory

    def token_steps(self, trajectory: Trajectory) -> list[TokenStep]:
        """Return a `TokenStep` for each sampled token."""
        return trajectory.token_steps(lambda token_id: self.tokenizer.decode([token_id]))

    def next_tasks(self, count: int = 0) -> list[Task]:
        """Return the next `count` tasks of the stream; `rollout.tasks_per_step` if `count` is 0.

        Repeated calls return the same tasks until `rollout` or `collect` is called. `rollout`
        samples these tasks as `train` would.
        """
        return self._open_learner.next_tasks(count)

    def rollout(self, tasks: Sequence[Task], group_size: int = 0) -> list[Group]:
        """Sample and score a group of trajectories for each task.

        Rewards include `shaping`; no group is filtered out. A trajectory whose environment failed
        has the outcome `environment_error`, and is excluded from statistics and the loss.

        Args:
            tasks: Tasks of any source. A task may occur several times.
            group_size: Number of trajectories per task; 0 for `rollout.group_size`.
        """
        with self._save_on_stop():
            return self._finish_previous_step().rollout(tasks, group_size)

    def collect(self) -> list[Group]:
        """Sample a step's groups as `train` does, with the filter, resampling and prefetching."""
        with self._save_on_stop():
            return self._finish_previous_step().collect()

    def compute_advantages(self, groups: Sequence[Group]) -> list[Group]:
        """Return the groups with the advantages of the configured estimator.

        Also measures the divergence from the reference and adjusts rewards, if configured. For
        custom advantages, call `set_advantages` instead, or on the result.
        """
        self._check_groups(groups)
        with self._save_on_stop():
            return self._finish_previous_step().compute_advantages(groups)

    def compute_logprobs(
        self, groups: Sequence[Group], *, use_reference: bool = False
    ) -> list[np.ndarray]:
        """Return log-probabilities in nats, float32 `[L]` for each trajectory in order.

        Tokens that were not sampled get 0. Logits are divided by `rollout.temperature`.

        Args:
            groups: Groups to score.
            use_reference: True for the reference of the KL term, False for the current policy.

        Raises:
            ValueError: The method has no reference.
        """
        self._check_groups(groups)
        with self._save_on_stop():
            return self._open_learner.compute_logprobs(groups, use_reference=use_reference)

    def load_scorer(self, folder: str | Path) -> Scorer:
        """Load another model with the same tokenizer, such as a larger teacher.

        Args:
            folder: Model folder in Hugging Face format, or `hf://org/name`.

        Raises:
            ValueError: The model's tokenizer is different.
        """
        with self._save_on_stop():
            learner = self._open_learner
            folder = str(download_model(folder, "folder"))
            return Scorer(load_frozen_model(self._config, folder, self.tokenizer), learner)

    def update(
        self, groups: Sequence[Group], *, loss: Callable[..., Any] | None = None
    ) -> dict[str, Any]:
        """Update the policy, load its weights into the sampler, and return the step's metrics.

        Args:
            groups: Groups with advantages, of any number and size.
            loss: Policy loss for this call, with the interface of `loss.name` (docs/extending.md);
                None for the configured loss. Pass the same function each time, so that it is
                compiled once.

        Returns:
            The metrics in docs/metrics.md. The most important metrics are repeated as `loss`, `kl`,
            `reward`, `entropy` and `grad_norm` if the method computes them.

        Raises:
            ValueError: A trajectory has no advantage or is invalid, or `num_steps` steps are done.
        """
        self._check_groups(groups)
        if loss is not None:
            probe_loss(loss)
        with self._save_on_stop():
            return _add_metric_aliases(self._finish_previous_step().update(groups, loss))

    def accumulate_gradients(
        self, groups: Sequence[Group], *, loss: Callable[..., Any] | None = None
    ) -> None:
        """Add the gradient of `groups` to the gradients accumulated for `apply_gradients`.

        The result equals the gradient of all groups in one mini-batch. For arguments, see
        `update`.
        """
        self._check_groups(groups)
        if loss is not None:
            probe_loss(loss)
        with self._save_on_stop():
            self._finish_previous_step().accumulate_gradients(groups, loss)

    def apply_gradients(self) -> dict[str, Any]:
        """Take one optimizer step with the accumulated gradient; return metrics as `update` does.

        Raises:
            ValueError: There is no accumulated gradient.
        """
        with self._save_on_stop():
            return _add_metric_aliases(self._open_learner.apply_gradients())

    def finish_step(self) -> dict[str, Any]:
        """Write and return the record of the last update, after running any evaluation that is due.

        Saves a checkpoint every `checkpoint.every_steps` steps.
        """
        with self._save_on_stop():
            return _add_metric_aliases(self._finish_or_roll_back(self._open_learner.finish_step))

    def step(self, tasks: Sequence[Task] | None = None) -> dict[str, Any]:
        """Run a complete step and return its record.

        Args:
            tasks: Tasks to train on; None for the next tasks of the stream, as in `train`.
        """
        with self._save_on_stop():
            learner = self._finish_previous_step()
            learner.run_state.check_budget()
            groups = learner.collect() if tasks is None else learner.rollout(tasks)
            learner.update(learner.compute_advantages(groups))
            return _add_metric_aliases(self._finish_or_roll_back(learner.finish_step))

    def _finish_or_roll_back(self, finish_step: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Finish a step; on a rollback, return to the earlier checkpoint (`watch.action`)."""
        assert self._run_state is not None
        record = dict(self._run_state.progress.record or {})
        try:
            return finish_step()
        except Rollback as decision:
            roll_back(self._run_state, decision)
            self._run_state.metrics_log.close()
            self._learner = None
            self._restore_or_start_stage(None)
            return record

    def evaluate(self, suites: Sequence[str] = ()) -> dict[str, float]:
        """Evaluate the current policy on the held-out tasks and return the metrics.

        Also writes `eval/train_<step>.json` and `.txt`.

        Args:
            suites: Suites to run; empty for `eval.suites`.

        Raises:
            ValueError: A suite is unknown.
        """
        learner, components = self._open_learner, self._prepared.components
        known = ("sampled", "greedy", *components.controls)
        suites = tuple(suites) or tuple(self._prepared.settings.evaluation.suites)
        unknown = [suite for suite in suites if suite not in known]
        if unknown:
            raise ValueError(
                f"evaluate received the suite {unknown[0]!r}; expected some of {', '.join(known)}. "
                "Name others in config.eval.final_suites."
            )
        with self._save_on_stop():
            return learner.evaluate(suites)

    def save(self) -> None:
        """Save a checkpoint of the completed steps, and wait until it is on disk."""
        with self._save_on_stop():
            _ = self._open_learner  # raises if closed
            self._save_completed_steps()

    def export(self, folder: str | Path) -> Path:
        """Write the policy in Hugging Face format to `<folder>/export` and return that path.

        An adapter is also written in PEFT's format, to `<folder>/adapter`.
        """
        learner = self._open_learner
        with self._save_on_stop():
            self._prepared.components.export(learner.state.params, Path(folder))
        return Path(folder) / "export"

    def close(self) -> None:
        """Save unsaved steps, write the report, and free the devices and the workdir's lock."""
        atexit.unregister(self._warn_if_unsaved)
        learner, run_state = self._learner, self._run_state
        if learner is None or run_state is None:
            return
        with self._resources, contextlib.closing(run_state.metrics_log):
            run_state.add_discarded_cost(run_state.pending_usage)
            run_state.pending_usage = UsageStats()
            self._save_completed_steps()
            self._learner = None
            if run_state.metrics_log.num_records:
                write_report(run_state, self._prepared.display.log)
            run_state.components.engine.release()
            run_state.state = run_state.ref_params = None

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


@dataclass(frozen=True)
class Scorer:
    """Frozen model that scores trajectories; created by `Trainer.load_scorer`."""

    _model: FrozenModel
    _learner: Learner

    def compute_logprobs(self, groups: Sequence[Group]) -> list[np.ndarray]:
        """Return log-probabilities of the sampled tokens; see `Trainer.compute_logprobs`."""
        score = ScoreStep(self._model.model, temperature=self._learner.method.temperature)
        trajectories, shape = flatten_groups(groups), self._learner.stage.shape
        return compute_logprobs(score, self._model.params, trajectories, shape)


GENERATE_STAGE = 2**30
"""Stage in the sampling seeds of `Trainer.generate`; no stage of a run uses it."""

SHORT_NAMES = {
    "loss": ("actor/pg_loss",),
    "kl": ("actor/kl_measured", "actor/kl_loss", "actor/ppo_kl"),
    "reward": ("critic/rewards/mean",),
    "entropy": ("actor/entropy",),
    "grad_norm": ("actor/grad_norm",),
}
"""Short names of metrics in results of `Trainer`: the first that is present."""


def _add_metric_aliases(metrics: dict[str, Any]) -> dict[str, Any]:
    """Return the metrics, with the most important also under `SHORT_NAMES`."""
    short = {
        name: next((metrics[full] for full in names if full in metrics), None)
        for name, names in SHORT_NAMES.items()
    }
    return {name: value for name, value in short.items() if value is not None} | metrics


@contextlib.contextmanager
def _stop_on_interrupt() -> Iterator[Callable[[], bool]]:
    """Turn the first interrupt into a stop request; a second interrupt stops immediately."""
    stop_requested = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop_requested.is_set  # Python delivers signals to the main thread only
        return
    previous_handler = signal.getsignal(signal.SIGINT)

    def request_stop(number: int, frame: Any) -> None:
        signal.signal(signal.SIGINT, previous_handler)
        stop_requested.set()

    signal.signal(signal.SIGINT, request_stop)
    try:
        yield stop_requested.is_set
    finally:
        signal.signal(signal.SIGINT, previous_handler)

"""Run the configured stages in order; resume from the latest checkpoint, if any."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from jaxrl.builders.components import RunComponents
from jaxrl.config.keys import import_optional
from jaxrl.config.schema import flatten_config
from jaxrl.evaluate import evaluate, run_suites
from jaxrl.logs.display import Display
from jaxrl.logs.trackers import open_metrics_log
from jaxrl.models.initial_weights import load_frozen_params, load_trained_params
from jaxrl.runtime import distributed, resume
from jaxrl.runtime.checkpoint import (
    Checkpointer,
    CheckpointError,
    make_optimizer_items,
    rank_steps,
)
from jaxrl.runtime.preemption import Interrupted
from jaxrl.runtime.sharding import make_param_shardings, make_restore_target
from jaxrl.runtime.versions import collect_kernel_checks, write_environment
from jaxrl.sft import sft
from jaxrl.train import train
from jaxrl.training.collect import FATAL_ERRORS, NotEnoughGroupsError
from jaxrl.training.failures import FailureCounter
from jaxrl.training.run_state import Components, Progress, RunState
from jaxrl.training.settings import Settings
from jaxrl.training.update import init_state, make_state_shardings
from jaxrl.training.usage import BudgetSpentError, UsageStats
from jaxrl.training.watch import CollapseError, Rollback
from jaxrl.types import Params
from jaxrl.utils.callables import UserCodeError

STAGE_FUNCTIONS: dict[str, Callable[[RunState, Params], Params]] = {
    "sft": sft,
    "train": train,
    "evaluate": evaluate,
}
"""Function of each stage, from the parameters at its start to those at its end."""


def run(
    settings: Settings,
    workdir: Path,
    components: RunComponents,
    display: Display,
    should_stop: Callable[[], bool] = lambda: False,
    contents: Mapping[str, str] | None = None,
    record_start: Callable[[], None] = lambda: None,
) -> None:
    """Run the configured stages; resume from the latest checkpoint in the workdir, if any.

    Args:
        settings: Settings of the stages.
        workdir: Folder of the run; it must exist.
        components: Components built from the configuration.
        display: Progress display.
        should_stop: Function that returns True once the run must save and exit.
        contents: Fingerprints of the configured files, saved in checkpoints.
        record_start: Function called once, after a checkpoint, if any, is restored. From then on,
            the workdir belongs to this configuration.

    Raises:
        Interrupted: `should_stop` returned True. Completed steps are saved.
        AllEpisodesFailedError: Every episode of several consecutive batches or of an evaluation
            failed.
        OutageError: The environment's server has been unreachable for too long.
        BudgetSpentError: The run has spent its budget.
        CollapseError: A sign of collapse ended the run. The step with the sign is saved.
        NotEnoughGroupsError: Too few groups passed the filter.
        UserCodeError: User code failed in a step. Earlier steps are saved.
        UnreadableImageError: An image in a demonstration or checkpoint cannot be read.
        CheckpointError: The checkpoint to resume cannot be read.
    """
    checkpointer = open_checkpointer(settings, workdir, display)
    # Each rollback ends `run_stages` and resumes with a new run state.
    with contextlib.closing(checkpointer):
        is_done = is_recorded = False
        while not is_done:
            run_state = load_run_state(
                settings,
                workdir,
                components=components,
                checkpointer=checkpointer,
                display=display,
                should_stop=should_stop,
                contents=contents or {},
                record_start=None if is_recorded else record_start,
            )
            is_recorded = True
            with contextlib.closing(run_state.metrics_log), _stop_display(display):
                is_done = run_stages(run_state)
    # End with the scores and the report's path. Warn first if nothing was learned.
    progress = run_state.progress
    if progress.has_learned_nothing:
        lr = components.method.optimizer.lr
        display.log(describe_no_learning(progress.stage_step, lr))
    write_report(run_state, display.log)


def open_checkpointer(settings: Settings, workdir: Path, display: Display) -> Checkpointer:
    """Open the checkpoints in a run's workdir."""
    return Checkpointer(
        workdir / "checkpoints",
        keep=settings.checkpoint.keep,
        keep_best=settings.checkpoint.keep_best,
        log=display.log,
    )


def describe_unsaved_work(run_state: RunState) -> str:
    """Return a message for a run that stops before its first checkpoint."""
    replies = run_state.settings.replay_folder
    if run_state.components.external and replies is not None:
        folder = replies or run_state.workdir / "replies"
        return (
            f"responses so far are saved in {folder}; repeat the command to request only the rest"
        )
    return "nothing to save yet; repeat the command to start over"


def evaluate_step(
    settings: Settings,
    workdir: Path,
    components: RunComponents,
    display: Display,
    should_stop: Callable[[], bool],
    contents: Mapping[str, str],
    step: int,
) -> None:
    """Evaluate and export the checkpoint of a step, without changing the rest of the run.

    Writes scores to `eval/evaluate_<step>.json` and the model to `steps/<step>/` in the workdir.
    `step` is counted across all stages. For the other arguments, see `run`.

    Raises:
        Interrupted: `should_stop` returned True.
        CheckpointError: There is no such checkpoint, or it is damaged.
        AllEpisodesFailedError, OutageError, BudgetSpentError: See `run`.
    """
    # The metrics log discards its records, and no rollback applies.
    checkpointer = Checkpointer(
        workdir / "checkpoints", keep=settings.checkpoint.keep, log=display.log
    )
    with contextlib.closing(checkpointer), _stop_display(display):
        position, restored = checkpointer.restore(
            lambda saved: build_restore_targets(components, saved),
            step,
        ) or ({}, {})
        progress = Progress.from_json(position, components.method)
        run_state = make_run_state(
            settings=settings,
            workdir=workdir,
            components=components,
            checkpointer=checkpointer,
            metrics_log=open_metrics_log(workdir, 0, settings, display.log, is_writer=False),
            display=display,
            progress=progress,
            restored=restored,
            should_stop=should_stop,
            contents=contents,
            saved=dataclasses.replace(progress),
        )
        params = load_initial_params(run_state)
        folder = workdir / "steps" / str(step)
        components.export(params, folder)
        evaluate(run_state, params)
    display.log(f"done; {folder} contains the model of step {step}")


def describe_no_learning(num_steps: int, learning_rate: float) -> str:
    """Return the warning for a train stage in which no update had a gradient."""
    cause = (
        "config.optimizer.lr is 0"
        if learning_rate == 0
        else "no update had a gradient, because all compared rewards were equal, every episode "
        "failed or gradients were not finite; see the warnings above"
    )
    steps = "one step" if num_steps == 1 else f"{num_steps} steps"
    return (
        f"warning: NOTHING WAS LEARNED in the {steps} of the train stage: {cause}. Only weight "
        "decay changed the weights. Look at generated_text and reward in trajectories/, and at "
        "filter/*_share and outcome/* in metrics.jsonl. If all answers are wrong, try a warm start "
        "(sft), a better prompt or easier tasks; if all are right, try harder tasks."
    )


@contextlib.contextmanager
def _stop_display(display: Display) -> Iterator[None]:
    """Stop the live display when the block ends."""
    try:
        yield
    finally:
        display.stop()


def run_stages(run_state: RunState) -> bool:
    """Run the stages. If a stage is interrupted, save the progress and report why.

    Returns:
        False after a rollback: a new run state must resume from an earlier checkpoint.
    """
    progress, display = run_state.progress, run_state.display
    try:
        params = load_initial_params(run_state)
        for stage in run_state.settings.stages:
            params = STAGE_FUNCTIONS[stage](run_state, params)
        return True
    except Rollback as decision:
        roll_back(run_state, decision)
        return False
    except (*FATAL_ERRORS, CollapseError, Interrupted) as error:
        run_state.save_progress()
        if isinstance(error, Interrupted):
            saved = f"saved after {progress.label}; repeat the command to resume"
            nothing = describe_unsaved_work(run_state)
            display.log(f"stopped: {saved if run_state.saved else nothing}")
        if isinstance(error, BudgetSpentError):
            saved = f"saved after {progress.label}" if run_state.saved else "nothing is saved yet"
            display.log(f"stopped: {saved}; {error}")
        # Rendering the report takes seconds. Skip it for an interrupted run without any records.
        has_no_records = isinstance(error, Interrupted) and not run_state.metrics_log.num_records
        if not (has_no_records or isinstance(error, NotEnoughGroupsError | UserCodeError)):
            write_report(run_state, display.log)
        if isinstance(error, UserCodeError):
            advice = "Completed steps are saved; fix the code and resume with --accept_changes."
            raise UserCodeError(f"{error} {advice}") from error
        raise


def roll_back(run_state: RunState, decision: Rollback) -> None:
    """Record a rollback decision and free device memory, to resume from an earlier checkpoint."""
    progress = run_state.progress
    number = progress.watched.num_roll_backs + 1
    line = {"number": number, "sign": decision.sign, "from_step": decision.from_step}
    line |= {"to_step": decision.to_step, "lr_scale": decision.lr_scale}
    progress.discard_prefetched_groups()
    line |= {"ledger": progress.ledger.to_json()}
    if distributed.is_main():
        resume.append_rollback(run_state.workdir, line)
    distributed.barrier()
    run_state.components.engine.release()
    run_state.state = run_state.ref_params = None  # the devices cannot hold two states
    later_folder = run_state.workdir / resume.ROLLED_BACK_FOLDER / str(number)
    run_state.display.log(
        f"rolling back from step {decision.from_step} to the checkpoint of step "
        f"{decision.to_step}, with other samples and the learning rate scaled by "
        f"{decision.lr_scale:g} ({decision.sign}); later metrics are in {later_folder}"
    )


def load_run_state(
    settings: Settings,
    workdir: Path,
    *,
    components: RunComponents,
    checkpointer: Checkpointer,
    display: Display,
    should_stop: Callable[[], bool],
    contents: Mapping[str, str],
    record_start: Callable[[], None] | None,
    restores_finished_stage: bool = False,
) -> RunState:
    """Restore the run state from the latest checkpoint, or create it.

    With `restores_finished_stage`, also restore the optimizer and the reference policy if all steps
    of the stage are done. For the other arguments, see `run`.
    """
    # Restore the progress, after applying rollbacks that are newer than the checkpoint.
    is_main = distributed.is_main()
    rollbacks = discard_rolled_back_output(workdir, checkpointer)
    checkpoint = checkpointer.restore(
        lambda saved: build_restore_targets(components, saved, restores_finished_stage)
    )
    position, restored = checkpoint or ({}, {})
    progress = Progress.from_json(position, components.method) if checkpoint else Progress()
    if rollbacks:
        apply_rollback(progress, rollbacks[-1], checkpointer)
    if components.processor is not None:
        progress.restore_images(components.processor.reload_images)
    # The restore succeeded, so the workdir may change: drop records after the checkpoint.
    if record_start is not None:
        record_start()
    if is_main and (checkpoint or set(settings.stages) != {"evaluate"}):
        resume.delete_later_output(workdir, progress.step)
    metrics_log = open_metrics_log(
        workdir,
        progress.num_records,
        settings,
        display.log,
        is_writer=is_main,
        is_later=progress.is_older_than,
    )
    if is_main:
        environment = workdir / "environment.json"
        write_environment(environment, progress.step, components, display.log)
    return make_run_state(
        settings=settings,
        workdir=workdir,
        components=components,
        checkpointer=checkpointer,
        metrics_log=metrics_log,
        display=display,
        progress=progress,
        restored=restored,
        should_stop=should_stop,
        contents=contents,
        saved=dataclasses.replace(progress) if checkpoint else None,
    )


def discard_rolled_back_output(workdir: Path, checkpointer: Checkpointer) -> list[dict[str, Any]]:
    """Remove or archive output that rollbacks after the latest checkpoint have made invalid.

    Returns:
        All rollback decisions if the last one is newer than that checkpoint, else [].

    Raises:
        CheckpointError: The decisions on disk are damaged, or there is no checkpoint to restore.
    """
    lines: list[dict[str, Any]] = []
    error = None
    if distributed.is_main():
        try:
            lines = resume.read_rollbacks(workdir)
        except (ValueError, OSError) as failure:
            error = str(failure)
    lines, error = distributed.broadcast((lines, error))
    if error is not None:
        raise CheckpointError(error)
    newest = checkpointer.find_latest_position() if lines else None
    if newest is None:
        if lines and distributed.is_main():  # the checkpoints were deleted: start over
            (workdir / resume.ROLLBACKS_FILE).unlink()
        return []
    step, position = newest
    num_done = position.get("watched", {}).get("num_roll_backs", 0)
    for line in (line for line in lines if line["number"] > num_done):
        if step > line["to_step"]:
            checkpointer.remove_after(line["to_step"])
        if distributed.is_main():
            resume.archive_later_output(workdir, line["to_step"], line["number"])
    return lines if lines[-1]["number"] > num_done else []


def apply_rollback(
    progress: Progress, decision: Mapping[str, Any], checkpointer: Checkpointer
) -> None:
    """Apply a rollback decision to the restored progress."""
    changed = {"lr_scale": decision["lr_scale"], "num_roll_backs": decision["number"]}
    progress.watched = dataclasses.replace(progress.watched, acting=(), **changed)
    # Keep the cost of discarded steps and groups.
    progress.ledger = UsageStats.from_json(decision["ledger"])
    progress.prefetched = None
    values = checkpointer.read_scores()
    if values.get(progress.best.step) != progress.best.value:
        ranked = rank_steps(values)
        value, step = (values[ranked[0]], ranked[0]) if ranked else (None, 0)
        progress.best = dataclasses.replace(progress.best, value=value, step=step, mark=value)


def make_run_state(
    settings: Settings,
    progress: Progress,
    display: Display,
    contents: Mapping[str, str],
    **fields: Any,
) -> RunState:
    """Create a run state; see `run` for the arguments. `fields` holds all other fields."""
    failures = FailureCounter(
        limit=settings.max_failed_steps, log=display.log, num_batches=progress.num_failed
    )
    return RunState(
        settings=settings,
        progress=progress,
        display=display,
        failures=failures,
        # These are compared on resume.
        origin={"config": flatten_config(settings.values), "contents": dict(contents)},
        run_suites=run_suites,
        **fields,
    )


def load_initial_params(run_state: RunState) -> Params:
    """Load the initial parameters from the checkpoint, or else from the model folder.

    If the run only evaluates, each leaf is a function that reads the parameter from disk.
    """
    settings, display, progress = run_state.settings, run_state.display, run_state.progress
    if run_state.components.external:
        display.log(f"the policy is {run_state.components.external}")
        return {}
    attention = run_state.components.model.attention
    display.log(f"attention: {attention.name}, {attention.reason}")
    if shown := run_state.components.model.architecture.kernel_summary:
        display.log(shown)
    for check in collect_kernel_checks(run_state.components):
        if check.is_sound:
            display.log(f"{check.operation}: {check.kernel} passes its check: {check.finding}")
        else:
            display.log(
                f"warning: {check.operation}: {check.kernel} fails its check, trying the next: "
                f"{check.finding}"
            )
    counter = display.make_progress_callback("loading weights, MiB")
    model = run_state.components.model
    load_args = model, settings.model_path, settings.architecture, counter
    model.base = load_frozen_params(*load_args)
    if run_state.saved:
        display.log(f"resuming after {progress.label}")
        return run_state.restored.pop("params")
    display.log(f"no checkpoint in {run_state.workdir}: starting from {settings.model_path}")
    is_lazy = settings.stages == ("evaluate",)
    return load_trained_params(*load_args, seed=settings.seed, is_lazy=is_lazy)


def write_report(run_state: RunState, log: Callable[[str], None]) -> None:
    """Write `report.html`, from the main process only."""
    if distributed.is_main():
        write = import_optional(REPORT)
        if write is None:
            log("no report: jaxrl/extras/view is missing")
        else:
            write(run_state.workdir, log)


REPORT = "jaxrl.extras.view.report:write_report_or_warn"
"""Function that writes a run's report; missing if the extra was deleted."""


def build_restore_targets(
    components: Components, saved: dict[str, Any], restores_finished_stage: bool = False
) -> dict[str, Any]:
    """Return the items to restore from a checkpoint with progress `saved`, as abstract arrays.

    Always includes the parameters. If a stage is in progress, or finished and
    `restores_finished_stage` is set, also includes its optimizer state and, in stage `train`, the
    reference policy if the method has one.
    """
    progress = Progress.from_json(saved, components.method)
    trained, mesh = components.model.trained, components.mesh
    shapes = trained.make_abstract_params()
    params = make_restore_target(shapes, make_param_shardings(mesh, trained))
    is_finished = progress.stage in components.stages and progress.stage_step > 0
    if not (
        progress.is_mid_stage(components.num_steps) or (restores_finished_stage and is_finished)
    ):
        return {"params": params}
    optimizer = components.stages[progress.stage].optimizer
    fresh = jax.eval_shape(lambda params: init_state(params, mesh, trained, optimizer), shapes)
    state = make_restore_target(fresh, make_state_shardings(mesh, trained, optimizer))
    targets = {"params": params, "optimizer": make_optimizer_items(state)}
    has_reference = progress.stage == "train" and components.method.has_reference
    return targets | ({"ref_params": params} if has_reference else {})

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

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from ml_collections import ConfigDict

from jaxrl import launch
from jaxrl.builders import validation
from jaxrl.logs.display import Display
from jaxrl.logs.writers import parse_record
from jaxrl.runtime.checkpoint import list_steps, quiet_orbax, read_value, sort_by_value
from jaxrl.runtime.preemption import Interrupted
from jaxrl.runtime.resume import add_code_folders
from jaxrl.runtime.watchdog import watchdog
from jaxrl.utils.secrets import redact_output


@dataclass(frozen=True, kw_only=True)
class Run:
    """Results of a run.

    Attributes:
        workdir: Folder of the run.
        metrics: Table with one row per record of `metrics.jsonl`, null for missing metrics. The
            column `step` counts over all stages; `stage` names the stage.
        scores: Metrics of the last evaluation by name, such as `val-core/all/exact_match/mean@1`.
        best_checkpoint: Checkpoint with the highest `eval.best_metric`, or the latest one if none
            was evaluated; None if there are no checkpoints.
        report: HTML report of the run, if it exists.
    """

    workdir: Path
    metrics: pa.Table
    scores: dict[str, float]
    best_checkpoint: Path | None
    report: Path | None


def train(
    config: ConfigDict,
    workdir: str | Path,
    *,
    accept_changes: bool = False,
    ignore_memory_plan: bool = False,
) -> Run:
    """Run the configured stages in this process, resuming from the latest checkpoint if any.

    Args:
        config: `jaxrl.config.default_config()` with changes. It is copied.
        workdir: Folder of the run; created if missing.
        accept_changes: True to resume even if data, rewards or the method differ from the start of
            the run.
        ignore_memory_plan: True to start even if the plan needs more memory than a device has.

    Raises:
        ValueError, KeyError, AttributeError, TypeError, OSError: The configuration, a file or the
            workdir is invalid.
        KeyboardInterrupt: The user interrupted. Completed steps are saved, and the same call
            resumes. A second interrupt stops immediately, without saving.
        OutageError, NothingWorksError, BudgetSpentError, UnsoundError, NotEnoughGroupsError,
            UserCodeError, UnreadableError, CheckpointError: See `jaxrl.run.run`.
    """
    return _run(
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
    return _run(config, Path(workdir), step=step)


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
    scores: dict[str, float] = {}
    for record in records:
        eval_metrics = {name: value for name, value in record.items() if name.startswith("val-")}
        scores = eval_metrics or scores
    names = dict.fromkeys(name for record in records for name in record)
    columns = {name: [record.get(name) for record in records] for name in names}
    checkpoints = workdir / "checkpoints"
    steps = list_steps(checkpoints)
    ranked = (
        sort_by_value({step: read_value(checkpoints / str(step)) for step in steps}) or steps[-1:]
    )
    return Run(
        workdir=workdir,
        metrics=pa.table(columns),
        scores=scores,
        best_checkpoint=checkpoints / str(ranked[0]) if ranked else None,
        report=report if report.is_file() else None,
    )


def _run(config: ConfigDict, workdir: Path, **settings: Any) -> Run:
    # A copy, because the memory plan sets micro-batch sizes in it.
    config = config.copy_and_resolve_references()
    add_code_folders(workdir)
    resolved = validation.validate(config)
    with contextlib.ExitStack() as stack:
        stack.enter_context(redact_output())
        stack.enter_context(quiet_orbax())
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
    # Raised here because a notebook keeps an error's frames alive, and thus the weights in them.
    if is_interrupted:
        raise KeyboardInterrupt(f"the steps done are saved in {workdir}")
    return load_run(workdir)


@contextlib.contextmanager
def _stop_on_interrupt() -> Iterator[Callable[[], bool]]:
    """Turn the first interrupt into a stop request. A second one interrupts immediately."""
    stop_requested = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop_requested.is_set  # Python delivers signals to the main thread only
        return
    previous_handler = signal.getsignal(signal.SIGINT)

    def handle_interrupt(number: int, frame: Any) -> None:
        signal.signal(signal.SIGINT, previous_handler)
        stop_requested.set()

    signal.signal(signal.SIGINT, handle_interrupt)
    try:
        yield stop_requested.is_set
    finally:
        signal.signal(signal.SIGINT, previous_handler)

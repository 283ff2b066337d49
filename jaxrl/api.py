"""Training and evaluation from Python, as in a notebook.

    from jaxrl.api import evaluate, train
    from jaxrl.config import default_config

    config = default_config().lock()
    config.model.path = "models/Qwen3-0.6B"
    ...
    run = train(config, "runs/first")
    run.metrics.to_pandas().plot(x="step", y="critic/rewards/mean")

A run lives in its workdir, as one of the command `jaxrl train` does. The same call resumes it, and
`jaxrl train`, `chat` and `report` read the same folder.
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
from jaxrl.runtime.checkpoint import by_value, raises_once, read_value, steps_in
from jaxrl.runtime.preemption import Interrupted
from jaxrl.runtime.resume import add_code_folders
from jaxrl.runtime.watchdog import watchdog
from jaxrl.utils.secrets import redacted_output


@dataclass(frozen=True, kw_only=True)
class Run:
    """Results of a run.

    Attributes:
        workdir: Folder of the run.
        metrics: One row for each record of `metrics.jsonl`, null where a record lacks a metric.
            `step` counts over all stages, `stage` names the stage.
        scores: Means of the last evaluation by name, such as `val-core/all/exact_match/mean@1`.
        best_checkpoint: Checkpoint with the highest `eval.best_metric`, or the newest one if none
            has a value; None without checkpoints.
        report: Page about the run, if there is one.
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
    """Run the stages of a configuration in this process, from the workdir's newest checkpoint.

    Args:
        config: `jaxrl.config.default_config()` with changes. It is copied.
        workdir: Folder of the run; it is made.
        accept_changes: Resume in a workdir that began with other data, rewards or another method.
        ignore_memory_plan: Start although the plan needs more memory than a device has.

    Raises:
        ValueError, KeyError, AttributeError, TypeError, OSError: The configuration, a file or the
            workdir is wrong.
        KeyboardInterrupt: The user interrupted. Finished steps are saved, and the same call
            resumes. A second interrupt ends at once.
        OutageError, NothingWorksError, BudgetSpentError, UnsoundError, NotEnoughGroupsError,
            UserCodeError, UnreadableError, CheckpointError: See `jaxrl.run.run`.
    """
    return _play(
        config, Path(workdir), accept_changes=accept_changes, ignore_memory_plan=ignore_memory_plan
    )


def evaluate(config: ConfigDict, workdir: str | Path, *, step: int | None = None) -> Run:
    """Evaluate a run on its held-out tasks, and export its model.

    In a workdir without checkpoints this measures the model of `config.model.path`.

    Args:
        config: Configuration of the run. `eval.*` and `tasks.eval` may have changed, and `stages`
            is ignored.
        workdir: Folder of the run.
        step: Step whose checkpoint is evaluated into `eval/evaluate_<step>.json` and
            `steps/<step>/`. Nothing else of the run changes.

    Raises:
        Exception: As `train`.
    """
    config = config.copy_and_resolve_references()
    config.stages = ("evaluate",)
    return _play(config, Path(workdir), step=step)


def load_run(workdir: str | Path) -> Run:
    """Read the results of a run, also of one in progress.

    Raises:
        FileNotFoundError: The folder holds no `metrics.jsonl`.
    """
    workdir = Path(workdir)
    file, page = workdir / "metrics.jsonl", workdir / "report.html"
    if not file.is_file():
        raise FileNotFoundError(f"{workdir} holds no metrics.jsonl; expected a run's workdir.")
    lines = file.read_bytes().splitlines()
    # The last line may be half written by a run that is under way.
    records = [record for record in map(parse_record, lines) if record is not None]
    scores: dict[str, float] = {}
    for record in records:
        evaluated = {name: value for name, value in record.items() if name.startswith("val-")}
        scores = evaluated or scores
    names = dict.fromkeys(name for record in records for name in record)
    columns = {name: [record.get(name) for record in records] for name in names}
    checkpoints = workdir / "checkpoints"
    steps = steps_in(checkpoints)
    ranked = by_value({step: read_value(checkpoints / str(step)) for step in steps}) or steps[-1:]
    return Run(
        workdir=workdir,
        metrics=pa.table(columns),
        scores=scores,
        best_checkpoint=checkpoints / str(ranked[0]) if ranked else None,
        report=page if page.is_file() else None,
    )


def _play(config: ConfigDict, workdir: Path, **settings: Any) -> Run:
    # A copy, because sizes that the memory decides are set in it.
    config = config.copy_and_resolve_references()
    add_code_folders(workdir)
    resolved = validation.validate(config)
    with contextlib.ExitStack() as stack:
        stack.enter_context(redacted_output())
        stack.enter_context(raises_once())
        display = Display()
        stack.callback(display.stop)
        play = launch.make_ready(resolved, workdir, display, stack, **settings)
        should_stop = stack.enter_context(_asked_to_stop())
        stack.enter_context(watchdog(display, config.watch.stall_s))
        is_interrupted = False
        try:
            play(should_stop)
        except Interrupted:
            is_interrupted = True
        del play
    # Raised here, since a notebook keeps the frames of an error, and with them weights.
    if is_interrupted:
        raise KeyboardInterrupt(f"the steps done are saved in {workdir}")
    return load_run(workdir)


@contextlib.contextmanager
def _asked_to_stop() -> Iterator[Callable[[], bool]]:
    """Let a first interrupt ask for the end of the run; a second one interrupts at once."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set  # where Python delivers no signals
        return
    before = signal.getsignal(signal.SIGINT)

    def ask(number: int, frame: Any) -> None:
        signal.signal(signal.SIGINT, before)
        asked.set()

    signal.signal(signal.SIGINT, ask)
    try:
        yield asked.is_set
    finally:
        signal.signal(signal.SIGINT, before)

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
import html
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from ml_collections import ConfigDict

from jaxrl import launch
from jaxrl.builders import validation
from jaxrl.logs.display import Display
from jaxrl.logs.results import SUITE_LABELS, Scores, format_scores, read_scores
from jaxrl.logs.writers import parse_record
from jaxrl.runtime.checkpoint import filter_orbax_logs, list_steps, rank_steps, read_value
from jaxrl.runtime.preemption import Interrupted
from jaxrl.runtime.resume import add_code_folders
from jaxrl.runtime.watchdog import watchdog
from jaxrl.utils.secrets import redact_output


@dataclass(frozen=True, kw_only=True, repr=False)
class Run:
    """Results of a run.

    Attributes:
        workdir: Folder of the run.
        metrics: Table with one row per record of `metrics.jsonl`, null for missing metrics. The
            column `step` counts over all stages; `stage` names the stage.
        scores: Means of the last evaluation, such as `scores["reward"]`, `scores["exact_match"]`,
            `scores["exact_match/greedy"]` or `scores["two_hop/exact_match"]`.
        scores_before: Means of the first evaluation, if there are several.
        best_checkpoint: Checkpoint with the highest `eval.best_metric`, or the latest one if none
            was evaluated; None if there are no checkpoints.
        report: HTML report of the run, if it exists.
    """

    workdir: Path
    metrics: pa.Table
    scores: Scores
    scores_before: Scores
    best_checkpoint: Path | None
    report: Path | None

    def __str__(self) -> str:
        """Describe the run in five lines: steps, scores, controls, checkpoint and report."""
        steps = [stage for stage, _, _ in self._points("timing_s/step")]
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
            points = [(step, y) for stage, step, y in self._points(name) if stage == "train"]
            curves.append(_draw_curve(title, points))
        return f"<div><code>{html.escape(str(self.workdir))}</code>{table}{''.join(curves)}</div>"

    def _points(self, name: str) -> list[tuple[str, int, float]]:
        """Return (stage, step, value) of the records that have a metric."""
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
    """Return an SVG image of a curve, 220 by 110 pixels; "" for less than two points."""
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
    evaluations = read_scores(workdir, records[-1]["step"] if records else 0)
    names = dict.fromkeys(name for record in records for name in record)
    columns = {name: [record.get(name) for record in records] for name in names}
    checkpoints = workdir / "checkpoints"
    steps = list_steps(checkpoints)
    ranked = rank_steps({step: read_value(checkpoints / str(step)) for step in steps}) or steps[-1:]
    return Run(
        workdir=workdir,
        metrics=pa.table(columns),
        scores=evaluations[-1] if evaluations else {},
        scores_before=evaluations[0] if len(evaluations) > 1 else {},
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

"""Trackers that mirror `metrics.jsonl`: TensorBoard event files and Weights & Biases."""

from __future__ import annotations

import functools
import importlib.util
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.proto.summary_pb2 import Summary

from jaxrl.logs.writers import MetricsLog
from jaxrl.training.interfaces import Record
from jaxrl.training.settings import Settings


def warn_about_missing_files(workdir: Path, records: Iterable[Record]) -> list[str]:
    """Return a list with a warning if files that the records refer to are missing; else []."""
    names = []
    for record in records:
        stage, step = record.get("stage", "train"), record["step"]
        if any(name.startswith("val-") for name in record):
            names.append(f"eval/{stage}_{step}.json")
        if stage == "train" and "timing_s/step" in record:
            names.append(f"trajectories/step_{step:06d}.jsonl")
    missing = [name for name in names if not (workdir / name).exists()]
    if not missing:
        return []
    more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
    return [f"warning: missing in {workdir}: {', '.join(missing[:3])}{more}"]


def open_metrics_log(
    workdir: Path,
    num_records: int,
    settings: Settings,
    log: Callable[[str], None],
    *,
    is_writer: bool,
    is_later: Callable[[Record], bool] = lambda _: False,
) -> MetricsLog:
    """Open `metrics.jsonl` and its trackers. Warn about lost records and missing files."""
    if not is_writer:
        return MetricsLog(None, num_records)
    metrics_log = MetricsLog(workdir / "metrics.jsonl", num_records, is_later=is_later, log=log)
    for warning in warn_about_missing_files(workdir, metrics_log.records()):
        log(warning)
    metrics_log.trackers.append(TensorBoard(workdir / "tensorboard", metrics_log.records(), log))
    if settings.wandb_project:
        tracker = WandB(workdir, settings.wandb_project, settings.values, log)
        metrics_log.trackers.append(tracker)
    return metrics_log


class _FailSafeTracker:
    """Base class of trackers that are disabled on failure, so that the run continues."""

    name: str

    def __init__(self, log: Callable[[str], None]):
        self._log = log
        self._is_enabled = True

    def _try(self, action: Callable[[], object]) -> None:
        if not self._is_enabled:
            return
        try:
            action()
        except Exception as error:  # no failure here may stop training
            self._is_enabled = False
            self._log(
                f"warning: {self.name} failed and is disabled for the rest of the run: {error!r}"
            )


class TensorBoard(_FailSafeTracker):
    """TensorBoard event files, rewritten from the records at startup to drop later steps.

    Does not use tensorboardX's writer thread, which dies on a full disk and blocks writers forever.
    """

    name = "TensorBoard"

    def __init__(self, folder: Path, records: Iterable[Record], log: Callable[[str], None]):
        """Replace the folder with one that contains `records`."""
        super().__init__(log)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self._writer = EventsWriter(str(folder / "events"))
        for record in records:
            self._try(functools.partial(self._write, record))
        self._try(self._writer.flush)

    def write(self, index: int, record: Record) -> None:
        """Append an event with the record's numbers."""
        self._try(functools.partial(self._write, record))
        self._try(self._writer.flush)

    def _write(self, record: Record) -> None:
        values = [
            Summary.Value(tag=name, simple_value=value)
            for name, value in record.items()
            if name not in ("step", "stage") and value is not None
        ]
        event = Event(wall_time=time.time(), step=record["step"], summary=Summary(value=values))
        self._writer.write_event(event)

    def close(self) -> None:
        """Flush and close."""
        self._try(self._writer.close)


class WandB(_FailSafeTracker):
    """A Weights & Biases run, which a restart in the same workdir continues.

    The W&B step is the record's index, since stages share global steps; `step` is the x-axis of
    charts. A restart may repeat records that W&B already has; these are not sent again.
    """

    name = "W&B"

    def __init__(
        self, workdir: Path, project: str, config: Mapping[str, Any], log: Callable[[str], None]
    ):
        """Start or continue the run.

        Raises:
            RuntimeError: W&B does not start, for example because there is no API key.
        """
        super().__init__(log)
        import wandb  # an optional dependency

        id_file = workdir / "wandb" / "run_id"
        if not id_file.exists():
            id_file.parent.mkdir(parents=True, exist_ok=True)
            id_file.write_text(uuid.uuid4().hex[:12], encoding="utf-8")
        try:
            self._run = wandb.init(
                project=project,
                id=id_file.read_text(encoding="utf-8"),
                resume="allow",
                name=workdir.name,
                dir=str(workdir),
                config=dict(config),
            )
            self._run.define_metric("*", step_metric="step")
        except Exception as error:
            raise RuntimeError(
                f"W&B did not start: {error}. Set WANDB_API_KEY, or WANDB_MODE=offline, in the "
                "environment, or set config.log.wandb_project='' to disable W&B."
            ) from error
        self._num_logged = self._run.step

    def write(self, index: int, record: Record) -> None:
        """Send a record unless W&B already has it."""
        if index >= self._num_logged:
            self._try(lambda: self._run.log(dict(record), step=index))

    def close(self) -> None:
        """Wait until all records are sent or, if offline, written to disk."""
        self._try(self._run.finish)


def check_trackers(project: str) -> None:
    """Raise a ValueError if a W&B project is set but wandb is not installed."""
    if project and importlib.util.find_spec("wandb") is None:
        raise ValueError(
            f"config.log.wandb_project is {project!r}, but wandb is not installed; "
            "run pip install -e '.[wandb]', or set it to ''."
        )

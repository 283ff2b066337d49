"""Trackers that mirror `metrics.jsonl` in other systems, and TensorBoard event files."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.proto.summary_pb2 import Summary

from jaxrl.logs.records import Record
from jaxrl.logs.writers import MetricsLog, Table, Tracker
from jaxrl.training.settings import Settings
from jaxrl.utils.callables import format_failure


def open_metrics_log(
    workdir: Path,
    num_records: int,
    settings: Settings,
    log: Callable[[str], None],
    *,
    is_writer: bool,
    is_later: Callable[[Record], bool] = lambda _: False,
) -> MetricsLog:
    """Open `metrics.jsonl` and its trackers. Warn about lost records."""
    if not is_writer:
        return MetricsLog(None, num_records)
    metrics_log = MetricsLog(workdir / "metrics.jsonl", num_records, is_later=is_later, log=log)
    records = metrics_log.read_records()
    metrics_log.trackers = [
        FailSafeTracker(name, partial(make, workdir=workdir, records=records), log)
        for name, make in settings.trackers.items()
    ]
    return metrics_log


class FailSafeTracker:
    """Wrapper that disables a tracker with a warning after a failure, so that the run continues.

    A tracker that fails to start, for example because a server does not respond, is also disabled.
    """

    def __init__(self, name: str, make: Callable[[], Tracker], log: Callable[[str], None]):
        """Create the tracker with `make`; warnings contain `name`."""
        self._name, self._log = name, log
        self._tracker: Tracker | None = None
        with self._disable_on_failure():
            self._tracker = make()

    @contextmanager
    def _disable_on_failure(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # no failure here may stop training
            self._tracker = None
            self._log(
                f"warning: the tracker {self._name!r} failed and is left out until the next start: "
                f"{format_failure(error)}"
            )

    def write(self, index: int, record: Record, tables: Mapping[str, Table]) -> None:
        """Write a record, unless the tracker has failed."""
        if self._tracker is not None:
            with self._disable_on_failure():
                self._tracker.write(index, record, tables)

    def close(self) -> None:
        """Close the tracker, unless it has failed."""
        if self._tracker is not None:
            with self._disable_on_failure():
                self._tracker.close()


class TensorBoard:
    """Tracker that writes TensorBoard event files.

    The files are rewritten from the records at startup, which drops later steps. Tables are not
    written. tensorboardX's writer thread is not used, because it dies on a full disk and then
    blocks writers forever.
    """

    def __init__(self, workdir: Path, records: Iterable[Record]):
        """Replace the folder `tensorboard` of the workdir with one that contains `records`."""
        folder = workdir / "tensorboard"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self._writer = EventsWriter(str(folder / "events"))
        for record in records:
            self._add_event(record)
        self._writer.flush()

    def write(self, index: int, record: Record, tables: Mapping[str, Table]) -> None:
        """Append an event with the record's metrics."""
        self._add_event(record)
        self._writer.flush()

    def _add_event(self, record: Record) -> None:
        values = [
            Summary.Value(tag=name, simple_value=value)
            for name, value in record.items()
            if name not in ("step", "stage") and value is not None
        ]
        event = Event(wall_time=time.time(), step=record["step"], summary=Summary(value=values))
        self._writer.write_event(event)

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


TRACKERS = {
    "tensorboard": TensorBoard,
    "wandb": "jaxrl.extras.trackers.wandb.WandB",
    "mlflow": "jaxrl.extras.trackers.mlflow.MLflow",
    "trackio": "jaxrl.extras.trackers.trackio.Trackio",
}
"""Classes of the built-in trackers by name; those of extras as dotted paths.

The constructor may take `workdir`, `records` (those of the run so far), `project` and `config`. The
attribute `package` names the Python package, and extra of jaxrl, that the class needs.
"""

"""Writers for `metrics.jsonl`, its trackers and trajectory files."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxrl.logs.metrics import to_json_numbers
from jaxrl.logs.records import (
    Record,
    build_sample_table,
    build_trajectory_record,
    round_token_arrays,
)
from jaxrl.types import Trajectory
from jaxrl.utils.files import (
    append_line,
    atomic_write,
    check_not_moved,
    open_atomic,
    quarantine_file,
)
from jaxrl.utils.json_io import parse_json

Table = Sequence[Mapping[str, Any]]
"""Rows of strings, numbers and None, with the same columns in each row."""


class Tracker(Protocol):
    """Experiment tracker that receives a copy of each record in `metrics.jsonl`."""

    def write(self, index: int, record: Record, tables: Mapping[str, Table]) -> None:
        """Write a record and the tables of its samples.

        Args:
            index: Number of earlier records of the run. A resumed run repeats the indices after
                its checkpoint, and a rollback repeats them with other values.
            record: Line of `metrics.jsonl`.
            tables: Tables by name, such as `samples/train` or `samples/greedy`.
        """
        ...

    def close(self) -> None:
        """Flush pending records and close the tracker."""
        ...


class MetricsLog:
    """Writer for `metrics.jsonl`, one object per record with `step` and `stage` first."""

    def __init__(
        self,
        path: Path | None,
        num_records: int,
        *,
        is_later: Callable[[Record], bool] = lambda _: False,
        log: Callable[[str], None] = print,
    ):
        """Open the log and truncate it to its first `num_records` records.

        Lost records also count, so later records keep their index.

        Args:
            path: Path of `metrics.jsonl`, which need not exist; None to count records only.
            num_records: Number of records of the run up to the checkpoint that it resumes from.
            is_later: Function that returns True for records newer than that checkpoint. If records
                were lost, newer records may be among the first `num_records`.
            log: Callback for warnings about damaged or lost records.
        """
        self._path = path
        self.num_records = num_records
        self.trackers: list[Tracker] = []
        self._next_metrics: defaultdict[str, float] = defaultdict(float)
        self._next_tables: dict[str, Table] = {}
        self._last_write_at = time.perf_counter()
        if path is None:
            return
        self._sentinel_path = path.with_name(SENTINEL_FILE)

        def truncate(file: Path, lines: Sequence[bytes]) -> list[bytes]:
            parsed = [(line, parse_record(line)) for line in lines]
            valid_lines = [
                line for line, record in parsed if record is not None and not is_later(record)
            ]
            with open_atomic(file) as out:
                out.writelines(line.decode("utf-8") + "\n" for line in valid_lines)
            return valid_lines

        # A killed process may have left an incomplete last line.
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        lines = lines[:num_records]
        damaged = [
            number for number, line in enumerate(lines, start=1) if parse_record(line) is None
        ]
        # Keep a copy of a damaged file before removing lines.
        if damaged:
            backup = quarantine_file(path, keeps_original=True)
            for number in damaged:
                log(f"warning: {path}:{number} is not a valid record and was removed; see {backup}")
        valid_lines = truncate(path, lines)
        if self._sentinel_path.exists():
            truncate(self._sentinel_path, self._sentinel_path.read_bytes().splitlines())
        if len(valid_lines) < num_records:
            log(
                f"warning: {path} contains {len(valid_lines)} of the {num_records} records that "
                "the run has written. Reports do not contain the others"
            )

    def read_records(self) -> list[Record]:
        """Read all records in the file."""
        if self._path is None:
            return []
        return [json.loads(line) for line in self._path.read_text(encoding="utf-8").splitlines()]

    def add_to_next_record(self, name: str, value: float) -> None:
        """Add `value` to the metric `name` of the next record."""
        self._next_metrics[name] += value

    def add_samples(self, name: str, trajectories: Sequence[Trajectory]) -> None:
        """Add a table of trajectories to the next record, for the trackers."""
        if trajectories:
            self._next_tables[f"samples/{name}"] = build_sample_table(trajectories)

    def write_trajectories(
        self, step: int, trajectories: Sequence[Trajectory], fields: Sequence[Mapping[str, Any]]
    ) -> None:
        """Write the trajectories of a step with additional fields, and their images."""
        if self._path is not None:
            workdir = self._path.parent
            file = workdir / "trajectories" / f"step_{step:06d}.jsonl"
            write_trajectories(file, trajectories, fields)
            write_images(workdir, trajectories)

    def write(self, step: int, stage: str, metrics: Mapping[str, float]) -> None:
        """Append a record, with null for numbers that are not finite.

        `timing_s/wall` is the time since the previous record, or since opening the log.
        """
        now = time.perf_counter()
        metrics = {**metrics, **self._next_metrics, "timing_s/wall": now - self._last_write_at}
        self._last_write_at = now
        self._next_metrics.clear()
        record = {"step": step, "stage": stage, **to_json_numbers(metrics)}
        if self._path is not None:
            check_not_moved(self._path)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        for tracker in self.trackers:
            tracker.write(self.num_records, record, self._next_tables)
        self._next_tables = {}
        self.num_records += 1

    def write_sign(self, step: int, stage: str, sign: Mapping[str, Any]) -> None:
        """Append a sign of collapse to `sentinel.jsonl`."""
        if self._path is not None:
            line = {"step": step, "stage": stage, "sign": sign["name"], **sign}
            del line["name"]
            append_line(self._sentinel_path, json.dumps(line, ensure_ascii=False))

    def close(self) -> None:
        """Close the trackers."""
        for tracker in self.trackers:
            tracker.close()


SENTINEL_FILE = "sentinel.jsonl"
"""Name of the file with the sentinel's alerts."""


def parse_record(line: bytes) -> dict[str, Any] | None:
    """Parse a line of `metrics.jsonl`; return None if it is damaged."""
    try:
        record = parse_json(line, "")
    except ValueError:
        return None
    is_record = isinstance(record, dict) and type(record.get("step")) is int
    return record if is_record and isinstance(record.get("stage", "train"), str) else None


def write_images(workdir: Path, trajectories: Iterable[Trajectory]) -> None:
    """Write in-memory images to `images/<digest>`; skip those already written."""
    for trajectory in trajectories:
        for image_file in [f for image in trajectory.images for f in image.files]:
            file = workdir / "images" / image_file.digest
            if not image_file.path and not file.exists():
                with atomic_write(file) as temp_path:
                    temp_path.write_bytes(image_file.data)


def write_trajectories(
    path: Path,
    trajectories: Sequence[Trajectory],
    fields: Sequence[Mapping[str, Any]],
) -> None:
    """Write a JSONL file of trajectories with text, turns, token arrays and additional fields."""
    with open_atomic(path) as file:
        for trajectory, more in zip(trajectories, fields, strict=True):
            arrays = {name: x for name, x in more.items() if isinstance(x, np.ndarray)}
            record = build_trajectory_record(trajectory) | dict(more) | round_token_arrays(arrays)
            file.write(json.dumps(record, ensure_ascii=False) + "\n")

"""Writers of `metrics.jsonl`, its mirrors, and trajectory files."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxrl.logs.metrics import plain_numbers
from jaxrl.logs.records import token_record, trajectory_record
from jaxrl.training.interfaces import Record
from jaxrl.types import Trajectory
from jaxrl.utils.files import append_line, atomic_write, set_aside, written_whole
from jaxrl.utils.json_io import parse_json


class Mirror(Protocol):
    """A copy of the records in another system. `metrics.jsonl` stays authoritative."""

    def write(self, index: int, record: Record) -> None:
        """Write record number `index` of the run."""
        ...

    def close(self) -> None:
        """Flush and close."""
        ...


class MetricsLog:
    """Writer of `metrics.jsonl`, one object per record with `step` and `stage` first."""

    def __init__(
        self,
        path: Path | None,
        num_records: int,
        *,
        is_later: Callable[[Record], bool] = lambda _: False,
        log: Callable[[str], None] = print,
    ):
        """Open the log and truncate it to its first `num_records` records.

        Lost records count too, so later records keep their index.

        Args:
            path: Path of `metrics.jsonl`, which need not exist; None in processes that only count.
            num_records: Number of records of the run up to the checkpoint that it resumes from.
            is_later: Predicate: is a record newer than that checkpoint? If records were lost,
                newer ones may be among the first `num_records`.
            log: Callback for warnings about damaged or lost records.
        """
        self._path = path
        self.num_records = num_records
        self.mirrors: list[Mirror] = []
        self._carried: defaultdict[str, float] = defaultdict(float)
        self._last = time.perf_counter()
        if path is None:
            return
        self._marks = path.with_name(MARKS)

        def cut_back(file: Path, lines: Sequence[bytes]) -> list[bytes]:
            parsed = [(line, parse_record(line)) for line in lines]
            kept = [line for line, record in parsed if record is not None and not is_later(record)]
            with written_whole(file) as out:
                out.writelines(line.decode("utf-8") + "\n" for line in kept)
            return kept

        # A killed process may have left an incomplete last line.
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        lines = lines[:num_records]
        where = "the first ones are lost" if path.exists() else "it is missing"
        bad = [number for number, line in enumerate(lines, start=1) if parse_record(line) is None]
        # Keep a copy of a damaged file before removing lines.
        if bad:
            aside = set_aside(path, is_copied=True)
            for number in bad:
                log(f"warning: {path}:{number} is no record and is removed; {aside} keeps it")
        kept = cut_back(path, lines)
        if self._marks.exists():
            cut_back(self._marks, self._marks.read_bytes().splitlines())
        if len(kept) < num_records:
            if kept:
                last = json.loads(kept[-1])
                where = f"the last one is of step {last['step']} ({last.get('stage', 'train')})"
            log(
                f"warning: {path} holds {len(kept)} of the {num_records} records that the run has "
                f"written; {where}. Lost records are in no report"
            )

    def records(self) -> list[Record]:
        """Return the records in the file."""
        if self._path is None:
            return []
        return [json.loads(line) for line in self._path.read_text(encoding="utf-8").splitlines()]

    def carry(self, name: str, value: float) -> None:
        """Add a value to a metric of the next record."""
        self._carried[name] += value

    def write(self, step: int, stage: str, metrics: Mapping[str, float]) -> None:
        """Append a record, with null for numbers that are not finite.

        `timing_s/wall` is the time since the previous record, or since opening the log.
        """
        now = time.perf_counter()
        metrics = {**metrics, **self._carried, "timing_s/wall": now - self._last}
        self._last = now
        self._carried.clear()
        record = {"step": step, "stage": stage, **plain_numbers(metrics)}
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        for mirror in self.mirrors:
            mirror.write(self.num_records, record)
        self.num_records += 1

    def mark(self, step: int, stage: str, sign: Mapping[str, Any]) -> None:
        """Append a sign of trouble to `sentinel.jsonl`."""
        if self._path is not None:
            line = {"step": step, "stage": stage, "sign": sign["name"], **sign}
            del line["name"]
            append_line(self._marks, json.dumps(line, ensure_ascii=False))

    def close(self) -> None:
        """Close the mirrors."""
        for mirror in self.mirrors:
            mirror.close()


MARKS = "sentinel.jsonl"
"""Name of the file with the sentinel's signs."""


def parse_record(line: bytes) -> dict[str, Any] | None:
    """Parse a line of `metrics.jsonl`. Return None if it is damaged."""
    try:
        record = parse_json(line, "")
    except ValueError:
        return None
    is_record = isinstance(record, dict) and type(record.get("step")) is int
    return record if is_record and isinstance(record.get("stage", "train"), str) else None


def write_samples(
    workdir: Path,
    step: int,
    trajectories: Sequence[Trajectory],
    fields: Sequence[Mapping[str, Any]],
) -> None:
    """Write the trajectories of a step with further fields, and their images."""
    file = workdir / "trajectories" / f"step_{step:06d}.jsonl"
    write_trajectories(file, trajectories, fields)
    write_images(workdir, trajectories)


def write_images(workdir: Path, trajectories: Iterable[Trajectory]) -> None:
    """Write each image without a file to `images/<digest>`, once."""
    for trajectory in trajectories:
        for picture in trajectory.pictures:
            file = workdir / "images" / picture.digest
            if not picture.path and not file.exists():
                with atomic_write(file) as unfinished:
                    unfinished.write_bytes(picture.data)


def write_trajectories(
    path: Path,
    trajectories: Sequence[Trajectory],
    fields: Sequence[Mapping[str, Any]],
) -> None:
    """Write a JSONL file of trajectories with text, turns, token arrays and further fields."""
    with written_whole(path) as file:
        for trajectory, more in zip(trajectories, fields, strict=True):
            arrays = {name: x for name, x in more.items() if isinstance(x, np.ndarray)}
            record = trajectory_record(trajectory) | dict(more) | token_record(arrays)
            file.write(json.dumps(record, ensure_ascii=False) + "\n")

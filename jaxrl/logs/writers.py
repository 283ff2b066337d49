"""Files in which a run records its measurements: `metrics.jsonl`, its mirrors, and trajectories."""

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
from jaxrl.utils.files import append_line, set_aside, taking_place, written_whole
from jaxrl.utils.json_io import parse_json


class Mirror(Protocol):
    """Another place where records are shown; `metrics.jsonl` stays the truth."""

    def write(self, index: int, record: Record) -> None:
        """Shows record number `index` of the run."""
        ...

    def close(self) -> None:
        """Closes it, with all that was written safe."""
        ...


class MetricsLog:
    """`metrics.jsonl`: one object a record, `step` and `stage` first."""

    def __init__(
        self,
        path: Path | None,
        num_records: int,
        *,
        is_later: Callable[[Record], bool] = lambda _: False,
        log: Callable[[str], None] = print,
    ):
        """Opens the log, cut back to its first `num_records` records.

        Of several processes one writes; in the others, without a path, the log only counts. Lost
        records count too: what follows keeps its number.

        Args:
            path: `metrics.jsonl`, which need not exist; None: nothing is written.
            num_records: that the run has written up to the checkpoint it goes on from.
            is_later: whether a record was written after that checkpoint. In a file that has lost
                some, there may be such among the first ones.
            log: tells what is damaged or lost.
        """
        self._path = path
        self.num_records = num_records
        self.mirrors: list[Mirror] = []
        self._carried: defaultdict[str, float] = defaultdict(float)
        self._last = time.perf_counter()
        if path is None:
            return
        # A killed process may have left a last line that is not whole.
        whole = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        parsed = [(line, parse_record(line)) for line in whole[:num_records]]
        bad = [number for number, (_, record) in enumerate(parsed, start=1) if record is None]
        if bad:
            aside = set_aside(path, is_copied=True)
            for number in bad:
                log(f"warning: {path}:{number} is no record and is left out; {aside} keeps it")
        kept = [line for line, record in parsed if record is not None and not is_later(record)]
        # The signs of later steps go with their records, and damaged ones without a word.
        self._marks = path.with_name(MARKS)
        marks = self._marks.read_bytes().splitlines() if self._marks.exists() else []
        signs = [(line, parse_record(line)) for line in marks]
        sound = [line for line, sign in signs if sign is not None and not is_later(sign)]
        if len(sound) < len(marks):
            with written_whole(self._marks) as file:
                file.writelines(line.decode("utf-8") + "\n" for line in sound)
        if len(kept) < num_records:
            where = "it is missing" if not path.exists() else "the first ones are lost"
            if kept:
                last = json.loads(kept[-1])
                where = f"the last one is of step {last['step']} ({last.get('stage', 'train')})"
            log(
                f"warning: {path} holds {len(kept)} of the {num_records} records that the run has "
                f"written; {where}. What is lost is in no report"
            )
        with written_whole(path) as file:
            file.writelines(line.decode("utf-8") + "\n" for line in kept)

    def records(self) -> list[Record]:
        """Reads the records in the log."""
        if self._path is None:
            return []
        return [json.loads(line) for line in self._path.read_text(encoding="utf-8").splitlines()]

    def carry(self, name: str, value: float) -> None:
        """Adds to a metric of the next record, for what happens between two of them."""
        self._carried[name] += value

    def write(self, step: int, stage: str, metrics: Mapping[str, float]) -> None:
        """Appends a record; numbers that are not finite become null, as JSON has no others.

        `timing_s/wall` is the time since the record before it, or since the log was opened.
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
        """Appends a sign of a step that is not sound to `sentinel.jsonl`, with its texts."""
        if self._path is not None:
            line = {"step": step, "stage": stage, "sign": sign["name"], **sign}
            del line["name"]
            append_line(self._marks, json.dumps(line, ensure_ascii=False))

    def close(self) -> None:
        """Closes the mirrors."""
        for mirror in self.mirrors:
            mirror.close()


MARKS = "sentinel.jsonl"
"""Beside `metrics.jsonl`: what was seen of steps that were not sound."""


def parse_record(line: bytes) -> dict[str, Any] | None:
    """Parses a line of `metrics.jsonl`; None for a damaged one."""
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
    """Writes trajectories of a step, with further fields of each, and their images."""
    file = workdir / "trajectories" / f"step_{step:06d}.jsonl"
    write_trajectories(file, trajectories, fields)
    write_images(workdir, trajectories)


def write_images(workdir: Path, trajectories: Iterable[Trajectory]) -> None:
    """Writes the images of trajectories that are in no file of their own, each once, by digest."""
    for trajectory in trajectories:
        for picture in trajectory.pictures:
            file = workdir / "images" / picture.digest
            if not picture.path and not file.exists():
                with taking_place(file) as unfinished:
                    unfinished.write_bytes(picture.data)


def write_trajectories(
    path: Path,
    trajectories: Sequence[Trajectory],
    fields: Sequence[Mapping[str, Any]],
) -> None:
    """Writes trajectories as JSONL, each with its text, its turns and its token arrays.

    Args:
        path: the JSONL file; it is replaced.
        trajectories: to write, with their advantages.
        fields: further JSON values of each; arrays, which are numbers by token, are rounded.
    """
    with written_whole(path) as file:
        for trajectory, more in zip(trajectories, fields, strict=True):
            arrays = {name: x for name, x in more.items() if isinstance(x, np.ndarray)}
            record = trajectory_record(trajectory) | dict(more) | token_record(arrays)
            file.write(json.dumps(record, ensure_ascii=False) + "\n")

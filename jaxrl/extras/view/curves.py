"""Metrics of a run as columns, followed as `metrics.jsonl` grows, and what a sentinel has seen."""

from __future__ import annotations

import bisect
import threading
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxrl.extras.view.values import damaged_text
from jaxrl.utils.json_io import number_of, parse_json

CHUNK = 2**20
"""Bytes that are read at a time."""

MAX_LINE = 2**20  # bytes of a record; the longest have some kilobytes

DEFAULTS = (
    *("critic/rewards/mean", "reward/exact_match/mean", "val-core/all/exact_match/mean@1"),
    *("val-core/all/exact_match/greedy", "response_length/mean", "num_searches/mean"),
    *("actor/entropy", "actor/grad_norm", "actor/ppo_kl", "actor/kl_loss", "actor/pg_clipfrac"),
    *("rollout_corr/k3_kl", "filter/mixed_share", "outcome/answered", "sft/loss"),
    *("perf/throughput", "timing_s/step"),
)
"""Metrics that are shown of a run that has them, until others are chosen."""


@dataclass
class LinesOf:
    """Whole lines of a file that grows, each read once.

    Attributes:
        path: JSONL.
        generation: how often the file was begun anew: replaced, or cut.
        num_damaged: lines that were no record.
    """

    path: Path
    generation: int = 0
    num_damaged: int = 0
    _inode: int = 0
    _end: int = 0  # of what has been read, bytes
    _rest: bytes = b""  # a line that is not whole yet

    def begins_anew(self) -> bool:
        """Returns True where the file is another one than before, which is then read whole."""
        try:
            about = self.path.stat()
            inode, size = about.st_ino, about.st_size
        except OSError:
            inode = size = 0
        is_another = self._end > 0 and (size < self._end or inode != self._inode)
        self._inode = inode
        if is_another:
            self.generation += 1
            self.num_damaged, self._end, self._rest = 0, 0, b""
        return is_another

    def new(self) -> Iterable[bytes]:
        """Lines since the last call; a last one without an end waits for it."""
        try:
            if not self.path.is_file():  # a pipe would never end
                return
            with self.path.open("rb") as file:
                file.seek(self._end)
                while chunk := file.read(CHUNK):
                    self._end += len(chunk)
                    first, *lines = chunk.split(b"\n")
                    # What is longer than any record is damage: its beginning is enough to say so.
                    self._rest = (self._rest + first)[:MAX_LINE]
                    if lines:
                        yield self._rest
                        yield from lines[:-1]
                        self._rest = lines[-1]
        except OSError:
            return


@dataclass
class Curves:
    """Columns of a run's metrics; one thread refreshes them, others read.

    Attributes:
        workdir: of the run.
        steps: of each record.
        stages: likewise.
    """

    workdir: Path
    steps: array[int] = field(default_factory=lambda: array("q"))
    stages: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Begins with nothing read."""
        self._lock = threading.Lock()
        self._lines = LinesOf(self.workdir / "metrics.jsonl")
        self._columns: dict[str, tuple[array[int], array[float]]] = {}
        self._sentinel_lines = LinesOf(self.workdir / "sentinel.jsonl")
        self._signs: list[dict[str, Any]] = []

    @property
    def generation(self) -> int:
        """The number of times that the records were begun anew."""
        return self._lines.generation

    @property
    def problems(self) -> list[str]:
        """Lines that could not be read, by file."""
        return [
            damaged_text(lines.num_damaged, lines.path.name)
            for lines in (self._lines, self._sentinel_lines)
            if lines.num_damaged
        ]

    def refresh(self) -> None:
        """Reads what was written since the last call."""
        with self._lock:
            if self._lines.begins_anew():
                self.steps, self.stages, self._columns = array("q"), [], {}
            if self._sentinel_lines.begins_anew():
                self._signs = []
        # Parsed without the lock: a long file takes seconds, and the page is shown what there is.
        for line in self._lines.new():
            if (record := _record(line)) is None:
                self._lines.num_damaged += bool(line.strip())
                continue
            with self._lock:
                number = len(self.steps)
                self.steps.append(record["step"])
                self.stages.append(record.get("stage", "train"))
                for name, value in record.items():
                    amount = number_of(value)
                    if name in ("step", "stage") or amount is None:
                        continue
                    places, values = self._columns.setdefault(name, (array("q"), array("d")))
                    places.append(number)
                    values.append(amount)
        for line in self._sentinel_lines.new():
            sign = _record(line)
            if sign is None or not isinstance(sign.get("sign"), str):
                self._sentinel_lines.num_damaged += bool(line.strip())
            else:
                with self._lock:
                    self._signs.append(sign)

    def names(self) -> list[str]:
        """Metrics that the run has, in alphabetical order."""
        with self._lock:
            return sorted(self._columns)

    def since(self, names: Sequence[str], generation: int, num_known: int) -> dict[str, Any]:
        """Points of metrics behind those that somebody has already.

        Args:
            names: of metrics.
            generation: of what he has; where it is not this one, he gets all.
            num_known: number of records that he has.

        Returns:
            The `generation`, the number of the first record that was looked at (`from`) and of all
            (`records`), and in `series` by name `steps` and `values`, in the metric's unit. Values
            that are no finite number are left out.
        """
        with self._lock:
            first = num_known if generation == self.generation else 0
            series = {}
            for name in names:
                places, values = self._columns.get(name, (array("q"), array("d")))
                begin = bisect.bisect_left(places, first)
                steps = [self.steps[place] for place in places[begin:]]
                series[name] = {"steps": steps, "values": values[begin:].tolist()}
            return {
                "generation": self.generation,
                "from": first,
                "records": len(self.steps),
                "series": series,
            }

    def shown_marks(self) -> list[dict[str, Any]]:
        """Signs as `sentinel.jsonl` has them: step, stage, name, text and action."""
        with self._lock:
            return [
                {
                    "step": one["step"],
                    "stage": one.get("stage", "train"),
                    "name": one["sign"],
                    "text": str(one.get("text", "")),
                    "action": str(one.get("action", "")),
                }
                for one in self._signs
            ]


def _record(line: bytes) -> dict[str, Any] | None:
    """A line with a step and a stage; None for a damaged one."""
    try:
        record = parse_json(line, "")
    except ValueError:
        return None
    is_record = isinstance(record, dict) and type(record.get("step")) is int
    is_record = (
        is_record and abs(record["step"]) < 2**53 and isinstance(record.get("stage", ""), str)
    )
    return record if is_record else None

"""Readers for a workdir whose files may be missing, truncated, damaged or still growing."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl.config.schema import read_flat_config
from jaxrl.extras.view.responses import classify_failure, is_correct
from jaxrl.extras.view.trajectories import (
    MAX_ANSWER,
    MAX_QUESTION,
    Identity,
    TrajectoryIndex,
    get_file_identity,
)
from jaxrl.runtime.resume import HISTORY_FILE, read_history
from jaxrl.training.settings import STAGES
from jaxrl.utils.json_io import parse_json, read_object, to_finite_float

FILES = ("metrics.jsonl", "config.json", "eval", "trajectories")
"""Files and folders. Every workdir contains at least one of them."""


@dataclass
class JsonLines:
    """Incremental reader of a growing JSONL file. Each line is parsed once.

    Attributes:
        path: Path of the file, which may not exist.
        field_types: Type of each required field.
        records: Valid records in file order.
        num_damaged: Number of invalid lines.
    """

    path: Path
    field_types: dict[str, type]
    records: list[dict[str, Any]] = field(default_factory=list)
    num_damaged: int = 0
    _inode: int = 0
    _offset: int = 0
    _partial_line: bytes = b""

    def refresh(self) -> bool:
        """Read appended lines, or the entire file if it was replaced or truncated.

        An incomplete last line is buffered until its end is written.

        Returns:
            True if anything changed.
        """
        identity = get_file_identity(self.path)
        inode, size, _ = identity or (0, 0, 0)
        was_reset = self._offset > 0 and (size < self._offset or inode != self._inode)
        if was_reset:
            self.records, self.num_damaged, self._offset, self._partial_line = [], 0, 0, b""
        self._inode = inode
        if identity is None or size == self._offset:
            return was_reset
        with self.path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        self._offset += len(data)
        *lines, self._partial_line = (self._partial_line + data).split(b"\n")
        for line in lines:
            record = self._parse_line(line)
            if record is not None:
                self.records.append(record)
            elif line.strip():
                self.num_damaged += 1
        return True

    def _parse_line(self, line: bytes) -> dict[str, Any] | None:
        try:
            record = parse_json(line, "")
        except ValueError:
            return None
        if not isinstance(record, dict):
            return None
        # All records have the same keys, so share the strings.
        record = {"stage": "train"} | {sys.intern(name): value for name, value in record.items()}
        is_valid = all(type(record.get(name)) is kind for name, kind in self.field_types.items())
        return record if is_valid and abs(record["step"]) < 2**53 else None


@dataclass(frozen=True, kw_only=True, eq=False)
class Evaluation:
    """Contents of a file in `eval/`, without the responses.

    Attributes:
        path: Path of the JSON file.
        stage: Stage of the evaluation.
        step: Global step of the evaluation.
        weights_step: Global step of the evaluated weights.
        summary: Means by suite, dataset and metric.
        intervals: 95% intervals by suite, dataset and metric.
        weights: Reward weights by suite and reward part.
        answers: One row per sample, by suite, in file order.
    """

    path: Path
    stage: str
    step: int
    weights_step: int
    summary: dict[str, Any]
    intervals: dict[str, Any]
    weights: dict[str, Any]
    answers: dict[str, list[dict[str, Any]]]


class _CachedFile(NamedTuple):
    """Parsed contents of a file, or the reason the file is unreadable."""

    identity: Identity | None
    value: Any
    problem: str


class RunReader:
    """Reader of a workdir, with the contents at the last `refresh`.

    Attributes:
        workdir: Folder of the run.
        name: Unique display name.
        version: Number of refreshes with changes.
        config: Flat config; {} without `config.json`.
        evaluations: Evaluations in chronological order.
        starts: Objects in `environment.json`, one per launch of the run.
        changes: Objects in `config_history.jsonl` with changed settings.
        index: Index of `trajectories/`.
    """

    def __init__(self, workdir: Path, name: str):
        self.workdir, self.name, self.version = workdir, name, 0
        step = {"step": int, "stage": str}
        self.metrics = JsonLines(workdir / "metrics.jsonl", step)
        self.signs = JsonLines(workdir / "sentinel.jsonl", step | {"sign": str})
        self.index = TrajectoryIndex(workdir / "trajectories")
        self.config: dict[str, Any] = {}
        self.starts: list[dict[str, Any]] = []
        self.changes: list[dict[str, Any]] = []
        self.evaluations: list[Evaluation] = []
        self._files: dict[Path, _CachedFile] = {}

    @property
    def records(self) -> list[dict[str, Any]]:
        """Records of `metrics.jsonl`."""
        return self.metrics.records

    @property
    def problems(self) -> list[str]:
        """Descriptions of unreadable files and lines."""
        problems = [file.problem for file in self._files.values() if file.problem]
        for lines in (self.metrics, self.signs):
            if lines.num_damaged:
                problems.append(f"{lines.num_damaged} lines of {lines.path.name} are damaged")
        return problems + self.index.problems

    def refresh(self, seconds: float = float("inf")) -> None:
        """Read changed files.

        Args:
            seconds: Time limit for indexing trajectories; the next refresh continues.
        """
        changed = [self.metrics.refresh(), self.signs.refresh()]
        readers: dict[Path, Callable[[Path], Any]] = {
            self.workdir / "config.json": read_flat_config,
            self.workdir / "environment.json": _read_launches,
        }
        readers |= dict.fromkeys(self.workdir.glob(HISTORY_FILE), _read_changes)
        paths = [path for path in self.workdir.glob("eval/*") if _EVALUATION.fullmatch(path.name)]
        readers |= dict.fromkeys(paths, _read_evaluation)
        changed.append(bool(self._files.keys() - readers.keys()))
        self._files = {path: file for path, file in self._files.items() if path in readers}
        changed += [self._refresh_file(path, read) for path, read in readers.items()]
        values = {path.name: file.value for path, file in self._files.items()}
        self.config = values.get("config.json") or {}
        self.starts = values.get("environment.json") or []
        self.changes = values.get(HISTORY_FILE) or []
        evaluations = (value for value in values.values() if isinstance(value, Evaluation))
        self.evaluations = sorted(evaluations, key=lambda e: (e.step, STAGES.index(e.stage)))
        changed.append(self.index.refresh(time.monotonic() + seconds))
        self.version += any(changed)

    def _refresh_file(self, path: Path, read: Callable[[Path], Any]) -> bool:
        """Return True if a file has changed, after reading it again."""
        identity = get_file_identity(path)
        if path in self._files and self._files[path].identity == identity:
            return False
        value, problem = None, f"{path.name} is missing"
        if identity is not None:  # a regular file: reading a pipe would never end
            try:
                value, problem = read(path), ""
            except (OSError, ValueError, AttributeError, TypeError) as error:
                problem = f"{path.name} cannot be read ({error})"
        self._files[path] = _CachedFile(identity, value, problem)
        return True

    def read_answer(self, evaluation: Evaluation, suite: str, row: int) -> dict[str, Any]:
        """Read the complete record of an answer from the evaluation's file.

        Raises:
            LookupError: The file has changed and no longer contains this row.
            OSError, ValueError: The file is unreadable.
        """
        content = _read_evaluation_json(evaluation.path, get_file_identity(evaluation.path))
        answer: dict[str, Any] = content["questions"][suite][row]
        return answer


_EVALUATION = re.compile(rf"({'|'.join(STAGES)})_(\d{{1,9}})\.json")


def open_runs(workdirs: Iterable[Path]) -> list[RunReader]:
    """Open a reader with a unique name for each distinct workdir.

    Raises:
        FileNotFoundError: A folder is not a run's workdir.
    """
    folders: dict[Path, Path] = {}
    for workdir in workdirs:
        if not any((workdir / name).exists() for name in FILES):
            raise FileNotFoundError(
                f"{workdir} is not a run: it has none of {', '.join(FILES)}. Pass the folder that "
                "the run got as --workdir."
            )
        folders.setdefault(workdir.resolve(), workdir)
    names = [path.name for path in folders]
    if len(set(names)) < len(names):
        names = list(map(str, folders))
    return [RunReader(folder, name) for folder, name in zip(folders.values(), names, strict=True)]


def _read_launches(path: Path) -> list[dict[str, Any]]:
    starts = parse_json(path.read_bytes(), path.name)
    return [start for start in starts if isinstance(start, dict)]


def _read_changes(path: Path) -> list[dict[str, Any]]:
    lines, _ = read_history(path.parent)
    return [line for line in lines if line["changes"]]


@lru_cache(maxsize=4)
def _read_evaluation_json(path: Path, identity: Identity | None) -> dict[str, Any]:
    """Read an evaluation file, cached by `identity` so that changed files are read again."""
    return read_object(path)


def _read_evaluation(path: Path) -> Evaluation:
    content = read_object(path)
    match = _EVALUATION.fullmatch(path.name)
    assert match
    step, weights_step = int(match[2]), content.get("weights_step")
    return Evaluation(
        path=path,
        stage=match[1],
        step=step,
        weights_step=weights_step if isinstance(weights_step, int) else step,
        summary=content.get("summary", {}),
        intervals=content.get("intervals", {}),
        weights=content.get("reward_weights", {}),
        answers={
            suite: list(map(_make_answer_row, records))
            for suite, records in content.get("questions", {}).items()
        },
    )


def _make_answer_row(record: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a record for the page's list of answers."""
    return {
        "task_id": str(record.get("task_id")),
        "sample": to_finite_float(record.get("sample_index")) or 0,
        "question": str(record.get("question") or record.get("task_id"))[:MAX_QUESTION],
        "accepted": [str(answer)[:MAX_ANSWER] for answer in record.get("answers", [])[:4]],
        "answer": str(record.get("final_answer") or "")[:MAX_ANSWER],
        "is_right": is_correct(record),
        "failure": classify_failure(record),
        "error": str(record.get("error") or ""),
    }

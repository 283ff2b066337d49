"""Readers for a workdir whose files may be missing, truncated, damaged or still growing."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
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
from jaxrl.logs.writers import SENTINEL_FILE, parse_record
from jaxrl.runtime.resume import HISTORY_FILE, read_history
from jaxrl.training.settings import STAGES
from jaxrl.utils.json_io import parse_json, read_object, to_finite_float

METRICS_FILE = "metrics.jsonl"

FILES = (METRICS_FILE, "config.json", "eval", "trajectories")
"""Files and folders. Every workdir contains at least one of them."""


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
        records: Valid records of `metrics.jsonl`, in file order.
        signs: Valid records of `sentinel.jsonl`, in file order.
        config: Flat config; {} without `config.json`.
        evaluations: Evaluations in chronological order.
        starts: Objects in `environment.json`, one per launch of the run.
        changes: Objects in `config_history.jsonl` with changed settings.
        index: Index of `trajectories/`.
    """

    def __init__(self, workdir: Path, name: str):
        self.workdir, self.name, self.version = workdir, name, 0
        self.index = TrajectoryIndex(workdir / "trajectories")
        self.records: list[dict[str, Any]] = []
        self.signs: list[dict[str, Any]] = []
        self.config: dict[str, Any] = {}
        self.starts: list[dict[str, Any]] = []
        self.changes: list[dict[str, Any]] = []
        self.evaluations: list[Evaluation] = []
        self._files: dict[Path, _CachedFile] = {}
        self._num_damaged: dict[str, int] = {}

    @property
    def problems(self) -> list[str]:
        """Descriptions of unreadable files and lines."""
        problems = [file.problem for file in self._files.values() if file.problem]
        problems += [
            f"{count} lines of {name} are damaged"
            for name, count in self._num_damaged.items()
            if count
        ]
        return problems + self.index.problems

    def refresh(self, seconds: float = float("inf")) -> None:
        """Read changed files.

        Args:
            seconds: Time limit for indexing trajectories; the next refresh continues.
        """
        readers: dict[Path, Callable[[Path], Any]] = {
            self.workdir / "config.json": read_flat_config,
            self.workdir / "environment.json": _read_launches,
        }
        readers |= dict.fromkeys(self.workdir.glob(HISTORY_FILE), _read_changes)
        logs = (self.workdir / METRICS_FILE, self.workdir / SENTINEL_FILE)
        readers |= dict.fromkeys((path for path in logs if path.exists()), _read_records)
        paths = [path for path in self.workdir.glob("eval/*") if _EVALUATION.fullmatch(path.name)]
        readers |= dict.fromkeys(paths, _read_evaluation)
        changed = [bool(self._files.keys() - readers.keys())]
        self._files = {path: file for path, file in self._files.items() if path in readers}
        changed += [self._refresh_file(path, read) for path, read in readers.items()]
        values = {path.name: file.value for path, file in self._files.items()}
        no_records: tuple[list[dict[str, Any]], int] = ([], 0)
        self.records, num_damaged = values.get(METRICS_FILE) or no_records
        self.signs, num_damaged_signs = values.get(SENTINEL_FILE) or no_records
        self._num_damaged = {METRICS_FILE: num_damaged, SENTINEL_FILE: num_damaged_signs}
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


def _read_records(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Read the valid records of a growing JSONL file, and count the damaged lines.

    An incomplete last line is ignored until its end is written.
    """
    *lines, _ = path.read_bytes().split(b"\n")
    records = [parse_record(line) for line in lines if line.strip()]
    valid = [{"stage": "train"} | record for record in records if record is not None]
    return valid, len(records) - len(valid)


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

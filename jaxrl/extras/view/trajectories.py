"""Index of a run's trajectories, with a short row and a byte offset for each.

A run's files can take gigabytes, so full records stay on disk. Each file is read once, newest
first, and again only if it changes.
"""

from __future__ import annotations

import re
import stat
import time
from pathlib import Path
from typing import Any

from jaxrl.utils.json_io import parse_json, to_finite_float

Identity = tuple[int, int, int]
"""Inode, size and modification time of a file."""

COLUMNS = (
    *("step", "line", "task", "sample", "outcome", "correct", "reward", "advantage"),
    *("sampled", "tokens", "turns", "answer"),
)
"""Fields of a row. `task` is an index into `TrajectoryIndex.tasks`."""

MAX_ANSWER = 200
"""Maximum length of a final answer in a list, in characters."""

MAX_QUESTION = 400
"""Maximum length of a question in a list, in characters."""

_FILE = re.compile(r"step_(\d{6,9})\.jsonl")
_TOKENS, _MASK = b', "token_ids": [', b', "loss_mask": ['


class TrajectoryIndex:
    """Index of the trajectories in `folder`.

    Attributes:
        folder: Folder `trajectories/` of a run.
        generation: Number of times that indexing has restarted because a file changed.
        rows: Values of `COLUMNS` for each trajectory, in indexing order.
        tasks: Id and question of each task.
        num_files: Number of files in the folder.
        num_indexed: Number of indexed files.
        num_damaged: Number of invalid lines.
        error: First environment error of the run; "" if there is none.
    """

    def __init__(self, folder: Path):
        self.folder, self.generation, self.num_files = folder, 0, 0
        self._reset()

    def _reset(self) -> None:
        self.rows: list[list[Any]] = []
        self.tasks: list[tuple[str, str]] = []
        self.num_damaged = 0
        self.error, self._error_step = "", 10**9
        self._tasks: dict[str, int] = {}
        self._offsets: dict[tuple[int, int], tuple[int, int]] = {}  # by step and line
        self._indexed: dict[int, Identity] = {}  # by step
        self._unreadable: list[str] = []

    @property
    def num_indexed(self) -> int:
        """Number of indexed files."""
        return len(self._indexed)

    @property
    def problems(self) -> list[str]:
        """Descriptions of unreadable files and lines."""
        problems = list(self._unreadable)
        if self.num_damaged:
            problems.append(f"{self.num_damaged} lines of trajectories/ are damaged")
        return problems

    def refresh(self, deadline: float) -> bool:
        """Index new and changed files, newest first, until the monotonic time `deadline`.

        Returns:
            True if anything changed.
        """
        files = self._list_files()
        is_stale = any(files.get(step) != identity for step, identity in self._indexed.items())
        if is_stale:
            self.generation += 1
            self._reset()
        self.num_files = len(files)
        new = sorted(files.keys() - self._indexed.keys(), reverse=True)
        for step in new:
            self._indexed[step] = files[step]
            try:
                self._index_file(step)
            except OSError as error:
                self._unreadable.append(
                    f"{self._get_file_path(step).name} cannot be read ({error})"
                )
            if time.monotonic() > deadline:
                break
        return is_stale or bool(new)

    def _get_file_path(self, step: int) -> Path:
        return self.folder / f"step_{step:06d}.jsonl"

    def _list_files(self) -> dict[int, Identity]:
        """Return the identity of each regular file by step."""
        files = {}
        for path in self.folder.glob("step_*.jsonl"):
            match = _FILE.fullmatch(path.name)
            if match and path.name == self._get_file_path(int(match[1])).name:
                identity = get_file_identity(path)
                if identity is not None:
                    files[int(match[1])] = identity
        return files

    def _index_file(self, step: int) -> None:
        offset = 0
        with self._get_file_path(step).open("rb") as file:
            for number, line in enumerate(file):
                row = self._make_row(line, step, number)
                if row is not None:
                    self.rows.append(row)
                    self._offsets[step, number] = offset, len(line)
                elif line.strip():
                    self.num_damaged += 1
                offset += len(line)

    def _make_row(self, line: bytes, step: int, number: int) -> list[Any] | None:
        record, num_tokens, num_sampled = parse_leading_fields(line)
        task_id, outcome = record.get("task_id"), record.get("outcome")
        if not isinstance(task_id, str) or not isinstance(outcome, str):
            return None
        if task_id not in self._tasks:
            texts = (record.get("query"), record.get("question"))
            question = next((text for text in texts if isinstance(text, str) and text), task_id)
            self._tasks[task_id] = len(self.tasks)
            self.tasks.append((task_id, question[:MAX_QUESTION]))
        turns, answer = record.get("turns"), record.get("final_answer")
        turns = turns if isinstance(turns, list) else []
        is_scored = outcome != "environment_error"
        if not is_scored and step < self._error_step:
            errors = [
                turn["error"] for turn in turns if isinstance(turn, dict) and turn.get("error")
            ]
            if errors:
                self.error, self._error_step = str(errors[0]), step
        return [
            step,
            number,
            self._tasks[task_id],
            to_finite_float(record.get("sample_index")),
            outcome,
            int(record.get("is_correct") is True) if is_scored else None,
            to_finite_float(record.get("reward")),
            to_finite_float(record.get("advantage")),
            num_sampled,
            num_tokens,
            len(turns),
            answer[:MAX_ANSWER] if isinstance(answer, str) else "",
        ]

    def read(self, step: int, line: int) -> dict[str, Any]:
        """Read a trajectory's complete record from disk.

        Raises:
            LookupError: The trajectory does not exist.
            ValueError: The line is damaged.
            OSError: The file is unreadable.
        """
        if (step, line) not in self._offsets:
            raise LookupError(f"There is no trajectory at step {step}, line {line + 1}.")
        offset, length = self._offsets[step, line]
        with self._get_file_path(step).open("rb") as file:
            file.seek(offset)
            record = parse_json(file.read(length), f"{self._get_file_path(step).name}:{line + 1}")
        if not isinstance(record, dict):
            raise ValueError(f"{self._get_file_path(step).name} has changed; reload the page.")
        return record


def get_file_identity(path: Path) -> Identity | None:
    """Return a value that changes with the file, or None if it is not a regular file."""
    try:
        status = path.stat()
    except OSError:
        return None
    if not stat.S_ISREG(status.st_mode):
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def parse_leading_fields(line: bytes) -> tuple[dict[str, Any], int | None, int | None]:
    """Parse a line up to the lists of numbers at its end.

    The elements of the lists are counted, not parsed. Damage in the lists is therefore noticed only
    when the trajectory is opened. The key of the first list cannot occur inside a string, where
    quotes are escaped.

    Returns:
        The fields before the lists ({} for a damaged line), the number of tokens and the number of
        sampled tokens (None for another layout).
    """
    line = line.strip()
    head, key, arrays = line.partition(_TOKENS)
    num_tokens = num_sampled = None
    if key and line.endswith(b"}"):
        ids = arrays.partition(b"]")[0]
        num_tokens = ids.count(b",") + 1 if ids.strip() else 0
        num_sampled = arrays.partition(_MASK)[2].partition(b"]")[0].count(b"1")
        line = head + b"}"
    try:
        record = parse_json(line, "")
    except ValueError:
        record = None
    return (record if isinstance(record, dict) else {}), num_tokens, num_sampled

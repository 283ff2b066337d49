"""Trajectories of a run by columns: what is filtered by, and where each lies in its file.

The files of a run are gigabytes, so no trajectory is held: a row has its numbers, the codes of its
texts and the place of its line. Each file is streamed once. What was found is kept in the user's
cache, not in the run's folder: that may be somebody else's, or not writable, and looking at a run
changes nothing in it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from jaxrl.extras.view.values import count_of
from jaxrl.utils.files import taking_place, users_cache
from jaxrl.utils.json_io import number_of, parse_json

COLUMNS: Mapping[str, type] = {
    "offset": np.int64,  # of the line in its file, bytes
    "length": np.int64,  # of the line, bytes
    "line": np.int32,  # its number, from 0
    "step": np.int32,  # of the file
    "reward": np.float64,  # NaN without one
    "advantage": np.float64,  # likewise
    "correct": np.int8,  # 1, 0, or -1 for one that was not scored
    "outcome": np.int32,  # codes of texts
    "task": np.int32,
    "question": np.int32,
    "answer": np.int32,
    "sample": np.int32,
    "attempt": np.int32,
    "turns": np.int32,
    "tokens": np.int32,
    "sampled": np.int32,
}
"""Columns of the index, each with a value a trajectory."""

TEXTS = ("outcome", "task", "question", "answer")
"""Columns that hold codes: places in a list of different texts."""

MAX_LINE = 2**26
"""Bytes of the longest line that is read; a longer one counts as damaged."""

MAX_ANSWER = 200
"""Characters of a final answer that the index keeps."""

SAVE_S = 30.0
"""Seconds between two savings while many files are indexed."""

_VERSION = 1
_FILE = re.compile(r"step_(\d{1,9})\.jsonl")
_TOKENS = b', "token_ids": ['
_MASK = b', "loss_mask": ['


@dataclass(frozen=True, kw_only=True)
class Block:
    """Rows of one file."""

    identity: tuple[int, int, int]  # inode, size in bytes, time of the last change in ns
    num_damaged: int
    columns: Mapping[str, np.ndarray]  # each [rows], as COLUMNS has them


CORRECT = {"right": 1, "wrong": 0, "unscored": -1}
"""Values of the column `correct`, by name."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of all files that are indexed, by step and line.

    Attributes:
        columns: each [rows], as `COLUMNS` has them.
        texts: by column of `TEXTS`, the text of each code.
        folded: the questions, without upper and lower case.
        num_damaged: lines that are no trajectory.
    """

    columns: Mapping[str, np.ndarray]
    texts: Mapping[str, Sequence[str]]
    folded: Sequence[str]
    num_damaged: int

    def __len__(self) -> int:
        return len(self.columns["step"])

    def text(self, name: str, row: int) -> str:
        """The text of a column of `TEXTS` in a row."""
        return self.texts[name][self.columns[name][row]]


@dataclass(frozen=True, kw_only=True)
class Filter:
    """Conditions on trajectories; the defaults leave all.

    Attributes:
        outcomes: any of these; () for all.
        correct: `right`, `wrong` or `unscored`; "" for all.
        reward_min: bound of the reward, itself included; one without a reward is then left out.
        reward_max: likewise.
        step_min: bound of the step, itself included.
        step_max: likewise.
        text: part of the question, in upper or lower case.
        task: id of the task; None for all.
    """

    outcomes: tuple[str, ...] = ()
    correct: str = ""
    reward_min: float | None = None
    reward_max: float | None = None
    step_min: int | None = None
    step_max: int | None = None
    text: str = ""
    task: str | None = None

    def rows(self, table: Table) -> np.ndarray:
        """int64 [rows kept], in the order of the table."""
        columns = table.columns
        kept = np.ones(len(table), bool)
        if self.outcomes:
            known = np.array([text in self.outcomes for text in table.texts["outcome"]], bool)
            kept &= known[columns["outcome"]]
        if self.correct:
            kept &= columns["correct"] == CORRECT[self.correct]
        # A comparison with NaN is false.
        if self.reward_min is not None:
            kept &= columns["reward"] >= self.reward_min
        if self.reward_max is not None:
            kept &= columns["reward"] <= self.reward_max
        if self.step_min is not None:
            kept &= columns["step"] >= self.step_min
        if self.step_max is not None:
            kept &= columns["step"] <= self.step_max
        if self.text:
            wanted = self.text.casefold()
            kept &= np.array([wanted in text for text in table.folded], bool)[columns["question"]]
        if self.task is not None:
            kept &= np.array([text == self.task for text in table.texts["task"]], bool)[
                columns["task"]
            ]
        return np.flatnonzero(kept)


def index_file(path: Path, step: int, code: Callable[[str, str], int]) -> Block:
    """Streams a file of trajectories.

    Args:
        path: JSONL, as `write_trajectories` makes it.
        step: of the file.
        code: of a text in a column.

    Raises:
        OSError: it cannot be read.
    """
    rows: list[tuple[Any, ...]] = []
    num_damaged = 0
    with path.open("rb") as file:
        about = os.fstat(file.fileno())
        for number, (offset, line) in enumerate(_lines(file)):
            fields = summary(line)
            if fields is None:
                num_damaged += bool(line.strip())
                continue
            place = {"offset": offset, "length": len(line), "line": number, "step": step}
            codes = {name: code(name, fields[name]) for name in TEXTS}
            row = fields | place | codes
            rows.append(tuple(row[name] for name in COLUMNS))
    listed = zip(*rows, strict=True) if rows else [()] * len(COLUMNS)
    columns: dict[str, np.ndarray] = {
        name: np.array(values, kind)
        for (name, kind), values in zip(COLUMNS.items(), listed, strict=True)
    }
    return Block(identity=_identity(about), num_damaged=num_damaged, columns=columns)


def _lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Lines with their offsets; of one that is too long only its beginning, which is no JSON."""
    offset = 0
    while line := file.readline(MAX_LINE):
        start, offset = offset, offset + len(line)
        yield start, line
        while len(line) == MAX_LINE and not line.endswith(b"\n"):
            line = file.readline(MAX_LINE)
            offset += len(line)


def summary(line: bytes) -> dict[str, Any] | None:
    """Fields of a trajectory that the index keeps, texts as they are; None for a damaged line.

    Most of a line are lists of numbers, which `trajectory_record` writes behind all else that is
    needed here. They are counted and not parsed, so damage within them shows only when the
    trajectory is opened. A quote within a JSON string has a backslash before it, so no text can
    hold the key that is looked for.
    """
    line = line.strip()
    if not line.endswith(b"}"):
        return None
    begin = line.find(_TOKENS)
    record: Any = None
    if begin > 0:
        with contextlib.suppress(ValueError):  # where the key stands within another object
            record = parse_json(line[:begin] + b"}", "")
    if isinstance(record, dict):
        begin += len(_TOKENS)
        end = line.find(b"]", begin)
        tokens = line.count(b",", begin, end) + 1 if line[begin:end].strip() else 0
        begin = line.find(_MASK, end) + len(_MASK)
        if end < 0 or begin < len(_MASK):
            return None
        sampled = line.count(b"1", begin, line.find(b"]", begin))
    else:
        try:
            record = parse_json(line, "")
        except ValueError:
            return None
        if not isinstance(record, dict):
            return None
        ids, mask = record.get("token_ids"), record.get("loss_mask")
        tokens = len(ids) if isinstance(ids, list) else 0
        sampled = sum(one in (1, True) for one in mask) if isinstance(mask, list) else 0
    task, outcome = record.get("task_id"), record.get("outcome")
    if not isinstance(task, str) or not isinstance(outcome, str):
        return None
    reward, advantage = number_of(record.get("reward")), number_of(record.get("advantage"))
    turns = record.get("turns")
    asked = [record.get("query"), record.get("question")]
    answer = record.get("final_answer")
    is_scored = outcome != "environment_error"
    return {
        "task": task,
        "outcome": outcome,
        "question": next(filter(is_text, asked), ""),
        "answer": answer[:MAX_ANSWER] if isinstance(answer, str) else "",
        "reward": np.nan if reward is None else reward,
        "advantage": np.nan if advantage is None else advantage,
        "correct": int(record.get("is_correct") is True) if is_scored else -1,
        "sample": count_of(record.get("sample_index")),
        "attempt": count_of(record.get("attempt")),
        "turns": len(turns) if isinstance(turns, list) else 0,
        "tokens": tokens,
        "sampled": sampled,
    }


def is_text(value: Any) -> bool:
    """Return True for a text that is not empty."""
    return isinstance(value, str) and value != ""


def _identity(about: os.stat_result) -> tuple[int, int, int]:
    return about.st_ino, about.st_size, about.st_mtime_ns


@dataclass
class TrajectoryIndex:
    """The index of a run's trajectories; one thread refreshes it, others read its `table`.

    Attributes:
        folder: `trajectories/` of the run.
        cache: where it is kept; None for nowhere.
        num_files: files of trajectories there are.
        num_indexed: of these, how many are indexed.
        problems: what could not be read or kept.
        indexing_s: seconds that indexing has taken so far, without what the cache had.
    """

    folder: Path
    cache: Path | None
    num_files: int = 0
    num_indexed: int = 0
    problems: list[str] = field(default_factory=list)
    indexing_s: float = 0.0

    def __post_init__(self) -> None:
        """Takes over what the cache has."""
        self._lock = threading.Lock()
        self._blocks: dict[int, Block] = {}  # by step
        self._paths: dict[int, Path] = {}
        self._codes: dict[str, dict[str, int]] = {name: {} for name in TEXTS}
        self._texts: dict[str, list[str]] = {name: [] for name in TEXTS}
        self._folded: list[str] = []
        self._table: Table | None = None
        self._is_read = False

    def _code(self, name: str, text: str) -> int:
        codes = self._codes[name]
        if text not in codes:
            with self._lock:
                codes[text] = len(codes)
                self._texts[name].append(text)
                if name == "question":
                    self._folded.append(text.casefold())
        return codes[text]

    def refresh(self, should_stop: Callable[[], bool] = lambda: False) -> bool:
        """Indexes the files that are new or have changed, the newest first.

        Returns:
            True if anything has changed.
        """
        if not self._is_read:
            self._load()
            self._is_read = True
        on_disk = self._find()
        changed = {
            step: path
            for step, (path, identity) in on_disk.items()
            if step not in self._blocks or self._blocks[step].identity != identity
        }
        with self._lock:
            gone = self._blocks.keys() - on_disk.keys()
            for step in gone | changed.keys():
                self._blocks.pop(step, None)
            if gone or changed:
                self._table = None
            self._paths = {step: path for step, (path, _) in on_disk.items()}
            self.num_files, self.num_indexed = len(on_disk), len(self._blocks)
        problems: list[str] = []
        saved = time.monotonic()
        for step in sorted(changed, reverse=True):
            if should_stop():
                return True
            began = time.monotonic()
            try:
                block = index_file(changed[step], step, self._code)
            except OSError as error:
                problems.append(f"{changed[step].name} cannot be read: {error.strerror or error}")
                continue
            with self._lock:
                self._blocks[step] = block
                self._table = None
                self.num_indexed = len(self._blocks)
            self.indexing_s += time.monotonic() - began
            if time.monotonic() - saved > SAVE_S:
                problems += self._save()
                saved = time.monotonic()
        is_other = bool(gone) or any(step in self._blocks for step in changed)
        if is_other:
            problems += self._save()
        if changed or gone:
            self.problems = problems
        return is_other

    def _find(self) -> dict[int, tuple[Path, tuple[int, int, int]]]:
        """Regular files by their step."""
        files = {}
        try:
            with os.scandir(self.folder) as entries:
                for entry in entries:
                    name = _FILE.fullmatch(entry.name)
                    # One spelling, the one that is written: a step has one file.
                    if name is None or entry.name != f"step_{int(name[1]):06d}.jsonl":
                        continue
                    try:
                        about = entry.stat()
                    except FileNotFoundError:
                        continue  # replaced at this moment
                    if stat.S_ISREG(about.st_mode):  # a pipe would never end
                        files[int(name[1])] = (self.folder / entry.name, _identity(about))
        except FileNotFoundError:
            pass  # none yet
        except OSError as error:
            self.problems = [f"{self.folder.name} cannot be read: {error.strerror or error}"]
        return files

    @property
    def table(self) -> Table:
        """All rows that are indexed by now."""
        with self._lock:
            if self._table is None:
                blocks = [self._blocks[step] for step in sorted(self._blocks)]
                self._table = Table(
                    columns=_joined(blocks),
                    texts={name: tuple(texts) for name, texts in self._texts.items()},
                    folded=tuple(self._folded),
                    num_damaged=sum(block.num_damaged for block in blocks),
                )
            return self._table

    def read(self, step: int, line: int) -> dict[str, Any]:
        """The record of one trajectory, read from its place in its file.

        Raises:
            LookupError: there is none such.
            ValueError: the file has changed since it was indexed, or the line is damaged.
            OSError: it cannot be read.
        """
        with self._lock:
            block, path = self._blocks.get(step), self._paths.get(step)
        rows = [] if block is None else np.flatnonzero(block.columns["line"] == line).tolist()
        if block is None or path is None or not rows:
            raise LookupError(f"there is no trajectory at step {step}, line {line + 1}.")
        offset, length = (int(block.columns[name][rows[0]]) for name in ("offset", "length"))
        with path.open("rb") as file:
            if _identity(os.fstat(file.fileno())) != block.identity:
                raise ValueError(f"{path.name} has changed since it was read; open the list again.")
            file.seek(offset)
            record = parse_json(file.read(length), f"{path.name}:{line + 1}")
        assert isinstance(record, dict)
        return record

    def _load(self) -> None:
        """Takes over blocks of the cache; whatever is wrong with it, it is made again."""
        if self.cache is None:
            return
        try:
            with np.load(self.cache, allow_pickle=False) as kept:
                about = parse_json(kept["about"].tobytes(), "the kept index")
                columns = {name: kept[name] for name in COLUMNS}
            if about["version"] != _VERSION or about["columns"] != list(COLUMNS):
                return
            texts = {name: [str(text) for text in about["texts"][name]] for name in TEXTS}
            ends = np.cumsum([count for *_, count in about["files"]], dtype=np.int64).tolist()
            is_whole = all(
                column.dtype == COLUMNS[name] and len(column) == (ends[-1] if ends else 0)
                for name, column in columns.items()
            ) and all(
                not len(columns[name])
                or 0 <= columns[name].min() <= columns[name].max() < len(texts[name])
                for name in TEXTS
            )
            if not is_whole:
                return
            blocks = {
                int(step): Block(
                    identity=(int(inode), int(size), int(changed)),
                    num_damaged=int(damaged),
                    columns={n: column[end - count : end] for n, column in columns.items()},
                )
                for (step, inode, size, changed, damaged, count), end in zip(
                    about["files"], ends, strict=True
                )
            }
        except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile):
            return
        with self._lock:
            self._blocks, self._texts, self._table = blocks, texts, None
            self._codes = {
                name: {text: number for number, text in enumerate(known)}
                for name, known in texts.items()
            }
            self._folded = [text.casefold() for text in texts["question"]]

    def _save(self) -> list[str]:
        """Writes the index to the cache; returns the problems of that."""
        if self.cache is None:
            return []
        blocks = sorted(self._blocks.items())
        about = {
            "version": _VERSION,
            "columns": list(COLUMNS),
            "texts": self._texts,
            "files": [
                [step, *block.identity, block.num_damaged, len(block.columns["step"])]
                for step, block in blocks
            ],
        }
        try:
            with taking_place(self.cache) as unfinished, unfinished.open("wb") as file:
                kept: dict[str, Any] = _joined([block for _, block in blocks])
                kept["about"] = np.frombuffer(json.dumps(about).encode(), np.uint8)
                np.savez(file, **kept)
        except OSError as error:
            return [f"the index is not kept in {self.cache}: {error.strerror or error}"]
        return []


def _joined(blocks: Sequence[Block]) -> dict[str, np.ndarray]:
    """Columns over the rows of all blocks."""
    return {
        name: np.concatenate([np.empty(0, kind), *(block.columns[name] for block in blocks)])
        for name, kind in COLUMNS.items()
    }


def cache_of(workdir: Path) -> Path | None:
    """The file in the user's cache that keeps the index of a run; None where there is no home."""
    try:
        folder = users_cache() / "view"
    except RuntimeError:
        return None
    name = hashlib.sha256(os.fsencode(workdir.resolve())).hexdigest()[:32]
    return folder / f"{name}.npz"

"""Loading, checking and mixing of the task sources in the config.

A small source is parsed once and kept in memory. A large source is read once for checks, and its
tasks are parsed again on access.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import math
import unicodedata
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from jaxrl.config.keys import reject_value
from jaxrl.config.registry import instantiate, resolve
from jaxrl.data.readers.base import (
    READERS,
    Reader,
    Record,
    SequenceReader,
    find_files,
    reject_bytes,
    split_range,
)
from jaxrl.data.records import parse_task
from jaxrl.data.stream import Mixture, Source
from jaxrl.envs.base import Task
from jaxrl.utils.callables import UserCodeError, format_failure, is_dotted_path
from jaxrl.utils.json_io import drop_nulls

MAX_CACHED_TASKS = 100_000
"""Maximum number of tasks in a source that is kept in memory."""

MAX_CACHED_IMAGE_BYTES = 2**28
"""Maximum total size in bytes of the inline images in a source that is kept in memory."""

_BLOCK_SIZE = 1000  # number of records read at a time


@dataclass(frozen=True, kw_only=True)
class TaskSource:
    """Configuration of a task source."""

    key: str  # config key of the section, or of its entry in `sources`
    source: str = ""
    format: str = ""  # "" to infer it from the path
    split: str = "train"
    settings: Mapping[str, Any] = field(default_factory=dict)
    columns: Mapping[str, str] = field(default_factory=dict)
    data_source: str = ""
    weight: float = 1.0
    environment: str = ""  # name in `config.environments`
    make_reader: Callable[..., Any] | None = field(default=None, compare=False)

    @property
    def format_name(self) -> str:
        """Name of the format, inferred from the path if none is configured."""
        return self.format or infer_format(self.source)

    @property
    def name(self) -> str:
        """Name of the source in metrics and messages."""
        return self.data_source or Path(self.source).stem or self.format


FIELDS = tuple(
    f.name
    for f in dataclasses.fields(TaskSource)
    if f.name not in ("key", "environment", "make_reader")
)
"""Allowed keys of an entry in `sources`."""


def resolve_sources(config: ConfigDict, kind: str, environment: str = "") -> list[TaskSource]:
    """Return the sources of `tasks.train` or `tasks.eval`, with their readers resolved.

    Args:
        config: Configuration of a run with one environment.
        kind: `train` or `eval`.
        environment: Name of the environment, if it is one of several.

    Raises:
        ValueError: A source is malformed, or its format is unknown.
    """
    prefix = f"environments.{environment}." if environment else ""
    section, key = config.tasks[kind].to_dict(), f"{prefix}tasks.{kind}"
    if section.pop("holdout", 0):
        return resolve_sources(config, "train", environment)
    entries = section.pop("sources")
    if not entries:
        return [_resolve_source(section, key, kind, environment)]
    split = section.pop("split")
    unused = [name for name in FIELDS if section.get(name)]
    if unused:
        expected = f"no value together with {key}.sources, whose entries set this key"
        reject_value(f"{key}.{unused[0]}", section[unused[0]], expected)
    sources = []
    for index, entry in enumerate(entries):
        if not isinstance(entry, dict) or not {*entry} <= {*FIELDS}:
            reject_value(
                f"{key}.sources", entry, f"mappings with some of the keys {', '.join(FIELDS)}"
            )
        fields = {"split": split, **entry}
        sources.append(_resolve_source(fields, f"{key}.sources[{index}]", kind, environment))
    return sources


def _resolve_source(fields: Mapping[str, Any], key: str, kind: str, environment: str) -> TaskSource:
    source = TaskSource(key=key, environment=environment, **fields)
    texts = (source.source, source.format, source.split, source.data_source)
    names = source.columns if isinstance(source.columns, Mapping) else {None: None}
    is_number = isinstance(source.weight, int | float) and not isinstance(source.weight, bool)
    has_path = source.source or is_dotted_path(str(source.format))
    checks = [
        ("source", all(isinstance(text, str) for text in texts), "texts in all its fields"),
        ("source", has_path, "a path" if kind == "train" else "a path to held-out tasks"),
        ("weight", is_number and 0 < source.weight < math.inf, "a number above 0"),
        (
            "weight",
            kind == "train" or source.weight == 1,
            "no weight: evaluations use all held-out tasks",
        ),
        ("settings", isinstance(source.settings, Mapping), "a mapping"),
        (
            "columns",
            all(isinstance(name, str) for name in (*names, *names.values())),
            "names of columns and fields",
        ),
    ]
    for name, is_valid, expected in checks:
        if not is_valid:
            reject_value(f"{key}.{name}", getattr(source, name), expected)
    return dataclasses.replace(source, make_reader=_resolve_reader(source))


def _resolve_reader(source: TaskSource) -> Callable[..., Any]:
    key, name = f"{source.key}.format", source.format_name
    reader: Any = resolve(key, name, READERS, example="my_tasks.Sums")
    if not callable(reader):
        reject_value(key, name, "a class or a function that returns a sequence of records")
    return reader


SUFFIXES = {".parquet": "parquet", ".csv": "csv", ".tsv": "csv", ".jsonl": "jsonl"}
"""Format by file suffix. Files with any other suffix are JSONL."""


def infer_format(source: str) -> str:
    """Infer the format of a file, pattern or folder from its name or contents."""
    path = Path(source)
    if path.is_dir():
        if any((path / name).is_file() for name in ("dataset_dict.json", "state.json")):
            return "hf"
        formats = {SUFFIXES[file.suffix] for file in path.iterdir() if file.suffix in SUFFIXES}
        is_files = len(formats) == 1 and not (path / "dataset_info.json").is_file()
        return formats.pop() if is_files else "tfds"
    return SUFFIXES.get(path.suffix, "jsonl")


def open_reader(source: TaskSource) -> Reader:
    """Open a source with the reader for its format.

    Raises:
        FileNotFoundError, ValueError: The source cannot be opened. The message names the key.
    """
    key = f"config.{source.key}.source"
    records: Any = instantiate(
        f"{source.key}.settings",
        source.make_reader or _resolve_reader(source),
        source.settings,
        source=source.source,
        split=source.split,
        config_key=key,
        columns=source.columns,
    )
    if not isinstance(records, Reader):
        records = SequenceReader(records, source.format_name, f"config.{source.key}.format")
    if not len(records):
        raise ValueError(f"{key}: {source.name!r} contains no tasks; expected at least one.")
    return records


class Tasks(Sequence[Task]):
    """Sequence of one source's tasks, all of which are checked when the source is opened.

    Tasks of a large source are not kept in memory; each access parses them again.

    Attributes:
        key: Config key of the source's section, with the prefix `config.`.
        id_hashes: Hashes of the ids, uint64 [N].
        question_hashes: Hashes of the questions, uint64 [N, 2]; see `hash_questions`.
    """

    def __init__(self, source: TaskSource, show: Callable[[str], None] = lambda _: None):
        """Open and check a source. `show` displays the progress for a large source.

        Raises:
            FileNotFoundError, ValueError: The source cannot be read, or a record is malformed. The
                message names its file and row.
        """
        self.key, self._source = f"config.{source.key}", source
        self._reader = open_reader(source)
        self._indices = np.arange(len(self._reader))
        self._cached_tasks: list[Task] | None = (
            [] if len(self._reader) <= MAX_CACHED_TASKS else None
        )
        self._unseen_columns = {column for column, name in source.columns.items() if name}
        ids, questions, num_bytes = array("Q"), array("Q"), 0
        for block in split_range(len(self._reader), _BLOCK_SIZE):
            for task in self._read_tasks(block):
                num_bytes += sum(len(f.data) for image in task.images for f in image.files)
                if num_bytes > MAX_CACHED_IMAGE_BYTES:
                    self._cached_tasks = None
                ids.append(_hash_text(task.id))
                try:
                    questions.extend(_hash_task(task))
                except OSError as error:
                    raise ValueError(
                        f"{self.key}.source: an image or video of task {task.id!r} cannot be "
                        f"read: {error}"
                    ) from error
                if self._cached_tasks is not None:
                    self._cached_tasks.append(task)
            if self._cached_tasks is None:
                show(f"checking {source.name}, tasks {block.stop:,} of {len(self):,}")
        if self._unseen_columns:
            missing = ", ".join(map(repr, sorted(self._unseen_columns)))
            expected = f"columns of the records; none of them has {missing}"
            reject_value(f"{source.key}.columns", dict(source.columns), expected)
        self.id_hashes = np.frombuffer(ids, np.uint64)
        self.question_hashes = np.frombuffer(questions, np.uint64).reshape(-1, 2)

    def _read_tasks(self, indices: Sequence[int]) -> list[Task]:
        """Read the tasks at `indices`. Any failure raises a UserCodeError."""
        try:
            records = self._reader.read(indices)
            return [self._parse_record(r, i) for r, i in zip(records, indices, strict=True)]
        except (ValueError, OSError) as error:
            raise UserCodeError(str(error)) from error
        except Exception as error:  # a user-supplied reader may raise anything
            raise UserCodeError(f"{self.key}: {format_failure(error)}.") from error

    def _parse_record(self, record: Record, index: int) -> Task:
        source, location = self._source, self._reader.location(index)
        if source.columns:
            self._unseen_columns -= record.keys()
            selected = {name: value for name, value in record.items() if name not in source.columns}
            renamed = {new: record[old] for old, new in source.columns.items() if old in record}
            record = selected | {name: value for name, value in renamed.items() if name}
        if self._reader.pads_with_nulls:  # else a call would have null arguments from other calls
            chats = {name: record[name] for name in ("messages", "prompt") if name in record}
            record = {**record, **drop_nulls(chats)}
        reject_bytes(record, location)
        task = parse_task(record, location, folder=self._reader.folder(index))
        if source.data_source:
            id = f"{source.data_source}/{task.id}"
            task = dataclasses.replace(task, id=id, data_source=source.data_source)
        if source.environment:  # files of different environments may have the same ids
            id = f"{source.environment}/{task.id}"
            task = dataclasses.replace(task, id=id, environment=source.environment)
        return task

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if self._cached_tasks is not None:
            return self._cached_tasks[index]
        return self._read_tasks([int(self._indices[index])])[0]

    def __iter__(self) -> Iterator[Task]:
        if self._cached_tasks is not None:
            yield from self._cached_tasks
            return
        for block in split_range(len(self), _BLOCK_SIZE):
            yield from self._read_tasks(self._indices[block.start : block.stop].tolist())

    def location(self, index: int) -> str:
        """Return the location `file:row` of a task."""
        return self._reader.location(int(self._indices[index]))

    def select(self, mask: np.ndarray) -> Tasks:
        """Return the tasks for which `mask`, bool [N], is True."""
        tasks = copy.copy(self)
        tasks._indices, tasks.id_hashes = self._indices[mask], self.id_hashes[mask]
        tasks.question_hashes = self.question_hashes[mask]
        if self._cached_tasks is not None:
            tasks._cached_tasks = [t for t, k in zip(self._cached_tasks, mask, strict=True) if k]
        return tasks


def open_tasks(
    sources: Sequence[TaskSource], show: Callable[[str], None] = lambda _: None
) -> Mixture[Task]:
    """Open and check all sources. Raises the errors of `Tasks` and `check_ids`."""
    opened = [Tasks(source, show) for source in sources]
    check_ids(opened)
    names = [source.name for source in sources]
    unique = [f"{n}_{i}" if names.count(n) > 1 else n for i, n in enumerate(names)]
    if len(set(unique)) < len(unique):  # a numbered name equals another source's name
        unique = [f"{n}_{i}" for i, n in enumerate(names)]
    parts = zip(opened, sources, unique, strict=True)
    return Mixture([Source(items=t, weight=s.weight, name=n) for t, s, n in parts])


def split_holdout(
    tasks: Mixture[Task], holdout: float, *, seed: int
) -> tuple[Mixture[Task], Mixture[Task]]:
    """Split tasks into training tasks and held-out tasks.

    Tasks are ranked by a hash of the seed and the question. The split does not depend on the order
    of files and tasks, and tasks with the same question stay together.

    Args:
        tasks: Tasks of all sources, opened by `open_tasks`.
        holdout: Fraction of the tasks to hold out if below 1, otherwise the number of tasks. Tasks
            that tie with the last held-out task are also held out.
        seed: Random seed for the split.

    Raises:
        ValueError: No task would be held out, or a source would have no training tasks left.
    """
    questions = hash_questions(tasks)[:, 1]  # for a chat with a question, the hash of that
    ranks = np.array([_hash_text(f"{seed} {question}") for question in questions], np.uint64)
    count = round(holdout * len(tasks)) if holdout < 1 else int(holdout)
    limit = np.sort(ranks)[count - 1] if 0 < count < len(tasks) else None
    splits: list[list[Source[Task]]] = [[], []]
    offset = 0
    for source in tasks.sources:
        items, stop = source.items, offset + len(source.items)
        assert isinstance(items, Tasks)
        is_held_out = ranks[offset:stop] <= limit if limit is not None else np.ones(0, bool)
        if is_held_out.all():
            reject_value(
                "tasks.eval.holdout",
                holdout,
                f"a value that holds out some of the {len(tasks)} tasks but not all of a source",
            )
        for split, mask in zip(splits, (~is_held_out, is_held_out), strict=True):
            if mask.any():
                split.append(dataclasses.replace(source, items=items.select(mask)))
        offset = stop
    return Mixture(splits[0]), Mixture(splits[1])


def read_tasks(source: str | Path, key: str, *, split: str = "train") -> list[Task]:
    """Read all tasks of a file or folder. Errors name `key`, such as `tasks.train`."""
    return list(open_tasks([TaskSource(key=key, source=str(source), split=split)]))


def check_ids(sources: Sequence[Tasks]) -> None:
    """Raise a ValueError if two tasks have the same id."""
    all_tasks = Mixture([Source(items=tasks) for tasks in sources])
    ids = np.concatenate([tasks.id_hashes for tasks in sources])
    order = np.argsort(ids, kind="stable")
    duplicates = np.flatnonzero(ids[order][1:] == ids[order][:-1])
    if not len(duplicates):
        return
    second, first = min((int(order[i + 1]), int(order[i])) for i in duplicates)
    locations = [source.location(i) for source in sources for i in range(len(source))]
    raise ValueError(
        f"{locations[second]}: the id {all_tasks[second].id!r} is already used in "
        f"{locations[first]}; make ids unique, for example with the dataset's name as a prefix "
        "(set data_source of each source), or omit 'id' everywhere."
    )


def check_data_sources(tasks: Sequence[Task], key: str) -> None:
    """Raise a ValueError if a task's `data_source` is in `RESERVED`."""
    for task in tasks:
        if task.data_source in RESERVED:
            raise ValueError(
                f"{key}: the data_source of task {task.id!r} is {task.data_source!r}, which is "
                "the name of a summary over datasets in evaluations; rename it in that file."
            )


RESERVED = ("all", "mean")
"""Names of evaluation summaries over datasets, which no dataset may have."""


def describe_overlap(tasks: Sequence[Task], held_out: Sequence[Task]) -> str:
    """Return a warning if training tasks contain held-out questions, else "".

    The comparison ignores case, whitespace and final punctuation. Two chats match if their messages
    or their questions in the metadata (verl's `extra_info`) match. Images must match too.
    """
    query = hash_questions(held_out)
    known, first = np.unique(hash_questions(tasks), return_index=True)
    if not (known.size and query.size):
        return ""
    positions = np.searchsorted(known, query).clip(max=len(known) - 1)
    is_known = known[positions] == query
    # The first training task that matches each held-out task, given two hashes per task.
    others = np.where(is_known, first[positions] // 2, len(tasks)).min(axis=1)
    overlapping = np.flatnonzero(is_known.any(axis=1)).tolist()
    if not overlapping:
        return ""
    task, other = held_out[overlapping[0]], tasks[int(others[overlapping[0]])]
    text = task.question or (task.messages or [{"content": ""}])[-1]["content"]
    return (
        f"warning: {len(overlapping)} of {len(held_out)} held-out questions are also training "
        f"tasks, so their scores are not held out; the first is {text[:100]!r}, {task.id!r} in "
        f"config.tasks.eval and {other.id!r} in config.tasks.train"
    )


def hash_questions(tasks: Sequence[Task]) -> np.ndarray:
    """Compute two hashes of each task's question, uint64 [N, 2].

    A chat with a question in its metadata gets a hash of its messages and a hash of the question.
    For any other task, the two hashes are equal.
    """
    if isinstance(tasks, Tasks):
        return tasks.question_hashes
    if isinstance(tasks, Mixture) and tasks.sources:
        return np.concatenate([hash_questions(source.items) for source in tasks.sources])
    hashes = array("Q")
    for task in tasks:
        hashes.extend(_hash_task(task))
    return np.frombuffer(hashes, np.uint64).reshape(-1, 2)


def _hash_task(task: Task) -> tuple[int, int]:
    first, *others = map(_hash_text, _list_dedup_keys(task))
    return first, others[0] if others else first


def _list_dedup_keys(task: Task) -> list[str]:
    """List texts that identify a task. Tasks with the same question share at least one."""
    if task.question is not None:
        texts = ["question " + normalize_question(task.question)]
    else:
        texts = ["chat " + json.dumps([*(task.messages or ())], sort_keys=True, default=str)]
        info = task.metadata.get("extra_info")
        query = task.metadata.get("question") or (isinstance(info, dict) and info.get("question"))
        if isinstance(query, str) and query.strip():
            texts.append("question " + normalize_question(query))
    image_digests = [image.digest for image in task.images]
    return [" ".join([text, *image_digests]) for text in texts]


def normalize_question(text: str) -> str:
    """Normalize a question's case and whitespace, and strip final punctuation."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split()).rstrip(" ?.")


def _hash_text(text: str) -> int:
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def list_task_files(sources: Sequence[TaskSource]) -> dict[str, tuple[list[Path], str]]:
    """Return the files of each source, keyed by names such as `tasks.train.sources/0`.

    The second value is "" unless the source is an entry of `sources`. Then it is a JSON text of the
    entry's other fields, because only the path may change on resume without `--accept_changes`.
    """
    by_key = {}
    for source in sources:
        section, _, index = source.key.partition(".sources[")
        name = f"{section}.sources/{index[:-1]}" if index else f"{section}.source"
        path = Path(source.source)
        files = [path] if path.exists() else find_files(source.source, ())
        rest = {field: getattr(source, field) for field in FIELDS}
        rest |= {"key": "", "source": "" if files else source.source}
        fields = json.dumps(rest, sort_keys=True, default=str)
        if source.source and (files or index):
            by_key[name] = files, fields if index else ""
    return by_key

"""Tasks and demonstrations from JSONL, tasks from TFDS."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from jaxrl.envs.base import Task
from jaxrl.envs.jsonl import read_objects

Item = TypeVar("Item")

ANSWER_KEYS = ("answers", "golden_answers", "answer")
"""Where a task's accepted answers may stand: our name, FlashRAG's, and the plain singular."""


def read_jsonl(
    path: str | Path, parse: Callable[[dict[str, Any], str], Item], key: str
) -> list[Item]:
    """Parses every line of a JSONL file.

    Args:
        path: of the file.
        parse: from a line's object and its place (`file:line`, for errors) to an item.
        key: the configuration key that named the file, for errors.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no JSONL, a line is malformed (file and line are named), or there is
            none.
    """
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(
            f"{str(path)!r} is not a file; set {key} to a JSONL file, one object a line."
        )
    items = [parse(fields, place) for fields, place in read_objects(file)]
    if not items:
        raise ValueError(f"{file} holds no line; {key} must name a file with at least one.")
    return items


def parse_task(fields: dict[str, Any], place: str) -> Task:
    """A task from a JSON object.

    Fields: `question` (text) or `messages` (a chat), `answers` (also `golden_answers`, `answer`;
    text or a list), and optionally `id` (default: its place), `data_source`, `metadata`.

    Raises:
        ValueError: a field is missing or of another type.
    """
    question, messages = fields.get("question"), fields.get("messages")
    if (question is None) == (messages is None):
        raise ValueError(
            f"{place}: expected either 'question' or 'messages', found {_names(fields)}."
        )
    if question is not None and not (isinstance(question, str) and question.strip()):
        raise ValueError(f"{place}: 'question' is {question!r}; expected text that is not blank.")
    if messages is not None:
        check_messages(messages, place)
    found = next((fields[name] for name in ANSWER_KEYS if name in fields), None)
    answers = [found] if isinstance(found, str) else found
    if not (answers and isinstance(answers, list) and all(isinstance(x, str) for x in answers)):
        raise ValueError(
            f"{place}: expected 'answers', a list of at least one text; found {_names(fields)} "
            f"with the answers {found!r}."
        )
    if not all(answer.strip() for answer in answers):
        raise ValueError(f"{place}: an answer is blank, which nothing can match; leave it out.")
    metadata = fields.get("metadata") or {}
    if not isinstance(metadata, dict):
        raise ValueError(f"{place}: 'metadata' is {metadata!r}; expected an object.")
    return Task(
        id=str(fields.get("id", place)),
        question=question,
        messages=tuple(messages) if messages is not None else None,
        answers=tuple(answers),
        data_source=str(fields.get("data_source", "default")),
        metadata=metadata,
    )


def check_messages(messages: Any, place: str) -> None:
    """Refuses what is not a chat: a list of objects with text `role` and `content`."""
    is_chat = isinstance(messages, list) and all(
        isinstance(message, dict)
        and isinstance(message.get("role"), str)
        and isinstance(message.get("content"), str)
        for message in messages
    )
    if not is_chat or not messages:
        raise ValueError(
            f"{place}: 'messages' must be a list of objects with text 'role' and 'content'."
        )


def _names(fields: dict[str, Any]) -> str:
    return "the fields " + (", ".join(map(repr, fields)) or "none")


def read_tasks(path: str | Path, key: str, *, split: str = "train") -> list[Task]:
    """All tasks of a JSONL file, or of a split of a TFDS data set where the path is a folder.

    See `parse_task`, `read_jsonl` and `tfds_objects`.

    Args:
        path: of the file or folder.
        key: the configuration key that named it, for errors.
        split: of a data set; also a part, as `train[:90%]`.

    Raises:
        ValueError: also where two tasks have one id, by which trajectories, evaluations,
            difficulties and solved tasks are told apart.
    """
    places: dict[str, str] = {}

    def parse(fields: dict[str, Any], place: str) -> Task:
        task = parse_task(fields, place)
        first = places.setdefault(task.id, place)
        if first != place:
            raise ValueError(
                f"{place}: the id {task.id!r} is that of line {first.rpartition(':')[2]} already; "
                "make ids unique, for instance by the data set's name before them, or leave out "
                "'id' everywhere."
            )
        return task

    if Path(path).is_dir():
        return [parse(fields, place) for fields, place in tfds_objects(Path(path), split, key)]
    return read_jsonl(path, parse, key)


def tfds_objects(folder: Path, split: str, key: str) -> Iterator[tuple[dict[str, Any], str]]:
    """The examples of a TFDS data set as plain data, each with its place (`folder [split]:1`).

    Empty texts and lists are left out, since TFDS cannot leave out a feature. `metadata` may be a
    text that holds a JSON object.

    Args:
        folder: of one version of the data set, prepared as array_record.
        split: a split, or a part of one, as `train[:90%]`.
        key: the configuration key that named the folder, for errors.

    Raises:
        ValueError: the folder is no data set, of another format, damaged, or without the split.
    """
    _check_tfds(folder, key)
    import tensorflow_datasets as tfds  # late: it takes a second, and most runs read JSONL

    try:
        builder = tfds.builder_from_directory(folder)
    except Exception as error:  # protobuf's, TFDS's own and others, as the damage has it
        raise ValueError(f"{folder} cannot be read: {_one_line(error)}.") from error
    try:
        is_empty = not builder.info.splits[split].num_examples
        source: Any = () if is_empty else builder.as_data_source(split)
    except (KeyError, ValueError) as error:
        name = key.replace(".source", ".split")
        raise ValueError(f"{name} is {split!r}, of {folder}: {_one_line(error)}") from error
    except RuntimeError as error:
        raise ValueError(f"{folder} cannot be read: {_one_line(error)}.") from error
    if is_empty:
        raise ValueError(f"{folder} holds no example in {split!r}; {key} must name at least one.")
    for start in range(0, len(source), _TFDS_BATCH):
        indices = range(start, min(start + _TFDS_BATCH, len(source)))
        try:
            examples = source.__getitems__(indices)
        except RuntimeError as error:
            raise ValueError(f"{folder} cannot be read: {_one_line(error)}.") from error
        for index, found in zip(indices, examples, strict=True):
            place = f"{folder} [{split}]:{index + 1}"
            yield _task_fields(found, place), place


_TFDS_BATCH = 1000  # examples read at a time, several times as quick as one by one


def _check_tfds(folder: Path, key: str) -> None:
    """Refuses what is no prepared data set, or one that TFDS would not read whole."""
    file = folder / "dataset_info.json"
    if not file.is_file():
        versions = sorted(path.parent.name for path in folder.glob("*/dataset_info.json"))
        hint = f" (it has the versions {', '.join(versions)})" if versions else ""
        raise ValueError(
            f"{str(folder)!r} has no dataset_info.json; set {key} to a JSONL file, or to the "
            f"folder of one version of a TFDS data set, as data/tfds/bridges/1.0.0{hint}."
        )
    try:
        # Data sets of before the field was introduced are TFRecord.
        found = json.loads(file.read_text(encoding="utf-8")).get("fileFormat", "tfrecord")
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{file} is no JSON object: {error}") from error
    if found != "array_record":
        raise ValueError(
            f"{folder} holds {found} files, of which TFDS would need TensorFlow or lose examples; "
            "prepare it anew with file_format='array_record'."
        )


def _task_fields(example: dict[str, Any], place: str) -> dict[str, Any]:
    """The fields that are there, as JSON would have them."""
    try:
        plain = {name: _plain(value) for name, value in example.items()}
    except UnicodeDecodeError as error:
        raise ValueError(f"{place} is not valid UTF-8: {error}") from error
    fields = {name: value for name, value in plain.items() if value not in ("", [], None)}
    messages, metadata = fields.get("messages"), fields.get("metadata")
    if isinstance(messages, dict):  # a sequence of records comes as a record of sequences
        rows = zip(*messages.values(), strict=True)
        fields["messages"] = [dict(zip(messages, row, strict=True)) for row in rows]
        if not fields["messages"]:
            del fields["messages"]
    if isinstance(metadata, str):
        try:
            fields["metadata"] = json.loads(metadata)
        except ValueError as error:
            raise ValueError(f"{place}: 'metadata' is not valid JSON: {error}") from error
    return fields


def _plain(value: Any) -> Any:
    """Text for bytes, numbers and lists for NumPy's."""
    if isinstance(value, bytes):
        return value.decode("utf-8")
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return value


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")


def check_data_sources(tasks: Sequence[Task], key: str) -> None:
    """Refuses a data set with the name of a summary over data sets.

    Raises:
        ValueError: names the task and the configuration key of its file.
    """
    for task in tasks:
        if task.data_source in RESERVED:
            raise ValueError(
                f"{key}: the data_source of task {task.id!r} is {task.data_source!r}, which is "
                "what the evaluation calls its summary over data sets; rename it in that file."
            )


def overlap_note(tasks: Sequence[Task], held_out: Sequence[Task]) -> str:
    """A warning where held-out questions are among the tasks that are trained on; else "".

    Case, blanks and how a question ends make no other question of it; the rest does, since in
    arithmetic every sign counts. Chats are the same when their messages are.
    """
    trained = {_identity(task): task for task in reversed(tasks)}
    both = [task for task in held_out if _identity(task) in trained]
    if not both:
        return ""
    task, other = both[0], trained[_identity(both[0])]
    text = task.question or (task.messages or [{"content": ""}])[-1]["content"]
    return (
        f"warning: {len(both)} of {len(held_out)} held-out questions are among the tasks trained "
        f"on, so their scores say little; the first: {text[:100]!r}, {task.id!r} of "
        f"config.tasks.eval.source and {other.id!r} of config.tasks.train.source"
    )


def _identity(task: Task) -> Hashable:
    if task.question is not None:
        return " ".join(unicodedata.normalize("NFKC", task.question).casefold().split()).rstrip(
            " ?."
        )
    return tuple((message["role"], message["content"]) for message in task.messages or ())


RESERVED = ("all", "mean")
"""Names of summaries over data sets, which no data set may have."""

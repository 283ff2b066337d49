"""Tasks and demonstrations from files, and their endless shuffled stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import grain

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


def read_tasks(path: str | Path, key: str) -> list[Task]:
    """All tasks of a JSONL file; see `parse_task` and `read_jsonl`.

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

    return read_jsonl(path, parse, key)


class Stream(Generic[Item]):
    """Items in an endless order that is shuffled anew each epoch.

    The order is a function of the seed, so one number, how many items were taken, is all a restart
    needs; it does not depend on how many processes read.
    """

    def __init__(self, items: Sequence[Item], *, seed: int):
        """A stream over `items`, which are held."""
        self.num_items = len(items)
        self._order = grain.MapDataset.source(list(items)).seed(seed).shuffle().repeat()

    def take(self, position: int, count: int) -> list[Item]:
        """Items `position` to `position + count - 1` of the stream."""
        return [self._order[index] for index in range(position, position + count)]

"""Records as tasks, and demonstrations from JSONL."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from jaxrl.data.readers.base import ANSWER_KEYS, as_plain
from jaxrl.envs.base import Task
from jaxrl.envs.images import MARK, Picture, picture, pictures
from jaxrl.utils.json_io import parse_json
from jaxrl.utils.jsonl import read_objects
from jaxrl.utils.paths import similar_path

Item = TypeVar("Item")


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
            f"{similar_path(path)}"
        )
    items = [parse(fields, place) for fields, place in read_objects(file)]
    if not items:
        raise ValueError(f"{file} holds no line; {key} must name a file with at least one.")
    return items


def parse_task(fields: dict[str, Any], place: str, *, folder: Path | None = None) -> Task:
    """A task from the fields of a record.

    Of `question` (text), `messages` (a chat) and `prompt` (either) there is one; `answers` (also
    `golden_answers`, `answer`) is what `accepted_answers` takes. Of verl's records the chat is
    `prompt`, and the answers stand in `reward_model`. Optional are `id` (default: its
    place), `data_source` and `metadata`. All further fields are kept in `Task.metadata`, which
    therefore holds verl's `reward_model`, `extra_info` and `ability`.

    `images` holds one image or a list of them (see `envs.images.picture`), for as many marks
    `<image>` in the texts; without any mark they stand before the question, in a chat before the
    first message of the user. Paths begin in `folder`, without one in that of `place`. A content
    may also be a list of parts, with images of their own.

    Raises:
        ValueError: a field is missing or of another type.
    """
    is_verl = isinstance(fields.get("prompt"), list) and isinstance(
        fields.get("reward_model"), dict
    )
    used = {"id", "data_source", "metadata", "images"}
    if is_verl:
        question, messages = None, fields["prompt"]
        answers = _ground_truth(fields["reward_model"], place)
        used |= {"prompt", *ANSWER_KEYS}
    else:
        question, messages, name = _prompt(fields, place)
        answers = _answers(fields, place)
        used |= {name, *ANSWER_KEYS}
    if question is not None and not (isinstance(question, str) and question.strip()):
        raise ValueError(f"{place}: 'question' is {question!r}; expected text that is not blank.")
    folder = Path(place.rpartition(":")[0]).parent if folder is None else folder
    images = _given_images(fields, place, folder)
    if messages is not None:
        messages, images = read_chat(messages, images, place, folder)
    elif images:
        [message], images = read_chat(
            [{"role": "user", "content": question}], images, place, folder
        )
        question = message["content"]
    metadata = fields.get("metadata") or {}
    if not isinstance(metadata, dict):
        raise ValueError(f"{place}: 'metadata' is {metadata!r}; expected an object.")
    id, data_source = fields.get("id"), fields.get("data_source")
    further = {name: value for name, value in fields.items() if name not in used}
    return Task(
        id=place if id is None else str(id),
        question=question,
        messages=tuple(messages) if messages is not None else None,
        answers=answers,
        data_source="default" if data_source is None else str(data_source),
        metadata=further | metadata,
        images=images,
    )


def read_demonstration(
    fields: dict[str, Any], place: str
) -> tuple[list[dict[str, Any]], tuple[Picture, ...]]:
    """The chat of a demonstration, and the images of the marks in its prompt.

    Raises:
        ValueError: it is no chat, or has images behind the first message of the assistant.
    """
    folder = Path(place.rpartition(":")[0]).parent
    given = _given_images(fields, place, folder)
    messages, images = read_chat(fields.get("messages"), given, place, folder)
    roles = [message["role"] for message in messages]
    start = roles.index("assistant") if "assistant" in roles else len(roles)
    marks = sum(message["content"].count(MARK) for message in messages[:start])
    if images and marks != len(images):
        raise ValueError(
            f"{place}: {len(images) - marks} images stand behind the first message of the "
            "assistant; expected all in the prompt."
        )
    return messages, images


def read_chat(
    messages: Any, given: Sequence[Picture], place: str, folder: Path
) -> tuple[list[dict[str, Any]], tuple[Picture, ...]]:
    """A chat whose contents are texts, and the images of the marks in them.

    Other fields of a message stay as they are, for the chat template to write; arguments of calls
    become objects, and fields that are null are left out.

    Args:
        messages: contents are texts, or lists of parts as chat templates know them. An assistant
            message that calls a tool or has other fields may have none.
        given: images for the marks, and for the parts that bring none.
        place: of the record.
        folder: that paths in parts begin in.

    Raises:
        ValueError: it is no chat, or has other marks than there are images.
    """
    chat: list[Any] = []
    marks: list[Picture | None] = []  # None: one of the given
    has_parts = False
    for message in messages if isinstance(messages, list) else [messages]:
        if isinstance(message, dict):
            message = _with_fields(message, place)
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list) and content:
            parts = [_part(part, place, folder) for part in content]
            has_parts |= any(text == MARK for text, _ in parts)
            content = "".join(text for text, _ in parts)
            message = {**message, "content": content}
            marks += [image for text, image in parts for _ in range(text.count(MARK))]
        elif isinstance(content, str):
            marks += [None] * content.count(MARK)
        chat.append(message)
    check_messages(chat if isinstance(messages, list) else messages, place)
    if not (given or has_parts):
        return chat, ()
    if not marks:
        at = next((i for i, message in enumerate(chat) if message["role"] == "user"), 0)
        chat[at] = {**chat[at], "content": MARK * len(given) + chat[at]["content"]}
        return chat, tuple(given)
    if marks.count(None) != len(given):
        raise ValueError(
            f"{place}: 'images' holds {len(given)}, and the texts have {marks.count(None)} marks "
            f"{MARK} for them; expected as many, or none at all."
        )
    others = iter(given)
    return chat, tuple(image or next(others) for image in marks)


def _with_fields(message: dict[str, Any], place: str) -> dict[str, Any]:
    """A message without its nulls, with an empty text where other fields stand for a content.

    Raises:
        ValueError: its calls of tools are no such list.
    """
    message = _without_nulls(message)
    calls = message.get("tool_calls")
    if calls is not None:
        message["tool_calls"] = [_call(call, place) for call in _listed(calls)]
    has_fields = any(value for name, value in message.items() if name not in ("role", "content"))
    if has_fields and message.get("role") == "assistant":
        message.setdefault("content", "")
    return message


def _without_nulls(fields: Any) -> dict[str, Any]:
    """An object without its nulls; {} for anything else."""
    if not isinstance(fields, dict):
        return {}
    return {name: value for name, value in fields.items() if value is not None}


def _listed(value: Any) -> Sequence[Any]:
    """The items of a list, or the value itself as the only one."""
    return value if isinstance(value, list | tuple) else [value]


def _call(call: Any, place: str) -> dict[str, Any]:
    """A call of a tool with its arguments as an object, where they are JSON of one.

    Name and arguments may also stand beside the other fields, as transformers takes them.
    """
    fields = _without_nulls(call)
    bare = {name: fields.pop(name) for name in ("name", "arguments") if name in fields}
    function = _without_nulls(fields.get("function", bare))
    if not isinstance(function.get("name"), str):
        raise ValueError(
            f"{place}: 'tool_calls' of a message holds {call!r:.100}; expected objects such as "
            '{"type": "function", "function": {"name": "search", "arguments": {"query": "x"}}}.'
        )
    if isinstance(arguments := function.get("arguments"), str):
        try:
            value = parse_json(arguments or "{}", "arguments")
        except ValueError:
            value = None
        function["arguments"] = value if isinstance(value, dict) else arguments
    return {**fields, "function": function}


def _part(part: Any, place: str, folder: Path) -> tuple[str, Picture | None]:
    """A part of a content as text, and the image it brings.

    Raises:
        ValueError: it is of another kind than text and image.
    """
    fields = _without_nulls(part if isinstance(part, dict) else {"text": part})
    kind = fields.get("type", "text" if "text" in fields else "image")
    text = fields.get("text")
    names = ("text",) if kind == "text" else ("image", "image_url", "path", "url")
    others = [name for name in fields if name not in ("type", *names)]
    if kind == "text" and isinstance(text, str) and not others:
        return text, None
    if kind not in ("image", "image_url") or others:
        raise ValueError(
            f"{place}: a message has a part of the type {kind!r}, with {_names(fields)}; expected "
            "'text' with a text, or 'image', and no other fields."
        )
    value = next((fields[name] for name in names if fields.get(name)), None)
    try:
        return MARK, picture(value, folder) if value else None
    except ValueError as error:
        raise ValueError(f"{place}: an image of a message: {error}.") from error


def _given_images(fields: dict[str, Any], place: str, folder: Path) -> tuple[Picture, ...]:
    """The images of the field `images`."""
    if fields.get("videos"):
        raise ValueError(
            f"{place} has videos, which are not read; leave the column out, by "
            "columns={'videos': ''}, or the record."
        )
    try:
        return pictures(fields.get("images"), folder)
    except ValueError as error:
        raise ValueError(f"{place}: 'images': {error}.") from error


OTHER_NAMES = "config.tasks.*.columns maps other names, as {'problem': 'question'}."


def _prompt(fields: dict[str, Any], place: str) -> tuple[Any, Any, str]:
    """Question, chat, and the name of the field that one of them stands in."""
    question, messages = fields.get("question"), fields.get("messages")
    if question is None and messages is None and fields.get("prompt") is not None:
        prompt = fields["prompt"]
        return (None, prompt, "prompt") if isinstance(prompt, list) else (prompt, None, "prompt")
    if (question is None) == (messages is None):
        raise ValueError(
            f"{place}: expected either 'question' or 'messages', found {_names(fields)}; "
            f"{OTHER_NAMES}"
        )
    return question, messages, "messages" if question is None else "question"


def _answers(fields: dict[str, Any], place: str) -> tuple[str, ...]:
    value = next((fields[name] for name in ANSWER_KEYS if fields.get(name) is not None), None)
    answers = accepted_answers(value, place)
    if not answers:
        raise ValueError(
            f"{place}: expected 'answers', a list of at least one text; found {_names(fields)} "
            f"with the answers {value!r}; {OTHER_NAMES}"
        )
    return answers


def _ground_truth(reward_model: dict[str, Any], place: str) -> tuple[str, ...]:
    """The answers of a record of verl's: the ground truth, or its `target`.

    An object without a target is for a reward function that reads the metadata. Its JSON is the
    only answer.
    """
    truth = reward_model.get("ground_truth")
    if isinstance(truth, dict):
        truth = _without_nulls(truth)  # tables fill in the fields of other rows
        if truth and "target" not in truth:
            return (json.dumps(truth, ensure_ascii=False),)
        truth = truth.get("target")
    answers = accepted_answers(truth, place)
    if not answers:
        raise ValueError(
            f"{place}: 'reward_model' holds {_names(reward_model)}; expected 'ground_truth' with "
            f"an answer, found {truth!r}."
        )
    return answers


def accepted_answers(value: Any, place: str) -> tuple[str, ...]:
    """Return the accepted answers that a value holds, as texts.

    A text or a number is one answer. Each item of a list or a NumPy array is one; nulls are
    dropped.

    Args:
        value: Field of a record, of any format.
        place: File and row, for errors.

    Raises:
        ValueError: An answer is blank, or neither a text nor a finite number.
    """
    expected = "expected a text, a number or a list of these"
    try:
        plain = as_plain(value)
    except TypeError as error:
        raise ValueError(f"{place}: an answer holds {error}; {expected}.") from error
    answers = []
    for item in plain if isinstance(plain, list) else [plain]:
        if isinstance(item, str):
            answers.append(str(item))
        elif isinstance(item, int | float) and not isinstance(item, bool) and math.isfinite(item):
            answers.append(_number_text(item))
        elif item is not None:
            raise ValueError(f"{place}: an answer is {item!r:.100}; {expected}.")
    if not all(answer.strip() for answer in answers):
        raise ValueError(f"{place}: an answer is blank, which nothing can match; leave it out.")
    return tuple(answers)


def _number_text(number: float) -> str:
    """Return a finite number as people write it: `42.0` is 42, and `1e-05` is 0.00001."""
    if isinstance(number, int):
        return str(int(number))
    value = Decimal(repr(float(number)))
    # Tables widen 32 bits to 64: 0.1 becomes 0.10000000149011612, with more digits than were meant.
    with np.errstate(over="ignore"):
        narrow = np.float32(number)
    if len(value.as_tuple().digits) > MAX_DIGITS and float(narrow) == number:
        value = Decimal(str(narrow))
    return format(value.normalize() + 0, "f")


MAX_DIGITS = 15
"""Significant digits that every decimal number keeps in 64 bits."""


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

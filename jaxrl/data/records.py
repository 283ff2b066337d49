"""Parsers that turn records of any format into tasks and demonstrations."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl.data.readers.base import ANSWER_KEYS, to_json_value
from jaxrl.envs.base import Task
from jaxrl.envs.images import (
    IMAGE_TAG,
    VIDEO_TAG,
    Picture,
    has_content,
    parse_image,
    parse_images,
    parse_video,
    parse_videos,
    split_at_tags,
)
from jaxrl.utils.json_io import parse_json


def parse_task(fields: dict[str, Any], location: str, *, folder: Path | None = None) -> Task:
    """Convert a record to a task.

    A record has one of `question` (text), `messages` (a chat) and `prompt` (either). Its answers
    are in `answers`, `golden_answers` or `answer`; see `parse_answers`. In verl's format,
    `prompt` is a chat, and the answers are in `reward_model`. `id` (default: `location`),
    `data_source` and `metadata` are optional. All other fields are added to `Task.metadata`.

    `images` is an image or a list of images (see `parse_image`), one for each `<image>` placeholder
    in the text. Likewise, `videos` (see `parse_video`) belong to `<video>` placeholders. Without
    placeholders, images and videos precede the question or the first user message. Message content
    may also be a list of parts, some of which are images or videos.

    Args:
        fields: Values by field name.
        location: Location `file:row` of the record, for error messages.
        folder: Base folder for relative paths; by default the folder of the file in `location`.

    Raises:
        ValueError: A field is missing or has the wrong type.
    """
    try:
        return _parse_task(
            fields, location, _get_parent_folder(location) if folder is None else folder
        )
    except ValueError as error:
        raise ValueError(f"{location}: {error}") from error


def parse_demonstration(
    fields: dict[str, Any], location: str
) -> tuple[list[dict[str, Any]], tuple[Picture, ...]]:
    """Convert a record to the chat of a demonstration and the images in its prompt.

    Raises:
        ValueError: The record is not a chat, or has images after the first assistant message.
    """
    folder = _get_parent_folder(location)
    try:
        messages, images = parse_chat(fields.get("messages"), _parse_images(fields, folder), folder)
        roles = [message["role"] for message in messages]
        start = roles.index("assistant") if "assistant" in roles else len(roles)
        tags = {image.tag for image in images}
        parts = [p for m in messages[:start] for p in split_at_tags(m["content"], tags)]
        num_placeholders = sum(part in tags for part in parts)
        if images and num_placeholders != len(images):
            raise ValueError(
                f"{len(images) - num_placeholders} images come after the first assistant message; "
                "expected all images in the prompt."
            )
    except ValueError as error:
        raise ValueError(f"{location}: {error}") from error
    return messages, images


def _get_parent_folder(location: str) -> Path:
    return Path(location.rpartition(":")[0]).parent


def _parse_task(fields: dict[str, Any], location: str, folder: Path) -> Task:
    used = {"id", "data_source", "metadata", "images", "videos", *ANSWER_KEYS}
    reward_model = fields.get("reward_model")
    if isinstance(fields.get("prompt"), list) and isinstance(reward_model, dict):
        name = "prompt"
        answers = _parse_ground_truth(reward_model)
    else:
        name = _find_prompt_field(fields)
        answers = _require_answers(fields)
    prompt = fields[name]
    is_chat = name == "messages" or (name == "prompt" and isinstance(prompt, list))
    if not is_chat and not (isinstance(prompt, str) and prompt.strip()):
        raise ValueError(f"'question' is {prompt!r}; expected text that is not blank.")
    images = _parse_images(fields, folder)
    question, messages = (None, prompt) if is_chat else (prompt, None)
    if is_chat:
        messages, images = parse_chat(messages, images, folder)
    elif images:
        [message], images = parse_chat([{"role": "user", "content": question}], images, folder)
        question = message["content"]
    metadata = fields.get("metadata") or {}
    if not isinstance(metadata, dict):
        raise ValueError(f"'metadata' is {metadata!r}; expected an object.")
    id, data_source = fields.get("id"), fields.get("data_source")
    other_fields = {key: value for key, value in fields.items() if key not in {*used, name}}
    return Task(
        id=location if id is None else str(id),
        question=question,
        messages=tuple(messages) if messages is not None else None,
        answers=answers,
        data_source="default" if data_source is None else str(data_source),
        metadata=other_fields | metadata,
        images=images,
    )


_COLUMNS_HINT = "config.tasks.*.columns maps other names, such as {'problem': 'question'}."


def _find_prompt_field(fields: dict[str, Any]) -> str:
    """Return the name of the field with the question or the chat."""
    names = [name for name in ("question", "messages") if fields.get(name) is not None]
    if not names and fields.get("prompt") is not None:
        return "prompt"
    if len(names) != 1:
        raise ValueError(
            f"expected either 'question' or 'messages', found {_format_fields(fields)}; "
            f"{_COLUMNS_HINT}"
        )
    return names[0]


def _require_answers(fields: dict[str, Any]) -> tuple[str, ...]:
    value = next((fields[name] for name in ANSWER_KEYS if fields.get(name) is not None), None)
    answers = parse_answers(value)
    if not answers:
        raise ValueError(
            f"expected 'answers', a list of at least one text, found {_format_fields(fields)} with "
            f"the answers {value!r}; {_COLUMNS_HINT}"
        )
    return answers


def _parse_ground_truth(reward_model: dict[str, Any]) -> tuple[str, ...]:
    """Return the accepted answers of a verl record: the ground truth, or its `target`.

    If the ground truth is an object without `target`, its JSON is the only answer, because such an
    object is meant for a reward function that reads the metadata.
    """
    truth = reward_model.get("ground_truth")
    if isinstance(truth, dict):
        truth = _drop_nulls(truth)  # tables add null fields for other rows
        if truth and "target" not in truth:
            return (json.dumps(truth, ensure_ascii=False),)
        truth = truth.get("target")
    answers = parse_answers(truth)
    if not answers:
        raise ValueError(
            f"'reward_model' has {_format_fields(reward_model)}; expected 'ground_truth' with an "
            f"answer, found {truth!r}."
        )
    return answers


def parse_answers(value: Any) -> tuple[str, ...]:
    """Convert a value to a tuple of accepted answers.

    Args:
        value: A string or number, or a list or NumPy array of these. Nulls are dropped.

    Raises:
        ValueError: An answer is blank, or is neither a string nor a finite number.
    """
    expected = "expected text, a number, or a list of these"
    try:
        plain = to_json_value(value)
    except TypeError as error:
        raise ValueError(f"an answer contains {error}; {expected}.") from error
    answers = []
    for item in plain if isinstance(plain, list) else [plain]:
        if isinstance(item, str):
            answers.append(str(item))
        elif isinstance(item, int | float) and not isinstance(item, bool) and math.isfinite(item):
            answers.append(_format_number(item))
        elif item is not None:
            raise ValueError(f"an answer is {item!r:.100}; {expected}.")
    if not all(answer.strip() for answer in answers):
        raise ValueError("an answer is blank, which nothing can match; remove it.")
    return tuple(answers)


def _format_number(number: float) -> str:
    """Format a finite number without exponent or trailing zeros: 42.0 as 42, 1e-05 as 0.00001."""
    if isinstance(number, int):
        return str(int(number))
    value = Decimal(repr(float(number)))
    # Tables may widen float32 to float64: 0.1 becomes 0.10000000149011612. Restore the short form.
    with np.errstate(over="ignore"):
        float32 = np.float32(number)
    if len(value.as_tuple().digits) > MAX_DIGITS and float(float32) == number:
        value = Decimal(str(float32))
    return format(value.normalize() + 0, "f")


MAX_DIGITS = 15
"""Number of significant decimal digits that float64 always preserves."""


def parse_chat(
    messages: Any, images: Sequence[Picture], folder: Path
) -> tuple[list[dict[str, Any]], tuple[Picture, ...]]:
    """Convert a chat's contents to text with placeholders; also return its images and videos.

    All other non-null fields of a message are kept for the chat template. Tool-call arguments that
    are JSON strings become objects.

    Args:
        messages: Messages whose content is text, or a list of parts as in chat templates. Content
            is optional in an assistant message that has other fields, such as tool calls.
        images: Images and videos for the placeholders in texts, and for parts without content.
        folder: Base folder for relative paths in parts.

    Raises:
        ValueError: The value is not a chat, or the number of images and placeholders differs.
    """
    chat: list[Any] = []
    parts: list[tuple[str, Picture | None]] = []
    tags = {image.tag for image in images}
    # Join the parts of each message into a single text with placeholders.
    for message in messages if isinstance(messages, list) else [messages]:
        message = _normalize_message(message) if isinstance(message, dict) else {}
        content = message.get("content")
        if isinstance(content, list) and content:
            message_parts = [_parse_part(part, folder) for part in content]
            tags |= {IMAGE_TAG, VIDEO_TAG} & {text for text, _ in message_parts}
            message["content"] = "".join(text for text, _ in message_parts)
            parts += message_parts
        elif isinstance(content, str):
            parts.append((content, None))
        is_message = isinstance(message.get("role"), str)
        if not (is_message and isinstance(message.get("content"), str)):
            chat.clear()
            break
        chat.append(message)
    if not chat:
        raise ValueError("'messages' must be a list of objects with text 'role' and 'content'.")
    # Without images, `<image>` is plain text, and without videos, `<video>`.
    placeholders: list[Picture | str] = [
        image or part for text, image in parts for part in split_at_tags(text, tags) if part in tags
    ]
    written = {item if isinstance(item, str) else item.tag for item in placeholders}
    first = [image for image in images if image.tag not in written]
    index = next((i for i, message in enumerate(chat) if message["role"] == "user"), 0)
    chat[index]["content"] = "".join(image.tag for image in first) + chat[index]["content"]
    others = {}
    for tag, name in ((IMAGE_TAG, "images"), (VIDEO_TAG, "videos")):
        remaining = [image for image in images if image.tag == tag and tag in written]
        if placeholders.count(tag) != len(remaining):
            raise ValueError(
                f"{name!r} contains {len(remaining)} {name}, and the texts "
                f"{placeholders.count(tag)} placeholders {tag}; expected the same number, or no "
                "placeholders."
            )
        others[tag] = iter(remaining)
    return chat, (
        *first,
        *(next(others[item]) if isinstance(item, str) else item for item in placeholders),
    )


def _normalize_message(message: dict[str, Any]) -> dict[str, Any]:
    """Drop null fields, normalize tool calls, and add missing content to assistant messages.

    Raises:
        ValueError: The tool calls are malformed.
    """
    message = _drop_nulls(message)
    calls = message.get("tool_calls")
    if calls is not None:
        calls = calls if isinstance(calls, list | tuple) else [calls]
        message["tool_calls"] = [_normalize_tool_call(call) for call in calls]
    has_fields = any(value for name, value in message.items() if name not in ("role", "content"))
    if has_fields and message.get("role") == "assistant":
        message.setdefault("content", "")
    return message


def _drop_nulls(fields: Any) -> dict[str, Any]:
    """Return a dict without its null fields; {} if the value is not a dict."""
    if not isinstance(fields, dict):
        return {}
    return {name: value for name, value in fields.items() if value is not None}


def _normalize_tool_call(call: Any) -> dict[str, Any]:
    """Normalize a tool call, and parse arguments that are the JSON text of an object.

    As in transformers, `name` and `arguments` may be outside `function`.
    """
    fields = _drop_nulls(call)
    flat_function = {name: fields.pop(name) for name in ("name", "arguments") if name in fields}
    function = _drop_nulls(fields.get("function", flat_function))
    if not isinstance(function.get("name"), str):
        raise ValueError(
            f"'tool_calls' of a message contains {call!r:.100}; expected objects such as "
            '{"type": "function", "function": {"name": "search", "arguments": {"query": "x"}}}.'
        )
    if isinstance(arguments := function.get("arguments"), str):
        try:
            value = parse_json(arguments or "{}", "arguments")
        except ValueError:
            value = None
        function["arguments"] = value if isinstance(value, dict) else arguments
    return {**fields, "function": function}


def _parse_part(part: Any, folder: Path) -> tuple[str, Picture | None]:
    """Convert a content part to text or a placeholder; also return its image, if any.

    Raises:
        ValueError: The part is neither text nor an image or a video.
    """
    fields = _drop_nulls(part if isinstance(part, dict) else {"text": part})
    default = "text" if "text" in fields else "video" if "video" in fields else "image"
    kind = fields.get("type", default)
    text = fields.get("text")
    names = {
        "text": ("text",),
        "image": ("image", "image_url", "path", "url"),
        "image_url": ("image", "image_url", "path", "url"),
        "video": ("video", "frames", "fps", "path", "url"),
    }.get(kind, ())
    others = [name for name in fields if name not in ("type", *names)]
    if kind == "text" and isinstance(text, str) and not others:
        return text, None
    if kind == "text" or not names or others:
        raise ValueError(
            f"a message has a part of the type {kind!r}, with {_format_fields(fields)}; expected "
            "'text' with a text, 'image' or 'video', and no other fields."
        )
    is_video = kind == "video"
    content = {name: fields[name] for name in names if has_content(fields.get(name))}
    try:
        if not content:
            return VIDEO_TAG if is_video else IMAGE_TAG, None
        if is_video:
            return VIDEO_TAG, parse_video(content, folder)
        return IMAGE_TAG, parse_image(next(iter(content.values())), folder)
    except ValueError as error:
        name = "a video" if is_video else "an image"
        raise ValueError(f"{name} of a message: {error}.") from error


def _parse_images(fields: dict[str, Any], folder: Path) -> tuple[Picture, ...]:
    """Parse the fields `images` and `videos` of a record into one tuple."""
    images: list[Picture] = []
    for name, parse in (("images", parse_images), ("videos", parse_videos)):
        try:
            images += parse(fields.get(name), folder)
        except ValueError as error:
            raise ValueError(f"{name!r}: {error}.") from error
    return tuple(images)


def _format_fields(fields: dict[str, Any]) -> str:
    return "the fields " + (", ".join(map(repr, fields)) or "none")

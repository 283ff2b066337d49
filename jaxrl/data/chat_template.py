"""Rendering of chats with a model's chat template, without added or lost content.

Templates rewrite their input. Some remove the thoughts from earlier messages, so that few-shot
examples would seem to answer without searching; others add a default system message. Each chat is
therefore rendered twice: as is, and with markers in place of the message contents. The second
rendering shows which text the template itself writes, and where.

The template also renders other message fields, such as `tool_calls`. A third rendering, with
markers in place of their values, shows whether the template writes them all. If not, the chat is
rejected.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import string
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import jinja2

from jaxrl.envs.base import Message
from jaxrl.envs.images import IMAGE_TAG, VIDEO_TAG, split_at_tags

_MARKER = re.compile("\ue000([0-9]+)\ue001|\ue002([^\ue002\ue003]*)\ue003")
"""Numbered marker that replaces a text, or a pair of markers around a token in a field.

They use private-use characters, which no template contains.
"""


def _make_marker(number: int) -> str:
    return f"\ue000{number}\ue001"


def mark_token(text: str) -> str:
    """Put markers around a token's text, so that it can be found in a template's output."""
    return f"\ue002{text}\ue003"


Shape = tuple[tuple[str, tuple[str, ...] | None, str], ...]
"""Role, types of the content parts, and other fields as JSON, for each message of a chat.

The types are None for plain text, and () for empty content in a message with other fields.
"""

FieldPath = tuple[str | int, ...]
"""Path of keys and indices to a value in a message, such as `("tool_calls", 0, "id")`."""


def reads_clock(template: str) -> bool:
    """Return True if a chat template reads the current time, like that of Llama 3.2."""
    return re.search(r"\bstrftime_now\b", template) is not None


def freeze_clock(template: str, now: datetime) -> str:
    """Return a chat template in which `strftime_now` always returns `now`.

    Templates can only call functions that transformers passes in, so a macro replaces
    `strftime_now`. It supports single-letter directives, optionally with one glibc flag or
    modifier.
    """
    if not reads_clock(template):
        return template
    flags = ("-", "_", "0", "^", "#", "E", "O", "")
    directives = [f"%{flag}{letter}" for flag in flags for letter in string.ascii_letters]
    written = {directive: now.strftime(directive) for directive in directives}
    written = {"%%": "\ue004", **written, "\ue004": "%"}
    return (
        "{% macro strftime_now(format) %}{% set time = namespace(text=format) %}"
        f"{{% for directive, text in {json.dumps(written)}.items() %}}"
        "{% set time.text = time.text.replace(directive, text) %}{% endfor %}"
        "{{ time.text }}{% endmacro %}\n" + template
    )


@dataclass(frozen=True)
class ChatPiece:
    """Piece of a rendered chat."""

    text: str
    is_content: bool  # True for message content, False for text that the template writes


class ChatTemplate:
    """Chat template that knows which text it writes around message contents.

    Attributes:
        response_prefix: Text that the template writes at the start of the model's message, such as
            `<think>` and a line break; "" for most templates.
        message_end: Text after an assistant message.
        template_text: All text before, between and after messages, concatenated.
        image: Text for an image, such as `<|vision_start|><|image_pad|><|vision_end|>`; "" if the
            template does not support images.
        video: Text for a video; "" if the template does not support videos.
        dropped_system_message: Default system message that `render` removed from a chat; "" if
            none was removed.
    """

    def __init__(
        self,
        apply: Callable[[Sequence[Mapping[str, Any]], bool], str],
        *,
        bos: str = "",
        mark_tokens: Callable[[str], str] = lambda text: text,
    ):
        """Probe the template: render chats that consist of markers to find the text around them.

        Args:
            apply: Function that renders messages. The flag adds the generation prompt.
            bos: Text of the tokenizer's beginning-of-sequence token; "" if it has none.
            mark_tokens: Function that applies `mark_token` to each control token in a text. Used
                for all fields except role and content.
        """
        self._apply, self._mark_tokens = apply, mark_tokens
        self._cached_rendering = functools.lru_cache(self._render_with_slots)
        self._default_system = self._find_default_system(bos)
        self.dropped_system_message = ""
        # The response prefix precedes the model's next message but no earlier message.
        chat, prompt_texts = (
            self._split_around_roles("user", "assistant", "user"),
            self._split_around_roles("user", add_generation_prompt=True),
        )
        self.response_prefix = ""
        if chat is not None and prompt_texts is not None and prompt_texts[-1].startswith(chat[1]):
            self.response_prefix = prompt_texts[-1].removeprefix(chat[1])
        self.message_end = (self._split_around_roles("user", "assistant") or [""])[-1]
        chat_texts = self._split_around_roles("system", "user", "assistant", "user")
        self.template_text = "".join(
            chat_texts or self._split_around_roles("user", "assistant", "user") or []
        )
        # The template's text for an image or a video is found between two texts.
        self.image, self.video = (
            texts[1] if (texts := self._split_around_contents((("user", kinds, ""),))) else ""
            for kinds in (("text", "image", "text"), ("text", "video", "text"))
        )

    def render(
        self,
        messages: Sequence[Message],
        *,
        tags: Collection[str] = (),
        has_default_system: bool = False,
    ) -> list[ChatPiece]:
        """Render a chat up to the start of the model's next message, as a list of pieces.

        Contents are unchanged, except that the template may strip surrounding whitespace. The
        template renders all other fields.

        Args:
            messages: Chat messages.
            tags: Texts in the contents that are placeholders, such as `<image>`.
            has_default_system: True to keep the template's default system message in a chat
                without a system message.

        Raises:
            ValueError: The template rejects the chat, or drops a message or a field.
        """
        check_result_order(messages)
        # Split the chat into its shape, which determines the template's text, and its contents.
        roles = tuple(message["role"] for message in messages)
        fields = [_serialize_fields(message) for message in messages]
        split = [
            _split_content(message["content"], tags=tags, has_fields=bool(others))
            for message, others in zip(messages, fields, strict=True)
        ]
        part_types = [_find_part_types(parts, tags) for parts in split]
        shape = tuple(zip(roles, part_types, fields, strict=True))
        texts = [(i, part) for i, parts in enumerate(split) for part in parts if part not in tags]
        try:
            text = self._apply(_fill_shape(shape, [part for _, part in texts]), True)
            rendering = self._cached_rendering(shape, True)
        except Exception as error:  # a template is a program and may raise anything
            error_type = (
                "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: "
            )
            raise ValueError(
                f"the tokenizer's chat template rejects a chat with the roles {list(roles)}: "
                f"{error_type}{error}"
            ) from error
        # If the marker of a text is missing, the template dropped that text.
        for number, (index, part) in enumerate(texts):
            if number not in rendering and part.strip():
                role, content = roles[index], messages[index]["content"]
                shown = content if len(content) <= 60 else f"{content[:60]}…"
                raise ValueError(
                    f"the tokenizer's chat template drops message {index + 1}, with the role "
                    f"{role!r}: {shown!r}. Put its text into another message "
                    "(config.prompt.template holds the question), or fix the template in the "
                    "model's folder."
                )
        if any(fields):
            self._check_fields(shape)
        # Strip the contents if that reproduces the template's own rendering.
        contents = [part for _, part in texts]
        stripped = [content.strip() for content in contents]
        if "".join(piece.text for piece in _fill_slots(rendering, stripped)) == text:
            contents = stripped
        # Remove an unwanted default system message.
        if "system" not in roles and not has_default_system:
            start = rendering[0]
            assert isinstance(start, ChatPiece)
            default_system, replacement = self._default_system
            if default_system and default_system in start.text:
                self.dropped_system_message = default_system.removeprefix(replacement)
                start = dataclasses.replace(
                    start, text=start.text.replace(default_system, replacement, 1)
                )
            rendering = (start, *rendering[1:])
        return _fill_slots(rendering, contents)

    def render_turn(self, message: Message) -> str:
        """Render an assistant message that calls a tool, as the model would generate it.

        The result excludes the message header and the end-of-message token.

        Raises:
            ValueError: The template rejects the message, drops part of it, or does not support tool
                results.
        """
        first, *_, last = self.render_tool_turn([()])
        opening = {"role": "user", "content": "?"}
        # Before another question, no template adds an empty thought to the message.
        header = self._split_around_roles("user", "assistant", "user")
        header = header or self._split_around_roles("user", "assistant", "tool")
        assert header is not None  # checked by `render_tool_turn`
        chat = [opening, message, {"role": "tool", "content": "?"}]
        pieces = self.render(chat, has_default_system=True)
        text = "".join(piece.text for piece in pieces)
        begin, end = f"{header[0]}?{header[1]}", f"{first}?{last}"
        if not (text.startswith(begin) and text.endswith(end)):
            raise ValueError(
                "the tokenizer's chat template writes extra text around an assistant message with "
                f"the fields {', '.join(message)}; expected only the fields between "
                f"{header[1]!r} and {first!r}."
            )
        return text[len(begin) : len(text) - len(end)]

    def render_tool_turn(self, tags: Sequence[Sequence[str]]) -> list[str]:
        """Return the template's text before, between and after tool results that may have images.

        The first text starts right after an assistant message. The last text ends right before the
        next assistant message.

        Args:
            tags: Placeholders of the images and videos in each result, which follow its text.

        Raises:
            ValueError: The template does not support the role `tool`, or images in its messages.
        """
        results = (
            ("tool", ("text", *map(_PART_TYPES.__getitem__, parts)) if parts else None, "")
            for parts in tags
        )
        shape = (("user", None, ""), ("assistant", None, ""), *results)
        texts = self._split_around_contents(shape, add_generation_prompt=True)
        if texts is None and any(tags):
            raise ValueError(
                "a tool returned an image, but the tokenizer's chat template does not support "
                "images in messages of the role 'tool'. Set config.env.search.protocol to one with "
                "tags."
            )
        if texts is None:
            raise ValueError(
                "the tokenizer's chat template does not support messages with the role 'tool'; "
                "expected one that renders tool results. Set config.env.search.protocol to one "
                "with tags, or config.model.path to a model that was trained to call tools."
            )
        return texts[2:]

    def _check_fields(self, shape: Shape) -> None:
        """Check that the template renders all fields of all messages.

        Raises:
            ValueError: The template drops a field. The error names the field and the message.
        """
        texts = _make_markers(shape)
        marked = _fill_shape(shape, texts)
        paths = [path for path in _find_paths(marked) if not _is_tool_call_metadata(marked, path)]
        values = {}
        for number, path in enumerate(paths, start=len(texts)):
            values[number] = path, _replace_value(marked, path, _make_marker(number))
        try:
            written = self._apply(marked, True)
        except Exception:  # the template requires a value that is not a string
            written = ""
        marker_numbers = {int(mark[1]) for mark in _MARKER.finditer(written) if mark[1]}
        for number, (path, value) in values.items():
            if number not in marker_numbers and not self._uses_value(shape, path):
                index, *keys = path
                name = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys)
                raise ValueError(
                    f"the tokenizer's chat template drops {name[1:]!r} of message "
                    f"{int(index) + 1}, with the role {shape[int(index)][0]!r}: {value!r:.60}. "
                    "Remove it, or put its text into the content of a message."
                )

    def _uses_value(self, shape: Shape, path: FieldPath) -> bool:
        """Return True if removing the value at this path changes the rendering."""
        chat = _fill_shape(shape, _make_markers(shape))
        rendered = self._apply(chat, True)
        _replace_value(chat, path, None)
        try:
            return self._apply(chat, True) != rendered
        except Exception:  # the template requires the value
            return True

    def _render_with_slots(
        self, shape: Shape, add_generation_prompt: bool
    ) -> tuple[ChatPiece | int, ...]:
        """Render a chat to pieces, with a slot (the index, an int) for each content text."""
        chat = _fill_shape(shape, _make_markers(shape))
        for index, (_, _, fields) in enumerate(shape):
            if fields:
                chat[index] |= _mark_strings(json.loads(fields), self._mark_tokens)
        text = self._apply(chat, add_generation_prompt)
        rendering: list[ChatPiece | int] = []
        start = 0
        for mark in _MARKER.finditer(text):
            rendering.append(ChatPiece(text[start : mark.start()], False))
            rendering.append(int(mark[1]) if mark[1] else ChatPiece(mark[2], True))
            start = mark.end()
        return (*rendering, ChatPiece(text[start:], False))

    def _split_around_roles(
        self, *roles: str, add_generation_prompt: bool = False
    ) -> list[str] | None:
        """Call `_split_around_contents` for plain-text messages with these roles."""
        return self._split_around_contents(
            tuple((role, None, "") for role in roles), add_generation_prompt=add_generation_prompt
        )

    def _split_around_contents(
        self, shape: Shape, *, add_generation_prompt: bool = False
    ) -> list[str] | None:
        """Return the template's texts around the contents; None if it omits a content."""
        try:
            rendering = self._cached_rendering(shape, add_generation_prompt)
        except Exception:  # if this affects a real chat, `render` reports it
            return None
        numbers = [part for part in rendering if isinstance(part, int)]
        is_complete = numbers == [*range(len(_make_markers(shape)))]
        if not is_complete:
            return None
        return [part.text for part in rendering if isinstance(part, ChatPiece)]

    def _find_default_system(self, bos: str) -> tuple[str, str]:
        """Return how a chat starts with the default system message, and how it starts without it.

        The start of a chat is a system message if the user message after it looks the same as after
        an explicit system message. Both results are "" if the template has no default.
        """
        reference, user_only = (
            self._split_around_roles("system", "user"),
            self._split_around_roles("user"),
        )
        if reference is None or user_only is None:
            return "", ""
        begin, middle, _ = reference
        rendered, end = user_only
        header = middle.removeprefix(end)
        default_system = rendered.removesuffix(header)
        if not (begin and middle.startswith(end) and rendered == default_system + header):
            return "", ""
        # Keep a BOS token that starts the chat. One that starts every message is in the header.
        replacement = bos if begin.startswith(bos) and not header.startswith(bos) else ""
        return (default_system, replacement) if default_system.startswith(begin) else ("", "")


def check_result_order(messages: Sequence[Mapping[str, Any]]) -> None:
    """Check that tool results are in the same order as the ids of their calls.

    The order matters because most chat templates drop the ids that link results to calls.

    Raises:
        ValueError: A result is out of order or has no call. The error names the message.
    """
    ids: list[Any] = []
    num_results = 0
    for index, message in enumerate(messages):
        if message["role"] != "tool":
            calls = [call for call in message.get("tool_calls") or () if isinstance(call, Mapping)]
            ids, num_results = [call.get("id") for call in calls], 0
            continue
        reference, expected = message.get("tool_call_id"), ids[num_results : num_results + 1]
        num_results += 1
        if ids and None not in (reference, *ids) and [reference] != expected:
            raise ValueError(
                f"message {index + 1} has the tool_call_id {reference!r}; expected the result of "
                f"{repr(expected[0]) if expected else 'no further call'}: put the tool results in "
                "the order of the calls."
            )


def _serialize_fields(message: Message) -> str:
    """Serialize the non-null fields other than role and content to JSON; "" if there are none.

    Raises:
        ValueError: A value cannot be represented in JSON, or contains a marker character.
    """
    fields = {
        name: value
        for name, value in message.items()
        if name not in ("role", "content") and value is not None
    }
    try:
        text = json.dumps(fields, ensure_ascii=False) if fields else ""
    except TypeError as error:
        raise ValueError(
            f"a message has the fields {[*fields]}: {error}; expected JSON."
        ) from error
    if reserved := re.search("[\ue000-\ue003]", text):
        raise ValueError(
            f"the fields {[*fields]} of a message hold the character {reserved[0]!a}, which marks "
            "texts here; remove it."
        )
    return text


def _split_content(content: str, *, tags: Collection[str], has_fields: bool) -> list[str]:
    """Split content into texts and placeholders.

    Empty content in a message with other fields becomes [], because templates render tool calls
    differently after text.
    """
    if has_fields and not content:
        return []
    return split_at_tags(content, tags)


_PART_TYPES = {IMAGE_TAG: "image", VIDEO_TAG: "video"}


def _find_part_types(parts: Sequence[str], tags: Collection[str]) -> tuple[str, ...] | None:
    """Return the types of a content's parts; None for plain text, () for empty content."""
    if parts and not any(part in tags for part in parts):
        return None
    return tuple(_PART_TYPES[part] if part in tags else "text" for part in parts)


def _make_markers(shape: Shape) -> list[str]:
    """Return a marker for each content text of a chat with this shape."""
    count = sum(1 if kinds is None else kinds.count("text") for _, kinds, _ in shape)
    return [_make_marker(number) for number in range(count)]


def _fill_shape(shape: Shape, texts: Sequence[str]) -> list[dict[str, Any]]:
    """Build chat messages from a shape and the content texts."""
    remaining = iter(texts)
    messages = []
    for role, kinds, fields in shape:
        content: Any = ""
        if kinds is None:
            content = next(remaining)
        elif kinds:
            content = [
                {"type": kind, **({"text": next(remaining)} if kind == "text" else {})}
                for kind in kinds
            ]
        messages.append({"role": role, "content": content, **json.loads(fields or "{}")})
    return messages


def _find_paths(value: Any, path: FieldPath = ()) -> Iterator[FieldPath]:
    """Yield the path of each value that is not null or blank, except roles and contents."""
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            if len(path) != 1 or key not in ("role", "content"):
                yield from _find_paths(inner, (*path, key))
    elif value is not None and str(value).strip():
        yield path


def _is_tool_call_metadata(messages: Sequence[Mapping[str, Any]], path: FieldPath) -> bool:
    """Return True if a field, such as `tool_call_id`, only identifies or labels a tool call.

    Templates may drop such a value, because `check_result_order` ensures that results can be
    matched to calls by their order.
    """
    match path:
        case (_, "tool_call_id") | (_, "tool_calls", _, "id" | "type" | "index"):
            return True
        case (index, "name"):
            return bool(messages[int(index)]["role"] == "tool")
    return False


def _replace_value(messages: list[dict[str, Any]], path: FieldPath, value: str | None) -> Any:
    """Replace the value at a path, or remove it if `value` is None; return the old value."""
    *before, key = path
    inner: Any = messages
    for step in before:
        inner = inner[step]
    old = inner.pop(key)
    if value is not None and isinstance(inner, list):
        inner.insert(int(key), value)
    elif value is not None:
        inner[key] = value
    return old


def _mark_strings(value: Any, mark_tokens: Callable[[str], str]) -> Any:
    """Apply `mark_tokens` to all strings in a JSON value, including keys."""
    if isinstance(value, dict):
        return {mark_tokens(key): _mark_strings(inner, mark_tokens) for key, inner in value.items()}
    if isinstance(value, list):
        return [_mark_strings(inner, mark_tokens) for inner in value]
    return mark_tokens(value) if isinstance(value, str) else value


def _fill_slots(rendering: Sequence[ChatPiece | int], contents: Sequence[str]) -> list[ChatPiece]:
    """Replace each content slot, an int, with the content text of that index."""
    return [
        part if isinstance(part, ChatPiece) else ChatPiece(contents[part], True)
        for part in rendering
    ]

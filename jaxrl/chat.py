"""Chats to text by a model's chat template: nothing that was given is lost, and nothing added.

Templates rewrite what they are given. Some take the thoughts out of earlier messages, so that
worked examples would answer without having searched; others write a system message of their own
where there is none. So a chat is rendered twice: as it is, and with marks in place of its messages'
contents, which shows what the template itself writes and where.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2

from jaxrl.envs.base import Message
from jaxrl.envs.images import MARK

_MARK = re.compile("\ue000([0-9]+)\ue001")
"""Mark in place of a message's content, with its number; no template knows these characters."""


Shape = tuple[tuple[str, tuple[str, ...] | None], ...]
"""Role of each message of a chat, and the types of the parts of its content; None: a text."""


@dataclass(frozen=True)
class Piece:
    """A part of a rendered chat."""

    text: str
    is_given: bool  # the content of a message; else the template wrote it


class Chat:
    """A chat template, and what it writes beside the contents of messages.

    Attributes:
        opener: what the template writes of the model's own message before the model does, as
            `<think>` and a line break; "" for most.
        message_end: what it writes behind a message of the assistant.
        around: all that it writes before, between and behind messages.
        image: what it writes for an image, as `<|vision_start|><|image_pad|><|vision_end|>`; ""
            where it takes none.
    """

    def __init__(self, apply: Callable[[Sequence[Mapping[str, Any]], bool], str], *, bos: str = ""):
        """Renders chats of marks, which show what the template writes.

        Args:
            apply: renders messages, and what comes before the model's next one if that is wanted.
            bos: the text of the tokenizer's first token; "" for none.
        """
        self._apply = apply
        self._frame = functools.lru_cache(self._frame_of)
        self._own_system = self._find_own_system(bos)
        # Text before the model's message, beyond what is before an earlier one's.
        chat, asked = self._texts("user", "assistant", "user"), self._texts("user", asks=True)
        self.opener = ""
        if chat is not None and asked is not None and asked[-1].startswith(chat[1]):
            self.opener = asked[-1].removeprefix(chat[1])
        self.message_end = (self._texts("user", "assistant") or [""])[-1]
        around = self._texts("system", "user", "assistant", "user")
        self.around = "".join(around or self._texts("user", "assistant", "user") or [])
        # Text that stands for an image between two texts.
        image = self._texts_of((("user", ("text", "image", "text")),))
        self.image = "" if image is None else image[1]

    def render(self, messages: Sequence[Message], *, with_images: bool = False) -> list[Piece]:
        """A chat up to where the model's next message begins, in pieces.

        The contents are as the template gives them back, without the blanks around them if it
        takes these off. Where it leaves out more than blanks, they are whole nevertheless.

        Args:
            messages: the chat.
            with_images: the marks in the contents are images, which the template writes.

        Raises:
            ValueError: the template refuses the chat, or drops one of its messages.
        """
        roles = tuple(message["role"] for message in messages)
        split = [
            parts_of(message["content"]) if with_images else [message["content"]]
            for message in messages
        ]
        shape = tuple(zip(roles, map(_types, split), strict=True))
        texts = [(i, part) for i, parts in enumerate(split) for part in parts if part is not None]
        filled = _filled(shape, [part for _, part in texts])
        try:
            chat = [{**message, **new} for message, new in zip(messages, filled, strict=True)]
            text = self._apply(chat, True)
            frame = self._frame(shape, True)
        except Exception as error:  # a template is a program: anything may go wrong in it
            what = "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: "
            raise ValueError(
                f"the tokenizer's chat template refuses a chat of the roles {list(roles)}: "
                f"{what}{error}"
            ) from error
        for number, (index, part) in enumerate(texts):
            if number not in frame and part.strip():
                role, content = roles[index], messages[index]["content"]
                shown = content if len(content) <= 60 else f"{content[:60]}…"
                raise ValueError(
                    f"the tokenizer's chat template drops message {index + 1}, of the role "
                    f"{role!r}: {shown!r}. Put its text into another message "
                    "(config.prompt.template holds the question), or mend the template in the "
                    "model's folder."
                )
        contents = [part for _, part in texts]
        stripped = [content.strip() for content in contents]
        if "".join(piece.text for piece in _fill(frame, stripped)) == text:
            contents = stripped
        if "system" not in roles:
            frame = (str(frame[0]).replace(*self._own_system, 1), *frame[1:])
        return _fill(frame, contents)

    def tool_turn(self, num_images: Sequence[int]) -> list[str]:
        """Texts the template writes before, between and behind results of tools, images included.

        It begins right behind a message of the assistant, and ends where its next one begins.

        Args:
            num_images: of each result, behind its text.

        Raises:
            ValueError: the template does not take messages of the role `tool`, or images in them.
        """
        kinds = [("text", *["image"] * n) if n else None for n in num_images]
        shape = (("user", None), ("assistant", None), *(("tool", kind) for kind in kinds))
        texts = self._texts_of(shape, asks=True)
        if texts is None and any(num_images):
            raise ValueError(
                "a tool shows an image, and the tokenizer's chat template takes none in messages "
                "of the role 'tool'; expected a protocol with tags in config.env.search.protocol."
            )
        if texts is None:
            raise ValueError(
                "the tokenizer's chat template does not take messages of the role 'tool'; expected "
                "one that shows results of tools. Set config.env.search.protocol to one with tags, "
                "or config.model.path to a model that was trained to call tools."
            )
        return texts[2:]

    def _frame_of(self, shape: Shape, asks: bool) -> tuple[str | int, ...]:
        """Texts the template writes, with the numbers of the given texts where these stand."""
        count = sum(1 if kinds is None else kinds.count("text") for _, kinds in shape)
        marks = [f"\ue000{number}\ue001" for number in range(count)]
        # Every second part is the number of a mark, which `_MARK` captures.
        parts = _MARK.split(self._apply(_filled(shape, marks), asks))
        return tuple(int(part) if i % 2 else part for i, part in enumerate(parts))

    def _texts(self, *roles: str, asks: bool = False) -> list[str] | None:
        """Calls `_texts_of` on messages of these roles, whose contents are texts."""
        return self._texts_of(tuple((role, None) for role in roles), asks=asks)

    def _texts_of(self, shape: Shape, *, asks: bool = False) -> list[str] | None:
        """Text it writes before, between and behind texts; None where it does not take them."""
        try:
            frame = self._frame(shape, asks)
        except Exception:  # told by `render`, if it is more than a chat that it does not take
            return None
        is_whole = frame[1::2] == tuple(range(len(frame) // 2))
        count = sum(1 if kinds is None else kinds.count("text") for _, kinds in shape)
        return [str(part) for part in frame[::2]] if is_whole and len(frame) // 2 == count else None

    def _find_own_system(self, bos: str) -> tuple[str, str]:
        """The beginning of a chat with a system message that nobody gave, and what to have instead.

        The user's message begins in it as behind a system message that was given.
        """
        given, alone = self._texts("system", "user"), self._texts("user")
        if given is None or alone is None:
            return "", ""
        begin, middle, _ = given
        whole, end = alone
        header = middle.removeprefix(end)
        own = whole.removesuffix(header)
        if not (begin and middle.startswith(end) and whole == own + header):
            return "", ""
        # A first token stands before all messages; one that begins each stands in the header too.
        instead = bos if begin.startswith(bos) and not header.startswith(bos) else ""
        return (own, instead) if own.startswith(begin) else ("", "")


def parts_of(content: str) -> list[str | None]:
    """A content in texts and, as None, images, where the marks are; no empty text beside them."""
    if MARK not in content:
        return [content]
    first, *others = content.split(MARK)
    split = [first, *(part for text in others for part in (None, text))]
    return [part for part in split if part != ""]


def _types(parts: Sequence[str | None]) -> tuple[str, ...] | None:
    """Types of a content's parts; None where it is a text."""
    if None not in parts:
        return None
    return tuple("image" if part is None else "text" for part in parts)


def _filled(shape: Shape, texts: Sequence[str]) -> list[dict[str, Any]]:
    """Messages of this shape, with these texts."""
    left = iter(texts)
    return [
        {
            "role": role,
            "content": next(left)
            if kinds is None
            else [
                {"type": kind, **({"text": next(left)} if kind == "text" else {})} for kind in kinds
            ],
        }
        for role, kinds in shape
    ]


def _fill(frame: Sequence[str | int], contents: Sequence[str]) -> list[Piece]:
    return [
        Piece(part, False) if isinstance(part, str) else Piece(contents[part], True)
        for part in frame
    ]

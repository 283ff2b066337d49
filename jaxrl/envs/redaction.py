"""Redaction of API keys: what a run was told in confidence stands in no message, result or file.

A server may echo a key in whatever it answers, and in whatever spelling. What comes from one is
redacted where it comes in, so that nothing behind it need know of keys.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import operator
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import MemberDescriptorType
from typing import IO, Any, TypeVar, cast

from jaxrl.envs.images import Pictured

Value = TypeVar("Value")

SHOWN = "***"
"""Text in place of a key."""

_MIN_FOUND = 6  # characters of what may be a key in a result; fewer are many a word of it
_MAX_WORD = 15  # letters of a word, as EMPTY or placeholder, which some write for a key
_MAX_READ = 2**18  # characters of a text of which only the start is shown
_MAX_ESCAPED = 12  # characters for one of a key

_needles: dict[str, list[tuple[bytes, bool]]] = {}  # by key: its codings, and if in base64
_words: dict[str, re.Pattern[str]] = {}  # by what stands for a key and may be any word


def hide(secret: str) -> None:
    """Registers a key to be left out of all texts from now on, with the keys inside it.

    That is the token behind `Bearer`, the value of `token=`, the password behind a user's name,
    also in base64.
    """
    from jaxrl.envs.spellings import codings_of  # which runs without keys do without

    parts = {secret, *(part for part in secret.split() if len(part) >= _MIN_FOUND)}
    for part in list(parts):
        with contextlib.suppress(binascii.Error, UnicodeDecodeError):
            if secret.lower().startswith("basic "):
                padded = part + "=" * (-len(part) % 4)
                parts.add(base64.b64decode(padded, validate=True).decode())
    for part in list(parts):
        address = re.search(r"://[^/@\s:]*:([^/@\s]+)@", part)
        _, colon, password = part.partition(":")
        parts |= {address[1]} if address else {password} if colon and "//" not in part else set()
        parts |= set(re.findall(r"(?<![^\s;,])[\w.-]{1,64}=\"?([^\s;,\"]{6,})", part))
    for part in sorted(parts - {""}):
        # What holds a key and little else needs no codings: that key's are found in them.
        is_covered = any(one in part and len(part) / 2 < len(one) < len(part) for one in parts)
        is_word = part.isalpha() and len(part) <= _MAX_WORD
        if not is_word and len(part) >= _MIN_FOUND:
            codings = [one for one in codings_of(part) if len(one[0]) >= _MIN_FOUND]
            _needles.setdefault(part, codings[:1] if is_covered else codings)
        elif part == secret:
            _words[part] = re.compile(rf"(?<![^\W_]){re.escape(part)}(?![^\W_])")


def redacted(text: str) -> str:
    """A message without keys; one that may be any word is left out where it stands alone."""
    for word, pattern in list(_words.items()):
        if word in text:
            text = pattern.sub(SHOWN, text)
    return redacted_content(text)


def redacted_start(text: str, length: int) -> str:
    """The first characters of a message, without keys and without the beginning of one."""
    start = redacted(text[:_MAX_READ])
    if len(text) > _MAX_READ:  # what was cut there may be the beginning of a key
        start = start[: max(0, len(start) - _margin())]
    return start[:length]


def redacted_end(text: str, length: int, *, is_cut: bool) -> str:
    """The last characters of a message, without keys.

    Args:
        text: the message.
        length: how many characters, at most.
        is_cut: the text may begin with the rest of a key, which is left out too.
    """
    end = redacted(text)
    return end[_margin() if is_cut else 0 :][-length:]


def _margin() -> int:
    """Characters of the longest key, escaped."""
    return _MAX_ESCAPED * max(map(len, [*_needles, *_words]), default=0)


def redacted_content(value: Value) -> Value:
    """Text, or JSON with all texts and numbers in it, without keys; any word stays.

    A key is found that is split over texts of a list, or over lines.
    """
    texts: list[str] = []
    _collect(value, texts)
    if not _needles:
        return value
    from jaxrl.envs.spellings import places_of

    places = places_of(list(_needles.items()), "\n".join(texts))
    return _rebuilt(value, _cut(texts, places)) if places else value


def redact_error(error: BaseException) -> None:
    """Leaves keys out of an exception's texts, and of those of the exceptions behind it.

    Where it makes its text of anything else, that may hold a key still.
    """
    waiting: list[Any] = [error]
    seen: set[int] = set()
    while waiting:
        one = waiting.pop()
        if not isinstance(one, BaseException) or id(one) in seen:
            continue
        seen.add(id(one))
        slots = [
            name
            for kind in type(one).__mro__
            for name, member in vars(kind).items()
            if isinstance(member, MemberDescriptorType)
        ]
        for name in ("args", *vars(one), *slots):
            with contextlib.suppress(Exception):  # some cannot be set, and classes are the user's
                value = getattr(one, name)
                if (clean := _cleaned(value)) is not value:
                    setattr(one, name, clean)
                waiting += value if isinstance(value, list | tuple) else [value]
        if isinstance(one, SystemExit) and not isinstance(one.code, int | None):
            one.code = redacted(str(one.code))
        waiting += [one.__cause__, one.__context__]


def _cleaned(value: Any) -> Any:
    """A value of an exception without keys; the same object where it holds none."""
    if isinstance(value, bytes):
        text = value.decode("utf-8", "surrogateescape")
        clean = redacted(text)
        return value if clean == text else clean.encode("utf-8", "surrogateescape")
    if isinstance(value, str):
        clean = redacted(value)
        return value if clean == value else clean
    if isinstance(value, tuple):
        cleaned = tuple(map(_cleaned, value))
        return value if all(map(operator.is_, value, cleaned)) else cleaned
    return redacted_content(value)


class _RedactedStream:
    """Text stream that redacts keys written in one piece and replaces what it cannot encode."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        text = redacted(text)
        try:
            return self._stream.write(text)
        except UnicodeEncodeError as error:
            return self._stream.write(text.encode(error.encoding, "replace").decode(error.encoding))

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def redacted_output() -> Iterator[None]:
    """Leaves keys out of what is printed, logged to the terminal or raised: users' code too.

    What shows an exception that nobody catches remains, since that comes behind it.
    """
    if getattr(sys.excepthook, "__func__", None) is not _Excepthook.show:
        sys.excepthook = _Excepthook(sys.excepthook).show
    if getattr(threading.excepthook, "__func__", None) is not _Excepthook.show_in_thread:
        threading.excepthook = _Excepthook(threading.excepthook).show_in_thread
    out, err = (cast("IO[str]", _RedactedStream(one)) for one in (sys.stdout, sys.stderr))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            yield
        except BaseException as error:
            redact_error(error)
            raise


class _Excepthook:
    """Exception hook that redacts keys; without any, the hook before shows the exception."""

    def __init__(self, before: Callable[..., object]) -> None:
        self._before = before

    def show(self, *raised: Any) -> None:
        self._show(raised[1], "", raised)

    def show_in_thread(self, raised: threading.ExceptHookArgs) -> None:
        name = raised.thread.name if raised.thread else "?"
        self._show(raised.exc_value, f"Exception in thread {name}:\n", (raised,))

    def _show(self, error: BaseException | None, title: str, raised: Sequence[Any]) -> None:
        text = "".join([title, *traceback.format_exception(error)]) if error else ""
        if (clean := redacted(text)) == text:
            self._before(*raised)
        else:
            sys.stderr.write(clean)


def _collect(value: Any, texts: list[str]) -> None:
    """Adds all texts of a value, and its numbers where a key is one."""
    if isinstance(value, str):
        texts.append(value)
    elif isinstance(value, list | tuple):
        for one in value:
            _collect(one, texts)
    elif isinstance(value, dict):
        for name, one in value.items():
            _collect(name, texts)
            _collect(one, texts)
    elif _may_be_key(value):
        texts.append(repr(value))


def _rebuilt(value: Any, texts: Iterator[str]) -> Any:
    """A value with other texts, as many and in the order that `_collect` has them."""
    if isinstance(value, str):
        text = next(texts)
        return Pictured(text, value.images) if isinstance(value, Pictured) else text
    if isinstance(value, list | tuple):
        return type(value)([_rebuilt(one, texts) for one in value])
    if isinstance(value, dict):
        return {_rebuilt(name, texts): _rebuilt(one, texts) for name, one in value.items()}
    if _may_be_key(value):
        text = next(texts)
        return value if text == repr(value) else text
    return value


def _may_be_key(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and any(key.isdecimal() for key in list(_needles))


def _cut(texts: Iterable[str], places: list[tuple[int, int]]) -> Iterator[str]:
    """Replaces the spans of the joined texts in each of them."""
    offset, index = 0, 0
    for text in texts:
        end, at, kept = offset + len(text), offset, []
        while index < len(places) and places[index][0] < end:
            kept += [text[at - offset : max(at, places[index][0]) - offset], SHOWN]
            at = min(places[index][1], end)
            if places[index][1] > end:  # it goes on in the next text
                break
            index += 1
        yield "".join([*kept, text[at - offset :]])
        # A span that ends here, or at the newline that joins the texts, is done.
        while index < len(places) and places[index][1] <= end + 1:
            index += 1
        offset = end + 1

"""Keys out of texts: what a run was told in confidence stands in no message, result or file.

A server may echo a key in whatever it answers, and in whatever spelling. What comes from one is
redacted where it comes in, so that nothing behind it need know of keys.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import html.entities
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import IO, Any, TypeVar, cast

from jaxrl.envs.images import Pictured

Value = TypeVar("Value")

SHOWN = "***"
"""In place of a key."""

_MAX_SPELLED = 128  # characters of a key that are looked for in all spellings
_MIN_FOUND = 6  # characters of what may be a key in a result; fewer are many a word of it
_MAX_WORD = 15  # letters of a word, as EMPTY or placeholder, which some write for a key

_patterns: dict[str, list[re.Pattern[str]]] = {}  # by key
_words: dict[str, re.Pattern[str]] = {}  # by what stands for a key and may be any word

_NAMES: dict[str, list[str]] = defaultdict(list)
for _name, _text in html.entities.html5.items():
    if len(_text) == 1 and _text.isascii() and _name.endswith(";"):
        _NAMES[_text].append(_name)

# The same character escaped by several hands, one after another, has more of these.
_BACKSLASH = r"(?:\\|%(?:25){0,3}5[cC]){1,8}"
_PERCENT = r"%(?:25){0,3}"
_AMPERSAND = r"&(?:amp;){0,3}"


def hide(secret: str) -> None:
    """Has a key left out of all texts from now on, with what in it is a key itself.

    That is the token behind `Bearer`, the password behind a user's name, also in base64.
    """
    parts = {secret, *(part for part in secret.split() if len(part) >= _MIN_FOUND)}
    for part in list(parts):
        with contextlib.suppress(binascii.Error, UnicodeDecodeError):
            if secret.lower().startswith("basic "):
                parts.add(base64.b64decode(part, validate=True).decode())
    for part in list(parts):
        address = re.search(r"://[^/@\s:]*:([^/@\s]+)@", part)
        _, colon, password = part.partition(":")
        parts |= {address[1]} if address else {password} if colon and "//" not in part else set()
    for part in sorted(parts - {""}, key=len, reverse=True):  # the whole before its parts
        is_word = part.isalpha() and len(part) <= _MAX_WORD
        if not is_word and len(part) >= _MIN_FOUND:
            _patterns.setdefault(part, _spellings(part))
        elif part == secret:
            _words[part] = re.compile(rf"(?<![^\W_]){re.escape(part)}(?![^\W_])")


def redacted(text: str) -> str:
    """A message without keys; one that may be any word is left out where it stands alone."""
    for word in _words.values():
        text = word.sub(SHOWN, text)
    return redacted_content(text)


def redacted_content(value: Value) -> Value:
    """Text, or JSON with all texts in it, without keys; one that may be any word stays."""
    if not _patterns:
        return value
    return _redacted(value)


def redact_error(error: BaseException) -> None:
    """Leaves keys out of an exception's texts, and of those of the exceptions behind it."""
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        one.args = tuple(redacted(text) if isinstance(text, str) else text for text in one.args)
        if isinstance(one, SystemExit) and isinstance(one.code, str):
            one.code = redacted(one.code)
        waiting += [one.__cause__, one.__context__, *getattr(one, "exceptions", ())]


class _RedactedStream:
    """A stream of text through which no key comes that is written in one piece."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write(redacted(text))

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def redacted_output() -> Iterator[None]:
    """Leaves keys out of what is printed, logged to the terminal or raised: users' code too."""
    out, err = (cast("IO[str]", _RedactedStream(one)) for one in (sys.stdout, sys.stderr))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            yield
        except BaseException as error:
            redact_error(error)
            raise


def _redacted(value: Any) -> Any:
    if isinstance(value, str):
        text = str(value)
        for pattern in [one for spellings in list(_patterns.values()) for one in spellings]:
            text = pattern.sub(SHOWN, text)
        return Pictured(text, value.images) if isinstance(value, Pictured) else text
    if isinstance(value, list | tuple):
        return type(value)([_redacted(one) for one in value])
    if isinstance(value, dict):
        return {_redacted(name): _redacted(one) for name, one in value.items()}
    return value


def _spellings(secret: str) -> list[re.Pattern[str]]:
    """Patterns of a key in all usual spellings: escaped, percent-encoded, in base64, in hex."""
    data = secret.encode()
    texts = [_spelled(secret), _spelled(data.hex(), is_hex=True)]
    for skipped in range(3):  # bytes before it in a group of three, as of a user's name
        coded = base64.b64encode(bytes(skipped) + data).decode().rstrip("=")
        bits = 8 * (skipped + len(data))
        known = coded[-(-8 * skipped // 6) : bits // 6]  # what depends on no byte beside it
        if len(known) >= _MIN_FOUND:
            texts.append(_spelled(known, is_base64=True) + r"(?:[\w+/-]?(?:=|%3[dD]){0,2})")
    return [re.compile(text) for text in texts]


def _spelled(text: str, *, is_base64: bool = False, is_hex: bool = False) -> str:
    start = text[:_MAX_SPELLED]
    pattern = "".join(_character(one, is_base64=is_base64, is_hex=is_hex) for one in start)
    rest = len(text) - len(start)
    return pattern + (rf"[^\s\"'<>]{{0,{12 * rest}}}" if rest else "")


def _character(one: str, *, is_base64: bool, is_hex: bool) -> str:
    """Matches one character of a key, as any of several hands writes it."""
    same = {one}
    if is_base64:
        same |= {"+": {"-"}, "/": {"_"}}.get(one, set())
    if is_hex:
        same |= {one.upper()}
    if is_hex:
        return f"[{''.join(sorted(same))}]"
    spellings = []  # the longest first: a backslash begins what stands for one
    for text in sorted(same):
        code = ord(text)
        digits = "".join(f"[{d}{d.upper()}]" if d.isalpha() else d for d in f"{code:02x}")
        spellings += [
            f"{_PERCENT}{digits}",
            f"{_BACKSLASH}(?:u00|x){digits}",
            f"{_AMPERSAND}#(?:0{{0,6}}{code}|[xX]0{{0,6}}{digits});?",
        ]
        if _NAMES[text]:
            spellings.append(f"{_AMPERSAND}(?:{'|'.join(_NAMES[text])})")
        if not text.isalnum():
            spellings.append(f"{_BACKSLASH}{re.escape(text)}")
        spellings += [re.escape(text), *([r"\+"] if text == " " else [])]
    return f"(?:{'|'.join(spellings)})"

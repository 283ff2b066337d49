"""Text from outside as files, terminals and pages can hold it."""

from __future__ import annotations

import codecs
import io
import re
import sys

# What a terminal obeys, a page may not hold or a reader cannot see: C0 but newline and tab, DEL,
# C1, marks that turn the direction of writing, characters without width, tags.
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f"
    "\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ufeff\uffa0\ufff0-\ufffb"
    "\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)


def _replaced(error: UnicodeError) -> tuple[bytes, int]:
    assert isinstance(error, UnicodeEncodeError)
    return "\N{REPLACEMENT CHARACTER}".encode() * (error.end - error.start), error.end


codecs.register_error("jaxrl.replaced", _replaced)


def writable(text: str) -> str:
    """Text that UTF-8 has bytes for: a half of a surrogate pair becomes a replacement character.

    Text of a server, a library or a file name may hold such halves, and no file takes them.
    """
    if type(text) is str and text.isascii():
        return text
    return text.encode("utf-8", "jaxrl.replaced").decode("utf-8")


def replace_unencodable() -> None:
    """Let the stdout of this process replace characters that its encoding lacks.

    Every command calls this first: any name or text may be part of its output.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def printable(text: str) -> str:
    r"""Text to show on a terminal or a page: writable, and what is obeyed or hidden as its code.

    Newline and tab stay. An escape sequence reads as `\x1b[2J` and is not obeyed, a mark that
    would turn the rest of a line round reads as `\u202e`.
    """
    return _HIDDEN.sub(lambda m: m[0].encode("unicode_escape").decode("ascii"), writable(text))

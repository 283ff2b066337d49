"""Foreign text for files, terminals and pages."""

from __future__ import annotations

import codecs
import io
import re
import sys
import unicodedata

import regex

# Control and invisible characters: C0 except newline and tab, DEL, C1, marks of direction,
# characters without width, tags.
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f"
    "\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ufeff\uffa0\ufff0-\ufffb"
    "\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)

UNSPACED = (
    r"[\u3005-\u3007\u3041-\u3096\u309d-\u309f\u30a1-\u30fa\u30fc-\u30ff\u31f0-\u31ff"
    r"\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff\U00020000-\U0003ffff"
    r"[\p{Line_Break=SA}--\p{M}]]"
)
"""A letter of a script without blanks between words, as a set of the `regex` module (`V1`).

Han, kana, Hangul (whose words have endings), and Unicode's class SA, such as Thai, Lao and Khmer.
"""

# Invisible characters such as soft hyphens and joiners, and enclosing marks such as a keycap's.
_IGNORED = regex.compile(r"[\p{Cf}\p{Default_Ignorable_Code_Point}\p{Me}]")


def _replaced(error: UnicodeError) -> tuple[bytes, int]:
    assert isinstance(error, UnicodeEncodeError)
    return "\N{REPLACEMENT CHARACTER}".encode() * (error.end - error.start), error.end


codecs.register_error("jaxrl.replaced", _replaced)


def writable(text: str) -> str:
    """Replace lone surrogates, which servers and file names may contain, by U+FFFD."""
    if type(text) is str and text.isascii():
        return text
    return text.encode("utf-8", "jaxrl.replaced").decode("utf-8")


def fold(text: str) -> str:
    """Return a text in lowercase and NFKC, without invisible characters."""
    if not text.isascii():
        text = unicodedata.normalize("NFKC", _IGNORED.sub("", text))
    text = text.lower()
    if text.isascii():
        return text
    # Python lowers a Turkish capital "İ" to an "i" with a second dot. Some letters compose only in
    # lowercase, such as "ẖ".
    return unicodedata.normalize("NFC", text.replace("i\u0307", "i"))


def replace_unencodable() -> None:
    """Let the stdout of this process replace characters that its encoding lacks.

    Every command calls this first: any name or text may be part of its output.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def printable(text: str) -> str:
    r"""Return writable text for a terminal or a page, with control characters as escapes.

    Newline and tab stay. An escape sequence reads as `\x1b[2J`.
    """
    return _HIDDEN.sub(lambda m: m[0].encode("unicode_escape").decode("ascii"), writable(text))

"""Cleaning of untrusted text for files, terminals and web pages."""

from __future__ import annotations

import io
import re
import sys
import unicodedata

import regex

MAX_ERROR_CHARS = 2000
"""Maximum length of an exception's text in characters, since some libraries write pages."""

# Control and invisible characters: C0 except newline and tab, DEL, C1, direction marks, zero-width
# characters, tags.
_INVISIBLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f"
    "\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ufeff\uffa0\ufff0-\ufffb"
    "\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)

UNSPACED = (
    r"[\u3005-\u3007\u3041-\u3096\u309d-\u309f\u30a1-\u30fa\u30fc-\u30ff\u31f0-\u31ff"
    r"\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff\U00020000-\U0003ffff"
    r"[\p{Line_Break=SA}--\p{M}]]"
)
"""A letter of a script without spaces between words, as a character set of `regex` (`V1`).

Han, kana, Hangul (because its words have endings), and Unicode line break class SA, such as Thai,
Lao and Khmer.
"""

# Invisible characters such as soft hyphens and joiners, and enclosing marks such as keycaps.
_IGNORED = regex.compile(r"[\p{Cf}\p{Default_Ignorable_Code_Point}\p{Me}]")


def replace_surrogates(text: str) -> str:
    """Join surrogate pairs and replace lone surrogates with U+FFFD.

    Servers, models and file names may contain them, but UTF-8 cannot encode them.
    """
    if type(text) is str and text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def fold_case(text: str) -> str:
    """Convert a text to lowercase NFKC without invisible characters."""
    if not text.isascii():
        text = unicodedata.normalize("NFKC", _IGNORED.sub("", text))
    text = text.lower()
    if text.isascii():
        return text
    # Python lowercases the Turkish "İ" to an "i" with a second dot. Some letters, such as "ẖ",
    # have a composed form only in lowercase.
    return unicodedata.normalize("NFC", text.replace("i\u0307", "i"))


def replace_unencodable_output() -> None:
    """Configure stdout to replace characters that its encoding cannot represent.

    Every command calls this first, since output may contain arbitrary names and text.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def escape_control_chars(text: str) -> str:
    r"""Escape control characters, so that text is safe for a terminal or web page.

    Newlines and tabs are kept. A terminal escape sequence becomes plain text such as `\x1b[2J`.
    """
    return _INVISIBLE.sub(
        lambda m: m[0].encode("unicode_escape").decode("ascii"), replace_surrogates(text)
    )

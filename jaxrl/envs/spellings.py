"""Spellings of an API key: how it may stand in a text, escaped and coded, and where it does."""

from __future__ import annotations

import base64
import html.entities
import itertools
import re
import sys
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence

_MAX_SPELLED = 128  # bytes of a key that are looked for; what goes on as the key is one too
_ROUNDS = 8  # of unescaping: hands that escaped a text one after another, each in its own way
_ANCHOR = 12  # bytes of a needle that are looked for first: a short one is found much faster
_SPACES = bytes([*range(33), 127])  # NUL too, which stands between the letters in UTF-16
_SPACE = re.compile(rb"[\x00-\x20\x7f]+")
_DROPPED = re.compile(rb"[\\\x00-\x20\x7f]+")

# Base64 has two alphabets, hex capitals and small letters.
_ALIKE = bytes.maketrans(b"-_", b"+/").lower()
_BASE64_END = re.compile(rb"[0-9a-zA-Z+/_-]?(?:=|%3[dD]){0,2}")

# What several hands have escaped in the same way, one after another, is read in one go.
_ESCAPE = re.compile(
    rb"\\++(?:u([0-9a-fA-F]{4})|u\{([0-9a-fA-F]{1,6})\}|U([0-9a-fA-F]{8})|x([0-9a-fA-F]{2})|([nrt]))?"
    rb"|%(?:25)*+(?:u([0-9a-fA-F]{4})|([0-9a-fA-F]{2}))?"
    rb"|&(?:amp;)*+(?:#0*+([0-9]{1,7});?|#[xX]0*+([0-9a-fA-F]{1,6});?|([a-zA-Z0-9]{2,31};))?"
)
_CODE, _BYTE, _SPACE_NAMED, _NAME = {1, 2, 3, 6, 9}, {4, 7}, 5, 10  # groups; 8 is decimal


def places_of(
    needles: Sequence[tuple[str, Sequence[tuple[bytes, bool]]]], text: str
) -> list[tuple[int, int]]:
    """Spans of keys in a text, in order and disjoint.

    Args:
        needles: keys with their codings, as `codings_of` has them.
        text: in which they are looked for.
    """
    data = text.encode("utf-8", "surrogatepass")
    as_written = [place for key, _ in needles for place in _occurrences(key.encode(), data)]
    plain, steps = _unescaped(data)
    matches: list[tuple[tuple[int, int], bool]] = []
    for needle, is_base64 in (coding for _, codings in needles for coding in codings):
        for start, end in _occurrences(needle[:_MAX_SPELLED], plain):
            # As much of a long key's rest as is there is left out too.
            more = zip(needle[_MAX_SPELLED:], plain[end : end + len(needle)], strict=False)
            end += sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], more))
            matches.append(((start, end), is_base64))
    spans = [place for place, _ in matches]
    for pattern, before in reversed(steps) if spans else ():
        spans = _origins(pattern, before, spans)
    # The last letter of base64 may be of what is behind the key too, so that none is looked for.
    for index, (start, end) in enumerate(spans):
        if matches[index][1] and (rest := _BASE64_END.match(data, end)):
            spans[index] = (start, rest.end())
    apart: list[tuple[int, int]] = []
    for start, end in sorted([*as_written, *spans]):
        if apart and start < apart[-1][1]:
            start, end = apart[-1][0], max(end, apart.pop()[1])
        apart.append((start, end))
    if text.isascii():
        return apart
    # From bytes to characters, by the characters between one bound and the next.
    bounds = [0, *itertools.chain(*apart)]
    sizes = (
        len(data[start:end].decode("utf-8", "surrogatepass"))
        for start, end in itertools.pairwise(bounds)
    )
    indices = list(itertools.accumulate(sizes))
    return list(zip(indices[::2], indices[1::2], strict=True))


def _occurrences(needle: bytes, data: bytes) -> Iterator[tuple[int, int]]:
    at = data.find(needle[:_ANCHOR])
    while at >= 0 and (at := data.find(needle, at)) >= 0:
        yield at, at + len(needle)
        at += len(needle)


def _unescaped(data: bytes) -> tuple[bytes, list[tuple[re.Pattern[bytes], bytes]]]:
    """Normalises a text: no escapes, spaces, backslashes or capitals; also the steps to get there.

    A key comes out alike however it was escaped; for a step, there are what was replaced and in
    which text.
    """
    steps = [(_SPACE, data)]
    data = data.translate(None, _SPACES)
    for _ in range(_ROUNDS):
        steps.append((_ESCAPE, data))
        data = _ESCAPE.sub(_meaning, data)
        if data == steps[-1][1]:
            break
    steps.append((_DROPPED, data))
    return data.translate(_ALIKE, _SPACES + b"\\"), steps


def _meaning(match: re.Match[bytes]) -> bytes:
    """Decodes a piece of a text that is replaced; b"" where it stands for no byte."""
    group = match.lastindex
    if group is None:
        return match[0][:1] if match.re is _ESCAPE else b""
    digits = match[group]
    if group in _BYTE:
        return bytes((int(digits, 16),))
    if group == _SPACE_NAMED:
        return b""
    if group == _NAME:
        named = html.entities.html5.get(digits.decode(), "")
        return named.encode() if len(named) == 1 else b"&" + digits
    code = int(digits, 16 if group in _CODE else 10)
    return chr(code).encode("utf-8", "surrogatepass") if code <= sys.maxunicode else b""


def _origins(
    pattern: re.Pattern[bytes], before: bytes, spans: list[tuple[int, int]]
) -> list[tuple[int, int]]:
    """Spans in the text before a step, from those in the text after it."""
    firsts, starts, ends, sizes, gone = array("q"), array("q"), array("q"), array("q"), 0
    for match in pattern.finditer(before):
        start, end = match.span()
        size = len(_meaning(match))
        firsts.append(start - gone)  # where what replaces it begins
        starts.append(start)
        ends.append(end)
        sizes.append(size)
        gone += end - start - size

    def origin(at: int) -> tuple[int, int]:
        index = bisect_right(firsts, at) - 1
        if index < 0:
            return at, at + 1
        beyond = at - firsts[index] - sizes[index]
        if beyond < 0:
            return starts[index], ends[index]
        return ends[index] + beyond, ends[index] + beyond + 1

    return [(origin(start)[0], origin(end - 1)[1]) for start, end in spans]


def codings_of(secret: str) -> list[tuple[bytes, bool]]:
    """A key as it stands in an unescaped text: plain, then in hex, or once or twice in base64."""
    data = secret.encode()
    once = _base64(data)
    # In hex bytes may have anything between them but spaces, which are gone; or be in decimal.
    in_hex = [data.hex(), *(data.hex(between) for between in ":-,")]
    in_hex += [data.hex(",").replace(",", ",0x"), ",".join(map(str, data))]
    numbers = [one.encode() for one in in_hex]
    coded = {
        **dict.fromkeys([data, data.replace(b" ", b"+"), *numbers], False),  # + as in forms
        **dict.fromkeys([*once, *(twice for one in once for twice in _base64(one))], True),
    }
    needles = {_unescaped(one)[0]: is_base64 for one, is_base64 in coded.items()}
    return list(needles.items())


def _base64(data: bytes) -> list[bytes]:
    """Bytes in base64 with 0 to 2 others before them, without what depends on any beside them."""
    codes = []
    for skipped in range(3):
        bits = 8 * (skipped + len(data))
        known = slice(-(-8 * skipped // 6), bits // 6)
        padded = bytes(skipped) + data
        codes += [base64.b64encode(padded)[known], base64.urlsafe_b64encode(padded)[known]]
    return list(dict.fromkeys(codes))

"""Extraction of math answers and comparison by value."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from fractions import Fraction

from jaxrl.envs.rewards.rules import extract_last_boxed, is_refusal

_ANSWER_LINE = re.compile(r"\banswer[*_]*\s*:[*_]*\s*([^\n]*)", re.IGNORECASE)
_COMMA = r"(?:\\!)*(?:\{,\}|,)(?:\s?\\!)*(?:(?<=[!}])\s)?"  # a plain `, ` separates list items
_SPACE = r"(?:\{\\[,;:]\}|\\(?:[,;:!]|thinspace(?![A-Za-z]))\s?|\\ |[~ \u00a0\u2009\u202f])"
_THOUSANDS = re.compile(
    rf"(?<![\d.^_])([1-9]\d{{0,2}})(?:((?:{_COMMA}\d{{3}})+)|((?:{_SPACE}\d{{3}})+))(?!\d)"
    r"(\s*/\s*\d+)?"
)
_LATEX_NOISE = re.compile(
    r"\\(?:left|right|displaystyle|degree|circ)(?![A-Za-z])|\\[()\[\]!,;: $]|[~$°*]"
)
_LATEX_TEXT = re.compile(r"\\(?:text(?:bf|it|rm)?|math(?:bf|rm)|mbox|operatorname)\s*\{([^{}]*)\}")
_LATEX_DEGREE = re.compile(r"\^\s*(?:\\circ|\{\s*\\circ\s*\})")
_LATEX_FRACTION = re.compile(r"\\[dtc]?frac\s*(?:\{([^{}]*)\}|(\d))\s*(?:\{([^{}]*)\}|(\d))")
_ASSIGNMENT = re.compile(r"[A-Za-z]\w?\s*=\s*([^=]+)")
_UNIT_POWER = re.compile(r"\^(?:\d|\{\d\})$")
_UNITS = """
    cm mm km kg cm² m² km² inch inches foot feet ft yard yards mile miles meter meters metre metres
    centimeter centimeters kilometer kilometers square cubic sq unit units gram grams kilogram
    kilograms pound pounds second seconds minute minutes hour hours day days week weeks month months
    year years mph dollar dollars cent cents percent degree degrees point points way ways
""".split()  # noqa: SIM905 - a list literal would fill a page
_DECIMAL = r"(?:\d{1,3}(?:,\d{3})+(?:\.\d*)?|\d+\.?\d*|\.\d+)"
_SIGNED = rf"[+-]?\s*{_DECIMAL}|\(\s*[+-]?\s*{_DECIMAL}\s*\)"
_NUMBER = re.compile(
    rf"([+-]?)\s*(?:({_DECIMAL})|(?:(\d+)\s+)?({_SIGNED})\s*/\s*({_SIGNED})"
    rf"|(\d+)?\s*\\frac\{{\s*({_SIGNED})\s*\}}\{{\s*({_SIGNED})\s*\}})"
)
_MAX_MATH = 200  # characters; longer answers are compared as text


def extract_math_answer(response: str) -> str | None:
    """Return the rest of the line after the last `Answer:`, or None if there is no answer.

    Case and bold markup are ignored. The answer may be on the next line.
    """
    lines = _ANSWER_LINE.findall(response)
    return lines[-1].strip() if lines else None


def compute_math_correctness(response: str, answers: str | Sequence[str]) -> float:
    """Return 1.0 if the last `Answer:` line equals an accepted answer (`is_equivalent`), else -1.0.

    DAPO's reward (https://arxiv.org/abs/2503.14476). An abstention is never correct.
    """
    answer = extract_math_answer(response)
    answers = (answers,) if isinstance(answers, str) else answers
    if not answer or is_refusal(answer):
        return -1.0
    return 1.0 if any(is_equivalent(answer, truth) for truth in answers) else -1.0


def is_equivalent(answer: str, truth: str) -> bool:
    r"""Return True if two answers are the same number, list of answers, or text.

    Numbers are integers, decimals or fractions (`1/2`, `\frac{1}{-2}`, `1\frac12`), may have
    thousands separators (see `remove_thousands_separators`), and are compared exactly. Dollar
    signs, `\boxed`, a final period, `x =`, degrees, percent signs and common units are ignored:
    `50\%` equals `50`. Other answers are compared as NFC text without whitespace, so `\sqrt{4}`
    does not equal `2`.
    """
    return compare_values(answer, truth) is True


def compare_values(answer: str, truth: str) -> bool | None:
    """Compare two answers like `is_equivalent`, but return None if it cannot tell.

    Two different numbers are certainly unequal. Other answers may differ only in notation.
    """
    answer, truth = (unicodedata.normalize("NFC", text) for text in (answer, truth))
    value, expected = _canonicalize(answer), _canonicalize(truth)
    if "" in (value, expected):  # text that is normally ignored may be the answer itself
        return answer.strip() == truth.strip() != ""
    if value == expected:
        return True
    are_numbers = isinstance(value, Fraction) and isinstance(expected, Fraction)
    return False if are_numbers else None


def remove_thousands_separators(text: str) -> str:
    r"""Remove thousands separators: `10,\!000`, `10{,}000`, `10\,000` or `10 000`.

    Plain commas are kept, since `(1,234)` is a list. Mixed numbers such as `2 100/300` are also
    kept.
    """
    return _THOUSANDS.sub(_remove_separators, text)


def _remove_separators(number: re.Match[str]) -> str:
    first, by_commas, by_spaces, under = number.groups("")
    groups = re.findall(r"\d+", by_commas or by_spaces)
    if by_spaces and under and len(groups) == 1 and groups[0][0] != "0":
        [divisor] = re.findall(r"\d+", under)
        if groups[0].zfill(len(divisor)) < divisor.zfill(3):  # proper fraction, so a mixed number
            return number[0]
    if by_commas and by_commas == "".join(f",{group}" for group in groups):
        return number[0]
    return first + "".join(groups) + under


def _canonicalize(text: str) -> Fraction | str | tuple:
    """Return a canonical form of an answer; "" if nothing is left."""
    text = text.strip().rstrip(".")
    boxed = extract_last_boxed(text)
    text = (text if boxed is None else boxed).replace("−", "-")
    if len(text) > _MAX_MATH:
        return "".join(text.split())
    text = remove_thousands_separators(text).replace("{,}", ",")
    text = _LATEX_DEGREE.sub("", text)
    text = _LATEX_NOISE.sub(" ", _LATEX_TEXT.sub(r" \1 ", text))
    text = _LATEX_FRACTION.sub(
        lambda m: f"\\frac{{{m[1] or m[2] or ''}}}{{{m[3] or m[4] or ''}}}", text
    ).strip()
    if assignment := _ASSIGNMENT.fullmatch(text):
        text = assignment[1]
    text = text.strip().rstrip(".").removesuffix("%").removesuffix("\\").strip()
    words = re.sub(r"(?<=\d)(?=[A-Za-z]{2})", " ", text).split(" ")
    while len(words) > 1 and _UNIT_POWER.sub("", words[-1].lower().rstrip(".")) in ("", *_UNITS):
        words.pop()
    return _parse_math(" ".join(words))


def _parse_math(text: str) -> Fraction | str | tuple:
    text = text.strip()
    number = _parse_number(text)
    if number is not None:
        return number
    if text[:1] in ("+", "-") and text[1:].lstrip()[:1] == "(":
        magnitude = _parse_math(text[1:])
        if isinstance(magnitude, Fraction):
            return -magnitude if text[0] == "-" else magnitude
    opening, inner, closing = "", text, ""
    if text[:1] in ("(", "[") and text[-1:] in (")", "]") and _is_bracketed(text):
        opening, inner, closing = text[0], text[1:-1], text[-1]
    items, depth = [""], 0
    for character in inner:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            items.append("")
        else:
            items[-1] += character
    if len(items) == 1:
        if opening == "(" and closing == ")":
            return _parse_math(inner)
        compact = "".join(text.split())
        return compact.casefold() if compact.isalpha() and len(compact) > 1 else compact
    return (opening, *(_parse_math(item) for item in items), closing)


def _parse_number(text: str) -> Fraction | None:
    """Parse a number, fraction or mixed number; return None for other text."""
    match = _NUMBER.fullmatch(text)
    if match is None:
        return None
    sign, decimal, whole, over, under, latex_whole, latex_over, latex_under = match.groups()
    whole, over, under = whole or latex_whole, over or latex_over, under or latex_under
    if decimal:
        value = _parse_fraction(decimal)
    elif (divisor := _parse_fraction(under)) == 0:
        return None
    elif whole is None:
        value = _parse_fraction(over) / divisor
    elif {*"+-("} & {*over, *under}:
        return None  # a sum or product, not a mixed number
    else:
        value = _parse_fraction(whole) + _parse_fraction(over) / divisor
    return -value if sign == "-" else value


def _parse_fraction(number: str) -> Fraction:
    """Parse a decimal number, which may have a sign and parentheses."""
    digits = number.replace(",", "").strip("()+- ").removesuffix(".")
    return -Fraction(digits) if "-" in number else Fraction(digits)


def _is_bracketed(text: str) -> bool:
    """Return True if a single pair of brackets encloses the text."""
    depth = 0
    for i, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if depth == 0:
            return i == len(text) - 1
    return False

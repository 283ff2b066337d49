"""JSON from outside, parsed with one-line errors and a bounded depth."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

MAX_DEPTH = 100
"""Depth of objects and lists in one another; copying and writing them later on is recursive."""


def parse_json(text: str | bytes, place: str) -> Any:
    """Parses JSON.

    Raises:
        ValueError: it is no JSON, or nested too deeply; `place` is named.
    """
    try:
        value = json.loads(text)
        if is_too_deep(text, value):
            raise RecursionError
    except RecursionError:
        raise ValueError(f"{place} is nested too deeply to be read; flatten it.") from None
    except ValueError as error:
        raise ValueError(f"{place} is not valid JSON: {error}") from error
    return value


def read_object(path: Path) -> dict[str, Any]:
    """Reads a JSON object from a file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it holds none.
    """
    value = parse_json(path.read_bytes(), str(path))
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}; expected a JSON object.")
    return value


def is_too_deep(text: str | bytes, value: Any) -> bool:
    """Return True if what a text holds is nested deeper than `MAX_DEPTH`."""
    data = text.encode("utf-8", "replace") if isinstance(text, str) else text
    if data.count(b"[") + data.count(b"{") <= MAX_DEPTH:  # as of nearly every text
        return False
    depth, level = 0, [value]
    while level := [one for one in level if isinstance(one, dict | list)]:
        depth += 1
        inner = (one.values() if isinstance(one, dict) else one for one in level)
        level = list(itertools.chain.from_iterable(inner))
    return depth > MAX_DEPTH


def number_of(value: Any) -> float | None:
    """A finite number; None for anything else."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None

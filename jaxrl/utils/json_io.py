"""JSON parsing for untrusted input, with one-line errors and a nesting limit."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

MAX_DEPTH = 100
"""Maximum nesting of objects and lists, since copying and serializing them is recursive."""


def parse_json(text: str | bytes, location: str) -> Any:
    """Parse untrusted JSON.

    Raises:
        ValueError: The text is not JSON, or is nested too deeply. The message starts with
            `location`.
    """
    try:
        value = json.loads(text)
        if is_too_deep(text, value):
            raise RecursionError
    except RecursionError:
        raise ValueError(f"{location} is nested too deeply to be read; flatten it.") from None
    except ValueError as error:
        raise ValueError(f"{location} is not valid JSON: {error}") from error
    return value


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises:
        OSError: The file cannot be read.
        ValueError: The content is not a JSON object.
    """
    value = parse_json(path.read_bytes(), str(path))
    if not isinstance(value, dict):
        raise ValueError(f"{path} contains a {type(value).__name__}; expected a JSON object.")
    return value


def is_too_deep(text: str | bytes, value: Any) -> bool:
    """Return True if parsed JSON is nested deeper than `MAX_DEPTH`."""
    data = text.encode("utf-8", "replace") if isinstance(text, str) else text
    if data.count(b"[") + data.count(b"{") <= MAX_DEPTH:  # fast path for nearly every text
        return False
    depth, level = 0, [value]
    while level := [item for item in level if isinstance(item, dict | list)]:
        depth += 1
        level = [x for item in level for x in (item.values() if isinstance(item, dict) else item)]
    return depth > MAX_DEPTH


def to_finite_float(value: Any) -> float | None:
    """Convert a finite number to a float; return None for anything else."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def drop_nulls(value: Any) -> Any:
    """Remove null fields from all objects in a JSON value, recursively."""
    if isinstance(value, dict):
        return {name: drop_nulls(item) for name, item in value.items() if item is not None}
    return [drop_nulls(item) for item in value] if isinstance(value, list) else value

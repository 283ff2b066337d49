"""Values from files as the page may have them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from jaxrl.utils.text import printable


def count_of(value: Any) -> int:
    """A whole number that a column of the index can hold; -1 for anything else."""
    return value if type(value) is int and 0 <= value < 2**31 else -1


def damaged_text(num_lines: int, name: str) -> str:
    """Sentence about damaged lines of a file."""
    lines = "1 line of {} is" if num_lines == 1 else f"{num_lines} lines of {{}} are"
    return f"{lines.format(name)} damaged and left out"


def plain(value: Any) -> Any:
    """The value as JSON for the page.

    Arrays become lists, numbers that are not finite null, and texts printable: marks that would
    turn the direction of writing, or hide, read as their codes.
    """
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable(str(key)): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value

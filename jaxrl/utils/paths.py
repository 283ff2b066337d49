"""Suggestions for paths that do not exist."""

from __future__ import annotations

import contextlib
import difflib
import os
from pathlib import Path


def suggest_path(path: str | Path) -> str:
    """Return a sentence that suggests an existing path with a similar name, or "".

    Args:
        path: File or folder. The suggestion replaces the first nonexistent component.
    """
    missing = Path(path)
    while not missing.parent.exists():
        missing = missing.parent
    with contextlib.suppress(OSError):  # an unreadable folder
        names = difflib.get_close_matches(missing.name, os.listdir(missing.parent), n=1)
        if names and not missing.exists():
            similar = missing.parent / names[0]
            full_path = similar / Path(path).relative_to(missing)
            return f" Did you mean {str(full_path if full_path.exists() else similar)!r}?"
    return ""

"""Suggest alternatives to paths that do not exist."""

from __future__ import annotations

import difflib
import os
from pathlib import Path


def suggest_path(path: str | Path) -> str:
    """Return a sentence that suggests an existing path with a similar name, or "".

    Args:
        path: File or folder. The suggestion replaces its first component that does not exist.
    """
    try:
        missing = Path(path)
        if missing.exists():
            return ""
        while not missing.parent.exists():
            missing = missing.parent
        # Compare stems, since a common suffix makes short names similar.
        names = sorted(os.listdir(missing.parent))
        stems = difflib.get_close_matches(missing.stem, [Path(name).stem for name in names], n=1)
        if not stems:
            return ""
        names = [name for name in names if Path(name).stem == stems[0]]
        [match] = difflib.get_close_matches(missing.name, names, n=1, cutoff=0)
        similar = missing.parent / match
        full_path = similar / Path(path).relative_to(missing)
        return f" Did you mean {str(full_path if full_path.exists() else similar)!r}?"
    except (OSError, ValueError):  # an invalid path, or an unreadable folder
        return ""

"""Files that appear whole or not at all, whenever the process is killed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO


@contextmanager
def written_whole(path: Path, *, errors: str = "strict") -> Iterator[TextIO]:
    """A text file to write to, which takes the place of `path` at the end; folders are made.

    Args:
        path: of the file.
        errors: what becomes of text that UTF-8 has no bytes for, as in `open`.
    """
    with (
        taking_place(path) as unfinished,
        unfinished.open("w", encoding="utf-8", errors=errors) as file,
    ):
        yield file


@contextmanager
def taking_place(path: Path) -> Iterator[Path]:
    """Where to write a file of any kind, which takes the place of `path` at the end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.unfinished")
    yield unfinished
    unfinished.replace(path)

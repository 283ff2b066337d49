"""Files that appear whole or not at all, whenever the process is killed."""

from __future__ import annotations

import fcntl
import os
import socket
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


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Holds a folder for this process; the system lets go of it when the process ends.

    Raises:
        ValueError: another process holds it; it is named.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise ValueError(
                f"{folder} is in use by {file.read().strip()}; wait for its end, or stop it, or "
                "name another --workdir."
            ) from None
        except OSError:
            pass  # a file system without locks: nobody watches over two runs in one folder
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield

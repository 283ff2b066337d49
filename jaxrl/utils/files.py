"""Atomic files and folders: complete or absent, even if the process is killed."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from jaxrl.utils.text import writable

FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers for a full disk, an exceeded quota and an exceeded file size limit."""

_RIGHTS = "give this user the right to it (ls -l shows who has it)."
_FILE_THERE = "a folder belongs there; move the file away."
REMEDIES = {
    **dict.fromkeys((errno.EACCES, errno.EPERM), _RIGHTS),
    **dict.fromkeys((errno.EEXIST, errno.ENOTDIR), _FILE_THERE),
    errno.EISDIR: "a file belongs there; move the folder away.",
    errno.EROFS: "name a place that can be written to.",
    errno.ENAMETOOLONG: "name a shorter path.",
    **dict.fromkeys(FULL_DISK, "free some space and run the same command again."),
    errno.EFBIG: "raise the limit on a file's size (ulimit -f) and run the same command again.",
}
"""Remedies for system errors, by error number."""


class MovedError(OSError):
    """A folder locked by this process was moved or removed. The text names it."""


_held: dict[Path, int] = {}
"""Folders locked by this process, with an open file descriptor each."""


def check_held(path: Path) -> None:
    """Check, before writing, that the locked folder at or above `path` is still there.

    Raises:
        MovedError: The folder was moved, removed or replaced.
    """
    path = path.absolute()
    for folder, descriptor in _held.items():
        if not path.is_relative_to(folder):
            continue
        if not (folder.exists() and os.path.samestat(os.stat(folder), os.fstat(descriptor))):
            raise MovedError(
                f"{folder} was moved or removed during the run; expected it to stay. Move it back "
                "or name its new place as --workdir, and run the same command again."
            )


def system_message(error: OSError, remedy: str = "", place: Path | None = None) -> str | None:
    """Return file, reason and remedy of a system error; None for other errors.

    Args:
        error: System error.
        remedy: Replacement for the text in `REMEDIES`.
        place: Path to show if the error does not name a file.
    """
    file = error.filename or place
    if not file or error.errno not in REMEDIES:
        return None
    return f"{file}: {error.strerror}; {remedy or REMEDIES[error.errno]}"


def full_disk(error: BaseException | None) -> OSError | None:
    """Return the disk-full error among an exception and its causes, or None.

    Some libraries report it only in the text of another exception.
    """
    while error is not None:
        for number in FULL_DISK:
            if isinstance(error, OSError) and error.errno == number:
                return error
            if os.strerror(number) in str(error):
                return OSError(number, os.strerror(number))
        error = error.__cause__ or error.__context__
    return None


def users_cache() -> Path:
    """Return `$XDG_CACHE_HOME/jaxrl`. The XDG specification says to ignore relative paths.

    Raises:
        RuntimeError: The user has no home directory.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "jaxrl"


@contextmanager
def written_whole(path: Path) -> Iterator[TextIO]:
    """Open a text file that replaces `path` on exit. Lone surrogates become U+FFFD."""
    with (
        atomic_write(path) as unfinished,
        unfinished.open("w", encoding="utf-8", errors="jaxrl.replaced") as file,
    ):
        yield file


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield the path of a temporary file that replaces `path` on exit."""
    check_held(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        yield unfinished
        unfinished.replace(path)
    except OSError as error:
        error.filename = error.filename or str(path)
        unfinished.unlink(missing_ok=True)  # it would occupy space on a full disk
        raise


@contextmanager
def atomic_folder(path: Path, *, marker: str, is_writer: bool = True) -> Iterator[Path]:
    """Yield a temporary folder that replaces `path` on exit.

    Args:
        path: The final folder. An existing one is replaced if it is empty or contains `marker`.
        marker: File that identifies an earlier output, to protect a folder named by mistake.
        is_writer: True in the process that writes to disk.

    Raises:
        FileExistsError: `path` is a file, or a nonempty folder without `marker`.
    """
    path = Path(os.path.abspath(path))
    if is_writer:
        check_held(path)
        recover(path)
    if path.exists() and not (path / marker).is_file() and (path.is_file() or any(path.iterdir())):
        raise FileExistsError(
            f"{path} exists and holds no {marker}, so it is not an earlier output to replace; "
            "name another folder."
        )
    unfinished = path.with_name(f".{path.name}.unfinished")
    if is_writer:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
    try:
        yield unfinished
    except BaseException:
        if is_writer:
            shutil.rmtree(unfinished, ignore_errors=True)
        raise
    if is_writer:
        begin_replacing(path)
        unfinished.rename(path)
        recover(path)


def begin_replacing(folder: Path) -> None:
    """Rename an existing folder to `<name>.replaced`, until `recover` removes or restores it."""
    if folder.exists():
        folder.rename(_beside(folder, "replaced"))


def remove_whole(folder: Path) -> None:
    """Remove a folder atomically. A kill may leave `<name>.removed`, which `recover` removes."""
    _remove(folder, _beside(folder, "removed"))


def recover(folder: Path) -> None:
    """Finish an interrupted replacement or removal; restore the old folder if no new one exists."""
    replaced, removed = _beside(folder, "replaced"), _beside(folder, "removed")
    if replaced.exists():
        if folder.exists():
            _remove(replaced, removed)
        else:
            replaced.rename(folder)
    shutil.rmtree(removed, ignore_errors=True)


def _beside(folder: Path, end: str) -> Path:
    return folder.with_name(f"{folder.name}.{end}")


def _remove(folder: Path, removed: Path) -> None:
    shutil.rmtree(removed, ignore_errors=True)
    folder.rename(removed)
    shutil.rmtree(removed, ignore_errors=True)


def set_aside(path: Path, *, is_copied: bool = False) -> Path:
    """Move a damaged file to `<name>.damaged`, with a number if that exists.

    Args:
        path: The file.
        is_copied: True to copy the file instead of moving it.
    """
    aside = free_name(path.with_name(f"{path.name}.damaged"))
    return Path(shutil.copy2(path, aside)) if is_copied else path.rename(aside)


def free_name(path: Path) -> Path:
    """Return `path`, with a number appended if it exists."""
    free, number = path, 0
    while free.exists():
        number += 1
        free = path.with_name(f"{path.name}.{number}")
    return free


def append_line(path: Path, text: str) -> None:
    """Append a line to a text file, after ending a last line that a kill truncated."""
    with path.open("a+b") as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            file.write(b"" if file.read() == b"\n" else b"\n")
        file.write(writable(text).encode() + b"\n")


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Lock a folder for this process. The system releases the lock when the process ends.

    Raises:
        ValueError: Another process holds the lock, or the folder cannot be created.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileNotFoundError as error:  # for example in /proc, although the parent exists
        raise ValueError(
            f"--workdir={folder} cannot be made ({error.strerror}); name a folder on a disk."
        ) from error
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
            pass  # the file system has no locks, so two runs in one folder are not detected
        file.truncate(0)
        try:  # bypass the buffer, which would be written again on close
            os.write(file.fileno(), f"process {os.getpid()} on {socket.gethostname()}".encode())
        except OSError as error:
            error.filename = file.name
            raise
        name, descriptor = folder.absolute(), os.open(folder, os.O_RDONLY)
        _held[name] = descriptor
        try:
            yield
        finally:
            del _held[name]
            os.close(descriptor)

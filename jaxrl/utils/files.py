"""Atomic files and folders, which are complete or absent even if the process is killed."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from jaxrl.utils.text import replace_surrogates

DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers for a full disk, an exceeded quota and an exceeded file size limit."""

_PERMISSION_REMEDY = "give this user permission (ls -l shows the owner)."
_NOT_A_FOLDER_REMEDY = "a folder belongs there; move the file away."
REMEDIES = {
    **dict.fromkeys((errno.EACCES, errno.EPERM), _PERMISSION_REMEDY),
    **dict.fromkeys((errno.EEXIST, errno.ENOTDIR), _NOT_A_FOLDER_REMEDY),
    errno.EISDIR: "a file belongs there; move the folder away.",
    errno.EROFS: "name a writable path.",
    errno.ENAMETOOLONG: "name a shorter path.",
    **dict.fromkeys(DISK_FULL_ERRNOS, "free some space and run the same command again."),
    errno.EFBIG: "raise the file size limit (ulimit -f) and run the same command again.",
}
"""Remedies for system errors, by error number."""


class FolderMovedError(OSError):
    """Error raised when a folder that this process has locked was moved or removed."""


_locked_folders: dict[Path, int] = {}
"""File descriptors of folders locked by this process."""


def check_not_moved(path: Path) -> None:
    """Check that the locked folder containing `path` still exists, before writing to it.

    Raises:
        FolderMovedError: The folder was moved, removed or replaced.
    """
    path = path.absolute()
    for folder, descriptor in _locked_folders.items():
        if not path.is_relative_to(folder):
            continue
        if not (folder.exists() and os.path.samestat(os.stat(folder), os.fstat(descriptor))):
            raise FolderMovedError(
                f"{folder} was moved or removed during the run; expected it to stay. Move it back "
                "or pass its new path as --workdir, and run the same command again."
            )


def format_os_error(error: OSError, remedy: str = "", path: Path | None = None) -> str | None:
    """Format the file, reason and remedy of a system error; return None if it has no errno.

    Args:
        error: System error.
        remedy: Replacement for the text in `REMEDIES`.
        path: Path to show if the error has no file name.
    """
    file = error.filename or path
    if not file or error.errno not in REMEDIES:
        return None
    return f"{file}: {error.strerror}; {remedy or REMEDIES[error.errno]}"


def find_disk_full_error(error: BaseException | None) -> OSError | None:
    """Find a disk-full error in an exception and its causes; return None if there is none.

    Some libraries report a full disk only in the text of another exception.
    """
    while error is not None:
        for number in DISK_FULL_ERRNOS:
            if isinstance(error, OSError) and error.errno == number:
                return error
            if os.strerror(number) in str(error):
                return OSError(number, os.strerror(number))
        error = error.__cause__ or error.__context__
    return None


def get_user_cache_folder() -> Path:
    """Return `$XDG_CACHE_HOME/jaxrl`; a relative path is ignored, as XDG specifies.

    Raises:
        RuntimeError: The user has no home directory.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "jaxrl"


@contextmanager
def open_atomic(path: Path) -> Iterator[TextIO]:
    """Open a text file that replaces `path` on exit. Lone surrogates become "?"."""
    with (
        atomic_write(path) as temp_path,
        temp_path.open("w", encoding="utf-8", errors="replace") as file,
    ):
        yield file


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield the path of a temporary file that replaces `path` on exit."""
    check_not_moved(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temp_path = path.with_name(f".{path.name}.unfinished")
    try:
        yield temp_path
        temp_path.replace(path)
    except OSError as error:
        error.filename = error.filename or str(path)
        temp_path.unlink(missing_ok=True)  # do not occupy space on a full disk
        raise


@contextmanager
def atomic_folder(path: Path, *, marker: str, is_writer: bool = True) -> Iterator[Path]:
    """Yield a temporary folder that replaces `path` on exit.

    Args:
        path: Final folder. An existing folder is replaced if it is empty or contains `marker`.
        marker: Name of a file that identifies a folder as earlier output, safe to replace.
        is_writer: True in the process that writes to disk.

    Raises:
        FileExistsError: `path` is a file, or a nonempty folder without `marker`.
    """
    path = Path(os.path.abspath(path))
    if is_writer:
        check_not_moved(path)
        recover(path)
    if path.exists() and not (path / marker).is_file() and (path.is_file() or any(path.iterdir())):
        raise FileExistsError(
            f"{path} exists and contains no {marker}, so it is not an earlier output to replace; "
            "name another folder."
        )
    temp_path = path.with_name(f".{path.name}.unfinished")
    if is_writer:
        shutil.rmtree(temp_path, ignore_errors=True)
        temp_path.mkdir(parents=True)
    try:
        yield temp_path
    except BaseException:
        if is_writer:
            shutil.rmtree(temp_path, ignore_errors=True)
        raise
    if is_writer:
        begin_replacing(path)
        temp_path.rename(path)
        recover(path)


def begin_replacing(folder: Path) -> None:
    """Rename an existing folder to `<name>.replaced`, which `recover` removes or restores."""
    if folder.exists():
        folder.rename(_get_sibling_path(folder, "replaced"))


def remove_atomic(folder: Path) -> None:
    """Remove a folder atomically. If killed, leave `<name>.removed` for `recover` to remove."""
    _rename_and_remove(folder, _get_sibling_path(folder, "removed"))


def recover(folder: Path) -> None:
    """Finish an interrupted replacement or removal; restore the old folder if no new one exists."""
    replaced, removed = _get_sibling_path(folder, "replaced"), _get_sibling_path(folder, "removed")
    if replaced.exists():
        if folder.exists():
            _rename_and_remove(replaced, removed)
        else:
            replaced.rename(folder)
    shutil.rmtree(removed, ignore_errors=True)


def _get_sibling_path(folder: Path, end: str) -> Path:
    return folder.with_name(f"{folder.name}.{end}")


def _rename_and_remove(folder: Path, removed: Path) -> None:
    shutil.rmtree(removed, ignore_errors=True)
    folder.rename(removed)
    shutil.rmtree(removed, ignore_errors=True)


def quarantine_file(path: Path, *, keeps_original: bool = False) -> Path:
    """Move a damaged file to `<name>.damaged`, with a number if that exists.

    Args:
        path: Damaged file.
        keeps_original: True to copy the file instead of moving it.
    """
    quarantined = find_unused_path(path.with_name(f"{path.name}.damaged"))
    return Path(shutil.copy2(path, quarantined)) if keeps_original else path.rename(quarantined)


def find_unused_path(path: Path) -> Path:
    """Return `path`, with a number appended if that path exists."""
    candidate, number = path, 0
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.name}.{number}")
    return candidate


def append_line(path: Path, text: str) -> None:
    """Append a line to a text file. First terminate a last line that was cut off by a kill."""
    with path.open("a+b") as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            file.write(b"" if file.read() == b"\n" else b"\n")
        file.write(replace_surrogates(text).encode() + b"\n")


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Lock a folder for this process. The OS releases the lock when the process ends.

    Raises:
        ValueError: Another process holds the lock.
        OSError: The folder cannot be created or written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise ValueError(
                f"{folder} is in use by {file.read().strip()}; wait for it to end, stop it, or "
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
        _locked_folders[name] = descriptor
        try:
            yield
        finally:
            del _locked_folders[name]
            os.close(descriptor)


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

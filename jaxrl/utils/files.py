"""Files and folders that appear whole or not at all, whenever the process is killed."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from jaxrl.utils.text import writable

FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors where a file cannot grow: the disk, a quota, a limit."""

REMEDIES = {
    errno.EACCES: "give this user the right to it (ls -l shows who has it).",
    errno.EPERM: "give this user the right to it (ls -l shows who has it).",
    errno.EROFS: "name a place that can be written to.",
    errno.EISDIR: "a file belongs there; move the folder away.",
    errno.EEXIST: "a folder belongs there; move the file away.",
    errno.ENAMETOOLONG: "name a shorter path.",
    errno.ENOTDIR: "a folder belongs there; move the file away.",
    **dict.fromkeys(FULL_DISK, "free some space and run the same command again."),
    errno.EFBIG: "raise the limit on a file's size (ulimit -f) and run the same command again.",
}
"""Remedies for errors of the system, whose texts do not tell them."""


class MovedError(OSError):
    """A folder that this process holds was moved or removed; the text names it."""


_held: dict[Path, int] = {}
"""Folders that this process holds, with an open descriptor of each."""


def check_held(path: Path) -> None:
    """Check that a held folder is still where it was, before something in it is made.

    Args:
        path: The folder, or a path below it; any other path passes.

    Raises:
        MovedError: The folder is not there any more, or another one is.
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
    """Says which file the system refuses, why, and the remedy; None for other errors.

    Args:
        error: of the system.
        remedy: what to do, if it is not what `REMEDIES` says.
        place: what the error is about, if it does not name a file.
    """
    file = error.filename or place
    if not file or error.errno not in REMEDIES:
        return None
    return f"{file}: {error.strerror}; {remedy or REMEDIES[error.errno]}"


def full_disk(error: BaseException | None) -> OSError | None:
    """Finds an error of a full disk in an exception or its causes; None: there is none.

    Libraries that write by themselves say it in their texts alone.
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
    """`$XDG_CACHE_HOME/jaxrl`; a relative path counts as none, as that specification has it.

    Raises:
        RuntimeError: the user has no home.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "jaxrl"


@contextmanager
def written_whole(path: Path) -> Iterator[TextIO]:
    """A text file to write to, which takes the place of `path` at the end; folders are made.

    What is written becomes `writable`: a file is never missing for one bad character in it.
    """
    with (
        taking_place(path) as unfinished,
        unfinished.open("w", encoding="utf-8", errors="jaxrl.replaced") as file,
    ):
        yield file


@contextmanager
def taking_place(path: Path) -> Iterator[Path]:
    """An unfinished file of any kind to write to, which takes the place of `path` at the end."""
    check_held(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        yield unfinished
        unfinished.replace(path)
    except OSError as error:
        error.filename = error.filename or str(path)
        unfinished.unlink(missing_ok=True)  # on a full disk it would take what room is left
        raise


@contextmanager
def folder_taking_place(path: Path, *, marker: str, is_writer: bool = True) -> Iterator[Path]:
    """A folder to write to, which takes the place of `path` at the end.

    Args:
        path: the final folder. What is there is replaced if it is empty or holds `marker`.
        marker: a file that tells an earlier output from a folder given by mistake.
        is_writer: whether this process touches the disk; of several, one does.

    Raises:
        FileExistsError: there is something else at `path`.
    """
    path = Path(os.path.abspath(path))
    if is_writer:
        check_held(path)
        settle(path)
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
        settle(path)


def begin_replacing(folder: Path) -> None:
    """Makes room for a new folder, if one is there; until `settle` it is `<its name>.replaced`."""
    if folder.exists():
        folder.rename(_beside(folder, "replaced"))


def remove_whole(folder: Path) -> None:
    """Removes a folder, of which nobody ever sees a part; a kill may leave `<its name>.removed`."""
    _remove(folder, _beside(folder, "removed"))


def settle(folder: Path) -> None:
    """Ends the replacement of a folder, and what a kill has left of one or of its removal.

    Where there is no new folder, the replaced one comes back.
    """
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
    """Moves a damaged file to `<its name>.damaged`, or one with a number where there is one.

    With `is_copied` it stays where it is too.
    """
    aside = free_name(path.with_name(f"{path.name}.damaged"))
    return Path(shutil.copy2(path, aside)) if is_copied else path.rename(aside)


def free_name(path: Path) -> Path:
    """The path, with a number at its end where something has that name."""
    ends = itertools.chain([""], (f".{number}" for number in itertools.count(1)))
    names = (path.with_name(f"{path.name}{end}") for end in ends)
    return next(name for name in names if not name.exists())


def append_line(path: Path, text: str) -> None:
    """Adds a line to a text file, after the end of one that a kill has cut."""
    with path.open("a+b") as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            file.write(b"" if file.read() == b"\n" else b"\n")
        file.write(writable(text).encode() + b"\n")


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Holds a folder for this process; the system lets go of it when the process ends.

    Raises:
        ValueError: another process holds it, and is named; or the folder cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileNotFoundError as error:  # as in /proc, though what it would lie in is there
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
            pass  # a file system without locks: nobody watches over two runs in one folder
        file.truncate(0)
        try:  # past the buffer, which would be written again at the end
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

"""Compiled programs kept on disk, so that a second start does not compile them again.

JAX's own cache stores, finds and evicts them. Around it stands what a default needs: a folder for
each version of JAX and type of processor, since JAX's key leaves out what the host's processor can
do; a digest behind each entry, since JAX runs whatever it reads; and an end of the cache, not of
the run, where the disk fails.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import platform
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
from jax._src import compilation_cache  # the public module does not have `get_file_cache`
from jax._src.lru_cache import LRUCache

from jaxrl.runtime.distributed import from_main, gather, is_main
from jaxrl.utils.files import system_message, users_cache

OFF = "off"
"""The value of `config.compilation_cache` without a cache."""

MAX_BYTES = 4 << 30
"""Limit of all entries, those for other versions and processors too."""

MAX_OTHER_BYTES = 2 << 30
"""Limit of entries for other versions and processors: beyond, whole folders go, oldest first."""

MIN_COMPILE_S = 0.1
"""Programs that take less to compile are compiled again."""

LOCK_S = 10.0
"""Seconds to wait for another process that reads or writes."""

_DIGEST_BYTES = hashlib.sha256().digest_size

_jax_store = compilation_cache.get_file_cache


def keep_programs(setting: str, log: Callable[[str], None]) -> Path | None:
    """Lets JAX look for programs in the cache, and add to it; all processes of a job call this.

    What is wrong with the folder or its entries costs time and is told once. A folder that JAX was
    given otherwise, as by `JAX_COMPILATION_CACHE_DIR`, stays unless `setting` names another.

    Args:
        setting: `config.compilation_cache`: a folder, "" for the user's cache, or "off".
        log: shows a line.

    Returns:
        The folder of this version and processor; None where nothing is kept, or JAX was left alone.
    """
    # It tells each time that it forgets its cache.
    logging.getLogger(compilation_cache.__name__).setLevel(logging.WARNING)
    given = jax.config.values["jax_compilation_cache_dir"]
    if not setting and given and compilation_cache.get_file_cache is _jax_store:
        return None
    folder, reason = _open(setting) if setting != OFF else (None, "")
    compilation_cache.get_file_cache = _jax_store
    if folder is not None:
        room = MAX_BYTES - (_bytes_of_others(folder) if is_main() else 0)
        compilation_cache.get_file_cache = lambda path: (_Checked(path, room, log), path)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", MIN_COMPILE_S)
        # XLA's own files would be read unchecked, and are in nobody's sum.
        jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
    elif reason:
        log(
            f"warning: programs are not kept in {setting or 'the compilation cache'}: {reason}. "
            "Each start compiles them again; config.compilation_cache names another folder."
        )
    jax.config.update("jax_compilation_cache_dir", None if folder is None else str(folder))
    compilation_cache.reset_cache()
    return folder


def _open(setting: str) -> tuple[Path | None, str]:
    """Makes the folder of this version and processor; or None, and the reason for that."""
    folder, reason = None, "it fails in another process"
    try:
        base = Path(setting).absolute() if setting else users_cache()
        wanted = base / f"jax-{jax.__version__}-{processor_type()}"
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        wanted.mkdir(mode=0o700, exist_ok=True)
        for path in (base, wanted):  # JAX runs what lies there, so nobody else may write it
            status = path.stat()
            if status.st_uid != os.getuid() or status.st_mode & 0o022:
                raise PermissionError(
                    f"{path} belongs to another user or can be written by others, who could have "
                    "programs run here"
                )
        probe = wanted / f".probe-{os.getpid()}-{secrets.token_hex(4)}"
        probe.touch()
        probe.unlink()
        folder = wanted
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home
        reason = _message(error)
    if not all(gather(folder is not None)):
        return None, reason
    if not _is_shared(wanted):
        return None, "the processes of the job have no such folder in common"
    return folder, ""


def processor_type() -> str:
    """The host's processor: architecture, name, and a digest of the instructions it knows."""
    facts: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            name, _, value = (part.strip() for part in line.partition(":"))
            facts.setdefault(name, value)  # of the first core
    name = facts.get("model name") or platform.processor() or "processor"
    known = facts.get("flags") or facts.get("Features") or ""  # of x86, of ARM
    digest = hashlib.sha256(f"{name} {sorted(known.split())}".encode()).hexdigest()[:8]
    return re.sub(r"\W+", "-", f"{platform.machine()}-{name[:40]}-{digest}").lower()


def _is_shared(folder: Path) -> bool:
    """True where all processes find what the first one wrote.

    Where only some found a program, those that compile it would wait for the others' part in it:
    XLA divides the choice of a GPU's kernels among processes.
    """
    mark = folder / f".job-{from_main(secrets.token_hex(8))}"
    with contextlib.suppress(OSError):
        if is_main():
            mark.touch()
    gather(None)  # it is written
    is_shared = all(gather(mark.exists()))
    with contextlib.suppress(OSError):
        if is_main():
            mark.unlink()
    return is_shared


def _bytes_of_others(folder: Path) -> int:
    """Bytes in the folders beside this one, after removing the oldest of too many."""
    sizes = {}
    with contextlib.suppress(OSError):
        for other in folder.parent.glob("jax-*"):
            if other != folder:
                files = [path.stat() for path in other.iterdir()]
                used = max((file.st_mtime for file in files), default=0.0)
                sizes[other] = (used, sum(file.st_size for file in files))
    total = sum(size for _, size in sizes.values())
    for other, (_, size) in sorted(sizes.items(), key=lambda item: item[1]):
        if total > MAX_OTHER_BYTES:
            shutil.rmtree(other, ignore_errors=True)
            total -= size
    return total


def _message(error: Exception) -> str:
    known = system_message(error) if isinstance(error, OSError) else None
    return known or str(error) or type(error).__name__


class _Checked(LRUCache):
    """JAX's cache with a digest behind each entry; no error of its disk leaves it."""

    def __init__(self, path: str, max_size: int, log: Callable[[str], None]):
        self._log = log
        self._is_over = False
        with self._ending_at_errors(path):
            super().__init__(path, max_size=max_size, lock_timeout_secs=LOCK_S)
            # A process killed in between leaves an entry without its time of use, or the reverse.
            with self.lock.acquire(timeout=LOCK_S):
                names = {path.name for path in self._path.glob("*-*")}
                for name in names:
                    key, _, suffix = name.rpartition("-")
                    other = {"cache": "atime", "atime": "cache"}.get(suffix)
                    if other and f"{key}-{other}" not in names:
                        (self._path / name).unlink(missing_ok=True)

    def get(self, key: str) -> bytes | None:
        """The entry; None where there is none, or a damaged one, which is removed."""
        if self._is_over:
            return None
        with self._ending_at_errors(self._path):
            stored = super().get(key)
            if stored is None:
                return None
            value, digest = stored[:-_DIGEST_BYTES], stored[-_DIGEST_BYTES:]
            if hashlib.sha256(value).digest() == digest:
                return value
            self._remove(key)
        return None

    def put(self, key: str, value: bytes) -> None:
        """Keeps an entry, for which the least recently used ones make room."""
        if self._is_over:
            return
        with self._ending_at_errors(self._path):
            try:
                super().put(key, value + hashlib.sha256(value).digest())
            except OSError:
                self._remove(key)  # half of it may have been written
                raise

    def _remove(self, key: str) -> None:
        for suffix in ("cache", "atime"):
            (self._path / f"{key}-{suffix}").unlink(missing_ok=True)

    @contextlib.contextmanager
    def _ending_at_errors(self, path: object) -> Iterator[None]:
        """Ends the cache at an error of the disk, as at a lock that nobody gives back."""
        try:
            yield
        except OSError as error:
            was_over, self._is_over = self._is_over, True
            if not was_over:
                self._log(
                    f"warning: the cache of compiled programs, {path}, is not used any more: "
                    f"{_message(error)}. The run goes on and compiles."
                )

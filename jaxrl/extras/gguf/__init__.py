"""Models from GGUF files, the format of llama.cpp; needs the extra `gguf`.

A file is made into a folder in Hugging Face's format once, in the user's cache; later starts find
that folder. `jaxrl.models.folder` names this package, and nothing else knows it.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from jaxrl.models.hf_weights import open_tensors
from jaxrl.runtime.files import folder_taking_place, full_disk, remove_whole, users_cache
from jaxrl.runtime.versions import sampled_digest

VERSION = 2
"""Raised with any change of what is written, so that folders of before are not found."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")

HEADER_BYTES = 2**24
"""Hashed whole at the start of a file: metadata and vocabulary of most models."""


def unpack(path: Path, log: Callable[[str], None]) -> str:
    """The folder of a GGUF file; made if this user's cache has none.

    Its name holds a digest of the file's size, beginning and blocks, so that a copy elsewhere is
    found and another file of the same name is not. Processes that want the same folder wait for the
    first of them. The folder appears whole or not at all.

    Args:
        path: the file.
        log: told before a folder is made.

    Raises:
        ValueError: the extra is missing, no model can be made of the file, or the disk is full.
    """
    if not path.is_file():  # to read from a pipe might wait without end
        raise ValueError(f"config.model.path is {str(path)!r}, which is no file.")
    digest = sampled_digest(path, header=HEADER_BYTES)
    try:
        cache = users_cache() / "models"
    except RuntimeError as error:
        raise ValueError(
            f"{path} is unpacked in the user's cache, but there is no home folder ({error}); set "
            "XDG_CACHE_HOME to a folder with room for the model."
        ) from error
    folder = cache / f"{path.stem}-{VERSION}-{digest[:16]}"
    if _is_whole(folder):
        return str(folder)
    try:
        from jaxrl.extras.gguf.model import read_model, write_model
    except ImportError as error:
        if error.name != "gguf":
            raise
        raise ValueError(
            f"config.model.path is {str(path)!r}, a GGUF file: {error}; install the extra: pip "
            "install 'jaxrl[gguf]'."
        ) from error
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    # The system lets go of it when its process ends.
    with FileLock(cache / f".{folder.name}.lock"):
        if _is_whole(folder):
            return str(folder)
        if folder.exists():  # somebody has deleted files of it
            remove_whole(folder)
        model = read_model(path)
        held = sum(file.stat().st_size for file in cache.rglob("*") if file.is_file())
        log(
            f"reading {path}, once; later starts find it in {folder} (at most "
            f"{_size(model.num_bytes)}; {cache} has {_size(held)} of other models, any of which "
            "may be deleted)"
        )
        try:
            with folder_taking_place(folder, marker="config.json") as unfinished:
                write_model(model, unfinished)
        except Exception as error:
            full = full_disk(error)
            if full is None:
                raise
            limit = " (or raise ulimit -f)" if full.errno == errno.EFBIG else ""
            raise ValueError(
                f"{cache}: {full.strerror} for the {_size(model.num_bytes)} of {path}; "
                f"free some space{limit}, or set XDG_CACHE_HOME to a folder that has it."
            ) from error
    return str(folder)


def _is_whole(folder: Path) -> bool:
    """Return True if a folder that was made has all its files, for a user's cache is cleaned."""
    try:
        open_tensors(folder)
    except (OSError, ValueError):
        return False
    return all((folder / name).is_file() for name in ("config.json", *TOKENIZER_FILES))


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**29 else f"{-(-num_bytes // 2**20)} MiB"

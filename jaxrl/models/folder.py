"""Folder of a model, by `config.model.path`: it is named, or made once of a single file."""

from __future__ import annotations

import os
import pkgutil
from collections.abc import Callable
from pathlib import Path

_made: dict[str, str] = {}
"""Folders of this process by the absolute path of their file.

A run exports beside what it began with, whatever has happened to the file since then.
"""


def model_folder(path: str, log: Callable[[str], None] = lambda _: None) -> str:
    """The folder in Hugging Face's format that `config.model.path` stands for.

    A folder stands for itself, and so does what is no file of a known format. Every reader of
    `config.model.path` asks here; the configuration keeps what the user gave.

    Args:
        path: a folder, or a file with an ending of `FORMATS`.
        log: told what takes long: the first reading of a file.

    Raises:
        FileNotFoundError, ValueError: there is no such file, or no model can be made of it.
    """
    name = FORMATS.get(Path(path).suffix.lower())
    if name is None or Path(path).is_dir():
        return path
    if not Path(path).exists():
        raise FileNotFoundError(
            f"config.model.path is {path!r}, which does not exist; set it to a local model, a file "
            "or a folder in Hugging Face format."
        )
    key = os.path.abspath(path)
    if key not in _made or not Path(_made[key]).is_dir():
        try:
            unpack = pkgutil.resolve_name(name)
        except ImportError as error:
            raise ValueError(
                f"config.model.path is {path!r}, which {name} reads: {error}. Name a folder in "
                "Hugging Face format."
            ) from error
        _made[key] = unpack(Path(path), log)
    return _made[key]


FORMATS = {".gguf": "jaxrl.extras.gguf:unpack"}
"""Endings of files to functions that make a folder of one; an extra is imported when asked."""

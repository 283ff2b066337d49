"""Images as they are given, encoded: in files or as bytes; and the marks for them in texts."""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

MARK = "<image>"
"""Stands in a text where an image is; in one that comes without images it is plain text."""


class UnreadableError(ValueError):
    """An image cannot be read, or is another one than it was; the text names it."""


@dataclass(frozen=True, kw_only=True)
class Picture:
    """An image as it is given, in a format such as PNG or JPEG; nothing of it is decoded."""

    path: str = ""  # of its file; "" where there is none
    data: bytes = field(default=b"", repr=False)  # what a file would hold, where there is none

    def read(self) -> bytes:
        """Reads the bytes of its file.

        Raises:
            OSError: there is no such file, or it cannot be read.
        """
        return Path(self.path).read_bytes() if self.path else self.data

    @cached_property
    def digest(self) -> str:
        """Hash of the content, equal for equal files wherever they are; errors as of `read`."""
        return hashlib.blake2b(self.read(), digest_size=16).hexdigest()

    @property
    def name(self) -> str:
        """Its name in messages."""
        return self.path or f"an image of {len(self.data):,} bytes"


class Pictured(str):
    """A text with images behind it, as a tool may answer: `Pictured("two", images=[picture])`."""

    __slots__ = ("images",)
    images: tuple[Picture, ...]

    def __new__(cls, text: str, images: Iterable[Picture]) -> Pictured:
        """Makes the text; what methods of `str` make of it has no images."""
        made = super().__new__(cls, text)
        made.images = tuple(images)
        return made


def images_behind(text: str) -> tuple[Picture, ...]:
    """The images of a `Pictured`; any other text has none."""
    return text.images if isinstance(text, Pictured) else ()


def picture(value: Any, folder: Path) -> Picture:
    """The image that a field of a record holds.

    Args:
        value: a path; the bytes of a file; a `data:` URL; or an object with `bytes` or `path`, as
            verl and Hugging Face's `datasets` have it, or with `image` or `url`.
        folder: that relative paths begin in.

    Raises:
        ValueError: it is something else.
    """
    match value:
        case bytes() if value:
            return Picture(data=value)
        case str() if value.startswith("data:"):
            head, _, content = value.partition(",")
            if not (content and head.endswith(";base64")):
                raise ValueError(
                    "it is a data: URL without base64; expected data:image/png;base64,…"
                )
            try:
                return Picture(data=base64.b64decode(content, validate=True))
            except binascii.Error as error:
                raise ValueError(f"it is a data: URL that cannot be read: {error}") from error
        case str() if "://" in value.removeprefix("file://"):
            raise ValueError(f"it is {value[:100]!r}; expected a file, since nothing is downloaded")
        case str() if value.strip():
            return Picture(path=str(folder / value.removeprefix("file://")))
        case Mapping():
            for name in ("bytes", "path", "image", "url"):
                if value.get(name):
                    return picture(value[name], folder)
            raise ValueError(f"it has the fields {', '.join(value)}; expected 'bytes' or 'path'")
    raise ValueError(f"it is a {type(value).__name__}; expected a path, or bytes")


def pictures(values: Any, folder: Path) -> tuple[Picture, ...]:
    """The images of a field that holds one or a list of them; errors as of `picture`."""
    if values is None:
        return ()
    is_list = isinstance(values, Sequence) and not isinstance(values, str | bytes)
    images = []
    for index, value in enumerate(values if is_list else [values]):
        try:
            images.append(picture(value, folder))
        except ValueError as error:
            raise ValueError(f"of its images number {index + 1}: {error}") from error
    return tuple(images)

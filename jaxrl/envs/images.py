"""Encoded images, in files or as bytes, and their placeholder in text."""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

IMAGE_TAG = "<image>"
"""Image placeholder in a text. It is plain text in a task without images."""


class UnreadableImageError(ValueError):
    """Error for an image that cannot be read or has changed. The message names it."""


@dataclass(frozen=True, kw_only=True)
class Picture:
    """An encoded image, given as a file path or as bytes."""

    path: str = ""
    data: bytes = field(default=b"", repr=False)

    def read(self) -> bytes:
        """Return the encoded bytes.

        Raises:
            OSError: The file cannot be read.
        """
        return Path(self.path).read_bytes() if self.path else self.data

    @cached_property
    def digest(self) -> str:
        """Hash of the encoded bytes. Raises the same errors as `read`."""
        return hashlib.blake2b(self.read(), digest_size=16).hexdigest()

    @property
    def name(self) -> str:
        """Name for error messages."""
        return self.path or f"an image of {len(self.data):,} bytes"


class TextWithImages(str):
    """Tool result followed by images: `TextWithImages("two", images=[image])`."""

    __slots__ = ("images",)
    images: tuple[Picture, ...]

    def __new__(cls, text: str, images: Iterable[Picture]) -> TextWithImages:
        """Create text with attached images. `str` methods return text without them."""
        instance = super().__new__(cls, text)
        instance.images = tuple(images)
        return instance


def attached_images(text: str) -> tuple[Picture, ...]:
    """Return the images of a `TextWithImages`; () for other text."""
    return text.images if isinstance(text, TextWithImages) else ()


def parse_picture(value: Any, folder: Path) -> Picture:
    """Convert a field of a record to a `Picture`.

    Args:
        value: A path, file content, a `data:` URL, or an object with `bytes`, `path`, `image` or
            `url`, as in verl and Hugging Face's `datasets`.
        folder: Base folder for relative paths.

    Raises:
        ValueError: The value has an unsupported type or format.
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
            raise ValueError(
                f"it is {value[:100]!r}; expected a file, since URLs are not downloaded"
            )
        case str() if value.strip():
            return Picture(path=str(folder / value.removeprefix("file://")))
        case Mapping():
            for name in ("bytes", "path", "image", "url"):
                if value.get(name):
                    return parse_picture(value[name], folder)
            raise ValueError(f"it has the fields {', '.join(value)}; expected 'bytes' or 'path'")
    raise ValueError(f"it is a {type(value).__name__}; expected a path or bytes")


def parse_pictures(values: Any, folder: Path) -> tuple[Picture, ...]:
    """Convert an image or a list of images. Raises the same errors as `parse_picture`."""
    if values is None:
        return ()
    is_list = isinstance(values, Sequence) and not isinstance(values, str | bytes)
    images = []
    for index, value in enumerate(values if is_list else [values]):
        try:
            images.append(parse_picture(value, folder))
        except ValueError as error:
            raise ValueError(f"image number {index + 1}: {error}") from error
    return tuple(images)

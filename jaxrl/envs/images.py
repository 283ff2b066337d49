"""Encoded images and videos, stored in files or as bytes, and their text placeholders."""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

IMAGE_TAG, VIDEO_TAG = "<image>", "<video>"
"""Placeholders in a text. Each is plain text in a task without images, or without videos."""


class UnreadableImageError(ValueError):
    """Error that names an image or video that cannot be read or has changed."""


@dataclass(frozen=True, kw_only=True)
class Picture:
    """Encoded image, given as a file path or as bytes."""

    tag: ClassVar[str] = IMAGE_TAG

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

    @property
    def files(self) -> tuple[Picture, ...]:
        """Encoded files of the image: the image itself."""
        return (self,)


@dataclass(frozen=True, kw_only=True)
class Video(Picture):
    """Video, given as a file path, as the bytes of a file, or as frames.

    Attributes:
        frames: Images of equal size in temporal order; () for a file.
        fps: Frames per second of `frames`; 0 if they were already sampled at `config.images.fps`.
    """

    tag = VIDEO_TAG

    frames: tuple[Picture, ...] = ()
    fps: float = 0.0

    @cached_property
    def digest(self) -> str:
        """Hash of the encoded bytes of the file, or of all frames and their rate."""
        if not self.frames:
            return hashlib.blake2b(self.read(), digest_size=16).hexdigest()
        content = " ".join([f"{self.fps}", *(frame.digest for frame in self.frames)])
        return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()

    @property
    def name(self) -> str:
        """Name for error messages."""
        if self.frames:
            return f"the video of {len(self.frames)} frames from {self.frames[0].name}"
        return self.path or f"a video of {len(self.data):,} bytes"

    @property
    def files(self) -> tuple[Picture, ...]:
        """The video file, or the frames."""
        return self.frames or (self,)


class VideoTokens(int):
    """Number of tokens of a video, with optional timestamps.

    Attributes:
        times: Timestamps in seconds. The tokens are split into equal parts, and each part follows
            its timestamp in the prompt. () for no timestamps.
    """

    times: tuple[float, ...]

    def __new__(cls, count: int, times: Iterable[float] = ()) -> VideoTokens:
        """Create a token count. Arithmetic on it returns a plain int."""
        instance = super().__new__(cls, count)
        instance.times = tuple(times)
        return instance


def split_at_tags(text: str, tags: Collection[str]) -> list[str]:
    """Split text at the placeholders in `tags`; return all nonempty pieces, tags included."""
    if not any(tag in text for tag in tags):
        return [text]
    return [part for part in re.split(f"({'|'.join(tags)})", text) if part]


class TextWithImages(str):
    """Text of a tool result with images after it: `TextWithImages("two", images=[image])`."""

    __slots__ = ("images",)
    images: tuple[Picture, ...]

    def __new__(cls, text: str, images: Iterable[Picture]) -> TextWithImages:
        """Create text with attached images. `str` methods return text without them."""
        instance = super().__new__(cls, text)
        instance.images = tuple(images)
        return instance


def get_attached_images(text: str) -> tuple[Picture, ...]:
    """Return the images of a `TextWithImages`; () for other text."""
    return text.images if isinstance(text, TextWithImages) else ()


def parse_image(value: Any, folder: Path) -> Picture:
    """Convert the value of a record's field to a `Picture`.

    Args:
        value: A path, file content, a `data:` URL, an array of pixels, or an object with `bytes`,
            `path`, `image`, `video` or `url`, as in verl and Hugging Face's `datasets`.
        folder: Base folder for relative paths.

    Raises:
        ValueError: The value has an unsupported type or format.
    """
    match value:
        case bytes() if value:
            return Picture(data=value)
        case np.ndarray():
            return encode_pixels(value)
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
            for name in ("bytes", "path", "image", "video", "url"):
                if has_content(value.get(name)):
                    return parse_image(value[name], folder)
            raise ValueError(f"it has the fields {', '.join(value)}; expected 'bytes' or 'path'")
    raise ValueError(f"it is a {type(value).__name__}; expected a path or bytes")


def encode_pixels(pixels: np.ndarray) -> Picture:
    """Encode an array as a PNG image.

    Args:
        pixels: Pixels, uint8 [H, W, 3].

    Raises:
        ValueError: The array has another shape or type.
    """
    import PIL.Image

    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3:
        raise ValueError(
            f"it is an array of {pixels.dtype} {list(pixels.shape)}; expected uint8 [H, W, 3]"
        )
    file = io.BytesIO()
    PIL.Image.fromarray(pixels).save(file, "PNG", compress_level=1)
    return Picture(data=file.getvalue())


def parse_video(value: Any, folder: Path) -> Video:
    """Convert the value of a record's field to a `Video`.

    Args:
        value: A file as in `parse_image`, a list or array of frames, or an object with `frames`
            and, unless they are already sampled, their `fps`.
        folder: Base folder for relative paths.

    Raises:
        ValueError: The value has an unsupported type or format.
    """
    fps: Any = 0.0
    if isinstance(value, Mapping):
        fields = {name: field for name, field in value.items() if field is not None}
        frames = fields.get("frames", fields.get("video"))
        if _is_list(frames):
            value, fps = frames, fields.get("fps", 0.0)
            is_valid = type(fps) in (int, float) and (fps == 0 or 1e-6 <= fps <= 1e6)
            if not is_valid:  # times in seconds must be finite
                raise ValueError(f"its fps is {fps!r}; expected frames per second, such as 25")
    if not _is_list(value):
        file = parse_image(value, folder)
        return Video(path=file.path, data=file.data)
    if not len(value):
        raise ValueError("it has no frames; expected at least one")
    return Video(frames=parse_images(list(value), folder), fps=float(fps))


def parse_videos(values: Any, folder: Path) -> tuple[Video, ...]:
    """Parse a video or a list of videos to a tuple. Raises the same errors as `parse_video`."""
    if values is None:
        return ()
    videos = []
    for index, value in enumerate(values if _is_list(values) else [values]):
        try:
            videos.append(parse_video(value, folder))
        except ValueError as error:
            raise ValueError(f"video number {index + 1}: {error}") from error
    return tuple(videos)


def has_content(value: Any) -> bool:
    """Return True if the value of a field is neither missing nor empty."""
    return isinstance(value, np.ndarray) or bool(value)


def _is_list(value: Any) -> bool:
    is_array = isinstance(value, np.ndarray) and value.ndim != 3  # 3 axes are one frame
    return is_array or (isinstance(value, Sequence) and not isinstance(value, str | bytes))


def parse_images(values: Any, folder: Path) -> tuple[Picture, ...]:
    """Parse an image or a list of images into a tuple. Raises the same errors as `parse_image`."""
    if values is None:
        return ()
    images = []
    for index, value in enumerate(values if _is_list(values) else [values]):
        try:
            images.append(parse_image(value, folder))
        except ValueError as error:
            raise ValueError(f"image number {index + 1}: {error}") from error
    return tuple(images)

"""Image decoding: supported formats, size limits and EXIF orientation."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager

import PIL.Image
from PIL.Image import Transpose

from jaxrl.envs.images import Picture, UnreadableImageError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Supported formats. By default, Pillow tries every format and starts Ghostscript for EPS."""

MAX_PIXELS = 50_000_000
"""Maximum number of pixels, since a small file may decode to many, at about 11 bytes each."""

MAX_SCANS = 100
"""Maximum number of scans in a JPEG. Even a tiny scan makes the decoder process all pixels."""

TRANSPOSED_ORIENTATIONS = range(5, 9)  # EXIF orientations that swap height and width
_TRANSFORMS = {
    2: Transpose.FLIP_LEFT_RIGHT, 3: Transpose.ROTATE_180, 4: Transpose.FLIP_TOP_BOTTOM,
    5: Transpose.TRANSPOSE, 6: Transpose.ROTATE_270, 7: Transpose.TRANSVERSE,
    8: Transpose.ROTATE_90,
}  # fmt: skip
"""Transforms that make images upright. Pillow's `exif_transpose` fails if an unrelated EXIF field
has the wrong type."""
_ORIENTATION = 0x0112


def open_image(picture: Picture) -> PIL.Image.Image:
    """Open an image without reading its pixels.

    Raises:
        UnreadableImageError: The image exceeds `MAX_PIXELS`, `MAX_SCANS` or 8 bits per value.
        Exception: The image is damaged or has an unsupported format; see `wrap_image_errors`.
    """
    source = picture.path if picture.path else io.BytesIO(picture.data)
    image = PIL.Image.open(source, formats=FORMATS)
    if image.width * image.height > MAX_PIXELS:
        raise UnreadableImageError(
            f"{picture.name} is an image of {image.width} x {image.height} pixels; expected at "
            f"most {MAX_PIXELS:,}. Make it smaller."
        )
    if image.format in ("JPEG", "MPO") and (count := count_scans(picture.read())) > MAX_SCANS:
        raise UnreadableImageError(
            f"{picture.name} is a JPEG with {count} scans; expected at most {MAX_SCANS}. Save it "
            "as a baseline JPEG."
        )
    if image.mode.startswith(("I", "F")):
        raise UnreadableImageError(
            f"{picture.name} is an image of mode {image.mode}, with more than 8 bits per value, "
            "which would be clipped to white; save it with 8 bits."
        )
    return image


def count_scans(jpeg: bytes) -> int:
    """Count the scans in a JPEG. A count up to `MAX_SCANS` may be too high."""
    starts = jpeg.count(b"\xff\xda")
    if starts <= MAX_SCANS:
        return starts
    # Some of these bytes may be in metadata, or in another image that follows this one.
    count, position = 0, 2
    # Within a scan, byte 255 is followed by 0 or a restart number.
    while marker := _MARKER.search(jpeg, position):
        kind, position = marker[0][1], marker.end()
        if kind == 0xD9:  # end of image
            break
        count += kind == 0xDA
        position += int.from_bytes(jpeg[position : position + 2])
    return count


_MARKER = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")


@contextmanager
def wrap_image_errors(picture: Picture) -> Iterator[None]:
    """Convert any exception in the block to an `UnreadableImageError`."""
    try:
        yield
    except UnreadableImageError:
        raise
    except Exception as error:
        why = " ".join(str(error).split())
        if isinstance(error, PIL.UnidentifiedImageError):  # its text may show a memory address
            why = f"its format is none of {', '.join(FORMATS)}"
        raise UnreadableImageError(f"{picture.name} cannot be read as an image: {why}") from error


def read_orientation(image: PIL.Image.Image) -> int | None:
    """Return the EXIF orientation, or None if there is none.

    If a PNG's EXIF data follows the pixels, return None until the pixels are loaded.
    """
    has_exif = image.format != "PNG" or "exif" in image.info
    return image.getexif().get(_ORIENTATION) if has_exif else None


def load_upright(image: PIL.Image.Image) -> PIL.Image.Image:
    """Decode an image to RGB and apply its EXIF orientation."""
    needs_transform = read_orientation(image) in _TRANSFORMS
    image.load()  # also transposes a TIFF, and reads the end of a PNG
    transform = _TRANSFORMS.get(read_orientation(image) or 1) if needs_transform else None
    return (image if transform is None else image.transpose(transform)).convert("RGB")

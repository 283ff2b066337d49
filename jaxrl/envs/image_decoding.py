"""Image decoding: supported formats, size limits and EXIF orientation."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager

import PIL.Image
from PIL.Image import Transpose

from jaxrl.envs.images import VIDEO_TAG, Picture, UnreadableImageError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Supported formats. By default, Pillow tries every format and starts Ghostscript for EPS."""

MAX_PIXELS = 50_000_000
"""Maximum number of pixels, since a small file may decode to many, at about 11 bytes each."""

TRANSPOSED_ORIENTATIONS = range(5, 9)  # EXIF orientations that swap height and width
_TRANSFORMS = {
    2: Transpose.FLIP_LEFT_RIGHT, 3: Transpose.ROTATE_180, 4: Transpose.FLIP_TOP_BOTTOM,
    5: Transpose.TRANSPOSE, 6: Transpose.ROTATE_270, 7: Transpose.TRANSVERSE,
    8: Transpose.ROTATE_90,
}  # fmt: skip
"""Transforms that make images upright. Pillow's `exif_transpose` fails if an unrelated EXIF field
has the wrong type."""
_ORIENTATION = 0x0112


def open_image(encoded_image: Picture) -> PIL.Image.Image:
    """Open an image without reading its pixels.

    Raises:
        UnreadableImageError: The image has more than `MAX_PIXELS` pixels or 8 bits per value.
        Exception: The image is damaged or has an unsupported format; see `wrap_image_errors`.
    """
    source = encoded_image.path if encoded_image.path else io.BytesIO(encoded_image.data)
    image = PIL.Image.open(source, formats=FORMATS)
    if image.width * image.height > MAX_PIXELS:
        raise UnreadableImageError(
            f"{encoded_image.name} is an image of {image.width} x {image.height} pixels; expected "
            f"at most {MAX_PIXELS:,}. Make it smaller."
        )
    if image.mode.startswith(("I", "F")):
        raise UnreadableImageError(
            f"{encoded_image.name} is an image of mode {image.mode}, with more than 8 bits per "
            "value, which would be clipped to white; save it with 8 bits."
        )
    return image


@contextmanager
def wrap_image_errors(encoded_image: Picture) -> Iterator[None]:
    """Convert any exception in the block to an `UnreadableImageError`."""
    try:
        yield
    except UnreadableImageError:
        raise
    except Exception as error:
        why = " ".join(str(error).split())
        if isinstance(error, PIL.UnidentifiedImageError):  # its text may show a memory address
            why = f"its format is none of {', '.join(FORMATS)}"
        kind = "a video" if encoded_image.tag == VIDEO_TAG else "an image"
        raise UnreadableImageError(
            f"{encoded_image.name} cannot be read as {kind}: {why}"
        ) from error


def read_orientation(image: PIL.Image.Image) -> int | None:
    """Return the EXIF orientation, or None if there is none.

    If a PNG's EXIF data follows the pixels, return None until the pixels are loaded.
    """
    has_exif = image.format != "PNG" or "exif" in image.info
    return image.getexif().get(_ORIENTATION) if has_exif else None


def read_upright_size(image: PIL.Image.Image) -> tuple[int, int]:
    """Return the width and height of an image in its EXIF orientation, without decoding pixels."""
    width, height = image.size
    is_transposed = read_orientation(image) in TRANSPOSED_ORIENTATIONS
    return (height, width) if is_transposed else (width, height)


def load_upright(image: PIL.Image.Image) -> PIL.Image.Image:
    """Decode an image to RGB and apply its EXIF orientation."""
    needs_transform = read_orientation(image) in _TRANSFORMS
    image.load()  # also transposes a TIFF, and reads the end of a PNG
    transform = _TRANSFORMS.get(read_orientation(image) or 1) if needs_transform else None
    return (image if transform is None else image.transpose(transform)).convert("RGB")

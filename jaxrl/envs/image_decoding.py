"""Opens encoded images: few formats, bounded, upright."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager

import PIL.Image
from PIL.Image import Transpose

from jaxrl.envs.images import Picture, UnreadableError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Formats that are read. Pillow would try all it knows, and starts Ghostscript for EPS."""

MAX_PIXELS = 50_000_000
"""Limit of an image in its file: few bytes may stand for many pixels, of which each takes some 11
bytes while it is made smaller."""

MAX_SCANS = 100
"""Limit of a JPEG, as in libtiff: each scan goes over all pixels again, and may take a few bytes of
the file. A progressive one has 10, or 18 with four colours."""

TURNED = range(5, 9)  # values of EXIF's orientation that swap height and width
_TURNS = {
    2: Transpose.FLIP_LEFT_RIGHT, 3: Transpose.ROTATE_180, 4: Transpose.FLIP_TOP_BOTTOM,
    5: Transpose.TRANSPOSE, 6: Transpose.ROTATE_270, 7: Transpose.TRANSVERSE,
    8: Transpose.ROTATE_90,
}  # fmt: skip
"""Turns to make images upright; Pillow's `exif_transpose` fails at other fields of wrong types."""
_ORIENTATION = 0x0112


def opened(picture: Picture) -> PIL.Image.Image:
    """An image whose pixels are not read yet.

    Raises:
        UnreadableError: it has more than `MAX_PIXELS` or `MAX_SCANS`, or its colours more than 8
            bits.
        Exception: it is none of `FORMATS`, or damaged; see `reading`.
    """
    source = picture.path if picture.path else io.BytesIO(picture.data)
    image = PIL.Image.open(source, formats=FORMATS)
    if image.width * image.height > MAX_PIXELS:
        raise UnreadableError(
            f"{picture.name} is an image of {image.width} x {image.height} pixels; expected at "
            f"most {MAX_PIXELS:,}. Make it smaller."
        )
    if image.format in ("JPEG", "MPO") and (count := num_scans(picture.read())) > MAX_SCANS:
        raise UnreadableError(
            f"{picture.name} is a JPEG of {count} scans; expected at most {MAX_SCANS}. Save it as "
            "a baseline JPEG."
        )
    if image.mode.startswith(("I", "F")):
        raise UnreadableError(
            f"{picture.name} is an image of mode {image.mode}, with more than 8 bits a value, most "
            "of which would become white; save it with 8 bits."
        )
    return image


def num_scans(jpeg: bytes) -> int:
    """Upper bound on the scans of the image that a JPEG begins with; exact above `MAX_SCANS`."""
    starts = jpeg.count(b"\xff\xda")
    if starts <= MAX_SCANS:
        return starts
    # Some may stand in what accompanies the image, or in another image or a film behind it.
    count, place = 0, 2
    # Within a scan, 255 stands before 0 or before the number of a restart.
    while marker := _MARKER.search(jpeg, place):
        kind, place = marker[0][1], marker.end()
        if kind == 0xD9:  # the end
            break
        count += kind == 0xDA
        place += int.from_bytes(jpeg[place : place + 2])
    return count


_MARKER = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")


@contextmanager
def reading(picture: Picture) -> Iterator[None]:
    """Raises whatever goes wrong while an image is read as an `UnreadableError`."""
    try:
        yield
    except UnreadableError:
        raise
    except PIL.UnidentifiedImageError as error:  # whose text may be an address in memory
        raise UnreadableError(
            _cannot_be_read(picture, f"it is none of {', '.join(FORMATS)}")
        ) from error
    except Exception as error:  # whatever Pillow's readers make of a damaged file
        raise UnreadableError(_cannot_be_read(picture, error)) from error


def orientation(image: PIL.Image.Image) -> int | None:
    """EXIF's orientation, as far as the start of the file tells; of a PNG, the end may say more."""
    is_told = image.format != "PNG" or "exif" in image.info
    return image.getexif().get(_ORIENTATION) if is_told else None


def upright(image: PIL.Image.Image) -> PIL.Image.Image:
    """Decodes an image to RGB, turned as EXIF says that it is looked at."""
    is_turned = orientation(image) in _TURNS
    image.load()  # which turns a TIFF, and reads the end of a PNG
    turn = _TURNS.get(orientation(image) or 1) if is_turned else None
    return (image if turn is None else image.transpose(turn)).convert("RGB")


def _cannot_be_read(picture: Picture, error: BaseException | str) -> str:
    why = " ".join(str(error).split())
    return f"{picture.name} cannot be read as an image: {why}"

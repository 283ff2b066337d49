"""Encoded images to what a vision model reads, by the checkpoint's own processor, without torch.

The processor is that of transformers which works with Pillow and NumPy. How many tokens an image
takes is told from its size alone, which the first bytes of a file tell. Images are decoded when a
prompt or an observation shows them; the last ones stay in memory, up to a limit.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import math
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
from PIL.Image import Transpose

from jaxrl.envs.images import Picture, UnreadableError
from jaxrl.envs.quiet import quiet_transformers
from jaxrl.types import Group, Trajectory

FILE = "preprocessor_config.json"

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Those that are read. Pillow would try all that it knows, and starts Ghostscript for EPS."""

MAX_PIXELS = 50_000_000
"""Of an image in its file: few bytes may stand for many pixels, of which each takes some 11 bytes
while it is made smaller."""

MAX_SCANS = 100
"""Of a JPEG, as in libtiff: each goes over all pixels again, and may take a few bytes of the file.
A progressive one has 10, or 18 with four colours."""

_TURNED = range(5, 9)  # values of EXIF's orientation that swap height and width
_TURNS = {
    2: Transpose.FLIP_LEFT_RIGHT, 3: Transpose.ROTATE_180, 4: Transpose.FLIP_TOP_BOTTOM,
    5: Transpose.TRANSPOSE, 6: Transpose.ROTATE_270, 7: Transpose.TRANSVERSE,
    8: Transpose.ROTATE_90,
}  # fmt: skip
"""What makes images upright; Pillow's `exif_transpose` fails at other fields of wrong types."""
_ORIENTATION = 0x0112


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Image:
    """What a vision model reads of one image: the model's own processor has cut it into patches."""

    patches: np.ndarray  # float32 [t * h * w, C * temporal patch * patch * patch], `pixel_values`
    grid: tuple[int, int, int]  # (t, h, w), patches in time, height and width

    @property
    def num_patches(self) -> int:
        """Rows of `patches`."""
        return math.prod(self.grid)

    @cached_property
    def digest(self) -> bytes:
        """Equal for images of equal content, which are equal."""
        content = np.ascontiguousarray(self.patches, np.float32)
        shape = repr(self.grid).encode()
        return hashlib.blake2b(shape + content.tobytes(), digest_size=16).digest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Image) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)


class Processor:
    """Makes images of pictures; several threads may ask at once."""

    def __init__(
        self, folder: str, *, min_pixels: int = 0, max_pixels: int = 0, cache_mib: float = 256.0
    ):
        """Reads the checkpoint's `preprocessor_config.json`.

        Args:
            folder: of the checkpoint.
            min_pixels: a smaller image is enlarged to so many; 0: as the checkpoint has it.
            max_pixels: a larger one is made smaller; likewise.
            cache_mib: of the images made last, which stay in memory.

        Raises:
            ValueError: the folder has no such file, or it is of another processor.
        """
        self._processor = _load(folder)
        size = dict(self._processor.size)
        limits = {"shortest_edge": min_pixels, "longest_edge": max_pixels}
        self._size = size | {name: value for name, value in limits.items() if value}
        self.merge_size = int(self._processor.merge_size)
        side, moments = self._processor.patch_size, self._processor.temporal_patch_size
        self.patch_values = 3 * int(moments) * int(side) ** 2
        self._room = int(cache_mib * 2**20)
        self._lock = threading.Lock()
        self._made: OrderedDict[str, Image] = OrderedDict()
        self._num_bytes = 0

    def num_tokens(self, picture: Picture) -> int:
        """Tokens that an image takes in a prompt; of a file, only the size is looked at.

        Raises:
            UnreadableError: it is no image.
        """
        with reading(picture), opened(picture) as image:
            width, height = image.size
            if orientation(image) in _TURNED:
                width, height = height, width
        limits = {
            "min_pixels": self._size["shortest_edge"],
            "max_pixels": self._size["longest_edge"],
        }
        try:
            count = self._processor.get_number_of_image_patches(height, width, limits)
        except ValueError as error:  # much wider than high
            raise UnreadableError(
                f"{picture.name} has {width} x {height} pixels: {error}"
            ) from error
        return int(count) // self.merge_size**2

    def __call__(self, picture: Picture) -> Image:
        """The image, decoded and cut into patches.

        Raises:
            UnreadableError: it is no image, or damaged.
        """
        with reading(picture):
            digest = picture.digest
        with self._lock:
            if digest in self._made:
                self._made.move_to_end(digest)
                return self._made[digest]
        made = self._make(picture)
        with self._lock:
            if digest not in self._made:
                self._made[digest] = made
                self._num_bytes += made.patches.nbytes
            while self._num_bytes > self._room and self._made:
                _, old = self._made.popitem(last=False)
                self._num_bytes -= old.patches.nbytes
        return made

    def _make(self, picture: Picture) -> Image:
        with reading(picture):
            with opened(picture) as image:
                whole = upright(image)
            found = self._processor(whole, size=self._size, return_tensors="np")
        t, h, w = (int(n) for n in found["image_grid_thw"][0])
        return Image(patches=np.asarray(found["pixel_values"], np.float32), grid=(t, h, w))

    def with_images(self, groups: Iterable[Group]) -> list[Group]:
        """Groups from another process or a checkpoint, with the images that they name.

        Raises:
            UnreadableError: a file is not there any more.
            ValueError: a file holds another image than it did.
        """
        return [
            dataclasses.replace(group, trajectories=tuple(map(self._restored, group.trajectories)))
            for group in groups
        ]

    def _restored(self, trajectory: Trajectory) -> Trajectory:
        return dataclasses.replace(trajectory, attachments=tuple(map(self, trajectory.pictures)))


class BlankProcessor(Processor):
    """In place of each image one of the same size without content: the control of what looks."""

    def __init__(self, processor: Processor):
        """Of the same settings as `processor`."""
        self._seen = processor
        self.merge_size = processor.merge_size

    def num_tokens(self, picture: Picture) -> int:
        """See `Processor`."""
        return self._seen.num_tokens(picture)

    def __call__(self, picture: Picture) -> Image:
        """Patches of 0, which is the mean colour."""
        image = self._seen(picture)
        return dataclasses.replace(image, patches=np.zeros_like(image.patches))


def _load(folder: str) -> Any:
    """The image processor of a checkpoint, of the kind that needs no torch."""
    file = Path(folder) / FILE
    if not file.is_file():
        raise ValueError(
            f"{folder!r} holds no {FILE}, and images are to be read; copy that file of the model "
            "into config.model.path."
        )
    try:
        with quiet_transformers():
            from transformers import AutoImageProcessor

            found = AutoImageProcessor.from_pretrained(
                folder, backend="pil", local_files_only=True, trust_remote_code=False
            )
    except Exception as error:  # whatever transformers makes of a damaged file
        raise ValueError(
            f"{file} cannot be loaded: {type(error).__name__}: {error}; expected the image "
            "processor of the model in config.model.path."
        ) from error
    needed = ("merge_size", "patch_size", "temporal_patch_size", "get_number_of_image_patches")
    if missing := [name for name in needed if not hasattr(found, name)]:
        raise ValueError(
            f"{file} is of {type(found).__name__}, which has no {', '.join(missing)}; expected one "
            "whose images have any size, as Qwen2.5-VL's have."
        )
    return found


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
    """Whatever goes wrong while an image is read is an `UnreadableError`."""
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
    """How it is turned, as far as the start of the file tells; of a PNG, the end may say more."""
    is_told = image.format != "PNG" or "exif" in image.info
    return image.getexif().get(_ORIENTATION) if is_told else None


def upright(image: PIL.Image.Image) -> PIL.Image.Image:
    """Decoded, as it is looked at, in three colours."""
    is_turned = orientation(image) in _TURNS
    image.load()  # which turns a TIFF, and reads the end of a PNG
    turn = _TURNS.get(orientation(image) or 1) if is_turned else None
    return (image if turn is None else image.transpose(turn)).convert("RGB")


def _cannot_be_read(picture: Picture, error: BaseException | str) -> str:
    why = " ".join(str(error).split())
    return f"{picture.name} cannot be read as an image: {why}"

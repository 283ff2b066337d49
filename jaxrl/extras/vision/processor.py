"""Encoded images to what a vision model reads, by the checkpoint's own processor, without torch.

The processor is that of transformers which works with Pillow and NumPy. How many tokens an image
takes is told from its size alone, which the first bytes of a file tell. Images are decoded when a
prompt or an observation shows them; the last ones stay in memory, up to a limit.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import threading
from collections import OrderedDict
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl.envs.image_decoding import TURNED, opened, orientation, reading, upright
from jaxrl.envs.images import Picture, UnreadableError
from jaxrl.types import Group
from jaxrl.utils.quiet_transformers import quiet_transformers

FILE = "preprocessor_config.json"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Image:
    """An image as a vision model reads it, cut into patches by the model's own processor."""

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

    is_blank = False

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
        self.unit = int(self._processor.merge_size) ** 2
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
            if orientation(image) in TURNED:
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
        return int(count) // self.unit

    def num_units(self, image: Image) -> int:
        """Tokens of an image that was read."""
        return image.num_patches // self.unit

    def blank(self) -> BlankProcessor:
        """Makes a processor of images without content."""
        return BlankProcessor(self)

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
        with reading(picture):
            with opened(picture) as image:
                whole = upright(image)
            fields = self._processor(whole, size=self._size, return_tensors="np")
        t, h, w = (int(n) for n in fields["image_grid_thw"][0])
        made = Image(patches=np.asarray(fields["pixel_values"], np.float32), grid=(t, h, w))
        with self._lock:
            if digest not in self._made:
                self._made[digest] = made
                self._num_bytes += made.patches.nbytes
            while self._num_bytes > self._room and self._made:
                _, old = self._made.popitem(last=False)
                self._num_bytes -= old.patches.nbytes
        return made

    def with_images(self, groups: Iterable[Group]) -> list[Group]:
        """Groups from another process or a checkpoint, with the images that they name.

        Raises:
            UnreadableError: a file is not there any more.
            ValueError: a file holds another image than it did.
        """
        return [
            dataclasses.replace(
                group,
                trajectories=tuple(
                    dataclasses.replace(one, attachments=tuple(map(self, one.pictures)))
                    for one in group.trajectories
                ),
            )
            for group in groups
        ]


class BlankProcessor(Processor):
    """Reads each image as one of the same size without content: the control of what looks."""

    is_blank = True

    def __init__(self, processor: Processor):
        """Takes the settings of `processor`."""
        self._seen = processor
        self.unit, self.patch_values = processor.unit, processor.patch_values

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

            processor = AutoImageProcessor.from_pretrained(
                folder, backend="pil", local_files_only=True, trust_remote_code=False
            )
    except Exception as error:  # whatever transformers makes of a damaged file
        raise ValueError(
            f"{file} cannot be loaded: {type(error).__name__}: {error}; expected the image "
            "processor of the model in config.model.path."
        ) from error
    needed = ("merge_size", "patch_size", "temporal_patch_size", "get_number_of_image_patches")
    if missing := [name for name in needed if not hasattr(processor, name)]:
        raise ValueError(
            f"{file} is of {type(processor).__name__}, which has no {', '.join(missing)}; expected "
            "one whose images have any size, as Qwen2.5-VL's have."
        )
    return processor

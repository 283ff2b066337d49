"""Image preprocessing with the checkpoint's image processor, without torch.

The processor is transformers' Pillow backend. An image's number of tokens depends only on its size,
which is read from the file header. An image is decoded when a prompt or an observation contains it;
a bounded cache keeps the most recently used images.
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

from jaxrl.envs.image_decoding import (
    TRANSPOSED_ORIENTATIONS,
    load_upright,
    open_image,
    read_orientation,
    wrap_image_errors,
)
from jaxrl.envs.images import Picture, UnreadableImageError
from jaxrl.types import Group
from jaxrl.utils.quiet_transformers import quiet_transformers

FILE = "preprocessor_config.json"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Image:
    """Image as patches from the model's image processor."""

    patches: np.ndarray  # float32 [t * h * w, C * temporal patch * patch * patch], `pixel_values`
    grid: tuple[int, int, int]  # number of patches in time, height and width

    @property
    def num_patches(self) -> int:
        """Total number of patches."""
        return math.prod(self.grid)

    @cached_property
    def digest(self) -> bytes:
        """Hash of the content, used to compare images."""
        content = np.ascontiguousarray(self.patches, np.float32)
        shape = repr(self.grid).encode()
        return hashlib.blake2b(shape + content.tobytes(), digest_size=16).digest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Image) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)


class HFImageProcessor:
    """Processor that decodes images into patches for the vision tower. Thread-safe."""

    is_blank = False

    def __init__(
        self, folder: str, *, min_pixels: int = 0, max_pixels: int = 0, cache_mib: float = 256.0
    ):
        """Load the checkpoint's `preprocessor_config.json`.

        Args:
            folder: Model folder with the file.
            min_pixels: Minimum pixels per image; smaller images are enlarged. 0 for the value in
                the file.
            max_pixels: Maximum pixels per image; larger images are reduced. 0 for the value in the
                file.
            cache_mib: Maximum size of the image cache, in MiB.

        Raises:
            ValueError: The file does not exist or describes an unsupported processor.
        """
        self._processor = _load_processor(folder)
        size = dict(self._processor.size)
        limits = {"shortest_edge": min_pixels, "longest_edge": max_pixels}
        self._size = size | {name: value for name, value in limits.items() if value}
        self.patches_per_token = int(self._processor.merge_size) ** 2
        side, frames = self._processor.patch_size, self._processor.temporal_patch_size
        self.patch_values = 3 * int(frames) * int(side) ** 2
        self._cache_bytes = int(cache_mib * 2**20)
        self._lock = threading.Lock()
        self._cache: OrderedDict[str, Image] = OrderedDict()
        self._num_bytes = 0

    def num_tokens(self, picture: Picture) -> int:
        """Return the number of tokens of an image, reading only its size.

        Raises:
            UnreadableError: The file is not an image.
        """
        with wrap_image_errors(picture), open_image(picture) as image:
            width, height = image.size
            if read_orientation(image) in TRANSPOSED_ORIENTATIONS:
                width, height = height, width
        limits = {
            "min_pixels": self._size["shortest_edge"],
            "max_pixels": self._size["longest_edge"],
        }
        try:
            count = self._processor.get_number_of_image_patches(height, width, limits)
        except ValueError as error:  # extreme aspect ratio
            raise UnreadableImageError(
                f"{picture.name} has {width} x {height} pixels: {error}"
            ) from error
        return int(count) // self.patches_per_token

    def num_units(self, image: Image) -> int:
        """Return the number of tokens of a preprocessed image."""
        return image.num_patches // self.patches_per_token

    def make_blank_processor(self) -> BlankProcessor:
        """Return a processor that replaces images with blank images."""
        return BlankProcessor(self)

    def __call__(self, picture: Picture) -> Image:
        """Decode an image and split it into patches.

        Raises:
            UnreadableError: The file is corrupt or not an image.
        """
        with wrap_image_errors(picture):
            digest = picture.digest
        with self._lock:
            if digest in self._cache:
                self._cache.move_to_end(digest)
                return self._cache[digest]
        with wrap_image_errors(picture):
            with open_image(picture) as image:
                upright_image = load_upright(image)
            fields = self._processor(upright_image, size=self._size, return_tensors="np")
        t, h, w = (int(n) for n in fields["image_grid_thw"][0])
        processed = Image(patches=np.asarray(fields["pixel_values"], np.float32), grid=(t, h, w))
        with self._lock:
            if digest not in self._cache:
                self._cache[digest] = processed
                self._num_bytes += processed.patches.nbytes
            while self._num_bytes > self._cache_bytes and self._cache:
                _, old = self._cache.popitem(last=False)
                self._num_bytes -= old.patches.nbytes
        return processed

    def with_images(self, groups: Iterable[Group]) -> list[Group]:
        """Reload the images of groups from another process or a checkpoint, by name.

        Raises:
            UnreadableError: An image file no longer exists.
            ValueError: An image file has changed.
        """
        return [
            dataclasses.replace(
                group,
                trajectories=tuple(
                    dataclasses.replace(
                        trajectory, attachments=tuple(map(self, trajectory.pictures))
                    )
                    for trajectory in group.trajectories
                ),
            )
            for group in groups
        ]


class BlankProcessor(HFImageProcessor):
    """Processor that replaces each image with a blank image of the same size, as a control."""

    is_blank = True

    def __init__(self, processor: HFImageProcessor):
        """Wrap `processor`, which determines the number of patches."""
        self._inner = processor
        self.patches_per_token, self.patch_values = (
            processor.patches_per_token,
            processor.patch_values,
        )

    def num_tokens(self, picture: Picture) -> int:
        """See `HFImageProcessor.num_tokens`."""
        return self._inner.num_tokens(picture)

    def __call__(self, picture: Picture) -> Image:
        """Return patches of zeros, which represent the mean image color."""
        image = self._inner(picture)
        return dataclasses.replace(image, patches=np.zeros_like(image.patches))


def _load_processor(folder: str) -> Any:
    """Load a checkpoint's image processor with transformers' Pillow backend."""
    file = Path(folder) / FILE
    if not file.is_file():
        raise ValueError(
            f"{folder!r} has no {FILE}, which images require; copy the model's file "
            "into config.model.path."
        )
    try:
        with quiet_transformers():
            from transformers import AutoImageProcessor

            processor = AutoImageProcessor.from_pretrained(
                folder, backend="pil", local_files_only=True, trust_remote_code=False
            )
    except Exception as error:  # transformers raises various types for a damaged file
        raise ValueError(
            f"{file} could not be loaded: {type(error).__name__}: {error}; expected the image "
            "processor of the model in config.model.path."
        ) from error
    required = ("merge_size", "patch_size", "temporal_patch_size", "get_number_of_image_patches")
    if missing := [name for name in required if not hasattr(processor, name)]:
        raise ValueError(
            f"{file} is for {type(processor).__name__}, which lacks {', '.join(missing)}; expected "
            "a processor that supports images of any size, such as Qwen2.5-VL's."
        )
    return processor

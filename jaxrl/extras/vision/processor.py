"""Preprocessing of images and videos with the checkpoint's image processor, without torch.

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
import PIL.Image

from jaxrl.envs.image_decoding import (
    load_upright,
    open_image,
    read_upright_size,
    wrap_image_errors,
)
from jaxrl.envs.images import Picture, UnreadableImageError, Video, VideoTokens
from jaxrl.extras.vision.video import VideoLayout, iter_frames, load_video_rules, read_header
from jaxrl.models.decoder import read_positive_int
from jaxrl.types import Group
from jaxrl.utils.quiet_transformers import quiet_transformers

FILE = "preprocessor_config.json"
EDGES = ("shortest_edge", "longest_edge")  # minimum and maximum number of pixels of an image


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Image:
    """Image or video as patches from the model's image processor."""

    patches: np.ndarray  # float32 [t * h * w, C * temporal patch * patch * patch], `pixel_values`
    grid: tuple[int, int, int]  # number of patches in time, height and width
    times: tuple[float, ...] = ()  # seconds of each of a video's t patches; () for an image

    @property
    def num_patches(self) -> int:
        """Total number of patches."""
        return math.prod(self.grid)

    @cached_property
    def digest(self) -> bytes:
        """Hash of the content, used to compare images."""
        content = np.ascontiguousarray(self.patches, np.float32)
        shape = repr((self.grid, self.times)).encode()
        return hashlib.blake2b(shape + content.tobytes(), digest_size=16).digest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Image) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)


class HFImageProcessor:
    """Processor that decodes images into patches for the vision tower. Thread-safe."""

    is_blank = False

    def __init__(
        self,
        folder: str,
        *,
        min_pixels: int = 0,
        max_pixels: int = 0,
        fps: float = 0.0,
        min_frames: int = 0,
        max_frames: int = 0,
        min_video_pixels: int = 0,
        max_video_pixels: int = 0,
        cache_mib: float = 256.0,
    ):
        """Load the checkpoint's settings for images and videos.

        Arguments of 0, except for `cache_mib`, select the checkpoint's values.

        Args:
            folder: Model folder with `preprocessor_config.json`.
            min_pixels: Minimum number of pixels per image; smaller images are enlarged.
            max_pixels: Maximum number of pixels per image; larger images are reduced.
            fps: Number of frames to sample per second of video; see `VideoRules`.
            min_frames: Minimum number of sampled frames.
            max_frames: Maximum number of sampled frames.
            min_video_pixels: Minimum number of pixels, as in `VideoRules.min_pixels`.
            max_video_pixels: Maximum number of pixels, as in `VideoRules.max_pixels`.
            cache_mib: Maximum size of the image cache, in MiB.

        Raises:
            ValueError: The file does not exist or describes an unsupported processor.
        """
        self._processor = _load_processor(folder)
        side, merge, frames, *edges = (
            read_positive_int(
                {**vars(self._processor), **dict(self._processor.size)}, name, f"{folder}/{FILE}"
            )
            for name in ("patch_size", "merge_size", "temporal_patch_size", *EDGES)
        )
        limits = zip(EDGES, (min_pixels, max_pixels), edges, strict=True)
        self._size = {name: limit or edge for name, limit, edge in limits}
        self.num_patches_per_token = merge**2
        self.num_values_per_patch = 3 * frames * side**2
        self.video_rules = load_video_rules(
            folder,
            patch=side,
            merge=merge,
            temporal_patch=frames,
            fps=fps,
            min_frames=min_frames,
            max_frames=max_frames,
            min_pixels=min_video_pixels,
            max_pixels=max_video_pixels,
        )
        self._layouts: dict[str, VideoLayout] = {}
        self._cache_bytes = int(cache_mib * 2**20)
        self._lock = threading.Lock()
        self._cache: OrderedDict[str, Image] = OrderedDict()
        self._num_bytes = 0

    def count_tokens(self, image: Picture) -> int:
        """Return the number of tokens of an image. Only the file's header is read.

        Raises:
            UnreadableImageError: The file is not an image.
        """
        if isinstance(image, Video):
            layout = self._compute_video_layout(image)
            return self._count_video_tokens(math.prod(layout.grid), layout.times)
        with wrap_image_errors(image), open_image(image) as opened:
            width, height = read_upright_size(opened)
        limits = {
            "min_pixels": self._size["shortest_edge"],
            "max_pixels": self._size["longest_edge"],
        }
        try:
            count = self._processor.get_number_of_image_patches(height, width, limits)
        except ValueError as error:  # extreme aspect ratio
            raise UnreadableImageError(
                f"{image.name} has {width} x {height} pixels: {error}"
            ) from error
        return int(count) // self.num_patches_per_token

    def count_image_tokens(self, image: Image) -> int:
        """Return the number of tokens of a preprocessed image."""
        if image.times:
            return self._count_video_tokens(image.num_patches, image.times)
        return image.num_patches // self.num_patches_per_token

    def _count_video_tokens(self, num_patches: int, times: tuple[float, ...]) -> VideoTokens:
        prompt_times = times if self.video_rules.writes_times else ()
        return VideoTokens(num_patches // self.num_patches_per_token, prompt_times)

    def make_blank_processor(self) -> BlankProcessor:
        """Return a processor that replaces images with blank images."""
        return BlankProcessor(self)

    def __call__(self, image: Picture) -> Image:
        """Decode an image and split it into patches.

        Raises:
            UnreadableImageError: The file is corrupt or not an image.
        """
        with wrap_image_errors(image):
            digest = image.digest
        with self._lock:
            if digest in self._cache:
                self._cache.move_to_end(digest)
                return self._cache[digest]
        if isinstance(image, Video):
            processed = self._process_video(image)
        else:
            with wrap_image_errors(image):
                with open_image(image) as opened:
                    upright_image = load_upright(opened)
                fields = self._processor(upright_image, size=self._size, return_tensors="np")
            t, h, w = (int(n) for n in fields["image_grid_thw"][0])
            patches = np.asarray(fields["pixel_values"], np.float32)
            processed = Image(patches=patches, grid=(t, h, w))
        with self._lock:
            if digest not in self._cache:
                self._cache[digest] = processed
                self._num_bytes += processed.patches.nbytes
            while self._num_bytes > self._cache_bytes and self._cache:
                _, old = self._cache.popitem(last=False)
                self._num_bytes -= old.patches.nbytes
        return processed

    def _compute_video_layout(self, video: Video) -> VideoLayout:
        """Compute a video's sampled frames and size; cached for later draws of the same task.

        Raises:
            UnreadableImageError: The file is not a video, or its frames differ in size.
        """
        with wrap_image_errors(video):
            digest = video.digest
        if digest not in self._layouts:
            try:
                self._layouts[digest] = self.video_rules.compute_layout(read_header(video))
            except UnreadableImageError:
                raise
            except ValueError as error:
                raise UnreadableImageError(f"{video.name}: {error}") from error
        return self._layouts[digest]

    def _process_video(self, video: Video) -> Image:
        """Decode the sampled frames of a video and split them into patches.

        Raises:
            UnreadableImageError: A frame is damaged.
        """
        layout, rules = self._compute_video_layout(video), self.video_rules
        t, h, w = layout.grid
        size = w * rules.patch, h * rules.patch
        frames = []
        for frame in iter_frames(video, layout.frames):
            image = frame.resize(size, PIL.Image.Resampling.BICUBIC)
            fields = self._processor(image, do_resize=False, return_tensors="np")
            # The processor repeats an image `temporal_patch` times in each patch.
            patches = np.asarray(fields["pixel_values"], np.float32)
            frames.append(patches.reshape(h * w, 3, rules.temporal_patch, -1)[:, :, 0])
        # The last frame fills up the last temporal patch.
        frames += frames[-1:] * (t * rules.temporal_patch - len(frames))
        patches = np.stack(frames).reshape(t, rules.temporal_patch, h * w, 3, -1)
        patches = patches.transpose(0, 2, 3, 1, 4).reshape(t * h * w, -1)
        return Image(patches=patches, grid=layout.grid, times=layout.times)

    def reload_images(self, groups: Iterable[Group]) -> list[Group]:
        """Reload the images of groups that come from another process or a checkpoint.

        Raises:
            UnreadableImageError: An image file no longer exists.
            ValueError: An image file has changed.
        """
        return [
            dataclasses.replace(
                group,
                trajectories=tuple(
                    dataclasses.replace(trajectory, attachments=tuple(map(self, trajectory.images)))
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
        self.num_patches_per_token, self.num_values_per_patch = (
            processor.num_patches_per_token,
            processor.num_values_per_patch,
        )
        self.video_rules = processor.video_rules

    def count_tokens(self, image: Picture) -> int:
        """See `HFImageProcessor.num_tokens`."""
        return self._inner.count_tokens(image)

    def __call__(self, image: Picture) -> Image:
        """Return patches of zeros, which represent the mean image color."""
        processed = self._inner(image)
        return dataclasses.replace(processed, patches=np.zeros_like(processed.patches))


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

"""Video decoding, frame sampling and resizing.

A video becomes an image with several temporal patches, each of `temporal_patch` frames. The rules
are those of the video processors of Qwen2-VL, Qwen2.5-VL and Qwen3-VL in transformers 5.24.
Qwen3.5 uses those of Qwen3-VL.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import PIL.Image

from jaxrl.envs.image_decoding import (
    MAX_PIXELS,
    load_upright,
    open_image,
    read_upright_size,
    wrap_image_errors,
)
from jaxrl.envs.images import UnreadableImageError, Video
from jaxrl.models.decoder import read_positive_float, read_positive_int
from jaxrl.utils.json_io import drop_nulls, read_object

FILES = ("processor_config.json", "video_preprocessor_config.json", "preprocessor_config.json")
"""Files with the settings of the video processor, in order of priority."""

FORMATS = ("mov", "mp4", "matroska", "webm", "avi", "mpegts", "mpeg", "ogg", "flv", "gif")
"""Supported containers. By default, FFmpeg also opens playlists, which read other files."""

MAX_ASPECT_RATIO = 200


@dataclass(frozen=True, kw_only=True)
class VideoHeader:
    """Size and frame rate of a video.

    Attributes:
        num_frames: Number of frames.
        fps: Frames per second; 0 if the frames are already sampled.
        height: Height in pixels.
        width: Width in pixels.
    """

    num_frames: int
    fps: float
    height: int
    width: int


@dataclass(frozen=True, kw_only=True)
class VideoLayout:
    """Sampled frames of a video and its size in patches.

    Attributes:
        frames: Indices of the sampled frames.
        grid: Number of patches in time, height and width.
        times: Timestamp of each temporal patch, in seconds.
    """

    frames: tuple[int, ...]
    grid: tuple[int, int, int]
    times: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class VideoRules:
    """Rules for frame sampling and resizing, as in Qwen2-VL and Qwen2.5-VL.

    Attributes:
        fps: Number of frames to sample per second of video.
        min_frames: Minimum number of sampled frames; shorter videos are not extended.
        max_frames: Maximum number of sampled frames.
        min_pixels: Minimum number of pixels per frame, or in Qwen3-VL per video.
        max_pixels: Maximum number of pixels per frame, or in Qwen3-VL per video.
        caps_frames: True to also limit the pixels of a frame by `max_video_tokens`.
        max_video_tokens: Maximum number of tokens of a video, of which a tenth is reserved; in
            Qwen3-VL, of a frame.
        patch: Number of pixels along each side of a patch.
        merge: Number of patches along each side of a token.
        temporal_patch: Number of frames per temporal patch.
    """

    default_limits: ClassVar[tuple[int, int]] = (128 * 28**2, 768 * 28**2)  # pixels
    default_tokens: ClassVar[int] = 128_000
    writes_times: ClassVar[bool] = False  # True if the prompt contains the time of each patch

    fps: float
    min_frames: int
    max_frames: int
    min_pixels: int
    max_pixels: int
    caps_frames: bool
    max_video_tokens: int
    patch: int
    merge: int
    temporal_patch: int

    def compute_layout(self, header: VideoHeader) -> VideoLayout:
        """Choose a video's frames, and compute their size and timestamps.

        Raises:
            ValueError: The aspect ratio is too large.
        """
        count, rate = header.num_frames, header.fps or self.fps
        frames = self._sample_frames(count, rate) if header.fps else range(count)
        height, width = self._compute_frame_size(header.height, header.width, len(frames))
        num_patches = -(-len(frames) // self.temporal_patch)
        return VideoLayout(
            frames=tuple(frames),
            grid=(num_patches, height // self.patch, width // self.patch),
            times=self._compute_timestamps(frames, num_patches, count, rate),
        )

    def _sample_frames(self, count: int, rate: float) -> Sequence[int]:
        """Return the indices of the frames to sample from `count` frames, `rate` per second."""
        size = self.temporal_patch
        limit = min(self.max_frames, count) // size * size
        target = min(max(count / rate * self.fps, self.min_frames), limit)
        num_frames = math.floor(target / size) * size or min(count, size)
        indices = np.arange(num_frames) * (count / num_frames)
        return indices.astype(np.float32).astype(int).tolist()  # float32, as in transformers

    def _compute_frame_size(self, height: int, width: int, num_frames: int) -> tuple[int, int]:
        """Return the height and width of resized frames, in pixels."""
        limit = self.max_pixels
        if self.caps_frames:
            pixels = int(self.max_video_tokens * self._token_side**2 * 0.9)
            share = pixels * self.temporal_patch // num_frames
            limit = max(min(limit, share), int(self.min_pixels * 1.05))
        return self._fit_frame_size(height, width, 1, 1, limit)

    @property
    def _token_side(self) -> int:
        return self.patch * self.merge

    def _fit_frame_size(
        self, height: int, width: int, num_frames: int, num_rounded_frames: int, limit: int
    ) -> tuple[int, int]:
        """Round a frame's size to whole tokens, with `min_pixels` to `limit` pixels in all frames.

        The limits apply to `num_rounded_frames`: in Qwen3-VL, `num_frames` rounded to whole
        temporal patches.
        """
        unit = self._token_side
        if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
            raise ValueError(
                f"it has {width} x {height} pixels; expected an aspect ratio of at most "
                f"{MAX_ASPECT_RATIO}"
            )
        rows, columns = round(height / unit), round(width / unit)
        pixels = num_rounded_frames * rows * columns * unit**2
        if pixels > limit:
            scale = math.sqrt(num_frames * height * width / limit)
            rows = max(1, math.floor(height / scale / unit))
            columns = max(1, math.floor(width / scale / unit))
        elif pixels < self.min_pixels:
            scale = math.sqrt(self.min_pixels / (num_frames * height * width))
            rows, columns = math.ceil(height * scale / unit), math.ceil(width * scale / unit)
        return rows * unit, columns * unit

    def _compute_timestamps(
        self, frames: Sequence[int], num_patches: int, count: int, rate: float
    ) -> tuple[float, ...]:
        """Return the evenly spaced timestamps of the temporal patches, in seconds."""
        interval = self.temporal_patch / (len(frames) / count * rate)
        return tuple(index * interval for index in range(num_patches))


class Qwen3VideoRules(VideoRules):
    """Rules for frame sampling and resizing as in Qwen3-VL, which puts timestamps in prompts."""

    default_limits = (128 * 32**2, 768 * 32**2)
    default_tokens = 768
    writes_times = True

    def _sample_frames(self, count: int, rate: float) -> Sequence[int]:
        target = max(int(count / rate * self.fps), self.min_frames)
        num_frames = min(target, self.max_frames, count)
        return np.linspace(0, count - 1, num_frames).round().astype(int).tolist()

    def _compute_frame_size(self, height: int, width: int, num_frames: int) -> tuple[int, int]:
        limit = self.max_pixels
        if self.caps_frames:
            share = min(self.max_video_tokens * self._token_side**2, limit // num_frames)
            limit = max(share, int(self.min_pixels * 1.05)) * num_frames
        if min(height, width) < self._token_side:
            scale = max(self._token_side / height, self._token_side / width)
            height, width = int(height * scale), int(width * scale)
        num_frames = max(num_frames, self.temporal_patch)
        num_rounded_frames = round(num_frames / self.temporal_patch) * self.temporal_patch
        return self._fit_frame_size(height, width, num_frames, num_rounded_frames, limit)

    def _compute_timestamps(
        self, frames: Sequence[int], num_patches: int, count: int, rate: float
    ) -> tuple[float, ...]:
        """Return the mean time of each temporal patch's first and last frame, in seconds."""
        size = self.temporal_patch
        ends = [(i * size, min((i + 1) * size, len(frames)) - 1) for i in range(num_patches)]
        return tuple((frames[start] / rate + frames[end] / rate) / 2 for start, end in ends)


def load_video_rules(
    folder: str,
    *,
    patch: int,
    merge: int,
    temporal_patch: int,
    fps: float,
    min_frames: int,
    max_frames: int,
    min_pixels: int,
    max_pixels: int,
) -> VideoRules:
    """Load a checkpoint's video rules. Arguments other than 0 replace the checkpoint's values.

    Raises:
        ValueError: A file cannot be read, or a setting is not a positive number.
    """
    fields: Any = {}
    for file in (Path(folder) / name for name in reversed(FILES)):
        if file.is_file():
            content = read_object(file)
            fields = content.get("video_processor", fields) if file.name == FILES[0] else content
    if not isinstance(fields, dict) or not isinstance(fields.get("size") or {}, dict):
        raise ValueError(
            f"{folder}: the settings of the video processor are {fields!r:.80}; expected an object "
            "whose 'size' is an object."
        )
    config = Path(folder) / "config.json"
    model_type = read_object(config).get("model_type") if config.is_file() else ""
    rules_type = Qwen3VideoRules if str(model_type).startswith("qwen3") else VideoRules
    size = drop_nulls(fields.get("size") or {})
    low, high = rules_type.default_limits
    arguments = {
        "fps": fps,
        "min_frames": min_frames,
        "max_frames": max_frames,
        "min_pixels": min_pixels,
        "max_pixels": max_pixels,
    }
    settings = {
        "fps": 2.0,
        "min_frames": 4,
        "max_frames": 768,
        "min_pixels": size.get("shortest_edge", low),
        "max_pixels": size.get("longest_edge", high),
        "max_video_tokens": rules_type.default_tokens,
        **drop_nulls(fields),
        **{name: value for name, value in arguments.items() if value},
    }
    counts = ("min_frames", "max_frames", "min_pixels", "max_pixels", "max_video_tokens")
    source = f"{folder}, settings of the video processor"
    return rules_type(
        fps=read_positive_float(settings, "fps", source),
        **{name: read_positive_int(settings, name, source) for name in counts},
        caps_frames=bool(fields.get("cap_pixels_per_frame")),
        patch=patch,
        merge=merge,
        temporal_patch=temporal_patch,
    )


def read_header(video: Video) -> VideoHeader:
    """Read the size and frame rate of a video, without decoding all frames.

    Raises:
        UnreadableImageError: The file is not a video, or the frames differ in size.
    """
    if video.frames:
        sizes = []
        for frame in video.frames:
            with wrap_image_errors(frame), open_image(frame) as image:
                sizes.append(read_upright_size(image))
        for index, (width, height) in enumerate(sizes):
            if (width, height) != sizes[0]:
                raise UnreadableImageError(
                    f"frame {index + 1} of {video.name} has {width} x {height} pixels; expected "
                    f"{sizes[0][0]} x {sizes[0][1]}, as in frame 1"
                )
        width, height = sizes[0]
        return VideoHeader(num_frames=len(sizes), fps=video.fps, height=height, width=width)
    with _open_file(video) as (container, stream):
        width, height = _turn_upright(next(container.decode(stream))).size
        if width * height > MAX_PIXELS:
            raise ValueError(
                f"it has {width} x {height} pixels; expected at most {MAX_PIXELS:,}. Make it "
                "smaller"
            )
        num_frames = stream.frames
        if not num_frames:  # some containers do not store it
            container.seek(0)
            num_frames = sum(packet.size > 0 for packet in container.demux(stream))
        rate = stream.average_rate or stream.guessed_rate
        return VideoHeader(num_frames=num_frames, fps=float(rate), height=height, width=width)


def iter_frames(video: Video, indices: Sequence[int]) -> Iterator[PIL.Image.Image]:
    """Decode the frames at increasing `indices`.

    Raises:
        UnreadableImageError: A frame is damaged or missing.
    """
    if video.frames:
        for index in indices:
            with wrap_image_errors(video.frames[index]), open_image(video.frames[index]) as image:
                yield load_upright(image)
        return
    with _open_file(video) as (container, stream):
        remaining = list(reversed(indices))
        num_frames = 0
        for index, frame in enumerate(container.decode(stream)):
            num_frames += 1
            if index == remaining[-1]:
                remaining.pop()
                yield _turn_upright(frame)
            if not remaining:
                return
        raise ValueError(
            f"it ends after {num_frames} frames; expected at least {indices[-1] + 1}, as in its "
            "header. Encode it again"
        )


@contextmanager
def _open_file(video: Video) -> Iterator[tuple[Any, Any]]:
    """Open a video file with FFmpeg; convert any exception to an `UnreadableImageError`."""
    try:
        import av
    except ImportError as error:
        raise UnreadableImageError(
            f"{video.name} is a video file, which requires PyAV; run pip install 'jaxrl[video]', "
            "or list the frames as images."
        ) from error
    try:
        source: Any = video.path or io.BytesIO(video.data)
        whitelist = {"format_whitelist": ",".join(FORMATS)}
        with av.open(source, container_options=whitelist) as container:
            yield container, container.streams.video[0]
    except UnreadableImageError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())
        if isinstance(error, IndexError | StopIteration | av.error.FFmpegError):
            reason = (
                f"it is damaged or in none of the formats {', '.join(FORMATS)}; encode it again"
            )
        raise UnreadableImageError(f"{video.name} cannot be read as a video: {reason}") from error


def _turn_upright(frame: Any) -> PIL.Image.Image:
    """Convert a decoded frame to an upright RGB image. Phones store portrait videos sideways."""
    image = frame.to_image()
    return image.rotate(frame.rotation, expand=True) if frame.rotation else image

"""Config keys for the preprocessing of images and videos."""

from jaxrl.config.keys import FREE, Key, Rule

# fmt: off
KEYS = {
    "images.min_pixels": Key(0, "Minimum pixels per image; smaller images are enlarged. 0: as in "
        "`preprocessor_config.json`.", at_least=0),
    "images.max_pixels": Key(0, "Maximum pixels per image; larger images are reduced. 0: as in "
        "`preprocessor_config.json`.", at_least=0),
    "images.fps": Key(0.0, "Frames per second sampled from a video. 0: the model's.", at_least=0),
    "images.min_frames": Key(0, "Minimum sampled frames. 0: the model's.", at_least=0),
    "images.max_frames": Key(0, "Maximum sampled frames. 0: the model's.", at_least=0),
    "images.min_video_pixels": Key(0, "Minimum pixels per frame (Qwen3-VL, Qwen3.5: per video). 0: "
        "the model's.", at_least=0),
    "images.max_video_pixels": Key(0, "Maximum pixels per frame (Qwen3-VL, Qwen3.5: per video). 0: "
        "the model's.", at_least=0),
    "images.cache_mib": Key(256.0, "MiB of preprocessed images kept in memory; the least "
        "recently used are evicted.", at_least=0, restart=FREE),
}
# fmt: on

RULES = (
    Rule(
        "images.max_pixels",
        lambda c: 0 < c.images.max_pixels < c.images.min_pixels,
        "at least images.min_pixels, or 0",
    ),
    Rule(
        "images.max_video_pixels",
        lambda c: 0 < c.images.max_video_pixels < c.images.min_video_pixels,
        "at least images.min_video_pixels, or 0",
    ),
    Rule(
        "images.max_frames",
        lambda c: 0 < c.images.max_frames < c.images.min_frames,
        "at least images.min_frames, or 0",
    ),
)
"""Invalid combinations of keys."""

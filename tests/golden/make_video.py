"""Write the reference values of `tests/extras/vision/test_video.py`; run with torch installed.

    python -m tests.golden.make_video

`videos.npz` has what the processors of transformers make of `requests()`: ids of a prompt, patches,
grid and interval. `<model>/video.npz` has a video for the model of `make_vision.py`, computed by
transformers in float32: patches, grid, interval, ids `[T]`, rotary positions `[3, T]`, and logits
`[T, V]`.
"""

from pathlib import Path

import numpy as np

from tests.extras.vision import video_reference

FOLDER = Path(__file__).parent
SETTINGS = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2, "fps": 2.0}
VIDEO, START, END = 91, 92, 93
GRID, INTERVAL = (4, 4, 6), 0.4


def requests():
    """Return two videos of each family: sampled from 3 frames per second, and already sampled."""
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (9, 16, 24, 3), np.uint8)
    for family, num_frames in (("qwen2_5_vl", 1), ("qwen3_vl", 9)):
        size = {"shortest_edge": 64, "longest_edge": 16 * 24 * num_frames}
        settings = SETTINGS | {"size": size}
        yield family, settings, pixels, {"total_num_frames": 9, "fps": 3.0}
        sampled = {"total_num_frames": 5, "fps": 2.0, "frames_indices": [*range(5)]}
        yield family, settings, pixels[:5], sampled


def video_ids(name):
    """Return the ids of a text with a video of `GRID`."""
    t, h, w = GRID
    frame = [VIDEO] * (h * w // 4)
    if name.startswith("qwen2"):
        return [1, 2, START, *frame * t, END, 3, 4, 5]
    frames = [id for i in range(t) for id in (6, 7 + i, START, *frame, END)]
    return [1, 2, START, *frames, END, 3, 4, 5]


def make_model(name):
    import torch
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(FOLDER / name, dtype=torch.float32).eval()
    torch.manual_seed(1)
    patches = torch.randn(int(np.prod(GRID)), 3 * 2 * 2 * 2)
    ids = torch.tensor([video_ids(name)])
    fields = {
        "video_grid_thw": torch.tensor([GRID]),
        "mm_token_type_ids": 2 * (ids == VIDEO).int(),
        **({"second_per_grid_ts": torch.tensor([INTERVAL])} if name == "qwen2_5_vl" else {}),
    }
    positions, _ = model.model.get_rope_index(ids, **fields)
    with torch.no_grad():
        logits = model(input_ids=ids, pixel_values_videos=patches, **fields).logits
    np.savez_compressed(
        FOLDER / name / "video.npz",
        patches=patches.numpy(),
        token_ids=ids[0].numpy().astype(np.int32),
        positions=positions[:, 0].numpy().astype(np.int32),
        logits=logits[0].numpy(),
    )


if __name__ == "__main__":
    video_reference.install_torchvision()
    arrays = {}
    for index, request in enumerate(requests()):
        result = video_reference.process(*request)
        result["patches"] = result["patches"].astype(np.float16)
        result["interval"] = result["interval"] or 0.0
        arrays |= {f"{index}/{name}": value for name, value in result.items()}
    np.savez_compressed(FOLDER / "videos.npz", **arrays)
    for name in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5_vl"):
        make_model(name)

"""Videos against `transformers` on torch: processors, positions and logits, on random videos."""

import json
import pickle
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.envs.images import Video, encode_pixels
from jaxrl.extras.vision.processor import HFImageProcessor, Image
from jaxrl.models.hf_weights import load_hf, save_hf
from tests.extras.vision.test_live_vision import (
    FAMILIES,
    IMAGE,
    START,
    VIDEO,
    load_reference,
    random_images,
    random_params,
)
from tests.helpers import ROOT
from tests.images import save_processor, video_tokenizer
from tests.vision import logits_of

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.torch

NUM_VIDEOS = 12


def random_request(family, rng):
    """Return the settings of a processor, pixels, and metadata for `video_reference`."""
    num_frames = int(rng.integers(2, 24))
    height, width = (int(x) for x in rng.integers(8, 60, 2))
    if rng.random() < 0.4:  # a size that is not changed
        height, width = 8 * int(rng.integers(1, 7)), 8 * int(rng.integers(1, 7))
    # No values that a resized frame would exceed.
    pixels = rng.integers(80, 176, (num_frames, height, width, 3), np.uint8)
    frames = num_frames if family == "qwen3_vl" else 1
    low = int(rng.choice([64, 200, 900])) * frames
    settings = {
        "patch_size": 4,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": low, "longest_edge": low * int(rng.choice([3, 10, 40]))},
        "fps": float(rng.choice([1, 2, 3.5])),
        "min_frames": int(rng.choice([2, 4, 5])),
        "max_frames": int(rng.choice([6, 7, 16])),
        "cap_pixels_per_frame": bool(rng.integers(2)),
        "max_video_tokens": int(rng.choice([5, 40, 1000])),
    }
    metadata = {"total_num_frames": num_frames, "fps": float(rng.choice([1.5, 4, 10, 29.97]))}
    if rng.random() < 0.25:  # already sampled
        metadata |= {"fps": settings["fps"], "frames_indices": list(range(num_frames))}
    return family, settings, pixels, metadata


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("videos"), np.random.default_rng(0)
    families = ("qwen2_5_vl", "qwen3_vl")
    requests = [random_request(family, rng) for family in families for _ in range(NUM_VIDEOS)]
    source, target = folder / "in.pickle", folder / "out.pickle"
    source.write_bytes(pickle.dumps(requests))
    program = [sys.executable, "-m", "tests.extras.vision.video_reference", source, target]
    subprocess.run(program, cwd=ROOT, check=True)
    return list(zip(requests, pickle.loads(target.read_bytes()), strict=True))


@pytest.mark.parametrize("index", range(2 * NUM_VIDEOS))
def test_videos_are_processed_as_by_the_reference(references, tmp_path, index):
    (family, settings, pixels, metadata), wanted = references[index]
    colors = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3} if family == "qwen3_vl" else {}
    folder = save_processor(tmp_path, **colors)
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    processor = HFImageProcessor(folder)
    fps = 0.0 if "frames_indices" in metadata else metadata["fps"]
    video = Video(frames=tuple(map(encode_pixels, pixels)), fps=fps)
    processed = processor(video)
    assert list(processed.grid) == wanted["grid"]
    # If frames are resized, both round rows and columns to whole gray levels, in another order.
    _, h, w = processed.grid
    is_resized = (4 * h, 4 * w) != pixels.shape[1:3]
    atol = 2.01 / 255 / 0.26 if is_resized else 1e-5
    np.testing.assert_allclose(processed.patches, wanted["patches"], atol=atol)
    if wanted["interval"] is not None:
        assert np.diff(processed.times) == pytest.approx(wanted["interval"])
    count = processor.count_tokens(video)
    assert (count, count.times) == (
        processor.count_image_tokens(processed),
        processor.count_image_tokens(processed).times,
    )
    chat = [{"role": "user", "content": "<video>What?"}]
    ids = video_tokenizer().render_prompt(chat, (), [count])
    assert ids[: len(wanted["ids"])] == wanted["ids"].tolist()
    assert video_tokenizer().decode(ids[len(wanted["ids"]) :]) == "<|im_start|>assistant\n"


def random_video(config, rng):
    """Return a video and the ids of its tokens."""
    tower = config.tower
    t, h, w = int(rng.integers(1, 6)), *(int(x) * tower.merge for x in rng.integers(1, 5, 2))
    patches = rng.standard_normal((t * h * w, tower.num_values_per_patch), np.float32)
    interval = float(rng.choice([0.1, 0.3, 0.5, 1.0, 2.0]))
    video = Image(patches=patches, grid=(t, h, w), times=tuple(i * interval for i in range(t)))
    frame = [VIDEO] * (h * w // tower.num_patches_per_token)
    if not tower.has_split_videos:
        return video, interval, [START, *frame * t]
    times = [[*rng.integers(5, config.vocab_size, 2), START, *frame] for _ in range(t)]
    return video, interval, [token for part in times for token in part]


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("family", FAMILIES)
def test_videos_have_the_positions_and_logits_of_the_reference(tmp_path, family, seed):
    config, rng = FAMILIES[family](seed), np.random.default_rng(seed)
    params = jax.tree.map(jnp.asarray, random_params(config, seed))
    save_hf(params, config, tmp_path / "hf")
    model = load_reference(family, tmp_path / "hf")
    images, ids = random_images(config, rng, 1)
    attachments, ids, intervals = list(images), ids.tolist(), []
    for _ in range(int(rng.integers(1, 3))):
        video, interval, tokens = random_video(config, rng)
        attachments.append(video)
        intervals.append(interval)
        ids += [*tokens, *rng.integers(5, config.vocab_size, 1 + rng.integers(4)).tolist()]
    ids = np.array(ids)
    token_ids = torch.tensor(ids[None])
    kinds = (token_ids == IMAGE).int() + 2 * (token_ids == VIDEO).int()
    videos = attachments[len(images) :]
    fields = {
        "image_grid_thw": torch.tensor([image.grid for image in images]),
        "video_grid_thw": torch.tensor([video.grid for video in videos]),
        "mm_token_type_ids": kinds,
    }
    if family == "Qwen2_5_VL":
        fields["second_per_grid_ts"] = torch.tensor(intervals)
    positions, _ = model.model.get_rope_index(token_ids, **fields)
    found = config.tower.compute_positions(ids, attachments).T
    np.testing.assert_array_equal(found, positions[:, 0].numpy())
    with torch.no_grad():
        logits = model(
            input_ids=token_ids,
            pixel_values=torch.tensor(np.concatenate([image.patches for image in images])),
            pixel_values_videos=torch.tensor(np.concatenate([video.patches for video in videos])),
            **fields,
        ).logits[0]
    wanted = logits[:, 3:].log_softmax(-1).numpy()
    params = load_hf(tmp_path / "hf")
    found = jax.jit(lambda params: logits_of(config, params, [ids], [attachments]))(params)
    found = jax.nn.log_softmax(found[0][:, 3:])
    np.testing.assert_allclose(found, wanted, atol=1e-4, rtol=0)

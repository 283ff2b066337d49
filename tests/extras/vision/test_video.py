"""Videos: sampling, sizes, patches and prompts against `transformers`; files; bad input."""

import dataclasses
import json
import math
from functools import partial

import jax
import numpy as np
import PIL.Image
import pytest

from jaxrl.envs.images import Picture, UnreadableImageError, Video, encode_pixels
from jaxrl.extras.vision.processor import HFImageProcessor, Image
from jaxrl.extras.vision.video import Qwen3VideoRules, VideoHeader, VideoRules
from tests.golden.make_video import GRID, INTERVAL, requests
from tests.images import drawn, encode_video, encoded, save_processor, video_tokenizer
from tests.vision import FOLDERS, NAMES, golden, logits_of

RULES = {
    "fps": 2.0, "min_frames": 4, "max_frames": 8, "min_pixels": 64, "max_pixels": 2**20,
    "caps_frames": False, "max_video_tokens": 100, "patch": 4, "merge": 2, "temporal_patch": 2,
}  # fmt: skip


def make_video(num_frames=5, fps=0.0, **settings):
    frames = [Picture(data=encoded(drawn(seed=i, **settings))) for i in range(num_frames)]
    return Video(frames=tuple(frames), fps=fps)


@pytest.fixture
def processor(tmp_path):
    return HFImageProcessor(save_processor(tmp_path / "model"))


@pytest.mark.parametrize("index", range(4))
def test_videos_are_processed_as_by_the_reference(tmp_path, index):
    family, settings, pixels, metadata = list(requests())[index]
    found = np.load(FOLDERS / "videos.npz")
    wanted = {name: found[f"{index}/{name}"] for name in ("ids", "patches", "grid", "interval")}
    colors = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3} if family == "qwen3_vl" else {}
    folder = save_processor(tmp_path, **colors)
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    fps = 0.0 if "frames_indices" in metadata else metadata["fps"]
    video = Video(frames=tuple(map(encode_pixels, pixels)), fps=fps)
    processor = HFImageProcessor(folder)
    processed = processor(video)
    assert list(processed.grid) == wanted["grid"].tolist()
    np.testing.assert_allclose(processed.patches, wanted["patches"], atol=2e-3)
    if family == "qwen2_5_vl":
        np.testing.assert_allclose(np.diff(processed.times), wanted["interval"])
    chat = [{"role": "user", "content": "<video>What?"}]
    ids = video_tokenizer().render_prompt(chat, (), [processor.count_tokens(video)])
    assert ids[: len(wanted["ids"])] == wanted["ids"].tolist()


@pytest.mark.parametrize("name", NAMES)
def test_a_video_has_the_positions_and_logits_of_the_reference(name):
    config, params, _, _ = golden(name)
    wanted = np.load(FOLDERS / name / "video.npz")
    times = tuple(i * INTERVAL for i in range(GRID[0]))
    video = Image(patches=wanted["patches"], grid=GRID, times=times)
    ids = wanted["token_ids"]
    found = config.tower.compute_positions(ids, [video]).T
    np.testing.assert_array_equal(found, wanted["positions"])
    logits = jax.jit(partial(logits_of, config, rows=[ids], images_of_rows=[[video]]))(params)[0]
    np.testing.assert_allclose(logits[:, :90], wanted["logits"][:, :90], atol=2e-4, rtol=0)


def test_positions_of_a_video_by_hand():
    """Two frames of 1 x 2 units, 0.6 seconds apart: 4 x 0.6 = 2.4 positions in Qwen2.5-VL."""
    tower = golden()[0].tower
    patches = np.zeros((16, tower.num_values_per_patch), np.float32)
    video = Image(patches=patches, grid=(2, 2, 4), times=(0.0, 0.6))
    ids = np.array([1, *[tower.video_id] * 4, 2, 3])
    assert tower.compute_positions(ids, [video]).T.tolist() == [
        [0, 1, 1, 3, 3, 3, 4],
        [0, 1, 1, 1, 1, 3, 4],
        [0, 1, 2, 1, 2, 3, 4],
    ]
    tower = golden("qwen3_vl")[0].tower
    ids = np.array([1, tower.video_id, tower.video_id, 2, tower.video_id, tower.video_id, 3])
    assert tower.compute_positions(ids, [video]).T.tolist() == [
        [0, 1, 1, 3, 4, 4, 6],
        [0, 1, 1, 3, 4, 4, 6],
        [0, 1, 2, 3, 4, 5, 6],
    ]
    ids[4] = tower.token_id
    with pytest.raises(ValueError, match=r"grid of \(2, 2, 4\) are not all 91"):
        tower.compute_positions(ids, [video])


def test_frames_are_sampled_by_hand():
    """10 frames, 5 per second: two seconds, in which each family takes 4 frames at 2 per second."""
    header = VideoHeader(num_frames=10, fps=5.0, height=16, width=24)
    layout = VideoRules(**RULES).compute_layout(header)
    assert layout.frames == (0, 2, 5, 7)
    assert layout.grid == (2, 4, 6)
    assert layout.times == (0.0, 1.0)
    layout = Qwen3VideoRules(**RULES).compute_layout(header)
    assert layout.frames == (0, 3, 6, 9)
    assert layout.times == pytest.approx((0.3, 1.5))  # of frames 0 and 3, then 6 and 9
    # Sampled frames are all used, and the last one fills up its patch.
    sampled = dataclasses.replace(header, num_frames=3, fps=0.0)
    for rules_type in (VideoRules, Qwen3VideoRules):
        layout = rules_type(**RULES).compute_layout(sampled)
        assert (layout.frames, layout.grid) == ((0, 1, 2), (2, 4, 6))


def test_all_frames_share_the_pixels_of_a_video():
    """8 frames of 64 x 64 pixels, of which Qwen3-VL may have 8,192 in all: 32 x 32."""
    header = VideoHeader(num_frames=8, fps=2.0, height=64, width=64)
    limits = RULES | {"max_pixels": 8192}
    assert VideoRules(**limits).compute_layout(header).grid == (4, 16, 16)
    assert Qwen3VideoRules(**limits).compute_layout(header).grid == (4, 8, 8)
    # 100 tokens of 64 pixels, less a tenth: 5,760 for 4 patches, 1,440 each.
    capped = RULES | {"caps_frames": True}
    assert VideoRules(**capped).compute_layout(header).grid == (4, 8, 8)


def test_a_video_of_one_picture_has_the_patches_of_an_image(processor):
    picture = Picture(data=encoded(drawn()))
    still = processor(Video(frames=(picture,) * 4))
    np.testing.assert_array_equal(still.patches, np.tile(processor(picture).patches, (2, 1)))


def test_blank_videos_have_the_size_and_nothing_else(processor):
    blank, video = processor.make_blank_processor(), make_video()
    assert blank.count_tokens(video) == processor.count_tokens(video) == 3 * 6
    assert blank.count_image_tokens(blank(video)) == 18
    assert not blank(video).patches.any()
    assert blank(video).times == processor(video).times


def test_the_config_overrides_the_files_of_the_model(tmp_path):
    fields = {"video_processor": {"fps": 4, "size": {"shortest_edge": 64, "longest_edge": 128}}}
    folder = save_processor(tmp_path)
    (tmp_path / "processor_config.json").write_text(json.dumps(fields))
    video = make_video(8, fps=8.0)
    sizes = [
        HFImageProcessor(folder, **settings)(video).grid
        for settings in ({}, {"fps": 8.0}, {"max_frames": 2}, {"max_video_pixels": 16 * 24})
    ]
    assert sizes == [(2, 2, 2), (4, 2, 2), (1, 2, 2), (2, 6, 4)]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("fps", "2"), ("fps", -1), ("fps", math.nan), ("min_frames", 1.5), ("max_frames", -1),
        ("min_pixels", [1]), ("max_video_tokens", "x"), ("size", 4),
    ],
)  # fmt: skip
def test_settings_that_are_no_positive_numbers_are_refused(tmp_path, name, value):
    folder = save_processor(tmp_path)
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps({name: value}))
    with pytest.raises(ValueError, match=f"'{name}'") as error:
        HFImageProcessor(folder)
    assert str(error.value).startswith(folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["patch_size", "merge_size", "temporal_patch_size", "size"])
@pytest.mark.parametrize("value", [0, -1, "4", [1], math.inf])
def test_sizes_of_images_that_are_no_positive_numbers_are_refused(tmp_path, name, value):
    folder = save_processor(tmp_path)
    file = tmp_path / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {name: value}))
    with pytest.raises(ValueError, match=r"preprocessor_config\.json") as error:
        HFImageProcessor(folder)
    assert "\n" not in str(error.value)


# Files.


PIXELS = np.random.default_rng(0).integers(0, 256, (12, 24, 16, 3), np.uint8)


@pytest.mark.parametrize("from_path", [False, True])
def test_a_file_is_read_like_its_frames(processor, tmp_path, from_path):
    data = encode_video(PIXELS)
    (tmp_path / "a.mkv").write_bytes(data)
    video = Video(path=str(tmp_path / "a.mkv")) if from_path else Video(data=data)
    frames = Video(frames=tuple(map(encode_pixels, PIXELS)), fps=10.0)
    assert processor.count_tokens(video) == processor.count_tokens(frames)
    found, wanted = processor(video), processor(frames)
    assert found.times == wanted.times
    np.testing.assert_array_equal(found.patches, wanted.patches)


def test_a_portrait_that_is_stored_sideways_is_upright(processor):
    """As phones do: the header of the track says to turn by a quarter."""
    smooth = PIL.Image.linear_gradient("L").resize((16, 24))
    pixels = np.stack([np.asarray(smooth.convert("RGB"))] * 4)
    data = bytearray(encode_video(pixels, "mp4", "mpeg4", "yuv420p"))
    matrix = data.index(b"tkhd") + 4 + 40
    data[matrix : matrix + 36] = np.array(
        [0, 2**16, 0, -(2**16), 0, 0, 0, 0, 2**30], ">i4"
    ).tobytes()
    turned = processor(Video(data=bytes(data)))
    wanted = np.rot90(pixels, -1, axes=(1, 2))  # clockwise
    upright = processor(Video(frames=tuple(map(encode_pixels, wanted)), fps=10.0))
    assert turned.grid == upright.grid
    assert abs(turned.patches - upright.patches).mean() < 0.1


# Bad input.


def test_frames_of_unequal_size_are_refused(processor):
    frames = (*make_video(2).frames, Picture(data=encoded(drawn(8, 8))))
    for use in (processor.count_tokens, processor):
        with pytest.raises(
            UnreadableImageError, match=r"frame 3 of .* 8 x 8 pixels; expected 16 x"
        ):
            use(Video(frames=frames))


@pytest.mark.parametrize("kind", ["text", "playlist", "picture", "cut"])
def test_a_file_that_is_no_video_is_refused(processor, tmp_path, kind):
    """A playlist would make FFmpeg read other files."""
    data = encode_video(PIXELS)
    (tmp_path / "b.mkv").write_bytes(data)
    file = tmp_path / "a.mkv"
    contents = {
        "text": b"a video",
        "playlist": f"#EXTM3U\n#EXTINF:10,\n{tmp_path / 'b.mkv'}\n".encode(),
        "picture": encoded(drawn()),
        "cut": data[:200],
    }
    file.write_bytes(contents[kind])
    for use in (processor.count_tokens, processor):
        with pytest.raises(
            UnreadableImageError,
            match=r"a\.mkv cannot be read as a video: it .* mp4, .*; encode it",
        ) as error:
            use(Video(path=str(file)))
        assert "\n" not in str(error.value)
        assert str(error.value)[-1] != "."  # callers end the sentence, as for images


def test_a_file_without_all_its_frames_is_refused(processor, tmp_path):
    data = encode_video(PIXELS, "mp4", "mpeg4", "yuv420p")
    whole = Video(data=data)
    assert processor(whole).grid == (2, 6, 4)
    start = data.index(b"mdat") + 4
    video = Video(data=data[: start + 20] + bytes(len(data) - start - 20))
    with pytest.raises(UnreadableImageError, match="cannot be read as a video"):
        processor(video)


def test_a_missing_file_is_named(processor, tmp_path):
    with pytest.raises(UnreadableImageError, match=r"none\.mp4 cannot be read as a video"):
        processor.count_tokens(Video(path=str(tmp_path / "none.mp4")))

"""Images from files of tasks to patches and token ids, and what is said where there is none."""

import base64
import dataclasses
import io
import json
import re
import struct
import zlib
from contextlib import nullcontext
from functools import partial

import numpy as np
import PIL.Image
import PIL.ImageOps
import PIL.ImageSequence
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import PreTrainedTokenizerFast

from jaxrl.builders.components import _build_processor
from jaxrl.config import default_config
from jaxrl.data import serialization, tasks
from jaxrl.data.records import parse_task
from jaxrl.data.tasks import Tasks, TaskSource, describe_overlap, read_tasks
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.envs.base import (
    Episode,
    Observation,
    Outcome,
    Prompt,
    StepResult,
    Task,
    ToolResults,
    Turn,
)
from jaxrl.envs.images import Picture, Pictured, UnreadableImageError, attached_images
from jaxrl.envs.protocol import qwen, search_r1
from jaxrl.envs.search.base import EmptySearch
from jaxrl.envs.search_env import SearchEnv
from jaxrl.envs.tools.base import Tool, run_call
from jaxrl.extras.endpoints.sent_images import prepare_image
from jaxrl.extras.vision.processor import BlankProcessor, HFImageProcessor
from jaxrl.logs.records import trajectory_to_record
from jaxrl.logs.writers import write_images
from jaxrl.sampling.demonstrations import read_demonstrations
from jaxrl.sampling.episodes import BaseRollout, StartError, TokenLimits
from jaxrl.types import Draw, Group
from tests.episodes import ANSWER, make_trajectory
from tests.helpers import resolved
from tests.images import PAD, TEMPLATE, drawn, encoded, looking_tokenizer, save_processor
from tests.toys import ScriptedEnv, toy_tokenizer
from tests.vision import golden

LIMITS = TokenLimits(
    max_prompt_tokens=200, max_response_tokens=64, max_total_tokens=300, max_observation_tokens=20
)
CHAT = [{"role": "user", "content": "<image>What is it?"}]


@pytest.fixture
def processor(tmp_path):
    return HFImageProcessor(save_processor(tmp_path / "model"))


def saved(path, **settings):
    path.write_bytes(encoded(drawn(**settings)))
    return path


class TestRecords:
    def test_paths_begin_in_the_folder_of_the_file(self, tmp_path):
        (tmp_path / "data" / "pictures").mkdir(parents=True)
        path, other = saved(tmp_path / "data" / "pictures" / "a.png"), saved(tmp_path / "b.png")
        row = {"question": "What?", "answers": "x", "images": ["pictures/a.png", str(other)]}
        (tmp_path / "data" / "t.jsonl").write_text(json.dumps(row) + "\n")
        cells = f'question,answers,images\nWhat?,x,"[""pictures/a.png"", ""{other}""]"\n'
        (tmp_path / "data" / "t.csv").write_text(cells)
        for name in ("t.jsonl", "t.csv"):
            [task] = read_tasks(tmp_path / "data" / name, "tasks.train")
            paths = [image.path for image in task.images]
            assert paths == [str(path), str(other)]
            assert task.question == "<image><image>What?"
        path.unlink()
        with pytest.raises(ValueError, match=r"tasks.train.source: an image of task '.*:2' cannot"):
            read_tasks(tmp_path / "data" / "t.csv", "tasks.train")

    def test_verls_rows_hold_bytes_or_paths(self, tmp_path):
        data = saved(tmp_path / "a.png").read_bytes()
        rows = [
            {
                "prompt": CHAT,
                "reward_model": {"ground_truth": "x"},
                "images": [{"bytes": content, "path": path}],
            }
            for content, path in ((data, None), (data, "a.png"), (None, "a.png"))
        ]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "v.parquet")
        first, both, last = read_tasks(tmp_path / "v.parquet", "tasks.train")
        assert first.images == both.images == (Picture(data=data),)
        assert last.images == (Picture(path=str(tmp_path / "a.png")),)
        assert "images" not in first.metadata

    def test_parts_bring_their_own_or_take_the_next(self, tmp_path):
        url = "data:image/png;base64," + base64.b64encode(b"png").decode()
        parts = [
            {"type": "image", "image": "own.png"},
            {"type": "text", "text": "or "},
            {"type": "image"},
            {"type": "image_url", "image_url": {"url": url}},
        ]
        chat = [
            {"role": "system", "content": "Look at <image>."},
            {"role": "user", "content": parts},
        ]
        fields = {"messages": chat, "answers": "x", "images": ["1.png", "2.png"]}
        task = parse_task(fields, "t:1", folder=tmp_path)
        assert [m["content"] for m in task.messages] == [
            "Look at <image>.", "<image>or <image><image>",
        ]  # fmt: skip
        own = [Picture(path=str(tmp_path / n)) for n in ("1.png", "own.png", "2.png")]
        assert task.images == (*own, Picture(data=b"png"))
        assert chat[1]["content"] is parts

    def test_marks_without_images_are_text(self):
        task = parse_task({"messages": CHAT, "answers": "x", "images": []}, "t:1")
        assert task.images == ()
        assert task.messages == tuple(CHAT)
        parts = [{"type": "text", "text": "What is <image>"}, {"type": "text", "text": " here?"}]
        chat = [{"role": "user", "content": parts}]
        task = parse_task({"messages": chat, "answers": "x"}, "t:1")
        assert task.images == ()
        assert task.messages[0]["content"] == "What is <image> here?"

    @pytest.mark.parametrize(
        ("changes", "why"),
        [
            ({"images": ["a", "b"]}, r"t:1: 'images' holds 2, and the texts have 1 marks <image>"),
            ({"images": [{"size": 3}]}, r"'images': image number 1: .*expected 'bytes' or"),
            ({"images": ["http://a/b.png"]}, "expected a file, since URLs are not downloaded"),
            ({"images": ["data:image/png,x"]}, r"a data: URL without base64"),
            ({"images": 3}, "it is a int; expected a path or bytes"),
            ({"images": ["a"], "videos": ["b"]}, "t:1: videos are not supported"),
            ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "the type 'audio'"),
        ],
    )  # fmt: skip
    def test_what_cannot_be_meant(self, changes, why):
        with pytest.raises(ValueError, match=why):
            parse_task({"messages": CHAT, "answers": "x"} | changes, "t:1")

    def test_bytes_stay_in_the_file_where_they_are_many(self, tmp_path, monkeypatch):
        monkeypatch.setattr(tasks, "MAX_CACHED_IMAGE_BYTES", 2000)
        rows = [
            {"question": f"{i}?", "answers": ["x"], "images": [{"bytes": encoded(drawn(seed=i))}]}
            for i in range(3)
        ]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "v.parquet")
        opened = Tasks(TaskSource(key="tasks.train", source=str(tmp_path / "v.parquet")))
        assert sum(len(task.images[0].data) for task in opened) > 2000
        assert opened[1].images[0].data == rows[1]["images"][0]["bytes"]
        assert opened[1] is not opened[1]  # read anew

    def test_bytes_elsewhere_are_told_by_place_and_column(self, tmp_path):
        row = {"question": "?", "answers": ["x"], "picture": b"\x89PNG\xff"}
        pq.write_table(pa.Table.from_pylist([row]), tmp_path / "v.parquet")
        source = TaskSource(key="tasks.train", source=str(tmp_path / "v.parquet"))
        with pytest.raises(
            ValueError, match=r"v.parquet:1: 'picture' is not valid UTF-8.*'images'"
        ):
            Tasks(source)
        [task] = Tasks(dataclasses.replace(source, columns={"picture": "images"}))
        assert task.images == (Picture(data=b"\x89PNG\xff"),)

    def test_the_same_question_of_another_image_is_another_one(self, tmp_path):
        for name, seed in (("a", 0), ("b", 1), ("c", 0)):
            saved(tmp_path / f"{name}.png", seed=seed)
        ask = lambda name: Task(  # noqa: E731
            id=name,
            question="<image>How many?",
            answers=("3",),
            images=(Picture(path=str(tmp_path / f"{name}.png")),),
        )
        assert describe_overlap([ask("a")], [ask("b")]) == ""
        assert "1 of 1 held-out questions" in describe_overlap([ask("a")], [ask("c")])


class TestProcessor:
    def test_patches_are_in_blocks_of_a_token(self, processor):
        """Against loops over rows, columns and colors; no resizing at this size."""
        image = drawn(width=16, height=24)
        made = processor(Picture(data=encoded(image)))
        mean = np.array([0.48145466, 0.4578275, 0.40821073])
        std = np.array([0.26862954, 0.26130258, 0.27577711])
        pixels = (np.asarray(image) / 255 - mean) / std
        wanted = [
            [
                pixels[8 * by + 4 * y + py, 8 * bx + 4 * x + px, color]
                for color in range(3)
                for _ in range(2)  # a still image, twice in time
                for py in range(4)
                for px in range(4)
            ]
            for by in range(3)
            for bx in range(2)
            for y in range(2)
            for x in range(2)
        ]
        assert made.grid == (1, 6, 4)
        assert made.patches.dtype == np.float32
        np.testing.assert_allclose(made.patches, wanted, atol=1e-6)

    def test_the_file_of_qwen3_vl(self, tmp_path):
        fields = {
            "size": {"longest_edge": 16777216, "shortest_edge": 65536},
            "patch_size": 16,
            "temporal_patch_size": 2,
            "merge_size": 2,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            "processor_class": "Qwen3VLProcessor",
            "image_processor_type": "Qwen2VLImageProcessorFast",
        }
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(fields))
        processor = HFImageProcessor(str(tmp_path))
        picture = Picture(data=encoded(PIL.Image.new("RGB", (320, 288), (255, 0, 51))))
        made = processor(picture)
        assert made.grid == (1, 18, 20)
        assert processor.num_tokens(picture) == 9 * 10
        # 0 to -1, 255 to 1, and 51 to 0.2 * 2 - 1; each color twice 16 x 16.
        wanted = np.repeat([1.0, -1.0, -0.6], 2 * 16 * 16)
        np.testing.assert_allclose(made.patches, np.tile(wanted, (360, 1)), atol=1e-6)

    @pytest.mark.parametrize(("width", "height"), [(5, 7), (16, 24), (90, 33), (400, 3)])
    def test_tokens_are_told_from_the_size_alone(self, processor, width, height, tmp_path):
        path = saved(tmp_path / "a.png", width=width, height=height)
        made = processor(Picture(path=str(path)))
        count = processor.num_tokens(Picture(path=str(path)))
        assert count == made.num_patches // 4 == np.prod(made.grid) // 4
        path.write_bytes(path.read_bytes()[:60])  # of the pixels nothing is left
        assert processor.num_tokens(Picture(path=str(path))) == count

    def test_limits_of_pixels_are_the_users(self, tmp_path):
        folder = save_processor(tmp_path)
        picture = Picture(data=encoded(drawn(width=64, height=64)))
        small, large = (HFImageProcessor(folder, max_pixels=n) for n in (256, 4096))
        assert (small.num_tokens(picture), large.num_tokens(picture)) == (4, 64)
        assert (small(picture).grid, large(picture).grid) == ((1, 4, 4), (1, 16, 16))
        tiny = Picture(data=encoded(drawn(width=8, height=8)))
        assert HFImageProcessor(folder, min_pixels=1024).num_tokens(tiny) == 16

    @pytest.mark.parametrize("orientation", range(1, 10))
    def test_photos_are_upright_whatever_else_their_exif_holds(self, processor, orientation):
        """Cameras write fields of wrong types, here a resolution as text; Pillow fails at them."""
        fields = [
            struct.pack("<HHIHH", 0x0112, 3, 1, orientation, 0),
            struct.pack("<HHI4s", 0x011A, 2, 4, b"1/2\0"),
        ]
        exif = b"Exif\0\0II*\0" + struct.pack("<IH", 8, 2) + b"".join(fields) + bytes(4)
        photo = Picture(data=encoded(drawn(16, 24), "JPEG", exif=exif))
        made = processor(photo)
        assert processor.num_tokens(photo) == made.num_patches // 4
        whole = PIL.Image.open(io.BytesIO(encoded(drawn(16, 24), "JPEG")))
        whole.getexif()[0x0112] = orientation
        wanted = PIL.ImageOps.exif_transpose(whole)
        expected = processor(Picture(data=encoded(wanted)))
        assert made.grid == expected.grid
        np.testing.assert_array_equal(made.patches, expected.patches)

    def test_images_made_last_are_kept_up_to_a_limit(self, tmp_path):
        folder = save_processor(tmp_path)
        size = 24 * 96 * 4  # bytes of an image
        few = HFImageProcessor(folder, cache_mib=2.5 * size / 2**20)
        pictures = [Picture(data=encoded(drawn(seed=seed))) for seed in range(3)]
        first, second, third = map(few, pictures)
        assert few(pictures[2]) is third
        assert few(pictures[1]) is second
        assert few(pictures[0]) is not first
        none = HFImageProcessor(folder, cache_mib=0.0)
        assert none(pictures[0]) is not none(pictures[0])

    def test_blank_images_have_the_size_and_nothing_else(self, processor):
        picture = Picture(data=encoded(drawn()))
        blank = BlankProcessor(processor)
        assert blank.num_tokens(picture) == processor.num_tokens(picture)
        assert blank(picture).grid == processor(picture).grid
        assert blank(picture).patches.shape[1] == blank.patch_values == 3 * 2 * 4**2
        assert not blank(picture).patches.any()
        assert processor(picture).patches.any()

    def test_what_cannot_be_read_is_named(self, processor, tmp_path):
        damaged = saved(tmp_path / "half.png")
        damaged.write_bytes(damaged.read_bytes()[:200])
        (tmp_path / "text.png").write_text("no image")
        for name, use in (
            ("missing.png", processor.num_tokens),
            ("text.png", processor.num_tokens),
            ("text.png", processor),
            ("missing.png", processor),
            ("half.png", processor),
        ):
            with pytest.raises(UnreadableImageError, match=f"{name} cannot be read as an image: "):
                use(Picture(path=str(tmp_path / name)))
        thin = Picture(data=encoded(drawn(width=900, height=1)))
        with pytest.raises(UnreadableImageError, match="900 x 1 pixels: absolute aspect ratio"):
            processor.num_tokens(thin)

    @pytest.mark.parametrize("kind", ["animated", "CMYK", "palette", "palette with a hole", "gray"])
    def test_other_kinds_of_images_are_what_pillow_makes_of_them(self, processor, kind):
        """The first of an animation; colors where something is transparent."""
        image, others = drawn(16, 16), [drawn(16, 16, seed=1)]
        data = {
            "animated": lambda: encoded(image, "GIF", save_all=True, append_images=others),
            "CMYK": lambda: encoded(image.convert("CMYK"), "TIFF"),
            "palette": lambda: encoded(image.quantize(8)),
            "palette with a hole": lambda: encoded(image.quantize(8), transparency=3),
            "gray": lambda: encoded(image.convert("LA")),
        }[kind]()
        [wanted] = PIL.ImageSequence.all_frames(PIL.Image.open(io.BytesIO(data)))[:1]
        plain = Picture(data=encoded(wanted.convert("RGB")))
        found = processor(Picture(data=data))
        np.testing.assert_array_equal(found.patches, processor(plain).patches)

    def test_what_is_wrong_with_an_image_is_said_once(self, processor):
        deep = PIL.Image.fromarray(np.full((8, 8), 40_000, np.uint16))
        length = np.array(20_000, ">u4").tobytes()
        bomb = bytearray(encoded(drawn(8, 8)))
        bomb[16:24] = length + length
        bomb[29:33] = np.array(zlib.crc32(bytes(bomb[12:29])), ">u4").tobytes()
        cases = {
            encoded(deep): "of mode I;16, with more than 8 bits per value.*save it with 8 bits",
            encoded(deep.convert("F"), "TIFF"): "of mode F, with more than 8 bits per value",
            bytes(bomb): r"as an image: Image size \(400000000 pixels\) exceeds limit",
            b"<svg/>": "cannot be read as an image: its format is none of PNG, JPEG, WEBP, GIF, B",
            b"": "cannot be read as an image: its format is none of PNG, JPEG, WEBP, GIF, B",
            encoded(drawn(1, 5000)): "absolute aspect ratio must be smaller than 200, got 5000",
        }
        for data, why in cases.items():
            for use in (processor.num_tokens, processor):
                with pytest.raises(UnreadableImageError, match=why) as raised:
                    use(Picture(data=data))
                assert str(raised.value).count("bytes") == 1

    @pytest.mark.parametrize("kind", ["EPS", "PSD", "PPM", "ICO", "JPEG2000"])
    def test_formats_that_are_not_asked_for_are_not_opened(
        self, processor, tmp_path, monkeypatch, kind
    ):
        """EPS would start Ghostscript: whatever is called so leaves no trace."""
        ghostscript = tmp_path / "gs"
        ghostscript.write_text(f"#!/bin/sh\ntouch {tmp_path / 'called'}\nexit 1\n")
        ghostscript.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
        monkeypatch.setattr("PIL.EpsImagePlugin.gs_binary", None)
        if kind == "PSD":
            data = b"8BPS\0\1" + bytes(6) + struct.pack(">HIIHH", 3, 8, 8, 8, 3) + bytes(300)
        else:
            data = encoded(drawn(16, 16), kind)
        for use in (processor.num_tokens, processor, prepare_image):
            with pytest.raises(
                UnreadableImageError, match="its format is none of PNG, JPEG, WEBP, GIF"
            ):
                use(Picture(data=data))
        assert not (tmp_path / "called").exists()

    @pytest.mark.parametrize("kind", ["PNG", "GIF", "BMP", "TIFF", "WEBP", "JPEG"])
    def test_the_pixels_of_an_image_are_counted_before_it_is_decoded(
        self, processor, monkeypatch, kind
    ):
        def decode(_):
            raise AssertionError("it is decoded")

        fitting, larger = encoded(drawn(40, 25), kind), encoded(drawn(77, 13), kind)
        monkeypatch.setattr("jaxrl.envs.image_decoding.MAX_PIXELS", 1000)
        assert processor(Picture(data=fitting)).patches.size
        for place in ("ImageFile.ImageFile", "GifImagePlugin.GifImageFile", "Image.Image"):
            monkeypatch.setattr(f"PIL.{place}.load", decode)
        for use in (processor.num_tokens, processor, partial(prepare_image, is_blank=True)):
            with pytest.raises(
                UnreadableImageError, match="of 77 x 13 pixels; expected at most 1,000"
            ):
                use(Picture(data=larger))

    def test_the_scans_of_a_jpeg_are_counted_before_it_is_decoded(self, processor, monkeypatch):
        """Each is a pass over all pixels, and may be of a few bytes."""
        jpeg = encoded(drawn(40, 25), "JPEG", progressive=True)
        last = jpeg.rfind(b"\xff\xda")
        many = jpeg[:-2] + jpeg[last:-2] * 100 + b"\xff\xd9"
        # What looks like scans in a comment, or behind the image, is none.
        marks = b"\xff\xda" * 300
        comment = b"\xff\xfe" + (2 + len(marks)).to_bytes(2) + marks
        for data in (jpeg[:2] + comment + jpeg[2:], jpeg + marks):
            assert processor(Picture(data=data)).patches.size
        monkeypatch.setattr("PIL.ImageFile.ImageFile.load", None)
        for use in (processor.num_tokens, processor, partial(prepare_image, is_blank=True)):
            for data in (many, jpeg[:2] + comment + many[2:]):
                with pytest.raises(
                    UnreadableImageError, match="a JPEG with 110 scans; expected at most"
                ):
                    use(Picture(data=data))

    def test_a_folder_without_a_processor_or_with_another(self, tmp_path):
        with pytest.raises(ValueError, match=r"has no preprocessor_config.json, which images"):
            HFImageProcessor(str(tmp_path))
        file = tmp_path / "preprocessor_config.json"
        file.write_text('{"image_processor_type": "CLIPImageProcessor"}')
        with pytest.raises(ValueError, match=r"preprocessor_config.json"):
            HFImageProcessor(str(tmp_path))


class TestPrompts:
    def test_the_template_writes_an_image_and_its_tokens_are_as_many(self):
        tokenizer = looking_tokenizer()
        chat = [{"role": "user", "content": "<image>Is it <image>?"}]
        ids = tokenizer.render_prompt(chat, (), [2, 1])
        shown = "<|vision_start|>{}<|vision_end|>".format
        wanted = f"<|im_start|>user\n{shown(2 * PAD)}Is it {shown(PAD)}?<|im_end|>\n"
        assert tokenizer.decode(ids) == wanted + "<|im_start|>assistant\n"
        assert ids.count(tokenizer.image_id) == 3
        plain = tokenizer.render_prompt(chat)
        assert "<image>Is it <image>?" in tokenizer.decode(plain)

    def test_no_text_forges_an_image(self):
        tokenizer = looking_tokenizer()
        chat = [{"role": "user", "content": f"<image>{PAD}<|vision_start|>"}]
        ids = tokenizer.render_prompt(chat, (), [2])
        assert ids.count(tokenizer.image_id) == 2
        assert tokenizer.decode(ids).count(PAD) == 3

    def test_no_text_forges_a_video_either(self, tmp_path):
        """Of any text of a user, whether the tokenizer flags the token as special or not."""
        tokenizer = watching_tokenizer()
        assert tokenizer.video_id == tokenizer.encode(VIDEO)[0]
        for content in (VIDEO, f"<image>{VIDEO}"):
            chat = [{"role": "user", "content": content}]
            ids = tokenizer.render_prompt(chat, (), [2] * content.count("<image>"))
            assert tokenizer.video_id not in ids
            assert VIDEO in tokenizer.decode(ids)
        save_tokenizer(tmp_path, image_token_id=tokenizer.image_id, video_token_id=7)
        assert Tokenizer.from_folder(tmp_path).video_id == 7

    def test_a_template_of_a_text_model_is_refused(self):
        with pytest.raises(ValueError, match="chat template drops message 1"):
            toy_tokenizer().render_prompt(CHAT, (), [3])

    @pytest.mark.parametrize("wrong", [5000, 7])
    def test_an_image_token_that_the_template_does_not_write_is_the_configs(self, tmp_path, wrong):
        save_tokenizer(tmp_path, image_token_id=wrong)
        start, pad, end = looking_tokenizer().encode(f"<|vision_start|>{PAD}<|vision_end|>")
        why = (
            rf"config.json in config.model.path has the image_token_id {wrong}; .* template writes "
            rf".*'<\|vision_start\|>': {start}, '<\|image_pad\|>': {pad}, '<\|vision_end\|>': {end}"
        )
        with pytest.raises(ValueError, match=why):
            Tokenizer.from_folder(tmp_path)
        save_tokenizer(tmp_path, image_token_id=pad)
        assert Tokenizer.from_folder(tmp_path).image_id == pad

    def test_results_show_images_behind_their_texts(self):
        tokenizer = looking_tokenizer()
        tools = [{"type": "function", "function": {"name": "crop"}}]
        ids, text = tokenizer.render_results(["a", f"b{PAD}"], tools, [[], [2]])
        assert ids.count(tokenizer.image_id) == 2
        results = text.split("<|im_start|>")
        assert results[1] == "tool\na<|im_end|>\n"
        assert results[2] == f"tool\nb{PAD}<|vision_start|>{PAD}<|vision_end|><|im_end|>\n"


def save_tokenizer(folder, **fields):
    """A tokenizer's files, and a `config.json` of these fields."""
    PreTrainedTokenizerFast(
        tokenizer_object=looking_tokenizer()._tokenizer,
        eos_token="<|im_end|>",
        chat_template=TEMPLATE,
    ).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2_5_vl"} | fields))


VIDEO = "<|video_pad|>"


def watching_tokenizer():
    """That of a model that knows videos by a token which is not flagged as special."""
    [video] = looking_tokenizer(added=[VIDEO]).encode(VIDEO)
    return looking_tokenizer(added=[VIDEO], video_id=video)


class LookingEnv(ScriptedEnv):
    def start(self, tasks):
        return [Prompt(system="", template="{question}").messages(task) for task in tasks]


def player(processor, reply=None, **changes):
    env = LookingEnv((), lambda turn: reply)
    limits = dataclasses.replace(LIMITS, **changes)
    return BaseRollout(env, looking_tokenizer(), limits, processor=processor)


def looking_task(tmp_path, **settings):
    picture = Picture(path=str(saved(tmp_path / "a.png", **settings)))
    return Task(id="t7", question="<image>What?", answers=("x",), images=(picture,))


class TestEpisodes:
    """What `BaseRollout` makes of tasks and replies, without an engine."""

    def sample(self, play, task):
        return play._make_samples([Draw(task=task, stream_index=0)], 2)

    def test_a_group_shares_its_images(self, processor, tmp_path):
        task = looking_task(tmp_path)
        first, second = self.sample(player(processor), task)
        assert first.attachments[0] is second.attachments[0]
        assert first.token_ids.count(looking_tokenizer().image_id) == 6
        assert first.attachments[0].num_patches == 24

    def test_overlong_prompts_with_images_are_never_cut(self, processor, tmp_path):
        task = looking_task(tmp_path, width=32, height=32)
        assert player(processor).prompt_fits(task)
        assert not player(processor, max_prompt_tokens=20, overlong_prompts="drop").prompt_fits(
            task
        )
        for choice in ("refuse", "truncate_left"):
            with pytest.raises(ValueError, match=r"prompt of task 't7' has \d+ tokens; expected 1"):
                player(processor, max_prompt_tokens=20, overlong_prompts=choice).prompt_fits(task)

    def test_prompts_of_more_image_tokens_than_there_is_room_for(self, processor, tmp_path):
        task = looking_task(tmp_path)  # of 6
        for limit, is_short in ((5, False), (6, True)):
            play = player(processor, max_image_tokens=limit, overlong_prompts="drop")
            assert play.prompt_fits(task) == is_short
        for choice in ("refuse", "truncate_left"):
            play = player(processor, max_image_tokens=5, overlong_prompts=choice)
            why = r"images of the prompt of task 't7' take 6 tokens; expected at most 5.*max_image"
            with pytest.raises(ValueError, match=why):
                play.prompt_fits(task)
            with pytest.raises(ValueError, match=why):
                self.sample(play, task)

    def test_images_that_cannot_be_had_name_the_task(self, processor, tmp_path):
        task = looking_task(tmp_path)
        with pytest.raises(
            UnreadableImageError,
            match=r"'t7': .*the model does not support images.*columns={'images'",
        ):
            player(None).prompt_fits(task)
        with pytest.raises(StartError, match="'t7' has 1 images, but its chat has 0 marks <image>"):
            player(processor).prompt_fits(dataclasses.replace(task, question="What?"))
        (tmp_path / "a.png").write_bytes(encoded(drawn())[:200])
        assert player(processor).prompt_fits(task)  # of which only the size was looked at
        first, _ = self.sample(player(processor), task)
        assert first.episode.outcome == Outcome.ENVIRONMENT_ERROR
        assert "task 't7': " in first.episode.turns[0].error
        assert "a.png cannot be read as an image" in first.episode.turns[0].error
        (tmp_path / "a.png").unlink()
        with pytest.raises(UnreadableImageError, match=r"task 't7': .*a.png cannot be read"):
            player(processor).prompt_fits(task)

    def shown(self, processor, tmp_path, observation, **changes):
        """The sample after a reply, and the reply as it was taken."""
        play = player(processor, StepResult(observation=observation), **changes)
        sample, _ = self.sample(play, looking_task(tmp_path))
        [reply] = play._step_episodes([sample.episode], ["call"])
        play._apply_step_result(sample, "call", reply)
        return sample

    def test_an_observation_shows_images_inside_its_tags(self, processor, tmp_path):
        picture = Picture(data=encoded(drawn(seed=5)))
        observation = Observation(
            prefix="<r>", body="x" * 50, suffix="</r>", images=(picture, picture)
        )
        sample = self.shown(processor, tmp_path, observation)
        turn = sample.episode.turns[0]
        image = f"<|vision_start|>{PAD}<|vision_end|>"
        assert turn.observation == f"<r>{'x' * 8}{image}{image}</r>"  # 20 tokens, 12 of images
        assert turn.images == (picture, picture)
        assert [i.num_patches for i in sample.attachments] == [24, 24, 24]
        assert sample.token_ids.count(looking_tokenizer().image_id) == 18
        assert sample.turn_starts[-1] == len(sample.token_ids)

    def test_images_of_results_stand_in_the_templates_turn(self, processor, tmp_path):
        picture = Picture(data=encoded(drawn(seed=5)))
        results = ToolResults(bodies=("a", "b"), images=((), (picture,)))
        sample = self.shown(processor, tmp_path, results)
        assert f"b<|vision_start|>{PAD}<|vision_end|>" in sample.episode.turns[0].observation
        assert len(sample.attachments) == 2

    @pytest.mark.parametrize(
        ("images", "why"),
        [
            (
                (Picture(data=b"no"),),
                "a tool returned an invalid image: an image of 2 bytes cannot be read",
            ),
            (
                (Picture(data=encoded(drawn(90, 90))),),
                r"images of \d+ tokens, which cannot be truncated",
            ),
            (("a.png",), "an observation has an image that is not a Picture"),
        ],
    )
    def test_images_of_tools_that_cannot_be_shown(self, processor, tmp_path, images, why):
        observation = Observation(prefix="", body="x", suffix="", images=images)
        sample = self.shown(processor, tmp_path, observation, max_observation_tokens=15)
        assert sample.episode.outcome == Outcome.ENVIRONMENT_ERROR
        with pytest.raises(AssertionError, match=why):
            raise AssertionError(sample.episode.turns[0].error)

    def test_images_without_room_end_the_episode(self, processor, tmp_path):
        picture = Picture(data=encoded(drawn()))
        observation = Observation(prefix="", body="", suffix="", images=(picture,))
        sample = self.shown(processor, tmp_path, observation, max_total_tokens=39)
        assert sample.episode.outcome == Outcome.OUT_OF_BUDGET
        assert len(sample.attachments) == 1

    @pytest.mark.parametrize("limit", [11, 12])
    def test_more_image_tokens_than_a_trajectory_may_have_end_it(self, processor, tmp_path, limit):
        picture = Picture(data=encoded(drawn(seed=5)))
        observation = Observation(prefix="<r>", body="x", suffix="</r>", images=(picture,))
        results = ToolResults(bodies=("x",), images=((picture,),))
        for shown in (observation, results):
            sample = self.shown(processor, tmp_path, shown, max_image_tokens=limit)
            [turn] = sample.episode.turns
            fits = limit == 12  # the prompt's image has 6, as that of the observation
            assert sample.episode.outcome == (None if fits else Outcome.OUT_OF_BUDGET)
            assert len(sample.attachments) == 1 + fits
            assert (turn.observation is not None, len(turn.images)) == (fits, fits)


class TestCodecs:
    def test_a_trajectory_names_its_images_and_finds_them_again(self, processor, tmp_path):
        file, data = saved(tmp_path / "a.png"), encoded(drawn(seed=3))
        pictures = Picture(path=str(file)), Picture(data=data)
        turn = Turn(text="look", observation="o", images=pictures[1:])
        plain = make_trajectory(turns=(turn, ANSWER))
        task = dataclasses.replace(plain.task, images=pictures[:1])
        seen = tuple(map(processor, pictures))
        before = dataclasses.replace(plain, task=task, attachments=seen)
        travelled = json.loads(json.dumps(serialization.to_json(before)))
        [group] = processor.with_images([Group(trajectories=(serialization.from_json(travelled),))])
        [after] = group.trajectories
        assert after.attachments == seen  # the very same: they were kept
        assert (after.task, after.turns) == (before.task, before.turns)
        record = json.loads(json.dumps(trajectory_to_record(before)))
        assert record["images"] == [{"digest": pictures[0].digest, "file": str(file)}]
        [shown] = record["turns"][0]["images"]
        assert shown == {"digest": pictures[1].digest, "file": f"images/{pictures[1].digest}"}
        for _ in range(2):
            write_images(tmp_path / "run", [before])
        assert (tmp_path / "run" / shown["file"]).read_bytes() == data
        assert len(list((tmp_path / "run" / "images").iterdir())) == 1
        saved(file, seed=9)
        with pytest.raises(
            UnreadableImageError, match=r"a.png, with which the run sampled, was changed"
        ):
            serialization.from_json(travelled)
        file.unlink()
        with pytest.raises(
            UnreadableImageError, match=r"a.png, .* cannot be read \(No such file or dir"
        ):
            serialization.from_json(travelled)


class Zoom(Tool):
    name, blank = "zoom", "nothing to look at"

    def run(self, call, /):
        return Pictured(f"a look at <search>{call}</search>", [Picture(data=b"png")])


class TestTools:
    @pytest.mark.parametrize("protocol", [search_r1, qwen])
    def test_a_tools_images_arrive_in_the_observation(self, protocol):
        env = SearchEnv(
            EmptySearch(),
            tools=[Zoom()],
            prompt=Prompt(system="", template="{question}"),
            max_turns=2,
            protocol=protocol,
        )
        call = '{"name": "zoom", "arguments": {"call": "left"}}'
        turn = {search_r1: "<zoom>left</zoom>", qwen: f"<tool_call>{call}</tool_call>"}[protocol]
        episode = Episode(task=Task(id="t", question="?", answers=("x",)))
        [result] = env.step([episode], [turn])
        shown = result.observation
        images = shown.images[0] if protocol is qwen else shown.images
        assert images == (Picture(data=b"png"),)
        [body] = shown.bodies if protocol is qwen else [shown.body]
        assert body.startswith("a look at ")
        assert ("<search>" in body) == (protocol is qwen)  # whose tags these are not

    def test_a_search_engine_finds_text_alone(self):
        class Engine(Zoom):
            name = "search"

        assert "expected text" in str(run_call(Engine(), "q"))
        assert attached_images(run_call(Zoom(), "q")) == (Picture(data=b"png"),)

    def test_a_text_model_is_told_of_images(self, tmp_path):
        picture = Picture(data=encoded(drawn()))
        observation = Observation(prefix="<", body="two", suffix=">", images=(picture,) * 2)
        play = player(None, StepResult(observation=observation))
        [reply] = play._step_episodes([Episode(task=Task(id="t", question="?"))], ["call"])
        assert reply.observation == Observation(
            prefix="<", body="two\n[image]\n[image]", suffix=">"
        )
        results = ToolResults(bodies=("", "b"), images=((picture,), ()))
        play = player(None, StepResult(observation=results))
        [reply] = play._step_episodes([Episode(task=Task(id="t", question="?"))], ["call"])
        assert reply.observation == ToolResults(bodies=("[image]", "b"))


def test_a_processor_of_another_model_is_refused(tmp_path):
    [model, *_], config = golden(), default_config()
    sizes = {"patch_size": model.tower.patch, "merge_size": model.tower.merge}
    for changes, why in (
        ({}, None),
        ({"patch_size": 4}, "96 values"),
        ({"merge_size": 3}, "9 per token"),
    ):
        config.model.path = save_processor(tmp_path, **sizes | changes)
        with pytest.raises(ValueError, match=why) if why else nullcontext():
            _build_processor(resolved(config), looking_tokenizer(), model)


class TestDemonstrations:
    def read(self, tmp_path, fields, processor, **more):
        chat = [*CHAT, {"role": "assistant", "content": "a dot"}]
        record = {"messages": chat, "images": ["a.png"]} | fields
        (tmp_path / "d.jsonl").write_text(json.dumps(record))
        return read_demonstrations(
            str(tmp_path / "d.jsonl"),
            watching_tokenizer(),
            TokenLimits(
                max_prompt_tokens=100,
                max_response_tokens=100,
                max_total_tokens=100,
                max_observation_tokens=10,
                **more,
            ),
            processor=processor,
        )

    def test_images_are_made_when_they_are_asked_for(self, processor, tmp_path):
        saved(tmp_path / "a.png")
        [one] = self.read(tmp_path, {}, processor)
        tokenizer = looking_tokenizer()
        assert one.token_ids.tolist().count(tokenizer.image_id) == 6
        assert tokenizer.decode(one.token_ids[one.loss_mask].tolist()) == "a dot"
        assert [image.grid for image in one.attachments] == [(1, 6, 4)]
        (tmp_path / "a.png").unlink()
        assert len(one.attachments) == 1  # kept

    @pytest.mark.parametrize(
        ("fields", "has_processor", "why"),
        [
            ({}, False, r"d.jsonl:1 has images, but the model does not"),
            ({"images": ["no.png"]}, True, r"d.jsonl:1, of config.sft.source: .*no.png cannot be"),
            (
                {"messages": [{"role": "user", "content": "?"},
                              {"role": "assistant", "content": "<image>"}]},
                True,
                "d.jsonl:1: 1 images come after the first assistant message",
            ),
        ],
    )  # fmt: skip
    def test_what_cannot_be_shown(self, processor, tmp_path, fields, has_processor, why):
        saved(tmp_path / "a.png")
        with pytest.raises(ValueError, match=why):
            self.read(tmp_path, fields, processor if has_processor else None)

    def test_more_images_than_there_is_room_for_are_refused(self, processor, tmp_path):
        saved(tmp_path / "a.png")
        assert len(self.read(tmp_path, {}, processor, max_image_tokens=6)) == 1
        why = (
            r"d.jsonl:1: the demonstration's images take 6 tokens; expected at most config.rollout"
        )
        with pytest.raises(ValueError, match=why):
            self.read(tmp_path, {}, processor, max_image_tokens=5)

    def test_the_assistant_writes_no_image_tokens(self, processor, tmp_path):
        saved(tmp_path / "a.png")
        for token in (PAD, VIDEO):
            chat = [*CHAT, {"role": "assistant", "content": f"a {token} dot"}]
            why = f"d.jsonl:1: an assistant message has '{token}', the placeholder of an image"
            with pytest.raises(ValueError, match=re.escape(why)):
                self.read(tmp_path, {"messages": chat}, processor)

    def test_a_damaged_image_is_named_with_its_key(self, processor, tmp_path):
        (tmp_path / "a.png").write_bytes(encoded(drawn())[:-100])
        [one] = self.read(tmp_path, {}, processor)
        with pytest.raises(
            UnreadableImageError, match=r"config.sft.source has .*a.png cannot be read"
        ):
            _ = one.attachments

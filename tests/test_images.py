"""Images of tasks: from files to patches and token ids, and errors where there is no image."""

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

from jaxrl.builders.components import build_image_processor
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
from jaxrl.envs.images import Picture, TextWithImages, UnreadableImageError
from jaxrl.envs.protocol import qwen, search_r1
from jaxrl.envs.search.base import EmptySearch
from jaxrl.envs.search_env import SearchEnv
from jaxrl.envs.tools.base import Tool
from jaxrl.extras.endpoints.images import prepare_image
from jaxrl.extras.vision.processor import BlankProcessor, HFImageProcessor
from jaxrl.logs.records import build_trajectory_record
from jaxrl.logs.writers import write_images
from jaxrl.sampling.demonstrations import read_demonstrations
from jaxrl.sampling.episodes import BaseRollout, EpisodeStartError, TokenLimits
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
    def test_paths_are_relative_to_the_folder_of_the_file(self, tmp_path):
        (tmp_path / "data" / "pictures").mkdir(parents=True)
        inside, outside = saved(tmp_path / "data" / "pictures" / "a.png"), saved(tmp_path / "b.png")
        row = {"question": "What?", "answers": "x", "images": ["pictures/a.png", str(outside)]}
        (tmp_path / "data" / "t.jsonl").write_text(json.dumps(row) + "\n")
        cells = f'question,answers,images\nWhat?,x,"[""pictures/a.png"", ""{outside}""]"\n'
        (tmp_path / "data" / "t.csv").write_text(cells)
        for name in ("t.jsonl", "t.csv"):
            [task] = read_tasks(tmp_path / "data" / name, "tasks.train")
            assert [image.path for image in task.images] == [str(inside), str(outside)]
            assert task.question == "<image><image>What?"
        inside.unlink()
        with pytest.raises(
            ValueError, match=r"tasks.train.source: an image or video of task '.*:2' cannot"
        ):
            read_tasks(tmp_path / "data" / "t.csv", "tasks.train")

    def test_rows_of_verl_hold_bytes_or_paths(self, tmp_path):
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

    def test_image_parts_without_a_source_take_the_next_of_the_row(self, tmp_path):
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
        assert [message["content"] for message in task.messages] == [
            "Look at <image>.", "<image>or <image><image>",
        ]  # fmt: skip
        files = [Picture(path=str(tmp_path / name)) for name in ("1.png", "own.png", "2.png")]
        assert task.images == (*files, Picture(data=b"png"))
        assert chat[1]["content"] is parts

    def test_marks_without_images_are_text(self):
        chat = [{"role": "user", "content": [{"type": "text", "text": "What is <image> here?"}]}]
        task = parse_task({"messages": chat, "answers": "x", "images": []}, "t:1")
        assert task.images == ()
        assert task.messages[0]["content"] == "What is <image> here?"

    @pytest.mark.parametrize(
        ("changes", "why"),
        [
            (
                {"images": ["a", "b"]},
                r"t:1: 'images' contains 2 images, and the texts 1 placeholders <image>",
            ),
            ({"images": ["http://a/b.png"]}, "expected a file, since URLs are not downloaded"),
            (
                {"images": ["a"], "videos": [["b"], []]},
                "t:1: 'videos': video number 2: it has no frames",
            ),
        ],
    )
    def test_unusable_images_are_refused(self, changes, why):
        with pytest.raises(ValueError, match=why):
            parse_task({"messages": CHAT, "answers": "x"} | changes, "t:1")

    def test_many_bytes_stay_in_the_file(self, tmp_path, monkeypatch):
        monkeypatch.setattr(tasks, "MAX_CACHED_IMAGE_BYTES", 2000)
        rows = [
            {"question": f"{i}?", "answers": ["x"], "images": [{"bytes": encoded(drawn(seed=i))}]}
            for i in range(3)
        ]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "v.parquet")
        opened = Tasks(TaskSource(key="tasks.train", source=str(tmp_path / "v.parquet")))
        assert sum(len(task.images[0].data) for task in opened) > 2000
        assert opened[1].images[0].data == rows[1]["images"][0]["bytes"]
        assert opened[1] is not opened[1]  # read again

    def test_overlap_of_questions_takes_their_images_into_account(self, tmp_path):
        for name, seed in (("a", 0), ("b", 1), ("c", 0)):
            saved(tmp_path / f"{name}.png", seed=seed)

        def ask_about(name):
            images = (Picture(path=str(tmp_path / f"{name}.png")),)
            return Task(id=name, question="<image>How many?", answers=("3",), images=images)

        assert describe_overlap([ask_about("a")], [ask_about("b")]) == ""
        overlap = describe_overlap([ask_about("a")], [ask_about("c")])
        assert "1 of 1 held-out questions" in overlap


class TestProcessor:
    def test_patches_are_in_blocks_of_a_token(self, processor):
        """Against loops over rows, columns and colors; no resizing at this size."""
        image = drawn(width=16, height=24)
        processed = processor(Picture(data=encoded(image)))
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
        assert processed.grid == (1, 6, 4)
        assert processed.patches.dtype == np.float32
        np.testing.assert_allclose(processed.patches, wanted, atol=1e-6)

    def test_reads_the_file_of_qwen3_vl(self, tmp_path):
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
        processed = processor(picture)
        assert processed.grid == (1, 18, 20)
        assert processor.count_tokens(picture) == 9 * 10
        # 0 to -1, 255 to 1, and 51 to 0.2 * 2 - 1; each color twice 16 x 16.
        wanted = np.repeat([1.0, -1.0, -0.6], 2 * 16 * 16)
        np.testing.assert_allclose(processed.patches, np.tile(wanted, (360, 1)), atol=1e-6)

    @pytest.mark.parametrize(("width", "height"), [(5, 7), (90, 33), (400, 3)])
    def test_tokens_are_counted_from_the_size_alone(self, processor, width, height, tmp_path):
        path = saved(tmp_path / "a.png", width=width, height=height)
        processed = processor(Picture(path=str(path)))
        count = processor.count_tokens(Picture(path=str(path)))
        assert count == processed.num_patches // 4 == np.prod(processed.grid) // 4
        path.write_bytes(path.read_bytes()[:60])  # no pixels are left
        assert processor.count_tokens(Picture(path=str(path))) == count

    def test_limits_of_pixels_are_the_users(self, tmp_path):
        folder = save_processor(tmp_path)
        picture = Picture(data=encoded(drawn(width=64, height=64)))
        small, large = (HFImageProcessor(folder, max_pixels=n) for n in (256, 4096))
        assert (small.count_tokens(picture), large.count_tokens(picture)) == (4, 64)
        assert (small(picture).grid, large(picture).grid) == ((1, 4, 4), (1, 16, 16))
        tiny = Picture(data=encoded(drawn(width=8, height=8)))
        assert HFImageProcessor(folder, min_pixels=1024).count_tokens(tiny) == 16

    @pytest.mark.parametrize("orientation", range(1, 10))
    def test_photos_are_upright_whatever_else_their_exif_holds(self, processor, orientation):
        """Cameras write fields of wrong types, here a resolution as text; Pillow fails at them."""
        fields = [
            struct.pack("<HHIHH", 0x0112, 3, 1, orientation, 0),
            struct.pack("<HHI4s", 0x011A, 2, 4, b"1/2\0"),
        ]
        exif = b"Exif\0\0II*\0" + struct.pack("<IH", 8, 2) + b"".join(fields) + bytes(4)
        photo = Picture(data=encoded(drawn(16, 24), "JPEG", exif=exif))
        processed = processor(photo)
        assert processor.count_tokens(photo) == processed.num_patches // 4
        image = PIL.Image.open(io.BytesIO(encoded(drawn(16, 24), "JPEG")))
        image.getexif()[0x0112] = orientation
        upright = PIL.ImageOps.exif_transpose(image)
        expected = processor(Picture(data=encoded(upright)))
        assert processed.grid == expected.grid
        np.testing.assert_array_equal(processed.patches, expected.patches)

    def test_blank_images_have_the_size_and_nothing_else(self, processor):
        picture = Picture(data=encoded(drawn()))
        blank = BlankProcessor(processor)
        assert blank.count_tokens(picture) == processor.count_tokens(picture)
        assert blank(picture).grid == processor(picture).grid
        assert blank(picture).patches.shape[1] == blank.num_values_per_patch == 3 * 2 * 4**2
        assert not blank(picture).patches.any()
        assert processor(picture).patches.any()

    @pytest.mark.parametrize("kind", ["animated", "CMYK", "palette with a hole", "gray"])
    def test_other_kinds_of_images_look_as_in_pillow(self, processor, kind):
        """The first frame of an animation; colors where a pixel is transparent."""
        image, others = drawn(16, 16), [drawn(16, 16, seed=1)]
        data = {
            "animated": lambda: encoded(image, "GIF", save_all=True, append_images=others),
            "CMYK": lambda: encoded(image.convert("CMYK"), "TIFF"),
            "palette with a hole": lambda: encoded(image.quantize(8), transparency=3),
            "gray": lambda: encoded(image.convert("LA")),
        }[kind]()
        first_frame, *_ = PIL.ImageSequence.all_frames(PIL.Image.open(io.BytesIO(data)))
        expected = processor(Picture(data=encoded(first_frame.convert("RGB"))))
        processed = processor(Picture(data=data))
        np.testing.assert_array_equal(processed.patches, expected.patches)

    def test_unusable_images_are_refused(self, processor):
        deep = PIL.Image.fromarray(np.full((8, 8), 40_000, np.uint16))
        length = np.array(20_000, ">u4").tobytes()
        bomb = bytearray(encoded(drawn(8, 8)))
        bomb[16:24] = length + length
        bomb[29:33] = np.array(zlib.crc32(bytes(bomb[12:29])), ">u4").tobytes()
        cases = {
            encoded(deep): "of mode I;16, with more than 8 bits per value.*save it with 8 bits",
            encoded(deep.convert("F"), "TIFF"): "of mode F, with more than 8 bits per value",
            bytes(bomb): r"as an image: Image size \(400000000 pixels\) exceeds limit",
            b"": "cannot be read as an image: its format is none of PNG, JPEG, WEBP, GIF, B",
            encoded(drawn(1, 5000)): "absolute aspect ratio must be smaller than 200, got 5000",
        }
        for data, why in cases.items():
            for use in (processor.count_tokens, processor):
                with pytest.raises(UnreadableImageError, match=why):
                    use(Picture(data=data))

    @pytest.mark.parametrize("kind", ["EPS", "JPEG2000"])
    def test_unsupported_formats_are_not_opened(self, processor, tmp_path, monkeypatch, kind):
        """EPS would start Ghostscript: a program of that name leaves no trace."""
        ghostscript = tmp_path / "gs"
        ghostscript.write_text(f"#!/bin/sh\ntouch {tmp_path / 'called'}\nexit 1\n")
        ghostscript.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
        monkeypatch.setattr("PIL.EpsImagePlugin.gs_binary", None)
        data = encoded(drawn(16, 16), kind)
        for use in (processor.count_tokens, processor, prepare_image):
            with pytest.raises(UnreadableImageError, match="its format is none of PNG, JPEG"):
                use(Picture(data=data))
        assert not (tmp_path / "called").exists()

    @pytest.mark.parametrize("kind", ["PNG", "GIF", "TIFF", "WEBP"])
    def test_pixels_are_counted_before_an_image_is_decoded(self, processor, monkeypatch, kind):
        def decode(_):
            raise AssertionError("the image is decoded")

        fitting, larger = encoded(drawn(40, 25), kind), encoded(drawn(77, 13), kind)
        monkeypatch.setattr("jaxrl.envs.image_decoding.MAX_PIXELS", 1000)
        assert processor(Picture(data=fitting)).patches.size
        for loader in ("ImageFile.ImageFile", "GifImagePlugin.GifImageFile", "Image.Image"):
            monkeypatch.setattr(f"PIL.{loader}.load", decode)
        for use in (processor.count_tokens, processor, partial(prepare_image, is_blank=True)):
            with pytest.raises(
                UnreadableImageError, match="of 77 x 13 pixels; expected at most 1,000"
            ):
                use(Picture(data=larger))

    def test_another_processor_is_refused(self, tmp_path):
        file = tmp_path / "preprocessor_config.json"
        file.write_text('{"image_processor_type": "CLIPImageProcessor"}')
        with pytest.raises(ValueError, match=r"preprocessor_config.json"):
            HFImageProcessor(str(tmp_path))


class TestPrompts:
    def test_an_image_becomes_as_many_tokens_as_it_has(self):
        tokenizer = looking_tokenizer()
        chat = [{"role": "user", "content": "<image>Is it <image>?"}]
        ids = tokenizer.render_prompt(chat, (), [2, 1])
        shown = "<|vision_start|>{}<|vision_end|>".format
        wanted = f"<|im_start|>user\n{shown(2 * PAD)}Is it {shown(PAD)}?<|im_end|>\n"
        assert tokenizer.decode(ids) == wanted + "<|im_start|>assistant\n"
        assert ids.count(tokenizer.image_id) == 3
        plain = tokenizer.render_prompt(chat)
        assert "<image>Is it <image>?" in tokenizer.decode(plain)

    def test_no_text_forges_an_image_or_a_video(self, tmp_path):
        """Whether or not the tokenizer flags the token as special."""
        tokenizer = watching_tokenizer()
        chat = [{"role": "user", "content": f"<image>{PAD}<|vision_start|>"}]
        ids = tokenizer.render_prompt(chat, (), [2])
        assert ids.count(tokenizer.image_id) == 2
        assert tokenizer.decode(ids).count(PAD) == 3
        assert tokenizer.video_id == tokenizer.encode(VIDEO)[0]
        for content in (VIDEO, f"<image>{VIDEO}"):
            chat = [{"role": "user", "content": content}]
            ids = tokenizer.render_prompt(chat, (), [2] * content.count("<image>"))
            assert tokenizer.video_id not in ids
            assert VIDEO in tokenizer.decode(ids)
        save_tokenizer(tmp_path, image_token_id=tokenizer.image_id, video_token_id=7)
        assert Tokenizer.from_folder(tmp_path).video_id == 7

    def test_a_template_without_images_is_refused(self):
        with pytest.raises(ValueError, match="chat template drops message 1"):
            toy_tokenizer().render_prompt(CHAT, (), [3])

    def test_results_show_images_after_their_texts(self):
        tokenizer = looking_tokenizer()
        tools = [{"type": "function", "function": {"name": "crop"}}]
        ids, text = tokenizer.render_results(["a", f"b{PAD}"], tools, [[], [2]])
        assert ids.count(tokenizer.image_id) == 2
        results = text.split("<|im_start|>")
        assert results[1] == "tool\na<|im_end|>\n"
        assert results[2] == f"tool\nb{PAD}<|vision_start|>{PAD}<|vision_end|><|im_end|>\n"


def save_tokenizer(folder, **fields):
    """Write a tokenizer's files and a `config.json` with these fields."""
    PreTrainedTokenizerFast(
        tokenizer_object=looking_tokenizer()._tokenizer,
        eos_token="<|im_end|>",
        chat_template=TEMPLATE,
    ).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2_5_vl"} | fields))


VIDEO = "<|video_pad|>"


def watching_tokenizer():
    """Return the tokenizer of a model whose video token is not flagged as special."""
    [video] = looking_tokenizer(added=[VIDEO]).encode(VIDEO)
    return looking_tokenizer(added=[VIDEO], video_id=video)


class LookingEnv(ScriptedEnv):
    def start(self, tasks):
        return [Prompt(system="", template="{question}").render_messages(task) for task in tasks]


def make_rollout(processor, reply=None, **changes):
    env = LookingEnv((), lambda turn: reply)
    limits = dataclasses.replace(LIMITS, **changes)
    return BaseRollout(env, looking_tokenizer(), limits, processor=processor)


def looking_task(tmp_path, **settings):
    picture = Picture(path=str(saved(tmp_path / "a.png", **settings)))
    return Task(id="t7", question="<image>What?", answers=("x",), images=(picture,))


class TestEpisodes:
    """What `BaseRollout` makes of tasks and replies, without an engine."""

    def start(self, rollout, task):
        return rollout._make_samples([Draw(task=task, stream_index=0)], 2)

    def test_a_group_shares_its_images(self, processor, tmp_path):
        first, second = self.start(make_rollout(processor), looking_task(tmp_path))
        assert first.attachments[0] is second.attachments[0]
        assert first.token_ids.count(looking_tokenizer().image_id) == 6
        assert first.attachments[0].num_patches == 24

    def test_overlong_prompts_with_images_are_never_truncated(self, processor, tmp_path):
        task = looking_task(tmp_path, width=32, height=32)
        assert make_rollout(processor).prompt_fits(task)
        overlong = partial(make_rollout, processor, max_prompt_tokens=20)
        assert not overlong(overlong_prompts="drop").prompt_fits(task)
        for choice in ("refuse", "truncate_left"):
            with pytest.raises(ValueError, match=r"prompt of task 't7' has \d+ tokens; expected 1"):
                overlong(overlong_prompts=choice).prompt_fits(task)

    def test_prompts_with_more_image_tokens_than_the_limit_are_refused(self, processor, tmp_path):
        task = looking_task(tmp_path)  # with 6 image tokens
        for limit, is_short in ((5, False), (6, True)):
            rollout = make_rollout(processor, max_image_tokens=limit, overlong_prompts="drop")
            assert rollout.prompt_fits(task) == is_short
        for choice in ("refuse", "truncate_left"):
            rollout = make_rollout(processor, max_image_tokens=5, overlong_prompts=choice)
            why = r"images of the prompt of task 't7' take 6 tokens; expected at most 5.*max_image"
            with pytest.raises(ValueError, match=why):
                rollout.prompt_fits(task)
            with pytest.raises(ValueError, match=why):
                self.start(rollout, task)

    def test_unusable_images_of_a_task_name_it(self, processor, tmp_path):
        task = looking_task(tmp_path)
        with pytest.raises(UnreadableImageError, match=r"'t7': .*the model does not support image"):
            make_rollout(None).prompt_fits(task)
        rollout = make_rollout(processor)
        with pytest.raises(
            EpisodeStartError, match="'t7' has 1 images, but its chat has 0 marks <image>"
        ):
            rollout.prompt_fits(dataclasses.replace(task, question="What?"))
        (tmp_path / "a.png").write_bytes(encoded(drawn())[:200])
        assert rollout.prompt_fits(task)  # which only needs the size
        first, _ = self.start(make_rollout(processor), task)
        assert first.episode.outcome == Outcome.ENVIRONMENT_ERROR
        error = first.episode.turns[0].error
        assert re.search(r"task 't7': .*a\.png cannot be read as an image", error)

    def start_and_reply(self, processor, tmp_path, observation, **changes):
        """Return a sample after one turn and this observation."""
        rollout = make_rollout(processor, StepResult(observation=observation), **changes)
        sample, _ = self.start(rollout, looking_task(tmp_path))
        [reply] = rollout._step_episodes([sample.episode], ["call"])
        rollout._apply_step_result(sample, "call", reply)
        return sample

    def test_an_observation_shows_images_inside_its_tags(self, processor, tmp_path):
        picture = Picture(data=encoded(drawn(seed=5)))
        images = (picture, picture)
        observation = Observation(prefix="<r>", body="x" * 50, suffix="</r>", images=images)
        sample = self.start_and_reply(processor, tmp_path, observation)
        turn = sample.episode.turns[0]
        image = f"<|vision_start|>{PAD}<|vision_end|>"
        assert turn.observation == f"<r>{'x' * 8}{image}{image}</r>"  # 20 tokens, 12 of images
        assert turn.images == images
        assert [image.num_patches for image in sample.attachments] == [24, 24, 24]
        assert sample.token_ids.count(looking_tokenizer().image_id) == 18
        assert sample.turn_starts[-1] == len(sample.token_ids)

    @pytest.mark.parametrize(
        ("image", "why"),
        [
            (Picture(data=b"no"), "a tool returned an invalid image: an image of 2 bytes cannot"),
            (Picture(data=encoded(drawn(90, 90))), r"images of \d+ tokens, which cannot be trunc"),
            ("a.png", "an observation has an image that is not a Picture"),
        ],
    )
    def test_unusable_images_of_tools_are_environment_errors(self, processor, tmp_path, image, why):
        observation = Observation(prefix="", body="x", suffix="", images=(image,))
        sample = self.start_and_reply(processor, tmp_path, observation, max_observation_tokens=15)
        assert sample.episode.outcome == Outcome.ENVIRONMENT_ERROR
        assert re.search(why, sample.episode.turns[0].error)

    def test_images_that_do_not_fit_end_the_episode(self, processor, tmp_path):
        picture = Picture(data=encoded(drawn()))
        observation = Observation(prefix="", body="", suffix="", images=(picture,))
        sample = self.start_and_reply(processor, tmp_path, observation, max_total_tokens=39)
        assert sample.episode.outcome == Outcome.OUT_OF_BUDGET
        assert len(sample.attachments) == 1

    @pytest.mark.parametrize("limit", [11, 12])
    def test_more_image_tokens_than_the_limit_end_the_episode(self, processor, tmp_path, limit):
        picture = Picture(data=encoded(drawn(seed=5)))
        observation = Observation(prefix="<r>", body="x", suffix="</r>", images=(picture,))
        results = ToolResults(bodies=("x",), images=((picture,),))
        for shown in (observation, results):
            sample = self.start_and_reply(processor, tmp_path, shown, max_image_tokens=limit)
            [turn] = sample.episode.turns
            fits = limit == 12  # 6 of the prompt's image, and 6 of the observation's
            assert sample.episode.outcome == (None if fits else Outcome.OUT_OF_BUDGET)
            assert len(sample.attachments) == 1 + fits
            assert (turn.observation is not None, len(turn.images)) == (fits, fits)


def test_a_saved_trajectory_restores_its_images(processor, tmp_path):
    file, data = saved(tmp_path / "a.png"), encoded(drawn(seed=3))
    pictures = Picture(path=str(file)), Picture(data=data)
    turn = Turn(text="look", observation="o", images=pictures[1:])
    plain = make_trajectory(turns=(turn, ANSWER))
    task = dataclasses.replace(plain.task, images=pictures[:1])
    attachments = tuple(map(processor, pictures))
    before = dataclasses.replace(plain, task=task, attachments=attachments)
    saved_fields = json.loads(json.dumps(serialization.serialize_trajectory(before)))
    restored = serialization.deserialize_trajectory(saved_fields)
    [group] = processor.reload_images([Group(trajectories=(restored,))])
    [after] = group.trajectories
    assert after.attachments == attachments  # from the processor's cache
    assert (after.task, after.turns) == (before.task, before.turns)
    record = json.loads(json.dumps(build_trajectory_record(before)))
    assert record["images"] == [{"digest": pictures[0].digest, "file": str(file)}]
    [shown] = record["turns"][0]["images"]
    assert shown == {"digest": pictures[1].digest, "file": f"images/{pictures[1].digest}"}
    for _ in range(2):
        write_images(tmp_path / "run", [before])
    assert (tmp_path / "run" / shown["file"]).read_bytes() == data
    assert len(list((tmp_path / "run" / "images").iterdir())) == 1
    saved(file, seed=9)
    with pytest.raises(
        UnreadableImageError, match=r"a.png, which the run used for sampling, was chang"
    ):
        serialization.deserialize_trajectory(saved_fields)
    file.unlink()
    with pytest.raises(UnreadableImageError, match=r"a.png, .* cannot be read \(No such file or"):
        serialization.deserialize_trajectory(saved_fields)


class Zoom(Tool):
    name, blank = "zoom", "nothing to look at"

    def run(self, call, /):
        return TextWithImages(f"a look at <search>{call}</search>", [Picture(data=b"png")])


class TestTools:
    @pytest.mark.parametrize("protocol", [search_r1, qwen])
    def test_images_of_a_tool_arrive_in_the_observation(self, protocol):
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
        assert ("<search>" in body) == (protocol is qwen)  # which does not use these tags

    def test_a_text_model_sees_placeholders_of_images(self):
        picture = Picture(data=encoded(drawn()))
        observation = Observation(prefix="<", body="two", suffix=">", images=(picture,) * 2)
        results = ToolResults(bodies=("", "b"), images=((picture,), ()))
        text = Observation(prefix="<", body="two\n[image]\n[image]", suffix=">")
        for shown, expected in (
            (observation, text),
            (results, ToolResults(bodies=("[image]", "b"))),
        ):
            rollout = make_rollout(None, StepResult(observation=shown))
            [reply] = rollout._step_episodes([Episode(task=Task(id="t", question="?"))], ["call"])
            assert reply.observation == expected


@pytest.mark.parametrize(
    ("changes", "why"),
    [({}, None), ({"patch_size": 4}, "96 values"), ({"merge_size": 3}, "9 per token")],
)
def test_the_processor_of_another_model_is_refused(tmp_path, changes, why):
    [model, *_], config = golden(), default_config()
    sizes = {"patch_size": model.tower.patch, "merge_size": model.tower.merge}
    config.model.path = save_processor(tmp_path, **sizes | changes)
    with pytest.raises(ValueError, match=why) if why else nullcontext():
        build_image_processor(resolved(config), looking_tokenizer(), model)


class TestDemonstrations:
    def read(self, tmp_path, processor, answer="a dot", **limits):
        chat = [*CHAT, {"role": "assistant", "content": answer}]
        record = {"messages": chat, "images": ["a.png"]}
        (tmp_path / "d.jsonl").write_text(json.dumps(record))
        limits = dataclasses.replace(
            TokenLimits(
                max_prompt_tokens=100,
                max_response_tokens=100,
                max_total_tokens=100,
                max_observation_tokens=10,
            ),
            **limits,
        )
        source = str(tmp_path / "d.jsonl")
        return read_demonstrations(source, watching_tokenizer(), limits, processor=processor)

    def test_images_are_processed_when_they_are_needed(self, processor, tmp_path):
        saved(tmp_path / "a.png")
        [demonstration] = self.read(tmp_path, processor)
        tokenizer = looking_tokenizer()
        assert demonstration.token_ids.tolist().count(tokenizer.image_id) == 6
        trained = demonstration.token_ids[demonstration.loss_mask]
        assert tokenizer.decode(trained.tolist()) == "a dot"
        assert [image.grid for image in demonstration.attachments] == [(1, 6, 4)]
        (tmp_path / "a.png").unlink()
        assert len(demonstration.attachments) == 1  # cached

    def test_a_model_without_images_refuses_them(self, tmp_path):
        with pytest.raises(ValueError, match=r"d.jsonl:1 has images, but the model does not"):
            self.read(tmp_path, None)

    def test_more_image_tokens_than_the_limit_are_refused(self, processor, tmp_path):
        saved(tmp_path / "a.png")
        assert len(self.read(tmp_path, processor, max_image_tokens=6)) == 1
        why = r"d.jsonl:1: the demonstration's images take 6 tokens; expected at most config.rol"
        with pytest.raises(ValueError, match=why):
            self.read(tmp_path, processor, max_image_tokens=5)

    @pytest.mark.parametrize("token", [PAD, VIDEO])
    def test_the_assistant_writes_no_image_tokens(self, processor, tmp_path, token):
        saved(tmp_path / "a.png")
        why = f"d.jsonl:1: an assistant message has '{token}', the placeholder of an image"
        with pytest.raises(ValueError, match=re.escape(why)):
            self.read(tmp_path, processor, f"a {token} dot")

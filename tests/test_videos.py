"""Videos of tasks: from records to tokens, episodes, demonstrations and checkpoints."""

import dataclasses
import json
import re

import numpy as np
import pytest

from jaxrl.data import serialization
from jaxrl.data.records import parse_demonstration, parse_task
from jaxrl.data.tasks import read_tasks
from jaxrl.envs.base import Episode, Observation, Outcome, Prompt, StepResult, Task, ToolResults
from jaxrl.envs.images import Picture, UnreadableImageError, Video, VideoTokens
from jaxrl.extras.endpoints.images import prepare_image
from jaxrl.extras.vision.processor import HFImageProcessor
from jaxrl.logs.records import build_trajectory_record
from jaxrl.logs.writers import write_images
from jaxrl.sampling.demonstrations import read_demonstrations
from jaxrl.sampling.episodes import BaseRollout, EpisodeStartError, TokenLimits
from jaxrl.types import Draw, Group
from tests.episodes import make_trajectory
from tests.images import PAD, VIDEO_PAD, drawn, encoded, save_processor, video_tokenizer
from tests.toys import ScriptedEnv

LIMITS = TokenLimits(
    max_prompt_tokens=200, max_response_tokens=64, max_total_tokens=300, max_observation_tokens=40
)


@pytest.fixture
def processor(tmp_path):
    return HFImageProcessor(save_processor(tmp_path / "model"))


def save_frames(folder, count=4, size=(16, 24)):
    names = [f"{i}.png" for i in range(count)]
    for seed, name in enumerate(names):
        (folder / name).write_bytes(encoded(drawn(*size, seed=seed)))
    return names


class TestRecords:
    def test_videos_are_files_or_frames(self, tmp_path):
        pixels = np.zeros((2, 8, 8, 3), np.uint8)
        videos = [
            "clips/a.mp4",
            {"path": "b.mp4"},
            {"type": "video", "video": "file:///c.mp4"},
            {"bytes": b"mp4"},
            ["1.png", "2.png"],
            {"frames": ["1.png", {"bytes": b"png"}], "fps": 12.5},
            pixels,
        ]
        fields = {"question": "What?", "answers": "x", "videos": videos}
        task = parse_task(fields, "t:1", folder=tmp_path)
        assert task.question == "<video>" * 7 + "What?"
        files = [Video(path=str(tmp_path / name)) for name in ("clips/a.mp4", "b.mp4", "/c.mp4")]
        first = Picture(path=str(tmp_path / "1.png"))
        assert task.images[:-1] == (
            *files,
            Video(data=b"mp4"),
            Video(frames=(first, Picture(path=str(tmp_path / "2.png")))),
            Video(frames=(first, Picture(data=b"png")), fps=12.5),
        )
        assert len(task.images[-1].frames) == 2
        assert task.metadata == {}

    def test_images_and_videos_are_in_the_order_of_their_placeholders(self, tmp_path):
        parts = [
            {"type": "video"},
            {"type": "text", "text": "or <image>?"},
            {"type": "video", "video": ["3.png"], "fps": 2},
        ]
        fields = {
            "messages": [{"role": "user", "content": parts}],
            "answers": "x",
            "images": ["a.png"],
            "videos": ["b.mp4"],
        }
        task = parse_task(fields, "t:1", folder=tmp_path)
        assert task.messages[0]["content"] == "<video>or <image>?<video>"
        third = Video(frames=(Picture(path=str(tmp_path / "3.png")),), fps=2.0)
        paths = [image.path for image in task.images[:2]]
        assert paths == [str(tmp_path / "b.mp4"), str(tmp_path / "a.png")]
        assert task.images[2] == third
        # A mark without images, or without videos, is text.
        fields = {"question": "<video>Is <image> here?", "answers": "x", "videos": ["b.mp4"]}
        task = parse_task(fields, "t:1", folder=tmp_path)
        assert (task.question, len(task.images)) == (fields["question"], 1)

    @pytest.mark.parametrize(
        ("videos", "why"),
        [
            (["a", "b"], "'videos' contains 2 videos, and the texts 1 placeholders <video>"),
            ([5], "'videos': video number 1: it is a int; expected a path or bytes"),
            ([{"frames": ["a"], "fps": "fast"}], "its fps is 'fast'; expected frames per second"),
            ([{"frames": ["a"], "fps": 5e-324}], "its fps is 5e-324; expected frames per second"),
            ([{"frames": ["a"], "fps": 10**400}], "; expected frames per second"),
            ([["a", 5]], "video number 1: image number 2: it is a int"),
        ],
    )
    def test_unusable_videos_are_refused(self, videos, why):
        fields = {"question": "<video>What?", "answers": "x", "videos": videos}
        with pytest.raises(ValueError, match=re.escape(why)):
            parse_task(fields, "t:1")

    def test_a_missing_file_is_an_error_at_startup(self, tmp_path):
        row = {"question": "What?", "answers": "x", "videos": [["0.png", "none.png"]]}
        (tmp_path / "t.jsonl").write_text(json.dumps(row) + "\n")
        save_frames(tmp_path, 1)
        with pytest.raises(ValueError, match=r"video of task '.*:1' cannot be read: .*none\.png"):
            read_tasks(tmp_path / "t.jsonl", "tasks.train")

    def test_videos_after_the_first_answer_are_refused(self, tmp_path):
        chat = [
            {"role": "user", "content": "<video>"},
            {"role": "assistant", "content": "a"},
            {"role": "user", "content": "<video>"},
        ]
        fields = {"messages": chat, "videos": ["a.mp4", "b.mp4"]}
        with pytest.raises(ValueError, match="1 images come after the first assistant message"):
            parse_demonstration(fields, "d:1")


def test_times_precede_the_frames_of_a_video():
    """As Qwen3-VL writes them: each frame within the marks of the template."""
    tokenizer = video_tokenizer()
    chat = [{"role": "user", "content": "<image>and <video>?"}]
    ids = tokenizer.render_prompt(chat, (), [1, VideoTokens(4, (0.25, 12.0))])
    image, start, end = f"<|vision_start|>{PAD}<|vision_end|>", "<|vision_start|>", "<|vision_end|>"
    frames = [f"<{time} seconds>{start}{VIDEO_PAD * 2}{end}" for time in ("0.2", "12.0")]
    text = f"<|im_start|>user\n{image}and {start}{''.join(frames)}{end}?<|im_end|>\n"
    assert tokenizer.decode(ids) == text + "<|im_start|>assistant\n"
    # Text cannot forge a video, and a video is not an image.
    ids = tokenizer.render_prompt(
        [{"role": "user", "content": f"<video>{VIDEO_PAD}"}], (), [VideoTokens(3)]
    )
    assert ids.count(tokenizer.video_id) == 3
    with pytest.raises(ValueError, match=r"writes the image or video tokens \[\] for 1"):
        tokenizer.render_prompt([{"role": "user", "content": "<image>"}], (), [VideoTokens(3)])


class VideoEnv(ScriptedEnv):
    def start(self, tasks):
        return [Prompt(system="", template="{question}").render_messages(task) for task in tasks]


def make_rollout(processor, reply=None, **changes):
    env = VideoEnv((), lambda turn: reply)
    limits = dataclasses.replace(LIMITS, **changes)
    return BaseRollout(env, video_tokenizer(), limits, processor=processor)


def make_task(tmp_path, **settings):
    frames = tuple(Picture(path=str(tmp_path / name)) for name in save_frames(tmp_path, **settings))
    return Task(id="t7", question="<video>What?", answers=("x",), images=(Video(frames=frames),))


def start(rollout, task):
    return rollout._make_samples([Draw(task=task, stream_index=0)], 2)


def test_a_group_shares_its_video(processor, tmp_path):
    first, second = start(make_rollout(processor), make_task(tmp_path))
    assert first.attachments[0] is second.attachments[0]
    assert first.attachments[0].grid == (2, 6, 4)
    assert first.token_ids.count(video_tokenizer().video_id) == 12


def test_a_text_model_refuses_videos(tmp_path):
    with pytest.raises(UnreadableImageError, match=r"'t7': .*the model does not support image"):
        make_rollout(None).prompt_fits(make_task(tmp_path))


def test_tokens_of_videos_count_toward_the_limit(processor, tmp_path):
    task = make_task(tmp_path)  # with 12 tokens
    for limit, fits in ((11, False), (12, True)):
        rollout = make_rollout(processor, max_image_tokens=limit, overlong_prompts="drop")
        assert rollout.prompt_fits(task) == fits
    changed = dataclasses.replace(task, question="<image>What?")
    with pytest.raises(EpisodeStartError, match="its chat has 0 marks <video>; expected <video>"):
        make_rollout(processor).prompt_fits(changed)


@pytest.mark.parametrize("in_template", [False, True])
def test_an_observation_shows_a_video(processor, tmp_path, in_template):
    task = make_task(tmp_path)
    observation = (
        ToolResults(bodies=("x",), images=(task.images,))
        if in_template
        else Observation(prefix="<r>", body="x", suffix="</r>", images=task.images)
    )
    rollout = make_rollout(processor, StepResult(observation=observation))
    sample, _ = start(rollout, task)
    [reply] = rollout._step_episodes([sample.episode], ["call"])
    rollout._apply_step_result(sample, "call", reply)
    assert f"x<|vision_start|>{VIDEO_PAD}<|vision_end|>" in sample.episode.turns[0].observation
    assert [video.grid for video in sample.attachments] == [(2, 6, 4)] * 2
    assert sample.token_ids.count(video_tokenizer().video_id) == 24
    text_rollout = make_rollout(None, StepResult(observation=observation))
    [reply] = text_rollout._step_episodes([Episode(task=Task(id="t", question="?"))], ["call"])
    shown = reply.observation
    assert (shown.bodies[0] if in_template else shown.body) == "x\n[video]"


def test_frames_of_unequal_size_end_the_episode(processor, tmp_path):
    task = make_task(tmp_path)
    (tmp_path / "2.png").write_bytes(encoded(drawn(8, 8)))
    observation = Observation(prefix="", body="", suffix="", images=task.images)
    rollout = make_rollout(processor, StepResult(observation=observation))
    [reply] = rollout._step_episodes([Episode(task=Task(id="t", question="?"))], ["call"])
    assert reply.outcome == Outcome.ENVIRONMENT_ERROR
    assert "invalid image: frame 3 of the video of 4 frames" in reply.error


def test_a_saved_trajectory_restores_its_videos(processor, tmp_path):
    data = encoded(drawn(seed=8))
    frames = (Picture(path=str(tmp_path / save_frames(tmp_path, 1)[0])), Picture(data=data))
    videos = Video(frames=frames, fps=3.0), Video(frames=frames[1:])
    plain = make_trajectory()
    task = dataclasses.replace(plain.task, images=videos)
    before = dataclasses.replace(plain, task=task, attachments=tuple(map(processor, videos)))
    saved = json.loads(json.dumps(serialization.serialize_trajectory(before)))
    restored = serialization.deserialize_trajectory(saved)
    [group] = processor.reload_images([Group(trajectories=(restored,))])
    assert group.trajectories[0].task == task
    assert group.trajectories[0].attachments == before.attachments
    for video in (Video(path=frames[0].path), Video(data=data)):
        files = dataclasses.replace(plain, task=dataclasses.replace(task, images=(video,)))
        saved = json.loads(json.dumps(serialization.serialize_trajectory(files)))
        assert serialization.deserialize_trajectory(saved).task.images == (video,)
    # Records name the files of all frames; those without a file are written.
    record = build_trajectory_record(before)
    files = [frame["file"] for frame in record["images"][0]["frames"]]
    assert files == [frames[0].path, f"images/{frames[1].digest}"]
    write_images(tmp_path / "run", [before])
    assert (tmp_path / "run" / files[1]).read_bytes() == data


def test_demonstrations_may_have_videos(processor, tmp_path):
    chat = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "a dot"}]
    record = {"messages": chat, "videos": [save_frames(tmp_path)]}
    (tmp_path / "d.jsonl").write_text(json.dumps(record))
    source = str(tmp_path / "d.jsonl")
    [demonstration] = read_demonstrations(source, video_tokenizer(), LIMITS, processor=processor)
    assert demonstration.token_ids.tolist().count(video_tokenizer().video_id) == 12
    assert [video.grid for video in demonstration.attachments] == [(2, 6, 4)]
    limits = dataclasses.replace(LIMITS, max_image_tokens=11)
    with pytest.raises(ValueError, match="images take 12 tokens; expected at most"):
        read_demonstrations(source, video_tokenizer(), limits, processor=processor)


@pytest.mark.parametrize(
    ("video", "is_blank", "why"),
    [
        (Video(path="a.mp4"), True, r"a\.mp4 is a list of frames or must be blank"),
        (Video(path="a.mp4"), False, r"a\.mp4 cannot be read as a video: .*No such file"),
    ],
)
def test_endpoints_refuse_some_videos(video, is_blank, why):
    with pytest.raises(UnreadableImageError, match=why) as error:
        prepare_image(video, is_blank=is_blank)
    assert len(str(error.value).splitlines()) == 1

"""The looking world: pictures are what their questions say, and a run goes through all stages."""

import dataclasses
import itertools
import json
import os
import random
import subprocess
import sys

import numpy as np
import PIL.Image
import pytest

from configs import looking, moving
from examples import looking_world, quickstart_world
from jaxrl.data.tasks import read_tasks
from jaxrl.envs.search.bm25 import LocalSearch
from jaxrl.models.hf_weights import open_hf
from tests.helpers import build

SIZES = ["--num_train=24", "--num_held_out=6", "--num_demonstrations=60"]


@pytest.fixture(scope="module", params=["looking", "moving", "seeking"])
def world(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    looking_world.main([f"--out={folder}", f"--kind={request.param}", *SIZES])
    return folder


def lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def list_images(record):
    """Return the paths of a record's picture, or of the frames of its video."""
    [attachment] = record.get("images") or record["videos"]
    return attachment["frames"] if isinstance(attachment, dict) else [attachment]


def test_no_picture_or_video_of_a_held_out_question_is_trained_on(world):
    def read_contents(name):
        records = lines(world / name)
        return {tuple((world / p).read_bytes() for p in list_images(r)) for r in records}

    held_out = read_contents("questions_eval.jsonl")
    trained = read_contents("questions_train.jsonl") | read_contents("demonstrations.jsonl")
    assert held_out
    assert not held_out & trained


def read_pixels(path):
    return np.asarray(PIL.Image.open(path)).astype(int)


def find_color(pixels):
    [color] = [c for c, rgb in looking_world.COLORS.items() if (pixels == rgb).all(-1).any()]
    return color


@pytest.mark.parametrize("world", ["looking", "seeking"], indirect=True)
def test_a_picture_shows_what_the_answer_says(world):
    towns = {}
    if (world / "corpus.jsonl").exists():
        towns = {d["title"]: d["text"].split()[-1][:-1] for d in lines(world / "corpus.jsonl")}
    for record in lines(world / "questions_train.jsonl"):
        [image] = record["images"]
        pixels = read_pixels(world / image)
        quarters = [pixels[y : y + 16, x : x + 16] for y in (0, 16) for x in (0, 16)]
        full = [quarter for quarter in quarters if quarter.any()]
        color = find_color(full[0])
        widths = [width for width in full[0].any(-1).sum(1) if width]
        shape = SHAPES[sum(widths), widths[-1]]
        answers = {"count": str(len(full)), "color": color, "shape": shape}
        answers["town"] = towns.get(f"{color} {shape}")
        assert record["answers"] == [answers[record["data_source"]]]


SHAPES = {(144, 12): "square", (80, 4): "cross", (112, 4): "circle", (78, 12): "triangle"}
"""By the pixels of all rows and of the lowest."""

WAYS = {(-4, 0): "left", (4, 0): "right", (0, -4): "up", (0, 4): "down"}
"""By the pixels to the right and down between two frames."""


@pytest.mark.parametrize("world", ["moving"], indirect=True)
def test_a_video_shows_what_the_answer_says(world):
    shapes = {num_pixels: shape for (num_pixels, _), shape in SHAPES.items()}
    circle = np.exp(2j * np.pi * np.arange(32) / 32)  # opposite edges meet
    for record in lines(world / "questions_train.jsonl"):
        frames = [read_pixels(world / path) for path in list_images(record)]
        assert len(frames) == 4
        masks = [frame.any(-1) for frame in frames]
        # The mean position of an object's pixels around the circle moves with the object.
        centers = [np.angle([mask.sum(0) @ circle, mask.sum(1) @ circle]) for mask in masks]
        steps = np.diff(np.unwrap(centers, axis=0), axis=0) * 32 / (2 * np.pi)
        [way] = {tuple(step) for step in steps.round(6).astype(int).tolist()}
        [color] = {find_color(frame) for frame in frames}
        [num_pixels] = {mask.sum() for mask in masks}
        answers = {"direction": WAYS[way], "color": color, "shape": shapes[num_pixels]}
        assert record["answers"] == [answers[record["data_source"]]]


def test_no_single_frame_tells_the_direction():
    """At each time, the frames of all directions are the same: an object in any of 64 positions."""
    rng = random.Random(0)
    frames = {(index, way): set() for index in range(4) for way in looking_world.DIRECTIONS}
    for _ in range(4000):
        clip = dataclasses.replace(looking_world.sample_clip(rng), shape="circle", color="red")
        for index, image in enumerate(looking_world.draw_frames(clip)):
            frames[index, clip.direction].add(image.tobytes())
    assert len(frames[0, "left"]) == 64
    assert all(a == b for a, b in itertools.pairwise(frames.values()))


@pytest.mark.parametrize(
    ("world", "module", "num_tokens"),
    [("looking", looking, 4), ("seeking", looking, 4), ("moving", moving, 8)],
    indirect=["world"],
)
def test_the_model_can_be_read_and_sees_all_tokens(world, module, num_tokens):
    config = module.get_config(str(world))
    config.stages = ("evaluate",)
    parts = build(config)
    open_hf(world / "model")
    [task, *_] = read_tasks(world / "questions_eval.jsonl", "tasks.eval")
    assert parts.processor.count_tokens(task.images[0]) == num_tokens
    assert "blank_images" in parts.controls


def test_demonstrations_find_what_the_environment_finds(tmp_path):
    rng = random.Random(0)
    towns = looking_world.sample_towns(rng)
    quickstart_world.write_jsonl(tmp_path / "corpus.jsonl", looking_world.make_documents(towns))
    engine = LocalSearch(tmp_path / "corpus.jsonl", topk=1)
    lengths = set()
    for _ in range(100):
        question = looking_world.make_seeking_question(towns, rng)
        chat = looking_world.demonstrate_seeking(question, True, towns, rng)
        _, search, result, answer = (message["content"] for message in chat["messages"])
        query = search.partition("<search> ")[2].partition(" </search>")[0]
        assert set(query.split()) <= set(question.scene.name.split())
        assert result == engine.run(query)
        assert result.endswith(answer.split()[1] + ".")
        lengths.add(len(query.split()))
    assert lengths == {1, 2}


def scores(workdir, name):
    summary = json.loads((workdir / "eval" / f"{name}.json").read_text())["summary"]
    return {suite: groups["all"]["exact_match"] for suite, groups in summary.items()}


@pytest.mark.slow(
    instead=None,
    because="it asserts scores that looking reaches after hundreds of steps",
)
@pytest.mark.parametrize(
    ("kind", "before", "after", "guessed"),
    [
        ("looking", "train_500", "evaluate_650", 0.25),
        ("moving", "train_1000", "evaluate_1150", 0.25),
        ("seeking", "train_900", "evaluate_1100", 1 / 16),
    ],
)
def test_a_run_learns_by_looking(kind, before, after, guessed, tmp_path):
    folder, workdir = tmp_path / "world", tmp_path / "run"
    looking_world.main([f"--out={folder}", f"--kind={kind}"])
    subprocess.run(
        [
            *(sys.executable, "-m", "jaxrl.launch", f"--config=configs/{kind}.py:{folder}"),
            f"--workdir={workdir}",
        ],
        env={**os.environ, "XLA_FLAGS": ""},  # compiled as by whoever runs the command
        check=True,
    )
    assert max(scores(workdir, before).values()) < 0.4
    learned = scores(workdir, after)
    assert min(learned["sampled"], learned["greedy"]) >= 0.85
    assert learned["blank_images"] == pytest.approx(guessed, abs=0.08)
    assert learned.get("empty_search", 0.0) < 0.1

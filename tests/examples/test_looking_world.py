"""The looking world: pictures are what their questions say, and a run goes through all stages."""

import json
import os
import random
import subprocess
import sys

import numpy as np
import PIL.Image
import pytest

from configs import looking
from examples import looking_world, quickstart_world
from jaxrl.data.tasks import read_tasks
from jaxrl.envs.search.bm25 import LocalSearch
from jaxrl.models.hf_weights import open_hf
from tests.helpers import build

SIZES = ["--num_train=24", "--num_held_out=6", "--num_demonstrations=60"]


@pytest.fixture(scope="module", params=["looking", "seeking"])
def world(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    looking_world.main([f"--out={folder}", f"--kind={request.param}", *SIZES])
    return folder


def lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_no_picture_of_a_held_out_question_is_trained_on(world):
    def shown(name):
        images = [image for record in lines(world / name) for image in record["images"]]
        return {(world / image).read_bytes() for image in images}

    held_out = shown("questions_eval.jsonl")
    assert held_out
    assert not held_out & (shown("questions_train.jsonl") | shown("demonstrations.jsonl"))


def test_a_picture_shows_what_the_answer_says(world):
    towns = {}
    if (world / "corpus.jsonl").exists():
        towns = {d["title"]: d["text"].split()[-1][:-1] for d in lines(world / "corpus.jsonl")}
    for record in lines(world / "questions_train.jsonl"):
        [image] = record["images"]
        pixels = np.asarray(PIL.Image.open(world / image)).astype(int)
        quarters = [pixels[y : y + 16, x : x + 16] for y in (0, 16) for x in (0, 16)]
        full = [quarter for quarter in quarters if quarter.any()]
        [color] = [c for c, rgb in looking_world.COLORS.items() if (full[0] == rgb).all(-1).any()]
        widths = [width for width in full[0].any(-1).sum(1) if width]
        shape = SHAPES[sum(widths), widths[-1]]
        found = {"count": str(len(full)), "color": color, "shape": shape}
        found["town"] = towns.get(f"{color} {shape}")
        assert record["answers"] == [found[record["data_source"]]]


SHAPES = {(144, 12): "square", (80, 4): "cross", (112, 4): "circle", (78, 12): "triangle"}
"""By the pixels of all rows and of the lowest."""


def test_the_model_can_be_read_and_sees_four_tokens(world):
    config = looking.get_config(str(world))
    config.stages = ("evaluate",)
    parts = build(config)
    open_hf(world / "model")
    [task, *_] = read_tasks(world / "questions_eval.jsonl", "tasks.eval")
    assert parts.processor.num_tokens(task.images[0]) == 4
    assert "blank_images" in parts.controls


def told(chat):
    """What a demonstration tells of the picture, and its answer."""
    text = chat["messages"][-1]["content"].removesuffix("<|im_end|>")
    description, _, answer = text.partition(" Answer: ")
    return description.split(), answer


@pytest.mark.parametrize("kind", looking_world.ANSWERS)
def test_a_demonstration_tells_what_is_seen_and_mostly_answers_another_question(kind):
    rng = random.Random(0)
    answered = {name: 0 for name in looking_world.ANSWERS}
    for _ in range(300):
        question = looking_world.make_looking_question(kind, rng)
        chat = looking_world.demonstrate_looking(question, True, rng)
        seen = looking_world.describe_scene(question.scene)
        description, answer = told(chat)
        assert description == [seen["shape"], seen["color"], seen["count"]]
        [named] = [name for name in seen if seen[name] == answer]
        answered[named] += 1
        assert chat["metadata"]["is_correct"] == (named == kind)
    assert answered[kind] / 300 == pytest.approx(0.35, abs=0.08)
    assert max(answered.values()) / 300 == pytest.approx(0.5, abs=0.08)
    assert max(answered, key=answered.get) != kind


def test_demonstrations_find_what_the_environment_finds(tmp_path):
    rng = random.Random(0)
    towns = looking_world.sample_towns(rng)
    quickstart_world.write_jsonl(tmp_path / "corpus.jsonl", looking_world.documents(towns))
    engine = LocalSearch(tmp_path / "corpus.jsonl", topk=1)
    queries = set()
    for _ in range(200):
        question = looking_world.make_seeking_question(towns, rng)
        _, asks, found, answers = looking_world.demonstrate_seeking(question, True, towns, rng)[
            "messages"
        ]
        query = asks["content"].partition("<search> ")[2].partition(" </search>")[0]
        assert set(query.split()) <= set(question.scene.name.split())
        assert found["content"] == engine.run(query)
        assert found["content"].endswith(answers["content"].split()[1] + ".")
        queries.add(len(query.split()))
    assert queries == {1, 2}


def scores(workdir, name):
    summary = json.loads((workdir / "eval" / f"{name}.json").read_text())["summary"]
    return {suite: found["all"]["exact_match"] for suite, found in summary.items()}


@pytest.mark.slow(
    instead=None,
    because="it asserts scores that looking reaches after hundreds of steps",
)
@pytest.mark.parametrize(
    ("kind", "before", "after", "guessed"),
    [
        ("looking", "train_500", "evaluate_650", 0.25),
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

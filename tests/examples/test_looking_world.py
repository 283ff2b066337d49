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
    def read_images(name):
        images = [image for record in lines(world / name) for image in record["images"]]
        return {(world / image).read_bytes() for image in images}

    held_out = read_images("questions_eval.jsonl")
    trained = read_images("questions_train.jsonl") | read_images("demonstrations.jsonl")
    assert held_out
    assert not held_out & trained


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
        answers = {"count": str(len(full)), "color": color, "shape": shape}
        answers["town"] = towns.get(f"{color} {shape}")
        assert record["answers"] == [answers[record["data_source"]]]


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

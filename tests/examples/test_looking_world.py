"""The looking world: pictures are what their questions say, and a run goes through all stages."""

import json

import numpy as np
import PIL.Image
import pytest

from configs.small_world import small_math
from examples import looking_world
from jaxrl.components import assemble
from jaxrl.logs.display import Display
from jaxrl.models.hf_weights import check_hf
from jaxrl.run import run
from jaxrl.tasks import read_tasks

SIZES = ["--num_train=24", "--num_held_out=6", "--num_demonstrations=60"]


@pytest.fixture(scope="module", params=["looking", "seeking"])
def world(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    looking_world.main([f"--out={folder}", f"--kind={request.param}", *SIZES])
    return folder


def lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_the_same_seed_gives_the_same_bytes(world, tmp_path):
    looking_world.main([f"--out={tmp_path}", f"--kind={world.name.rstrip('0123456789')}", *SIZES])
    files = sorted(path.relative_to(world) for path in world.rglob("*") if path.is_file())
    assert files == sorted(p.relative_to(tmp_path) for p in tmp_path.rglob("*") if p.is_file())
    assert all((world / file).read_bytes() == (tmp_path / file).read_bytes() for file in files)


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


def test_the_model_can_be_read_and_sees_sixteen_tokens(world):
    config = small_math(str(world))
    config.stages = ("evaluate",)
    config.rollout.max_prompt_tokens = 48
    config.eval.final_suites = ("sampled", "blank_images")
    parts = assemble(config)
    check_hf(world / "model")
    [task, *_] = read_tasks(world / "questions_eval.jsonl", "tasks.eval")
    assert parts.processor.num_tokens(task.images[0]) == 16
    assert parts.rollout_blank_images is not None


@pytest.mark.slow
def test_a_run_looks_in_all_stages(tmp_path):
    looking_world.main([f"--out={tmp_path / 'world'}", *SIZES])
    config = small_math(str(tmp_path / "world"))
    config.update_from_flattened_dict(
        {
            **{"sft.num_steps": 60, "sft.batch_size": 8, "num_steps": 2},
            **{"rollout.tasks_per_step": 4, "rollout.group_size": 4, "rollout.num_rows": 8},
            **{"rollout.max_prompt_tokens": 40, "rollout.max_response_tokens": 8},
            **{"rollout.max_total_tokens": 48, "rollout.chunk_tokens": 4, "log.trajectories": -1},
            "eval.final_suites": ("sampled", "blank_images"),
        }
    )
    run(config, tmp_path / "run", assemble(config), Display())
    record = lines(tmp_path / "run" / "metrics.jsonl")[-1]
    assert "val-core/all/exact_match/blank_images" in record
    first = lines(tmp_path / "run" / "trajectories" / "step_000061.jsonl")[0]
    assert first["images"][0]["file"].endswith(".png")
    assert first["token_ids"].count(max(first["token_ids"][: first["prompt_length"]])) >= 16

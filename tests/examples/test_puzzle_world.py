"""The puzzle world: the same for a seed, held-out puzzles unseen, answers that are checked."""

import json
import random

import pytest

from benchmarks import worlds
from examples import puzzle_world as world
from jaxrl.envs.base import Episode, Prompt, Task, Turn
from jaxrl.envs.math_env import MathEnv

SMALL = ["--num_train=60", "--num_held_out=20", "--num_demonstrations=400"]
FILES = ("questions_train", "questions_eval", "demonstrations")


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    out = tmp_path_factory.mktemp("puzzles")
    world.main([f"--out={out}", *SMALL])

    def read(path):
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]

    return {name: read(out / f"{name}.jsonl") for name in FILES}


def test_every_open_way_is_accepted_and_no_other():
    [puzzle] = world.make_puzzles(1, 7, random.Random(3))
    fields = world.to_record(puzzle)
    task = Task(id=fields["id"], question=fields["question"], answers=tuple(fields["answers"]))
    env = MathEnv(prompt=Prompt(system="", template="{question}"))
    for way in world.PATHS:
        text = f"Answer: {' '.join(way)}"
        [reward] = env.score([Episode(task=task, turns=[Turn(text=text)])])
        assert reward.is_correct == (not set(puzzle.closed) & set(way)) == (way in puzzle.paths)


def test_puzzles_are_different_and_can_be_solved(records):
    tasks = [*records["questions_train"], *records["questions_eval"]]
    assert len({task["id"] for task in tasks}) == len(tasks) == 80
    for task in tasks:
        assert len(task["answers"]) == task["metadata"]["num_ways"] >= 1
        assert (task["data_source"] == "edge") == (" ".join(world.HABIT) in task["answers"])


def test_what_is_held_out_is_not_trained_on(records):
    world.check_nothing_leaks(records)
    leaking = {**records, "questions_eval": records["questions_train"][:1]}
    with pytest.raises(AssertionError, match="held out, but trained on"):
        world.check_nothing_leaks(leaking)


@pytest.mark.slow(
    instead=None,
    because="it compares the two halves of a run of minutes, and what each has learnt",
)
def test_pass_at_k_widens_what_is_solved_and_then_pass_at_1_rises(tmp_path):
    worlds.main(["--world=puzzles", "--seeds=0", f"--workdir={tmp_path}"])
    got = json.loads((tmp_path / "puzzles" / "results.json").read_text())["0"]
    assert got["pass@8, sampled, before"] < 0.5
    assert got["exact_match, sampled, before"] < 0.2
    # With k = 4 nearly every puzzle is solved by one of eight; then there is nothing left to learn.
    assert got["pass@8, halfway"] > 0.9
    assert got["with signal, halfway"] < got["with signal, first fifth"]
    # With k = 1 every single answer counts.
    assert got["exact_match, sampled, after"] > got["exact_match, halfway"] + 0.05
    assert got["exact_match, sampled, after"] > 0.75
    assert got["pass@8, sampled, after"] > 0.85
    assert (got["k, halfway"], got["k, last fifth"]) == (4, 1)

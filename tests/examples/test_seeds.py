"""Every world is a function of its seed."""

import pytest

from examples import (
    bapo_world,
    claims_world,
    looking_world,
    math_world,
    puzzle_world,
    quickstart_world,
    trail_world,
)

PEOPLE = ("--num_people=60", "--num_held_out=12", "--num_demonstrations=100", "--num_worlds=2")
IMAGES = ("--num_train=24", "--num_held_out=6", "--num_demonstrations=60")
PROBLEMS = ("--num_train=60", "--num_held_out=20", "--num_demonstrations=100")
WORLDS = {
    "quickstart": (quickstart_world, PEOPLE),
    "bapo": (bapo_world, PEOPLE),
    "claims": (claims_world, ("--world=unanswerable", "--num_questions=12", *PEOPLE)),
    "looking": (looking_world, ("--kind=looking", *IMAGES)),
    "seeking": (looking_world, ("--kind=seeking", *IMAGES)),
    "math": (math_world, PROBLEMS),
    "puzzle": (puzzle_world, PROBLEMS),
    "trail": (trail_world, ("--num_trails=40", "--num_held_out=10", "--length=5")),
}


@pytest.mark.parametrize("name", WORLDS)
def test_the_seed_decides_every_byte(name, tmp_path):
    world, flags = WORLDS[name]

    def make(folder, seed):
        world.main([f"--out={tmp_path / folder}", f"--seed={seed}", *flags])
        files = (path for path in (tmp_path / folder).rglob("*") if path.is_file())
        return {str(path.relative_to(tmp_path / folder)): path.read_bytes() for path in files}

    first, again, other = make("first", 0), make("again", 0), make("other", 1)
    assert again == first
    assert first["demonstrations.jsonl"] != other["demonstrations.jsonl"]
    assert first["questions_eval.jsonl"] != other["questions_eval.jsonl"]

"""The world of trails: what its questions need, and that nothing of the held-out ones is told."""

import json

import pytest

from examples import trail_world

SIZES = ["--num_trails=40", "--num_held_out=10", "--length=5", "--num_demonstrations=60",
         "--num_worlds=2"]  # fmt: skip


def lines(folder, name):
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trail")
    trail_world.main([f"--out={folder}", *SIZES])
    return folder


def test_every_trail_is_followed_to_its_word(world):
    told = {document["title"]: document["text"] for document in lines(world, "corpus")}
    assert len(told) == 200
    for question in lines(world, "questions_train") + lines(world, "questions_eval"):
        name = question["question"].removeprefix("Which word ends the trail of ").rstrip("?")
        for _ in range(4):
            name = told[name].partition(f"{name} says see ")[2].rstrip(".")
        assert told[name].endswith(f". {name} says the word {question['answers'][0]}.")


def test_demonstrations_name_nobody_who_is_held_out(world):
    told = {document["title"]: document["text"] for document in lines(world, "corpus")}
    held_out = set()
    for question in lines(world, "questions_eval"):
        name = question["question"].removeprefix("Which word ends the trail of ").rstrip("?")
        while name in told:
            held_out.add(name)
            name = told[name].partition(f"{name} says see ")[2].rstrip(".")
    assert len(held_out) == 50
    shown = json.dumps(lines(world, "demonstrations") + lines(world, "questions_train"))
    assert not any(name in shown for name in held_out)

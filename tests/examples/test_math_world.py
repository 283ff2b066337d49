"""The math world: the same for a seed, held-out problems unseen, demonstrations as bad as meant."""

import json
import re

import pytest

from benchmarks import worlds
from examples import math_world as world
from examples import quickstart_world as quickstart
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.envs.base import Episode, Outcome, Prompt, Task
from jaxrl.envs.math_env import MathEnv

SMALL = ("--num_train=200", "--num_held_out=25", "--num_demonstrations=300")
FILES = ("questions_train", "questions_dev", "questions_eval", "demonstrations")


def read(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("math")


@pytest.fixture(scope="module")
def files(folder):
    world.main([f"--out={folder}", *SMALL])
    return {name: read(folder / f"{name}.jsonl") for name in FILES}


def solve(question):
    """The answer to a question, worked out from its text."""
    total = int(re.search(r"holds (\d+)", question)[1])
    for verb, amount in re.findall(r"(adds|takes) (\d+)", question):
        total += int(amount) if verb == "adds" else -int(amount)
        assert 0 <= total <= world.MAX_COINS
    return total


def test_answers_are_those_of_the_questions(files):
    for name in FILES[:3]:
        questions = files[name]
        assert all([str(solve(q["question"]))] == q["answers"] for q in questions)
        assert len({q["id"] for q in questions}) == len(questions)
        assert {q["data_source"] for q in questions} == {f"{n}_moves" for n in world.NUM_MOVES}


def test_no_numbers_are_on_two_sides(files):
    ids = [{q["id"] for q in files[name]} for name in FILES[:3]]
    assert not ids[0] & ids[1]
    assert not (ids[0] | ids[1]) & ids[2]
    leaking = {**files, "questions_train": files["questions_train"] + files["questions_eval"][:1]}
    with pytest.raises(AssertionError, match="on both sides, train and eval"):
        world.check_nothing_leaks(leaking)


def test_demonstrations_are_as_the_environment_scores_them(files):
    """Each ends with an answer line and the end of the turn; right ones are known as such."""
    env = MathEnv(prompt=Prompt(system="", template="{question}"))
    for chat in files["demonstrations"]:
        question, response = (message["content"] for message in chat["messages"])
        assert response.endswith(quickstart.END_OF_TURN)
        text = response.removesuffix(quickstart.END_OF_TURN)
        task = Task(id="0", question=question, answers=(str(solve(question)),))
        [result] = env.step([Episode(task=task)], [text])
        assert result.outcome == Outcome.ANSWERED
        assert (int(text.rpartition(" ")[2]) == solve(question)) == chat["metadata"]["is_correct"]


def test_numbers_and_names_are_one_token_each(folder, files):
    tokenizer = Tokenizer.from_folder(folder / "model")
    start = "So Lena: 12 - 3 ="
    assert len(tokenizer.encode(start)) == 7
    assert len(tokenizer.encode(f"{start} 9\nAnswer: 9<|im_end|>")) == 7 + 2 + 4
    prompts = [
        tokenizer.render_prompt([{"role": "user", "content": q["question"]}])
        for name in FILES[:3]
        for q in files[name]
    ]
    assert max(map(len, prompts)) <= 56


def whole_run(name, tmp_path):
    """The figures of one seed, by the benchmark's own command."""
    worlds.main([f"--world={name}", "--seeds=0", f"--workdir={tmp_path}"])
    return json.loads((tmp_path / name / "results.json").read_text())["0"]


@pytest.mark.slow(
    instead=None,
    because="it compares what DAPO did in the first and the last fifth of a run of minutes",
)
def test_dapo_learns_and_all_of_it_acts(tmp_path):
    got = whole_run("math", tmp_path)
    for suite, least in (("sampled", 0.7), ("greedy", 0.9)):
        assert got[f"exact_match, {suite}, before"] < 0.6
        assert got[f"exact_match, {suite}, after"] > least
    assert got["overlong penalty, first fifth"] < -0.01
    assert got["overlong penalty, last fifth"] > got["overlong penalty, first fifth"] / 2
    assert got["cut off, last fifth"] < got["cut off, first fifth"] / 2
    assert got["groups not kept"] > 0.02
    assert got["batches a step"] > 1
    assert got["clipped tokens"] > 0


@pytest.mark.slow(
    instead=None,
    because="it compares what ARES did in the first and the last fifth of a run of minutes",
)
def test_ares_learns_and_all_of_it_acts(tmp_path):
    got = whole_run("ares", tmp_path)
    assert got["exact_match, greedy, after"] > got["exact_match, greedy, before"] + 0.3
    assert got["easy tasks, last fifth"] > got["easy tasks, first fifth"] + 0.1
    assert got["hard tasks, last fifth"] < got["hard tasks, first fifth"]
    assert got["entropy reward"] != 0
    assert got["groups not kept"] > 0.02
    for bucket in ("easy", "medium", "hard"):
        assert got[f"alpha, {bucket}, end"] != 0.5
        assert got[f"KL multiplier, {bucket}, end"] != 1

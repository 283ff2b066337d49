"""BAPO's world: what is told can be found, the rest is nowhere, and chats are as if played."""

import json
import re

import pytest
import tokenizers

from benchmarks import worlds
from examples import bapo_world as world
from examples import quickstart_world as quickstart
from jaxrl.envs.protocol import BAPO

SMALL = ["--num_people=60", "--num_held_out=12", "--num_demonstrations=600", "--num_worlds=3"]
FILES = ("corpus", "questions_train", "questions_eval", "demonstrations")


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    world.main([f"--out={folder}", *SMALL])
    return folder


@pytest.fixture(scope="module")
def records(out):
    return {
        name: [json.loads(line) for line in (out / f"{name}.jsonl").read_text().splitlines()]
        for name in FILES
    }


def response_of(chat):
    """What follows the prompt, as a rollout has it."""
    prompt = quickstart.render_prompt(chat["messages"][0]["content"])
    return quickstart.render_chat(chat, BAPO).removeprefix(prompt).removesuffix("<|im_end|>")


def test_answers_are_read_or_computed_or_nowhere(out, records):
    text_of = {document["title"]: document["text"] for document in records["corpus"]}
    everything = (out / "corpus.jsonl").read_text() + (out / "demonstrations.jsonl").read_text()
    sources = set()
    for question in records["questions_train"] + records["questions_eval"]:
        *path, last = question["metadata"]["titles"]
        [answer], source = question["answers"], question["data_source"]
        sources.add(source)
        assert (path or [last])[0] in question["question"]
        assert question["metadata"]["is_answerable"] == (source not in world.UNANSWERABLE)
        if source in world.UNANSWERABLE:
            assert not re.search(rf"{answer}\D", everything.replace('"answers": ["' + answer, ""))
        if source == "unknown":
            assert not text_of.keys() >= {*path, last}
            continue
        text = text_of[last]
        assert not path or f", taught by {last}, " in text_of[path[0]]
        years = [int(year) for year in re.findall(r"\b\d{4}\b", text)]
        if source == "untold":
            fact = question["metadata"]["hops"][-1]
            assert " and died in " not in text if fact == "age" else " born in 1" in text
        elif question["metadata"]["hops"][-1] == "age":
            assert years[1] - years[0] == int(answer)
        else:
            assert f" born in {answer} in {years[0]}" in text
    assert sources == {"place", "age", "mentor_place", "mentor_age", *world.UNANSWERABLE}


def test_nothing_that_is_trained_on_names_a_held_out_person(out, records):
    held_out = {q["metadata"]["titles"][0] for q in records["questions_eval"]}
    assert len(held_out) == 12
    for name in ("questions_train", "demonstrations"):
        text = (out / f"{name}.jsonl").read_text(encoding="utf-8")
        assert not [person for person in held_out if person in text]


def test_demonstrations_keep_to_the_protocol_and_show_what_was_printed(records):
    for chat in records["demonstrations"]:
        assert BAPO.format_reward(response_of(chat)) == 0
        called = [message["content"] for message in chat["messages"][1:]]
        for call, result in zip(called[::2], called[1::2], strict=False):
            if sum_ := re.fullmatch(
                r"<think> (\d+) - (\d+) </think><python> print\(\1 - \2\) </python>", call
            ):
                assert result == str(int(sum_[1]) - int(sum_[2]))
            else:
                assert call.endswith(" </search>")


def test_every_name_and_every_number_is_one_token(out, records):
    tokenizer = tokenizers.Tokenizer.from_file(str(out / "model" / "tokenizer.json"))
    wanted = {*world.WORDS, *map(str, world.NUMBERS)}
    for chat in records["demonstrations"][:200]:
        text = quickstart.render_chat(chat, BAPO)
        pieces = [
            tokenizer.decode([token], skip_special_tokens=False)
            for token in tokenizer.encode(text).ids
        ]
        assert "".join(pieces) == text
        words = [word for word in re.findall(r"\w+", text) if word in wanted]
        assert [piece.strip() for piece in pieces if piece.strip() in wanted] == words


@pytest.mark.slow(
    instead=None,
    because="it compares what BAPO did in the first and the last fifth of a run of minutes",
)
def test_all_that_bapo_is_for_acts_in_a_run(tmp_path):
    worlds.main(["--world=bapo", "--seeds=0", f"--workdir={tmp_path}"])
    got = json.loads((tmp_path / "bapo" / "results.json").read_text())["0"]
    # Of these questions 0.412 have no answer.
    assert got["exact_match, sampled, before"] < 0.3
    assert got["exact_match, sampled, after"] > 0.45
    assert got["exact_match, greedy, after"] > 0.55
    # Of those, many are declined, and hardly any others.
    assert got["abstained, greedy, before"] < 0.1 < got["abstained, greedy, after"]
    assert got["precision, greedy, after"] > got["precision, greedy, before"] + 0.1
    assert got["reliability, sampled, after"] > got["reliability, sampled, before"] + 0.25
    assert got["pay for abstaining, last fifth"] > got["pay for abstaining, first fifth"]
    assert got["groups sampled again"] > 0
    assert 0 < got["share of steps in the late stage"] < 1
    assert got["Python calls, last fifth"] > 0.2

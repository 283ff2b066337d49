"""The quickstart's world: the same for a seed, honest about who is held out, easy to tokenize."""

import json
import re

import numpy as np
import pytest

from examples import quickstart_world as world

SMALL = ["--num_people=60", "--num_held_out=12", "--num_demonstrations=400", "--num_worlds=4"]
FILES = ("questions_train", "questions_eval", "demonstrations", "demonstrations_perfect")


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    world.main([f"--out={folder}", *SMALL])
    return folder


@pytest.fixture(scope="module")
def records(out):
    return {name: read(out / f"{name}.jsonl") for name in ("corpus", *FILES)}


@pytest.fixture(scope="module")
def hf_tokenizer(out):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(out / "model")


def read(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_nothing_that_is_trained_on_names_a_held_out_person(out, records):
    titles = {document["title"] for document in records["corpus"]}
    trained = {q["metadata"]["titles"][0] for q in records["questions_train"]}
    held_out = titles - trained
    assert len(held_out) == 12
    for question in records["questions_eval"]:
        assert held_out.issuperset(question["metadata"]["titles"])
    for name in ("questions_train", "demonstrations", "demonstrations_perfect"):
        text = (out / f"{name}.jsonl").read_text(encoding="utf-8")
        assert not [title for title in held_out if title in text]
        assert any(title in text for title in trained)


def test_answers_stand_in_the_documents_that_metadata_names(records):
    text_of = {document["title"]: document["text"] for document in records["corpus"]}
    for question in records["questions_train"] + records["questions_eval"]:
        *path, last = question["metadata"]["titles"]
        assert (path or [last])[0] in question["question"]
        assert f" {question['answers'][0]} " in text_of[last]
        if path:
            assert text_of[path[0]].endswith(f" taught by {last}.")


def answer_of(chat):
    return re.fullmatch(r"<answer> (\w+) </answer>", chat["messages"][-1]["content"])[1]


def test_perfect_demonstrations_are_right(records):
    for chat in records["demonstrations_perfect"]:
        [gold] = chat["metadata"]["answers"]
        assert answer_of(chat) == gold
        assert f" {gold} " in chat["messages"][-2]["content"]
        assert chat["metadata"]["num_searches"] == {"one_hop": 1, "two_hop": 2}[chat["data_source"]]


def test_mixed_demonstrations_are_partly_right(records):
    chats = records["demonstrations"]
    is_right = [answer_of(chat) in chat["metadata"]["answers"] for chat in chats]
    assert is_right == [chat["metadata"]["is_correct"] for chat in chats]
    # Among so few people a surname alone often suffices; in a full world 3 in 10 are right.
    assert 0.1 < np.mean(is_right) < 0.9
    results = [m["content"] for chat in chats for m in chat["messages"] if m["role"] == "tool"]
    assert "No information found" in results
    assert 0.05 < np.mean([chat["metadata"]["num_searches"] == 0 for chat in chats]) < 0.15


def test_every_name_is_one_token_in_every_place(records, hf_tokenizer):
    chats = records["demonstrations"] + records["demonstrations_perfect"]
    for chat in chats:
        text = world.render_chat(chat)
        pieces = [hf_tokenizer.decode([id]) for id in hf_tokenizer(text)["input_ids"]]
        assert "".join(pieces) == text
        words = [word for word in re.findall(r"\w+", text) if word in world.POOL]
        assert [piece[1:] for piece in pieces if piece[1:] in world.POOL] == words


def test_the_template_renders_as_the_script_says(hf_tokenizer):
    messages = [{"role": "user", "content": "Where was Lena Okafor born?"}]
    text = hf_tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == world.render_prompt(messages[0]["content"])
    assert len(hf_tokenizer(text)["input_ids"]) == 14
    for tag in world.list_tags(world.SEARCH_R1) + world.SPECIAL_TOKENS:
        assert len(hf_tokenizer(tag)["input_ids"]) == 1
    assert hf_tokenizer.eos_token == "<|im_end|>"

"""The world of calls: the quickstart's, with searches as calls of a tool."""

import json

import pytest
from transformers import AutoTokenizer

from examples import calls_world, quickstart_world
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.envs.protocol import ParsedCall, parse_tool_calls
from jaxrl.envs.search.base import EmptySearch
from jaxrl.envs.tools.base import build_chat_schema

SIZES = ["--num_people=60", "--num_held_out=12", "--num_demonstrations=40", "--num_worlds=1"]
TOOLS = [build_chat_schema(EmptySearch())]  # the schema of any search engine


def lines(folder, name):
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("calls")
    calls_world.main([f"--out={folder}", *SIZES])
    return folder


def test_only_how_a_search_is_written_differs(world, tmp_path):
    quickstart_world.main([f"--out={tmp_path}", *SIZES])
    for name in ("corpus", "questions_train", "questions_eval"):
        assert lines(world, name) == lines(tmp_path, name)
    num_calls = 0
    pairs = zip(lines(world, "demonstrations"), lines(tmp_path, "demonstrations"), strict=True)
    for chat, plain in pairs:
        system, *messages = chat["messages"]
        assert system == {"role": "system", "content": calls_world.SYSTEM}
        for message, before in zip(messages, plain["messages"], strict=True):
            if "<search>" not in before["content"]:
                assert message == before
                continue
            thought, _, query = before["content"].partition("<search>")
            [call] = parse_tool_calls(message["content"]).calls
            assert message["content"].startswith(f"{thought}\n<tool_call>")
            query = query.removesuffix(" </search>")
            assert call == ParsedCall(tool="search", arguments={"query": query})
            num_calls += 1
    assert num_calls > 30


def test_the_template_describes_the_tool_and_shows_results(world):
    tokenizer = Tokenizer(AutoTokenizer.from_pretrained(world / "model"))
    asked = [{"role": "system", "content": "Answer."}, {"role": "user", "content": "Who?"}]
    assert tokenizer.decode(tokenizer.render_prompt(asked, TOOLS)) == (
        "<|im_start|>system\nAnswer.\nTools:\nsearch(query): Searches a collection of documents "
        'and returns passages that fit a query.\nA call is <tool_call>\n{"name": name, '
        '"arguments": object}\n</tool_call><|im_end|>\n<|im_start|>user\nWho?<|im_end|>\n'
        "<|im_start|>assistant\n"
    )
    assert tokenizer.decode(tokenizer.render_prompt(asked)) == (
        "<|im_start|>system\nAnswer.<|im_end|>\n<|im_start|>user\nWho?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    _, text = tokenizer.render_results(["one", "two"], TOOLS)
    assert text == (
        "\n<|im_start|>user\n<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n"
        "</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )

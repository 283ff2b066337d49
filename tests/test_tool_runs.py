"""Runs whose model calls functions as Qwen does; what it is told is what its answers come from."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxrl.envs.protocol import parse_tool_calls
from jaxrl.envs.tools.base import build_chat_schema
from jaxrl.envs.tools.functions import FunctionTool
from jaxrl.models.hf_weights import load_hf
from tests import tool_world
from tests.runs import records, trajectories

TOOLS = [build_chat_schema(FunctionTool(tool_world.look_up))]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shelves")
    tool_world.write(folder, TOOLS)
    return folder


def check_ids(line, tokenizer):
    """What was inserted is what the template writes of the results, and is not trained on."""
    ids, mask = np.array(line["token_ids"]), np.array(line["loss_mask"], bool)
    assert not mask[: line["prompt_length"]].any()
    pieces = np.split(np.arange(len(ids)), np.flatnonzero(np.diff(mask)) + 1)[1:]
    sampled, inserted = pieces[::2], pieces[1::2]
    asked = [turn for turn in line["turns"] if turn["observation"] is not None]
    assert len(inserted) == len(asked) >= len(line["turns"]) - 1
    for piece, turn in zip(inserted, asked, strict=True):
        results = turn["observation"].split("<tool_response>\n")[1:]
        bodies = [result.partition("\n</tool_response>")[0] for result in results]
        assert (ids[piece].tolist(), turn["observation"]) == tokenizer.render_results(bodies, TOOLS)
        assert turn["results"] == bodies
    for piece, turn in zip(sampled, line["turns"], strict=True):
        text = tokenizer.decode(ids[piece])
        is_cut = turn is line["turns"][-1] and line["outcome"] == "out_of_budget"
        ends = ("<|im_end|>", "<|endoftext|>", *([""] if is_cut else []))
        assert text in [turn["text"] + end for end in ends]


@pytest.mark.minutes
@pytest.mark.usefixtures("quick_compilation", "no_pictures", "one_size")
def test_a_run_calls_a_function_and_is_told_what_it_returns(world, tmp_path):
    config = tool_world.config_of(world, **{"sft.num_steps": 25, "num_steps": 1})
    components = tool_world.play(config, tmp_path / "run")
    lines = trajectories(tmp_path / "run", records(tmp_path / "run")[-1]["step"])
    told = 0
    for line in lines:
        check_ids(line, components.tokenizer)
        for turn in line["turns"]:
            for record in turn["records"]:
                number = json.loads(record["call"])["number"]
                assert record["tool"] == "look_up"
                assert turn["results"][record["result_index"]] == tool_world.colour(number)
                told += 1
            asked = len(parse_tool_calls(turn["text"]).calls)
            assert (turn["observation"] or "").count("<tool_response>") in (asked, 0)
    assert told > 5
    assert max(len(turn["records"]) for line in lines for turn in line["turns"]) > 1
    before, after = load_hf(world / "model"), load_hf(tmp_path / "run" / "export")
    assert not np.array_equal(before["embed"]["embedding"], after["embed"]["embedding"])


@pytest.mark.slow(instead="extras/mcp/test_mcp.py::test_they_answer_tool_calls")
@pytest.mark.usefixtures("no_pictures")
def test_a_run_calls_the_tools_of_a_server(world, tmp_path):
    server = str(Path(__file__).parent / "extending" / "my_server.py")
    changes = {"env.search.tools": (), "env.search.mcp": ({"command": (sys.executable, server)},)}
    # Its schema is longer than the one that the tokenizer was made for.
    changes |= {"rollout.max_prompt_tokens": 320, "rollout.max_total_tokens": 448}
    config = tool_world.config_of(world, **{"sft.num_steps": 60, "num_steps": 2, **changes})
    tool_world.play(config, tmp_path / "run")
    lines = trajectories(tmp_path / "run", records(tmp_path / "run")[-1]["step"])
    told = [
        (turn, record) for line in lines for turn in line["turns"] for record in turn["records"]
    ]
    assert len(told) > 5
    for turn, record in told:
        assert (record["tool"], record["error"]) == ("look_up", None)
        colour = tool_world.colour(json.loads(record["call"])["number"])
        assert f"\n{colour}\n" in turn["observation"]


@pytest.mark.slow(
    instead=None,
    because="it asserts the score after 500 steps on demonstrations, with the tool and without",
)
@pytest.mark.usefixtures("no_pictures")
def test_answers_come_from_the_tool(world, tmp_path):
    """Held-out pairs of shelves, whose colour no question tells: with a tool that says nothing
    there is nothing right."""
    scores = {}
    for name in ("look_up", "know_nothing"):
        changes = {"stages": ("sft", "evaluate"), "sft.num_steps": 500}
        changes |= {"eval.final_suites": ("greedy",)}
        changes |= {"env.search.tools": (f"tests.tool_world.{name}",)}
        config = tool_world.config_of(world, **changes)
        # Both learn from the same demonstrations, of a tool that tells the colour.
        if name == "know_nothing":
            config.stages = ("evaluate",)
            config.model.path = str(tmp_path / "look_up" / "export")
        tool_world.play(config, tmp_path / name)
        scores[name] = records(tmp_path / name)[-1]["val-core/all/exact_match/greedy"]
    assert scores["look_up"] > 0.8
    assert scores["know_nothing"] < 0.4  # one colour in eight is guessed

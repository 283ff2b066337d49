"""Runs whose model calls functions as Qwen does, and answers from their results."""

import json

import numpy as np
import pytest

from jaxrl.envs.protocol import parse_tool_calls
from jaxrl.envs.tools.base import build_chat_schema
from jaxrl.envs.tools.functions import FunctionTool
from jaxrl.models.hf_weights import load_hf
from tests import tool_world
from tests.runs import records, trajectories

TOOLS = [build_chat_schema(FunctionTool(tool_world.look_up))]


SETTINGS = {
    "qwen3": {"sft.num_steps": 25},
    "qwen3_5": {
        "sft.num_steps": 40,
        "rollout.max_prompt_tokens": 320,
        "rollout.max_response_tokens": 96,
        "rollout.max_total_tokens": 512,
    },
}


def check_ids(line, tokenizer):
    """Check that the template's text of the results is inserted, and not trained on."""
    ids, mask = np.array(line["token_ids"]), np.array(line["loss_mask"], bool)
    assert not mask[: line["prompt_length"]].any()
    pieces = np.split(np.arange(len(ids)), np.flatnonzero(np.diff(mask)) + 1)[1:]
    sampled, inserted = pieces[::2], pieces[1::2]
    calling = [turn for turn in line["turns"] if turn["observation"] is not None]
    assert len(inserted) == len(calling) >= len(line["turns"]) - 1
    for piece, turn in zip(inserted, calling, strict=True):
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
@pytest.mark.parametrize("family", SETTINGS)
def test_a_run_calls_a_function_and_reads_its_results(tmp_path, family):
    world = tmp_path / "shelves"
    tool_world.write(world, TOOLS, family=family)
    config = tool_world.config_of(world, **SETTINGS[family], num_steps=1)
    components = tool_world.play(config, tmp_path / "run")
    step = records(tmp_path / "run")[-1]
    assert step["rollout_corr/logprob_diff_max"] < 1e-4
    lines = trajectories(tmp_path / "run", step["step"])
    num_calls = 0
    for line in lines:
        check_ids(line, components.tokenizer)
        for turn in line["turns"]:
            for record in turn["records"]:
                number = json.loads(record["call"])["number"]
                assert record["tool"] == "look_up"
                assert turn["results"][record["result_index"]] == tool_world.color(number)
                num_calls += 1
            parsed = len(parse_tool_calls(turn["text"]).calls)
            assert (turn["observation"] or "").count("<tool_response>") in (parsed, 0)
    assert num_calls > 5
    assert max(len(turn["records"]) for line in lines for turn in line["turns"]) > 1
    before, after = load_hf(world / "model"), load_hf(tmp_path / "run" / "export")
    assert not np.array_equal(before["embed"]["embedding"], after["embed"]["embedding"])

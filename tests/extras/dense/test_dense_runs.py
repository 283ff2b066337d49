"""Runs that search by vectors: what the policy read is what the engine finds."""

import json

import pytest

from configs import debug_tiny
from jaxrl.builders.validation import validate
from jaxrl.envs.search.bm25 import LocalSearch
from jaxrl.extras.dense.engine import DenseSearch
from jaxrl.logs.display import Display
from jaxrl.run import run
from tests.extras.dense.worlds import ENCODER, PREFIXES
from tests.helpers import build, settings_of
from tests.runs import SIZES, records, trajectories

pytestmark = [
    pytest.mark.minutes, pytest.mark.usefixtures("quick_compilation", "no_pictures", "one_size"),
]  # fmt: skip

QUERY = "the mill"


def dense_settings(world, index):
    return {
        "corpus": f"{world}/corpus.jsonl",
        "encoder": str(ENCODER),
        "index": str(index),
        **PREFIXES,
    }


def configured(world, index, **changes):
    config = debug_tiny.get_config(str(world))
    of_dense = {f"search.dense.{k}": v for k, v in dense_settings(world, index).items()}
    sizes = {"num_steps": 1, "checkpoint.every_steps": 1, "eval.suites": (), "eval.max_tasks": 2}
    only = {"search.local.corpus": "", "search.local.index": str(index)}  # hybrid reads dense's
    config.update_from_flattened_dict({**SIZES, **sizes, **of_dense, **only, **changes})
    validate(config)
    return config


@pytest.fixture(scope="module")
def dense_run(tiny_world, tmp_path_factory, quick_compilation, no_pictures):
    """A policy learns to ask one question always, and is trained while it asks it."""
    folder = tmp_path_factory.mktemp("dense_run")
    roles = ["user", "assistant", "tool", "assistant"]
    texts = [f"<search> {QUERY} </search>", "x", "<answer> y </answer>"]
    lines = (tiny_world / "questions_train.jsonl").read_text().splitlines()
    with open(folder / "chats.jsonl", "w") as chats:
        for line in lines:
            spoken = zip(roles, [json.loads(line)["question"], *texts], strict=True)
            messages = [{"role": role, "content": text} for role, text in spoken]
            chats.write(json.dumps({"messages": messages}) + "\n")
    config = configured(
        tiny_world, folder / "index",
        **{
            "search.engine": "dense", "search.dense.dtype": "int8", "sft.num_steps": 40,
            "stages": ("sft", "train"), "sft.source": str(folder / "chats.jsonl"),
        },
    )  # fmt: skip
    (folder / "run").mkdir()
    run(settings_of(config), folder / "run", build(config), Display())
    return folder


def read_by_the_policy(workdir):
    """What it read after its query, tags and what was cut off left aside."""
    record = records(workdir)[-1]
    assert record["num_searches/mean"] > 0
    turns = [turn for line in trajectories(workdir, record["step"]) for turn in line["turns"]]
    found = {turn["observation"] for turn in turns if turn["tool_call"] == QUERY}
    assert found
    return {one.partition("<information>")[2].partition("</information>")[0] for one in found}


def test_a_run_reads_what_dense_search_finds(dense_run, tiny_world):
    answer = DenseSearch(**dense_settings(tiny_world, dense_run / "index")).run(QUERY)
    for text in read_by_the_policy(dense_run / "run"):
        assert len(text) > len("Doc 1(Title: ")
        assert answer.startswith(text.strip())
    # Another engine would have told it something else.
    assert LocalSearch(f"{tiny_world}/corpus.jsonl").run(QUERY)[:40] != answer[:40]

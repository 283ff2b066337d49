"""verifiers environments, played by its own training client.

`JAXRL_VERIFIERS_PYTHON` names a Python with `verifiers==0.4.0` and `textarena`; it needs no jaxrl.
Without it only what needs neither is tested.
"""

import dataclasses
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from jaxrl.data.records import parse_task
from jaxrl.extras.serve.agents import verifiers
from tests.extras.serve.agents.scripted import Scripted, serving
from tests.extras.serve.served import CONFIG, make_engine
from tests.extras.serve.served import serving as served
from tests.helpers import ROOT, tiny_params
from tests.qwen import qwen3
from tests.toys import taught

MODULE = ROOT / "jaxrl/extras/serve/agents/verifiers.py"
PYTHON = os.environ.get("JAXRL_VERIFIERS_PYTHON", "")
has_verifiers = pytest.mark.skipif(
    not PYTHON, reason="JAXRL_VERIFIERS_PYTHON names no Python with verifiers 0.4.0 and textarena"
)
ROOMS, GAME = str(ROOT / "examples/verifiers_rooms.py"), "textarena"
HANGMAN = {"taskset": {"game": "Hangman-v0"}}


def needs_verifiers(test):
    """Marks a test that starts Pythons with verifiers, some ten seconds each."""
    return pytest.mark.minutes(has_verifiers(test))


def call(room):
    block = json.dumps({"name": "look", "arguments": {"house_number": 0, "room": room}})
    return f"<tool_call>\n{block}\n</tool_call>"


# The key of house 0 is in the jar, which the attic does not know.
SEARCH = (call("attic"), "<think>\nhm\n</think>\n\nThere." + call("hall"), "jar")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tokenizer, and five words for games."""
    path = tmp_path_factory.mktemp("verifiers")
    qwen3().save_pretrained(path / "model")
    words = path / "nltk/corpora/words"
    words.mkdir(parents=True)
    for name in ("en", "en-basic"):
        (words / name).write_text("ease\nidea\narea\ntree\nseat\n")
    return path


def python(folder, words, text=""):
    """What a command prints in the Python of verifiers."""
    environment = {
        **os.environ, "NLTK_DATA": str(folder / "nltk"),
        "HOME": str(folder),
    }  # fmt: skip
    done = subprocess.run(
        [PYTHON, *map(str, words)], input=text, capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def tasks_of(folder, environment, num, arguments):
    words = [MODULE, environment, f"--arguments={json.dumps(arguments)}", f"--num={num}"]
    return [json.loads(line) for line in python(folder, words).splitlines()]


def play(folder, port, environment, tasks, arguments, *, deadline_s=300.0, **settings):
    """Plays tasks side by side, each at its address; what came back, and traces by address."""
    traces = folder / "traces.jsonl"
    traces.unlink(missing_ok=True)
    calls = [
        {
            "base_url": f"http://127.0.0.1:{port}/r/{number}/v1",
            "api_key": f"key-{number}",
            "model": "tiny",
            "environment": environment,
            "tokenizer": str(folder / "model"),
            "arguments": arguments,
            "traces": str(traces),
            **settings,
        }
        for number in range(len(tasks))
    ]
    given = {"module": str(MODULE), "tasks": tasks, "calls": calls, "deadline_s": deadline_s}
    text = python(folder, [ROOT / "tests/extras/serve/agents/play_all.py"], json.dumps(given))
    by_address = {}
    for line in traces.read_text().splitlines():
        [trace] = json.loads(line)["traces"]
        url = trace["agent"]["config"]["client"]["base_url"]
        by_address[url.removeprefix(f"http://127.0.0.1:{port}").removesuffix("/v1")] = trace
    return json.loads(text.splitlines()[-1]), by_address


def sampled(trace):
    """Ids of the answers in a trace, and their log-probabilities."""
    nodes = [node for node in trace["nodes"] if node["sampled"]]
    ids = [
        [id for id, is_sampled in zip(node["token_ids"], node["mask"], strict=True) if is_sampled]
        for node in nodes
    ]
    return ids, [node["logprobs"] for node in nodes]


@pytest.fixture(scope="module")
def rooms(folder):
    """Tasks of five houses."""
    return tasks_of(folder, ROOMS, 5, {})


@pytest.fixture(scope="module")
def searched(folder, rooms):
    """What came of five searches that were all scripted, their traces, and the script."""
    script = Scripted(SEARCH)
    with serving(script) as port:
        return *play(folder, port, ROOMS, rooms, {}, sampling={"max_tokens": 50}), script


@needs_verifiers
def test_a_tool_is_called_and_the_trace_has_what_was_sampled(rooms, searched):
    """House 0 pays 1 for the jar, all others 0.2 for each of the two looks."""
    got, traces, script = searched
    assert parse_task(rooms[0], "here").answers == ("jar",)
    assert rooms[4]["id"] == "verifiers_rooms/4"
    assert [one["reward"] for one in got["results"]] == [1.0, 0.4, 0.4, 0.4, 0.4]
    assert [one["is_correct"] for one in got["results"]] == [True] + [False] * 4
    assert {one["final_answer"] for one in got["results"]} == {"jar"}
    assert (got["num_checked"], got["num_refused"], got["num_open"]) == (15, 0, 0)
    assert traces.keys() == script.told.keys() == {f"/r/{number}" for number in range(5)}
    for address, trace in traces.items():
        ids, logprobs = sampled(trace)
        assert ids == script.told[address]
        assert logprobs[0][:2] == [-0.5, -0.501]
        # Every prompt goes on from all that stood there before: one row an episode.
        for before, told, after in zip(
            script.asked[address], script.told[address], script.asked[address][1:], strict=False
        ):
            assert after[: len(before) + len(told)] == before + told
    assert {headers["authorization"] for headers, _ in script.bodies} == {
        f"Bearer key-{number}" for number in range(5)
    }
    assert {body["sampling_params"]["max_tokens"] for _, body in script.bodies} == {50}


def damage(address, choice):
    """Makes an answer one that verifiers refuses, at each address in another way."""
    content = choice["logprobs"]["content"]
    if address == "/r/0":
        content.pop()
    elif address == "/r/1":
        choice["logprobs"] = None
    else:
        content[0]["token"] = "<tool_call>"


@needs_verifiers
def test_an_answer_that_verifiers_refuses_is_an_error_and_no_reward(folder, rooms):
    with serving(Scripted(SEARCH, damage)) as port:
        got, _ = play(folder, port, ROOMS, rooms[:3], {})
    texts = ("does not match logprob count", "must be an object", "must be 'token_id:")
    for result, text in zip(got["results"], texts, strict=True):
        assert result.startswith(f"RuntimeError: verifiers' episode of {ROOMS} failed: ")
        assert text in result
    assert got["num_refused"] == got["num_checked"] >= 3


@needs_verifiers
def test_what_is_spent_ends_an_episode_without_an_error(folder, rooms, searched):
    """Who is refused a second answer has not been paid for the look that it would have told of.

    The last two are errors: another refusal, and an answer that never comes.
    """
    _, _, before = searched
    script = Scripted(
        SEARCH,
        lengths={"/r/0": len(before.asked["/r/0"][1]) - 1},  # the client asks first
        refusals={
            "/r/1": "This model's maximum context length is 9 tokens.",
            "/r/2": "the episode has had 1 answers; expected at most config.rollout.max_turns.",
            "/r/3": "something is wrong.",
        },
        silent=("/r/4",),
    )
    with serving(script) as port:
        got, traces = play(folder, port, ROOMS, rooms, {}, deadline_s=40.0)
    *spent, failed, late = got["results"]
    assert [one["reward"] for one in spent] == [0.0] * 3
    assert [len(told) for told in script.told.values()] == [1] * 5
    assert late.startswith("TimeoutError")
    assert "/r/4" not in traces
    assert got["num_open"] == 0
    assert "ProviderError" in failed
    assert "something is wrong." in failed


@needs_verifiers
def test_the_engine_samples_and_the_trace_has_its_ids(folder, rooms, searched, quick_compilation):
    """A model that was taught a search is asked for it by verifiers."""
    _, _, script = searched
    asked, told = script.asked["/r/0"], script.told["/r/0"]
    ids = asked[-1] + told[-1]
    config = dataclasses.replace(CONFIG, width=256, mlp_width=64)
    params = taught(tiny_params(config), config, ids, start=len(asked[0]))
    engine = make_engine(params, config, max_total_tokens=1024, max_prompt_tokens=1023)
    with served(engine, max_cached_rows=4) as (server, client):
        got, traces = play(folder, server.port, ROOMS, rooms[:1] * 3, {})
        metrics = client.metrics()
    assert [one["reward"] for one in got["results"]] == [1.0] * 3
    assert (got["num_checked"], got["num_refused"]) == (9, 0)
    for trace in traces.values():
        found, logprobs = sampled(trace)
        assert found == told
        assert np.concatenate(logprobs).min() > -1e-3
    assert metrics["jaxrl_prompt_tokens_reused_total"] > 0  # rows of finished answers went on


@needs_verifiers
def test_tasks_that_never_end_are_counted(folder):
    done = subprocess.run(
        [PYTHON, MODULE, GAME, f"--arguments={json.dumps(HANGMAN)}"],
        capture_output=True, text=True, env={**os.environ, "NLTK_DATA": str(folder / "nltk")},
    )  # fmt: skip
    assert done.returncode == 1
    assert "never end; expected --num=N" in done.stderr


def test_the_file_needs_the_standard_library_alone_and_is_not_the_package():
    """Without site-packages the package is not found, rather than this file of its name."""
    done = subprocess.run(
        [sys.executable, "-S", MODULE, "any"], capture_output=True, text=True, cwd=MODULE.parent
    )
    assert done.returncode == 1
    assert "No module named 'verifiers'" in done.stderr
    assert "not a package" not in done.stderr


def trace_of(base_url, name):
    client = SimpleNamespace(base_url=base_url)
    return SimpleNamespace(agent=SimpleNamespace(name=name, config=SimpleNamespace(client=client)))


def test_one_agent_is_trained():
    """A user that is played by a model elsewhere is none; a second player is refused."""
    here, other = "http://127.0.0.1:1/r/0/v1", "https://api.example.org/v1"
    player = trace_of(here, "player")
    episode = SimpleNamespace(traces=[trace_of(other, "user"), player])
    assert verifiers.find_trained_trace(episode, here) is player
    with pytest.raises(ValueError, match="player, second; expected one"):
        verifiers.find_trained_trace(
            SimpleNamespace(traces=[player, trace_of(here, "second")]), here
        )
    with pytest.raises(ValueError, match="none; expected one"):
        verifiers.find_trained_trace(SimpleNamespace(traces=[]), here)

"""Environments of verifiers, with its own training client.

The environment variable `JAXRL_VERIFIERS_PYTHON` names a Python with `verifiers==0.4.0`. If it is
not set, tests that need verifiers are skipped.
"""

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from jaxrl.data.records import parse_task
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.extras.serve.agents import verifiers
from tests.extras.serve.served import CONFIG, make_engine, serving
from tests.helpers import ROOT, tiny_params
from tests.qwen import qwen3
from tests.servers import Reply, served
from tests.toys import taught

MODULE = ROOT / "jaxrl/extras/serve/agents/verifiers.py"
PYTHON = os.environ.get("JAXRL_VERIFIERS_PYTHON", "")
has_verifiers = pytest.mark.skipif(
    not PYTHON, reason="JAXRL_VERIFIERS_PYTHON names no Python with verifiers 0.4.0"
)
ROOMS = str(ROOT / "examples/verifiers_rooms.py")


def needs_verifiers(test):
    """Mark a test that starts Pythons with verifiers, some ten seconds each."""
    return pytest.mark.minutes(has_verifiers(test))


def write_call(room):
    block = json.dumps({"name": "look", "arguments": {"house_number": 0, "room": room}})
    return f"<tool_call>\n{block}\n</tool_call>"


# The key of house 0 is in the jar, which the attic does not know.
SEARCH = (write_call("attic"), "<think>\nhm\n</think>\n\nThere." + write_call("hall"), "jar")


class Scripted:
    """A server for verifiers' training client.

    It answers the n-th request to an address with the n-th text, and records everything.

    Attributes:
        prompts: Token ids of the prompts, by address.
        answers: Token ids of the answers, by address.
        requests: Received requests for answers.
        lengths: Maximum lengths of prompts, by address.
        refusals: Messages with which second requests are rejected, by address.
        silent: Addresses whose second requests get no answer.
    """

    def __init__(self, texts, lengths=None, refusals=None, silent=()):
        self.tokenizer = Tokenizer(qwen3())
        self.texts, self.lengths = texts, lengths or {}
        self.refusals, self.silent = refusals or {}, silent
        self.prompts: dict[str, list[list[int]]] = {}
        self.answers: dict[str, list[list[int]]] = {}
        self.requests = []
        self.is_over = threading.Event()

    def answer(self, request):
        """Answer a request for a list of models or for a completion."""
        if request.method == "GET":
            length = self.lengths.get(request.path.removesuffix("/v1/models"), 2048)
            return as_json({"data": [{"id": "tiny", "max_model_len": length}]})
        address = request.path.removesuffix("/inference/v1/generate")
        turn = len(self.answers.setdefault(address, []))
        if turn and address in self.silent:
            self.is_over.wait()
            return Reply(status=503)
        if turn and address in self.refusals:
            return as_json({"error": {"message": self.refusals[address], "type": "refused"}}, 400)
        ids = [*self.tokenizer.encode(self.texts[turn]), self.tokenizer.eos_ids[0]]
        self.requests.append(request)
        self.prompts.setdefault(address, []).append(request.json["token_ids"])
        self.answers[address].append(ids)
        logprobs = [
            {"token": f"token_id:{id}", "logprob": -0.5 - 0.001 * index}
            for index, id in enumerate(ids)
        ]
        choice = {"index": 0, "token_ids": ids, "finish_reason": "stop"}
        choice["logprobs"] = {"content": logprobs}
        return as_json({"request_id": f"{address}-{turn}", "choices": [choice]})


def as_json(value, status=200):
    """Return a reply with the content type that verifiers requires."""
    return Reply(value, status, {"Content-Type": "application/json"})


@contextlib.contextmanager
def answering(script):
    """Yield the port of a server that answers by a script."""
    with served(script.answer) as server:
        yield int(server.url.rpartition(":")[2])
        script.is_over.set()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a tokenizer."""
    path = tmp_path_factory.mktemp("verifiers")
    qwen3().save_pretrained(path / "model")
    return path


def run_python(folder, arguments, text=""):
    """Return the output of a command in the Python of verifiers."""
    done = subprocess.run(
        [PYTHON, *map(str, arguments)],
        input=text, capture_output=True, text=True, env=os.environ | {"HOME": str(folder)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def play(folder, port, tasks, *, deadline_s=300.0, **settings):
    """Play tasks concurrently, each at its address; return results, and traces by address."""
    traces = folder / "traces.jsonl"
    traces.unlink(missing_ok=True)
    calls = [
        {
            "base_url": f"http://127.0.0.1:{port}/r/{number}/v1",
            "api_key": f"key-{number}",
            "model": "tiny",
            "environment": ROOMS,
            "tokenizer": str(folder / "model"),
            "arguments": {},
            "traces": str(traces),
            **settings,
        }
        for number in range(len(tasks))
    ]
    job = {"module": str(MODULE), "tasks": tasks, "calls": calls, "deadline_s": deadline_s}
    script = ROOT / "tests/extras/serve/agents/play_all.py"
    output = run_python(folder, [script], json.dumps(job)).splitlines()[-1]
    by_address = {}
    for line in traces.read_text().splitlines():
        [trace] = json.loads(line)["traces"]
        url = trace["agent"]["config"]["client"]["base_url"]
        by_address[url.removeprefix(f"http://127.0.0.1:{port}").removesuffix("/v1")] = trace
    return json.loads(output), by_address


def sampled(trace):
    """Return the ids of the answers in a trace, and their log-probabilities."""
    nodes = [node for node in trace["nodes"] if node["sampled"]]
    ids = [
        [id for id, is_sampled in zip(node["token_ids"], node["mask"], strict=True) if is_sampled]
        for node in nodes
    ]
    return ids, [node["logprobs"] for node in nodes]


@pytest.fixture(scope="module")
def rooms(folder):
    """Tasks of five houses."""
    output = run_python(folder, [MODULE, ROOMS, "--arguments={}", "--num=5"])
    return [json.loads(line) for line in output.splitlines()]


@pytest.fixture(scope="module")
def searched(folder, rooms):
    """Results and traces of five scripted searches, and the script."""
    script = Scripted(SEARCH)
    with answering(script) as port:
        return *play(folder, port, rooms, sampling={"max_tokens": 50}), script


@needs_verifiers
def test_a_trace_has_what_was_sampled(rooms, searched):
    """House 0 pays 1 for the jar, all others 0.2 for each of the two looks."""
    output, traces, script = searched
    assert parse_task(rooms[0], "here").answers == ("jar",)
    assert rooms[4]["id"] == "verifiers_rooms/4"
    results = output["results"]
    assert [result["reward"] for result in results] == [1.0, 0.4, 0.4, 0.4, 0.4]
    assert {result["final_answer"] for result in results} == {"jar"}
    assert (output["num_checked"], output["num_open"]) == (15, 0)
    assert traces.keys() == script.answers.keys() == {f"/r/{number}" for number in range(5)}
    for address, trace in traces.items():
        ids, logprobs = sampled(trace)
        prompts, answers = script.prompts[address], script.answers[address]
        assert ids == answers
        assert logprobs[0][:2] == [-0.5, -0.501]
        # Every prompt starts with the ids before it: an episode is one row.
        for prompt, answer, following in zip(prompts, answers, prompts[1:], strict=False):
            assert following[: len(prompt) + len(answer)] == prompt + answer
    keys = {request.headers["authorization"] for request in script.requests}
    assert keys == {f"Bearer key-{number}" for number in range(5)}
    assert {r.json["sampling_params"]["max_tokens"] for r in script.requests} == {50}


@needs_verifiers
def test_an_episode_without_tokens_or_turns_ends_without_an_error(folder, rooms, searched):
    """Without a second answer there is no reward for the look.

    The last two are errors: another refusal, and an answer that never comes.
    """
    _, _, scripted = searched
    script = Scripted(
        SEARCH,
        lengths={"/r/0": len(scripted.prompts["/r/0"][1]) - 1},  # the client checks it
        refusals={
            "/r/1": "This model's maximum context length is 9 tokens.",
            "/r/2": "the episode has had 1 answers; expected at most config.rollout.max_turns.",
            "/r/3": "something is wrong.",
        },
        silent=("/r/4",),
    )
    with answering(script) as port:
        output, traces = play(folder, port, rooms, deadline_s=40.0)
    *ended, failed, late = output["results"]
    assert [result["reward"] for result in ended] == [0.0] * 3
    assert [len(answers) for answers in script.answers.values()] == [1] * 5
    assert late.startswith("TimeoutError")
    assert "/r/4" not in traces
    assert output["num_open"] == 0
    assert "ProviderError" in failed
    assert "something is wrong." in failed


@needs_verifiers
def test_a_trace_has_the_ids_of_the_engine(folder, rooms, searched, quick_compilation):
    """verifiers plays with a model that was trained to search."""
    _, _, script = searched
    prompts, answers = script.prompts["/r/0"], script.answers["/r/0"]
    config = dataclasses.replace(CONFIG, width=256, mlp_width=64)
    ids = prompts[-1] + answers[-1]
    params = taught(tiny_params(config), config, ids, start=len(prompts[0]))
    engine = make_engine(params, config, max_total_tokens=1024)
    with serving(engine, max_cached_rows=4) as (server, client):
        output, traces = play(folder, server.port, rooms[:1] * 3)
        metrics = client.metrics()
    assert [result["reward"] for result in output["results"]] == [1.0] * 3
    assert output["num_checked"] == 9
    for trace in traces.values():
        ids, logprobs = sampled(trace)
        assert ids == answers
        assert np.concatenate(logprobs).min() > -1e-3
    assert metrics["jaxrl_prompt_tokens_reused_total"] > 0  # of cached rows


def test_the_file_needs_only_the_standard_library_and_does_not_shadow_verifiers():
    done = subprocess.run(
        [sys.executable, "-S", MODULE, "any"], capture_output=True, text=True, cwd=MODULE.parent
    )
    assert done.returncode == 1
    assert "No module named 'verifiers'" in done.stderr
    assert "not a package" not in done.stderr


def make_trace(base_url, name):
    client = SimpleNamespace(base_url=base_url)
    return SimpleNamespace(agent=SimpleNamespace(name=name, config=SimpleNamespace(client=client)))


def test_one_agent_is_trained():
    """A user played by a model elsewhere does not count; a second player is an error."""
    here, elsewhere = "http://127.0.0.1:1/r/0/v1", "https://api.example.org/v1"
    player = make_trace(here, "player")
    episode = SimpleNamespace(traces=[make_trace(elsewhere, "user"), player])
    assert verifiers.find_policy_trace(episode, here) is player
    for traces, names in (([player, make_trace(here, "second")], "player, second"), ([], "none")):
        with pytest.raises(ValueError, match=f"{names}; expected one"):
            verifiers.find_policy_trace(SimpleNamespace(traces=traces), here)

"""Runs whose policy is a model behind an endpoint."""

import json
import shutil
import urllib.parse

import pytest

from configs import debug_tiny
from jaxrl.builders.validation import validate
from jaxrl.extras.view.report import write_report
from jaxrl.logs.display import Display
from jaxrl.run import run
from jaxrl.runtime.preemption import Interrupted
from jaxrl.training.usage import BudgetSpentError
from tests.helpers import build, settings_of
from tests.runs import evaluation, records
from tests.servers import Reply, served

KEY = "sk-very-secret"


def external_config(world, model, url, **changes):
    config = debug_tiny.get_config(str(world))
    config.update_from_flattened_dict(
        {
            "stages": ("evaluate",),
            "model.path": str(model),
            "policy.name": "openai",
            "policy.openai.url": url,
            "policy.openai.model": "their-model",
            "policy.openai.key_env": "POLICY_KEY",
            "rollout.max_response_tokens": 200,
            "rollout.max_total_tokens": 600,
            "eval.samples": 2,
            "eval.resamples": 20,
            **changes,
        }
    )
    return config


@pytest.fixture
def bare_model(tiny_world, tmp_path, monkeypatch):
    """A model's folder without its weights."""
    monkeypatch.setenv("POLICY_KEY", KEY)
    folder = tmp_path / "model"
    shutil.copytree(tiny_world / "model", folder, ignore=shutil.ignore_patterns("*.safetensors"))
    return folder


def play(config, workdir, should_stop=lambda: False):
    validate(config)
    workdir.mkdir(exist_ok=True)
    display = Display()
    parts = build(config, workdir=workdir, log=display.log)
    run(settings_of(config), workdir, parts, display, should_stop)


def assert_key_is_in_no_file(folder):
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert not [path for path in files if KEY.encode() in path.read_bytes()]


def half_right(world):
    """Return a policy that searches, and answers every other question right."""
    lines = (world / "questions_eval.jsonl").read_text().splitlines()
    tasks = [json.loads(line) for line in lines]
    known = {task["question"]: task["answers"][0] for task in tasks[::2]}

    def answer(request):
        first, *others = request.json["messages"]
        text = f"<search> {first['content']} "
        if others:
            text = f"<answer> {known.get(first['content'], 'nobody')} "
        return {
            "choices": [{"message": {"content": text}, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 10, "completion_tokens": 2},
        }

    return answer


def test_a_stopped_evaluation_requests_only_the_rest(tiny_world, bare_model, tmp_path):
    workdir = tmp_path / "run"

    def recorded():
        files = (workdir / "replies").rglob("*.jsonl")
        return [line for file in files for line in file.read_text().splitlines()]

    with served(half_right(tiny_world)) as server:
        config = external_config(tiny_world, bare_model, server.url)
        with pytest.raises(Interrupted):
            play(config, workdir, lambda: len(recorded()) > 0)
        requests = [json.loads(json.loads(line)["query"]) for line in recorded()]
        num_requests = len(server.requests)  # those under way may be sent again
        play(config, workdir)
        later = [request.json for request in server.requests[num_requests:]]
    later = [{name: v for name, v in request.items() if name != "model"} for request in later]
    assert requests
    assert later
    assert requests[0].keys() == later[0].keys()
    assert [request for request in later if request in requests] == []


def test_a_model_behind_an_endpoint_is_evaluated(tiny_world, bare_model, tmp_path):
    workdir = tmp_path / "run"
    with served(half_right(tiny_world)) as server:
        config = external_config(tiny_world, bare_model, server.url)
        play(config, workdir)
        num_requests = len(server.requests)
        play(config, workdir)
        assert len(server.requests) == num_requests  # it was evaluated before
    record = evaluation(workdir, "evaluate_0.json")
    num_questions, num_turns = 8, 2
    # sampled, greedy, and of empty_search the second turn: the first is that of sampled.
    assert num_requests == num_questions * ((2 + 1) * num_turns + 2)
    for suite in ("sampled", "greedy", "empty_search"):
        summary = record["summary"][suite]["all"]
        assert summary["exact_match"] == 0.5
        assert summary["searches"] == summary["answered"] == 1.0
        assert summary["environment_errors"] == 0
    assert record["summary"]["empty_search"]["all"]["answer_in_results"] == 0.0
    temperatures = {request.json["temperature"] for request in server.requests}
    assert temperatures == {0.0, 1.0}
    assert record["questions"]["greedy"][0]["usage"] == {
        "calls": 2, "attempts": 2, "prompt_tokens": 20, "completion_tokens": 4,
    }  # fmt: skip
    metrics = records(workdir)[-1]
    num_calls = num_questions * (2 + 1 + 2) * num_turns
    assert metrics["perf/ledger/total/policy/calls"] == num_calls
    assert metrics["perf/ledger/total/policy/prompt_tokens"] == 10 * num_requests
    assert metrics["val-core/all/exact_match/greedy"] == 0.5
    started = json.loads((workdir / "environment.json").read_text())[-1]
    assert started["model"] == {"external": f"their-model at {server.url}"}
    assert_key_is_in_no_file(workdir)


def test_a_workdir_with_checkpoints_is_refused(tiny_world, bare_model, tmp_path):
    config = external_config(tiny_world, bare_model, "http://127.0.0.1:1")
    manifest = tmp_path / "checkpoints" / "3" / "manifest.json"
    manifest.parent.mkdir(parents=True)
    manifest.write_text("{}")
    with pytest.raises(ValueError, match="checkpoints of a local model; set --workdir"):
        build(config, workdir=tmp_path)


def test_replies_are_paid_once_and_replayed_without_the_endpoint(
    tiny_world, bare_model, tmp_path, monkeypatch
):
    prices = {"policy.openai.prompt_price": 2.0, "policy.openai.completion_price": 8.0}
    changes = {**prices, "eval.final_suites": ("sampled", "greedy")}

    def play_at(name, **more):
        play(external_config(tiny_world, bare_model, server.url, **changes | more), tmp_path / name)
        return evaluation(tmp_path / name, "evaluate_0.json"), records(tmp_path / name)[-1]

    with served(half_right(tiny_world)) as server:
        first, metrics = play_at("first")
        num_requests = len(server.requests)
        assert num_requests == 8 * (2 + 1) * 2
        cost = num_requests * (10 * 2.0 + 2 * 8.0) / 1e6
        assert metrics["perf/ledger/total/policy/cost"] == pytest.approx(cost)
        assert metrics["perf/ledger/total/attempts/search"] > 0
        assert metrics["perf/ledger/total/cost"] == pytest.approx(cost)  # searches are free
        play_at("first", **{"eval.samples": 3})  # of which two are known
        assert len(server.requests) - num_requests == 8 * 2
        with pytest.raises(BudgetSpentError, match=r"config\.ledger\.max_cost=0\.0001; to resume"):
            play_at("poor", **{"ledger.max_cost": 1e-4})
    monkeypatch.delenv("POLICY_KEY")
    folder = {"policy.openai.replay_folder": str(tmp_path / "first" / "replies")}
    replayed, metrics = play_at("replayed", **folder, **{"policy.openai.replay": "only"})
    assert metrics["perf/ledger/total/policy/replayed"] == num_requests
    assert metrics["perf/ledger/total/policy/attempts"] == 0
    assert "perf/ledger/total/policy/cost" not in metrics

    def without_usage(record):
        questions = [q for suite in record["questions"].values() for q in suite]
        return record["summary"], [{k: q[k] for k in q if k != "usage"} for q in questions]

    assert str(without_usage(replayed)) == str(without_usage(first))
    assert_key_is_in_no_file(tmp_path)


def test_a_key_that_the_endpoint_echoes_is_in_no_output(
    tiny_world, bare_model, tmp_path, monkeypatch, capfd
):
    key = 'sk-Ab9/x+"Q7w<mnop>Z-long'
    monkeypatch.setenv("POLICY_KEY", key)
    spellings = (
        key,
        json.dumps(key)[1:-1],
        json.dumps(key)[1:-1].replace("/", "\\/"),
        urllib.parse.quote(key, safe=""),
    )
    play_half_right = half_right(tiny_world)
    last = json.loads((tiny_world / "questions_eval.jsonl").read_text().splitlines()[-1])

    def answer(request):
        header = request.headers["authorization"]
        assert header == f"Bearer {key}"
        if request.json["messages"][0]["content"] == last["question"]:
            return Reply(" ".join(spellings), 400)
        reply = play_half_right(request)
        message = reply["choices"][0]["message"]
        message["content"] = " ".join(spellings) + message["content"]
        return {**reply, header: spellings}

    workdir = tmp_path / "run"
    with served(answer) as server:
        play(external_config(tiny_world, bare_model, f"{server.url}/v1"), workdir)
    write_report([workdir])
    contents = {path: path.read_bytes() for path in workdir.rglob("*") if path.is_file()}
    assert {"report.html"} < {path.name for path in contents}
    assert sum(b"***" in content for content in contents.values()) >= 3
    contents |= dict(enumerate(text.encode() for text in capfd.readouterr()))
    for spelling in spellings:
        assert [path for path, data in contents.items() if spelling.encode() in data] == []

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
def bare_model(tiny_world, tmp_path):
    """A model's folder without its weights."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_world / "model", folder, ignore=shutil.ignore_patterns("*.safetensors"))
    return folder


def half_right(world):
    """A policy that searches, and answers every other question right."""
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


def test_replies_of_an_evaluation_that_was_stopped_are_kept_and_it_says_so(
    tiny_world, bare_model, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("POLICY_KEY", KEY)
    workdir = tmp_path / "run"
    workdir.mkdir()

    def written():
        files = (workdir / "replies").rglob("*.jsonl")
        return [line for file in files for line in file.read_text().splitlines()]

    with served(half_right(tiny_world)) as server:
        config = external_config(tiny_world, bare_model, server.url)
        parts = build(config, workdir=workdir)
        with pytest.raises(Interrupted):
            run(settings_of(config), workdir, parts, Display(), lambda: len(written()) > 0)
        told = capsys.readouterr().out
        kept = f"stopped; responses so far are saved in {workdir / 'replies'}. The same command"
        assert f"{kept} requests only the rest" in told
        assert "nothing to save" not in told
        kept = [json.loads(json.loads(line)["query"]) for line in written()]
        asked = len(server.requests)  # some of them under way, which may be asked again
        run(settings_of(config), workdir, build(config, workdir=workdir), Display())
        later = [request.json for request in server.requests[asked:]]
        later = [{name: v for name, v in one.items() if name != "model"} for one in later]
        assert kept
        assert later
        assert kept[0].keys() == later[0].keys()
        assert [request for request in later if request in kept] == []


def test_a_model_behind_an_endpoint_is_evaluated(tiny_world, bare_model, tmp_path, monkeypatch):
    monkeypatch.setenv("POLICY_KEY", KEY)
    workdir = tmp_path / "run"
    workdir.mkdir()
    with served(half_right(tiny_world)) as server:
        config = external_config(tiny_world, bare_model, server.url)
        run(settings_of(config), workdir, build(config, workdir=workdir), Display())
        asked = len(server.requests)
        run(settings_of(config), workdir, build(config, workdir=workdir), Display())
        assert len(server.requests) == asked  # it was evaluated before
    record = evaluation(workdir, "evaluate_0.json")
    num_questions, num_turns = 8, 2
    # sampled, greedy, and of empty_search the second turn: the first is that of sampled.
    assert asked == num_questions * ((2 + 1) * num_turns + 2)
    played = num_questions * (2 + 1 + 2) * num_turns
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
    assert metrics["perf/ledger/total/policy/calls"] == played
    assert metrics["perf/ledger/total/policy/prompt_tokens"] == 10 * asked
    assert metrics["val-core/all/exact_match/greedy"] == 0.5
    started = json.loads((workdir / "environment.json").read_text())[-1]
    assert started["model"] == {"external": f"their-model at {server.url}"}
    files = [path for path in workdir.rglob("*") if path.is_file()]
    assert not [path for path in files if KEY.encode() in path.read_bytes()]


LETTERS = "ABCD"


def multiple_choice(folder):
    """The file of two questions for each letter, and a policy right in the first one of them."""
    tasks = [
        {
            "id": f"{letter}{i}",
            "question": f"Which one is {letter}{i}? A, B, C or D?",
            "answer": letter,
        }
        for letter in LETTERS
        for i in (0, 1)
    ]
    file = folder / "choices.jsonl"
    file.write_text("".join(json.dumps(task) + "\n" for task in tasks))

    def answer(request):
        [about] = [t for t in tasks if t["question"] in request.json["messages"][-1]["content"]]
        letter = about["answer"]
        if about["id"].endswith("1"):  # the next letter: D for A
            letter = LETTERS[LETTERS.index(letter) - 1]
        text = rf"<think>Hm.</think><answer>{letter}.</answer>"
        return {
            "choices": [{"message": {"content": text}, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 10, "completion_tokens": 2},
        }

    return file, answer


def test_multiple_choice_is_scored_by_its_letters(tiny_world, bare_model, tmp_path, monkeypatch):
    monkeypatch.setenv("POLICY_KEY", KEY)
    file, answer = multiple_choice(tmp_path)
    changes = {
        "tasks.eval.source": str(file),
        "eval.final_suites": ("sampled", "greedy"),
        "reward.weights": {"exact_match": 1.0, "f1": 0.5},
    }
    workdir = tmp_path / "run"
    workdir.mkdir()
    with served(answer) as server:
        config = external_config(tiny_world, bare_model, server.url, **changes)
        validate(config)
        run(settings_of(config), workdir, build(config, workdir=workdir), Display())
    found = evaluation(workdir, "evaluate_0.json")
    for suite in ("sampled", "greedy"):
        for question in found["questions"][suite]:
            is_right = question["task_id"].endswith("0")
            assert question["exact_match"] == question["f1"] == is_right, question["task_id"]
    voted = found["summary"]["sampled"]["all"]
    assert voted["exact_match"] == voted["pass@2"] == voted["maj@2"] == 0.5


def test_what_cannot_be_played_is_refused_at_the_start(
    tiny_world, bare_model, tmp_path, monkeypatch
):
    for key in ("url", "model"):
        config = external_config(tiny_world, bare_model, "http://127.0.0.1:1")
        config.policy.openai[key] = ""
        with pytest.raises(ValueError, match=rf"config\.policy\.openai\.{key} is ''; expected"):
            validate(config)
    config = external_config(tiny_world, bare_model, "http://127.0.0.1:1")
    validate(config)
    monkeypatch.delenv("POLICY_KEY", raising=False)
    with pytest.raises(ValueError, match=r"POLICY_KEY.*config\.policy\.openai\.key_env"):
        build(config)
    monkeypatch.setenv("POLICY_KEY", KEY)
    made = tmp_path / "checkpoints" / "3" / "manifest.json"
    made.parent.mkdir(parents=True)
    made.write_text("{}")
    with pytest.raises(ValueError, match="checkpoints of a model of its own; set --workdir"):
        build(config, workdir=tmp_path)


def test_answers_are_paid_and_given_again_without_the_endpoint(
    tiny_world, bare_model, tmp_path, monkeypatch
):
    monkeypatch.setenv("POLICY_KEY", KEY)
    changes = {
        "policy.openai.prompt_price": 2.0,
        "policy.openai.completion_price": 8.0,
        "eval.final_suites": ("sampled", "greedy"),
    }

    def played(name, **more):
        config = external_config(tiny_world, bare_model, server.url, **changes | more)
        validate(config)
        (tmp_path / name).mkdir(exist_ok=True)
        parts = build(config, workdir=tmp_path / name)
        run(settings_of(config), tmp_path / name, parts, Display())
        return evaluation(tmp_path / name, "evaluate_0.json"), records(tmp_path / name)[-1]

    with served(half_right(tiny_world)) as server:
        first, metrics = played("first")
        asked = len(server.requests)
        assert asked == 8 * (2 + 1) * 2
        cost = asked * (10 * 2.0 + 2 * 8.0) / 1e6
        assert metrics["perf/ledger/total/policy/cost"] == pytest.approx(cost)
        searches = metrics["perf/ledger/total/attempts/search"]
        assert searches > 0
        assert metrics["perf/ledger/total/cost"] == pytest.approx(cost)  # searches are free
        played("first", **{"eval.samples": 3})  # of which two are known
        assert len(server.requests) - asked == 8 * 2
        with pytest.raises(BudgetSpentError, match=r"config\.ledger\.max_cost=0\.0001; to resume"):
            played("poor", **{"ledger.max_cost": 1e-4})
    monkeypatch.delenv("POLICY_KEY")
    known = {"policy.openai.replay_folder": str(tmp_path / "first" / "replies")}
    again, metrics = played("again", **known, **{"policy.openai.replay": "only"})
    assert metrics["perf/ledger/total/policy/replayed"] == asked
    assert metrics["perf/ledger/total/policy/attempts"] == 0
    assert "perf/ledger/total/policy/cost" not in metrics

    def without_usage(record):
        questions = [q for suite in record["questions"].values() for q in suite]
        return record["summary"], [{k: q[k] for k in q if k != "usage"} for q in questions]

    assert str(without_usage(again)) == str(without_usage(first))
    with pytest.raises(FileNotFoundError, match=r"openai\.replay is 'only', but .* no replies"):
        played("nothing", **{"policy.openai.replay": "only"})
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in files if KEY.encode() in path.read_bytes()]


def test_an_endpoint_that_echoes_its_key_tells_it_to_no_file(
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
    plays = half_right(tiny_world)
    last = json.loads((tiny_world / "questions_eval.jsonl").read_text().splitlines()[-1])

    def answer(request):
        asked = request.headers["authorization"]
        assert asked == f"Bearer {key}"
        if request.json["messages"][0]["content"] == last["question"]:
            return Reply(" ".join(spellings), 400)
        reply = plays(request)
        message = reply["choices"][0]["message"]
        message["content"] = " ".join(spellings) + message["content"]
        return {**reply, asked: spellings}

    workdir = tmp_path / "run"
    workdir.mkdir()
    with served(answer) as server:
        config = external_config(tiny_world, bare_model, f"{server.url}/v1")
        validate(config)
        display = Display()
        run(
            settings_of(config),
            workdir,
            build(config, workdir=workdir, log=display.log),
            display,
        )
    write_report([workdir])
    found = {path: path.read_bytes() for path in workdir.rglob("*") if path.is_file()}
    assert {"report.html"} < {path.name for path in found}
    assert sum(b"***" in content for content in found.values()) >= 3
    found |= dict(enumerate(text.encode() for text in capfd.readouterr()))
    for spelling in spellings:
        assert [place for place, content in found.items() if spelling.encode() in content] == []

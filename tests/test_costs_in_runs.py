"""What runs spend is counted, and ends them; where answers come from, in a run's evaluation."""

import dataclasses
import json
import re

import pytest

from jaxrl import evaluate
from jaxrl.builders.environment import _check_prices
from jaxrl.builders.validation import validate
from jaxrl.envs.search.bm25 import LocalSearch
from jaxrl.envs.search.random_search import RandomSearch
from jaxrl.logs.display import Display
from jaxrl.run import run
from jaxrl.runtime.checkpoint import list_steps
from jaxrl.runtime.preemption import Interrupted
from jaxrl.training.usage import BudgetSpentError, Usage, UsageStats
from tests.helpers import build, settings_of
from tests.runs import (
    base_config,
    lasting,
    records,
    saved_progress,
    trajectories,
    warm_start,
)

pytestmark = [
    pytest.mark.minutes,
    pytest.mark.usefixtures("quick_compilation", "no_pictures", "one_size"),
]

PRICES = {"search": 0.25}


@pytest.fixture(scope="module")
def held_out(tiny_world, tmp_path_factory):
    """Held-out questions with one more accepted answer, which a fifth of the documents hold."""
    lines = (tiny_world / "questions_eval.jsonl").read_text().splitlines()
    tasks = [json.loads(line) for line in lines]
    file = tmp_path_factory.mktemp("held_out") / "questions.jsonl"
    more = [{**task, "answers": [*task["answers"], "a sailor"]} for task in tasks]
    file.write_text("".join(json.dumps(task) + "\n" for task in more))
    return str(file)


@pytest.fixture(scope="module")
def source(tiny_world, cache_folder, quick_compilation):
    return warm_start(tiny_world, cache_folder)


def configured(world, source, **changes):
    config = base_config(world, source)
    settings = {
        **{"num_steps": 2, "log.trajectories": -1, "checkpoint.every_steps": 1},
        **{"eval.suites": ("greedy",), "eval.final_suites": ("sampled", "random_search")},
        **{"stages": ("train", "evaluate"), "ledger.prices": PRICES},
        **{"rollout.max_cost": 0.25, "eval.samples": 2, "search.cache_mib": 0.0},
        **{"rollout.max_total_tokens": 192, "rollout.max_observation_tokens": 72},
    }
    config.update_from_flattened_dict({**settings, **changes})
    validate(config)
    return config


def play(config, workdir, parts):
    workdir.mkdir(exist_ok=True)
    run(settings_of(config), workdir, parts, Display())


@pytest.fixture(scope="module")
def parts(tiny_world, source, held_out):
    return build(configured(tiny_world, source, **{"tasks.eval.source": held_out}))


@pytest.fixture(scope="module")
def base(tiny_world, source, held_out, parts, tmp_path_factory):
    """A run that was stopped after its first step, as it had asked the engine often enough."""
    workdir = tmp_path_factory.mktemp("costs") / "base"
    first = {"ledger.max_calls": 1, "tasks.eval.source": held_out}
    config = configured(tiny_world, source, **first)
    with pytest.raises(BudgetSpentError, match=r"config\.ledger\.max_calls=1; to resume, raise it"):
        play(config, workdir, parts)
    assert list_steps(workdir / "checkpoints") == []  # the first evaluation has spent it
    config.ledger.max_calls = records(workdir)[0]["perf/ledger/total/attempts/search"] + 1
    with pytest.raises(BudgetSpentError):
        play(config, workdir, parts)
    assert list_steps(workdir / "checkpoints") == [1]
    progress, _ = saved_progress(parts, workdir)
    assert progress.ledger.num_calls["search"] == records(workdir)[1]["ledger/total/calls/search"]
    config.ledger.max_calls = 0
    play(config, workdir, parts)
    return workdir


def evaluation_ledger(workdir, name):
    """The counters of an evaluation's file."""
    return UsageStats.from_json(
        json.loads((workdir / "eval" / f"{name}.json").read_text())["ledger"]
    )


def searches_of(line):
    """The searches of a written trajectory."""
    calls = [call for turn in line["turns"] for call in turn["records"]]
    return [call for call in calls if call["tool"] is None]


def step_ledger(lines):
    """The counters of a step, from its written trajectories."""
    searches = [call for line in lines for call in searches_of(line)]
    attempts = sum(call["attempts"] for call in searches if call["source"] == "tool")
    sampled = [sum(line["loss_mask"]) for line in lines]
    responses = [len(line["token_ids"]) - line["prompt_length"] for line in lines]
    return UsageStats(
        num_trajectories=len(lines),
        num_calls={"search": len(searches)},
        observation_tokens=sum(responses) - sum(sampled),
        sampled_tokens=sum(sampled),
        usage=Usage(attempts={"search": attempts}, cost=0.25 * attempts),
    )


def totals(record):
    return {name: value for name, value in record.items() if "ledger/" in name}


def test_totals_are_the_sums_over_all_trajectories(base):
    first, *steps, last = records(base)
    spent = evaluation_ledger(base, "train_0")
    assert totals(first) == spent.metrics()
    for step in steps:
        of_step = step_ledger(trajectories(base, step["step"]))
        assert of_step.num_trajectories == 16
        assert of_step.num_calls["search"] > 0
        assert of_step.usage.attempts["search"] == step["perf/search/attempts"]
        spent += of_step
        if step is steps[-1]:
            spent += evaluation_ledger(base, "train_2")
        assert totals(step) == spent.metrics()
    final = evaluation_ledger(base, "evaluate_2")
    assert totals(last) == (spent + final).metrics()
    # Searches of the control reach no engine, and are not paid.
    assert final.num_calls["search"] == sum(len(q["searches"]) for q in of_suite(base, "sampled"))
    assert any(question["searches"] for question in of_suite(base, "random_search"))


def test_a_trajectory_ends_where_its_calls_would_cost_too_much(base):
    written = [line for step in (1, 2) for line in trajectories(base, step)]
    assert all(len(searches_of(line)) <= 1 for line in written)
    ended = [line for line in written if line["turns"][-1]["text"].endswith("</search>")]
    # Two turns may call, so it is the price that ends those that ask a second time.
    assert ended
    assert all(line["outcome"] == "out_of_budget" for line in ended)
    assert any(len(searches_of(line)) == 1 for line in ended)


def of_suite(workdir, suite):
    return json.loads((workdir / "eval" / "evaluate_2.json").read_text())["questions"][suite]


def test_random_search_shows_documents_drawn_by_query_and_seed(base, parts, tiny_world):
    engine = LocalSearch(tiny_world / "corpus.jsonl")
    assert len(engine.documents) == 40
    drawn, found = RandomSearch(engine, seed=0), []
    for answer in of_suite(base, "random_search"):
        for query in answer["searches"]:
            title = drawn.run(query).partition(")")[0]
            assert title in answer["response"]
            found.append(engine.run(query).startswith(title))
    assert found
    assert not all(found)


def test_evidence_is_what_stands_between_the_tags(base):
    final = json.loads((base / "eval" / "evaluate_2.json").read_text())
    for suite, answers in final["questions"].items():
        held = []
        for one in answers:
            results = re.findall("<information>(.*?)</information>", one["response"], re.DOTALL)
            words = re.findall(r"\w+", " ".join(results).lower())
            held.append(any(a.lower().split()[-1] in words for a in one["answers"]))
            assert one["answer_in_results"] == held[-1]
            assert one["retrieved_but_ignored"] == (held[-1] and not one["exact_match"])
            assert one["right_without_evidence"] == (bool(one["exact_match"]) and not held[-1])
        assert final["summary"][suite]["all"]["answer_in_results"] == sum(held) / len(held)
        assert any(held)
    name = "val-aux/all/answer_in_results/random_search"
    assert records(base)[-1][name] == final["summary"]["random_search"]["all"]["answer_in_results"]


def test_prices_are_of_tools_that_there_are(tiny_world, source):
    config = configured(tiny_world, source, **{"ledger.prices": {"serach": 1.0}})
    with pytest.raises(ValueError, match=r"ledger\.prices names 'serach'; expected some of search"):
        _check_prices(config, ["search", "python"])
    _check_prices(configured(tiny_world, source), ["search"])
    config.reward.judges = {"helpful": {}}
    config.ledger.prices = {"helpful": 1.0, "search": 1.0}
    _check_prices(config, ["search"])
    with pytest.raises(ValueError, match=r"judges has 'helpful', which is also the name of a tool"):
        _check_prices(config, ["search", "helpful"])
    config.ledger.prices = {"helpfull": 1.0}
    with pytest.raises(ValueError, match=r"'helpfull'; expected some of search, helpful"):
        _check_prices(config, ["search"])
    config.env.name = "my_env.CalculatorEnv"  # which may have tools of its own
    _check_prices(config, ["search"])


ONE_STEP = """
calls = []


def keep(group_ids):
    calls.append(1)
    return (group_ids >= 0) & (len(calls) <= NUM)
"""


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_step_that_draws_on_is_ended_and_what_it_cost_is_counted(
    ahead, tiny_world, source, tmp_path, monkeypatch
):
    """A filter that keeps the first step's groups and then none: a step without end."""
    (tmp_path / f"one_step_{ahead}.py").write_text(ONE_STEP.replace("NUM", "2"))
    monkeypatch.syspath_prepend(tmp_path)
    changes = {"filter.name": f"one_step_{ahead}.keep", "filter.max_batches": 0, "num_steps": 3}
    changes |= {"eval.suites": (), "stages": ("train",), "rollout.async_level": ahead}
    changes |= {"loss.correction.level": "token"} if ahead else {}
    config = configured(tiny_world, source, **changes)
    parts = build(config)  # which tries the filter once
    config.ledger.max_calls = 60  # steps have 16 trajectories with a search each, or two
    with pytest.raises(BudgetSpentError, match=r"has spent .* of config\.ledger\.max_calls=60; "):
        play(config, tmp_path / "run", parts)
    assert list_steps(tmp_path / "run" / "checkpoints") == [1]
    first = records(tmp_path / "run")[-1]
    assert first["ledger/total/calls/search"] <= 16 * 2
    progress, _ = saved_progress(parts, tmp_path / "run")
    assert progress.ledger.usage.attempts["search"] >= 60
    # What was lost is sampled again: the counts of what the policy asked for repeat.
    assert progress.ledger.num_calls["search"] == first["ledger/total/calls/search"]


class StopsAtItsSecond:
    """Updates that are interrupted where a start that goes on would compile its first one."""

    def __init__(self, update):
        self._update, self._calls = update, iter(range(9))

    def __call__(self, *arguments):
        if next(self._calls) == 1:
            raise Interrupted("the run was asked to stop")
        return self._update(*arguments)

    def __getattr__(self, name):
        return getattr(self._update, name)


def test_a_step_that_is_stopped_behind_its_rollout_counts_what_that_cost(
    tiny_world, source, tmp_path
):
    config = configured(tiny_world, source, **{"eval.suites": (), "stages": ("train",)})
    parts = build(config)
    stage = parts.stages["train"]
    stopping = {"train": dataclasses.replace(stage, update=StopsAtItsSecond(stage.update))}
    with pytest.raises(Interrupted):
        play(config, tmp_path / "run", dataclasses.replace(parts, stages=stopping))
    [_, first] = records(tmp_path / "run")
    attempts, calls = "perf/ledger/total/attempts/search", "ledger/total/calls/search"
    progress, _ = saved_progress(parts, tmp_path / "run")
    lost = progress.ledger.usage.attempts["search"] - first[attempts]
    play(config, tmp_path / "run", parts)
    *_, last = records(tmp_path / "run")
    # What was lost is drawn again: it is asked for once, and paid twice.
    assert lost == last["perf/search/attempts"] > 0
    assert last[calls] == first[calls] + last["perf/search/calls"]
    assert last[attempts] == first[attempts] + 2 * lost


def test_an_evaluation_that_is_stopped_counts_its_suites(tiny_world, source, tmp_path, monkeypatch):
    changes = {"eval.suites": ("greedy", "sampled"), "eval.every_steps": 1, "stages": ("train",)}
    config = configured(tiny_world, source, **changes)
    parts, suite = build(config), evaluate.roll_out_suite

    def stopped(session, name):
        if session.progress.stage_step and name == "sampled":
            raise Interrupted("the run was asked to stop")
        return suite(session, name)

    monkeypatch.setattr(evaluate, "roll_out_suite", stopped)
    with pytest.raises(Interrupted):
        play(config, tmp_path / "run", parts)
    monkeypatch.undo()
    before, _ = saved_progress(parts, tmp_path / "run")
    play(config, tmp_path / "run", parts)
    [begin, first, _] = records(tmp_path / "run")
    attempts = "perf/ledger/total/attempts/search"
    again = first[attempts] - before.ledger.usage.attempts["search"]
    both_suites = evaluation_ledger(tmp_path / "run", "train_1")
    assert again == both_suites.usage.attempts["search"]  # played again
    lost = first[attempts] - begin[attempts] - first["perf/search/attempts"] - again
    assert 0 < lost < again  # of the first suite alone


def test_a_final_evaluation_that_is_stopped_resumes(
    base, tiny_world, source, parts, tmp_path, held_out, monkeypatch
):
    """It is stopped after its first suite, when nothing is left that a checkpoint could hold."""
    config = configured(tiny_world, source, **{"tasks.eval.source": held_out})
    suite = evaluate.roll_out_suite

    def stopped(session, name):
        if name == "random_search":
            raise Interrupted("the run was asked to stop")
        return suite(session, name)

    monkeypatch.setattr(evaluate, "roll_out_suite", stopped)
    with pytest.raises(Interrupted):
        play(config, tmp_path / "run", parts)
    monkeypatch.undo()
    play(config, tmp_path / "run", parts)
    assert lasting(tmp_path / "run") == lasting(base)


@pytest.mark.slow(instead="test_costs_in_runs.py::test_totals_are_the_sums_over_all_trajectories")
def test_a_run_that_spent_its_budget_is_as_if_it_had_not(
    base, tiny_world, source, held_out, parts, tmp_path
):
    config = configured(tiny_world, source, **{"tasks.eval.source": held_out})
    workdir = tmp_path / "run"
    play(config, workdir, parts)
    assert lasting(workdir) == lasting(base)
    # Evaluating again finds it done, and what it took.
    before = records(workdir)[-1]
    play(config, workdir, parts)
    after = records(workdir)[-1]
    assert after["perf/ledger/total/cost"] == before["perf/ledger/total/cost"]
    # A limit of money is kept alike.
    before, after, *_ = (record["perf/ledger/total/cost"] for record in records(base))
    config.ledger.max_cost = (before + after) / 2
    with pytest.raises(BudgetSpentError, match=r"of config\.ledger\.max_cost="):
        play(config, tmp_path / "other", parts)
    assert list_steps(tmp_path / "other" / "checkpoints") == [1]

"""What runs spend: it is counted, and it ends them."""

import dataclasses
import json
from types import SimpleNamespace

import pytest

from jaxrl import evaluate
from jaxrl.builders.environment import check_price_names
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
    made_for,
    records,
    saved_progress,
    trajectories,
)

pytestmark = [
    pytest.mark.minutes,
    pytest.mark.usefixtures("quick_compilation", "no_pictures", "one_size"),
]


def configured(world, warm_model, **changes):
    config = base_config(world, warm_model)
    settings = {
        **{"num_steps": 2, "log.trajectories": -1, "checkpoint.every_steps": 1},
        **{"eval.suites": ("greedy",), "eval.final_suites": ("sampled", "random_search")},
        **{"stages": ("train", "evaluate"), "ledger.prices": {"search": 0.25}},
        **{"rollout.max_cost": 0.25, "eval.samples": 2, "search.cache_mib": 0.0},
        **{"rollout.max_total_tokens": 192, "rollout.max_observation_tokens": 72},
    }
    config.update_from_flattened_dict({**settings, **changes})
    validate(config)
    return config


def play(config, workdir, parts):
    """Run with the method of this configuration."""
    workdir.mkdir(exist_ok=True)
    run(settings_of(config), workdir, made_for(config, parts), Display())


@pytest.fixture(scope="module")
def parts(tiny_world, warm_model):
    """The components that all runs share."""
    return build(configured(tiny_world, warm_model))


@pytest.fixture(scope="module")
def base(tiny_world, warm_model, parts, tmp_path_factory):
    """The workdir of a run that has spent its budget twice: before and in the second step."""
    workdir = tmp_path_factory.mktemp("costs") / "base"
    config = configured(tiny_world, warm_model, **{"ledger.max_calls": 1})
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
    """Return the counters in an evaluation's file."""
    return UsageStats.from_json(
        json.loads((workdir / "eval" / f"{name}.json").read_text())["ledger"]
    )


def searches_of(line):
    """Return the searches of a logged trajectory."""
    calls = [call for turn in line["turns"] for call in turn["records"]]
    return [call for call in calls if call["tool"] is None]


def step_ledger(lines):
    """Compute the counters of a step from its logged trajectories."""
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
    # Searches of the control reach no engine and cost nothing.
    assert final.num_calls["search"] == sum(len(q["searches"]) for q in of_suite(base, "sampled"))
    assert any(question["searches"] for question in of_suite(base, "random_search"))


def test_a_trajectory_ends_before_its_calls_cost_too_much(base):
    written = [line for step in (1, 2) for line in trajectories(base, step)]
    assert all(len(searches_of(line)) <= 1 for line in written)
    ended = [line for line in written if line["turns"][-1]["text"].endswith("</search>")]
    # Two turns may call, so it is the price that ends those that ask a second time.
    assert ended
    assert all(line["outcome"] == "out_of_budget" for line in ended)
    assert any(len(searches_of(line)) == 1 for line in ended)


def of_suite(workdir, suite):
    return json.loads((workdir / "eval" / "evaluate_2.json").read_text())["questions"][suite]


def test_random_search_shows_documents_drawn_by_query_and_seed(base, tiny_world):
    engine = LocalSearch(tiny_world / "corpus.jsonl")
    random_search, is_best = RandomSearch(engine, seed=0), []
    for answer in of_suite(base, "random_search"):
        for query in answer["searches"]:
            title = random_search.run(query).partition(")")[0]
            assert title in answer["response"]
            is_best.append(engine.run(query).startswith(title))
    assert is_best
    assert not all(is_best)


def test_prices_must_name_a_tool_or_judge(tiny_world, warm_model):
    config = configured(tiny_world, warm_model)
    config.reward.judges = {"helpful": {}}

    def check(prices):
        config.ledger.prices = prices
        check_price_names(
            SimpleNamespace(environments={"": config}, ledger=config.ledger), {"": ()}
        )

    check({"helpful": 1.0, "search": 1.0})
    with pytest.raises(ValueError, match=r"'helpfull'; expected some of search, helpful"):
        check({"helpfull": 1.0})
    config.env.name = "my_env.CalculatorEnv"  # which may have tools of its own
    check({"helpfull": 1.0})


ONE_STEP = """
calls = []


def keep(group_ids):
    calls.append(1)
    return (group_ids >= 0) & (len(calls) <= 2)  # the first call is that of a check
"""


@pytest.mark.parametrize("async_level", [0, 1])
def test_an_endless_step_ends_at_the_budget_and_its_cost_is_counted(
    async_level, tiny_world, warm_model, parts, tmp_path, monkeypatch
):
    """A filter keeps the groups of the first step and no others: the second step never ends."""
    (tmp_path / f"one_step_{async_level}.py").write_text(ONE_STEP)
    monkeypatch.syspath_prepend(tmp_path)
    changes = {"filter.name": f"one_step_{async_level}.keep", "filter.max_batches": 0}
    changes |= {"eval.suites": (), "stages": ("train",), "rollout.async_level": async_level}
    changes |= {"loss.correction.level": "token"} if async_level else {}
    config = configured(tiny_world, warm_model, **changes)
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


class InterruptedUpdate:
    """An update whose second optimizer step is interrupted."""

    def __init__(self, update):
        self._update, self._calls = update, iter(range(9))

    def apply_gradients(self, *arguments):
        if next(self._calls) == 1:
            raise Interrupted("the run was asked to stop")
        return self._update.apply_gradients(*arguments)

    def __getattr__(self, name):
        return getattr(self._update, name)


def test_a_step_that_is_stopped_after_its_rollout_counts_the_cost(
    tiny_world, warm_model, parts, tmp_path
):
    config = configured(tiny_world, warm_model, **{"eval.suites": (), "stages": ("train",)})
    stage = made_for(config, parts).stages["train"]
    stages = {"train": dataclasses.replace(stage, update=InterruptedUpdate(stage.update))}
    workdir = tmp_path / "run"
    workdir.mkdir()
    interrupted = dataclasses.replace(made_for(config, parts), stages=stages)
    with pytest.raises(Interrupted):
        run(settings_of(config), workdir, interrupted, Display())
    [_, first] = records(tmp_path / "run")
    attempts, calls = "perf/ledger/total/attempts/search", "ledger/total/calls/search"
    progress, _ = saved_progress(parts, tmp_path / "run")
    lost = progress.ledger.usage.attempts["search"] - first[attempts]
    play(config, tmp_path / "run", parts)
    *_, last = records(tmp_path / "run")
    # What was lost is sampled again: it counts once, and costs twice.
    assert lost == last["perf/search/attempts"] > 0
    assert last[calls] == first[calls] + last["perf/search/calls"]
    assert last[attempts] == first[attempts] + 2 * lost


def test_an_evaluation_that_is_stopped_counts_its_suites(
    tiny_world, warm_model, parts, tmp_path, monkeypatch
):
    changes = {"eval.suites": ("greedy", "sampled"), "eval.every_steps": 1, "stages": ("train",)}
    config = configured(tiny_world, warm_model, **changes, num_steps=1)
    suite = evaluate.roll_out_suite

    def interrupt(run_state, name):
        if run_state.progress.stage_step and name == "sampled":
            raise Interrupted("the run was asked to stop")
        return suite(run_state, name)

    monkeypatch.setattr(evaluate, "roll_out_suite", interrupt)
    with pytest.raises(Interrupted):
        play(config, tmp_path / "run", parts)
    monkeypatch.undo()
    before, _ = saved_progress(parts, tmp_path / "run")
    play(config, tmp_path / "run", parts)
    [begin, first] = records(tmp_path / "run")
    attempts = "perf/ledger/total/attempts/search"
    again = first[attempts] - before.ledger.usage.attempts["search"]
    both_suites = evaluation_ledger(tmp_path / "run", "train_1")
    assert again == both_suites.usage.attempts["search"]
    lost = first[attempts] - begin[attempts] - first["perf/search/attempts"] - again
    assert 0 < lost < again  # of the first suite alone


def test_a_final_evaluation_that_is_stopped_resumes(
    base, tiny_world, warm_model, parts, tmp_path, monkeypatch
):
    """It is stopped after its first suite, when all checkpoints are written.

    The run equals `base`, which has spent its budget and resumed.
    """
    config, suite = configured(tiny_world, warm_model), evaluate.roll_out_suite

    def interrupt(run_state, name):
        if name == "random_search":
            raise Interrupted("the run was asked to stop")
        return suite(run_state, name)

    monkeypatch.setattr(evaluate, "roll_out_suite", interrupt)
    with pytest.raises(Interrupted):
        play(config, tmp_path / "run", parts)
    monkeypatch.undo()
    play(config, tmp_path / "run", parts)
    assert lasting(tmp_path / "run") == lasting(base)

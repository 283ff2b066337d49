"""Runs with several environments: a search world and a math world, one model."""

import json
import shutil
from collections import Counter

import jax
import numpy as np
import pytest

from configs import mixed_small
from examples import mixed_world
from jaxrl import api
from jaxrl.builders.saved_run import load_saved_run, read_config, select_environment
from jaxrl.builders.validation import validate
from jaxrl.data.stream import locate_item
from jaxrl.envs.base import Task
from jaxrl.extras.audit import __main__ as audit
from jaxrl.extras.chat.conversation import Conversation
from jaxrl.extras.plan import memory
from jaxrl.extras.serve.loading import load_model
from jaxrl.extras.view.facts import compute_scores
from jaxrl.extras.view.reader import open_runs
from jaxrl.logs.display import Display
from jaxrl.models.hf_weights import load_hf
from jaxrl.models.registry import read_architecture
from jaxrl.types import flatten_groups
from tests.helpers import with_devices
from tests.runs import (
    Processes,
    assert_close,
    assert_same_weights,
    evaluation,
    killed,
    lasting,
    lasting_anywhere,
    records,
    trajectories,
    without_usage,
)
from tests.servers import served

pytestmark = [
    pytest.mark.minutes,
    pytest.mark.usefixtures("quick_compilation", "one_size", "no_pictures"),
]

SIZES = {
    **{"num_steps": 3, "sft.num_steps": 4, "sft.batch_size": 4, "sft.optimizer.micro_rows": 2},
    **{"rollout.tasks_per_step": 4, "rollout.group_size": 4, "rollout.max_num_seqs": 4},
    **{"rollout.max_response_tokens": 24, "rollout.max_total_tokens": 168},
    **{"rollout.max_observation_tokens": 24, "optimizer.micro_rows": 2, "model.remat": "none"},
    **{"eval.max_tasks": 3, "eval.suites": ("sampled",), "eval.resamples": 20},
    **{"eval.final_suites": ("sampled", "empty_search", "random_search")},
    **{"checkpoint.every_steps": 1, "checkpoint.keep": 100, "log.trajectories": -1},
}


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixed")
    sizes = ["--num_people=40", "--num_train=40", "--num_held_out=8", "--num_demonstrations=400"]
    mixed_world.main([f"--out={folder}", *sizes])
    return folder


def configured(world, **changes):
    """Return a configuration in which random answers of both environments differ in reward."""
    config = mixed_small.get_config(str(world))
    config.update_from_flattened_dict(SIZES | changes)
    brevity = {"tests.extending.my_reward.brevity": 1.0}
    search, math = config.environments.values()
    config.environments = {
        "search": search | {"reward.weights": brevity, "rollout.max_turns": 1},
        "math": math | {"reward.weights": {"math": 1.0, **brevity}},
    }
    return config


@pytest.fixture(scope="module")
def base(world, tmp_path_factory, quick_compilation, one_size, no_pictures):
    """The workdir of a complete run."""
    return api.train(configured(world), tmp_path_factory.mktemp("runs") / "base").workdir


STEPS = (5, 6, 7)
"""Global steps of the train stage, after those of the warm start."""


def test_draws_follow_the_weights_and_groups_do_not_mix(base):
    drawn = []
    for step in STEPS:
        lines = trajectories(base, step)
        for start in range(0, 16, 4):
            group = lines[start : start + 4]
            assert {line["group_id"] for line in group} == {start // 4}
            assert len({(line["task_id"], line["environment"]) for line in group}) == 1
            assert group[0]["task_id"].startswith(group[0]["environment"] + "/")
            advantages = [line["advantage"] for line in group]
            assert sum(advantages) == pytest.approx(0, abs=1e-4)
            drawn.append(group[0]["environment"])
    names = ("search", "math")
    assert drawn == [names[locate_item([7, 3], position)[0]] for position in range(12)]
    last = records(base)[-2]
    assert (last["tasks/search/taken"], last["tasks/math/taken"]) == (9, 3)


def test_each_environment_has_its_prompt_parts_and_turns(base):
    lines = [line for step in STEPS for line in trajectories(base, step)]
    parts = {
        name: {
            part for line in lines if line["environment"] == name for part in line["reward_parts"]
        }
        for name in ("search", "math")
    }
    assert parts["search"] == {"format", "answer", "exact_match", "f1", "brevity"}
    assert parts["math"] == {"math", "exact_match", "brevity"}
    turns = Counter((line["environment"], len(line["turns"])) for line in lines)
    assert {count for name, count in turns if name == "math"} == {1}
    for line in lines:
        text = "".join(turn["text"] for turn in line["turns"])
        if line["environment"] == "search":
            calls = [turn for turn in line["turns"] if turn["observation"] is not None]
            assert len(calls) <= 1
        elif "</search>" in text:  # not a stop string here
            assert not text.endswith("</search>") or line["outcome"] == "out_of_budget"


def test_each_environment_has_its_metrics(base):
    for record in (record for record in records(base) if record["step"] in STEPS):
        if "critic/rewards/mean" not in record:
            continue
        lines = trajectories(base, record["step"])
        for name in ("search", "math"):
            own = [line for line in lines if line["environment"] == name]
            metrics = {k: v for k, v in record.items() if k.startswith(f"env/{name}/")}
            assert None not in metrics.values()
            assert record[f"env/{name}/share"] == len(own) / len(lines)
            if own:
                rewards = [line["reward"] for line in own]
                assert record[f"env/{name}/critic/rewards/mean"] == pytest.approx(np.mean(rewards))
                right = np.mean([line["reward_parts"]["exact_match"] for line in own])
                assert record[f"env/{name}/reward/exact_match/mean"] == pytest.approx(right)
    assert records(base)[5]["actor/grad_norm"] > 0


def test_each_environment_has_its_held_out_scores(base):
    final = evaluation(base, "evaluate_7.json")
    for suite, names in (
        ("sampled", {"search", "math"}), ("empty_search", {"search"}), ("random_search", {"search"})
    ):  # fmt: skip
        questions = final["questions"][suite]
        assert {row["environment"] for row in questions} == names
        rewards = []
        for name in names:
            own = [row for row in questions if row["environment"] == name]
            assert len(own) == final["summary"][suite][name]["num_questions"] == 3
            reward = [row["brevity"] + (row.get("math", 0.0)) for row in own]
            assert final["summary"][suite][name]["reward"] == pytest.approx(np.mean(reward))
            rewards += reward
        assert final["summary"][suite]["all"]["reward"] == pytest.approx(np.mean(rewards))
    [row] = [
        row
        for row in compute_scores(refreshed(base))
        if (row["suite"], row["data_set"], row["measure"]) == ("sampled", "math", "reward")
    ]
    assert len(row["points"]) == 3  # before and after training, and at the end
    scores = api.load_run(base).scores
    assert scores["math/reward"] == final["summary"]["sampled"]["math"]["reward"]


def refreshed(workdir):
    [run] = open_runs([workdir])
    run.refresh()
    return run


def test_a_killed_run_resumes_bit_for_bit(world, base, tmp_path):
    workdir = killed(base, tmp_path / "run", after=6)
    api.train(configured(world), workdir)
    assert lasting(workdir) == lasting(base)
    assert_same_weights(workdir / "export", base / "export")
    for step in STEPS:
        assert [*map(without_usage, trajectories(workdir, step))] == [
            *map(without_usage, trajectories(base, step))
        ]
    assert evaluation(workdir, "evaluate_7.json") == evaluation(base, "evaluate_7.json")
    # Other weights are another experiment; the same files elsewhere are not.
    config = configured(world)
    other = {name: dict(values) for name, values in config.environments.items()}
    other["math"]["weight"] = 0.5
    config.environments = other
    with pytest.raises(ValueError, match=r"config.environments.math.weight: 0.3 -> 0.5"):
        api.train(config, workdir)
    moved = shutil.copytree(world, tmp_path / "moved")
    api.train(configured(moved), workdir)


def test_a_finished_run_is_evaluated(base, tmp_path, capsys):
    workdir = shutil.copytree(base, tmp_path / "run")
    config = read_config(workdir)
    run = api.evaluate(config, workdir)
    assert "already evaluated with the same settings" in capsys.readouterr().out
    assert run.scores == api.load_run(base).scores
    config.eval.max_tasks = 2
    config.eval.final_suites = ("sampled",)
    run = api.evaluate(config, workdir)
    assert run.scores["search/num_questions"] == run.scores["math/num_questions"] == 2


def test_a_trainer_takes_the_same_steps(world, base, tmp_path):
    source = tmp_path / "warm"
    shutil.copytree(base, source)
    for checkpoint in (source / "checkpoints").iterdir():
        if checkpoint.name.isdigit() and int(checkpoint.name) > 5:
            shutil.rmtree(checkpoint)
    with api.Trainer(configured(world), source) as trainer:
        assert trainer.num_steps_done == 1
        with pytest.raises(ValueError, match="environment ''; expected one of 'search', 'math'"):
            trainer.generate("Who?")
        for name in ("search", "math"):
            task = Task(id="mine", question="Who?", environment=name)
            got = trainer.generate(task, max_tokens=5)
            assert (got.task.environment, got.num_sampled <= 5) == (name, True)
        groups = trainer.rollout(trainer.next_tasks())
        assert {t.task.environment for t in flatten_groups(groups)} == {"search", "math"}
        trainer.update(trainer.compute_advantages(groups))
        assert trainer.finish_step()["env/math/critic/rewards/mean"] is not None
        trainer.step()
        assert trainer.evaluate(("sampled",))["val-aux/math/num_questions/sampled"] == 3
        trainer.export(tmp_path)
    assert_same_weights(tmp_path / "export", base / "export")


def test_chat_and_serve_take_one_environment(base):
    config = read_config(base)
    for name in ("", "code"):
        with pytest.raises(
            ValueError, match=f"--environment is '{name}'; expected one of 'search'"
        ):
            select_environment(config, name)
    components, selected = load_saved_run(base, None, Display(), environment="math")
    assert selected.env.name == "math"
    trajectory, _ = Conversation(components, selected).ask("How many?")
    assert trajectory.task.environment == ""
    served_model = load_model(base, Display(), environment="search", num_rows=1)
    assert served_model.stops == ("</search>", "</answer>")


def test_plan_and_audit_know_all_environments(world, tmp_path, monkeypatch, capsys):
    c = validate(configured(world), needs_data=False)
    target = memory.Target(platform="gpu", num_devices=1, memory_bytes=2**34)
    plan = memory.make_plan(c, read_architecture(c.model.path, ""), target)
    assert plan.fits
    monkeypatch.chdir(tmp_path)
    audit.main([f"--config={mixed_small.__file__}:{world}"])
    figures = json.loads((tmp_path / "audit.json").read_text())
    assert {*figures} == {"search training", "search held-out", "math training", "math held-out"}
    assert "answer in no document" in figures["search training"]
    assert "answer in no document" not in figures["math training"]


def test_a_model_behind_an_endpoint_plays_both(world, tmp_path):
    changes = {
        **{"stages": ("evaluate",), "eval.final_suites": ("greedy",), "policy.name": "openai"},
        **{"policy.openai.model": "m", "rollout.max_response_tokens": 60},
    }

    def answer(request):
        is_math = "coins" in request.json["messages"][-1]["content"]
        text = "Answer: 3" if is_math else "<answer> Ada "
        choice = {"message": {"content": text}, "finish_reason": "stop"}
        return {"choices": [choice], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}

    with served(answer) as server:
        config = configured(world, **changes, **{"policy.openai.url": server.url})
        run = api.evaluate(config, tmp_path)
        stops = {
            "coins" in request.json["messages"][-1]["content"]: request.json.get("stop")
            for request in server.requests
        }
    assert stops == {False: ["</search>", "</answer>"], True: None}
    assert run.scores["search/answered"] == run.scores["math/answered"] == 1.0


@pytest.mark.slow(instead="runtime/test_distributed.py::test_two_processes_take_the_steps_of_one")
def test_two_processes_take_the_steps_of_one(world, tmp_path, quick_compilation):
    changes = SIZES | {
        **{"stages": "('train',)", "num_steps": 1, "eval.suites": "()", "log.trajectories": -1},
        "loss.entropy_coef": 0.1,  # a gradient for any rewards
    }
    del changes["eval.final_suites"]
    for num in (1, 2):
        job = Processes(
            world, tmp_path / str(num), quick_compilation | with_devices(1), num,
            config="configs/mixed_small.py", **changes,
        )  # fmt: skip
        codes, errors = job.wait()
        assert codes == [0] * num, errors
    alone, pair = ([lasting_anywhere(r) for r in records(tmp_path / num)] for num in "12")
    for a, b in zip(alone, pair, strict=True):
        assert_close(a, b, 1e-4)
    alone, pair = (trajectories(tmp_path / num, 1) for num in "12")
    assert [t["token_ids"] for t in alone] == [t["token_ids"] for t in pair]
    assert [t["environment"] for t in pair] == [t["environment"] for t in alone]
    assert {t["environment"] for t in pair} == {"search", "math"}
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4),
        *(load_hf(tmp_path / num / "export") for num in "12"),
    )

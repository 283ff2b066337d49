"""Whole runs on a tiny world: what they leave on disk, and that a restart changes nothing."""

import dataclasses
import gc
import json
import os
import re
import shutil
import subprocess
import sys
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl import run
from jaxrl.builders import components
from jaxrl.builders.fingerprints import compute_fingerprints
from jaxrl.builders.resolved import resolve_names
from jaxrl.envs.base import Outcome, Turn
from jaxrl.envs.search.base import SearchEngine
from jaxrl.extras.view import report
from jaxrl.logs.display import Display
from jaxrl.models.hf_weights import load_hf
from jaxrl.models.layers import HOST_MEMORY
from jaxrl.runtime.checkpoint import restore_params
from jaxrl.training.failures import NothingWorksError
from jaxrl.training.run_state import RunState
from jaxrl.training.update import put_batch
from jaxrl.types import flatten_groups, replace_fields
from tests.helpers import UPDATE_PROGRAMS, build, settings_of
from tests.runs import (
    SIZES,
    assert_same_weights,
    evaluation,
    killed,
    lasting,
    made_for,
    records,
    run_settings,
    trajectories,
)

pytestmark = [pytest.mark.minutes, pytest.mark.usefixtures("quick_compilation", "no_pictures")]

CHECKPOINTS = {"checkpoint.every_steps": 3, "checkpoint.keep": 100}
BASE = {**SIZES, **CHECKPOINTS, "sft.num_steps": 40, "eval.every_steps": 3, "log.trajectories": -1}


@pytest.fixture(scope="module")
def base(tiny_world, tmp_path_factory, quick_compilation):
    """The workdir of a whole run, made by the command in a process of its own."""
    workdir = tmp_path_factory.mktemp("runs") / "base"
    command = [
        *(sys.executable, "-m", "jaxrl.launch"),
        *(f"--config=configs/debug_tiny.py:{tiny_world}", f"--workdir={workdir}"),
        *(f"--config.{key}={value}" for key, value in BASE.items()),
    ]
    environment = os.environ | quick_compilation
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    (workdir / "stdout").write_text(done.stdout)
    return workdir


def play(config, workdir, **parts):
    """Runs in this process, with some of the parts replaced."""
    workdir.mkdir(parents=True, exist_ok=True)
    made = build(config)
    changed, contents = (
        dataclasses.replace(made, **parts),
        compute_fingerprints(resolve_names(config)),
    )
    run.run(settings_of(config), workdir, changed, Display(), contents=contents)
    return made


def test_a_run_leaves_what_it_promises(base):
    config = json.loads((base / "config.json").read_text())
    assert config["sft"]["num_steps"] == 40
    found = records(base)
    assert [(r["stage"], r["step"]) for r in found] == [
        *(("sft", step) for step in range(1, 41)),
        *(("train", step) for step in range(40, 45)),
        ("evaluate", 44),
    ]
    first, *steps, last = found[40:]
    assert "val-core/all/exact_match/empty_search" in last
    assert "val-core/all/exact_match/mean@1" in first
    assert "val-core/two_hop/exact_match/greedy" in first
    for record in steps:
        assert record.keys() >= {
            *("critic/rewards/mean", "reward/exact_match/mean", "response_length/mean"),
            *("actor/pg_loss", "actor/grad_norm", "actor/entropy", "actor/pg_clipfrac"),
            *("num_turns/mean", "num_searches/mean", "outcome/environment_error"),
            *("timing_s/gen", "timing_s/update_actor", "timing_s/step", "perf/throughput"),
        }
    evaluations = ["train_40", "train_43", "train_44", "evaluate_44"]
    assert sorted(path.name for path in (base / "eval").iterdir()) == sorted(
        name + ending for name in evaluations for ending in (".json", ".txt")
    )
    final = json.loads((base / "eval" / "evaluate_44.json").read_text())
    assert final["summary"].keys() == {"sampled", "greedy", "empty_search"}
    assert len(final["questions"]["greedy"]) == 8
    written = [trajectories(base, step) for step in range(41, 45)]
    assert [len(lines) for lines in written] == [16] * 4
    for step, lines in zip(steps, written, strict=True):
        rewards = [line["reward"] for line in lines]
        assert step["critic/rewards/mean"] == pytest.approx(np.mean(rewards))


def test_its_output_ends_in_before_and_after_and_the_report(base):
    """Scores, controls, then the page: what a newcomer looks for."""
    *_, scores, controls, page = (base / "stdout").read_text().splitlines()
    number = r"\d\.\d{3}"
    before_and_after = rf"sampled {number} -> {number}, greedy {number} -> {number}"
    assert re.fullmatch(rf"reward: {before_and_after}; exact match: {before_and_after}", scores)
    control = f"search finds nothing {number}"
    assert re.fullmatch(rf"controls, reward: {control}; exact match: {control}", controls)
    assert page == f"report: {base / 'report.html'}"


def test_a_step_in_the_middle_is_evaluated_and_exported(base, tiny_world, tmp_path):
    """Its scores are those that training saw at that step, and nothing else of the run changes."""
    workdir = tmp_path / "run"
    shutil.copytree(base, workdir)
    kept = ("metrics.jsonl", "config.json", "config_history.jsonl", "environment.json", "export",
            "eval", "trajectories", "checkpoints")  # fmt: skip
    before = {
        path: path.read_bytes()
        for name in kept
        for path in [workdir / name, *(workdir / name).rglob("*")]
        if path.is_file()
    }
    config = run_settings(tiny_world, **BASE)
    config.stages = ("evaluate",)
    parts = build(config)
    given, known = settings_of(config), compute_fingerprints(resolve_names(config))
    run.evaluate_step(given, workdir, parts, Display(), lambda: False, known, 43)
    new, old = (
        json.loads((workdir / "eval" / f"{name}.json").read_text())
        for name in ("evaluate_43", "train_43")
    )
    assert (new["step"], new["weights_step"]) == (43, 43)
    for suite in old["summary"]:
        assert new["summary"][suite] == old["summary"][suite]
        assert new["questions"][suite] == old["questions"][suite]
    assert {path: path.read_bytes() for path in before} == before
    exported = load_hf(workdir / "steps" / "43" / "export")
    _, params = restore_params(workdir / "checkpoints", jax.tree.map(np.zeros_like, exported), 43)
    jax.tree.map(np.testing.assert_array_equal, exported, params)


def test_the_export_is_the_last_checkpoint(base, tiny_world):
    checkpointer = run.Checkpointer(base / "checkpoints", keep=100)
    exported = load_hf(base / "export")
    shapes = jax.tree.map(np.zeros_like, exported)
    _, saved = checkpointer.restore(lambda _: {"params": shapes})
    jax.tree.map(np.testing.assert_array_equal, exported, saved["params"])
    source, copy = tiny_world / "model" / "config.json", base / "export" / "config.json"
    assert copy.read_bytes() == source.read_bytes()
    checkpointer.close()


def test_progress_is_told_line_by_line(base):
    lines = (base / "stdout").read_text().splitlines()
    [last] = [line for line in lines if line.startswith("train 4/4 ")]
    for name in (
        "reward ",
        "held-out ",
        "KL ",
        "entropy ",
        "grad norm ",
        "lr ",
        "tokens/s ",
        " left",
    ):
        assert name in last
    assert all(len(line) < 250 and "\x1b" not in line for line in lines)
    assert any(line.startswith("evaluate sampled: reward ") for line in lines)


def test_training_works(base):
    found = records(base)
    assert found[39]["sft/loss"] < 0.4 * found[0]["sft/loss"]
    steps = found[41:45]
    assert all(record["actor/num_skipped"] == 0 for record in steps)
    assert steps[-1]["actor/num_updates"] == 4
    assert any(record["rollout/informative_share"] > 0 for record in steps)


def test_sampler_and_trainer_agree(base):
    gaps = [r["rollout_corr/logprob_diff_max"] for r in records(base)[41:45]]
    gaps = [gap for gap in gaps if gap is not None]  # a step without signal measures nothing
    assert max(gaps) < 1e-4
    assert max(gaps) > 0  # it was measured


def test_each_program_is_compiled_once(base, tiny_world):
    found = records(base)
    for stage in (found[:40], found[41:45]):
        counts = [r["perf/num_compilations/update"] for r in stage]
        assert counts == sorted(counts)
        assert counts[-1] <= UPDATE_PROGRAMS
    # The sampler's when they are first needed, each at most once.
    counts = [r["perf/num_compilations/sampler"] for r in found[41:45]]
    functions = build(run_settings(tiny_world, **BASE)).sampler.functions
    assert counts == sorted(counts)
    assert counts[-1] <= sum(len(function.variants) for function in functions)


@pytest.mark.parametrize(
    ("after", "stage"),
    [
        pytest.param(39, "sft", marks=pytest.mark.slow(instead="::[43]")),
        pytest.param(40, "sft", marks=pytest.mark.slow(instead="::[43]")),
        (43, "train"),
    ],
)
def test_a_restart_changes_nothing(base, tiny_world, tmp_path, capsys, after, stage):
    workdir = killed(base, tmp_path / "restarted", after=after)
    play(run_settings(tiny_world, **BASE), workdir)
    assert f"resuming after {stage} " in capsys.readouterr().out
    assert lasting(workdir) == lasting(base)
    assert_same_weights(workdir / "export", base / "export")
    last = "evaluate_44.json"
    assert evaluation(workdir, last) == evaluation(base, last)


@pytest.mark.slow(instead="test_evaluate.py::test_an_evaluation_that_is_on_disk")
def test_a_finished_run_does_nothing_again(base, tiny_world, tmp_path, monkeypatch, capsys):
    workdir = tmp_path / "again"
    shutil.copytree(base, workdir)
    # The rest tells times, of this start too.
    parts = ("checkpoints", "export", "trajectories", "eval", "config.json")

    def contents():
        files = [file for part in parts for file in [workdir / part, *(workdir / part).rglob("*")]]
        return {file: file.read_bytes() for file in files if file.is_file()}

    before = contents()
    monkeypatch.setattr("jaxrl.evaluate.run_suites", lambda *_: pytest.fail("it evaluates again"))
    play(run_settings(tiny_world, **BASE), workdir)
    assert contents() == before
    assert lasting(workdir) == lasting(base)
    said = f"already evaluated with the same settings: {workdir / 'eval' / 'evaluate_44.txt'}"
    assert said in capsys.readouterr().out.replace("\n", "")


def test_evaluating_takes_the_newest_checkpoint(base, tiny_world, tmp_path):
    workdir = tmp_path / "evaluated"
    shutil.copytree(base, workdir)
    (workdir / "eval" / "evaluate_44.json").unlink()
    play(run_settings(tiny_world, **BASE, stages=("evaluate",)), workdir)
    assert evaluation(workdir, "evaluate_44.json") == evaluation(base, "evaluate_44.json")


def continued(base, tiny_world, **changes):
    """Reinforcement learning alone, from the weights that the base run ended with."""
    export = str(base / "export")
    usual = {"model.path": export, "stages": ("train",), "eval.suites": ("sampled",)}
    return run_settings(tiny_world, **usual, **changes)


@pytest.mark.slow(instead="test_controllers_in_runs.py::test_a_killed_run_goes_on_with_its_states")
def test_a_restart_with_a_reference_policy_changes_nothing(base, tiny_world, tmp_path):
    # The same four tasks at every step and in every evaluation: had the sampler kept anything of
    # an evaluation's prompts, the run that was not stopped would differ.
    tasks = tmp_path / "tasks.jsonl"
    lines = (tiny_world / "questions_train.jsonl").read_text().splitlines()
    tasks.write_text("\n".join(lines[:4]) + "\n")
    config = continued(
        base,
        tiny_world,
        **{"tasks.train.source": str(tasks), "tasks.eval.source": str(tasks)},
        **{"kl.coef": 0.05, "kl.anchor": "ref", "num_steps": 3, "eval.every_steps": 1},
        **{"optimizer.num_epochs": 2, "optimizer.num_minibatches": 2},
        **{"checkpoint.every_steps": 2, "checkpoint.keep": 100},
    )
    whole = tmp_path / "whole"
    play(config, whole)
    found = records(whole)
    assert [record.get("actor/num_updates") for record in found] == [None, 4, 8, 12]
    assert found[1]["actor/kl_loss"] >= 0
    assert found[3]["actor/kl_loss"] > 1e-6
    assert max(r["rollout_corr/logprob_diff_max"] for r in found[1:]) < 1e-4
    assert max(record["perf/num_compilations/update"] for record in found[1:]) <= UPDATE_PROGRAMS
    workdir = killed(whole, tmp_path / "restarted", after=2)
    play(config, workdir)
    assert lasting(workdir) == lasting(whole)
    assert_same_weights(workdir / "export", whole / "export")


def live_bytes():
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


@pytest.mark.slow(instead="sampling/test_schedule.py::test_who_holds_memory_in_each_phase")
def test_the_update_has_the_memory_for_itself(tiny_world, tmp_path, monkeypatch):
    config = run_settings(tiny_world, **{"sft.num_steps": 2, "num_steps": 2})
    made, measured = build(config), []
    before = live_bytes()  # the sampler's tables among them, but neither its weights nor its cache

    def measuring(*args):
        measured.append(live_bytes() - before)
        return put_batch(*args)

    save = run.Checkpointer.save

    def save_and_wait(checkpointer, *args, **kwargs):
        save(checkpointer, *args, **kwargs)
        checkpointer.wait()  # on a CPU a save under way holds the very arrays that it writes

    monkeypatch.setattr(run.Checkpointer, "save", save_and_wait)
    for module in ("sft", "training.minibatches"):
        monkeypatch.setattr(f"jaxrl.{module}.put_batch", measuring)
    run.run(settings_of(config), tmp_path, made, Display())
    leaves = jax.tree.leaves(made.model.architecture.abstract_params())
    weights = 4 * sum(leaf.size for leaf in leaves)  # float32; the state has two moments as well
    assert len(measured) == 4
    for held in measured:  # the batch of the step before is the rest
        assert 3 * weights <= held < 3.5 * weights
    assert live_bytes() - before < 0.5 * weights


class Flaky(SearchEngine):
    """Fails for every other query, with a text that no file can hold."""

    def __init__(self, engine):
        self._engine = self.engine = engine

    def run(self, query):
        if zlib.crc32(query.encode()) % 2:
            raise ConnectionError(f"no answer to {query!r} \ud800\x1b[2J")
        return self._engine.run(query)


def test_environment_errors_teach_nothing(base, tiny_world, tmp_path, monkeypatch, capsys):
    build_search = components.build_search
    monkeypatch.setattr(components, "build_search", lambda *given: Flaky(build_search(*given)))
    play(continued(base, tiny_world, num_steps=2), tmp_path)
    told = capsys.readouterr().err
    for record in records(tmp_path)[1:]:
        lines = trajectories(tmp_path, record["step"])
        failed = [line for line in lines if line["outcome"] == "environment_error"]
        scored = [line for line in lines if line["outcome"] != "environment_error"]
        assert 0 < len(failed) < len(lines)
        number = f"{len(failed)} of {len(lines)} episodes ended in an environment error; the first"
        assert f"{number}: ConnectionError: no answer to" in told
        assert record["outcome/environment_error"] == len(failed) / len(lines)
        assert record["critic/rewards/mean"] == pytest.approx(
            np.mean([line["reward"] for line in scored])
        )
        assert all(line["advantage"] == 0 for line in failed)
        errors = [line["turns"][-1]["error"] for line in failed]
        assert all(error.startswith("ConnectionError: no answer to") for error in errors)
        assert all("\N{REPLACEMENT CHARACTER}" in error for error in errors)
        for group in {line["group_id"] for line in scored}:
            flatten_groups = [line for line in scored if line["group_id"] == group]
            mean = np.mean([line["reward"] for line in flatten_groups])
            for line in flatten_groups:
                assert line["advantage"] == pytest.approx(line["reward"] - mean, abs=1e-6)
    summary = json.loads((tmp_path / "eval" / "train_2.json").read_text())["summary"]
    means = summary["sampled"]["all"]
    assert 0 < means["environment_errors"] < means["num_questions"]
    assert means["unscored_questions"] == means["environment_errors"]


def test_steps_of_only_environment_errors_change_nothing_and_end_the_run(
    base, tiny_world, tmp_path, capsys, no_pictures, monkeypatch
):
    changes = {"optimizer.weight_decay": 0.1, "rollout.max_failed_steps": 3, "num_steps": 2}
    config = continued(base, tiny_world, **changes)
    parts = build(config)
    is_mended = False

    def all_failed(*args, **kwargs):
        made = parts.rollout(*args, **kwargs)
        lost = {"outcome": Outcome.ENVIRONMENT_ERROR, "reward": 0.0, "reward_parts": {}}
        turns = (Turn(text="<search>q</search>", error="no route to host"),)
        if is_mended:
            return made
        lost["turns"] = turns
        return replace_fields(
            made, **{name: [value] * len(flatten_groups(made)) for name, value in lost.items()}
        )

    def go_on(workdir):
        failing = dataclasses.replace(made_for(config, parts), rollout=all_failed)
        run.run(settings_of(config), workdir, failing, Display())

    workdir = tmp_path / "run"
    workdir.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(report, "write_report_or_warn", no_pictures)
        go_on(workdir)
    for record in records(workdir)[1:]:
        assert record["outcome/environment_error"] == 1
        assert record["actor/num_updates"] == record["actor/num_learned"] == 0
        assert record["critic/rewards/mean"] is None
    assert_same_weights(workdir / "export", base / "export")
    told = capsys.readouterr().err
    reason = "ended in an environment error; the first: no route to host"
    assert told.count(f"warning: each of the 16 episodes of this batch {reason}") == 2
    assert told.count(f"no question could be scored, because every episode {reason}") == 2
    assert told.count("NOTHING WAS LEARNED in the 2 steps of the train stage") == 1
    assert told.splitlines()[-1].startswith("warning: NOTHING WAS LEARNED")
    assert "nan" not in told
    page = (workdir / "report.html").read_text()
    assert "nothing learned" in page
    assert "no route to host" in page
    # One more step is one too many; so is it at a restart, until the reason is gone.
    config.num_steps = 3
    for stage_step in (2, 2):
        with pytest.raises(NothingWorksError, match=r"batches in a row .*: no route to host\."):
            go_on(workdir)
        assert [record["step"] for record in records(workdir)] == [0, 1, 2]
        assert f"resuming after train {stage_step}" in capsys.readouterr().out
    is_mended = True
    go_on(workdir)
    assert [record["outcome/environment_error"] for record in records(workdir)[3:]] == [0]
    # Nor is an evaluation a result of which every episode failed.
    # The engine draws as the stages that it was made for do.
    is_mended, config.stages, config.eval.final_suites = False, ("evaluate",), ("sampled",)
    with pytest.raises(NothingWorksError, match=r"of the evaluation \(.*: no route to host\."):
        go_on(workdir)
    assert records(workdir)[-1]["stage"] == "evaluate"
    assert (workdir / "eval" / "evaluate_3.json").exists()


@pytest.mark.minutes
def test_moments_may_be_short_and_in_host_memory_and_activations_too(
    tiny_world, tmp_path, monkeypatch
):
    keys = {"moments_dtype": "bfloat16", "offload": True}
    config = run_settings(
        tiny_world,
        **{"stages": ("sft",), "sft.num_steps": 2, "model.remat": "offload"},
        **{f"sft.optimizer.{key}": value for key, value in keys.items()},
    )
    states, end = [], RunState.end_stage

    def watched(session, state):
        states.append(state)
        return end(session, state)

    monkeypatch.setattr(RunState, "end_stage", watched)
    run.run(settings_of(config), tmp_path, build(config), Display())
    [state] = states
    kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state.opt_state)}
    assert kinds == {HOST_MEMORY}
    first = optax.tree.get(state.opt_state, "mu")
    assert {leaf.dtype for leaf in jax.tree.leaves(first)} == {jnp.dtype("bfloat16")}
    assert int(state.num_updates) == 2

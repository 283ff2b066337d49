"""Complete runs in a tiny world: what they leave on disk, and that a restart changes nothing."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest

from jaxrl import run
from jaxrl.builders.fingerprints import compute_fingerprints
from jaxrl.builders.resolved import resolve_names
from jaxrl.envs.base import Outcome, Turn
from jaxrl.extras.view import report
from jaxrl.logs.display import Display
from jaxrl.models.hf_weights import load_hf
from jaxrl.runtime.checkpoint import MANIFEST, list_steps, restore_params
from jaxrl.training.failures import AllEpisodesFailedError
from jaxrl.training.packing import MAX_SIZES
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

BASE = {
    **{**SIZES, "sft.num_steps": 40, "eval.every_steps": 3, "log.trajectories": -1},
    **{"checkpoint.every_steps": 3, "checkpoint.keep": 100, "model.remat": "full"},
    "log.trackers": ("tensorboard", "tests.extending.my_tracker.SampleFiles"),
}


@pytest.fixture(scope="module")
def base(tiny_world, tmp_path_factory, quick_compilation):
    """The workdir of a complete run of the command, in a separate process."""
    workdir = tmp_path_factory.mktemp("runs") / "base"
    command = [
        *(sys.executable, "-m", "jaxrl.launch"),
        *(f"--config=configs/debug_tiny.py:{tiny_world}", f"--workdir={workdir}"),
        *(f"--config.{key}={value}" for key, value in BASE.items()),
    ]
    environment = os.environ | quick_compilation
    process = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert process.returncode == 0, process.stderr
    return workdir


@pytest.fixture(scope="module")
def parts(tiny_world, quick_compilation):
    """The components of the run's configuration, which the runs in this process share."""
    return build(run_settings(tiny_world, **BASE))


def play(config, workdir, parts):
    contents = compute_fingerprints(resolve_names(config))
    run.run(settings_of(config), workdir, made_for(config, parts), Display(), contents=contents)


def contents_of(workdir, names):
    """Return the content of all files that have one of these names or are in such a folder."""
    files = [path for name in names for path in [workdir / name, *(workdir / name).rglob("*")]]
    return {path: path.read_bytes() for path in files if path.is_file()}


def test_a_run_writes_metrics_evaluations_and_trajectories(base):
    config = json.loads((base / "config.json").read_text())
    assert config["sft"]["num_steps"] == 40
    written = records(base)
    assert [(r["stage"], r["step"]) for r in written] == [
        *(("sft", step) for step in range(1, 41)),
        *(("train", step) for step in range(40, 45)),
        ("evaluate", 44),
    ]
    first, *steps, last = written[40:]
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
    for record in steps:
        lines = trajectories(base, record["step"])
        assert len(lines) == 16
        rewards = [line["reward"] for line in lines]
        assert record["critic/rewards/mean"] == pytest.approx(np.mean(rewards))


def test_trackers_get_the_samples_of_training_and_evaluations(base):
    *_, step, last = (json.loads(p.read_text()) for p in sorted((base / "samples").iterdir()))
    assert [*step] == ["stage", "step", "samples/train", "samples/sampled", "samples/greedy"]
    rows, lines = step["samples/train"], trajectories(base, step["step"])
    for name, field in (("response", "generated_text"), ("reward", "reward")):
        assert [row[name] for row in rows] == [line[field] for line in lines]
    final = json.loads((base / "eval" / "evaluate_44.json").read_text())
    for suite, questions in final["questions"].items():
        responses = [row["response"] for row in last[f"samples/{suite}"]]
        assert responses == [question["response"] for question in questions]


def test_training_works(base):
    written = records(base)
    assert written[39]["sft/loss"] < 0.4 * written[0]["sft/loss"]
    steps = written[41:45]
    assert all(record["actor/num_skipped"] == 0 for record in steps)
    assert steps[-1]["actor/num_updates"] == 4
    assert any(record["rollout/informative_share"] > 0 for record in steps)


def test_sampler_and_trainer_agree(base):
    gaps = [r["rollout_corr/logprob_diff_max"] for r in records(base)[41:45]]
    gaps = [gap for gap in gaps if gap is not None]  # a step without signal measures nothing
    assert max(gaps) < 1e-4
    assert max(gaps) > 0  # it was measured


def test_each_program_is_compiled_once(base, parts):
    written = records(base)
    for stage, step in ((written[:40], 40), (written[41:45], 44)):
        counts = [r["perf/num_compilations/update"] for r in stage]
        assert counts == sorted(counts)
        position = base / "checkpoints" / str(step) / "position" / "metadata"
        sizes = json.loads(position.read_text(encoding="utf-8"))["compiled_sizes"]["sizes"]
        assert 1 <= len(sizes) <= MAX_SIZES
        assert counts[-1] <= UPDATE_PROGRAMS * len(sizes)
    # The sampler's when they are first needed, each at most once.
    counts = [r["perf/num_compilations/sampler"] for r in written[41:45]]
    assert counts == sorted(counts)
    assert counts[-1] <= sum(len(function.variants) for function in parts.sampler.jitted_functions)


def test_the_export_is_the_last_checkpoint(base, tiny_world):
    exported = load_hf(base / "export")
    _, saved = restore_params(base / "checkpoints", jax.tree.map(np.zeros_like, exported), 44)
    jax.tree.map(np.testing.assert_array_equal, exported, saved)
    source, copy = tiny_world / "model" / "config.json", base / "export" / "config.json"
    assert copy.read_bytes() == source.read_bytes()


@pytest.mark.parametrize(
    ("after", "stage"),
    [
        pytest.param(39, "sft", marks=pytest.mark.slow(instead="::[43]")),
        pytest.param(40, "sft", marks=pytest.mark.slow(instead="::[43]")),
        (43, "train"),
    ],
)
def test_a_restart_changes_nothing(
    base, parts, tiny_world, tmp_path, capsys, monkeypatch, after, stage
):
    workdir = killed(base, tmp_path / "restarted", after=after)
    config = run_settings(tiny_world, **BASE)
    play(config, workdir, parts)
    assert f"resuming after {stage} " in capsys.readouterr().out
    assert lasting(workdir) == lasting(base)
    assert_same_weights(workdir / "export", base / "export")
    last = "evaluate_44.json"
    assert evaluation(workdir, last) == evaluation(base, last)
    # A finished run repeats nothing.
    names = ("checkpoints", "export", "trajectories", "eval", "config.json")
    before = contents_of(workdir, names)
    monkeypatch.setattr("jaxrl.evaluate.run_suites", lambda *_: pytest.fail("it evaluates again"))
    play(config, workdir, parts)
    assert contents_of(workdir, names) == before
    assert lasting(workdir) == lasting(base)


def test_only_damaged_checkpoints_are_refused(base, parts, tiny_world, tmp_path):
    workdir = killed(base, tmp_path / "run", after=44)
    for step in list_steps(workdir / "checkpoints"):
        (workdir / "checkpoints" / str(step) / MANIFEST).unlink()
    before = contents_of(workdir, (".",))
    with pytest.raises(ValueError, match=rf"checkpoint 44: {MANIFEST}: missing or unreadable; "):
        play(run_settings(tiny_world, **BASE), workdir, parts)
    assert contents_of(workdir, (".",)) == before


def test_any_checkpoint_can_be_evaluated(base, parts, tiny_world, tmp_path):
    """The scores are those of the run, and nothing else of the run changes."""
    workdir = tmp_path / "run"
    shutil.copytree(base, workdir)
    (workdir / "eval" / "evaluate_44.json").unlink()
    config = run_settings(tiny_world, **BASE, stages=("evaluate",))
    play(config, workdir, parts)
    assert evaluation(workdir, "evaluate_44.json") == evaluation(base, "evaluate_44.json")

    names = ("metrics.jsonl", "config.json", "config_history.jsonl", "environment.json", "export",
             "eval", "trajectories", "checkpoints")  # fmt: skip
    before = contents_of(workdir, names)
    fingerprints = compute_fingerprints(resolve_names(config))
    arguments = (made_for(config, parts), Display(), lambda: False, fingerprints, 43)
    run.evaluate_step(settings_of(config), workdir, *arguments)
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


def test_steps_of_only_environment_errors_change_nothing_and_end_the_run(
    parts, tiny_world, tmp_path, capsys, no_pictures, monkeypatch
):
    changes = {
        **{"stages": ("train",), "num_steps": 2, "eval.suites": ("sampled",)},
        **{"optimizer.weight_decay": 0.1, "rollout.max_failed_steps": 3},
    }
    config = run_settings(tiny_world, **{**BASE, **changes})
    is_reachable = False

    def fail(*args, **kwargs):
        groups = parts.rollout(*args, **kwargs)
        if is_reachable:
            return groups
        lost = {
            **{"outcome": Outcome.ENVIRONMENT_ERROR, "reward": 0.0, "reward_parts": {}},
            "turns": (Turn(text="<search>q</search>", error="no route to host"),),
        }
        count = len(flatten_groups(groups))
        return replace_fields(groups, **{name: [value] * count for name, value in lost.items()})

    def resume(workdir):
        failing = dataclasses.replace(made_for(config, parts), rollout=fail)
        run.run(settings_of(config), workdir, failing, Display())

    workdir = tmp_path / "run"
    workdir.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(report, "write_report_or_warn", no_pictures)
        resume(workdir)
    for record in records(workdir)[1:]:
        assert record["outcome/environment_error"] == 1
        assert record["actor/num_updates"] == record["actor/num_learned"] == 0
        assert record["critic/rewards/mean"] is None
    assert_same_weights(workdir / "export", tiny_world / "model")
    warnings = capsys.readouterr().err
    assert warnings.count("NOTHING WAS LEARNED in the 2 steps of the train stage") == 1
    assert "no route to host" in warnings
    assert "nan" not in warnings
    page = (workdir / "report.html").read_text()
    assert "nothing learned" in page
    assert "no route to host" in page
    # One more step is one too many; so is it at a restart, until the reason is gone.
    config.num_steps = 3
    for _ in range(2):
        with pytest.raises(
            AllEpisodesFailedError, match=r"batches in a row .*: no route to host\."
        ):
            resume(workdir)
        assert [record["step"] for record in records(workdir)] == [0, 1, 2]
    is_reachable = True
    resume(workdir)
    assert [record["outcome/environment_error"] for record in records(workdir)[3:]] == [0]
    # An evaluation of which every episode failed is no result.
    is_reachable, config.stages, config.eval.final_suites = False, ("evaluate",), ("sampled",)
    with pytest.raises(AllEpisodesFailedError, match=r"of the evaluation \(.*: no route to host\."):
        resume(workdir)
    assert records(workdir)[-1]["stage"] == "evaluate"
    assert (workdir / "eval" / "evaluate_3.json").exists()

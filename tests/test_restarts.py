"""Runs that are stopped, killed, moved to another mesh or ended early, in a tiny world."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from functools import partial

import jax
import numpy as np
import pytest

from jaxrl import run
from jaxrl.builders.fingerprints import compute_fingerprints
from jaxrl.builders.resolved import resolve_names
from jaxrl.logs.display import Display
from jaxrl.models.hf_weights import load_hf
from jaxrl.runtime import resume
from jaxrl.runtime.checkpoint import list_steps, restore_params
from jaxrl.runtime.preemption import EXIT_INTERRUPTED, Interrupted
from tests.helpers import build, settings_of, with_devices
from tests.one_size import take_the_largest
from tests.runs import (
    SIZES,
    assert_same_weights,
    evaluation,
    killed,
    lasting,
    records,
    run_settings,
    trajectories,
    without_usage,
)

pytestmark = [pytest.mark.minutes, pytest.mark.usefixtures("quick_compilation", "no_pictures")]

NUM_SFT, NUM_TRAIN = 24, 6
SETTINGS = {
    **SIZES,
    "sft.num_steps": NUM_SFT,
    "num_steps": NUM_TRAIN,
    "checkpoint.every_steps": 2,
    "checkpoint.keep_best": 1,
    "eval.every_steps": 2,
    "eval.suites": ("sampled",),
    "eval.final_suites": ("sampled",),
    "log.trajectories": -1,
}
LAST = NUM_SFT + NUM_TRAIN
settings = partial(run_settings, **SETTINGS)


@pytest.fixture(scope="module")
def base(tiny_world, tmp_path_factory, quick_compilation, no_pictures):
    """The workdir of an undisturbed run."""
    workdir = tmp_path_factory.mktemp("runs") / "base"
    assert play(settings(tiny_world, **{"checkpoint.keep": 100}), workdir)
    return workdir


def files(workdir, folder):
    return sorted(path.name for path in (workdir / folder).iterdir())


def assert_same_run(workdir, base):
    """Compare all that two runs leave, except for clocks."""
    assert lasting(workdir) == lasting(base)
    assert_same_weights(workdir / "export", base / "export")
    for folder in ("eval", "trajectories"):
        assert files(workdir, folder) == files(base, folder)
    for name in files(base, "eval"):
        assert evaluation(workdir, name) == evaluation(base, name)
    for step in range(NUM_SFT + 1, LAST + 1):
        got, wanted = trajectories(workdir, step), trajectories(base, step)
        assert [*map(without_usage, got)] == [*map(without_usage, wanted)]
    checkpoints = (workdir / "checkpoints").iterdir()
    assert all(path.name.isdecimal() for path in checkpoints), "unfinished files stay"
    # What the command writes, and `run.run` without plots does not.
    of_command = {"config.json", "config_history.jsonl", ".lock", "report.html"}
    assert {*files(workdir, ".")} - of_command == {*files(base, ".")}
    best = position(base, LAST)["best"]
    assert position(workdir, LAST)["best"] == best
    assert {best["step"], LAST} <= set(list_steps(workdir / "checkpoints"))


def position(workdir, step):
    return json.loads((workdir / "checkpoints" / str(step) / "position" / "metadata").read_text())


def play(config, workdir, should_stop=lambda: False):
    """Run in this process; return False if it was stopped."""
    workdir.mkdir(exist_ok=True, parents=True)
    try:
        fingerprints = compute_fingerprints(resolve_names(config))
        arguments = (build(config), Display(), should_stop, fingerprints)
        run.run(settings_of(config), workdir, *arguments)
    except Interrupted:
        return False
    return True


def after_records(workdir, count):
    """Return a condition: so many records are written, and the next step or evaluation runs."""
    return lambda: num_lines(workdir) == count


def evaluating(workdir, step):
    """Return a condition: a step is done, and its evaluation runs."""
    return (workdir / "trajectories" / f"step_{step:06d}.jsonl").exists


def num_lines(workdir):
    file = workdir / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


@pytest.mark.slow(instead="test_api.py::test_an_interrupt_saves_and_the_same_call_goes_on")
def test_a_run_that_is_stopped_repeatedly_equals_one_that_is_not(
    base, tiny_world, tmp_path, capsys
):
    config, workdir = settings(tiny_world), tmp_path / "run"
    stops = [
        (after_records(workdir, 9), 9, "sft 9"),  # in the supervised stage
        # In the evaluation before the first step.
        (after_records(workdir, NUM_SFT), NUM_SFT, "train 0"),
        (after_records(workdir, NUM_SFT + 2), NUM_SFT + 1, "train 1"),  # in a rollout; not due
        (evaluating(workdir, NUM_SFT + 2), NUM_SFT + 2, "train 2"),  # in an evaluation
        # In a rollout right after a checkpoint.
        (after_records(workdir, NUM_SFT + 5), NUM_SFT + 4, "train 4"),
        (after_records(workdir, LAST + 1), LAST, f"train {NUM_TRAIN}"),  # in the evaluate stage
    ]
    for should_stop, step, label in stops:
        assert not play(config, workdir, should_stop)
        assert f"stopped: saved after {label};" in capsys.readouterr().out
        assert list_steps(workdir / "checkpoints")[-1] == step
        pending = position(workdir, step)["record"]
        assert (pending is not None) == (step == NUM_SFT + 2)
    assert play(config, workdir)
    out = capsys.readouterr().out
    assert f"resuming after train {NUM_TRAIN}" in out
    assert_same_run(workdir, base)


def launch(tiny_world, workdir, environment, output, **changes):
    """Start the command as the leader of its own process group."""
    command = [
        *(sys.executable, "-m", "jaxrl.launch"),
        *(f"--config=configs/debug_tiny.py:{tiny_world}", f"--workdir={workdir}"),
        *(f"--config.{key}={value}" for key, value in {**SETTINGS, **changes}.items()),
    ]
    return subprocess.Popen(
        command,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,
    )


def wait_for(condition, process, *, seconds=300):
    """Wait until a condition holds; return False if the process ended before."""
    deadline = time.monotonic() + seconds
    while not condition():
        if process.poll() is not None:
            return False
        assert time.monotonic() < deadline
        time.sleep(0.002)
    return True


@pytest.mark.slow(instead="test_launch.py::test_a_run_that_ends_early_says_how")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_the_run_resumes(base, tiny_world, tmp_path, quick_compilation, number):
    workdir = killed(base, tmp_path / "run", after=NUM_SFT + 2)
    assert num_lines(workdir) > NUM_SFT + 4
    file = tmp_path / "log"
    with file.open("w") as output:
        process = launch(tiny_world, workdir, os.environ | quick_compilation, output)
        # Resumed (the log is cut back), then one step later, whose checkpoint is not due.
        assert wait_for(lambda: num_lines(workdir) == NUM_SFT + 3, process)
        assert wait_for(lambda: num_lines(workdir) == NUM_SFT + 4, process)
        process.send_signal(number)
        assert process.wait(timeout=120) == EXIT_INTERRUPTED == 75
    log = file.read_text()
    assert f"{number.name}: stopping; send it again to exit immediately" in log
    assert "Traceback" not in log
    newest = list_steps(workdir / "checkpoints")[-1]
    assert newest >= NUM_SFT + 3
    assert play(settings(tiny_world), workdir)
    assert_same_run(workdir, base)


def phase(workdir):
    """Return what a run is doing, according to its files."""
    checkpoints = workdir / "checkpoints"
    if (checkpoints / "saving").exists() or any(checkpoints.glob("*.orbax-checkpoint-tmp")):
        return "save"
    file = workdir / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    if not lines or len(lines) < NUM_SFT:
        return "sft"
    steps = [
        int(re.sub(r"\D", "", path.name)) for path in workdir.glob("trajectories/step_*.jsonl")
    ]
    done = len(lines) + (len(lines) == NUM_SFT) - 1  # the record before the first step is no step
    if max(steps, default=0) > done:
        return "evaluation"
    return "export" if done >= LAST else "rollout or update"


def kill_in(wanted, tiny_world, workdir, environment, rng, output):
    """Kill a run at some moment of a phase; return False if it ended before."""
    process = launch(tiny_world, workdir, environment, output)
    try:
        if wanted == "start":
            time.sleep(rng.uniform(0, 6))
        else:
            lines = num_lines(workdir)
            wait_for(lambda: num_lines(workdir) != lines, process)  # it cuts the log, then resumes
            if not wait_for(lambda: phase(workdir) == wanted, process):
                return False
            if wanted == "rollout or update":
                # The share of the time from one record to the next trajectories.
                steps = [
                    r for r in records(workdir) if "timing_s/step" in r and r["stage"] == "train"
                ]
                time.sleep(rng.random() * (steps[-1]["timing_s/step"] if steps else 0.5))
            else:
                time.sleep(rng.uniform(0, 0.01))
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return True


@pytest.mark.slow(instead="test_runs.py::test_a_restart_changes_nothing")
@pytest.mark.parametrize("seed", range(5))
def test_runs_killed_in_every_phase(base, tiny_world, tmp_path, quick_compilation, seed):
    """Kill a run in one phase after the other, then compare it with one that was not killed."""
    phases = ["sft", "rollout or update", "save", "evaluation", "rollout or update", "start"]
    phases = [*phases, "rollout or update", "save", "evaluation", "save"]
    wanted = [phases[(seed * 4 + index) % len(phases)] for index in range(4)]
    environment, rng = os.environ | quick_compilation, random.Random(seed)
    workdir, has_warm_start = tmp_path / "run", "sft" not in wanted
    if has_warm_start:
        killed(base, workdir, after=NUM_SFT)
    with (tmp_path / "log").open("w") as output:
        for each in wanted:
            killed_in = None
            while killed_in != each:
                if kill_in(each, tiny_world, workdir, environment, rng, output):
                    # Killed a little late it may be in another phase, from which it resumes.
                    killed_in = each if each == "start" else phase(workdir)
                else:  # it ended before that phase: start over
                    assert_same_run(workdir, base)
                    shutil.rmtree(workdir)
                    if has_warm_start:
                        killed(base, workdir, after=NUM_SFT)
    assert play(settings(tiny_world), workdir)
    assert "Traceback" not in (tmp_path / "log").read_text()
    assert_same_run(workdir, base)


def test_files_beyond_the_checkpoint_are_removed(tmp_path):
    stay = ["trajectories/step_000004.jsonl", "eval/train_4.json", "eval/evaluate_4.json"]
    stay += ["eval/notes.json", "trajectories/step_x.jsonl", "eval/mine_9.json", "train_9.json"]
    gone = ["trajectories/step_000005.jsonl", "eval/train_6.json", "eval/evaluate_9.txt"]
    gone += ["eval/.train_4.json.unfinished", "trajectories/.step_000004.jsonl.unfinished"]
    for name in [*stay, *gone]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    resume.delete_later_output(tmp_path, 4)
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*")} == set(stay)


def saved_params(workdir, step):
    shapes = jax.tree.map(np.zeros_like, load_hf(workdir / "export"))
    return restore_params(workdir / "checkpoints", shapes, step)[1]


def test_patience_ends_a_run_with_its_best_weights(warm_model, tiny_world, tmp_path, monkeypatch):
    """The second step is worse than the first: it is the last, and is undone."""
    run_suites = run.run_suites

    def score(run_state, stage, suites):
        metrics, errors = run_suites(run_state, stage, suites)
        accuracy = 0.5 if run_state.progress.stage_step == 1 else 0.25
        return metrics | {"val-core/all/exact_match/mean@1": accuracy}, errors

    monkeypatch.setattr(run, "run_suites", score)
    take_the_largest(monkeypatch)
    changes = {
        **{"stages": ("train",), "model.path": warm_model, "num_steps": 3},
        **{"eval.every_steps": 1, "eval.patience": 1, "checkpoint.every_steps": 100},
        **{"checkpoint.keep": 1, "optimizer.lr": 1e-2, "rollout.async_level": 1},
        "loss.correction.level": "token",
        "loss.entropy_coef": 0.01,  # a gradient whatever is sampled
    }
    workdir = tmp_path / "run"
    assert play(settings(tiny_world, **changes), workdir)
    assert [record["step"] for record in records(workdir)] == [0, 1, 2]
    end = position(workdir, 2)
    assert (end["stopped_early"], end["best"]["step"]) == (True, 1)
    exported = load_hf(workdir / "export")
    jax.tree.map(np.testing.assert_array_equal, exported, saved_params(workdir, 1))
    jax.tree.map(np.testing.assert_array_equal, exported, saved_params(workdir, 2))
    # Three evaluations of 8 questions, two steps of 16 trajectories and a third sampled ahead.
    assert end["ledger"]["num_trajectories"] == 3 * 8 + 3 * 16


@pytest.mark.slow(instead="runtime/test_checkpoint.py::test_a_round_trip_is_exact")
def test_a_run_resumes_on_other_meshes(tiny_world, tmp_path, quick_compilation, no_pictures):
    # AdamW's first step is as long for a gradient of rounding's size as for any other, unless
    # epsilon is larger than that.
    small = {"sft.optimizer.epsilon": 1e-3, "optimizer.epsilon": 1e-3}
    base = tmp_path / "base"
    assert play(settings(tiny_world, **small, num_steps=2, stages=("sft", "train")), base)
    # Devices, their mesh, and the number of records after which the run moves: in the middle of
    # the supervised stage, then in the middle of reinforcement learning.
    moves = (
        (2, {"data": 1, "fsdp": 2}, 9),
        (1, {"data": 1, "fsdp": 1}, NUM_SFT + 2),
        (4, {"data": 1, "fsdp": 2, "context": 2}, None),
    )
    workdir, changes = tmp_path / "run", {"stages": "('sft', 'train')", "num_steps": 2, **small}
    for num_devices, mesh, num_records in moves:
        environment = os.environ | quick_compilation
        environment |= with_devices(num_devices)
        sizes = {f"mesh.{name}": size for name, size in mesh.items()}
        with (tmp_path / "log").open("a") as output:
            process = launch(tiny_world, workdir, environment, output, **changes, **sizes)
            if num_records is not None:
                has_enough = lambda count=num_records: num_lines(workdir) >= count  # noqa: E731
                assert wait_for(has_enough, process)
                process.send_signal(signal.SIGTERM)
            process.wait()
        log = (tmp_path / "log").read_text()
        assert process.returncode == (0 if num_records is None else EXIT_INTERRUPTED), log
        assert "damaged" not in log
    got, wanted = records(workdir), records(base)[: NUM_SFT + 3]
    assert [(r["stage"], r["step"]) for r in got] == [(r["stage"], r["step"]) for r in wanted]
    for resumed, whole in zip(got[:NUM_SFT], wanted, strict=False):
        assert resumed["sft/loss"] == pytest.approx(whole["sft/loss"], rel=1e-5)
        assert resumed["sft/grad_norm"] == pytest.approx(whole["sft/grad_norm"], rel=2e-5)
        assert resumed["sft/lr"] == whole["sft/lr"] > 0
    assert got[0]["sft/grad_norm"] == pytest.approx(wanted[0]["sft/grad_norm"], rel=1e-6)
    # A draw may differ where it is as close as rounding, and so does all that comes after it.
    pairs = [
        pair
        for step in (NUM_SFT + 1, NUM_SFT + 2)
        for pair in zip(trajectories(workdir, step), trajectories(base, step), strict=True)
    ]
    equal = [pair for pair in pairs if pair[0]["token_ids"] == pair[1]["token_ids"]]
    assert len(equal) >= 3 / 4 * len(pairs)
    for resumed, whole in equal:
        logprobs = (resumed["rollout_logprobs"], whole["rollout_logprobs"])
        np.testing.assert_allclose(*logprobs, atol=0.01)
    assert [record["actor/num_updates"] for record in got[NUM_SFT + 1 :]] == [1, 2]
    assert max(r["rollout_corr/logprob_diff_max"] for r in got[NUM_SFT + 1 :]) < 1e-4

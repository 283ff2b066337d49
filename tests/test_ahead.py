"""Rollouts one step ahead of updates, on a tiny world: by whose weights, and through restarts."""

import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from jaxrl import run
from jaxrl.data import serialization
from jaxrl.data.stream import Stream
from jaxrl.logs.display import Display
from jaxrl.runtime.checkpoint import list_steps
from jaxrl.runtime.preemption import Interrupted
from jaxrl.sampling.interfaces import SamplingConfig, Seeds
from jaxrl.training.collect import draw
from jaxrl.training.settings import STAGES
from jaxrl.types import flatten_groups
from jaxrl.utils.callables import UserCodeError
from tests.helpers import build, settings_of, with_devices
from tests.runs import (
    SIZES,
    assert_close,
    assert_same_weights,
    lasting,
    lasting_anywhere,
    made_for,
    records,
    run_settings,
    saved_progress,
    trajectories,
    without_usage,
)

pytestmark = [
    pytest.mark.minutes,
    pytest.mark.usefixtures("quick_compilation", "no_pictures", "one_size"),
]

NUM_SFT, NUM_TRAIN = 16, 4
LAST = NUM_SFT + NUM_TRAIN
SETTINGS = {
    **SIZES,
    "stages": ("sft", "train"),
    "sft.num_steps": NUM_SFT,
    "num_steps": NUM_TRAIN,
    "rollout.async_level": 1,
    "loss.correction.level": "token",
    "checkpoint.every_steps": 1,
    "checkpoint.keep": 100,
    "eval.every_steps": 2,
    "eval.suites": ("sampled",),
    "log.trajectories": -1,
}


def settings(tiny_world, **changes):
    return run_settings(tiny_world, **{**SETTINGS, **changes})


def play(config, workdir, should_stop=lambda: False, change=lambda parts: parts):
    """Runs in this process; False when it was stopped."""
    workdir.mkdir(exist_ok=True, parents=True)
    try:
        run.run(settings_of(config), workdir, change(build(config)), Display(), should_stop)
    except Interrupted:
        return False
    return True


@pytest.fixture(scope="module")
def base(tiny_world, tmp_path_factory, quick_compilation, no_pictures, one_size):
    """The workdir of a run that nothing disturbed."""
    workdir = tmp_path_factory.mktemp("runs") / "base"
    assert play(settings(tiny_world), workdir)
    return workdir


def as_of(base, workdir, step):
    """A copy of a run as it was when killed some time after the checkpoint of a step."""
    shutil.copytree(base, workdir)
    shutil.rmtree(workdir / "export")
    for other in list_steps(workdir / "checkpoints"):
        if other > step:
            shutil.rmtree(workdir / "checkpoints" / str(other))
    return workdir


def position(workdir, step):
    return json.loads((workdir / "checkpoints" / str(step) / "position" / "metadata").read_text())


def train_records(workdir):
    return [r for r in records(workdir) if r["stage"] == "train" and "actor/grad_norm" in r]


def assert_same_run(workdir, base):
    assert lasting(workdir) == lasting(base)
    assert_same_weights(workdir / "export", base / "export")
    for step in range(NUM_SFT + 1, LAST + 1):
        got, wanted = trajectories(workdir, step), trajectories(base, step)
        assert [*map(without_usage, got)] == [*map(without_usage, wanted)]


def test_the_weights_before_an_update_sample_what_the_next_one_learns_from(
    base, tiny_world, tmp_path
):
    config, parts = settings(tiny_world), build(settings(tiny_world))
    for done in (1, 2):
        workdir = as_of(base, tmp_path / str(done), NUM_SFT + done - 1)
        if done > 1:
            _, params = saved_progress(parts, workdir)  # before the update of this step
        else:
            sft = run_settings(tiny_world, **{**SETTINGS, "stages": ("sft",)})
            _, params = saved_progress(made_for(sft, parts), workdir)
        saved = position(base, NUM_SFT + done)
        ahead = serialization.groups_from_json(saved["prefetched"]["groups"])
        parts.engine.set_weights(params)
        size = config.rollout.tasks_per_step
        draws, _ = draw(Stream(parts.tasks, seed=config.seed), saved["items_taken"], size)
        sampling = SamplingConfig(
            group_size=config.rollout.group_size,
            temperature=config.rollout.temperature,
            top_p=config.rollout.top_p,
            seeds=Seeds(seed=config.seed, stage=STAGES.index("train"), step=NUM_SFT + done),
            policy_version=done - 1,
        )
        wanted = parts.rollout(draws, sampling)
        parts.engine.clear()
        for one, other in zip(flatten_groups(ahead), flatten_groups(wanted), strict=True):
            np.testing.assert_array_equal(one.token_ids, other.token_ids)
            np.testing.assert_array_equal(one.rollout_logprobs, other.rollout_logprobs)
            assert {*one.policy_versions[one.loss_mask]} == {done - 1}
    assert position(base, LAST)["prefetched"] is None
    found = train_records(base)
    assert [record["rollout/lag"] for record in found] == [0, 1, 1, 1]
    gaps = [record["rollout_corr/logprob_diff_mean"] for record in found]
    assert gaps[0] < 1e-5
    assert min(gaps[1:]) > 1e-3


@pytest.mark.parametrize(
    "done",
    [
        pytest.param(1, marks=pytest.mark.slow(instead="::[2]")),
        2,
        pytest.param(3, marks=pytest.mark.slow(instead="::[2]")),
    ],
)
def test_a_run_that_was_killed_goes_on_as_if_it_had_not_been(base, tiny_world, tmp_path, done):
    workdir = as_of(base, tmp_path / "run", NUM_SFT + done)
    assert play(settings(tiny_world), workdir)
    assert_same_run(workdir, base)


@pytest.mark.slow(
    instead="test_controllers_in_runs.py"
    "::test_a_run_that_is_stopped_while_it_samples_goes_on_with_its_states"
)
def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(base, tiny_world, tmp_path):
    config = settings(tiny_world, **{"checkpoint.every_steps": 100})
    workdir = as_of(base, tmp_path / "run", NUM_SFT)
    is_asked = False

    def asking(parts):
        """The run is asked to stop in the middle of a rollout that is one step ahead."""

        def rollout(draws, sampling, **others):
            nonlocal is_asked
            is_asked = sampling.seeds.step == NUM_SFT + 2
            return parts.rollout(draws, sampling, **others)

        return dataclasses.replace(parts, rollout=rollout)

    # The evaluation of step 2 is given up, the step itself is saved, with what is ahead.
    assert not play(config, workdir, lambda: is_asked, asking)
    newest = list_steps(workdir / "checkpoints")[-1]
    assert newest == NUM_SFT + 2
    assert position(workdir, newest)["record"]
    assert position(workdir, newest)["prefetched"]
    # Then right after that evaluation: nothing is sampled before the run ends.
    count = NUM_SFT + 1 + 2
    file = workdir / "metrics.jsonl"
    assert not play(config, workdir, lambda: file.read_bytes().count(b"\n") == count)
    assert len(records(workdir)) == count
    assert not position(workdir, newest)["record"]
    assert play(config, workdir)
    assert_same_run(workdir, base)


def launch(tiny_world, workdir, environment, output, **changes):
    settings = {**SETTINGS, **changes}
    command = [sys.executable, "-m", "tests.one_size", f"--workdir={workdir}"]
    command += [f"--config=configs/debug_tiny.py:{tiny_world}"]
    command += [f"--config.{key}={value}" for key, value in settings.items()]
    return subprocess.Popen(
        command,
        env=os.environ | environment,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


@pytest.mark.slow(instead="test_ahead.py::test_a_run_that_was_killed_goes_on_as_if_it_had_not_been")
def test_a_kill_at_any_time_costs_only_time(base, tiny_world, tmp_path, quick_compilation):
    workdir, rng = as_of(base, tmp_path / "run", NUM_SFT), random.Random(0)
    file = workdir / "metrics.jsonl"
    log = tmp_path / "log"
    for count in (NUM_SFT + 1, NUM_SFT + 2):
        with log.open("a") as output:
            process = launch(tiny_world, workdir, quick_compilation, output)
            while not NUM_SFT < file.read_bytes().count(b"\n") <= count:  # it cuts the log first
                assert process.poll() is None, log.read_text()
                time.sleep(0.002)
            while file.read_bytes().count(b"\n") < count:
                assert process.poll() is None, log.read_text()
                time.sleep(0.002)
            time.sleep(rng.uniform(0, 0.2))
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert play(settings(tiny_world), workdir)
    assert_same_run(workdir, base)


@pytest.mark.slow(instead="runtime/test_sharding.py::test_two_devices_compute_what_one_does")
def test_devices_that_only_sample_change_no_number(base, tiny_world, tmp_path, quick_compilation):
    workdir, log = tmp_path / "run", tmp_path / "log"
    environment = quick_compilation | with_devices(2)
    with log.open("w") as output:
        process = launch(tiny_world, workdir, environment, output, **{"mesh.rollout_devices": 1})
        assert process.wait(timeout=300) == 0, log.read_text()
    for one, other in zip(records(base), records(workdir), strict=True):
        assert_close(lasting_anywhere(one), lasting_anywhere(other), 1e-4)


@pytest.mark.slow(
    instead="test_costs_in_runs.py::test_a_step_that_draws_on_is_ended_and_what_it_cost_is_counted"
)
def test_a_failure_ahead_is_told_after_the_step_is_saved(base, tiny_world, tmp_path):
    config = settings(tiny_world)
    workdir = as_of(base, tmp_path / "run", NUM_SFT + 1)

    def failing(parts):
        def rollout(draws, sampling, **others):
            if sampling.seeds.step == NUM_SFT + 2 and sampling.group_size > 1:  # no evaluation
                raise UserCodeError("mine failed.")
            return parts.rollout(draws, sampling, **others)

        return dataclasses.replace(parts, rollout=rollout)

    with pytest.raises(UserCodeError, match="mine failed"):
        play(config, workdir, change=failing)
    assert list_steps(workdir / "checkpoints")[-1] == NUM_SFT + 2
    assert position(workdir, NUM_SFT + 2)["prefetched"] is None
    assert lasting(workdir) == lasting(base)[: NUM_SFT + 3]
    # Mended, it samples that step's groups by the weights it has.
    assert play(config, workdir)
    assert [record["rollout/lag"] for record in train_records(workdir)] == [0, 1, 0, 1]

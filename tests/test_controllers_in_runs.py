"""Runs whose methods keep states: stopped and started again, they are as if they never stopped."""

import dataclasses
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest

from configs import ares, debug_tiny, passk
from jaxrl.builders.validation import validate
from jaxrl.config import default_config
from jaxrl.data.serialization import to_json
from jaxrl.logs.display import Display
from jaxrl.models.hf_weights import load_hf
from jaxrl.run import run
from jaxrl.runtime.preemption import Interrupted
from jaxrl.training.collect import StepSampler, collect
from jaxrl.training.controllers import BUCKETS, Controllers, update_controllers
from jaxrl.training.failures import FailureCounter
from jaxrl.training.rewards import add_entropy_reward
from jaxrl.types import Group, flatten_groups
from tests.episodes import NumberedTasks, make_trajectory
from tests.helpers import build, method_of, settings_of, with_devices
from tests.runs import (
    JOB_SETTINGS,
    SIZES,
    Processes,
    Sampler,
    assert_close,
    base_config,
    killed,
    lasting,
    lasting_anywhere,
    records,
    saved_progress,
    warm_start,
)

pytestmark = pytest.mark.usefixtures("quick_compilation", "no_pictures")

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def source(tiny_world, cache_folder, quick_compilation):
    return warm_start(tiny_world, cache_folder)


@pytest.fixture(scope="module")
def sampler(tiny_world, source):
    return Sampler(base_config(tiny_world, source))


def configured(world, source, set_method, **changes):
    config = base_config(world, source)
    set_method(config)
    steps = {"num_steps": 4, "checkpoint.every_steps": 1, "checkpoint.keep": 100}
    config.update_from_flattened_dict({**steps, **changes})
    validate(config)
    return config


CARRYING = {
    "filter.name": "varied",
    "filter.carry_over": True,
    "filter.tasks_per_batch": 3,
    "filter.skip_solved": True,
    "filter.skip_entropy": 10.0,
    "kl.second_chance": True,
    "shaping.bootstrap_tasks": 5,
    "optimizer.num_minibatches": 2,
}


def assert_same_end(config, components, workdir, wanted):
    assert lasting(workdir) == lasting(wanted)
    jax.tree.map(
        np.testing.assert_array_equal, load_hf(workdir / "export"), load_hf(wanted / "export")
    )
    one, other = (saved_progress(components, x)[0] for x in (workdir, wanted))
    assert one.controllers == other.controllers
    assert one.items_taken == other.items_taken
    assert without_latencies(one.buffered_groups) == without_latencies(other.buffered_groups)


def without_latencies(groups):
    """Leftover groups as they are saved, but for what the clock said."""
    saved = [to_json(trajectory) for group in groups for trajectory in group.trajectories]
    turns = [[{**turn, "latency_s": 0, "records": ()} for turn in one["turns"]] for one in saved]
    return [{**one, "turns": its} for one, its in zip(saved, turns, strict=True)]


@pytest.fixture(scope="module")
def ares_run(tiny_world, source, sampler, tmp_path_factory):
    config = configured(tiny_world, source, ares.set_method, **CARRYING)
    components = sampler.for_config(config)
    workdir = tmp_path_factory.mktemp("ares")
    run(settings_of(config), workdir, components, Display())
    return config, components, workdir


@pytest.mark.minutes
@pytest.mark.usefixtures("one_size")
def test_every_state_is_in_every_record(ares_run):
    _, components, workdir = ares_run
    before, *steps = records(workdir)
    names = Controllers.init(components.method).metrics().keys()
    for record in (before, *steps):
        assert record.keys() >= names
        assert record["controller/threshold/value"] > 0  # known since the pass before the start
        assert sum(record[f"controller/buckets/{name}"] for name in BUCKETS) >= 5
    assert any(record["filter/surplus_groups"] for record in steps)  # for the restarts below
    # The KL term is in the loss, and in no reward.
    assert all("reward/kl/mean" not in record and "actor/kl_loss" in record for record in steps)
    for name in ("threshold", "buckets", "coefficients", "kl"):  # all of them move
        states = {tuple(x for key, x in r.items() if f"/{name}/" in key) for r in steps}
        assert len(states) > 2, name
    progress, _ = saved_progress(components, workdir)
    kept = {name: x for name, x in steps[-1].items() if name.startswith("controller/")}
    assert progress.controllers.metrics() == kept


@pytest.mark.minutes
@pytest.mark.usefixtures("one_size")
@pytest.mark.parametrize("after", [pytest.param(1, marks=pytest.mark.slow(instead="::[2]")), 2])
def test_a_killed_run_goes_on_with_its_states(ares_run, tmp_path, after):
    config, components, wanted = ares_run
    workdir = killed(wanted, tmp_path / "killed", after=after)
    run(settings_of(config), workdir, components, Display())
    assert_same_end(config, components, workdir, wanted)


@pytest.mark.minutes
@pytest.mark.usefixtures("one_size")
def test_a_run_that_is_stopped_while_it_samples_goes_on_with_its_states(ares_run, tmp_path):
    config, components, wanted = ares_run
    calls = []

    def should_stop():
        # Asked before every chunk: in the middle of the third step.
        calls.append(1)
        lines = tmp_path / "stopped" / "metrics.jsonl"
        num_records = len(lines.read_text().splitlines()) if lines.exists() else 0
        return num_records == 3 and len(calls) % 5 == 0

    workdir = tmp_path / "stopped"
    workdir.mkdir()
    with pytest.raises(Interrupted):
        run(settings_of(config), workdir, components, Display(), should_stop)
    assert len(records(workdir)) == 3
    run(settings_of(config), workdir, components, Display())
    assert_same_end(config, components, workdir, wanted)


@pytest.mark.minutes
@pytest.mark.usefixtures("one_size")
def test_a_schedule_of_k_is_continued(tiny_world, source, sampler, tmp_path):
    """k hangs on the step of the stage alone, so a restart changes nothing."""
    changes = {"num_steps": 2, "advantage.pass_at_k.k_schedule": ((0, 2), (1, 1))}
    config = configured(tiny_world, source, passk.set_method, **changes)
    components = sampler.for_config(config)
    whole = tmp_path / "whole"
    whole.mkdir()
    run(settings_of(config), whole, components, Display())
    assert [record.get("advantage/k") for record in records(whole)] == [None, 2, 1]
    workdir = killed(whole, tmp_path / "killed", after=1)
    run(settings_of(config), workdir, components, Display())
    assert_same_end(config, components, workdir, whole)


# Several processes decide alike.


def decisions():
    """What is decided from trajectories, which all processes gather in the same order."""
    config = default_config()
    ares.set_method(config)
    config.update_from_flattened_dict(
        {"rollout.tasks_per_step": 3, "filter.name": "varied", "filter.carry_over": True}
    )

    def roll_out(draws, sampling, **options):
        return [
            Group(trajectories=tuple(map(partial(by_chance, draw), range(4)))) for draw in draws
        ]

    def by_chance(draw, sample):
        rng = np.random.default_rng([draw.stream_index, sample])
        one = make_trajectory(sample_index=sample, length=20)
        values = rng.random(20, np.float32) * one.loss_mask
        right = bool(rng.integers(2))
        changed = {"rollout_entropies": values, "is_correct": right, "reward": float(right)}
        return dataclasses.replace(one, task=draw.task, **changed)

    method, failures = method_of(config), FailureCounter(limit=0, log=print, num_batches=0)
    controllers, leftover, taken, found = Controllers.init(method), [], 0, []
    for _ in range(3):
        collected = collect(
            StepSampler(rollout=roll_out, sampling=None),
            NumberedTasks(7),
            method,
            num_tasks_taken=taken,
            buffered_groups=leftover,
            controllers=controllers,
            add_divergences=list,
            failures=failures,
        )
        leftover, taken = collected.buffered_groups, collected.num_tasks_taken
        controllers, groups = update_controllers(
            controllers, collected.groups, collected.sampled_stats, method, None
        )
        shaped = flatten_groups(add_entropy_reward(groups, controllers, method.shaping))
        found.append(
            {
                "tasks": [t.task_id for t in shaped],
                "rewards": [t.reward for t in shaped],
                "controllers": dataclasses.asdict(controllers),
                "metrics": collected.metrics,
            }
        )
    return json.loads(json.dumps(found))


def test_another_process_decides_the_same():
    """Nothing hangs on the order of a set or on where objects lie in memory."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.test_controllers_in_runs"],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONHASHSEED": "12345"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    here = decisions()
    assert json.loads(done.stdout.splitlines()[-1]) == here
    assert len(here[-1]["controllers"]["buckets"]["buckets"]) > 4


SHARED = {
    **SIZES,
    **{"num_steps": 2, "stages": ("train",), "eval.suites": (), "checkpoint.every_steps": 9},
    **{"optimizer.lr": 1e-4, "shaping.entropy_reward": True, "shaping.bootstrap_tasks": 4},
    **{"kl.coef": 0.05, "kl.controller": "budget", "kl.low_factor": 0.5},
    **{"filter.name": "varied", "filter.varied.metric": "seq_reward", "filter.carry_over": True},
    **{"filter.tasks_per_batch": 6, "filter.max_batches": 0},
}


ROWS, PIECES = {"mesh.data": 2}, {"mesh.data": 1, "mesh.context": 2}


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param(
            ROWS,
            marks=pytest.mark.slow(
                instead="runtime/test_distributed.py::test_two_processes_take_the_steps_of_one"
            ),
            id="rows",
        ),
        pytest.param(
            PIECES,
            marks=pytest.mark.slow(
                instead="runtime/test_sharding.py::test_two_devices_compute_what_one_does"
            ),
            id="pieces",
        ),
    ],
)
def test_two_processes_have_the_states_of_one(
    tiny_world, source, tmp_path, quick_compilation, mesh
):
    """Whatever is measured, decided and learnt is the same, however many processes share it.

    Each has some of the rows, or a piece of every one.
    """
    changes = SHARED | {"model.path": source}
    config = debug_tiny.get_config(str(tiny_world))
    config.update_from_flattened_dict(JOB_SETTINGS | changes)
    (tmp_path / "1").mkdir()
    run(settings_of(config), tmp_path / "1", build(config), Display())
    environment = quick_compilation | with_devices(1)
    job = Processes(tiny_world, tmp_path / "2", environment, **changes | mesh)
    codes, errors = job.wait(400)
    assert codes == [0, 0], errors
    one, two = (list(map(lasting_anywhere, records(tmp_path / str(num)))) for num in (1, 2))
    assert [record["step"] for record in one] == [record["step"] for record in two] == [0, 1, 2]
    for a, b in zip(one, two, strict=True):
        assert any(name.startswith("controller/coefficients/") for name in a)
        assert_close(a, b, 1e-3)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4),
        *(load_hf(tmp_path / str(num) / "export") for num in (1, 2)),
    )


if __name__ == "__main__":
    print(json.dumps(decisions()))

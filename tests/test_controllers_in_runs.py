"""Runs whose methods have states: killed or stopped, they resume with the same ones."""

from pathlib import Path

import jax
import numpy as np
import pytest

from configs import ares, debug_tiny
from jaxrl.builders.validation import validate
from jaxrl.data.serialization import serialize_trajectory
from jaxrl.logs.display import Display
from jaxrl.models.hf_weights import load_hf
from jaxrl.objectives.shaping import BUCKETS
from jaxrl.run import run
from jaxrl.runtime.preemption import Interrupted
from jaxrl.training.controllers import Controllers
from tests.helpers import build, settings_of, with_devices
from tests.runs import (
    JOB_SETTINGS,
    SIZES,
    Processes,
    Sampler,
    assert_close,
    assert_same_weights,
    base_config,
    killed,
    lasting,
    lasting_anywhere,
    records,
    saved_progress,
)

pytestmark = pytest.mark.usefixtures("quick_compilation", "no_pictures")

ROOT = Path(__file__).parents[1]


SETTINGS = {
    "num_steps": 4,
    "checkpoint.every_steps": 1,
    "checkpoint.keep": 100,
    "filter.name": "varied",
    "filter.carry_over": True,
    "filter.tasks_per_batch": 3,
    "filter.skip_solved": True,
    "filter.skip_entropy": 10.0,
    "kl.second_chance": True,
    "shaping.bootstrap_tasks": 5,
    "optimizer.num_minibatches": 2,
}


@pytest.fixture(scope="module")
def ares_run(tiny_world, warm_model, tmp_path_factory):
    """Configuration, components and workdir of an undisturbed run."""
    config = base_config(tiny_world, warm_model)
    ares.set_method(config)
    config.update_from_flattened_dict(SETTINGS)
    validate(config)
    components = Sampler(base_config(tiny_world, warm_model)).for_config(config)
    workdir = tmp_path_factory.mktemp("ares")
    run(settings_of(config), workdir, components, Display())
    return config, components, workdir


def assert_same_end(components, workdir, expected):
    assert lasting(workdir) == lasting(expected)
    assert_same_weights(workdir / "export", expected / "export")
    got, wanted = (saved_progress(components, folder)[0] for folder in (workdir, expected))
    assert got.controllers == wanted.controllers
    assert got.items_taken == wanted.items_taken
    assert without_latencies(got.buffered_groups) == without_latencies(wanted.buffered_groups)


def without_latencies(groups):
    """Return buffered groups as they are saved, without what depends on the clock."""
    trajectories = [
        serialize_trajectory(trajectory) for group in groups for trajectory in group.trajectories
    ]
    for trajectory in trajectories:
        trajectory["turns"] = [
            {**turn, "latency_s": 0, "records": ()} for turn in trajectory["turns"]
        ]
    return trajectories


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
    last = {name: x for name, x in steps[-1].items() if name.startswith("controller/")}
    assert progress.controllers.metrics() == last


@pytest.mark.minutes
@pytest.mark.usefixtures("one_size")
@pytest.mark.parametrize("after", [pytest.param(1, marks=pytest.mark.slow(instead="::[2]")), 2])
def test_a_killed_run_resumes_with_its_states(ares_run, tmp_path, after):
    config, components, whole = ares_run
    workdir = killed(whole, tmp_path / "killed", after=after)
    run(settings_of(config), workdir, components, Display())
    assert_same_end(components, workdir, whole)


@pytest.mark.minutes
@pytest.mark.usefixtures("one_size")
def test_a_run_that_is_stopped_while_it_samples_resumes_with_its_states(ares_run, tmp_path):
    config, components, whole = ares_run
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
    assert_same_end(components, workdir, whole)


SHARED = {
    **SIZES,
    **{"num_steps": 2, "stages": ("train",), "eval.suites": (), "checkpoint.every_steps": 9},
    **{"optimizer.lr": 1e-4, "shaping.entropy_reward": True, "shaping.bootstrap_tasks": 4},
    **{"kl.coef": 0.05, "kl.controller": "budget", "kl.low_factor": 0.5},
    **{"filter.name": "varied", "filter.key": "seq_reward", "filter.carry_over": True},
    **{"filter.tasks_per_batch": 6, "filter.max_batches": 0},
}


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param(
            {"mesh.data": 2},
            marks=pytest.mark.slow(
                instead="runtime/test_distributed.py::test_two_processes_take_the_steps_of_one"
            ),
            id="rows",
        ),
        pytest.param(
            {"mesh.data": 1, "mesh.context": 2},
            marks=pytest.mark.slow(
                instead="runtime/test_sharding.py::test_four_devices_compute_what_one_does"
            ),
            id="pieces of rows",
        ),
    ],
)
def test_two_processes_have_the_states_of_one(
    tiny_world, warm_model, tmp_path, quick_compilation, mesh
):
    """All that is measured, decided and learned is the same, by one process or two."""
    changes = SHARED | {"model.path": warm_model}
    config = debug_tiny.get_config(str(tiny_world))
    config.update_from_flattened_dict(JOB_SETTINGS | changes)
    (tmp_path / "1").mkdir()
    run(settings_of(config), tmp_path / "1", build(config), Display())
    environment = quick_compilation | with_devices(1)
    job = Processes(tiny_world, tmp_path / "2", environment, **changes | mesh)
    codes, errors = job.wait(400)
    assert codes == [0, 0], errors
    single, pair = (list(map(lasting_anywhere, records(tmp_path / str(num)))) for num in (1, 2))
    assert [record["step"] for record in single] == [record["step"] for record in pair] == [0, 1, 2]
    for a, b in zip(single, pair, strict=True):
        assert any(name.startswith("controller/coefficients/") for name in a)
        assert_close(a, b, 1e-3)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4),
        *(load_hf(tmp_path / str(num) / "export") for num in (1, 2)),
    )

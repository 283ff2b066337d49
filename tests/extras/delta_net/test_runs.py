"""Complete runs of a hybrid: agreement of sampler and trainer, and resume."""

import pytest

from jaxrl.models.registry import read_architecture
from tests.extras.delta_net.models import write_hybrid_world
from tests.runs import (
    assert_same_weights,
    evaluation,
    killed,
    lasting,
    records,
    run_settings,
    trajectories,
    without_usage,
)
from tests.test_restarts import play

pytestmark = [pytest.mark.minutes, pytest.mark.usefixtures("quick_compilation", "one_size")]

SETTINGS = {
    "sft.num_steps": 40,
    "num_steps": 3,
    "checkpoint.every_steps": 1,
    "checkpoint.keep": 100,
    "eval.every_steps": 2,
    "eval.suites": ("sampled",),
    "eval.final_suites": ("sampled", "greedy"),
    "rollout.async_level": 1,
}


@pytest.fixture(scope="module")
def world(tiny_world, tmp_path_factory):
    return write_hybrid_world(tiny_world, tmp_path_factory.mktemp("hybrid") / "world")


@pytest.fixture(scope="module")
def base(world, tmp_path_factory, quick_compilation, one_size, no_pictures):
    """A run that samples one step ahead, with its settings."""
    workdir = tmp_path_factory.mktemp("runs") / "base"
    config = run_settings(world, **SETTINGS)
    assert play(config, workdir)
    return config, workdir


def test_sampler_and_trainer_agree(world, tmp_path):
    """Without sampling a step ahead, the sampler has the weights that the step starts from."""
    changes = {"rollout.async_level": 0, "eval.every_steps": 0, "eval.final_suites": ()}
    workdir = tmp_path / "run"
    assert play(run_settings(world, **SETTINGS | changes), workdir)
    steps = [record for record in records(workdir) if "num_searches/mean" in record]
    assert len(steps) == SETTINGS["num_steps"]
    for record in steps:
        assert record["rollout_corr/logprob_diff_max"] < 1e-4
        assert record["num_searches/mean"] > 0.2
        assert record["actor/grad_norm"] > 0


@pytest.mark.parametrize("step", [25, 41])
def test_a_killed_run_resumes_bit_for_bit(base, tmp_path, step):
    config, workdir = base
    copy = killed(workdir, tmp_path / "run", after=step)
    assert play(config, copy)
    assert lasting(copy) == lasting(workdir)
    assert_same_weights(copy / "export", workdir / "export")
    for number in range(41, 44):
        got, wanted = trajectories(copy, number), trajectories(workdir, number)
        assert [*map(without_usage, got)] == [*map(without_usage, wanted)]
    for file in (workdir / "eval").iterdir():
        assert evaluation(copy, file.name) == evaluation(workdir, file.name)


def test_an_export_has_the_format_of_its_source(base, world):
    _, workdir = base
    export = workdir / "export"
    assert read_architecture(export) == read_architecture(world / "model")
    names = ("config.json", "tokenizer.json")
    assert all((export / n).read_bytes() == (world / "model" / n).read_bytes() for n in names)

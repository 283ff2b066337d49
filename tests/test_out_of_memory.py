"""Updates that run out of device memory: they are repeated with smaller micro-batches."""

import jax
import numpy as np
import pytest

from jaxrl import api
from jaxrl.training.update import GradientStep, UpdateStep
from jaxrl.types import flatten_groups
from tests.helpers import relative_distance
from tests.runs import METHOD_SIZES, base_config

pytestmark = [
    pytest.mark.minutes,
    pytest.mark.usefixtures("quick_compilation", "one_size", "no_pictures"),
]

ROW_TOKENS = METHOD_SIZES["rollout.max_total_tokens"]
OUT_OF_MEMORY = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory: 1 GiB")


class Device:
    """A device with memory for `max_rows` rows in a micro-batch, which counts the attempts."""

    max_rows = 1

    def __init__(self):
        self.tried = []
        self._compute = GradientStep.__call__

    def compute(self, step, params, batch, packed):
        self.tried.append(batch.token_ids[0].size // ROW_TOKENS)
        if self.tried[-1] > self.max_rows:
            raise OUT_OF_MEMORY
        return self._compute(step, params, batch, packed)


@pytest.fixture
def device(monkeypatch):
    device = Device()
    monkeypatch.setattr(GradientStep, "__call__", lambda *args: device.compute(*args))
    return device


def open_trainer(world, workdir, micro_rows):
    config = base_config(world)
    # With a small epsilon, Adam turns the rounding of gradients near zero into whole steps.
    changes = {"optimizer.micro_rows": micro_rows, "optimizer.epsilon": 1e-3, "kl.coef": 0.01}
    config.update_from_flattened_dict({"num_steps": 9, "checkpoint.every_steps": 1} | changes)
    return api.Trainer(config, workdir)


def copy_params(trainer):
    return jax.tree.map(np.array, trainer._learner.state.params)


def take_step(trainer):
    """Take a step in which every other sample counts as right; return its record."""
    groups = trainer.collect()
    advantages = np.resize([1.0, -1.0], len(flatten_groups(groups)))
    record = trainer.update(api.set_advantages(groups, advantages))
    trainer.finish_step()
    return record


def test_an_update_is_repeated_with_half_the_rows(tiny_world, tmp_path, device, capsys):
    with open_trainer(tiny_world, tmp_path / "run", 0) as trainer:
        before, record = copy_params(trainer), take_step(trainer)
        after = copy_params(trainer)
    assert device.tried == [5, 2, 1]  # 5 rows of 112 tokens on a CPU
    assert (record["perf/micro_rows"], record["actor/num_updates"]) == (1, 1)
    assert capsys.readouterr().out.count("is out of memory; repeating the update with") == 2
    # A resumed run starts with the smaller micro-batches.
    with open_trainer(tiny_world, tmp_path / "run", 0) as trainer:
        assert take_step(trainer)["perf/micro_rows"] == 1
    assert device.tried[3:] == [1]
    # With more memory, the same samples give the same update.
    device.max_rows = 5
    with open_trainer(tiny_world, tmp_path / "larger", 5) as trainer:
        larger = take_step(trainer)
        changes, expected = (
            jax.tree.map(np.subtract, params, before) for params in (after, copy_params(trainer))
        )
    assert device.tried[4:] == [5]
    assert relative_distance(changes, expected) < 1e-4
    for name in ("critic/rewards/mean", "actor/pg_loss", "actor/grad_norm", "actor/kl_loss"):
        assert record[name] == pytest.approx(larger[name], rel=1e-4, abs=1e-6)


def test_a_configured_number_of_rows_is_kept(tiny_world, tmp_path, device):
    with (
        open_trainer(tiny_world, tmp_path, 4) as trainer,
        pytest.raises(jax.errors.JaxRuntimeError, match="Out of memory"),
    ):
        take_step(trainer)
    assert device.tried == [4]


def test_an_update_that_lost_its_state_is_not_repeated(tiny_world, tmp_path, device, monkeypatch):
    apply = UpdateStep.apply_gradients

    def fail_after_donation(*args):
        apply(*args)
        raise OUT_OF_MEMORY

    monkeypatch.setattr(UpdateStep, "apply_gradients", fail_after_donation)
    device.max_rows = 5
    with (
        open_trainer(tiny_world, tmp_path, 0) as trainer,
        pytest.raises(jax.errors.JaxRuntimeError, match="Out of memory"),
    ):
        take_step(trainer)
    assert device.tried == [5]

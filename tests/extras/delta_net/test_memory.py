"""The memory plan of a hybrid, against the compiler."""

import jax
import pytest

from jaxrl.builders.capacity import GIB
from jaxrl.extras.plan import memory
from tests import compiled_memory as programs


@pytest.mark.minutes
def test_four_layers_on_one_device():
    target = memory.Target(platform="cpu", num_devices=1, memory_bytes=80 * GIB)
    config, model = programs.small_run(1, 1, 1), programs.MODELS["hybrid-tiny"]
    parts = ("update", "decode", "prefill")
    sizes = programs.compare(config, model, target, jax.devices()[:1], parts)
    for part, (planned, compiled) in sizes.items():
        assert compiled <= planned <= 1.15 * compiled, part


def test_the_states_lie_beside_an_update_of_a_run_one_step_ahead():
    config = programs.small_run(1, 1, 1).with_values({"rollout.async_level": 1})
    model = programs.MODELS["hybrid-0.8b"]
    target = memory.Target(platform="gpu", num_devices=1, memory_bytes=80 * GIB)
    # 32 states in 18 layers: 16 heads of 128 x 128, and three tokens of 3 x 16 x 128 channels.
    size = 32 * 18 * 4 * (16 * 128 * 128 + 3 * 3 * 16 * 128)
    phase = memory.plan_update(config, model, target, "train")
    assert phase.persistent["states of recurrent layers"] == size
    assert (
        memory.plan_rollout(config, model, target).persistent["states of recurrent layers"] == size
    )

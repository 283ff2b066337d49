"""The memory plan of a hybrid with experts, against the compiler."""

import jax
import pytest

from jaxrl.builders.capacity import GIB
from jaxrl.extras.plan import memory
from tests import compiled_memory as programs


@pytest.mark.minutes
def test_four_layers_on_one_device():
    target = memory.Target(platform="cpu", num_devices=1, memory_bytes=80 * GIB)
    config, model = programs.small_run(1, 1, 1), programs.MODELS["hybrid-moe-tiny"]
    parts = ("update", "decode", "prefill")
    sizes = programs.compare(config, model, target, jax.devices()[:1], parts)
    for part, (planned, compiled) in sizes.items():
        assert compiled <= planned <= 1.15 * compiled, part

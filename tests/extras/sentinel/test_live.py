"""Faults that show only in a run: in the sampler's weights, its ids, and what a search returns."""

import pytest

from jaxrl.builders.validation import validate
from jaxrl.logs.display import Display
from jaxrl.run import run
from tests.extras.sentinel import faults
from tests.helpers import build, settings_of
from tests.runs import base_config, warm_start

pytestmark = [
    pytest.mark.minutes,
    pytest.mark.usefixtures("quick_compilation", "no_pictures", "one_size"),
]

STEP = 8


@pytest.mark.parametrize("fault", ["none", "stale sampler", "swapped ids"])
def test_it_is_named_within_five_steps(fault, tiny_world, cache_folder, tmp_path):
    config = base_config(tiny_world, warm_start(tiny_world, cache_folder))
    config.update_from_flattened_dict(
        {
            **{"watch.name": "sentinel", "num_steps": STEP + 4, "optimizer.lr": 1e-3},
            **{
                "loss.entropy_coef": 0.01,
                "rollout.tasks_per_step": 2,
                "checkpoint.every_steps": 50,
            },
            "advantage.grpo.normalize_std": False,
        }
    )
    validate(config)
    parts = faults.with_fault(build(config), fault, STEP)
    run(settings_of(config), tmp_path, parts, Display())
    found = faults.signs_of(tmp_path)
    assert all(step >= STEP for step, _ in found)
    assert {sign for _, sign in found} & {*faults.FAULTS[fault]} or fault == "none"
    assert fault != "none" or found == []

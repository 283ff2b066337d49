"""Runs whose episodes go through several contexts: trained, killed, gone on with, asked."""

import itertools
import json

import pytest

from jaxrl.builders.validation import validate
from jaxrl.logs.display import Display
from jaxrl.run import run
from tests.helpers import build, settings_of
from tests.runs import (
    assert_same_weights,
    base_config,
    killed,
    lasting,
    records,
    trajectories,
    warm_start,
    without_usage,
)

pytestmark = [
    pytest.mark.minutes,
    pytest.mark.usefixtures("quick_compilation", "no_pictures", "one_size"),
]


@pytest.fixture(scope="module")
def source(tiny_world, cache_folder, quick_compilation):
    return warm_start(tiny_world, cache_folder)


def configured(world, source, name, **changes):
    config = base_config(world, source)
    settings = {
        **{"rollout.context.name": name, "rollout.context.max_tokens": 96},
        **{"rollout.context.turn_tokens": 24, "rollout.max_total_tokens": 320},
        **{"rollout.max_response_tokens": 120, "rollout.max_observation_tokens": 24},
        **{"rollout.max_turns": 5, "log.trajectories": -1, "num_steps": 3},
        **{"checkpoint.every_steps": 1, "checkpoint.keep": 4, **changes},
    }
    config.update_from_flattened_dict(settings)
    validate(config)
    return config


def play(config, workdir):
    run(settings_of(config), workdir, build(config), Display(is_enabled=False))


@pytest.mark.parametrize("name", ["drop_observations", "last_turns"])
def test_sampler_and_trainer_agree_and_a_killed_run_goes_on(name, tiny_world, source, tmp_path):
    config = configured(tiny_world, source, name)
    play(config, tmp_path / "whole")
    found = records(tmp_path / "whole")
    steps = [record for record in found if "actor/grad_norm" in record]
    assert len(steps) == 3
    assert all(step["rollout_corr/logprob_diff_max"] < 1e-4 for step in steps)
    assert any(step.get("num_contexts/mean", 1) > 1 for step in steps)
    made = [t for step in (1, 2, 3) for t in trajectories(tmp_path / "whole", step)]
    several = [t for t in made if "contexts" in t]
    assert several
    for one in several:
        starts = [0, *(start for start, _ in one["contexts"]), len(one["token_ids"])]
        assert max(b - a for a, b in itertools.pairwise(starts)) <= 96
    killed(tmp_path / "whole", tmp_path / "cut", after=1)
    play(config, tmp_path / "cut")
    assert lasting(tmp_path / "cut") == lasting(tmp_path / "whole")
    assert_same_weights(tmp_path / "cut" / "export", tmp_path / "whole" / "export")
    for step in (2, 3):
        pairs = [[*map(json.dumps, map(without_usage, trajectories(tmp_path / folder, step)))]
                 for folder in ("cut", "whole")]  # fmt: skip
        assert pairs[0] == pairs[1]


def test_an_engine_has_room_for_a_context_and_a_row_for_all(tiny_world, source):
    parts = build(configured(tiny_world, source, "last_turns"))
    assert "up to 6 per row" in parts.engine.describe_shapes()  # pages of 16 tokens
    assert parts.stages["train"].shape.max_tokens == 320

"""Runs whose episodes go through several contexts."""

import itertools

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
    without_usage,
)

pytestmark = [
    pytest.mark.minutes,
    pytest.mark.usefixtures("quick_compilation", "no_pictures", "one_size"),
]


def test_sampler_and_trainer_agree_and_a_killed_run_resumes(tiny_world, warm_model, tmp_path):
    config = base_config(tiny_world, warm_model)
    settings = {
        **{"rollout.context.name": "last_turns", "rollout.context.max_tokens": 96},
        **{"rollout.context.turn_tokens": 24, "rollout.max_total_tokens": 320},
        **{"rollout.max_response_tokens": 120, "rollout.max_observation_tokens": 24},
        **{"rollout.max_turns": 5, "log.trajectories": -1, "num_steps": 2},
        **{"checkpoint.every_steps": 1, "checkpoint.keep": 4},
    }
    config.update_from_flattened_dict(settings)
    validate(config)
    parts, display = build(config), Display(is_enabled=False)
    # The engine has room for a context, and a packed row for all.
    assert parts.engine._table_pages == 6  # pages of 16 tokens
    assert parts.stages["train"].shape.max_tokens == 320

    whole = tmp_path / "whole"
    whole.mkdir()
    run(settings_of(config), whole, parts, display)
    steps = [record for record in records(whole) if "actor/grad_norm" in record]
    assert len(steps) == 2
    assert all(step["rollout_corr/logprob_diff_max"] < 1e-4 for step in steps)
    assert any(step.get("num_contexts/mean", 1) > 1 for step in steps)
    lines = [line for step in (1, 2) for line in trajectories(whole, step) if "contexts" in line]
    assert lines
    for line in lines:
        starts = [0, *(start for start, _ in line["contexts"]), len(line["token_ids"])]
        assert max(b - a for a, b in itertools.pairwise(starts)) <= 96

    resumed = killed(whole, tmp_path / "resumed", after=1)
    run(settings_of(config), resumed, parts, display)
    assert lasting(resumed) == lasting(whole)
    assert_same_weights(resumed / "export", whole / "export")
    assert [*map(without_usage, trajectories(resumed, 2))] == [
        *map(without_usage, trajectories(whole, 2))
    ]

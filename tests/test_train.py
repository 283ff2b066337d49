import math
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from configs import debug_tiny
from jaxrl import assemble, train
from jaxrl.config import default_config
from jaxrl.method import make_estimator
from jaxrl.metrics import Display
from jaxrl.minibatches import make_minibatches
from jaxrl.sampling.engine import Counts
from tests.episodes import make_failure, make_trajectory


def trajectory(group_id, reward, seed=0, **fields):
    return make_trajectory(group_id=group_id, reward=reward, sample_index=seed, **fields)


def minibatches(members, **changes):
    config = debug_tiny.get_config()
    config.update_from_flattened_dict(
        {"rollout.tasks_per_step": 2, "rollout.group_size": 3, "optimizer.micro_rows": 2, **changes}
    )
    shape = assemble.train_shape(config)
    return make_minibatches(members, make_estimator(config)(members, 0, 4), shape, config)


def test_a_loss_without_environment_errors_is_that_of_the_others_alone():
    failed = make_failure(group_id=0, length=9, sample_index=2)
    others = [trajectory(0, 1.0), trajectory(0, 0.0, seed=1), trajectory(1, 1.0)]
    others += [trajectory(1, 1.0, seed=1), trajectory(1, 0.0, seed=2)]
    [got] = minibatches([*others[:2], failed, *others[2:]])
    [wanted] = minibatches(others)
    assert got.num_counted == wanted.num_counted == 5 * 4
    jax.tree.map(np.testing.assert_array_equal, got.batch, wanted.batch)


def test_groups_stay_whole_in_minibatches():
    rewards = [(0, 1.0), (0, 0.0), (0, 0.0), (1, 1.0), (1, 1.0), (1, 1.0)]
    members = [trajectory(group, reward, seed=i) for i, (group, reward) in enumerate(rewards)]
    first, second = minibatches(members, **{"optimizer.num_minibatches": 2})
    # Group 1 is all right: it has no signal and is left out, but still counts as sampled.
    assert (first.num_tokens, first.num_counted) == (3 * 6, 3 * 4)
    assert (second.num_tokens, second.num_micro, second.num_counted) == (0, 0, 3 * 4)


def test_trajectories_without_advantage_stay_where_another_term_needs_them():
    members = [trajectory(group, 1.0, seed=i) for group in (0, 1) for i in range(3)]
    assert [m.num_tokens for m in minibatches(members)] == [0]
    assert [m.num_tokens for m in minibatches(members, **{"kl.coef": 0.1})] == [36]
    assert [m.num_tokens for m in minibatches(members, **{"loss.entropy_coef": 0.1})] == [36]


def test_merged_metrics():
    measured = [
        {"actor/pg_loss": 1.0, "x/gap_max": 3.0, "grad_norm": 2.0},
        {"actor/pg_loss": 3.0, "x/gap_max": 1.0, "grad_norm": 4.0},
    ]
    assert train.merge(measured) == {"actor/pg_loss": 2.0, "x/gap_max": 3.0, "actor/grad_norm": 3.0}
    assert train.merge([]) == {}


def test_a_failed_trajectory_is_in_no_group():
    members = [trajectory(0, 1.0), trajectory(0, 0.0, seed=1), make_failure(sample_index=2)]
    config = debug_tiny.get_config()
    np.testing.assert_allclose(make_estimator(config)(members, 0, 4), [0.5, -0.5, 0.0])
    config.advantage.normalize_std = True
    got = make_estimator(config)(members, 0, 4)
    np.testing.assert_allclose(got, np.array([0.5, -0.5, 0.0]) / math.sqrt(0.5), rtol=1e-5)


class StubEngine:
    counts = Counts(prefilled_prompt=10, prefilled_resume=8, sampled=60, slot_steps=200)
    num_compilations = 3


def test_the_sampler_is_measured_step_by_step():
    # Since the start of the process it would differ after a restart.
    before = Counts(prefilled_prompt=4, prefilled_resume=3, sampled=20, slot_steps=100)
    assert train.engine_metrics(StubEngine(), before) == {
        "rollout/slot_occupancy": 0.4,
        "rollout/prefilled_prompt_tokens": 6,
        "rollout/prefilled_resume_tokens": 5,
        "rollout/sampled_tokens": 40,
        "perf/num_compilations/sampler": 3,
    }


def test_which_records_come_after_a_position():
    done = [
        ("sft", 24),
        ("train", 24),
        ("train", 25),
        ("train", 26),
        ("train", 27),
        ("evaluate", 27),
    ]
    records = [{"stage": stage, "step": step} for stage, step in done]

    def counted(**fields):
        position = train.Position(**fields)
        return sum(not position.is_passed_by(record) for record in records)

    assert counted() == 0
    assert counted(stage="sft", step=24) == 1  # the evaluation before the first step is to come
    assert counted(stage="train", step=26) == 4
    assert counted(stage="train", step=26, record={}) == 3  # its own record is to come
    assert counted(stage="train", step=27) == 5
    assert train.Position(stage="train", step=1).is_passed_by({"step": 1, "stage": "unknown"})


def test_a_start_that_fails_closes_the_checkpoints(tmp_path, monkeypatch):
    def adopt():
        raise OSError("full")

    def close(checkpointer, close=train.Checkpointer.close):
        closed.append(checkpointer)
        close(checkpointer)

    closed = []
    monkeypatch.setattr(train.Checkpointer, "close", close)
    with pytest.raises(OSError, match="full"):
        train.run(default_config(), tmp_path, None, Display(), adopt=adopt)
    assert len(closed) == 1


def test_more_steps_are_done_than_are_asked_for():
    said, config = [], default_config()
    config.num_steps = 2
    position = train.Position(stage="train", stage_step=6)
    display = SimpleNamespace(say=said.append)
    this = SimpleNamespace(config=config, parts=None, position=position, display=display)
    assert train.run_train(this, "weights") == "weights"
    [line] = said
    assert line.startswith("train: 6 steps are done, and config.num_steps is 2: nothing is left")

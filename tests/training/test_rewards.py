"""Changes of rewards by abstentions, lengths, divergences and entropies."""

import dataclasses

import numpy as np
import pytest

from configs import dapo, dapo_small, search_r1_small
from jaxrl.envs.base import Outcome
from jaxrl.logs.records import build_trajectory_record
from jaxrl.training.controllers import (
    AdaptiveKL,
    Controllers,
    DifficultyBuckets,
    EntropyCoefficients,
    EntropyThreshold,
)
from jaxrl.training.rewards import (
    add_entropy_reward,
    apply_kl_penalty,
    compute_kl_penalties,
    shape_rewards,
)
from jaxrl.types import flatten_groups, replace_fields
from tests.episodes import (
    grouped,
    in_turns,
    is_same,
    make_failure,
    make_trajectory,
    strayed,
    wavering,
)
from tests.helpers import method_of, method_with, resolved


def test_shaping_adds_parts_and_leaves_failures_alone():
    long = {"token_ids": np.ones(13, np.int32), "loss_mask": np.arange(13) >= 2}
    group = [
        dataclasses.replace(make_trajectory(outcome=Outcome.ABSTAINED), is_abstention=True),
        dataclasses.replace(make_trajectory(sample_index=1), **long),
        make_failure(sample_index=2),
    ]
    changes = {
        "shaping.boundary_aware": True, "shaping.sample_level": False, "shaping.overlong_buffer": 4,
        "shaping.overlong_max_tokens": 12,
    }  # fmt: skip
    honest, slow, failed = flatten_groups(
        shape_rewards(grouped(group), method_with(**changes).shaping, is_late=True)
    )
    assert (honest.reward, dict(honest.reward_parts)) == (0.5, {"abstention": 0.5, "overlong": 0})
    assert (honest.reward_reason, slow.reward_reason) == ("IDK encouraged", "")
    assert build_trajectory_record(honest)["reward_reason"] == "IDK encouraged"
    assert "reward_reason" not in build_trajectory_record(slow)
    # 11 tokens after the prompt, 3 of them in the buffer of 4.
    assert (slow.reward, dict(slow.reward_parts)) == (-0.75, {"abstention": 0, "overlong": -0.75})
    assert (failed.reward, dict(failed.reward_parts)) == (0.0, {})


def test_shaping_is_of_the_whole_trajectory_and_of_no_turn():
    by_turn = in_turns([0.3, 0.2], 1.0, lengths=[4, 6])  # 12 tokens after the prompt
    changes = {"shaping.overlong_buffer": 4, "shaping.overlong_max_tokens": 12}
    [actual] = flatten_groups(
        shape_rewards(grouped([by_turn]), method_with(**changes).shaping, is_late=True)
    )
    assert (actual.rest_reward, actual.turn_rewards) == (0.0, (0.3, 0.2))
    assert actual.reward == pytest.approx(0.5)
    # Without rewards by turn it is the same, to the last bit.
    plain = in_turns([], 1.0, lengths=[4, 6])
    [unshaped] = flatten_groups(
        shape_rewards(grouped([plain]), method_with(**changes).shaping, is_late=True)
    )
    assert actual.rest_reward == unshaped.reward


def test_searching_is_not_overlong_by_the_limit_of_what_is_sampled():
    """At most 64 tokens are sampled, and two results add 72 tokens."""
    config = search_r1_small.get_config()
    config.shaping.overlong_buffer = 16
    assert resolved(config).overlong_limit == 192 - 32
    searched = make_trajectory(length=2 + 100)
    [actual] = flatten_groups(
        shape_rewards(grouped([searched]), method_of(config).shaping, is_late=True)
    )
    assert actual.reward_parts["overlong"] == 0
    config.shaping.overlong_max_tokens = 176
    assert resolved(config).overlong_limit == 176
    assert resolved(dapo_small.get_config()).overlong_limit == 96
    assert resolved(dapo.get_config()).overlong_limit == 20480


# Divergence.

IN_REWARD = {"kl.coef": 0.5, "kl.apply_to": "reward", "kl.estimator": "k1"}
BATCH = grouped(
    [
        make_trajectory(reward=1.0, length=6),
        make_failure(sample_index=1),
        make_trajectory(reward=0.25, task_number=1, length=4),
    ]
)
STRAYED = replace_fields(
    BATCH, divergence=[strayed(0.5, -0.25, 1.0, 0.75), None, strayed(0.25, 0.75)]
)


def test_the_penalty_by_hand():
    # Sums of 2 and 1 nat, times a coefficient of 0.5.
    np.testing.assert_allclose(compute_kl_penalties(STRAYED, 0.5), [1, 0, 0.5])
    actual = flatten_groups(apply_kl_penalty(STRAYED, Controllers(), method_with(**IN_REWARD)))
    assert [t.reward for t in actual] == [0.0, 0.0, -0.25]
    assert actual[0].reward_parts["kl"] == -1
    assert actual[2].reward_parts["kl"] == -0.5
    assert is_same(actual[1], flatten_groups(BATCH)[1])


def test_the_penalty_has_the_coefficient_of_its_controller():
    method = method_with(**IN_REWARD, **{"kl.controller": "adaptive"})
    actual = flatten_groups(apply_kl_penalty(STRAYED, Controllers(kl=AdaptiveKL(2.0)), method))
    assert [t.reward for t in actual] == [-3.0, 0.0, -1.75]


# Entropy.

ENTROPY = {"shaping.entropy_reward": True}
CALIBRATED = Controllers(
    threshold=EntropyThreshold(1.0),
    buckets=DifficultyBuckets({"t0": "easy"}),
    coefficients=EntropyCoefficients(
        {"easy": 0.5, "medium": 0.5, "hard": 0.5}, {"easy": 10, "medium": 20, "hard": 10}
    ),
)


def with_windows(trajectories, windows):
    return replace_fields(grouped(trajectories), windows=windows)


def test_environment_errors_and_methods_without_it_earn_no_entropy_reward():
    method = method_with(**ENTROPY)
    groups = with_windows([make_failure(), make_trajectory(sample_index=1)], [wavering(20)] * 2)
    failed, scored = flatten_groups(add_entropy_reward(groups, CALIBRATED, method.shaping))
    assert is_same(failed, flatten_groups(groups)[0])
    assert scored.reward == pytest.approx(0.6 * 0.5 / (1 + np.exp(-(10 - 1.5) / 2)))
    plain = method_with()
    assert is_same(add_entropy_reward(groups, Controllers.init(plain), plain.shaping), groups)


def test_the_entropy_reward_takes_its_sizes_from_the_configuration():
    changes = ENTROPY | {
        "shaping.margins": (0.5, 0.25, 0.35),
        "shaping.sigmoid_temperatures": (10.0, 2.5, 3.0),
    }
    groups = with_windows([make_trajectory()], [wavering(20)])
    [actual] = flatten_groups(
        add_entropy_reward(groups, CALIBRATED, method_with(**changes).shaping)
    )
    assert actual.reward == pytest.approx(0.6 * 0.5 / (1 + np.exp(-(10 - 5) / 10)))

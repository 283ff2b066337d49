"""ARES on trajectories made by hand: thresholds, difficulties, entropy rewards, KL weights."""

import dataclasses
import json
import math

import numpy as np
import pytest
from jaxrl.objectives.controllers import (
    AdaptiveKL,
    DifficultyBuckets,
    EntropyCoefficients,
    KLBudget,
)
from jaxrl.training.entropy_control import (
    Windows,
    advance,
    reward_entropy,
    sample_fields,
    token_kl_weights,
    window_metrics,
)
from jaxrl.training.method import Controllers

from jaxrl.config import default_config
from jaxrl.objectives.entropy import EntropyThreshold
from tests.episodes import make_failure, make_trajectory

ENTROPIES = [0.1, 0.2, 1.0, 2.0, 1.5, 0.5, 0.1, 0.0, 0.3, 0.2]
WINDOWS = [1.175, 1.25, 1.025, 0.525, 0.225, 0.15]  # of four tokens each
PERCENTILE = 1.23125


def settings(**changes):
    config = default_config()
    config.update_from_flattened_dict({"shaping.entropy_reward": True, **changes})
    return config


def thinking(entropies, *, right=False, group=0, sample=0, tool=(), failed=False):
    """A trajectory whose sampled tokens have these entropies, but those of a tool have none.

    Two tokens of the prompt come first.
    """
    length = 2 + len(entropies)
    make = make_failure if failed else make_trajectory
    made = make(group_id=group, sample_index=sample, length=length)
    mask = np.arange(length) >= 2
    mask[[2 + place for place in tool]] = False
    values = np.concatenate([[0, 0], entropies]).astype(np.float32)
    return dataclasses.replace(
        made, loss_mask=mask, rollout_entropies=np.where(mask, values, 0), is_correct=right
    )


def first(config):
    return Controllers.init(config)


# Windows and their threshold.


def test_windows_and_the_first_threshold_by_hand():
    # The percentiles are 1.23125, then 0.5 of windows that are all alike, and 2; their median.
    group = [
        thinking(ENTROPIES),
        thinking([0.5] * 8, sample=1),
        thinking([2.0] * 6, sample=2),
    ]
    config = settings()
    controllers, windows = advance(group, config, first(config), None)
    assert controllers.level == pytest.approx(PERCENTILE, abs=1e-6)
    one, low, high = windows
    np.testing.assert_allclose(one.values, [0, 0, *WINDOWS, 0, 0, 0, 0], atol=1e-6)
    np.testing.assert_array_equal(one.valid, [False] * 2 + [True] * 6 + [False] * 4)
    assert [w.count for w in windows] == [1, 0, 2]
    np.testing.assert_array_equal(np.flatnonzero(one.is_high), [3])
    assert [w.percentile for w in windows] == pytest.approx([PERCENTILE, 0.5, 2.0], abs=1e-6)
    excess = [1.25 - PERCENTILE, 0, 2 * (2 - PERCENTILE)]
    assert [w.excess for w in windows] == pytest.approx(excess, abs=1e-6)
    assert low.values.dtype == high.values.dtype == np.float32


def test_the_threshold_moves_before_it_is_used():
    # 0.9 and an estimate of 1.23125 make 0.9033125: still three windows above.
    config = settings()
    controllers = dataclasses.replace(first(config), threshold=EntropyThreshold(0.9))
    controllers, [window] = advance([thinking(ENTROPIES)], config, controllers, None)
    assert controllers.level == pytest.approx(0.99 * 0.9 + 0.01 * PERCENTILE, abs=1e-7)
    assert window.count == 3
    excess = sum(value - controllers.level for value in WINDOWS[:3])
    assert window.excess == pytest.approx(excess, abs=1e-5)


def test_windows_pass_over_what_a_tool_wrote():
    config = settings()
    controllers, [window] = advance([thinking(ENTROPIES, tool=(4, 5))], config, first(config), None)
    places = np.flatnonzero(window.valid) - 2
    np.testing.assert_array_equal(places, [0, 1, 2, 3])
    np.testing.assert_allclose(window.values[places + 2], [0.825, 0.775, 0.6, 0.15], atol=1e-6)
    assert controllers.level == pytest.approx(np.percentile([0.825, 0.775, 0.6, 0.15], 95))


def test_settings_of_the_threshold_are_the_configuration_s():
    changes = {
        "shaping.entropy_window": 2,
        "shaping.entropy_percentile": 50.0,
        "shaping.entropy_decay": 0.5,
    }
    config = settings(**changes)
    controllers = dataclasses.replace(first(config), threshold=EntropyThreshold(1.0))
    # Windows of two: 0.6, 1.5, 1.75, 1.0, 0.3, 0.05, 0.15, 0.25; their median is 0.45.
    controllers, [window] = advance([thinking(ENTROPIES)], config, controllers, None)
    assert controllers.level == pytest.approx(0.725, abs=1e-6)
    assert window.count == 3


def test_too_short_for_a_window_is_left_out_of_the_threshold():
    config = settings()
    group = [thinking([9.0] * 4), thinking(ENTROPIES, sample=1)]
    controllers, [short, _] = advance(group, config, first(config), None)
    assert controllers.level == pytest.approx(PERCENTILE, abs=1e-6)
    assert short.count == short.excess == 0
    assert np.isnan(short.percentile)


def test_without_any_window_nothing_is_known():
    config = settings(**{"kl.coef": 0.1, "kl.second_chance": True})
    group = [thinking([9.0] * 4, right=True), thinking([1.0], sample=1)]
    controllers, windows = advance(group, config, first(config), None)
    assert controllers.level is None
    assert [w.count for w in windows] == [0, 0]
    # Difficulties are known all the same; targets are not, and rewards stay what they were.
    assert controllers.buckets.buckets == {"t0": "medium"}
    assert controllers.coefficients == first(config).coefficients
    shaped = reward_entropy(group, windows, config, controllers)
    assert [t.reward for t in shaped] == [t.reward for t in group]
    assert [dict(t.reward_parts) for t in shaped] == [{"entropy": 0.0}] * 2
    weights = token_kl_weights(group, windows, config, controllers)
    for one, weight in zip(group, weights, strict=True):
        np.testing.assert_array_equal(weight, np.full(len(one.token_ids), 0.1, np.float32))


def test_environment_errors_move_nothing():
    config = settings()
    good = [thinking(ENTROPIES, right=True), thinking([0.5] * 8, sample=1)]
    wild = thinking([7.0] * 9, right=True, sample=2, failed=True)
    alone, _ = advance(good, config, first(config), None)
    together, windows = advance([wild, *good], config, first(config), None)
    assert together == alone
    assert len(windows) == 3
    lost, _ = advance([wild], config, first(config), None)
    assert lost == first(config)


def test_only_trigger_words_count():
    config = settings()
    one = thinking(ENTROPIES)
    controllers = dataclasses.replace(first(config), threshold=EntropyThreshold(0.9))
    is_trigger = np.zeros(60, bool)
    is_trigger[one.token_ids[[2, 4, 7]]] = True
    places = [t for t in (2, 3, 4) if is_trigger[one.token_ids[t]]]
    _, [window] = advance([one], config, controllers, is_trigger)
    np.testing.assert_array_equal(np.flatnonzero(window.is_high), places)
    assert 0 < window.count < 3
    assert window.excess > 0.5  # of all tokens, triggers or not


# Difficulties and coefficients.


def group_of(task, num_right, size, counts):
    """A group whose members have so many tokens above a threshold of 1."""
    made = []
    for sample in range(size):
        count = counts[sample % len(counts)]
        # A window follows a token: the first of count + 4 alike tokens have one.
        entropies = [2.0] * (count + 4) if count else [0.1] * 6
        made.append(thinking(entropies, right=sample < num_right, group=task, sample=sample))
    return made


def calibrated(config, **alphas):
    return dataclasses.replace(
        first(config),
        threshold=EntropyThreshold(1.0),
        coefficients=EntropyCoefficients(
            {"easy": 0.5, "medium": 0.5, "hard": 0.5} | alphas,
            {"easy": 10, "medium": 20, "hard": 10},
        ),
    )


def test_coefficients_follow_the_distance_to_the_previous_target():
    # With a decay of 1 the threshold stays. Two easy tasks with means of 10 and 14, the target 10;
    # a medium one with 4, the target 20; a hard one with 7, the target 10.
    config = settings(**{"shaping.entropy_decay": 1.0})
    batch = [
        *group_of(0, 2, 3, [10]),
        *group_of(1, 3, 3, [12, 14, 16]),
        *group_of(2, 1, 3, [4]),
        *group_of(3, 0, 3, [6, 7, 8]),
    ]
    got, windows = advance(batch, config, calibrated(config), None)
    assert [w.count for w in windows] == [10, 10, 10, 12, 14, 16, 4, 4, 4, 6, 7, 8]
    assert got.buckets.buckets == {"t0": "easy", "t1": "easy", "t2": "medium", "t3": "hard"}
    assert got.coefficients.alphas == pytest.approx({"easy": 0.6, "medium": 0.0, "hard": 0.65})
    assert got.coefficients.targets == {"easy": 12, "medium": 4, "hard": 7}


def test_step_and_bound_of_the_coefficients_are_the_configuration_s():
    changes = {"shaping.alpha_step": 0.5, "shaping.alpha_max": 1.0, "shaping.entropy_decay": 1.0}
    config = settings(**changes)
    batch = [*group_of(0, 3, 3, [11]), *group_of(3, 0, 3, [7])]
    got, _ = advance(batch, config, calibrated(config, easy=0.25), None)
    assert got.coefficients.alphas == pytest.approx({"easy": 0.75, "medium": 0.5, "hard": 1.0})
    assert got.coefficients.targets == {"easy": 11, "medium": 20, "hard": 7}  # one was absent


def test_one_update_goes_by_the_difficulties_of_its_own_batch():
    config = settings(**{"shaping.entropy_decay": 1.0})
    controllers = dataclasses.replace(
        calibrated(config), buckets=DifficultyBuckets({"t0": "hard", "t9": "medium"})
    )
    got, _ = advance(group_of(0, 3, 3, [12]), config, controllers, None)
    assert got.buckets.buckets == {"t0": "easy", "t9": "medium"}
    assert got.coefficients.alphas == pytest.approx({"easy": 0.6, "medium": 0.5, "hard": 0.5})


def test_groups_are_known_by_their_ids():
    config = settings()
    batch = [*group_of(0, 2, 3, [10]), *group_of(7, 1, 3, [4]), *group_of(3, 0, 3, [6, 7, 8])]
    wanted, _ = advance(batch, config, calibrated(config), None)
    mixed = [batch[i] for i in (4, 8, 0, 3, 7, 1, 5, 2, 6)]
    got, _ = advance(mixed, config, calibrated(config), None)
    assert got.buckets == wanted.buckets
    assert got.threshold == wanted.threshold
    assert got.coefficients.targets == wanted.coefficients.targets
    assert got.coefficients.alphas == pytest.approx(wanted.coefficients.alphas)


def test_states_that_a_method_lacks_stay_away():
    batch = [thinking(ENTROPIES, right=True)]
    plain = default_config()
    assert advance(batch, plain, first(plain), None) == (Controllers(), [])
    budget = default_config()
    budget.kl.coef, budget.kl.controller = 0.1, "budget"
    got, windows = advance(batch, budget, first(budget), None)
    assert (got.buckets.buckets, got.threshold, windows) == ({"t0": "easy"}, None, [])


# Rewards.


def counted(count, excess=0.0):
    return Windows(
        values=np.zeros(40, np.float32),
        valid=np.ones(40, bool),
        is_high=np.arange(40) < count,
        percentile=1.5,
        excess=excess,
    )


REWARDS = {  # right and wrong, for counts of 0, 4, 10, 13, 20 where the target is 10
    "easy": ([0, 0, 0, -0.080357, -0.5], [0.15, 0.15, 0.15, 0.203754, 0.295781]),
    "medium": ([-0.5, -0.181818, 0, -0.003788, -0.5], [0.2, 0.2, 0.2, 0.219934, 0.38103]),
    "hard": ([-0.18, -0.03125, 0.457525, 0.53833, 0.593408], [0.3, 0.3, 0.3, 0.3, 0.53833]),
}


@pytest.mark.parametrize("bucket", REWARDS)
def test_entropy_rewards_by_hand(bucket):
    config = settings()
    controllers = Controllers(
        threshold=EntropyThreshold(1.0),
        buckets=DifficultyBuckets({"t0": bucket}),
        coefficients=EntropyCoefficients(dict.fromkeys(REWARDS, 0.5), {bucket: 10}),
    )
    for right, expected in zip((True, False), REWARDS[bucket], strict=True):
        batch = [
            dataclasses.replace(make_trajectory(reward=0.25, sample_index=i), is_correct=right)
            for i in range(5)
        ]
        windows = [counted(count) for count in (0, 4, 10, 13, 20)]
        got = reward_entropy(batch, windows, config, controllers)
        np.testing.assert_allclose([t.reward_parts["entropy"] for t in got], expected, atol=1e-6)
        np.testing.assert_allclose([t.reward for t in got], 0.25 + np.array(expected), atol=1e-6)


def test_environment_errors_and_methods_without_it_earn_no_entropy_reward():
    config = settings()
    controllers = dataclasses.replace(calibrated(config), buckets=DifficultyBuckets({"t0": "easy"}))
    batch = [make_failure(), make_trajectory(sample_index=1)]
    failed, scored = reward_entropy(batch, [counted(20), counted(20)], config, controllers)
    assert failed is batch[0]
    assert scored.reward == pytest.approx(0.6 * 0.5 / (1 + np.exp(-(10 - 1.5) / 2)))
    plain = default_config()
    assert reward_entropy(batch, [], plain, first(plain)) == batch


def test_a_centred_gain_where_asked_for():
    config = settings(**{"shaping.centred_gain": True})
    controllers = dataclasses.replace(calibrated(config), buckets=DifficultyBuckets({"t0": "easy"}))
    [wrong] = reward_entropy([make_trajectory()], [counted(10)], config, controllers)
    assert wrong.reward == 0


# Weights of the KL term.


def weighed(**changes):
    return settings(**{"shaping.entropy_reward": False, "kl.coef": 0.01, **changes})


def four(is_high):
    return Windows(
        values=np.zeros(4, np.float32),
        valid=np.ones(4, bool),
        is_high=np.array(is_high, bool),
        percentile=1.0,
        excess=0.6,
    )


def test_kl_weights_by_hand():
    config = weighed(**{"kl.low_factor": 0.5, "kl.controller": "budget"})
    batch = [make_trajectory(group_id=i, length=4) for i in range(2)]
    windows = [four([0, 1, 1, 0]), four([1, 0, 0, 0])]
    controllers = Controllers(
        threshold=EntropyThreshold(1.0),
        buckets=DifficultyBuckets({"t0": "easy", "t1": "medium"}),
        kl=KLBudget({"easy": 1.0, "medium": 3.0, "hard": 7.0}),
    )
    got = token_kl_weights(batch, windows, config, controllers)
    np.testing.assert_allclose(got[0], [0.01, 0.005, 0.005, 0.01])
    np.testing.assert_allclose(got[1], [0.015, 0.03, 0.03, 0.03])
    assert got[0].dtype == np.float32
    # As a mean over these four tokens, the term of the first is 0.002.
    assert np.mean(got[0] * [0.2, 0.1, 0.3, 0.4]) == pytest.approx(0.002)


def test_a_second_chance_for_wrong_answers_to_easy_tasks():
    config = weighed(**{"kl.second_chance": True})
    controllers = Controllers(
        threshold=EntropyThreshold(1.0),
        buckets=DifficultyBuckets({"t0": "easy", "t1": "medium"}),
    )
    batch = [
        make_trajectory(length=4),
        dataclasses.replace(make_trajectory(length=4), is_correct=True),
        make_trajectory(group_id=1, length=4),
        make_trajectory(length=4),
    ]
    sure = dataclasses.replace(four([1, 1, 1, 1]), excess=0.4)
    windows = [four([1, 1, 1, 1])] * 3 + [sure]
    got = token_kl_weights(batch, windows, config, controllers)
    scales = [0.67, 1, 1, 1]
    np.testing.assert_allclose(got, np.outer(scales, np.full(4, 0.01)), rtol=1e-6)


def test_a_moving_coefficient_is_every_token_s():
    config = weighed(**{"kl.controller": "adaptive"})
    controllers = Controllers(kl=AdaptiveKL(0.03))
    got = token_kl_weights([make_trajectory(length=5)], [], config, controllers)
    np.testing.assert_array_equal(got, [np.full(5, 0.03, np.float32)])


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"kl.coef": 0.0},
        {"kl.place": "reward"},
        {"kl.place": "reward", "kl.controller": "adaptive"},
    ],
    ids=str,
)
def test_without_need_there_are_no_weights(changes):
    config = weighed(**changes)
    assert token_kl_weights([make_trajectory()], [], config, first(config)) is None


# What is written down.


def test_fields_of_a_sample():
    config = settings()
    controllers = dataclasses.replace(
        calibrated(config),
        threshold=EntropyThreshold(1.25),
        buckets=DifficultyBuckets({"t0": "easy"}),
    )
    controllers.coefficients.targets.pop("hard")
    right = dataclasses.replace(make_trajectory(), is_correct=True)
    batch = [right, make_failure(group_id=4)]
    nothing = dataclasses.replace(counted(0), percentile=float("nan"))
    one, failed = sample_fields(batch, [counted(7), nothing], controllers)
    assert one == {
        "uid": "t0",
        "global_id": "t0/0",
        "ground_truth": ["x"],
        "accuracy": 1.0,
        "high_entropy_token_num": 7,
        "entropy_percentile_thresholds": 1.5,
        "high_entropy_threshold": 1.25,
        "difficulty": "easy",
        "target_high_entropy_token_num": 10,
        "alpha_entropy": 0.5,
    }
    assert failed["accuracy"] is None
    assert failed["entropy_percentile_thresholds"] is None
    assert failed["difficulty"] == "hard"
    assert failed["target_high_entropy_token_num"] is None
    assert json.loads(json.dumps([one, failed])) == [one, failed]
    [plain] = sample_fields([right], [], Controllers())
    assert plain == {"uid": "t0", "global_id": "t0/0", "ground_truth": ["x"], "accuracy": 1.0}


def test_a_sample_is_called_the_same_in_every_step():
    of_t1 = [make_trajectory(group_id=1, sample_index=index) for index in (0, 1)]
    alone, beside = (
        sample_fields(batch, [], Controllers()) for batch in (of_t1, [make_trajectory(), *of_t1])
    )
    assert [fields["global_id"] for fields in alone] == ["t1/0", "t1/1"]
    assert beside[1:] == alone


def test_metrics_by_difficulty():
    controllers = Controllers(buckets=DifficultyBuckets({"t0": "easy", "t1": "hard"}))
    batch = [
        make_trajectory(length=6),
        make_trajectory(group_id=1, length=9),
        make_trajectory(group_id=1, length=13),
        make_failure(group_id=0, length=30),
    ]
    windows = [counted(c) for c in (3, 8, 10, 30)]
    got = window_metrics(batch, windows, controllers)
    assert got["entropy/high_window_tokens"] == 7
    assert got["difficulty/easy/share"] == pytest.approx(1 / 3)
    assert got["difficulty/hard/share"] == pytest.approx(2 / 3)
    assert got["difficulty/medium/share"] == 0
    assert got["difficulty/easy/response_length"] == 4
    assert got["difficulty/hard/response_length"] == 9
    assert got["difficulty/easy/high_window_tokens"] == 3
    assert got["difficulty/hard/high_window_tokens"] == 9
    assert np.isnan(got["difficulty/medium/high_window_tokens"])
    assert window_metrics(batch, [], Controllers()) == {}


@pytest.mark.parametrize(
    ("rewards", "share"),
    [
        ([[1.0, 0.4], [1.0, 0.9]], 0.0),
        ([[1.0, 0.4], [0.9, 0.9]], 0.5),
        ([[0.3, 0.4], [0.9, 1.1]], 1.0),
        ([[None, 0.4], [0.3, None]], math.nan),
    ],
    ids=str,
)
def test_inversions_are_groups_in_which_a_wrong_answer_earns_as_much(rewards, share):
    """Of each group the reward of its right answer, then of its wrong one."""
    batch = [
        dataclasses.replace(make_trajectory(group_id=g, reward=x), is_correct=is_correct)
        for g, pair in enumerate(rewards)
        for x, is_correct in zip(pair, (True, False), strict=True)
        if x is not None
    ]
    controllers = Controllers(coefficients=EntropyCoefficients.init())
    got = window_metrics([*batch, make_failure(group_id=1)], [], controllers)
    assert got["entropy/inversions"] == pytest.approx(share, nan_ok=True)


def test_the_same_batch_makes_the_same_decisions():
    """Bit for bit: every process decides from the same gathered trajectories."""
    config = settings(**{"kl.coef": 0.1, "kl.controller": "budget", "kl.low_factor": 0.5})

    def decide():
        batch = [*group_of(0, 2, 3, [10, 3]), *group_of(1, 0, 3, [4]), thinking(ENTROPIES, group=2)]
        controllers = calibrated(config)
        for _ in range(3):
            controllers, windows = advance(batch, config, controllers, None)
        rewards = [t.reward for t in reward_entropy(batch, windows, config, controllers)]
        weights = token_kl_weights(batch, windows, config, controllers)
        return json.dumps(dataclasses.asdict(controllers)), rewards, np.concatenate(weights)

    (states, rewards, weights), (states_again, rewards_again, weights_again) = decide(), decide()
    assert (states, rewards) == (states_again, rewards_again)
    np.testing.assert_array_equal(weights, weights_again)

import dataclasses
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxrl.objectives.controllers import (
    AdaptiveKL,
    DifficultyBuckets,
    EntropyCoefficients,
    KLBudget,
    LogKL,
    SkipSet,
    StageGate,
    difficulty,
)

# Difficulty


@pytest.mark.parametrize(
    ("right", "size", "bucket"),
    [
        (2, 3, "easy"),
        (1, 3, "medium"),
        (0, 3, "hard"),
        (6, 8, "easy"),
        (5, 8, "medium"),
        (3, 8, "medium"),
        (2, 8, "hard"),
        (1, 1, "easy"),
        (0, 1, "hard"),
    ],
)
def test_difficulty(right, size, bucket):
    assert difficulty(right, size) == bucket


@pytest.mark.parametrize("count", [(0, 0), (3, 2), (-1, 2)])
def test_a_count_that_is_no_share_is_refused(count):
    with pytest.raises(ValueError, match=f"{count[0]} of {count[1]} samples are correct"):
        difficulty(*count)


def test_buckets_are_the_last_seen():
    state = DifficultyBuckets.init().update(["a", "b"], [8, 0], [8, 8])
    assert state.buckets == {"a": "easy", "b": "hard"}
    after = state.update(["b", "c"], [4, 3], [8, 3])
    assert after.buckets == {"a": "easy", "b": "medium", "c": "easy"}
    assert state.buckets == {"a": "easy", "b": "hard"}  # the state before is as it was


def test_a_task_drawn_twice_is_counted_together():
    for order in ([0, 3], [3, 0]):
        state = DifficultyBuckets.init().update(["a", "a"], order, [3, 3])
        assert state.buckets == {"a": "medium"}


# Entropy


def test_alpha_follows_the_previous_target():
    state = EntropyCoefficients(
        dict.fromkeys(["easy", "medium", "hard"], 0.5), {"easy": 10, "medium": 20, "hard": 10}
    )
    after = state.update([12, 4, 7], ["easy", "medium", "hard"])
    assert after.alphas == pytest.approx({"easy": 0.6, "medium": 0.0, "hard": 0.65})
    assert after.targets == {"easy": 12, "medium": 4, "hard": 7}


def test_the_mean_is_over_groups_and_rounded():
    state = EntropyCoefficients.init().update([1, 2.5, 100], ["easy", "easy", "hard"])
    assert state == EntropyCoefficients({"easy": 0.5, "medium": 0.5, "hard": 0.5}, state.targets)
    assert state.targets == {"easy": 2, "hard": 100}  # 1.75; the first mean is only a target
    after = state.update([3.5, 2.5], ["easy", "easy"])
    assert after.alphas == pytest.approx({"easy": 0.55, "medium": 0.5, "hard": 0.5})
    assert after.targets == {"easy": 3, "hard": 100}
    assert state.targets == {"easy": 2, "hard": 100}


def test_alpha_stays_in_its_range():
    state = EntropyCoefficients.init(alpha=1.9)
    state = state.update([0, 0], ["easy", "hard"]).update([50, 50], ["easy", "hard"])
    assert (state.alphas["easy"], state.alphas["hard"]) == (2.0, 0.0)
    other = EntropyCoefficients({"easy": 0.5}, {"easy": 0})
    assert other.update([1], ["easy"], rate=1.0, max_alpha=0.75).alphas == {"easy": 0.75}


def test_an_absent_bucket_stays():
    state = EntropyCoefficients.init().update([5], ["easy"])
    assert state.update([], []) == state
    assert state.update([5], ["easy"]) == state


# KL


def test_dual_ascent_by_hand():
    state = KLBudget.init().update({"easy": 0.45})
    assert state.multipliers == pytest.approx({"easy": 1.004, "medium": 1.0, "hard": 1.0})
    low = KLBudget({"hard": 0.001}).update({"hard": 0.01})
    assert low.multipliers == {"hard": 0.0}  # 0.001 - 0.0019
    assert KLBudget.init().update({}) == KLBudget.init()
    other = KLBudget.init().update({"easy": 0.5}, budgets={"easy": 0.25}, rate=0.5)
    assert other.multipliers["easy"] == 1.125


@settings(max_examples=30)
@given(st.lists(st.floats(0, 1), max_size=20))
def test_dual_ascent_agrees_with_a_loop(kls):
    state, expected = KLBudget.init(), {"easy": 1.0, "medium": 1.0, "hard": 1.0}
    for number, kl in enumerate(kls):
        bucket = ["easy", "medium", "hard"][number % 3]
        state = state.update({bucket: kl})
        budget = {"easy": 0.05, "medium": 0.1, "hard": 0.2}[bucket]
        expected[bucket] = max(0.0, expected[bucket] + 0.01 * (kl - budget))
    assert state.multipliers == pytest.approx(expected)


def test_adaptive_kl_by_hand():
    assert AdaptiveKL.init(0.001).update(0.2, 512).coef == pytest.approx(0.00101024)
    assert AdaptiveKL(0.001).update(0.0, 512).coef == pytest.approx(0.001 * (1 - 0.2 * 0.0512))
    assert AdaptiveKL(0.001).update(0.11, 1000).coef == pytest.approx(0.001 * 1.01)
    assert AdaptiveKL(0.001).update(0.1, 512).coef == 0.001
    assert AdaptiveKL(1.0).update(3.0, 50, target=2.0, horizon=100).coef == pytest.approx(1.1)
    assert AdaptiveKL(0.001).update(math.nan, 512).coef == 0.001


def test_log_kl_by_hand():
    # An error of 1 from the start: after two updates the average is 1 - 0.9**2 = 0.19.
    settings = {"target": 0.5, "decay": 0.9, "every": 2, "rate": 1.0}
    state = LogKL.init(2.0).update(1.0, **settings)
    assert (state.coef, state.num_updates) == (2.0, 1)
    assert state.average == pytest.approx(0.1)
    state = state.update(1.0, **settings)
    assert state.coef == pytest.approx(2.0 * math.exp(0.19))
    for _ in range(2):
        state = state.update(1.0, **settings)
    assert state.coef == pytest.approx(2.0 * math.exp(0.19 + 0.2))  # 0.3439 is clipped
    assert state.num_updates == 4


def test_log_kl_rests_in_the_dead_zone_and_keeps_its_range():
    settings = {"target": 1.0, "decay": 0.0, "every": 1, "rate": 100.0}
    assert LogKL(0.5).update(1.019, **settings).coef == 0.5
    assert LogKL(0.5).update(0.981, **settings).coef == 0.5
    assert LogKL(0.5).update(1.021, **settings).coef == pytest.approx(0.5 * math.exp(2.1))
    assert LogKL(0.5).update(2.0, **settings).coef == 100.0
    assert LogKL(0.5).update(0.0, **settings).coef == 1e-4
    assert LogKL(0.5).update(math.nan, **settings) == LogKL(0.5)


@settings(max_examples=10, deadline=None)
@given(st.lists(st.floats(0, 0.05), min_size=250, max_size=320))
def test_log_kl_agrees_with_a_loop(kls):
    state, log_coef, average = LogKL.init(0.01), math.log(0.01), 0.0
    for number, kl in enumerate(kls, start=1):
        state = state.update(kl)
        average = 0.97 * average + 0.03 * (kl / 0.01 - 1)
        if number % 100 == 0 and abs(average) >= 0.02:
            log_coef += 0.05 * max(-0.2, min(0.2, average))
    assert math.log(state.coef) == pytest.approx(log_coef)


# The stage gate


def gates(values, **settings):
    state, found = StageGate.init(), []
    for value in values:
        state = state.update(value, **settings)
        found.append(state.is_late)
    return found


def test_the_early_stage_ends_after_the_sixth_validation_below_the_best():
    values = [0.30, 0.29, 0.28, 0.31, 0.30, 0.30, 0.31, 0.30, 0.29]
    assert gates(values) == [False] * 8 + [True]
    assert gates([*values, 0.9, 1.0])[-2:] == [True, True]  # for good
    assert gates(values, max_tolerance=0) == [False] + [True] * 8


def test_negative_scores_are_no_decline():
    assert not any(gates([-1.0, -0.9, -0.8, -0.7, -0.6, -0.5, -0.4, -0.4]))
    assert StageGate.init().update(-1.0) == StageGate(best=-1.0)


def test_a_validation_that_is_no_number_changes_nothing():
    state = StageGate.init().update(0.5)
    assert state.update(math.nan) == state


# Skipping


def test_only_the_surely_solved_are_skipped():
    state = SkipSet.init().update(
        ["sure", "unsure", "missed", "edge", "empty"],
        [4, 4, 3, 4, 0],
        [4, 4, 4, 4, 0],
        [0.1, 0.9, 0.1, 0.5, 0.1],
        threshold=0.5,
    )
    assert state.task_ids == {"sure": 0.1}
    assert "sure" in state
    assert "unsure" not in state
    after = state.update(["sure", "missed"], [0, 4], [4, 4], [2.0, 0.2], threshold=0.5)
    assert after.task_ids == {"sure": 0.1, "missed": 0.2}


# All of them

STATES = [
    DifficultyBuckets.init().update(["a", "ü"], [1, 3], [3, 3]),
    EntropyCoefficients.init(),
    EntropyCoefficients.init().update([1 / 3, 7], ["easy", "hard"]).update([2 / 3], ["easy"]),
    KLBudget.init().update({"medium": 1 / 3}),
    StageGate.init(),
    StageGate.init().update(0.1).update(1 / 3).update(0.2),
    AdaptiveKL.init(1e-3).update(0.17, 100),
    LogKL.init(0.01).update(0.017),
    SkipSet.init().update(["a"], [2], [2], [1 / 3], threshold=1.0),
]


@pytest.mark.parametrize("state", STATES, ids=lambda state: type(state).__name__)
def test_json_restores_a_state_exactly(state):
    saved = json.loads(json.dumps(dataclasses.asdict(state), allow_nan=False))
    assert type(state)(**saved) == state


@pytest.mark.parametrize("state", STATES, ids=lambda state: type(state).__name__)
def test_states_are_frozen(state):
    name = dataclasses.fields(state)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(state, name, None)

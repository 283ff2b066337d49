"""Controllers: states, their updates in a step, and their checkpoints."""

import dataclasses
import json
import math
from functools import partial

import numpy as np
import pytest

from jaxrl.training.controllers import (
    AdaptiveKL,
    Controllers,
    DifficultyBuckets,
    EntropyCoefficients,
    EntropyThreshold,
    KLBudget,
    LogKL,
    SkipSet,
    StageGate,
    compute_mean_divergences,
    grade_difficulty,
    update_controllers,
    update_stage_gate,
)
from jaxrl.types import GroupStats, flatten_groups
from tests.episodes import grouped, make_failure, make_trajectory, strayed, thinking
from tests.helpers import method_with

ENTROPIES = [0.1, 0.2, 1.0, 2.0, 1.5, 0.5, 0.1, 0.0, 0.3, 0.2]
WINDOWS = [1.175, 1.25, 1.025, 0.525, 0.225, 0.15]  # of four tokens each
PERCENTILE = 1.23125

# Difficulty


def test_difficulty_has_bounds_at_one_and_two_thirds():
    graded = {
        "easy": [(2, 3), (6, 8)],
        "medium": [(1, 3), (5, 8), (3, 8)],
        "hard": [(2, 8), (0, 1)],
    }
    for bucket, counts in graded.items():
        assert {grade_difficulty(*count) for count in counts} == {bucket}


def test_default_difficulties_are_those_of_integer_arithmetic():
    for size in range(1, 200):
        for right in range(size + 1):
            easy, medium = 3 * right >= 2 * size, 3 * right >= size
            expected = "easy" if easy else "medium" if medium else "hard"
            assert grade_difficulty(right, size) == expected


def test_difficulty_bounds_are_settings():
    state = DifficultyBuckets().update(
        ["a", "b", "c"], [7, 4, 3], [8, 8, 8], min_accuracies=(0.9, 0.5)
    )
    assert state.buckets == {"a": "medium", "b": "medium", "c": "hard"}


def test_buckets_are_the_last_seen():
    state = DifficultyBuckets().update(["a", "b"], [8, 0], [8, 8])
    after = state.update(["b", "c"], [4, 3], [8, 3])
    assert after.buckets == {"a": "easy", "b": "medium", "c": "easy"}
    assert state.buckets == {"a": "easy", "b": "hard"}
    # A task that was drawn twice is counted together.
    assert DifficultyBuckets().update(["a", "a"], [0, 3], [3, 3]).buckets == {"a": "medium"}


# Entropy


def test_the_mean_is_over_groups_and_rounded():
    state = EntropyCoefficients().update([1, 2.5, 100], ["easy", "easy", "hard"])
    assert state == EntropyCoefficients({"easy": 0.5, "medium": 0.5, "hard": 0.5}, state.targets)
    assert state.targets == {"easy": 2, "hard": 100}  # 1.75; the first mean is only a target
    after = state.update([3.5, 2.5], ["easy", "easy"])
    assert after.alphas == pytest.approx({"easy": 0.55, "medium": 0.5, "hard": 0.5})
    assert after.targets == {"easy": 3, "hard": 100}
    assert state.targets == {"easy": 2, "hard": 100}


def test_alpha_stays_in_its_range():
    state = EntropyCoefficients(dict.fromkeys(("easy", "medium", "hard"), 1.9))
    state = state.update([0, 0], ["easy", "hard"]).update([50, 50], ["easy", "hard"])
    assert (state.alphas["easy"], state.alphas["hard"]) == (2.0, 0.0)
    other = EntropyCoefficients({"easy": 0.5}, {"easy": 0})
    assert other.update([1], ["easy"], rate=1.0, max_alpha=0.75).alphas == {"easy": 0.75}


def test_the_threshold_is_the_median_over_samples_that_have_windows():
    none = np.zeros(0, np.float32)
    samples = [none, np.array([1.0, 3.0]), np.array([9.0]), none, np.array([4.0, 4.0])]
    # First quartiles 1.5, 9 and 4, whose median is 4; of all five windows together it is 3.
    actual = EntropyThreshold().update(samples, percentile=25.0)
    assert actual.value == 4.0
    assert EntropyThreshold().update(samples[:4], percentile=50.0).value == 5.5
    assert EntropyThreshold(value=2.0).update(samples, percentile=50.0, decay=0.5).value == 3.0


# KL


def test_adaptive_kl_by_hand():
    assert AdaptiveKL(0.001).update(0.2, 512).coef == pytest.approx(0.00101024)
    assert AdaptiveKL(0.001).update(0.0, 512).coef == pytest.approx(0.001 * (1 - 0.2 * 0.0512))
    assert AdaptiveKL(0.001).update(0.11, 1000).coef == pytest.approx(0.001 * 1.01)
    assert AdaptiveKL(0.001).update(0.1, 512).coef == 0.001
    assert AdaptiveKL(1.0).update(3.0, 50, target=2.0, horizon=100).coef == pytest.approx(1.1)
    assert AdaptiveKL(0.001).update(math.nan, 512).coef == 0.001


def test_log_kl_by_hand():
    # An error of 1 from the start: after two updates the average is 1 - 0.9**2 = 0.19.
    keywords = {"target": 0.5, "decay": 0.9, "every": 2, "rate": 1.0}
    state = LogKL(2.0).update(1.0, **keywords)
    assert (state.coef, state.num_updates) == (2.0, 1)
    assert state.average == pytest.approx(0.1)
    state = state.update(1.0, **keywords)
    assert state.coef == pytest.approx(2.0 * math.exp(0.19))
    for _ in range(2):
        state = state.update(1.0, **keywords)
    assert state.coef == pytest.approx(2.0 * math.exp(0.19 + 0.2))  # 0.3439 is clipped
    assert state.num_updates == 4


def test_log_kl_rests_in_the_dead_zone_and_keeps_its_range():
    keywords = {"target": 1.0, "decay": 0.0, "every": 1, "rate": 100.0}
    assert LogKL(0.5).update(1.019, **keywords).coef == 0.5
    assert LogKL(0.5).update(0.981, **keywords).coef == 0.5
    assert LogKL(0.5).update(1.021, **keywords).coef == pytest.approx(0.5 * math.exp(2.1))
    assert LogKL(0.5).update(2.0, **keywords).coef == 100.0
    assert LogKL(0.5).update(0.0, **keywords).coef == 1e-4
    assert LogKL(0.5).update(0.0, **keywords, min_coef=0.2).coef == 0.2
    assert LogKL(0.5).update(math.nan, **keywords) == LogKL(0.5)


# The stage gate


def run_gate(values, **settings):
    state, is_late = StageGate(), []
    for value in values:
        state = state.update(value, **settings)
        is_late.append(state.is_late)
    return is_late


def test_the_early_stage_ends_after_the_sixth_validation_below_the_best():
    values = [0.30, 0.29, 0.28, 0.31, 0.30, 0.30, 0.31, 0.30, 0.29]
    assert run_gate(values) == [False] * 8 + [True]
    assert run_gate([*values, 0.9, 1.0])[-2:] == [True, True]  # for good
    assert run_gate(values, max_tolerance=0) == [False] + [True] * 8


# Skipping


def test_only_the_surely_solved_are_skipped():
    state = SkipSet().update(
        ["sure", "unsure", "missed", "edge", "empty"],
        [4, 4, 3, 4, 0],
        [4, 4, 4, 4, 0],
        [0.1, 0.9, 0.1, 0.5, 0.1],
        threshold=0.5,
    )
    assert state.task_ids == {"sure": 0.1}
    after = state.update(["sure", "missed"], [0, 4], [4, 4], [2.0, 0.2], threshold=0.5)
    assert after.task_ids == {"sure": 0.1, "missed": 0.2}


def test_values_that_are_not_finite_move_no_controller():
    budget = KLBudget().update({"easy": math.nan, "hard": 1.0})
    assert budget.multipliers == {"easy": 1.0, "medium": 1.0, "hard": pytest.approx(1.008)}
    good, bad = np.array([1.0, 2.0], np.float32), np.array([1.0, np.nan], np.float32)
    threshold = EntropyThreshold().update([good, bad], percentile=50.0)
    assert threshold.value == 1.5
    assert threshold.update([bad]) == threshold


# As a method needs them, in checkpoints and in records.

ALL = {
    "shaping.boundary_aware": True,
    "shaping.entropy_reward": True,
    "filter.skip_solved": True,
    "kl.coef": 0.02,
    "kl.controller": "budget",
    "shaping.alpha_init": 0.25,
}
MOVED = Controllers(
    gate=StageGate(best=1 / 3, tolerance=2, is_late=False),
    threshold=EntropyThreshold(value=0.1 + 0.2),
    buckets=DifficultyBuckets({"q0": "easy", "q1": "hard"}),
    coefficients=EntropyCoefficients({"easy": 0.6, "medium": 0.0, "hard": 0.65}, {"easy": 12}),
    kl=KLBudget({"easy": 1.004, "medium": 0.0, "hard": 1e-17}),
    skipped=SkipSet({"q0": 0.05}),
)


def through_json(controllers, **changes):
    saved = json.loads(json.dumps(dataclasses.asdict(controllers)))
    return Controllers.from_json(saved, method_with(**{**ALL, **changes}))


@pytest.mark.parametrize(
    ("name", "kl"),
    [("budget", MOVED.kl), ("adaptive", AdaptiveKL(0.1 + 0.2)), ("log", LogKL(1e-4, -1 / 3, 7))],
)
def test_states_survive_json_bit_for_bit(name, kl):
    moved = dataclasses.replace(MOVED, kl=kl)
    assert through_json(moved, **{"kl.controller": name}) == moved


def test_a_changed_configuration_keeps_what_it_still_reads():
    # Another controller of the KL term starts afresh; the rest goes on.
    actual = through_json(MOVED, **{"kl.controller": "log"})
    assert actual == dataclasses.replace(MOVED, kl=LogKL(0.02))
    # What is turned off is dropped; what is turned on starts afresh.
    off = through_json(MOVED, **{"shaping.entropy_reward": False, "shaping.boundary_aware": False})
    assert off == Controllers(buckets=MOVED.buckets, kl=MOVED.kl, skipped=MOVED.skipped)
    saved = json.loads(json.dumps(dataclasses.asdict(off)))
    again = Controllers.from_json(saved, method_with(**ALL))
    assert again.buckets == MOVED.buckets
    assert (again.gate, again.threshold) == (StageGate(), EntropyThreshold())
    # So does all of a checkpoint that knows of no controllers.
    assert Controllers.from_json({}, method_with(**ALL)) == Controllers.init(method_with(**ALL))


def test_states_are_metrics():
    metrics = MOVED.metrics()
    assert metrics["controller/gate/best"] == 1 / 3
    assert metrics["controller/coefficients/targets/easy"] == 12
    assert [metrics[f"controller/buckets/{name}"] for name in ("easy", "medium")] == [1, 0]
    assert metrics["controller/skipped/count"] == 1


# A step moves them.

ares_method = partial(method_with, **{"shaping.entropy_reward": True})
kl_method = partial(method_with, **{"kl.coef": 0.5})


def update(controllers, trajectories, method, is_trigger=None):
    """Return the controllers after a step of these trajectories, and the windows of each."""
    after, groups = update_controllers(controllers, grouped(trajectories), (), method, is_trigger)
    return after, [t.windows for t in flatten_groups(groups)]


# Windows and their threshold.


def test_windows_and_the_first_threshold_by_hand():
    # The percentiles are 1.23125, then 0.5 of windows that are all alike, and 2; their median.
    group = [
        thinking(ENTROPIES),
        thinking([0.5] * 8, sample_index=1),
        thinking([2.0] * 6, sample_index=2),
    ]
    method = ares_method()
    controllers, windows = update(Controllers.init(method), group, method)
    assert controllers.entropy_threshold == pytest.approx(PERCENTILE, abs=1e-6)
    first, low, high = windows
    np.testing.assert_allclose(first.values, [0, 0, *WINDOWS, 0, 0, 0, 0], atol=1e-6)
    np.testing.assert_array_equal(first.valid, [False] * 2 + [True] * 6 + [False] * 4)
    assert [w.num_high_entropy_windows for w in windows] == [1, 0, 2]
    np.testing.assert_array_equal(np.flatnonzero(first.is_high), [3])
    assert [w.percentile for w in windows] == pytest.approx([PERCENTILE, 0.5, 2.0], abs=1e-6)
    excess = [1.25 - PERCENTILE, 0, 2 * (2 - PERCENTILE)]
    assert [w.excess for w in windows] == pytest.approx(excess, abs=1e-6)
    assert low.values.dtype == high.values.dtype == np.float32


def test_the_threshold_moves_before_it_is_used():
    # 0.9 and an estimate of 1.23125 make 0.9033125: still three windows above.
    method = ares_method()
    controllers = dataclasses.replace(Controllers.init(method), threshold=EntropyThreshold(0.9))
    controllers, [window] = update(controllers, [thinking(ENTROPIES)], method)
    assert controllers.entropy_threshold == pytest.approx(0.99 * 0.9 + 0.01 * PERCENTILE, abs=1e-7)
    assert window.num_high_entropy_windows == 3
    excess = sum(value - controllers.entropy_threshold for value in WINDOWS[:3])
    assert window.excess == pytest.approx(excess, abs=1e-5)


def test_the_threshold_has_the_settings_of_the_configuration():
    changes = {
        "shaping.entropy_window": 2,
        "shaping.entropy_percentile": 50.0,
        "shaping.entropy_decay": 0.5,
    }
    method = ares_method(**changes)
    controllers = dataclasses.replace(Controllers.init(method), threshold=EntropyThreshold(1.0))
    # Windows of two: 0.6, 1.5, 1.75, 1.0, 0.3, 0.05, 0.15, 0.25; their median is 0.45.
    controllers, [window] = update(controllers, [thinking(ENTROPIES)], method)
    assert controllers.entropy_threshold == pytest.approx(0.725, abs=1e-6)
    assert window.num_high_entropy_windows == 3


def test_without_any_window_nothing_is_known():
    method = ares_method(**{"kl.coef": 0.1, "kl.second_chance": True})
    group = [thinking([9.0] * 4, right=True), thinking([1.0], sample_index=1)]
    controllers, windows = update(Controllers.init(method), group, method)
    assert controllers.entropy_threshold is None
    assert [w.num_high_entropy_windows for w in windows] == [0, 0]
    # Difficulties are known all the same; targets are not.
    assert controllers.buckets.buckets == {"t0": "medium"}
    assert controllers.coefficients == Controllers.init(method).coefficients


def test_environment_errors_move_nothing():
    method = ares_method()
    good = [thinking(ENTROPIES, right=True), thinking([0.5] * 8, sample_index=1)]
    wild = thinking([7.0] * 9, right=True, sample_index=2, failed=True)
    alone, _ = update(Controllers.init(method), good, method)
    together, windows = update(Controllers.init(method), [wild, *good], method)
    assert together == alone
    assert len(windows) == 3
    lost, _ = update(Controllers.init(method), [wild], method)
    assert lost == Controllers.init(method)


def test_only_trigger_words_count():
    method = ares_method()
    trajectory = thinking(ENTROPIES)
    controllers = dataclasses.replace(Controllers.init(method), threshold=EntropyThreshold(0.9))
    is_trigger = np.zeros(60, bool)
    is_trigger[trajectory.token_ids[[2, 4, 7]]] = True
    _, [window] = update(controllers, [trajectory], method, is_trigger)
    triggers = [t for t in (2, 3, 4) if is_trigger[trajectory.token_ids[t]]]
    np.testing.assert_array_equal(np.flatnonzero(window.is_high), triggers)
    assert 0 < window.num_high_entropy_windows < 3
    assert window.excess > 0.5  # of all tokens, triggers or not


# Difficulties and coefficients.


def make_group(task, num_right, size, counts):
    """Return trajectories of a task with these numbers of tokens above a threshold of 1."""
    members = []
    for sample in range(size):
        count = counts[sample % len(counts)]
        # A window follows a token: the first of count + 4 alike tokens have one.
        entropies = [2.0] * (count + 4) if count else [0.1] * 6
        right = sample < num_right
        member = thinking(entropies, right=right, task_number=task, sample_index=sample)
        members.append(member)
    return members


def calibrated(method, **alphas):
    return dataclasses.replace(
        Controllers.init(method),
        threshold=EntropyThreshold(1.0),
        coefficients=EntropyCoefficients(
            {"easy": 0.5, "medium": 0.5, "hard": 0.5} | alphas,
            {"easy": 10, "medium": 20, "hard": 10},
        ),
    )


def test_coefficients_follow_the_distance_to_the_previous_target():
    # With a decay of 1 the threshold stays. Two easy tasks with means of 10 and 14, the target 10;
    # a medium one with 4, the target 20; a hard one with 7, the target 10.
    method = ares_method(**{"shaping.entropy_decay": 1.0})
    batch = [
        *make_group(0, 2, 3, [10]),
        *make_group(1, 3, 3, [12, 14, 16]),
        *make_group(2, 1, 3, [4]),
        *make_group(3, 0, 3, [6, 7, 8]),
    ]
    actual, windows = update(calibrated(method), batch, method)
    assert [w.num_high_entropy_windows for w in windows] == [
        10,
        10,
        10,
        12,
        14,
        16,
        4,
        4,
        4,
        6,
        7,
        8,
    ]
    assert actual.buckets.buckets == {"t0": "easy", "t1": "easy", "t2": "medium", "t3": "hard"}
    assert actual.coefficients.alphas == pytest.approx({"easy": 0.6, "medium": 0.0, "hard": 0.65})
    assert actual.coefficients.targets == {"easy": 12, "medium": 4, "hard": 7}


def test_the_coefficients_have_the_settings_of_the_configuration():
    changes = {"shaping.alpha_step": 0.5, "shaping.alpha_max": 1.0, "shaping.entropy_decay": 1.0}
    method = ares_method(**changes)
    batch = [*make_group(0, 3, 3, [11]), *make_group(3, 0, 3, [7])]
    actual, _ = update(calibrated(method, easy=0.25), batch, method)
    assert actual.coefficients.alphas == pytest.approx({"easy": 0.75, "medium": 0.5, "hard": 1.0})
    assert actual.coefficients.targets == {"easy": 11, "medium": 20, "hard": 7}  # one was absent


def test_an_update_uses_the_difficulties_of_its_own_batch():
    method = ares_method(**{"shaping.entropy_decay": 1.0})
    controllers = dataclasses.replace(
        calibrated(method), buckets=DifficultyBuckets({"t0": "hard", "t9": "medium"})
    )
    actual, _ = update(controllers, make_group(0, 3, 3, [12]), method)
    assert actual.buckets.buckets == {"t0": "easy", "t9": "medium"}
    assert actual.coefficients.alphas == pytest.approx({"easy": 0.6, "medium": 0.5, "hard": 0.5})


# Divergences.


BATCH = [
    make_trajectory(reward=1.0, length=6),
    make_failure(sample_index=1),
    make_trajectory(reward=0.25, task_number=1, length=4),
]
DIVERGENCES = [strayed(0.5, -0.25, 1.0, 0.75), None, strayed(0.25, 0.75)]


def with_divergences(trajectories, divergences):
    pairs = zip(trajectories, divergences, strict=True)
    return grouped(dataclasses.replace(t, divergence=divergence) for t, divergence in pairs)


def update_kl(controllers, trajectories, divergences, method):
    """Return the controllers after a step with these divergences."""
    groups = with_divergences(trajectories, divergences)
    return update_controllers(controllers, groups, (), method, None)[0]


def test_means_per_token_leave_out_what_has_no_token():
    last = make_trajectory(task_number=2, length=2)
    actual = compute_mean_divergences(with_divergences([*BATCH, last], [*DIVERGENCES, strayed()]))
    assert actual == [("t0", pytest.approx(0.5)), ("t1", pytest.approx(0.5))]


def test_adaptive_kl_has_the_settings_of_the_configuration():
    # A mean of 0.5 is 0.2 below the target; the failure is no sample, so two of ten count.
    method = kl_method(
        **{"kl.controller": "adaptive", "kl.adaptive.target": 0.625, "kl.adaptive.horizon": 10}
    )
    actual = update_kl(Controllers(kl=AdaptiveKL(1.0)), BATCH, DIVERGENCES, method)
    assert actual.kl.coef == pytest.approx(1 - 0.2 * 2 / 10)


def test_kl_budgets_by_hand():
    # Easy tasks strayed 0.45 nats a token on average, 0.4 beyond their budget; hard ones 0.1 less
    # than theirs; of medium ones there were none.
    method = kl_method(**{"kl.controller": "budget"})
    buckets = DifficultyBuckets({"t0": "easy", "t1": "hard"})
    right = [make_trajectory(sample_index=i, length=n) for i, n in ((0, 6), (2, 3))]
    right = [dataclasses.replace(t, is_correct=True) for t in right]
    batch = [right[0], *BATCH[1:], right[1]]
    divergences = [strayed(0.4, 0.2, 0.4, 0.2), None, strayed(0.0, 0.2), strayed(0.6)]
    controllers = Controllers(buckets=buckets, kl=KLBudget())
    actual = update_kl(controllers, batch, divergences, method)
    assert actual.kl.multipliers == pytest.approx({"easy": 1.004, "medium": 1.0, "hard": 0.999})
    assert actual.buckets == buckets
    tight = kl_method(
        **{"kl.controller": "budget", "kl.budget.budgets.hard": 0.05, "kl.budget.step": 100.0}
    )
    actual = update_kl(controllers, batch, divergences, tight)
    assert actual.kl.multipliers == pytest.approx({"easy": 41.0, "medium": 1.0, "hard": 6.0})
    idle = kl_method(**{"kl.controller": "budget", "kl.budget.step": 100.0})
    actual = update_kl(controllers, batch, divergences, idle)
    assert actual.kl.multipliers["hard"] == 0  # never below


# Skipped tasks and the gate.


def make_stats(task, *verdicts):
    """Return the statistics of a group with these verdicts; None is an environment error."""
    members = [
        make_failure(sample_index=i)
        if verdict is None
        else dataclasses.replace(make_trajectory(sample_index=i), is_correct=verdict)
        for i, verdict in enumerate(verdicts)
    ]
    [group] = grouped(members)
    return dataclasses.replace(GroupStats.from_group(group), task_id=task)


def test_a_task_is_not_skipped_for_what_failures_left_of_its_group():
    method = method_with(
        **{"filter.skip_solved": True, "filter.skip_entropy": 1.0, "rollout.group_size": 4}
    )
    stats = [
        make_stats("whole", True, True, True, True),
        make_stats("rest", True, None, None, None),
    ]
    controllers, _ = update_controllers(Controllers.init(method), (), stats, method, None)
    assert list(controllers.skipped.task_ids) == ["whole"]


def test_evaluations_update_the_gate_of_a_method_that_has_one():
    method = method_with(**{"shaping.boundary_aware": True, "shaping.stage_tolerance": 0})
    early = update_stage_gate(Controllers.init(method), 0.5, method.shaping)
    assert (early.gate.best, early.is_late) == (0.5, False)
    assert update_stage_gate(early, math.nan, method.shaping) == early
    assert update_stage_gate(early, 0.4, method.shaping).is_late
    assert update_stage_gate(Controllers(), 0.5, method.shaping) == Controllers()

"""Metrics of a training step, on trajectories made by hand."""

import dataclasses
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest

from jaxrl.logs.steps import (
    collect_sample_fields,
    compute_engine_metrics,
    compute_entropy_window_metrics,
    compute_kl_metrics,
    compute_packing_metrics,
    merge_update_metrics,
)
from jaxrl.objectives.metrics import Metric
from jaxrl.sampling.interfaces import EngineCounts
from jaxrl.training.controllers import (
    AdaptiveKL,
    Controllers,
    DifficultyBuckets,
    EntropyCoefficients,
    EntropyThreshold,
    LogKL,
)
from jaxrl.types import replace_fields
from tests.episodes import grouped, make_failure, make_trajectory, strayed, wavering
from tests.helpers import method_with


def update(loss, gap, norm):
    return {
        "actor/pg_loss": Metric(loss, "loss"),
        "x/gap": Metric(gap, "maximum"),
        "grad_norm": Metric(norm),
    }


def test_update_metrics_are_merged_by_their_reductions():
    measured = [update(1.0, 3.0, 2.0), update(3.0, 1.0, 4.0)]
    assert merge_update_metrics(measured) == {
        "actor/pg_loss": 2.0,
        "x/gap": 3.0,
        "actor/grad_norm": 3.0,
    }
    assert merge_update_metrics([]) == {}


def test_an_update_without_a_value_is_left_out_of_the_mean():
    merged = merge_update_metrics([update(1.0, math.nan, 2.0), update(3.0, 1.0, math.nan)])
    assert merged == {"actor/pg_loss": 2.0, "x/gap": 1.0, "actor/grad_norm": 2.0}
    assert math.isnan(merge_update_metrics([update(1.0, math.nan, 2.0)])["x/gap"])


def pack(num_micro, num_tokens, num_shared=0, imbalance=0.0, rest=None):
    """Return the fields that the metrics read, of a mini-batch with 2 rows of 10 tokens."""
    return SimpleNamespace(
        batch=SimpleNamespace(token_ids=np.zeros((3, 2, 10))),
        num_micro=num_micro,
        num_tokens=num_tokens,
        num_shared=num_shared,
        imbalance=imbalance,
        rest=rest,
    )


def test_padding_is_that_of_all_slots_and_ignores_empty_minibatches():
    minibatches = [
        pack(0, 0, rest=pack(1, 15, imbalance=0.4)),
        pack(2, 45, num_shared=15),
        pack(0, 0),
    ]
    assert compute_packing_metrics(minibatches) == {
        "rollout/padding": pytest.approx(1 - (15 + 30) / 60),
        "rollout/shared_tokens": pytest.approx(15 / 60),
        "rollout/imbalance": pytest.approx(0.4 * 15 / 60),
    }
    assert compute_packing_metrics([pack(0, 0)])["rollout/padding"] == 0


@pytest.mark.parametrize(
    ("state", "coef"), [(None, 0.5), (AdaptiveKL(2.0), 2.0), (LogKL(0.125), 0.125)]
)
def test_kl_metrics_are_the_divergence_and_the_coefficient_in_use(state, coef):
    # Half a nat a token in either trajectory.
    members = [make_trajectory(length=6), make_failure(sample_index=1)]
    members += [make_trajectory(task_number=1, length=4)]
    divergences = [strayed(0.5, -0.25, 1.0, 0.75), None, strayed(0.25, 0.75)]
    groups = replace_fields(grouped(members), divergence=divergences)
    kl = method_with(**{"kl.coef": 0.5}).kl
    assert compute_kl_metrics(groups, Controllers(kl=state), kl) == {
        "actor/kl_coef": coef,
        "actor/kl_measured": 0.5,
    }


def test_sample_fields_by_hand():
    controllers = Controllers(
        threshold=EntropyThreshold(1.25),
        buckets=DifficultyBuckets({"t0": "easy"}),
        coefficients=EntropyCoefficients(
            {"easy": 0.5, "medium": 0.5, "hard": 0.5}, {"easy": 10, "medium": 20}
        ),
    )
    right = dataclasses.replace(make_trajectory(), is_correct=True)
    groups = grouped([right, make_failure(task_number=4)])
    windows = [wavering(7), wavering(0, percentile=math.nan)]
    first, failed = collect_sample_fields(replace_fields(groups, windows=windows), controllers)
    assert first == {
        "group_id": 0,
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
    assert failed["group_id"] == 1
    assert failed["accuracy"] is None
    assert failed["entropy_percentile_thresholds"] is None
    assert failed["difficulty"] == "hard"
    assert failed["target_high_entropy_token_num"] is None
    assert json.loads(json.dumps([first, failed])) == [first, failed]
    [plain] = collect_sample_fields(grouped([right]), Controllers())
    assert plain.keys() == {"group_id", "uid", "global_id", "ground_truth", "accuracy"}


def test_window_metrics_by_difficulty():
    controllers = Controllers(
        threshold=EntropyThreshold(1.0), buckets=DifficultyBuckets({"t0": "easy", "t1": "hard"})
    )
    members_and_counts = [
        (make_trajectory(length=6), 3),
        (make_trajectory(task_number=1, length=9), 8),
        (make_trajectory(task_number=1, length=13), 10),
        (make_failure(length=30), 30),
    ]
    groups = grouped(
        dataclasses.replace(t, windows=wavering(count)) for t, count in members_and_counts
    )
    got = compute_entropy_window_metrics(groups, controllers)
    assert got["entropy/high_window_tokens"] == 7
    assert got["difficulty/easy/share"] == pytest.approx(1 / 3)
    assert got["difficulty/hard/share"] == pytest.approx(2 / 3)
    assert got["difficulty/medium/share"] == 0
    assert got["difficulty/easy/response_length"] == 4
    assert got["difficulty/hard/response_length"] == 9
    assert got["difficulty/easy/high_window_tokens"] == 3
    assert got["difficulty/hard/high_window_tokens"] == 9
    assert np.isnan(got["difficulty/medium/high_window_tokens"])
    assert compute_entropy_window_metrics(groups, Controllers()) == {}


@pytest.mark.parametrize(
    ("rewards", "share"),
    [
        ([[1.0, 0.4], [0.9, 0.9]], 0.5),
        ([[0.3, 0.4], [0.9, 1.1]], 1.0),
        ([[None, 0.4], [0.3, None]], math.nan),
    ],
    ids=str,
)
def test_inversions_are_groups_in_which_a_wrong_answer_earns_as_much(rewards, share):
    """Of each group the reward of its right answer, then of its wrong one."""
    batch = [
        dataclasses.replace(make_trajectory(task_number=g, reward=x), is_correct=is_correct)
        for g, pair in enumerate(rewards)
        for x, is_correct in zip(pair, (True, False), strict=True)
        if x is not None
    ]
    controllers = Controllers(coefficients=EntropyCoefficients())
    got = compute_entropy_window_metrics(
        grouped([*batch, make_failure(task_number=1)]), controllers
    )
    assert got["entropy/inversions"] == pytest.approx(share, nan_ok=True)


def test_engine_metrics_count_one_step():
    # Since the start of the process they would differ after a restart.
    before = EngineCounts(prefilled_prompt=4, prefilled_resume=3, sampled=20, row_steps=100)
    after = EngineCounts(
        prefilled_prompt=10,
        prefilled_resume=8,
        sampled=60,
        row_steps=200,
        preemptions=2,
        swapped=70,
    )
    engine = SimpleNamespace(counts=after, peak_pages=6, num_pages=8)
    assert compute_engine_metrics(engine, before) == {
        "rollout/row_occupancy": 0.4,
        "rollout/prefilled_prompt_tokens": 6,
        "rollout/prefilled_resume_tokens": 5,
        "rollout/sampled_tokens": 40,
        "rollout/preemptions": 2,
        "rollout/swapped_tokens": 70,
        "rollout/cache_use": 0.75,
    }

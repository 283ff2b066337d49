"""Objectives that read whole trajectories, against loops written from their papers' formulas."""

import math

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.objectives.aggregation import AGGREGATIONS
from jaxrl.objectives.corrections import importance_weights
from jaxrl.objectives.entropy import window_entropy
from jaxrl.objectives.losses import gspo_policy_loss
from tests.helpers import weights_in_rows

pytestmark = pytest.mark.usefixtures("quick_compilation")

ROWS, LENGTH = 3, 12  # one shape, so that everything compiles once


@st.composite
def batches(draw):
    """Packed trajectories: ids, mask, and arrays of logprobs on a grid.

    Log-ratios are multiples of 1/8, so that none of them is at the end of a range by rounding.
    """
    ids = np.zeros((ROWS, LENGTH), np.int32)
    numbers = iter(draw(st.permutations(range(1, ROWS * LENGTH + 1))))
    for row in ids:
        start = 0
        for size in draw(st.lists(st.integers(1, 7), max_size=4)):
            start += draw(st.integers(0, 1))
            row[start : start + size] = next(numbers)
            start += size
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    spread = draw(st.sampled_from([2, 16, 60]))
    logprobs, old, rollout = (
        (-rng.integers(0, spread + 1, ids.shape) / 8).astype(np.float32) for _ in range(3)
    )
    each = rng.choice([-2.0, -1.0, -0.5, 0.0, 0.75, 1.5], ROWS * LENGTH + 1)
    return {
        "ids": ids,
        "mask": (ids > 0) & (rng.random(ids.shape) < draw(st.sampled_from([0.0, 0.6, 1.0]))),
        "logprobs": logprobs,
        "old": old,
        "rollout": rollout,
        "advantages": each[ids].astype(np.float32),
        "entropies": (rng.integers(0, 32, ids.shape) / 8).astype(np.float32),
    }


def trajectories(batch):
    """Return the positions of each trajectory's sampled tokens, in order, if it has any."""
    by_id = {}
    for row in range(ROWS):
        for t in range(LENGTH):
            if batch["mask"][row, t]:
                by_id.setdefault(int(batch["ids"][row, t]), []).append((row, t))
    return list(by_id.values())


def per_token(batch, function):
    """Return `function(positions of the trajectory, position)` at sampled tokens, else 0."""
    out = np.zeros((ROWS, LENGTH))
    for positions in trajectories(batch):
        for position in positions:
            out[position] = function(positions, position)
    return out


def difference(batch, first, second, position):
    return float(batch[first][position]) - float(batch[second][position])


def clip(x, low, high):
    return min(max(x, low), high)


gspo_jit = jax.jit(gspo_policy_loss, static_argnames=("clip_low", "clip_high"))
weights_jit = jax.jit(importance_weights, static_argnames=("level", "mode", "cap", "low", "high"))
window_jit = jax.jit(window_entropy, static_argnames="window")


def mean_log_ratio(batch, positions):
    log_ratios = [difference(batch, "logprobs", "old", position) for position in positions]
    return sum(log_ratios) / len(log_ratios)


@settings(max_examples=25, deadline=None)
@given(batch=batches(), bounds=st.sampled_from([(3e-4, 4e-4), (0.2, 0.28)]))
def test_gspo(batch, bounds):
    low, high = bounds

    def loss(positions, position):
        advantage = float(batch["advantages"][position])
        ratio = math.exp(mean_log_ratio(batch, positions))
        return -min(ratio * advantage, clip(ratio, 1 - low, 1 + high) * advantage)

    def is_clipped(positions, position):
        advantage = float(batch["advantages"][position])
        ratio = math.exp(mean_log_ratio(batch, positions))
        return (advantage > 0 and ratio > 1 + high) or (advantage < 0 and ratio < 1 - low)

    arrays = [batch[name] for name in ("logprobs", "old", "advantages", "mask", "ids")]
    got, metrics = gspo_jit(*arrays, clip_low=low, clip_high=high)
    np.testing.assert_allclose(got, per_token(batch, loss), rtol=2e-5, atol=1e-6)
    np.testing.assert_array_equal(metrics["pg_clipfrac"], per_token(batch, is_clipped))

    # The objective itself: one term a trajectory, averaged.
    terms = [loss(positions, positions[0]) for positions in trajectories(batch)]
    total = sum(terms) / max(len(terms), 1)
    weights = weights_in_rows(batch["mask"], batch["ids"], "seq-mean-token-mean")
    np.testing.assert_allclose((weights * got).sum(), total, rtol=2e-5, atol=1e-6)


@settings(max_examples=40, deadline=None)
@given(batch=batches(), mode=st.sampled_from([*AGGREGATIONS]))
def test_aggregation(batch, mode):
    values = batch["entropies"]
    by_trajectory = [
        [float(values[position]) for position in positions] for positions in trajectories(batch)
    ]
    sums, lengths = [sum(x) for x in by_trajectory], [len(x) for x in by_trajectory]
    total = 0.0
    if by_trajectory:
        total = {
            "token-mean": sum(sums) / sum(lengths),
            "seq-mean-token-sum": np.mean(sums),
            "seq-mean-token-mean": np.mean(np.divide(sums, lengths)),
            "seq-mean-token-sum-norm": np.mean(sums) / 8,
        }[mode]
    weights = weights_in_rows(batch["mask"], batch["ids"], mode, 8)
    np.testing.assert_allclose((weights * values).sum(), total, rtol=1e-5)


@settings(max_examples=40, deadline=None)
@given(
    batch=batches(),
    level=st.sampled_from(["token", "sequence", "geometric"]),
    mode=st.sampled_from(["truncate", "mask"]),
)
def test_importance_weights(batch, level, mode):
    cap, low, high = 2.0, 0.5, 5.0

    def weight(positions, position):
        members = [position] if level == "token" else positions
        log_ratio = sum(difference(batch, "old", "rollout", each) for each in members)
        if level == "geometric":
            log_ratio /= len(members)
        ratio = math.exp(clip(log_ratio, -20.0, 20.0))
        if mode == "truncate":
            return min(ratio, cap)
        return ratio if low <= ratio <= high else 0.0

    arrays = batch["old"], batch["rollout"], batch["mask"], batch["ids"]
    got = weights_jit(*arrays, level=level, mode=mode, cap=cap, low=low, high=high)
    np.testing.assert_allclose(got, per_token(batch, weight), rtol=2e-5)


@settings(max_examples=30, deadline=None)
@given(batch=batches(), window=st.sampled_from([1, 4]))
def test_window_entropy(batch, window):
    values, defined = np.zeros((ROWS, LENGTH)), np.zeros((ROWS, LENGTH), bool)
    for positions in trajectories(batch):
        for index, position in enumerate(positions):
            following = positions[index + 1 : index + 1 + window]
            if len(following) == window:
                values[position] = sum(float(batch["entropies"][p]) for p in following) / window
                defined[position] = True
    arrays = batch["entropies"], batch["mask"], batch["ids"]
    for run in (window_entropy, window_jit):
        got, valid = run(*arrays, window=window)
        np.testing.assert_array_equal(valid, defined)
        np.testing.assert_allclose(got, values, rtol=1e-6)

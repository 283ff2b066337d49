"""Every loss against a loop over single tokens, written from its paper's formula."""

import math

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.objectives import losses
from jaxrl.objectives.aggregation import AGGREGATIONS
from jaxrl.objectives.corrections import importance_weights
from jaxrl.objectives.entropy import kl_weights, window_entropy
from jaxrl.objectives.kl import KL_ESTIMATORS, kl_estimate
from jaxrl.objectives.losses import negative_log_likelihood
from tests.helpers import metrics_of, per_token_of, weights_in_rows

pytestmark = pytest.mark.usefixtures("quick_compilation")

cispo_metrics = metrics_of(losses.cispo_policy_loss)
cispo_policy_loss = per_token_of(losses.cispo_policy_loss)
clip_metrics = metrics_of(losses.clipped_policy_loss)
clipped_policy_loss = per_token_of(losses.clipped_policy_loss)
gspo_metrics = metrics_of(losses.gspo_policy_loss)
gspo_policy_loss = per_token_of(losses.gspo_policy_loss)

ROWS, LENGTH = 3, 12  # one shape, so that everything compiles once


@st.composite
def batches(draw):
    """Packed trajectories: ids, mask, and arrays of logprobs on a grid.

    Log-ratios are multiples of 1/8, so that none of them is at the end of a range by rounding.
    """
    ids = np.zeros((ROWS, LENGTH), np.int32)
    names = iter(draw(st.permutations(range(1, ROWS * LENGTH + 1))))
    for row in ids:
        place = 0
        for size in draw(st.lists(st.integers(1, 7), max_size=4)):
            place += draw(st.integers(0, 1))
            row[place : place + size] = next(names)
            place += size
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    spread = draw(st.sampled_from([2, 16, 60]))
    logprobs, old, rollout, ref = (
        (-rng.integers(0, spread + 1, ids.shape) / 8).astype(np.float32) for _ in range(4)
    )
    each = rng.choice([-2.0, -1.0, -0.5, 0.0, 0.75, 1.5], ROWS * LENGTH + 1)
    return {
        "ids": ids,
        "mask": (ids > 0) & (rng.random(ids.shape) < draw(st.sampled_from([0.0, 0.6, 1.0]))),
        "logprobs": logprobs,
        "old": old,
        "rollout": rollout,
        "ref": ref,
        "advantages": each[ids].astype(np.float32),
        "entropies": (rng.integers(0, 32, ids.shape) / 8).astype(np.float32),
    }


def trajectories(batch):
    """Of each trajectory that has any: the places of its sampled tokens, in order."""
    found = {}
    for row in range(ROWS):
        for t in range(LENGTH):
            if batch["mask"][row, t]:
                found.setdefault(int(batch["ids"][row, t]), []).append((row, t))
    return list(found.values())


def per_token(batch, function):
    """Zeros, but `function` of the trajectory's places and the place at every sampled token."""
    out = np.zeros((ROWS, LENGTH))
    for places in trajectories(batch):
        for place in places:
            out[place] = function(places, place)
    return out


def difference(batch, first, second, place):
    return float(batch[first][place]) - float(batch[second][place])


def clip(x, low, high):
    return min(max(x, low), high)


RANGE = ("clip_low", "clip_high")
clipped_jit = jax.jit(
    lambda *arrays, **given: (
        clipped_policy_loss(*arrays, **given),
        clip_metrics(*arrays, **given),
    ),
    static_argnames=(*RANGE, "dual_clip"),
)
gspo_jit = jax.jit(
    lambda *arrays, **given: (gspo_policy_loss(*arrays, **given), gspo_metrics(*arrays, **given)),
    static_argnames=RANGE,
)
cispo_jit = jax.jit(
    lambda *arrays, **given: (cispo_policy_loss(*arrays, **given), cispo_metrics(*arrays, **given)),
    static_argnames=RANGE,
)
kl_jit = jax.jit(kl_estimate, static_argnames="estimator")
weights_jit = jax.jit(importance_weights, static_argnames=("level", "mode", "cap", "low", "high"))
window_jit = jax.jit(window_entropy, static_argnames="window")


def loss_arrays(batch):
    return batch["logprobs"], batch["old"], batch["advantages"], batch["mask"]


@settings(max_examples=40, deadline=None)
@given(
    batch=batches(), given=st.sampled_from([(0.2, 0.28, 0.0), (0.2, 0.28, 3.0), (0.1, 0.1, 1.5)])
)
def test_clipped_loss(batch, given):
    low, high, dual = given

    def loss(places, place):
        advantage = float(batch["advantages"][place])
        ratio = math.exp(difference(batch, "logprobs", "old", place))
        objective = min(ratio * advantage, clip(ratio, 1 - low, 1 + high) * advantage)
        if dual and advantage < 0:
            objective = max(objective, dual * advantage)
        return -objective

    def was_clipped(places, place):
        advantage = float(batch["advantages"][place])
        ratio = math.exp(difference(batch, "logprobs", "old", place))
        return (advantage > 0 and ratio > 1 + high) or (advantage < 0 and ratio < 1 - low)

    def was_limited(places, place):
        ratio = math.exp(difference(batch, "logprobs", "old", place))
        return bool(dual) and batch["advantages"][place] < 0 and max(ratio, 1 - low) > dual

    settings = {"clip_low": low, "clip_high": high, "dual_clip": dual}
    got, metrics = clipped_jit(*loss_arrays(batch), **settings)
    np.testing.assert_allclose(got, per_token(batch, loss), rtol=2e-5, atol=1e-6)
    np.testing.assert_array_equal(metrics["pg_clipfrac"], per_token(batch, was_clipped))
    np.testing.assert_array_equal(metrics["pg_clipfrac_lower"], per_token(batch, was_limited))
    minus_log_ratio = lambda _, place: difference(batch, "old", "logprobs", place)  # noqa: E731
    np.testing.assert_array_equal(metrics["ppo_kl"], per_token(batch, minus_log_ratio))


def mean_log_ratio(batch, places):
    return sum(difference(batch, "logprobs", "old", place) for place in places) / len(places)


@settings(max_examples=40, deadline=None)
@given(batch=batches(), bounds=st.sampled_from([(3e-4, 4e-4), (0.2, 0.28)]))
def test_gspo(batch, bounds):
    low, high = bounds

    def loss(places, place):
        advantage = float(batch["advantages"][place])
        ratio = math.exp(mean_log_ratio(batch, places))
        return -min(ratio * advantage, clip(ratio, 1 - low, 1 + high) * advantage)

    def was_clipped(places, place):
        advantage = float(batch["advantages"][place])
        ratio = math.exp(mean_log_ratio(batch, places))
        return (advantage > 0 and ratio > 1 + high) or (advantage < 0 and ratio < 1 - low)

    given = {"clip_low": low, "clip_high": high}
    got, metrics = gspo_jit(*loss_arrays(batch), batch["ids"], **given)
    expected = per_token(batch, loss)
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=1e-6)
    np.testing.assert_array_equal(metrics["pg_clipfrac"], per_token(batch, was_clipped))
    minus_log_ratio = lambda _, place: difference(batch, "old", "logprobs", place)  # noqa: E731
    np.testing.assert_array_equal(metrics["ppo_kl"], per_token(batch, minus_log_ratio))

    # The objective itself: one term a trajectory, averaged.
    places = trajectories(batch)
    total = sum(loss(own, own[0]) for own in places) / max(len(places), 1)
    weights = weights_in_rows(batch["mask"], batch["ids"], "seq-mean-token-mean")
    np.testing.assert_allclose((weights * got).sum(), total, rtol=2e-5, atol=1e-6)


@settings(max_examples=40, deadline=None)
@given(batch=batches(), bounds=st.sampled_from([(1.0, 4.0), (0.2, 0.28)]))
def test_cispo(batch, bounds):
    low, high = bounds

    def loss(places, place):
        ratio = math.exp(difference(batch, "logprobs", "old", place))
        weight = clip(ratio, 1 - low, 1 + high)
        return -weight * float(batch["advantages"][place]) * float(batch["logprobs"][place])

    def was_clipped(places, place):
        ratio = math.exp(difference(batch, "logprobs", "old", place))
        return clip(ratio, 1 - low, 1 + high) != ratio

    given = {"clip_low": low, "clip_high": high}
    got, metrics = cispo_jit(*loss_arrays(batch), **given)
    np.testing.assert_allclose(got, per_token(batch, loss), rtol=2e-5, atol=1e-6)
    np.testing.assert_array_equal(metrics["pg_clipfrac"], per_token(batch, was_clipped))
    minus_log_ratio = lambda _, place: difference(batch, "old", "logprobs", place)  # noqa: E731
    np.testing.assert_array_equal(metrics["ppo_kl"], per_token(batch, minus_log_ratio))


@settings(max_examples=10, deadline=None)
@given(batch=batches())
def test_likelihood(batch):
    got = negative_log_likelihood(batch["logprobs"], batch["mask"])
    expected = per_token(batch, lambda _, place: -batch["logprobs"][place])
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
@settings(max_examples=15, deadline=None)
@given(batch=batches())
def test_kl(estimator, batch):
    def estimate(places, place):
        log_ratio = difference(batch, "ref", "logprobs", place)  # r = anchor / current
        return {
            "k1": -log_ratio,
            "k2": log_ratio**2 / 2,
            "k3": min(math.exp(log_ratio) - 1 - log_ratio, 10.0),
            "abs": abs(log_ratio),
        }[estimator.removesuffix("+")]

    got = kl_jit(batch["logprobs"], batch["ref"], batch["mask"], estimator=KL_ESTIMATORS[estimator])
    np.testing.assert_allclose(got, per_token(batch, estimate), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("mode", AGGREGATIONS)
@settings(max_examples=20, deadline=None)
@given(batch=batches())
def test_aggregation(mode, batch):
    values = batch["entropies"]
    own = [[float(values[place]) for place in places] for places in trajectories(batch)]
    total = 0.0
    if own:
        total = {
            "token-mean": sum(map(sum, own)) / sum(map(len, own)),
            "seq-mean-token-sum": sum(map(sum, own)) / len(own),
            "seq-mean-token-mean": sum(sum(x) / len(x) for x in own) / len(own),
            "seq-mean-token-sum-norm": sum(map(sum, own)) / (len(own) * 8.0),
        }[mode]
    weights = weights_in_rows(batch["mask"], batch["ids"], mode, 8)
    np.testing.assert_allclose((weights * values).sum(), total, rtol=1e-5)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("mode", ["truncate", "mask"])
@settings(max_examples=20, deadline=None)
@given(batch=batches())
def test_importance_weights(level, mode, batch):
    cap, low, high = 2.0, 0.5, 5.0

    def weight(places, place):
        own = places if level == "sequence" else [place]
        log_ratio = sum(difference(batch, "old", "rollout", each) for each in own)
        ratio = math.exp(clip(log_ratio, -20.0, 20.0))
        if mode == "truncate":
            return min(ratio, cap)
        return ratio if low <= ratio <= high else 0.0

    arrays = batch["old"], batch["rollout"], batch["mask"], batch["ids"]
    got = weights_jit(*arrays, level=level, mode=mode, cap=cap, low=low, high=high)
    np.testing.assert_allclose(got, per_token(batch, weight), rtol=2e-5)


@pytest.mark.parametrize("window", [1, 4])
@settings(max_examples=30, deadline=None)
@given(batch=batches())
def test_window_entropy(window, batch):
    values, defined = np.zeros((ROWS, LENGTH)), np.zeros((ROWS, LENGTH), bool)
    for places in trajectories(batch):
        for index, place in enumerate(places):
            following = places[index + 1 : index + 1 + window]
            if len(following) == window:
                values[place] = sum(float(batch["entropies"][p]) for p in following) / window
                defined[place] = True
    arrays = batch["entropies"], batch["mask"], batch["ids"]
    for run in (window_entropy, window_jit):
        got, valid = run(*arrays, window=window)
        np.testing.assert_array_equal(valid, defined)
        np.testing.assert_allclose(got, values, rtol=1e-6)


@settings(max_examples=15, deadline=None)
@given(batch=batches(), low_factor=st.sampled_from([0.0, 0.5, 1.0]))
def test_kl_weights(batch, low_factor):
    scale = np.abs(batch["advantages"])
    expected = np.zeros((ROWS, LENGTH))
    for place in np.ndindex(expected.shape):
        expected[place] = 0.01 * float(scale[place])
        if batch["mask"][place]:
            expected[place] *= low_factor
    got = kl_weights(batch["mask"], kl_coef=0.01, low_factor=low_factor, bucket_scale=scale)
    np.testing.assert_allclose(got, expected, rtol=1e-6)

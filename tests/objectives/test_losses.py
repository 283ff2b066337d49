import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.objectives import losses
from jaxrl.objectives.kl import kl_estimate
from jaxrl.objectives.losses import negative_log_likelihood
from tests.helpers import metrics_of, per_token_of, weights_in_rows

pytestmark = pytest.mark.usefixtures("quick_compilation")

cispo_metrics = metrics_of(losses.cispo_policy_loss)
cispo_policy_loss = per_token_of(losses.cispo_policy_loss)
clip_metrics = metrics_of(losses.clipped_policy_loss)
clipped_policy_loss = per_token_of(losses.clipped_policy_loss)
gspo_metrics = metrics_of(losses.gspo_policy_loss)
gspo_policy_loss = per_token_of(losses.gspo_policy_loss)

DAPO_RANGE = {"clip_low": 0.2, "clip_high": 0.28}

# Two trajectories with an anchor each; the second one's tool tokens and the padding are masked.
LOGPROBS = np.array([[-1, -0.5, -2, 0], [-0.3, -1.2, -0.7, -0.9]], np.float32)
OLD = np.array([[-1.1, -0.9, -2, 0], [-0.3, -1, -1.7, -0.9]], np.float32)
REF = np.array([[-1, -0.7, -1.5, 0], [-0.4, -1.2, -0.6, -0.9]], np.float32)
MASK = np.array([[1, 1, 0, 0], [1, 0, 1, 1]], bool)
ADVANTAGES = np.array([[1] * 4, [-1] * 4], np.float32)
IDS = np.array([[1] * 4, [2] * 4])
GSPO_RANGE = {"clip_low": 3e-4, "clip_high": 4e-4}
CISPO_RANGE = {"clip_low": 1.0, "clip_high": 4.0}


def one_token(ratio, advantage):
    return (
        np.log(np.array([[ratio]], np.float32)),
        np.zeros((1, 1), np.float32),
        np.array([[advantage]], np.float32),
        np.ones((1, 1), bool),
    )


@pytest.mark.parametrize(
    ("ratio", "advantage", "dual_clip", "expected"),
    [
        (1.5, 1, 0.0, -1.28),
        (1.25, 1, 0.0, -1.25),
        (0.5, 1, 0.0, -0.5),
        (0.5, -1, 0.0, 0.8),
        (1.5, -1, 0.0, 1.5),
        (5, -1, 0.0, 5),
        (5, -1, 3.0, 3),
        (5, -1, 10.0, 5),
        (12, -1, 10.0, 10),
        (5, 1, 3.0, -1.28),
    ],
)
def test_one_token_by_hand(ratio, advantage, dual_clip, expected):
    got = clipped_policy_loss(*one_token(ratio, advantage), **DAPO_RANGE, dual_clip=dual_clip)
    np.testing.assert_allclose(got, [[expected]], rtol=1e-6)


@pytest.mark.parametrize(
    ("mode", "policy", "kl", "total"),
    [
        ("token-mean", 0.466622, 0.005748, 0.467197),
        ("seq-mean-token-mean", 0.190088, 0.006351, 0.190723),
    ],
)
def test_whole_loss_by_hand(mode, policy, kl, total):
    weights = weights_in_rows(MASK, IDS, mode)
    loss = clipped_policy_loss(LOGPROBS, OLD, ADVANTAGES, MASK, **DAPO_RANGE, dual_clip=3.0)
    k3 = kl_estimate(LOGPROBS, REF, MASK)
    got = [(weights * x).sum() for x in (loss, k3, loss + 0.1 * k3)]
    np.testing.assert_allclose(got, [policy, kl, total], atol=1e-6)


@pytest.mark.parametrize(
    ("ratio", "advantage", "clipped", "dual_clipped"),
    [
        (1.5, 1, 1, 0),
        (1.25, 1, 0, 0),
        (0.5, 1, 0, 0),
        (0.5, -1, 1, 0),
        (5, -1, 0, 1),
        (2, -1, 0, 0),
    ],
)
def test_metrics_by_hand(ratio, advantage, clipped, dual_clipped):
    got = clip_metrics(*one_token(ratio, advantage), **DAPO_RANGE, dual_clip=3.0)
    assert got["pg_clipfrac"] == clipped
    assert got["pg_clipfrac_lower"] == dual_clipped
    np.testing.assert_allclose(got["ppo_kl"], [[-np.log(ratio)]], rtol=1e-6)


def test_metrics_of_a_batch():
    got = clip_metrics(LOGPROBS, OLD, ADVANTAGES, MASK, **DAPO_RANGE)
    # Ratios e^.1, e^.4 with advantage 1; 1, e, 1 with advantage -1: one is over the ceiling.
    np.testing.assert_array_equal(got["pg_clipfrac"], [[0, 1, 0, 0], [0, 0, 0, 0]])
    assert not got["pg_clipfrac_lower"].any()
    np.testing.assert_allclose(got["ppo_kl"], np.where(MASK, OLD - LOGPROBS, 0), rtol=1e-6)


@pytest.mark.parametrize(
    ("bounds", "first", "mean"), [(GSPO_RANGE, -1.0004, 0.197606), (DAPO_RANGE, -1.28, 0.057806)]
)
def test_gspo_by_hand(bounds, first, mean):
    # The mean log-ratios are (.1 + .4) / 2 and (0 + 1 + 0) / 3: ratios 1.284025 and 1.395612.
    got = gspo_policy_loss(LOGPROBS, OLD, ADVANTAGES, MASK, IDS, **bounds)
    np.testing.assert_allclose(got, MASK * np.array([[first], [1.395612]]), rtol=1e-6)
    mode = "seq-mean-token-mean"
    weights = weights_in_rows(MASK, IDS, mode)
    np.testing.assert_allclose((weights * got).sum(), mean, atol=1e-6)
    metrics = gspo_metrics(LOGPROBS, OLD, ADVANTAGES, MASK, IDS, **bounds)
    np.testing.assert_array_equal(metrics["pg_clipfrac"], [[1, 1, 0, 0], [0, 0, 0, 0]])
    np.testing.assert_allclose(metrics["ppo_kl"], np.where(MASK, OLD - LOGPROBS, 0), rtol=1e-6)


@pytest.mark.parametrize(
    ("bounds", "weights", "mean", "clipped"),
    [
        (CISPO_RANGE, [1.105171, 1.491825, 1, 2.718282, 1], -0.250343, [0, 0, 0, 0, 0]),
        (DAPO_RANGE, [1.105171, 1.28, 1, 1.28, 1], -0.070166, [0, 1, 0, 1, 0]),
    ],
)
def test_cispo_by_hand(bounds, weights, mean, clipped):
    got = np.asarray(cispo_policy_loss(LOGPROBS, OLD, ADVANTAGES, MASK, **bounds))
    expected = -np.array(weights) * (ADVANTAGES * LOGPROBS)[MASK]
    np.testing.assert_allclose(got[MASK], expected, rtol=1e-6)
    np.testing.assert_allclose(got.sum() / 5, mean, atol=1e-6)
    metrics = cispo_metrics(LOGPROBS, OLD, ADVANTAGES, MASK, **bounds)
    np.testing.assert_array_equal(np.asarray(metrics["pg_clipfrac"])[MASK], clipped)
    assert not np.asarray(metrics["pg_clipfrac"])[~MASK].any()
    np.testing.assert_allclose(metrics["ppo_kl"], np.where(MASK, OLD - LOGPROBS, 0), rtol=1e-6)


def test_likelihood_by_hand():
    got = negative_log_likelihood(LOGPROBS, MASK)
    np.testing.assert_allclose(got, [[1, 0.5, 0, 0], [0.3, 0, 0.7, 0.9]])


def losses_of(old, advantages, mask):
    return {
        "policy": lambda x: clipped_policy_loss(x, old, advantages, mask, **DAPO_RANGE),
        "dual": lambda x: clipped_policy_loss(
            x, old, advantages, mask, **DAPO_RANGE, dual_clip=3.0
        ),
        "gspo": lambda x: gspo_policy_loss(x, old, advantages, mask, IDS, **DAPO_RANGE),
        "cispo": lambda x: cispo_policy_loss(x, old, advantages, mask, **CISPO_RANGE),
        "likelihood": lambda x: negative_log_likelihood(x, mask),
    }


EXTREMES = [0.0, -1e4, 1e4, -np.inf, np.inf, np.nan]


@pytest.mark.parametrize("name", ["policy", "dual", "gspo", "cispo", "likelihood"])
@pytest.mark.parametrize("extreme", EXTREMES)
@pytest.mark.parametrize("old_extreme", EXTREMES)
def test_masked_tokens_are_inert_whatever_they_hold(name, extreme, old_extreme):
    advantages = np.where(MASK, ADVANTAGES, extreme).astype(np.float32)
    loss = losses_of(np.where(MASK, OLD, old_extreme).astype(np.float32), advantages, MASK)[name]
    logprobs = jnp.where(MASK, LOGPROBS, extreme)
    clean = losses_of(OLD, ADVANTAGES, MASK)[name]
    np.testing.assert_array_equal(loss(logprobs), clean(LOGPROBS))
    got = jax.grad(lambda x: loss(x).sum())(logprobs)
    assert (got[~MASK] == 0).all()
    np.testing.assert_array_equal(got, jax.grad(lambda x: clean(x).sum())(jnp.array(LOGPROBS)))


@pytest.mark.parametrize("extreme", EXTREMES)
def test_metrics_of_masked_tokens_are_zero(extreme):
    x = np.full((2, 4), extreme, np.float32)
    arrays = x, -x, x, np.zeros((2, 4), bool)
    for got in (
        clip_metrics(*arrays, **DAPO_RANGE, dual_clip=3.0),
        gspo_metrics(*arrays, IDS, **GSPO_RANGE),
        cispo_metrics(*arrays, **CISPO_RANGE),
    ):
        assert all((value == 0).all() for value in got.values())


@pytest.mark.parametrize("name", ["policy", "gspo", "cispo"])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_an_unmasked_extreme_stays_finite(name, advantage):
    old = np.zeros((2, 4), np.float32)
    loss = losses_of(old, advantage * np.ones_like(old), np.ones((2, 4), bool))[name]
    logprobs = jnp.array([[1e4, -1e4, 0, 0], [-1e4, -1e4, 0, -1]])
    value, gradient = jax.value_and_grad(lambda x: loss(x).sum())(logprobs)
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()

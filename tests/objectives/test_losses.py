import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.objectives.kl import kl_estimate
from jaxrl.objectives.losses import (
    PolicyLoss,
    cispo_policy_loss,
    clipped_policy_loss,
    gspo_policy_loss,
    negative_log_likelihood,
)
from tests.helpers import weights_in_rows

pytestmark = pytest.mark.usefixtures("quick_compilation")

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


@pytest.mark.parametrize(
    ("ratio", "advantage", "dual_clip", "expected", "clipped", "dual_clipped"),
    [
        (1.5, 1, 0.0, -1.28, 1, 0),
        (1.25, 1, 0.0, -1.25, 0, 0),
        (0.5, 1, 0.0, -0.5, 0, 0),
        (0.5, -1, 0.0, 0.8, 1, 0),
        (5, -1, 0.0, 5, 0, 0),
        (5, -1, 3.0, 3, 0, 1),
        (5, -1, 10.0, 5, 0, 0),
        (5, 1, 3.0, -1.28, 1, 0),
    ],
)
def test_one_token_by_hand(ratio, advantage, dual_clip, expected, clipped, dual_clipped):
    old, mask = np.zeros((1, 1), np.float32), np.ones((1, 1), bool)
    actual = clipped_policy_loss(
        np.full((1, 1), np.log(ratio), np.float32),
        old,
        np.full((1, 1), advantage, np.float32),
        mask,
        **DAPO_RANGE,
        dual_clip=dual_clip,
    )
    np.testing.assert_allclose(actual.per_token, [[expected]], rtol=1e-6)
    assert actual.metrics["pg_clipfrac"] == clipped
    assert actual.metrics["pg_clipfrac_lower"] == dual_clipped
    np.testing.assert_allclose(actual.metrics["ppo_kl"], [[-np.log(ratio)]], rtol=1e-6)


@pytest.mark.parametrize(
    ("mode", "policy", "kl", "total"),
    [
        ("token-mean", 0.466622, 0.005748, 0.467197),
        ("seq-mean-token-mean", 0.190088, 0.006351, 0.190723),
    ],
)
def test_whole_loss_by_hand(mode, policy, kl, total):
    weights = weights_in_rows(MASK, IDS, mode)
    loss, metrics = clipped_policy_loss(
        LOGPROBS, OLD, ADVANTAGES, MASK, **DAPO_RANGE, dual_clip=3.0
    )
    k3 = kl_estimate(LOGPROBS, REF, MASK)
    actual = [(weights * x).sum() for x in (loss, k3, loss + 0.1 * k3)]
    np.testing.assert_allclose(actual, [policy, kl, total], atol=1e-6)
    # Ratios e^.1, e^.4 with advantage 1; 1, e, 1 with advantage -1: one is over the ceiling.
    np.testing.assert_array_equal(metrics["pg_clipfrac"], [[0, 1, 0, 0], [0, 0, 0, 0]])
    assert not metrics["pg_clipfrac_lower"].any()
    np.testing.assert_allclose(metrics["ppo_kl"], np.where(MASK, OLD - LOGPROBS, 0), rtol=1e-6)


@pytest.mark.parametrize(
    ("bounds", "first", "mean"), [(GSPO_RANGE, -1.0004, 0.197606), (DAPO_RANGE, -1.28, 0.057806)]
)
def test_gspo_by_hand(bounds, first, mean):
    # The mean log-ratios are (.1 + .4) / 2 and (0 + 1 + 0) / 3: ratios 1.284025 and 1.395612.
    actual, metrics = gspo_policy_loss(LOGPROBS, OLD, ADVANTAGES, MASK, IDS, **bounds)
    np.testing.assert_allclose(actual, MASK * np.array([[first], [1.395612]]), rtol=1e-6)
    weights = weights_in_rows(MASK, IDS, "seq-mean-token-mean")
    np.testing.assert_allclose((weights * actual).sum(), mean, atol=1e-6)
    np.testing.assert_array_equal(metrics["pg_clipfrac"], [[1, 1, 0, 0], [0, 0, 0, 0]])


@pytest.mark.parametrize(
    ("bounds", "weights", "mean", "clipped"),
    [
        (CISPO_RANGE, [1.105171, 1.491825, 1, 2.718282, 1], -0.250343, [0, 0, 0, 0, 0]),
        (DAPO_RANGE, [1.105171, 1.28, 1, 1.28, 1], -0.070166, [0, 1, 0, 1, 0]),
    ],
)
def test_cispo_by_hand(bounds, weights, mean, clipped):
    actual, metrics = cispo_policy_loss(LOGPROBS, OLD, ADVANTAGES, MASK, **bounds)
    expected = -np.array(weights) * (ADVANTAGES * LOGPROBS)[MASK]
    np.testing.assert_allclose(np.asarray(actual)[MASK], expected, rtol=1e-6)
    np.testing.assert_allclose(actual.sum() / 5, mean, atol=1e-6)
    np.testing.assert_array_equal(np.asarray(metrics["pg_clipfrac"])[MASK], clipped)


LOSSES = {
    "clip": lambda *arrays: clipped_policy_loss(*arrays, **DAPO_RANGE),
    "dual clip": lambda *arrays: clipped_policy_loss(*arrays, **DAPO_RANGE, dual_clip=3.0),
    "gspo": lambda *arrays: gspo_policy_loss(*arrays, IDS, **DAPO_RANGE),
    "cispo": lambda *arrays: cispo_policy_loss(*arrays, **CISPO_RANGE),
    "likelihood": lambda logprobs, old_logprobs, advantages, mask: PolicyLoss(
        negative_log_likelihood(logprobs, mask), {}
    ),
}
EXTREMES = [0.0, -1e4, 1e4, -np.inf, np.inf, np.nan]


def compile_gradient(name):
    """Return a function of a loss's arrays: its gradient, and its values and metrics."""

    def total(logprobs, *arrays):
        loss = LOSSES[name](logprobs, *arrays)
        return loss.per_token.sum(), loss

    return jax.jit(jax.grad(total, has_aux=True))


@pytest.mark.parametrize("name", LOSSES)
def test_masked_tokens_are_inert_whatever_they_hold(name):
    run = compile_gradient(name)
    expected_gradient, expected = run(LOGPROBS, OLD, ADVANTAGES, MASK)
    assert (expected_gradient[~MASK] == 0).all()
    for extreme in EXTREMES:
        for old_extreme in EXTREMES:
            logprobs = np.where(MASK, LOGPROBS, np.float32(extreme))
            old = np.where(MASK, OLD, np.float32(old_extreme))
            advantages = np.where(MASK, ADVANTAGES, np.float32(extreme))
            gradient, actual = run(logprobs, old, advantages, MASK)
            np.testing.assert_array_equal(gradient, expected_gradient)
            jax.tree.map(np.testing.assert_array_equal, actual, expected)
    for value in expected.metrics.values():
        assert (value[~MASK] == 0).all()


@pytest.mark.parametrize("name", ["clip", "gspo", "cispo"])
def test_an_unmasked_extreme_stays_finite(name):
    run = compile_gradient(name)
    logprobs = jnp.array([[1e4, -1e4, 0, 0], [-1e4, -1e4, 0, -1]])
    for advantage in (-1, 1):
        advantages = np.full((2, 4), advantage, np.float32)
        gradient, actual = run(
            logprobs, np.zeros((2, 4), np.float32), advantages, np.ones_like(MASK)
        )
        assert np.isfinite(actual.per_token).all()
        assert np.isfinite(gradient).all()

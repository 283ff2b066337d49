"""Gradients that differ from the derivative of the loss value, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.objectives import losses
from jaxrl.objectives.kl import KL_ESTIMATORS, kl_estimate
from tests.helpers import per_token_of, weights_in_rows

pytestmark = pytest.mark.usefixtures("quick_compilation")

cispo_policy_loss = per_token_of(losses.cispo_policy_loss)
clipped_policy_loss = per_token_of(losses.clipped_policy_loss)
gspo_policy_loss = per_token_of(losses.gspo_policy_loss)

ROWS, LENGTH = 2, 9
IDS = np.array([[3, 3, 3, 3, 8, 8, 8, 0, 0], [5, 5, 5, 5, 5, 1, 1, 1, 1]])
MASK = np.array([[1, 1, 0, 1, 1, 1, 1, 0, 0], [0, 1, 1, 0, 1, 1, 0, 1, 1]], bool)
ADVANTAGES = np.select([IDS == 3, IDS == 8, IDS == 5], [1.5, -0.7, 0.4], -1.1)


@pytest.fixture(autouse=True)
def in_float64():
    with jax.enable_x64(True):
        yield


def logprobs(seed, spread):
    """Return current and old log-probabilities that differ by about `spread` nats."""
    rng = np.random.default_rng(seed)
    current = -rng.random((ROWS, LENGTH))
    return current, current + spread * rng.normal(size=current.shape)


def sequence_weights():
    """Return weights whose weighted sums are means over the four trajectories' means."""
    lengths = {id: int(MASK[id == IDS].sum()) for id in (1, 3, 5, 8)}
    return np.where(MASK, 1 / (4 * np.vectorize(lambda id: lengths.get(id, 1))(IDS)), 0.0)


def naive_gspo(x, old, low, high):
    """Compute the paper's objective: one ratio and one term per trajectory, averaged."""
    terms = []
    for id in (1, 3, 5, 8):
        members = MASK & (id == IDS)
        ratio = jnp.exp((x - old)[members].mean())
        advantage = ADVANTAGES[members][0]
        clipped = jnp.clip(ratio, 1 - low, 1 + high)
        terms.append(-jnp.minimum(ratio * advantage, clipped * advantage))
    return sum(terms) / len(terms)


@pytest.mark.parametrize(("spread", "low", "high"), [(0.9, 0.2, 0.28), (2e-3, 3e-4, 4e-4)])
def test_gspo_has_the_gradient_of_the_trajectories_objective(spread, low, high):
    x, old = logprobs(1, spread)
    weights = sequence_weights()
    total = jax.jit(
        lambda x, old: (
            weights * gspo_policy_loss(x, old, ADVANTAGES, MASK, IDS, clip_low=low, clip_high=high)
        ).sum()
    )
    actual = jax.jit(jax.grad(total))(x, old)
    value, gradient = jax.jit(jax.value_and_grad(naive_gspo), static_argnums=(2, 3))(
        x, old, low, high
    )
    np.testing.assert_allclose(total(x, old), value, rtol=1e-12)
    np.testing.assert_allclose(actual, gradient, rtol=1e-12, atol=1e-15)
    # Clipped trajectories and others are among them.
    is_flat = [not actual[id == IDS].any() for id in (1, 3, 5, 8)]
    assert any(is_flat)
    assert not all(is_flat)


def test_the_weights_of_this_file_are_those_of_the_aggregation():
    actual = weights_in_rows(MASK, IDS, "seq-mean-token-mean")
    np.testing.assert_allclose(actual, sequence_weights(), rtol=1e-6)


@pytest.mark.parametrize(("low", "high"), [(1.0, 4.0), (0.2, 0.28)])
def test_cispo_has_the_gradient_of_weighted_likelihood(low, high):
    x, old = logprobs(0, 0.7)
    loss = jax.jit(
        lambda x: cispo_policy_loss(x, old, ADVANTAGES, MASK, clip_low=low, clip_high=high).sum()
    )
    # The importance weight is a constant, so that the function differentiated is linear.
    weight = np.where(MASK, np.clip(np.exp(x - old), 1 - low, 1 + high), 0.0)
    actual = jax.grad(loss)(x)
    np.testing.assert_allclose(actual, -weight * ADVANTAGES, rtol=1e-12)
    np.testing.assert_allclose(loss(x), -(weight * ADVANTAGES * x).sum(), rtol=1e-12)
    # Clipped tokens go on being trained, other than under PPO's loss.
    assert (np.asarray(actual)[MASK] != 0).all() or low == 1.0


@pytest.mark.parametrize(
    ("advantage", "edge", "below", "above"),
    [
        (1.0, 0.8, True, True),  # only a negative advantage is clipped here
        (1.0, 1.28, True, False),
        (-1.0, 0.8, False, True),
        (-1.0, 1.5, True, False),  # by the dual clip
    ],
)
def test_at_a_clipping_boundary_the_gradient_is_a_side_or_between(advantage, edge, below, above):
    at = np.log(edge)
    near = np.array([[at - 1e-12, np.nextafter(at, -9), at, np.nextafter(at, 9), at + 1e-12]])
    advantages, mask = np.full(near.shape, advantage), np.ones(near.shape, bool)
    settings = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 1.5}

    def loss(x):
        return clipped_policy_loss(x, np.zeros(near.shape), advantages, mask, **settings).sum()

    actual = np.asarray(jax.jit(jax.grad(loss))(near))[0]
    moving = -advantage * edge
    np.testing.assert_allclose(actual[0], moving if below else 0.0, rtol=1e-9)
    np.testing.assert_allclose(actual[-1], moving if above else 0.0, rtol=1e-9)
    low, high = sorted((0.0, moving))
    assert ((actual >= low - 1e-9) & (actual <= high + 1e-9)).all()


@pytest.mark.parametrize("gap", [-25.0, 25.0])
def test_beyond_twenty_nats_no_ratio_has_a_gradient(gap):
    x, old, mask = np.full((1, 3), gap), np.zeros((1, 3)), np.ones((1, 3), bool)
    bounds = {"clip_low": 0.2, "clip_high": 0.28}

    @jax.jit
    @jax.grad
    def gradient(x, advantages):
        clip = clipped_policy_loss(x, old, advantages, mask, **bounds)
        gspo = gspo_policy_loss(x, old, advantages, mask, np.ones((1, 3), int), **bounds)
        return clip.sum() + gspo.sum()

    for advantage in (1.0, -1.0):
        actual = gradient(x, np.full((1, 3), advantage))
        np.testing.assert_array_equal(actual, np.zeros((1, 3)))


@pytest.mark.parametrize("name", ["k1", "k2", "k3", "abs"])
def test_a_plus_keeps_the_value_and_takes_the_gradient_of_k2(name):
    x, anchor = logprobs(1, 1.0)
    x[0, 0] = x[0, 1] = anchor[0, 0] = 30.0  # one pair coincides, one is beyond every clip

    def compile_total(estimator):
        function = KL_ESTIMATORS[estimator]
        total = lambda x: kl_estimate(x, anchor, MASK, estimator=function).sum()  # noqa: E731
        return jax.jit(jax.value_and_grad(total))

    value, gradient = compile_total(name + "+")(x)
    np.testing.assert_allclose(value, compile_total(name)(x)[0], rtol=1e-14)
    np.testing.assert_array_equal(gradient, compile_total("k2")(x)[1])

"""Gradients that are not plain differentiation of the value, against what they stand for.

In float64, where finite differences are good to nine digits.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.objectives import losses
from jaxrl.objectives.kl import KL_ESTIMATORS, kl_estimate
from jaxrl.objectives.losses import negative_log_likelihood
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
    """Current and old log-probabilities that differ by about `spread` nats."""
    rng = np.random.default_rng(seed)
    current = -rng.random((ROWS, LENGTH))
    return current, current + spread * rng.normal(size=current.shape)


def slopes(function, x, step=1e-6):
    """The gradient of a scalar function by central differences."""
    out = np.zeros_like(x)
    for place in np.ndindex(x.shape):
        moved = np.zeros_like(x)
        moved[place] = step
        out[place] = (float(function(x + moved)) - float(function(x - moved))) / (2 * step)
    return out


def sequence_weights():
    """Sums of values under these are means over the four trajectories' means."""
    lengths = {id: int(MASK[id == IDS].sum()) for id in (1, 3, 5, 8)}
    return np.where(MASK, 1 / (4 * np.vectorize(lambda id: lengths.get(id, 1))(IDS)), 0.0)


def naive_gspo(x, old, low, high):
    """The objective as the paper has it: one ratio and one term a trajectory, averaged."""
    terms = []
    for id in (1, 3, 5, 8):
        own = MASK & (id == IDS)
        ratio = jnp.exp((x - old)[own].mean())
        advantage = ADVANTAGES[own][0]
        clipped = jnp.clip(ratio, 1 - low, 1 + high)
        terms.append(-jnp.minimum(ratio * advantage, clipped * advantage))
    return sum(terms) / len(terms)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(("spread", "low", "high"), [(0.9, 0.2, 0.28), (2e-3, 3e-4, 4e-4)])
def test_gspo_has_the_gradient_of_the_trajectories_objective(seed, spread, low, high):
    x, old = logprobs(seed, spread)
    weights = sequence_weights()
    total = jax.jit(
        lambda x, old: (
            weights * gspo_policy_loss(x, old, ADVANTAGES, MASK, IDS, clip_low=low, clip_high=high)
        ).sum()
    )
    got = jax.jit(jax.grad(total))(x, old)
    np.testing.assert_allclose(total(x, old), naive_gspo(x, old, low, high), rtol=1e-12)
    naive = jax.jit(jax.grad(naive_gspo), static_argnums=(2, 3))(x, old, low, high)
    np.testing.assert_allclose(got, naive, rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(got, slopes(lambda x: total(x, old), x), atol=1e-8)
    # Clipped trajectories and others are among them.
    is_flat = [not got[id == IDS].any() for id in (1, 3, 5, 8)]
    assert any(is_flat)
    assert not all(is_flat)


def test_the_weights_of_this_file_are_those_of_the_aggregation():
    got = weights_in_rows(MASK, IDS, "seq-mean-token-mean")
    np.testing.assert_allclose(got, sequence_weights(), rtol=1e-6)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("low", "high"), [(1.0, 4.0), (0.2, 0.28)])
def test_cispo_has_the_gradient_of_weighted_likelihood(seed, low, high):
    x, old = logprobs(seed, 0.7)
    loss = jax.jit(
        lambda x: cispo_policy_loss(x, old, ADVANTAGES, MASK, clip_low=low, clip_high=high).sum()
    )
    # The importance weight is a constant, so that the function differentiated is linear.
    weight = np.where(MASK, np.clip(np.exp(x - old), 1 - low, 1 + high), 0.0)
    got = jax.grad(loss)(x)
    np.testing.assert_allclose(got, -weight * ADVANTAGES, rtol=1e-12)
    frozen = lambda y: -(weight * ADVANTAGES * y).sum()  # noqa: E731
    np.testing.assert_allclose(got, slopes(frozen, x), atol=1e-8)
    np.testing.assert_allclose(loss(x), frozen(x), rtol=1e-12)
    # Clipped tokens go on being trained, other than under PPO's loss.
    assert (np.asarray(got)[MASK] != 0).all() or low == 1.0


@pytest.mark.parametrize("dual_clip", [0.0, 1.5])
def test_clipped_loss_off_its_kinks(dual_clip):
    x, old = logprobs(0, 0.7)
    loss = jax.jit(
        lambda x: clipped_policy_loss(
            x, old, ADVANTAGES, MASK, clip_low=0.2, clip_high=0.28, dual_clip=dual_clip
        ).sum()
    )
    got = np.asarray(jax.grad(loss)(x))
    np.testing.assert_allclose(got, slopes(loss, x), atol=1e-8)
    ratio = np.exp(x - old)
    flat = np.where(ADVANTAGES > 0, ratio > 1.28, ratio < 0.8)
    if dual_clip:
        flat |= (ADVANTAGES < 0) & (ratio > dual_clip)
    np.testing.assert_allclose(got, np.where(MASK & ~flat, -ratio * ADVANTAGES, 0), rtol=1e-12)
    assert flat[MASK].any()
    assert not flat[MASK].all()


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("edge", [0.8, 1.28, 1.5])
def test_at_a_clipping_boundary_the_gradient_is_a_side_or_between(advantage, edge):
    at = np.log(edge)
    near = np.array([[at - 1e-12, np.nextafter(at, -9), at, np.nextafter(at, 9), at + 1e-12]])
    shape = near.shape
    loss = lambda x: clipped_policy_loss(  # noqa: E731
        x, np.zeros(shape), np.full(shape, advantage), np.ones(shape, bool),
        clip_low=0.2, clip_high=0.28, dual_clip=1.5,
    ).sum()  # fmt: skip
    got = np.asarray(jax.jit(jax.grad(loss))(near))[0]
    moving = -advantage * edge
    below = (advantage > 0) or edge > 0.8  # unclipped to the left of the edge
    above = (advantage > 0 and edge == 0.8) or (advantage < 0 and edge < 1.5)
    if advantage > 0 and edge == 1.5:
        below = above = False
    np.testing.assert_allclose(got[0], moving if below else 0.0, rtol=1e-9)
    np.testing.assert_allclose(got[-1], moving if above else 0.0, rtol=1e-9)
    low, high = sorted((0.0, moving))
    assert ((got >= low - 1e-9) & (got <= high + 1e-9)).all()


def test_the_first_update_moves_every_token_by_its_advantage():
    # Where the policies coincide, the losses that clip all have the plain policy gradient.
    x, _ = logprobs(0, 0.0)
    bounds = {"clip_low": 0.2, "clip_high": 0.28}
    given = (ADVANTAGES, MASK)
    plain = np.where(MASK, -ADVANTAGES, 0)
    for loss in (
        lambda y: clipped_policy_loss(y, x, *given, **bounds, dual_clip=3.0),
        lambda y: gspo_policy_loss(y, x, *given, IDS, **bounds),
        lambda y: cispo_policy_loss(y, x, *given, **bounds),
    ):
        got = jax.jit(jax.grad(lambda y, loss=loss: loss(y).sum()))(x)
        np.testing.assert_allclose(got, plain, rtol=1e-12)


@pytest.mark.parametrize("gap", [-25.0, 25.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_beyond_twenty_nats_no_ratio_has_a_gradient(gap, advantage):
    shape = (1, 3)
    x, old = np.full(shape, gap), np.zeros(shape)
    given = np.full(shape, advantage), np.ones(shape, bool)
    bounds = {"clip_low": 0.2, "clip_high": 0.28}
    for loss in (
        lambda y: clipped_policy_loss(y, old, *given, **bounds),
        lambda y: gspo_policy_loss(y, old, *given, np.ones(shape, int), **bounds),
    ):
        got = jax.jit(jax.grad(lambda y, loss=loss: loss(y).sum()))(x)
        np.testing.assert_array_equal(got, np.zeros(shape))


@pytest.mark.parametrize("name", ["k1", "k2", "k3", "abs"])
def test_plain_kl_estimates_have_the_slope_of_their_value(name):
    x, anchor = logprobs(1, 1.0)
    total = jax.jit(lambda x: kl_estimate(x, anchor, MASK, estimator=KL_ESTIMATORS[name]).sum())
    np.testing.assert_allclose(jax.grad(total)(x), slopes(total, x), atol=1e-7)


@pytest.mark.parametrize("name", ["k1", "k2", "k3", "abs"])
def test_a_plus_keeps_the_value_and_takes_the_gradient_of_k2(name):
    x, anchor = logprobs(1, 1.0)
    x[0, 0] = x[0, 1] = anchor[0, 0] = 30.0  # one pair coincides, one is beyond every clip
    plus, k2, plain = (
        jax.jit(lambda x, e=e: kl_estimate(x, anchor, MASK, estimator=KL_ESTIMATORS[e]).sum())
        for e in (name + "+", "k2", name)
    )
    np.testing.assert_allclose(plus(x), plain(x), rtol=1e-14)
    got = jax.grad(plus)(x)
    np.testing.assert_array_equal(got, jax.grad(k2)(x))
    np.testing.assert_allclose(got, slopes(k2, x, step=1e-5), atol=1e-5)


def test_likelihood():
    x, _ = logprobs(3, 0.0)
    got = jax.grad(lambda x: negative_log_likelihood(x, MASK).sum())(x)
    np.testing.assert_array_equal(got, -1.0 * MASK)

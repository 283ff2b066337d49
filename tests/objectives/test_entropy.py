from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.objectives.entropy import (
    high_window_entropy_mask,
    kl_weights,
    window_entropy,
)
from jaxrl.sampling.next_token import sample_tokens

pytestmark = pytest.mark.usefixtures("quick_compilation")

ENTROPIES = np.array([[0.1, 0.2, 1, 2, 1.5, 0.5, 0.1, 0, 0.3, 0.2]], np.float32)
ALL = np.ones((1, 10), bool)
IDS = np.ones((1, 10), np.int32)
NUMPY_OR_JAX = pytest.mark.parametrize("convert", [np.asarray, jnp.asarray])


@NUMPY_OR_JAX
def test_ten_tokens_by_hand(convert):
    values, valid = window_entropy(convert(ENTROPIES), ALL, IDS, window=4)
    expected = [1.175, 1.25, 1.025, 0.525, 0.225, 0.15, 0, 0, 0, 0]
    np.testing.assert_allclose(values, [expected], rtol=1e-6)
    np.testing.assert_array_equal(valid, [[True] * 6 + [False] * 4])


def test_an_observation_is_passed_over():
    mask = ALL.copy()
    mask[0, 4:6] = False
    values, valid = window_entropy(ENTROPIES, mask, IDS, window=4)
    np.testing.assert_allclose(values, [[0.825, 0.775, 0.6, 0.15] + [0] * 6], rtol=1e-6)
    np.testing.assert_array_equal(valid, [[True] * 4 + [False] * 6])


def test_windows_end_with_their_trajectory():
    # By hand, window 2: trajectory 5 is .1 .2 1 2, trajectory 3 (after padding) .5 .1 0.
    ids = np.array([[5, 5, 5, 5, 0, 3, 3, 3, 0, 0]], np.int32)
    values, valid = window_entropy(ENTROPIES, ids > 0, ids, window=2)
    np.testing.assert_allclose(values, [[0.6, 1.5, 0, 0, 0, 0.05, 0, 0, 0, 0]], rtol=1e-6)
    np.testing.assert_array_equal(valid, [[1, 1, 0, 0, 0, 1, 0, 0, 0, 0]])
    # A window as long as the row has no room.
    assert window_entropy(ENTROPIES, ALL, IDS, window=9)[1].sum() == 1
    assert not window_entropy(ENTROPIES, ALL, IDS, window=10)[1].any()


@pytest.mark.parametrize("extreme", [-1e30, np.nan])
def test_tokens_that_were_not_sampled_may_hold_anything(extreme):
    mask = ALL.copy()
    mask[0, [0, 4, 5, 9]] = False
    dirty = np.where(mask, ENTROPIES, np.float32(extreme))
    clean = window_entropy(ENTROPIES, mask, IDS, window=3)
    for actual, expected in zip(window_entropy(dirty, mask, IDS, window=3), clean, strict=True):
        np.testing.assert_array_equal(actual, expected)


@NUMPY_OR_JAX
def test_tokens_at_the_threshold_count(convert):
    values, valid = window_entropy(convert(ENTROPIES), ALL, IDS, window=4)
    actual = high_window_entropy_mask(values, valid, threshold=0.9)
    np.testing.assert_array_equal(actual, [[1, 1, 1, 0, 0, 0, 0, 0, 0, 0]])
    assert high_window_entropy_mask(values, valid, threshold=float(values[0, 2])).sum() == 3
    # Where no window is complete its entropy is 0, which is no measurement.
    assert high_window_entropy_mask(values, valid, threshold=-1.0).sum() == 6
    without = high_window_entropy_mask(values, valid, threshold=None)
    assert without.shape == valid.shape
    assert not without.any()


def test_kl_term_by_hand():
    k3 = np.array([[0.2, 0.1, 0.3, 0.4]])
    marked = np.array([[False, True, True, False]])
    weights = kl_weights(marked, kl_coef=0.01, low_factor=0.5, bucket_scale=1.0)
    np.testing.assert_allclose(weights, [[0.01, 0.005, 0.005, 0.01]], rtol=1e-6)
    np.testing.assert_allclose((weights * k3).mean(), 0.002, rtol=1e-6)


def test_entropy_of_the_sampler_by_hand():
    logits = jnp.array([[2.0, 1.0, 0.0]])
    for temperature, expected in ((1.0, 0.832396), (0.5, 0.441057)):
        draw = partial(
            sample_tokens, logits, jnp.array([0.5]), jnp.float32(temperature), jnp.float32(1)
        )
        entropy = draw(kind="full")[2]
        np.testing.assert_allclose(entropy, [expected], atol=1e-6)

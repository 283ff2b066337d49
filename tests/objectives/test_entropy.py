import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.objectives.entropy import (
    EntropyThreshold,
    high_window_entropy_mask,
    kl_weights,
    window_entropy,
)
from jaxrl.sampling.next_token import sample

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


@NUMPY_OR_JAX
def test_an_observation_is_passed_over(convert):
    mask = ALL.copy()
    mask[0, 4:6] = False
    values, valid = window_entropy(convert(ENTROPIES), mask, IDS, window=4)
    np.testing.assert_allclose(values, [[0.825, 0.775, 0.6, 0.15] + [0] * 6], rtol=1e-6)
    np.testing.assert_array_equal(valid, [[True] * 4 + [False] * 6])


@NUMPY_OR_JAX
def test_windows_end_with_their_trajectory(convert):
    # By hand, window 2: trajectory 5 is .1 .2 1 2, trajectory 3 (after padding) .5 .1 0.
    ids = np.array([[5, 5, 5, 5, 0, 3, 3, 3, 0, 0]], np.int32)
    values, valid = window_entropy(convert(ENTROPIES), ids > 0, ids, window=2)
    np.testing.assert_allclose(values, [[0.6, 1.5, 0, 0, 0, 0.05, 0, 0, 0, 0]], rtol=1e-6)
    np.testing.assert_array_equal(valid, [[1, 1, 0, 0, 0, 1, 0, 0, 0, 0]])


@NUMPY_OR_JAX
@pytest.mark.parametrize("extreme", [-1e30, np.inf, -np.inf, np.nan])
def test_tokens_that_were_not_sampled_may_hold_anything(convert, extreme):
    mask = ALL.copy()
    mask[0, [0, 4, 5, 9]] = False
    dirty = np.where(mask, ENTROPIES, np.float32(extreme))
    clean = window_entropy(convert(ENTROPIES), mask, IDS, window=3)
    for got, wanted in zip(window_entropy(convert(dirty), mask, IDS, window=3), clean, strict=True):
        np.testing.assert_array_equal(got, wanted)


@NUMPY_OR_JAX
@pytest.mark.parametrize("window", [1, 9, 10, 50])
def test_windows_of_every_length(convert, window):
    values, valid = window_entropy(convert(ENTROPIES), ALL, IDS, window=window)
    assert valid.sum() == max(10 - window, 0)
    if window < 10:
        np.testing.assert_allclose(values[0, 0], ENTROPIES[0, 1 : 1 + window].mean(), rtol=1e-6)


def test_numpy_in_numpy_out_of_any_shape_without_compiling():
    for shape in ((0, 5), (1, 1), (2, 37)):
        got = window_entropy(
            np.ones(shape, np.float32), np.ones(shape, bool), np.ones(shape, np.int32), window=4
        )
        assert all(isinstance(x, np.ndarray) and x.shape == shape for x in got)
        assert [x.dtype for x in got] == [np.float32, bool]
        marked = high_window_entropy_mask(*got, threshold=0.5)
        assert isinstance(marked, np.ndarray)
        weights = kl_weights(marked, kl_coef=0.1, low_factor=0.5, bucket_scale=np.ones(shape))
        assert isinstance(weights, np.ndarray)
        assert weights.dtype == np.float32
    traced, _ = window_entropy(jnp.asarray(ENTROPIES), ALL, IDS, window=4)
    assert isinstance(traced, jax.Array)


def test_a_window_of_nothing_is_refused():
    with pytest.raises(ValueError, match="window of 0 tokens; expected at least 1"):
        window_entropy(ENTROPIES, ALL, IDS, window=0)


@NUMPY_OR_JAX
def test_tokens_at_the_threshold_count(convert):
    values, valid = window_entropy(convert(ENTROPIES), ALL, IDS, window=4)
    got = high_window_entropy_mask(values, valid, threshold=0.9)
    np.testing.assert_array_equal(got, [[1, 1, 1, 0, 0, 0, 0, 0, 0, 0]])
    assert high_window_entropy_mask(values, valid, threshold=float(values[0, 2])).sum() == 3
    # Where no window is complete its entropy is 0, which is no measurement.
    assert high_window_entropy_mask(values, valid, threshold=0.0).sum() == 6
    assert high_window_entropy_mask(values, valid, threshold=-1.0).sum() == 6


@NUMPY_OR_JAX
def test_without_a_threshold_nothing_is_marked(convert):
    values, valid = window_entropy(convert(ENTROPIES), ALL, IDS, window=4)
    got = high_window_entropy_mask(values, convert(valid), threshold=None)
    assert got.dtype == bool
    assert got.shape == valid.shape
    assert not got.any()
    assert isinstance(got, np.ndarray) == (convert is np.asarray)


@NUMPY_OR_JAX
def test_kl_term_by_hand(convert):
    k3 = np.array([[0.2, 0.1, 0.3, 0.4]])
    marked = convert(np.array([[False, True, True, False]]))
    weights = kl_weights(marked, kl_coef=0.01, low_factor=0.5, bucket_scale=1.0)
    np.testing.assert_allclose(weights, [[0.01, 0.005, 0.005, 0.01]], rtol=1e-6)
    np.testing.assert_allclose((weights * k3).mean(), 0.002, rtol=1e-6)


@NUMPY_OR_JAX
def test_scale_by_trajectory_or_token(convert):
    marked = convert(np.array([[True, False], [True, False]]))
    for scale in ([[1.0], [3.0]], [[1.0, 1.0], [3.0, 3.0]]):
        got = kl_weights(marked, kl_coef=0.1, low_factor=0.5, bucket_scale=convert(np.array(scale)))
        np.testing.assert_allclose(got, [[0.05, 0.1], [0.15, 0.3]], rtol=1e-6)


def test_threshold_by_hand():
    # Six windows: the 95th percentile lies at place 4.75 of 0.15 ... 1.175, 1.25.
    values, valid = window_entropy(ENTROPIES, ALL, IDS, window=4)
    state = EntropyThreshold.init()
    assert state.value is None
    state = state.update([values[valid]])
    np.testing.assert_allclose(state.value, 1.23125, rtol=1e-6)
    state = EntropyThreshold(value=1.0).update([np.array([1.2])])
    np.testing.assert_allclose(state.value, 1.002, rtol=1e-12)
    np.testing.assert_allclose(state.update([np.array([0.8])]).value, 0.99998, rtol=1e-12)


def test_threshold_takes_the_median_over_samples_that_have_windows():
    none = np.zeros(0, np.float32)
    samples = [none, np.array([1.0, 3.0]), np.array([9.0]), none, np.array([4.0, 4.0])]
    # First quarters 1.5, 9 and 4, whose median is 4; of all five windows together it is 3.
    got = EntropyThreshold.init().update(samples, percentile=25.0)
    assert got.value == 4.0
    assert EntropyThreshold.init().update(samples[:4], percentile=50.0).value == 5.5
    assert EntropyThreshold(value=2.0).update(samples, percentile=50.0, decay=0.5).value == 3.0


@pytest.mark.parametrize("state", [EntropyThreshold.init(), EntropyThreshold(value=0.7)])
def test_threshold_stays_without_windows(state):
    assert state.update([]) == state
    assert state.update([np.zeros(0)]) == state


def test_threshold_survives_json():
    state = EntropyThreshold.init()
    for _ in range(2):
        saved = json.loads(json.dumps(dataclasses.asdict(state)))
        assert EntropyThreshold(**saved) == state
        state = state.update([np.array([1.1, 0.3], np.float32)])


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 9), max_size=5),
    seed=st.integers(0, 2**32 - 1),
    percentile=st.sampled_from([0.0, 37.5, 95.0, 100.0]),
)
def test_threshold_agrees_with_a_slow_loop(sizes, seed, percentile):
    rng = np.random.default_rng(seed)
    samples = [rng.random(size) for size in sizes]
    levels = []
    for windows in samples:
        if len(windows):
            ordered = sorted(windows)
            place = percentile / 100 * (len(ordered) - 1)
            below = int(place)
            above = min(below + 1, len(ordered) - 1)
            share = place - below
            levels.append((1 - share) * ordered[below] + share * ordered[above])
    levels.sort()
    state = EntropyThreshold(value=0.25)
    expected = 0.25
    if levels:
        middle = (levels[(len(levels) - 1) // 2] + levels[len(levels) // 2]) / 2
        expected = 0.9 * 0.25 + 0.1 * middle
    got = state.update(samples, percentile=percentile, decay=0.9)
    np.testing.assert_allclose(got.value, expected, rtol=1e-9)


def test_entropy_of_the_sampler_by_hand():
    logits = jnp.array([[2.0, 1.0, 0.0]])
    for temperature, wanted in ((1.0, 0.832396), (0.5, 0.441057)):
        entropy = sample(logits, jnp.array([0.5]), jnp.float32(temperature))[2]
        np.testing.assert_allclose(entropy, [wanted], atol=1e-6)

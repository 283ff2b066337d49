import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jaxrl.models.attention.reference import MASK_VALUE
from jaxrl.sampling.next_token import (
    filter_top_p,
    sample_tokens,
    sample_uniforms,
    select_sampling_method,
)

ALMOST_ONE = np.float32(1 - 2**-24)  # the largest float32 below 1
draw_kind = jax.jit(sample_tokens, static_argnames="kind")
filter_top_p_jit = jax.jit(filter_top_p)


def draw(logits, uniform, temperature, top_p=1.0):
    """Draw with the cheapest program for these settings."""
    kind = select_sampling_method(float(temperature), float(top_p))
    return draw_kind(logits, uniform, temperature, np.float32(top_p), kind=kind)


def reference(logits, temperature):
    """Return probabilities, log-probabilities and entropy of one row, in float64."""
    scaled = logits.astype(np.float64) / temperature
    logprobs = scaled - np.logaddexp.reduce(scaled)
    probabilities = np.exp(logprobs)
    entropy = -(probabilities * np.where(probabilities > 0, logprobs, 0)).sum()
    return probabilities, logprobs, entropy


def test_two_tokens_by_hand():
    # Probabilities 1/4 and 3/4: uniforms below 1/4 draw the first.
    logits = jnp.broadcast_to(jnp.log(jnp.array([1.0, 3.0])), (4, 2))
    uniform = jnp.array([0.0, 0.2499, 0.2501, ALMOST_ONE])
    token, logprob, entropy = draw(logits, uniform, jnp.float32(1))
    np.testing.assert_array_equal(token, [0, 0, 1, 1])
    np.testing.assert_allclose(logprob, np.log([0.25, 0.25, 0.75, 0.75]), rtol=1e-6)
    np.testing.assert_allclose(entropy, 0.25 * np.log(4) + 0.75 * np.log(4 / 3), rtol=1e-6)


# One token, less than a block, a last block that is not full, and a whole square of blocks.
@pytest.mark.parametrize(
    ("num_tokens", "temperature"), [(1, 1.0), (5, 0.5), (300, 1.0), (1024, 2.0)]
)
def test_draws_invert_the_cumulative_distribution(num_tokens, temperature):
    rng = np.random.default_rng(num_tokens)
    logits = (3 * rng.normal(size=num_tokens)).astype(np.float32)
    uniform = np.append(rng.random(2000), [0.0, ALMOST_ONE]).astype(np.float32)
    rows = np.broadcast_to(logits, (len(uniform), num_tokens))
    token, logprob, entropy = (np.asarray(x) for x in draw(rows, uniform, np.float32(temperature)))

    probabilities, logprobs, expected_entropy = reference(logits, temperature)
    ends = np.cumsum(probabilities)
    assert np.all(uniform < ends[token] + 1e-6)
    assert np.all(uniform > ends[token] - probabilities[token] - 1e-6)
    np.testing.assert_allclose(logprob, logprobs[token], atol=1e-5)
    np.testing.assert_allclose(entropy, expected_entropy, atol=1e-5)


def test_temperature_zero_draws_the_most_likely_and_reports_logprobs_of_temperature_one():
    logits = np.random.default_rng(1).normal(size=(8, 300)).astype(np.float32)
    uniform = np.linspace(0, ALMOST_ONE, 8, dtype=np.float32)
    token, logprob, entropy = draw(logits, uniform, np.float32(0))
    np.testing.assert_array_equal(token, logits.argmax(axis=-1))
    for row in range(8):
        _, logprobs, expected = reference(logits[row], 1.0)
        np.testing.assert_allclose(logprob[row], logprobs.max(), atol=1e-5)
        np.testing.assert_allclose(entropy[row], expected, atol=1e-5)


@settings(deadline=None, max_examples=40)
@given(
    logits=hnp.arrays(np.float32, (1, 37), elements=st.floats(-200, 200, width=32)),
    allowed=hnp.arrays(bool, 37).filter(np.any),
    uniform=st.floats(0, 1, width=32, exclude_max=True),
    temperature=st.sampled_from([0.0, 0.01, 0.7, 1.0, 5.0]),
)
def test_masked_ids_are_never_drawn(logits, allowed, uniform, temperature):
    rows = np.broadcast_to(np.where(allowed, logits, MASK_VALUE), (3, 37)).astype(np.float32)
    edges = np.array([uniform, 0.0, ALMOST_ONE], np.float32)
    token, logprob, entropy = draw(rows, edges, np.float32(temperature))
    assert allowed[token].all()
    assert np.isfinite(logprob).all()
    assert (np.asarray(logprob) <= 1e-6).all()
    assert ((np.asarray(entropy) >= -1e-5) & (np.asarray(entropy) <= np.log(37) + 1e-5)).all()


def test_rounded_running_sums_draw_no_id_of_weight_zero():
    # Blocks of 512, as with a real vocabulary, are summed in pieces: rounding makes the running sum
    # grow at ids of weight 0. The uniforms are aimed at such ids.
    rng = np.random.default_rng(0)
    num_tokens, block = 70_000, 512
    logits = np.full(num_tokens, MASK_VALUE, np.float32)
    allowed = np.flatnonzero(rng.random(block) < 0.5)
    aimed = np.empty(0, np.float32)
    while not aimed.size:
        logits[allowed] = np.log(rng.random(len(allowed)))
        weights = jnp.exp(logits[:block] - logits.max())
        ends = np.asarray(jnp.cumsum(weights))
        grows = np.flatnonzero((np.diff(ends) > 0) & (np.asarray(weights)[1:] == 0))
        near = (ends[grows] / ends[-1])[:, None] + np.arange(-8, 9) * 2.0**-25
        aimed = np.clip(near.ravel(), 0, ALMOST_ONE).astype(np.float32)
    uniform = np.resize(aimed, 64)
    token, logprob, _ = draw(np.broadcast_to(logits, (64, num_tokens)), uniform, np.float32(1))
    assert np.isin(token, allowed).all()
    assert (np.asarray(logprob) > -50).all()


def test_uniforms_depend_only_on_key_and_position():
    rng = np.random.default_rng(0)
    keys = rng.integers(0, 2**32, (6, 2), dtype=np.uint32)
    positions = np.array([0, 1, 2, 3, 100, 4000], np.int32)
    actual = np.asarray(sample_uniforms(keys, positions))
    assert ((actual >= 0) & (actual < 1)).all()
    order = rng.permutation(6)[:4]
    np.testing.assert_array_equal(sample_uniforms(keys[order], positions[order]), actual[order])
    uniforms = np.array([sample_uniforms(keys, np.full(6, position)) for position in range(20)])
    assert len(np.unique(uniforms)) == uniforms.size


@pytest.mark.parametrize(
    ("top_p", "is_kept"),
    [
        (0.001, [0, 1, 0, 0, 0]),
        (0.5, [0, 1, 0, 0, 0]),  # reached exactly
        (0.501, [1, 1, 0, 0, 0]),
        (0.76, [1, 1, 1, 1, 0]),  # both of two equals, though one would do
        (0.9376, [1, 1, 1, 1, 1]),
        (1.0, [1, 1, 1, 1, 1]),
    ],
)
def test_top_p_of_five_tokens_by_hand(top_p, is_kept):
    # Probabilities 1/4, 1/2, 3/32, 3/32, 1/16; a sixth token is masked.
    weights = np.array([[0.5, 1, 0.1875, 0.1875, 0.125, 0]], np.float32)
    filtered = filter_top_p_jit(weights, np.float32(top_p))
    np.testing.assert_array_equal(filtered, weights * [*is_kept, 0])


def slow_top_p(weights, top_p):
    """Return a mask of the kept tokens of one row, computed by sorting; sums are exact."""
    goal = float(top_p) * float(weights.sum())
    mass = 0.0
    for weight in sorted(weights, reverse=True):
        mass += float(weight)
        if mass >= goal:
            return weights >= weight
    raise AssertionError


@settings(max_examples=25, deadline=None)
@given(
    sixtyfourths=hnp.arrays(np.int32, (3, 37), elements=st.integers(0, 63)),
    top_p=st.sampled_from([1 / 128, 0.25, 0.5, 0.75, 0.875, 127 / 128, 1.0]),
)
def test_top_p_agrees_with_sorting(sixtyfourths, top_p):
    weights = sixtyfourths.astype(np.float32) / 64
    weights[np.arange(3), sixtyfourths.argmax(axis=1)] = 1.0
    actual = np.asarray(filter_top_p_jit(weights, np.float32(top_p)))
    for row, expected in zip(actual, weights, strict=True):
        np.testing.assert_array_equal(row, expected * slow_top_p(expected, top_p))


@pytest.mark.parametrize(("spread", "top_p"), [(0.1, 0.1), (3.0, 0.9), (30.0, 0.99999)])
def test_top_p_of_a_large_vocabulary_keeps_the_smallest_set(spread, top_p):
    # With spread 30 most weights are below 1e-38, or 0.
    logits = spread * np.random.default_rng(0).normal(size=(4, 5000))
    weights = np.exp(logits - logits.max(axis=1, keepdims=True)).astype(np.float32)
    actual = np.asarray(filter_top_p_jit(weights, np.float32(top_p)))
    for row, expected in zip(actual, weights.astype(np.float64), strict=True):
        is_kept = row > 0
        np.testing.assert_array_equal(row[is_kept], expected[is_kept])
        last = expected[is_kept].min()
        assert last > expected[~is_kept].max(initial=0)  # the most likely ones
        total = expected.sum()
        assert expected[is_kept].sum() >= (top_p - 1e-6) * total  # enough
        assert expected[expected > last].sum() < (top_p + 1e-6) * total  # and without the last not


def test_top_p_draws_follow_the_remaining_distribution():
    num_draws = 20_000
    logits = np.random.default_rng(0).normal(size=40).astype(np.float32)
    probabilities, logprobs, entropy = reference(logits, 0.8)
    ordered = np.sort(probabilities)[::-1]
    last = ordered[np.searchsorted(np.cumsum(ordered), 0.7)]
    expected = np.where(probabilities >= last, probabilities, 0)
    assert 1 < (expected > 0).sum() < 20
    uniform = (np.arange(num_draws, dtype=np.float32) + 0.5) / num_draws
    rows = np.broadcast_to(logits, (num_draws, 40))
    token, actual_logprob, actual_entropy = draw(rows, uniform, np.float32(0.8), np.float32(0.7))
    frequencies = np.bincount(token, minlength=40) / num_draws
    np.testing.assert_allclose(frequencies, expected / expected.sum(), atol=2 / num_draws)
    # Reported numbers are of the whole distribution, as the trainer computes them.
    np.testing.assert_allclose(actual_logprob, logprobs[token], atol=1e-5)
    np.testing.assert_allclose(actual_entropy, entropy, atol=1e-5)

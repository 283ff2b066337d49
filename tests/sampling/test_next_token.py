import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import stats

from jaxrl.models.attention import LOWEST
from jaxrl.sampling.next_token import sample, uniforms

ALMOST_ONE = np.float32(1 - 2**-24)  # the largest float32 below 1
draw = jax.jit(sample)


def reference(logits, temperature):
    """Probabilities, log-probabilities and entropy of one row, in float64."""
    scaled = logits.astype(np.float64) / temperature
    logprobs = scaled - np.logaddexp.reduce(scaled)
    probabilities = np.exp(logprobs)
    entropy = -(probabilities * np.where(probabilities > 0, logprobs, 0)).sum()
    return probabilities, logprobs, entropy


def test_two_tokens_by_hand():
    # Probabilities 1/4 and 3/4: uniforms below 1/4 draw the first.
    logits = jnp.broadcast_to(jnp.log(jnp.array([1.0, 3.0])), (4, 2))
    token, logprob, entropy = sample(
        logits, jnp.array([0.0, 0.2499, 0.2501, ALMOST_ONE]), jnp.float32(1)
    )
    np.testing.assert_array_equal(token, [0, 0, 1, 1])
    np.testing.assert_allclose(logprob, np.log([0.25, 0.25, 0.75, 0.75]), rtol=1e-6)
    np.testing.assert_allclose(entropy, 0.25 * np.log(4) + 0.75 * np.log(4 / 3), rtol=1e-6)


# One token, less than a block, a last block that is not full, and a whole square of blocks.
@pytest.mark.parametrize("num_tokens", [1, 5, 300, 1024])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_inverse_distribution_logprob_and_entropy(num_tokens, temperature):
    rng = np.random.default_rng(num_tokens)
    logits = (3 * rng.normal(size=num_tokens)).astype(np.float32)
    uniform = np.append(rng.random(2000), [0.0, ALMOST_ONE]).astype(np.float32)
    rows = np.broadcast_to(logits, (len(uniform), num_tokens))
    token, logprob, entropy = (np.asarray(x) for x in draw(rows, uniform, np.float32(temperature)))

    probabilities, logprobs, wanted_entropy = reference(logits, temperature)
    ends = np.cumsum(probabilities)
    assert np.all(uniform < ends[token] + 1e-6)
    assert np.all(uniform > ends[token] - probabilities[token] - 1e-6)
    np.testing.assert_allclose(logprob, logprobs[token], atol=1e-5)
    np.testing.assert_allclose(entropy, wanted_entropy, atol=1e-5)


def test_frequencies_follow_the_probabilities():
    num_draws = 20_000
    logits = np.random.default_rng(0).normal(size=40).astype(np.float32)
    keys = jnp.broadcast_to(jax.random.key_data(jax.random.key(1)), (num_draws, 2))
    uniform = uniforms(keys, jnp.arange(num_draws))
    token, _, _ = draw(np.broadcast_to(logits, (num_draws, 40)), uniform, np.float32(1))
    wanted = reference(logits, 1.0)[0] * num_draws
    assert stats.chisquare(np.bincount(token, minlength=40), wanted).pvalue > 1e-3


def test_temperature_zero_takes_the_most_likely_and_reports_it_under_one():
    logits = np.random.default_rng(1).normal(size=(8, 300)).astype(np.float32)
    uniform = np.linspace(0, ALMOST_ONE, 8, dtype=np.float32)
    token, logprob, entropy = draw(logits, uniform, np.float32(0))
    np.testing.assert_array_equal(token, logits.argmax(axis=-1))
    for row in range(8):
        _, logprobs, wanted = reference(logits[row], 1.0)
        np.testing.assert_allclose(logprob[row], logprobs.max(), atol=1e-5)
        np.testing.assert_allclose(entropy[row], wanted, atol=1e-5)


@settings(deadline=None, max_examples=100)
@given(
    logits=hnp.arrays(np.float32, (1, 37), elements=st.floats(-200, 200, width=32)),
    allowed=hnp.arrays(bool, 37).filter(np.any),
    uniform=st.floats(0, 1, width=32, exclude_max=True),
    temperature=st.sampled_from([0.0, 0.01, 0.7, 1.0, 5.0]),
)
def test_ids_that_are_masked_are_never_drawn(logits, allowed, uniform, temperature):
    rows = np.broadcast_to(np.where(allowed, logits, LOWEST), (3, 37)).astype(np.float32)
    edges = np.array([uniform, 0.0, ALMOST_ONE], np.float32)
    token, logprob, entropy = draw(rows, edges, np.float32(temperature))
    assert allowed[token].all()
    assert np.isfinite(logprob).all()
    assert (np.asarray(logprob) <= 1e-6).all()
    assert ((np.asarray(entropy) >= -1e-5) & (np.asarray(entropy) <= np.log(37) + 1e-5)).all()


def test_rounded_running_sums_draw_no_id_without_weight():
    # Blocks of 512, as with a real vocabulary, are added up in pieces: by rounding the running sum
    # grows at ids of weight 0. Uniforms are aimed at such places.
    rng = np.random.default_rng(0)
    num_tokens, block = 70_000, 512
    logits = np.full(num_tokens, LOWEST, np.float32)
    kept = np.flatnonzero(rng.random(block) < 0.5)
    aimed = np.empty(0, np.float32)
    while not aimed.size:
        logits[kept] = np.log(rng.random(len(kept)))
        weights = jnp.exp(logits[:block] - logits.max())
        ends = np.asarray(jnp.cumsum(weights))
        grows = np.flatnonzero((np.diff(ends) > 0) & (np.asarray(weights)[1:] == 0))
        near = (ends[grows] / ends[-1])[:, None] + np.arange(-8, 9) * 2.0**-25
        aimed = np.clip(near.ravel(), 0, ALMOST_ONE).astype(np.float32)
    uniform = np.resize(aimed, 64)
    token, logprob, _ = draw(np.broadcast_to(logits, (64, num_tokens)), uniform, np.float32(1))
    assert np.isin(token, kept).all()
    assert (np.asarray(logprob) > -50).all()


def test_uniforms_belong_to_key_and_position_alone():
    rng = np.random.default_rng(0)
    keys = rng.integers(0, 2**32, (6, 2), dtype=np.uint32)
    positions = np.array([0, 1, 2, 3, 100, 4000], np.int32)
    got = np.asarray(uniforms(keys, positions))
    assert ((got >= 0) & (got < 1)).all()
    order = rng.permutation(6)[:4]
    np.testing.assert_array_equal(uniforms(keys[order], positions[order]), got[order])
    everywhere = np.array([uniforms(keys, np.full(6, position)) for position in range(20)])
    assert len(np.unique(everywhere)) == everywhere.size

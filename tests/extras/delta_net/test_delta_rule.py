"""The gated delta rule compared with a loop over tokens in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.extras.delta_net.delta_rule import delta_rule, invert_unit_triangular
from jaxrl.extras.delta_net.qwen3_5 import causal_conv
from jaxrl.models.recurrence import CHUNK_TOKENS, make_recurrence

N, K, V = 3, 8, 6
SPECS = {"memory": jax.ShapeDtypeStruct((N, K, V), jnp.float32)}

LENGTHS = [
    (1,),
    (CHUNK_TOKENS - 1,),
    (CHUNK_TOKENS,),
    (CHUNK_TOKENS + 1,),
    (3 * CHUNK_TOKENS + 5,),
    (5, CHUNK_TOKENS - 5, 1, CHUNK_TOKENS, 2),  # contexts end with chunks
    (1, 1, 1, 2 * CHUNK_TOKENS + 10, 40),
]


def make_inputs(num_tokens, seed=0):
    """Return tokens among which some decay the state slowly, and some clear it."""
    rng = np.random.default_rng(seed)
    q, k = rng.normal(size=(2, num_tokens, N, K))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    k[1::5] = k[0]  # repeated keys
    v = rng.normal(size=(num_tokens, N, V))
    speeds = rng.choice([0.01, 1.0, 200.0], size=(num_tokens, N))
    log_decay = -rng.uniform(size=(num_tokens, N)) * speeds
    beta = rng.uniform(size=(num_tokens, N))
    return q, k, v, log_decay, beta


def loop(q, k, v, log_decay, beta, lengths):
    """Return the outputs, in float64."""
    begins, out = np.cumsum([0, *lengths[:-1]]), np.zeros_like(v)
    for t in range(len(q)):
        if t in begins:
            state = np.zeros((N, K, V))
        for n in range(N):
            state[n] *= np.exp(log_decay[t, n])
            change = beta[t, n] * (v[t, n] - state[n].T @ k[t, n])
            state[n] += np.outer(k[t, n], change)
            out[t, n] = state[n].T @ q[t, n]
    return out


@pytest.mark.parametrize("size", [1, 2, 5, 64])
def test_the_inverse_of_a_triangular_matrix(size):
    # Equal keys without decay: every entry below the diagonal is 1, and sums of powers overflow.
    equal = np.tril(np.ones((size, size)))
    random = np.tril(np.random.default_rng(0).uniform(-1, 1, (2, size, size)), -1) + np.eye(size)
    matrices = np.stack([equal, *random])
    expected = np.linalg.inv(matrices)
    inverse, pull_back = jax.vjp(invert_unit_triangular, jnp.asarray(matrices, jnp.float32))
    scale = np.abs(expected).max(axis=(1, 2), keepdims=True)
    np.testing.assert_allclose(inverse / scale, expected / scale, atol=2e-6)
    # The derivative of an inverse is -inverse @ change @ inverse.
    weights = np.random.default_rng(1).normal(size=matrices.shape)
    transposed = expected.swapaxes(1, 2)
    gradient = np.tril(-transposed @ weights @ transposed)
    [actual] = pull_back(jnp.asarray(weights, jnp.float32))
    scale = np.abs(gradient).max(axis=(1, 2), keepdims=True)
    np.testing.assert_allclose(np.tril(actual) / scale, gradient / scale, atol=1e-5)


def get_starts(lengths):
    begins = np.cumsum([0, *lengths[:-1]])
    return np.repeat(begins, lengths)


def run_recurrence(inputs, starts, **settings):
    """Return the outputs for R rows, given inputs `[R, T, ...]` and starts `[R, T]`."""

    def advance(state, inputs, starts, counts):
        out, memory = delta_rule(state["memory"], *inputs, starts)
        return out, {"memory": memory}

    flat = tuple(jnp.asarray(x, jnp.float32).reshape(-1, *x.shape[2:]) for x in inputs)
    out = make_recurrence(SPECS, jnp.asarray(starts, jnp.int32), **settings)(advance, flat)
    return out.reshape(*starts.shape, N, V)


@pytest.mark.parametrize("lengths", LENGTHS)
def test_chunks_equal_a_loop_over_tokens(lengths):
    inputs = make_inputs(sum(lengths))
    got = run_recurrence([x[None] for x in inputs], get_starts(lengths)[None])
    np.testing.assert_allclose(got[0], loop(*inputs, lengths), atol=5e-6, rtol=1e-5)


def test_steps_equal_a_chunk():
    inputs = [x[None] for x in make_inputs(100)]
    starts = get_starts((30, 70))[None]
    steps = run_recurrence(inputs, starts, chunk_tokens=1)
    np.testing.assert_allclose(steps, run_recurrence(inputs, starts), atol=5e-6, rtol=1e-5)


def test_gradients_are_those_of_the_steps():
    lengths = (20, CHUNK_TOKENS, 30)
    inputs = [x[None] for x in make_inputs(sum(lengths))]
    weights = np.random.default_rng(1).normal(size=(1, sum(lengths), N, V))

    def loss(inputs, **settings):
        return (run_recurrence(inputs, get_starts(lengths)[None], **settings) * weights).sum()

    chunks, steps = (
        jax.grad(loss)(inputs), jax.grad(lambda x: loss(x, chunk_tokens=1))(inputs)
    )  # fmt: skip
    for got, wanted in zip(chunks, steps, strict=True):
        assert np.isfinite(got).all()
        np.testing.assert_allclose(got, wanted, atol=2e-5 * np.abs(wanted).max(), rtol=1e-4)


def test_contexts_of_a_row_do_not_change_each_other():
    lengths = (20, CHUNK_TOKENS, 30)
    first, second = make_inputs(sum(lengths), seed=0), make_inputs(sum(lengths), seed=1)
    middle = slice(20, 20 + CHUNK_TOKENS)
    mixed = []
    for mine, others in zip(first, second, strict=True):
        mixed.append(others.copy())
        mixed[-1][middle] = mine[middle]
    starts = get_starts(lengths)[None]
    out, other = (run_recurrence([x[None] for x in inputs], starts)[0] for inputs in (first, mixed))
    np.testing.assert_array_equal(out[middle], other[middle])
    assert np.abs(out - other)[-30:].min() > 0


def test_memory_of_the_backward_pass_grows_with_chunks_not_tokens():
    def measure(num_tokens, chunk_tokens):
        """Return the temporary memory of a gradient beyond that of the inputs and outputs."""
        inputs = [x[None].astype(np.float32) for x in make_inputs(num_tokens)]
        starts = get_starts((num_tokens,))[None]

        def loss(inputs):
            return (run_recurrence(inputs, starts, chunk_tokens=chunk_tokens) ** 2).sum()

        compiled = jax.jit(jax.grad(loss)).lower(inputs).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    state_bytes, num_tokens = 4 * N * K * V, 4096
    saved = measure(num_tokens, 64) - measure(num_tokens // 2, 64)
    token_bytes = 4 * N * (2 * K + 2 * V + 2)
    # Half of the tokens more: 32 states more, and some copies of the inputs.
    assert saved < 32 * state_bytes + 4 * token_bytes * num_tokens // 2
    assert saved < num_tokens // 2 * state_bytes / 4


@pytest.mark.parametrize("width", [2, 4])
def test_convolution_equals_a_loop_and_continues_from_its_window(width):
    rng = np.random.default_rng(0)
    lengths, lookback = (3, 1, 6, 2), width - 1
    T = sum(lengths)
    x, taps = rng.normal(size=(T, 2, 5)), rng.normal(size=(width, 2, 5))
    starts = get_starts(lengths)
    wanted = np.zeros_like(x)
    for t in range(T):
        for distance in range(width):
            if t - distance >= starts[t]:
                wanted[t] += taps[lookback - distance] * x[t - distance]

    # In pieces of 5 slots, of which some are padding at the end.
    window, got, first = np.zeros((1, lookback, 2, 5)), [], 0
    for count in (5, 1, 4, 2):
        padding = ((0, 5 - count), (0, 0), (0, 0))
        piece = np.pad(x[first : first + count], padding, constant_values=9.0)
        piece_starts = np.maximum(starts[first : first + count] - first, -1)
        piece_starts = np.pad(piece_starts, (0, 5 - count), mode="edge")
        out, window = causal_conv(
            piece[None], window, taps, jnp.asarray(piece_starts[None]), jnp.array([count])
        )
        got.append(out[0, :count])
        first += count
    np.testing.assert_allclose(np.concatenate(got), wanted, atol=1e-5)

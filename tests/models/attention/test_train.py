"""Attention over packed rows: each kernel compared with brute force."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.extras.kernels import attention_gpu as gpu
from jaxrl.extras.kernels import attention_tpu as tpu
from jaxrl.models.attention import reference
from jaxrl.models.attention.kernels import compute_key_ranges
from tests.models.attention.brute import brute_force, random_inputs, random_rows

pytestmark = pytest.mark.usefixtures("quick_compilation")

KERNELS = {
    "xla": reference.attend_packed,
    "triton": partial(gpu.attend_packed, interpret=True),
    "mosaic": partial(tpu.attend_packed, interpret=True),
}


@cache
def compile_gradient(attend_packed):
    """Return a function that computes outputs and gradients, compiled once per shape."""

    def run(q, k, v, gradient, *ids):
        key_ranges = compute_key_ranges(*ids)
        out, back = jax.vjp(lambda q, k, v: attend_packed(q, k, v, key_ranges), q, k, v)
        return out, *back(gradient)

    return jax.jit(run)


def differentiate(attend_packed, dtype, q, k, v, gradient, segment_ids, positions):
    """Return outputs and gradients in float32 of arrays cast to `dtype`; padding gives 0."""
    cast = [jnp.asarray(x, dtype) for x in (q, k, v, gradient)]
    out, *gradients = compile_gradient(attend_packed)(*cast, segment_ids, positions)
    results = [np.asarray(x, np.float32) for x in (out, *gradients)]
    assert all(np.isfinite(x).all() for x in results)
    assert (out.dtype, *(x.dtype for x in gradients)) == (jnp.dtype(dtype),) * 4
    return [np.where((segment_ids > 0)[:, :, None, None], results[0], 0), *results[1:]]


def check_kernel(name, shape, num_kv_heads, *, dtype="float32", seed=0, tolerance=2e-5):
    attend_packed, rng = KERNELS[name], np.random.default_rng(seed)
    *ids, attention_mask = random_rows(rng, *shape[:2], shares_prompts=name != "mosaic")
    q, k, v, gradient = random_inputs(rng, shape, num_kv_heads)
    gradient *= (ids[0] > 0)[:, :, None, None]
    if dtype != "float32":  # both compute with the rounded values
        q, k, v, gradient = (
            np.asarray(jnp.asarray(x, dtype), np.float32) for x in (q, k, v, gradient)
        )
    expected = brute_force(q, k, v, gradient, attention_mask)
    actual = differentiate(attend_packed, dtype, q, k, v, gradient, *ids)
    for label, x, y in zip(("out", "dq", "dk", "dv"), actual, expected, strict=True):
        np.testing.assert_allclose(x, y, atol=tolerance, err_msg=label)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(
    ("shape", "num_kv_heads"),
    [
        ((3, 211, 4, 8), 2),
        ((2, 96, 7, 16), 1),
        ((2, 1, 2, 16), 2),
    ],
)
def test_equals_brute_force(name, shape, num_kv_heads):
    for seed in range(2):
        check_kernel(name, shape, num_kv_heads, seed=seed)


@pytest.mark.parametrize("name", KERNELS)
def test_bfloat16_is_summed_in_float32(name):
    # A sum over 400 keys in bfloat16 would be off by some percent; operands are rounded to 2^-9.
    check_kernel(name, (2, 400, 4, 16), 2, dtype="bfloat16", tolerance=0.03)


def test_other_segments_and_padding_change_nothing():
    # 250 tokens are three blocks; the second segment begins in one and ends in another.
    rng = np.random.default_rng(0)
    q, k, v, gradient = random_inputs(rng, (1, 250, 2, 8), 1)
    lengths = (70, 120, 60)
    segment_ids = np.repeat([1, 2, 0], lengths)[None].astype(np.int32)
    ids = segment_ids, np.concatenate([np.arange(n) for n in lengths])[None]
    inside = segment_ids == 2
    gradient *= inside[:, :, None, None]
    outside = [np.where(inside[:, :, None, None], x, 7.0).astype(np.float32) for x in (q, k, v)]
    for attend_packed in KERNELS.values():
        alone = differentiate(attend_packed, "float32", q, k, v, gradient, *ids)
        changed = differentiate(attend_packed, "float32", *outside, gradient, *ids)
        for x, y in zip(alone, changed, strict=True):
            np.testing.assert_array_equal(x[inside], y[inside])
        assert not any(x[~inside].any() for x in alone[1:])


def test_blocks_that_no_query_reads_are_skipped():
    # The second segment begins at 200, and blocks hold at most 128 tokens, so no query from 328 on
    # reads a block with tokens before 72. Infinity times a weight of 0 would be NaN.
    q, k, v, _ = random_inputs(np.random.default_rng(0), (1, 400, 2, 8), 1)
    v[:, :72] = np.inf
    ids = jnp.repeat(jnp.array([1, 2]), 200)[None], jnp.tile(jnp.arange(200), 2)[None]
    key_ranges = compute_key_ranges(*ids)
    for name in ("xla", "triton"):
        out = jax.jit(KERNELS[name])(*map(jnp.asarray, (q, k, v)), key_ranges)
        assert np.isfinite(out[:, 328:]).all()
        assert not np.isfinite(out[:, 72:200]).any()


@pytest.mark.parametrize("name", KERNELS)
def test_queries_of_the_last_tokens_alone(name):
    # The other queries have no gradient, so the keys get only what the last queries add.
    num_queries, num_tokens = 77, 211
    rng = np.random.default_rng(num_queries)
    *ids, _ = random_rows(rng, 2, num_tokens, shares_prompts=name != "mosaic")
    q, k, v, gradient = random_inputs(rng, (2, num_tokens, 4, 16), 2)
    gradient *= (ids[0] > 0)[:, :, None, None]
    gradient[:, :-num_queries] = 0
    expected = differentiate(KERNELS["xla"], "float32", q, k, v, gradient, *ids)

    def last(q, k, v, key_ranges):
        out = KERNELS[name](q[:, -num_queries:], k, v, key_ranges)
        return jnp.pad(out, ((0, 0), (num_tokens - num_queries, 0), (0, 0), (0, 0)))

    actual = differentiate(last, "float32", q, k, v, gradient, *ids)
    np.testing.assert_allclose(
        actual[0][:, -num_queries:], expected[0][:, -num_queries:], atol=2e-5
    )
    for x, y in zip(actual[1:], expected[1:], strict=True):
        np.testing.assert_allclose(x, y, atol=2e-5)

"""The sampler's attention over pages: each kernel against brute force in float64."""

from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.extras.kernels import attention_gpu as gpu
from jaxrl.extras.kernels import attention_tpu as tpu
from jaxrl.models.attention import reference
from tests.models.attention.brute import assert_agrees, brute_force_pages, random_pages

pytestmark = pytest.mark.usefixtures("quick_compilation")


def attend_by_page(*arrays):
    """Run the TPU kernel with one page per step."""
    with mock.patch.object(tpu, "STEP_PAGES", 1):
        return tpu.attend_pages(*arrays, interpret=True)


KERNELS = {
    "xla": reference.attend_pages,
    "triton": partial(gpu.attend_pages, interpret=True),
    "mosaic": partial(tpu.attend_pages, interpret=True),
    "mosaic, by page": attend_by_page,
}
SHAPES = [
    # B, Q, N, K, H, page, M
    (3, 1, 4, 4, 8, 4, 5),
    (2, 3, 7, 1, 16, 4, 7),
    (2, 64, 8, 2, 16, 32, 4),  # more rows of queries than a program has
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", KERNELS)
def test_attention_over_pages_equals_brute_force(name, shape):
    arrays = random_pages(np.random.default_rng(0), *shape)
    assert_agrees(jax.jit(KERNELS[name])(*arrays), brute_force_pages(*arrays))


@pytest.mark.parametrize("name", KERNELS)
def test_bfloat16_pages_are_summed_in_float32(name):
    q, keys, values, tables, limits = random_pages(np.random.default_rng(0), *SHAPES[1])
    half = [jnp.asarray(x, jnp.bfloat16) for x in (q, keys, values)]
    expected = brute_force_pages(*(np.asarray(x, np.float32) for x in half), tables, limits)
    assert_agrees(jax.jit(KERNELS[name])(*half, tables, limits), expected, tolerance=0.02)


@pytest.mark.parametrize("shape", [(4, 1, 8, 2, 64, 8, 20), (5, 1, 2, 1, 8, 64, 2)], ids=str)
def test_pages_or_their_copy_and_the_current_chunk_equal_brute_force(shape):
    rng = np.random.default_rng(1)
    q, keys, values, tables, limits = random_pages(rng, *shape)
    B, _, _, K, H = shape[:5]
    chunk = rng.normal(size=(2, B, K, 5, H)).astype(np.float32)  # of which two tokens are valid
    of_chunk = jax.jit(reference.attend_chunk)(q[:, 0], *chunk, 1)
    out, lse = jax.jit(reference.attend_pages)(q, keys, values, tables, limits)
    merged = jax.jit(reference.merge_attention_outputs)(*of_chunk, out[:, 0], lse[:, 0])
    for longest in (limits.max(), 40, 0):
        below = np.minimum(limits, longest)
        past = jax.jit(reference.gather_past)(keys, values, tables)
        actual = jax.jit(reference.attend_past)(q[:, 0], past, below[:, 0], *chunk, 1)
        for b in range(B):
            named = tables[b, : -(-below[b, 0] // keys.shape[2])]
            joined = [
                np.concatenate([x[named].swapaxes(0, 1).reshape(K, -1, H)[:, : below[b, 0]], y], 1)
                for x, y in zip((keys, values), chunk[:, b, :, :2], strict=True)
            ]
            one_page = (q[b : b + 1], *(x[None] for x in joined), np.zeros((1, 1), int))
            expected = brute_force_pages(*one_page, np.full((1, 1), joined[0].shape[1]))[0][0, 0]
            np.testing.assert_allclose(actual[b], expected, atol=2e-6)
            if longest == limits.max():
                np.testing.assert_allclose(merged[b], expected, atol=2e-6)


def test_past_boundaries_cover_all_pages():
    for num_pages in range(1, 100):
        ends = reference.compute_past_boundaries(num_pages, 16)
        assert ends == sorted(set(ends))
        assert ends[-1] == num_pages
        assert len(ends) <= 7

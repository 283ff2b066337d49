"""The sampler's attention over pages: each kernel against brute force in float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.models.attention import gpu, reference, tpu

pytestmark = pytest.mark.usefixtures("quick_compilation")

KERNELS = {
    "xla": reference.attend_pages,
    "triton": partial(gpu.attend_pages, interpret=True),
    "mosaic": partial(tpu.attend_pages, interpret=True),
}
SHAPES = [
    # B, Q, N, K, H, page, M
    (3, 1, 4, 4, 8, 4, 5),
    (2, 16, 4, 2, 16, 16, 3),
    (4, 1, 8, 2, 64, 8, 20),
    (2, 3, 7, 1, 16, 4, 7),
    (1, 16, 8, 1, 24, 32, 2),
    (5, 1, 2, 1, 8, 64, 2),
]


def inputs(rng, B, Q, N, K, H, page, M):
    """Queries, more pages than tables name, tables, and limits of which one is 0."""
    num_pages = B * M + 3
    q = rng.normal(size=(B, Q, N, H)).astype(np.float32)
    keys, values = rng.normal(size=(2, num_pages, K, page, H)).astype(np.float32)
    tables = rng.permutation(num_pages)[: B * M].reshape(B, M).astype(np.int32)
    limits = rng.integers(0, M * page + 1, (B, Q)).astype(np.int32)
    limits[0, 0] = 0
    limits[-1, -1] = M * page
    for b in range(B):  # behind the last page that is read stands "no page"
        tables[b, -(-limits[b].max() // page) :] = num_pages
    return q, keys, values, tables, limits


def brute_force(q, keys, values, tables, limits):
    """Outputs and log-sum-exp in float64; of a query that reads nothing 0 and minus infinity."""
    groups = q.shape[2] // keys.shape[1]
    out, lse = np.zeros(q.shape), np.full(q.shape[:3], -np.inf)
    for b, i, n in np.ndindex(q.shape[:3]):
        if limits[b, i]:
            named = tables[b, : -(-limits[b, i] // keys.shape[2])]
            k, v = (
                np.float64(x[named, n // groups]).reshape(-1, q.shape[3])[: limits[b, i]]
                for x in (keys, values)
            )
            scores = k @ np.float64(q[b, i, n]) * q.shape[3] ** -0.5
            lse[b, i, n] = np.logaddexp.reduce(scores)
            out[b, i, n] = np.exp(scores - lse[b, i, n]) @ v
    return out, lse


def assert_agrees(got, wanted, tolerance=2e-6):
    (out, lse), (wanted_out, wanted_lse) = got, wanted
    assert out.dtype == lse.dtype == jnp.float32
    assert np.isfinite(out).all()
    assert np.isfinite(lse).all()
    np.testing.assert_allclose(out, wanted_out, atol=tolerance)
    reads = np.isfinite(wanted_lse)
    np.testing.assert_allclose(np.asarray(lse)[reads], wanted_lse[reads], atol=tolerance)
    assert (np.asarray(lse)[~reads] < -1e30).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", KERNELS)
def test_pages_against_brute_force(name, shape):
    for seed in range(2):
        arrays = inputs(np.random.default_rng(seed), *shape)
        assert_agrees(jax.jit(KERNELS[name])(*arrays), brute_force(*arrays))


@pytest.mark.parametrize("name", KERNELS)
def test_operands_in_bfloat16_sums_in_float32(name):
    q, keys, values, tables, limits = inputs(np.random.default_rng(0), *SHAPES[1])
    half = [jnp.asarray(x, jnp.bfloat16) for x in (q, keys, values)]
    wanted = brute_force(*(np.asarray(x, np.float32) for x in half), tables, limits)
    assert_agrees(jax.jit(KERNELS[name])(*half, tables, limits), wanted, tolerance=0.02)


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape[1] == 1], ids=str)
def test_pages_or_their_copy_and_the_chunk_behind_them(shape):
    rng = np.random.default_rng(1)
    q, keys, values, tables, limits = inputs(rng, *shape)
    B, _, _, K, H = shape[:5]
    chunk = rng.normal(size=(2, B, K, 5, H)).astype(np.float32)  # of which two tokens count
    own = jax.jit(reference.attend_chunk)(q[:, 0], *chunk, 1)
    out, lse = jax.jit(reference.attend_pages)(q, keys, values, tables, limits)
    merged = jax.jit(reference.merge)(*own, out[:, 0], lse[:, 0])
    for longest in (limits.max(), 40, 0):
        below = np.minimum(limits, longest)
        past = jax.jit(reference.open_past)(keys, values, tables, below[:, 0])
        got = jax.jit(reference.attend_past)(q[:, 0], past, below[:, 0], *chunk, 1)
        for b in range(B):
            named = tables[b, : -(-below[b, 0] // keys.shape[2])]
            joined = [
                np.concatenate([x[named].swapaxes(0, 1).reshape(K, -1, H)[:, : below[b, 0]], y], 1)
                for x, y in zip((keys, values), chunk[:, b, :, :2], strict=True)
            ]
            one = (q[b : b + 1], *(x[None] for x in joined), np.zeros((1, 1), int))
            wanted = brute_force(*one, np.full((1, 1), joined[0].shape[1]))[0][0, 0]
            np.testing.assert_allclose(got[b], wanted, atol=2e-6)
            if longest == limits.max():
                np.testing.assert_allclose(merged[b], wanted, atol=2e-6)


def test_pieces_of_a_past_cover_it():
    for num_pages in range(1, 200):
        ends = reference._piece_ends(num_pages, 4)
        assert ends == sorted(set(ends))
        assert ends[-1] == num_pages
        assert len(ends) <= 7

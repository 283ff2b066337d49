"""Attention with tokamax's kernels: merging against float64, masks and lowering.

Some tests need tokamax, which `make test-newest` installs.
"""

import re
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.extras.kernels.attention_tokamax import (
    KeyRange,
    TokamaxKernels,
    _get_range_ends,
    attend_packed,
)
from jaxrl.models.attention.kernels import compute_key_ranges
from jaxrl.models.kernel_check import import_tokamax
from tests.models.attention.brute import brute_force, random_inputs, random_rows
from tests.programs import for_gpu, lowered_for_gpu, pretend_hopper

pytestmark = pytest.mark.usefixtures("quick_compilation")


class XlaKernels(TokamaxKernels):
    """Implementation of `TokamaxKernels` in XLA, which holds all scores in memory."""

    def is_hopper(self):
        return False

    def forward(self, q, k, v, keys):
        R, Q, N, _ = q.shape
        scores = self._compute_scores(q, k, keys)
        lse = jax.nn.logsumexp(scores, axis=-1)
        weights = jnp.exp(scores - jnp.where(jnp.isfinite(lse), lse, 0.0)[..., None])
        return self._einsum_to_query_shape("rkgts,rskh->rtkgh", weights, v, q), lse.reshape(R, N, Q)

    def backward(self, q, k, v, keys, out, lse, gradient):
        (R, Q, N, H), K = q.shape, k.shape[2]
        group_shape = (R, Q, K, N // K, H)
        lse = lse.reshape(R, K, N // K, Q)
        weights = jnp.exp(self._compute_scores(q, k, keys) - lse[..., None])
        d_out = gradient.astype(jnp.float32).reshape(group_shape)
        delta = (d_out * out.reshape(group_shape)).sum(axis=-1).transpose(0, 2, 3, 1)
        d_weights = jnp.einsum("rtkgh,rskh->rkgts", d_out, v.astype(jnp.float32))
        d_scores = weights * (d_weights - delta[..., None]) * self.scale
        dq = self._einsum_to_query_shape("rkgts,rskh->rtkgh", d_scores, k, q)
        dk = jnp.einsum("rkgts,rtkgh->rskh", d_scores, q.reshape(group_shape))
        dv = jnp.einsum("rkgts,rtkgh->rskh", weights, d_out)
        return dq, dk.astype(k.dtype), dv.astype(v.dtype)

    def _einsum_to_query_shape(self, axes, weights, x, q):
        return jnp.einsum(axes, weights, x.astype(jnp.float32)).reshape(q.shape).astype(q.dtype)

    def _compute_scores(self, q, k, keys):
        (R, Q, N, H), (T, K) = q.shape, k.shape[1:3]
        products = jnp.einsum(
            "rtkgh,rskh->rkgts",
            q.reshape(R, Q, K, N // K, H),
            k,
            preferred_element_type=jnp.float32,
        )
        ends = _get_range_ends(keys, T)
        positions = jnp.arange(T)
        is_read = (positions >= keys.start[..., None]) & (positions < ends[..., None])
        return jnp.where(is_read[:, None, None], products * self.scale, -jnp.inf)


def forward_and_backward(**settings):
    def run(q, k, v, key_ranges, gradient):
        out, back = jax.vjp(lambda q, k, v: attend_packed(q, k, v, key_ranges, **settings), q, k, v)
        return out, *back(gradient)

    return jax.jit(run)


def rounded_inputs(rng, shape, num_kv_heads):
    """Return inputs that bfloat16 represents exactly, in bfloat16 and in float32."""
    short = [jnp.asarray(x, jnp.bfloat16) for x in random_inputs(rng, shape, num_kv_heads)]
    return short, [np.asarray(x, np.float32) for x in short]


@pytest.mark.parametrize(
    ("shape", "num_kv_heads", "num_queries", "shares_prompts"),
    [
        ((3, 111, 4, 8), 2, 111, True),
        ((1, 97, 7, 64), 1, 97, False),
        ((2, 200, 2, 16), 2, 90, True),
    ],
)
def test_two_ranges_merged_equal_brute_force(shape, num_kv_heads, num_queries, shares_prompts):
    rng = np.random.default_rng(0)
    segment_ids, positions, attention_mask = random_rows(
        rng, *shape[:2], shares_prompts=shares_prompts
    )
    is_token = (segment_ids > 0)[:, :, None, None]
    (q, k, v, gradient), exact = rounded_inputs(rng, shape, num_kv_heads)
    is_asked = is_token & (np.arange(shape[1]) >= shape[1] - num_queries)[:, None, None]
    exact[3] = exact[3] * is_asked
    gradient = (gradient * is_asked)[:, -num_queries:]
    run = forward_and_backward(make_kernels=XlaKernels, shares_prompts=shares_prompts)
    key_ranges = compute_key_ranges(jnp.asarray(segment_ids), jnp.asarray(positions))
    actual = run(q[:, -num_queries:], k, v, key_ranges, gradient)
    assert {x.dtype for x in actual} == {jnp.dtype("bfloat16")}
    out, of_queries, *of_keys = brute_force(*exact, attention_mask)
    expected = (out[:, -num_queries:], of_queries[:, -num_queries:], *of_keys)
    actual = [np.asarray(x, np.float32) for x in actual]
    actual[0] = actual[0] * is_token[:, -num_queries:]
    for name, one, other in zip(("out", "dq", "dk", "dv"), actual, expected, strict=True):
        # Each part and their sum are rounded to 2^-9 of what they are.
        np.testing.assert_allclose(one, other, atol=0.01 * np.abs(other).max(), err_msg=name)


def test_float32_is_refused():
    x = jnp.ones((1, 8, 2, 64))
    with pytest.raises(ValueError, match=r"float32, but .* set config\.model\.dtype to"):
        attend_packed(x, x, x, jnp.zeros((1, 3, 8), jnp.int32))


def test_another_version_is_refused(monkeypatch):
    import_tokamax.cache_clear()
    other = type("tokamax", (), {"__version__": "0.0.18"})
    monkeypatch.setitem(sys.modules, "tokamax", other)
    x = jnp.ones((1, 8, 2, 64), jnp.bfloat16)
    with pytest.raises(ImportError, match=r"tokamax 0\.0\.18 is installed.* tokamax==0\.0\.17"):
        attend_packed(x, x, x, jnp.zeros((1, 3, 8), jnp.int32))
    import_tokamax.cache_clear()


@pytest.mark.parametrize("which", ["own", "shared", "own of the last"])
def test_its_masks_are_those_of_the_stand_in(which):
    """Compare with tokamax's XLA attention, with the masks that the kernels get."""
    pytest.importorskip("tokamax")
    from tokamax._src.ops.attention import base

    rng, T = np.random.default_rng(1), 128
    segment_ids, positions, _ = random_rows(rng, 2, T)
    starts, *shared = jnp.moveaxis(
        compute_key_ranges(*map(jnp.asarray, (segment_ids, positions))), 1, 0
    )
    num_queries = 48 if which == "own of the last" else T
    own = starts, None
    keys = KeyRange(
        *(x if x is None else x[:, -num_queries:] for x in {"shared": shared}.get(which, own))
    )
    (q, k, v, gradient), _ = rounded_inputs(rng, (2, T, 4, 64), 2)
    q, gradient = (x[:, -num_queries:].astype(jnp.float32) for x in (q, gradient))
    k, v = (x.astype(jnp.float32) for x in (k, v))
    settings = TokamaxKernels(0.125)._make_settings(q, k, keys)
    assert settings["mask"].is_causal == (which == "own")

    def theirs(q, k, v):
        attention = base.DotProductAttention()
        return attention(q, k, v, return_residuals=True, **settings)

    out, back, (highest, total) = jax.vjp(theirs, q, k, v, has_aux=True)
    actual, lse = XlaKernels(0.125).forward(q, k, v, keys)
    # In XLA it averages all values where nothing is read; the kernels and we give 0.
    has_keys = jnp.isfinite(lse).swapaxes(1, 2)[..., None]
    assert has_keys.all() == (which != "shared")
    np.testing.assert_allclose(actual, jnp.where(has_keys, out, 0), atol=1e-5)
    theirs = jnp.where(jnp.isfinite(lse), highest + jnp.log(total), -jnp.inf)
    np.testing.assert_allclose(lse, theirs, atol=1e-5)
    gradient = jnp.where(has_keys, gradient, 0)
    found = XlaKernels(0.125).backward(
        q, k, v, keys, actual, jnp.where(has_keys[..., 0].swapaxes(1, 2), lse, 0), gradient
    )
    for one, other in zip(found, back(gradient), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)


SHAPES = [
    # R, T, N, K, H, kernels where prompts are shared
    (2, 4096, 28, 4, 128, 4),
    (1, 300, 14, 2, 64, 4),
    (1, 512, 4, 4, 80, 4),
    (1, 200, 4, 2, 256, 6),  # backwards tokamax's, twice
]


@pytest.mark.parametrize("shape", SHAPES)
def test_lowered_for_a_hopper_chip_without_a_warning(monkeypatch, shape):
    tokamax = pytest.importorskip("tokamax")
    pretend_hopper(monkeypatch)
    R, T, N, K, H, num_kernels = shape
    q, kv = (jax.ShapeDtypeStruct((R, T, n, H), jnp.bfloat16) for n in (N, K))
    arguments = q, kv, kv, jax.ShapeDtypeStruct((R, 3, T), jnp.int32), q
    for shares_prompts, count in ((True, num_kernels), (False, 3)):
        function = for_gpu(forward_and_backward(shares_prompts=shares_prompts))
        with warnings.catch_warnings(), tokamax.config.cross_compile(True):
            warnings.simplefilter("error")
            program = lowered_for_gpu(jax.jit(function), *arguments)
        assert program.count("custom_call @mosaic_gpu_v2") == count
        assert not re.search(rf"tensor<[\dx]*{T}x{T}x", program)

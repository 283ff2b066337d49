"""Products of experts by kernels for Mosaic: what goes in and out of them, and lowering.

Where tokamax is not installed the tests that need it are skipped; `make test-newest` has it.
"""

import sys
import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.extras.experts import tokamax as ours
from jaxrl.extras.experts.products import grouped_matmul
from jaxrl.models.kernel_check import import_tokamax
from tests.extras.experts.brute import brute_force
from tests.programs import for_gpu, lowered_for_gpu, pretend_hopper

pytestmark = pytest.mark.usefixtures("quick_compilation")

interpreted = partial(ours.grouped_matmul, interpret=True)


def differentiated(product):
    def run(rows, weights, sizes, gradient):
        out, back = jax.vjp(lambda rows, weights: product(rows, weights, sizes), rows, weights)
        return out, *back(gradient)

    return jax.jit(run)


def operands(sizes, num_more, width, columns):
    rng = np.random.default_rng(len(sizes))
    shapes = (sum(sizes) + num_more, width), (len(sizes), width, columns)
    rows, weights = (jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in shapes)
    gradient = jnp.asarray(rng.standard_normal((len(rows), columns)), jnp.bfloat16)
    return rows, weights, jnp.asarray(sizes, jnp.int32), gradient


CASES = [
    # sizes of groups, rows beyond them, width, width of what comes out
    ([10, 20, 3, 0, 7], 5, 5, 7),
    ([131, 0, 1, 90], 3, 64, 16),
    ([0, 0], 9, 16, 16),
]


@pytest.mark.parametrize("case", CASES)
def test_rows_beyond_and_empty_groups_have_no_part(case):
    sizes, *_ = case
    rows, weights, given, gradient = operands(*case)
    count = sum(sizes)
    spoilt, of_spoilt = (x.at[count:].set(jnp.nan) for x in (rows, gradient))
    got = differentiated(interpreted)(spoilt, weights, given, of_spoilt)
    wanted = brute_force(rows, weights, sizes, gradient)
    loop = differentiated(grouped_matmul)(rows, weights, given, gradient)
    assert {x.dtype for x in got} == {jnp.dtype("bfloat16")}
    for one, exact, other, end in zip(got, wanted, loop, (count, count, None), strict=True):
        one, other = (np.asarray(x, np.float64)[:end] for x in (one, other))
        np.testing.assert_allclose(one, exact[:end], rtol=2**-8, atol=1e-5)
        np.testing.assert_allclose(one, other, rtol=2**-7, atol=1e-5)


def test_float32_is_refused():
    rows, weights, sizes, _ = operands(*CASES[0])
    with pytest.raises(ValueError, match=r"float32, but .* set config\.model\.dtype to"):
        ours.grouped_matmul(rows.astype(jnp.float32), weights, sizes)


def test_without_tokamax_the_error_says_what_to_install(monkeypatch):
    import_tokamax.cache_clear()
    monkeypatch.setitem(sys.modules, "tokamax", None)
    with pytest.raises(ImportError, match=r"pip install 'jaxrl\[cuda\]'`\.(\n|$)"):
        ours.grouped_matmul(*operands(*CASES[0])[:3])


def test_tokamax_s_product_in_xla_is_the_same():
    """Its kernels' dimension numbers, by the implementation that they share a contract with."""
    pytest.importorskip("tokamax")
    from tokamax._src.ops.ragged_dot import base

    rows, weights, sizes, gradient = operands(*CASES[1])
    loop = differentiated(grouped_matmul)(rows, weights, sizes, gradient)

    def theirs(rows, weights, sizes):
        return base.RaggedDot(vjp=base.vjp)(rows, weights, group_sizes=sizes)

    count = sum(CASES[1][0])
    found = differentiated(theirs)(rows, weights, sizes, gradient.at[count:].set(0))
    for one, other, end in zip(found, loop, (count, count, None), strict=True):
        one, other = (np.asarray(x, np.float64)[:end] for x in (one, other))
        np.testing.assert_allclose(one, other, rtol=2**-7, atol=1e-5)


SHAPES = [
    # rows, width, width of what comes out, groups
    (65_536, 2048, 768, 128),  # an update of Qwen3-30B-A3B
    (2048, 768, 2048, 128),  # a decoding step
    (16_384, 2048, 96, 16),  # a device's of eight along both axes
    (96, 40, 24, 8),
]


@pytest.mark.parametrize("shape", SHAPES)
def test_three_kernels_are_lowered_for_a_hopper_chip(monkeypatch, shape):
    tokamax = pytest.importorskip("tokamax")
    pretend_hopper(monkeypatch)
    A, D, F, G = shape
    make = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    arguments = make((A, D)), make((G, D, F)), jax.ShapeDtypeStruct((G,), jnp.int32), make((A, F))
    function = for_gpu(differentiated(ours.grouped_matmul))
    with warnings.catch_warnings(), tokamax.config.cross_compile(True):
        warnings.simplefilter("error")
        program = lowered_for_gpu(jax.jit(function), *arguments)
    assert program.count("custom_call @mosaic_gpu_v2") == 3

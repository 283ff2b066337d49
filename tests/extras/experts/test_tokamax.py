"""Grouped matmul with Mosaic kernels: inputs, outputs and lowering.

Some tests need tokamax, which `make test-newest` installs.
"""

import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.extras.experts import tokamax as tokamax_experts
from jaxrl.extras.experts.products import grouped_matmul
from tests.extras.experts.brute import brute_force, differentiated
from tests.programs import for_gpu, lowered_for_gpu, pretend_hopper

pytestmark = pytest.mark.usefixtures("quick_compilation")

interpreted = partial(tokamax_experts.grouped_matmul, interpret=True)


def operands(sizes, num_more, width, columns):
    rng = np.random.default_rng(len(sizes))
    shapes = (sum(sizes) + num_more, width), (len(sizes), width, columns)
    rows, weights = (jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in shapes)
    gradient = jnp.asarray(rng.standard_normal((len(rows), columns)), jnp.bfloat16)
    return rows, weights, jnp.asarray(sizes, jnp.int32), gradient


CASES = [
    # sizes of groups, rows beyond them, width, width of what comes out
    ([131, 0, 1, 90], 3, 64, 16),
    ([0, 0], 9, 16, 16),
]


@pytest.mark.parametrize("case", CASES)
def test_rows_beyond_and_empty_groups_have_no_part(case):
    sizes, *_ = case
    rows, weights, given, gradient = operands(*case)
    count = sum(sizes)
    spoilt, of_spoilt = (x.at[count:].set(jnp.nan) for x in (rows, gradient))
    actual = differentiated(interpreted)(spoilt, weights, given, of_spoilt)
    expected = brute_force(rows, weights, sizes, gradient)
    assert {x.dtype for x in actual} == {jnp.dtype("bfloat16")}
    for result, exact, end in zip(actual, expected, (count, count, None), strict=True):
        result = np.asarray(result, np.float64)[:end]
        np.testing.assert_allclose(result, exact[:end], rtol=2**-8, atol=1e-5)


def test_tokamax_s_product_in_xla_is_the_same():
    """Check the kernels' dimension numbers with an implementation of the same contract."""
    pytest.importorskip("tokamax")
    from tokamax._src.ops.ragged_dot import base

    rows, weights, sizes, gradient = operands(*CASES[0])
    loop = differentiated(grouped_matmul)(rows, weights, sizes, gradient)

    def theirs(rows, weights, sizes):
        return base.RaggedDot(vjp=base.vjp)(rows, weights, group_sizes=sizes)

    count = sum(CASES[0][0])
    found = differentiated(theirs)(rows, weights, sizes, gradient.at[count:].set(0))
    for result, ours, end in zip(found, loop, (count, count, None), strict=True):
        result, ours = (np.asarray(x, np.float64)[:end] for x in (result, ours))
        np.testing.assert_allclose(result, ours, rtol=2**-7, atol=1e-5)


SHAPES = [
    # rows, width, width of what comes out, groups
    (65_536, 2048, 768, 128),  # an update of Qwen3-30B-A3B
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
    function = for_gpu(differentiated(tokamax_experts.grouped_matmul))
    with warnings.catch_warnings(), tokamax.config.cross_compile(True):
        warnings.simplefilter("error")
        program = lowered_for_gpu(jax.jit(function), *arguments)
    assert program.count("custom_call @mosaic_gpu_v2") == 3

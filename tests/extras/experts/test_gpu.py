"""The kernels for NVIDIA GPUs: interpreted against float64, and lowered without such a device."""

import math
import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.extras.experts import gpu
from jaxrl.extras.experts.dispatch import ExpertKernels
from tests.extras.experts.brute import brute_force, differentiated
from tests.helpers import TINY_MOE
from tests.programs import for_gpu, lowered_for_gpu, trainer_programs

pytestmark = pytest.mark.usefixtures("quick_compilation")

interpreted = partial(gpu.grouped_matmul, interpret=True)


CASES = [
    # sizes of groups, rows beyond them, width, width of what comes out, dtype
    ([10, 20, 3, 0, 7], 5, 5, 7, "float32"),
    ([131, 0, 1, 90], 3, 64, 16, "bfloat16"),
    ([0, 0], 9, 16, 16, "float32"),
]


@pytest.mark.parametrize("case", CASES)
def test_products_and_gradients_are_exact_whatever_the_groups(case):
    sizes, num_more, width, columns, dtype = case
    count, rng = sum(sizes), np.random.default_rng(len(sizes))

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    rows, gradient = (normal(count + num_more, size) for size in (width, columns))
    spoilt, of_spoilt = (x.at[count:].set(jnp.nan) for x in (rows, gradient))
    weights = normal(len(sizes), width, columns)
    given = jnp.asarray(sizes, jnp.int32)
    actual = differentiated(interpreted)(spoilt, weights, given, of_spoilt)
    expected = brute_force(rows, weights, sizes, gradient)
    assert {x.dtype for x in actual} == {jnp.dtype(dtype)}
    # What is summed in float32 is rounded once.
    bound = {"float32": 1e-6, "bfloat16": 2**-8}[dtype]
    for result, exact, end in zip(actual, expected, (count, count, None), strict=True):
        result = np.asarray(result, np.float64)[:end]
        np.testing.assert_allclose(result, exact[:end], rtol=bound, atol=1e-5)


SHAPES = [
    # rows, width, width of what comes out, groups, dtype
    (65_536, 2048, 768, 128, "bfloat16"),  # an update of Qwen3-30B-A3B
    (16_384, 2048, 96, 16, "bfloat16"),  # a device's of eight along both axes
    (96, 40, 24, 8, "float32"),
]


@pytest.mark.parametrize("shape", SHAPES)
def test_three_kernels_are_lowered_for_a_gpu(shape):
    A, D, F, G, dtype = shape
    make, dtype = jax.ShapeDtypeStruct, jnp.dtype(dtype)
    arguments = make((A, D), dtype), make((G, D, F), dtype), make((G,), jnp.int32)
    function = differentiated(for_gpu(gpu.grouped_matmul))
    program = lowered_for_gpu(function, *arguments, make((A, F), dtype))
    names = re.findall(r'name = "(experts_\w+)"', program)
    assert sorted(names) == ["experts_rows", "experts_rows_backward", "experts_weights_backward"]


def test_an_update_for_a_gpu_has_the_kernels_and_no_tokens_times_experts_times_width():
    rows, row_tokens = 4, 64
    model = replace(TINY_MOE, num_experts=32, expert_layers=(0, 1, 2))
    pairs = rows * row_tokens * model.top_k

    product = for_gpu(gpu.grouped_matmul)
    experts = ExpertKernels(name="triton", reason="for a test", grouped_matmul=product)
    function, arguments = trainer_programs(
        replace(model, experts=experts), kernels="triton", rows=rows, row_tokens=row_tokens
    )["update"]
    program = lowered_for_gpu(jax.jit(function), *arguments)
    # Forwards, again for the gradient, and that: of three products with weights.
    names = re.findall(r'name = "(experts_\w+)"', program)
    assert {name: names.count(name) for name in names} == {
        "experts_rows": 6, "experts_rows_backward": 3, "experts_weights_backward": 3,
    }  # fmt: skip
    assert "ragged_dot" not in program
    shapes = re.findall(r"tensor<((?:\d+x)+)", program)
    largest = max(math.prod(map(int, shape[:-1].split("x"))) for shape in shapes)
    assert largest < pairs * model.num_experts * model.expert_width

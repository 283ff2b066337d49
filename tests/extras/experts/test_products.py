"""Grouped matmul against `jax.lax.ragged_dot`, and its cost."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.extras.experts import tpu
from jaxrl.extras.experts.choice import resolve_kernel_name
from jaxrl.extras.experts.dispatch import apply_experts
from jaxrl.extras.experts.products import (
    choose_tile_rows,
    grouped_matmul,
    grouped_matmul_static,
    split_into_tiles,
)
from tests.helpers import shapes_in

pytestmark = pytest.mark.usefixtures("quick_compilation")


def operands(sizes, *, num_rows, seed=0):
    rng = np.random.default_rng(seed)
    rows = jnp.asarray(rng.standard_normal((num_rows, 5), np.float32))
    weights = jnp.asarray(rng.standard_normal((len(sizes), 5, 7), np.float32))
    return rows, weights, jnp.asarray(sizes, jnp.int32)


def differentiate(product, count):
    def total(rows, weights, sizes):
        return jnp.sin(product(rows, weights, sizes)[:count]).sum()

    return jax.jit(jax.value_and_grad(total, argnums=(0, 1)))


def test_tiles_by_hand():
    # Groups of 3, 0, 9 and 1 rows in tiles of 4: one, none, three and one.
    tiles = split_into_tiles(jnp.array([3, 0, 9, 1]), 16, 4)
    assert int(tiles.num_tiles) == 5
    assert len(tiles.start) == 4 + 12 // 4  # a tile a group, and the whole ones of what is left
    assert tiles.start[:5].tolist() == [0, 3, 7, 11, 12]
    assert tiles.group[:5].tolist() == [0, 2, 2, 2, 3]
    assert tiles.size[:5].tolist() == [3, 4, 4, 1, 1]
    assert [choose_tile_rows(*sizes) for sizes in ((1, 8), (64, 4), (100, 4), (4096, 4))] == [
        8,
        16,
        32,
        128,
    ]


@pytest.mark.parametrize(
    ("product", "sizes"),
    [
        (grouped_matmul, [10, 20, 3, 0, 7]),
        (grouped_matmul, [0] * 5),
        (grouped_matmul_static, [10, 0, 3, 20, 7]),
        (partial(tpu.grouped_matmul, interpret=True), [10, 0, 3, 20, 7]),
    ],
)
def test_products_and_gradients_are_those_of_ragged_dot(product, sizes):
    count = sum(sizes)
    rows, weights, sizes = operands(sizes, num_rows=45)
    spoilt = rows.at[count:].set(jnp.nan)  # rows beyond the groups have no part
    value, (of_rows, of_weights) = differentiate(product, count)(spoilt, weights, sizes)
    expected = differentiate(jax.lax.ragged_dot, count)(rows, weights, sizes)
    np.testing.assert_allclose(value, expected[0], rtol=1e-5)
    np.testing.assert_allclose(of_rows[:count], expected[1][0][:count], atol=1e-5)
    np.testing.assert_allclose(of_weights, expected[1][1], atol=1e-5)


def test_bfloat16_is_summed_in_float32():
    rows, weights, sizes = operands([30, 10], num_rows=40)
    rows, weights = rows.astype(jnp.bfloat16), weights.astype(jnp.bfloat16)
    actual = jax.jit(grouped_matmul)(rows, weights, sizes)
    expected = jax.jit(grouped_matmul)(*(x.astype(jnp.float32) for x in (rows, weights)), sizes)
    assert actual.dtype == jnp.bfloat16
    np.testing.assert_array_equal(actual, expected.astype(jnp.bfloat16))


def test_the_choice_and_its_reason():
    assert resolve_kernel_name("auto", "tpu") == ("megablox", "since the devices are tpus")
    assert resolve_kernel_name("auto", "gpu")[0] == "mosaic_gpu"
    assert resolve_kernel_name("auto", "gpu", "float32")[0] == "triton"
    assert resolve_kernel_name("auto", "cpu")[0] == "xla"
    assert resolve_kernel_name("xla", "tpu")[0] == "xla"
    with pytest.raises(ValueError, match="'mosaic_gpu', whose kernels multiply 16-bit floats, but"):
        resolve_kernel_name("mosaic_gpu", "gpu", "float32")
    with pytest.raises(ValueError, match=r"model\.experts is 'megablox', .* devices are cpus; set"):
        resolve_kernel_name("megablox", "cpu")


def test_no_array_holds_tokens_times_experts_times_width():
    tokens, num_experts, width, inner, top_k = 64, 32, 24, 40, 2
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((tokens, width), np.float32))
    shapes = {"gate": (width, inner), "up": (width, inner), "down": (inner, width)}
    weights = {n: jnp.ones((num_experts, *shape), jnp.float32) for n, shape in shapes.items()}
    chosen = jnp.asarray(rng.integers(0, num_experts, (tokens, top_k)), jnp.int32)
    shares = jnp.ones((tokens, top_k), jnp.float32)

    def largest(product):
        def loss(x, weights, shares):
            return (apply_experts(x, weights, chosen, shares, grouped_matmul=product) ** 2).sum()

        compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(x, weights, shares).compile()
        return max(map(math.prod, shapes_in(compiled.as_text())))

    assert largest(grouped_matmul) < tokens * num_experts * width
    assert largest(jax.lax.ragged_dot) >= tokens * num_experts * width  # so the test would tell

"""Loops over layers of several kinds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.models.layers import LayerScan

WIDTH, MLP_WIDTH, NUM_TOKENS = 16, 64, 512


def run_layer(x, block):
    mixed = jnp.tanh(x @ block["a"]) if "a" in block else jnp.sin(x @ block["b"])
    x = x + mixed
    return x + jax.nn.silu(x @ block["up"]) @ block["down"]


def make_blocks(kinds):
    """Return random weights of layers of kinds `a` and `b`, and the layers that have each."""
    stacks = {kind: [i for i, k in enumerate(kinds) if k == kind] for kind in sorted(set(kinds))}
    shapes = {kind: (len(layers), WIDTH, WIDTH) for kind, layers in stacks.items()}
    shapes |= {"up": (len(kinds), WIDTH, MLP_WIDTH), "down": (len(kinds), MLP_WIDTH, WIDTH)}
    rng = np.random.default_rng(0)
    blocks = {name: 0.1 * rng.normal(size=shape) for name, shape in shapes.items()}
    return jax.tree.map(jnp.float32, blocks), stacks


def make_gradient(kinds, **settings):
    blocks, stacks = make_blocks(kinds)

    def loss(blocks, x):
        return (LayerScan(**settings)(run_layer, x, blocks, stacks) ** 2).mean()

    x = jnp.asarray(np.random.default_rng(1).normal(size=(NUM_TOKENS, WIDTH)), jnp.float32)
    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1))), (blocks, x)


@pytest.mark.parametrize("kinds", ["aaab" * 3, "ab" * 4, "aabab", "ba", "aaaa"])
def test_the_loop_computes_the_layers_in_order(kinds):
    compute, arguments = make_gradient(kinds, remat="full")
    unrolled, _ = make_gradient(kinds, scan=False)
    jax.tree.map(
        lambda ours, other: np.testing.assert_allclose(ours, other, rtol=2e-5, atol=1e-7),
        compute(*arguments),
        unrolled(*arguments),
    )


@pytest.mark.parametrize("kinds", ["aaab" * 3, "ab" * 6])
def test_single_layers_of_a_repeating_pattern_are_recomputed(kinds):
    sizes = {}
    for remat in ("full", "none"):
        compute, arguments = make_gradient(kinds, remat=remat)
        sizes[remat] = compute.lower(*arguments).compile().memory_analysis().temp_size_in_bytes
    assert sizes["full"] < 0.6 * sizes["none"]

"""The output layer: computing logits block by block changes no result."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl.models.decoder import project
from jaxrl.models.output import OutputLayer, choose_block_tokens
from jaxrl.runtime.sharding import make_mesh
from tests.helpers import ROOT, with_devices
from tests.toys import one_device_mesh

pytestmark = pytest.mark.usefixtures("quick_compilation")


def unembed(tables, hidden):
    return project("vd", hidden, tables["embedding"], tables["embedding"])


def build_layer(mesh, *, chunk, block, entropy_gradient=True):
    return OutputLayer(
        unembed=unembed,
        mesh=mesh,
        chunk_tokens=chunk,
        block_tokens=block,
        entropy_gradient=entropy_gradient,
    )


def draw_inputs(rng, num_tokens, num_ids, width):
    """Return a table, hidden states, targets, and weights of the results."""
    shapes = ((num_ids, width), (1, num_tokens, width), (2, 1, num_tokens))
    table, hidden, weights = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in shapes)
    return table, hidden, jnp.asarray(rng.integers(num_ids, size=(1, num_tokens))), weights


def dense(table, hidden, targets, temperature):
    """Return logprobs and entropies computed from all logits at once."""
    table_logprobs = jax.nn.log_softmax(hidden @ table.T / temperature)
    logprobs = jnp.take_along_axis(table_logprobs, targets[..., None], axis=-1)[..., 0]
    return logprobs, -(jnp.exp(table_logprobs) * table_logprobs).sum(axis=-1)


def blockwise(layer):
    return lambda table, *rest: layer.compute_logprobs_and_entropies({"embedding": table}, *rest)


def values_and_gradients(compute, table, hidden, targets, weights, temperature):
    def total(table, hidden):
        values = compute(table, hidden, targets, temperature)
        return sum((x * w).sum() for x, w in zip(values, weights, strict=True)), values

    differentiate = jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))
    (_, values), gradients = differentiate(table, hidden)
    return *values, *gradients


def assert_all_close(actual, expected):
    for x, y in zip(actual, expected, strict=True):
        scale = max(1.0, float(np.abs(y).max()))
        np.testing.assert_allclose(x, y, atol=1e-6 * scale, rtol=1e-6)


def test_blocks_change_nothing_at_random_sizes():
    rng = np.random.default_rng(0)
    for chunk, block in ((12, 5), (9, 1), (4, 6), (100, 100)):
        inputs = draw_inputs(rng, int(rng.integers(20, 40)), int(rng.integers(10, 90)), 8)
        temperature = float(rng.uniform(0.5, 2))
        layer = build_layer(one_device_mesh(), chunk=chunk, block=block)
        actual = values_and_gradients(blockwise(layer), *inputs, temperature)
        assert_all_close(actual, values_and_gradients(dense, *inputs, temperature))


def check_with_a_split_vocabulary():
    """Check on four devices, each with half of the tokens and of the ids."""
    mesh = make_mesh(data=2, fsdp=1, tensor=2, devices=jax.devices())
    table, hidden, targets, weights = draw_inputs(np.random.default_rng(1), 24, 32, 8)
    split_table = jax.device_put(table, NamedSharding(mesh, P("tensor", None)))
    hidden, targets = hidden.reshape(2, 12, 8), targets.reshape(2, 12)
    inputs = hidden, targets, weights.reshape(2, 2, 12), 0.7
    for entropy_gradient in (False, True):
        actual, expected = (
            values_and_gradients(
                blockwise(
                    build_layer(mesh, chunk=8, block=block, entropy_gradient=entropy_gradient)
                ),
                split_table,
                *inputs,
            )
            for block in (3, sys.maxsize)
        )
        assert_all_close(actual, expected)
    assert_all_close(actual, values_and_gradients(dense, table, *inputs))


def test_blocks_change_nothing_with_a_split_vocabulary():
    subprocess.run(
        [sys.executable, "-c", f"import {__name__} as m; m.check_with_a_split_vocabulary()"],
        env={**os.environ, **with_devices(4)},
        cwd=ROOT,
        check=True,
    )


def test_a_block_has_two_megabytes_on_a_cpu_and_is_unlimited_elsewhere():
    assert choose_block_tokens("cpu", 32_000) == 16
    assert choose_block_tokens("cpu", 152_064) == 3
    assert choose_block_tokens("cpu", 2**20) == 1
    assert choose_block_tokens("gpu", 32_000) == choose_block_tokens("tpu", 32_000) == sys.maxsize


def test_the_logits_of_a_chunk_are_in_memory_once():
    """512 tokens x 8,192 ids: 16 MiB of logits, blocks of 2; a table of 2 MiB and its gradient."""
    inputs = draw_inputs(np.random.default_rng(0), 512, 8192, 64)
    chunk, table = 512 * 8192 * 4, 8192 * 64 * 4

    def temporaries(block):
        layer = build_layer(one_device_mesh(), chunk=512, block=block)
        compute = lambda *arrays: values_and_gradients(blockwise(layer), *arrays, 1.0)  # noqa: E731
        return jax.jit(compute).lower(*inputs).compile().memory_analysis().temp_size_in_bytes

    assert temporaries(choose_block_tokens("cpu", 8192)) < chunk + 2 * table + 4 * 2**21
    assert temporaries(sys.maxsize) > 2 * chunk

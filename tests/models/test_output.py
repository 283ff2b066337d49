"""The output layer: what is made of logits block by block is what is made of all of them."""

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


def layer_of(mesh, *, chunk, block, entropy_gradient=True):
    return OutputLayer(
        unembed=unembed,
        mesh=mesh,
        chunk_tokens=chunk,
        block_tokens=block,
        entropy_gradient=entropy_gradient,
    )


def drawn(rng, num_tokens, num_ids, width):
    """A table, hidden states, targets and the weights of what is found."""
    shapes = ((num_ids, width), (1, num_tokens, width), (2, 1, num_tokens))
    table, hidden, weights = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in shapes)
    return table, hidden, jnp.asarray(rng.integers(num_ids, size=(1, num_tokens))), weights


def plain(table, hidden, targets, temperature):
    logp = jax.nn.log_softmax(hidden @ table.T / temperature)
    taken = jnp.take_along_axis(logp, targets[..., None], axis=-1)[..., 0]
    return taken, -(jnp.exp(logp) * logp).sum(axis=-1)


def found_and_gradients(compute, table, hidden, targets, weights, temperature):
    def total(table, hidden):
        found = compute(table, hidden, targets, temperature)
        return sum((one * w).sum() for one, w in zip(found, weights, strict=True)), found

    of_all = jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))
    (_, found), gradients = of_all(table, hidden)
    return *found, *gradients


def by(layer):
    return lambda table, *rest: layer.logprobs_and_entropies({"embedding": table}, *rest)


def assert_alike(got, want):
    for one, other in zip(got, want, strict=True):
        scale = max(1.0, float(np.abs(other).max()))
        np.testing.assert_allclose(one, other, atol=1e-6 * scale, rtol=1e-6)


@pytest.mark.parametrize(
    "entropy_gradient", [pytest.param(False, marks=pytest.mark.slow(instead="::[True]")), True]
)
def test_blocks_change_nothing_at_random_sizes(entropy_gradient):
    rng = np.random.default_rng(0)
    for chunk, block in ((100, 7), (12, 5), (9, 1), (4, 6), (100, 100)):
        given = drawn(rng, int(rng.integers(20, 40)), int(rng.integers(10, 90)), 8)
        temperature = float(rng.uniform(0.5, 2))
        settings = {"chunk": chunk, "entropy_gradient": entropy_gradient}
        one, other = (
            layer_of(one_device_mesh(), block=size, **settings) for size in (block, sys.maxsize)
        )
        got = found_and_gradients(by(one), *given, temperature)
        assert_alike(got, found_and_gradients(by(other), *given, temperature))
        if entropy_gradient:
            assert_alike(got, found_and_gradients(plain, *given, temperature))


def check_with_a_split_vocabulary():
    """On four devices, half of the tokens and of the ids on each."""
    mesh = make_mesh(data=2, fsdp=1, tensor=2, devices=jax.devices())
    table, hidden, targets, weights = drawn(np.random.default_rng(1), 24, 32, 8)
    placed = jax.device_put(table, NamedSharding(mesh, P("tensor", None)))
    hidden, targets = hidden.reshape(2, 12, 8), targets.reshape(2, 12)
    given = hidden, targets, weights.reshape(2, 2, 12), 0.7
    for entropy_gradient in (False, True):
        settings = {"chunk": 8, "entropy_gradient": entropy_gradient}
        got, want = (
            found_and_gradients(by(layer_of(mesh, block=size, **settings)), placed, *given)
            for size in (3, sys.maxsize)
        )
        assert_alike(got, want)
    assert_alike(got, found_and_gradients(plain, table, *given))


def test_blocks_change_nothing_where_the_vocabulary_is_split():
    done = subprocess.run(
        [sys.executable, "-c", f"import {__name__} as here; here.check_with_a_split_vocabulary()"],
        env={**os.environ, **with_devices(4)},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_a_block_is_two_megabytes_on_a_cpu_and_all_elsewhere():
    assert choose_block_tokens("cpu", 32_000) == 16
    assert choose_block_tokens("cpu", 152_064) == 3
    assert choose_block_tokens("cpu", 2**20) == 1
    assert choose_block_tokens("gpu", 32_000) == choose_block_tokens("tpu", 32_000) == sys.maxsize


def test_blocks_are_alike_rather_than_padded():
    """Tokens just beyond one block would otherwise be multiplied twice over."""
    for num_tokens, chunk, block in ((576, 8192, 551), (17, 100, 16), (100, 30, 7), (40, 40, 1)):
        layer = layer_of(one_device_mesh(), chunk=chunk, block=block)
        count, _, width, _ = layer.split_chunks(jnp.zeros((1, num_tokens, 2))).shape
        num_blocks = count * -(-width // block)
        assert num_tokens <= count * width < num_tokens + num_blocks + count


def test_a_chunk_has_its_logits_once():
    """512 tokens x 8,192 ids: 16 MiB of logits, blocks of 2; a table of 2 MiB and its gradient."""
    given = drawn(np.random.default_rng(0), 512, 8192, 64)
    chunk, table = 512 * 8192 * 4, 8192 * 64 * 4

    def temporaries(block):
        layer = layer_of(one_device_mesh(), chunk=512, block=block)
        compute = lambda *arrays: found_and_gradients(by(layer), *arrays, 1.0)  # noqa: E731
        return jax.jit(compute).lower(*given).compile().memory_analysis().temp_size_in_bytes

    assert temporaries(choose_block_tokens("cpu", 8192)) < chunk + 2 * table + 4 * 2**21
    assert temporaries(sys.maxsize) > 2 * chunk

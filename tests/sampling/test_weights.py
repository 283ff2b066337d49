"""Conversion of parameters to the sampler's weights, with and without donation."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.extras.lora.adapter import Adapter, find_targets
from jaxrl.models.layers import prepare_sampler_weights
from jaxrl.runtime.sharding import make_mesh
from jaxrl.sampling.weights import WeightConverter, donate, partition_program
from tests.helpers import TINY, tiny_params

pytestmark = pytest.mark.usefixtures("quick_compilation")

TIED = replace(TINY, tie_embeddings=True)
ADAPTED = Adapter(model=TIED, rank=4, alpha=8.0, targets=find_targets(TIED, ["all-linear"]))


def build_converter(policy, dtype):
    def prepare(params):
        return prepare_sampler_weights(policy.prepare_decoding_weights(params, dtype), scan=False)

    mesh = make_mesh(data=1, fsdp=1, tensor=1)
    return WeightConverter(prepare, policy, mesh=mesh, train_mesh=mesh, scan_layers=False)


def test_program_parts_share_no_input():
    def program(a, b, c, d):
        return a + 1, b * c, d, c[0], jnp.zeros(3)

    # The second and the fourth need c; the last needs nothing.
    parts = partition_program(jax.make_jaxpr(program)(*[jnp.ones(2)] * 4))
    assert sorted(parts) == [([], [4]), ([0], [0]), ([1, 2], [1, 3]), ([3], [2])]


@pytest.mark.parametrize(
    ("policy", "dtype"), [(TIED, "float32"), (ADAPTED, "bfloat16")], ids=["model", "adapter"]
)
def test_donated_parameters_are_never_all_in_memory(policy, dtype):
    params = tiny_params(policy)
    on_device = jax.device_put(params, jax.devices()[0])
    expected = jax.device_get(build_converter(policy, jnp.dtype(dtype)).convert(on_device))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(on_device))

    read, sizes = [], []

    def on_disk(leaf):
        def load():
            sizes.append(sum(array.nbytes for array in read if not array.is_deleted()))
            read.append(jax.device_put(leaf, jax.devices()[0]))
            return read[-1]

        return load

    converter = build_converter(policy, jnp.dtype(dtype))
    weights = converter.convert(jax.tree.map(on_disk, params))
    jax.tree.map(np.testing.assert_array_equal, weights, expected)
    assert len(read) == len(jax.tree.leaves(params))
    # A parameter that is not deleted is itself a weight.
    weight_ids = {id(leaf) for leaf in jax.tree.leaves(weights)}
    assert all(array.is_deleted() or id(array) in weight_ids for array in read)
    largest = max(leaf.nbytes for leaf in jax.tree.leaves(params))
    unconverted = sum(array.nbytes for array in read if not array.is_deleted())
    assert max(sizes) <= unconverted + (policy is ADAPTED) * largest
    converter.free()
    assert all(array.is_deleted() for array in read)


def test_donated_parameters_in_memory_are_freed():
    on_device = jax.device_put(tiny_params(TIED), jax.devices()[0])
    weights = build_converter(TIED, jnp.dtype("bfloat16")).convert(donate(on_device))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(on_device))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(weights))

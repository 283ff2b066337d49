"""The sampler's weights, out of parameters that are kept and out of those that are given up."""

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


def of_policy(policy, dtype, mesh):
    def prepare(params):
        return prepare_sampler_weights(policy.weights_for_decoding(params, dtype), scan=False)

    return WeightConverter(prepare, policy, mesh=mesh, train_mesh=mesh, scan_layers=False)


def test_parts_share_no_input():
    def made(a, b, c, d):
        return a + 1, b * c, d, c[0], jnp.zeros(3)

    # The second and the fourth need c; nothing is needed for the last.
    found = partition_program(jax.make_jaxpr(made)(*[jnp.ones(2)] * 4))
    assert sorted(found) == [([], [4]), ([0], [0]), ([1, 2], [1, 3]), ([3], [2])]


@pytest.mark.parametrize(
    ("policy", "dtype"), [(TIED, "float32"), (ADAPTED, "bfloat16")], ids=["model", "adapter"]
)
def test_parameters_that_are_given_up_are_never_all_there(policy, dtype):
    mesh = make_mesh(data=1, fsdp=1, tensor=1)
    params = tiny_params(policy)
    kept = of_policy(policy, jnp.dtype(dtype), mesh)
    own = jax.device_put(params, jax.devices()[0])
    wanted = jax.device_get(kept.convert(own))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(own))

    read, sizes = [], []

    def on_disk(leaf):
        def load():
            sizes.append(sum(array.nbytes for array in read if not array.is_deleted()))
            read.append(jax.device_put(leaf, jax.devices()[0]))
            return read[-1]

        return load

    freed = of_policy(policy, jnp.dtype(dtype), mesh)
    made = freed.convert(jax.tree.map(on_disk, params))
    for one, other in zip(jax.tree.leaves(made), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(one, other)
    assert len(read) == len(jax.tree.leaves(params))
    # What is not deleted is a weight as it is; another parameter waits for those made with it.
    weights = {id(leaf) for leaf in jax.tree.leaves(made)}
    assert all(array.is_deleted() or id(array) in weights for array in read)
    largest = max(leaf.nbytes for leaf in jax.tree.leaves(params))
    as_they_are = sum(array.nbytes for array in read if not array.is_deleted())
    assert max(sizes) <= as_they_are + (policy is ADAPTED) * largest
    freed.free()
    assert all(array.is_deleted() for array in read)


def test_parameters_in_memory_are_freed_once_given_up():
    mesh = make_mesh(data=1, fsdp=1, tensor=1)
    own = jax.device_put(tiny_params(TIED), jax.devices()[0])
    made = of_policy(TIED, jnp.dtype("bfloat16"), mesh).convert(donate(own))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(own))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(made))

"""Memory for a policy's weights on one device, with full training or with an adapter."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

from jaxrl.models.architecture import Architecture
from jaxrl.models.params import ParamSpec
from jaxrl.models.policy import get_stacked_modules
from jaxrl.runtime.sharding import make_param_shardings


@dataclass(frozen=True, kw_only=True)
class PolicyWeights:
    """Sizes of a policy's weights on one device.

    Attributes:
        num_trained: Number of trained parameters, which are float32.
        has_adapter: True if only an adapter is trained.
        base_bytes: Bytes of the frozen weights.
        cast_bytes: Bytes of the copies that an update makes in the compute dtypes.
        cast_table_bytes: Part of `cast_bytes` used by the embedding and output tables.
        int8_values_per_layer: Number of int8 values per layer, which are cast when multiplied.
    """

    num_trained: int
    has_adapter: bool
    base_bytes: int
    cast_bytes: int
    cast_table_bytes: int
    int8_values_per_layer: int


def count_elements(tree: Any) -> int:
    """Return the total number of elements in a tree of abstract arrays."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


@functools.cache
def measure_weights(
    policy: Architecture, frozen: tuple[str, ...], mesh: Any, dtype: np.dtype
) -> PolicyWeights:
    """Compute the size of a policy's weights on one device.

    Entries in `frozen` are not trained. Weights are cast to `dtype`, and the output layer to the
    model's `head_dtype` if it has one. A tied table is cast to both. Int8 kernels are cast layer by
    layer.
    """
    all_params, trained = (
        compute_local_param_sizes(policy, mesh),
        compute_local_param_sizes(policy.make_param_specs(frozen)[0], mesh),
    )
    stacked_modules = get_stacked_modules(policy)
    num_int8 = cast_bytes = cast_table_bytes = 0
    for path, (size, param_dtype) in all_params.items():
        if param_dtype == np.int8:
            num_int8 += size
            continue
        target_dtypes = {dtype}
        if policy.head_dtype and path[0] == policy.output_module:
            target_dtypes = {
                jnp.dtype(policy.head_dtype),
                *(target_dtypes if policy.tie_embeddings else ()),
            }
        num_bytes = size * sum(target.itemsize for target in target_dtypes - {param_dtype})
        cast_bytes += num_bytes
        cast_table_bytes += num_bytes * (path[0] not in stacked_modules)
    return PolicyWeights(
        num_trained=sum(size for size, _ in trained.values()),
        has_adapter=policy.wrapper is not None,
        base_bytes=sum(
            size * param_dtype.itemsize
            for path, (size, param_dtype) in all_params.items()
            if path not in trained
        ),
        cast_bytes=cast_bytes,
        cast_table_bytes=cast_table_bytes,
        int8_values_per_layer=num_int8 // policy.num_layers,
    )


def compute_local_param_sizes(
    spec: ParamSpec, mesh: Any, **settings: bool
) -> dict[tuple[str, ...], tuple[int, np.dtype]]:
    """Return the number of values on one device and the dtype of each parameter, by path."""
    shapes = flatten_dict(spec.make_abstract_params())
    layouts = flatten_dict(make_param_shardings(mesh, spec, **settings))
    return {
        path: (math.prod(layouts[path].shard_shape(leaf.shape)), jnp.dtype(leaf.dtype))
        for path, leaf in shapes.items()
    }

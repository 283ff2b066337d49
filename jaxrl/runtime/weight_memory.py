"""Sizes of a policy's weights on one device: a model, or an adapter and its base."""

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
from jaxrl.models.policy import entries_with_layers
from jaxrl.runtime.sharding import param_shardings


@dataclass(frozen=True, kw_only=True)
class PolicyWeights:
    """Counts of a policy's weights on one device.

    Attributes:
        trained: Values that an optimizer changes, in float32.
        has_adapter: True if only an adapter is trained.
        base_bytes: Bytes of the frozen weights.
        cast_bytes: Bytes of the copies that an update makes in the compute dtypes.
        cast_tables: Part of `cast_bytes` for embedding and output tables.
        int8_layer: Int8 values of one layer, which are cast when multiplied.
    """

    trained: int
    has_adapter: bool
    base_bytes: int
    cast_bytes: int
    cast_tables: int
    int8_layer: int


def num_values(tree: Any) -> int:
    """Count the elements of a tree of abstract arrays."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


@functools.cache
def count_weights(
    policy: Architecture, frozen: tuple[str, ...], mesh: Any, dtype: np.dtype
) -> PolicyWeights:
    """Count the weights of a policy on one device; entries in `frozen` are not trained.

    Weights are cast to `dtype`, and the output layer to the model's `head_dtype` if it has one. A
    tied table is cast to both. Int8 kernels are cast layer by layer.
    """
    held, trained = leaves(policy, mesh), leaves(policy.parts(frozen)[0], mesh)
    inside = entries_with_layers(policy)
    num_int8 = cast_bytes = cast_tables = 0
    for path, (size, kind) in held.items():
        if kind == np.int8:
            num_int8 += size
            continue
        read = {dtype}
        if policy.head_dtype and path[0] == policy.output:
            read = {jnp.dtype(policy.head_dtype), *(read if policy.tie_embeddings else ())}
        num_bytes = size * sum(target.itemsize for target in read - {kind})
        cast_bytes += num_bytes
        cast_tables += num_bytes * (path[0] not in inside)
    return PolicyWeights(
        trained=sum(size for size, _ in trained.values()),
        has_adapter=policy.wrapper is not None,
        base_bytes=sum(
            size * kind.itemsize for path, (size, kind) in held.items() if path not in trained
        ),
        cast_bytes=cast_bytes,
        cast_tables=cast_tables,
        int8_layer=num_int8 // policy.num_layers,
    )


def leaves(
    declared: ParamSpec, mesh: Any, **settings: bool
) -> dict[tuple[str, ...], tuple[int, np.dtype]]:
    """Return the number of values on one device and the dtype of each parameter, by path."""
    shapes = flatten_dict(declared.abstract_params())
    layouts = flatten_dict(param_shardings(mesh, declared, **settings))
    return {
        path: (math.prod(layouts[path].shard_shape(leaf.shape)), jnp.dtype(leaf.dtype))
        for path, leaf in shapes.items()
    }

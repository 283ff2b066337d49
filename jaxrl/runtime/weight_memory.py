"""Counts a policy's weights on a device: all of a model, or an adapter and its base."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

from jaxrl.models.architecture import Architecture
from jaxrl.models.params import Declared
from jaxrl.runtime.sharding import param_shardings


def num_values(tree: Any, shardings: Any = None) -> int:
    """Count the elements of abstract arrays, on one device if shardings are given."""
    leaves = jax.tree.leaves(tree)
    if shardings is None:
        return sum(math.prod(leaf.shape) for leaf in leaves)
    pairs = zip(leaves, jax.tree.leaves(shardings), strict=True)
    return sum(math.prod(sharding.shard_shape(leaf.shape)) for leaf, sharding in pairs)


@dataclass(frozen=True, kw_only=True)
class PolicyWeights:
    """The weights of a policy on one device."""

    trained: int  # values that an optimizer changes, float32
    has_adapter: bool = False  # True if these are an adapter's
    base_bytes: int = 0  # frozen weights
    cast_bytes: int = 0  # what the update casts to the dtypes of its products
    cast_tables: int = 0  # the part of `cast_bytes` in token tables
    dequantised: int = 0  # values of the largest int8 layer, which a product casts on the fly


Leaves = dict[tuple[str, ...], tuple[int, np.dtype]]
"""Values on one device and dtype of each parameter, by its path."""


def cast_leaves(model: Architecture, held: Leaves, dtype: np.dtype) -> dict[tuple[str, ...], int]:
    """Return the bytes of each parameter's casts in an update.

    The dtype is the compute dtype or the output layer's; a tied table is read in both.
    """
    cast = {}
    for path, (size, kind) in held.items():
        read = {dtype}
        if model.head_dtype and path[0] == model.output:
            read = {jnp.dtype(model.head_dtype), *(read if model.tie_embeddings else ())}
        cast[path] = size * sum(one.itemsize for one in read - {kind})
    return cast


def leaves(declared: Declared, mesh: Any, **settings: bool) -> Leaves:
    """Return values on one device and dtype of each parameter."""
    shapes = flatten_dict(declared.abstract_params())
    layouts = flatten_dict(param_shardings(mesh, declared, **settings))
    return {
        path: (math.prod(layouts[path].shard_shape(leaf.shape)), jnp.dtype(leaf.dtype))
        for path, leaf in shapes.items()
    }

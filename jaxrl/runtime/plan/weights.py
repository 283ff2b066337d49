"""A policy's weights on a device: all of a model, or an adapter and its base."""

from __future__ import annotations

import functools
import importlib
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict
from ml_collections import ConfigDict

from jaxrl.method import frozen_of, policy_of
from jaxrl.models.architecture import Architecture
from jaxrl.models.parts import Declared
from jaxrl.models.policy import entries_with_layers
from jaxrl.runtime.sharding import param_shardings


def num_values(tree: Any, shardings: Any = None) -> int:
    """Elements of a tree of abstract arrays, on one device where shardings are given."""
    leaves = jax.tree.leaves(tree)
    if shardings is None:
        return sum(math.prod(leaf.shape) for leaf in leaves)
    pairs = zip(leaves, jax.tree.leaves(shardings), strict=True)
    return sum(math.prod(sharding.shard_shape(leaf.shape)) for leaf, sharding in pairs)


@dataclass(frozen=True, kw_only=True)
class PolicyWeights:
    """The weights of a policy on one device.

    Attributes:
        trained: values that an optimizer changes, float32.
        has_adapter: these are an adapter's.
        base_bytes: of the weights that are not trained.
        cast_bytes: of what the update casts to the dtypes that products read.
        cast_tables: of these, in tables for tokens.
        dequantised: values of the largest int8 layer, which a product casts as it takes it.
    """

    trained: int
    has_adapter: bool = False
    base_bytes: int = 0
    cast_bytes: int = 0
    cast_tables: int = 0
    dequantised: int = 0

    @classmethod
    def of(cls, config: ConfigDict, model: Architecture, mesh: Any) -> PolicyWeights:
        """Counts the configured policy's weights on the mesh."""
        dtype = jnp.dtype(config.model.dtype)
        policy = policy_of(config, model)
        if policy.around is None:
            return _entries(policy, frozen_of(config), mesh, dtype)
        plan: Any = importlib.import_module(policy.around.plan)
        found: PolicyWeights = plan.policy_weights(policy, mesh, dtype)
        return found


@functools.cache
def _entries(
    model: Architecture, frozen: tuple[str, ...], mesh: Any, dtype: np.dtype
) -> PolicyWeights:
    trained, others = (
        num_values(part.abstract_params(), param_shardings(mesh, part))
        for part in model.parts(frozen)
    )
    cast = cast_leaves(model, leaves(model, mesh), dtype)
    return PolicyWeights(
        trained=trained,
        base_bytes=4 * others,
        cast_bytes=sum(cast.values()),
        cast_tables=sum(
            size for path, size in cast.items() if path[0] not in entries_with_layers(model)
        ),
    )


Leaves = dict[tuple[str, ...], tuple[int, np.dtype]]
"""Values on one device and dtype of each parameter, by its path."""


def cast_leaves(model: Architecture, held: Leaves, dtype: np.dtype) -> dict[tuple[str, ...], int]:
    """Bytes of what an update casts each parameter to: the compute dtype, or the output layer's.

    A tied table is read in both.
    """
    cast = {}
    for path, (size, kind) in held.items():
        read = {dtype}
        if model.head_dtype and path[0] == model.output:
            read = {jnp.dtype(model.head_dtype), *(read if model.tie_embeddings else ())}
        cast[path] = size * sum(one.itemsize for one in read - {kind})
    return cast


def leaves(declared: Declared, mesh: Any, **settings: bool) -> Leaves:
    """Values on one device and dtype of each parameter."""
    shapes = flatten_dict(declared.abstract_params())
    layouts = flatten_dict(param_shardings(mesh, declared, **settings))
    return {
        path: (math.prod(layouts[path].shard_shape(leaf.shape)), jnp.dtype(leaf.dtype))
        for path, leaf in shapes.items()
    }

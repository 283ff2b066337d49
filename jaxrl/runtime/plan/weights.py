"""What of a policy's weights lies on a device: all of a model, or an adapter and its base."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict
from ml_collections import ConfigDict

from jaxrl.method import adapter_of, frozen_of
from jaxrl.models.architecture import Architecture
from jaxrl.models.lora import QUANTISED, TRAINED, Adapter, Declared, divide
from jaxrl.models.policy import NO_TABLES
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
        cast_bytes: of what the update casts to the compute dtype.
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
        """Of the configured policy on the mesh."""
        dtype = jnp.dtype(config.model.dtype)
        adapter = adapter_of(config, model)
        if adapter is None:
            return _entries(model, frozen_of(config), mesh, dtype)
        return _adapted(adapter, mesh, dtype)


@functools.cache
def _entries(
    model: Architecture, frozen: tuple[str, ...], mesh: Any, dtype: np.dtype
) -> PolicyWeights:
    trained, others = (
        num_values(part.abstract_params(), param_shardings(mesh, part))
        for part in divide(model, frozen)
    )
    itemsize = dtype.itemsize if dtype.itemsize < 4 else 0
    tables = sum(size for path, (size, _) in _leaves(model, mesh).items() if is_table(path))
    return PolicyWeights(
        trained=trained,
        base_bytes=4 * others,
        cast_bytes=itemsize * (trained + others),
        cast_tables=itemsize * tables,
    )


@functools.cache
def _adapted(adapter: Adapter, mesh: Any, dtype: np.dtype) -> PolicyWeights:
    trained = num_values(adapter.trained.abstract_params(), param_shardings(mesh, adapter.trained))
    base = _leaves(adapter.frozen, mesh)
    kept = {"int8", str(dtype)}
    cast = {
        path: size * dtype.itemsize
        for path, (size, kind) in base.items()
        if str(kind) not in kept and path[-1] != "kernel_scale"
    }
    return PolicyWeights(
        trained=trained,
        has_adapter=True,
        base_bytes=sum(size * kind.itemsize for size, kind in base.values()),
        cast_bytes=dtype.itemsize * trained + sum(cast.values()),
        cast_tables=sum(size for path, size in cast.items() if is_table(path)),
        dequantised=max(
            (size // adapter.model.num_layers for size, kind in base.values() if kind == "int8"),
            default=0,
        ),
    )


def is_table(path: tuple[str, ...]) -> bool:
    """Whether a parameter is outside the layers: one of rows or columns for tokens."""
    return path[0] not in NO_TABLES


def _leaves(
    declared: Declared, mesh: Any, **settings: bool
) -> dict[tuple[str, ...], tuple[int, np.dtype]]:
    """Values on one device and dtype of each parameter."""
    shapes = flatten_dict(declared.abstract_params())
    layouts = flatten_dict(param_shardings(mesh, declared, **settings))
    return {
        path: (math.prod(layouts[path].shard_shape(leaf.shape)), jnp.dtype(leaf.dtype))
        for path, leaf in shapes.items()
    }


@functools.cache
def decode_bytes(adapter: Adapter, mesh: Any, dtype: np.dtype, *, may_share: bool) -> int:
    """Of the sampler's weights with an adapter, on one device.

    Args:
        adapter: of the policy.
        mesh: whose layout the base has.
        dtype: of the sampler.
        may_share: it reads arrays of the base that are in its dtype and layout where they are.
    """
    parts = _leaves(adapter, mesh, for_decode=True)
    held = _leaves(adapter, mesh)
    total = 0
    for path, (size, kind) in parts.items():
        is_target = adapter.is_merged and "/".join(path[:-1]) in adapter.targets
        if is_target and path[-1] in (*TRAINED, "kernel_scale"):
            continue
        is_int8 = (*path[:-1], "kernel_scale") in parts and path[-1] in QUANTISED
        is_sum = is_target and path[-1] == "kernel"
        wanted = kind if is_int8 and not is_sum else dtype
        is_own = path[-1] in TRAINED or wanted != kind or is_sum or held[path][0] != size
        total += size * wanted.itemsize if is_own or not may_share else 0
    return total

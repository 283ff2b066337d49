"""Memory of a policy with an adapter, for the plan."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from jaxrl.extras.lora.adapter import QUANTISED, TRAINED, Adapter
from jaxrl.models.policy import entries_with_layers
from jaxrl.runtime.sharding import param_shardings
from jaxrl.runtime.weight_memory import PolicyWeights, cast_leaves, leaves, num_values


@functools.cache
def policy_weights(adapter: Adapter, mesh: Any, dtype: np.dtype) -> PolicyWeights:
    """The weights of a policy with an adapter, on one device."""
    own, others = adapter.parts()
    trained = num_values(own.abstract_params(), param_shardings(mesh, own))
    base, inside = leaves(others, mesh), entries_with_layers(adapter)
    floats = {
        path: (size, kind)
        for path, (size, kind) in base.items()
        if kind != np.int8 and path[-1] != "kernel_scale"
    }
    cast = cast_leaves(adapter, floats, dtype)
    return PolicyWeights(
        trained=trained,
        has_adapter=True,
        base_bytes=sum(size * kind.itemsize for size, kind in base.values()),
        cast_bytes=dtype.itemsize * trained + sum(cast.values()),
        cast_tables=sum(size for path, size in cast.items() if path[0] not in inside),
        dequantised=max(
            (size // adapter.model.num_layers for size, kind in base.values() if kind == "int8"),
            default=0,
        ),
    )


@functools.cache
def decode_bytes(adapter: Adapter, mesh: Any, dtype: np.dtype, *, may_share: bool) -> int:
    """Bytes of the sampler's weights with an adapter, on one device.

    Args:
        adapter: of the policy.
        mesh: whose layout the base has.
        dtype: of the sampler.
        may_share: it reads arrays of the base that are in its dtype and layout where they are.
    """
    parts = leaves(adapter, mesh, for_decode=True)
    held = leaves(adapter, mesh)
    total = 0
    for path, (size, kind) in parts.items():
        is_target = adapter.is_merged and "/".join(path[:-1]) in adapter.targets
        if is_target and path[-1] in (*TRAINED, "kernel_scale"):
            continue
        is_int8 = (*path[:-1], "kernel_scale") in parts and path[-1] in QUANTISED
        is_sum = is_target and path[-1] == "kernel"
        wanted = kind if is_int8 and not is_sum else dtype
        if adapter.head_dtype and path[0] == adapter.output and not adapter.tie_embeddings:
            wanted = np.dtype(adapter.head_dtype)
        is_own = path[-1] in TRAINED or wanted != kind or is_sum or held[path][0] != size
        total += size * wanted.itemsize if is_own or not may_share else 0
    return total

"""Memory of a policy with an adapter, for the planner."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from jaxrl.extras.lora.adapter import QUANTISED, TRAINED, Adapter
from jaxrl.runtime.weight_memory import leaves


@functools.cache
def decode_bytes(adapter: Adapter, mesh: Any, dtype: np.dtype, *, may_share: bool) -> int:
    """Return the bytes of the sampler's weights with an adapter, on one device.

    Args:
        adapter: Adapter of the policy.
        mesh: Mesh that determines the layout of the base.
        dtype: Dtype of the sampler.
        may_share: True if the sampler reuses base arrays that have its dtype and layout.
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

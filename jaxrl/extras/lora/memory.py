"""Estimate the memory of a policy with an adapter."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from jaxrl.extras.lora.adapter import QUANTIZED, TRAINED, Adapter
from jaxrl.runtime.weight_memory import compute_local_param_sizes


@functools.cache
def count_decode_bytes(adapter: Adapter, mesh: Any, dtype: np.dtype, *, may_share: bool) -> int:
    """Return the bytes of the sampler's weights on one device, with an adapter.

    Args:
        adapter: Adapter of the policy.
        mesh: Mesh over which the base is sharded.
        dtype: Dtype of the sampler's weights.
        may_share: True if the sampler reuses base arrays that have its dtype and layout.
    """
    decode_leaves = compute_local_param_sizes(adapter, mesh, for_decode=True)
    train_leaves = compute_local_param_sizes(adapter, mesh)
    total = 0
    for path, (size, leaf_dtype) in decode_leaves.items():
        is_target = adapter.is_merged and "/".join(path[:-1]) in adapter.targets
        if is_target and path[-1] in (*TRAINED, "kernel_scale"):
            continue
        is_int8 = (*path[:-1], "kernel_scale") in decode_leaves and path[-1] in QUANTIZED
        is_sum = is_target and path[-1] == "kernel"
        target_dtype = leaf_dtype if is_int8 and not is_sum else dtype
        if adapter.head_dtype and path[0] == adapter.output_module and not adapter.tie_embeddings:
            target_dtype = np.dtype(adapter.head_dtype)
        is_copy = (
            path[-1] in TRAINED
            or target_dtype != leaf_dtype
            or is_sum
            or train_leaves[path][0] != size
        )
        total += size * target_dtype.itemsize if is_copy or not may_share else 0
    return total

"""Selection of a run's attention kernels."""

from __future__ import annotations

import functools
import pkgutil
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from jaxrl.models import kernel_check
from jaxrl.models.architecture import Architecture
from jaxrl.models.attention.kernels import (
    PAGE_TOKENS,
    SHARES_PROMPTS,
    AttendPacked,
    AttentionKernels,
)
from jaxrl.models.attention.reference import XLA, shift_key_ranges
from jaxrl.models.kernel_check import SelectedKernel, Trial, list_candidates, select_kernel
from jaxrl.runtime.compilation import get_or_create
from jaxrl.runtime.sharding import BATCH_AXES, CONTEXT_AXIS, PIECE_AXES

TRAIN_KERNELS = {
    "gpu": {
        "mosaic_gpu": "jaxrl.extras.kernels.attention_tokamax:attend_packed",
        "triton": "jaxrl.extras.kernels.attention_gpu:attend_packed",
    },
    "tpu": {"mosaic": "jaxrl.extras.kernels.attention_tpu:attend_packed"},
}
"""Platform-specific training kernels, by platform, in order of preference."""

PAGED_KERNELS = {
    "gpu": {
        "mosaic_gpu": "jaxrl.extras.kernels.pages_gpu:attend_pages",
        "triton": "jaxrl.extras.kernels.attention_gpu:attend_pages",
    },
    "tpu": {"mosaic": "jaxrl.extras.kernels.attention_tpu:attend_pages"},
}
"""Platform-specific sampler kernels, by platform, in order of preference."""

CONFIG_KEY = "config.model.attention"

TRIALS_MODULE = "jaxrl.extras.kernels.trials"
"""Module with the kernels' self-tests."""

MAX_HEAD_DIM = 256
"""Maximum head size of these kernels. Blocks of larger heads do not fit in on-chip memory."""


def select_kernels(
    name: str, mesh: Mesh, model: Architecture, *, check_dtype: DTypeLike | None = None
) -> AttentionKernels:
    """Select the attention kernels of the trainer and the sampler for a model on a mesh.

    Args:
        name: Value of `config.model.attention`.
        mesh: Mesh that runs the model.
        model: Architecture, for its head sizes.
        check_dtype: Dtype of the kernels' self-tests (see `models.kernel_check`); None skips them.

    Raises:
        ValueError: The devices do not support the kernels, or a self-test fails.
    """
    device = mesh.local_devices[0]  # other processes check theirs
    dtype = None if check_dtype is None else jnp.dtype(check_dtype)
    preferred, reason = resolve_kernel_name(name, device.platform, model.head_dim, dtype)
    heads = (
        max(model.num_heads // mesh.shape["tensor"], 1),
        max(model.num_kv_heads // mesh.shape["tensor"], 1),
        model.head_dim,
    )
    block = choose_prefill_block_tokens(device.platform, model.num_heads, model.num_kv_heads)
    train_kernel, sampler_kernel = _select_kernels_cached(name, device, heads, dtype, block)
    attend_packed = train_kernel.function
    if train_kernel.name != "xla" or mesh.shape[CONTEXT_AXIS] > 1:
        attend_packed = shard_attention(attend_packed, mesh)
    names = train_kernel.name, sampler_kernel.name
    return AttentionKernels(
        name=preferred
        if names == (preferred, preferred)
        else f"{names[0]}, in the sampler {names[1]}",
        reason=reason if names == (preferred, preferred) else f"where {preferred} failed its check",
        attend_packed=attend_packed,
        attend_pages=sampler_kernel.function,
        page_tokens=PAGE_TOKENS[sampler_kernel.name],
        shares_prompts=SHARES_PROMPTS[train_kernel.name],
        past=XLA.past if copies_pages(sampler_kernel.name, device.platform) else None,
        kernel_checks=train_kernel.kernel_checks + sampler_kernel.kernel_checks,
    )


@functools.cache
def _select_kernels_cached(
    name: str, device: jax.Device, heads: tuple[int, int, int], dtype: Any, block: int
) -> tuple[SelectedKernel, SelectedKernel]:
    """Select the kernels of the trainer and the sampler; cached for all meshes of a process."""
    kernels_for_size = TRAIN_KERNELS.get(device.platform, {}) if heads[2] <= MAX_HEAD_DIM else {}
    candidates = list_candidates(name, kernels_for_size, dtype)
    config_key = "" if name == "auto" else CONFIG_KEY

    def make_train_trials(name: str) -> list[Trial]:
        shares = SHARES_PROMPTS[name]
        if not dtype:
            return []
        make_packed_trial: Any = pkgutil.resolve_name(f"{TRIALS_MODULE}:make_packed_trial")
        return [make_packed_trial(*heads, dtype, device, shares_prompts=shares)]

    def make_sampler_trials(name: str) -> list[Trial]:
        if not dtype:
            return []
        make_paged_trial: Any = pkgutil.resolve_name(f"{TRIALS_MODULE}:make_paged_trial")
        make = partial(make_paged_trial, *heads, dtype, device, page_tokens=PAGE_TOKENS[name])
        # Shapes of decode and of prefill.
        return [make(num_queries=count) for count in (1, block)]

    def select_from_table(table: Any, make_trials: Any, reference: Any) -> SelectedKernel:
        # Import lazily: most processes use none, and one of them emits a JAX warning on import.
        kernels = {
            kernel: partial(pkgutil.resolve_name, table[device.platform][kernel])
            for kernel in candidates
        }
        return select_kernel(make_trials, kernels, reference, config_key=config_key)

    return select_from_table(
        TRAIN_KERNELS, make_train_trials, XLA.attend_packed
    ), select_from_table(PAGED_KERNELS, make_sampler_trials, XLA.attend_pages)


def copies_pages(name: str, platform: str) -> bool:
    """Return True if decoding steps read a contiguous copy of the pages; see `gather_past`.

    This is faster on a CPU. Elsewhere the copy would need as much memory as the cache.
    """
    return name == "xla" and platform == "cpu"


def choose_prefill_block_tokens(platform: str, num_heads: int, num_kv_heads: int) -> int:
    """Return the number of tokens of one row in a prefill block.

    Each block reads its past from the cache. Smaller blocks are bound by the memory bandwidth, and
    larger blocks compute more padding. A TPU v6e performs 460 operations per byte read and an H200
    180, so a TPU needs larger blocks if there are few query heads per KV head. With more than 16
    heads, such blocks and the pages would not fit in a v4's on-chip memory.

    Args:
        platform: JAX platform of the devices.
        num_heads: Number of query heads.
        num_kv_heads: Number of KV heads.
    """
    if platform == "cpu":
        return 16
    needs_larger_blocks = platform == "tpu" and num_heads < 4 * num_kv_heads
    return 128 if needs_larger_blocks and num_heads <= 16 else 64


def resolve_kernel_name(
    name: str, platform: str, head_dim: int, dtype: DTypeLike | None = None
) -> tuple[str, str]:
    """Resolve `config.model.attention` to a kernel name; also return the reason, to be logged.

    Args:
        name: Value of `config.model.attention`.
        platform: JAX platform of the devices.
        head_dim: Head size of the model.
        dtype: Dtype of the matmuls; None skips the dtype check.

    Raises:
        ValueError: The kernels do not support these devices, heads of this size, or this dtype.
    """
    problem = f"kernels support heads of at most {MAX_HEAD_DIM}, but the model's are {head_dim}"
    return kernel_check.resolve_kernel_name(
        CONFIG_KEY,
        name,
        platform,
        TRAIN_KERNELS,
        dtype,
        size_problem=problem if head_dim > MAX_HEAD_DIM else "",
    )


def shard_attention(attend_packed: AttendPacked, mesh: Mesh | AbstractMesh) -> AttendPacked:
    """Wrap `attend_packed` in `shard_map`, which splits rows into pieces and heads over devices.

    Queries, keys and values are pieces of rows, `[R * C, T / C, heads, H]`: for each device, the
    first pieces of its rows, then the second pieces, and so on. `key_ranges` covers complete rows.
    Equal arguments return the same function, so that compiled programs are reused.
    """
    return get_or_create(
        partial(_shard_attention, attend_packed, mesh), name="attention", key=(attend_packed, mesh)
    )


def _shard_attention(attend_packed: AttendPacked, mesh: Mesh | AbstractMesh) -> AttendPacked:
    heads = P(PIECE_AXES, None, "tensor", None)
    local_attend = (
        partial(_attend_pieces, attend_packed) if mesh.shape[CONTEXT_AXIS] > 1 else attend_packed
    )
    return jax.shard_map(
        local_attend,
        mesh=mesh,
        in_specs=(heads, heads, heads, P(BATCH_AXES, None, None)),
        out_specs=heads,
        check_vma=False,
    )


def _attend_pieces(
    attend_packed: AttendPacked, q: jax.Array, k: jax.Array, v: jax.Array, key_ranges: jax.Array
) -> jax.Array:
    """Gather the keys and values of complete rows, and attend to them from a device's pieces.

    Rows are rotated so that the device's piece comes last, which makes the position of the queries
    static. Later pieces wrap around to positions before the row's first token, where they are
    masked. The backward pass sums the gradients of a device's keys over all devices.
    """
    T, piece_tokens = key_ranges.shape[2], q.shape[1]
    num_later_pieces = T // piece_tokens - 1 - jax.lax.axis_index(CONTEXT_AXIS)

    def gather_rows(x: jax.Array) -> jax.Array:
        pieces = jnp.roll(jax.lax.all_gather(x, CONTEXT_AXIS), num_later_pieces, axis=0)
        return pieces.swapaxes(0, 1).reshape(x.shape[0], T, *x.shape[2:])

    shift = num_later_pieces * piece_tokens
    key_ranges = shift_key_ranges(jnp.roll(key_ranges, shift, axis=2), shift)
    return attend_packed(q, gather_rows(k), gather_rows(v), key_ranges)

"""Selection of a run's attention kernels, once, on the host."""

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

from jaxrl.models.architecture import Architecture
from jaxrl.models.attention.kernels import (
    PAGE_TOKENS,
    SHARES_PROMPTS,
    AttendPacked,
    AttentionKernels,
)
from jaxrl.models.attention.reference import XLA, shift_reads
from jaxrl.models.kernel_check import (
    SelectedKernel,
    Trial,
    explain_excluded,
    select_kernel,
    supports_dtype,
)
from jaxrl.runtime.compilation import get_or_make
from jaxrl.runtime.sharding import BATCH_AXES, CONTEXT_AXIS, PIECE_AXES

TRAIN_KERNELS = {
    "gpu": {
        "mosaic_gpu": "jaxrl.extras.kernels.attention_tokamax:attend_packed",
        "triton": "jaxrl.extras.kernels.attention_gpu:attend_packed",
    },
    "tpu": {"mosaic": "jaxrl.extras.kernels.attention_tpu:attend_packed"},
}
"""Platform-specific kernels of the update, by platform, in order of preference."""

PAGED_KERNELS = {
    "gpu": {
        "mosaic_gpu": "jaxrl.extras.kernels.pages_gpu:attend_pages",
        "triton": "jaxrl.extras.kernels.attention_gpu:attend_pages",
    },
    "tpu": {"mosaic": "jaxrl.extras.kernels.attention_tpu:attend_pages"},
}
"""Platform-specific kernels of the sampler, like `TRAIN_KERNELS`."""

TRIALS_MODULE = "jaxrl.extras.kernels.trials"
"""Module with the kernels' trials."""

MAX_HEAD_DIM = 256
"""Maximum head size of these kernels: blocks of wider heads do not fit on the chip."""


def select_kernels(
    name: str, mesh: Mesh, model: Architecture, *, check_dtype: DTypeLike | None = None
) -> AttentionKernels:
    """Return the attention kernels of `config.model.attention` for a model on a mesh.

    Args:
        name: One of `config.ATTENTION`.
        mesh: Mesh that runs the model.
        model: Architecture with the heads.
        check_dtype: Dtype with which the kernels of update and sampler are separately self-tested
            (see `models.kernel_check`); None runs no test.

    Raises:
        ValueError: The kernels do not run on these devices, or fail the self-test.
    """
    device = mesh.local_devices[0]  # other processes check theirs
    dtype = None if check_dtype is None else jnp.dtype(check_dtype)
    first, reason = resolve_kernel_name(name, device.platform, model.head_dim, dtype)
    heads = (
        max(model.num_heads // mesh.shape["tensor"], 1),
        max(model.num_kv_heads // mesh.shape["tensor"], 1),
        model.head_dim,
    )
    block = prefill_block_tokens(device.platform, model.num_heads, model.num_kv_heads)
    of_update, of_sampler = _select_cached(name, device, heads, dtype, block)
    attend_packed = of_update.function
    if of_update.name != "xla" or mesh.shape[CONTEXT_AXIS] > 1:
        attend_packed = shard_attention(attend_packed, mesh)
    names = of_update.name, of_sampler.name
    return AttentionKernels(
        name=first if names == (first, first) else f"{names[0]}, in the sampler {names[1]}",
        reason=reason if names == (first, first) else f"where {first} failed its check",
        attend_packed=attend_packed,
        attend_pages=of_sampler.function,
        page_tokens=PAGE_TOKENS[of_sampler.name],
        shares_prompts=SHARES_PROMPTS[of_update.name],
        past=XLA.past if copies_pages(of_sampler.name, device.platform) else None,
        kernel_checks=of_update.kernel_checks + of_sampler.kernel_checks,
    )


@functools.cache
def _select_cached(
    name: str, device: jax.Device, heads: tuple[int, int, int], dtype: Any, block: int
) -> tuple[SelectedKernel, SelectedKernel]:
    """Select the kernels of update and sampler, once for all meshes of a process."""
    candidates = _list_candidates(name, device.platform, heads[2], dtype)
    config_key = "" if name == "auto" else "config.model.attention"

    def of_update(name: str) -> list[Trial]:
        shares = SHARES_PROMPTS[name]
        if not dtype:
            return []
        make_packed_trial: Any = pkgutil.resolve_name(f"{TRIALS_MODULE}:make_packed_trial")
        return [make_packed_trial(*heads, dtype, device, shares_prompts=shares)]

    def of_sampler(name: str) -> list[Trial]:
        if not dtype:
            return []
        make_paged_trial: Any = pkgutil.resolve_name(f"{TRIALS_MODULE}:make_paged_trial")
        make = partial(make_paged_trial, *heads, dtype, device, page_tokens=PAGE_TOKENS[name])
        # Shapes of decode and of prefill.
        return [make(num_queries=count) for count in (1, block)]

    def select(table: Any, make_trials: Any, reference: Any) -> SelectedKernel:
        # Import lazily: most processes use none, and importing one of them emits a JAX warning.
        kernels = {
            kernel: partial(pkgutil.resolve_name, table[device.platform][kernel])
            for kernel in candidates
        }
        return select_kernel(make_trials, kernels, reference, config_key=config_key)

    return select(TRAIN_KERNELS, of_update, XLA.attend_packed), select(
        PAGED_KERNELS, of_sampler, XLA.attend_pages
    )


def copies_pages(name: str, platform: str) -> bool:
    """Return True if a chunk of decoding steps reads a copy of its rows' pages.

    It is faster on a CPU. Elsewhere it would need as much memory as the cache.
    """
    return name == "xla" and platform == "cpu"


def prefill_block_tokens(platform: str, num_heads: int, num_kv_heads: int) -> int:
    """Return the number of a row's tokens that one prefill block processes.

    With fewer, an accelerator waits for cache reads, since each block reads its past; with more, it
    computes padding. A TPU v6e performs 460 operations per byte read, an H200 180: with few query
    heads per key head it needs larger blocks. Blocks for more than 16 heads would not fit on a v4's
    chip together with the pages.

    Args:
        platform: Platform of the devices.
        num_heads: Query heads of the model.
        num_kv_heads: Key heads of the model.
    """
    if platform == "cpu":
        return 16
    needs_more = platform == "tpu" and num_heads < 4 * num_kv_heads
    return 128 if needs_more and num_heads <= 16 else 64


def resolve_kernel_name(
    name: str, platform: str, head_dim: int, dtype: DTypeLike | None = None
) -> tuple[str, str]:
    """Resolve `config.model.attention` to a kernel name other than `auto`, and the reason.

    Args:
        name: Name in the configuration.
        platform: Platform of the devices.
        head_dim: Head size of the model.
        dtype: Dtype of the products; None is a dtype that every kernel supports.

    Raises:
        ValueError: The kernels do not support these devices, heads of this size, or this dtype.
    """
    is_narrow = head_dim <= MAX_HEAD_DIM
    kernels = TRAIN_KERNELS.get(platform, {})
    if name == "auto":
        if kernels and not is_narrow:
            return "xla", f"since heads of {head_dim} are too wide for {next(iter(kernels))}"
        first = (*_list_candidates(name, platform, head_dim, dtype), "xla")[0]
        return first, f"since the devices are {platform}s{explain_excluded(kernels, dtype)}"
    if name != "xla" and name not in kernels:
        places = " and ".join(
            f"{place}s" for place in TRAIN_KERNELS if name in TRAIN_KERNELS[place]
        )
        problem = f"kernels are for {places}, but the devices are {platform}s"
    elif name != "xla" and not supports_dtype(name, dtype):
        problem = f"kernels multiply 16-bit floats, but config.model.dtype is '{dtype}'"
    elif name != "xla" and not is_narrow:
        problem = f"kernels take heads of at most {MAX_HEAD_DIM}, but the model's are {head_dim}"
    else:
        return name, "as config.model.attention says"
    raise ValueError(
        f"config.model.attention is {name!r}, whose {problem}; set it to 'auto' or 'xla'."
    )


def _list_candidates(name: str, platform: str, head_dim: int, dtype: DTypeLike | None) -> list[str]:
    """Return the kernels to try before XLA, in order of preference."""
    if name != "auto":
        return [name] if name != "xla" else []
    candidates = TRAIN_KERNELS.get(platform, {}) if head_dim <= MAX_HEAD_DIM else {}
    return [kernel for kernel in candidates if supports_dtype(kernel, dtype)]


def shard_attention(attend_packed: AttendPacked, mesh: Mesh | AbstractMesh) -> AttendPacked:
    """Split `attend_packed` over a mesh; each device processes its own pieces of rows and heads.

    Queries, keys and values are pieces `[R * C, T / C, heads, H]`: for each device, the first
    pieces of its rows, then the second ones, and so on; `reads` covers complete rows. Equal
    arguments return the same function, so that its compiled programs are reused.
    """
    return get_or_make(
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
    attend_packed: AttendPacked, q: jax.Array, k: jax.Array, v: jax.Array, reads: jax.Array
) -> jax.Array:
    """Attend from a device's pieces to keys and values of complete rows, which it gathers.

    The tokens of a row are rotated so that the device's piece comes last: then the position of the
    queries is static. The pieces after it wrap around to before the row's first token, and nothing
    reads them. In the backward pass each device gets the sum of all gradients of its own keys.
    """
    T, piece_tokens = reads.shape[2], q.shape[1]
    later = (
        T // piece_tokens - 1 - jax.lax.axis_index(CONTEXT_AXIS)
    )  # pieces after the device's own

    def gather_rows(x: jax.Array) -> jax.Array:
        pieces = jnp.roll(jax.lax.all_gather(x, CONTEXT_AXIS), later, axis=0)
        return pieces.swapaxes(0, 1).reshape(x.shape[0], T, *x.shape[2:])

    places = later * piece_tokens
    reads = shift_reads(jnp.roll(reads, places, axis=2), places)
    return attend_packed(q, gather_rows(k), gather_rows(v), reads)

"""Choice of a run's attention kernels: made once, on the host."""

from __future__ import annotations

import importlib
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from jaxrl.models.architecture import Architecture
from jaxrl.models.attention.kernels import PAGE_TOKENS, SHARES_PROMPTS, Kernels, Train
from jaxrl.models.attention.reference import XLA, moved_reads
from jaxrl.runtime.sharding import BATCH, CONTEXT, PIECES

PLATFORMS = {"triton": "gpu", "mosaic": "tpu"}
"""Platforms of the kernels that do not run everywhere."""

KERNELS = {
    "triton": "jaxrl.extras.kernels.attention_gpu",
    "mosaic": "jaxrl.extras.kernels.attention_tpu",
}
"""The modules that have them."""

MAX_HEAD_DIM = 256
"""Limit of these kernels: blocks of wider heads do not fit on the chip."""


def choose(name: str, mesh: Mesh, model: Architecture) -> Kernels:
    """The kernels that `config.model.attention` names, for a model on a mesh; see `decide`."""
    platform = mesh.devices.flat[0].platform
    name, reason = decide(name, platform, model.head_dim)
    if name == "xla":
        past = XLA.past if copies_past(name, platform) else None
        train = on_mesh(XLA.train, mesh) if mesh.shape[CONTEXT] > 1 else XLA.train
        return replace(XLA, reason=reason, past=past, train=train)
    # Imported when asked: neither is of use to most processes, and JAX warns of one of them.
    kernels = importlib.import_module(KERNELS[name])
    return Kernels(
        name=name,
        reason=reason,
        train=on_mesh(kernels.train, mesh),
        attend_pages=kernels.attend_pages,
        page_tokens=PAGE_TOKENS[name],
        shares_prompts=SHARES_PROMPTS[name],
    )


def copies_past(name: str, platform: str) -> bool:
    """True if a chunk of decoding steps reads a copy of its rows' pages.

    It is faster on a CPU. Elsewhere it would take as much memory as the cache.
    """
    return name == "xla" and platform == "cpu"


def decide(name: str, platform: str, head_dim: int) -> tuple[str, str]:
    """Picks the kernels `config.model.attention` stands for, never `auto`, and tells why.

    Raises:
        ValueError: names the key where these kernels do not run on the devices, or not with heads
            of this size.
    """
    is_narrow = head_dim <= MAX_HEAD_DIM
    if name == "auto":
        own = [one for one, place in PLATFORMS.items() if place == platform]
        if own and not is_narrow:
            return "xla", f"since heads of {head_dim} are too wide for {own[0]}"
        return (*own, "xla")[0], f"since the devices are {platform}s"
    place = PLATFORMS.get(name, platform)
    if place != platform:
        problem = f"kernels are for {place}s, but the devices are {platform}s"
    elif name != "xla" and not is_narrow:
        problem = f"kernels take heads of at most {MAX_HEAD_DIM}, but the model's are {head_dim}"
    else:
        return name, "as config.model.attention says"
    raise ValueError(
        f"config.model.attention is {name!r}, whose {problem}; set it to 'auto' or 'xla'."
    )


def on_mesh(train: Train, mesh: Mesh | AbstractMesh) -> Train:
    """Splits `train` over a mesh; each device has its own pieces of rows and heads.

    Queries, keys and values are pieces `[R * C, T / C, heads, H]`, of each device's rows the first
    ones, the second ones, …; what each token reads is of whole rows.
    """
    heads = P(PIECES, None, "tensor", None)
    of_device = partial(_train_pieces, train) if mesh.shape[CONTEXT] > 1 else train
    return jax.shard_map(
        of_device,
        mesh=mesh,
        in_specs=(heads, heads, heads, P(BATCH, None, None)),
        out_specs=heads,
        check_vma=False,
    )


def _train_pieces(
    train: Train, q: jax.Array, k: jax.Array, v: jax.Array, reads: jax.Array
) -> jax.Array:
    """Attention of a device's pieces over keys and values of whole rows, which it gathers.

    The tokens of a row are turned, so that the device's piece comes last: then the kernel knows
    before it is compiled where the queries are. What follows the piece stands before the row's
    first token, and nothing reads it. Backwards each device gets what all add to its own keys.
    """
    T, num_own = reads.shape[2], q.shape[1]
    later = T // num_own - 1 - jax.lax.axis_index(CONTEXT)  # pieces behind the device's own

    def whole(x: jax.Array) -> jax.Array:
        pieces = jnp.roll(jax.lax.all_gather(x, CONTEXT), later, axis=0)
        return pieces.swapaxes(0, 1).reshape(x.shape[0], T, *x.shape[2:])

    places = later * num_own
    reads = moved_reads(jnp.roll(reads, places, axis=2), places)
    return train(q, whole(k), whole(v), reads)

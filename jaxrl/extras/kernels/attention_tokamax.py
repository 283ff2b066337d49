"""Attention for the update on Hopper and newer NVIDIA GPUs, with tokamax's Mosaic kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from jaxrl.models.attention.reference import pad_to_blocks
from jaxrl.models.kernel_check import import_tokamax

BLOCK = 128
"""Multiple to which tokens are padded: two warpgroups of 64 each, without bounds checks."""

HEAD_MULTIPLE = 64
"""Multiple to which head sizes are padded, as the backward kernels require."""

MAX_HEAD_DIM = 128
"""Maximum head size of `gradients_hopper`, limited by registers."""


def attend_packed(
    q: Float[Array, "R Q N H"],
    k: Float[Array, "R T K H"],
    v: Float[Array, "R T K H"],
    key_ranges: Int[Array, "R 3 T"],
    *,
    shares_prompts: bool = True,
    make_kernels: Callable[[float], TokamaxKernels] | None = None,
) -> Float[Array, "R Q N H"]:
    """Compute `reference.attend_packed` with kernels that support one range of keys per query.

    Each query has two ranges: its segment and a shared prompt. The forward pass therefore runs
    twice, skips blocks that no query reads, and merges the results by log-sum-exp. Tokamax's
    backward kernels process all blocks before the diagonal, so Hopper uses `gradients_hopper`. On
    other GPUs, and for wide heads, two backward passes use the output and log-sum-exp of the
    complete softmax, and their gradients are summed.

    Args:
        q: Queries of the last Q tokens.
        k: Keys of all T tokens.
        v: Values of all T tokens.
        key_ranges: Ranges of tokens that each token attends to; see `kernels.compute_key_ranges`.
        shares_prompts: True if segments may share a prompt; False skips the second pass.
        make_kernels: Replacement for `TokamaxKernels`, for tests without a GPU.

    Raises:
        ImportError: tokamax is not installed, or has an unsupported version.
        ValueError: The queries are not 16-bit floats.
    """
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        raise ValueError(
            f"attention got queries of {q.dtype}, but tokamax's kernels support only bfloat16 and "
            "float16; set config.model.dtype to 'bfloat16'."
        )
    Q, H = q.shape[1], q.shape[3]
    q, k, v, key_ranges = pad_to_blocks(q, k, v, key_ranges, BLOCK)
    pad = ((0, 0), (0, 0), (0, 0), (0, -H % HEAD_MULTIPLE))
    q, k, v = (jnp.pad(x, pad) for x in (q, k, v))
    kernels = (make_kernels or TokamaxKernels)(H**-0.5)
    return _attend(q, k, v, key_ranges, kernels, shares_prompts)[:, :Q, :, :H]


class KeyRange(NamedTuple):
    """Range of keys that each query reads, from `start` to `end` (exclusive)."""

    start: jax.Array  # int32 [R, Q]
    end: jax.Array | None  # int32 [R, Q]; None for causal, up to and including the query


def _get_range_ends(keys: KeyRange, T: int) -> jax.Array:
    """Return the exclusive end of each query's range, int32 [R, Q]."""
    if keys.end is not None:
        return keys.end
    Q = keys.start.shape[1]
    return jnp.broadcast_to(jnp.arange(T - Q, T, dtype=jnp.int32) + 1, keys.start.shape)


@dataclass(frozen=True)
class TokamaxKernels:
    """Tokamax's kernels, with default instead of autotuned block sizes.

    Attributes:
        scale: Factor by which scores are multiplied.
    """

    scale: float

    def forward(
        self, q: jax.Array, k: jax.Array, v: jax.Array, keys: KeyRange
    ) -> tuple[jax.Array, jax.Array]:
        """Compute outputs `[R, Q, N, H]` and log-sum-exp `[R, N, Q]`; -inf for empty ranges."""
        attention = import_tokamax("attention.pallas_mosaic_gpu").PallasMosaicGpuFlashAttention()
        settings = self._make_settings(q, k, keys)
        config = attention.bind(q, k, v, return_residuals=True, **settings).heuristics_config
        attention = attention.replace(config=config)
        out, (highest, total) = attention(q, k, v, return_residuals=True, **settings)
        return out, highest + jnp.log(total)

    def backward(
        self, q: jax.Array, k: jax.Array, v: jax.Array, keys: KeyRange,
        out: jax.Array, lse: jax.Array, gradient: jax.Array,
    ) -> tuple[jax.Array, ...]:  # fmt: skip
        """Compute the contribution of a range of keys to the gradients of q, k and v.

        A causal mask skips the blocks after the diagonal.
        """
        attention = import_tokamax("attention.pallas_mosaic_gpu").PallasMosaicGpuFlashAttention()
        bound_op = attention.bind(q, k, v, **self._make_settings(q, k, keys))
        settings = {key: x for key, x in bound_op.kwargs.items() if key != "return_residuals"}
        # With the log-sum-exp as the maximum score, the softmax sum is 1.
        args = (lse, jnp.ones_like(lse)), out, gradient, q, k, v
        backward = attention.vjp
        config = backward.bind(*args, **settings).heuristics_config
        attention_gradients = backward.replace(config=config)(*args, **settings)
        return attention_gradients["q"], attention_gradients["k"], attention_gradients["v"]

    def is_hopper(self) -> bool:
        """Return True if the GPU is a Hopper GPU, as `gradients_hopper` requires."""
        return bool(import_tokamax("attention.pallas_mosaic_gpu").gpu_utils.is_sm90())

    def _make_settings(self, q: jax.Array, k: jax.Array, keys: KeyRange) -> dict[str, Any]:
        """Return tokamax's scale and mask arguments, with a causal mask where possible."""
        is_causal = keys.end is None and q.shape[1] == k.shape[1]
        mask = import_tokamax("attention.base").Mask(
            is_causal=is_causal,
            k_start=keys.start[:, None],
            k_end=None if is_causal else _get_range_ends(keys, k.shape[1])[:, None],
        )
        return {"mask": mask, "logits_scale": self.scale}


def _split_key_ranges(q: jax.Array, key_ranges: jax.Array, shares_prompts: bool) -> list[KeyRange]:
    """Return the key range in each query's segment and, if prompts are shared, in its prompt."""
    starts, *shared = jnp.moveaxis(key_ranges[:, :, -q.shape[1] :], 1, 0)
    return [KeyRange(starts, None), KeyRange(*shared)][: 1 + shares_prompts]


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _attend(
    q: jax.Array, k: jax.Array, v: jax.Array, key_ranges: jax.Array,
    kernels: TokamaxKernels, shares_prompts: bool,
) -> jax.Array:  # fmt: skip
    return _forward(q, k, v, key_ranges, kernels, shares_prompts)[0]


def _forward(
    q: jax.Array, k: jax.Array, v: jax.Array, key_ranges: jax.Array,
    kernels: TokamaxKernels, shares_prompts: bool,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:  # fmt: skip
    """Return the outputs and the residuals, which contain the log-sum-exp `[R, N, Q]`."""
    ranges = _split_key_ranges(q, key_ranges, shares_prompts)
    outs, sums = zip(*[kernels.forward(q, k, v, part) for part in ranges], strict=True)
    out, lse = outs[0], sums[0]
    if shares_prompts:
        lse = jnp.logaddexp(*sums)
        part_weights = [jnp.exp(part - lse).swapaxes(1, 2)[..., None] for part in sums]
        out = sum(
            part * part_weight for part, part_weight in zip(outs, part_weights, strict=True)
        ).astype(q.dtype)
    out, lse = checkpoint_name(out, "attended"), checkpoint_name(lse, "lse")
    return out, (q, k, v, key_ranges, out, lse)


def _backward(
    kernels: TokamaxKernels,
    shares_prompts: bool,
    residuals: tuple[jax.Array, ...],
    gradient: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    q, k, v, key_ranges, out, lse = residuals
    if q.shape[3] <= MAX_HEAD_DIM and kernels.is_hopper():
        from jaxrl.extras.kernels.gradients_hopper import compute_attention_gradients

        return *compute_attention_gradients(
            q, k, v, key_ranges, out, lse, gradient, scale=kernels.scale
        ), None
    ranges = _split_key_ranges(q, key_ranges, shares_prompts)
    parts = [kernels.backward(q, k, v, part, out, lse, gradient) for part in ranges]
    return *(sum(grads[1:], grads[0]) for grads in zip(*parts, strict=True)), None


_attend.defvjp(_forward, _backward)

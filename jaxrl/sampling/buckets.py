"""Sizes for which the sampler's programs are compiled, a few of each kind."""

from __future__ import annotations

import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxrl.runtime.compilation import MULTIPLIES_BFLOAT16


def row_sizes(platform: str, num_rows: int, dtype: DTypeLike = jnp.float32) -> list[int]:
    """Numbers of rows for which decoding is compiled, the smaller first.

    An accelerator takes about as long for half the rows, a CPU half as long. But in bfloat16 a CPU
    would multiply a single row with float32 copies of all weights: two rows take less time.
    """
    parts = (1, 2, 4, 16) if platform == "cpu" else (1, 4, 16)
    spared = platform == "cpu" and MULTIPLIES_BFLOAT16 and jnp.dtype(dtype).itemsize < 4
    least = min(2 if spared else 1, num_rows)
    return sorted({max(-(-num_rows // part), least) for part in parts})


def append_sizes(platform: str, max_total_tokens: int) -> list[int]:
    """Numbers of tokens to which those to read are padded, the smaller first.

    Reading few costs an accelerator what reading many does; a CPU computes the padding.
    """
    block = 16 if platform == "cpu" else 128  # or a multiple of the model's, see `append_block`
    longest = -(-max_total_tokens // block) * block
    sizes = (64, 256) if platform == "cpu" else (256, 2048)
    return sorted({min(size, longest) for size in sizes})


def patch_sizes(max_units: int, unit: int) -> list[int]:
    """Numbers of patches to which a shard's attachments are padded, the smaller first.

    Args:
        max_units: of the attachments of one trajectory.
        unit: patches of each.
    """
    return sorted({max(max_units // part, 1) * unit for part in (4, 1)})

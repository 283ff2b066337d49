"""Shape buckets: the small set of sizes for which the sampler's programs are compiled."""

from __future__ import annotations

import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxrl.runtime.compilation import CPU_HAS_BFLOAT16_MATMUL


def list_row_buckets(platform: str, num_rows: int, dtype: DTypeLike = jnp.float32) -> list[int]:
    """List the numbers of rows for which decoding is compiled, in ascending order.

    Halving the rows saves little time on an accelerator, but half the time on a CPU. On a CPU in
    bfloat16, the minimum is two rows: for a single row, XLA would first copy all weights to
    float32, which takes longer.
    """
    divisors = (1, 2, 4, 16) if platform == "cpu" else (1, 4, 16)
    avoids_single_row = (
        platform == "cpu" and CPU_HAS_BFLOAT16_MATMUL and jnp.dtype(dtype).itemsize < 4
    )
    min_rows = min(2 if avoids_single_row else 1, num_rows)
    return sorted({max(-(-num_rows // divisor), min_rows) for divisor in divisors})


def list_prefill_buckets(platform: str, max_total_tokens: int) -> list[int]:
    """List the numbers of tokens to which prefills are padded, in ascending order.

    On an accelerator, a small prefill takes as long as a large one; on a CPU, padding costs time.
    """
    # Equal to the model's block or a multiple of it; see `choose_prefill_block_tokens`.
    block = 16 if platform == "cpu" else 128
    longest = -(-max_total_tokens // block) * block
    sizes = (64, 256) if platform == "cpu" else (256, 2048)
    return sorted({min(size, longest) for size in sizes})


def list_patch_buckets(max_units: int, patches_per_unit: int) -> list[int]:
    """List the numbers of patches to which attachments are padded per shard, ascending.

    Args:
        max_units: Maximum number of attachment tokens in a trajectory.
        patches_per_unit: Number of patches per attachment token.
    """
    return sorted({max(max_units // divisor, 1) * patches_per_unit for divisor in (4, 1)})

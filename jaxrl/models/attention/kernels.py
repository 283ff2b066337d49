"""Interface of attention kernels, and the ranges of tokens that each token attends to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxrl.models.architecture import Attend, KernelCheck

AttendPacked = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]
"""Function from queries of the last Q of T tokens `[R, Q, N, H]`, keys and values of all T tokens
`[R, T, K, H]`, and the result of `compute_key_ranges` `[R, 3, T]` to outputs `[R, Q, N, H]`."""


@dataclass(frozen=True, kw_only=True)
class AttentionKernels:
    """Attention functions of the trainer and the sampler.

    Attributes:
        name: Names of the selected kernels, for the log.
        reason: Reason for the selection, for the log.
        attend_packed: Attention in training; see `reference.attend_packed`.
        attend_pages: Attention of the sampler over the pages of one device; see
            `reference.attend_pages`.
        page_tokens: Number of tokens per page of the sampler's cache.
        shares_prompts: True if `attend_packed` supports segments that share a prompt.
        past: Functions `gather_past` and `attend_past` of `reference` if decoding steps should read
            a copy of the pages, else None.
        kernel_checks: Self-test results; see `models.kernel_check`.
    """

    name: str
    reason: str
    attend_packed: AttendPacked
    attend_pages: Callable[..., tuple[jax.Array, jax.Array]]
    page_tokens: int
    shares_prompts: bool
    past: tuple[Callable[..., Any], Callable[..., jax.Array]] | None = None
    kernel_checks: tuple[KernelCheck, ...] = ()

    def make_attend(
        self, segment_ids: Int[Array, "R T"], positions: Int[Array, "R T"], num_pieces: int = 1
    ) -> Attend:
        """Return the attention function for packed rows.

        For the ids and positions, see `compute_key_ranges`. Each row is split into `num_pieces`. A
        device holds the first pieces of all its rows, then the second pieces, and so on.
        """
        key_ranges = compute_key_ranges(segment_ids, positions)
        R, T = segment_ids.shape

        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            def split_rows(x: jax.Array) -> jax.Array:
                return x.reshape(R * num_pieces, T // num_pieces, *x.shape[1:])

            return self.attend_packed(
                split_rows(q), split_rows(k), split_rows(v), key_ranges
            ).reshape(q.shape)

        return attend


PAGE_TOKENS = {"xla": 16, "mosaic_gpu": 64, "triton": 64, "mosaic": 128}
"""Tokens per page for each kernel. A kernel reads one page at a time, so large pages are faster."""

SHARES_PROMPTS = {"xla": True, "mosaic_gpu": True, "triton": True, "mosaic": False}
"""For each kernel, True if segments of a row may share a prompt.

Splash attention masks tokens by equal segment ids or at compile time.
"""


def compute_key_ranges(
    segment_ids: Int[Array, "R T"], positions: Int[Array, "R T"]
) -> Int[Array, "R 3 T"]:
    """Return the ranges of tokens that each token attends to, as three indices per token.

    The first index is the start of the token's context; the token attends from there through
    itself. The second and third are the start and end (exclusive) of the shared prompt, an empty
    range unless the context continues another. A context whose first position is p > 0 continues
    the last earlier context that began at 0, and shares its first p tokens. Padding attends to
    itself.

    Args:
        segment_ids: Segment of each token; 0 is padding. Within a segment, a new context begins
            where positions do not increase by one.
        positions: Position of each token in its context.
    """
    T = segment_ids.shape[1]
    prev_segment_ids, prev_positions = (
        jnp.pad(x[:, :-1], ((0, 0), (1, 0))) for x in (segment_ids, positions)
    )
    begins_context = (
        (segment_ids != prev_segment_ids) | (segment_ids == 0) | (positions != prev_positions + 1)
    )

    def find_last_start_index(is_start: jax.Array) -> jax.Array:
        return jax.lax.cummax(jnp.where(is_start, jnp.arange(T), 0), axis=1)

    starts = find_last_start_index(begins_context)
    shared = find_last_start_index(begins_context & (positions == 0))
    first_positions = jnp.take_along_axis(positions, starts, axis=1)
    continues = (first_positions > 0) & (segment_ids > 0)
    shared_starts = jnp.where(continues, shared, T)
    return jnp.stack([starts, shared_starts, jnp.where(continues, shared + first_positions, 0)], 1)

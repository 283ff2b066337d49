"""Attention kernels as models and sampler know them, and which tokens a token reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxrl.models.architecture import Attend, KernelCheck

Train = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]
"""Queries of the last Q of T tokens `[R, Q, N, H]`, keys and values of all `[R, T, K, H]`, what
each token reads `[R, 3, T]` to outputs `[R, Q, N, H]`."""


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """The attention functions of one kind.

    Attributes:
        name: out of `config.ATTENTION`, never `auto`.
        reason: why these, for the log.
        train: see `reference.train`.
        attend_pages: the sampler's attention over the pages of one device; see
            `reference.attend_pages`.
        page_tokens: tokens of a page of the sampler's cache.
        shares_prompts: `train` reads what segments share; else each segment must be whole.
        past: `open_past` and `attend_past` where a chunk of decoding steps reads a copy of the
            pages faster than `attend_pages` reads the pages; see `reference`.
        kernel_checks: what was found about kernels before the run; see `models.kernel_check`.
    """

    name: str
    reason: str
    train: Train
    attend_pages: Callable[..., tuple[jax.Array, jax.Array]]
    page_tokens: int
    shares_prompts: bool
    past: tuple[Callable[..., Any], Callable[..., jax.Array]] | None = None
    kernel_checks: tuple[KernelCheck, ...] = ()

    def within(
        self, segment_ids: Int[Array, "R T"], positions: Int[Array, "R T"], num_pieces: int = 1
    ) -> Attend:
        """Attention of packed rows, over their tokens one after another; see `find_reads`.

        With pieces, each row is cut into `num_pieces`; a device holds the first pieces of all its
        rows, then the second ones, and so on.
        """
        reads = find_reads(segment_ids, positions)
        R, T = segment_ids.shape

        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            def by_row(x: jax.Array) -> jax.Array:
                return x.reshape(R * num_pieces, T // num_pieces, *x.shape[1:])

            return self.train(by_row(q), by_row(k), by_row(v), reads).reshape(q.shape)

        return attend


PAGE_TOKENS = {"xla": 16, "mosaic_gpu": 64, "triton": 64, "mosaic": 128}
"""Tokens of a page, by kernels: a kernel reads a page at a time, and wants it large."""

SHARES_PROMPTS = {"xla": True, "mosaic_gpu": True, "triton": True, "mosaic": False}
"""True where segments of a row may share a prompt, by kernels.

Splash attention tells by equal ids, or before it is compiled, which tokens a token reads.
"""


def find_reads(segment_ids: Int[Array, "R T"], positions: Int[Array, "R T"]) -> Int[Array, "R 3 T"]:
    """Finds the tokens of its row that each token reads.

    Those from the first number to itself, which are of its context, and those from the second to
    before the third. These are none, unless the context continues another: one whose first position
    is p > 0 has the first p tokens of the last context before it that began at 0. Padding reads
    itself.

    Args:
        segment_ids: a run of tokens with one id is a segment; 0 is padding. Within it a context
            ends where positions do not go on by one.
        positions: of each token in its context.
    """
    T = segment_ids.shape[1]
    before, place = (jnp.pad(x[:, :-1], ((0, 0), (1, 0))) for x in (segment_ids, positions))
    begins = (segment_ids != before) | (segment_ids == 0) | (positions != place + 1)

    def last(is_start: jax.Array) -> jax.Array:
        return jax.lax.cummax(jnp.where(is_start, jnp.arange(T), 0), axis=1)

    starts, shared = last(begins), last(begins & (positions == 0))
    first_positions = jnp.take_along_axis(positions, starts, axis=1)
    continues = (first_positions > 0) & (segment_ids > 0)
    shared_starts = jnp.where(continues, shared, T)
    return jnp.stack([starts, shared_starts, jnp.where(continues, shared + first_positions, 0)], 1)

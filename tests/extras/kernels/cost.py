"""Counts of what accelerators' attention kernels fetch, from their grids, on any machine.

Nothing runs: grids and maps of blocks are those of the kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.extras.kernels.attention_tpu import PagesCall, make_pages_call
from jaxrl.models.attention.kernels import PAGE_TOKENS

NUM_ROWS = 256


class Model(NamedTuple):
    """Sizes of a model on which the cost of attention depends; its cache is bfloat16."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys and values of a token."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * 2


MODELS = {
    "Qwen3-0.6B": Model(28, 16, 8, 128),
    "Qwen3-4B": Model(36, 32, 8, 128),
    "Qwen2.5-7B": Model(28, 28, 4, 128),
    "Qwen3-30B-A3B": Model(48, 32, 4, 128),
}


def even(rng: np.random.Generator) -> np.ndarray:
    """Rows of 896 to 1,152 tokens."""
    return rng.integers(896, 1153, NUM_ROWS)


def long_tailed(rng: np.random.Generator) -> np.ndarray:
    """Rows of about 1,000 tokens on the mean, the longest 8,192."""
    lengths = np.clip(rng.lognormal(np.log(700), 0.85, NUM_ROWS), 64, 8192).astype(int)
    lengths[rng.integers(NUM_ROWS)] = 8192
    return lengths


def tail_end(rng: np.random.Generator) -> np.ndarray:
    """Eight rows of 4,096 to 8,192 tokens; the others have stopped."""
    lengths = np.zeros(NUM_ROWS, int)
    lengths[rng.choice(NUM_ROWS, 8, replace=False)] = rng.integers(4096, 8193, 8)
    return lengths


LOADS: dict[str, Callable[[np.random.Generator], np.ndarray]] = {
    "even": even,
    "long-tailed": long_tailed,
    "tail end": tail_end,
}


class Cost(NamedTuple):
    """Parameters of one layer."""

    steps: int  # of the grid
    fetched: int  # bytes of pages
    moved: int  # bytes of everything else, in and out


def moves(grid: Sequence[int], spec: Any, scalars: Sequence[Any] = ()) -> int:
    """Number of blocks of an array that a grid's steps fetch or write, one after another.

    A block that the step before had is not moved again.

    Args:
        grid: of the kernel; its last axis is the fastest.
        spec: a `BlockSpec`.
        scalars: arrays that the index map gets behind the step.
    """
    steps = np.indices(tuple(map(int, grid))).reshape(len(grid), -1)
    scalars = [jnp.asarray(one) for one in scalars]
    blocks = np.stack(jax.vmap(lambda *step: spec.index_map(*step, *scalars))(*steps))
    return 1 + np.count_nonzero((blocks[:, 1:] != blocks[:, :-1]).any(axis=0))


def block_bytes(spec: Any, itemsize: int) -> int:
    """Bytes of a block of a `BlockSpec`; on a TPU its last axis fills lanes of 128."""
    *sizes, last = (size or 1 for size in spec.block_shape)
    return int(np.prod(sizes)) * -(-last // 128) * 128 * itemsize


def tables_of(lengths: np.ndarray, page: int, rng: np.random.Generator) -> np.ndarray:
    """Pages at random for rows of such lengths, "no page" behind each row's last."""
    counts = -(-lengths // page)
    tables = np.full((len(lengths), max(counts.max(), 1)), counts.sum(), np.int32)
    pages = rng.permutation(counts.sum())
    for row, (end, count) in enumerate(zip(np.cumsum(counts), counts, strict=True)):
        tables[row, :count] = pages[end - count : end]
    return tables


def tpu_call(model: Model, tables: np.ndarray, limits: np.ndarray) -> PagesCall:
    """The TPU kernel's grid for queries of so many blocks below `limits` `[B, Q]`."""
    make, page = jax.ShapeDtypeStruct, PAGE_TOKENS["mosaic"]
    q = make((*limits.shape, model.num_heads, model.head_dim), jnp.bfloat16)
    pages = (int(tables.max()) + 1, model.num_kv_heads, page, model.head_dim)
    call = make_pages_call(q, make(pages, jnp.bfloat16), jnp.asarray(tables), jnp.asarray(limits))
    return jax.tree.map(lambda x: np.asarray(x) if isinstance(x, jax.Array) else x, call)


def tpu_cost(model: Model, call: PagesCall) -> Cost:
    """Counts what a grid of the TPU kernel moves."""
    page_bytes = model.cache_bytes // model.num_layers * PAGE_TOKENS["mosaic"]
    num_steps = int(call.grid[0])
    fetched = sum(len(call.list_copied_pages(step)) for step in range(num_steps)) * page_bytes
    sizes = ((call.queries, 2), (call.limits, 4), (call.queries, 4), (call.lse, 4))
    moved = sum(
        moves(call.grid, spec, call.steps) * block_bytes(spec, itemsize) for spec, itemsize in sizes
    )
    return Cost(num_steps, fetched, moved)


def live_bytes(model: Model, lengths: np.ndarray, page: int) -> int:
    """Bytes of a layer's pages that hold what the rows read."""
    return int((-(-lengths // page)).sum()) * page * model.cache_bytes // model.num_layers

"""Attention on TPUs: splash attention for the update, and a Pallas kernel for paged attention."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as splash,
)
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jaxtyping import Array, Float, Int

from jaxrl.models.attention.reference import (
    EMPTY_LSE,
    MASK_VALUE,
    group_by_kv_head,
    pad_to_blocks,
    ungroup_queries,
)

LANES = 128
"""Lanes of a TPU register. Block and head sizes are multiples of this number."""

MAX_BLOCK = 512
"""Maximum tokens in a block of queries or keys."""


def attend_packed(
    q: Float[Array, "R Q N H"],
    k: Float[Array, "R T K H"],
    v: Float[Array, "R T K H"],
    key_ranges: Int[Array, "R 3 T"],
    *,
    interpret: bool = False,
) -> Float[Array, "R Q N H"]:
    """Compute `reference.attend_packed` with splash attention, without shared prompts.

    Tokens are padded to full blocks and heads to multiples of `LANES`. The queries are scaled. The
    backward pass uses two kernels, because the fused kernel would write a partial query gradient
    for each block of keys.
    """
    Q, N, H = q.shape[1:]
    # Blocks have equal sizes, a multiple of `LANES`.
    num_blocks = -(-Q // MAX_BLOCK)
    size = -(-Q // (num_blocks * LANES)) * LANES
    q, k, v, key_ranges = pad_to_blocks(q, k, v, key_ranges, size)
    num_queries, length = q.shape[1], k.shape[1]
    blocks = splash.BlockSizes(
        block_q=size,
        block_kv=size,
        block_kv_compute=size,
        block_q_dkv=size,
        block_kv_dkv=size,
        block_kv_dkv_compute=size,
        block_q_dq=size,
        block_kv_dq=size,
    )
    attend = splash.make_splash_mha(
        masks.MultiHeadMask(
            [masks.CausalMask((num_queries, length), offset=length - num_queries)] * N
        ),
        block_sizes=blocks,
        head_shards=1,
        q_seq_shards=1,
        residual_checkpoint_name="attended",
        interpret=interpret,
    )
    pad = ((0, 0), (0, 0), (0, 0), (0, -H % LANES))
    q = (q.astype(jnp.float32) * H**-0.5).astype(q.dtype)
    q, k, v = (jnp.pad(x, pad).swapaxes(1, 2) for x in (q, k, v))
    ids = key_ranges[:, 0]  # all tokens of a segment have the same start
    out = jax.vmap(attend)(q, k, v, splash.SegmentIds(ids[:, -num_queries:], ids))
    return out.swapaxes(1, 2)[:, :Q, :, :H]


SUBLANES = 16
"""Multiple to which matrix rows are padded, for bfloat16 and float32."""

STEP_PAGES = 4
"""Maximum pages per step. Fetching a page takes less time than its two matmuls."""

NUM_SLOTS = 4
"""Maximum number of steps with pages in VMEM or in flight."""

BUFFER_BYTES = 6 << 20
"""Bytes of VMEM for pages. A kernel has at least 16 MiB (TPU v4), including queries."""


def attend_pages(
    q: Float[Array, "B Q N H"],
    keys: Float[Array, "P K page H"],
    values: Float[Array, "P K page H"],
    tables: Int[Array, "B M"],
    limits: Int[Array, "B Q"],
    *,
    interpret: bool | pltpu.InterpretParams = False,
) -> tuple[Float[Array, "B Q N H"], Float[Array, "B Q N"]]:
    """Compute `reference.attend_pages` without fetching pages beyond a block's highest limit.

    Each step processes a few live pages of one block; blocks without live pages have no steps.
    Pages are prefetched a few steps ahead. KV heads with few queries share a query matrix. After
    its product with one head's keys, the rows of other heads are discarded.
    """
    spec = make_kernel_spec(q, keys, tables, limits)
    grouped_q, row_limits = group_by_kv_head(
        q, limits, keys.shape[1] // spec.heads_per_matrix, spec.num_rows
    )
    out, lse = pl.pallas_call(
        partial(
            _pages_kernel,
            scale=q.shape[3] ** -0.5,
            heads_per_matrix=spec.heads_per_matrix,
            groups=q.shape[2] // keys.shape[1],
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(spec.steps),
            grid=spec.grid,
            in_specs=[spec.queries, spec.limits, spec.pages, spec.pages],
            out_specs=[spec.queries, spec.lse],
            scratch_shapes=spec.scratch,
        ),
        out_shape=[
            jax.ShapeDtypeStruct(grouped_q.shape, jnp.float32),
            jax.ShapeDtypeStruct((*grouped_q.shape[:3], LANES), jnp.float32),
        ],
        interpret=interpret,
        name="attention_pages",
    )(*spec.steps, grouped_q, row_limits[:, :, None], keys, values)
    out, lse = ungroup_queries(out, lse[..., 0], q.shape)
    key_ranges = (limits > 0)[:, :, None]  # blocks without steps are not written
    return jnp.where(key_ranges[..., None], out, 0.0), jnp.where(key_ranges, lse, EMPTY_LSE)


class PageSteps(NamedTuple):
    """Assignment of pages to steps, as scalars that are prefetched before the first step."""

    tables: Any  # int32 [B, M]
    num_pages: Any  # int32 [B], live pages of each block
    starts: Any  # int32 [B], each block's first step
    blocks: Any  # int32 [S], the block of each step

    def locate_first_page(self, step: Any, width: int) -> tuple[Any, Any]:
        """Return the block of a step, and the block-table index of the step's first page."""
        block = self.blocks[step]
        return block, (step - self.starts[block]) * width

    def locate_page(self, step: Any, index: int, width: int) -> tuple[Any, Any]:
        """Return the index of a step's page in `tables`, and True if the page is live."""
        block, first_page = self.locate_first_page(step, width)
        return (block, first_page + index), first_page + index < self.num_pages[block]

    @classmethod
    def build(
        cls, tables: jax.Array, num_pages: jax.Array, width: int
    ) -> tuple[PageSteps, jax.Array]:
        """Divide the live pages into steps of `width` pages; return the steps and their count."""
        B, M = tables.shape
        num_steps = -(-num_pages // width)
        ends = jnp.cumsum(num_steps)
        steps = jnp.arange(B * -(-M // width))
        # Count the blocks that end before each step: scalar lookups are slow on a TPU.
        blocks = (ends <= steps[:, None]).sum(axis=1, dtype=jnp.int32)
        return cls(tables, num_pages, ends - num_steps, jnp.minimum(blocks, B - 1)), ends[-1]


class KernelSpec(NamedTuple):
    """Grid, block specs and sizes of one kernel call."""

    grid: tuple[Any, ...]
    steps: PageSteps
    queries: pl.BlockSpec  # for queries and outputs
    limits: pl.BlockSpec
    lse: pl.BlockSpec  # for the log-sum-exp
    pages: pl.BlockSpec  # left in HBM
    scratch: list[Any]
    width: int  # pages per step
    heads_per_matrix: int  # KV heads that share a query matrix
    num_rows: int  # rows of a query matrix


def make_kernel_spec(q: Any, keys: Any, tables: Any, limits: Any) -> KernelSpec:
    """Choose the grid, block specs and scratch buffers for `attend_pages`.

    Uses only the shapes of `q` and `keys` and the dtype of `keys`, not their values.
    """
    (_, Q, N, H), (P, K, page, _) = q.shape, keys.shape
    # Maximize the pages per step and the steps in flight that fit in the buffer.
    page_bytes = 2 * K * page * -(-H // LANES) * LANES * keys.dtype.itemsize
    max_pages = max(BUFFER_BYTES // page_bytes, 2)
    width = max(min(max_pages // 2, STEP_PAGES, tables.shape[1]), 1)
    slots = min(max_pages // width, NUM_SLOTS)
    steps, num_steps = PageSteps.build(
        jnp.clip(tables, 0, P - 1), -(-limits.max(axis=1) // page), width
    )
    # Combine as many KV heads in a query matrix as its minimum number of rows allows.
    valid_sizes = [n for n in range(1, K + 1) if K % n == 0 and n * Q * N // K <= SUBLANES]
    heads_per_matrix = max(valid_sizes, default=1)
    num_rows = -(-Q * N // K * heads_per_matrix // SUBLANES) * SUBLANES
    heads = K // heads_per_matrix

    def block_index_map(step: Any, *steps: Any) -> tuple[Any, ...]:
        return PageSteps(*steps).blocks[step], 0, 0, 0

    return KernelSpec(
        grid=(jnp.maximum(num_steps, 1),),
        steps=steps,
        queries=pl.BlockSpec((1, heads, num_rows, H), block_index_map),
        limits=pl.BlockSpec((1, num_rows, 1), lambda *step: block_index_map(*step)[:3]),
        lse=pl.BlockSpec((1, heads, num_rows, LANES), block_index_map),
        pages=pl.BlockSpec(memory_space=pl.ANY),
        scratch=[
            *[pltpu.VMEM((slots, width, K, page, H), keys.dtype)] * 2,
            pltpu.SemaphoreType.DMA((slots,)),
            *[pltpu.VMEM((heads, num_rows, LANES), jnp.float32)] * 2,
        ],
        width=width,
        heads_per_matrix=heads_per_matrix,
        num_rows=num_rows,
    )


def _pages_kernel(
    tables_ref: Any, num_pages_ref: Any, starts_ref: Any, blocks_ref: Any, q_ref: Any,
    limits_ref: Any, k_ref: Any, v_ref: Any, out_ref: Any, lse_ref: Any, keys_ref: Any,
    values_ref: Any, arrived_ref: Any, highest_ref: Any, total_ref: Any, *, scale: float,
    heads_per_matrix: int, groups: int,
) -> None:  # fmt: skip
    """Add a step's pages to a block's running softmax; the last step normalizes the outputs."""
    steps = PageSteps(tables_ref, num_pages_ref, starts_ref, blocks_ref)
    (slots, width), (page, H) = keys_ref.shape[:2], keys_ref.shape[3:]
    step, num_steps = pl.program_id(0), pl.num_programs(0)
    block, first_page = steps.locate_first_page(step, width)

    # Start the copies of a step's live pages, or wait for them.
    def copy_pages(step: Any, *, should_wait: bool) -> None:
        slot = jax.lax.rem(step, slots)
        for index in range(width):
            table_index, is_live = steps.locate_page(step, index, width)

            @pl.when(is_live)
            def _(index: int = index, table_index: Any = table_index) -> None:
                page = tables_ref[table_index]
                for source, target in ((k_ref, keys_ref), (v_ref, values_ref)):
                    dma = pltpu.make_async_copy(
                        source.at[page], target.at[slot, index], arrived_ref.at[slot]
                    )
                    dma.wait() if should_wait else dma.start()

    @pl.when(step == 0)
    def _() -> None:
        # Buffers without a live page are multiplied by 0, so their content must be finite.
        for slot in range(slots):
            values_ref[slot] = jnp.zeros(values_ref.shape[1:], values_ref.dtype)
        for early_step in range(slots - 1):
            pl.when(early_step < num_steps)(partial(copy_pages, early_step, should_wait=False))

    # Prefetch the pages of a later step into the slot that the previous step freed.
    prefetch_step = step + slots - 1
    pl.when(prefetch_step < num_steps)(partial(copy_pages, prefetch_step, should_wait=False))

    @pl.when(first_page == 0)
    def _() -> None:
        out_ref[...] = jnp.zeros(out_ref.shape, jnp.float32)
        highest_ref[...] = jnp.full(highest_ref.shape, EMPTY_LSE, jnp.float32)
        total_ref[...] = jnp.zeros(total_ref.shape, jnp.float32)

    # Wait for this step's pages. Compute which positions each row reads, and its KV head.
    copy_pages(step, should_wait=True)
    slot, limits = jax.lax.rem(step, slots), limits_ref[0]
    shape = (limits.shape[0], width * page)
    is_read = first_page * page + jax.lax.broadcasted_iota(jnp.int32, shape, 1) < limits
    row = jax.lax.broadcasted_iota(jnp.int32, (shape[0], 1), 0)
    head_of_row = jax.lax.div(jax.lax.rem(row, heads_per_matrix * groups), groups)

    def load_head(ref: Any, head: int) -> jax.Array:
        return ref[slot, :, head].reshape(width * page, H)

    def select_head(index: int, new: jax.Array, others: Any) -> jax.Array:
        return new if heads_per_matrix == 1 else jnp.where(head_of_row == index, new, others)

    # Online softmax: output, maximum and total accumulate over the block's steps.
    for head in range(q_ref.shape[1]):
        product = jnp.zeros(shape, jnp.float32)
        for index in range(heads_per_matrix):
            head_part = jax.lax.dot_general(
                q_ref[0, head],
                load_head(keys_ref, head * heads_per_matrix + index),
                (((1,), (1,)), ((), ())),
                preferred_element_type=jnp.float32,
            )
            product = select_head(index, head_part, product)
        scores = jnp.where(is_read, product * scale, MASK_VALUE)
        highest = highest_ref[head, :, :1]
        new = jnp.maximum(highest, scores.max(axis=1, keepdims=True))
        weights, rescale = jnp.exp(scores - new), jnp.exp(highest - new)
        head_out = jnp.zeros(out_ref.shape[2:], jnp.float32)
        for index in range(heads_per_matrix):
            head_part = select_head(index, weights, 0.0).astype(values_ref.dtype)
            values = load_head(values_ref, head * heads_per_matrix + index)
            head_out += jnp.dot(head_part, values, preferred_element_type=jnp.float32)
        out_ref[0, head] = out_ref[0, head] * rescale + head_out
        total = total_ref[head, :, :1] * rescale + weights.sum(axis=1, keepdims=True)
        highest_ref[head] = jnp.broadcast_to(new, highest_ref.shape[1:])
        total_ref[head] = jnp.broadcast_to(total, total_ref.shape[1:])

    @pl.when(first_page + width >= num_pages_ref[block])
    def _() -> None:
        total = jnp.where(total_ref[...] > 0, total_ref[...], 1.0)
        out_ref[0] = out_ref[0] / total[:, :, :1]
        lse_ref[0] = highest_ref[...] + jnp.log(total)

"""Paged attention on NVIDIA Hopper GPUs: a Pallas kernel for the Mosaic GPU backend.

The kernel combines flash-decoding (https://pytorch.org/blog/flash-decoding/) with stream-K work
partitioning (https://arxiv.org/abs/2301.03598). Each page of a KV head is one unit of work, and
starting a KV head costs one more. The units of all rows are concatenated and divided evenly among
programs, one per multiprocessor, so the GPU is fully used even with a few long rows. If a row is
split among programs, each program writes a partial softmax, and XLA merges the results.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from jaxrl.models.attention.reference import (
    EMPTY_LSE,
    MASK_VALUE,
    group_by_kv_head,
    ungroup_queries,
)

NUM_PROGRAMS = 132
"""Number of programs: one for each multiprocessor of an H100 or H200."""

MAX_PARTS = 16
"""Maximum number of programs that share one KV head of a row."""

ROWS = 64
"""Rows of a query matrix, as many as a warpgroup multiplies."""

STAGES_BYTES = 128 * 1024
"""Bytes of shared memory for pages in flight."""


def attend_pages(
    q: Float[Array, "B Q N H"],
    keys: Float[Array, "P K page H"],
    values: Float[Array, "P K page H"],
    tables: Int[Array, "B M"],
    limits: Int[Array, "B Q"],
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "B Q N H"], Float[Array, "B Q N"]]:
    """Compute `reference.attend_pages` without reading pages beyond a block's highest limit.

    A query matrix holds up to `ROWS` queries of one block and KV head. For each matrix, the kernel
    reads the pages below the highest limit of its queries. The Pallas interpreter (JAX 0.12 or
    later) also supports float32 and sizes that the GPU does not support.

    Raises:
        ValueError: The GPU's matrix units do not support the operands.
    """
    B, H = q.shape[0], q.shape[3]
    K, page = keys.shape[1:3]
    if not interpret:
        _check_operands(q.dtype, H, page)
    merged, row_limits = group_by_kv_head(q, limits, K)
    R = merged.shape[2]
    rows = min(pl.cdiv(R, 8) * 8, ROWS)
    num_blocks = pl.cdiv(R, rows)
    padding = num_blocks * rows - R
    merged = jnp.pad(merged, ((0, 0), (0, 0), (0, padding), (0, 0)))
    # [B * blocks, K, rows, H] and [B * blocks, rows]
    merged = merged.reshape(B, K, num_blocks, rows, H).swapaxes(1, 2).reshape(-1, K, rows, H)
    row_limits = jnp.pad(row_limits, ((0, 0), (0, padding))).reshape(-1, rows)
    highest = limits if num_blocks == 1 else row_limits
    work = partition_work(highest.max(axis=1), page, K)
    out, lse = _run_kernel(merged, keys, values, tables, row_limits, work, interpret)
    filled = min(R, rows)
    out, lse = _merge_partial_results(out[:, :filled], lse[:, :filled], work, K)
    out = out.reshape(B, num_blocks, K, filled, H).swapaxes(1, 2).reshape(B, K, -1, H)
    lse = lse.reshape(B, num_blocks, K, filled).swapaxes(1, 2).reshape(B, K, -1)
    return ungroup_queries(out, lse, q.shape)


def _check_operands(dtype: Any, head_dim: int, page: int) -> None:
    """Raise a ValueError if the kernel does not support the operands."""
    if jnp.dtype(dtype).itemsize != 2:
        problem = f"{dtype} operands, which a Hopper GPU would round; expected bfloat16"
    elif head_dim % 16 or head_dim > 256:
        problem = f"a head size of {head_dim}; expected a multiple of 16 up to 256"
    elif page % 64 or 8 * page * head_dim > STAGES_BYTES:
        problem = f"pages of {page} tokens; expected 64, or 128 for head sizes up to 128"
    else:
        return
    raise ValueError(
        f"The Mosaic GPU kernel for paged attention got {problem}. "
        "Set config.model.dtype to 'bfloat16'."
    )


class WorkPartition(NamedTuple):
    """Partition of the work on F query matrices, with all KV heads, among programs.

    The units of a matrix are the start of its first KV head, that head's pages, the start of its
    second head, and so on. Starting a head costs about as much as a page. If the last unit of a
    program is a start, the next program processes it.

    Attributes:
        pages: Number of pages per KV head, int32 [F].
        ends: Cumulative number of units through each matrix, int32 [F].
        next_live: Next matrix that has units, int32 [F].
        programs: Work of each program, int32 [PROGRAMS, 6]: first matrix, KV head and page, number
            of spans (see `get_next_span`), number of pages, and the last program that reads pages
            of the KV head in which this program's units end.
        num_programs: Number of programs that have units, int32 [].
    """

    pages: jax.Array
    ends: jax.Array
    next_live: jax.Array
    programs: jax.Array
    num_programs: jax.Array


def partition_work(limits: Int[Array, " F"], page_tokens: int, num_heads: int) -> WorkPartition:
    """Divide the pages below each limit, for all KV heads, among programs.

    The numbers of units per program differ by at most one. If the longest row would be split among
    more than `MAX_PARTS` programs, fewer programs are used. A span costs about as much as a page:
    timings of three workloads on an H200 fit 1.35 us per span, 1.03 us per page of 64 tokens and
    128 values, and 30 us per call.
    """
    F = len(limits)
    pages = (limits + page_tokens - 1) // page_tokens
    # Pairwise sums compile to a single XLA kernel, unlike cumulative sums.
    order = jnp.arange(F)
    is_after, is_live = order > order[:, None], pages > 0
    width = jnp.where(is_live, pages + 1, 0)  # units of one KV head
    ends = jnp.where(is_after, 0, width).sum(axis=1) * num_heads
    rank = (~is_after & is_live).sum(axis=1)
    next_live = jnp.where(is_after & is_live, order, F).min(axis=1)

    # Limit the number of programs that share a row.
    total = jnp.maximum(ends[-1], 1)
    min_units = jnp.maximum(pl.cdiv(width.max(), MAX_PARTS - 1), 1)
    num_programs = jnp.clip(total // min_units, 1, NUM_PROGRAMS)
    bounds = jnp.minimum(jnp.arange(NUM_PROGRAMS + 1) * total // num_programs, ends[-1])

    def decompose_unit(unit: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        matrix = jnp.minimum((ends <= unit[:, None]).sum(axis=1), F - 1)
        offset = unit - (ends - width * num_heads)[matrix]
        units_per_head = jnp.maximum(width[matrix], 1)
        return matrix, offset // units_per_head, offset % units_per_head

    matrix, head, cursor = decompose_unit(bounds)
    start = jnp.maximum(cursor - 1, 0)
    # Units are pages and starts; each KV head has one start.
    before = ends - width * num_heads - (rank - is_live) * num_heads
    num_before = before[matrix] + head * pages[matrix] + start
    num_pages = jnp.diff(num_before)
    last_matrix, last_head, cursor = decompose_unit(jnp.maximum(bounds[1:] - 1, 0))
    last_head -= cursor == 0  # the previous KV head, possibly of another matrix
    last_end = ends[last_matrix] - width[last_matrix] * (num_heads - 1 - last_head)
    matrix, head, start = (x[:-1] for x in (matrix, head, start))
    num_spans = (rank[last_matrix] - rank[matrix]) * num_heads + last_head - head + 1
    num_spans = jnp.where(num_pages > 0, num_spans, 0)
    last = (last_end * num_programs - 1) // total
    programs = jnp.stack([matrix, head, start, num_spans, num_pages, last], axis=1)
    arrays = pages, ends, next_live, programs, num_programs
    return WorkPartition(*(x.astype(jnp.int32) for x in arrays))


class PageSpan(NamedTuple):
    """Consecutive pages that a program reads for one KV head of a query matrix.

    Attributes:
        matrix: Index of the query matrix.
        head: Index of the KV head.
        start: Index of the first page in the matrix's block table.
        num_pages: Number of pages.
        slot: Output slot. The first slots are for complete KV heads, by matrix and head. They are
            followed by two slots per program: for the end of a head that an earlier program starts,
            and for the start of a head that a later program ends.
    """

    matrix: Any
    head: Any
    start: Any
    num_pages: Any
    slot: Any


Cursor = tuple[Any, Any, Any, Any]
"""Matrix, KV head and page of a program's next unit, and the number of remaining units."""


def get_next_span(
    cursor: Cursor, program: Any, pages: Any, next_live: Any, K: int
) -> tuple[PageSpan, Cursor]:
    """Return a program's next span, and the cursor after it."""
    matrix, head, start, num_left = cursor
    width = pages[matrix]
    count = jnp.minimum(width - start, num_left)
    parts = pages.shape[0] * K + 2 * program
    complete_slot = jnp.where(count < width, parts + 1, matrix * K + head)
    span = PageSpan(matrix, head, start, count, jnp.where(start > 0, parts, complete_slot))
    is_last = head == K - 1
    after = jnp.where(is_last, next_live[matrix], matrix), jnp.where(is_last, 0, head + 1)
    return span, (*after, 0 * start, num_left - count)


def _run_kernel(
    q: Float[Array, "F K rows H"],
    keys: Float[Array, "P K page H"],
    values: Float[Array, "P K page H"],
    tables: Int[Array, "B M"],
    limits: Int[Array, "F rows"],
    work: WorkPartition,
    interpret: bool,
) -> tuple[Float[Array, "slots rows H"], Float[Array, "slots rows"]]:
    """Compute the output and log-sum-exp of each slot; unused slots are uninitialized.

    One of a program's two warpgroups copies pages to a ring buffer; the other computes attention.
    Padding rows are also computed, because the kernel is memory-bound.
    """
    F, K, rows, H = q.shape
    page = keys.shape[2]
    # Split the output columns to limit the registers per thread.
    width = H if H <= 128 else math.gcd(H, 64)
    num_stages = max(min(STAGES_BYTES // (2 * page * H * keys.dtype.itemsize), 8), 2)
    ring = plgpu.SMEM((num_stages, page, H), keys.dtype)
    barriers = plgpu.Barrier(num_barriers=num_stages)
    shared = SharedMemory(
        queries=plgpu.SMEM((ROWS, H), q.dtype),
        limits=plgpu.SMEM((ROWS,), jnp.int32),
        rings=(ring, ring),
        weights=plgpu.SMEM((ROWS, page), keys.dtype),
        out=plgpu.SMEM((ROWS, width), jnp.float32),
        lse=plgpu.SMEM((ROWS,), jnp.float32),
        query_barrier=plgpu.Barrier(num_arrivals=2),
        full_barriers=(barriers, barriers),
        free_barriers=(barriers, barriers),
    )
    slots = F * K + 2 * NUM_PROGRAMS
    call = plgpu.kernel(
        partial(
            _attend_pages_kernel,
            matrices_per_row=F // len(tables),
            scale=H**-0.5 * math.log2(math.e),
        ),
        out_type=(
            jax.ShapeDtypeStruct((slots, rows, H), jnp.float32),
            jax.ShapeDtypeStruct((slots, rows), jnp.float32),
        ),
        scratch_types=shared,
        grid=(NUM_PROGRAMS,),
        grid_names=("program",),
        num_threads=2,
        thread_name="role",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
        # Not every version of JAX has this class. With race detection, the interpreter raises an
        # error if two threads access memory without ordering.
        interpret=vars(plgpu)["InterpretGPUParams"](detect_races=True) if interpret else None,
        kernel_name="attention_pages",
    )
    limits = jnp.pad(limits, ((0, 0), (0, ROWS - rows)))
    return call(q, keys, values, tables, limits, work.pages, work.next_live, work.programs)


class SharedMemory(NamedTuple):
    """Shared memory and barriers of a program.

    Ring buffers hold the keys and values of the pages in flight. Each page slot has one barrier for
    arrival and one for release.
    """

    queries: Any
    limits: Any
    rings: Any
    weights: Any
    out: Any
    lse: Any
    query_barrier: Any
    full_barriers: Any
    free_barriers: Any


def _attend_pages_kernel(*refs: Any, matrices_per_row: int, scale: float) -> None:
    q, keys, values, tables, limits, pages, next_live, programs, out, lse = refs[:10]
    shared = SharedMemory(*refs[10:])
    program = jax.lax.axis_index("program")

    def for_each_span(visit: Callable[[PageSpan, jax.Array], None]) -> None:
        """Call `visit` with each span of the program and the number of preceding pages."""

        def step(_: jax.Array, carry: tuple[Cursor, jax.Array]) -> tuple[Cursor, jax.Array]:
            cursor, num_before = carry
            span, cursor = get_next_span(cursor, program, pages, next_live, q.shape[1])
            visit(span, num_before)
            return cursor, num_before + span.num_pages

        matrix, head, start, num_spans, num_units = (programs[program, i] for i in range(5))
        begin = (matrix, head, start, num_units), jnp.int32(0)
        jax.lax.fori_loop(0, num_spans, step, begin)

    @pl.when(jax.lax.axis_index("role") == 0)
    def _() -> None:
        for_each_span(partial(_attend_span, (q, limits, out, lse), shared, scale=scale))
        plgpu.wait_smem_to_gmem(0)

    @pl.when(jax.lax.axis_index("role") == 1)
    def _() -> None:
        for_each_span(partial(_fetch_span, (keys, values), tables, shared, matrices_per_row))


def _fetch_span(
    arrays: tuple[Any, Any],
    tables: Any,
    shared: SharedMemory,
    matrices_per_row: int,
    span: PageSpan,
    num_before: Any,
) -> None:
    """Copy a span's keys and values to the ring buffers, page by page as slots become free."""
    num_stages = shared.rings[0].shape[0]
    row = jax.lax.div(span.matrix, jnp.int32(matrices_per_row))

    def copy_page(i: jax.Array, _: None) -> None:
        page = tables[row, span.start + i]
        stage = jax.lax.rem(num_before + i, jnp.int32(num_stages))
        buffers = zip(arrays, shared.rings, shared.full_barriers, shared.free_barriers, strict=True)
        for array, ring, full_barrier, free_barrier in buffers:

            @pl.when(num_before + i >= num_stages)
            def _(free_barrier: Any = free_barrier) -> None:
                plgpu.barrier_wait(free_barrier.at[stage])

            plgpu.copy_gmem_to_smem(
                array.at[page, span.head], ring.at[stage], full_barrier.at[stage]
            )

    jax.lax.fori_loop(0, span.num_pages, copy_page, None)


def _attend_span(
    arrays: tuple[Any, ...], shared: SharedMemory, span: PageSpan, num_before: Any, *, scale: float
) -> None:
    """Compute a span's attention as pages arrive, and store the result in its slot."""
    q, all_limits, all_out, all_lse = arrays
    rows, H = q.shape[2:]
    keys, values = shared.rings
    num_stages, page, _ = keys.shape
    # Load the span's queries and limits.
    filled = shared.queries.at[pl.ds(0, rows)]
    plgpu.copy_gmem_to_smem(q.at[span.matrix, span.head], filled, shared.query_barrier)
    plgpu.copy_gmem_to_smem(all_limits.at[span.matrix], shared.limits, shared.query_barrier)
    plgpu.barrier_wait(shared.query_barrier)
    limits = shared.limits[...]
    width = shared.out.shape[1]
    parts = [pl.ds(start, width) for start in range(0, H, width)]

    # Online softmax in base 2 over a page. Keys and values are released as early as possible.
    def accumulate_page(i: jax.Array, sums: tuple[Any, ...]) -> tuple[Any, ...]:
        highest, total, accumulators = sums
        stage = jax.lax.rem(num_before + i, jnp.int32(num_stages))
        plgpu.barrier_wait(shared.full_barriers[0].at[stage])
        scores = _matmul(shared.queries, keys.at[stage].T)
        plgpu.barrier_arrive(shared.free_barriers[0].at[stage])
        tokens = (span.start + i) * page + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1)
        scores = jnp.where(tokens < _broadcast_columns(limits, scores), scores * scale, MASK_VALUE)
        new_highest = jnp.maximum(highest, scores.max(axis=1))
        rescale = jnp.exp2(highest - new_highest)
        weights = jnp.exp2(scores - _broadcast_columns(new_highest, scores))
        shared.weights[...] = weights.astype(values.dtype)
        plgpu.commit_smem()
        plgpu.barrier_wait(shared.full_barriers[1].at[stage])
        accumulators = tuple(
            acc * _broadcast_columns(rescale, acc)
            + _matmul(shared.weights, values.at[stage, :, part])
            for acc, part in zip(accumulators, parts, strict=True)
        )
        plgpu.barrier_arrive(shared.free_barriers[1].at[stage])
        return new_highest, total * rescale + weights.sum(axis=1), accumulators

    accumulators = tuple(jnp.zeros((ROWS, width), jnp.float32) for _ in parts)
    sums = jnp.full(ROWS, EMPTY_LSE, jnp.float32), jnp.zeros(ROWS, jnp.float32), accumulators
    highest, total, accumulators = jax.lax.fori_loop(0, span.num_pages, accumulate_page, sums)
    # Normalize, convert the log-sum-exp to nats, and write the output part by part.
    total = jnp.where(total > 0, total, 1.0)
    shared.lse[...] = highest * math.log(2) + jnp.log(total)
    for acc, part in zip(accumulators, parts, strict=True):
        shared.out[...] = acc / _broadcast_columns(total, acc)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(shared.out.at[pl.ds(0, rows)], all_out.at[span.slot, :, part])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    plgpu.copy_smem_to_gmem(shared.lse.at[pl.ds(0, rows)], all_lse.at[span.slot])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _matmul(a: Any, b: Any) -> jax.Array:
    """Multiply two matrices in shared memory, accumulating in float32."""

    def run_wgmma(total: Any) -> jax.Array:
        plgpu.wgmma(total, a, b)
        return total[...]

    return pl.run_scoped(run_wgmma, plgpu.ACC((a.shape[0], b.shape[1]), jnp.float32))


def _broadcast_columns(x: jax.Array, like: jax.Array) -> jax.Array:
    """Broadcast one value per row to all columns."""
    return jax.lax.broadcast_in_dim(x, like.shape, [0])


def _merge_partial_results(
    out: Float[Array, "slots rows H"], lse: Float[Array, "slots rows"], work: WorkPartition, K: int
) -> tuple[Float[Array, "FK rows H"], Float[Array, "FK rows"]]:
    """Return the result of each KV head, merging heads that are split among programs.

    A program starts at most one split head: the head in which its units end. Partial results are
    therefore merged once per program, and a split head gets the merged result of the program that
    starts it.
    """
    F = len(work.pages)
    pages = jnp.repeat(work.pages, K)
    width = work.pages[:, None] + 1
    ends = (work.ends[:, None] - width * (K - 1 - jnp.arange(K))).reshape(-1)
    total = jnp.maximum(work.ends[-1], 1)
    first, last = (((x + 1) * work.num_programs - 1) // total for x in (ends - pages, ends - 1))
    is_live, is_shared = pages > 0, (pages > 0) & (last > first)
    offsets = jnp.arange(MAX_PARTS)
    part_programs = jnp.arange(NUM_PROGRAMS)[:, None] + offsets
    is_part = part_programs <= work.programs[:, 5:]
    slots = F * K + 2 * jnp.where(is_part, part_programs, 0) + (offsets == 0)
    part_lse = jnp.where(is_part[..., None], lse[slots], EMPTY_LSE)
    highest = part_lse.max(axis=1)
    weights = jnp.exp(part_lse - highest[:, None])
    part_out = jnp.where(is_part[..., None, None], out[slots], 0)
    merged = (weights[..., None] * part_out).sum(axis=1) / weights.sum(axis=1)[..., None]
    merged_lse = highest + jnp.log(weights.sum(axis=1))
    first_program = jnp.minimum(first, NUM_PROGRAMS - 1)
    out = jnp.where(is_shared[:, None, None], merged[first_program], out[: F * K])
    lse = jnp.where(is_shared[:, None], merged_lse[first_program], lse[: F * K])
    return jnp.where(is_live[:, None, None], out, 0), jnp.where(is_live[:, None], lse, EMPTY_LSE)

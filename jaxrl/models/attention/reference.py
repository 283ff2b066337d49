"""XLA attention for every platform: packed rows in training, pages in the sampler.

Scores and softmax are computed in float32. The sampler's pages are `[P, K, page, H]`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from jaxrl.models.attention.kernels import PAGE_TOKENS, SHARES_PROMPTS, AttentionKernels

MASK_VALUE = float(jnp.finfo(jnp.float32).min) / 2
"""Finite substitute for minus infinity in scores and logits. Its exponential is 0."""

MAX_BLOCK = 96
"""Maximum number of tokens in a block of queries or keys of `attend_packed`."""


def attend_packed(
    q: Float[Array, "R Q N H"],
    k: Float[Array, "R T K H"],
    v: Float[Array, "R T K H"],
    key_ranges: Int[Array, "R 3 T"],
) -> Float[Array, "R Q N H"]:
    """Compute causal attention within the segments of packed rows, and over shared prompts.

    Flash attention (https://arxiv.org/abs/2205.14135) in blocks of tokens: forward and backward
    hold the scores of one query block and one key block at a time, and skip blocks that are fully
    masked. Matmuls take operands in the dtype of the inputs and accumulate in float32.

    The query heads of a KV head are merged with the tokens of a block. This gives one matmul per
    row and KV head, without repeating keys.

    Args:
        q: Queries of the last Q tokens.
        k: Keys of all T tokens.
        v: Values of all T tokens.
        key_ranges: Ranges of tokens that each token attends to; see `kernels.compute_key_ranges`.
    """
    R, Q, N, H = q.shape
    K = k.shape[2]
    num_blocks = -(-Q // MAX_BLOCK)
    size = -(-Q // num_blocks)
    q, k, v, key_ranges = pad_to_blocks(q, k, v, key_ranges, size)
    q = q.reshape(R, num_blocks, size, K, N // K, H).transpose(1, 0, 3, 4, 2, 5)
    k, v = (x.reshape(R, -1, size, K, H).transpose(1, 0, 3, 2, 4) for x in (k, v))
    key_ranges = key_ranges.reshape(R, 3, -1, size).transpose(2, 1, 0, 3)[-num_blocks:]
    out = _attend(q.reshape(num_blocks, R, K, -1, H), k, v, key_ranges)
    out = out.reshape(num_blocks, R, K, N // K, size, H).transpose(1, 0, 4, 2, 3, 5)
    return out.reshape(R, -1, N, H)[:, :Q]


def pad_to_blocks(
    q: Float[Array, "R Q N H"],
    k: Float[Array, "R T K H"],
    v: Float[Array, "R T K H"],
    key_ranges: Int[Array, "R 3 T"],
    size: int,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Pad the arguments of `attend_packed` to full blocks of `size` tokens.

    Queries and keys get the same padding at the end, so that queries stay last. Keys are also
    padded at the start.
    """
    Q, T = q.shape[1], k.shape[1]
    pad_after = -Q % size
    pad_before = -(T + pad_after) % size
    key_ranges = pad_key_ranges(key_ranges, T + pad_after)
    if pad_before:
        key_ranges = shift_key_ranges(
            jnp.pad(key_ranges, ((0, 0), (0, 0), (pad_before, 0))), pad_before
        )
    q = jnp.pad(q, ((0, 0), (0, pad_after), (0, 0), (0, 0)))
    k, v = (jnp.pad(x, ((0, 0), (pad_before, pad_after), (0, 0), (0, 0))) for x in (k, v))
    return q, k, v, key_ranges


def pad_key_ranges(key_ranges: Int[Array, "R 3 T"], length: int) -> Int[Array, "R 3 length"]:
    """Append padding to `key_ranges`, up to `length` tokens per row."""
    R, _, T = key_ranges.shape
    padding_ranges = jnp.stack([jnp.arange(T, length), *[jnp.full(length - T, n) for n in (T, 0)]])
    padding = jnp.broadcast_to(padding_ranges.astype(key_ranges.dtype), (R, *padding_ranges.shape))
    return jnp.concatenate([key_ranges, padding], axis=2)


def shift_key_ranges(
    key_ranges: Int[Array, "R 3 T"], shift: int | jax.Array
) -> Int[Array, "R 3 T"]:
    """Shift `key_ranges` right by `shift` tokens, with padding at the start."""
    starts, shared_starts, shared_ends = jnp.moveaxis(key_ranges, 1, 0)
    T = key_ranges.shape[2]
    is_before = jnp.arange(T) < shift
    starts = jnp.where(is_before, jnp.arange(T), starts + shift)
    shared_starts = jnp.where(is_before, T, shared_starts + shift)
    shared_ends = jnp.where(is_before | (shared_ends == 0), 0, shared_ends + shift)
    return jnp.stack([starts, shared_starts, shared_ends], axis=1).astype(key_ranges.dtype)


def find_key_blocks(
    key_ranges: Iterable[jax.Array], index: jax.Array, size: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Find the key blocks before block `index` that the queries of that block attend to.

    Args:
        key_ranges: Ranges that the queries attend to, `[3, ...]`; see `kernels.compute_key_ranges`.
        index: Index of the queries' first block.
        size: Number of tokens in a block of keys.

    Returns:
        First block and number of blocks of the shared prompt, and the first block of the contiguous
        range that ends at `index`.
    """
    starts, shared_starts, shared_ends = key_ranges
    local = starts.min() // size
    shared = shared_starts.min() // size
    end = jnp.minimum((shared_ends.max() + size - 1) // size, jnp.minimum(local, index))
    return shared, jnp.maximum(end - shared, 0), local


def make_attention_mask(key_ranges: Iterable[jax.Array], keys: jax.Array) -> jax.Array:
    """Return a mask of the keys that each query attends to, before causal masking."""
    starts, shared_starts, shared_ends = key_ranges
    return (keys >= starts) | (keys >= shared_starts) & (keys < shared_ends)


# Below, the first axis is over blocks of B tokens, with G query heads per KV head: queries and
# outputs `[blocks, R, K, G * B, H]`, keys and values `[blocks, R, K, B, H]`, and key ranges
# `[blocks, 3, R, B]`. Blocks of keys may precede the first block of queries.

_product = partial(jnp.einsum, preferred_element_type=jnp.float32)


@jax.custom_vjp
def _attend(q: jax.Array, k: jax.Array, v: jax.Array, key_ranges: jax.Array) -> jax.Array:
    return _attend_forward(q, k, v, key_ranges)[0]


def _attend_forward(
    q: jax.Array, k: jax.Array, v: jax.Array, key_ranges: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Return the outputs, and the residuals for the backward pass."""

    def step(block: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        index, q, key_ranges = block
        return _forward_block(index, q, key_ranges, k, v)

    out, lse = jax.lax.map(step, (_compute_query_block_indices(q, k), q, key_ranges))
    out, lse = checkpoint_name(out, "attended"), checkpoint_name(lse, "lse")
    return out, (q, k, v, key_ranges, out, lse)


def _compute_query_block_indices(q: jax.Array, k: jax.Array) -> jax.Array:
    """Return the key block index of each query block; queries are the last blocks."""
    return jnp.arange(len(k) - len(q), len(k))


def _forward_block(
    index: jax.Array, q: jax.Array, key_ranges: jax.Array, k: jax.Array, v: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Compute a query block's outputs and log-sum-exp, with an online softmax over key blocks."""

    def apply_attention_weights(weights: jax.Array, values: jax.Array) -> jax.Array:
        return _product("rkts,rksh->rkth", weights.astype(values.dtype), values)

    # Start with the diagonal block: each query attends to itself, so the maximum is finite.
    scores = _compute_scores(q, k[index], key_ranges, index, is_diagonal=True)
    highest = scores.max(axis=-1, keepdims=True)
    weights = jnp.exp(scores - highest)
    sums = highest, weights.sum(axis=-1, keepdims=True), apply_attention_weights(weights, v[index])

    def add_key_block(i: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        highest, total, out = sums
        j = block_at(i)
        scores = _compute_scores(q, k[j], key_ranges, j, is_diagonal=False)
        new = jnp.maximum(highest, scores.max(axis=-1, keepdims=True))
        weights, correction = jnp.exp(scores - new), jnp.exp(highest - new)
        total = total * correction + weights.sum(axis=-1, keepdims=True)
        return new, total, out * correction + apply_attention_weights(weights, v[j])

    if len(k) > 1:
        count, block_at = _find_blocks_before(index, key_ranges)
        sums = jax.lax.fori_loop(0, count, add_key_block, sums)
    highest, total, out = sums
    return (out / total).astype(q.dtype), highest + jnp.log(total)


def _find_blocks_before(
    index: jax.Array, key_ranges: jax.Array
) -> tuple[jax.Array, Callable[[jax.Array], jax.Array]]:
    """Find the earlier key blocks that a query block reads.

    Returns:
        The number of blocks, and a function that maps a loop index to a block index.
    """
    shared, num_shared, local = find_key_blocks(key_ranges, index, key_ranges.shape[2])
    count = num_shared + index - local
    return count, lambda i: jnp.where(i < num_shared, shared + i, local - num_shared + i)


def _compute_scores(
    q: jax.Array, k: jax.Array, key_ranges: jax.Array, key_block: jax.Array, *, is_diagonal: bool
) -> jax.Array:
    """Compute the masked, scaled scores of a query block and a key block, `[R, K, G * B, B]`."""
    offsets = jnp.arange(k.shape[2])
    mask = make_attention_mask(key_ranges[..., None], key_block * len(offsets) + offsets)
    if is_diagonal:
        mask &= offsets <= offsets[:, None]
    mask = jnp.tile(mask[:, None], (1, 1, q.shape[2] // len(offsets), 1))
    return jnp.where(mask, _product("rkth,rksh->rkts", q, k) * q.shape[3] ** -0.5, MASK_VALUE)


def _attend_backward(
    saved: tuple[jax.Array, ...], gradient: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    q, k, v, key_ranges, out, lse = saved
    scale = q.shape[4] ** -0.5
    delta = (out.astype(jnp.float32) * gradient.astype(jnp.float32)).sum(axis=-1, keepdims=True)

    def step(sums: KVGradients, indexed_block: tuple[Any, ...]) -> tuple[KVGradients, jax.Array]:
        index, block = indexed_block
        dq, *dkv = _backward_block_pair(block, index, k, v, is_diagonal=True)
        sums = _add_to_block(sums, index, dkv)

        def add_key_block(
            i: jax.Array, carry: tuple[jax.Array, KVGradients]
        ) -> tuple[jax.Array, KVGradients]:
            j = block_at(i)
            dq, *dkv = _backward_block_pair(block, j, k, v, is_diagonal=False)
            return carry[0] + dq, _add_to_block(carry[1], j, dkv)

        if len(k) > 1:
            count, block_at = _find_blocks_before(index, block[1])
            dq, sums = jax.lax.fori_loop(0, count, add_key_block, (dq, sums))
        return sums, (dq * scale).astype(q.dtype)

    # Accumulate in the transposed layout of the matmuls, since transposing is slow on a CPU.
    zeros = jnp.zeros(k.swapaxes(3, 4).shape, jnp.float32)
    blocks = (_compute_query_block_indices(q, k), (q, key_ranges, lse, gradient, delta))
    (dk, dv), dq = jax.lax.scan(step, (zeros, zeros), blocks)
    dk, dv = (dk * scale).swapaxes(3, 4), dv.swapaxes(3, 4)
    return dq, dk.astype(k.dtype), dv.astype(v.dtype), None


KVGradients = tuple[jax.Array, jax.Array]
"""Accumulated gradients of keys and values `[blocks, R, K, H, B]`, float32."""


def _backward_block_pair(
    block: tuple[jax.Array, ...], j: jax.Array, k: jax.Array, v: jax.Array, *, is_diagonal: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute gradients of queries, keys and values for a query block and key block `j`."""
    q, key_ranges, lse, gradient, delta = block
    weights = jnp.exp(_compute_scores(q, k[j], key_ranges, j, is_diagonal=is_diagonal) - lse)
    dv = _product("rkth,rkts->rkhs", gradient, weights.astype(q.dtype))
    dweights = _product("rkth,rksh->rkts", gradient, v[j])
    dscores = (weights * (dweights - delta)).astype(q.dtype)
    dk = _product("rkth,rkts->rkhs", q, dscores)
    return _product("rkts,rksh->rkth", dscores, k[j]), dk, dv


def _add_to_block(sums: KVGradients, index: jax.Array, new: Sequence[jax.Array]) -> KVGradients:
    dk, dv = (
        jax.lax.dynamic_update_index_in_dim(total, total[index] + step, index, axis=0)
        for total, step in zip(sums, new, strict=True)
    )
    return dk, dv


_attend.defvjp(_attend_forward, _attend_backward)


EMPTY_LSE = MASK_VALUE / 2
"""Log-sum-exp of an empty set of keys, below any score, so that it contributes nothing."""

STEP_TOKENS = 64
"""Number of tokens that `attend_pages` processes per loop iteration."""

PartialSoftmax = tuple[jax.Array, jax.Array, jax.Array]
"""Partial softmax: weighted sum of values `[..., H]`, maximum score, sum of weights `[...]`."""


def attend_pages(
    q: Float[Array, "B Q N H"],
    keys: Float[Array, "P K page H"],
    values: Float[Array, "P K page H"],
    tables: Int[Array, "B M"],
    limits: Int[Array, "B Q"],
) -> tuple[Float[Array, "B Q N H"], Float[Array, "B Q N"]]:
    """Attend from query i of row b to the positions below `limits[b, i]` in the row's pages.

    The loop ends at the highest limit, so its cost does not depend on the length of the tables.

    Returns:
        Outputs and the log-sum-exp of the scores, float32; 0 and `EMPTY_LSE` for a limit of 0.
    """
    B, H = q.shape[0], q.shape[3]
    K, page = keys.shape[1:3]
    width = max(STEP_TOKENS // page, 1)
    merged, row_limits = group_by_kv_head(q, limits, K)
    tables = jnp.pad(tables, ((0, 0), (0, -tables.shape[1] % width)))

    def gather_pages(pages: jax.Array, ids: jax.Array) -> jax.Array:
        gathered = pages.at[ids].get(mode="clip").swapaxes(1, 2)
        return gathered.reshape(B, K, width * page, H)

    def attend_step(index: jax.Array, acc: PartialSoftmax) -> PartialSoftmax:
        ids = jax.lax.dynamic_slice_in_dim(tables, index * width, width, axis=1)
        product = jnp.einsum(
            "bkqh,bkth->bkqt", merged, gather_pages(keys, ids), preferred_element_type=jnp.float32
        )
        positions = index * width * page + jnp.arange(width * page)
        attention_mask = positions < row_limits[:, None, :, None]
        scores = jnp.where(attention_mask, product * H**-0.5, MASK_VALUE)
        return _update_softmax(acc, scores, gather_pages(values, ids))

    num_steps = -(-limits.max() // (width * page))
    part = jax.lax.fori_loop(0, num_steps, attend_step, _init_softmax(merged.shape))
    return ungroup_queries(*_normalize_softmax(part), q.shape)


def group_by_kv_head(
    q: Float[Array, "B Q N H"], limits: Int[Array, "B Q"], K: int, rows: int = 0
) -> tuple[Float[Array, "B K R H"], Int[Array, "B R"]]:
    """Merge the queries of each KV head into a matrix; also return the limit of each matrix row.

    The matrix is padded to at least `rows` rows. Padding attends to nothing.
    """
    B, Q, N, H = q.shape
    merged = q.reshape(B, Q, K, N // K, H).swapaxes(1, 2).reshape(B, K, -1, H)
    row_limits = jnp.repeat(limits, N // K, axis=1)
    num_padding = max(rows - row_limits.shape[1], 0)
    return (
        jnp.pad(merged, ((0, 0), (0, 0), (0, num_padding), (0, 0))),
        jnp.pad(row_limits, ((0, 0), (0, num_padding))),
    )


def ungroup_queries(
    out: Float[Array, "B K R H"], lse: Float[Array, "B K R"], shape: tuple[int, ...]
) -> tuple[Float[Array, "B Q N H"], Float[Array, "B Q N"]]:
    """Invert `group_by_kv_head` for queries of shape `[B, Q, N, H]`."""
    B, Q, N, H = shape
    K = out.shape[1]
    num_rows = Q * N // K
    out = out[:, :, :num_rows].reshape(B, K, Q, N // K, H).swapaxes(1, 2).reshape(shape)
    return out, lse[:, :, :num_rows].reshape(B, K, Q, -1).swapaxes(1, 2).reshape(B, Q, N)


Past = tuple[tuple[jax.Array, jax.Array], ...]
"""Past tokens of the rows, in consecutive pieces: keys `[B, K, H, w]`, values `[B, K, w, H]`."""


@jax.named_scope("cache")
def gather_past(
    keys: Float[Array, "P K page H"],
    values: Float[Array, "P K page H"],
    tables: Int[Array, "B M"],
) -> Past:
    """Copy the rows' pages into contiguous arrays for a chunk of decoding steps.

    On a CPU, a step takes 1.1 ms over contiguous arrays and 2.5 ms over pages, for 4 layers and 32
    rows of 128 tokens. The past is therefore copied once per chunk, with keys transposed, into
    pieces that each double the length. Sums over a piece do not depend on the total length, so
    neither does a row's result, bit for bit.
    """
    B, M = tables.shape
    K, page, H = keys.shape[1:]

    def gather_piece(first: int, end: int) -> tuple[jax.Array, jax.Array]:
        # [B, pages, K, page, H]
        k, v = (x.at[tables[:, first:end]].get(mode="clip") for x in (keys, values))
        return (
            k.transpose(0, 2, 4, 1, 3).reshape(B, K, H, -1),
            v.swapaxes(1, 2).reshape(B, K, -1, H),
        )

    ends = compute_past_boundaries(M, page)
    return tuple(gather_piece(first, end) for first, end in zip([0, *ends], ends, strict=False))


def compute_past_boundaries(num_pages: int, page_tokens: int) -> list[int]:
    """Return the ends of the past's pieces, in pages: `STEP_TOKENS` and each doubling."""
    ends = [min(max(STEP_TOKENS // page_tokens, 1), num_pages)]
    while ends[-1] < num_pages:
        ends.append(min(2 * ends[-1], num_pages))
    return ends


def attend_past(
    q: Float[Array, "B N H"],
    past: Past,
    limits: Int[Array, " B"],
    keys: Float[Array, "B K C H"],
    values: Float[Array, "B K C H"],
    index: Int[Array, ""],
) -> Float[Array, "B N H"]:
    """Attend from one query per row to the gathered past and `index + 1` tokens of a chunk.

    One softmax covers both, since each operation costs a few microseconds on a CPU.
    """
    B, N, H = q.shape
    K = keys.shape[1]
    grouped = q.reshape(B, K, N // K, H)

    def compute_scores(equation: str, keys: jax.Array, attention_mask: jax.Array) -> jax.Array:
        product = jnp.einsum(equation, grouped, keys, preferred_element_type=jnp.float32)
        return jnp.where(attention_mask, product * H**-0.5, MASK_VALUE)

    local = compute_scores("bkgh,bkch->bkgc", keys, jnp.arange(keys.shape[2]) <= index)
    parts, start = [(local, values)], 0
    for piece, piece_values in past:
        is_past = start + jnp.arange(piece.shape[3]) < limits[:, None]
        piece_scores = compute_scores("bkgh,bkhw->bkgw", piece, is_past[:, None, None])
        parts.append((piece_scores, piece_values))
        start += piece.shape[3]
    return _apply_joint_softmax(parts).reshape(q.shape)


def _apply_joint_softmax(parts: Sequence[tuple[jax.Array, jax.Array]]) -> jax.Array:
    """Average values `[B, K, t, H]`, weighted by one softmax over all scores `[B, K, q, t]`."""
    highest = parts[0][0].max(axis=-1, keepdims=True)
    for scores, _ in parts[1:]:
        highest = jnp.maximum(highest, scores.max(axis=-1, keepdims=True))
    total = average = jnp.zeros(())
    for scores, values in parts:
        weights = jnp.exp(scores - highest)
        total = total + weights.sum(axis=-1, keepdims=True)
        average = average + jnp.einsum(
            "bkqt,bkth->bkqh",
            weights.astype(values.dtype),
            values,
            preferred_element_type=jnp.float32,
        )
    return average / total


def attend_chunk(
    q: Float[Array, "B N H"],
    keys: Float[Array, "B K C H"],
    values: Float[Array, "B K C H"],
    index: Int[Array, ""],
) -> tuple[Float[Array, "B N H"], Float[Array, "B N"]]:
    """Attend from one query per row to `index + 1` tokens; also return the log-sum-exp."""
    B, N, H = q.shape
    K = keys.shape[1]
    grouped = q.reshape(B, K, N // K, H)
    product = jnp.einsum("bkgh,bkch->bkgc", grouped, keys, preferred_element_type=jnp.float32)
    scores = jnp.where(jnp.arange(keys.shape[2]) <= index, product * H**-0.5, MASK_VALUE)
    out, lse = _normalize_softmax(_update_softmax(_init_softmax(grouped.shape), scores, values))
    return out.reshape(q.shape), lse.reshape(B, N)


def merge_attention_outputs(
    out: Float[Array, "*heads H"],
    lse: Float[Array, "*heads"],
    other_out: Float[Array, "*heads H"],
    other_lse: Float[Array, "*heads"],
) -> Float[Array, "*heads H"]:
    """Combine attention outputs over two sets of keys by their log-sum-exp, in float32."""
    highest = jnp.maximum(lse, other_lse)
    weight, other_weight = jnp.exp(lse - highest), jnp.exp(other_lse - highest)
    joined = out * weight[..., None] + other_out * other_weight[..., None]
    return joined / (weight + other_weight)[..., None]


def _init_softmax(shape: tuple[int, ...]) -> PartialSoftmax:
    """Return the initial state of an online softmax, for queries of shape `[..., H]`."""
    zeros = jnp.zeros(shape[:-1], jnp.float32)
    return jnp.zeros(shape, jnp.float32), zeros + EMPTY_LSE, zeros


def _update_softmax(acc: PartialSoftmax, scores: jax.Array, values: jax.Array) -> PartialSoftmax:
    """Update a partial softmax with scores `[B, K, q, t]` and values `[B, K, t, H]`."""
    average, highest, total = acc
    new_highest = jnp.maximum(highest, scores.max(axis=-1))
    weights = jnp.exp(scores - new_highest[..., None])
    correction = jnp.exp(highest - new_highest)
    added = jnp.einsum(
        "bkqt,bkth->bkqh", weights.astype(values.dtype), values, preferred_element_type=jnp.float32
    )
    return (
        average * correction[..., None] + added,
        new_highest,
        total * correction + weights.sum(axis=-1),
    )


def _normalize_softmax(part: PartialSoftmax) -> tuple[jax.Array, jax.Array]:
    """Normalize a partial softmax; return the output and log-sum-exp."""
    average, highest, total = part
    total = jnp.where(total > 0, total, 1.0)
    return average / total[..., None], highest + jnp.log(total)


XLA = AttentionKernels(
    name="xla",
    reason="available on every platform",
    attend_packed=attend_packed,
    attend_pages=attend_pages,
    page_tokens=PAGE_TOKENS["xla"],
    shares_prompts=SHARES_PROMPTS["xla"],
    past=(gather_past, attend_past),
)
"""XLA implementation, available on every platform."""

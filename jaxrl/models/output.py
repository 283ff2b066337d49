"""Output layer: log-probabilities and entropies of selected tokens, in chunks of logits.

Pieces of rows are split over S shards. On each shard, the hidden states of the selected tokens are
compacted to `[S, C, D]`; their logits are computed one chunk at a time, and each block of a chunk
is replaced in place with its results.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl.runtime.sharding import make_piece_sharding

LOGIT_CAPACITIES = (1, 2, 3, 4)
"""Capacities for selected tokens, in quarters of all tokens.

Each capacity that a run uses compiles a program.
"""

Unembed = Callable[[Any, jax.Array], jax.Array]
"""Function from output weights and hidden states `[..., D]` to float32 logits `[..., V]`."""


class TokenSlots(NamedTuple):
    """Assignment of a shard's selected tokens to slots: M tokens, C slots."""

    source: jax.Array  # int32 [S, C], token of each slot
    is_filled: jax.Array  # bool [S, C], the slot holds a token
    slot: jax.Array  # int32 [S, M], slot of each token
    is_selected: jax.Array  # bool [S, M]


def assign_slots(is_selected: jax.Array, num_shards: int, capacity: int) -> TokenSlots:
    """Assign the selected tokens `[b, T]` to slots in order, at most `capacity` per shard."""
    is_selected = is_selected.reshape(num_shards, -1)
    counts = jnp.cumsum(is_selected, axis=1, dtype=jnp.int32)
    source = jnp.argsort(~is_selected, axis=1, stable=True).astype(jnp.int32)
    source = jnp.pad(source, ((0, 0), (0, max(capacity - source.shape[1], 0))))[:, :capacity]
    return TokenSlots(
        source=source,
        is_filled=jnp.arange(capacity) < counts[:, -1:],
        slot=jnp.clip(counts - 1, 0, capacity - 1),
        is_selected=is_selected,
    )


@jax.custom_vjp
def _gather_slots(
    x: jax.Array,
    index: jax.Array,
    is_valid: jax.Array,
    inverse: jax.Array,
    is_inverse_valid: jax.Array,
) -> jax.Array:
    """Gather the values at `index` on each shard; invalid values become 0.

    `inverse` is the inverse index, which lets the backward pass gather instead of scatter.
    """
    gathered = jax.vmap(lambda x, i: x.at[i].get(mode="promise_in_bounds"))(x, index)
    return jnp.where(is_valid.reshape(*is_valid.shape, *[1] * (x.ndim - 2)), gathered, 0)


def _gather_slots_forward(
    x: jax.Array, *slots: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return _gather_slots(x, *slots), slots


def _gather_slots_backward(slots: tuple[jax.Array, ...], gradient: jax.Array) -> tuple[Any, ...]:
    index, is_valid, inverse, is_inverse_valid = slots
    return (
        _gather_slots(gradient, inverse, is_inverse_valid, index, is_valid),
        None,
        None,
        None,
        None,
    )


_gather_slots.defvjp(_gather_slots_forward, _gather_slots_backward)


def gather_tokens(x: jax.Array, slots: TokenSlots) -> jax.Array:
    """Gather the selected tokens `[S, C, ...]` from all tokens `[S, M, ...]`."""
    return _gather_slots(x, slots.source, slots.is_filled, slots.slot, slots.is_selected)


def scatter_tokens(x: jax.Array, slots: TokenSlots) -> jax.Array:
    """Scatter results of selected tokens `[S, C]` to all tokens `[S, M]`, 0 elsewhere."""
    return _gather_slots(x, slots.slot, slots.is_selected, slots.source, slots.is_filled)


def split_evenly(num_tokens: int, max_tokens: int) -> tuple[int, int]:
    """Return the number of chunks of at most `max_tokens`, and the number of tokens per chunk."""
    count = -(-num_tokens // max_tokens)
    return count, -(-num_tokens // count)


def choose_block_tokens(platform: str, num_ids: int) -> int:
    """Return the number of tokens per block.

    On a CPU, which stores a block's logits in memory, the block size limits them to 2 MB. Other
    devices process each chunk as one block.
    """
    return max(2**19 // num_ids, 1) if platform == "cpu" else sys.maxsize


class _TokenStats(NamedTuple):
    """Statistics of tokens `[..., C]`, float32, in nats."""

    logprobs: jax.Array
    entropies: jax.Array
    log_normalizers: jax.Array  # log-sum-exp of the logits


def _compute_stats(logits: jax.Array, targets: jax.Array) -> _TokenStats:
    """Compute statistics of logits `[..., V]`.

    Masked ids have a very low logit, and thus probability 0.
    """
    highest = logits.max(axis=-1, keepdims=True)
    centered = logits - highest
    weights = jnp.exp(centered)
    total = weights.sum(axis=-1)
    # A one-hot sum, unlike a gather, can be split over a sharded vocabulary.
    logprobs = jnp.where(_make_target_mask(logits, targets), centered, 0.0).sum(axis=-1) - jnp.log(
        total
    )
    products = jnp.where(weights > 0, weights * centered, 0.0)
    entropies = jnp.log(total) - products.sum(axis=-1) / total
    return _TokenStats(logprobs, entropies, jnp.log(total) + highest[..., 0])


def _make_target_mask(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Return a mask `[..., V]` of the target of each token."""
    return jnp.arange(logits.shape[-1]) == targets[..., None]


@dataclass(frozen=True, kw_only=True)
class OutputLayer:
    """Output layer, computed chunk by chunk.

    The backward pass recomputes logits, unless there is only one chunk. Each batch shard sums a
    table's gradient over chunks in float32; the sums of the shards are added at the end.

    Attributes:
        unembed: Function that computes the logits.
        mesh: Device mesh; its data, fsdp, expert and context axes are the shards.
        chunk_tokens: Maximum number of tokens per shard whose logits are in memory at a time.
        block_tokens: Maximum number of a chunk's tokens processed at a time.
        entropy_gradient: True if gradients flow through the entropies.
        trains_tables: True if gradients flow to the arrays that `unembed` reads.
    """

    unembed: Unembed
    mesh: Mesh
    chunk_tokens: int
    block_tokens: int
    entropy_gradient: bool
    trains_tables: bool = True

    @jax.named_scope("head")
    def compute_logprobs_and_entropies(
        self, tables: Any, hidden: jax.Array, targets: jax.Array, temperature: float | jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Compute log-probabilities of the targets, and entropies, from hidden states `[S, C, D]`.

        Args:
            tables: Arrays that `unembed` reads.
            hidden: Hidden states in the compute dtype.
            targets: Token ids, int32 `[S, C]`.
            temperature: The distribution is softmax(logits / temperature).
        """
        temperature = jnp.asarray(temperature, jnp.float32)
        return _compute_logprobs_and_entropies(self, tables, hidden, targets, temperature)

    def split_chunks(self, x: jax.Array) -> jax.Array:
        """Reshape `[S, C, ...]` to `[chunks, S, c, ...]`, padded to equal chunks and blocks."""
        count, width = split_evenly(x.shape[1], self.chunk_tokens)
        width += -width % split_evenly(width, self.block_tokens)[0]
        x = jnp.pad(x, [(0, 0), (0, count * width - x.shape[1])] + [(0, 0)] * (x.ndim - 2))
        return x.reshape(x.shape[0], count, width, *x.shape[2:]).swapaxes(0, 1)

    def join_chunks(self, chunks: jax.Array, num_tokens: int) -> jax.Array:
        """Invert `split_chunks`, dropping the padding."""
        x = chunks.swapaxes(0, 1)
        return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :num_tokens]

    def map_blocks(self, compute: Callable[..., Any], out: Any, *inputs: Any) -> Any:
        """Replace each block of `out`, `[S, c, ...]`, with `compute(block, *input_blocks)`."""
        num_tokens = jax.tree.leaves(out)[0].shape[1]
        count, width = split_evenly(num_tokens, self.block_tokens)

        def replace_block(index: jax.Array, out: Any) -> Any:
            slice_block = partial(jax.lax.dynamic_slice_in_dim, slice_size=width, axis=1)
            new = compute(*jax.tree.map(lambda x: slice_block(x, index * width), (out, *inputs)))
            write_block = partial(
                jax.lax.dynamic_update_slice_in_dim, start_index=index * width, axis=1
            )
            return jax.tree.map(write_block, out, new)

        return jax.lax.fori_loop(0, count, replace_block, out)

    def constrain_to_shards(self, x: jax.Array) -> jax.Array:
        """Constrain the leading axis to be sharded; leave the other axes unconstrained."""
        unconstrained = [P.UNCONSTRAINED] * (x.ndim - 1)
        spec = P(*make_piece_sharding(self.mesh).spec, *unconstrained)
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _compute_logprobs_and_entropies(
    layer: OutputLayer, tables: Any, hidden: jax.Array, targets: jax.Array, temperature: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return _compute_logprobs_and_entropies_forward(layer, tables, hidden, targets, temperature)[0]


def _compute_logprobs_and_entropies_forward(
    layer: OutputLayer, tables: Any, hidden: jax.Array, targets: jax.Array, temperature: jax.Array
) -> tuple[tuple[jax.Array, jax.Array], tuple[Any, ...]]:
    saves_products = hidden.shape[1] <= layer.chunk_tokens

    def compute_chunk_logprobs(_: None, xs: tuple[jax.Array, jax.Array]) -> tuple[None, Any]:
        hidden, targets = xs
        products = layer.unembed(tables, hidden)
        compute_stats = lambda _, products, targets: _compute_stats(products / temperature, targets)  # noqa: E731
        empty = _TokenStats(*[jnp.zeros(targets.shape, jnp.float32)] * 3)
        stats = layer.map_blocks(compute_stats, empty, products, targets)
        return None, (stats, products if saves_products else None)

    xs = (layer.split_chunks(hidden), layer.split_chunks(targets))
    _, (stats, products) = jax.lax.scan(compute_chunk_logprobs, None, xs)
    logprobs, entropies = (layer.join_chunks(x, hidden.shape[1]) for x in stats[:2])
    return (logprobs, entropies), (tables, hidden, targets, temperature, stats, products)


def _compute_logprobs_and_entropies_backward(
    layer: OutputLayer, saved: tuple[Any, ...], gradients: tuple[jax.Array, jax.Array]
) -> tuple[Any, jax.Array, None, None]:
    tables, hidden, targets, temperature, stats, products = saved
    trained = tables if layer.trains_tables else {}

    # One vjp per shard keeps the shards' table gradients separate.
    def compute_shard_vjp(hidden: jax.Array, dproducts: jax.Array) -> tuple[Any, jax.Array]:
        compute_logits = lambda trained, hidden: layer.unembed(trained or tables, hidden)  # noqa: E731
        return jax.vjp(compute_logits, trained, hidden)[1](dproducts)

    def compute_block_gradient(
        products: jax.Array, targets: jax.Array, stats: _TokenStats, gradients: Any
    ) -> jax.Array:
        logits = products / temperature
        # With probabilities p and entropy H, the gradient with respect to the logits is
        # `(one_hot - p) * dlogprob - p * (log p + H) * dentropy`.
        dlogprobs, dentropies = (gradient[..., None] for gradient in gradients)
        log_p = logits - stats.log_normalizers[..., None]
        p = jnp.exp(log_p)
        softmax_gradient = dlogprobs
        if layer.entropy_gradient:
            softmax_gradient += dentropies * jnp.where(
                p > 0, log_p + stats.entropies[..., None], 0.0
            )
        dlogits = (
            jnp.where(_make_target_mask(logits, targets), dlogprobs, 0.0) - p * softmax_gradient
        )
        return dlogits / temperature

    def compute_chunk_gradients(sums: Any, xs: tuple[Any, ...]) -> tuple[Any, jax.Array]:
        hidden, targets, stats, products, dstats = xs
        if products is None:
            products = layer.unembed(tables, hidden)
        dproducts = layer.map_blocks(compute_block_gradient, products, targets, stats, dstats)
        dtables, dhidden = jax.vmap(compute_shard_vjp)(hidden, dproducts)
        return jax.tree.map(jnp.add, sums, dtables), dhidden

    # Table gradients accumulate over chunks in float32, and over shards at the end.
    shards = hidden.shape[0]
    zeros = jax.tree.map(
        lambda x: layer.constrain_to_shards(jnp.zeros((shards, *x.shape), jnp.float32)), trained
    )
    dstats = tuple(map(layer.split_chunks, gradients))
    xs = (layer.split_chunks(hidden), layer.split_chunks(targets), stats, products, dstats)
    sums, dhidden = jax.lax.scan(compute_chunk_gradients, zeros, xs)
    dtables = jax.tree.map(lambda total, x: total.sum(axis=0).astype(x.dtype), sums, trained)
    return dtables or None, layer.join_chunks(dhidden, hidden.shape[1]), None, None


_compute_logprobs_and_entropies.defvjp(
    _compute_logprobs_and_entropies_forward, _compute_logprobs_and_entropies_backward
)

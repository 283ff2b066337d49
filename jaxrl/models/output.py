"""Output layer for the wanted tokens: log-probabilities and entropies without all logits.

Pieces of rows are split over S shards. On each shard, the hidden states of the wanted tokens are
compacted to `[S, C, D]`; their logits exist one chunk at a time and are overwritten in blocks.
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

from jaxrl.runtime.sharding import piece_sharding

LOGIT_CAPACITIES = (1, 2, 3, 4)
"""Capacities for wanted tokens, in quarters of all; each one in use compiles a program."""

Unembed = Callable[[Any, jax.Array], jax.Array]
"""Function from tables and hidden states `[..., D]` to float32 logits `[..., V]`."""


class Places(NamedTuple):
    """Slots of each shard's wanted tokens: M tokens, C slots."""

    source: jax.Array  # int32 [S, C], token of each slot
    is_taken: jax.Array  # bool [S, C], the slot holds a token
    place: jax.Array  # int32 [S, M], slot of each token
    is_wanted: jax.Array  # bool [S, M]


def find_places(is_wanted: jax.Array, num_shards: int, room: int) -> Places:
    """Assign slots to the wanted tokens `[b, T]` in order, at most `room` per shard."""
    is_wanted = is_wanted.reshape(num_shards, -1)
    counts = jnp.cumsum(is_wanted, axis=1, dtype=jnp.int32)
    source = jnp.argsort(~is_wanted, axis=1, stable=True).astype(jnp.int32)
    source = jnp.pad(source, ((0, 0), (0, max(room - source.shape[1], 0))))[:, :room]
    return Places(
        source=source,
        is_taken=jnp.arange(room) < counts[:, -1:],
        place=jnp.clip(counts - 1, 0, room - 1),
        is_wanted=is_wanted,
    )


@jax.custom_vjp
def _move(
    x: jax.Array, index: jax.Array, is_valid: jax.Array, back: jax.Array, is_valid_back: jax.Array
) -> jax.Array:
    """Gather at `index` on each shard, with 0 at invalid entries.

    `back` is the inverse index: the gradient is gathered too, not scattered.
    """
    moved = jax.vmap(lambda x, i: x.at[i].get(mode="promise_in_bounds"))(x, index)
    return jnp.where(is_valid.reshape(*is_valid.shape, *[1] * (x.ndim - 2)), moved, 0)


def _move_forward(x: jax.Array, *places: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return _move(x, *places), places


def _move_backward(places: tuple[jax.Array, ...], gradient: jax.Array) -> tuple[Any, ...]:
    index, is_valid, back, is_valid_back = places
    return _move(gradient, back, is_valid_back, index, is_valid), None, None, None, None


_move.defvjp(_move_forward, _move_backward)


def take(x: jax.Array, places: Places) -> jax.Array:
    """Gather the wanted tokens `[S, C, ...]` from tokens `[S, M, ...]`."""
    return _move(x, places.source, places.is_taken, places.place, places.is_wanted)


def put(x: jax.Array, places: Places) -> jax.Array:
    """Scatter results of wanted tokens `[S, C]` to their tokens `[S, M]`, 0 elsewhere."""
    return _move(x, places.place, places.is_wanted, places.source, places.is_taken)


def chunks_of(num_tokens: int, max_tokens: int) -> tuple[int, int]:
    """Return the number of chunks for a shard's tokens, and the tokens of each chunk."""
    count = -(-num_tokens // max_tokens)
    return count, -(-num_tokens // count)


def block_tokens(platform: str, num_ids: int) -> int:
    """Return the tokens per block: on a CPU, which materializes each step, 2 MB of logits."""
    return max(2**19 // num_ids, 1) if platform == "cpu" else sys.maxsize


class _Measures(NamedTuple):
    """Measures of tokens `[..., C]`, float32, in nats."""

    logprobs: jax.Array
    entropies: jax.Array
    log_sums: jax.Array  # log-sum-exp of the logits


def _measure(logits: jax.Array, targets: jax.Array) -> _Measures:
    """Measure logits `[..., V]`; masked ids have a very low logit and contribute exactly 0."""
    highest = logits.max(axis=-1, keepdims=True)
    centred = logits - highest
    weights = jnp.exp(centred)
    total = weights.sum(axis=-1)
    # A sum over one-hot, not a gather: it splits over a sharded vocabulary.
    logprobs = jnp.where(_is_target(logits, targets), centred, 0.0).sum(axis=-1) - jnp.log(total)
    products = jnp.where(weights > 0, weights * centred, 0.0)
    entropies = jnp.log(total) - products.sum(axis=-1) / total
    return _Measures(logprobs, entropies, jnp.log(total) + highest[..., 0])


def _is_target(logits: jax.Array, targets: jax.Array) -> jax.Array:
    return jnp.arange(logits.shape[-1]) == targets[..., None]


@dataclass(frozen=True, kw_only=True)
class OutputLayer:
    """Output layer, computed chunk by chunk.

    The backward pass recomputes logits, unless there is only one chunk. The chunks' contributions
    to a table's gradient are summed in float32, on each batch shard separately until the end.

    Attributes:
        unembed: Function that computes the logits.
        mesh: Device mesh; its data, fsdp, expert and context axes are the shards.
        chunk_tokens: Tokens per shard with logits in memory at a time.
        block_tokens: Tokens of a chunk processed at a time.
        entropy_gradient: True if gradients flow through the entropies.
        trains_tables: True if gradients flow to the tables.
    """

    unembed: Unembed
    mesh: Mesh
    chunk_tokens: int
    block_tokens: int
    entropy_gradient: bool
    trains_tables: bool = True

    @jax.named_scope("head")
    def logprobs_and_entropies(
        self, tables: Any, hidden: jax.Array, targets: jax.Array, temperature: float | jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Score the targets `[S, C]` by the logits of the hidden states `[S, C, D]`.

        Args:
            tables: Arrays that `unembed` reads.
            hidden: Hidden states in the compute dtype.
            targets: Token ids, int32.
            temperature: The distribution is softmax(logits / temperature).
        """
        temperature = jnp.asarray(temperature, jnp.float32)
        return _logprobs_and_entropies(self, tables, hidden, targets, temperature)

    def by_chunk(self, x: jax.Array) -> jax.Array:
        """Reshape `[S, C, ...]` to `[chunks, S, c, ...]`, padded to equal chunks and blocks."""
        count, width = chunks_of(x.shape[1], self.chunk_tokens)
        width += -width % chunks_of(width, self.block_tokens)[0]
        x = jnp.pad(x, [(0, 0), (0, count * width - x.shape[1])] + [(0, 0)] * (x.ndim - 2))
        return x.reshape(x.shape[0], count, width, *x.shape[2:]).swapaxes(0, 1)

    def whole(self, chunks: jax.Array, num_tokens: int) -> jax.Array:
        """Invert `by_chunk`."""
        x = chunks.swapaxes(0, 1)
        return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :num_tokens]

    def by_block(self, compute: Callable[..., Any], into: Any, *given: Any) -> Any:
        """Replace each block of `into` by `compute` of that block and of `given`, `[S, c, ...]`."""
        num_tokens = jax.tree.leaves(into)[0].shape[1]
        count, width = chunks_of(num_tokens, self.block_tokens)

        def block(index: jax.Array, into: Any) -> Any:
            cut = partial(jax.lax.dynamic_slice_in_dim, slice_size=width, axis=1)
            new = compute(*jax.tree.map(lambda x: cut(x, index * width), (into, *given)))
            put = partial(jax.lax.dynamic_update_slice_in_dim, start_index=index * width, axis=1)
            return jax.tree.map(put, into, new)

        return jax.lax.fori_loop(0, count, block, into)

    def on_shards(self, x: jax.Array) -> jax.Array:
        """Shard the leading axis, and leave the others unconstrained."""
        free = [P.UNCONSTRAINED] * (x.ndim - 1)
        spec = P(*piece_sharding(self.mesh).spec, *free)
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _logprobs_and_entropies(
    layer: OutputLayer, tables: Any, hidden: jax.Array, targets: jax.Array, temperature: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return _forward(layer, tables, hidden, targets, temperature)[0]


def _forward(
    layer: OutputLayer, tables: Any, hidden: jax.Array, targets: jax.Array, temperature: jax.Array
) -> tuple[tuple[jax.Array, jax.Array], tuple[Any, ...]]:
    keeps_products = hidden.shape[1] <= layer.chunk_tokens

    def chunk(_: None, xs: tuple[jax.Array, jax.Array]) -> tuple[None, Any]:
        hidden, targets = xs
        products = layer.unembed(tables, hidden)
        measure = lambda _, products, targets: _measure(products / temperature, targets)  # noqa: E731
        empty = _Measures(*[jnp.zeros(targets.shape, jnp.float32)] * 3)
        measures = layer.by_block(measure, empty, products, targets)
        return None, (measures, products if keeps_products else None)

    xs = (layer.by_chunk(hidden), layer.by_chunk(targets))
    _, (measures, products) = jax.lax.scan(chunk, None, xs)
    logprobs, entropies = (layer.whole(x, hidden.shape[1]) for x in measures[:2])
    return (logprobs, entropies), (tables, hidden, targets, temperature, measures, products)


def _backward(
    layer: OutputLayer, saved: tuple[Any, ...], gradients: tuple[jax.Array, jax.Array]
) -> tuple[Any, jax.Array, None, None]:
    tables, hidden, targets, temperature, measures, products = saved
    trained = tables if layer.trains_tables else {}

    # One vjp per shard keeps the shards' table gradients separate.
    def of_shard(hidden: jax.Array, of_products: jax.Array) -> tuple[Any, jax.Array]:
        read = lambda trained, hidden: layer.unembed(trained or tables, hidden)  # noqa: E731
        return jax.vjp(read, trained, hidden)[1](of_products)

    def of_block(
        products: jax.Array, targets: jax.Array, measures: _Measures, gradients: Any
    ) -> jax.Array:
        logits = products / temperature
        # With probabilities p and entropy H, the gradient at the logits is `one_hot - p` times that
        # of the log-probability, plus `-p * (log p + H)` times that of the entropy.
        of_logprobs, of_entropies = (one[..., None] for one in gradients)
        log_p = logits - measures.log_sums[..., None]
        p = jnp.exp(log_p)
        lost = of_logprobs
        if layer.entropy_gradient:
            lost += of_entropies * jnp.where(p > 0, log_p + measures.entropies[..., None], 0.0)
        of_logits = jnp.where(_is_target(logits, targets), of_logprobs, 0.0) - p * lost
        return of_logits / temperature

    def chunk(sums: Any, xs: tuple[Any, ...]) -> tuple[Any, jax.Array]:
        hidden, targets, measures, products, of_measures = xs
        if products is None:
            products = layer.unembed(tables, hidden)
        of_products = layer.by_block(of_block, products, targets, measures, of_measures)
        of_tables, of_hidden = jax.vmap(of_shard)(hidden, of_products)
        return jax.tree.map(jnp.add, sums, of_tables), of_hidden

    # Table gradients accumulate over chunks in float32, and over shards at the end.
    shards = hidden.shape[0]
    zeros = jax.tree.map(
        lambda x: layer.on_shards(jnp.zeros((shards, *x.shape), jnp.float32)), trained
    )
    of_measures = tuple(map(layer.by_chunk, gradients))
    xs = (layer.by_chunk(hidden), layer.by_chunk(targets), measures, products, of_measures)
    sums, of_hidden = jax.lax.scan(chunk, zeros, xs)
    of_tables = jax.tree.map(lambda total, x: total.sum(axis=0).astype(x.dtype), sums, trained)
    return of_tables or None, layer.whole(of_hidden, hidden.shape[1]), None, None


_logprobs_and_entropies.defvjp(_forward, _backward)

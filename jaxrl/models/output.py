"""The output layer of the tokens that count: log-probabilities and entropies without all logits.

Pieces of rows lie on S shards. On each, the hidden states before the wanted tokens are
moved side by side, `[S, C, D]`, and their logits exist chunk by chunk, written over in blocks.
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
"""Shares of the tokens that have room for logits, in quarters; each compiles a program."""

Unembed = Callable[[Any, jax.Array], jax.Array]
"""Tables and hidden states `[..., D]` to float32 logits `[..., V]`."""


class Places(NamedTuple):
    """Places of a shard's wanted tokens; M tokens, room for C."""

    source: jax.Array  # int32 [S, C], of each place its token
    is_taken: jax.Array  # bool [S, C], the place has a token
    place: jax.Array  # int32 [S, M], of each token its place
    is_wanted: jax.Array  # bool [S, M]


def find_places(is_wanted: jax.Array, num_shards: int, room: int) -> Places:
    """Places for the wanted tokens `[b, T]`, in their order; at most `room` of each shard's."""
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
    """Gathers at `index` of each shard, 0 where that is not valid.

    `back` is the inverse: the gradient is moved as well, rather than scattered.
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
    """Gathers the wanted ones `[S, C, ...]` of tokens `[S, M, ...]`."""
    return _move(x, places.source, places.is_taken, places.place, places.is_wanted)


def put(x: jax.Array, places: Places) -> jax.Array:
    """Scatters results of wanted tokens `[S, C]` to their places `[S, M]`, elsewhere 0."""
    return _move(x, places.place, places.is_wanted, places.source, places.is_taken)


def chunks_of(num_tokens: int, max_tokens: int) -> tuple[int, int]:
    """Number of chunks into which so many tokens of a shard are cut, and the tokens of each."""
    count = -(-num_tokens // max_tokens)
    return count, -(-num_tokens // count)


def block_tokens(platform: str, num_ids: int) -> int:
    """Tokens of a block: on a CPU 2 MB of logits, since each step to gradients is an array."""
    return max(2**19 // num_ids, 1) if platform == "cpu" else sys.maxsize


class _Measures(NamedTuple):
    """Measures of tokens `[..., C]`, float32, nats."""

    logprobs: jax.Array
    entropies: jax.Array
    log_sums: jax.Array  # of the exponentials of the logits


def _measure(logits: jax.Array, targets: jax.Array) -> _Measures:
    """Measures `[..., V]` logits; masked ids have a huge negative logit and add exactly nothing."""
    highest = logits.max(axis=-1, keepdims=True)
    centred = logits - highest
    weights = jnp.exp(centred)
    total = weights.sum(axis=-1)
    # A sum over one-hot rather than a gather: it splits over a sharded vocabulary.
    logprobs = jnp.where(_is_target(logits, targets), centred, 0.0).sum(axis=-1) - jnp.log(total)
    products = jnp.where(weights > 0, weights * centred, 0.0)
    entropies = jnp.log(total) - products.sum(axis=-1) / total
    return _Measures(logprobs, entropies, jnp.log(total) + highest[..., 0])


def _is_target(logits: jax.Array, targets: jax.Array) -> jax.Array:
    return jnp.arange(logits.shape[-1]) == targets[..., None]


@dataclass(frozen=True, kw_only=True)
class OutputLayer:
    """Computes the output layer, chunk by chunk.

    In the backward pass logits are computed again, unless one chunk is all. What chunks add to a
    table's gradient is summed in float32, on each shard of the batch alone until the end.

    Attributes:
        unembed: gives the logits.
        mesh: its data, fsdp, expert and context axes are the shards.
        chunk_tokens: of a shard, whose logits are in memory at a time.
        block_tokens: of these, whose logits are treated at a time.
        entropy_gradient: gradients flow through the entropies.
        trains_tables: gradients flow to the tables; else they get none.
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
        """Scores the targets `[S, C]` by the logits of the hidden states `[S, C, D]`.

        Args:
            tables: all that `unembed` reads.
            hidden: in the compute dtype.
            targets: int32.
            temperature: the distribution is softmax(logits / temperature).
        """
        temperature = jnp.asarray(temperature, jnp.float32)
        return _logprobs_and_entropies(self, tables, hidden, targets, temperature)

    def by_chunk(self, x: jax.Array) -> jax.Array:
        """`[S, C, ...]` as `[chunks, S, c, ...]`, padded so that chunks, and blocks, are alike."""
        count, width = chunks_of(x.shape[1], self.chunk_tokens)
        width += -width % chunks_of(width, self.block_tokens)[0]
        x = jnp.pad(x, [(0, 0), (0, count * width - x.shape[1])] + [(0, 0)] * (x.ndim - 2))
        return x.reshape(x.shape[0], count, width, *x.shape[2:]).swapaxes(0, 1)

    def whole(self, chunks: jax.Array, num_tokens: int) -> jax.Array:
        """The inverse of `by_chunk`."""
        x = chunks.swapaxes(0, 1)
        return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :num_tokens]

    def by_block(self, compute: Callable[..., Any], into: Any, *given: Any) -> Any:
        """Replaces blocks of `into` by what `compute` makes of them and `given`, `[S, c, ...]`."""
        num_tokens = jax.tree.leaves(into)[0].shape[1]
        count, width = chunks_of(num_tokens, self.block_tokens)

        def block(index: jax.Array, into: Any) -> Any:
            cut = partial(jax.lax.dynamic_slice_in_dim, slice_size=width, axis=1)
            new = compute(*jax.tree.map(lambda x: cut(x, index * width), (into, *given)))
            put = partial(jax.lax.dynamic_update_slice_in_dim, start_index=index * width, axis=1)
            return jax.tree.map(put, into, new)

        return jax.lax.fori_loop(0, count, block, into)

    def on_shards(self, x: jax.Array) -> jax.Array:
        """The leading axis over the shards, the others wherever they are."""
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

    def of_shard(hidden: jax.Array, of_products: jax.Array) -> tuple[Any, jax.Array]:
        read = lambda trained, hidden: layer.unembed(trained or tables, hidden)  # noqa: E731
        return jax.vjp(read, trained, hidden)[1](of_products)

    def of_block(
        products: jax.Array, targets: jax.Array, measures: _Measures, gradients: Any
    ) -> jax.Array:
        logits = products / temperature
        # With p the probabilities and H the entropy, logits have `one_hot - p` times the gradient
        # of a log-probability, and `-p * (log p + H)` times that of an entropy.
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

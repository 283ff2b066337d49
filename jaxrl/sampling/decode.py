"""The sampler's device programs: prompts in, chunks of tokens out.

All are pure functions of `Slots`, which the engine donates from call to call. What the host
reads after a chunk is returned beside the slots: dispatching the next chunk must not take it away.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh

from jaxrl.models import kv_cache
from jaxrl.models.architecture import Architecture, Cache
from jaxrl.runtime.sharding import batch_sharding, cache_sharding, prefix_sharding, replicated
from jaxrl.sampling import next_token
from jaxrl.types import Params

Array = Any
"""A device array, or its host copy."""

RUNNING, STOP_STRING, END_OF_TURN, OUT_OF_BUDGET = 0, 1, 2, 3
"""Why a row stopped: not at all, a stop string, an end-of-turn id, no tokens left."""


@struct.dataclass
class Slots:
    """B decode slots. A slot with `active` False is free, or waits for an observation."""

    cache: Cache  # [B, K, S, H] a layer
    hidden: jax.Array  # [B, D], normed; the next token's logits come from it
    length: jax.Array  # int32 [B], tokens in the cache
    active: jax.Array  # bool [B]
    budget: jax.Array  # int32 [B], tokens the row may still sample
    stop_state: jax.Array  # int32 [B], of the stop automaton
    key: jax.Array  # uint32 [B, 2], of the sample


@struct.dataclass
class Report:
    """What a chunk of N steps sampled, for r rows."""

    token_ids: Array  # int32 [r, N]; -1 where nothing was sampled
    logprobs: Array  # float32 [r, N], nats
    entropies: Array  # float32 [r, N], nats
    status: jax.Array  # int32 [r], RUNNING or why the row stopped


@struct.dataclass
class StopTables:
    """The stop automaton over token ids and the end-of-turn ids, on the device."""

    next_state: Array  # [states, V]
    is_hit: Array  # bool [states, V]
    is_end: Array  # bool [V]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampler:
    """Static settings of the programs below.

    Attributes:
        config: of the model.
        mesh: over which slots (data, fsdp) and heads (tensor) are split.
        num_tokens: ids the tokenizer knows; larger ones are never sampled.
        num_steps: decoding steps of a chunk.
        dtype: of weights, activations and caches.
    """

    config: Architecture
    mesh: Mesh
    num_tokens: int
    num_steps: int
    dtype: jnp.dtype

    def empty_slots(self, num_slots: int, capacity: int) -> Slots:
        """Free slots with caches of `capacity` tokens."""
        zeros = jnp.zeros(num_slots, jnp.int32)
        return self._constrain(
            Slots(
                cache=kv_cache.allocate(self.config, num_slots, capacity, self.dtype),
                hidden=jnp.zeros((num_slots, self.config.width), self.dtype),
                length=zeros,
                active=zeros.astype(bool),
                budget=zeros,
                stop_state=zeros,
                key=jnp.zeros((num_slots, 2), jnp.uint32),
            )
        )

    def _constrain(self, slots: Slots) -> Slots:
        """Slots and heads stay split over the mesh, whatever the compiler would prefer."""
        by_slot = batch_sharding(self.mesh)
        small = jax.tree.map(
            lambda x: jax.lax.with_sharding_constraint(x, by_slot),
            dataclasses.replace(slots, cache=()),
        )
        constrain = lambda x: jax.lax.with_sharding_constraint(x, cache_sharding(self.mesh))  # noqa: E731
        return dataclasses.replace(small, cache=jax.tree.map(constrain, slots.cache))

    def prefill(
        self, weights: Params, token_ids: jax.Array, lengths: jax.Array
    ) -> tuple[jax.Array, Cache]:
        """Reads P prompts `[P, C]` once each: hidden states `[P, D]` and their caches."""
        by_row = batch_sharding(self.mesh)
        token_ids = jax.lax.with_sharding_constraint(token_ids, by_row)
        start = jnp.zeros(token_ids.shape[0], jnp.int32)
        hidden, prefix = self.config.extend(weights, None, token_ids, start, lengths)
        shardings = (replicated(self.mesh), prefix_sharding(self.mesh))
        hidden, prefix = jax.lax.with_sharding_constraint((hidden, prefix), shardings)
        return hidden, prefix

    def place(
        self,
        slots: Slots,
        hidden: jax.Array,
        prefix: Cache,
        lengths: jax.Array,
        source: jax.Array,
        budget: jax.Array,
        key: jax.Array,
    ) -> Slots:
        """Starts samples of prefilled prompts.

        `source` `[B]` names the prompt each slot gets, -1 for slots left as they are; `lengths`
        `[P]` are the prompts'; `budget` `[B]` and `key` `[B, 2]` count where `source` is not -1.
        """
        is_new = source >= 0
        prompt = jnp.maximum(source, 0)
        cache = tuple(
            (
                kv_cache.place_prefix(keys, new_keys, source),
                kv_cache.place_prefix(values, new_values, source),
            )
            for (keys, values), (new_keys, new_values) in zip(slots.cache, prefix, strict=True)
        )
        return self._constrain(
            Slots(
                cache=cache,
                hidden=jnp.where(is_new[:, None], hidden[prompt], slots.hidden),
                length=jnp.where(is_new, lengths[prompt], slots.length),
                active=is_new | slots.active,
                budget=jnp.where(is_new, budget, slots.budget),
                stop_state=jnp.where(is_new, 0, slots.stop_state),
                key=jnp.where(is_new[:, None], key, slots.key),
            )
        )

    def extend(
        self,
        weights: Params,
        slots: Slots,
        rows: jax.Array,
        token_ids: jax.Array,
        lengths: jax.Array,
        budget: jax.Array,
    ) -> Slots:
        """Appends tokens that were not sampled to waiting rows and lets them go on.

        `rows` `[shards, r]` as in `kv_cache`; `token_ids` `[shards * r, C]` with `lengths` valid
        ones each; `budget` `[shards * r]` is what the row may sample from here.
        """
        start = kv_cache.take_rows(slots.length, rows)
        past = jax.tree.map(lambda x: kv_cache.take_rows(x, rows), slots.cache)
        hidden, new = self.config.extend(weights, past, token_ids, start, lengths)
        put = lambda old, x: kv_cache.put_rows(old, rows, x)  # noqa: E731
        return self._constrain(
            Slots(
                cache=jax.tree.map(
                    lambda old, x: kv_cache.write_window(old, rows, start, x), slots.cache, new
                ),
                hidden=put(slots.hidden, hidden),
                length=put(slots.length, start + lengths),
                active=put(slots.active, jnp.ones_like(start, bool)),
                budget=put(slots.budget, budget),
                stop_state=put(slots.stop_state, jnp.zeros_like(start)),
                key=slots.key,
            )
        )

    def decode_chunk(
        self,
        weights: Params,
        slots: Slots,
        rows: jax.Array,
        stops: StopTables,
        temperature: jax.Array,
        length: int | None = None,
        top_p: jax.Array | None = None,
    ) -> tuple[Slots, Report]:
        """Samples up to `num_steps` tokens in `rows`; other slots are left alone.

        `length` is static: none of the rows holds more tokens, so no more of the cache is read;
        None stands for its capacity. `temperature` and `top_p` are those of `next_token.sample`.

        The number of steps is static, because a GPU runs a loop of known length without asking the
        host after each turn of it; rows that stop early are masked.
        """
        length = slots.cache[0][0].shape[2] if length is None else length
        window = kv_cache.open_window(slots.cache, rows, length, self.num_steps)
        small = jax.tree.map(
            lambda x: kv_cache.take_rows(x, rows), dataclasses.replace(slots, cache=())
        )
        cached, num_rows = small.length, small.length.shape[0]
        place = jnp.arange(length + self.num_steps)
        is_past = (place < length) & (place < cached[:, None])
        # While a row runs, its step i draws the token at position cached + i.
        draws = cached + jnp.arange(self.num_steps)[:, None]
        uniforms = jax.vmap(next_token.uniforms, in_axes=(None, 0))(small.key, draws)
        report = Report(
            token_ids=jnp.full((self.num_steps, num_rows), -1, jnp.int32),
            logprobs=jnp.zeros((self.num_steps, num_rows), jnp.float32),
            entropies=jnp.zeros((self.num_steps, num_rows), jnp.float32),
            status=jnp.zeros(num_rows, jnp.int32),
        )

        def step(
            index: jax.Array, carry: tuple[Slots, Cache, Report]
        ) -> tuple[Slots, Cache, Report]:
            small, window, report = carry
            logits = self.config.unembed(weights, small.hidden, num_tokens=self.num_tokens)
            token, logprob, entropy = next_token.sample(logits, uniforms[index], temperature, top_p)
            budget = small.budget - small.active
            status = _status(stops, small.stop_state, token, budget)
            running = small.active & (status == RUNNING)
            report = Report(
                token_ids=report.token_ids.at[index].set(jnp.where(small.active, token, -1)),
                logprobs=report.logprobs.at[index].set(jnp.where(small.active, logprob, 0.0)),
                entropies=report.entropies.at[index].set(jnp.where(small.active, entropy, 0.0)),
                status=jnp.where(small.active, status, report.status),
            )
            valid = is_past | ((place >= length) & (place <= length + index))
            hidden, window = self.config.decode(
                weights, window, valid, length + index, token, small.length
            )
            small = dataclasses.replace(
                small,
                hidden=jnp.where(running[:, None], hidden, small.hidden),
                length=small.length + running,
                active=running,
                budget=budget,
                stop_state=stops.next_state[small.stop_state, token].astype(jnp.int32),
            )
            return small, window, report

        small, window, report = jax.lax.fori_loop(0, self.num_steps, step, (small, window, report))
        put = lambda old, x: kv_cache.put_rows(old, rows, x)  # noqa: E731
        cache = jax.tree.map(
            lambda old, x: kv_cache.write_window(old, rows, cached, x),
            slots.cache,
            kv_cache.window_tail(window, self.num_steps),
        )
        updated = jax.tree.map(put, dataclasses.replace(slots, cache=()), small)
        slots = dataclasses.replace(updated, cache=cache)
        by_row = Report(
            token_ids=report.token_ids.T,
            logprobs=report.logprobs.T,
            entropies=report.entropies.T,
            status=report.status,
        )
        return self._constrain(slots), by_row


def _status(
    stops: StopTables, stop_state: jax.Array, token: jax.Array, budget: jax.Array
) -> jax.Array:
    """Why each row stops at this token; a stop string counts before an empty budget."""
    status = jnp.where(budget <= 0, OUT_OF_BUDGET, RUNNING)
    status = jnp.where(stops.is_end[token], END_OF_TURN, status)
    return jnp.where(stops.is_hit[stop_state, token], STOP_STRING, status)

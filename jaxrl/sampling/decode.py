"""Device programs of the sampler: prefill tokens into the cache, and decode chunks of tokens.

Each program is a pure function of the cache, which the engine donates. The cache holds the keys and
values of attention layers in pages, and the states of recurrent layers in slots. The *pending*
token of a row is the last token of its prompt, its samples or an observation. It is not in the
cache yet: a decoding step reads it and samples the next token.

Arrays are ordered by the S shards (the mesh's data, fsdp, expert and context axes), each with the
same number of rows, pages, slots and tokens. Their indices are local to the shard.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl.models import kv_cache
from jaxrl.models.architecture import Architecture
from jaxrl.models.attention.choice import choose_prefill_block_tokens
from jaxrl.models.attention.kernels import AttentionKernels
from jaxrl.models.attention.reference import attend_chunk, merge_attention_outputs
from jaxrl.models.aux_arrays import AuxArrays, TokenArraySpec
from jaxrl.models.kv_cache import Cache, Pages
from jaxrl.models.layers import LayerScan, SamplerLayerScan, prepare_sampler_weights
from jaxrl.models.recurrence import Advance, State, init_state
from jaxrl.runtime.sharding import (
    PIECE_AXES,
    cache_sharding,
    count_piece_shards,
    make_piece_sharding,
)
from jaxrl.sampling import next_token
from jaxrl.types import Params

Array = Any
"""Device array, or its copy on the host."""

RUNNING, STOP_STRING, END_OF_TURN, OUT_OF_BUDGET = 0, 1, 2, 3
"""Status of a row: running, or stopped by a stop string, an end-of-turn id or the token budget."""

_PAGES, _ROWS, _QUERIES = P(PIECE_AXES, "tensor"), P(PIECE_AXES), P(PIECE_AXES, None, "tensor")


@struct.dataclass
class SamplerCache:
    """Device cache: keys, values and states of all rows and cached prompts."""

    pages: Cache
    states: tuple[State, ...] = ()  # [S * slots, heads, ...] of each recurrent layer


@struct.dataclass
class CacheIndices:
    """Indices of pages and state slots to copy or swap.

    An index beyond the last page or slot means "none".
    """

    pages: Array  # int32 [S * n]
    state_slots: Array | None = None  # int32 [S * m]; None without recurrent layers


@struct.dataclass
class DecodeState:
    """State of all rows between two decoding steps."""

    pending: Array  # int32 [r], token to read next
    length: Array  # int32 [r], tokens in the cache
    budget: Array  # int32 [r], tokens the row may still sample
    stop_state: Array  # int32 [r], of the stop automaton
    active: Array  # bool [r], True if not stopped


@struct.dataclass
class DecodeRows:
    """Rows to decode in a chunk, as sent by the host."""

    source: Array  # int32 [r], index of the row in the last chunk; -1 to start from `state`
    state: DecodeState  # state of rows that start or resume after an observation
    tables: Array  # int32 [r, M], block tables
    keys: Array  # uint32 [r, 2], random keys of the samples
    offset: Array | None = None  # int32 [r], position offsets; None without a tower
    state_slots: Array | None = None  # int32 [r]; None without recurrent layers


@struct.dataclass
class PrefillBlocks:
    """Tokens to prefill: each block has up to Q (`Programs.block_tokens`) tokens of one row."""

    token_ids: Array  # int32 [b, Q]
    start: Array  # int32 [b], position of the first token
    counts: Array  # int32 [b], tokens without padding
    tables: Array  # int32 [b, M], block table of the row
    # [b, Q, ...] of `Tower.input_arrays`; {} without a tower
    token_arrays: dict[str, Array] = dataclasses.field(default_factory=dict)
    state_slots: Array | None = None  # int32 [b]; None without recurrent layers


@struct.dataclass
class ChunkReport:
    """Result of a chunk of C steps for r rows."""

    token_ids: Array  # int32 [r, C]; -1 where nothing was sampled
    logprobs: Array  # float32 [r, C], nats
    entropies: Array  # float32 [r, C], nats
    status: Array  # int32 [r], RUNNING or the reason the row stopped
    stop_state: Array  # int32 [r], of the stop automaton, if the row is running
    # [r, C, ...] of `Programs.recorded_specs`. Step i has the values of the token that the step
    # reads, which precedes the sampled token.
    recorded: dict[str, Array]


@struct.dataclass
class PackedReport:
    """Report packed into one array, for a single transfer to the host."""

    values: Array  # int32 [r, 3 * C + 2]: token ids, log-probabilities, entropies, status, state
    recorded: dict[str, Array]  # see `ChunkReport`


@struct.dataclass
class StopTables:
    """Stop automaton over token ids, and the end-of-turn ids, on the device."""

    next_state: Array  # [states, V]
    is_hit: Array  # bool [states, V]
    is_eos: Array  # bool [V]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Programs:
    """Programs of the sampler, with the settings for which they are compiled.

    Attributes:
        architecture: Model architecture.
        mesh: Mesh that splits rows and pages (data, fsdp, expert, context) and heads (tensor).
        kernels: Attention kernels.
        num_tokens: Vocabulary size of the tokenizer; larger ids are never sampled.
        num_steps: Decoding steps per chunk.
        num_rows: Maximum number of rows in a chunk.
        dtype: Type of weights, activations and pages.
        records: True if the programs return the arrays of `Architecture.recorded_specs`.
        scan_layers: True to loop over stacked layers, which compile once; False to unroll them.
    """

    architecture: Architecture
    mesh: Mesh
    kernels: AttentionKernels
    num_tokens: int
    num_steps: int
    num_rows: int
    dtype: jnp.dtype
    records: bool = False
    scan_layers: bool = False

    @property
    def recorded_specs(self) -> Mapping[str, TokenArraySpec]:
        """Return the specs of the per-token arrays that the programs record."""
        return self.architecture.recorded_specs if self.records else {}

    def convert_params(self, params: Params) -> Params:
        """Convert all parameters of the policy to the layout and dtype used for decoding."""
        weights = self.architecture.prepare_decoding_weights(params, self.dtype)
        return prepare_sampler_weights(
            weights, scan=self.scan_layers, stacks=self.architecture.partial_layer_indices
        )

    def init_cache(self, num_pages: int, page_tokens: int, num_states: int = 0) -> SamplerCache:
        """Return a cache of zeros."""
        model = self.architecture
        pages = kv_cache.allocate_pages(
            model, num_pages, page_tokens, self.dtype, scan_layers=self.scan_layers
        )
        states = tuple(
            init_state(model.state_specs, num_states) for _ in range(model.num_recurrent_layers)
        )
        return self._constrain_cache(SamplerCache(pages=pages, states=states))

    def init_decode_state(self) -> DecodeState:
        """Return a decode state in which no row is running."""
        zeros = jnp.zeros(self.num_rows, jnp.int32)
        state = DecodeState(
            pending=zeros, length=zeros, budget=zeros, stop_state=zeros, active=zeros.astype(bool)
        )
        return self._constrain_rows(state)

    def init_embeds(self, num_units: int) -> Array | None:
        """Return zeros in the shape of the result of `embed`; None without a tower."""
        if self.architecture.tower is None:
            return None
        values = (1 + self.architecture.tower.num_deepstack_layers) * self.architecture.width
        return self._constrain_rows(
            jnp.zeros((count_piece_shards(self.mesh), num_units, values), self.dtype)
        )

    @cached_property
    def block_tokens(self) -> int:
        """Return the number of tokens per prefill block."""
        platform, model = self.mesh.devices.flat[0].platform, self.architecture
        return choose_prefill_block_tokens(platform, model.num_heads, model.num_kv_heads)

    def _constrain_cache(self, cache: Any) -> Any:
        """Constrain the sharding of the cache, so that the compiler does not change it."""
        return jax.lax.with_sharding_constraint(cache, cache_sharding(self.mesh))

    def _constrain_rows(self, values: Any) -> Any:
        return jax.lax.with_sharding_constraint(values, make_piece_sharding(self.mesh))

    def _shard_map(self, function: Callable[..., Any], specs: Any, out_specs: Any) -> Any:
        """Wrap a function in `shard_map` over the shards; page indices are local to a shard."""
        if self.mesh.size == 1:
            return function
        return jax.shard_map(
            function, mesh=self.mesh, in_specs=specs, out_specs=out_specs, check_vma=False
        )

    @property
    def _chunk_spec(self) -> P:
        """Return the sharding of a chunk: `[r, K, C, H]`, or `[n, r, K, C, H]` for n layers.

        On a CPU, a layer axis of size 1 would add copies that take an eighth of the decoding time.
        """
        return P(None, *_PAGES) if self.scan_layers else _PAGES

    @property
    def _layers_per_entry(self) -> int:
        """Return the number of layers in each (keys, values) pair of the cache."""
        return self.architecture.num_attention_layers if self.scan_layers else 1

    def _make_paged_attention(self) -> Callable[..., tuple[jax.Array, jax.Array]]:
        """Return a function that attends to a layer's pages; its last argument is the layer."""

        def attend_layer(
            q: jax.Array,
            keys: jax.Array,
            values: jax.Array,
            tables: jax.Array,
            limits: jax.Array,
            layer: Any,
        ) -> tuple[jax.Array, jax.Array]:
            keys, _ = kv_cache.view_layer(keys, tables, layer, self._layers_per_entry)
            values, tables = kv_cache.view_layer(values, tables, layer, self._layers_per_entry)
            return self.kernels.attend_pages(q, keys, values, tables, limits)

        return self._shard_map(
            attend_layer, (_QUERIES, _PAGES, _PAGES, _ROWS, _ROWS, P()), (_QUERIES,) * 2
        )

    def embed(self, weights: Params, patches: Array, coords: Array, num_units: int) -> Array:
        """Embed attachments, for `prefill` to use in place of their token embeddings.

        Args:
            weights: Result of `convert_params`.
            patches: float32 [S, P, values], patches of each shard.
            coords: int32 [S, P, W], see `Tower.encode`.
            num_units: Capacity of each shard, in attachment tokens.

        Returns:
            `[S, num_units, E]`, padded at the end; see `Tower.encode`.
        """
        tower = self.architecture.tower
        assert tower is not None
        patches, coords = self._constrain_rows((patches, coords))
        layer_scan = LayerScan(scan=self.scan_layers)
        attachment_embeds = tower.encode(weights[tower.entry], patches, coords, layer_scan)
        return self._constrain_rows(
            jnp.pad(
                attachment_embeds, ((0, 0), (0, num_units - attachment_embeds.shape[1]), (0, 0))
            )
        )

    def prefill(
        self,
        weights: Params,
        cache: SamplerCache,
        blocks: PrefillBlocks,
        attachment_embeds: Array | None = None,
    ) -> tuple[SamplerCache, dict[str, Array]]:
        """Prefill tokens that were not sampled: prompts and observations.

        A block may continue another block of the same call: each attention layer writes all keys
        and values before it reads any, and a recurrent layer processes the blocks in order.
        `attachment_embeds` is the result of `embed` for these tokens. A model with a tower requires
        this argument even if there are no attachments.

        Returns:
            The cache, and the arrays of `recorded`, `[b, Q, ...]`.
        """
        blocks = self._constrain_rows(blocks)
        index = jnp.arange(self.block_tokens)
        positions = blocks.start[:, None] + index
        limits = jnp.where(index < blocks.counts[:, None], positions + 1, 0)
        tables, attend_layer = blocks.tables, self._make_paged_attention()

        def write_layer(pages: jax.Array, tables: jax.Array, layer: Any, *new: Any) -> jax.Array:
            layer_pages, layer_tables = kv_cache.view_layer(
                pages, tables, layer, self._layers_per_entry
            )
            return kv_cache.write_tokens(layer_pages, layer_tables, *new).reshape(pages.shape)

        write = self._shard_map(write_layer, (_PAGES, _ROWS, P(), _ROWS, _ROWS, _PAGES), _PAGES)

        def attend(
            layer: Any, pages: Pages, past: None, q: jax.Array, k: jax.Array, v: jax.Array
        ) -> tuple[jax.Array, Pages]:
            q, k, v = (x.reshape(-1, self.block_tokens, *x.shape[1:]) for x in (q, k, v))
            keys, values = (
                write(before, tables, layer, blocks.start, blocks.counts, new.swapaxes(1, 2))
                for before, new in zip(pages, (k, v), strict=True)
            )
            out, _ = attend_layer(q, keys, values, tables, limits, layer)
            return out.astype(q.dtype).reshape(-1, *q.shape[2:]), (keys, values)

        inputs = {name: x.reshape(-1, *x.shape[2:]) for name, x in blocks.token_arrays.items()}
        aux = AuxArrays(inputs=inputs, attached=attachment_embeds, records=self.records)
        layer_scan = SamplerLayerScan(
            attend,
            cache.pages,
            aux,
            run_recurrence=partial(self._scan_blocks, blocks),
            states=cache.states,
            recurrent_module=self.architecture.recurrent_module,
        )
        token_ids = blocks.token_ids.reshape(-1)
        self.architecture.compute_sampler_hidden_states(
            weights, token_ids, positions.reshape(-1), layer_scan
        )
        recorded = self._check_recorded_arrays(layer_scan.aux, token_ids.size)
        recorded = {
            name: x.reshape(-1, self.block_tokens, *x.shape[1:]) for name, x in recorded.items()
        }
        cache = SamplerCache(pages=layer_scan.cache, states=layer_scan.states)
        return self._constrain_cache(cache), recorded

    def _scan_blocks(
        self, blocks: PrefillBlocks, states: State, advance: Advance, inputs: Any
    ) -> tuple[jax.Array, State]:
        """Run a recurrence over the token blocks of each row, in order; see `CachedRecurrence`."""
        shards, size = count_piece_shards(self.mesh), self.block_tokens
        assert blocks.state_slots is not None

        def step(states: State, block: Any) -> tuple[State, jax.Array]:
            inputs, slots, start, counts = block
            state = self._read_states(states, slots, is_new=start == 0)
            out, state = advance(state, inputs, jnp.full((shards, size), -1), counts)
            return self._write_states(states, slots, state), out

        inputs = jax.tree.map(lambda x: x.reshape(-1, size, *x.shape[1:]), inputs)
        steps = jax.tree.map(
            lambda x: x.reshape(shards, -1, *x.shape[1:]).swapaxes(0, 1),
            (inputs, blocks.state_slots, blocks.start, blocks.counts),
        )
        states, out = jax.lax.scan(step, states, steps)
        out = out.swapaxes(0, 1).reshape(-1, *out.shape[3:])
        return self._constrain_rows(out), states

    def _check_recorded_arrays(self, aux: AuxArrays, num_tokens: int) -> dict[str, Array]:
        """Validate and return the arrays `[M, ...]` recorded by a pass over M tokens."""
        for name, spec in self.recorded_specs.items():
            expected = (num_tokens, *spec.shape), spec.dtype
            array = aux.recorded.get(name)
            if array is None or (array.shape, array.dtype) != expected:
                actual = "nothing" if array is None else f"{array.dtype} {list(array.shape)}"
                raise ValueError(
                    f"config.model.replay is True, but a pass of "
                    f"{type(self.architecture).__name__} over {num_tokens} tokens stores {actual} "
                    f"as {name!r} in `layer_scan.aux.recorded`; expected {spec.dtype} "
                    f"{list(expected[0])}. Correct the pass, or set the key to False."
                )
        return {name: self._constrain_rows(aux.recorded[name]) for name in self.recorded_specs}

    def decode_chunk(
        self,
        weights: Params,
        cache: SamplerCache,
        last: DecodeState,
        rows: DecodeRows,
        stops: StopTables,
        temperature: jax.Array,
        top_p: jax.Array,
        kind: str,
        past_pages: int | None = None,
    ) -> tuple[SamplerCache, DecodeState, ChunkReport]:
        """Sample up to `num_steps` tokens in each row.

        The past is read-only during the chunk. New keys and values go to a separate buffer, at an
        index shared by all rows, and are written to the pages at the end. States are read from
        their slots at the start and written back at the end.

        The number of steps is static because a GPU runs a loop of known length without
        synchronizing with the host after each iteration; rows that stop early are masked.

        Args:
            weights: Result of `convert_params`.
            cache: Cache of the rows.
            last: State after the previous chunk, for `num_rows` rows.
            rows: Rows to decode.
            stops: Stop automaton and end-of-turn ids.
            temperature: See `next_token.sample_tokens`.
            top_p: See `next_token.sample_tokens`.
            kind: Sampling method, static; see `next_token.sample_tokens`.
            past_pages: Static number of leading pages of each block table that contain all tokens
                to read; None for all pages. Kernels that copy the past copy only these pages.
                Copying the pages of the longest possible trajectory took a third of a chunk's time.
        """
        # Take each row's state from the host or from the previous chunk.
        rows = self._constrain_rows(rows)
        state = self._merge_states(last, rows)
        cached, num_rows = state.length, state.length.shape[0]
        offset = rows.offset
        # Step i of a running row samples the token at position cached + 1 + i.
        sample_positions = cached + 1 + jnp.arange(self.num_steps)[:, None]
        uniforms = jax.vmap(next_token.sample_uniforms, in_axes=(None, 0))(
            rows.keys, sample_positions
        )

        # Keys and values of the chunk, and its report, start empty.
        shape = (
            num_rows,
            self.architecture.num_kv_heads,
            self.num_steps,
            self.architecture.head_dim,
        )
        empty = jnp.zeros(
            (self._layers_per_entry, *shape) if self.scan_layers else shape, self.dtype
        )
        chunk: Cache = jax.lax.with_sharding_constraint(
            tuple((empty, empty) for _ in cache.pages), NamedSharding(self.mesh, self._chunk_spec)
        )
        report = ChunkReport(
            token_ids=jnp.full((self.num_steps, num_rows), -1, jnp.int32),
            logprobs=jnp.zeros((self.num_steps, num_rows), jnp.float32),
            entropies=jnp.zeros((self.num_steps, num_rows), jnp.float32),
            status=jnp.zeros(num_rows, jnp.int32),
            stop_state=state.stop_state,
            recorded={
                name: jnp.full((self.num_steps, num_rows, *array.shape), array.fill, array.dtype)
                for name, array in self.recorded_specs.items()
            },
        )

        def step(
            attend_layer: Callable[..., jax.Array],
            past: tuple[Any, ...],
            index: jax.Array,
            carry: tuple[DecodeState, SamplerCache, ChunkReport],
        ) -> tuple[DecodeState, SamplerCache, ChunkReport]:
            state, chunk, report = carry
            limits = jnp.where(state.active, cached, 0)  # stopped rows read nothing
            position = state.length if offset is None else state.length + offset
            hidden, chunk, recorded = self._forward_pending(
                weights, state, position, limits, chunk, index, attend_layer, past
            )
            logits = self.architecture.unembed(weights, hidden, num_tokens=self.num_tokens)
            token, logprob, entropy = next_token.sample_tokens(
                logits, uniforms[index], temperature, top_p, kind=kind
            )
            budget = state.budget - state.active
            # Order of precedence: stop string, end-of-turn id, empty budget.
            status = jnp.where(budget <= 0, OUT_OF_BUDGET, RUNNING)
            status = jnp.where(stops.is_eos[token], END_OF_TURN, status)
            status = jnp.where(stops.is_hit[state.stop_state, token], STOP_STRING, status)
            stop_state = stops.next_state[state.stop_state, token].astype(jnp.int32)
            report = ChunkReport(
                token_ids=report.token_ids.at[index].set(jnp.where(state.active, token, -1)),
                logprobs=report.logprobs.at[index].set(jnp.where(state.active, logprob, 0.0)),
                entropies=report.entropies.at[index].set(jnp.where(state.active, entropy, 0.0)),
                status=jnp.where(state.active, status, report.status),
                stop_state=jnp.where(state.active, stop_state, report.stop_state),
                recorded={
                    name: report.recorded[name].at[index].set(array)
                    for name, array in recorded.items()
                },
            )
            state = DecodeState(
                pending=jnp.where(state.active, token, state.pending),
                length=state.length + state.active,
                budget=budget,
                stop_state=stop_state,
                active=state.active & (status == RUNNING),
            )
            return state, chunk, report

        # Run the steps, then write the chunk to the pages and put rows first in the report.
        loop_body = partial(
            step, *self._make_chunk_attention(cache.pages, rows.tables[:, :past_pages])
        )
        row_states = tuple(
            self._read_states(before, rows.state_slots, is_new=cached == 0)
            for before in cache.states
        )
        row_cache = SamplerCache(pages=chunk, states=row_states)
        carry = (state, row_cache, report)
        state, row_cache, report = jax.lax.fori_loop(0, self.num_steps, loop_body, carry)
        write = self._shard_map(
            _write_chunk, (_PAGES, _ROWS, _ROWS, _ROWS, self._chunk_spec), _PAGES
        )
        pages = jax.tree.map(
            lambda pages, new: write(pages, rows.tables, cached, state.length - cached, new),
            cache.pages,
            row_cache.pages,
        )
        states = tuple(
            self._write_states(before, rows.state_slots, after)
            for before, after in zip(cache.states, row_cache.states, strict=True)
        )
        cache = SamplerCache(pages=pages, states=states)
        by_row = dataclasses.replace(
            report,
            token_ids=report.token_ids.T,
            logprobs=report.logprobs.T,
            entropies=report.entropies.T,
            recorded={
                n: self._constrain_rows(x.swapaxes(0, 1)) for n, x in report.recorded.items()
            },
        )
        return self._constrain_cache(cache), self._pad_state(state), by_row

    def decode_packed(self, *arguments: Any) -> tuple[SamplerCache, DecodeState, PackedReport]:
        """Run `decode_chunk` and pack its report for the host."""
        cache, state, report = self.decode_chunk(*arguments)
        floats = [report.logprobs, report.entropies]
        ints = [jax.lax.bitcast_convert_type(array, jnp.int32) for array in floats]
        ends = [report.status[:, None], report.stop_state[:, None]]
        values = self._constrain_rows(jnp.concatenate([report.token_ids, *ints, *ends], axis=1))
        return cache, state, PackedReport(values=values, recorded=report.recorded)

    def _forward_pending(
        self,
        weights: Params,
        state: DecodeState,
        positions: jax.Array,
        limits: jax.Array,
        chunk: SamplerCache,
        index: jax.Array,
        attend_layer: Callable[..., jax.Array],
        past: tuple[Any, ...],
    ) -> tuple[jax.Array, SamplerCache, dict[str, Array]]:
        """Process pending tokens; return hidden states, the updated chunk, and recorded arrays."""

        def attend(
            layer: Any, chunk: Pages, past: Any, q: jax.Array, k: jax.Array, v: jax.Array
        ) -> tuple[jax.Array, Pages]:
            added = [
                self._write_to_chunk(old, new, layer, index)
                for old, new in zip(chunk, (k, v), strict=True)
            ]
            (keys, values), layer_kv = zip(*added, strict=True)
            return attend_layer(layer, past, q, limits, *layer_kv, index).astype(q.dtype), (
                keys,
                values,
            )

        def run_recurrence(states: State, advance: Advance, inputs: Any) -> tuple[jax.Array, State]:
            inputs = jax.tree.map(lambda x: x[:, None], inputs)
            starts = jnp.full((len(limits), 1), -1)
            out, states = advance(states, inputs, starts, state.active.astype(jnp.int32))
            return out[:, 0], states

        layer_scan = SamplerLayerScan(
            attend,
            chunk.pages,
            AuxArrays(records=self.records),
            past,
            run_recurrence=run_recurrence,
            states=chunk.states,
            recurrent_module=self.architecture.recurrent_module,
        )
        hidden = self.architecture.compute_sampler_hidden_states(
            weights, state.pending, positions, layer_scan
        )
        chunk = SamplerCache(pages=layer_scan.cache, states=layer_scan.states)
        return hidden, chunk, self._check_recorded_arrays(layer_scan.aux, state.pending.size)

    def _write_to_chunk(
        self, old: jax.Array, new: jax.Array, layer: Any, index: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Write a step's keys or values to the chunk; return the chunk and this layer's part."""
        if not self.scan_layers:
            updated = jax.lax.dynamic_update_slice_in_dim(old, new[:, :, None], index, axis=2)
            return updated, updated
        at = (layer, 0, 0, index, 0)
        updated = jax.lax.dynamic_update_slice(old, new[None, :, :, None], at)
        return updated, updated[layer]

    @property
    def copies_pages(self) -> bool:
        """Return True if each chunk starts by copying the past out of its pages."""
        return self.kernels.past is not None and not self.scan_layers

    def _make_chunk_attention(
        self, cache: Cache, tables: jax.Array
    ) -> tuple[Callable[..., jax.Array], tuple[Any, ...]]:
        """Return the attention function for a chunk's steps, and the past to pass to the function.

        Queries attend to past positions below their limits. The past has one entry per layer, or
        one for all layers.
        """
        if self.kernels.past is None or self.scan_layers:
            paged_attention = self._make_paged_attention()

            def attend_layer(
                layer: Any, pages: Pages, q: jax.Array, limits: jax.Array, *chunk: jax.Array
            ) -> jax.Array:
                past, lse = paged_attention(q[:, None], *pages, tables, limits[:, None], layer)
                return merge_attention_outputs(*attend_chunk(q, *chunk), past[:, 0], lse[:, 0])

            return attend_layer, cache
        gather_past, attend_past = self.kernels.past
        gather_sharded = self._shard_map(gather_past, (_PAGES, _PAGES, _ROWS), _PAGES)
        past_attention = self._shard_map(
            attend_past, (_PAGES, _PAGES, _ROWS, _PAGES, _PAGES, P()), _PAGES
        )
        past = tuple(gather_sharded(*pages, tables) for pages in cache)
        return lambda _, past, q, *arguments: past_attention(q, past, *arguments), past

    def _merge_states(self, last: DecodeState, rows: DecodeRows) -> DecodeState:
        """Return the state of each row, taken from the host or from the previous chunk."""
        shards = count_piece_shards(self.mesh)
        source = rows.source.reshape(shards, -1)

        def merge_leaf(previous: jax.Array, from_host: jax.Array) -> jax.Array:
            previous = jnp.take_along_axis(
                previous.reshape(shards, -1), source, axis=1, mode="clip"
            )
            return jnp.where(rows.source >= 0, previous.reshape(-1), from_host)

        return self._constrain_rows(jax.tree.map(merge_leaf, last, rows.state))

    def _pad_state(self, state: DecodeState) -> DecodeState:
        """Pad the state to `num_rows` rows, as the next chunk requires."""
        shards = count_piece_shards(self.mesh)

        def pad_rows(values: jax.Array) -> jax.Array:
            by_shard = values.reshape(shards, -1)
            missing = self.num_rows // shards - by_shard.shape[1]
            return jnp.pad(by_shard, ((0, 0), (0, missing))).reshape(-1)

        return self._constrain_rows(jax.tree.map(pad_rows, state))

    def copy_pages(
        self, cache: SamplerCache, sources: CacheIndices, targets: CacheIndices
    ) -> SamplerCache:
        """Copy pages and states from `sources` to `targets` within each shard."""
        return self.swap_pages(cache, self._read_cache(cache, sources), sources, targets)[0]

    def swap_pages(
        self,
        cache: SamplerCache,
        incoming: SamplerCache,
        sources: CacheIndices,
        targets: CacheIndices,
    ) -> tuple[SamplerCache, SamplerCache]:
        """Write `incoming` to `targets`; return the previous contents of `sources`."""
        outgoing = self._read_cache(cache, sources)
        write = self._shard_map(kv_cache.write_pages, (_PAGES, _ROWS, _PAGES), _PAGES)
        cache = SamplerCache(
            pages=jax.tree.map(
                lambda old, new: write(old, targets.pages, new), cache.pages, incoming.pages
            ),
            states=jax.tree.map(
                lambda old, new: write(old, targets.state_slots, new), cache.states, incoming.states
            ),
        )
        return self._constrain_cache(cache), self._constrain_cache(outgoing)

    def _read_cache(self, cache: SamplerCache, sources: CacheIndices) -> SamplerCache:
        """Return the contents of the pages and states at `sources`."""
        read = self._shard_map(kv_cache.read_pages, (_PAGES, _ROWS), _PAGES)
        return SamplerCache(
            pages=jax.tree.map(lambda old: read(old, sources.pages), cache.pages),
            states=jax.tree.map(lambda old: read(old, sources.state_slots), cache.states),
        )

    def _read_states(self, states: State, slots: Any, is_new: jax.Array) -> State:
        """Return the states in `slots`, or zeros for new rows."""
        read = self._shard_map(kv_cache.read_pages, (_PAGES, _ROWS), _PAGES)

        def read_leaf(leaf: jax.Array) -> jax.Array:
            out = read(leaf, slots)
            return jnp.where(is_new.reshape(-1, *(1,) * (out.ndim - 1)), 0, out)

        return jax.tree.map(read_leaf, states)

    def _write_states(self, states: State, slots: Any, new: State) -> State:
        """Write the states of rows to `slots`."""
        write = self._shard_map(kv_cache.write_pages, (_PAGES, _ROWS, _PAGES), _PAGES)
        return jax.tree.map(lambda old, new: write(old, slots, new), states, new)


def unpack_report(packed: PackedReport) -> ChunkReport:
    """Unpack a report on the host; the fields are views of the packed array."""
    values = np.asarray(packed.values)
    steps = (values.shape[1] - 2) // 3
    logprobs, entropies = values[:, steps:-2].view(np.float32).reshape(-1, 2, steps).swapaxes(0, 1)
    return ChunkReport(
        token_ids=values[:, :steps],
        logprobs=logprobs,
        entropies=entropies,
        status=values[:, -2],
        stop_state=values[:, -1],
        recorded={name: np.asarray(array) for name, array in packed.recorded.items()},
    )


def should_scan_layers(scan_layers: bool, platform: str, *, has_adapter: bool) -> bool:
    """Return True if the sampler must loop over stacked layers; see `config.model.scan_layers`.

    In a loop, XLA copies each layer's weights before it multiplies by them. On a CPU, the copies
    took a fifth of the time. On a GPU, they move the weights three times per step, while unrolled
    layers compile in seconds. With an adapter, however, a loop reads the trainer's arrays directly,
    so the weights are in memory only once, which matters more on a GPU.
    """
    return scan_layers and (platform == "tpu" or (platform == "gpu" and has_adapter))


def _write_chunk(
    pages: jax.Array, tables: jax.Array, start: jax.Array, counts: jax.Array, chunk: jax.Array
) -> jax.Array:
    """Write a chunk, `[r, K, C, H]` or `[n, r, K, C, H]` for n stacked layers, to the pages."""
    if chunk.ndim == 5:
        chunk = jnp.concatenate(chunk, axis=1)
    return kv_cache.write_tokens(pages, tables, start, counts, chunk)

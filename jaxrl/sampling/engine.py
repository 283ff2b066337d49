"""Sampling engine: continuous batching over a paged KV cache.

The engine works on token ids. `prefill.py` batches the tokens and attachments to prefill.

Requests wait in a queue and are admitted in order while there are free rows and cache pages. A
running row is decoded in chunks until it stops. It then waits until the caller resumes it with the
tokens of an observation, or finishes it. A waiting row keeps its pages, so only the new tokens are
prefilled when it resumes. All samples of a prompt share the prompt's full pages. With recurrent
layers, each row and each cached prompt also has a state; a waiting row keeps its state too.

If pages run out, the newest request is preempted: its pages are swapped out to the host, and
swapped in before any newer request is admitted. The oldest request therefore always makes progress.

A chunk may be dispatched before the report of the previous chunk is read, so that the host works
while the device decodes. Scheduling then depends on how many reports have been read, which depends
only on the requests and never on timing.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from operator import itemgetter
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl.models.architecture import Architecture
from jaxrl.models.attention.kernels import AttentionKernels
from jaxrl.models.attention.reference import XLA, compute_past_boundaries
from jaxrl.models.aux_arrays import TokenArraySpec
from jaxrl.runtime.compilation import CompiledFunction, cached_jit, compile_all, join_keys
from jaxrl.runtime.sharding import (
    cache_sharding,
    count_piece_shards,
    make_piece_sharding,
    make_replicated_sharding,
)
from jaxrl.sampling import decode, next_token
from jaxrl.sampling.blocks import count_pages
from jaxrl.sampling.buckets import list_patch_buckets, list_prefill_buckets, list_row_buckets
from jaxrl.sampling.decode import (
    CacheIndices,
    DecodeRows,
    DecodeState,
    Programs,
    SamplerCache,
    StopTables,
)
from jaxrl.sampling.interfaces import EngineCounts
from jaxrl.sampling.prefill import PrefillBatcher, PrefillPiece
from jaxrl.sampling.scheduler import (
    BlockScheduler,
    PromptTokens,
    RecordedBlock,
    Row,
)
from jaxrl.sampling.stop_strings import StopAutomaton
from jaxrl.sampling.weights import WeightConverter, delete_arrays
from jaxrl.types import Attachment, Params

PAGES_PER_TRANSFER = 8
"""Pages per shard copied or swapped in one call, together with one state."""

MAX_PROGRAMS = 10
"""Maximum number of programs that an engine compiles, for any model and sampling method.

Programs that differ only in the length of the past count once.
"""


@dataclass(frozen=True, kw_only=True)
class Request:
    """One sample to generate.

    Attributes:
        prompt_ids: Prompt, at least one id. Requests with the same prompt share pages while any of
            them has pages.
        sample_key: Random key of the sample, uint32 [2]; see `derive_sample_keys`.
        budget: Maximum number of tokens to sample until the caller resumes the request with a new
            budget.
        attachments: Attachments in the order of their placeholder tokens in `prompt_ids`.
        stop_state: State of the stop automaton, if the turn begins inside `prompt_ids`.
        start_state: State of the stop automaton at the start of each later turn.
    """

    prompt_ids: tuple[int, ...]
    sample_key: np.ndarray
    budget: int
    attachments: tuple[Attachment, ...] = ()
    stop_state: int = 0
    start_state: int = 0

    @cached_property
    def prompt(self) -> PromptTokens:
        """Return the prompt's ids and attachments, the key in the prefix cache."""
        return PromptTokens(self.prompt_ids, self.attachments)


_NO_ARRAYS: Mapping[str, np.ndarray] = MappingProxyType({})


class Event(NamedTuple):
    """Tokens that one request sampled in one chunk; `decode` defines the values of `status`."""

    request: int
    chunk: int  # chunk number since the engine was created
    token_ids: np.ndarray  # int32 [n]
    logprobs: np.ndarray  # float32 [n], nats
    entropies: np.ndarray  # float32 [n], nats
    status: int
    # Recorded arrays `[m, ...]` of the tokens read since the previous event: prompt, observations
    # and sampled tokens, except the last sampled token, which is read later. {} if nothing is
    # recorded.
    recorded: Mapping[str, np.ndarray] = _NO_ARRAYS


@dataclass(frozen=True)
class _Chunk:
    """Dispatched chunk whose report has not been read."""

    number: int
    rows: list[tuple[int, int]]  # (request, index in the report)
    report: decode.PackedReport


def _pick_bucket(size: int, sizes: Sequence[int]) -> int:
    """Return the smallest of the ascending `sizes` that is at least `size`."""
    return next(bound for bound in sizes if bound >= size)


class Engine:
    """Sampler with a fixed number of rows and a fixed number of cache pages.

    Compiled shapes come from small sets (`buckets.py`): rows per shard in `row_sizes`, prefill
    tokens per shard in `prefill_sizes`, attachment patches in `patch_sizes`. There are at most
    `MAX_PROGRAMS` programs. If chunks read a copy of the past, each decoding program is compiled
    once for each of `past_sizes`.

    `set_weights` allocates device memory for the weights; the next `submit` allocates memory for
    the cache. `release` frees both.

    Attributes:
        counts: Work done so far.
        wait_s: Seconds spent waiting, by reason in `WAIT_REASONS`.
        num_pages: Cache pages per shard.
        peak_pages: Peak number of pages in use on a shard since the cache was created.
        device: A sampling device.
    """

    def __init__(
        self,
        architecture: Architecture,
        mesh: Mesh,
        automaton: StopAutomaton,
        *,
        num_tokens: int,
        eos_ids: Sequence[int],
        num_rows: int,
        num_pages: int = 0,
        num_states: int = 0,
        max_total_tokens: int,
        chunk_tokens: int,
        dtype: Any = jnp.float32,
        kernels: AttentionKernels = XLA,
        records: bool = False,
        train_mesh: Mesh | None = None,
        max_units: int = 0,
        scan_layers: bool = False,
        kinds: Sequence[str] = (next_token.GREEDY, next_token.FULL),
    ):
        """Define the programs without compiling them, and allocate the stop tables.

        Args:
            architecture: Model architecture.
            mesh: Mesh of this process's sampling devices. Rows and pages are split over its data,
                fsdp, expert and context axes.
            automaton: Automaton that detects stop strings, which end a turn.
            num_tokens: Vocabulary size of the tokenizer.
            eos_ids: Ids that also end a turn.
            num_rows: Maximum number of rows decoded together; a multiple of data * fsdp * expert *
                context.
            num_pages: Pages per shard, enough for at least one row of full length; 0 for enough
                pages for `num_rows` such rows.
            num_states: States per shard, at least 2, if there are recurrent layers; 0 for two per
                row. Each row and each prompt has one.
            max_total_tokens: Maximum combined length of the prompt, samples and observations.
            chunk_tokens: Decoding steps per chunk.
            dtype: Type of weights, activations and cache.
            kernels: Attention kernels.
            records: True if events have the arrays of `Architecture.recorded_specs`.
            train_mesh: Mesh of the parameters passed to `set_weights`; `mesh` by default.
            max_units: Maximum number of attachment tokens in a trajectory; 0 for as many as fit.
            scan_layers: See `decode.Programs`.
            kinds: Sampling methods in `next_token.KINDS` that `submit` may use.
        """
        # Split rows and pages evenly over the shards.
        self.num_shards = count_piece_shards(mesh)
        self._mesh = mesh
        self._rows_per_shard = num_rows // self.num_shards
        self._max_total_tokens = max_total_tokens
        self.page_tokens = kernels.page_tokens
        self._table_pages = count_pages(max_total_tokens, self.page_tokens)
        self.num_pages = num_pages or self._rows_per_shard * self._table_pages
        self.num_states = 0
        if architecture.num_recurrent_layers:
            self.num_states = num_states or 2 * self._rows_per_shard

        # Programs and weights, which depend only on the settings.
        self.programs = Programs(
            architecture=architecture,
            mesh=mesh,
            kernels=kernels,
            num_tokens=num_tokens,
            num_steps=chunk_tokens,
            num_rows=num_rows,
            dtype=dtype,
            records=records,
            scan_layers=scan_layers,
        )
        self._weight_converter = WeightConverter(
            self.programs.convert_params,
            architecture,
            key=self._program_key,
            mesh=mesh,
            train_mesh=mesh if train_mesh is None else train_mesh,
            scan_layers=scan_layers,
        )
        self.device = mesh.devices.flat[0]
        # A chunk dispatched before the last report is read may contain stopped rows. An accelerator
        # computes them in parallel with the others; a CPU would lose the time of a chunk per turn.
        self.overlaps = self.device.platform != "cpu"

        # Bucket sizes, which keep the number of compiled programs small.
        self.row_sizes = list_row_buckets(self.device.platform, self._rows_per_shard, dtype)
        self.prefill_sizes = list_prefill_buckets(self.device.platform, max_total_tokens)
        self.past_sizes = (
            compute_past_boundaries(self._table_pages, self.page_tokens)
            if self.programs.copies_pages
            else [self._table_pages]
        )
        self._max_units = max_units or max_total_tokens
        self.patch_sizes = (
            list_patch_buckets(self._max_units, architecture.tower.num_patches_per_token)
            if architecture.tower
            else []
        )
        self._prefill_batcher = PrefillBatcher(
            tower=architecture.tower,
            num_shards=self.num_shards,
            block_tokens=self.programs.block_tokens,
            max_units=self._max_units,
            num_states=self.num_states,
        )
        self.kinds = tuple(kinds)
        # The programs, compiled by `compile` or on first use.
        programs = self.programs
        define_program = partial(CompiledFunction, key=self._program_key)
        self._prefill = define_program(
            programs.prefill, name="prefill", variants=self.prefill_sizes, donate_argnums=(1,)
        )
        self._copy = define_program(programs.copy_pages, name="copy", donate_argnums=(0,))
        self._swap = define_program(programs.swap_pages, name="swap", donate_argnums=(0,))
        self._embed = define_program(
            programs.embed, name="embed", variants=self.patch_sizes, static_argnums=(3,)
        )
        self._decode = define_program(
            programs.decode_packed,
            name="decode",
            variants=self._list_decode_variants(),
            donate_argnums=(1,),
            static_argnums=(7, 8),
        )
        self._make_cache = cached_jit(
            programs.init_cache, name="cache", key=self._program_key, static_argnums=(0, 1, 2)
        )
        self._make_start = cached_jit(
            lambda num_units: (programs.init_decode_state(), programs.init_embeds(num_units)),
            name="start",
            key=self._program_key,
            static_argnums=(0,),
        )

        # Device state; cache, row state and attachments are allocated by `submit`.
        self._stops = _make_stop_tables(automaton, architecture.vocab_size, eos_ids, mesh)
        self._weights: Params | None = None
        self._next_request = 0
        self._temperature = self._top_p = 1.0  # of all current requests
        self.counts = EngineCounts()
        self.wait_s: dict[str, float] = defaultdict(float)
        self.peak_pages = 0
        self._cache: SamplerCache | None = None
        self._state: DecodeState | None = None
        self._zero_pages: SamplerCache | None = None
        self._attachment_embeds: jax.Array | None = None  # last embedded attachments
        self._reset_scheduling()

    def _reset_scheduling(self) -> None:
        """Drop all requests and mark all pages and states as free."""
        self._rows: dict[int, Row] = {}  # all shards, by request
        self._queue: deque[tuple[int, Request]] = deque()
        self._in_flight: deque[_Chunk] = deque()
        # Random keys and block tables of all rows, by slot; slot 0 stays empty.
        self._slots: list[int] = []
        self._keys = np.zeros((1, 2), np.uint32)
        self._tables = np.full((1, self._table_pages), self.num_pages, np.int32)
        self._shards = [
            BlockScheduler(
                index,
                num_rows=self._rows_per_shard,
                num_steps=self.programs.num_steps,
                num_pages=self.num_pages,
                page_tokens=self.page_tokens,
                num_states=self.num_states,
            )
            for index in range(self.num_shards)
        ]

    @property
    def _program_key(self) -> Hashable:
        """Return the cache key of the programs; see `cached_jit`."""
        return join_keys(self.programs, self.programs.architecture.program_key)

    @property
    def jitted_functions(self) -> tuple[CompiledFunction, ...]:
        """Return the engine's jitted functions, whether or not they have been compiled."""
        return self._prefill, self._decode, self._copy, self._swap, self._embed

    def check_recorded_arrays(self) -> None:
        """Check the arrays that the architecture records, by tracing a prefill without running it.

        Raises:
            ValueError: The forward pass does not record the arrays that the architecture declares.
        """
        cache, attachment_embeds = jax.eval_shape(
            lambda: (
                self.programs.init_cache(*self._cache_sizes),
                self.programs.init_embeds(self._max_units),
            )
        )
        blocks, _ = self._prefill_batcher.make_blocks((), self.prefill_sizes[0], self._tables)
        jax.eval_shape(
            self.programs.prefill,
            self._weight_converter.make_abstract_weights(),
            cache,
            blocks,
            attachment_embeds,
        )

    def compile(self, show: Callable[[str], None] = lambda _: None) -> None:
        """Compile all remaining programs in parallel; report progress to `show`."""
        shards, programs = self.num_shards, self.programs

        def make_abstract(sharding: Any, make: Callable[..., Any], *sizes: int) -> Any:
            return jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
                jax.eval_shape(partial(make, *sizes)),
            )

        # Describe the arguments by shape and sharding; no device memory is needed.
        weights = self._weight_converter.make_abstract_weights()
        by_page, by_row = cache_sharding(self._mesh), make_piece_sharding(self._mesh)
        transfer_sizes = PAGES_PER_TRANSFER * shards, self.page_tokens, shards
        cache, transfer_pages = (
            make_abstract(by_page, programs.init_cache, *sizes)
            for sizes in (self._cache_sizes, transfer_sizes)
        )
        state = make_abstract(by_row, programs.init_decode_state)
        attachment_embeds = make_abstract(by_row, programs.init_embeds, self._max_units)
        indices = self._make_transfer_indices()
        no_rows: list[list[Row]] = [[] for _ in range(shards)]

        # Lower one program per combination of shapes, with dummy rows and blocks.
        jobs = [self._copy.make_compile_fn(cache, indices, indices)]
        jobs.append(self._swap.make_compile_fn(cache, transfer_pages, indices, indices))
        for size in self.patch_sizes:
            patches = self._prefill_batcher.batch_patches([()] * shards, size)[:2]
            jobs.append(
                self._embed.make_compile_fn(weights, *patches, self._max_units, variant=size)
            )
        for size in self.prefill_sizes:
            blocks, _ = self._prefill_batcher.make_blocks((), size, self._tables)
            jobs.append(
                self._prefill.make_compile_fn(
                    weights, cache, blocks, attachment_embeds, variant=size
                )
            )
        for variant in self._list_decode_variants():
            rows, *static_args = variant
            chunk, _ = self._build_rows(no_rows, rows)
            sampling_params = self._get_sampling_params(no_rows, rows)
            arguments = (weights, cache, state, chunk, self._stops, *sampling_params, *static_args)
            jobs.append(self._decode.make_compile_fn(*arguments, variant=variant))
        total = len(jobs)
        compile_all(jobs, lambda count: show(f"compiling the sampler, {count} of {total} programs"))

    def _list_decode_variants(self) -> list[tuple[int, str, int]]:
        """Return the rows per shard, sampling method and past pages of each decoding program."""
        sizes = [(rows, kind) for kind in self.kinds for rows in self._select_row_sizes(kind)]
        return [(*size, pages) for size in sizes for pages in self.past_sizes]

    def _select_row_sizes(self, kind: str) -> list[int]:
        """Return the row buckets to compile for a sampling method, within `MAX_PROGRAMS`."""
        others = len(self.kinds) - 1
        room = MAX_PROGRAMS - 2 - len(self.prefill_sizes) - len(self.patch_sizes)  # 2: copy, swap
        every_second, between = self.row_sizes[::-2], self.row_sizes[-2::-2]
        count = min(len(self.row_sizes), room - others)
        if kind != self.kinds[0]:  # the first method samples the most, so it gets more buckets
            count = min(len(every_second), (room - count) // others)
        return sorted([*every_second, *between[::-1]][:count])

    @property
    def recorded_specs(self) -> Mapping[str, TokenArraySpec]:
        """Return the specs of the per-token arrays in `Event.recorded`."""
        return self.programs.recorded_specs

    @property
    def num_compilations(self) -> int:
        """Return the number of programs compiled, or loaded from the compilation cache, so far."""
        return sum(function.num_programs for function in self.jitted_functions)

    def set_weights(self, params: Params) -> None:
        """Cast and reshard all parameters of the policy for decoding; call once per update.

        Later changes to trained parameters do not affect the weights.
        """
        self._free_weights()
        self._weights = self._weight_converter.convert(params)

    def release(self) -> None:
        """Free the memory of the cache and the weights, for example before an update.

        `set_weights` recreates the weights, and the next `submit` recreates the cache. There must
        be no requests.
        """
        self.clear()
        self._free_weights()

    def _free_weights(self) -> None:
        self._weight_converter.free()
        self._weights = None
        for shard in self._shards:
            shard.reset_prefix_cache()

    def clear(self) -> None:
        """Drop all requests, including running requests, and free the cache."""
        self._reset_scheduling()
        delete_arrays((self._cache, self._state, self._zero_pages, self._attachment_embeds))
        self._cache = self._state = self._zero_pages = self._attachment_embeds = None

    def submit(
        self, requests: Sequence[Request], *, temperature: float = 1.0, top_p: float = 1.0
    ) -> list[int]:
        """Queue requests; return their ids, as used in events.

        All unfinished requests must have the same `temperature` and `top_p`.

        Args:
            requests: Requests, in the order in which to admit them.
            temperature: Sampling temperature, at least 0; 0 is greedy.
            top_p: Nucleus sampling probability in (0, 1].

        Raises:
            RuntimeError: There are no weights, or current requests have different sampling
                settings.
            ValueError: A budget is below 1, or exceeds `max_total_tokens` with its prompt; no
                request is queued.
        """
        if self._weights is None:
            raise RuntimeError("the engine has no weights; call set_weights first.")
        for request in requests:
            self._check_budget(len(request.prompt_ids), request.budget)
            self._prefill_batcher.check_attachments(request.prompt_ids, request.attachments)
        numbers = list(range(self._next_request, self._next_request + len(requests)))
        self._set_sampling_params(numbers, temperature, top_p)
        if self._cache is None:
            self._cache = self._make_cache(*self._cache_sizes)
            self._state, self._attachment_embeds = self._make_start(self._max_units)
        self._next_request += len(requests)
        self._queue.extend(zip(numbers, requests, strict=True))
        return numbers

    def _set_sampling_params(
        self, numbers: Sequence[int], temperature: float, top_p: float
    ) -> None:
        """Set the sampling settings shared by all current requests."""
        current = (self._temperature, self._top_p)
        if not self.is_idle and (temperature, top_p) != current:
            raise RuntimeError(
                f"requests with temperature {temperature} and top_p {top_p} cannot join those with "
                f"{current[0]} and {current[1]}; finish or clear those first."
            )
        self._temperature, self._top_p = temperature, top_p

    # extras/serve/engine.py overrides the next two methods, for settings by request.
    def _select_chunk_method(self, running: list[list[Row]]) -> str:
        """Return the sampling method for a chunk that decodes these rows."""
        return self._select_sampling_method(self._temperature, self._top_p)

    def _get_sampling_params(self, running: list[list[Row]], num_rows: int) -> tuple[Any, Any]:
        """Return the temperature and `top_p` of the next chunk: float32 [], or [r] for r rows."""
        return np.float32(self._temperature), np.float32(self._top_p)

    def _check_budget(self, length: int, budget: int) -> None:
        """Check that a budget is at least 1 and that the row fits in `max_total_tokens`."""
        if budget < 1 or length + budget > self._max_total_tokens:
            raise ValueError(
                f"a request of {length} tokens has a budget of {budget}; expected at least 1, and "
                f"a total of up to max_total_tokens={self._max_total_tokens}. This is a bug in "
                "jaxrl."
            )

    def _select_sampling_method(self, temperature: float, top_p: float) -> str:
        """Return the cheapest sampling method in `kinds`; `top_p` at 1 is equivalent to `full`."""
        kind = next_token.select_sampling_method(temperature, top_p)
        if kind == next_token.FULL and kind not in self.kinds and next_token.TOP_P in self.kinds:
            return next_token.TOP_P
        return kind

    def finish(self, request: int) -> None:
        """Remove a stopped request and free its pages."""
        row = self._rows.pop(request)
        self._slots.append(row.slot)
        self._shards[row.shard].finish(row, self._next_prompt)
        if self.is_idle:
            self._in_flight.clear()  # all of their rows had already stopped

    @property
    def num_running(self) -> int:
        """Return the number of requests not yet reported as stopped."""
        return sum(not row.is_waiting for row in self._rows.values())

    @property
    def is_idle(self) -> bool:
        """Return True if there are no requests."""
        return not self._queue and not self._rows

    @property
    def is_stalled(self) -> bool:
        """Return True if the engine must wait for the caller to resume or finish a request."""
        return not (self._in_flight or self._can_progress)

    @property
    def _can_progress(self) -> bool:
        """Return True if some row can run, be swapped in or be admitted."""
        can_run = any(row.saved is None and not row.is_waiting for row in self._rows.values())
        can_swap_in = any(shard.find_row_to_swap_in() for shard in self._shards)
        return can_run or can_swap_in or self._select_shard() is not None

    @property
    def is_busy(self) -> bool:
        """Return True while the device has unfinished work."""
        return bool(self._in_flight) and not self._in_flight[-1].report.values.is_ready()

    @property
    def wait_reason(self) -> str:
        """Return the entry of `WAIT_REASONS` that explains why decoding has stalled."""
        if self._can_progress:
            return "lag"
        is_short = self._queue or any(row.saved is not None for row in self._rows.values())
        return "cache" if is_short else "tasks"

    def resume(
        self,
        resumed: Sequence[tuple[int, Sequence[int], int]],
        attachments: Mapping[int, Sequence[Attachment]] = MappingProxyType({}),
    ) -> None:
        """Resume stopped requests.

        Args:
            resumed: (request id, token ids to append, new token budget) for each request. The ids
                may be empty.
            attachments: Attachments of the appended tokens, keyed by request id.

        Raises:
            ValueError: A budget is below 1, or attachments do not match the tokens; no request is
                resumed.
        """
        for request, tokens, budget in resumed:
            self._check_budget(self._rows[request].length + 1 + len(tokens), budget)
            row = self._rows[request]
            self._prefill_batcher.check_attachments(
                [row.pending, *tokens], attachments.get(request, ())
            )
        for request, tokens, budget in resumed:
            row = self._rows[request]
            assert row.is_waiting, f"request {request} has not stopped"
            read = [row.pending, *tokens]
            self._prefill_batcher.set_attachments(
                row, read, tuple(attachments.get(request, ())), row.length
            )
            *row.prefill_ids, row.pending = read
            row.is_waiting, row.budget, row.stop_state = False, budget, row.start_state
            self.counts.prefilled_resume += len(row.prefill_ids)

    def step(self, *, ahead: int = 0) -> list[Event]:
        """Admit requests, dispatch a chunk, and return the events of a finished chunk.

        Args:
            ahead: Number of chunks to leave in flight, 0 or 1. With 0, wait for the chunk just
                dispatched. With 1, read the previous chunk while the device works on the new chunk.
                If no chunk can be dispatched, read the oldest chunk in flight.
        """
        is_dispatched = self._allocate_pages()
        if is_dispatched:
            self._swap_in_rows()
            self._admit_requests()
            is_dispatched = self._dispatch_chunk()
        self.peak_pages = max(shard.pool.peak_used for shard in self._shards)
        if len(self._in_flight) <= (ahead if is_dispatched else 0):
            return []
        return self._read_report(self._in_flight.popleft())

    # Pages.

    def _allocate_pages(self) -> bool:
        """Allocate pages for the next chunk, preempting the newest rows if necessary.

        Return False if reports must be read first, because rows of a chunk in flight keep their
        pages.
        """
        for shard in self._shards:
            for row in shard.scheduled_rows:
                num_missing_pages = shard.count_missing_pages(row)
                while row.saved is None and num_missing_pages > shard.pool.num_free:
                    if shard.evict_cached_prompts():  # evict unused prompts first
                        continue
                    if self._in_flight:  # its rows still write to their pages
                        return False
                    self._preempt_row(shard, shard.resident_rows[-1])
                if row.saved is None:
                    first = len(row.pages)
                    row.pages += shard.pool.allocate(num_missing_pages)
                    self._tables[row.slot, first : len(row.pages)] = row.pages[first:]
        return True

    def _update_block_table(self, row: Row) -> None:
        """Update a row's block table from its pages."""
        self._tables[row.slot] = self.num_pages
        self._tables[row.slot, : len(row.pages)] = row.pages

    def _preempt_row(self, shard: BlockScheduler, row: Row) -> None:
        """Swap a row out to the host, and free its pages and state."""
        num_pages = count_pages(row.length, self.page_tokens)
        row.saved = self._swap_row(row, sources=row.pages[:num_pages])
        shard.free(row)
        self.counts.preemptions += 1
        self.counts.swapped += row.length

    def _swap_in_rows(self) -> None:
        """Swap in preempted rows while their pages fit, oldest first."""
        for shard in self._shards:
            while row := shard.find_row_to_swap_in():
                first, end = shard.swap_in(row), count_pages(row.length, self.page_tokens)
                self._update_block_table(row)
                self._swap_row(row, targets=row.pages[first:end], first=first)
                row.saved = None

    @property
    def _next_prompt(self) -> PromptTokens:
        """Return the prompt of the next queued request; an empty prompt if there is none."""
        return self._queue[0][1].prompt if self._queue else PromptTokens()

    def _select_shard(self, loads: Sequence[int | None] = ()) -> int | None:
        """Return the shard that can admit the next queued request; None if no shard has room.

        `loads` is the `num_runnable_rows` of each shard; it is computed if empty.
        """
        if not self._queue:
            return None
        request = self._queue[0][1]
        loads = loads or [shard.num_runnable_rows for shard in self._shards]
        shard_loads = zip(self._shards, loads, strict=True)
        candidates = (
            shard.rank_request(request.prompt, request.budget, load) for shard, load in shard_loads
        )
        ranks = [room for room in candidates if room]
        return min(ranks)[-1] if ranks else None

    def _admit_requests(self) -> None:
        """Admit queued requests while there is room."""
        loads = [shard.num_runnable_rows for shard in self._shards] if self._queue else []
        while (shard := self._select_shard(loads)) is not None:
            loads[shard] = (loads[shard] or 0) + 1
            number, request = self._queue.popleft()
            if not self._slots:
                size = len(self._keys)
                self._slots = list(range(size, 2 * size))
                self._keys = np.tile(self._keys, (2, 1))
                self._tables = np.tile(self._tables, (2, 1))
            slot = self._slots.pop()
            row = self._shards[shard].admit(
                number, request.prompt, slot=slot, budget=request.budget
            )
            self._keys[slot] = request.sample_key
            self._update_block_table(row)
            row.stop_state, row.start_state = request.stop_state, request.start_state
            # The prompt is cached: only its position offset is needed.
            is_cached = not row.prefill_ids
            self._prefill_batcher.set_attachments(row, request.prompt_ids, request.attachments, 0)
            if is_cached:
                row.prefill_attachments, row.prefill_arrays = (), {}
            self.counts.prefilled_prompt += len(row.prefill_ids)
            self._rows[number] = row
        for scheduler in self._shards:
            scheduler.evict_cached_prompts(keep=self._next_prompt)

    @property
    def _cache_sizes(self) -> tuple[int, int, int]:
        """Return the number of pages, the tokens per page and the number of states."""
        shards = self.num_shards
        return self.num_pages * shards, self.page_tokens, self.num_states * shards

    def _make_transfer_indices(
        self,
        pages: Mapping[int, Sequence[int]] = MappingProxyType({}),
        states: Mapping[int, int] = MappingProxyType({}),
    ) -> CacheIndices:
        """Return for each shard the indices of one state and up to `PAGES_PER_TRANSFER` pages."""
        page_indices = np.full((self.num_shards, PAGES_PER_TRANSFER), self.num_pages, np.int32)
        state_slots = np.full(self.num_shards, self.num_states, np.int32)
        for shard, shard_pages in pages.items():
            page_indices[shard, : len(shard_pages)] = shard_pages
        for shard, slot in states.items():
            state_slots[shard] = slot
        return CacheIndices(
            pages=page_indices.reshape(-1), state_slots=state_slots if self.num_states else None
        )

    def _copy_prefixes(self) -> None:
        """Copy each prompt's partial last page and recurrent state to the prompt's samples."""
        while any(shard.copies or shard.state_copies for shard in self._shards):
            pages = {shard.index: shard.copies[:PAGES_PER_TRANSFER] for shard in self._shards}
            states = {
                shard.index: shard.state_copies.pop(0)
                for shard in self._shards
                if shard.state_copies
            }
            sources, targets = (
                self._make_transfer_indices(
                    {shard: [pair[side] for pair in pairs] for shard, pairs in pages.items()},
                    {shard: pair[side] for shard, pair in states.items()},
                )
                for side in range(2)
            )
            for shard in self._shards:
                del shard.copies[:PAGES_PER_TRANSFER]
            self._cache = self._copy(self._cache, sources, targets)

    def _swap_row(
        self, row: Row, *, sources: Sequence[int] = (), targets: Sequence[int] = (), first: int = 0
    ) -> SamplerCache:
        """Swap out the pages and state of a row, or swap in its saved pages and state.

        Args:
            row: Row to swap.
            sources: Pages to read, if the row is not swapped out.
            targets: Pages to write, if the row is swapped out.
            first: Index in `row.saved` of the contents for the first target.

        Returns:
            Contents of the sources: `[pages, K, page, H]` of each attention layer, and the state of
            each recurrent layer, `[heads, ...]`.
        """
        # Swap a fixed number of pages per call, so that one program suffices. If nothing is
        # written, `_zero_pages` is the input. The first call also swaps the state.
        if self._zero_pages is None:
            self._zero_pages = self._make_swap_arrays()
        shard, saved = row.shard, row.saved
        contents: list[Any] = []
        states: Any = ()
        for start in range(0, max(len(sources), len(targets), 1), PAGES_PER_TRANSFER):
            read = sources[start : start + PAGES_PER_TRANSFER]
            write = targets[start : start + PAGES_PER_TRANSFER]
            incoming = self._zero_pages
            if saved is not None:
                incoming = self._make_swap_arrays(saved, shard, first + start, len(write))
            slot = {shard: row.state_slot} if self.num_states and not start else {}
            self._cache, outgoing = self._swap(
                self._cache,
                incoming,
                self._make_transfer_indices({shard: read}, slot if saved is None else {}),
                self._make_transfer_indices({shard: write}, {} if saved is None else slot),
            )
            if saved is None:
                begin = shard * PAGES_PER_TRANSFER
                pages = jax.device_get(outgoing.pages)
                contents.append(jax.tree.map(itemgetter(slice(begin, begin + len(read))), pages))
                if slot:
                    states = jax.tree.map(itemgetter(shard), jax.device_get(outgoing.states))
        pages = jax.tree.map(lambda *parts: np.concatenate(parts), *contents) if contents else ()
        return SamplerCache(pages=pages, states=states)

    def _make_swap_arrays(
        self, saved: SamplerCache | None = None, shard: int = 0, first: int = 0, count: int = 0
    ) -> SamplerCache:
        """Return the arrays that the swap program writes: zeros, or contents saved from a shard.

        `first` and `count` select the saved pages.
        """

        def make_zeros(tree: Any, size: int) -> Any:
            size *= self.num_shards
            return jax.tree.map(lambda leaf: np.zeros((size, *leaf.shape[1:]), leaf.dtype), tree)

        assert self._cache is not None
        pages = make_zeros(self._cache.pages, PAGES_PER_TRANSFER)
        states = make_zeros(self._cache.states, 1)
        if saved is not None:
            begin = shard * PAGES_PER_TRANSFER
            for out, values in zip(*map(jax.tree.leaves, (pages, saved.pages)), strict=True):
                out[begin : begin + count] = values[first : first + count]
            for out, values in zip(*map(jax.tree.leaves, (states, saved.states)), strict=True):
                out[shard] = values
        return jax.device_put(SamplerCache(pages=pages, states=states), cache_sharding(self._mesh))

    # Chunks.

    def _dispatch_chunk(self) -> bool:
        """Dispatch a chunk of the rows that can run, oldest first; return False if none can."""
        running = [shard.scheduled_rows for shard in self._shards]
        if not any(running):
            return False

        # Prefill first, then choose the smallest compiled shapes that fit.
        self._prefill_rows(running)
        self._copy_prefixes()
        kind = self._select_chunk_method(running)
        num_rows = _pick_bucket(max(len(rows) for rows in running), self._select_row_sizes(kind))
        past_pages = self.past_sizes[-1]
        if len(self.past_sizes) > 1:
            cached = max(row.length + row.in_flight for rows in running for row in rows)
            read = min(count_pages(cached, self.page_tokens), self._table_pages)
            past_pages = _pick_bucket(read, self.past_sizes)

        # Decode, and start the transfer of the report.
        chunk, members = self._build_rows(running, num_rows)
        self._cache, self._state, report = self._decode(
            self._weights,
            self._cache,
            self._state,
            chunk,
            self._stops,
            *self._get_sampling_params(running, num_rows),
            kind,
            past_pages,
            variant=(num_rows, kind, past_pages),
        )
        for array in (report.values, *report.recorded.values()):
            array.copy_to_host_async()
        self._in_flight.append(_Chunk(self.counts.chunks, members, report))
        self.counts.chunks += 1
        self.counts.row_steps += num_rows * self.num_shards * self.programs.num_steps
        return True

    def _build_rows(
        self, running: list[list[Row]], num_rows: int
    ) -> tuple[DecodeRows, list[tuple[int, int]]]:
        """Build the device arrays of a chunk; also return (request, report index) for each row."""
        total, num_steps = self.num_shards * num_rows, self.programs.num_steps

        # Padding rows are inactive and have source -1.
        ints = np.zeros((5, total), np.int32)
        ints[0] = -1
        active, slots = np.zeros(total, bool), np.zeros(total, np.int32)
        offset = None if self._prefill_batcher.tower is None else np.zeros(total, np.int32)
        state_slots = np.full(total, self.num_states, np.int32)
        members = []
        for shard, rows in enumerate(running):
            if not rows:
                continue
            first = shard * num_rows
            shard_slice = slice(first, first + len(rows))
            # A row in flight continues from the state that the last chunk left on the device.
            ints[:, shard_slice] = np.array(
                [
                    (r.index if r.in_flight else -1, r.pending, r.length, r.budget, r.stop_state)
                    for r in rows
                ]
            ).T
            active[shard_slice] = True
            slots[shard_slice] = [row.slot for row in rows]
            if offset is not None:
                offset[shard_slice] = [row.offset for row in rows]
            if self.num_states:
                state_slots[shard_slice] = [row.state_slot for row in rows]
            for index, row in enumerate(rows):
                row.in_flight += num_steps
                row.index = index
                members.append((row.request, first + index))
        source, pending, length, budget, stop_state = ints
        state = DecodeState(
            pending=pending, length=length, budget=budget, stop_state=stop_state, active=active
        )
        tables, keys = self._tables[slots], self._keys[slots]
        chunk = DecodeRows(
            source=source,
            state=state,
            tables=tables,
            keys=keys,
            offset=offset,
            state_slots=state_slots if self.num_states else None,
        )
        return chunk, members

    def _prefill_rows(self, running: list[list[Row]]) -> None:
        """Prefill the unread tokens of rows, in pieces of up to `Programs.block_tokens` tokens.

        Attachments are embedded for as many rows at a time as fit. Text uses the same programs and
        ignores the embeddings of earlier attachments.
        """
        small, large = self.prefill_sizes[0], self.prefill_sizes[-1]
        remaining = [deque(row for row in rows if row.prefill_ids) for rows in running]
        while any(remaining):
            # Embed the attachments of as many rows as fit, then prefill these rows.
            rows = [self._prefill_batcher.pop_rows(shard_rows) for shard_rows in remaining]
            attached = [
                tuple(item for row in shard_rows for item in row.prefill_attachments)
                for shard_rows in rows
            ]
            pieces: list[deque[PrefillPiece]] = []
            for shard_rows, units in zip(rows, self._embed_attachments(attached), strict=True):
                pieces.append(deque())
                for row in shard_rows:
                    pieces[-1].extend(self._prefill_batcher.split_row(row, units))
            while any(pieces):
                longest = (
                    max(len(shard_pieces) for shard_pieces in pieces) * self.programs.block_tokens
                )
                # Use the large program only if less than half of its tokens are padding.
                size = large if longest > max(small, large // 2) else small
                blocks, members = self._prefill_batcher.make_blocks(pieces, size, self._tables)
                self._cache, arrays = self._prefill(
                    self._weights, self._cache, blocks, self._attachment_embeds, variant=size
                )
                if arrays:
                    jax.tree.map(lambda x: x.copy_to_host_async(), arrays)
                    for piece, index in members:
                        block = RecordedBlock(arrays, index, piece.num_tokens)
                        piece.row.recorded_blocks.append(block)

    def _embed_attachments(
        self, attached: list[tuple[Attachment, ...]]
    ) -> list[Iterator[np.ndarray]]:
        """Embed the attachments of each shard; return the indices of their tokens in the result."""
        if not any(attached):
            return [iter(()) for _ in attached]
        counts = [sum(item.num_patches for item in attachments) for attachments in attached]
        size = _pick_bucket(max(counts), self.patch_sizes)
        patches, coords, units = self._prefill_batcher.batch_patches(attached, size)
        self._attachment_embeds = None  # free its memory before the next call
        self._attachment_embeds = self._embed(
            self._weights, patches, coords, self._max_units, variant=size
        )
        return [iter(shard_units) for shard_units in units]

    def _read_report(self, chunk: _Chunk) -> list[Event]:
        """Wait for a chunk, read its report and return its events."""
        report = decode.unpack_report(chunk.report)
        num_steps, token_ids = self.programs.num_steps, report.token_ids
        num_sampled = (token_ids >= 0).sum(axis=1)
        last_ids = token_ids[np.arange(len(token_ids)), num_sampled - 1].tolist()
        stop_states, statuses = report.stop_state.tolist(), report.status.tolist()
        # Views of rows; creating them together is faster.
        by_row = list(zip(token_ids, report.logprobs, report.entropies, strict=True))
        counts, events = num_sampled.tolist(), []
        for request, index in sorted(chunk.rows):
            if not (count := counts[index]):
                continue  # stopped in an earlier chunk; may be finished
            row, status = self._rows[request], statuses[index]
            ids, logprobs, entropies = by_row[index]
            row.pending, row.stop_state = last_ids[index], stop_states[index]
            row.length += count
            row.budget -= count
            row.in_flight -= num_steps
            if status != decode.RUNNING:
                row.is_waiting, row.in_flight = True, 0
                ids, logprobs, entropies = ids[:count], logprobs[:count], entropies[:count]
            recorded = (
                _pop_recorded_arrays(row, report, index, count) if report.recorded else _NO_ARRAYS
            )
            events.append(Event(request, chunk.number, ids, logprobs, entropies, status, recorded))
            self.counts.sampled += count
        return events


def _pop_recorded_arrays(
    row: Row, report: decode.ChunkReport, index: int, count: int
) -> Mapping[str, np.ndarray]:
    """Pop the arrays recorded for a row since its last event.

    The report holds the last `count` tokens, at `index`; earlier blocks are popped from the row.
    """
    before = [read.arrays for read in row.recorded_blocks]
    row.recorded_blocks = []
    return {
        name: np.concatenate([*(item[name] for item in before), array[index, :count]])
        for name, array in report.recorded.items()
    }


def _make_stop_tables(
    automaton: StopAutomaton, vocab_size: int, eos_ids: Sequence[int], mesh: Mesh
) -> StopTables:
    """Pad the automaton's tables to the model's vocabulary and replicate them on the devices."""
    padding = ((0, 0), (0, vocab_size - automaton.is_hit.shape[1]))
    is_eos = np.zeros(vocab_size, bool)
    is_eos[list(eos_ids)] = True
    return jax.device_put(
        StopTables(
            next_state=np.pad(automaton.next_state, padding),
            is_hit=np.pad(automaton.is_hit, padding),
            is_eos=is_eos,
        ),
        make_replicated_sharding(mesh),
    )

"""The sampling engine: slots, chunks and refill. It knows tokens only.

Requests wait in a queue; free slots take them in order. A running row is decoded in chunks until
it stops, then waits until the caller resumes it with the tokens of an observation or finishes it.
Its cache stays where it is, so that of a resumed row only the new tokens are read, and a prompt is
read once for all its samples.

A chunk may be dispatched before the report of the one before it is read, so that the host works
while the device decodes. Everything here is then decided from what the host knows at that moment,
which depends on the state of the requests and never on the clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl.models.architecture import Architecture
from jaxrl.runtime.compilation import CompiledFunction
from jaxrl.runtime.sharding import decode_shardings, num_batch_shards, on_local_mesh, replicated
from jaxrl.sampling import decode
from jaxrl.sampling.decode import Sampler, Slots, StopTables
from jaxrl.sampling.stop_strings import StopAutomaton
from jaxrl.types import Params


@dataclass(frozen=True, kw_only=True)
class Request:
    """One sample to draw.

    Attributes:
        prompt_ids: at least one id. Requests with the same prompt that follow one another have it
            read once.
        sample_key: uint32 [2], see `sample_keys`.
        budget: tokens it may sample until the caller grants more.
    """

    prompt_ids: tuple[int, ...]
    sample_key: np.ndarray
    budget: int


@dataclass(frozen=True, kw_only=True)
class Event:
    """Tokens that a request sampled in one chunk; `status` as in `decode`."""

    request: int
    chunk: int  # its number, counted since the engine was made
    token_ids: np.ndarray  # int32 [n]
    logprobs: np.ndarray  # float32 [n], nats
    entropies: np.ndarray  # float32 [n], nats
    status: int


@dataclass
class Counts:
    """Work done since the engine was made, in tokens unless named otherwise."""

    prefilled_prompt: int = 0  # prompts, each read once for its group
    prefilled_resume: int = 0  # observations and the pending token of each resumed turn
    sampled: int = 0
    chunks: int = 0  # dispatched
    slot_steps: int = 0  # steps times the rows they were computed for


@dataclass
class _Row:
    """A request in a slot."""

    request: int
    length: int  # tokens in the cache, as far as reports were read
    budget: int  # tokens it may still sample, likewise
    in_flight: int = 0  # steps dispatched for it whose reports were not read
    is_waiting: bool = False  # stopped; neither resumed nor finished yet
    pending: int | None = None  # sampled but not read into the cache

    @property
    def may_run(self) -> bool:
        """False where it has stopped, or must have when the chunks in flight are done."""
        return not self.is_waiting and self.in_flight < self.budget

    @property
    def longest(self) -> int:
        """The most tokens its cache can hold when the chunks in flight are done."""
        return self.length + min(self.in_flight, self.budget)


@dataclass(frozen=True)
class _Chunk:
    """A chunk whose report was not read yet."""

    number: int
    rows: list[tuple[int, int, int]]  # of each: request, slot, index in the report
    report: decode.Report


@dataclass
class _Prompts:
    """The prompts prefilled last; kept while samples of them still wait for a slot."""

    index: dict[tuple[int, ...], int] = field(default_factory=dict)  # prompt to row
    hidden: Any = None
    prefix: Any = None
    lengths: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    width: int = 0


def sample_keys(
    seed: int,
    stage: int,
    step: int,
    positions: np.ndarray,
    samples: np.ndarray,
    attempts: np.ndarray,
) -> np.ndarray:
    """Keys `uint32 [n, 2]` of samples, from what identifies them and nothing else.

    Args:
        seed: `config.seed`.
        stage: number of the stage that samples.
        step: the step at which the sample starts.
        positions: int32 [n], of the task in the task stream.
        samples: int32 [n], number of the sample in its group.
        attempts: int32 [n], 0 unless the group is drawn again.
    """
    # In blocks of one size: what is sampled again comes in any number, and would compile anew.
    keys = np.zeros((len(positions), 2), np.uint32)
    for start in range(0, len(positions), _KEY_BLOCK):
        block = [np.asarray(x[start : start + _KEY_BLOCK]) for x in (positions, samples, attempts)]
        count = len(block[0])
        padded = [np.pad(x.astype(np.int32), (0, _KEY_BLOCK - count)) for x in block]
        keys[start : start + count] = np.asarray(_sample_keys(seed, stage, step, *padded))[:count]
    return keys


_KEY_BLOCK = 256


@jax.jit
def _sample_keys(
    seed: jax.Array,
    stage: jax.Array,
    step: jax.Array,
    positions: jax.Array,
    samples: jax.Array,
    attempts: jax.Array,
) -> jax.Array:
    run = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), stage), step)

    def one(position: jax.Array, sample: jax.Array, attempt: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.fold_in(run, position), sample)
        return jax.random.key_data(jax.random.fold_in(key, attempt))

    return jax.vmap(one)(positions, samples, attempts)


def powers(lowest: int, highest: int, factor: int) -> list[int]:
    """`lowest`, `lowest * factor`, … up to the first that reaches `highest`, cut to it."""
    sizes = [lowest]
    while sizes[-1] < highest:
        sizes.append(min(sizes[-1] * factor, highest))
    return sizes


def padded_sizes(longest: int) -> list[int]:
    """The sizes to which up to `longest` tokens are padded when they are read."""
    return powers(16, max(longest, 16), 2)


def cache_capacity(*, max_prompt_tokens: int, max_total_tokens: int, chunk_tokens: int) -> int:
    """Tokens of a slot's cache: a trajectory and a chunk, and any prompt with its padding."""
    return max(max_total_tokens + chunk_tokens, padded_sizes(max_prompt_tokens)[-1])


def _fit(size: int, sizes: Sequence[int]) -> int:
    """The smallest of the increasing `sizes` that holds `size`."""
    if size > sizes[-1]:
        raise ValueError(
            f"{size} rows or tokens do not fit the engine's sizes {list(sizes)}. This is a bug in "
            "jaxrl: prompts and observations are cut or refused before they come here."
        )
    return next(bound for bound in sizes if bound >= size)


class Engine:
    """Decodes requests in a fixed number of slots.

    All its compiled shapes come from small sets: rows of a shard to decode in `row_sizes`, to read
    tokens into in `resume_sizes`, chunks of tokens to read in `read_sizes`, prompts in
    `prompt_sizes`, live lengths in `length_sizes`; `shapes` prints them.

    It holds memory only while it works: weights from `set_weights`, a cache from the next `submit`
    on, both until `release`.
    """

    def __init__(
        self,
        config: Architecture,
        mesh: Mesh,
        automaton: StopAutomaton,
        *,
        num_tokens: int,
        eos_ids: Sequence[int],
        num_slots: int,
        num_rows: int = 0,
        max_prompt_tokens: int,
        max_total_tokens: int,
        chunk_tokens: int,
        prompts_per_prefill: int,
        dtype: Any = jnp.float32,
        train_mesh: Mesh | None = None,
        nucleus: bool = False,
    ):
        """Declares the programs; allocates nothing but the stop tables.

        Args:
            config: of the model.
            mesh: of this process's devices, and only these are used; slots are split over its data
                and fsdp axes.
            automaton: ends a turn.
            num_tokens: ids the tokenizer knows.
            eos_ids: end a turn too.
            num_slots: rows with a cache; a multiple of data * fsdp.
            num_rows: rows decoded side by side at most, a multiple of data * fsdp; 0: all. Slots
                beyond it hold rows that wait.
            max_prompt_tokens: of any prompt.
            max_total_tokens: prompt, samples and observations together.
            chunk_tokens: decoding steps between two looks of the host.
            prompts_per_prefill: prompts read side by side.
            dtype: of weights, activations and cache.
            train_mesh: on which `set_weights` finds the parameters; `mesh` by default.
            nucleus: compile what `top_p` needs, which every decoding step then runs.

        Raises:
            ValueError: `num_slots` or `num_rows` is not a multiple of data * fsdp, or there are
                more rows than slots.
        """
        num_rows = num_rows or num_slots
        self.num_shards = num_batch_shards(mesh)
        for name, value in {"num_slots": num_slots, "num_rows": num_rows}.items():
            if value % self.num_shards:
                raise ValueError(
                    f"config.rollout.{name}={value} is not a multiple of data * fsdp = "
                    f"{self.num_shards}; every device needs the same number."
                )
        if num_rows > num_slots:
            raise ValueError(
                f"config.rollout.num_rows={num_rows} is more than num_slots={num_slots}; a row "
                "that is decoded needs a slot."
            )
        self.num_slots = num_slots
        self.capacity = cache_capacity(
            max_prompt_tokens=max_prompt_tokens,
            max_total_tokens=max_total_tokens,
            chunk_tokens=chunk_tokens,
        )
        self._mesh = mesh
        self._train_mesh = mesh if train_mesh is None else train_mesh
        self._slots_per_shard = num_slots // self.num_shards
        self._num_prompts = -(-prompts_per_prefill // self.num_shards) * self.num_shards
        self._max_prompt_tokens = max_prompt_tokens
        self.sampler = Sampler(
            config=config, mesh=mesh, num_tokens=num_tokens, num_steps=chunk_tokens, dtype=dtype
        )
        rows = num_rows // self.num_shards
        self.row_sizes = sorted({-(-rows // part) for part in (1, 2, 4, 16)})
        self.resume_sizes = sorted({-(-rows // part) for part in (1, 4, 16)})
        self.read_sizes = padded_sizes(max_total_tokens)
        self.prompt_sizes = padded_sizes(max_prompt_tokens)
        self.length_sizes = powers(min(64, max_total_tokens), max_total_tokens, 2)
        self._compile(config, dtype)
        self._stops = _stop_tables(automaton, config.vocab_size, eos_ids, mesh)
        self._empty_slots = jax.jit(self.sampler.empty_slots, static_argnums=(0, 1))
        self._slots: Slots | None = None
        self._weights: Params | None = None
        self._rows: list[_Row | None] = [None] * num_slots
        self._slot_of: dict[int, int] = {}
        self._queue: deque[tuple[int, Request]] = deque()
        self._in_flight: deque[_Chunk] = deque()
        self._prompts = _Prompts()
        self._next_request = 0
        self._nucleus = nucleus
        self._temperature = self._top_p = 1.0  # of all requests there are
        self.counts = Counts()

    def _compile(self, config: Architecture, dtype: Any) -> None:
        extends = [(rows, size) for rows in self.resume_sizes for size in self.read_sizes]
        prepare = lambda params: config.decode_weights(params, dtype)  # noqa: E731
        layouts = decode_shardings(self._train_mesh, config)
        self._prepare = jax.jit(prepare, out_shardings=layouts)
        self._layouts = decode_shardings(self._mesh, config)
        decodes = [(rows, length) for rows in self.row_sizes for length in self.length_sizes]
        sampler = self.sampler
        self.functions = (
            CompiledFunction(sampler.prefill, name="prefill", variants=self.prompt_sizes),
            CompiledFunction(
                sampler.place, name="place", variants=self.prompt_sizes, donate_argnums=(0,)
            ),
            CompiledFunction(sampler.extend, name="extend", variants=extends, donate_argnums=(1,)),
            CompiledFunction(
                sampler.decode_chunk,
                name="decode",
                variants=decodes,
                donate_argnums=(1,),
                static_argnums=(5,),
            ),
        )
        self._prefill, self._place, self._extend, self._decode = self.functions

    def shapes(self) -> str:
        """The set of shapes that may be compiled, for people."""
        rows, resumed = (
            [size * self.num_shards for size in sizes]
            for sizes in (self.row_sizes, self.resume_sizes)
        )
        return (
            f"decode {self.sampler.num_steps} steps of {rows} rows over {self.length_sizes} "
            f"tokens; read {self.read_sizes} tokens "
            f"of {resumed} rows; prompts {self._num_prompts} x {self.prompt_sizes}; "
            f"cache {len(self._rows)} slots x {self.capacity} tokens"
        )

    @property
    def num_compilations(self) -> int:
        """Compilations of the programs so far."""
        return sum(function.num_traces for function in self.functions)

    def set_weights(self, params: Params) -> None:
        """Casts and reshards the trainer's parameters for decoding, once an update.

        The weights are copies: what becomes of `params` afterwards does not touch them.
        """
        self._drop_weights()
        weights = self._prepare(params)
        if self._train_mesh != self._mesh:
            weights = jax.tree.map(on_local_mesh, weights, self._layouts)
        self._weights = weights

    def release(self) -> None:
        """Gives back the memory of cache and weights, before an update say.

        `set_weights` makes the weights anew, the next `submit` the cache.

        Raises:
            RuntimeError: there are requests; `clear` forgets them.
        """
        if not self.is_idle:
            raise RuntimeError("the engine still has requests; finish or clear them first.")
        self.clear()
        self._drop_weights()

    def _drop_weights(self) -> None:
        _delete(self._weights)
        self._weights = None
        self._prompts = _Prompts()  # what the old weights made of them is of no use

    def clear(self) -> None:
        """Forgets every request, running ones too, and gives back the cache's memory."""
        self._queue.clear()
        self._slot_of.clear()
        self._in_flight.clear()
        self._rows = [None] * self.num_slots
        self._prompts = _Prompts()
        _delete(self._slots)
        self._slots = None

    def submit(
        self, requests: Sequence[Request], *, temperature: float = 1.0, top_p: float = 1.0
    ) -> list[int]:
        """Queues requests; the numbers by which events name them.

        Args:
            requests: what to sample, in the order in which slots take it.
            temperature: of their tokens' distribution; 0 is greedy. All requests that are there at
                a time share it.
            top_p: likewise; they draw from the most likely tokens of this probability only. Other
                than 1 needs an engine made with `nucleus`.

        Raises:
            RuntimeError: there are no weights, or requests that are drawn in another way.
            ValueError: a prompt is too long, a budget below 1, a temperature below 0 or `top_p` no
                share; then none is queued.
        """
        if self._weights is None:
            raise RuntimeError("the engine has no weights; call set_weights first.")
        for request in requests:
            _fit(len(request.prompt_ids), self.prompt_sizes)
            _check_budget(request.budget)
        self._take_settings(temperature, top_p)
        if self.is_idle:
            # What came before, an evaluation say, may not show: a restart would not have had it.
            self._prompts = _Prompts()
        if self._slots is None:
            self._slots = self._empty_slots(self.num_slots, self.capacity)
        numbers = list(range(self._next_request, self._next_request + len(requests)))
        self._next_request += len(requests)
        self._queue.extend(zip(numbers, requests, strict=True))
        return numbers

    def _take_settings(self, temperature: float, top_p: float) -> None:
        """Refuses what cannot be drawn, or not beside the requests that are there."""
        if not temperature >= 0.0:
            raise ValueError(f"temperature is {temperature}; expected 0 or more.")
        if not 0.0 < top_p <= 1.0:
            raise ValueError(f"top_p is {top_p}; expected a number in (0, 1].")
        if top_p != 1.0 and not self._nucleus:
            raise RuntimeError(f"top_p is {top_p}, but the engine was made without nucleus=True.")
        there = (self._temperature, self._top_p)
        if not self.is_idle and (temperature, top_p) != there:
            raise RuntimeError(
                f"requests of temperature {temperature} and top_p {top_p} cannot join those of "
                f"{there[0]} and {there[1]}; finish or clear them first."
            )
        self._temperature, self._top_p = temperature, top_p

    def finish(self, request: int) -> None:
        """Frees the slot of a stopped request."""
        self._rows[self._slot_of.pop(request)] = None
        if self.is_idle:
            self._in_flight.clear()  # in which every row had stopped before

    @property
    def num_running(self) -> int:
        """Rows that have not stopped, as far as the host knows."""
        return sum(row is not None and not row.is_waiting for row in self._rows)

    @property
    def is_idle(self) -> bool:
        """Nothing runs, waits or is queued."""
        return not self._queue and not self._slot_of

    @property
    def is_stalled(self) -> bool:
        """Nothing happens before the caller resumes or finishes a request."""
        is_full = len(self._slot_of) == self.num_slots
        return not self._in_flight and not self.num_running and (is_full or not self._queue)

    def resume(self, resumed: Sequence[tuple[int, Sequence[int], int]]) -> None:
        """Lets stopped requests go on.

        Args:
            resumed: of each: its number, the tokens to read after what it sampled (possibly
                none), and the tokens it may sample from here.

        Raises:
            ValueError: a budget is below 1; then none goes on.
        """
        for _, _, granted in resumed:
            _check_budget(granted)
        remaining = deque(resumed)
        while remaining:
            batch = self._take_batch(remaining)
            size = max(len(rows) for rows in batch)
            num_rows = _fit(size, self.resume_sizes)
            longest = max(len(tokens) + 1 for rows in batch for _, tokens, _ in rows)
            width = _fit(longest, self.read_sizes)
            rows = np.full((self.num_shards, num_rows), self._slots_per_shard, np.int32)
            token_ids = np.zeros((self.num_shards, num_rows, width), np.int32)
            lengths = np.ones((self.num_shards, num_rows), np.int32)
            budget = np.zeros((self.num_shards, num_rows), np.int32)
            for shard, members in enumerate(batch):
                for index, (request, tokens, allowed) in enumerate(members):
                    slot = self._slot_of[request]
                    row = self._row(slot)
                    assert row.pending is not None, f"request {request} has not stopped"
                    new = [row.pending, *tokens]
                    rows[shard, index] = slot % self._slots_per_shard
                    token_ids[shard, index, : len(new)] = new
                    lengths[shard, index] = len(new)
                    budget[shard, index] = allowed
                    row.is_waiting, row.pending, row.budget = False, None, allowed
                    row.length += len(new)
                    self.counts.prefilled_resume += len(new)
            self._slots = self._extend(
                self._weights,
                self._slots,
                rows,
                token_ids.reshape(-1, width),
                lengths.reshape(-1),
                budget.reshape(-1),
                variant=(num_rows, width),
            )

    def _take_batch(
        self, remaining: deque[tuple[int, Sequence[int], int]]
    ) -> list[list[tuple[int, Sequence[int], int]]]:
        """Rows to resume in one call, by shard: all of one token-size class, in order."""
        batch: list[list[tuple[int, Sequence[int], int]]] = [[] for _ in range(self.num_shards)]
        width = _fit(len(remaining[0][1]) + 1, self.read_sizes)
        for entry in [x for x in remaining if _fit(len(x[1]) + 1, self.read_sizes) == width]:
            members = batch[self._slot_of[entry[0]] // self._slots_per_shard]
            if len(members) < self.resume_sizes[-1]:
                members.append(entry)
                remaining.remove(entry)
        return batch

    def step(self, *, ahead: int = 0) -> list[Event]:
        """Fills free slots, dispatches a chunk, and tells what an earlier one sampled.

        Args:
            ahead: chunks left in flight. With 0 the chunk just dispatched is read, which waits for
                it; with 1 the one before it, so that the device has work meanwhile. Where nothing
                is left to decode, the oldest chunk in flight is read.
        """
        self._admit()
        is_dispatched = self._dispatch()
        if len(self._in_flight) <= (ahead if is_dispatched else 0):
            return []
        return self._collect(self._in_flight.popleft())

    def _dispatch(self) -> bool:
        """Starts a chunk of the rows that may run, oldest requests first; False without any."""
        running: list[list[int]] = [[] for _ in range(self.num_shards)]
        for _, slot in sorted(self._slot_of.items()):
            shard = running[slot // self._slots_per_shard]
            if self._row(slot).may_run and len(shard) < self.row_sizes[-1]:
                shard.append(slot)
        if not any(running):
            return False
        num_rows = _fit(max(len(slots) for slots in running), self.row_sizes)
        length = _fit(
            max(self._row(slot).longest for slots in running for slot in slots), self.length_sizes
        )
        rows = np.full((self.num_shards, num_rows), self._slots_per_shard, np.int32)
        members = []
        for number, slots in enumerate(running):
            rows[number, : len(slots)] = [slot % self._slots_per_shard for slot in slots]
            for index, slot in enumerate(slots):
                row = self._row(slot)
                row.in_flight += self.sampler.num_steps
                members.append((row.request, slot, number * num_rows + index))
        self._slots, report = self._decode(
            self._weights,
            self._slots,
            rows,
            self._stops,
            np.float32(self._temperature),
            length,
            np.float32(self._top_p) if self._nucleus else None,
            variant=(num_rows, length),
        )
        jax.tree.map(lambda x: x.copy_to_host_async(), report)
        self._in_flight.append(_Chunk(self.counts.chunks, members, report))
        self.counts.chunks += 1
        self.counts.slot_steps += rows.size * self.sampler.num_steps
        return True

    def _collect(self, chunk: _Chunk) -> list[Event]:
        """Waits for a chunk and reads its report."""
        report = jax.device_get(chunk.report)
        num_sampled = (report.token_ids >= 0).sum(axis=1)
        # A row that stopped in an earlier chunk has sampled nothing; its slot may be another's.
        return [
            self._event(chunk.number, request, slot, report, index, int(num_sampled[index]))
            for request, slot, index in sorted(chunk.rows)
            if num_sampled[index]
        ]

    def _event(
        self, chunk: int, request: int, slot: int, report: decode.Report, index: int, count: int
    ) -> Event:
        row = self._row(slot)
        assert row.request == request, f"slot {slot} was taken from request {request}"
        status = int(report.status[index])
        token_ids = np.array(report.token_ids[index, :count])
        row.budget -= count
        row.in_flight -= self.sampler.num_steps
        if status != decode.RUNNING:
            row.is_waiting, row.pending, row.in_flight = True, int(token_ids[-1]), 0
        row.length += count - row.is_waiting
        self.counts.sampled += count
        return Event(
            request=request,
            chunk=chunk,
            token_ids=token_ids,
            logprobs=np.array(report.logprobs[index, :count]),
            entropies=np.array(report.entropies[index, :count]),
            status=status,
        )

    def _row(self, slot: int) -> _Row:
        row = self._rows[slot]
        assert row is not None, f"slot {slot} is free"
        return row

    def _admit(self) -> None:
        """Moves requests from the queue to free slots, reading each new prompt once."""
        free = deque(self._free_slots())
        while self._queue and free:
            if self._queue[0][1].prompt_ids not in self._prompts.index:
                self._read_prompts()
            placed = []
            while self._queue and free and self._queue[0][1].prompt_ids in self._prompts.index:
                placed.append((free.popleft(), *self._queue.popleft()))
            self._place_requests(placed)

    def _free_slots(self) -> list[int]:
        """Free slots, taken from the shards in turn so that their loads stay even."""
        free = [slot for slot, row in enumerate(self._rows) if row is None]
        load = [0] * self.num_shards
        for slot, row in enumerate(self._rows):
            load[slot // self._slots_per_shard] += row is not None
        ranks = []
        for slot in free:
            shard = slot // self._slots_per_shard
            ranks.append((load[shard], shard, slot))
            load[shard] += 1
        return [slot for _, _, slot in sorted(ranks)]

    def _read_prompts(self) -> None:
        """Reads the next prompts of the queue, as many as are read side by side.

        Some are read before there is a slot for their samples: slots become free one by one, and
        reading one prompt costs as much as reading them all.
        """
        # Only as far into the queue as needed: an evaluation's may be long.
        found: dict[tuple[int, ...], None] = {}
        for _, request in self._queue:
            if request.prompt_ids not in found and len(found) == self._num_prompts:
                break
            found[request.prompt_ids] = None
        prompts = list(found)
        width = _fit(max(len(ids) for ids in prompts), self.prompt_sizes)
        token_ids = np.zeros((self._num_prompts, width), np.int32)
        lengths = np.ones(self._num_prompts, np.int32)
        for index, ids in enumerate(prompts):
            token_ids[index, : len(ids)] = ids
            lengths[index] = len(ids)
            self.counts.prefilled_prompt += len(ids)
        hidden, prefix = self._prefill(self._weights, token_ids, lengths, variant=width)
        self._prompts = _Prompts(
            index={prompt: index for index, prompt in enumerate(prompts)},
            hidden=hidden,
            prefix=prefix,
            lengths=lengths,
            width=width,
        )

    def _place_requests(self, placed: Sequence[tuple[int, int, Request]]) -> None:
        """Starts requests, each given as its slot, its number and itself."""
        source = np.full(self.num_slots, -1, np.int32)
        budget = np.zeros(self.num_slots, np.int32)
        key = np.zeros((self.num_slots, 2), np.uint32)
        for slot, number, request in placed:
            source[slot] = self._prompts.index[request.prompt_ids]
            budget[slot] = request.budget
            key[slot] = request.sample_key
            self._rows[slot] = _Row(
                request=number, length=len(request.prompt_ids), budget=request.budget
            )
            self._slot_of[number] = slot
        self._slots = self._place(
            self._slots,
            self._prompts.hidden,
            self._prompts.prefix,
            self._prompts.lengths,
            source,
            budget,
            key,
            variant=self._prompts.width,
        )


def _check_budget(budget: int) -> None:
    """A row that may sample nothing would neither run nor stop."""
    if budget < 1:
        raise ValueError(f"a request may sample {budget} tokens; expected at least 1.")


def _delete(arrays: Any) -> None:
    """Frees device arrays at once, whoever still refers to them; donated ones are gone already."""
    for array in jax.tree.leaves(arrays):
        if not array.is_deleted():
            array.delete()


def _stop_tables(
    automaton: StopAutomaton, vocab_size: int, eos_ids: Sequence[int], mesh: Mesh
) -> StopTables:
    """The automaton's tables padded to the model's vocabulary, on every device."""
    padding = ((0, 0), (0, vocab_size - automaton.is_hit.shape[1]))
    is_end = np.zeros(vocab_size, bool)
    is_end[list(eos_ids)] = True
    return jax.device_put(
        StopTables(
            next_state=np.pad(automaton.next_state, padding),
            is_hit=np.pad(automaton.is_hit, padding),
            is_end=is_end,
        ),
        replicated(mesh),
    )

"""Host-side block scheduler for one mesh shard: admission, preemption and the prefix cache.

Decisions depend only on the sequence of calls. The engine copies and swaps the pages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from jaxrl.sampling.blocks import PagePool, count_pages
from jaxrl.types import Attachment


class RecordedBlock(NamedTuple):
    """Reference to the recorded arrays of a row's tokens in one prefill block."""

    recorded: Mapping[str, Any]  # device arrays [b, Q, ...]
    block_index: int
    num_tokens: int

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """Return the recorded arrays by name, `[num_tokens, ...]`."""
        return {
            name: np.asarray(array)[self.block_index, : self.num_tokens]
            for name, array in self.recorded.items()
        }


class PromptTokens(NamedTuple):
    """Ids and attachments of a prompt. Requests with equal prompts share pages."""

    ids: tuple[int, ...] = ()
    attachments: tuple[Attachment, ...] = ()


@dataclass(eq=False)
class Prefix:
    """Cached prompt. Samples share its full pages and copy its partial last page."""

    prompt: PromptTokens
    state_slot: int = 0  # state after the prompt, if there are recurrent layers
    shared: list[int] = field(default_factory=list)  # full pages
    cached: list[int] = field(default_factory=list)  # all pages, while no row uses them
    rows: dict[int, Row] = field(default_factory=dict)  # rows with pages, by request
    # Blocks of all prompt tokens, if arrays are recorded.
    recorded_blocks: list[RecordedBlock] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Return the number of prompt tokens stored in pages: every token except the last."""
        return len(self.prompt.ids) - 1


@dataclass(eq=False, kw_only=True, slots=True)
class Row:
    """Admitted request."""

    request: int
    slot: int  # index of the row's key and block table in the engine's arrays
    shard: int
    prefix: Prefix
    pending: int  # the token that is not in the cache yet
    budget: int  # tokens still to sample, according to the reports read
    length: int = 0  # tokens in the cache, according to the reports read
    stop_state: int = 0  # state of the stop automaton, according to the reports read
    start_state: int = 0  # state of the stop automaton at the start of a turn
    prefill_ids: list[int] = field(default_factory=list)  # tokens to prefill before the pending one
    prefill_attachments: tuple[Attachment, ...] = ()  # attachments of the unread tokens
    # [n, ...], if there is a tower
    prefill_arrays: dict[str, np.ndarray] = field(default_factory=dict)
    offset: int = 0  # position offset of the pending and later tokens
    pages: list[int] = field(default_factory=list)
    state_slot: int = 0  # its state, if there are recurrent layers
    saved: Any = None  # contents of pages and state while the row is swapped out
    in_flight: int = 0  # dispatched steps without a report
    index: int = -1  # index in the last chunk that includes the row
    is_waiting: bool = False  # True if stopped and not yet resumed or finished
    # Recorded arrays of the tokens prefilled since the last event, in order. At first, all rows of
    # a prompt share the prefix's list, which the row that prefills the prompt fills.
    recorded_blocks: list[RecordedBlock] = field(default_factory=list)

    @property
    def may_run(self) -> bool:
        """Return True unless the row has stopped, or will stop in a chunk in flight."""
        return not self.is_waiting and self.in_flight < self.budget

    def compute_max_length(self, num_steps: int) -> int:
        """Return the maximum cache length after `num_steps` more steps."""
        return self.length + len(self.prefill_ids) + min(self.in_flight + num_steps, self.budget)


class BlockScheduler:
    """Scheduler of the rows and pages of one shard.

    Attributes:
        index: Index of the shard.
        pool: Page allocator.
        rows: Admitted, unfinished requests by request id, oldest first.
        prefixes: Cached prompts.
        copies: (source, target) pages to copy before the next chunk.
        state_pool: Allocator of state slots; None without recurrent layers.
        state_copies: (source, target) state slots to copy before the next chunk.
    """

    def __init__(
        self,
        index: int,
        *,
        num_rows: int,
        num_steps: int,
        num_pages: int,
        page_tokens: int,
        num_states: int = 0,
    ):
        """Create a scheduler with all pages free.

        Args:
            index: Index of the shard.
            num_rows: Maximum number of rows in a chunk.
            num_steps: Decoding steps per chunk.
            num_pages: Number of pages of the shard.
            page_tokens: Number of tokens per page.
            num_states: Number of state slots of the shard; 0 without recurrent layers.
        """
        self.index = index
        self.state_pool = PagePool(num_states) if num_states else None
        self.state_copies: list[tuple[int, int]] = []
        self.pool = PagePool(num_pages)
        self.rows: dict[int, Row] = {}
        self.prefixes: dict[PromptTokens, Prefix] = {}
        self.copies: list[tuple[int, int]] = []
        self._num_rows, self._num_steps, self._page_tokens = num_rows, num_steps, page_tokens

    @property
    def resident_rows(self) -> list[Row]:
        """Return the rows with pages, oldest first."""
        return [row for row in self.rows.values() if row.saved is None]

    @property
    def scheduled_rows(self) -> list[Row]:
        """Return the rows to decode in the next chunk, oldest first."""
        return [row for row in self.resident_rows if row.may_run][: self._num_rows]

    def count_missing_pages(self, row: Row) -> int:
        """Return the number of pages that a row still needs for the next chunk; 0 if waiting."""
        max_length = row.length if row.is_waiting else row.compute_max_length(self._num_steps)
        return max(count_pages(max_length, self._page_tokens) - len(row.pages), 0)

    def free(self, row: Row) -> None:
        """Release the pages and state of a row. Shared pages stay until no row uses them."""
        self.pool.free(row.pages)
        row.pages = []
        self._free_state(row.state_slot)
        prefix = row.prefix
        del prefix.rows[row.request]
        if not prefix.rows and not prefix.cached and self._is_current(prefix):
            self._stop_sharing(prefix)

    def _stop_sharing(self, prefix: Prefix) -> None:
        """Stop sharing a prompt with new requests."""
        self._free_state(prefix.state_slot)
        del self.prefixes[prefix.prompt]

    def _allocate_state(self) -> int:
        return self.state_pool.allocate(1)[0] if self.state_pool else 0

    def _free_state(self, slot: int) -> None:
        if self.state_pool:
            self.state_pool.free([slot])

    def _has_states(self, count: int) -> bool:
        """Return True if `count` state slots are free, or none are needed."""
        return self.state_pool is None or count <= self.state_pool.num_free

    def _is_current(self, prefix: Prefix) -> bool:
        """Return True if the prefix was computed with the current weights."""
        return self.prefixes.get(prefix.prompt) is prefix

    def finish(self, row: Row, next_prompt: PromptTokens) -> None:
        """Remove a row. Keep its prompt cached if the next request has the same prompt."""
        del self.rows[row.request]
        if row.saved is not None:
            return
        prefix = row.prefix
        is_last = self._is_current(prefix) and len(prefix.rows) == 1
        has_preempted = len(self.resident_rows) < len(self.rows)
        if is_last and not has_preempted and prefix.prompt == next_prompt:
            prefix.cached = row.pages[: count_pages(prefix.num_tokens, self._page_tokens)]
            self.pool.retain(prefix.cached)
        self.free(row)

    def evict_cached_prompts(self, *, keep: PromptTokens = PromptTokens()) -> bool:
        """Evict unused cached prompts except `keep`; return False if there were none."""
        cached = [
            prefix for prefix in self.prefixes.values() if prefix.cached and prefix.prompt != keep
        ]
        for prefix in cached:
            self.pool.free(prefix.cached)
            prefix.cached = []
            self._stop_sharing(prefix)
        return bool(cached)

    def reset_prefix_cache(self) -> None:
        """Invalidate the prefix cache after a weight update."""
        self.evict_cached_prompts()
        for prefix in list(self.prefixes.values()):
            self._stop_sharing(prefix)

    def find_row_to_swap_in(self) -> Row | None:
        """Return the oldest preempted row if its pages and state fit, else None."""
        row = next((row for row in self.rows.values() if row.saved is not None), None)
        if row is None or not self._has_states(1):
            return None
        shared = len(row.prefix.shared) if row.prefix.rows else 0
        return row if self.count_missing_pages(row) - shared <= self.pool.num_free else None

    def swap_in(self, row: Row) -> int:
        """Allocate pages and a state for a preempted row; return the number of valid pages."""
        row.state_slot = self._allocate_state()
        prefix, num_missing_pages = row.prefix, self.count_missing_pages(row)
        num_shared = len(prefix.shared)
        num_resident = num_shared if prefix.rows else 0
        if prefix.rows:
            self.pool.retain(prefix.shared)
            row.pages = [*prefix.shared, *self.pool.allocate(num_missing_pages - num_shared)]
        else:
            row.pages = self.pool.allocate(num_missing_pages)
            prefix.shared = row.pages[:num_shared]
            if self.state_pool is None:  # the state after the prompt was not saved
                self.prefixes.setdefault(prefix.prompt, prefix)
        prefix.rows[row.request] = row
        return num_resident

    @property
    def num_runnable_rows(self) -> int | None:
        """Return the number of rows that can run, or None while preempted rows wait for pages."""
        rows = self.resident_rows
        return sum(row.may_run for row in rows) if len(rows) == len(self.rows) else None

    def rank_request(
        self, prompt: PromptTokens, budget: int, load: int | None
    ) -> tuple[bool, int, int] | None:
        """Return the shard's rank for a request (lowest is best); None if it does not fit."""
        if load is None or load >= self._num_rows:
            return None
        max_length = len(prompt.ids) - 1 + min(self._num_steps, budget)
        prefix = self.prefixes.get(prompt)
        num_cached = len(prefix.cached or prefix.shared) if prefix else 0
        has_pages = count_pages(max_length, self._page_tokens) - num_cached <= self.pool.num_free
        has_room = has_pages and self._has_states(2 if prefix is None else 1)
        # Prefer a shard that has the prompt cached, then the one with the fewest running rows.
        return (prefix is None, load, self.index) if has_room else None

    def admit(self, request: int, prompt: PromptTokens, *, slot: int, budget: int) -> Row:
        """Admit a request; its row prefills the prompt unless the prompt is cached."""
        prefix = self.prefixes.get(prompt)
        is_new = prefix is None
        if prefix is None:
            prefix = self.prefixes[prompt] = Prefix(prompt, self._allocate_state())
        row = Row(
            request=request,
            slot=slot,
            shard=self.index,
            prefix=prefix,
            pending=prompt.ids[-1],
            budget=budget,
            length=0 if is_new else prefix.num_tokens,
            prefill_ids=list(prompt.ids[:-1]) if is_new else [],
            recorded_blocks=prefix.recorded_blocks,
            state_slot=self._allocate_state(),
        )
        # The prompt is prefilled in the prefix's state, and every sample starts from a copy.
        if self.state_pool:
            self.state_copies.append((prefix.state_slot, row.state_slot))

        # Share the full pages of a known prompt; the partial last page is copied below.
        num_full, rest = divmod(prefix.num_tokens, self._page_tokens)
        if prefix.cached:
            row.pages, prefix.cached = prefix.cached, []
        elif not is_new:
            self.pool.retain(prefix.shared)
            row.pages = list(prefix.shared)
        row.pages += self.pool.allocate(self.count_missing_pages(row))
        if is_new:
            prefix.shared = row.pages[:num_full]
        elif rest and prefix.rows:
            other = next(iter(prefix.rows.values()))
            self.copies.append((other.pages[num_full], row.pages[num_full]))
        prefix.rows[request] = self.rows[request] = row
        return row

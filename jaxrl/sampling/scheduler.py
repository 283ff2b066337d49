"""The books of one shard of the mesh: whose its rows and pages are, and what waits for some.

They live on the host and follow from the calls alone. The engine moves what is in the pages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from jaxrl.sampling.blocks import PagePool, pages_for
from jaxrl.types import Attachment


class Recorded:
    """Arrays by token that one call has recorded, on the device until they are asked for."""

    def __init__(self, arrays: Mapping[str, Any]):
        """`arrays` are `[b, Q, ...]` by name, on their way to the host."""
        self._arrays = arrays

    def of_block(self, index: int, count: int) -> dict[str, np.ndarray]:
        """Values of a block's first tokens, `[count, ...]`."""
        self._arrays = {name: np.asarray(array) for name, array in self._arrays.items()}
        return {name: array[index, :count] for name, array in self._arrays.items()}


class Read(NamedTuple):
    """Tokens of a row that were read together."""

    recorded: Recorded
    block: int
    num_tokens: int

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """`[num_tokens, ...]`."""
        return self.recorded.of_block(self.block, self.num_tokens)


class Prompt(NamedTuple):
    """Ids and attachments that a request begins with; equal prompts share their pages."""

    ids: tuple[int, ...] = ()
    attachments: tuple[Attachment, ...] = ()


@dataclass(eq=False)
class Prefix:
    """A prompt in the cache: its full pages are shared, what is left is copied for each sample."""

    prompt: Prompt
    shared: list[int] = field(default_factory=list)  # pages
    kept: list[int] = field(default_factory=list)  # all its pages, while no row has them
    rows: dict[int, Row] = field(default_factory=dict)  # that have pages, by request
    reads: list[Read] = field(default_factory=list)  # of all its tokens, where arrays are recorded

    @property
    def num_tokens(self) -> int:
        """Tokens that its pages hold: all but the last."""
        return len(self.prompt.ids) - 1


@dataclass(eq=False, kw_only=True, slots=True)
class Row:
    """A request that was admitted."""

    request: int
    slot: int  # of its key and table among those of all rows
    shard: int
    prefix: Prefix
    pending: int  # the token that is not in the cache yet
    budget: int  # tokens it may still sample, as far as reports were read
    length: int = 0  # tokens in the cache, likewise
    stop_state: int = 0  # likewise
    unread: list[int] = field(default_factory=list)  # tokens to read before the pending one
    unread_attachments: tuple[Attachment, ...] = ()  # whose tokens are among them
    unread_arrays: dict[str, np.ndarray] = field(default_factory=dict)  # [n, ...], with a tower
    offset: int = 0  # of the position of the pending token and those after it
    pages: list[int] = field(default_factory=list)
    saved: Any = None  # the content of its pages, of each layer, while they are another's
    in_flight: int = 0  # steps dispatched for it whose reports were not read
    index: int = -1  # in the last chunk dispatched for it
    is_waiting: bool = False  # stopped; neither resumed nor finished yet
    # Of the tokens before those it sampled last, in order, where arrays are recorded; at first the
    # list of its prefix itself, which the row that reads the prompt fills for all.
    reads: list[Read] = field(default_factory=list)

    @property
    def may_run(self) -> bool:
        """False where it has stopped, or must have when the chunks in flight are done."""
        return not self.is_waiting and self.in_flight < self.budget

    def longest(self, num_steps: int) -> int:
        """The most tokens its cache can hold after so many steps more."""
        return self.length + len(self.unread) + min(self.in_flight + num_steps, self.budget)


class BlockScheduler:
    """Rows and pages of one shard.

    Attributes:
        index: its number.
        pool: its pages.
        rows: requests that were admitted and not finished, by number, the oldest first.
        prefixes: prompts in the cache.
        copies: pages to copy before the next chunk, each a source and a target.
    """

    def __init__(
        self, index: int, *, num_rows: int, num_steps: int, num_pages: int, page_tokens: int
    ):
        """All pages are free.

        Args:
            index: its number.
            num_rows: decoded side by side at most.
            num_steps: of a chunk.
            num_pages: there are.
            page_tokens: tokens of a page.
        """
        self.index = index
        self.pool = PagePool(num_pages)
        self.rows: dict[int, Row] = {}
        self.prefixes: dict[Prompt, Prefix] = {}
        self.copies: list[tuple[int, int]] = []
        self._num_rows, self._num_steps, self._page_tokens = num_rows, num_steps, page_tokens

    @property
    def resident(self) -> list[Row]:
        """The rows that have pages, the oldest first."""
        return [row for row in self.rows.values() if row.saved is None]

    @property
    def _away(self) -> list[Row]:
        """The rows whose pages were given to others, the oldest first."""
        return [row for row in self.rows.values() if row.saved is not None]

    @property
    def to_decode(self) -> list[Row]:
        """The rows of the next chunk."""
        running = (
            row
            for row in self.rows.values()
            if not row.is_waiting and row.in_flight < row.budget and row.saved is None
        )
        return list(islice(running, self._num_rows))

    def missing(self, row: Row) -> int:
        """Pages that a row needs beside its own for the next chunk; none if it waits."""
        longest = row.length if row.is_waiting else row.longest(self._num_steps)
        return max(pages_for(longest, self._page_tokens) - len(row.pages), 0)

    @property
    def short_of_pages(self) -> list[Row]:
        """The rows of the next chunk that need more pages for it, if their budgets are so large."""
        steps, page_tokens = self._num_steps, self._page_tokens
        return [
            row
            for row in self.to_decode
            if row.length + len(row.unread) + row.in_flight + steps > len(row.pages) * page_tokens
        ]

    def free(self, row: Row) -> None:
        """Frees the pages of a row but for those that others share."""
        self.pool.give_up(row.pages)
        row.pages = []
        prefix = row.prefix
        del prefix.rows[row.request]
        if not prefix.rows and not prefix.kept and self._is_known(prefix):
            del self.prefixes[prefix.prompt]

    def _is_known(self, prefix: Prefix) -> bool:
        """Return False for a prompt that was read with other weights."""
        return self.prefixes.get(prefix.prompt) is prefix

    def finish(self, row: Row, next_prompt: Prompt) -> None:
        """Forgets a row; its prompt is kept if the next request begins with it too."""
        del self.rows[row.request]
        if row.saved is not None:
            return
        prefix = row.prefix
        is_last = self._is_known(prefix) and len(prefix.rows) == 1 and not self._away
        if is_last and prefix.prompt == next_prompt:
            prefix.kept = row.pages[: pages_for(prefix.num_tokens, self._page_tokens)]
            self.pool.share(prefix.kept)
        self.free(row)

    def evict_cached(self, *, but: Prompt = Prompt()) -> bool:
        """Gives up the pages of prompts that no row has, except `but`; False if there were none."""
        kept = [one for one in self.prefixes.values() if one.kept and one.prompt != but]
        for prefix in kept:
            self.pool.give_up(prefix.kept)
            prefix.kept = []
            del self.prefixes[prefix.prompt]
        return bool(kept)

    def forget_prompts(self) -> None:
        """Lets no later request share what is there, since other weights come."""
        self.evict_cached()
        self.prefixes.clear()

    def next_back(self) -> Row | None:
        """The oldest row without its pages, if there is room for them."""
        row = next((row for row in self.rows.values() if row.saved is not None), None)
        if row is None:
            return None
        shared = len(row.prefix.shared) if row.prefix.rows else 0
        return row if self.missing(row) - shared <= self.pool.num_free else None

    def swap_in(self, row: Row) -> int:
        """Gives a row pages again; returns how many of the first still hold their content."""
        prefix, missing = row.prefix, self.missing(row)
        num_shared = len(prefix.shared)
        num_there = num_shared if prefix.rows else 0
        if prefix.rows:
            self.pool.share(prefix.shared)
            row.pages = [*prefix.shared, *self.pool.take(missing - num_shared)]
        else:
            row.pages = self.pool.take(missing)
            prefix.shared = row.pages[:num_shared]
            self.prefixes.setdefault(prefix.prompt, prefix)
        prefix.rows[row.request] = row
        return num_there

    @property
    def load(self) -> int | None:
        """Rows that may run; None where some wait for their pages, which come before others."""
        count = 0
        for row in self.rows.values():
            if row.saved is not None:
                return None
            count += not row.is_waiting and row.in_flight < row.budget
        return count

    def room(self, prompt: Prompt, budget: int, load: int | None) -> tuple[bool, int, int] | None:
        """Rates a place for a request here, the lowest best; None: there is no room."""
        if load is None or load >= self._num_rows:
            return None
        longest = len(prompt.ids) - 1 + min(self._num_steps, budget)
        prefix = self.prefixes.get(prompt)
        there = len(prefix.kept or prefix.shared) if prefix else 0
        has_pages = pages_for(longest, self._page_tokens) - there <= self.pool.num_free
        # Best where the prompt was read before, then where the fewest rows run.
        return (prefix is None, load, self.index) if has_pages else None

    def admit(self, request: int, prompt: Prompt, *, slot: int, budget: int) -> Row:
        """A row for a request, which has to read its prompt unless another one has."""
        prefix = self.prefixes.get(prompt)
        is_new = prefix is None
        if prefix is None:
            prefix = self.prefixes[prompt] = Prefix(prompt)
        row = Row(
            request=request,
            slot=slot,
            shard=self.index,
            prefix=prefix,
            pending=prompt.ids[-1],
            budget=budget,
            length=0 if is_new else prefix.num_tokens,
            unread=list(prompt.ids[:-1]) if is_new else [],
            reads=prefix.reads,
        )
        num_full, rest = divmod(prefix.num_tokens, self._page_tokens)
        if prefix.kept:
            row.pages, prefix.kept = prefix.kept, []
        elif not is_new:
            self.pool.share(prefix.shared)
            row.pages = list(prefix.shared)
        row.pages += self.pool.take(self.missing(row))
        if is_new:
            prefix.shared = row.pages[:num_full]
        elif rest and prefix.rows:
            other = next(iter(prefix.rows.values()))
            self.copies.append((other.pages[num_full], row.pages[num_full]))
        prefix.rows[request] = self.rows[request] = row
        return row

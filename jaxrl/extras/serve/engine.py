"""The engine of rollouts for requests that come one by one, each drawn in its own way.

What stands in `sampling/engine.py` for all requests together is here by row: temperature, `top_p`
and the key of the draws. A request may be cancelled at any time, and cut back to some of what it
has sampled: the keys and values behind that are written over when it goes on.

A chunk may be in flight meanwhile. What it samples for a request that was cancelled or cut is not
read. Its writes come before those of all that is dispatched later, so whoever has the pages then
writes over them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from jaxrl.sampling import next_token
from jaxrl.sampling.blocks import pages_for
from jaxrl.sampling.engine import Engine
from jaxrl.sampling.scheduler import Prompt, Row, Shard


class Way(NamedTuple):
    """Settings by which the tokens of a request are drawn; see `Engine.submit`."""

    temperature: float
    top_p: float


class ServedEngine(Engine):
    """An engine whose requests share nothing but its rows and pages."""

    draws_any = True
    """Draws by any kind, since clients may want it; False: by those of the argument alone."""

    def __init__(self, *arguments: Any, **settings: Any):
        """Takes the arguments of `Engine`; the kinds given come before the others there are."""
        # The first one has programs for the fewest rows, so it is not the one that few ask for.
        kinds = settings.pop("kinds", ())
        if self.draws_any:
            kinds = dict.fromkeys([*kinds, next_token.PLAIN, *next_token.KINDS])
        super().__init__(*arguments, **settings, kinds=tuple(kinds))
        self._ways: dict[int, Way] = {}

    def clear(self) -> None:
        """Forgets every request, and gives back the cache's memory."""
        super().clear()
        self._ways.clear()

    def finish(self, request: int) -> None:
        """Gives up the pages of a request, whether it has stopped or not."""
        self._leave_chunks(request)
        super().finish(request)
        del self._ways[request]

    def cancel(self, request: int) -> None:
        """Forgets a request, also one that waits for a row."""
        left = deque(one for one in self._queue if one[0] != request)
        if len(left) == len(self._queue):
            self.finish(request)
        else:
            self._queue = left
            del self._ways[request]

    def cut(self, request: int, token_ids: Sequence[int]) -> None:
        """Stops a request behind the last of `token_ids`, all it read and sampled up to there."""
        self._leave_chunks(request)
        row = self._rows[request]
        row.length, row.pending, row.is_waiting = len(token_ids) - 1, token_ids[-1], True

    def _leave_chunks(self, request: int) -> None:
        """Has nothing read of what chunks in flight sample for a request."""
        for chunk in self._in_flight:
            chunk.rows[:] = [one for one in chunk.rows if one[0] != request]
        self._rows[request].in_flight = 0

    def go_on(
        self, request: int, tokens: Sequence[int], budget: int, *, sample_key: np.ndarray, way: Way
    ) -> None:
        """Resumes a stopped request, drawn in another way from here.

        Args:
            request: its number.
            tokens: to read after what it has sampled.
            budget: tokens that it may sample.
            sample_key: uint32 [2], of these.
            way: likewise.
        """
        self.resume([(request, tokens, budget)])
        self._keys[self._rows[request].slot], self._ways[request] = sample_key, way

    @property
    def num_rows(self) -> int:
        """Requests that are decoded side by side at most."""
        return self._rows_per_shard * self.num_shards

    @property
    def num_queued(self) -> int:
        """Requests that have no row yet."""
        return len(self._queue)

    @property
    def max_total_tokens(self) -> int:
        """Tokens of a request, read and sampled together."""
        return self._max_total_tokens

    @property
    def num_free_pages(self) -> int:
        """Pages of all shards that hold nothing."""
        return sum(shard.pool.num_free for shard in self._shards)

    @property
    def lacks_pages(self) -> bool:
        """True where requests that run, come back or come next lack pages that others hold.

        That they lack a row in which to be decoded does not count.
        """
        return any(map(self._is_short, self._shards)) or self._lacks_pages_for_next

    @property
    def _lacks_pages_for_next(self) -> bool:
        """True where those that will find a row take more pages together than are free."""
        running = [row for shard in self._shards for row in shard.to_decode]
        seen: set[Prompt] = set()
        num_free = self.num_free_pages - sum(map(self._missing, running))
        for _, request in islice(self._queue, max(self.num_rows - len(running), 0)):
            read = len(request.prompt_ids) - 1
            longest = read + min(self.programs.num_steps, request.budget)
            prompt = request.prompt
            is_read = prompt in seen or any(prompt in shard.prefixes for shard in self._shards)
            seen.add(prompt)
            shared = read // self.page_tokens if is_read else 0
            num_free -= pages_for(longest, self.page_tokens) - shared
        return num_free < 0

    def _missing(self, row: Row) -> int:
        """Pages that a row takes beside its own for the next chunk."""
        longest = row.longest(self.programs.num_steps)
        return max(pages_for(longest, self.page_tokens) - len(row.pages), 0)

    def _is_short(self, shard: Shard) -> bool:
        if sum(map(self._missing, shard.to_decode)) > shard.pool.num_free:
            return True
        away = any(row.saved is not None and not row.is_waiting for row in shard.rows.values())
        if away and shard.next_back() is None:
            return True
        has_row = sum(row.may_run for row in shard.resident) < self._rows_per_shard
        return bool(self._queue) and has_row and self._free_shard() is None

    def _draw_by(self, numbers: Sequence[int], temperature: float, top_p: float) -> None:
        """Remembers how these requests are drawn, whatever else is there."""
        for number in numbers:
            self._ways[number] = Way(temperature, top_p)

    def _kind_for(self, running: list[list[Row]]) -> str:
        """The cheapest kind that draws for every row."""
        kinds = {self._kind_of(*self._ways[row.request]) for rows in running for row in rows}
        return max(kinds, key=next_token.KINDS.index)

    def _ways_of(self, running: list[list[Row]], num_rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Temperature and `top_p` by row, float32 [r]."""
        ways = np.ones((2, self.num_shards * num_rows), np.float32)
        for shard, rows in enumerate(running):
            for index, row in enumerate(rows[:num_rows], start=shard * num_rows):
                ways[:, index] = self._ways[row.request]
        return ways[0], ways[1]

"""The rollout engine for requests that arrive one by one, each with its own sampling settings.

What `sampling/engine.py` holds for all requests is held here per row: temperature, `top_p` and the
random key. A request may be cancelled at any time, and truncated to some of its tokens: keys and
values after that are overwritten when it resumes.

A chunk may be in flight meanwhile. What it samples for a cancelled or truncated request is not
read. It writes before anything that is dispatched later, so the next owner of a page overwrites it.
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
from jaxrl.sampling.scheduler import BlockScheduler, Prompt, Row


class SamplingParams(NamedTuple):
    """How the tokens of a request are drawn; see `Engine.submit`."""

    temperature: float
    top_p: float


class ServedEngine(Engine):
    """An engine whose requests share only its rows and pages."""

    draws_any = True
    """Whether to compile every kind of draw; False for the given kinds only."""

    def __init__(self, *arguments: Any, **settings: Any):
        """Take the arguments of `Engine`; given kinds come before all others."""
        # The first kind has programs for the fewest rows, so it should be a common one.
        kinds = settings.pop("kinds", ())
        if self.draws_any:
            kinds = dict.fromkeys([*kinds, next_token.FULL, *next_token.KINDS])
        super().__init__(*arguments, **settings, kinds=tuple(kinds))
        self._params: dict[int, SamplingParams] = {}

    def clear(self) -> None:
        """Drop all requests, and free the cache's memory."""
        super().clear()
        self._params.clear()

    def finish(self, request: int) -> None:
        """Free the pages of a request, whether it has stopped or not."""
        self._detach(request)
        super().finish(request)
        del self._params[request]

    def cancel(self, request: int) -> None:
        """Drop a request, which may wait for a row."""
        queue = deque(item for item in self._queue if item[0] != request)
        if len(queue) == len(self._queue):
            self.finish(request)
        else:
            self._queue = queue
            del self._params[request]

    def truncate(self, request: int, token_ids: Sequence[int]) -> None:
        """Stop a request after the last of `token_ids`, its prompt and tokens up to there."""
        self._detach(request)
        row = self._rows[request]
        row.length, row.pending, row.is_waiting = len(token_ids) - 1, token_ids[-1], True

    def _detach(self, request: int) -> None:
        """Ignore what chunks in flight sample for a request."""
        for chunk in self._in_flight:
            chunk.rows[:] = [item for item in chunk.rows if item[0] != request]
        self._rows[request].in_flight = 0

    def resume_with(
        self,
        request: int,
        tokens: Sequence[int],
        budget: int,
        *,
        sample_key: np.ndarray,
        params: SamplingParams,
    ) -> None:
        """Resume a stopped request with other settings.

        Args:
            request: Number of the request.
            tokens: Ids to prefill after what it has sampled.
            budget: Tokens that it may sample.
            sample_key: Key uint32 [2] of these.
            params: How these are drawn.
        """
        self.resume([(request, tokens, budget)])
        self._keys[self._rows[request].slot], self._params[request] = sample_key, params

    @property
    def num_rows(self) -> int:
        """Return the number of requests that decode side by side."""
        return self._rows_per_shard * self.num_shards

    @property
    def num_queued(self) -> int:
        """Return the number of requests without a row."""
        return len(self._queue)

    @property
    def max_total_tokens(self) -> int:
        """Return the limit on a request's prompt and completion together."""
        return self._max_total_tokens

    @property
    def num_free_pages(self) -> int:
        """Return the number of free pages of all shards."""
        return sum(shard.pool.num_free for shard in self._shards)

    @property
    def lacks_pages(self) -> bool:
        """Return True if running, returning or next requests lack pages; rows do not count."""
        return any(map(self._is_short, self._shards)) or self._lacks_pages_for_next

    @property
    def _lacks_pages_for_next(self) -> bool:
        """Return True if the requests that will get a row need more pages than are free."""
        running = [shard.missing(row) for shard in self._shards for row in shard.to_decode]
        prompts: set[Prompt] = set()
        num_free = self.num_free_pages - sum(running)
        for _, request in islice(self._queue, max(self.num_rows - len(running), 0)):
            num_prefilled = len(request.prompt_ids) - 1
            longest = num_prefilled + min(self.programs.num_steps, request.budget)
            prompt = request.prompt
            is_shared = prompt in prompts or any(prompt in shard.prefixes for shard in self._shards)
            prompts.add(prompt)
            num_shared = num_prefilled // self.page_tokens if is_shared else 0
            num_free -= pages_for(longest, self.page_tokens) - num_shared
        return num_free < 0

    def _is_short(self, shard: BlockScheduler) -> bool:
        if sum(map(shard.missing, shard.to_decode)) > shard.pool.num_free:
            return True
        is_away = any(row.saved is not None and not row.is_waiting for row in shard.rows.values())
        if is_away and shard.next_back() is None:
            return True
        has_row = sum(row.may_run for row in shard.resident) < self._rows_per_shard
        return bool(self._queue) and has_row and self._free_shard() is None

    def _draw_by(self, numbers: Sequence[int], temperature: float, top_p: float) -> None:
        """Remember how these requests are drawn."""
        for number in numbers:
            self._params[number] = SamplingParams(temperature, top_p)

    def _kind_for(self, running: list[list[Row]]) -> str:
        """Return the cheapest kind that draws for every row."""
        kinds = {self._kind_of(*self._params[row.request]) for rows in running for row in rows}
        return max(kinds, key=next_token.KINDS.index)

    def _ways_of(self, running: list[list[Row]], num_rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Return temperature and `top_p` by row, float32 [r]."""
        params = np.ones((2, self.num_shards * num_rows), np.float32)
        for shard, rows in enumerate(running):
            for index, row in enumerate(rows[:num_rows], start=shard * num_rows):
                params[:, index] = self._params[row.request]
        return params[0], params[1]

"""Engine for requests that arrive one at a time, with per-request sampling settings.

Unlike `sampling/engine.py`, this engine stores temperature and `top_p` per request. These and the
random key can change when a request resumes. A request can be cancelled at any time, or truncated
to a prefix of its tokens; keys and values after the prefix are overwritten on resumption.

If a request is cancelled or truncated while a chunk is in flight, the chunk's samples are ignored.
The chunk writes to the cache before any later chunk, so the next owner of a page overwrites its
keys and values.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from jaxrl.sampling import next_token
from jaxrl.sampling.blocks import count_pages
from jaxrl.sampling.engine import Engine
from jaxrl.sampling.scheduler import BlockScheduler, PromptTokens, Row


class SamplingParams(NamedTuple):
    """Sampling settings of a request; see `Engine.submit`."""

    temperature: float
    top_p: float


class ServedEngine(Engine):
    """Engine with sampling settings per request."""

    compiles_all_kinds = True
    """True to compile all sampling methods, False for only the given `kinds`."""

    def __init__(self, *args: Any, **kwargs: Any):
        """Create an engine. It compiles the sampling methods in the optional `kinds` first."""
        # The first method has programs for the fewest rows, so it should be a common one.
        kinds = kwargs.pop("kinds", ())
        if self.compiles_all_kinds:
            kinds = dict.fromkeys([*kinds, next_token.FULL, *next_token.KINDS])
        super().__init__(*args, **kwargs, kinds=tuple(kinds))
        self._params: dict[int, SamplingParams] = {}

    def clear(self) -> None:
        """Drop all requests and free the cache's memory."""
        super().clear()
        self._params.clear()

    def finish(self, request: int) -> None:
        """Free the pages of a stopped or running request."""
        self._discard_in_flight_samples(request)
        super().finish(request)
        del self._params[request]

    def cancel(self, request: int) -> None:
        """Drop a running or queued request."""
        queue = deque(item for item in self._queue if item[0] != request)
        if len(queue) == len(self._queue):
            self.finish(request)
        else:
            self._queue = queue
            del self._params[request]

    def truncate(self, request: int, token_ids: Sequence[int]) -> None:
        """Stop a request and truncate its cache to `token_ids`, a prefix of all its ids."""
        self._discard_in_flight_samples(request)
        row = self._rows[request]
        row.length, row.pending, row.is_waiting = len(token_ids) - 1, token_ids[-1], True

    def can_truncate(self, request: int, num_tokens: int) -> bool:
        """Return True if `truncate` supports this number of tokens.

        Recurrent layers store only the state after the last token that was read.
        """
        row = self._rows[request]
        return not self.num_states or (row.in_flight == 0 and row.length + 1 == num_tokens)

    def _discard_in_flight_samples(self, request: int) -> None:
        """Discard the samples of a request in chunks that are in flight."""
        for chunk in self._in_flight:
            chunk.rows[:] = [item for item in chunk.rows if item[0] != request]
        self._rows[request].in_flight = 0

    def resume_with_params(
        self,
        request: int,
        tokens: Sequence[int],
        budget: int,
        *,
        sample_key: np.ndarray,
        params: SamplingParams,
    ) -> None:
        """Resume a stopped request with new settings.

        Args:
            request: ID of the request.
            tokens: Token ids to prefill after the cached tokens.
            budget: Maximum number of tokens to sample.
            sample_key: Random key, uint32 [2].
            params: Temperature and `top_p`.
        """
        self.resume([(request, tokens, budget)])
        self._keys[self._rows[request].slot], self._params[request] = sample_key, params

    @property
    def num_rows(self) -> int:
        """Maximum number of requests that decode concurrently."""
        return self._rows_per_shard * self.num_shards

    @property
    def num_queued(self) -> int:
        """Number of requests without a row."""
        return len(self._queue)

    @property
    def max_total_tokens(self) -> int:
        """Maximum number of prompt and completion tokens combined."""
        return self._max_total_tokens

    @property
    def num_free_pages(self) -> int:
        """Number of free pages in all shards."""
        return sum(shard.pool.num_free for shard in self._shards)

    @property
    def is_out_of_pages(self) -> bool:
        """True if running, swapped-out or next requests need more pages than are free."""
        return any(map(self._is_shard_out_of_pages, self._shards)) or self._queue_exceeds_free_pages

    @property
    def _queue_exceeds_free_pages(self) -> bool:
        """True if the next requests to get a row need more pages than are free."""
        running = [
            shard.count_missing_pages(row) for shard in self._shards for row in shard.scheduled_rows
        ]
        prompts: set[PromptTokens] = set()
        num_free = self.num_free_pages - sum(running)
        for _, request in islice(self._queue, max(self.num_rows - len(running), 0)):
            num_prefilled = len(request.prompt_ids) - 1
            longest = num_prefilled + min(self.programs.num_steps, request.budget)
            prompt = request.prompt
            is_shared = prompt in prompts or any(prompt in shard.prefixes for shard in self._shards)
            prompts.add(prompt)
            num_shared = num_prefilled // self.page_tokens if is_shared else 0
            num_free -= count_pages(longest, self.page_tokens) - num_shared
        return num_free < 0

    def _is_shard_out_of_pages(self, shard: BlockScheduler) -> bool:
        if sum(map(shard.count_missing_pages, shard.scheduled_rows)) > shard.pool.num_free:
            return True
        has_swapped_out = any(
            row.saved is not None and not row.is_waiting for row in shard.rows.values()
        )
        if has_swapped_out and shard.find_row_to_swap_in() is None:
            return True
        has_row = sum(row.may_run for row in shard.resident_rows) < self._rows_per_shard
        return bool(self._queue) and has_row and self._select_shard() is None

    def _set_sampling_params(
        self, requests: Sequence[int], temperature: float, top_p: float
    ) -> None:
        """Store the sampling settings of the new requests with these ids."""
        for request in requests:
            self._params[request] = SamplingParams(temperature, top_p)

    def _select_chunk_method(self, running: list[list[Row]]) -> str:
        """Return the cheapest sampling method for the settings of all running rows."""
        kinds = {
            self._select_sampling_method(*self._params[row.request])
            for rows in running
            for row in rows
        }
        return max(kinds, key=next_token.KINDS.index)

    def _get_sampling_params(
        self, running: list[list[Row]], num_rows: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the temperature and `top_p` of each row, float32 [r]."""
        params = np.ones((2, self.num_shards * num_rows), np.float32)
        for shard, rows in enumerate(running):
            for index, row in enumerate(rows[:num_rows], start=shard * num_rows):
                params[:, index] = self._params[row.request]
        return params[0], params[1]

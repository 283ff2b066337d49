"""Host-side page allocator for the KV cache.

Pages are reference-counted: rows share them, and a page is free once its reference count is 0.
Allocation is deterministic: the lowest free pages come first.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable


class PagePool:
    """Reference-counted pages of one mesh shard.

    Attributes:
        num_pages: Total number of pages, numbered from 0.
        peak_used: Peak number of pages in use.
    """

    def __init__(self, num_pages: int):
        self.num_pages = num_pages
        self.peak_used = 0
        self._free = list(range(num_pages))  # heap
        self._ref_counts = [0] * num_pages

    @property
    def num_free(self) -> int:
        """Return the number of free pages."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Allocate the `count` lowest free pages, and set their reference counts to 1."""
        pages = [heapq.heappop(self._free) for _ in range(count)]
        for page in pages:
            self._ref_counts[page] = 1
        self.peak_used = max(self.peak_used, self.num_pages - len(self._free))
        return pages

    def retain(self, pages: Iterable[int]) -> None:
        """Increment the reference counts of allocated pages."""
        for page in pages:
            self._ref_counts[page] += 1

    def free(self, pages: Iterable[int]) -> None:
        """Decrement reference counts; free pages that reach zero."""
        for page in pages:
            self._ref_counts[page] -= 1
            if not self._ref_counts[page]:
                heapq.heappush(self._free, page)


def count_pages(num_tokens: int, page_tokens: int) -> int:
    """Return the number of pages needed for `num_tokens` tokens."""
    return -(-num_tokens // page_tokens)

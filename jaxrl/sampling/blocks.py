"""Owners of the pages of the cache, on the host.

A page belongs to as many rows as share it, and is free again when the last of them gives it up.
Everything here follows from the calls, never from the clock: the lowest free page is taken first.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable


class PagePool:
    """The pages of one shard of the mesh.

    Attributes:
        num_pages: all there are, numbered from 0.
        most_used: pages in use at once, at most so far.
    """

    def __init__(self, num_pages: int):
        self.num_pages = num_pages
        self.most_used = 0
        self._free = list(range(num_pages))  # a heap
        self._num_users = [0] * num_pages

    @property
    def num_free(self) -> int:
        """Pages that `take` could give."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Return the lowest free pages, each with one user; there must be so many."""
        pages = [heapq.heappop(self._free) for _ in range(count)]
        for page in pages:
            self._num_users[page] = 1
        self.most_used = max(self.most_used, self.num_pages - len(self._free))
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Adds one user for each of some pages in use."""
        for page in pages:
            self._num_users[page] += 1

    def give_up(self, pages: Iterable[int]) -> None:
        """Takes one user from each; a page without any is free."""
        for page in pages:
            self._num_users[page] -= 1
            if not self._num_users[page]:
                heapq.heappush(self._free, page)

    def num_users(self, page: int) -> int:
        """Rows that share a page; 0: it is free."""
        return self._num_users[page]


def pages_for(num_tokens: int, page_tokens: int) -> int:
    """Pages that hold so many tokens."""
    return -(-num_tokens // page_tokens)

"""The order in which a run takes its tasks or demonstrations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

import grain

Item = TypeVar("Item")


class Stream(Generic[Item]):
    """Items in an endless order that is shuffled anew each epoch.

    The order is a function of the seed, so one number, how many items were taken, is all a restart
    needs; it does not depend on how many processes read.
    """

    def __init__(self, items: Sequence[Item], *, seed: int):
        """A stream over `items`, which are held."""
        self.num_items = len(items)
        self._order = grain.MapDataset.source(list(items)).seed(seed).shuffle().repeat()

    def take(self, position: int, count: int) -> list[Item]:
        """Items `position` to `position + count - 1` of the stream."""
        return [self._order[index] for index in range(position, position + count)]

"""Balanced partitioning of items of different sizes, with the largest differencing method."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def karmarkar_karp(sizes: Sequence[int], num_parts: int, *, equal_size: bool) -> list[list[int]]:
    """Split items into parts with nearly equal total sizes.

    Karmarkar and Karp, "The differencing method of set partitioning" (1982). Each partial solution
    has `num_parts` bundles. Each step joins the two solutions with the largest spreads, until one
    solution remains. A join merges the heaviest bundle of the first solution with the lightest
    bundle of the second, and so on. The result is deterministic and close to optimal.

    Args:
        sizes: Size of each item, 0 or more, such as the number of tokens of a sequence.
        num_parts: Number of parts, 1 or more.
        equal_size: True to give every part the same number of items. Each partial solution then
            starts from `num_parts` items of similar size instead of one item.

    Returns:
        The item indices of each part in ascending order. Parts are sorted by first item, with empty
        parts last.
    """
    order = sorted(range(len(sizes)), key=lambda i: (sizes[i], i))
    step = num_parts if equal_size else 1
    starts = [
        _Solution([(int(sizes[i]), [i]) for i in order[at : at + step]], num_parts)
        for at in range(0, len(order), step)
    ]
    # The serial number breaks ties between equal spreads, so the result is deterministic.
    heap = [(-solution.spread, serial, solution) for serial, solution in enumerate(starts)]
    heapq.heapify(heap)
    serial = len(heap)
    while len(heap) > 1:
        _, _, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        joined = first.join(second)
        heapq.heappush(heap, (-joined.spread, serial, joined))
        serial += 1
    bundles = [sorted(items) for _, items in heap[0][2].bundles] if heap else [[]] * num_parts
    return sorted(bundles, key=lambda items: items[0] if items else len(sizes))


class _Solution:
    """Partial solution: some of the items, split into bundles, largest sum first."""

    def __init__(self, bundles: list[tuple[int, list[int]]], num_parts: int) -> None:
        empty: list[tuple[int, list[int]]] = [(0, []) for _ in range(num_parts - len(bundles))]
        self.bundles = sorted([*bundles, *empty], key=lambda bundle: (-bundle[0], bundle[1]))

    @property
    def spread(self) -> int:
        """Difference between the largest and the smallest bundle sum."""
        return self.bundles[0][0] - self.bundles[-1][0]

    def join(self, other: _Solution) -> _Solution:
        """Merge the largest bundle of one solution with the smallest of the other, and so on."""
        pairs = zip(self.bundles, reversed(other.bundles), strict=True)
        return _Solution(
            [(a_sum + b_sum, a + b) for (a_sum, a), (b_sum, b) in pairs], len(self.bundles)
        )

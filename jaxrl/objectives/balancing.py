"""Spreading work of different sizes evenly: the largest differencing method."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def largest_differencing(
    sizes: Sequence[int], num_parts: int, *, equal_size: bool
) -> list[list[int]]:
    """Splits items into parts whose sums of sizes are close to each other.

    Karmarkar and Karp, "The differencing method of set partitioning" (1982). It keeps partial
    solutions, each of `num_parts` bundles, and joins the two whose bundles differ most, the
    heaviest bundle of one with the lightest of the other, until one solution is left. Good, not
    optimal; the same input always gives the same result.

    Args:
        sizes: of the items, 0 or more, as tokens of sequences.
        num_parts: how many parts, 1 or more.
        equal_size: every part gets the same number of items. The partial solutions then start
            from `num_parts` items of similar size rather than from one item.

    Returns:
        The indices of each part's items in ascending order; parts by their first item, empty ones
        last.
    """
    order = sorted(range(len(sizes)), key=lambda i: (sizes[i], i))
    step = num_parts if equal_size else 1
    starts = [
        _Solution([(int(sizes[i]), [i]) for i in order[at : at + step]], num_parts)
        for at in range(0, len(order), step)
    ]
    # The serial number decides between equal spreads and so makes the result repeatable.
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
    """A partial solution: some of the items, split into bundles, the heaviest first."""

    def __init__(self, bundles: list[tuple[int, list[int]]], num_parts: int) -> None:
        empty: list[tuple[int, list[int]]] = [(0, []) for _ in range(num_parts - len(bundles))]
        self.bundles = sorted([*bundles, *empty], key=lambda bundle: (-bundle[0], bundle[1]))

    @property
    def spread(self) -> int:
        """The heaviest bundle less the lightest: what is still to be evened out."""
        return self.bundles[0][0] - self.bundles[-1][0]

    def join(self, other: _Solution) -> _Solution:
        pairs = zip(self.bundles, reversed(other.bundles), strict=True)
        return _Solution(
            [(a_sum + b_sum, a + b) for (a_sum, a), (b_sum, b) in pairs], len(self.bundles)
        )

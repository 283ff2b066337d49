"""Endless shuffled stream of tasks or demonstrations from a single source or a mixture."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True)
class Source(Generic[Item]):
    """Items of one source, with the source's sampling weight in a mixture."""

    items: Sequence[Item]
    weight: float | Fraction = 1.0  # positive; relative to the weights of the other sources
    name: str = ""  # name in metrics


class Mixture(Sequence[Item]):
    """Concatenation of sources. A stream samples each source in proportion to its weight."""

    def __init__(self, sources: Sequence[Source[Item]]):
        self.sources = tuple(sources)

    def __len__(self) -> int:
        return sum(len(source.items) for source in self.sources)

    def __iter__(self) -> Iterator[Item]:
        for source in self.sources:
            yield from source.items

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index += len(self) * (index < 0)
        for source in self.sources if index >= 0 else ():
            if index < len(source.items):
                return source.items[index]
            index -= len(source.items)
        raise IndexError(index)


class Stream(Generic[Item]):
    """Endless stream of items, reshuffled every epoch.

    The order depends only on the items and the seed, so a stream can resume from the number of
    items taken so far. In a mixture, the order of sources depends only on their weights, and each
    source is shuffled separately.
    """

    def __init__(self, items: Sequence[Item], *, seed: int):
        import grain  # imported late, because it imports JAX, which config checks do not need

        sources = items.sources if isinstance(items, Mixture) else (Source(items=items),)
        self.num_items = len(items)
        self._sources = sources
        # Convert the decimal weights to fractions and scale them to integers, without rounding.
        exact = [Fraction(str(source.weight)) for source in sources]
        scale = math.lcm(*(weight.denominator for weight in exact))
        self._weights = [int(weight * scale) for weight in exact]
        self._orders = [
            # The first source uses the run's seed. The prime 2654435761 separates the other seeds.
            grain.MapDataset.source(source.items)
            .seed((seed + index * 2_654_435_761) % 2**32)
            .shuffle()
            .repeat()
            for index, source in enumerate(sources)
        ]

    @property
    def epoch_length(self) -> int:
        """Number of items after which every source has completed an epoch (rounded)."""
        total = sum(self._weights)
        parts = zip(self._sources, self._weights, strict=True)
        return max(math.ceil(len(source.items) * total / weight) for source, weight in parts)

    def get_items(self, position: int, count: int) -> list[Item]:
        """Return `count` items of the stream, starting at `position`."""
        locations = (locate_item(self._weights, item) for item in range(position, position + count))
        return [self._orders[source][index] for source, index in locations]

    def compute_metrics(self, position: int) -> dict[str, float]:
        """Return the number of items and epochs of each source in the first `position` items.

        Returns {} unless the stream is a mixture.
        """
        if len(self._sources) == 1:
            return {}
        counts = count_items_by_source(self._weights, position)
        metrics: dict[str, float] = {}
        for source, count in zip(self._sources, counts, strict=True):
            metrics[f"tasks/{source.name}/taken"] = count
            metrics[f"tasks/{source.name}/epochs"] = count / len(source.items)
        return metrics


def count_items_by_source(weights: Sequence[int], position: int) -> list[int]:
    """Count the items of each source among a mixture's first `position` items.

    The first source gets its share, rounded up; the remaining sources divide the rest in the same
    way. The first two counts differ from their exact shares by at most 1; the n-th, by n - 1.

    Args:
        weights: Positive integer weight of each source.
        position: Number of items of the mixture.
    """
    counts, rest, total = [], position, sum(weights)
    for weight in weights:
        remainder = rest * (total - weight) // total
        counts.append(rest - remainder)
        rest, total = remainder, total - weight
    return counts


def locate_item(weights: Sequence[int], position: int) -> tuple[int, int]:
    """Return the index of the source of a mixture's item, and the item's index in the source."""
    before, after = (
        count_items_by_source(weights, position),
        count_items_by_source(weights, position + 1),
    )
    source = next(i for i, (a, b) in enumerate(zip(before, after, strict=True)) if b > a)
    return source, before[source]


@dataclass(frozen=True)
class FixedStream(Generic[Item]):
    """Fixed list of items with the interface of `Stream`. `first_index` is the first index."""

    items: Sequence[Item]
    first_index: int

    @property
    def num_items(self) -> int:
        """Number of items in the list, which is also the epoch length."""
        return len(self.items)

    epoch_length = num_items

    def get_items(self, start: int, count: int) -> list[Item]:
        """Return `count` items, from stream index `start` on."""
        return [*self.items[start - self.first_index :][:count]]

    def compute_metrics(self, num_taken: int) -> dict[str, float]:
        """Return {}, since there are no sources to report."""
        return {}

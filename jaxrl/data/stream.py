"""The order in which a run takes its tasks or demonstrations."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True)
class Source(Generic[Item]):
    """Items that a stream draws from, and how often."""

    items: Sequence[Item]
    weight: float = 1.0  # above 0; draws from it in proportion to this
    name: str = ""  # in metrics


class Mixture(Sequence[Item]):
    """Sources one after another; a stream draws from each by its weight."""

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
    """Items in an endless order that is shuffled anew each epoch.

    The order is a function of the seed, not of the number of processes, so a restart needs only
    the number of items taken. In a mixture each source has its own order and epochs, and the
    weights alone say which source comes next.
    """

    def __init__(self, items: Sequence[Item], *, seed: int):
        import grain  # late: it imports JAX, and a configuration is checked without

        sources = items.sources if isinstance(items, Mixture) else (Source(items=items),)
        self.num_items = len(items)
        self._sources = sources
        # Weights are exact fractions of their decimal text, and scaled to whole numbers.
        exact = [Fraction(str(source.weight)) for source in sources]
        scale = math.lcm(*(weight.denominator for weight in exact))
        self._shares = [int(weight * scale) for weight in exact]
        self._orders = [
            # Of one source the seed is the run's; 2654435761 is a prime that parts the others.
            grain.MapDataset.source(source.items)
            .seed((seed + place * 2_654_435_761) % 2**32)
            .shuffle()
            .repeat()
            for place, source in enumerate(sources)
        ]

    @property
    def epoch_length(self) -> int:
        """Draws in which every item comes, of each source, but for the rounding of shares."""
        total = sum(self._shares)
        parts = zip(self._sources, self._shares, strict=True)
        return max(math.ceil(len(source.items) * total / share) for source, share in parts)

    def take(self, position: int, count: int) -> list[Item]:
        """Items `position` to `position + count - 1` of the stream."""
        places = (next_of(self._shares, at) for at in range(position, position + count))
        return [self._orders[source][index] for source, index in places]

    def metrics(self, position: int) -> dict[str, float]:
        """Draws and epochs of each source of several, in the first `position` items."""
        if len(self._sources) == 1:
            return {}
        counts = taken_of(self._shares, position)
        metrics: dict[str, float] = {}
        for source, count in zip(self._sources, counts, strict=True):
            metrics[f"tasks/{source.name}/taken"] = count
            metrics[f"tasks/{source.name}/epochs"] = count / len(source.items)
        return metrics


def taken_of(shares: Sequence[int], position: int) -> list[int]:
    """Divide a mixture's first `position` items among its sources, by integer shares above 0.

    The first source takes its share, rounded up, and the others share the rest likewise. So the
    first two are within 1 of their shares, and the n-th within n - 1, since each before it rounds.
    """
    counts, rest, total = [], position, sum(shares)
    for share in shares:
        left = rest * (total - share) // total
        counts.append(rest - left)
        rest, total = left, total - share
    return counts


def next_of(shares: Sequence[int], position: int) -> tuple[int, int]:
    """The source of item `position` of a mixture, and its place among that source's."""
    now, then = taken_of(shares, position), taken_of(shares, position + 1)
    source = next(i for i, (a, b) in enumerate(zip(now, then, strict=True)) if b > a)
    return source, now[source]

"""Arrays by token beside ids, positions and states, and sums over tokens.

An architecture declares arrays by token. A pass leaves those of `Architecture.recorded`: the
sampler keeps them, rollouts carry them with the trajectory, packing lays them beside the ids, and
passes of training find them again. Those of `Tower.arrays` follow from a text and its attachments.
None of these rooms reads what is recorded; engine and packing fill what a tower asks for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np


@dataclass(frozen=True, kw_only=True)
class TokenArray:
    """An array by token, as an architecture declares it.

    Attributes:
        shape: of one token's value.
        dtype: of the value.
        fill: of padding, and of tokens that no pass has read.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    fill: int

    def filled(self, *sizes: int) -> np.ndarray:
        """An array `[*sizes, *shape]` of `fill`."""
        return np.full((*sizes, *self.shape), self.fill, self.dtype)

    @property
    def num_bytes(self) -> int:
        """Bytes of one token's value."""
        return math.prod(self.shape) * self.dtype.itemsize


@runtime_checkable
class Statistics(Protocol):
    """Metrics and a loss of a tree of sums over tokens, which passes of a model leave."""

    def metrics(self, sums: Any) -> dict[str, jax.Array]:
        """Scalars by name of metric, of the sums over a mini-batch."""
        ...

    def balance_weights(self, sums: Any, coef: jax.Array) -> Any:
        """The constant part of `balance_loss`, of the sums over the whole mini-batch."""
        ...

    def balance_loss(self, weights: Any, sums: Any) -> jax.Array:
        """A micro-batch's part of a loss that has experts used alike; a scalar."""
        ...


@dataclass(kw_only=True)
class AuxArrays:
    """Inputs of a pass over M tokens beside ids and positions, and outputs beside states.

    Attributes:
        given: arrays `[M, ...]` by name: of `Architecture.recorded`, and of `Tower.arrays`.
        attached: the attachments among the tokens: `patches` and `places` in the full pass, what
            `Tower.embeddings` gave in the sampler's; None without any.
        counted: float32 `[M]`, how often each token counts in `statistics`; None: none are wanted.
        records: `recorded` is wanted.
        recorded: after the pass, arrays `[M, ...]` by name.
        statistics: after the pass, a tree of sums over tokens; None of a model that has none, see
            `Architecture.statistics`.
    """

    given: Mapping[str, jax.Array] = field(default_factory=dict)
    attached: Any = None
    counted: jax.Array | None = None
    records: bool = False
    recorded: dict[str, jax.Array] = field(default_factory=dict)
    statistics: Any = None

"""What goes with the tokens of a pass beside their ids and positions, and with their states.

An architecture declares arrays by token. A pass leaves those of `Architecture.recorded`: the
sampler keeps them, rollouts carry them with the trajectory, packing lays them beside the ids, and
passes of training find them again. Those of `Tower.arrays` follow from a text and its attachments.
None of these rooms reads what is recorded; engine and packing fill what a tower asks for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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


@dataclass(kw_only=True)
class Beside:
    """What a pass over M tokens is given beside ids and positions, and leaves beside states.

    Attributes:
        given: arrays `[M, ...]` by name: of `Architecture.recorded`, and of `Tower.arrays`.
        attached: the attachments among the tokens: `patches` and `places` in the full pass, what
            `Tower.embeddings` gave in the sampler's; None without any.
        counted: float32 `[M]`, how often each token counts in `statistics`; None: none are wanted.
        records: `recorded` is wanted.
        recorded: after the pass, arrays `[M, ...]` by name.
        statistics: after the pass, a tree of sums over tokens; None of a model that has none.
    """

    given: Mapping[str, jax.Array] = field(default_factory=dict)
    attached: Any = None
    counted: jax.Array | None = None
    records: bool = False
    recorded: dict[str, jax.Array] = field(default_factory=dict)
    statistics: Any = None

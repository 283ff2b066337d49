"""Auxiliary inputs and outputs of a forward pass: per-token arrays, and sums over tokens.

An architecture declares its per-token arrays. Arrays in `Architecture.recorded_specs` are outputs:
the sampler stores them, trajectories carry them, packing aligns them with the token ids, and
training reads them. Only the architecture interprets the values of recorded arrays. Arrays in
`Tower.input_arrays` are inputs: the engine and packing compute them from text and its attachments.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np


@dataclass(frozen=True, kw_only=True)
class TokenArraySpec:
    """Shape and dtype of a per-token array.

    Attributes:
        shape: Shape of one token's value.
        dtype: Dtype of the array.
        fill: Value for padding, and for tokens that no pass has processed.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    fill: int

    def full(self, *sizes: int) -> np.ndarray:
        """Return an array of shape `[*sizes, *shape]` filled with `fill`."""
        return np.full((*sizes, *self.shape), self.fill, self.dtype)

    @property
    def num_bytes(self) -> int:
        """Return the number of bytes per token."""
        return math.prod(self.shape) * self.dtype.itemsize


@runtime_checkable
class StatisticsReader(Protocol):
    """Functions that compute metrics and a loss from a forward pass's sums over tokens."""

    def metrics(self, sums: Any) -> dict[str, jax.Array]:
        """Compute scalar metrics from the sums over a mini-batch."""
        ...

    def balance_weights(self, sums: Any, coef: jax.Array) -> Any:
        """Compute the constant `weights` of `balance_loss` from the sums over a mini-batch."""
        ...

    def balance_loss(self, weights: Any, sums: Any) -> jax.Array:
        """Compute a micro-batch's contribution to the load-balancing loss, a scalar."""
        ...


@dataclass(kw_only=True)
class AuxArrays:
    """Auxiliary inputs and outputs of a forward pass over M tokens.

    Attributes:
        inputs: Input arrays `[M, ...]` by name: those of `Architecture.recorded_specs` and
            `Tower.input_arrays`.
        attached: Attachments among the tokens, or None. In the full pass, a dict of `patches` and
            `coords`; in the sampler, the result of `Tower.encode`.
        statistics_weights: Weight of each token in `statistics`, float32 `[M]`; None skips the
            statistics.
        records: True to output the arrays of `Architecture.recorded_specs`.
        recorded: Output arrays `[M, ...]` by name.
        statistics: Output tree of sums over tokens, or None; see `StatisticsReader`.
    """

    inputs: Mapping[str, jax.Array] = field(default_factory=dict)
    attached: Any = None
    statistics_weights: jax.Array | None = None
    records: bool = False
    recorded: dict[str, jax.Array] = field(default_factory=dict)
    statistics: Any = None

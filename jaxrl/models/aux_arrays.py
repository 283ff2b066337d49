"""Per-token arrays other than ids, positions and states, and sums over tokens.

An architecture declares per-token arrays. A pass outputs those in `Architecture.recorded`: the
sampler stores them, rollouts carry them with the trajectory, packing aligns them with the ids, and
training passes read them. Those in `Tower.input_arrays` follow from a text and its attachments.
Sampler, rollouts and packing do not interpret recorded arrays; engine and packing compute a
tower's arrays.
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
    """Declaration of a per-token array.

    Attributes:
        shape: Shape of one token's value.
        dtype: Dtype of the value.
        fill: Value for padding, and for tokens that no pass has processed.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    fill: int

    def full(self, *sizes: int) -> np.ndarray:
        """Return an array `[*sizes, *shape]` of `fill`."""
        return np.full((*sizes, *self.shape), self.fill, self.dtype)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of one token's value."""
        return math.prod(self.shape) * self.dtype.itemsize


@runtime_checkable
class Statistics(Protocol):
    """Metrics and loss computed from a tree of sums over tokens that a pass outputs."""

    def metrics(self, sums: Any) -> dict[str, jax.Array]:
        """Compute scalar metrics from the sums over a mini-batch."""
        ...

    def balance_weights(self, sums: Any, coef: jax.Array) -> Any:
        """Compute the constant part of `balance_loss` from the sums over the mini-batch."""
        ...

    def balance_loss(self, weights: Any, sums: Any) -> jax.Array:
        """Compute a micro-batch's share of the load-balancing loss over experts; a scalar."""
        ...


@dataclass(kw_only=True)
class AuxArrays:
    """Auxiliary inputs and outputs of a forward pass over M tokens.

    Attributes:
        inputs: Input arrays `[M, ...]` by name: those of `Architecture.recorded` and
            `Tower.input_arrays`.
        attached: Attachments among the tokens, or None: `patches` and `places` in the full pass,
            the result of `Tower.encode` in the sampler's.
        statistics_weights: Weight of each token in `statistics`, float32 `[M]`; None requests no
            statistics.
        records: True to request `recorded`.
        recorded: Output arrays `[M, ...]` by name.
        statistics: Output tree of sums over tokens; None if the model has none, see
            `Architecture.statistics`.
    """

    inputs: Mapping[str, jax.Array] = field(default_factory=dict)
    attached: Any = None
    statistics_weights: jax.Array | None = None
    records: bool = False
    recorded: dict[str, jax.Array] = field(default_factory=dict)
    statistics: Any = None

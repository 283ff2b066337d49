"""Per-token loss metrics, and their reduction to one number across micro-batches and updates."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float


@struct.dataclass
class Metric:
    """Per-token values `[R, T]` of a metric, or a number after reduction."""

    value: Any  # float32
    reduction: str = struct.field(pytree_node=False, default="mean")  # key of REDUCTIONS

    def reduce(self, loss_mask: Bool[Array, "R T"], token_weights: Float[Array, "R T"]) -> Metric:
        """Reduce to the partial result of one micro-batch, without a gradient."""
        values = jax.lax.stop_gradient(self.value)
        reduced = REDUCTIONS[self.reduction].reduce(values, loss_mask, token_weights)
        return dataclasses.replace(self, value=reduced)

    def combine(self, other: Metric) -> Metric:
        """Combine the partial results of two micro-batches."""
        combined = REDUCTIONS[self.reduction].combine(self.value, other.value)
        return dataclasses.replace(self, value=combined)

    def finish(self, num_tokens: Float[Array, ""]) -> Metric:
        """Compute the final result from the partial result of `num_tokens` sampled tokens."""
        finished = REDUCTIONS[self.reduction].finish(self.value, num_tokens)
        return dataclasses.replace(self, value=finished)


@dataclass(frozen=True, kw_only=True)
class Reduction:
    """Reduction of per-token values to one number.

    Attributes:
        reduce: Function that maps a micro-batch's values, loss mask and token weights `[R, T]` to a
            partial result.
        combine: Function that combines the partial results of two micro-batches.
        finish: Function that maps the partial result of all micro-batches and their number of
            sampled tokens to the final result.
        merge: Function that merges the final results of several updates, on the host.
    """

    reduce: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
    combine: Callable[[jax.Array, jax.Array], jax.Array]
    finish: Callable[[jax.Array, jax.Array], jax.Array]
    merge: Callable[[Sequence[float]], Any]


REDUCTIONS = {
    # Without tokens, the result is NaN, because a 0 would appear as a dip in the curve.
    "mean": Reduction(
        reduce=lambda values, loss_mask, token_weights: (values * loss_mask).sum(),
        combine=jnp.add,
        finish=lambda total, num_tokens: total / num_tokens,
        merge=np.mean,
    ),
    "maximum": Reduction(
        reduce=lambda values, loss_mask, token_weights: jnp.where(loss_mask, values, 0.0).max(),
        combine=jnp.maximum,
        finish=lambda largest, num_tokens: largest / jnp.where(num_tokens > 0, 1.0, jnp.nan),
        merge=max,
    ),
    "loss": Reduction(
        reduce=lambda values, loss_mask, token_weights: (values * token_weights).sum(),
        combine=jnp.add,
        finish=lambda total, num_tokens: total,
        merge=np.mean,
    ),
}
"""`mean_or_nan` and `maximum` (at least 0) over sampled tokens; `loss` is summed like the loss."""


def mean_or_nan(values: Sequence[float]) -> float:
    """Return the mean, or NaN if there are no values; unlike numpy, do not warn."""
    return float(np.mean(values)) if values else math.nan

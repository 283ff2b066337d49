"""Measurements of a loss on its tokens, and reductions of many measurements to one number."""

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
    """A measurement: of each token `[R, T]` as a loss returns it, else one number."""

    value: Any  # float32
    reduction: str = struct.field(pytree_node=False, default="mean")  # a name in REDUCTIONS

    def reduce(self, loss_mask: Bool[Array, "R T"], token_weights: Float[Array, "R T"]) -> Metric:
        """A micro-batch's number, as yet unfinished; no gradient flows through it.

        Args:
            loss_mask: True where the policy sampled the token.
            token_weights: by which the losses of tokens are added up.
        """
        values = jax.lax.stop_gradient(self.value)
        reduced = REDUCTIONS[self.reduction].reduce(values, loss_mask, token_weights)
        return dataclasses.replace(self, value=reduced)

    def combine(self, other: Metric) -> Metric:
        """The unfinished number of two micro-batches from their own."""
        combined = REDUCTIONS[self.reduction].combine(self.value, other.value)
        return dataclasses.replace(self, value=combined)

    def finish(self, num_tokens: Float[Array, ""]) -> Metric:
        """The number of all micro-batches, in which `num_tokens` tokens were sampled."""
        finished = REDUCTIONS[self.reduction].finish(self.value, num_tokens)
        return dataclasses.replace(self, value=finished)


@dataclass(frozen=True, kw_only=True)
class Reduction:
    """Reduction of the values of many tokens to one.

    Attributes:
        reduce: values, loss mask and token weights `[R, T]` of a micro-batch to a number.
        combine: the numbers of two micro-batches to that of both.
        finish: the number of all micro-batches, and how many tokens they sampled, to the result.
        merge: results of several updates to one, on the host.
    """

    reduce: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
    combine: Callable[[jax.Array, jax.Array], jax.Array]
    finish: Callable[[jax.Array, jax.Array], jax.Array]
    merge: Callable[[Sequence[float]], Any]


REDUCTIONS = {
    # Of no token at all there is no mean: not a number, rather than a dip to 0 in a curve.
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
"""`mean` and `maximum` (0 where all are below) of sampled tokens; `loss`: a sum like the loss's."""


def mean(values: Sequence[float]) -> float:
    """The mean; NaN, without a warning, for no values."""
    return float(np.mean(values)) if values else math.nan

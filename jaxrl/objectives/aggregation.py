"""Aggregation of token losses to one number: a weighted sum, fixed before the batch is cut up."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Float, Int, ScalarLike

Array = jax.Array | np.ndarray


def token_weights(
    loss_masks: Sequence[Bool[np.ndarray, " _"]],
    aggregation: Callable[[Int[np.ndarray, " N"]], Float[Array, " N"] | ScalarLike],
) -> list[Float[np.ndarray, " _"]]:
    """The weight of every token of a mini-batch; its loss is `(weights * values).sum()`.

    Because the counts are the whole mini-batch's, the sums over its micro-batches add up to the
    same loss however it is cut, packed or sharded.

    Args:
        loss_masks: of each trajectory, True where it is trained on.
        aggregation: one of those below: from the tokens counted in each trajectory to the weight
            of one of them.

    Raises:
        ValueError: an aggregation of one's own returned something else.
    """
    token_counts = np.array([mask.sum() for mask in loss_masks], np.int64)
    weights = np.asarray(aggregation(token_counts))
    is_weight = np.isfinite(weights) & (weights >= 0)  # below 0 the policy would learn the opposite
    if weights.shape not in ((), token_counts.shape) or not is_weight.all():
        raise ValueError(
            f"config.loss.aggregation returned {list(weights.shape)} with {is_weight.sum()} "
            f"weights; expected finite [{len(token_counts)}] from 0, one a trajectory."
        )
    weights = np.broadcast_to(weights, token_counts.shape)
    return [
        np.where(mask, weight, 0.0).astype(np.float32)
        for mask, weight in zip(loss_masks, weights, strict=True)
    ]


def token_mean(token_counts: Int[Array, " N"]) -> ScalarLike:
    """Mean over all tokens: a trajectory counts as often as it has tokens.

    Args:
        token_counts: tokens of each trajectory that are trained on, 0 in some.
    """
    return 1.0 / token_counts.sum().clip(1)


def seq_mean_token_mean(token_counts: Int[Array, " N"]) -> Float[Array, " N"]:
    """Means over each trajectory, averaged over the trajectories that have tokens."""
    return 1.0 / (token_counts.clip(1) * _num_trajectories(token_counts))


def seq_mean_token_sum(token_counts: Int[Array, " N"]) -> ScalarLike:
    """Sums over each trajectory, averaged over the trajectories that have tokens."""
    return 1.0 / _num_trajectories(token_counts)


def seq_mean_token_sum_norm(
    token_counts: Int[Array, " N"], *, max_response_tokens: int
) -> ScalarLike:
    """`seq_mean_token_sum` divided by a length that is the same in every mini-batch."""
    return 1.0 / (_num_trajectories(token_counts) * max_response_tokens)


def _num_trajectories(token_counts: Int[Array, " N"]) -> Any:
    return (token_counts > 0).sum().clip(1)


AGGREGATIONS: dict[str, Callable[..., Any]] = {
    "token-mean": token_mean,
    "seq-mean-token-mean": seq_mean_token_mean,
    "seq-mean-token-sum": seq_mean_token_sum,
    "seq-mean-token-sum-norm": seq_mean_token_sum_norm,
}
"""Aggregations by `loss.aggregation`; the names are verl's."""

ARRAYS = ("token_counts",)
"""Arrays that an aggregation may ask for: int [N], tokens trained on of each trajectory of a
mini-batch, also of those that the update leaves out since they have no signal."""

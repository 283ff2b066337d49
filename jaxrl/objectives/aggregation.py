"""Aggregation of per-token losses: a weighted sum, with weights fixed per mini-batch."""

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
    """Compute the weight of every token in a mini-batch; the loss is `(weights * values).sum()`.

    Tokens are counted over the complete mini-batch, so the loss is the same however the mini-batch
    is split, packed or sharded.

    Args:
        loss_masks: Mask of each trajectory, True for tokens that are trained on.
        aggregation: Function that maps each trajectory's token count to the weight of each of its
            tokens, such as `token_mean`.

    Raises:
        ValueError: A user-supplied aggregation returned the wrong shape or an invalid weight.
    """
    token_counts = np.array([mask.sum() for mask in loss_masks], np.int64)
    weights = np.asarray(aggregation(token_counts))
    # A negative weight would reverse the gradient.
    is_valid = np.isfinite(weights) & (weights >= 0)
    if weights.shape not in ((), token_counts.shape) or not is_valid.all():
        raise ValueError(
            f"config.loss.aggregation returned {list(weights.shape)} with {is_valid.sum()} "
            f"weights; expected [{len(token_counts)}] finite weights of at least 0, one per "
            "trajectory."
        )
    weights = np.broadcast_to(weights, token_counts.shape)
    return [
        np.where(mask, weight, 0.0).astype(np.float32)
        for mask, weight in zip(loss_masks, weights, strict=True)
    ]


def token_mean(token_counts: Int[Array, " N"]) -> ScalarLike:
    """Return the weight that averages over all tokens, so that longer trajectories count more.

    Args:
        token_counts: Number of trained tokens in each trajectory; may be 0.
    """
    return 1.0 / token_counts.sum().clip(1)


def seq_mean_token_mean(token_counts: Int[Array, " N"]) -> Float[Array, " N"]:
    """Return weights that average over tokens, then over trajectories that have tokens."""
    return 1.0 / (token_counts.clip(1) * _count_trajectories(token_counts))


def seq_mean_token_sum(token_counts: Int[Array, " N"]) -> ScalarLike:
    """Return weights that sum over tokens, then average over trajectories that have tokens."""
    return 1.0 / _count_trajectories(token_counts)


def seq_mean_token_sum_norm(
    token_counts: Int[Array, " N"], *, max_response_tokens: int
) -> ScalarLike:
    """Return `seq_mean_token_sum` divided by `max_response_tokens`, a constant length."""
    return 1.0 / (_count_trajectories(token_counts) * max_response_tokens)


def _count_trajectories(token_counts: Int[Array, " N"]) -> Any:
    return (token_counts > 0).sum().clip(1)


AGGREGATIONS: dict[str, Callable[..., Any]] = {
    "token-mean": token_mean,
    "seq-mean-token-mean": seq_mean_token_mean,
    "seq-mean-token-sum": seq_mean_token_sum,
    "seq-mean-token-sum-norm": seq_mean_token_sum_norm,
}
"""Aggregations by `loss.aggregation`, with verl's names."""

ARRAYS = ("token_counts",)
"""Arrays that an aggregation may request.

`token_counts` is int [N], trained tokens per trajectory, including trajectories without signal.
"""

"""How per-token values become one number: a weighted sum, fixed before the batch is cut up."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int, ScalarLike

Array = jax.Array | np.ndarray

MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def token_weights(
    loss_mask: Bool[Array, "R T"],
    segment_ids: Int[Array, "R T"],
    *,
    mode: str,
    num_tokens: ScalarLike,
    num_trajectories: ScalarLike,
    scale: int | float | None = None,
) -> Float[Array, "R T"]:
    """Weights such that the aggregate of `values` is `(weights * values).sum()`.

    The names are verl's. Because the counts are the whole mini-batch's, the sums over its
    micro-batches add up to the same loss however it is cut, packed or sharded. All weights are
    zero where there is no token to train on.

    Computes in numpy where all arguments are numpy (packing, on the host), else in JAX.

    Args:
        loss_mask: True where the policy sampled the token.
        segment_ids: which trajectory a token belongs to, unique in the mini-batch; 0 on padding.
            Every trajectory is here whole.
        mode: one of
            `token-mean`, over all sampled tokens;
            `seq-mean-token-sum`, sums over each trajectory, averaged over trajectories;
            `seq-mean-token-mean`, means over each trajectory, averaged over trajectories;
            `seq-mean-token-sum-norm`, as token-sum, divided by `scale`.
        num_tokens: sampled tokens in the mini-batch.
        num_trajectories: trajectories in the mini-batch with at least one sampled token.
        scale: tokens; `rollout.max_response_tokens`, never an array's length. Read by
            `seq-mean-token-sum-norm` only.
    """
    arrays = (loss_mask, segment_ids, num_tokens, num_trajectories)
    xp = jnp if any(isinstance(array, jax.Array) for array in arrays) else np
    if mode == "token-mean":
        denominator = xp.maximum(num_tokens, 1)
    elif mode == "seq-mean-token-sum":
        denominator = xp.maximum(num_trajectories, 1)
    elif mode == "seq-mean-token-mean":
        # Two places in the sorted ids of all sampled tokens tell how many share one.
        sampled = xp.sort(xp.where(loss_mask, segment_ids, 0), axis=None)
        first = xp.searchsorted(sampled, segment_ids, side="left")
        lengths = xp.searchsorted(sampled, segment_ids, side="right") - first
        denominator = xp.maximum(lengths, 1) * xp.maximum(num_trajectories, 1.0)
    elif mode == "seq-mean-token-sum-norm":
        if scale is None:
            raise ValueError(
                "aggregation 'seq-mean-token-sum-norm' came without `scale`; expected "
                "`rollout.max_response_tokens`."
            )
        denominator = xp.maximum(num_trajectories, 1) * scale
    else:
        raise ValueError(
            f"unknown aggregation {mode!r}; expected one of {', '.join(MODES)}. "
            "Set `loss.aggregation`."
        )
    return xp.where(loss_mask, 1.0 / denominator, 0.0).astype(xp.float32)

"""Window entropies, which measure the policy's uncertainty, and KL weights based on them.

ARES (https://arxiv.org/abs/2510.08457) lowers the KL penalty at tokens that begin an uncertain
window.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int, ScalarLike

Array = jax.Array | np.ndarray


def window_entropy(
    entropies: Float[Array, "R T"],
    loss_mask: Bool[Array, "R T"],
    segment_ids: Int[Array, "R T"],
    *,
    window: int,
) -> tuple[Float[Array, "R T"], Bool[Array, "R T"]]:
    """Compute the mean entropy of the next `window` sampled tokens after each token.

    `W[t] = mean(H[t + 1], ..., H[t + window])`, skipping prompts and observations. The token itself
    is excluded: the paper's text includes it, but the paper's code does not.

    Computes in numpy if all arguments are numpy arrays (on the host), else in JAX.

    Args:
        entropies: Entropies in nats of the distributions that the tokens were sampled from.
        loss_mask: True for tokens that the policy sampled.
        segment_ids: Trajectory of each token; contiguous, 0 on padding.
        window: Number of tokens, at least 1.

    Returns:
        The window entropies in nats, 0 where undefined, and a mask of where they are defined: at
        sampled tokens followed by at least `window` sampled tokens of the same trajectory.
    """
    xp = _get_array_module(entropies, loss_mask, segment_ids)
    T = loss_mask.shape[1]
    # Move sampled tokens to the front of the row in order; the rest acts as padding.
    order = xp.argsort(~loss_mask, axis=1, stable=True)
    values = xp.take_along_axis(entropies, order, axis=1)
    ids = xp.take_along_axis(xp.where(loss_mask, segment_ids, 0), order, axis=1)
    values, ends = (xp.pad(x, ((0, 0), (0, window))) for x in (values, ids))
    sums = sum(values[:, shift : shift + T] for shift in range(1, window + 1))
    is_complete = (ids != 0) & (ends[:, window:] == ids)
    # Scatter the results back to the original positions.
    index = xp.maximum(xp.cumsum(loss_mask, axis=1) - 1, 0)
    valid = loss_mask & xp.take_along_axis(is_complete, index, axis=1)
    return xp.where(valid, xp.take_along_axis(sums, index, axis=1) / window, 0.0), valid


def high_window_entropy_mask(
    window_entropies: Float[Array, "R T"],
    valid: Bool[Array, "R T"],
    *,
    threshold: ScalarLike | None,
) -> Bool[Array, "R T"]:
    """Return a mask of the tokens whose window entropy is defined and >= `threshold`.

    Computes in numpy if all arguments are numpy arrays, else in JAX.

    Args:
        window_entropies: Window entropies in nats, from `window_entropy`.
        valid: True where the window entropy is defined.
        threshold: Threshold in nats. None, before the first estimate, gives an all-False mask.
    """
    if threshold is None:
        return _get_array_module(window_entropies, valid).zeros_like(valid)
    return valid & (window_entropies >= threshold)


def kl_weights(
    high_entropy_mask: Bool[Array, "R T"],
    *,
    kl_coef: ScalarLike,
    low_factor: ScalarLike,
    bucket_scale: ScalarLike | Float[Array, "#R #T"],
) -> Float[Array, "R T"]:
    """Compute KL coefficients: `kl_coef * bucket_scale`, times `low_factor` at uncertain tokens.

    The paper defines this token-level budget. The paper's code instead has one coefficient per
    difficulty bucket. Computes in numpy if all arguments are numpy arrays or plain numbers, else in
    JAX.

    Args:
        high_entropy_mask: Mask from `high_window_entropy_mask`.
        kl_coef: Coefficient of the KL term in the loss.
        low_factor: Factor for tokens in `high_entropy_mask`; 0.5 in ARES.
        bucket_scale: Factor for all tokens: the multiplier for the trajectory's difficulty.
    """
    xp = _get_array_module(high_entropy_mask, kl_coef, low_factor, bucket_scale)
    weights = kl_coef * bucket_scale * xp.where(high_entropy_mask, low_factor, 1.0)
    return weights.astype(xp.float32)


def _get_array_module(*arrays: ScalarLike | Array) -> Any:
    return jnp if any(isinstance(array, jax.Array) for array in arrays) else np

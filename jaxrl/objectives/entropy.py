"""Window entropies, which tell where the policy is undecided, and the KL that they relax.

ARES (https://arxiv.org/abs/2510.08457) lets a policy stray further from its reference at the
tokens from which on it is undecided.
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
    """Mean entropy of the `window` tokens that the policy samples after each token.

    `W[t] = mean(H[t + 1], ..., H[t + window])`, where prompts and observations are passed over as
    if they were not there. The token itself does not count: the paper's text includes it, its
    code does not.

    Computes in numpy where all arguments are numpy (on the host), else in JAX.

    Args:
        entropies: nats, of the distribution each token was sampled from.
        loss_mask: True where the policy sampled the token.
        segment_ids: which trajectory a token belongs to; contiguous, 0 on padding.
        window: tokens, at least 1.

    Returns:
        The window entropies in nats, 0 where undefined, and where they are defined: at sampled
        tokens that at least `window` sampled tokens of the same trajectory follow.
    """
    xp = _numpy_or_jax(entropies, loss_mask, segment_ids)
    T = loss_mask.shape[1]
    # Sampled tokens move to the front of the row, keeping their order; the rest are padding.
    order = xp.argsort(~loss_mask, axis=1, stable=True)
    values = xp.take_along_axis(entropies, order, axis=1)
    ids = xp.take_along_axis(xp.where(loss_mask, segment_ids, 0), order, axis=1)
    values, ends = (xp.pad(x, ((0, 0), (0, window))) for x in (values, ids))
    sums = sum(values[:, shift : shift + T] for shift in range(1, window + 1))
    is_complete = (ids != 0) & (ends[:, window:] == ids)
    # And back to where they stood.
    place = xp.maximum(xp.cumsum(loss_mask, axis=1) - 1, 0)
    valid = loss_mask & xp.take_along_axis(is_complete, place, axis=1)
    return xp.where(valid, xp.take_along_axis(sums, place, axis=1) / window, 0.0), valid


def high_window_entropy_mask(
    window_entropies: Float[Array, "R T"],
    valid: Bool[Array, "R T"],
    *,
    threshold: ScalarLike | None,
) -> Bool[Array, "R T"]:
    """True where a defined window entropy reaches `threshold`; nowhere where that is None.

    Computes in numpy where all arguments are numpy, else in JAX.

    Args:
        window_entropies: nats, from `window_entropy`.
        valid: where they are defined.
        threshold: nats; None before the first estimate.
    """
    if threshold is None:
        return _numpy_or_jax(window_entropies, valid).zeros_like(valid)
    return valid & (window_entropies >= threshold)


def kl_weights(
    high_entropy_mask: Bool[Array, "R T"],
    *,
    kl_coef: ScalarLike,
    low_factor: ScalarLike,
    bucket_scale: ScalarLike | Float[Array, "#R #T"],
) -> Float[Array, "R T"]:
    """Coefficient of each token's KL term: `kl_coef * bucket_scale`, less where undecided.

    The paper's token-level budget; its code has one coefficient a bucket of difficulty instead.
    Computes in numpy where all arguments are numpy or plain numbers, else in JAX.

    Args:
        high_entropy_mask: from `high_window_entropy_mask`.
        kl_coef: of the KL term in the loss.
        low_factor: multiplies the coefficient where `high_entropy_mask` is True; ARES has 0.5.
        bucket_scale: multiplies all of it; the dual variable of the trajectory's difficulty.
    """
    xp = _numpy_or_jax(high_entropy_mask, kl_coef, low_factor, bucket_scale)
    weights = kl_coef * bucket_scale * xp.where(high_entropy_mask, low_factor, 1.0)
    return weights.astype(xp.float32)


def _numpy_or_jax(*arrays: ScalarLike | Array) -> Any:
    return jnp if any(isinstance(array, jax.Array) for array in arrays) else np

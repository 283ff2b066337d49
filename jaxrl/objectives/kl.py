"""Per-token estimators of the KL divergence from an anchor policy."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

Array = jax.Array | np.ndarray


def k1(log_ratios: Float[Array, "R T"]) -> Float[Array, "R T"]:
    """Compute `-d` for log-ratios d, an unbiased estimate that may be negative.

    Args:
        log_ratios: `anchor_logprobs - logprobs` in nats; 0 at masked tokens.
    """
    return -log_ratios


def k2(log_ratios: Float[Array, "R T"]) -> Float[Array, "R T"]:
    """Compute `d^2 / 2`, a biased estimate with an unbiased gradient of the KL divergence."""
    return log_ratios**2 / 2


def k3(log_ratios: Float[Array, "R T"]) -> Float[Array, "R T"]:
    """Compute `exp(d) - d - 1`, an unbiased, non-negative estimate; verl's `low_var_kl`.

    As in verl, `d` is clipped to [-20, 20] and the estimate to 10, with zero gradient beyond.
    """
    d = jnp.clip(log_ratios, -20.0, 20.0)
    return jnp.clip(jnp.expm1(d) - d, -10.0, 10.0)


def absolute_log_ratio(log_ratios: Float[Array, "R T"]) -> Float[Array, "R T"]:
    """Return the absolute value of the log-ratio, verl's `abs`."""
    # jnp.abs has gradient 1 at 0, the value of every log-ratio at the first update.
    return jnp.sign(log_ratios) * log_ratios


def kl_estimate(
    logprobs: Float[Array, "R T"],
    anchor_logprobs: Float[Array, "R T"],
    loss_mask: Bool[Array, "R T"] | None = None,
    *,
    estimator: Callable[..., Any] = k3,
) -> Float[jax.Array, "R T"]:
    """Estimate KL(current || anchor) at each token sampled by the current policy.

    See http://joschu.net/blog/kl-approx.html.

    Args:
        logprobs: Log-probabilities in nats under the parameters being trained.
        anchor_logprobs: Log-probabilities in nats under the policy to stay close to.
        loss_mask: False where the estimate and both gradients must be zero, even if inputs are not
            finite. None if all inputs are finite and the caller masks the result.
        estimator: Function of the log-ratios, such as `k3`.
    """
    # Masking only the result would leave 0 * inf in the gradient.
    d = jnp.asarray(anchor_logprobs - logprobs)
    if loss_mask is not None:
        d = jnp.where(loss_mask, d, 0.0)
    value: jax.Array = estimator(d)
    return value if loss_mask is None else jnp.where(loss_mask, value, 0.0)


def use_k2_gradient(estimator: Callable[..., Any]) -> Callable[..., Any]:
    """Return an estimator with the values of `estimator` and the gradient of `k2`."""

    def estimate(log_ratios: Float[Array, "R T"]) -> Float[Array, "R T"]:
        value, straight = estimator(log_ratios), k2(log_ratios)
        return jax.lax.stop_gradient(value) + (straight - jax.lax.stop_gradient(straight))

    return estimate


KL_ESTIMATORS: dict[str, Callable[..., Any]] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "abs": absolute_log_ratio,
    "k1+": use_k2_gradient(k1),
    "k2+": use_k2_gradient(k2),
    "k3+": use_k2_gradient(k3),
    "abs+": use_k2_gradient(absolute_log_ratio),
}
"""Estimators by `kl.estimator`."""

ARRAYS = ("log_ratios",)
"""Arrays that an estimator may request."""

"""Estimates of the KL divergence to an anchor policy, token by token."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

Array = jax.Array | np.ndarray


def k1(log_ratios: Float[Array, "R T"]) -> Float[Array, "R T"]:
    """Unbiased estimate, of either sign.

    Args:
        log_ratios: nats, `anchor_logprobs - logprobs`; 0 where nothing is estimated.
    """
    return -log_ratios


def k2(log_ratios: Float[Array, "R T"]) -> Float[Array, "R T"]:
    """Biased estimate; its gradient is in expectation that of the KL divergence."""
    return log_ratios**2 / 2


def k3(log_ratios: Float[Array, "R T"]) -> Float[Array, "R T"]:
    """Unbiased estimate that is never negative: `exp(d) - d - 1`; verl's `low_var_kl`.

    As there, `d` is kept within 20 and the estimate within 10: the gradient is zero beyond.
    """
    d = jnp.clip(log_ratios, -20.0, 20.0)
    return jnp.clip(jnp.expm1(d) - d, -10.0, 10.0)


def absolute(log_ratios: Float[Array, "R T"]) -> Float[Array, "R T"]:
    """The size of the log-ratio."""
    # The gradient of jnp.abs is 1 at 0, where every first update starts.
    return jnp.sign(log_ratios) * log_ratios


def kl_estimate(
    logprobs: Float[Array, "R T"],
    anchor_logprobs: Float[Array, "R T"],
    loss_mask: Bool[Array, "R T"] | None = None,
    *,
    estimator: Callable[..., Any] = k3,
) -> Float[jax.Array, "R T"]:
    """Per-token estimate of KL(current || anchor) on tokens the current policy sampled.

    http://joschu.net/blog/kl-approx.html.

    Args:
        logprobs: nats, under the parameters being trained.
        anchor_logprobs: nats, under the policy to stay close to.
        loss_mask: where False, the estimate and both gradients are exactly zero, whatever the
            inputs hold. None where every entry is finite and the result is masked by the caller.
        estimator: one of those above, of the log-ratios.

    Raises:
        ValueError: an estimator of one's own returned something else.
    """
    # Masking the result alone would leave 0 * inf in the gradient.
    d = jnp.asarray(anchor_logprobs - logprobs)
    if loss_mask is not None:
        d = jnp.where(loss_mask, d, 0.0)
    value: jax.Array = estimator(d)
    if jnp.shape(value) != d.shape:
        raise ValueError(
            f"config.kl.estimator returned the shape {list(jnp.shape(value))}; expected "
            f"{list(d.shape)}, a number a token."
        )
    return value if loss_mask is None else jnp.where(loss_mask, value, 0.0)


def with_gradient_of_k2(estimator: Callable[..., Any]) -> Callable[..., Any]:
    """The estimator's value, with the gradient of `k2`."""

    def estimate(log_ratios: Float[Array, "R T"]) -> Float[Array, "R T"]:
        value, straight = estimator(log_ratios), k2(log_ratios)
        return jax.lax.stop_gradient(value) + (straight - jax.lax.stop_gradient(straight))

    return estimate


KL_ESTIMATORS: dict[str, Callable[..., Any]] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "abs": absolute,
    "k1+": with_gradient_of_k2(k1),
    "k2+": with_gradient_of_k2(k2),
    "k3+": with_gradient_of_k2(k3),
    "abs+": with_gradient_of_k2(absolute),
}
"""Estimators by `kl.estimator`."""

ARRAYS = ("log_ratios",)
"""Arrays that an estimator may ask for."""

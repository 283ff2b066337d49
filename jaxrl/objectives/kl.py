"""Estimates of the KL divergence to an anchor policy, token by token."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

Array = jax.Array | np.ndarray


def kl_estimate(
    logprobs: Float[Array, "R T"],
    anchor_logprobs: Float[Array, "R T"],
    loss_mask: Bool[Array, "R T"] | None = None,
    *,
    estimator: str = "k3",
) -> Float[jax.Array, "R T"]:
    """Per-token estimate of KL(current || anchor) on tokens the current policy sampled.

    http://joschu.net/blog/kl-approx.html. With `d = anchor_logprobs - logprobs`:

    - `k1`: `-d`, unbiased, of either sign.
    - `k2`: `d**2 / 2`, biased; its gradient is in expectation that of the KL divergence.
    - `k3`: `exp(d) - d - 1`, unbiased and never negative; verl's `low_var_kl`. As there, `d` is
      kept within 20 and the estimate within 10: the gradient is zero beyond.
    - `abs`: `|d|`.

    A `+` after the name keeps its value and takes the gradient of `k2`.

    Args:
        logprobs: nats, under the parameters being trained.
        anchor_logprobs: nats, under the policy to stay close to.
        loss_mask: where False, the estimate and both gradients are exactly zero, whatever the
            inputs hold. None where every entry is finite and the result is masked by the caller.
        estimator: one of the names above.
    """
    names = [name + suffix for suffix in ("", "+") for name in _ESTIMATORS]
    if estimator not in names:
        raise ValueError(
            f"unknown KL estimator {estimator!r}; expected one of {', '.join(names)}. "
            "Set `kl.estimator`."
        )
    # Masking the result alone would leave 0 * inf in the gradient.
    d = jnp.asarray(anchor_logprobs - logprobs)
    if loss_mask is not None:
        d = jnp.where(loss_mask, d, 0.0)
    value = _ESTIMATORS[estimator.removesuffix("+")](d)
    if estimator.endswith("+"):
        k2 = _k2(d)
        value = jax.lax.stop_gradient(value) + (k2 - jax.lax.stop_gradient(k2))
    return value


def _k1(d: jax.Array) -> jax.Array:
    return -d


def _k2(d: jax.Array) -> jax.Array:
    return d**2 / 2


def _k3(d: jax.Array) -> jax.Array:
    d = jnp.clip(d, -20.0, 20.0)
    return jnp.clip(jnp.expm1(d) - d, -10.0, 10.0)


def _abs(d: jax.Array) -> jax.Array:
    return jnp.sign(d) * d  # the gradient of jnp.abs is 1 at 0, where every first update starts


_ESTIMATORS = {"k1": _k1, "k2": _k2, "k3": _k3, "abs": _abs}

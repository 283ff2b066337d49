"""Policy loss with correction, KL and entropy terms, compiled into the update step."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxrl.models.policy import Model
from jaxrl.objectives.corrections import importance_weights
from jaxrl.objectives.kl import kl_estimate
from jaxrl.objectives.metrics import Metric
from jaxrl.runtime.compilation import get_or_create
from jaxrl.training.method import KLSettings, LossSettings, Method
from jaxrl.training.update import TokenLoss, UpdateStep
from jaxrl.types import Batch
from jaxrl.utils.callables import NamedFunction


def make_policy_loss(method: Method) -> TokenLoss:
    """Return the policy loss with KL and entropy terms.

    Cached: equal settings return the same function, so compiled programs are reused.
    """
    settings = method.loss, method.kl
    return get_or_create(partial(_build_policy_loss, *settings), name="policy loss", key=settings)


def make_update_step(
    model: Model, method: Method, optimizer: optax.GradientTransformation
) -> UpdateStep:
    """Create the update step of the train stage, with the method's loss."""
    has_user_code = method.loss_has_user_code or method.optimizer.schedule.is_user_code
    return UpdateStep(
        model,
        make_policy_loss(method),
        optimizer,
        temperature=method.temperature,
        entropy_gradient=method.loss.entropy_coef != 0,
        balance_coef=method.balance_coef,
        offload=method.optimizer.offload,
        shares_programs=not has_user_code,
    )


def _build_policy_loss(loss: LossSettings, kl: KLSettings) -> TokenLoss:
    policy_loss = loss.policy_loss  # objectives/losses.py, by loss.name
    is_corrected = loss.correction["level"] != "none"
    kl_coef = kl.coef if kl.apply_to == "loss" else 0.0

    def token_loss(
        logprobs: jax.Array, entropies: jax.Array, batch: Batch
    ) -> tuple[jax.Array, dict[str, Metric]]:
        mask = batch.loss_mask
        # With one optimizer step per batch, the policy before the update is the current one.
        current = jax.lax.stop_gradient(logprobs)
        scored = current if batch.old_logprobs is None else batch.old_logprobs
        old = batch.rollout_logprobs if loss.old_logprobs == "sampler" else scored
        computed = {"logprobs": logprobs, "old_logprobs": old, "entropies": entropies}

        def call_with_arrays(function: NamedFunction) -> Any:
            arrays = (
                computed[n] if n in computed else getattr(batch, n) for n in function.arguments
            )
            return function(*arrays)

        # The policy term. The update multiplies it by `token_weights` (minibatches.py).
        values, loss_metrics = call_with_arrays(policy_loss)
        # Observations that are trained on have no sampler log-probability.
        is_sampled = mask if loss.mask_observations else mask & (batch.rollout_logprobs != 0)
        logprob_diff = jnp.where(is_sampled, scored - batch.rollout_logprobs, 0.0)
        metrics = {
            "actor/entropy": Metric(entropies),
            **{f"actor/{name}": Metric(value) for name, value in loss_metrics.items()},
            "rollout_corr/logprob_diff_mean": Metric(jnp.abs(logprob_diff)),
            "rollout_corr/logprob_diff_max": Metric(jnp.abs(logprob_diff), "maximum"),
            "rollout_corr/k3_kl": Metric(kl_estimate(batch.rollout_logprobs, scored, is_sampled)),
        }
        # Correct for the difference between sampler and trainer.
        if is_corrected:
            weights = importance_weights(
                old, batch.rollout_logprobs, mask, batch.segment_ids, **loss.correction
            )
            values = values * weights
            metrics["rollout_corr/weight_mean"] = Metric(weights)
            metrics["rollout_corr/weight_square_mean"] = Metric(weights**2)
        if loss.token_filter is not None:  # in objectives/losses.py
            passes_filter = call_with_arrays(loss.token_filter)
            values = jnp.where(passes_filter, values, 0.0)
            metrics["actor/gated_share"] = Metric(jnp.where(mask & ~passes_filter, 1.0, 0.0))
        metrics["actor/pg_loss"] = Metric(values, "loss")
        if loss.term is not None:  # in objectives/losses.py
            term_values, term_metrics = call_with_arrays(loss.term)
            values = values + loss.term_coef * term_values
            metrics |= {f"actor/{name}": Metric(value) for name, value in term_metrics.items()}
            metrics["actor/term_loss"] = Metric(term_values, "loss")
        # The KL and entropy terms.
        if kl_coef:
            anchor = batch.ref_logprobs if kl.anchor == "ref" else old
            assert anchor is not None
            divergence = kl_estimate(logprobs, anchor, mask, estimator=kl.estimator)
            kl_weights = kl_coef if batch.kl_weights is None else batch.kl_weights
            values = values + kl_weights * divergence
            metrics["actor/kl_loss"] = Metric(divergence, "loss")
        if loss.entropy_coef:
            values = values - loss.entropy_coef * jnp.where(mask, entropies, 0.0)
        return values, metrics

    return token_loss

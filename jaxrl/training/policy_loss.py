"""The policy loss: ratio, correction, KL and entropy terms, compiled into the update step."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.objectives.corrections import importance_weights
from jaxrl.objectives.kl import kl_estimate
from jaxrl.objectives.losses import PolicyLoss
from jaxrl.objectives.metrics import Metric
from jaxrl.runtime.compilation import kept
from jaxrl.training.method import KL, Loss, Method, token_fields
from jaxrl.training.packing import BatchShape
from jaxrl.training.update import TokenLoss, UpdateStep
from jaxrl.types import Batch
from jaxrl.utils.callables import Chosen, failure_text


class LossError(ValueError):
    """The function that `loss.name` or `kl.estimator` names cannot be used."""


def make_policy_loss(method: Method) -> TokenLoss:
    """The policy loss with its KL and entropy terms; a term that is off adds nothing.

    One function for equal settings, by which its programs are found again.
    """
    settings = method.loss, method.kl
    return kept(partial(_policy_loss, *settings), name="policy loss", key=settings)


def _policy_loss(loss: Loss, kl: KL) -> TokenLoss:
    policy_loss = loss.policy_loss  # objectives/losses.py, by loss.name
    is_corrected = loss.correction["level"] != "none"
    kl_coef = kl.coef if kl.place == "loss" else 0.0

    def token_loss(
        logprobs: jax.Array, entropies: jax.Array, batch: Batch
    ) -> tuple[jax.Array, dict[str, Metric]]:
        mask = batch.loss_mask
        # With one optimizer step a batch, the policy before the update is the current one.
        current = jax.lax.stop_gradient(logprobs)
        old = current if batch.old_logprobs is None else batch.old_logprobs
        computed = {"logprobs": logprobs, "old_logprobs": old, "entropies": entropies}

        def called(chosen: Chosen) -> Any:
            arrays = (computed[n] if n in computed else getattr(batch, n) for n in chosen.arguments)
            return traced(chosen, *arrays)

        # Not weighted yet: the update multiplies by `token_weights` (minibatches.py).
        values, measured = check_loss(policy_loss, called(policy_loss), logprobs)
        # Of an observation that is trained on, the sampler has no log-probability.
        is_sampled = mask if loss.mask_observations else mask & (batch.rollout_logprobs != 0)
        gap = jnp.where(is_sampled, old - batch.rollout_logprobs, 0.0)
        metrics = {
            "actor/entropy": Metric(entropies),
            **{f"actor/{name}": Metric(value) for name, value in measured.items()},
            "rollout_corr/logprob_diff_mean": Metric(jnp.abs(gap)),
            "rollout_corr/logprob_diff_max": Metric(jnp.abs(gap), "maximum"),
            "rollout_corr/k3_kl": Metric(kl_estimate(batch.rollout_logprobs, old, is_sampled)),
        }
        if is_corrected:
            weights = importance_weights(
                old, batch.rollout_logprobs, mask, batch.segment_ids, **loss.correction
            )
            values = values * weights
            metrics["rollout_corr/weight_mean"] = Metric(weights)
            metrics["rollout_corr/weight_square_mean"] = Metric(weights**2)
        if loss.gate is not None:
            is_open = called(loss.gate)  # objectives/losses.py, by loss.gate.name
            if getattr(is_open, "shape", None) != logprobs.shape or is_open.dtype != jnp.bool_:
                raise LossError(
                    f"config.{loss.gate.key} names {loss.gate.name!r}, which returned "
                    f"{is_open!r:.80}; expected bool {list(logprobs.shape)}, one a token."
                )
            values = jnp.where(is_open, values, 0.0)
            metrics["actor/gated_share"] = Metric(jnp.where(mask & ~is_open, 1.0, 0.0))
        metrics["actor/pg_loss"] = Metric(values, "loss")
        if loss.term is not None:
            # objectives/losses.py, by loss.term.name
            added, term_metrics = check_loss(loss.term, called(loss.term), logprobs)
            if both := sorted(term_metrics.keys() & measured.keys()):
                raise LossError(
                    f"config.{loss.term.key} names {loss.term.name!r}, whose metrics hold "
                    f"{both[0]!r}, which {policy_loss.name!r} measures too; give it another name."
                )
            values = values + loss.term_coef * added
            metrics |= {f"actor/{name}": Metric(value) for name, value in term_metrics.items()}
            metrics["actor/term_loss"] = Metric(added, "loss")
        if kl_coef:
            anchor = batch.ref_logprobs if kl.anchor == "ref" else old
            assert anchor is not None
            # objectives/kl.py, by kl.estimator
            estimator = partial(traced, kl.estimator)
            divergence = kl_estimate(logprobs, anchor, mask, estimator=estimator)
            kl_weights = kl_coef if batch.kl_weights is None else batch.kl_weights
            values = values + kl_weights * divergence
            metrics["actor/kl_loss"] = Metric(divergence, "loss")
        if loss.entropy_coef:
            values = values - loss.entropy_coef * jnp.where(mask, entropies, 0.0)
        return values, metrics

    return token_loss


def traced(chosen: Chosen, *arrays: jax.Array) -> Any:
    """Calls a function of the loss while JAX traces it.

    Raises:
        LossError: names the key, and the line that raised.
    """
    try:
        return chosen(*arrays)
    except (Exception, SystemExit) as error:
        raise LossError(
            f"config.{chosen.key} names {chosen.name!r}, which JAX cannot trace: "
            f"{failure_text(error)}."
        ) from error


def check_update(update: UpdateStep, shape: BatchShape, method: Method) -> None:
    """Refuses functions of the loss that a step of these shapes could not trace or differentiate.

    Raises:
        LossError: names the key, and the line that raised.
    """
    try:
        update.gradient.check(shape, token_fields(method.optimizer, method.filter, method.kl))
    except LossError:
        raise
    except Exception as error:
        if isinstance(error, ValueError) and str(error).startswith("config."):
            raise LossError(str(error)) from error
        # Which of them it was does not show in the error: each is differentiated by itself.
        for chosen in (method.kl.estimator, method.loss.term, method.loss.policy_loss):
            if chosen is not None and chosen.is_own and not _has_gradient(chosen, shape):
                raise LossError(
                    f"config.{chosen.key} names {chosen.name!r}, which JAX cannot differentiate: "
                    f"{failure_text(error)}."
                ) from error
        raise


def _has_gradient(chosen: Chosen, shape: BatchShape) -> bool:
    """True where JAX differentiates a function of the loss in what the policy gives it."""
    sizes = shape.micro_rows, shape.row_tokens
    kinds = {"loss_mask": jnp.bool_, "segment_ids": jnp.int32, "positions": jnp.int32}
    arrays = [
        jax.ShapeDtypeStruct(sizes, kinds.get(name, jnp.float32)) for name in chosen.arguments
    ]
    policys = ("logprobs", "entropies", "log_ratios")
    places = tuple(i for i, name in enumerate(chosen.arguments) if name in policys)
    if not places:  # nothing is differentiated in it
        return True

    def total(*arrays: jax.Array) -> jax.Array:
        loss = chosen(*arrays)
        return jnp.sum(loss.per_token if isinstance(loss, PolicyLoss) else loss)

    try:
        jax.eval_shape(jax.grad(total, argnums=places), *arrays)
    except Exception:
        return False
    return True


def check_loss(chosen: Chosen, result: Any, logprobs: jax.Array) -> PolicyLoss:
    """Refuses anything but a loss for every token: a scalar would train, on padding too.

    Raises:
        LossError: says what the loss returned.
    """
    begin = f"config.{chosen.key} names {chosen.name!r}, "
    if not isinstance(result, PolicyLoss):
        kind = "an array" if isinstance(result, jax.Array) else type(result).__name__
        raise LossError(
            f"{begin}which returned {kind}; expected a PolicyLoss (jaxrl/objectives/losses.py)."
        )
    begin += "whose"
    if not isinstance(result.metrics, Mapping):
        raise LossError(f"{begin} metrics are {type(result.metrics).__name__}; expected a mapping.")
    taken = [one for one in result.metrics if not isinstance(one, str) or one in _MEASURED]
    if taken:
        raise LossError(
            f"{begin} metrics hold {taken[0]!r}; expected texts other than {', '.join(_MEASURED)}, "
            "which are measured of every loss."
        )
    for what, values in {"loss": result.per_token, **result.metrics}.items():
        shape = getattr(values, "shape", None)
        if shape != logprobs.shape:
            got = type(values).__name__ if shape is None else f"of the shape {list(shape)}"
            raise LossError(
                f"{begin} {what} is {got}; expected an array {list(logprobs.shape)}, a number a "
                "token."
            )
    if not jnp.issubdtype(result.per_token.dtype, jnp.floating):
        raise LossError(f"{begin} loss is {result.per_token.dtype}; expected float32.")
    return result


_MEASURED = ("entropy", "pg_loss", "kl_loss", "term_loss", "gated_share")
"""Metrics `actor/..` of every loss."""

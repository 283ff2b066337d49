"""The jitted update step: micro-batches, gradients and the optimizer in one program."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl.models.architecture import Architecture
from jaxrl.models.policy import Model
from jaxrl.objectives.metrics import Metric
from jaxrl.runtime.compilation import CompiledFunction
from jaxrl.runtime.sharding import BATCH, param_shardings, replicated
from jaxrl.types import Batch, Params, TrainState

TokenLoss = Callable[[jax.Array, jax.Array, Batch], tuple[jax.Array, dict[str, Metric]]]
"""Log-probabilities and entropies `[b, T]` and their micro-batch to losses and metrics `[b, T]`.

`token_weights` adds the losses up. Each metric says how it is reduced.
"""


def state_shardings(
    mesh: Mesh, config: Architecture, optimizer: optax.GradientTransformation
) -> TrainState:
    """Optimizer moments lie like their parameters, counters on every device."""
    params = param_shardings(mesh, config)
    whole = replicated(mesh)
    abstract = jax.eval_shape(optimizer.init, config.abstract_params())
    moments = optax.tree_map_params(
        optimizer,
        lambda _, sharding: sharding,
        abstract,
        params,
        transform_non_params=lambda _: whole,
    )
    counters: Any = whole
    return TrainState(params=params, opt_state=moments, num_updates=counters, num_skipped=counters)


def init_state(
    params: Params, mesh: Mesh, config: Architecture, optimizer: optax.GradientTransformation
) -> TrainState:
    """A fresh optimizer around parameters, which are donated: there is one master copy."""

    def init(params: Params) -> TrainState:
        zero = jnp.zeros((), jnp.int32)
        return TrainState(
            params=params, opt_state=optimizer.init(params), num_updates=zero, num_skipped=zero
        )

    shardings = state_shardings(mesh, config, optimizer)
    return jax.jit(init, out_shardings=shardings, donate_argnums=0)(params)


def batch_shardings(mesh: Mesh, batch: Batch) -> Batch:
    """Rows over data and fsdp."""
    return jax.tree.map(lambda _: NamedSharding(mesh, P(None, BATCH, None)), batch)


def put_batch(mesh: Mesh, batch: Batch) -> Batch:
    """A host batch on the mesh; every process holds the whole and gives its own devices' part."""

    def put(array: np.ndarray, sharding: NamedSharding) -> jax.Array:
        return jax.make_array_from_callback(array.shape, sharding, array.__getitem__)

    return jax.tree.map(put, batch, batch_shardings(mesh, batch))


def _micro(batch: Batch, index: jax.Array) -> Batch:
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), batch)


def make_score_step(model: Model, *, temperature: float) -> CompiledFunction:
    """`score(params, batch, num_micro) -> float32 [A, b, T]`, the tokens' log-probabilities."""

    def score(params: Params, batch: Batch, num_micro: jax.Array) -> jax.Array:
        def body(index: jax.Array, logprobs: jax.Array) -> jax.Array:
            one, _ = model.token_logprobs(params, _micro(batch, index), temperature=temperature)
            return logprobs.at[index].set(one)

        return jax.lax.fori_loop(0, num_micro, body, jnp.zeros(batch.token_ids.shape, jnp.float32))

    return CompiledFunction(score, name="score")


def make_gradient(
    model: Model, token_loss: TokenLoss, *, temperature: float, entropy_gradient: bool
) -> Callable[[Params, Batch, jax.Array], tuple[Params, dict[str, Metric]]]:
    """`gradient(params, batch, num_micro) -> (gradients, metrics)`, summed over micro-batches.

    The loop over micro-batches runs a traced number of times and differentiates inside, so that
    one compilation serves any number of them.
    """

    def micro_loss(params: Params, micro: Batch) -> tuple[jax.Array, tuple[Any, jax.Array]]:
        logprobs, entropies = model.token_logprobs(
            params, micro, temperature=temperature, entropy_gradient=entropy_gradient
        )
        values, metrics = token_loss(logprobs, entropies, micro)
        reduced = {
            name: metric.reduce(micro.loss_mask, micro.token_weights)
            for name, metric in metrics.items()
        }
        num_tokens = micro.loss_mask.sum().astype(jnp.float32)
        return (values * micro.token_weights).sum(), (reduced, num_tokens)

    def gradient(
        params: Params, batch: Batch, num_micro: jax.Array
    ) -> tuple[Params, dict[str, Metric]]:
        differentiate = jax.grad(micro_loss, has_aux=True)
        abstract = jax.eval_shape(micro_loss, params, _micro(batch, jnp.int32(0)))[1]
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (params, abstract))
        shardings = param_shardings(model.mesh, model.config)

        def body(index: jax.Array, carry: tuple[Params, Any]) -> tuple[Params, Any]:
            gradients, (metrics, num_tokens) = carry
            new_gradients, (new, num_new) = differentiate(params, _micro(batch, index))
            gradients = jax.tree.map(jnp.add, gradients, new_gradients)
            gradients = jax.lax.with_sharding_constraint(gradients, shardings)
            metrics = {name: metric.combine(new[name]) for name, metric in metrics.items()}
            return gradients, (metrics, num_tokens + num_new)

        gradients, (metrics, num_tokens) = jax.lax.fori_loop(0, num_micro, body, zeros)
        return gradients, {name: metric.finish(num_tokens) for name, metric in metrics.items()}

    return gradient


def make_update_step(
    model: Model,
    token_loss: TokenLoss,
    optimizer: optax.GradientTransformation,
    *,
    temperature: float = 1.0,
    entropy_gradient: bool = False,
) -> CompiledFunction:
    """`update(state, batch, num_micro) -> (state, metrics)`, one optimizer step; donates `state`.

    A step whose gradient is not finite changes neither parameters nor moments and is counted in
    `TrainState.num_skipped`.

    Args:
        model: the policy.
        token_loss: see `TokenLoss`.
        optimizer: applied to the float32 master weights.
        temperature: of the distribution that was sampled from.
        entropy_gradient: the loss differentiates through the entropies.
    """
    gradient = make_gradient(
        model, token_loss, temperature=temperature, entropy_gradient=entropy_gradient
    )
    shardings = state_shardings(model.mesh, model.config, optimizer)

    def update(
        state: TrainState, batch: Batch, num_micro: jax.Array
    ) -> tuple[TrainState, dict[str, Metric]]:
        gradients, metrics = gradient(state.params, batch, num_micro)
        norm = optax.tree.norm(gradients)
        is_finite = jnp.isfinite(norm)

        def apply(state: TrainState) -> TrainState:
            changes, opt_state = optimizer.update(gradients, state.opt_state, state.params)
            return dataclasses.replace(
                state,
                params=optax.apply_updates(state.params, changes),
                opt_state=opt_state,
                num_updates=state.num_updates + 1,
            )

        def skip(state: TrainState) -> TrainState:
            return dataclasses.replace(state, num_skipped=state.num_skipped + 1)

        state = jax.lax.cond(is_finite, apply, skip, state)
        state = jax.lax.with_sharding_constraint(state, shardings)
        return state, {**metrics, "grad_norm": Metric(norm), "skipped": Metric(1.0 - is_finite)}

    return CompiledFunction(update, name="update", donate_argnums=(0,))

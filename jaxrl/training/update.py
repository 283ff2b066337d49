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

from jaxrl.models import qwen
from jaxrl.models.qwen import QwenConfig
from jaxrl.runtime.compilation import CompiledFunction
from jaxrl.runtime.sharding import BATCH, batch_sharding, param_shardings, replicated
from jaxrl.types import Batch, Params, TrainState

TokenLoss = Callable[[jax.Array, jax.Array, Batch], tuple[jax.Array, dict[str, jax.Array]]]
"""Log-probabilities and entropies `[b, T]` and their micro-batch to losses and metrics `[b, T]`.

`token_weights` adds the losses up.

Metrics are averaged over the sampled tokens; of one whose name ends in `_max`, the largest counts;
one that ends in `_loss` is added up like the loss.
"""


class Model:
    """What the update needs to know of the policy, beside its parameters."""

    def __init__(
        self,
        config: QwenConfig,
        mesh: Mesh,
        *,
        num_tokens: int,
        dtype: Any = jnp.float32,
        remat: bool = True,
        logits_chunk_tokens: int = 2048,
    ):
        """Static settings.

        Args:
            config: of the model.
            mesh: rows are split over its data and fsdp axes.
            num_tokens: ids the tokenizer knows; larger ones have probability 0.
            dtype: of activations and matrix products; master weights stay float32.
            remat: recompute layers in the backward pass.
            logits_chunk_tokens: at most so many tokens have their logits in memory at a time.
        """
        self.config = config
        self.mesh = mesh
        self.num_tokens = num_tokens
        self.dtype = dtype
        self.remat = remat
        self.logits_chunk_tokens = logits_chunk_tokens

    def token_logprobs(
        self, params: Params, batch: Batch, *, temperature: float, entropy_gradient: bool = False
    ) -> tuple[jax.Array, jax.Array]:
        """Log-probability of each token given those before it, and the entropy it was drawn with.

        The one place of the shift: index t of the results is about token t, scored by the logits
        at t - 1. A trajectory's first token gets 0.

        Args:
            params: float32 master weights.
            batch: one micro-batch, `[b, T]`.
            temperature: the distribution is softmax(logits / temperature), as in the sampler.
            entropy_gradient: let gradients flow through the entropies.

        Returns:
            Log-probabilities and entropies, float32 [b, T], nats.
        """
        params = self._gather_tables(qwen.train_weights(params, self.dtype))
        hidden = qwen.hidden_states(
            params,
            self.config,
            batch.token_ids,
            batch.positions,
            batch.segment_ids,
            remat=self.remat,
        )
        # Rows stay split over data and fsdp: left alone, the compiler splits the width of
        # activations over fsdp instead, and sums partial activations and logits across devices.
        hidden = jax.lax.with_sharding_constraint(hidden, batch_sharding(self.mesh))
        previous = jnp.pad(hidden[:, :-1], ((0, 0), (1, 0), (0, 0)))
        b, T = batch.token_ids.shape
        width = chunk_width(b, T, self.logits_chunk_tokens)

        def chunk(_: None, xs: tuple[jax.Array, jax.Array]) -> tuple[None, tuple[jax.Array, ...]]:
            hidden, targets = xs
            logits = qwen.unembed(params, self.config, hidden, num_tokens=self.num_tokens)
            return None, _logprobs_and_entropies(logits / temperature, targets, entropy_gradient)

        if width < T:
            # Keeping the logits of all chunks for the backward pass would undo the chunks.
            chunk = jax.checkpoint(chunk)

        def by_chunk(x: jax.Array) -> jax.Array:
            return x.reshape(b, T // width, width, *x.shape[2:]).swapaxes(0, 1)

        _, results = jax.lax.scan(chunk, None, (by_chunk(previous), by_chunk(batch.token_ids)))
        has_past = (batch.positions > 0) & (batch.segment_ids > 0)
        logprobs, entropies = (
            jnp.where(has_past, x.swapaxes(0, 1).reshape(b, T), 0.0) for x in results
        )
        return logprobs, entropies

    def _gather_tables(self, params: Params) -> Params:
        """Embedding and output layer whole along the width, as reading rows of tokens wants it."""
        whole = param_shardings(self.mesh, self.config, for_decode=True)
        tables = {}
        for name in params.keys() - {"blocks"}:
            [layout] = whole[name].values()
            tables[name] = jax.lax.with_sharding_constraint(params[name], layout)
        return {**params, **tables}


def chunk_width(num_rows: int, row_tokens: int, max_tokens: int) -> int:
    """The widest divisor of `row_tokens` for which a chunk holds at most `max_tokens` tokens."""
    widths = [w for w in range(1, row_tokens + 1) if row_tokens % w == 0]
    return max([w for w in widths if w * num_rows <= max_tokens], default=1)


def _logprobs_and_entropies(
    logits: jax.Array, targets: jax.Array, entropy_gradient: bool
) -> tuple[jax.Array, jax.Array]:
    """Of `[b, c, V]` logits; masked ids carry a huge negative logit and add exactly nothing."""
    centred = logits - jax.lax.stop_gradient(logits.max(axis=-1, keepdims=True))
    weights = jnp.exp(centred)
    total = weights.sum(axis=-1)
    # A sum over one-hot rather than a gather: it splits over a sharded vocabulary.
    is_target = jnp.arange(logits.shape[-1]) == targets[..., None]
    logprobs = jnp.where(is_target, centred, 0.0).sum(axis=-1) - jnp.log(total)
    products = jnp.where(weights > 0, weights * centred, 0.0)
    entropies = jnp.log(total) - products.sum(axis=-1) / total
    return logprobs, entropies if entropy_gradient else jax.lax.stop_gradient(entropies)


def state_shardings(
    mesh: Mesh, config: QwenConfig, optimizer: optax.GradientTransformation
) -> TrainState:
    """Optimizer moments lie like their parameters, counters on every device."""
    params = param_shardings(mesh, config)
    whole = replicated(mesh)
    abstract = jax.eval_shape(optimizer.init, qwen.abstract_params(config))
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
    params: Params, mesh: Mesh, config: QwenConfig, optimizer: optax.GradientTransformation
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
) -> Callable[[Params, Batch, jax.Array], tuple[Params, dict[str, jax.Array]]]:
    """`gradient(params, batch, num_micro) -> (gradients, metrics)`, summed over micro-batches.

    The loop over micro-batches runs a traced number of times and differentiates inside, so that
    one compilation serves any number of them.
    """

    def micro_loss(params: Params, micro: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
        logprobs, entropies = model.token_logprobs(
            params, micro, temperature=temperature, entropy_gradient=entropy_gradient
        )
        values, metrics = token_loss(logprobs, entropies, micro)
        sums = {}
        for name, value in metrics.items():
            value = jax.lax.stop_gradient(value)
            if name.endswith("_max"):
                sums[name] = jnp.where(micro.loss_mask, value, 0.0).max()
            else:
                weights = micro.token_weights if name.endswith("_loss") else micro.loss_mask
                sums[name] = (value * weights).sum()
        sums["num_tokens"] = micro.loss_mask.sum().astype(jnp.float32)
        return (values * micro.token_weights).sum(), sums

    def gradient(
        params: Params, batch: Batch, num_micro: jax.Array
    ) -> tuple[Params, dict[str, jax.Array]]:
        differentiate = jax.grad(micro_loss, has_aux=True)
        abstract = jax.eval_shape(micro_loss, params, _micro(batch, jnp.int32(0)))[1]
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (params, abstract))
        shardings = param_shardings(model.mesh, model.config)

        def body(index: jax.Array, carry: tuple[Params, Any]) -> tuple[Params, Any]:
            gradients, sums = carry
            new_gradients, new_sums = differentiate(params, _micro(batch, index))
            gradients = jax.tree.map(jnp.add, gradients, new_gradients)
            gradients = jax.lax.with_sharding_constraint(gradients, shardings)
            merge = {name: jnp.maximum if name.endswith("_max") else jnp.add for name in sums}
            return gradients, {name: merge[name](sums[name], new_sums[name]) for name in sums}

        gradients, sums = jax.lax.fori_loop(0, num_micro, body, zeros)
        num_tokens = sums.pop("num_tokens")
        # Of no token at all there is no mean: not a number, rather than a dip to 0 in a curve.
        counts = {
            name: jnp.where(num_tokens > 0, 1.0, jnp.nan) if name.endswith("_max") else num_tokens
            for name in sums
            if not name.endswith("_loss")
        }
        return gradients, {name: value / counts.get(name, 1.0) for name, value in sums.items()}

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
    ) -> tuple[TrainState, dict[str, jax.Array]]:
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
        return state, {**metrics, "grad_norm": norm, "skipped": 1.0 - is_finite}

    return CompiledFunction(update, name="update", donate_argnums=(0,))

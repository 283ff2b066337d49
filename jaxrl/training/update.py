"""The update step: one program for micro-batch gradients and one for the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jax.sharding import Mesh

from jaxrl.models.aux_arrays import StatisticsReader
from jaxrl.models.layers import HOST_MEMORY
from jaxrl.models.output import LOGIT_CAPACITIES
from jaxrl.models.params import ParamSpec, merge_params
from jaxrl.models.policy import Model
from jaxrl.objectives.metrics import Metric
from jaxrl.runtime.compilation import CompiledFunction, cached_jit, join_keys
from jaxrl.runtime.sharding import (
    CONTEXT_AXIS,
    count_batch_shards,
    make_batch_sharding,
    make_param_shardings,
    make_piece_sharding,
    make_replicated_sharding,
)
from jaxrl.training.packing import PackedAttachments, PackedBatch, compute_logit_capacities
from jaxrl.types import Batch, Params, TrainState

TokenLoss = Callable[[jax.Array, jax.Array, Batch], tuple[jax.Array, dict[str, Metric]]]
"""Function from logprobs and entropies `[b, T]` and a micro-batch to losses and metrics `[b, T]`.

The update sums the losses, weighted by `token_weights`. Each metric specifies its reduction.
"""


def make_state_shardings(
    mesh: Mesh, trained: ParamSpec, optimizer: optax.GradientTransformation
) -> TrainState:
    """Return the shardings of a training state.

    Moments are sharded like their parameters; counters are replicated.
    """
    params = make_param_shardings(mesh, trained)
    replicated = make_replicated_sharding(mesh)
    abstract = jax.eval_shape(optimizer.init, trained.make_abstract_params())
    moments = optax.tree_map_params(
        optimizer,
        lambda _, sharding: sharding,
        abstract,
        params,
        transform_non_params=lambda _: replicated,
    )
    counters: Any = replicated
    return TrainState(params=params, opt_state=moments, num_updates=counters, num_skipped=counters)


def init_state(
    params: Params, mesh: Mesh, trained: ParamSpec, optimizer: optax.GradientTransformation
) -> TrainState:
    """Initialize the training state. The parameters are donated, so only one copy exists."""

    def create_state(params: Params) -> TrainState:
        zero = jnp.zeros((), jnp.int32)
        return TrainState(
            params=params, opt_state=optimizer.init(params), num_updates=zero, num_skipped=zero
        )

    shardings = make_state_shardings(mesh, trained, optimizer)
    leaves, structure = jax.tree.flatten(shardings)
    program = cached_jit(
        create_state,
        name="init",
        key=(optimizer, structure, *leaves),
        out_shardings=shardings,
        donate_argnums=0,
    )
    state: TrainState = program(params)
    return state


def move_moments(state: TrainState, memory: str) -> TrainState:
    """Move the optimizer's moments to a memory kind: `device` or `HOST_MEMORY`."""
    opt_state = jax.tree.map(
        lambda leaf: jax.device_put(leaf, leaf.sharding.with_memory_kind(memory)), state.opt_state
    )
    return replace(state, opt_state=opt_state)


def shard_batch(mesh: Mesh, batch: Batch) -> Batch:
    """Shard a host batch over the mesh.

    Every process holds the complete batch and supplies its local shards.
    """

    def shard_array(array: np.ndarray) -> jax.Array:
        return jax.make_array_from_callback(
            array.shape, make_batch_sharding(mesh), array.__getitem__
        )

    return jax.tree.map(shard_array, batch)


def shard_patches(
    mesh: Mesh, attachments: PackedAttachments, micro: int, dtype: Any
) -> dict[str, jax.Array]:
    """Shard a micro-batch's `patches` `[S, P, values]` and `coords` `[S, P, W]` over the mesh."""
    # Cached, because the function is called twice per shard.
    shard_inputs = cache(partial(attachments.make_shard_inputs, micro, dtype=dtype))

    def shard_output(output_index: int, values: int) -> jax.Array:
        shape = (attachments.num_shards, attachments.num_patches, values)

        def load_shards(index: Any) -> np.ndarray:
            shards = range(*index[0].indices(attachments.num_shards))
            return np.stack([shard_inputs(shard)[output_index] for shard in shards])

        return jax.make_array_from_callback(shape, make_piece_sharding(mesh), load_shards)

    return {
        "patches": shard_output(0, attachments.tower.num_values_per_patch),
        "coords": shard_output(1, attachments.tower.num_coords),
    }


class MicroBatchLoop:
    """Loop that accumulates over micro-batches: `sums = loop(params, sums, batch, packed)`.

    Without attachments, the host never waits for the devices. On a GPU, each program call runs one
    micro-batch, because a loop of dynamic length would make the host wait. On other devices, one
    call runs all consecutive micro-batches that have the same logit capacity. On a CPU, with one
    call per micro-batch, memory allocation would take a quarter of the time.

    With attachments, each call runs one micro-batch. Its patches are transferred while the previous
    micro-batch runs, so devices hold the patches of at most two micro-batches.
    """

    def __init__(self, model: Model, name: str, step: Callable[..., Any], key: Hashable = None):
        """Wrap `step(params, sums, micro_batch, index, logit_capacity) -> sums`.

        `logit_capacity` is static. `name` and `key` identify the program; see `cached_jit`.
        """
        self._mesh, self._dtype = model.mesh, model.dtype
        self._recorded = model.architecture.recorded_specs
        self._pieces = count_batch_shards(model.mesh), model.mesh.shape[CONTEXT_AXIS]
        self._is_looped = is_looped = model.mesh.devices.flat[0].platform != "gpu"

        def run_micro_batches(
            params: Params,
            sums: Any,
            batch: Batch,
            start: jax.Array,
            stop: jax.Array,
            logit_capacity: int,
            attached: dict[str, jax.Array] | None = None,
        ) -> Any:
            def body(index: jax.Array, sums: Any) -> Any:
                micro = jax.tree.map(
                    lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), batch
                )
                micro = replace(micro, attached=attached)
                return step(params, sums, micro, index, logit_capacity)

            if not is_looped:
                return body(start, sums)
            return jax.lax.fori_loop(start, stop, body, sums)

        self.program = CompiledFunction(
            run_micro_batches,
            name=name,
            variants=None,  # logit capacities, and sizes from `packing.fit_rows`
            donate_argnums=(1,),
            static_argnums=(5,),
            key=key,
        )

    def __call__(self, params: Params, sums: Any, batch: Batch, packed: PackedBatch) -> Any:
        """Run `step` on each micro-batch of `packed`; `batch` is its copy on the devices."""
        capacities = compute_logit_capacities(packed, *self._pieces)
        attachments = packed.attachments
        start = 0
        while start < len(capacities):
            stop, logit_capacity = start + 1, capacities[start]
            attached: tuple[Any, ...] = ()
            if attachments is not None:
                attached = (shard_patches(self._mesh, attachments, start, self._dtype),)
                # Wait for the previous micro-batch, which frees its patches.
                jax.block_until_ready(sums)
            while (
                self._is_looped
                and not attached
                and stop < len(capacities)
                and capacities[stop] == logit_capacity
            ):
                stop += 1
            span = np.int32(start), np.int32(stop)
            has_recorded = any(name in batch.token_arrays for name in self._recorded)
            divisor = attachments.divisor if attachments else 0
            variant = logit_capacity, divisor, has_recorded, batch.token_ids.shape
            sums = self.program(
                params, sums, batch, *span, logit_capacity, *attached, variant=variant
            )
            start = stop
        return sums


class ScoreStep:
    """Compiled scoring step: `score(params, batch, packed)` returns log-probabilities [A, b, T]."""

    def __init__(self, model: Model, *, temperature: float):
        """Prepare scoring, with logits divided by `temperature`."""
        self._mesh, self.model, bare_model = model.mesh, model, model.without_base

        def score_micro_batch(
            params: Params, logprobs: jax.Array, micro: Batch, index: jax.Array, logit_capacity: int
        ) -> jax.Array:
            micro_logprobs, _ = bare_model.compute_token_logprobs(
                params, micro, temperature=temperature, logit_capacity=logit_capacity
            )
            return logprobs.at[index].set(micro_logprobs)

        self.loop = MicroBatchLoop(
            model, "score", score_micro_batch, key=join_keys(model.program_key, temperature)
        )

    @property
    def num_programs(self) -> int:
        """Number of programs compiled so far."""
        return self.loop.program.num_programs

    def __call__(self, params: Params, batch: Batch, packed: PackedBatch) -> jax.Array:
        """Score `packed`; `batch` is its copy on the devices. Tokens without loss get 0."""
        zeros = jnp.zeros(
            batch.token_ids.shape, jnp.float32, device=make_batch_sharding(self._mesh)
        )
        return self.loop(self.model.merge(params), zeros, batch, packed)


@struct.dataclass
class GradAccumulator:
    """Sums of gradients and metrics over the micro-batches so far."""

    gradients: Params  # float32
    metrics: dict[str, Metric]  # sums before `Metric.finish`
    num_tokens: jax.Array  # float32 scalar, number of tokens with loss
    statistics: Any = None  # see `AuxArrays`
    balance: Any = None  # result of `StatisticsReader.balance_weights`; None without that loss

    def add_metrics(
        self, metrics: dict[str, Metric], num_tokens: Any, statistics: Any
    ) -> GradAccumulator:
        """Add the metrics, number of tokens and model statistics of a micro-batch."""
        return replace(
            self,
            metrics={name: metric.combine(metrics[name]) for name, metric in self.metrics.items()},
            num_tokens=self.num_tokens + num_tokens,
            statistics=jax.tree.map(jnp.add, self.statistics, statistics),
        )

    def finish_metrics(self, statistics: StatisticsReader | None) -> dict[str, Metric]:
        """Return the final metrics, including those that `statistics` computes."""
        metrics = {name: metric.finish(self.num_tokens) for name, metric in self.metrics.items()}
        if statistics is not None:
            measured = statistics.metrics(self.statistics)
            metrics |= {name: Metric(value) for name, value in measured.items()}
        return metrics


@partial(jax.jit, donate_argnums=0)
def combine_sums(
    first: GradAccumulator, second: GradAccumulator, factors: tuple[jax.Array, jax.Array]
) -> GradAccumulator:
    """Add the sums of two mini-batches, with losses and gradients multiplied by `factors`."""

    def compute_weighted_sum(a: jax.Array, b: jax.Array) -> jax.Array:
        return factors[0] * a + factors[1] * b

    metrics = {**second.metrics, **first.metrics}
    for name in first.metrics.keys() & second.metrics.keys():
        pair = first.metrics[name], second.metrics[name]
        is_loss = pair[0].reduction == "loss"
        metrics[name] = (
            replace(pair[0], value=compute_weighted_sum(pair[0].value, pair[1].value))
            if is_loss
            else pair[0].combine(pair[1])
        )
    return replace(
        first,
        gradients=jax.tree.map(compute_weighted_sum, first.gradients, second.gradients),
        metrics=metrics,
        num_tokens=first.num_tokens + second.num_tokens,
        statistics=jax.tree.map(jnp.add, first.statistics, second.statistics),
        balance=None,
    )


class LoadBalanceStep:
    """Step that computes load-balancing coefficients in an extra pass over the mini-batch."""

    def __init__(self, model: Model):
        """Prepare the forward pass of `model`, which must have statistics."""
        self._model, stats = model, model.architecture.statistics_reader
        assert stats is not None

        def compute_statistics(params: Params, micro: Batch, logit_capacity: int) -> Any:
            aux = model.make_aux(micro)
            model.compute_token_logprobs(
                params, micro, temperature=1.0, logit_capacity=logit_capacity, aux=aux
            )
            return aux.statistics

        def init_sums(params: Params, batch: Batch) -> Any:
            first = jax.tree.map(lambda x: x[0], batch)
            shapes = jax.eval_shape(
                partial(compute_statistics, logit_capacity=LOGIT_CAPACITIES[0]), params, first
            )
            return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

        def add_statistics(
            params: Params, sums: Any, micro: Batch, _: jax.Array, logit_capacity: int
        ) -> Any:
            return jax.tree.map(jnp.add, sums, compute_statistics(params, micro, logit_capacity))

        replicated = make_replicated_sharding(model.mesh)
        self._init_sums = jax.jit(init_sums, out_shardings=replicated)
        self._balance_weights = jax.jit(stats.balance_weights, out_shardings=replicated)
        self.loop = MicroBatchLoop(model, "balance", add_statistics)

    def __call__(self, params: Params, batch: Batch, packed: PackedBatch, coef: float) -> Any:
        """Compute `StatisticsReader.balance_weights` for the mini-batch."""
        zeros = self._init_sums(params, self._model.without_attachments(batch))
        sums = self.loop(params, zeros, batch, packed)
        return self._balance_weights(sums, np.float32(coef))


class GradientStep:
    """Compiled gradient step: `gradient(params, batch, packed)` returns a `GradAccumulator`."""

    def __init__(
        self,
        model: Model,
        token_loss: TokenLoss,
        *,
        temperature: float = 1.0,
        entropy_gradient: bool = False,
        balance_coef: float = 0.0,
        shares_programs: bool = False,
    ):
        """Prepare the gradient of a loss.

        Args:
            model: Policy to differentiate.
            token_loss: Loss of each token.
            temperature: Sampling temperature.
            entropy_gradient: True to differentiate through the entropies.
            balance_coef: Coefficient of `StatisticsReader.balance_loss` over the complete
                mini-batch. If nonzero, an extra forward pass counts the tokens of each expert.
            shares_programs: True to share compiled programs with other instances for this loss,
                see `cached_jit`; False for user code, which may be edited between runs.
        """
        shardings, stats = (
            make_param_shardings(model.mesh, model.trained),
            model.architecture.statistics_reader,
        )
        key: Hashable = None
        if shares_programs:
            key = join_keys(model.program_key, token_loss, temperature, entropy_gradient)
        bare_model = model.without_base

        # The loss of one micro-batch, already weighted: sums over micro-batches need no scaling.
        def compute_micro_batch_loss(
            trained: Params, others: Params, micro: Batch, balance: Any, logit_capacity: int
        ) -> tuple[jax.Array, Any]:
            aux = bare_model.make_aux(micro)
            logprobs, entropies = bare_model.compute_token_logprobs(
                merge_params(others, trained),
                micro,
                temperature=temperature,
                entropy_gradient=entropy_gradient,
                logit_capacity=logit_capacity,
                aux=aux,
            )
            values, metrics = token_loss(logprobs, entropies, micro)
            reduced = {
                name: metric.reduce(micro.loss_mask, micro.token_weights)
                for name, metric in metrics.items()
            }
            num_tokens = micro.loss_mask.sum().astype(jnp.float32)
            loss = (values * micro.token_weights).sum()
            if balance is not None and stats is not None:
                loss += stats.balance_loss(balance, aux.statistics)
            return loss, (reduced, num_tokens, aux.statistics)

        # The programs below share this function, which is traced once per shape and logit capacity.
        differentiate = cached_jit(
            jax.grad(compute_micro_batch_loss, has_aux=True),
            name="gradient",
            key=key,
            static_argnames="logit_capacity",
            inline=True,
        )

        # Zeros of the right shapes, without running the gradient.
        def init_sums(params: Params, batch: Batch) -> GradAccumulator:
            first = jax.tree.map(lambda x: x[0], batch)
            gradient_fn = partial(differentiate, balance=None, logit_capacity=LOGIT_CAPACITIES[-1])
            abstract = jax.eval_shape(gradient_fn, *bare_model.split(params), first)
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), abstract)
            gradients, (metrics, num_tokens, statistics) = zeros
            gradients = jax.lax.with_sharding_constraint(gradients, shardings)
            return GradAccumulator(
                gradients=gradients, metrics=metrics, num_tokens=num_tokens, statistics=statistics
            )

        def accumulate_gradients(
            params: Params, sums: GradAccumulator, micro: Batch, _: jax.Array, logit_capacity: int
        ) -> GradAccumulator:
            new, measured = differentiate(
                *bare_model.split(params),
                micro,
                balance=sums.balance,
                logit_capacity=logit_capacity,
            )
            with jax.named_scope("sum"):
                gradients = jax.tree.map(jnp.add, sums.gradients, new)
            gradients = jax.lax.with_sharding_constraint(gradients, shardings)
            return replace(sums.add_metrics(*measured), gradients=gradients)

        # Metrics only, for trajectories without a gradient.
        def accumulate_metrics(
            params: Params, sums: GradAccumulator, micro: Batch, _: jax.Array, logit_capacity: int
        ) -> GradAccumulator:
            _, measured = compute_micro_batch_loss(
                *bare_model.split(params), micro, None, logit_capacity
            )
            return sums.add_metrics(*measured)

        self._model = model
        self.balance = LoadBalanceStep(model) if balance_coef else None
        self._balance_coef = balance_coef
        self.init_sums = CompiledFunction(init_sums, name="update_start", variants=None, key=key)
        self.loop = MicroBatchLoop(model, "update", accumulate_gradients, key)
        self.metrics_loop = MicroBatchLoop(model, "update_metrics", accumulate_metrics, key)

    def __call__(self, params: Params, batch: Batch, packed: PackedBatch) -> GradAccumulator:
        """Accumulate gradients over the micro-batches of `packed`; `batch` is its device copy."""
        policy, rest = self._model.merge(params), batch.rest
        batch = replace(batch, rest=None)
        # Attachments do not change the shapes of the sums.
        sums = self.init_sums(
            policy, self._model.without_attachments(batch), variant=batch.token_ids.shape
        )
        if rest is not None and packed.rest is not None:
            sums = self.metrics_loop(policy, sums, rest, packed.rest)
        if self.balance is not None:
            balance = self.balance(policy, batch, packed, self._balance_coef)
            sums = replace(sums, balance=balance)
        return self.loop(policy, sums, batch, packed)


class UpdateStep:
    """Compiled optimizer step: `update(state, batch, packed)` returns the new state and metrics.

    `state` is donated. Calls do not wait for the devices. A step with a non-finite gradient changes
    neither parameters nor moments, and is counted in `TrainState.num_skipped`.
    """

    def __init__(
        self,
        model: Model,
        token_loss: TokenLoss,
        optimizer: optax.GradientTransformation,
        *,
        offload: bool = False,
        shares_programs: bool = False,
        **settings: Any,
    ):
        """Prepare the update of the float32 master weights; `settings` are for `GradientStep`.

        With `offload`, the optimizer's moments are on the devices only during the optimizer step.
        """
        self._offload = offload
        self.gradient = GradientStep(model, token_loss, shares_programs=shares_programs, **settings)
        shardings = make_state_shardings(model.mesh, model.trained, optimizer)
        statistics = model.architecture.statistics_reader

        def apply_optimizer(
            state: TrainState, sums: GradAccumulator, lr_scale: jax.Array | None = None
        ) -> tuple[TrainState, dict[str, Metric]]:
            norm = optax.tree.norm(sums.gradients)
            is_finite = jnp.isfinite(norm)
            changes, opt_state = optimizer.update(sums.gradients, state.opt_state, state.params)
            if lr_scale is not None:  # all changes are proportional to the learning rate
                changes = jax.tree.map(lambda change: change * lr_scale, changes)
            # Select elementwise: a branch would make a GPU's host wait.
            params, opt_state = jax.tree.map(
                lambda new, old: jnp.where(is_finite, new, old),
                (optax.apply_updates(state.params, changes), opt_state),
                (state.params, state.opt_state),
            )
            state = TrainState(
                params=params,
                opt_state=opt_state,
                num_updates=state.num_updates + is_finite,
                num_skipped=state.num_skipped + ~is_finite,
            )
            state = jax.lax.with_sharding_constraint(state, shardings)
            measured = {"grad_norm": Metric(norm), "skipped": Metric(1.0 - is_finite)}
            return state, sums.finish_metrics(statistics) | measured

        self.apply = CompiledFunction(
            apply_optimizer,
            name="optimizer",
            variants=(False, True),
            donate_argnums=(0,),
            key=join_keys(model.program_key, optimizer) if shares_programs else None,
        )

    @property
    def num_programs(self) -> int:
        """Number of programs compiled so far."""
        gradient = self.gradient
        programs = [
            gradient.init_sums,
            gradient.loop.program,
            gradient.metrics_loop.program,
            self.apply,
        ]
        if gradient.balance is not None:
            programs.append(gradient.balance.loop.program)
        return sum(program.num_programs for program in programs)

    def __call__(
        self, state: TrainState, batch: Batch, packed: PackedBatch, lr_scale: float | None = None
    ) -> tuple[TrainState, dict[str, Metric]]:
        """Take an optimizer step on `packed`; `batch` is its copy on the devices.

        `lr_scale` multiplies the learning rate.
        """
        return self.apply_gradients(state, self.gradient(state.params, batch, packed), lr_scale)

    def apply_gradients(
        self, state: TrainState, sums: GradAccumulator, lr_scale: float | None = None
    ) -> tuple[TrainState, dict[str, Metric]]:
        """Take an optimizer step with the gradient in `sums`; see `__call__`."""
        scale = None if lr_scale is None else np.float32(lr_scale)
        if self._offload:
            state = move_moments(state, "device")
        state, metrics = self.apply(state, sums, scale, variant=scale is not None)
        return (move_moments(state, HOST_MEMORY) if self._offload else state), metrics

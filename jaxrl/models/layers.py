"""Loops over layers: for the full forward pass with rematerialization, and for the sampler."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxrl.models.aux_arrays import AuxArrays
from jaxrl.models.recurrence import Advance, Recurrence
from jaxrl.types import Params

Layer = Callable[[Any, Params], Any]
"""Function that computes the next activations.

Its arguments are the activations, or a tree that contains them, and one layer's parameters.
"""

Stacks = Mapping[str, Sequence[int]]
"""Modules of `blocks` that only some layers have, with the sorted indices of these layers."""

Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""Function from queries `[M, N, H]`, keys and values `[M, K, H]` to outputs `[M, N, H]`."""

Mixer = Callable[..., jax.Array]
"""Function that mixes the tokens of a sequence: `Attend`, or `recurrence.Recurrence` in a recurrent
layer."""

CachedRecurrence = Callable[[Any, Advance, Any], tuple[jax.Array, Any]]
"""Function of a layer's state and the arguments of `recurrence.Recurrence`. Returns the outputs and
the new state."""

CachedAttend = Callable[..., tuple[jax.Array, Any]]
"""Function of a layer's index in the cache, the cache, the read-only past and the arguments of
`Attend`. Returns the outputs, and the cache with the layer's new keys and values."""

SAVED_NAMES = (
    *("q", "k", "v", "qkv", "beta", "attended", "lse", "o"),
    *("router", "gate", "up"),
)
"""Values that the remat mode `names` saves, by their `jax.ad_checkpoint.checkpoint_name`.

Architectures name matmul outputs before norms and rotary embeddings; attention names its output and
the log-sum-exp of its scores. The backward pass then recomputes no matmul except the scores.
"""

HOST_MEMORY = "pinned_host"
"""JAX memory kind of host memory."""

LAYER_INPUT = "layer_input"

OFFLOADED_NAMES = (LAYER_INPUT, "attended", "lse")
"""Values that `offload` saves. In a long context, recomputing attention costs the most."""

_POLICIES = jax.checkpoint_policies

REMAT: dict[str, Any] = {
    "none": None,
    "dots": _POLICIES.dots_with_no_batch_dims_saveable,
    "names": _POLICIES.save_only_these_names(*SAVED_NAMES),
    "full": _POLICIES.nothing_saveable,
    "offload": _POLICIES.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=list(OFFLOADED_NAMES),
        offload_src="device",
        offload_dst=HOST_MEMORY,
    ),
}
"""Policy of `jax.checkpoint` for each `model.remat` mode; None saves all values.

`dots` saves matmuls with weights, but neither the scores nor anything computed from them. `offload`
saves a layer's input and attention output in host memory, and nothing on the device.
"""


@dataclass(frozen=True, kw_only=True)
class LayerScan:
    """Loop over stacked layers in a full forward pass, without a KV cache.

    Attributes:
        remat: Name in `REMAT`.
        scan: True to compile consecutive layers of the same kind once, as a loop. False to unroll
            the layers; on a CPU, all activations are then saved regardless of `remat`.
        aux: Auxiliary arrays of the tokens.
        run_recurrence: Recurrence over the packed rows; None for models without recurrent layers.
        constrain_to_shards: Sharding constraint for arrays with a leading shard axis.
    """

    remat: str = "none"
    scan: bool = True
    aux: AuxArrays = field(default_factory=AuxArrays, compare=False)
    run_recurrence: Recurrence | None = field(default=None, compare=False)
    constrain_to_shards: Callable[[jax.Array], jax.Array] = field(
        default=lambda x: x, compare=False
    )

    def __call__(self, layer: Layer, x: Any, blocks: Params, stacks: Stacks | None = None) -> Any:
        """Compute the activations after all layers.

        Args:
            layer: Function that computes one layer.
            x: Activations before the layers, or a tree that contains them.
            blocks: Parameters, each with a leading layer axis.
            stacks: Modules that only some layers have. Their leading axis covers only these layers.
        """
        layer = self._with_remat(layer)
        runs = _find_layer_runs(blocks, stacks) if stacks else ()
        if not self.scan:
            for run in _slice_runs(runs, blocks) if runs else [blocks]:
                for block in _unstack_layers(run):
                    x = layer(x, block)
            return x

        def run_layer(x: Any, block: Params) -> tuple[Any, None]:
            return layer(x, block), None

        def run_period(x: Any, period: Params) -> tuple[Any, None]:
            for run in _slice_runs(runs[: len(runs) // num_periods], period):
                x = jax.lax.scan(run_layer, x, run)[0]
            return x, None

        if not runs:
            return jax.lax.scan(run_layer, x, blocks)[0]
        # XLA unrolls loops of one layer and then merges the recomputation with the forward pass, so
        # runs that repeat, such as three delta nets and one attention layer, are looped over too.
        num_periods = _count_periods(runs)
        periods = jax.tree.map(lambda w: w.reshape(num_periods, -1, *w.shape[1:]), blocks)
        return jax.lax.scan(run_period, x, periods)[0]

    def run_with_intermediates(
        self, layer: Layer, x: jax.Array, blocks: Params, layers: Sequence[int]
    ) -> tuple[jax.Array, jax.Array]:
        """Return the final activations, and the stacked activations after each of `layers`."""
        layer = self._with_remat(layer)
        if not self.scan:
            outputs = []
            for block in _unstack_layers(blocks):
                x = layer(x, block)
                outputs.append(x)
            return x, jnp.stack([outputs[layer_index] for layer_index in layers])

        def step(carry: tuple[Any, Any], indexed: tuple[Any, Params]) -> tuple[Any, None]:
            (x, intermediates), (layer_index, weights) = carry, indexed
            x = layer(x, weights)
            # For a sum, the backward pass saves no array of the size of `x`.
            is_selected = (jnp.array(layers) == layer_index).reshape(-1, *(1,) * x.ndim)
            return (x, intermediates + is_selected.astype(x.dtype) * x), None

        # Slicing the stacks at `layers` would copy their weights.
        layer_indices = jnp.arange(len(jax.tree.leaves(blocks)[0]))
        intermediates = jnp.zeros((len(layers), *x.shape), x.dtype)
        return jax.lax.scan(step, (x, intermediates), (layer_indices, blocks))[0]

    def _with_remat(self, layer: Layer) -> Layer:
        """Wrap a layer in `jax.checkpoint` with the policy of `remat`."""
        policy = REMAT[self.remat]
        if self.remat == "offload":
            layer = _with_named_input(layer)
        if policy is None:
            return layer
        # Inside a loop, the compiler cannot merge the recomputation with the forward pass.
        return jax.checkpoint(layer, policy=policy, prevent_cse=not self.scan)


@dataclass
class SamplerLayerScan:
    """Loop over the layers of `prepare_sampler_weights`, reading and writing the KV cache.

    Attributes:
        attend: Attention function of a layer.
        cache: Cache of each attention layer, or one cache of all of them. Each call replaces it.
        past: Read-only cache in the same layout.
        aux: Auxiliary arrays of the tokens.
        run_recurrence: Recurrence of a layer.
        states: State of each recurrent layer. Each call replaces it.
        recurrent_module: See `Architecture.recurrent_module`.
    """

    attend: CachedAttend
    cache: tuple[Any, ...]
    aux: AuxArrays = field(default_factory=AuxArrays)
    past: tuple[Any, ...] = ()
    run_recurrence: CachedRecurrence | None = None
    states: tuple[Any, ...] = ()
    recurrent_module: str = ""

    def __call__(self, layer: Callable[[Any, Params, Mixer], Any], x: Any, blocks: Any) -> Any:
        """Apply all layers to `x`, an array of activations or a tree that contains one."""

        def run_block(
            x: Any, cache: Any, past: Any, weights: Params, index: Any
        ) -> tuple[Any, Any]:
            def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
                nonlocal cache
                out, cache = self.attend(index, cache, past, q, k, v)
                return out

            return layer(x, weights, attend), cache

        def run_recurrent_block(x: Any, state: Any, weights: Params) -> tuple[Any, Any]:
            def run_recurrence(advance: Advance, inputs: Any) -> jax.Array:
                nonlocal state
                assert self.run_recurrence is not None
                out, state = self.run_recurrence(state, advance, inputs)
                return out

            return layer(x, weights, run_recurrence), state

        past: Sequence[Any] = self.past or [None] * len(self.cache)

        if isinstance(blocks, tuple):
            # Under jit, the function is traced once for all layers of one kind.
            jitted, caches = jax.jit(run_block), list(self.cache)
            jitted_recurrent = jax.jit(run_recurrent_block)
            states: list[Any] = []
            for layer_index, weights in enumerate(blocks):
                if self.recurrent_module in weights:
                    x, state = jitted_recurrent(x, self.states[len(states)], weights)
                    states.append(state)
                    continue
                cache_index = layer_index - len(states)
                slot = min(cache_index, len(caches) - 1)  # one cache per layer, or one for all
                x, caches[slot] = jitted(x, caches[slot], past[slot], weights, cache_index - slot)
            self.cache, self.states = tuple(caches), tuple(states)
            return x
        count = len(jax.tree.leaves(blocks)[0])
        (x, cache), _ = jax.lax.scan(
            lambda carry, indexed: (run_block(*carry, past[0], *indexed), None),
            (x, self.cache[0]),
            (blocks, jnp.arange(count)),
        )
        self.cache = (cache,)
        return x


def _with_named_input(layer: Layer) -> Layer:
    """Wrap a layer so that its input is named and can be offloaded to host memory."""

    def call_with_named_input(x: Any, weights: Params) -> Any:
        return layer(jax.tree.map(lambda leaf: checkpoint_name(leaf, LAYER_INPUT), x), weights)

    return call_with_named_input


def prepare_sampler_weights(weights: Params, *, scan: bool, stacks: Stacks | None = None) -> Params:
    """Return the weights with stacked layers if `scan`, else with a tuple of layers.

    With `stacks`, always return a tuple: the sampler can scan only over layers of one kind.
    """
    if scan and not stacks:
        return weights
    blocks = weights["blocks"]
    runs = _slice_runs(_find_layer_runs(blocks, stacks), blocks) if stacks else [blocks]
    return {**weights, "blocks": tuple(block for run in runs for block in _unstack_layers(run))}


LayerRun = tuple[tuple[str, int, int], ...]
"""Run of layers with the same modules: name, and first and end index in the module's stack."""


def _find_layer_runs(blocks: Params, stacks: Stacks) -> tuple[LayerRun, ...]:
    """Return the runs of consecutive layers that have the same modules."""
    common = next(blocks[name] for name in blocks if name not in stacks)
    count = len(jax.tree.leaves(common)[0])

    def list_modules(layer: int) -> tuple[str, ...]:
        return tuple(name for name in blocks if name not in stacks or layer in stacks[name])

    runs = []
    for names, layers in groupby(range(count), list_modules):
        first, *rest = layers
        indices = {n: list(stacks[n]).index(first) if n in stacks else first for n in names}
        runs.append(tuple((n, index, index + 1 + len(rest)) for n, index in indices.items()))
    return tuple(runs)


def _count_periods(runs: Sequence[LayerRun]) -> int:
    """Return how often the shortest sequence of runs that makes up all of them is repeated."""
    kinds = [[(name, end - first) for name, first, end in run] for run in runs]
    return next(n for n in range(len(runs), 0, -1) if kinds == kinds[: len(runs) // n] * n)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _slice_runs(runs: tuple[LayerRun, ...], blocks: Params) -> list[Params]:
    """Slice the parameters of each run; gradients are concatenated instead of summed."""
    return [
        {name: jax.tree.map(lambda x, a=a, b=b: x[a:b], blocks[name]) for name, a, b in run}
        for run in runs
    ]


def _slice_runs_forward(runs: tuple[LayerRun, ...], blocks: Params) -> tuple[list[Params], None]:
    return _slice_runs(runs, blocks), None


def _slice_runs_backward(
    runs: tuple[LayerRun, ...], _: None, gradients: list[Params]
) -> tuple[Params]:
    parts: dict[str, list[Any]] = {}
    for gradient in gradients:
        for name, part in gradient.items():
            parts.setdefault(name, []).append(part)
    join = lambda *leaves: jnp.concatenate(leaves)  # noqa: E731
    return ({name: jax.tree.map(join, *pieces) for name, pieces in parts.items()},)


_slice_runs.defvjp(_slice_runs_forward, _slice_runs_backward)


@jax.custom_vjp
def _unstack_layers(blocks: Params) -> list[Params]:
    """Return one parameter tree per layer; gradients are stacked instead of summed."""
    [count] = {len(leaf) for leaf in jax.tree.leaves(blocks)}
    return [jax.tree.map(lambda leaf, i=i: leaf[i], blocks) for i in range(count)]


def _unstack_layers_forward(blocks: Params) -> tuple[list[Params], None]:
    return _unstack_layers(blocks), None


def _unstack_layers_backward(_: None, gradients: list[Any]) -> tuple[Params]:
    def stack_leaves(*leaves: Any) -> Any:
        return None if leaves[0].dtype == jax.dtypes.float0 else jnp.stack(leaves)  # int8 weights

    return (jax.tree.map(stack_leaves, *gradients),)


_unstack_layers.defvjp(_unstack_layers_forward, _unstack_layers_backward)

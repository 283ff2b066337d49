"""Routing of tokens to experts: top-k selection, load balancing and recording."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Integer

from jaxrl.models.aux_arrays import AuxArrays

ROUTED_EXPERTS = "routed_experts"
"""Name of the per-token array of selected experts, `[layers, k]`."""


class Routing(NamedTuple):
    """Experts selected for M tokens in one layer."""

    topk_ids: jax.Array  # int32 [M, k], selected experts
    topk_weights: jax.Array  # float32 [M, k], weights of the selected experts' outputs
    log_probabilities: jax.Array  # float32 [M, E], of all experts, in nats
    differs: jax.Array | None = None  # bool [M], True if replayed experts are not the top k


def route_tokens(
    logits: Float[Array, "M E"],
    *,
    top_k: int,
    renormalize: bool,
    replayed_ids: Integer[Array, "M k"] | None = None,
) -> Routing:
    """Select the top-k experts of each token by a softmax over all experts.

    Args:
        logits: Router logits, float32.
        top_k: Number of experts per token.
        renormalize: True to scale a token's expert weights to sum to 1; False to use the softmax
            probabilities.
        replayed_ids: Experts to use instead of the top k, with weights from `logits`
            (https://arxiv.org/abs/2510.11370). A token with an invalid index uses the top k.
    """
    log_probabilities = jax.nn.log_softmax(logits, axis=-1)
    probabilities = jnp.exp(log_probabilities)
    _, topk_ids = jax.lax.top_k(jax.lax.stop_gradient(probabilities), top_k)
    differs = None
    if replayed_ids is not None:
        is_valid = has_valid_expert_ids(replayed_ids, logits.shape[-1])
        is_top_k = (topk_ids[:, :, None] == replayed_ids[:, None]).any(axis=-1).all(axis=-1)
        differs = is_valid & ~is_top_k
        topk_ids = jnp.where(is_valid[:, None], replayed_ids.astype(jnp.int32), topk_ids)
    topk_weights = jnp.take_along_axis(probabilities, topk_ids, axis=-1)
    if renormalize:
        topk_weights = topk_weights / topk_weights.sum(axis=-1, keepdims=True)
    return Routing(topk_ids, topk_weights, log_probabilities, differs)


def has_valid_expert_ids(
    replayed_ids: Integer[Array, "M k"], num_experts: int
) -> Bool[Array, " M"]:
    """Return True for tokens with valid expert ids, and False for tokens without recorded ids."""
    return (replayed_ids < num_experts).all(axis=-1)


def select_index_dtype(num_experts: int) -> np.dtype:
    """Return the smallest dtype for expert indices and an invalid index."""
    return np.dtype(np.uint8 if num_experts < 256 else np.uint16)


@struct.dataclass
class ExpertUsage:
    """Expert usage in L layers, as weighted sums over tokens, float32."""

    num_tokens: Any  # scalar
    counts: Any  # [L, E], tokens routed to the expert
    probabilities: Any  # [L, E]; differentiable
    entropies: Any  # [L], of a token's distribution over the experts, in nats
    num_replayed: Any = None  # scalar, tokens with replayed experts; None without replay
    differences: Any = None  # [L], tokens whose replayed experts are not the top k


def balance_loss(
    probabilities: Float[Array, "L E"], counts: Float[Array, "L E"], num_tokens: Any
) -> Float[Array, ""]:
    """Compute the load-balancing loss: E * sum over experts of token fraction * mean probability.

    Equations 4 to 6 of Switch Transformers (https://arxiv.org/abs/2101.03961), computed over all
    layers together as in transformers. The loss is k for uniform usage and at most E. Counts are
    treated as constants in the gradient.

    Args:
        probabilities: Router probabilities, summed over tokens.
        counts: Number of tokens routed to each expert.
        num_tokens: Number of tokens in the sums.
    """
    rows = num_tokens * len(probabilities)
    token_fractions = jax.lax.stop_gradient(counts).sum(axis=0) / rows
    return probabilities.shape[-1] * (token_fractions * probabilities.sum(axis=0) / rows).sum()


def compute_usage_metrics(usage: ExpertUsage) -> dict[str, jax.Array]:
    """Compute routing metrics.

    `entropy` is the mean over layers, in nats. `load_max` and `load_min` are the highest and lowest
    load of any expert, relative to the mean load of its layer; `load_max_mean` averages the highest
    loads of all layers. `replay_difference` is the fraction of (token, layer) pairs whose replayed
    experts are not the router's top k.
    """
    tokens = jnp.maximum(usage.num_tokens, 1.0)
    mean = jnp.maximum(usage.counts.mean(axis=-1, keepdims=True), 1e-9)
    loads = usage.counts / mean
    replayed = {}
    if usage.differences is not None:
        num_choices = jnp.maximum(usage.num_replayed, 1.0) * len(usage.differences)
        replayed["replay_difference"] = usage.differences.sum() / num_choices
    return {
        "entropy": usage.entropies.mean() / tokens,
        "load_max": loads.max(),
        "load_max_mean": loads.max(axis=-1).mean(),
        "load_min": loads.min(),
        "balance_loss": balance_loss(usage.probabilities, usage.counts, tokens),
        **replayed,
    }


class RouterStatistics:
    """Metrics and load-balancing loss, computed from `ExpertUsage`."""

    def metrics(self, sums: ExpertUsage) -> dict[str, jax.Array]:
        """Return the metrics of `compute_usage_metrics`, with the prefix `router/`."""
        return {f"router/{name}": value for name, value in compute_usage_metrics(sums).items()}

    def balance_weights(self, sums: ExpertUsage, coef: jax.Array) -> jax.Array:
        """Return the constant factors of `balance_loss`, float32 [E], from mini-batch sums."""
        num_layers, num_experts = sums.counts.shape
        rows = sums.num_tokens * num_layers
        return coef * num_experts * sums.counts.sum(axis=0) / rows**2

    def balance_loss(self, weights: jax.Array, sums: ExpertUsage) -> jax.Array:
        """Compute a micro-batch's share of the load-balancing loss, times its coefficient."""
        return (weights * sums.probabilities.sum(axis=0)).sum()


RoutingResults = tuple[jax.Array | None, ExpertUsage | None]
"""Selected experts `[L, M, k]` and expert usage of the layers so far."""


def init_results(
    aux: AuxArrays, *, num_layers: int, num_tokens: int, top_k: int, num_experts: int
) -> RoutingResults:
    """Allocate routing results for the outputs that `aux` requests."""
    topk_ids = usage = None
    if aux.records:
        dtype = select_index_dtype(num_experts)
        topk_ids = jnp.zeros((num_layers, num_tokens, top_k), dtype)
    if aux.statistics_weights is not None:
        table = jnp.zeros((num_layers, num_experts), jnp.float32)
        usage = ExpertUsage(
            num_tokens=aux.statistics_weights.sum(),
            counts=table,
            probabilities=table,
            entropies=table[:, 0],
        )
        if (replayed_ids := aux.inputs.get(ROUTED_EXPERTS)) is not None:
            num_replayed = (
                aux.statistics_weights * has_valid_expert_ids(replayed_ids[:, 0], num_experts)
            ).sum()
            usage = replace(usage, num_replayed=num_replayed, differences=table[:, 0])
    return topk_ids, usage


def get_replayed_ids(aux: AuxArrays, layer_index: Any) -> jax.Array | None:
    """Return the replayed experts `[M, k]` of expert layer `layer_index`, or None."""
    return (
        None
        if (replayed_ids := aux.inputs.get(ROUTED_EXPERTS)) is None
        else replayed_ids[:, layer_index]
    )


def record_layer_routing(
    aux: AuxArrays, results: RoutingResults, layer_index: Any, routing_result: Routing
) -> RoutingResults:
    """Add the routing of a layer to the results."""
    topk_ids, usage = results
    if topk_ids is not None:
        topk_ids = topk_ids.at[layer_index].set(routing_result.topk_ids.astype(topk_ids.dtype))
    if usage is not None and aux.statistics_weights is not None:
        probabilities = jnp.exp(routing_result.log_probabilities)
        num_experts = probabilities.shape[-1]
        weights = jnp.repeat(aux.statistics_weights, routing_result.topk_ids.shape[-1])
        counts = jnp.zeros(num_experts).at[routing_result.topk_ids.reshape(-1)].add(weights)
        entropies = -(probabilities * routing_result.log_probabilities).sum(axis=-1)
        if routing_result.differs is not None:
            count = (aux.statistics_weights * routing_result.differs).sum()
            usage = replace(usage, differences=usage.differences.at[layer_index].set(count))
        usage = replace(
            usage,
            counts=usage.counts.at[layer_index].set(counts),
            probabilities=usage.probabilities.at[layer_index].set(
                aux.statistics_weights @ probabilities
            ),
            entropies=usage.entropies.at[layer_index].set(
                jax.lax.stop_gradient(aux.statistics_weights @ entropies)
            ),
        )
    return topk_ids, usage


def store_results(aux: AuxArrays, results: RoutingResults) -> None:
    """Store the results in `aux` after the last layer."""
    topk_ids, aux.statistics = results
    if topk_ids is not None:
        aux.recorded[ROUTED_EXPERTS] = jnp.moveaxis(topk_ids, 1, 0)

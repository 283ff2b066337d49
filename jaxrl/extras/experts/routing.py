"""Routing of tokens to experts: choices, load balance, and what a pass records of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Integer

from jaxrl.models.aux_arrays import AuxArrays

ROUTED = "routed_experts"
"""Name of the per-token array of chosen experts, `[layers, k]`."""


class Choice(NamedTuple):
    """Experts chosen for M tokens in one layer."""

    chosen: jax.Array  # int32 [M, k], experts
    shares: jax.Array  # float32 [M, k], weights of the chosen experts' outputs
    log_probabilities: jax.Array  # float32 [M, E], of all experts, in nats
    differs: jax.Array | None = None  # bool [M], the given experts are not the top k


def route(
    logits: Float[Array, "M E"],
    *,
    num_chosen: int,
    normalises: bool,
    given: Integer[Array, "M k"] | None = None,
) -> Choice:
    """Choose the top-k experts of each token, by a softmax over all experts.

    Args:
        logits: Router logits, float32.
        num_chosen: Experts per token.
        normalises: True if a token's shares add up to 1; otherwise they are the probabilities.
        given: Experts to use instead of the top k, with shares computed here
            (https://arxiv.org/abs/2510.11370). A token with an invalid index uses the top k.
    """
    log_probabilities = jax.nn.log_softmax(logits, axis=-1)
    probabilities = jnp.exp(log_probabilities)
    _, chosen = jax.lax.top_k(jax.lax.stop_gradient(probabilities), num_chosen)
    differs = None
    if given is not None:
        is_known = is_recorded(given, logits.shape[-1])
        is_likely = (chosen[:, :, None] == given[:, None]).any(axis=-1).all(axis=-1)
        differs = is_known & ~is_likely
        chosen = jnp.where(is_known[:, None], given.astype(jnp.int32), chosen)
    shares = jnp.take_along_axis(probabilities, chosen, axis=-1)
    if normalises:
        shares = shares / shares.sum(axis=-1, keepdims=True)
    return Choice(chosen, shares, log_probabilities, differs)


def is_recorded(given: Integer[Array, "M k"], num_experts: int) -> Bool[Array, " M"]:
    """Return True for tokens with recorded experts; the others hold invalid indices."""
    return (given < num_experts).all(axis=-1)


def recorded_dtype(num_experts: int) -> np.dtype:
    """Return the smallest dtype for expert indices with its maximum free to mean invalid."""
    return np.dtype(np.uint8 if num_experts < 256 else np.uint16)


@struct.dataclass
class Usage:
    """Usage of the experts of L layers: weighted sums over counted tokens, float32."""

    num_tokens: Any  # scalar
    counts: Any  # [L, E], tokens that chose the expert
    probabilities: Any  # [L, E]; differentiable
    entropies: Any  # [L], of a token's distribution over the experts, in nats
    num_replayed: Any = None  # scalar, tokens with given experts; None without given experts
    differences: Any = None  # [L], tokens whose given experts are not the top k


def balance_loss(
    probabilities: Float[Array, "L E"], counts: Float[Array, "L E"], num_tokens: Any
) -> Float[Array, ""]:
    """Compute E times the sum over experts of the share of tokens times the mean probability.

    Equations 4 to 6 of Switch Transformers (https://arxiv.org/abs/2101.03961), over all layers
    together as in transformers: k for uniform usage, up to E otherwise. The counts are constants.

    Args:
        probabilities: Sums over tokens.
        counts: Tokens that chose each expert.
        num_tokens: Number of counted tokens.
    """
    rows = num_tokens * len(probabilities)
    shares = jax.lax.stop_gradient(counts).sum(axis=0) / rows
    return probabilities.shape[-1] * (shares * probabilities.sum(axis=0) / rows).sum()


def usage_metrics(usage: Usage) -> dict[str, jax.Array]:
    """Compute routing metrics.

    `entropy` is the mean over layers, in nats. `load_max` and `load_min` are an expert's load
    relative to its layer's mean, the extremes over all layers; `load_max_mean` is the mean over
    layers of the highest load. With given experts, `replay_difference` is the share of (token,
    layer) choices in which the router's top k differs.
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
    """Metrics of `Usage`, and the balance loss with the counts of a complete mini-batch."""

    def metrics(self, sums: Usage) -> dict[str, jax.Array]:
        """Return `usage_metrics` as `router/...`."""
        return {f"router/{name}": value for name, value in usage_metrics(sums).items()}

    def balance_weights(self, sums: Usage, coef: jax.Array) -> jax.Array:
        """Return float32 [E], to be multiplied by token probabilities summed over layers."""
        num_layers, num_experts = sums.counts.shape
        rows = sums.num_tokens * num_layers
        return coef * num_experts * sums.counts.sum(axis=0) / rows**2

    def balance_loss(self, weights: jax.Array, sums: Usage) -> jax.Array:
        """Compute the share of `balance_loss`; equal to it if the sums cover the mini-batch."""
        return (weights * sums.probabilities.sum(axis=0)).sum()


Found = tuple[jax.Array | None, Usage | None]
"""Routing results of the layers so far: the chosen experts `[L, M, k]`, and their usage."""


def begin(
    beside: AuxArrays, *, num_layers: int, num_tokens: int, num_chosen: int, num_experts: int
) -> Found:
    """Return empty routing results for what the pass is asked to compute."""
    chosen = usage = None
    if beside.records:
        dtype = recorded_dtype(num_experts)
        chosen = jnp.zeros((num_layers, num_tokens, num_chosen), dtype)
    if beside.counted is not None:
        table = jnp.zeros((num_layers, num_experts), jnp.float32)
        usage = Usage(
            num_tokens=beside.counted.sum(),
            counts=table,
            probabilities=table,
            entropies=table[:, 0],
        )
        if (given := beside.given.get(ROUTED)) is not None:
            num_replayed = (beside.counted * is_recorded(given[:, 0], num_experts)).sum()
            usage = replace(usage, num_replayed=num_replayed, differences=table[:, 0])
    return chosen, usage


def given_in(beside: AuxArrays, number: Any) -> jax.Array | None:
    """Return the given experts `[M, k]` of layer `number` among those with experts."""
    return None if (given := beside.given.get(ROUTED)) is None else given[:, number]


def note(beside: AuxArrays, noted: Found, number: Any, choice: Choice) -> Found:
    """Add a layer's choice to the routing results."""
    chosen, usage = noted
    if chosen is not None:
        chosen = chosen.at[number].set(choice.chosen.astype(chosen.dtype))
    if usage is not None and beside.counted is not None:
        probabilities = jnp.exp(choice.log_probabilities)
        num_experts = probabilities.shape[-1]
        weights = jnp.repeat(beside.counted, choice.chosen.shape[-1])
        counts = jnp.zeros(num_experts).at[choice.chosen.reshape(-1)].add(weights)
        entropies = -(probabilities * choice.log_probabilities).sum(axis=-1)
        if choice.differs is not None:
            count = (beside.counted * choice.differs).sum()
            usage = replace(usage, differences=usage.differences.at[number].set(count))
        usage = replace(
            usage,
            counts=usage.counts.at[number].set(counts),
            probabilities=usage.probabilities.at[number].set(beside.counted @ probabilities),
            entropies=usage.entropies.at[number].set(
                jax.lax.stop_gradient(beside.counted @ entropies)
            ),
        )
    return chosen, usage


def end(beside: AuxArrays, noted: Found) -> None:
    """Store the requested results after the last layer."""
    chosen, beside.statistics = noted
    if chosen is not None:
        beside.recorded[ROUTED] = jnp.moveaxis(chosen, 1, 0)

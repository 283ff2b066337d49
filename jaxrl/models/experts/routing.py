"""Which experts a token reaches, how evenly they are used, and what of that is kept of a pass."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Integer

from jaxrl.models.experts.dispatch import XLA, Experts


class Choice(NamedTuple):
    """Of M tokens in one layer."""

    chosen: jax.Array  # int32 [M, k], experts
    shares: jax.Array  # float32 [M, k], by which what they make is added up
    log_probabilities: jax.Array  # float32 [M, E], of all experts, nats
    differs: jax.Array | None = None  # bool [M], given experts are not the most likely ones


def route(
    logits: Float[Array, "M E"],
    *,
    num_chosen: int,
    normalises: bool,
    given: Integer[Array, "M k"] | None = None,
) -> Choice:
    """The most likely experts of each token, by a softmax before the top-k.

    Args:
        logits: float32.
        num_chosen: experts of a token.
        normalises: the shares of a token add up to 1; else they are the probabilities.
        given: experts to take in place of the most likely, their shares computed here
            (https://arxiv.org/abs/2510.11370); a token whose numbers are no experts' takes the
            most likely.
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
    """Which tokens have recorded experts: the numbers of others are no experts'."""
    return (given < num_experts).all(axis=-1)


def recorded_dtype(num_experts: int) -> np.dtype:
    """The smallest dtype of recorded experts whose highest number is none of theirs."""
    return np.dtype(np.uint8 if num_experts < 256 else np.uint16)


def unknown_experts(dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """Numbers that are no experts', as tokens have that no sampler has read."""
    return np.full(shape, np.iinfo(dtype).max, dtype)


@struct.dataclass
class Usage:
    """How the tokens that count used the experts of L layers; sums over these tokens, float32."""

    num_tokens: Any  # scalar
    counts: Any  # [L, E], tokens that chose it
    probabilities: Any  # [L, E]; differentiable
    entropies: Any  # [L], of a token's distribution over the experts, nats
    num_replayed: Any = None  # scalar, tokens with given experts; None where none are given
    differences: Any = None  # [L], of these, those whose most likely experts are others


def balance_loss(
    probabilities: Float[Array, "L E"], counts: Float[Array, "L E"], num_tokens: Any
) -> Float[Array, ""]:
    """E times the sum over experts of the share of tokens times the mean probability.

    Equations 4 to 6 of Switch Transformers (https://arxiv.org/abs/2101.03961), over all layers
    together as transformers has it: k where experts are used alike, up to E where they are not.
    The counts are constants.

    Args:
        probabilities: sums over tokens.
        counts: tokens that chose the expert.
        num_tokens: that were counted.
    """
    rows = num_tokens * len(probabilities)
    shares = jax.lax.stop_gradient(counts).sum(axis=0) / rows
    return probabilities.shape[-1] * (shares * probabilities.sum(axis=0) / rows).sum()


def usage_metrics(usage: Usage) -> dict[str, jax.Array]:
    """`entropy` (mean over layers, nats), `load_max` and `load_min` of an expert over the mean.

    The loads are of each layer, the most and least of all layers'; `load_max_mean` is the mean over
    layers of their highest. Where experts are given, `replay_difference` is the share of choices,
    of a token in a layer, that the router would have made otherwise.
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


Found = tuple[jax.Array | None, Usage | None]
"""What a pass has found in the layers so far: the experts chosen `[L, M, k]`, and their use."""


@dataclass(kw_only=True)
class Routing:
    """What is given to and kept of the routers of one pass over M tokens.

    Attributes:
        experts: how they are computed.
        given: int `[L, M, k]`, of the layers with experts; see `route`.
        counted: float32 `[M]`, how often each token counts in `usage`; None: that is not wanted.
        records: `chosen` is wanted.
        chosen: after the pass, `[L, M, k]` of `recorded_dtype`.
        usage: after the pass.
    """

    experts: Experts = field(default=XLA)
    given: jax.Array | None = None
    counted: jax.Array | None = None
    records: bool = False
    chosen: jax.Array | None = None
    usage: Usage | None = None

    def begin(self, num_layers: int, num_tokens: int, num_chosen: int, num_experts: int) -> Found:
        """Before the first layer."""
        chosen = usage = None
        if self.records:
            dtype = recorded_dtype(num_experts)
            chosen = jnp.zeros((num_layers, num_tokens, num_chosen), dtype)
        if self.counted is not None:
            table = jnp.zeros((num_layers, num_experts), jnp.float32)
            usage = Usage(
                num_tokens=self.counted.sum(),
                counts=table,
                probabilities=table,
                entropies=table[:, 0],
            )
            if self.given is not None:
                is_known = is_recorded(self.given[0], num_experts)
                num_replayed = (self.counted * is_known).sum()
                usage = replace(usage, num_replayed=num_replayed, differences=table[:, 0])
        return chosen, usage

    def given_in(self, number: Any) -> jax.Array | None:
        """What is given to the layer of that number among those with experts."""
        return None if self.given is None else self.given[number]

    def note(self, found: Found, number: Any, choice: Choice) -> Found:
        """What is found with that layer."""
        chosen, usage = found
        if chosen is not None:
            chosen = chosen.at[number].set(choice.chosen.astype(chosen.dtype))
        if usage is not None and self.counted is not None:
            probabilities = jnp.exp(choice.log_probabilities)
            num_experts = probabilities.shape[-1]
            weights = jnp.repeat(self.counted, choice.chosen.shape[-1])
            counts = jnp.zeros(num_experts).at[choice.chosen.reshape(-1)].add(weights)
            entropies = -(probabilities * choice.log_probabilities).sum(axis=-1)
            if choice.differs is not None:
                count = (self.counted * choice.differs).sum()
                usage = replace(usage, differences=usage.differences.at[number].set(count))
            usage = replace(
                usage,
                counts=usage.counts.at[number].set(counts),
                probabilities=usage.probabilities.at[number].set(self.counted @ probabilities),
                entropies=usage.entropies.at[number].set(
                    jax.lax.stop_gradient(self.counted @ entropies)
                ),
            )
        return chosen, usage

    def end(self, routed: tuple[Any, Found] | None) -> None:
        """After the last layer; None: no layer has experts."""
        if routed is not None:
            self.chosen, self.usage = routed[1]

"""Drawing the next token, with the log-probability and entropy of the whole distribution."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32


def uniforms(keys: UInt32[Array, "B 2"], positions: Int[Array, " B"]) -> Float[Array, " B"]:
    """One uniform in [0, 1) a row, from its sample's key and the position of the token drawn.

    It depends on neither the slot nor what runs beside it.
    """

    def draw(key: jax.Array, position: jax.Array) -> jax.Array:
        return jax.random.uniform(jax.random.fold_in(jax.random.wrap_key_data(key), position))

    return jax.vmap(draw)(keys, positions)


def sample(
    logits: Float[Array, "B V"], uniform: Float[Array, " B"], temperature: Float[Array, ""]
) -> tuple[Int[Array, " B"], Float[Array, " B"], Float[Array, " B"]]:
    """Draws by the inverse cumulative distribution: ids, log-probabilities, entropies in nats.

    Two levels, so that no running sum over the vocabulary is formed: the block of tokens in which
    the uniform falls, then the token inside it.

    Args:
        logits: float32; ids that must not be drawn carry `attention.LOWEST`.
        uniform: in [0, 1).
        temperature: the distribution is softmax(logits / temperature), which is also the one whose
            log-probability and entropy are returned; 0 takes the most likely token and reports it
            under temperature 1.
    """
    B, V = logits.shape
    greedy = temperature == 0.0
    scaled = logits / jnp.where(greedy, 1.0, temperature)
    centred = scaled - scaled.max(axis=-1, keepdims=True)
    weights = jnp.exp(centred)
    block = 1 << math.ceil(math.log2(V) / 2)
    num_blocks = -(-V // block)
    blocks = jnp.pad(weights, ((0, 0), (0, num_blocks * block - V))).reshape(B, num_blocks, block)
    block_ends = jnp.cumsum(blocks.sum(axis=-1), axis=-1)
    total = block_ends[:, -1]
    target = uniform * total
    chosen_block = _first_beyond(block_ends, target)
    start = jnp.where(
        chosen_block > 0, block_ends[jnp.arange(B), jnp.maximum(chosen_block - 1, 0)], 0.0
    )
    inside = blocks[jnp.arange(B), chosen_block]
    chosen = chosen_block * block + _first_beyond(jnp.cumsum(inside, axis=-1), target - start)
    token = jnp.where(greedy, jnp.argmax(logits, axis=-1), chosen).astype(jnp.int32)
    log_total = jnp.log(total)
    entropy = log_total - jnp.where(weights > 0, weights * centred, 0.0).sum(axis=-1) / total
    return token, centred[jnp.arange(B), token] - log_total, entropy


def _first_beyond(ends: Float[Array, "B n"], target: Float[Array, " B"]) -> Int[Array, " B"]:
    """The first index whose running sum exceeds `target`, or the last one where it grew.

    An index where the sum does not grow has no weight and is never returned, also where rounding
    puts the target beyond the end.
    """
    grew_last = jnp.argmax(ends >= ends[:, -1:], axis=-1)
    return jnp.minimum((ends <= target[:, None]).sum(axis=-1), grew_last)

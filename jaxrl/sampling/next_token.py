"""Sample the next token, with the log-probability and entropy of the full distribution."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

_BITS_OF_ONE = 0x3F800000  # bit pattern of the float32 1.0


def sample_uniforms(keys: UInt32[Array, "B 2"], positions: Int[Array, " B"]) -> Float[Array, " B"]:
    """Draw one number in [0, 1) per row from the sample's key and the next token's position.

    The value does not depend on the row index or on the other rows.
    """

    def draw_uniform(key: jax.Array, position: jax.Array) -> jax.Array:
        return jax.random.uniform(jax.random.fold_in(jax.random.wrap_key_data(key), position))

    return jax.vmap(draw_uniform)(keys, positions)


GREEDY, FULL, TOP_P = KINDS = ("greedy", "full", "top_p")
"""Sampling methods.

Each method has a program without the computations that only other methods need.
"""


def select_sampling_method(temperature: float, top_p: float) -> str:
    """Return the cheapest sampling method that supports these settings."""
    if temperature == 0.0:
        return GREEDY
    return FULL if top_p == 1.0 else TOP_P


@jax.named_scope("draw")
def sample_tokens(
    logits: Float[Array, "B V"],
    uniform: Float[Array, " B"],
    temperature: Float[Array, "*B"],
    top_p: Float[Array, "*B"],
    *,
    kind: str,
) -> tuple[Int[Array, " B"], Float[Array, " B"], Float[Array, " B"]]:
    """Sample tokens by inverse CDF; return ids, log-probabilities and entropies in nats.

    Log-probabilities and entropies are those of the full distribution, which the trainer uses.

    Args:
        logits: Logits, float32; `reference.MASK_VALUE` at ids that must not be sampled.
        uniform: One uniform random number in [0, 1) per row.
        temperature: The distribution is softmax(logits / temperature). One value for all rows, or
            one per row, where 0 is greedy. The `greedy` method ignores it and reports values at
            temperature 1.
        top_p: Probability mass of the nucleus in (0, 1], for all rows or per row. Only the `top_p`
            method uses it.
        kind: Method in `KINDS`: `greedy` takes the most likely token, `full` samples from all
            tokens, `top_p` samples from the nucleus.
    """
    V = logits.shape[1]
    if is_per_row := jnp.ndim(temperature) > 0:
        is_greedy = temperature == 0.0
        temperature = jnp.where(is_greedy, 1.0, temperature)[:, None]
    scaled = logits if kind == GREEDY else logits / temperature

    # Subtract the maximum for stability; the weights are then at most 1.
    shifted = scaled - scaled.max(axis=-1, keepdims=True)
    weights = jnp.exp(shifted)
    token, total = _sample_index(weights, uniform)
    if kind == TOP_P:
        token, _ = _sample_index(filter_top_p(weights, top_p), uniform)
    if kind == GREEDY or is_per_row:
        # Find the first index of the maximum; on a CPU, this is several times faster than argmax.
        first = jnp.where(shifted == 0.0, jnp.arange(V), V).min(axis=-1, initial=V - 1)
        token = jnp.where(is_greedy, first, token) if is_per_row else first
    token = token.astype(jnp.int32)
    log_total = jnp.log(total)
    entropy = log_total - jnp.where(weights > 0, weights * shifted, 0.0).sum(axis=-1) / total
    return token, _select_per_row(shifted, token) - log_total, entropy


def filter_top_p(weights: Float[Array, "B V"], top_p: Float[Array, "*B"]) -> Float[Array, "B V"]:
    """Zero the weights of all tokens except the most likely tokens that together reach `top_p`.

    Nucleus sampling (https://arxiv.org/abs/1904.09751): the smallest set of tokens with a total
    probability of at least `top_p`, plus tokens as likely as the last of them. Sorting a vocabulary
    is slow on every device, so bisection finds the smallest weight to keep. It runs over the bit
    patterns of float32, which have the same order as the numbers, and is therefore exact.

    Args:
        weights: Token weights in [0, 1], float32, proportional to the probabilities.
        top_p: Probability mass in (0, 1]; 1 keeps all tokens, even those that rounding would drop.
    """
    target_weight = top_p * weights.sum(axis=-1)

    def mask_below(lowest: Int[Array, " B"]) -> Float[Array, "B V"]:
        threshold = jax.lax.bitcast_convert_type(lowest, jnp.float32)
        return jnp.where(weights >= threshold[:, None], weights, 0.0)

    def bisect(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = low + (high - low) // 2
        is_enough = mask_below(middle).sum(axis=-1) >= target_weight
        return jnp.where(is_enough, middle, low), jnp.where(is_enough, high, middle)

    min_bits = jnp.zeros_like(target_weight, jnp.int32)
    max_bits = min_bits + _BITS_OF_ONE + 1
    low, _ = jax.lax.fori_loop(0, _BITS_OF_ONE.bit_length(), bisect, (min_bits, max_bits))
    return mask_below(jnp.where(top_p < 1.0, low, 0))


def _sample_index(
    weights: Float[Array, "B V"], uniform: Float[Array, " B"]
) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """Return the token whose cumulative weight interval contains `uniform`, and the total weight.

    Two levels avoid a cumulative sum over the vocabulary: find the block of tokens that contains
    the number, then the token within the block.
    """
    B, V = weights.shape
    block = 1 << math.ceil(math.log2(V) / 2)
    num_blocks = -(-V // block)
    blocks = jnp.pad(weights, ((0, 0), (0, num_blocks * block - V))).reshape(B, num_blocks, block)
    block_weights = blocks.sum(axis=-1)
    block_ends = jnp.cumsum(block_weights, axis=-1)
    total = block_ends[:, -1]
    target = uniform * total
    block_index = _find_first_above(block_weights, block_ends, target)
    before = _select_per_row(block_ends, jnp.maximum(block_index - 1, 0))
    start = jnp.where(block_index > 0, before, 0.0)
    block_values = jnp.take_along_axis(blocks, block_index[:, None, None], axis=1)[:, 0]
    value_ends = jnp.cumsum(block_values, axis=-1)
    return block_index * block + _find_first_above(block_values, value_ends, target - start), total


def _select_per_row(values: Float[Array, "B n"], index: Int[Array, " B"]) -> Float[Array, " B"]:
    """Return `values[i, index[i]]` for each row i.

    Avoids `values[jnp.arange(B), index]`, which would move data between devices.
    """
    return jnp.take_along_axis(values, index[:, None], axis=1)[:, 0]


def _find_first_above(
    weights: Float[Array, "B n"], ends: Float[Array, "B n"], target: Float[Array, " B"]
) -> Int[Array, " B"]:
    """Return the first index with nonzero weight at which the running sum exceeds `target`.

    The weight must be nonzero because XLA sums long rows in pieces: rounding can change the running
    sum even where the weight is 0. If no sum exceeds `target`, return the last such index.
    """
    n = weights.shape[-1]
    has_weight = weights > 0
    first = jnp.where(has_weight & (ends > target[:, None]), jnp.arange(n), n).min(axis=-1)
    return jnp.minimum(first, jnp.where(has_weight, jnp.arange(n), 0).max(axis=-1))

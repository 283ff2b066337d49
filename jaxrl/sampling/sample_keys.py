"""Random keys of samples, which depend only on the sample's identity."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np


def derive_sample_keys(
    seed: int,
    stage: int,
    step: int,
    positions: np.ndarray,
    samples: np.ndarray,
    attempts: np.ndarray,
    device: Any = None,
) -> np.ndarray:
    """Compute the random keys `uint32 [n, 2]` of n samples.

    Args:
        seed: Random seed of the run, `config.seed`.
        stage: Index of the sampling stage.
        step: Training step at which the sample starts.
        positions: Position of each sample's task in the task stream, int32 [n].
        samples: Index of each sample within its group, int32 [n].
        attempts: Attempt number of each sample's group, int32 [n]; 0 unless it is resampled.
        device: Device that computes the keys; None for JAX's default device.
    """
    # Use blocks of a fixed size, because the number of tasks varies and each size compiles a
    # program.
    keys = np.zeros((len(positions), 2), np.uint32)
    for start in range(0, len(positions), _KEY_BLOCK):
        block = [np.asarray(x[start : start + _KEY_BLOCK]) for x in (positions, samples, attempts)]
        count = len(block[0])
        padded = [np.pad(x.astype(np.int32), (0, _KEY_BLOCK - count)) for x in block]
        with jax.default_device(device):
            block_keys = _derive_sample_keys(seed, stage, step, *padded)
        keys[start : start + count] = np.asarray(block_keys)[:count]
    return keys


_KEY_BLOCK = 256


def derive_context_key(key: np.ndarray, number: int, device: Any = None) -> np.ndarray:
    """Derive the random key, uint32 [2], of a sample's context `number` (1-based).

    Token keys depend on the position in the context, and positions repeat across contexts.
    """
    with jax.default_device(device):
        return np.asarray(_derive_context_key(key, np.uint32(2**31 + number)))  # above any position


@jax.jit
def _derive_context_key(key: jax.Array, number: jax.Array) -> jax.Array:
    return jax.random.key_data(jax.random.fold_in(jax.random.wrap_key_data(key), number))


@jax.jit
def _derive_sample_keys(
    seed: jax.Array,
    stage: jax.Array,
    step: jax.Array,
    positions: jax.Array,
    samples: jax.Array,
    attempts: jax.Array,
) -> jax.Array:
    step_key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), stage), step)

    def derive_key(position: jax.Array, sample: jax.Array, attempt: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.fold_in(step_key, position), sample)
        return jax.random.key_data(jax.random.fold_in(key, attempt))

    return jax.vmap(derive_key)(positions, samples, attempts)

"""Keys of samples: what identifies a sample decides what is drawn for it, and nothing else does."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np


def sample_keys(
    seed: int,
    stage: int,
    step: int,
    positions: np.ndarray,
    samples: np.ndarray,
    attempts: np.ndarray,
    device: Any = None,
) -> np.ndarray:
    """Keys `uint32 [n, 2]` of samples, from what identifies them and nothing else.

    Args:
        seed: `config.seed`.
        stage: number of the stage that samples.
        step: the step at which the sample starts.
        positions: int32 [n], of the task in the task stream.
        samples: int32 [n], number of the sample in its group.
        attempts: int32 [n], 0 unless the group is drawn again.
        device: that computes them; JAX's first by default.
    """
    # In blocks of one size: what is sampled again comes in any number, and would compile anew.
    keys = np.zeros((len(positions), 2), np.uint32)
    for start in range(0, len(positions), _KEY_BLOCK):
        block = [np.asarray(x[start : start + _KEY_BLOCK]) for x in (positions, samples, attempts)]
        count = len(block[0])
        padded = [np.pad(x.astype(np.int32), (0, _KEY_BLOCK - count)) for x in block]
        with jax.default_device(device):
            of_block = _sample_keys(seed, stage, step, *padded)
        keys[start : start + count] = np.asarray(of_block)[:count]
    return keys


_KEY_BLOCK = 256


def context_key(key: np.ndarray, number: int, device: Any = None) -> np.ndarray:
    """The key `uint32 [2]` of a sample in its context `number`, from 1.

    A draw depends on the key and on the token's place in its context, and a place comes again.
    """
    with jax.default_device(device):
        return np.asarray(_context_key(key, np.uint32(2**31 + number)))  # no place is so large


@jax.jit
def _context_key(key: jax.Array, number: jax.Array) -> jax.Array:
    return jax.random.key_data(jax.random.fold_in(jax.random.wrap_key_data(key), number))


@jax.jit
def _sample_keys(
    seed: jax.Array,
    stage: jax.Array,
    step: jax.Array,
    positions: jax.Array,
    samples: jax.Array,
    attempts: jax.Array,
) -> jax.Array:
    run = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), stage), step)

    def one(position: jax.Array, sample: jax.Array, attempt: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.fold_in(run, position), sample)
        return jax.random.key_data(jax.random.fold_in(key, attempt))

    return jax.vmap(one)(positions, samples, attempts)

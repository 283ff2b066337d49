"""Exchange of host-side values between the processes of a job.

Each host runs one process. Processes sample on their local devices (`sharding.make_local_mesh`)
without waiting for each other. Updates run on the mesh of all devices. In between, `gather`
collects the samples in process order, so that all processes base decisions about the batch on the
same values.
"""

from __future__ import annotations

import json
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

Value = TypeVar("Value")

_BLOCK_SIZES = (1 << 12, 1 << 20)
"""Bytes that each process sends per collective call. Few sizes mean few compilations."""


def is_main() -> bool:
    """Return True if this is process 0, which writes files and prints."""
    return jax.process_index() == 0


def get_local_slice(count: int) -> slice:
    """Return this process's slice of `count` items, split evenly in process order."""
    index, size = jax.process_index(), jax.process_count()
    return slice(count * index // size, count * (index + 1) // size)


def gather(value: Value) -> list[Value]:
    """Gather a value from every process, in process order; all processes must call this.

    Values are sent as JSON over the device network, in blocks of a few fixed sizes. Tuples arrive
    as lists.
    """
    if jax.process_count() == 1:
        return [value]
    data = json.dumps(value).encode()
    sizes = _gather_lengths(len(data))
    longest = max(sizes)
    length = next((block for block in _BLOCK_SIZES if block >= longest), _BLOCK_SIZES[-1])
    rows = np.empty((len(sizes), longest), np.uint8)
    for start in range(0, longest, length):
        block = np.zeros(length, np.uint8)
        part = np.frombuffer(data[start : start + length], np.uint8)
        block[: len(part)] = part
        gathered = multihost_utils.process_allgather(block)
        rows[:, start : start + length] = gathered[:, : longest - start]
    return [json.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]


def _gather_lengths(length: int) -> list[int]:
    """Gather a length from every process. Lengths are sent as bytes: JAX truncates int64."""
    encoded = np.frombuffer(length.to_bytes(8, "little"), np.uint8)
    gathered = multihost_utils.process_allgather(encoded)
    return [int.from_bytes(row.tobytes(), "little") for row in gathered]


def barrier() -> None:
    """Wait for all processes; their earlier writes to disk are then complete."""
    gather(None)


def any_process(flag: bool) -> bool:
    """Return True if `flag` is True in any process; all processes must call this."""
    return any(gather(flag))


def broadcast(value: Value) -> Value:
    """Return process 0's value in every process; all processes must call this."""
    return gather(value)[0]

"""Checks and sizes of rows, positions and KV-cache pages on the configured devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from jaxrl.builders.resolved import ResolvedConfig
from jaxrl.models.architecture import Architecture
from jaxrl.runtime.sharding import BATCH_AXES, PIECE_AXES, num_batch_shards, num_pieces
from jaxrl.sampling.blocks import count_pages

GIB = 2**30


def gib(size: int) -> str:
    """Format a number of bytes in GiB, or in MiB below 1 GiB."""
    unit, scale = unit_of(size)
    return f"{size / scale:.2f} {unit}"


def unit_of(size: int) -> tuple[str, int]:
    """Return the display unit for a number of bytes, and the unit's bytes."""
    return ("GiB", GIB) if size >= GIB else ("MiB", 2**20)


MICRO_ROWS = {"sft": "sft.optimizer.micro_rows", "train": "optimizer.micro_rows"}
"""Config keys of the rows per micro-batch, by stage."""


def check_rows(config: ResolvedConfig, mesh: Any, num_processes: int) -> None:
    """Check that the rows of the configured stages divide evenly over the devices.

    Raises:
        ValueError: A number of rows does not. The message names the key.
    """
    batch, shards = " * ".join(BATCH_AXES), num_batch_shards(mesh)
    pieces = " * ".join(PIECE_AXES)
    if config.mesh.rollout_devices:
        pieces = "rollout_devices / tensor, of all processes,"
    sampling = sampling_shards(config, mesh, num_processes)
    for key, stages, axes, count in (
        ("optimizer.micro_rows", {"train"}, batch, shards),
        ("sft.optimizer.micro_rows", {"sft"}, batch, shards),
        ("rollout.max_num_seqs", {"train", "evaluate"}, pieces, sampling),
    ):
        value = config.config[key]
        if value % count and stages & set(config.stages):
            raise ValueError(
                f"config.{key} is {value}; expected a multiple of {axes} = {count}, so that every "
                "device gets the same number."
            )


def check_length(config: ResolvedConfig, model: Architecture) -> None:
    """Check that trajectories fit in the model's positions.

    Raises:
        ValueError: They are too long. The message names the key.
    """
    length = config.context_tokens
    if length > model.max_positions:
        raise ValueError(
            f"config.rollout.{_length_key(config)}={length} is beyond the "
            f"model's {model.max_positions} positions (max_position_embeddings of its config.json, "
            "or what YaRN in rope_scaling makes of them)."
        )


def sampling_shards(config: ResolvedConfig, mesh: Any, num_processes: int) -> int:
    """Return the number of devices, or groups along `tensor`, that sample separate rows."""
    devices = config.mesh.rollout_devices
    return num_processes * devices // mesh.shape["tensor"] if devices else num_pieces(mesh)


def samples_beside(config: ResolvedConfig) -> bool:
    """Return True if the same devices sample and update at the same time."""
    return bool(config.rollout.async_level) and not config.mesh.rollout_devices


@dataclass(frozen=True, kw_only=True)
class CacheSizes:
    """KV cache of the sampler on one device.

    Attributes:
        rows: Trajectories decoded in parallel.
        pages_each: Pages of a trajectory of maximum length.
        page_bytes: Bytes of a page over all layers.
    """

    rows: int
    pages_each: int
    page_bytes: int

    @classmethod
    def of(
        cls,
        config: ResolvedConfig,
        model: Architecture,
        mesh: Any,
        num_processes: int,
        page_tokens: int,
    ) -> CacheSizes:
        """Compute the sizes for pages of `page_tokens`. The mesh may be a planned one."""
        heads = model.num_kv_heads // mesh.shape["tensor"]
        values = 2 * model.num_layers * heads * model.head_dim
        return cls(
            rows=config.rollout.max_num_seqs // sampling_shards(config, mesh, num_processes),
            pages_each=count_pages(config.context_tokens, page_tokens),
            page_bytes=page_tokens * values * jnp.dtype(config.model.dtype).itemsize,
        )

    @property
    def full(self) -> int:
        """Pages for all rows at maximum length."""
        return self.rows * self.pages_each

    def fixed_pages(self, config: ResolvedConfig, platform: str) -> int | None:
        """Return the pages of the cache; None if they depend on the device's free memory.

        `rollout.cache_gib` decides. If it is 0, all rows fit on a CPU, because other programs use
        its memory too, and on a device that samples while it updates.

        Raises:
            ValueError: The cache does not hold one trajectory.
        """
        if not config.rollout.cache_gib:
            return self.full if platform == "cpu" or samples_beside(config) else None
        pages = int(config.rollout.cache_gib * GIB) // self.page_bytes
        if pages < self.pages_each:
            raise ValueError(
                f"config.rollout.cache_gib={config.rollout.cache_gib} does not hold one trajectory "
                f"of {config.context_tokens} tokens, which "
                f"takes {gib(self.pages_each * self.page_bytes)} of each device; raise "
                f"cache_gib or lower {_length_key(config)}."
            )
        return pages


def _length_key(config: ResolvedConfig) -> str:
    return "context.max_tokens" if config.has_contexts else "max_total_tokens"

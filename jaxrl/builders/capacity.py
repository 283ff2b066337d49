"""Rows, positions and KV-cache pages that the configured devices hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from jaxrl.builders.resolved import ResolvedConfig
from jaxrl.models.architecture import Architecture
from jaxrl.runtime.sharding import BATCH, PIECES, num_batch_shards, num_pieces
from jaxrl.sampling.blocks import pages_for

GIB = 2**30


def gib(size: int) -> str:
    """Format a number of bytes, in MiB if it is less than a GiB."""
    unit, scale = unit_of(size)
    return f"{size / scale:.2f} {unit}"


def unit_of(size: int) -> tuple[str, int]:
    """Return the unit in which a number of bytes is shown, and its bytes."""
    return ("GiB", GIB) if size >= GIB else ("MiB", 2**20)


MICRO_ROWS = {"sft": "sft.optimizer.micro_rows", "train": "optimizer.micro_rows"}
"""Keys of the rows of a micro-batch, by stage."""


def check_rows(config: ResolvedConfig, mesh: Any, num_processes: int) -> None:
    """Refuse numbers of rows, of configured stages, that do not divide evenly over the devices.

    Raises:
        ValueError: The message names the key.
    """
    batch, shards = " * ".join(BATCH), num_batch_shards(mesh)
    pieces = " * ".join(PIECES)
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
    """Refuse trajectories longer than the model's positions.

    Raises:
        ValueError: The message names the key.
    """
    length = config.context_tokens
    if length > model.max_positions:
        raise ValueError(
            f"config.rollout.{_length_key(config)}={length} is beyond the "
            f"model's {model.max_positions} positions (max_position_embeddings of its config.json, "
            "or what YaRN in rope_scaling makes of them)."
        )


def sampling_shards(config: ResolvedConfig, mesh: Any, num_processes: int) -> int:
    """Return the number of devices, or groups along `tensor`, that sample rows of their own."""
    devices = config.mesh.rollout_devices
    return num_processes * devices // mesh.shape["tensor"] if devices else num_pieces(mesh)


def samples_beside(config: ResolvedConfig) -> bool:
    """Return True if a device samples while it updates."""
    return bool(config.rollout.async_level) and not config.mesh.rollout_devices


@dataclass(frozen=True, kw_only=True)
class CacheSizes:
    """KV cache of the sampler on one device.

    Attributes:
        rows: Trajectories decoded side by side.
        pages_each: Pages of a trajectory of full length.
        page_bytes: Bytes of a page, in all layers.
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
        """Return the sizes for pages of `page_tokens`, on a mesh that need not exist."""
        heads = model.num_kv_heads // mesh.shape["tensor"]
        values = 2 * model.num_layers * heads * model.head_dim
        return cls(
            rows=config.rollout.max_num_seqs // sampling_shards(config, mesh, num_processes),
            pages_each=pages_for(config.context_tokens, page_tokens),
            page_bytes=page_tokens * values * jnp.dtype(config.model.dtype).itemsize,
        )

    @property
    def full(self) -> int:
        """Pages of all rows at full length."""
        return self.rows * self.pages_each

    def fixed_pages(self, config: ResolvedConfig, platform: str) -> int | None:
        """Return the pages of the cache; None if they depend on what else the device holds.

        `rollout.cache_gib` decides. Without it, there are enough for all rows on a CPU, whose
        memory has other users, and on a device that samples while it updates.

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

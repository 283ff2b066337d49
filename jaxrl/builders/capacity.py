"""Rows, positions and pages of keys and values that the configured devices hold."""

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
    """A number of bytes for people, of less than a GiB in MiB."""
    unit, scale = unit_of(size)
    return f"{size / scale:.2f} {unit}"


def unit_of(size: int) -> tuple[str, int]:
    """The unit in which people read a number of bytes, and its bytes."""
    return ("GiB", GIB) if size >= GIB else ("MiB", 2**20)


MICRO_ROWS = {"sft": "sft.optimizer.micro_rows", "train": "optimizer.micro_rows"}
"""Keys of a micro-batch's rows, by stage."""


def check_rows(config: ResolvedConfig, mesh: Any, num_processes: int) -> None:
    """Refuses numbers of rows, of stages that run, that do not divide evenly over the devices.

    Raises:
        ValueError: names the key.
    """
    shards, sampling = num_batch_shards(mesh), sampling_shards(config, mesh, num_processes)
    told = " * ".join(PIECES)
    if config.mesh.rollout_devices:
        told = "rollout_devices / tensor, of all processes,"
    rows = {
        "optimizer.micro_rows": (config.optimizer.micro_rows, shards, {"train"}),
        "sft.optimizer.micro_rows": (config.sft.optimizer.micro_rows, shards, {"sft"}),
        "rollout.num_rows": (config.rollout.num_rows, sampling, {"train", "evaluate"}),
    }
    for key, (value, count, readers) in rows.items():
        if value % count and readers & set(config.stages):
            what = told if key == "rollout.num_rows" else " * ".join(BATCH)
            raise ValueError(
                f"config.{key} is {value}; expected a multiple of {what} = {count}, so that "
                "every device gets the same number."
            )


def check_length(config: ResolvedConfig, model: Architecture) -> None:
    """Refuses trajectories longer than the model's positions.

    Raises:
        ValueError: names the key.
    """
    length = config.context_tokens
    if length > model.max_positions:
        raise ValueError(
            f"config.rollout.{_length_key(config)}={length} is beyond the "
            f"model's {model.max_positions} positions (max_position_embeddings of its config.json, "
            "or what YaRN in rope_scaling makes of them)."
        )


def sampling_shards(config: ResolvedConfig, mesh: Any, num_processes: int) -> int:
    """Number of devices, or of groups of them along `tensor`, that sample rows of their own."""
    devices = config.mesh.rollout_devices
    return num_processes * devices // mesh.shape["tensor"] if devices else num_pieces(mesh)


def samples_beside(config: ResolvedConfig) -> bool:
    """Return True if a device samples while it updates."""
    return bool(config.rollout.ahead) and not config.mesh.rollout_devices


@dataclass(frozen=True, kw_only=True)
class CacheSizes:
    """Keys and values of the sampler on one device.

    Attributes:
        rows: trajectories decoded side by side.
        pages_each: of a trajectory of full length.
        page_bytes: keys and values of a page, in all layers.
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
        """Counts for kernels whose pages have `page_tokens`, on a mesh that need not exist."""
        heads = model.num_kv_heads // mesh.shape["tensor"]
        values = 2 * model.num_layers * heads * model.head_dim
        return cls(
            rows=config.rollout.num_rows // sampling_shards(config, mesh, num_processes),
            pages_each=pages_for(config.context_tokens, page_tokens),
            page_bytes=page_tokens * values * jnp.dtype(config.model.dtype).itemsize,
        )

    @property
    def full(self) -> int:
        """Pages of all rows at full length."""
        return self.rows * self.pages_each

    def fixed_pages(self, config: ResolvedConfig, platform: str) -> int | None:
        """Pages of the cache where they do not depend on what else is on the device, else None.

        As many as `rollout.cache_gib` holds. Without it, enough for all rows on a CPU, whose memory
        others use too, and where a device samples while it updates.

        Raises:
            ValueError: what is configured does not hold one trajectory.
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

"""Checks of row counts and context length, and the size of each device's KV cache."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from jaxrl.builders.resolved import ResolvedConfig
from jaxrl.models.architecture import Architecture
from jaxrl.runtime.compilation import is_out_of_memory
from jaxrl.runtime.sharding import BATCH_AXES, PIECE_AXES, count_batch_shards, count_piece_shards
from jaxrl.sampling.blocks import count_pages

GIB = 2**30


def format_bytes(size: int) -> str:
    """Format a size in bytes as GiB, or as MiB below 1 GiB."""
    unit, scale = choose_byte_unit(size)
    return f"{size / scale:.2f} {unit}"


def choose_byte_unit(size: int) -> tuple[str, int]:
    """Return the unit, GiB or MiB, in which to display a size, and the unit's size in bytes."""
    return ("GiB", GIB) if size >= GIB else ("MiB", 2**20)


MICRO_ROWS = {"sft": "sft.optimizer.micro_rows", "train": "optimizer.micro_rows"}
"""Config key of the micro-batch size, by stage."""


def check_row_counts(config: ResolvedConfig, mesh: Any, num_processes: int) -> None:
    """Check that the configured stages' row counts are multiples of the number of shards.

    Raises:
        ValueError: A row count is not a multiple. The message names the key.
    """
    batch, shards = " * ".join(BATCH_AXES), count_batch_shards(mesh)
    piece_axes = " * ".join(PIECE_AXES)
    if config.mesh.rollout_devices:
        piece_axes = "rollout_devices / tensor, of all processes,"
    sampling_shards = count_sampling_shards(config, mesh, num_processes)
    for key, stages, axes, count in (
        ("optimizer.micro_rows", {"train"}, batch, shards),
        ("sft.optimizer.micro_rows", {"sft"}, batch, shards),
        ("rollout.max_num_seqs", {"train", "evaluate"}, piece_axes, sampling_shards),
    ):
        value = config.config[key]
        if value % count and stages & set(config.stages):
            raise ValueError(
                f"config.{key} is {value}; expected a multiple of {axes} = {count}, so that every "
                "device gets the same number."
            )


def check_context_length(config: ResolvedConfig, model: Architecture) -> None:
    """Check that trajectories fit in the model's context window.

    Raises:
        ValueError: The trajectories do not fit. The message names the key.
    """
    length = config.context_tokens
    if length > model.max_positions:
        raise ValueError(
            f"config.rollout.{_get_context_length_key(config)}={length} exceeds the "
            f"model's {model.max_positions} positions (max_position_embeddings in its config.json, "
            "extended by YaRN if rope_scaling is set)."
        )


def explain_out_of_memory(config: ResolvedConfig, error: Exception) -> str | None:
    """Name the settings to lower after an out-of-memory error; return None for other errors.

    The message names the settings of all phases: programs run asynchronously, so an error in the
    update may surface during the next sampling phase.
    """
    if not is_out_of_memory(error):
        return None
    reason, *_ = str(error).splitlines()  # XLA appends a list of its largest buffers
    keys = [*(MICRO_ROWS[stage] for stage in config.num_steps_by_stage), "rollout.max_num_seqs"]
    settings = " or ".join(f"config.{key}={config[key]}" for key in keys)
    return (
        f"a device is out of memory ({reason.rstrip('.')}); lower {settings}; `jaxrl plan` shows "
        "the memory of each phase and suggests settings"
    )


def count_sampling_shards(config: ResolvedConfig, mesh: Any, num_processes: int) -> int:
    """Return the number of sampler shards. A shard is the devices along the `tensor` axis."""
    devices = config.mesh.rollout_devices
    return num_processes * devices // mesh.shape["tensor"] if devices else count_piece_shards(mesh)


def update_overlaps_sampling(config: ResolvedConfig) -> bool:
    """Return True if the same devices run sampling and the update concurrently."""
    return bool(config.rollout.async_level) and not config.mesh.rollout_devices


@dataclass(frozen=True, kw_only=True)
class CacheSizes:
    """Size of the sampler's cache on one device.

    Attributes:
        num_rows: Number of trajectories decoded in parallel.
        num_pages_per_row: Number of pages for a trajectory of maximum length.
        page_bytes: Size of a page in bytes, summed over all layers.
        row_state_bytes: Size of a row's state in recurrent layers, in bytes.
    """

    num_rows: int
    num_pages_per_row: int
    page_bytes: int
    row_state_bytes: int = 0

    @classmethod
    def from_config(
        cls,
        config: ResolvedConfig,
        model: Architecture,
        mesh: Any,
        num_processes: int,
        page_tokens: int,
    ) -> CacheSizes:
        """Compute the sizes for pages of `page_tokens` tokens. The mesh may be abstract."""
        heads = model.num_kv_heads // mesh.shape["tensor"]
        values = 2 * model.num_attention_layers * heads * model.head_dim
        state_bytes = sum(
            math.prod(spec.shape) * spec.dtype.itemsize for spec in model.state_specs.values()
        )
        return cls(
            num_rows=config.rollout.max_num_seqs
            // count_sampling_shards(config, mesh, num_processes),
            num_pages_per_row=count_pages(config.context_tokens, page_tokens),
            page_bytes=page_tokens * values * jnp.dtype(config.model.dtype).itemsize,
            row_state_bytes=model.num_recurrent_layers * state_bytes // mesh.shape["tensor"],
        )

    @property
    def num_states(self) -> int:
        """Number of recurrent states: two per row, to have some for prompts and waiting rows."""
        return 2 * self.num_rows

    @property
    def max_pages(self) -> int:
        """Number of pages for all rows at maximum length."""
        return self.num_rows * self.num_pages_per_row

    def compute_num_pages(self, config: ResolvedConfig, platform: str) -> int | None:
        """Return the number of cache pages; None if it depends on the device's free memory.

        `rollout.cache_gib` sets the size. If it is 0, the cache holds all rows at maximum length on
        a CPU, which shares its memory with other programs, and on a device that samples during the
        update.

        Raises:
            ValueError: The configured cache is too small for one trajectory and all states.
        """
        if not config.rollout.cache_gib:
            return self.max_pages if platform == "cpu" or update_overlaps_sampling(config) else None
        states_bytes = self.num_states * self.row_state_bytes
        pages = (int(config.rollout.cache_gib * GIB) - states_bytes) // self.page_bytes
        if pages < self.num_pages_per_row:
            raise ValueError(
                f"config.rollout.cache_gib={config.rollout.cache_gib} cannot hold one trajectory "
                f"of {config.context_tokens} tokens, which "
                f"takes {format_bytes(self.num_pages_per_row * self.page_bytes)} per device; raise "
                f"cache_gib or lower {_get_context_length_key(config)}."
            )
        return pages


def _get_context_length_key(config: ResolvedConfig) -> str:
    return "context.max_tokens" if config.has_contexts else "max_total_tokens"

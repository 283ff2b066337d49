"""Search for settings, or a number of devices, that let a run fit in memory."""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jaxrl.builders.capacity import MICRO_ROWS, format_bytes
from jaxrl.builders.method import compute_batch_shape
from jaxrl.builders.resolved import ResolvedConfig
from jaxrl.config.schema import flatten_config
from jaxrl.extras.plan.memory import (
    IGNORE_PLAN_HINT,
    Target,
    make_plan,
    make_target_mesh,
    plan_update,
)
from jaxrl.models.architecture import Architecture
from jaxrl.runtime.sharding import count_batch_shards

CPU_TOKENS = 512
"""Minimum tokens of a micro-batch on a CPU, to amortize the pass over all gradients."""


def find_micro_rows(
    config: ResolvedConfig,
    model: Architecture,
    target: Target,
    stage: str,
    *,
    must_fit: bool = True,
) -> tuple[int, int]:
    """Return the number of rows of the fastest micro-batch that fits, and its peak memory in bytes.

    On a GPU or TPU, the fastest is the largest that fits, up to the size of a mini-batch. On a
    CPU, small micro-batches have less padding and take about as long per token, so a micro-batch
    has two rows, which can share a prompt, or more rows up to `CPU_TOKENS` tokens. The number of
    rows is a multiple of data * fsdp * expert.

    Raises:
        ValueError: One row per device does not fit, and `must_fit` is True.
    """
    shards = count_batch_shards(make_target_mesh(config, model, target))

    def compute_peak(rows_each: int) -> int:
        changed = config.with_values({MICRO_ROWS[stage]: rows_each * shards})
        return plan_update(changed, model, target, stage).peak_bytes

    # With single-row micro-batches, a mini-batch has one micro-batch per sequence.
    single_row = config.with_values(dict.fromkeys(MICRO_ROWS.values(), 1))
    max_rows = -(-compute_batch_shape(single_row, stage).num_micro // shards)
    if target.platform == "cpu":
        max_rows = min(max_rows, max(-(-CPU_TOKENS // config.rollout.max_total_tokens), 2))
    # The peak increases with the rows, so bisection needs few plans.
    num_fitting = bisect.bisect_right(range(1, max_rows + 1), target.usable_bytes, key=compute_peak)
    if num_fitting == 0 and must_fit:
        raise ValueError(
            f"config.{MICRO_ROWS[stage]}=0 selects a micro-batch that fits, but {shards} rows, one "
            f"per device, need {format_bytes(compute_peak(1))}, and the limit is "
            f"{format_bytes(target.usable_bytes)}; --plan suggests changes, {IGNORE_PLAN_HINT}."
        )
    rows_each = max(num_fitting, 1)
    return rows_each * shards, compute_peak(rows_each)


def choose_micro_rows(
    config: ResolvedConfig,
    model: Architecture,
    target: Target,
    recorded_config: Mapping[str, Any] | None = None,
    *,
    must_fit: bool = True,
) -> list[str]:
    """Replace each `micro_rows` of 0 with the best value that fits, in place; return notes.

    A resumed run keeps the value in `recorded_config`, the flat config of its first start, if that
    fits and is a multiple of the number of batch shards; this adds no note.
    """
    # The free memory of a CPU differs at each start, but the selected value must not.
    target = dataclasses.replace(target, free_bytes=None)
    shards = count_batch_shards(make_target_mesh(config, model, target))
    notes = []
    for stage, key in MICRO_ROWS.items():
        section = config.get_optimizer_section(stage)
        if stage not in config.stages or section.micro_rows:
            continue
        previous = (recorded_config or {}).get(key, 0)
        if previous and previous % shards == 0:
            changed = config.with_values({key: previous})
            if plan_update(changed, model, target, stage).peak_bytes <= target.usable_bytes:
                section.micro_rows = previous
                continue
        note = f" (the original {previous} do not fit these devices)" if previous else ""
        rows, peak = find_micro_rows(config, model, target, stage, must_fit=must_fit)
        section.micro_rows = rows
        notes.append(
            f"config.{key}=0: {rows} rows{note}, planned at {format_bytes(peak)} per device"
        )
    return notes


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    """Suggested settings, and the memory needed by the resulting plan (`Plan.needed_bytes`)."""

    settings: dict[str, Any]
    needed_bytes: int


def suggest_settings(
    config: ResolvedConfig, model: Architecture, target: Target
) -> list[Suggestion]:
    """Find setting changes that let a run fit, cheapest first.

    Returns the smallest sufficient change of each key that suffices on its own. Of changes that
    need the same memory, only the cheapest is returned. If no single key suffices, keys are
    combined until the plan fits. The list is empty if no combination fits.
    """

    def compute_needed_bytes(settings: dict[str, Any]) -> int | None:
        try:
            return make_plan(config.with_values(settings), model, target).needed_bytes
        except ValueError:
            return None  # the mesh does not divide the rows or heads

    usable = target.usable_bytes
    single: dict[str, Suggestion] = {}
    combined = Suggestion(settings={}, needed_bytes=make_plan(config, model, target).needed_bytes)
    # Try each key alone. In the same pass, collect all changes that save memory.
    for options in _iter_options(config, model, target):
        for settings in options:
            size = compute_needed_bytes(settings)
            if size is not None and size <= usable:
                single.setdefault(
                    format_bytes(size), Suggestion(settings=settings, needed_bytes=size)
                )
                break
        for settings in options:
            if combined.needed_bytes <= usable:
                break
            merged = {**combined.settings, **settings}
            size = compute_needed_bytes(merged)
            if size is not None and size < combined.needed_bytes:
                combined = Suggestion(settings=merged, needed_bytes=size)
    return [*single.values()] or ([combined] if combined.needed_bytes <= usable else [])


def find_num_devices(config: ResolvedConfig, model: Architecture, target: Target) -> int | None:
    """Return a number of devices on which the run fits, found by doubling.

    The `fsdp` axis grows with the number of devices. A job with several processes gets more
    processes of the same size.

    Returns:
        The number of devices, or None if the run does not fit after ten doublings.
    """
    flat, mesh = flatten_config(config), make_target_mesh(config, model, target)
    sizes, is_job = mesh.shape, target.num_processes > 1
    # Scale the mesh, and round up the rows to multiples of its size.
    for factor in (2**power for power in range(1, 11)):
        larger = dataclasses.replace(
            target,
            num_devices=target.num_devices * factor,
            num_processes=target.num_processes * (factor if is_job else 1),
        )
        shards = count_batch_shards(mesh) * factor
        num_sampling = max(flat["mesh.rollout_devices"] * factor * target.num_processes, 1)
        unit = math.lcm(shards * sizes["context"], num_sampling)
        keys = (*MICRO_ROWS.values(), "rollout.max_num_seqs")
        changes = {
            **{key: -(-flat[key] // unit) * unit for key in keys},
            "mesh.data": sizes["data"],
            "mesh.fsdp": sizes["fsdp"] * factor,
            "mesh.rollout_devices": flat["mesh.rollout_devices"] * (1 if is_job else factor),
        }
        changed = config.with_values(changes)
        if make_plan(changed, model, larger).fits or suggest_settings(changed, model, larger):
            return larger.num_devices
    return None


def _iter_options(
    config: ResolvedConfig, model: Architecture, target: Target
) -> Iterator[list[dict[str, Any]]]:
    """Yield, for each config key, a list of settings from the smallest to the largest change.

    Keys are ordered by their cost in step time.
    """
    mesh = make_target_mesh(config, model, target)
    flat = flatten_config(config)
    is_cpu = target.platform == "cpu"
    sizes, shards = mesh.shape, count_batch_shards(mesh)
    groups = sizes["data"] * sizes["fsdp"]  # each group of devices holds all experts
    row_keys = [key for stage, key in MICRO_ROWS.items() if stage in config.stages]
    optimizers = [key.removesuffix("micro_rows") for key in row_keys]
    # Lower precision, and no sampling during updates.
    if config.model.dtype == "float32":
        yield [{"model.dtype": "bfloat16"}]
    yield [{f"{optimizer}moments_dtype": "bfloat16" for optimizer in optimizers}]
    if config.rollout.async_level and not config.mesh.rollout_devices:
        yield [{"rollout.async_level": 0}]
    # Sharded weights, smaller micro-batches and chunks, offloading and rematerialization.
    yield [
        {"mesh.data": groups // fsdp, "mesh.fsdp": fsdp, "mesh.tensor": sizes["tensor"]}
        for fsdp in _list_doublings(sizes["fsdp"], groups)
    ]
    for key in row_keys:
        yield [{key: rows} for rows in _list_halvings(flat[key], unit=shards)]
    chunk = "model.logits_chunk_tokens"
    yield [{chunk: size} for size in _list_halvings(flat[chunk], least=128)]
    if not is_cpu:  # offloading moves arrays to host memory, where a CPU's arrays already are
        yield [{f"{optimizer}offload": True for optimizer in optimizers}]
    remats = ("none", "dots", "names", "full") + (() if is_cpu else ("offload",))
    if config.model.remat in remats:
        yield [{"model.remat": remat} for remat in remats[remats.index(config.model.remat) + 1 :]]
    # A smaller cache, fewer concurrent sequences, other devices for sampling.
    if flat["rollout.cache_gib"]:
        yield [{"rollout.cache_gib": 0.0}]
    unit = shards * sizes["context"]
    yield [
        {"rollout.max_num_seqs": num_seqs}
        for num_seqs in _list_halvings(flat["rollout.max_num_seqs"], unit=unit)
    ]
    if config.rollout.async_level and sizes["expert"] == 1:
        yield _list_device_splits(config, target, sizes)
    # Context parallelism: equal rows per device, whose tokens are split over several devices.
    yield [
        {"mesh.data": 1, "mesh.fsdp": groups // count, "mesh.context": sizes["context"] * count}
        | {key: flat[key] // count for key in row_keys}
        for count in _list_doublings(1, groups)
        if groups % count == 0
    ]
    # Tensor parallelism.
    meshes = [
        {"mesh.data": 1, "mesh.fsdp": groups * sizes["tensor"] // tensor, "mesh.tensor": tensor}
        for tensor in _list_doublings(
            sizes["tensor"], math.gcd(model.num_kv_heads, target.num_local)
        )
    ]
    yield meshes
    # Tensor parallelism with equal rows per shard, and so fewer rows in total.
    yield [
        mesh | {key: flat[key] * mesh["mesh.fsdp"] // groups for key in row_keys} for mesh in meshes
    ]
    # Shorter sequences come last, because they change the task most.
    shortest = config.rollout.max_prompt_tokens + 1
    if config.has_contexts:
        context = config.rollout.context
        shortest, least = context.max_tokens, config.rollout.max_prompt_tokens + context.turn_tokens
        lengths = _list_halvings(context.max_tokens, least=least)
        yield [{"rollout.context.max_tokens": tokens} for tokens in lengths]
    lengths = _list_halvings(config.rollout.max_total_tokens, least=shortest)
    yield [{"rollout.max_total_tokens": tokens} for tokens in lengths]


def _list_device_splits(
    config: ResolvedConfig, target: Target, sizes: Mapping[str, int]
) -> list[dict[str, Any]]:
    """Return settings that reserve different numbers of devices for asynchronous sampling.

    The last option is 0 if devices are currently reserved. The `fsdp` axis covers all training
    devices, with an unchanged number of micro-batch rows per device.
    """
    flat, tensor, processes = flatten_config(config), sizes["tensor"], target.num_processes
    previous, context = sizes["data"] * sizes["fsdp"], sizes["context"]
    counts = [tensor, *_list_doublings(tensor, target.num_local - 1)]
    if config.mesh.rollout_devices:
        counts.append(0)
    candidates = []
    for count in counts:
        if count == config.mesh.rollout_devices:
            continue
        shards = (target.num_devices - count * processes) // (tensor * context)
        sampling = processes * count // tensor or shards * context
        candidate = {
            "rollout.async_level": int(count > 0),
            "mesh.rollout_devices": count,
            "mesh.data": 1,
            "mesh.fsdp": shards,
            "mesh.tensor": tensor,
            "rollout.max_num_seqs": -(-flat["rollout.max_num_seqs"] // sampling) * sampling,
        }
        for stage, key in MICRO_ROWS.items():
            if stage in config.stages:
                candidate[key] = flat[key] // previous * shards
        candidates.append(candidate)
    return candidates


def _list_halvings(value: int, *, least: int = 1, unit: int = 1) -> list[int]:
    """Return 1/2, 1/4, ... of the value, rounded down to multiples of `unit`, down to `least`."""
    sizes = [(value >> power) // unit * unit for power in range(1, 32)]
    return [size for size in dict.fromkeys(sizes) if size >= least]


def _list_doublings(value: int, max_rows: int) -> list[int]:
    """Return 2, 4, ... times the value, up to `max_rows`."""
    return [value << power for power in range(1, 32) if value << power <= max_rows]

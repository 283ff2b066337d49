"""Settings with which a run would fit its devices: rows, one key, several keys, more devices."""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jaxrl.builders.capacity import MICRO_ROWS, gib
from jaxrl.builders.method import batch_shape
from jaxrl.builders.resolved import ResolvedConfig
from jaxrl.config.schema import flatten
from jaxrl.extras.plan.memory import (
    GO_ON,
    Target,
    make_plan,
    target_mesh,
    update_phase,
)
from jaxrl.models.architecture import Architecture
from jaxrl.runtime.sharding import BATCH, num_batch_shards

CPU_TOKENS = 512
"""Tokens of a micro-batch on a CPU that are worth a pass over the gradients of all weights."""


def best_micro_rows(
    config: ResolvedConfig,
    model: Architecture,
    target: Target,
    stage: str,
    *,
    must_fit: bool = True,
) -> tuple[int, int]:
    """The micro-batch of a stage that is computed the fastest among those that fit a device.

    On a GPU or TPU the largest one, but no larger than a mini-batch needs. On a CPU a token takes
    about as long in a small one, of which less is padding: there it is two rows, so that sequences
    of a prompt meet, or `CPU_TOKENS` if that is more. Where not even one row on each device
    fits, it is that, unless `must_fit`.

    Returns:
        Rows, a multiple of data * fsdp * expert, and the bytes of a device at the peak.

    Raises:
        ValueError: not even one row on each device fits, and `must_fit`.
    """
    shards = num_batch_shards(target_mesh(config, model, target))

    def peak(rows_each: int) -> int:
        changed = config.with_values({MICRO_ROWS[stage]: rows_each * shards})
        return update_phase(changed, model, target, stage).peak

    # With one row each, there are as many micro-batches as sequences in a mini-batch.
    one_each = config.with_values(dict.fromkeys(MICRO_ROWS.values(), 1))
    most = -(-batch_shape(one_each, stage).num_micro // shards)
    if target.platform == "cpu":
        most = min(most, max(-(-CPU_TOKENS // config.rollout.max_total_tokens), 2))
    usable = target.usable
    # The peak grows with the rows, so that few plans are made.
    fitting = bisect.bisect_right(range(1, most + 1), usable, key=peak)
    if fitting == 0 and must_fit:
        raise ValueError(
            f"config.{MICRO_ROWS[stage]}=0 asks for a micro-batch that fits, but "
            f"{shards} rows, one on each device, would need {gib(peak(1))} of the "
            f"{gib(usable)} that may be used of each; --plan tells what to "
            f"change, {GO_ON}."
        )
    rows_each = max(fitting, 1)
    return rows_each * shards, peak(rows_each)


def choose_micro_rows(
    config: ResolvedConfig,
    model: Architecture,
    target: Target,
    began: Mapping[str, Any] | None = None,
    *,
    must_fit: bool = True,
) -> list[str]:
    """Replaces a `micro_rows` of 0 by the best that fits, in place; says what it chose.

    What a run began with, the flat keys `began`, is kept without a word while it divides over the
    mesh and fits. `must_fit` as in `best_micro_rows`.
    """
    # What is free of a CPU is another at each start, and a choice that depends on it would be too.
    target = dataclasses.replace(target, free_bytes=None)
    shards = num_batch_shards(target_mesh(config, model, target))
    usable = target.usable
    notes = []
    for stage, key in MICRO_ROWS.items():
        if stage not in config.stages or config.optimizer_section(stage).micro_rows:
            continue
        note, kept = "", (began or {}).get(key, 0)
        if kept and kept % shards:
            axes = " * ".join(BATCH)
            note = f" (not the {kept} it began with: no multiple of {axes} = {shards})"
        elif kept:
            peak = update_phase(config.with_values({key: kept}), model, target, stage).peak
            if peak <= usable:
                config.optimizer_section(stage).micro_rows = kept
                continue
            note = f" (not the {kept} it began with: they would need {gib(peak)})"
        rows, peak = best_micro_rows(config, model, target, stage, must_fit=must_fit)
        config.optimizer_section(stage).micro_rows = rows
        notes.append(f"config.{key}=0: {rows} rows{note}, planned at {gib(peak)} on each device")
    return notes


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Settings that make a plan fit, and the peak with them."""

    settings: dict[str, Any]
    peak: int


def advise(config: ResolvedConfig, model: Architecture, target: Target) -> list[Advice]:
    """Finds changes that make a configuration fit: every single key that is enough.

    Where none is, keys are added up in the order of what they cost in speed, until it fits.
    An empty list: nothing tried here helps.
    """

    def peak(settings: dict[str, Any]) -> int | None:
        try:
            return make_plan(config.with_values(settings), model, target).peak
        except ValueError:
            return None  # rows or heads that the mesh would not divide

    usable = target.usable
    single, together = [], Advice(settings={}, peak=make_plan(config, model, target).peak)
    for options in _options(config, model, target):
        peaks = [(settings, peak(settings)) for settings in options]
        fitting = [Advice(settings=s, peak=p) for s, p in peaks if p is not None and p <= usable]
        single += fitting[:1]
        if together.peak > usable:
            for settings in options:
                joint = {**together.settings, **settings}
                size = peak(joint)
                if size is not None and size < together.peak:
                    together = Advice(settings=joint, peak=size)
                if together.peak <= usable:
                    break
    return single or ([together] if together.peak <= usable else [])


def devices_needed(config: ResolvedConfig, model: Architecture, target: Target) -> int | None:
    """The first doubling of the devices at which it fits, with settings as `advise` tries them.

    The new devices are put along fsdp first; several processes become more of them, each with as
    many devices as before. None: no number up to a thousandfold is enough.
    """
    flat, mesh = flatten(config), target_mesh(config, model, target)
    sizes, is_job = mesh.shape, target.num_processes > 1
    for factor in (2**power for power in range(1, 11)):
        larger = dataclasses.replace(
            target,
            num_devices=target.num_devices * factor,
            num_processes=target.num_processes * (factor if is_job else 1),
        )
        shards = num_batch_shards(mesh) * factor
        num_sampling = max(flat["mesh.rollout_devices"] * factor * target.num_processes, 1)
        unit = math.lcm(shards * sizes["context"], num_sampling)
        keys = ("optimizer.micro_rows", "sft.optimizer.micro_rows", "rollout.num_rows")
        rows = {key: -(-flat[key] // unit) * unit for key in keys}
        grown_mesh = {
            "mesh.data": sizes["data"],
            "mesh.fsdp": sizes["fsdp"] * factor,
            "mesh.rollout_devices": flat["mesh.rollout_devices"] * (1 if is_job else factor),
        }
        grown = config.with_values({**rows, **grown_mesh})
        if make_plan(grown, model, larger).fits or advise(grown, model, larger):
            return larger.num_devices
    return None


def _options(
    config: ResolvedConfig, model: Architecture, target: Target
) -> Iterator[list[dict[str, Any]]]:
    """Yields for each key its values to try, the cheapest first; keys by what they cost in time."""
    mesh = target_mesh(config, model, target)
    sizes, shards = mesh.shape, num_batch_shards(mesh)
    groups = sizes["data"] * sizes["fsdp"]  # of devices that have all experts together
    if config.model.dtype == "float32":
        yield [{"model.dtype": "bfloat16"}]
    yield [_of_optimizers(config, "moments_dtype", "bfloat16")]
    if config.rollout.ahead and not config.mesh.rollout_devices:
        yield [{"rollout.ahead": 0}]
    yield [
        {"mesh.data": groups // fsdp, "mesh.fsdp": fsdp, "mesh.tensor": sizes["tensor"]}
        for fsdp in _doublings(sizes["fsdp"], groups)
    ]
    flat = flatten(config)
    for stage, key in MICRO_ROWS.items():
        if stage in config.stages:
            yield [{key: rows} for rows in _halvings(flat[key], unit=shards)]
    yield [
        {"model.logits_chunk_tokens": size}
        for size in _halvings(flat["model.logits_chunk_tokens"], least=128)
    ]
    if target.platform != "cpu":  # whose memory is the host's
        yield [_of_optimizers(config, "offload", True)]
    kept = ("none", "dots", "names", "full") + (() if target.platform == "cpu" else ("offload",))
    if config.model.remat in kept:
        yield [{"model.remat": less} for less in kept[kept.index(config.model.remat) + 1 :]]
    if flat["rollout.cache_gib"]:
        yield [{"rollout.cache_gib": 0.0}]
    unit = shards * sizes["context"]
    yield [{"rollout.num_rows": fewer} for fewer in _halvings(flat["rollout.num_rows"], unit=unit)]
    if config.rollout.ahead and sizes["expert"] == 1:
        yield _divisions(config, target, sizes)
    keys = [key for stage, key in MICRO_ROWS.items() if stage in config.stages]
    # As many rows each, of which several devices then share the tokens.
    yield [
        {"mesh.data": 1, "mesh.fsdp": groups // count, "mesh.context": sizes["context"] * count}
        | {key: flat[key] // count for key in keys}
        for count in _doublings(1, groups)
        if groups % count == 0
    ]
    meshes = [
        {"mesh.data": 1, "mesh.fsdp": groups * sizes["tensor"] // tensor, "mesh.tensor": tensor}
        for tensor in _doublings(sizes["tensor"], math.gcd(model.num_kv_heads, target.num_local))
    ]
    yield meshes
    # On fewer shards as many rows each: two devices then share the heads of what one had.
    yield [mesh | {key: flat[key] * mesh["mesh.fsdp"] // groups for key in keys} for mesh in meshes]
    shortest = config.rollout.max_prompt_tokens + 1
    if config.has_contexts:
        context = config.rollout.context
        shortest, least = context.max_tokens, config.rollout.max_prompt_tokens + context.turn_tokens
        yield [
            {"rollout.context.max_tokens": tokens}
            for tokens in _halvings(context.max_tokens, least=least)
        ]
    yield [
        {"rollout.max_total_tokens": tokens}
        for tokens in _halvings(config.rollout.max_total_tokens, least=shortest)
    ]


def _of_optimizers(config: ResolvedConfig, key: str, value: Any) -> dict[str, Any]:
    """A key of the optimizers of all stages that run."""
    sections = [
        one.removesuffix("micro_rows") for s, one in MICRO_ROWS.items() if s in config.stages
    ]
    return {f"{section}{key}": value for section in sections}


def _divisions(
    config: ResolvedConfig, target: Target, sizes: Mapping[str, int]
) -> list[dict[str, Any]]:
    """Other numbers of devices that only sample, one step ahead; at last, where some do, none.

    The devices that train are put along fsdp, with as many rows of a micro-batch each as before.
    """
    flat, tensor, processes = flatten(config), sizes["tensor"], target.num_processes
    before, context = sizes["data"] * sizes["fsdp"], sizes["context"]
    counts = [tensor, *_doublings(tensor, target.num_local - 1)]
    if config.mesh.rollout_devices:
        counts.append(0)
    divisions = []
    for count in counts:
        shards = (target.num_devices - count * processes) // (tensor * context)
        sampling = processes * count // tensor or shards * context
        division = {
            "rollout.ahead": int(count > 0),
            "mesh.rollout_devices": count,
            "mesh.data": 1,
            "mesh.fsdp": shards,
            "mesh.tensor": tensor,
            "rollout.num_rows": -(-flat["rollout.num_rows"] // sampling) * sampling,
        }
        for stage, key in MICRO_ROWS.items():
            if stage in config.stages:
                division[key] = flat[key] // before * shards
        if count != config.mesh.rollout_devices:
            divisions.append(division)
    return divisions


def _halvings(value: int, *, least: int = 1, unit: int = 1) -> list[int]:
    """Half the value, a quarter, … down to `least`, each cut to a multiple of `unit`."""
    sizes = [(value >> power) // unit * unit for power in range(1, 32)]
    return [size for size in dict.fromkeys(sizes) if size >= least]


def _doublings(value: int, most: int) -> list[int]:
    """Twice the value, four times, … up to `most`."""
    return [value << power for power in range(1, 32) if value << power <= most]

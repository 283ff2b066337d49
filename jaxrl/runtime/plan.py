"""Memory and shapes of a run on each device, from its configuration and the model's config.json.

Nothing is allocated and no weights are read. What arrays will lie on a device follows from the
shapes of parameters, optimizer state and caches and from how they are split; what a compiled
program needs beside them is modelled term by term, and tests hold the sums to what XLA's memory
analysis of the same programs says. `make_plan` computes, `advise` looks for settings that fit,
`largest_micro_rows` for the largest micro-batch; `show` is the table for people.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType
from ml_collections import ConfigDict
from rich.console import Group
from rich.table import Table
from rich.text import Text

from jaxrl.components import (
    check_length,
    check_rows,
    make_optimizer,
    prompts_per_prefill,
    sft_shape,
    train_shape,
)
from jaxrl.config import default_config, flatten
from jaxrl.config_checks import has_kl_loss, has_kl_weights
from jaxrl.models import kv_cache, qwen
from jaxrl.models.qwen import QwenConfig
from jaxrl.runtime.sharding import (
    cache_sharding,
    check_model_fits,
    mesh_sizes,
    num_batch_shards,
    param_shardings,
    spans_processes,
)
from jaxrl.sampling.engine import cache_capacity, padded_sizes
from jaxrl.training.minibatches import takes_own_logprobs
from jaxrl.training.packing import BatchShape
from jaxrl.training.update import chunk_width, state_shardings

USABLE = 0.9
"""Share of a device's memory that a plan may fill: the rest is for what it does not see."""

TAG_TOKENS = 32
"""Room for the tags around a result and the token sampled last; it is read together with them."""

GIB = 2**30

GO_ON = "--ignore_memory_plan goes on all the same, since the plan may err"


@dataclass(frozen=True, kw_only=True)
class Target:
    """The devices that a plan is made for.

    Attributes:
        platform: cpu, gpu or tpu. A CPU multiplies bfloat16 in float32, from copies.
        num_devices: of all machines together.
        memory_bytes: of one device.
        num_processes: among which the devices are divided evenly. Each samples on its own devices
            and reads its own prompts.
    """

    platform: str
    num_devices: int
    memory_bytes: int
    num_processes: int = 1

    @property
    def num_local(self) -> int:
        """Devices of one process."""
        return self.num_devices // self.num_processes


@dataclass(frozen=True, kw_only=True)
class Phase:
    """What lies on one device in a phase, in bytes.

    Attributes:
        name: of the phase.
        kept: what is there all the time.
        moments: what comes on top of it at each of the moments that could be the peak.
    """

    name: str
    kept: dict[str, int]
    moments: dict[str, dict[str, int]]

    @property
    def peak(self) -> int:
        """The most that is there at once."""
        return sum(self.kept.values()) + max(sum(parts.values()) for parts in self.moments.values())

    @property
    def moment(self) -> str:
        """The name of the moment of the peak."""
        return max(self.moments, key=lambda name: sum(self.moments[name].values()))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run needs on each device, and what it computes."""

    target: Target
    mesh: dict[str, int]
    phases: tuple[Phase, ...]
    between: dict[str, int]  # what is on a device between two phases, in the fullest stage
    shapes: dict[str, str]
    num_params: int
    tokens_per_step: int  # at most: every trajectory as long as it may be
    flops_per_step: int  # of these tokens, sampled and trained on, nothing recomputed

    @property
    def peak(self) -> int:
        """Bytes of a device at the run's peak."""
        return max(phase.peak for phase in self.phases)

    @property
    def usable(self) -> int:
        """Bytes of a device that the plan may fill."""
        return int(self.target.memory_bytes * USABLE)

    @property
    def fits(self) -> bool:
        """The peak is within the usable memory."""
        return self.peak <= self.usable


def host_target() -> Target:
    """The devices that JAX sees here, with the memory that it may use of each.

    A CPU reports none; its devices share half of the machine's memory.
    """
    devices = jax.local_devices()
    stats = [device.memory_stats() or {} for device in devices]
    if all("bytes_limit" in one for one in stats):
        memory_bytes = min(one["bytes_limit"] for one in stats)
    else:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        memory_bytes = total // 2 // len(devices)
    return Target(
        platform=devices[0].platform,
        num_devices=jax.device_count(),
        memory_bytes=memory_bytes,
        num_processes=jax.process_count(),
    )


def make_plan(config: ConfigDict, model: QwenConfig, target: Target) -> Plan:
    """Plans the configured stages.

    Raises:
        ValueError: the mesh does not divide the devices, the heads or the rows, or trajectories
            are longer than the model's positions.
    """
    mesh = target_mesh(config, model, target)
    check_rows(config, mesh)
    check_length(config, model)
    phases = [
        update_phase(config, model, target, stage)
        for stage in ("sft", "train")
        if stage in config.stages
    ]
    if {"train", "evaluate"} & set(config.stages):
        phases.append(rollout_phase(config, model, target))
    tokens = config.rollout.tasks_per_step * config.rollout.group_size
    tokens *= config.rollout.max_total_tokens
    held = [_between(config, model, target, stage) for stage in config.stages]
    return Plan(
        target=target,
        mesh=dict(mesh.shape),
        phases=tuple(phases),
        between=max(held, key=lambda parts: sum(parts.values())),
        shapes=_shapes(config, model, target),
        num_params=_num_params(model),
        tokens_per_step=tokens,
        flops_per_step=tokens * _flops_per_token(model, config.rollout.max_total_tokens),
    )


def target_mesh(config: ConfigDict, model: QwenConfig, target: Target) -> Any:
    """The configured mesh over devices that need not exist.

    Raises:
        ValueError: it does not divide the devices, those of a process or the model's heads.
    """
    sizes = mesh_sizes(target.num_devices, **config.mesh)
    if target.num_local % sizes["tensor"]:
        raise spans_processes(sizes["tensor"], target.num_local)
    mesh: Any = AbstractMesh(
        tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes)
    )
    check_model_fits(mesh, model)
    return mesh


def update_phase(config: ConfigDict, model: QwenConfig, target: Target, stage: str) -> Phase:
    """Memory while a mini-batch of a stage, sft or train, is trained on."""
    mesh = target_mesh(config, model, target)
    shape = _shape(config, stage)
    count = _Counts.of(model, mesh)
    itemsize = jnp.dtype(config.model.dtype).itemsize
    is_cast, is_cpu = itemsize < 4, target.platform == "cpu"
    shards, tensor = num_batch_shards(mesh), mesh.shape["tensor"]
    rows = shape.micro_rows // shards
    tokens = rows * shape.row_tokens
    heads, mlp = model.num_heads // tensor, _split(model.mlp_width, tensor)
    width = chunk_width(shape.micro_rows, shape.row_tokens, config.model.logits_chunk_tokens)
    scores = rows * heads * shape.row_tokens**2
    inner = tokens * (4 * mlp + 4 * heads * model.head_dim + 4 * model.width)
    saved = model.num_layers * tokens * model.width * itemsize
    if not config.model.remat:
        saved += model.num_layers * 5 * scores
        inner_saved = 3 * mlp + 4 * heads * model.head_dim + 2 * model.width
        saved += model.num_layers * tokens * inner_saved * itemsize
    logits = rows * width * _split(model.vocab_size, tensor) * 4
    output_table = count.whole_tables // (1 if model.tie_embeddings else 2)
    gathers = mesh.shape["fsdp"] > 1
    layer_params = count.params - count.tables
    gathered = gathers * itemsize * count.whole_tables
    if is_cpu and model.tie_embeddings:
        gathered *= 2  # the table and its transpose
    kept = {
        **_state(config, model, mesh, stage),
        "gradients": 4 * count.params,
        "weights in the compute dtype": is_cast * itemsize * count.params,
        "activations kept for the backward pass": saved,
        "float32 copies of these": is_cpu * is_cast * (4 * layer_params + 2 * saved),
        "batch": _batch_bytes(config, shape, shards, stage),
    }
    new_gradients = itemsize * layer_params
    operand = 4 if is_cpu else itemsize
    moments = {
        "layers": {
            # The output layer's is float32, whatever the others are.
            "a micro-batch's gradients": new_gradients
            + max(itemsize * count.whole_tables, 4 * output_table),
            # Backwards: two arrays in float32, two in the compute dtype where it differs, a mask.
            "attention scores": scores * (2 * 4 + is_cast * 2 * itemsize + 1),
            "activations of a layer": inner * operand,
            "layers gathered": gathers * 2 * operand * count.whole_layer,
            "embedding and output gathered": is_cpu * gathered,
        },
        "output": {
            "a micro-batch's gradients": is_cpu * new_gradients
            + 4 * (1 + (gathers and is_cpu)) * count.whole_tables
            + 4 * (is_cast and gathers and is_cpu) * output_table,
            # Logits and their gradient, further copies on a CPU; one less where nothing is chunked.
            "logits chunk": logits * ((4 if is_cpu else 2) - (width == shape.row_tokens)),
            "embedding and output gathered": gathered,
        },
    }
    return Phase(name=f"{stage} update", kept=_nonzero(kept), moments=moments)


def rollout_phase(config: ConfigDict, model: QwenConfig, target: Target) -> Phase:
    """Memory while trajectories are sampled, in training and evaluation alike."""
    mesh = target_mesh(config, model, target)
    rollout = config.rollout
    dtype = jnp.dtype(config.model.dtype)
    shards, tensor = num_batch_shards(mesh), mesh.shape["tensor"]
    slots = rollout.num_slots // shards
    rows = (rollout.num_rows or rollout.num_slots) // shards
    capacity = cache_tokens(config)
    heads, mlp = model.num_heads // tensor, _split(model.mlp_width, tensor)
    one_layer = jax.eval_shape(
        lambda: kv_cache.allocate(
            dataclasses.replace(model, num_layers=1), rollout.num_slots, capacity, dtype
        )
    )
    split = cache_sharding(mesh).shard_shape(jax.tree.leaves(one_layer)[0].shape)
    cache = 2 * model.num_layers * math.prod(split) * dtype.itemsize
    per_token = cache // (slots * capacity)  # of cache
    decoded = cache * rows // slots  # the caches of as many slots as are decoded
    # A process has its own prompts, whole on each of its shards.
    own_shards = shards // target.num_processes
    num_prompts = -(-_num_prompts(config, target) // own_shards) * own_shards
    prompt_tokens = padded_sizes(rollout.max_prompt_tokens)[-1]
    read_tokens = longest_read(config)
    prompts = num_prompts * prompt_tokens * per_token
    vocab = _split(model.vocab_size, tensor)
    kept = {
        **_state(config, model, mesh, "train" if "train" in config.stages else "evaluate"),
        "decode weights": _decode_weights(config, model, target),
        "KV cache": cache,
        "prompts' caches": prompts,
    }
    inner = (mlp + 2 * heads * model.head_dim + 3 * model.width) * dtype.itemsize
    chunk, new = rows * read_tokens, num_prompts // own_shards * prompt_tokens
    is_upcast = target.platform == "cpu" and dtype.itemsize < 4
    moments = {
        "decode": {
            # A CPU's compiler keeps parts of the window in float32 besides.
            "cache window of a chunk": round(decoded * (2.7 if is_upcast else 1)),
            "logits": 3 * rows * vocab * 4,
        },
        # Scores are in float32; where they meet the values, a part is in the compute dtype too.
        "reading results": {
            "caches of the rows": decoded,
            "attention scores": chunk * heads * (capacity + read_tokens) * 5,
            "activations": chunk * inner,
        },
        "reading prompts": {
            "new prompts' caches": prompts,
            "attention scores": new * heads * prompt_tokens * 5,
            "activations": new * inner,
        },
    }
    if config.env.name == "math":  # one turn: nothing is read between
        del moments["reading results"]
    if target.platform == "cpu":
        moments["writing results"] = {
            "copies of the cache, float32": 2 * cache * 4 // dtype.itemsize
        }
    return Phase(name="rollout", kept=_nonzero(kept), moments=moments)


@dataclass(frozen=True)
class _Counts:
    """Numbers of parameters on one device."""

    params: int  # split as in training
    tables: int  # of these, outside the layers
    decode_params: int  # split as in decoding, over tensor only
    whole_tables: int  # of these, embedding and output layer
    whole_layer: int  # of these, one layer

    @classmethod
    @functools.cache
    def of(cls, model: QwenConfig, mesh: Any) -> _Counts:
        """Of a model on a mesh."""
        params = qwen.abstract_params(model)
        train, decode = param_shardings(mesh, model), param_shardings(mesh, model, for_decode=True)
        layers = _num_values(params["blocks"], decode["blocks"])
        total, whole = _num_values(params, train), _num_values(params, decode)
        return cls(
            params=total,
            tables=total - _num_values(params["blocks"], train["blocks"]),
            decode_params=whole,
            whole_tables=whole - layers,
            whole_layer=layers // model.num_layers,
        )


def _num_values(tree: Any, shardings: Any = None) -> int:
    """Elements of a tree of abstract arrays, on one device where shardings are given."""
    leaves = jax.tree.leaves(tree)
    if shardings is None:
        return sum(math.prod(leaf.shape) for leaf in leaves)
    pairs = zip(leaves, jax.tree.leaves(shardings), strict=True)
    return sum(math.prod(sharding.shard_shape(leaf.shape)) for leaf, sharding in pairs)


@functools.cache
def _num_params(model: QwenConfig) -> int:
    return _num_values(qwen.abstract_params(model))


def _split(size: int, parts: int) -> int:
    """A device's part of a dimension; one that does not divide is whole, as `sharding` has it."""
    return size if size % parts else size // parts


def _state(config: ConfigDict, model: QwenConfig, mesh: Any, stage: str) -> dict[str, int]:
    """What lies on a device from step to step: weights, moments, and the reference policy."""
    params = _Counts.of(model, mesh).params * 4
    state = {"parameters": params}
    if stage != "evaluate":
        state["optimizer state"] = 4 * _num_moments(model, mesh)
    if stage == "train" and config.kl.coef and config.kl.anchor == "ref":
        state["reference parameters"] = params
    return state


def _between(config: ConfigDict, model: QwenConfig, target: Target, stage: str) -> dict[str, int]:
    """What is on a device between two phases of a stage, where no cache and no batch is.

    The sampler has its weights from right after an update on.
    """
    held = _state(config, model, target_mesh(config, model, target), stage)
    if stage != "sft":
        held["decode weights"] = _decode_weights(config, model, target)
    return held


def _decode_weights(config: ConfigDict, model: QwenConfig, target: Target) -> int:
    """Bytes of the sampler's weights on one device."""
    count = _Counts.of(model, target_mesh(config, model, target))
    has_head_copy = target.platform == "cpu" and model.tie_embeddings
    weights = count.decode_params + has_head_copy * count.whole_tables
    return jnp.dtype(config.model.dtype).itemsize * weights


def _num_prompts(config: ConfigDict, target: Target) -> int:
    """Prompts that a process reads side by side."""
    num_slots = config.rollout.num_slots // target.num_processes
    return prompts_per_prefill(num_slots, config.rollout.group_size)


@functools.cache
def _num_moments(model: QwenConfig, mesh: Any) -> int:
    """Values of the optimizer's state on one device; no setting changes how many there are."""
    optimizer = make_optimizer(default_config().optimizer, 1)
    moments = jax.eval_shape(optimizer.init, qwen.abstract_params(model))
    return _num_values(moments, state_shardings(mesh, model, optimizer).opt_state)


def _settings(config: ConfigDict, stage: str) -> ConfigDict:
    return config.sft.optimizer if stage == "sft" else config.optimizer


def _shape(config: ConfigDict, stage: str) -> BatchShape:
    return sft_shape(config) if stage == "sft" else train_shape(config)


def _batch_bytes(config: ConfigDict, shape: BatchShape, shards: int, stage: str) -> int:
    """All mini-batches of a step: six arrays of four bytes, a mask, and what the method adds."""
    tokens = shape.num_micro * shape.micro_rows * shape.row_tokens // shards
    if stage == "sft":
        return 25 * tokens
    needs_ref = has_kl_loss(config) and config.kl.anchor == "ref"
    num_more = (not takes_own_logprobs(config)) + needs_ref + has_kl_weights(config)
    return config.optimizer.num_minibatches * (25 + 4 * num_more) * tokens


def _nonzero(parts: dict[str, int]) -> dict[str, int]:
    return {name: size for name, size in parts.items() if size}


def cache_tokens(config: ConfigDict) -> int:
    """Tokens of a slot's cache."""
    rollout = config.rollout
    return cache_capacity(
        max_prompt_tokens=rollout.max_prompt_tokens,
        max_total_tokens=rollout.max_total_tokens,
        chunk_tokens=rollout.chunk_tokens,
    )


def longest_read(config: ConfigDict) -> int:
    """The widest chunk in which a result is read: its body, its tags and the pending token."""
    longest = config.search.max_observation_tokens + TAG_TOKENS
    sizes = padded_sizes(config.rollout.max_total_tokens)
    return next((size for size in sizes if size >= longest), sizes[-1])


def _flops_per_token(model: QwenConfig, length: int) -> int:
    """To sample a token once and train on it once, in a sequence of `length`, causal."""
    tables = model.vocab_size * model.width
    outside = tables * (1 if model.tie_embeddings else 2)
    product_params = _num_params(model) - outside + tables
    attention = 4 * model.num_layers * model.num_heads * model.head_dim * length // 2
    return 4 * (2 * product_params + attention)


def _shapes(config: ConfigDict, model: QwenConfig, target: Target) -> dict[str, str]:
    """The largest shapes of the programs, over all devices."""
    rollout = config.rollout
    shapes = {}
    for stage in ("sft", "train"):
        if stage in config.stages:
            shape = _shape(config, stage)
            b, T = shape.micro_rows, shape.row_tokens
            width = chunk_width(b, T, config.model.logits_chunk_tokens)
            shapes[f"{stage} update"] = (
                f"{shape.num_micro} micro-batches of {b} rows x {T} tokens; logits of "
                f"{b} x {width} x {model.vocab_size}"
            )
    if {"train", "evaluate"} & set(config.stages):
        each = " in each process" if target.num_processes > 1 else ""
        shapes["rollout"] = (
            f"decode {rollout.chunk_tokens} steps of up to "
            f"{rollout.num_rows or rollout.num_slots} rows over up to "
            f"{rollout.max_total_tokens} tokens; read results of up to {longest_read(config)} "
            f"tokens, {_num_prompts(config, target)} prompts{each} of up to "
            f"{padded_sizes(rollout.max_prompt_tokens)[-1]}; cache {rollout.num_slots} slots x "
            f"{cache_tokens(config)} tokens"
        )
    return shapes


def largest_micro_rows(
    config: ConfigDict, model: QwenConfig, target: Target, stage: str, *, must_fit: bool = True
) -> tuple[int, int]:
    """The largest micro-batch of a stage whose update fits a device.

    No larger than a mini-batch needs. Where not even one row on each device fits, it is that,
    unless `must_fit`.

    Returns:
        Rows, a multiple of data * fsdp, and the bytes of a device at the peak.

    Raises:
        ValueError: not even one row on each device fits, and `must_fit`.
    """
    shards = num_batch_shards(target_mesh(config, model, target))

    def peak(rows_each: int) -> int:
        changed = _changed(config, {_MICRO_ROWS[stage]: rows_each * shards})
        return update_phase(changed, model, target, stage).peak

    needed = _shape(_changed(config, {_MICRO_ROWS[stage]: 1}), stage).num_micro
    most = -(-needed // shards)
    usable = int(target.memory_bytes * USABLE)
    fitting = bisect.bisect_right(range(1, most + 1), usable, key=peak)
    if fitting == 0 and must_fit:
        raise ValueError(
            f"config.{_MICRO_ROWS[stage]}=0 asks for the largest micro-batch that fits, but "
            f"{shards} rows, one on each device, would need {gib(peak(1))} of the "
            f"{gib(usable)} that may be used of each; --plan tells what to "
            f"change, {GO_ON}."
        )
    rows_each = max(fitting, 1)
    return rows_each * shards, peak(rows_each)


_MICRO_ROWS = {"sft": "sft.optimizer.micro_rows", "train": "optimizer.micro_rows"}


def choose_micro_rows(
    config: ConfigDict,
    model: QwenConfig,
    target: Target,
    began: Mapping[str, Any] | None = None,
    *,
    must_fit: bool = True,
) -> list[str]:
    """Replaces a `micro_rows` of 0 by the largest that fits, in place; says what it chose.

    What a run began with, the flat keys `began`, is kept without a word while it divides over the
    mesh and fits. `must_fit` as in `largest_micro_rows`.
    """
    shards = num_batch_shards(target_mesh(config, model, target))
    usable = int(target.memory_bytes * USABLE)
    said = []
    for stage, key in _MICRO_ROWS.items():
        if stage not in config.stages or _settings(config, stage).micro_rows:
            continue
        note, kept = "", (began or {}).get(key, 0)
        if kept and kept % shards:
            note = f" (not the {kept} it began with: no multiple of data * fsdp = {shards})"
        elif kept:
            peak = update_phase(_changed(config, {key: kept}), model, target, stage).peak
            if peak <= usable:
                _settings(config, stage).micro_rows = kept
                continue
            note = f" (not the {kept} it began with: they would need {gib(peak)})"
        rows, peak = largest_micro_rows(config, model, target, stage, must_fit=must_fit)
        _settings(config, stage).micro_rows = rows
        said.append(f"config.{key}=0: {rows} rows{note}, planned at {gib(peak)} on each device")
    return said


def _changed(config: ConfigDict, values: dict[str, Any]) -> ConfigDict:
    """A copy with some keys, with their sections, set."""
    changed = config.copy_and_resolve_references()
    changed.update_from_flattened_dict(values)
    return changed


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Settings that make a plan fit, and the peak with them."""

    settings: dict[str, Any]
    peak: int


def advise(config: ConfigDict, model: QwenConfig, target: Target) -> list[Advice]:
    """What to change in a configuration that does not fit: every single key that is enough.

    Where none is, keys are added up in the order of what they cost in speed, until it fits.
    An empty list: nothing tried here helps.
    """

    def peak(settings: dict[str, Any]) -> int | None:
        try:
            return make_plan(_changed(config, settings), model, target).peak
        except ValueError:
            return None  # rows or heads that the mesh would not divide

    usable = int(target.memory_bytes * USABLE)
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


def devices_needed(config: ConfigDict, model: QwenConfig, target: Target) -> int | None:
    """The first doubling of the devices at which it fits, with settings as `advise` tries them.

    The new devices are put along fsdp first; several processes become more of them, each with as
    many devices as before. None: no number up to a thousandfold is enough.
    """
    sizes, flat = mesh_sizes(target.num_devices, **config.mesh), flatten(config)
    for factor in (2**power for power in range(1, 11)):
        larger = dataclasses.replace(
            target,
            num_devices=target.num_devices * factor,
            num_processes=target.num_processes * (factor if target.num_processes > 1 else 1),
        )
        shards = sizes["data"] * sizes["fsdp"] * factor
        rows = {key: -(-flat[key] // shards) * shards for key in _ROWS}
        mesh = {"mesh.data": sizes["data"], "mesh.fsdp": sizes["fsdp"] * factor}
        grown = _changed(config, {**rows, **mesh})
        if make_plan(grown, model, larger).fits or advise(grown, model, larger):
            return larger.num_devices
    return None


_ROWS = (
    "optimizer.micro_rows", "sft.optimizer.micro_rows", "rollout.num_slots", "rollout.num_rows",
)  # fmt: skip


def _options(
    config: ConfigDict, model: QwenConfig, target: Target
) -> Iterator[list[dict[str, Any]]]:
    """For each key its values to try, the cheapest first; keys in the order of their cost."""
    sizes = mesh_sizes(target.num_devices, **config.mesh)
    shards = sizes["data"] * sizes["fsdp"]
    if config.model.dtype == "float32":
        yield [{"model.dtype": "bfloat16"}]
    yield [
        {"mesh.data": shards // fsdp, "mesh.fsdp": fsdp, "mesh.tensor": sizes["tensor"]}
        for fsdp in _doublings(sizes["fsdp"], shards)
    ]
    flat = flatten(config)
    for stage, key in _MICRO_ROWS.items():
        if stage in config.stages:
            yield [{key: rows} for rows in _halvings(flat[key], unit=shards)]
    yield [
        {"model.logits_chunk_tokens": size}
        for size in _halvings(flat["model.logits_chunk_tokens"], least=128)
    ]
    if not config.model.remat:
        yield [{"model.remat": True}]
    rows = flat["rollout.num_rows"] or flat["rollout.num_slots"]
    yield [{"rollout.num_rows": fewer} for fewer in _halvings(rows, unit=shards)]
    yield [
        {"rollout.num_slots": slots, "rollout.num_rows": min(slots, flat["rollout.num_rows"])}
        for slots in _halvings(flat["rollout.num_slots"], unit=shards)
    ]
    meshes = [
        {"mesh.data": 1, "mesh.fsdp": target.num_devices // tensor, "mesh.tensor": tensor}
        for tensor in _doublings(sizes["tensor"], math.gcd(model.num_kv_heads, target.num_local))
    ]
    yield meshes
    # On fewer shards as many rows each: two devices then share the heads of what one had.
    keys = [key for stage, key in _MICRO_ROWS.items() if stage in config.stages]
    yield [mesh | {key: flat[key] * mesh["mesh.fsdp"] // shards for key in keys} for mesh in meshes]
    shortest = config.rollout.max_prompt_tokens + 1
    yield [
        {"rollout.max_total_tokens": tokens}
        for tokens in _halvings(config.rollout.max_total_tokens, least=shortest)
    ]


def _halvings(value: int, *, least: int = 1, unit: int = 1) -> list[int]:
    """Half the value, a quarter, … down to `least`, each cut to a multiple of `unit`."""
    sizes = [(value >> power) // unit * unit for power in range(1, 32)]
    return [size for size in dict.fromkeys(sizes) if size >= least]


def _doublings(value: int, most: int) -> list[int]:
    """Twice the value, four times, … up to `most`."""
    return [value << power for power in range(1, 32) if value << power <= most]


def gib(size: int) -> str:
    """A number of bytes for people."""
    return f"{size / GIB:.2f} GiB"


def show(plan: Plan, advice: Sequence[Advice], num_needed: int | None) -> Group:
    """The plan for people; `advice` and `num_needed` count where it does not fit."""
    target, sizes = plan.target, plan.mesh
    mesh = ", ".join(f"{name}={size}" for name, size in sizes.items())
    processes = f" of {target.num_processes} processes" if target.num_processes > 1 else ""
    title = f"one of {target.num_devices} {target.platform} devices{processes} ({mesh})"
    table = Table(title=title)
    table.add_column("part")
    table.add_column("GiB", justify="right")
    for phase in plan.phases:
        table.add_row(f"[bold]{phase.name}[/bold]", f"[bold]{phase.peak / GIB:.2f}[/bold]")
        for name, size in phase.kept.items():
            table.add_row(f"  {name}", f"{size / GIB:.2f}")
        for moment, parts in phase.moments.items():
            mark = " (the peak)" if moment == phase.moment else ""
            table.add_row(f"  while at: {moment}{mark}", f"{sum(parts.values()) / GIB:.2f}")
            for name, size in parts.items():
                if size:
                    table.add_row(f"    {name}", f"{size / GIB:.2f}")
        table.add_section()
    table.add_row("[bold]between phases[/bold]", f"{sum(plan.between.values()) / GIB:.2f}")
    for name, size in plan.between.items():
        table.add_row(f"  {name}", f"{size / GIB:.2f}")
    tokens, flops = plan.tokens_per_step, plan.flops_per_step
    lines = [
        f"{plan.num_params:,} parameters; a step is at most {tokens:,} tokens and "
        f"{flops:.2e} operations, {flops / target.num_devices:.2e} on each device",
        *(f"{name}: {shape}" for name, shape in plan.shapes.items()),
        f"{'fits' if plan.fits else 'does not fit'}: {gib(plan.peak)} at the peak, "
        f"{gib(plan.usable)} may be used ({USABLE:.0%} of {gib(target.memory_bytes)})",
    ]
    for one in advice:
        settings = " ".join(f"--config.{key}={value}" for key, value in one.settings.items())
        lines.append(f"would fit with {settings}: {gib(one.peak)}")
    if not plan.fits and not advice:
        more = (
            f"{num_needed} such devices would do (plan for them)"
            if num_needed
            else "more devices do not help"
        )
        lines.append(f"no change of settings on these devices makes it fit; {more}")
    return Group(table, *(Text(line) for line in lines))


def as_json(plan: Plan) -> dict[str, Any]:
    """The plan as plain data, sizes in bytes."""
    phases = [
        {**dataclasses.asdict(phase), "moment": phase.moment, "peak": phase.peak}
        for phase in plan.phases
    ]
    totals = {"peak": plan.peak, "usable": plan.usable, "fits": plan.fits}
    return {**dataclasses.asdict(plan), "phases": phases, **totals}

"""Estimate a run's memory per device from its config and the model's `config.json`.

The estimate allocates nothing and reads no weights. It counts weights, optimizer state and caches
from shapes and shardings, and estimates the temporary arrays of a program by a few large terms plus
`MARGIN`. Tests compare the sums with XLA's memory analysis of the same programs.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import pkgutil
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType

from jaxrl.builders.capacity import (
    CacheSizes,
    check_context_length,
    check_row_counts,
    update_overlaps_sampling,
)
from jaxrl.builders.method import (
    build_policy_architecture,
    compute_batch_shape,
    find_frozen_entries,
)
from jaxrl.builders.resolved import ResolvedConfig
from jaxrl.extras.plan.host import read_host_memory
from jaxrl.models.architecture import Architecture
from jaxrl.models.attention.choice import (
    choose_prefill_block_tokens,
    copies_pages,
    resolve_kernel_name,
)
from jaxrl.models.attention.kernels import PAGE_TOKENS, SHARES_PROMPTS
from jaxrl.models.attention.reference import STEP_TOKENS
from jaxrl.models.output import split_evenly
from jaxrl.models.policy import get_stacked_modules
from jaxrl.runtime.compilation import CPU_HAS_BFLOAT16_MATMUL
from jaxrl.runtime.sharding import (
    check_even_split,
    compute_mesh_sizes,
    count_batch_shards,
    count_devices_per_replica,
    count_piece_shards,
    make_process_span_error,
)
from jaxrl.runtime.weight_memory import (
    PolicyWeights,
    compute_local_param_sizes,
    count_elements,
    measure_weights,
)
from jaxrl.sampling.buckets import list_prefill_buckets, list_row_buckets

USABLE_SHARE = 0.9
"""Fraction of a device's memory that a plan may fill; the plan omits small allocations."""

MARGIN = 0.1
"""Fraction added to a program's temporary arrays, for buffers, masks and small copies."""

IGNORE_PLAN_HINT = "--ignore_memory_plan starts anyway, because the plan may be wrong"

BATCH_BYTES = 40
"""Bytes per token in a mini-batch, which has about ten arrays of four bytes."""

LOGIT_BLOCKS_BYTES = 4 * 2**20
"""Bytes of two copies of a block of logits on a CPU; `block_tokens` makes a block 2 MiB."""

PROCESS_BYTES, COMPILER_BYTES = 400 * 2**20, 100 * 2**20
"""Host memory of a process (interpreter, libraries, tokenizer, data) and of the compiler.

Measured on Linux with JAX 0.10.2.
"""

LAYER_PROGRAM_BYTES, LAYER_COMPILER_BYTES = 9 * 2**20, 2 * 2**20
"""Host memory per layer of the sampler's programs, and of compiling one of them."""

WEIGHTS_PHASE = "weights to the sampler"


@dataclass(frozen=True, kw_only=True)
class Target:
    """Target hardware of a plan.

    Attributes:
        platform: One of `cpu`, `gpu` and `tpu`.
        num_devices: Total number of devices on all hosts.
        memory_bytes: Memory per device that JAX may use, in bytes.
        num_processes: Number of processes, each with the same number of devices.
        num_passages: Number of passages for `search.dense`; 0 to count the lines of the corpus.
        free_bytes: A CPU device's share of the host's free memory; None if unknown or not a CPU.
    """

    platform: str
    num_devices: int
    memory_bytes: int
    num_processes: int = 1
    num_passages: int = 0
    free_bytes: int | None = None

    @property
    def num_local(self) -> int:
        """Number of devices per process."""
        return self.num_devices // self.num_processes

    @property
    def limit_bytes(self) -> int:
        """Memory of a device, in bytes. A run that needs more does not start."""
        return self.memory_bytes if self.free_bytes is None else self.free_bytes

    @property
    def usable_bytes(self) -> int:
        """Memory of a device that a plan may fill, in bytes."""
        return int(self.limit_bytes * USABLE_SHARE)


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Estimated memory of one device during a phase, in bytes.

    Attributes:
        name: Name of the phase in the table.
        persistent: Terms that are allocated for the entire phase.
        moments: Additional terms at each point that could be the peak.
        spare: Bytes of `persistent` that are allocated only if memory is free.
    """

    name: str
    persistent: dict[str, int]
    moments: dict[str, dict[str, int]]
    spare: int = 0

    @property
    def peak_bytes(self) -> int:
        """Peak memory in bytes."""
        return sum(self.persistent.values()) + sum(self.moments[self.peak_moment].values())

    @property
    def peak_moment(self) -> str:
        """Name of the entry in `moments` with the highest memory use."""
        return max(self.moments, key=lambda name: sum(self.moments[name].values()))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Memory that a run needs on each device.

    Attributes:
        target: Target hardware.
        mesh: Size of each mesh axis.
        phases: Phases of all stages.
        shapes: Description of the largest shapes of each phase.
        num_params: Number of model parameters.
        num_trained: Number of parameters that the optimizer updates.
        tokens_per_step: Maximum tokens per training step.
    """

    target: Target
    mesh: dict[str, int]
    phases: tuple[Phase, ...]
    shapes: dict[str, str]
    num_params: int
    num_trained: int
    tokens_per_step: int

    @property
    def peak_bytes(self) -> int:
        """Peak memory per device over the entire run, in bytes."""
        return max(phase.peak_bytes for phase in self.phases)

    @property
    def needed_bytes(self) -> int:
        """Peak memory in bytes, excluding optional allocations (`Phase.spare`)."""
        return max(phase.peak_bytes - phase.spare for phase in self.phases)

    @property
    def fits(self) -> bool:
        """True if the peak is within the usable memory."""
        return self.peak_bytes <= self.target.usable_bytes


def detect_target() -> Target:
    """Detect the JAX devices of this job and their memory.

    On a CPU, JAX may use half of the host's memory, and the devices share the free memory.
    """
    devices = jax.local_devices()
    stats, free_bytes = [device.memory_stats() or {} for device in devices], None
    if all("bytes_limit" in device_stats for device_stats in stats):
        memory_bytes = min(device_stats["bytes_limit"] for device_stats in stats)
    else:
        total, free = read_host_memory()
        total = total or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        memory_bytes = total // 2 // len(devices)
        if devices[0].platform == "cpu" and free is not None:
            free_bytes = free // len(devices)
    return Target(
        platform=devices[0].platform,
        num_devices=jax.device_count(),
        memory_bytes=memory_bytes,
        num_processes=jax.process_count(),
        free_bytes=free_bytes,
    )


def make_target_mesh(config: ResolvedConfig, model: Architecture, target: Target) -> Any:
    """Build the configured mesh of abstract devices.

    Raises:
        ValueError: The mesh does not divide all devices, a process's devices or the heads.
    """
    sizes = compute_mesh_sizes(
        target.num_devices, **config.mesh, num_processes=target.num_processes
    )
    if (target.num_local - config.mesh.rollout_devices) % count_devices_per_replica(sizes):
        raise make_process_span_error(sizes, target.num_local)
    mesh: Any = AbstractMesh(
        tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes)
    )
    check_even_split(mesh, model)
    return mesh


def make_plan(config: ResolvedConfig, model: Architecture, target: Target) -> Plan:
    """Estimate the memory of all configured stages.

    Scoring with old and reference parameters is not a separate phase, because it needs less memory
    than the update of the same micro-batch.

    Raises:
        ValueError: The mesh does not divide the devices, the heads or the rows, or trajectories
            exceed the model's maximum length.
    """
    mesh = make_target_mesh(config, model, target)
    check_row_counts(config, mesh, target.num_processes)
    check_context_length(config, model)
    training = [stage for stage in ("sft", "train") if stage in config.stages]
    phases = [plan_update(config, model, target, stage) for stage in training]
    if {"train", "evaluate"} & set(config.stages):
        phases.append(plan_rollout(config, model, target))
    if config.mesh.rollout_devices or (_frees_params(config) and "evaluate" in config.stages):
        phases.append(_estimate_weight_sync_memory(config, model, target))
    if target.platform == "cpu":
        phases += [_plan_checkpoint(config, model, target, stage) for stage in training]
        phases = [_add_process_memory(phase, config, model, target) for phase in phases]
    policy = build_policy_architecture(config, model)
    trained, _ = policy.make_param_specs(find_frozen_entries(config, policy))
    rollout = config.rollout
    return Plan(
        target=target,
        mesh=dict(mesh.shape),
        phases=tuple(phases),
        shapes=_describe_shapes(config, model, target),
        num_params=count_elements(model.make_abstract_params()),
        num_trained=count_elements(trained.make_abstract_params()),
        tokens_per_step=rollout.tasks_per_step * rollout.group_size * rollout.max_total_tokens,
    )


def plan_update(config: ResolvedConfig, model: Architecture, target: Target, stage: str) -> Phase:
    """Estimate the memory of updates in stage `sft` or `train`."""
    mesh = make_target_mesh(config, model, target)
    sizes, section = mesh.shape, config.get_optimizer_section(stage)
    is_cpu, is_tpu = target.platform == "cpu", target.platform == "tpu"
    policy, counts = (
        _count_policy_weights(config, model, mesh),
        _ParamCounts.from_model(model, mesh),
    )
    gathers = sizes["fsdp"] * sizes["context"] * sizes["expert"] > 1
    splits_gradients = gathers and sizes["data"] == 1  # gradients of tables are sharded immediately
    itemsize = jnp.dtype(config.model.dtype).itemsize
    head_itemsize = jnp.dtype(config.model.head_dtype or config.model.dtype).itemsize
    copies = is_cpu and itemsize < 4 and not CPU_HAS_BFLOAT16_MATMUL
    operand_bytes = 4 if copies else itemsize  # bytes per value of a matmul operand

    # One device's shard of a micro-batch and of a chunk of logits.
    shards = count_batch_shards(mesh)
    shares_prompts = _shares_prompts(config, model, target)
    shape = compute_batch_shape(config, stage, shards * shares_prompts, sizes["context"], model)
    rows = shape.micro_rows // shards
    tokens = rows * shape.row_tokens // sizes["context"]
    chunk_tokens = max(config.model.logits_chunk_tokens // count_piece_shards(mesh), 1)
    num_chunks, _ = split_evenly(tokens, chunk_tokens)
    # Rows may be shorter than planned, and then their chunks of logits larger.
    chunk = min(tokens, chunk_tokens)
    logits = 4 * chunk * _compute_shard_size(model.vocab_size, sizes["tensor"])

    # Terms that are allocated for the entire phase.
    num_minibatches = config.optimizer.num_minibatches if stage == "train" else 1
    token_bytes = BATCH_BYTES + sum(array.num_bytes for array in shape.token_arrays.values())
    search_resident, searching = _count_search_bytes(config, target)
    persistent = {
        **_count_state_bytes(config, model, mesh, stage),
        **search_resident,
        "gradients": 4 * policy.num_trained,
        "batch": num_minibatches * shape.num_micro * tokens * token_bytes,
    }
    if stage == "train" and update_overlaps_sampling(
        config
    ):  # the next rollout runs during the update
        sampling = plan_rollout(config, model, target)
        names = ("decode weights", "KV cache", "states of recurrent layers")
        persistent |= {n: sampling.persistent[n] for n in names if n in sampling.persistent}
        persistent |= {"sampling": sum(sampling.moments[sampling.peak_moment].values())} | searching

    # Layers. Without a scan over layers, the CPU compiler keeps all activations.
    remat = "none" if is_cpu and not config.model.scan_layers else config.model.remat
    layer = model.estimate_layer_memory(sizes["tensor"])
    saved, num_layers = layer.saved_activations.get(remat, 0), model.num_layers
    inner = tokens * layer.activations * operand_bytes
    if model.num_experts:
        experts = model.estimate_expert_memory(sizes["tensor"], sizes["expert"])
        saved += experts.saved_activations.get(remat, 0)
        # CPUs copy some activations of experts; accelerators reuse some buffers.
        values = experts.activations if is_cpu else experts.activations - experts.reused_activations
        inner += tokens * values * (3 if copies else itemsize)
    if remat == "offload":  # saves the attention output; all layers but two are in host memory
        saved = model.num_heads // sizes["tensor"] * (model.head_dim + 4 // itemsize)
        num_layers = num_layers if is_cpu else min(num_layers, 2)
    activations = num_layers * tokens * (model.width + saved)
    cast = policy.cast_bytes
    if gathers or (copies and not policy.has_adapter):
        cast -= policy.cast_table_bytes  # counted below, with the gathered tables
    gradients = itemsize * (policy.num_trained - counts.split_tables)
    if policy.has_adapter:
        gradients = 4 * policy.num_trained
    # Devices along the axis `context` gather the keys and values of complete rows.
    keys = (sizes["context"] > 1) * rows * shape.row_tokens * model.num_kv_heads * model.head_dim
    resident = {  # terms of both moments, layers and output
        "weights in the compute dtype": cast + copies * 4 * counts.layers,
        "saved activations": activations * (itemsize + copies * 2),
    }
    layer_terms = {
        "micro-batch gradients": gradients,
        "activations of a layer": inner,
        "int8 weights in the compute dtype": operand_bytes * policy.int8_values_per_layer,
        "keys and values of complete rows": keys // sizes["tensor"] * (3 * itemsize + 2 * 4),
        "gathered layers": gathers * 2 * operand_bytes * counts.gathered_layer,
    }
    output_terms = {"micro-batch gradients": is_cpu * gradients, "logits": logits}

    # Embedding and output layer, each `table` bytes in float32, and their gradients.
    table, tables = 4 * counts.count_table_params(model), itemsize * counts.tables
    if head_itemsize > itemsize:
        tables = (itemsize + head_itemsize) * counts.count_table_params(model)
    gradient, table_gradients = (0, 0) if policy.has_adapter else (table, 4 * counts.tables)
    is_added = is_tpu and (splits_gradients or not gathers)  # gradients are added in place
    layer_terms["gradients of embedding tables"] = 0 if is_added else gradient
    if is_cpu:
        # CPUs transpose a tied table, and look up bfloat16 tokens in a float32 table.
        layer_terms["embedding tables"] = (1 + gathers) * table
        output_terms["embedding tables"] = layer_terms["embedding tables"]
        output_terms["logits"] += LOGIT_BLOCKS_BYTES + copies * (head_itemsize < 4) * logits // 2
        output_terms["gradients of embedding tables"] = (2 + (itemsize < 4)) * gradient
        if splits_gradients:
            output_terms["embedding tables"] = table if copies else tables
            layer_terms["gradients of embedding tables"] //= sizes["fsdp"] * sizes["context"]
        else:
            has_extra_gradient = copies and (gathers or num_chunks > 1)
            output_terms["gradients of embedding tables"] = (
                1 + gathers
            ) * table_gradients + has_extra_gradient * gradient
    else:
        layer_terms["embedding tables"] = output_terms["embedding tables"] = gathers * tables
        is_shared = count_piece_shards(mesh) > 1
        if is_tpu:
            if itemsize == 4:  # float32 tables are multiplied as bfloat16 copies
                layer_terms["embedding tables"] = output_terms["embedding tables"] = (
                    gathers * table + gradient // 2
                )
            is_summed = is_shared or num_chunks > 1
            output_terms["gradients of embedding tables"] = gradient if is_summed else gradient // 2
            output_terms["logits"] = max(logits, is_shared * gradient)
        else:
            output_terms["gradients of embedding tables"] = max(
                table_gradients, splits_gradients * 2 * gradient
            )
            output_terms["logits"] = min(num_chunks, 2) * logits
    moments = {"layers": layer_terms, "output layer": output_terms}

    # Images: patches and the activations of the vision tower.
    if tower := shape.tower:
        terms = tower.estimate_layer_memory()
        trains = not (config.model.freeze_tower or policy.has_adapter)
        patches = rows * shape.row_units * tower.num_patches_per_token
        # Patches of this micro-batch and the next.
        patch_bytes = tower.num_values_per_patch * itemsize + 4 * tower.num_coords
        persistent["batch"] += 2 * patches * patch_bytes
        values = (1 + trains) * tower.num_deepstack_layers * tokens * model.width
        saved = terms.saved_activations.get(remat, 0)
        values += trains * tower.num_layers * patches * (tower.width + saved)
        moments["images"] = {
            "micro-batch gradients": trains * gradients,
            "activations of patches": patches
            * operand_bytes
            * (terms.activations if trains else terms.prefill_activations),
            "attention scores of patches": 4 * (2 + trains) * tower.count_attention_scores(patches),
        }
        resident["saved image activations"] = values * (itemsize + copies * 2)
    phase = _make_phase(f"{stage} update", persistent, moments, resident)
    if section.offload:
        offloaded_bytes = _count_moment_bytes(policy, section)
        phase.moments["optimizer"] = {"optimizer state, from the host": offloaded_bytes}
    return phase


def plan_rollout(config: ResolvedConfig, model: Architecture, target: Target) -> Phase:
    """Estimate the memory of the rollout phase, in training and evaluation."""
    phase, cache = _plan_sampling(config, model, target), _get_cache_sizes(config, model, target)
    pages = count_cache_pages(config, model, target)
    is_fixed = cache.compute_num_pages(config, target.platform) is not None
    return replace(
        phase,
        persistent=phase.persistent | {"KV cache": pages * cache.page_bytes},
        spare=0 if is_fixed else (pages - cache.num_pages_per_row) * cache.page_bytes,
    )


def count_cache_pages(config: ResolvedConfig, model: Architecture, target: Target) -> int:
    """Return the number of KV-cache pages per shard.

    By default (`rollout.cache_gib`), the cache fills the remaining memory, up to twice the pages of
    `rollout.max_num_seqs` trajectories of maximum length. On a CPU, and on devices that sample
    during updates, it has exactly the pages for these trajectories.

    Raises:
        ValueError: `rollout.cache_gib` is too small for one trajectory.
    """
    cache = _get_cache_sizes(config, model, target)
    pages = cache.compute_num_pages(config, target.platform)
    if pages is not None:
        return pages
    remaining_bytes = target.usable_bytes - _plan_sampling(config, model, target).peak_bytes
    return max(
        min(remaining_bytes // cache.page_bytes, 2 * cache.max_pages), cache.num_pages_per_row
    )


def get_page_size(config: ResolvedConfig, model: Architecture, target: Target) -> int:
    """Return the page size, in tokens, of the first candidate attention kernels."""
    return PAGE_TOKENS[_resolve_attention_kernels(config, model, target)]


def _resolve_attention_kernels(config: ResolvedConfig, model: Architecture, target: Target) -> str:
    """Return the name of the first candidate attention kernels. Raises the same errors as a run."""
    name, dtype = config.model.attention, config.model.dtype
    model.check_kernels(target.platform, experts=config.model.experts, dtype=dtype)
    return resolve_kernel_name(name, target.platform, model.head_dim, dtype)[0]


def _shares_prompts(config: ResolvedConfig, model: Architecture, target: Target) -> bool:
    """Return True if the sequences of a row share their prompt; see `Model.num_prompt_shards`."""
    shares = SHARES_PROMPTS[_resolve_attention_kernels(config, model, target)]
    return shares and not model.num_recurrent_layers


def _get_cache_sizes(config: ResolvedConfig, model: Architecture, target: Target) -> CacheSizes:
    mesh, page = make_target_mesh(config, model, target), get_page_size(config, model, target)
    return CacheSizes.from_config(config, model, mesh, target.num_processes, page)


def _plan_sampling(config: ResolvedConfig, model: Architecture, target: Target) -> Phase:
    """Estimate the memory of the rollout phase without the KV cache."""
    mesh, is_cpu = make_target_mesh(config, model, target), target.platform == "cpu"
    counts, cache = _ParamCounts.from_model(model, mesh), _get_cache_sizes(config, model, target)
    itemsize = jnp.dtype(config.model.dtype).itemsize
    copies = is_cpu and itemsize < 4 and not CPU_HAS_BFLOAT16_MATMUL
    operand_bytes = 4 if copies else itemsize
    token_bytes = cache.page_bytes // get_page_size(config, model, target)

    # Largest decode program. An evaluation may have fewer samples than rows.
    rows = cache.num_rows
    if "train" not in config.stages and config.eval.max_tasks:
        samples = 1 if {*config.eval.final_suites} == {"greedy"} else config.eval.samples
        num_sources = 0
        for environment in config.environments.values():
            kind = "train" if environment.tasks.eval.holdout else "eval"
            num_sources += len(environment.tasks[kind].sources) or 1
        rows = min(rows, num_sources * config.eval.max_tasks * samples)
    programs = list_row_buckets(target.platform, cache.num_rows, config.model.dtype)
    rows = next(size for size in programs if size >= rows)
    past = (
        copies_pages(_resolve_attention_kernels(config, model, target), target.platform)
        * cache.num_pages_per_row
    )
    heads = model.num_heads // mesh.shape["tensor"]
    read_heads = (model.num_heads + 2 * model.num_kv_heads) // mesh.shape["tensor"]
    kernels = model.num_layers * model.width * read_heads * model.head_dim
    decode = {
        "gathered KV cache": rows * past * cache.page_bytes,
        "keys and values of the chunk": 2 * rows * config.rollout.chunk_tokens * token_bytes,
        "logits": 3 * rows * _compute_shard_size(model.vocab_size, mesh.shape["tensor"]) * 4,
        # The TPU compiler transposes them.
        "transposed attention weights": (target.platform == "tpu") * kernels * itemsize,
    }

    # Prefill of prompts and observations, with the keys and values of a step over pages.
    prefill_tokens = list_prefill_buckets(target.platform, config.context_tokens)[-1]
    values = model.estimate_layer_memory(mesh.shape["tensor"]).prefill_activations
    if model.num_experts:
        sizes = mesh.shape["tensor"], mesh.shape["expert"]
        values += model.estimate_expert_memory(*sizes).prefill_activations
    block = choose_prefill_block_tokens(target.platform, model.num_heads, model.num_kv_heads)
    kv_step_bytes = 2 * (prefill_tokens // block) * STEP_TOKENS * token_bytes
    kv_step_bytes //= model.num_attention_layers
    prefill = {
        "activations": prefill_tokens * values * operand_bytes,
        "keys and values": kv_step_bytes * operand_bytes // itemsize,
        "attention scores": 3 * prefill_tokens * heads * STEP_TOKENS * 4,
    }
    # CPUs transpose the kernels of a layer, but not beside a loop over blocks of recurrent layers.
    if is_cpu and not copies and not model.num_recurrent_layers:
        prefill["transposed weights of a layer"] = (
            itemsize * counts.decode_layers // model.num_layers
        )
    if is_cpu and itemsize < 4:
        # Decoding keeps float32 copies of the cache and the weights during a chunk; prefill copies
        # half of the layers at a time. For a single row, every JAX version makes these copies.
        cached = 2 * cache.page_bytes * (cache.compute_num_pages(config, "cpu") or 0)
        if copies or rows == 1:
            weights = counts.decode_layers + counts.count_table_params(model)
            decode["float32 copies"] = cached + 4 * weights
        if copies:
            prefill["float32 copies"] = cached + 2 * counts.decode_layers
    moments = {"decode": decode, "prefill": prefill}
    for moment in moments.values():  # two layers at a time
        int8_values_per_layer = _count_policy_weights(config, model, mesh).int8_values_per_layer
        moment["int8 weights in the compute dtype"] = 2 * operand_bytes * int8_values_per_layer

    if tower := model.tower:
        patches = config.max_image_tokens * tower.num_patches_per_token
        prefill["DeepStack features"] = (
            prefill_tokens * tower.num_deepstack_layers * model.width * itemsize
        )
        moments["images"] = {
            "patches": 4 * patches * (tower.num_values_per_patch + tower.num_coords),
            "activations of patches": patches
            * tower.estimate_layer_memory().prefill_activations
            * operand_bytes,
            "attention scores of patches": 2 * 4 * tower.count_attention_scores(patches),
        }
        for moment in moments.values():
            values = config.max_image_tokens * (1 + tower.num_deepstack_layers) * model.width
            moment["image embeddings"] = values * itemsize
    is_separate = config.mesh.rollout_devices or _frees_params(config)
    persistent = {} if is_separate else _count_state_bytes(config, model, mesh, "train")
    persistent["decode weights"] = _count_decode_weight_bytes(config, model, target)
    if model.num_recurrent_layers:
        persistent["states of recurrent layers"] = cache.num_states * cache.row_state_bytes
        # The states of all layers, and the new ones of a layer.
        row_state_bytes = (
            cache.row_state_bytes + cache.row_state_bytes // model.num_recurrent_layers
        )
        decode["copies of recurrent states"] = rows * row_state_bytes
    resident, searching = _count_search_bytes(config, target)
    return _make_phase("rollout", persistent | resident | searching, moments)


def _estimate_weight_sync_memory(
    config: ResolvedConfig, model: Architecture, target: Target
) -> Phase:
    """Estimate the memory for copying weights to a sampler on devices without parameters.

    Training devices send a copy. After the last training stage, decode weights replace the
    parameters one by one. Without training, parameters are read from disk one by one, largest
    first, except that the base model of an adapter is loaded as a whole.
    """
    mesh = make_target_mesh(config, model, target)
    resident = _count_search_bytes(config, target)[0]
    itemsize = jnp.dtype(config.model.dtype).itemsize
    head = _get_extra_head_itemsize(config, model, target)
    stage = next((stage for stage in config.stages if stage != "sft"), "sft")
    persistent = _count_state_bytes(config, model, mesh, stage) | resident
    train_params = compute_local_param_sizes(model, mesh)
    decode_params = compute_local_param_sizes(model, mesh, for_decode=True)
    decode_sizes = {
        path: size * (itemsize + head * (path[0] == model.output_module))
        for path, (size, _) in decode_params.items()
    }
    if config.mesh.rollout_devices:
        moment = {"decode weights": _count_decode_weight_bytes(config, model, target)}
    elif (
        config.stages != ("evaluate",)
        or build_policy_architecture(config, model).wrapper is not None
    ):
        moment = {"decode weights of one parameter": max(decode_sizes.values())}
    else:
        # On a CPU, a parameter has three copies: in the page cache, as read, and as an array.
        persistent, copies, done_bytes = resident, 3 if target.platform == "cpu" else 1, 0
        moment = {"decode weights so far": 0, "one parameter": 0}
        for path, (size, _) in sorted(train_params.items(), key=lambda leaf: -leaf[1][0]):
            for done_size, num_copies in (
                (done_bytes, copies),
                (done_bytes + decode_sizes[path], 1),
            ):
                if done_size + num_copies * 4 * size > sum(moment.values()):
                    parameter = num_copies * 4 * size
                    moment = {"decode weights so far": done_size, "one parameter": parameter}
            done_bytes += decode_sizes[path]
    return Phase(name=WEIGHTS_PHASE, persistent=persistent, moments={"copying": moment})


def _plan_checkpoint(
    config: ResolvedConfig, model: Architecture, target: Target, stage: str
) -> Phase:
    """Estimate the memory needed to save on a CPU, where arrays are copied before writing."""
    state = _count_state_bytes(config, model, make_target_mesh(config, model, target), stage)
    saved = sum(size for name, size in state.items() if name != "frozen weights")
    persistent = state | _count_search_bytes(config, target)[0]
    is_last = 0 < config.num_steps <= config.checkpoint.every_steps  # sampling is over
    if stage == "train" and not config.mesh.rollout_devices and not is_last:
        persistent["decode weights"] = _count_decode_weight_bytes(config, model, target)
    moments = {"saving": {"copies to be written": saved}}
    return Phase(name=f"{stage} checkpoint", persistent=persistent, moments=moments)


def _add_process_memory(
    phase: Phase, config: ResolvedConfig, model: Architecture, target: Target
) -> Phase:
    """Add a CPU device's share of the memory used by the process and the compiler.

    The sampler's programs unroll the layers; other programs loop over them if `scan_layers` is
    True.
    """
    process, compiler = PROCESS_BYTES, COMPILER_BYTES
    if {"train", "evaluate"} & set(config.stages):
        process += model.num_layers * LAYER_PROGRAM_BYTES
    if phase.name == "rollout" or not config.model.scan_layers:
        compiler += model.num_layers * LAYER_COMPILER_BYTES
    moments = phase.moments
    if phase.name.endswith(("update", "rollout")):
        moments = moments | {"compiling": {"compiler": compiler // target.num_local}}
    return replace(
        phase,
        persistent={"process": process // target.num_local} | phase.persistent,
        moments=moments,
    )


def _make_phase(
    name: str,
    persistent: dict[str, int],
    moments: dict[str, dict[str, int]],
    resident: dict[str, int] | None = None,
) -> Phase:
    """Build a phase, dropping zero terms.

    Adds `resident` and a margin to each entry of `moments`; `MARGIN` does not apply to `resident`.
    """
    for moment, terms in moments.items():
        margin = {"margin": int(MARGIN * sum(terms.values()))}
        all_terms = (resident or {}) | terms | margin
        moments[moment] = {term: size for term, size in all_terms.items() if size}
    return Phase(
        name=name, persistent={k: size for k, size in persistent.items() if size}, moments=moments
    )


@dataclass(frozen=True, kw_only=True)
class _ParamCounts:
    """Parameter counts of one device, for several shardings.

    Attributes:
        layers: All layers, sharded as in training.
        split_tables: Embedding, final norm and output layer, sharded as in training.
        gathered_layer: One layer, gathered from the training shards.
        decode_layers: All layers, sharded over `tensor`, experts over `expert`, as in decoding.
        tables: Embedding, final norm and output layer, sharded as in decoding.
    """

    layers: int
    split_tables: int
    gathered_layer: int
    decode_layers: int
    tables: int

    def count_table_params(self, model: Architecture) -> int:
        """Return the number of parameters in the embedding or an untied output layer."""
        return self.tables // (1 if model.tie_embeddings else 2)

    @classmethod
    @functools.cache
    def from_model(cls, model: Architecture, mesh: Any) -> _ParamCounts:
        """Count the parameters of a model on a mesh."""
        stacked_modules = get_stacked_modules(model)
        counts = dict.fromkeys(("layers", "split_tables", "gathered", "decode_layers", "tables"), 0)
        decode = compute_local_param_sizes(model, mesh, for_decode=True)
        for path, (size, _) in compute_local_param_sizes(model, mesh).items():
            decode_size, _ = decode[path]
            counts["layers" if path[0] in stacked_modules else "split_tables"] += size
            counts["decode_layers" if path[0] in stacked_modules else "tables"] += decode_size
            if path[0] == "blocks" and size < decode_size:
                counts["gathered"] += decode_size
        return cls(gathered_layer=counts.pop("gathered") // model.num_layers, **counts)


def _compute_shard_size(size: int, num_shards: int) -> int:
    """Return an axis's size per shard; the full size if `num_shards` does not divide it."""
    return size if size % num_shards else size // num_shards


def _count_policy_weights(config: ResolvedConfig, model: Architecture, mesh: Any) -> PolicyWeights:
    """Return the bytes of the policy's weights on one device, by kind."""
    policy = build_policy_architecture(config, model)
    frozen, dtype = find_frozen_entries(config, policy), jnp.dtype(config.model.dtype)
    return measure_weights(policy, frozen, mesh, dtype)


def _count_state_bytes(
    config: ResolvedConfig, model: Architecture, mesh: Any, stage: str
) -> dict[str, int]:
    """Return the sizes of weights, Adam moments and reference policy on a device, in bytes."""
    policy = _count_policy_weights(config, model, mesh)
    section = config.get_optimizer_section(stage)
    params = 4 * policy.num_trained
    state = {"frozen weights": policy.base_bytes} if policy.base_bytes else {}
    state["parameters"] = params
    if stage != "evaluate" and not section.offload:
        state["optimizer state"] = _count_moment_bytes(policy, section)
    if stage == "train" and config.kl.coef and config.kl.anchor == "ref":
        state["reference parameters"] = params
    return state


def _count_moment_bytes(policy: PolicyWeights, section: Any) -> int:
    """Return the size of Adam's moments in bytes: mean in `moments_dtype`, variance in float32."""
    return (jnp.dtype(section.moments_dtype).itemsize + 4) * policy.num_trained


def _frees_params(config: ResolvedConfig) -> bool:
    """Return True if the parameters are freed once the sampler has its weights."""
    return "train" not in config.stages


def _count_search_bytes(
    config: ResolvedConfig, target: Target
) -> tuple[dict[str, int], dict[str, int]]:
    """Return the permanent and temporary memory of the search engines, in bytes."""
    environments = [e for e in config.environments.values() if e.has_search]
    distinct = {json.dumps(e.search.to_dict(), sort_keys=True): e for e in environments}
    totals: tuple[Counter[str], Counter[str]] = Counter(), Counter()
    for environment in distinct.values():
        if name := SEARCH_MEMORY.get(environment.search.engine):
            count_search_bytes = pkgutil.resolve_name(name)
            counts = count_search_bytes(
                environment, target.num_passages, target.num_local, target.platform
            )
            for total, count in zip(totals, counts, strict=True):
                total.update(count)
    return dict(totals[0]), dict(totals[1])


SEARCH_MEMORY = dict.fromkeys(("dense", "hybrid"), "jaxrl.extras.dense.memory:count_search_bytes")
"""For each search engine, the dotted path of the function that computes its device memory."""


def _count_decode_weight_bytes(config: ResolvedConfig, model: Architecture, target: Target) -> int:
    """Return the bytes of the sampler's weights on one device."""
    mesh, policy = make_target_mesh(config, model, target), build_policy_architecture(config, model)
    counts, dtype = _ParamCounts.from_model(model, mesh), jnp.dtype(config.model.dtype)
    head = _get_extra_head_itemsize(config, model, target) * counts.count_table_params(model)
    if policy.wrapper is None:
        return dtype.itemsize * (counts.decode_layers + counts.tables) + head
    shares_devices = target.num_processes == 1 and not config.mesh.rollout_devices
    # On a CPU, the sampler cannot share layers, because it stores them separately.
    may_share = shares_devices and target.platform != "cpu" and not _frees_params(config)
    plan = importlib.import_module(policy.wrapper.memory_module)
    size: int = plan.count_decode_bytes(policy, mesh, dtype, may_share=may_share)
    return size + head * model.tie_embeddings  # `size` includes an untied output layer


def _get_extra_head_itemsize(config: ResolvedConfig, model: Architecture, target: Target) -> int:
    """Return the additional bytes per value of the sampler's output layer.

    Tied embeddings are copied on a CPU, or if the dtypes differ.
    """
    itemsize = jnp.dtype(config.model.dtype).itemsize
    head = jnp.dtype(config.model.head_dtype or config.model.dtype).itemsize
    if not model.tie_embeddings:
        return head - itemsize
    return head if target.platform == "cpu" or config.model.head_dtype else 0


def _describe_shapes(config: ResolvedConfig, model: Architecture, target: Target) -> dict[str, str]:
    """Describe the largest shapes of each phase, which are global unless "on a device"."""
    rollout, mesh, shapes = config.rollout, make_target_mesh(config, model, target), {}
    shards = count_batch_shards(mesh) * _shares_prompts(config, model, target)
    for stage in ("sft", "train"):
        if stage in config.stages:
            shape = compute_batch_shape(config, stage, shards, mesh.shape["context"], model)
            rows, length = shape.micro_rows, shape.row_tokens
            _, chunk = split_evenly(rows * length, config.model.logits_chunk_tokens)
            shapes[f"{stage} update"] = (
                f"{shape.num_micro} micro-batches of {rows} rows x {length} tokens; logits of "
                f"{chunk} x {model.vocab_size}"
            )
    if {"train", "evaluate"} & set(config.stages):
        prefill_tokens = list_prefill_buckets(target.platform, config.context_tokens)[-1]
        shapes["rollout"] = (
            f"decode {rollout.chunk_tokens} steps of up to {rollout.max_num_seqs} rows over up to "
            f"{config.context_tokens} tokens; prefill up to {prefill_tokens} tokens on a device; "
            f"cache {count_cache_pages(config, model, target)} blocks x "
            f"{get_page_size(config, model, target)} tokens on a device"
        )
    return shapes

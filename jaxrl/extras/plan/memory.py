"""Memory and shapes of a run on each device, from its configuration and the model's config.json.

Nothing is allocated and no weights are read. What arrays will lie on a device follows from the
shapes of parameters, optimizer state and caches and from how they are split; what a compiled
program needs beside them is modelled term by term, and tests hold the sums to what XLA's memory
analysis of the same programs says. What the terms owe to the architecture is in `ModelTerms`.
"""

from __future__ import annotations

import functools
import importlib
import math
import os
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType

from jaxrl.builders.capacity import (
    CacheSizes,
    check_length,
    check_rows,
    samples_beside,
    sampling_shards,
)
from jaxrl.builders.method import (
    batch_shape,
    frozen_entries,
    optimizer_settings,
    policy_architecture,
)
from jaxrl.builders.resolved import ResolvedConfig, resolve_names
from jaxrl.config import default_config
from jaxrl.extras.plan.host import host_memory
from jaxrl.models.architecture import Architecture, MemoryTerms
from jaxrl.models.attention.choice import append_block, copies_past, decide
from jaxrl.models.attention.kernels import PAGE_TOKENS, SHARES_PROMPTS
from jaxrl.models.attention.reference import MAX_BLOCK, TURN_TOKENS
from jaxrl.models.aux_arrays import TokenArray
from jaxrl.models.output import block_tokens, chunks_of
from jaxrl.models.params import Declared
from jaxrl.models.policy import entries_with_layers
from jaxrl.runtime.compilation import MULTIPLIES_BFLOAT16
from jaxrl.runtime.sharding import (
    check_model_fits,
    devices_together,
    mesh_sizes,
    num_batch_shards,
    num_pieces,
    param_shardings,
    spans_processes,
)
from jaxrl.runtime.weight_memory import PolicyWeights, cast_leaves, leaves, num_values
from jaxrl.sampling.buckets import append_sizes, row_sizes
from jaxrl.training.method import has_kl_loss, is_measured, takes_own_logprobs, token_fields
from jaxrl.training.optimizer import make_optimizer
from jaxrl.training.packing import BatchShape
from jaxrl.training.update import state_shardings

USABLE = 0.9
"""Share of a device's memory that a plan may fill: the rest is for what it does not see."""

GO_ON = "--ignore_memory_plan goes on all the same, since the plan may err"

PROCESS_BYTES = 400 * 2**20
"""Interpreter, libraries, tokenizer, data and small programs; measured on Linux, JAX 0.10.2."""

COMPILER_BYTES, LAYER_COMPILER_BYTES = 100 * 2**20, 4 * 2**20
"""Taken by a CPU's compiler for a program, and for each layer that it compiles apart.

With the program itself, some of which is left when it is done.
"""

NUM_COMPILED, LAYER_CODE_BYTES = 5, 9 * 2**18
"""The sampler's programs that a run comes to need at most, and what each of their layers takes."""

HANDING_OVER = "weights to the sampler"

COMPUTING = ("sft update", "train update", "scoring", "rollout")
"""Phases in which something is compiled."""

WINDOWED_BYTES = 100 * 2**20
"""Size from which on a TPU's compiler multiplies with a split kernel while its parts arrive.

It does with 130 MiB (Qwen2.5-7B's gate over fsdp=8), not with 65 (over fsdp=4 and tensor=2).
"""


@dataclass(frozen=True, kw_only=True)
class Target:
    """The devices that a plan is made for.

    Attributes:
        platform: cpu, gpu or tpu.
        num_devices: devices of all machines together.
        memory_bytes: what JAX may use of one device.
        num_processes: among which the devices are divided evenly. Each samples on its own devices
            and reads its own prompts.
        num_passages: of the corpus that `search.dense` names; 0: as many as the file holds.
        free_bytes: of a CPU what is free now, a device's part; None: not known, or no CPU.
    """

    platform: str
    num_devices: int
    memory_bytes: int
    num_processes: int = 1
    num_passages: int = 0
    free_bytes: int | None = None

    @property
    def num_local(self) -> int:
        """Devices of one process."""
        return self.num_devices // self.num_processes

    @property
    def limit(self) -> int:
        """Bytes of a device beyond which a run cannot start."""
        return self.memory_bytes if self.free_bytes is None else self.free_bytes

    @property
    def usable(self) -> int:
        """Bytes of a device that a plan may fill."""
        return int(self.limit * USABLE)


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Bytes on one device during a phase.

    Attributes:
        name: what is done, as the table shows it.
        kept: what is there all the time.
        moments: what comes on top of it at each of the moments that could be the peak.
    """

    name: str
    kept: dict[str, int]
    moments: dict[str, dict[str, int]]

    @property
    def peak(self) -> int:
        """The most that is there at once."""
        return sum(self.kept.values()) + max(sum(terms.values()) for terms in self.moments.values())

    def largest(self, count: int) -> list[tuple[str, int]]:
        """The terms that take most of the peak, the largest first."""
        terms = self.kept | self.moments[self.moment]
        return sorted(terms.items(), key=lambda term: -term[1])[:count]

    @property
    def moment(self) -> str:
        """The name of the moment of the peak."""
        return max(self.moments, key=lambda name: sum(self.moments[name].values()))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Memory that a run needs on each device, and the work of a step."""

    target: Target
    mesh: dict[str, int]
    phases: tuple[Phase, ...]
    between: dict[str, int]  # what is on a device between two phases, in the fullest stage
    shapes: dict[str, str]
    num_params: int
    num_trained: int  # of these, or of the adapter beside them
    tokens_per_step: int  # at most: every trajectory as long as it may be
    flops_per_step: int  # of these tokens, sampled and trained on, nothing recomputed

    @property
    def peak(self) -> int:
        """Bytes of a device at the run's peak."""
        return max(phase.peak for phase in self.phases)

    @property
    def fits(self) -> bool:
        """True if the peak is within the usable memory."""
        return self.peak <= self.target.usable


def host_target() -> Target:
    """The devices that JAX sees here, with the memory that it may use of each.

    A CPU reports none; its devices share half of the host's memory, and what is free of it.
    """
    devices = jax.local_devices()
    stats, free_bytes = [device.memory_stats() or {} for device in devices], None
    if all("bytes_limit" in one for one in stats):
        memory_bytes = min(one["bytes_limit"] for one in stats)
    else:
        total, free = host_memory()
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


def make_plan(config: ResolvedConfig, model: Architecture, target: Target) -> Plan:
    """Plans the configured stages.

    Raises:
        ValueError: the mesh does not divide the devices, the heads or the rows, or trajectories
            are longer than the model's positions.
    """
    mesh = target_mesh(config, model, target)
    check_rows(config, mesh, target.num_processes)
    check_length(config, model)
    phases = [
        update_phase(config, model, target, stage)
        for stage in ("sft", "train")
        if stage in config.stages
    ]
    # An update that takes its own log-probabilities, without a reference, needs no pass before it.
    is_own = takes_own_logprobs(config.optimizer, config.filter)
    if "train" in config.stages and (
        not is_own or has_kl_loss(config.kl) or is_measured(config.kl)
    ):
        phases.append(score_phase(config, model, target))
    if {"train", "evaluate"} & set(config.stages):
        phases.append(rollout_phase(config, model, target))
    if config.mesh.rollout_devices or (_is_given_up(config) and "evaluate" in config.stages):
        phases.append(_handing_over(config, model, target))
    tokens = config.rollout.tasks_per_step * config.rollout.group_size
    tokens *= config.rollout.max_total_tokens
    held = [_between(config, model, target, stage) for stage in config.stages]
    if target.platform == "cpu":
        for stage in ("sft", "train"):
            if stage in config.stages:  # arrays are copied before they are written
                state = _state(config, model, mesh, stage)
                saved = sum(size for name, size in state.items() if name != "frozen weights")
                kept = _between(config, model, target, stage)
                if config.num_steps <= config.checkpoint.every_steps:  # only the one at the end
                    kept.pop("decode weights", None)
                saving = {"saving": {"copies to be written": saved}}
                phases.append(Phase(name=f"{stage} checkpoint", kept=kept, moments=saving))
        phases = [_with_process(phase, config, model, target) for phase in phases]
        held = [terms | _process(config, model, target) for terms in held]
    is_around = policy_architecture(config, model).around is not None
    num_trained = num_values(_trained(config, model).abstract_params())
    return Plan(
        target=target,
        mesh=dict(mesh.shape),
        phases=tuple(phases),
        between=max(held, key=lambda terms: sum(terms.values())),
        shapes=_shapes(config, model, target),
        num_params=_num_params(model),
        num_trained=num_trained,
        tokens_per_step=tokens,
        flops_per_step=tokens
        * ModelTerms(model, mesh).flops_per_token(
            config.rollout.max_total_tokens, trains_all=not is_around
        ),
    )


def target_mesh(config: ResolvedConfig, model: Architecture, target: Target) -> Any:
    """The configured mesh over devices that need not exist.

    Raises:
        ValueError: it does not divide the devices, those of a process or the model's heads.
    """
    sizes = mesh_sizes(target.num_devices, **config.mesh, num_processes=target.num_processes)
    if (target.num_local - config.mesh.rollout_devices) % devices_together(sizes):
        raise spans_processes(sizes, target.num_local)
    mesh: Any = AbstractMesh(
        tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes)
    )
    check_model_fits(mesh, model)
    return mesh


@dataclass(frozen=True)
class ModelTerms:
    """Terms that depend on the architecture: values on one device, of the model on the mesh."""

    model: Architecture
    mesh: Any

    @property
    def heads(self) -> int:
        """Score matrices of a layer, each of queries x keys."""
        return self.model.num_heads // self.mesh.shape["tensor"]

    @property
    def logits(self) -> int:
        """Logits of a token."""
        return _split(self.model.vocab_size, self.mesh.shape["tensor"])

    @property
    def layer(self) -> MemoryTerms:
        """Values of a token inside a layer."""
        dense = self.model.memory_terms(self.mesh.shape["tensor"])
        return dense if self.experts is None else dense.plus(self.experts)

    @property
    def experts(self) -> MemoryTerms | None:
        """The part of these values that experts add."""
        if not self.model.num_experts:
            return None
        sizes = self.mesh.shape
        return self.model.expert_terms(sizes["tensor"], sizes["expert"])

    def flops_per_token(self, length: int, *, trains_all: bool = True) -> int:
        """Operations to sample a token and train on it, in a causal sequence of `length`.

        Weights beside an adapter, which are not trained, get no gradient.
        """
        model = self.model
        tables = model.vocab_size * model.width
        outside = tables * (1 if model.tie_embeddings else 2)
        product_params = _num_params(model) - outside + tables - model.num_idle
        attention = 4 * model.num_layers * model.num_heads * model.head_dim * length // 2
        return (4 if trains_all else 3) * 2 * product_params + 4 * attention


def update_phase(config: ResolvedConfig, model: Architecture, target: Target, stage: str) -> Phase:
    """Memory while a mini-batch of a stage, sft or train, is trained on."""
    update = _Update.of(config, model, target, stage)
    # A CPU's compiler schedules layers that are compiled one by one as it likes, and keeps all.
    keeps_all = update.is_cpu and not config.model.scan_layers
    saved = update.saved("none" if keeps_all else config.model.remat)
    count = update.count
    trains_images = not config.model.freeze_tower and not update.policy.has_adapter
    seen = trains_images * update.saved_of_images("none" if keeps_all else config.model.remat)
    copied = 4 * (count.params - count.tables) + 2 * (saved + seen)
    held = {
        "weights in the compute dtype": update.cast_weights,
        "activations kept for the backward pass": saved,
        "images, kept for the backward pass": seen,
        "images, added in first layers": (1 + trains_images) * update.added_of_images,
        "float32 copies of these": update.copies_bfloat16 * copied,
        "replayed experts": update.replayed,
    }
    held_by_search, _ = _search_bytes(config, target)
    kept = {
        **_state(config, model, update.mesh, stage),
        **held_by_search,
        "gradients": 4 * update.policy.trained,
        "batch": _batch_bytes(config, update.shape, num_pieces(update.mesh), stage),
        "patches of two micro-batches": update.patch_bytes,
    }
    if stage == "train" and samples_beside(config):  # the next step's rollout is under way
        sampler = _Sampler.of(config, model, target)
        kept["decode weights"] = _decode_weights(config, model, target)
        kept["KV cache"] = cache_pages(config, model, target) * sampler.cache.page_bytes
        kept["sampling"] = max(sum(terms.values()) for terms in sampler.moments.values())
        kept |= _search_bytes(config, target)[1]
    moments = {"layers": held | update.at_layers(), "output": held | update.at_output()}
    if update.num_patches:
        moments["images"] = held | update.at_images(is_trained=trains_images)
    if config.optimizer_section(stage).offload:
        moved = _moment_bytes(config, model, update.mesh, stage)
        moments["optimizer"] = {"optimizer state, from the host": moved}
    moments = {name: _nonzero(terms) for name, terms in moments.items()}
    return Phase(name=f"{stage} update", kept=_nonzero(kept), moments=moments)


def score_phase(config: ResolvedConfig, model: Architecture, target: Target) -> Phase:
    """Memory while old or reference log-probabilities are computed, before the updates."""
    update = _Update.of(config, model, target, "train")
    count = update.count
    held = {
        "weights in the compute dtype": update.cast_weights,
        "float32 copies of these": update.copies_bfloat16 * 4 * (count.params - count.tables),
        "replayed experts": update.replayed,
    }
    kept = {
        **_state(config, model, update.mesh, "train"),
        **_search_bytes(config, target)[0],
        "batch": _batch_bytes(config, update.shape, num_pieces(update.mesh), "train"),
        "patches of two micro-batches": update.patch_bytes,
    }
    moments = {
        "layers": held | update.at_layers_forward(),
        "output": held | update.at_output_forward(),
    }
    if update.exchanged_tables:
        moments["gathering"] = held | {"embedding and output gathered": update.exchanged_tables}
    if update.num_patches:
        moments["images"] = held | update.at_images(is_trained=False)
    moments = {name: _nonzero(terms) for name, terms in moments.items()}
    return Phase(name="scoring", kept=_nonzero(kept), moments=moments)


@dataclass(frozen=True, kw_only=True)
class _Update:
    """A micro-batch's update on one device, for the terms of its memory, in bytes."""

    model: Architecture
    mesh: Any
    shape: BatchShape
    itemsize: int  # bytes of a value in the compute dtype
    head_itemsize: int  # in the output layer's
    logits_chunk_tokens: int  # whose logits are computed at once, at most
    is_cpu: bool
    is_tpu: bool
    policy: PolicyWeights

    @classmethod
    def of(cls, config: ResolvedConfig, model: Architecture, target: Target, stage: str) -> _Update:
        """Builds the terms for a stage, sft or train."""
        mesh = target_mesh(config, model, target)
        return cls(
            model=model,
            mesh=mesh,
            shape=_shape(config, model, target, stage),
            itemsize=jnp.dtype(config.model.dtype).itemsize,
            head_itemsize=jnp.dtype(config.model.head_dtype or config.model.dtype).itemsize,
            logits_chunk_tokens=max(config.model.logits_chunk_tokens // num_pieces(mesh), 1),
            is_cpu=target.platform == "cpu",
            is_tpu=target.platform == "tpu",
            policy=_policy_weights(config, model, mesh),
        )

    @property
    def count(self) -> _Counts:
        """Numbers of parameters."""
        return _Counts.of(self.model, self.mesh)

    @property
    def terms(self) -> ModelTerms:
        """Values that depend on the architecture."""
        return ModelTerms(self.model, self.mesh)

    @property
    def is_cast(self) -> bool:
        """True if the weights are multiplied in another dtype than they are kept in."""
        return self.itemsize < 4

    @property
    def copies_bfloat16(self) -> bool:
        """True if bfloat16 is multiplied in float32, from copies."""
        return self.is_cpu and self.is_cast and not MULTIPLIES_BFLOAT16

    @property
    def has_head(self) -> bool:
        """True if the output layer multiplies in float32 what others multiply in less."""
        return self.head_itemsize > self.itemsize

    @property
    def operand(self) -> int:
        """Bytes of a value that is multiplied."""
        return 4 if self.copies_bfloat16 else self.itemsize

    @property
    def cast_weights(self) -> int:
        """The weights in the compute dtype, unless they are kept in it.

        A CPU that copies has the layers in float32 instead, and the tables where they are gathered.
        A TPU's compiler gathers tables before the first micro-batch and has no more of their parts.
        """
        if self.copies_tables:
            return 0
        has_no_parts = self.is_tpu and self.gathers
        return self.policy.cast_bytes - has_no_parts * self.policy.cast_tables

    @property
    def copies_tables(self) -> bool:
        """True if a CPU has copies of trained tables to multiply with."""
        return self.copies_bfloat16 and not self.policy.has_adapter

    @property
    def gathers(self) -> bool:
        """True if the weights are split over devices that multiply them whole."""
        sizes = self.mesh.shape
        return sizes["fsdp"] * sizes["context"] * sizes["expert"] > 1

    @property
    def splits_gradients(self) -> bool:
        """True if gradients of tables are split where they arise; see `Model`."""
        return self.gathers and self.mesh.shape["data"] == 1

    @property
    def rows(self) -> int:
        """Rows of a micro-batch in which a device has tokens."""
        return self.shape.micro_rows // num_batch_shards(self.mesh)

    @property
    def tokens(self) -> int:
        """Tokens of these rows that the device has."""
        return self.rows * self.shape.row_tokens // self.mesh.shape["context"]

    @property
    def scores(self) -> int:
        """Values of the scores of one block of queries and one of keys, of all heads."""
        block = min(self.shape.row_tokens // self.mesh.shape["context"], MAX_BLOCK)
        return self.rows * self.terms.heads * block**2

    @property
    def whole_keys(self) -> int:
        """Values of the keys of a layer, or of its values, that a device gathers of whole rows."""
        sizes = self.mesh.shape
        heads = self.model.num_kv_heads // sizes["tensor"]
        return (
            (sizes["context"] > 1) * self.rows * self.shape.row_tokens * heads * self.model.head_dim
        )

    @property
    def replayed(self) -> int:
        """Recorded arrays that passes are given, as the batch has them and by layer."""
        return 2 * self.tokens * _bytes_of_token(self.shape.token_arrays)

    def saved(self, remat: str) -> int:
        """Activations kept for the backward pass."""
        tokens, terms = self.tokens, self.terms
        num_layers = self.model.num_layers
        inside = terms.layer.saved_activations | {"full": 0}
        if remat == "offload":  # attention's result, and the float32 log-sum-exp of its scores
            inside["offload"] = terms.heads * (self.model.head_dim + 4 // self.itemsize)
            # All memory of a CPU is the host's. Elsewhere a layer's are on their way out or back
            # while another is computed.
            num_layers = num_layers if self.is_cpu else min(num_layers, 2)
        return num_layers * tokens * (self.model.width + inside[remat]) * self.itemsize

    @property
    def num_patches(self) -> int:
        """Most patches of a micro-batch on one device."""
        tower = self.shape.tower
        return self.rows * self.shape.row_units * tower.unit if tower is not None else 0

    @property
    def patch_bytes(self) -> int:
        """Patches and places of the micro-batch that is computed, and of the next one."""
        tower = self.shape.tower
        values = (
            tower.patch_values * self.itemsize + 4 * tower.place_values if tower is not None else 0
        )
        return 2 * self.num_patches * values

    def saved_of_images(self, remat: str) -> int:
        """Activations of patches kept for the backward pass."""
        tower = self.shape.tower
        if tower is None:
            return 0
        inside = tower.memory_terms().saved_activations | {"full": 0, "offload": 0}
        values = tower.width + inside[remat]
        return tower.num_layers * self.num_patches * values * self.itemsize

    @property
    def added_of_images(self) -> int:
        """Bytes added to hidden states in the first layers."""
        tower = self.shape.tower
        depths = tower.num_added if tower is not None else 0
        return depths * self.tokens * self.model.width * self.itemsize

    def at_images(self, *, is_trained: bool) -> dict[str, int]:
        """Terms of a layer that reads images, forwards, or backwards where it is trained."""
        tower = self.shape.tower
        if tower is None:
            return {}
        terms, operand = tower.memory_terms(), self.operand
        inner = terms.activations if is_trained else terms.read_activations
        scores = tower.num_scores(self.num_patches)
        return {
            "a micro-batch's gradients": is_trained * self.new_gradients,
            "attention scores of patches": scores * (3 * 4 if is_trained else 2 * 4),
            "activations of patches": self.num_patches * inner * operand,
        }

    def not_held(self, *, read: bool = False) -> int:
        """Bytes by which experts' values take less than their terms say; `read`: without gradients.

        An accelerator's compiler has some where others were. A CPU keeps them in bfloat16, and
        copies those that it multiplies in float32: three bytes on average.
        """
        terms = self.terms.experts
        if terms is None or (self.is_cpu and not self.copies_bfloat16):
            return 0
        if self.is_cpu:
            return self.tokens * (terms.read_activations if read else terms.activations)
        reused = terms.read_reused if read else terms.reused["tpu" if self.is_tpu else "gpu"]
        return self.tokens * self.operand * reused

    @property
    def new_gradients(self) -> int:
        """A micro-batch's gradients of the layers."""
        if self.policy.has_adapter:
            return 4 * self.policy.trained
        return self.itemsize * (self.policy.trained - self.count.tables)

    @property
    def output_table(self) -> int:
        """Values of the output layer, whole, where it gets a gradient."""
        return 0 if self.policy.has_adapter else self.embedding

    @property
    def embedding(self) -> int:
        """Values of the table of ids, whole; an output layer of its own has as many."""
        return self.count.table(self.model)

    @property
    def tables(self) -> int:
        """Bytes of embedding and output layer, whole, as look-ups and products read them."""
        if self.has_head:
            return (self.itemsize + self.head_itemsize) * self.embedding
        return self.itemsize * self.count.whole_tables

    @property
    def gathered_tables(self) -> int:
        """Embedding and output layer, gathered."""
        gathered = self.tables
        if self.is_tpu and not self.is_cast:  # it multiplies float32 in bfloat16, from a copy
            return self.gathers * 4 * self.embedding + 2 * self.output_table
        if self.is_tpu:
            return self.gathers * gathered
        if self.copies_tables and self.gathers:
            # The output layer's as devices exchange it, and as it is multiplied.
            return (4 + self.head_itemsize) * self.output_table
        if self.copies_tables and self.has_head:
            return 4 * self.embedding  # in which tokens are found: the other is a parameter
        if self.is_cpu and self.model.tie_embeddings and not self.has_head:
            gathered *= 2  # the table itself, and turned over
        of_adapted = self.policy.has_adapter * self.looked_up
        return (self.gathers or self.copies_tables) * gathered + of_adapted

    @property
    def exchanged_tables(self) -> int:
        """Tables on a CPU's device when others have sent their parts, and none is computed with."""
        if not (self.is_cpu and self.gathers):
            return 0
        if self.copies_tables:
            # The embedding as it came and as tokens are found in it, and the output layer.
            return (4 + 4 + self.head_itemsize) * self.output_table
        return self.gathered_tables

    @property
    def read_tables(self) -> int:
        """Bytes of the output layer's table where nothing is differentiated."""
        if self.copies_bfloat16:
            if self.gathers:
                return self.gathered_tables + self.turned_table
            cast = 0 if self.has_head else self.itemsize
            return cast * self.output_table + self.looked_up
        return self.gathers * self.tables

    @property
    def looked_up(self) -> int:
        """The table of ids in float32, in which a CPU finds tokens of bfloat16.

        It makes that once for all micro-batches.
        """
        return (self.copies_bfloat16 and self.shape.num_micro > 1) * 4 * self.embedding

    @property
    def turned_table(self) -> int:
        """A tied table turned over, as a CPU multiplies bfloat16 where devices split tables."""
        is_copied = self.copies_tables and self.gathers and not self.has_head
        return is_copied * self.model.tie_embeddings * self.itemsize * self.output_table

    @property
    def gathered_layer(self) -> int:
        """Values of a layer that a device gathers; a CPU copies those that it has, too."""
        return self.count.whole_layer if self.is_cpu else self.count.gathered_layer

    def at_layers(self) -> dict[str, int]:
        """Terms of a layer's backward pass."""
        count = self.count
        # The output layer's is float32, whatever the others are.
        of_tables = max(self.itemsize * count.whole_tables, 4 * self.output_table)
        # A TPU has added these to the gradients so far, and alone it adds to them at once.
        is_added = self.is_tpu and (self.splits_gradients or not self.gathers)
        if self.policy.has_adapter or is_added:
            of_tables = 0
        elif self.splits_gradients and self.is_cpu:  # the embedding's: all ids, a part of the width
            values, sizes = self.model.vocab_size * self.model.width, self.mesh.shape
            of_tables = 4 * _split(values, sizes["fsdp"] * sizes["context"])
        operand = self.operand
        terms = self.terms
        inner = self.tokens * terms.layer.activations
        return {
            "a micro-batch's gradients": self.new_gradients + of_tables,
            # Backwards: two arrays in float32, two in the compute dtype where it differs, a mask.
            "attention scores": self.scores * (2 * 4 + self.is_cast * 2 * self.itemsize + 1),
            # Gathered, then turned one after the other; their gradients are summed in float32.
            "keys and values of whole rows": self.whole_keys * (3 * self.itemsize + 2 * 4),
            "activations of a layer": inner * operand - self.not_held(),
            "int8 weights in the compute dtype": operand * self.policy.dequantised,
            "layers gathered": self.gathers * 2 * operand * self.gathered_layer,
            "embedding and output gathered": (self.is_cpu or self.is_tpu) * self.gathered_tables,
        }

    def at_output(self) -> dict[str, int]:
        """Terms of the output layer and the loss."""
        num_chunks, chunk = chunks_of(self.tokens, self.logits_chunk_tokens)  # all may carry loss
        ids = self.terms.logits
        # A block's logits are treated at once; their gradient is written over them.
        block = 4 * ids * min(block_tokens("cpu" if self.is_cpu else "accelerator", ids), chunk)
        logits, table = 4 * ids * chunk, 4 * self.output_table
        copies = self.gathers and self.is_cpu
        if self.is_tpu:
            # It makes the gradient of logits as it multiplies, in the compute dtype, unless the
            # logits are kept from the forward pass. What one device sums in one chunk it adds to
            # the gradients at once; several add up sums when no logits are left.
            of_logits = logits if num_chunks == 1 else logits * self.head_itemsize // 4
            is_shared = num_pieces(self.mesh) > 1
            sums = (is_shared or num_chunks > 1) * table
            return {
                "a micro-batch's gradients": sums,
                "logits chunk, gradients of all": max(of_logits, is_shared * sums, logits - sums),
                "embedding and output gathered": self.gathered_tables,
            }
        # In bfloat16 a CPU has the gradient of logits as it is, and to multiply with in float32.
        is_copied = self.copies_bfloat16 and not self.has_head
        of_logits = is_copied * self.itemsize * ids * chunk
        if copies and self.splits_gradients:
            return {
                "a micro-batch's gradients": self.new_gradients + (1 + self.is_cast) * table,
                # What devices add up lies where two copies of the logits were.
                "logits chunk, gradients of all": logits + of_logits + max(table, 2 * block),
                "embedding and output gathered": 4 * self.embedding
                if self.has_head
                else self.itemsize * self.count.whole_tables + self.turned_table,
            }
        # The output layer's of each device's own tokens, then of all; the embedding's is split.
        tables = 0 if self.policy.has_adapter else 4 * self.count.whole_tables
        whole = max(tables, self.splits_gradients * 2 * table)
        has_product = self.copies_bfloat16 and (self.gathers or num_chunks > 1)  # beside the sums
        # A block's logits and their gradient, further copies on a CPU; one less in a single chunk.
        blocks = 3 if self.copies_tables else (4 if self.is_cpu else 2) - (num_chunks == 1)
        return {
            "a micro-batch's gradients": self.is_cpu * self.new_gradients
            + (1 + copies) * whole
            + has_product * table,
            "logits chunk": logits + block * (blocks - 1) + of_logits,
            "embedding and output gathered": self.gathered_tables + self.turned_table,
        }

    def at_layers_forward(self) -> dict[str, int]:
        """Terms of a layer where nothing is differentiated."""
        operand, terms = self.operand, self.terms.layer
        is_float32 = self.is_cpu and not self.is_cast
        # At least the inner width once, if the MLP's gate is applied within a product. A CPU has
        # gate and product side by side. A TPU multiplies with a large kernel part by part as the
        # parts arrive, and has the sum and the next part too.
        kernel = self.itemsize * self.model.width * terms.inner
        in_parts = self.is_tpu and self.gathers and kernel > WINDOWED_BYTES
        copies = 3 if in_parts else 1 + self.is_cpu
        values = max(terms.read_activations, copies * terms.inner + 2 * self.model.width)
        return {
            "attention scores": self.scores * 4,
            "keys and values of whole rows": self.whole_keys * 3 * self.itemsize,
            "activations of a layer": self.tokens * values * operand - self.not_held(read=True),
            "int8 weights in the compute dtype": operand * self.policy.dequantised,
            "layers gathered": self.gathers * operand * self.gathered_layer,
            "embedding and output gathered": self.read_tables
            if is_float32
            else self.gathered_tables,
        }

    def at_output_forward(self) -> dict[str, int]:
        """Terms of the output layer where nothing is differentiated."""
        _, chunk = chunks_of(self.tokens, self.logits_chunk_tokens)
        return {
            "activations": self.tokens * self.model.width * self.itemsize,
            "logits chunk": chunk * self.terms.logits * 4,
            "embedding and output gathered": self.read_tables,
        }


def rollout_phase(config: ResolvedConfig, model: Architecture, target: Target) -> Phase:
    """Memory while trajectories are sampled, in training and evaluation alike."""
    sampler = _Sampler.of(config, model, target)
    kept = {
        **sampler.kept,
        "KV cache": cache_pages(config, model, target) * sampler.cache.page_bytes,
    }
    return Phase(name="rollout", kept=_nonzero(kept), moments=sampler.moments)


def _handing_over(config: ResolvedConfig, model: Architecture, target: Target) -> Phase:
    """Memory of a device that trains while the weights go to those that sample.

    Where nothing is trained any more, they take the place of the parameters, one after the other.
    Where nothing is trained at all, each parameter is read from disk as its turn comes; but those
    of a checkpoint, which a workdir may have, and of an adapter's base are all there before.
    """
    mesh = target_mesh(config, model, target)
    held = _search_bytes(config, target)[0]
    is_around = policy_architecture(config, model).around is not None
    is_on_disk = config.stages == ("evaluate",) and not is_around
    if is_on_disk and not config.mesh.rollout_devices:
        made = _made_in_turn(config, model, target)
        return Phase(name=HANDING_OVER, kept=held, moments={"handing over": made})
    stage = next((stage for stage in config.stages if stage != "sft"), "sft")
    kept = _state(config, model, mesh, stage) | held
    moved = {"decode weights": _decode_weights(config, model, target)}
    if _is_given_up(config) and not config.mesh.rollout_devices:
        itemsize, more = jnp.dtype(config.model.dtype).itemsize, _head_bytes(config, model, target)
        largest = max(
            max(math.prod(leaf.shape) for leaf in jax.tree.leaves(entry))
            * (itemsize + more * (name == model.output))
            for name, entry in model.abstract_params().items()
        )
        moved = {"decode weights of one parameter": largest}
    return Phase(name=HANDING_OVER, kept=kept, moments={"handing over": moved})


def _made_in_turn(config: ResolvedConfig, model: Architecture, target: Target) -> dict[str, int]:
    """The fullest moment while parameters are read and cast, the largest first: `Weights.of`."""
    mesh = target_mesh(config, model, target)
    params, itemsize = model.abstract_params(), jnp.dtype(config.model.dtype).itemsize
    of_params = param_shardings(mesh, model)
    of_weights = param_shardings(mesh, model, for_decode=True)
    parts = []
    for name in params:
        made_bytes = itemsize + _head_bytes(config, model, target) * (name == model.output)
        for leaf, read, made in zip(
            *(jax.tree.leaves(tree[name]) for tree in (params, of_params, of_weights)), strict=True
        ):
            sizes = [math.prod(layout.shard_shape(leaf.shape)) for layout in (read, made)]
            parts.append((math.prod(leaf.shape), 4 * sizes[0], made_bytes * sizes[1]))
    parts.sort(key=lambda part: -part[0])
    # A CPU has it in the pages of its file, as it is read and as an array, before it is cast.
    copies, moments, so_far = (3 if target.platform == "cpu" else 1), [], 0
    for _, read, made in parts:
        if copies > 1:
            moments.append((so_far, copies * read))
        so_far += made
        moments.append((so_far, read))
    sum_made, read = max(moments, key=sum)
    return {"decode weights so far": sum_made, "one parameter": read}


def _is_given_up(config: ResolvedConfig) -> bool:
    """Return True if the parameters are freed once the sampler has its weights: `Weights.of`."""
    return "train" not in config.stages


def _process(config: ResolvedConfig, model: Architecture, target: Target) -> dict[str, int]:
    """Bytes that a process holds beside arrays, a device's part, on a CPU."""
    held = {"process": PROCESS_BYTES}
    if {"train", "evaluate"} & set(config.stages):
        # The sampler's: those that read, and those that decode as many rows as there are.
        mesh = target_mesh(config, model, target)
        rows = config.rollout.num_rows // sampling_shards(config, mesh, target.num_processes)
        busy = _busy_rows(config, target, rows)
        decoding = sum(size <= busy for size in _row_sizes(config, target, rows))
        reading = len(append_sizes(target.platform, config.context_tokens))
        num_compiled = min(NUM_COMPILED, decoding + reading)
        held["compiled programs"] = num_compiled * model.num_layers * LAYER_CODE_BYTES
    return _nonzero({name: size // target.num_local for name, size in held.items()})


def _with_process(
    phase: Phase, config: ResolvedConfig, model: Architecture, target: Target
) -> Phase:
    """Adds to a phase on a CPU the process around it, and the compiler of its programs."""
    kept = _process(config, model, target) | phase.kept
    if phase.name == HANDING_OVER and config.stages == ("evaluate",):
        kept.pop("compiled programs", None)  # they come after the weights
    if phase.name not in COMPUTING:
        return replace(phase, kept=kept)
    # The sampler's layers are compiled one by one; others in a loop, unless they are not to be.
    layers = model.num_layers if phase.name == "rollout" or not config.model.scan_layers else 1
    compiler = COMPILER_BYTES + layers * LAYER_COMPILER_BYTES
    if phase.name == "rollout":  # what is left of the last program is among the compiled ones
        compiler -= layers * LAYER_CODE_BYTES
    compiler //= target.num_local
    moments = phase.moments | {"compiling": {"compiler": compiler}}
    return replace(phase, kept=kept, moments=moments)


def cache_pages(config: ResolvedConfig, model: Architecture, target: Target) -> int:
    """Pages of each shard's cache.

    As many as `rollout.cache_gib` holds. By default what the plan leaves of a device, and no more
    than twice what `rollout.num_rows` trajectories of full length fill, the second half for those
    that wait. What they fill on a CPU, whose memory is others' too, and where a device samples
    while it updates.

    Raises:
        ValueError: what is configured does not hold one trajectory.
    """
    sampler = _Sampler.of(config, model, target)
    cache = sampler.cache
    pages = cache.fixed_pages(config, target.platform)
    if pages is not None:
        return pages
    moment = max(sum(terms.values()) for terms in sampler.moments.values())
    left = target.usable - sum(sampler.kept.values()) - moment
    return max(min(left // cache.page_bytes, 2 * cache.full), cache.pages_each)


def page_tokens(config: ResolvedConfig, model: Architecture, target: Target) -> int:
    """Tokens of a page of the kernels that are tried first."""
    return PAGE_TOKENS[_kernels(config, model, target)]


def _kernels(config: ResolvedConfig, model: Architecture, target: Target) -> str:
    """Name of the attention kernels that are tried first; refuses what the run would."""
    own = config.model
    model.check_kernels(target.platform, experts=own.experts, dtype=own.dtype)
    return decide(own.attention, target.platform, model.head_dim, own.dtype)[0]


@dataclass(frozen=True, kw_only=True)
class _Sampler:
    """The sampler's memory on one device, in bytes."""

    cache: CacheSizes
    kept: dict[str, int]  # without the cache
    moments: dict[str, dict[str, int]]

    @classmethod
    def of(cls, config: ResolvedConfig, model: Architecture, target: Target) -> _Sampler:
        """Builds the terms for a run's rollouts and evaluations."""
        mesh = target_mesh(config, model, target)
        terms = ModelTerms(model, mesh)
        chunk_tokens = config.rollout.chunk_tokens
        dtype = jnp.dtype(config.model.dtype)
        kernels = _kernels(config, model, target)
        page = page_tokens(config, model, target)
        cache = CacheSizes.of(config, model, mesh, target.num_processes, page)
        token_bytes = cache.page_bytes // page
        is_short = target.platform == "cpu" and dtype.itemsize < 4
        upcast = 4 // dtype.itemsize if is_short and not MULTIPLIES_BFLOAT16 else 1
        busy = _busy_rows(config, target, cache.rows)
        is_copied = copies_past(kernels, target.platform)
        past = busy * cache.pages_each * cache.page_bytes if is_copied else 0
        read = append_sizes(target.platform, config.context_tokens)[-1]
        # Of each turn of the XLA loop over pages.
        block = append_block(target.platform, model.num_heads, model.num_kv_heads)
        turn_tokens = read // block * TURN_TOKENS
        read_values = terms.layer.read_activations
        if terms.experts is not None and target.platform != "cpu":
            read_values -= terms.experts.read_reused
        is_recorded = config.model.replay and "train" in config.stages
        routed = 2 * is_recorded * _bytes_of_token(model.recorded)  # by layer, and by token
        moments = {
            "decode": {
                "rows' past": past,
                "the chunk's keys and values": 2 * busy * chunk_tokens * token_bytes,
                "logits": 3 * busy * terms.logits * 4,
                "recorded experts": busy * chunk_tokens * routed,
            },
            "reading": {
                "activations": read * read_values * dtype.itemsize * upcast,
                "keys and values": 2 * turn_tokens * token_bytes // model.num_layers * upcast,
                "attention scores": 3 * read * terms.heads * TURN_TOKENS * 4,
                "recorded experts": read * routed,
            },
        }
        if is_short:
            # A CPU computes with float32 copies of values of two bytes, of the whole cache too. For
            # a chunk of steps it makes them once, the table of ids among them. Where tokens are
            # read, about half the layers are copied at a time: some before their turn.
            count = _Counts.of(model, mesh)
            held_pages = cache.fixed_pages(config, target.platform) or cache.full
            cache_bytes = cache.page_bytes * held_pages
            layers = count.decode_params - count.whole_tables
            if upcast > 1 or busy == 1:
                copied = 2 * cache_bytes + 4 * (layers + count.table(model))
                moments["decode"]["float32 copies"] = copied
            if upcast > 1:
                moments["reading"]["float32 copies"] = 2 * cache_bytes + 4 * layers // 2
        tower = model.tower
        if tower is not None:
            added = read * tower.num_added * model.width * dtype.itemsize
            moments["reading"]["images, added in first layers"] = added
            patches = config.image_tokens * tower.unit
            activations = patches * tower.memory_terms().read_activations
            moments["images"] = {
                "patches": 4 * patches * (tower.patch_values + tower.place_values),
                "activations of patches": activations * dtype.itemsize * upcast,
                "attention scores of patches": 2 * 4 * tower.num_scores(patches),
            }
            values = config.image_tokens * (1 + tower.num_added) * model.width
            for terms_of_moment in moments.values():
                terms_of_moment["images, seen last"] = values * dtype.itemsize
        is_apart = config.mesh.rollout_devices or _is_given_up(config)
        kept = {} if is_apart else _state(config, model, mesh, "train")
        kept["decode weights"] = _decode_weights(config, model, target)
        held, searching = _search_bytes(config, target)
        return cls(
            cache=cache,
            kept=kept | held | searching,
            moments=moments,
        )


def _busy_rows(config: ResolvedConfig, target: Target, rows: int) -> int:
    """Rows of the largest decoding program that a device comes to run.

    An evaluation alone, of a part of the questions, may ask fewer than there are rows.
    """
    asked = rows
    if "train" not in config.stages and config.eval.max_tasks:
        is_greedy = {*config.eval.final_suites} == {"greedy"}
        samples = 1 if is_greedy else config.eval.samples
        asked = (len(config.tasks.eval.sources) or 1) * config.eval.max_tasks * samples
    return next(size for size in _row_sizes(config, target, rows) if size >= min(asked, rows))


def _row_sizes(config: ResolvedConfig, target: Target, rows: int) -> list[int]:
    return row_sizes(target.platform, rows, config.model.dtype)


@dataclass(frozen=True)
class _Counts:
    """Numbers of parameters on one device."""

    params: int  # split as in training
    tables: int  # of these, outside the layers
    decode_params: int  # split as in decoding, over tensor only
    whole_tables: int  # of these, embedding and output layer
    whole_layer: int  # of these, one layer
    gathered_layer: int  # of this, what is split further in training

    def table(self, model: Architecture) -> int:
        """Counts the table of ids, whole; an output layer of its own has as many."""
        return self.whole_tables // (1 if model.tie_embeddings else 2)

    @classmethod
    @functools.cache
    def of(cls, model: Architecture, mesh: Any) -> _Counts:
        """Counts the parameters of a model on a mesh."""
        params = model.abstract_params()
        train, decode = param_shardings(mesh, model), param_shardings(mesh, model, for_decode=True)
        layers = [
            (math.prod(whole.shard_shape(leaf.shape)), math.prod(own.shard_shape(leaf.shape)))
            for leaf, whole, own in zip(
                *(jax.tree.leaves(tree["blocks"]) for tree in (params, decode, train)), strict=True
            )
        ]
        total, whole = num_values(params, train), num_values(params, decode)
        inside = [name for name in params if name in entries_with_layers(model)]
        return cls(
            params=total,
            tables=total - sum(num_values(params[name], train[name]) for name in inside),
            decode_params=whole,
            whole_tables=whole - sum(num_values(params[name], decode[name]) for name in inside),
            whole_layer=sum(size for size, _ in layers) // model.num_layers,
            gathered_layer=sum(size for size, own in layers if own < size) // model.num_layers,
        )


@functools.cache
def _num_params(model: Architecture) -> int:
    return num_values(model.abstract_params())


def _split(size: int, num_shards: int) -> int:
    """A device's part of a dimension; one that does not divide is whole, as `sharding` has it."""
    return size if size % num_shards else size // num_shards


def _policy_weights(config: ResolvedConfig, model: Architecture, mesh: Any) -> PolicyWeights:
    """The configured policy's weights on the mesh, of a device."""
    dtype = jnp.dtype(config.model.dtype)
    policy = policy_architecture(config, model)
    if policy.around is None:
        return _plain_weights(policy, frozen_entries(config, policy), mesh, dtype)
    around: Any = importlib.import_module(policy.around.plan)
    weights: PolicyWeights = around.policy_weights(policy, mesh, dtype)
    return weights


@functools.cache
def _plain_weights(
    model: Architecture, frozen: tuple[str, ...], mesh: Any, dtype: np.dtype
) -> PolicyWeights:
    """Counts the weights of a model without an adapter, some of them frozen."""
    trained, others = (
        num_values(part.abstract_params(), param_shardings(mesh, part))
        for part in model.parts(frozen)
    )
    cast = cast_leaves(model, leaves(model, mesh), dtype)
    return PolicyWeights(
        trained=trained,
        base_bytes=4 * others,
        cast_bytes=sum(cast.values()),
        cast_tables=sum(
            size for path, size in cast.items() if path[0] not in entries_with_layers(model)
        ),
    )


def _state(config: ResolvedConfig, model: Architecture, mesh: Any, stage: str) -> dict[str, int]:
    """Bytes that stay on a device from step to step: weights, moments, and the reference policy."""
    policy = _policy_weights(config, model, mesh)
    params = 4 * policy.trained
    state = {"frozen weights": policy.base_bytes} if policy.base_bytes else {}
    state["parameters"] = params
    if stage != "evaluate" and not config.optimizer_section(stage).offload:
        state["optimizer state"] = _moment_bytes(config, model, mesh, stage)
    if stage == "train" and config.kl.coef and config.kl.anchor == "ref":
        state["reference parameters"] = params
    return state


def _between(
    config: ResolvedConfig, model: Architecture, target: Target, stage: str
) -> dict[str, int]:
    """Bytes on a device between two phases of a stage, where no cache and no batch is.

    The sampler has its weights from right after an update on.
    """
    is_freed = stage == "evaluate" and _is_given_up(config)
    held = {} if is_freed else _state(config, model, target_mesh(config, model, target), stage)
    if stage != "sft" and not config.mesh.rollout_devices:
        held["decode weights"] = _decode_weights(config, model, target)
    return held | _search_bytes(config, target)[0]


def _search_bytes(config: ResolvedConfig, target: Target) -> tuple[dict[str, int], dict[str, int]]:
    if (name := IN_MEMORY.get(config.search.engine)) is None:
        return {}, {}
    search_bytes = pkgutil.resolve_name(name)
    held: dict[str, int]
    held, searching = search_bytes(config, target.num_passages, target.num_local, target.platform)
    return held, searching


IN_MEMORY = dict.fromkeys(("dense", "hybrid"), "jaxrl.extras.dense.memory:search_bytes")
"""Search engines that lie on devices, by what knows how much of them."""


def _decode_weights(config: ResolvedConfig, model: Architecture, target: Target) -> int:
    """Bytes of the sampler's weights on one device."""
    mesh, policy = target_mesh(config, model, target), policy_architecture(config, model)
    count, dtype = _Counts.of(model, mesh), jnp.dtype(config.model.dtype)
    head = _head_bytes(config, model, target) * count.table(model)
    if policy.around is None:
        return dtype.itemsize * count.decode_params + head
    is_alone = target.num_processes == 1 and not config.mesh.rollout_devices
    # A CPU's sampler has its layers apart.
    may_share = is_alone and target.platform != "cpu" and not _is_given_up(config)
    plan = importlib.import_module(policy.around.plan)
    own: int = plan.decode_bytes(policy, mesh, dtype, may_share=may_share)
    return own + head * model.tie_embeddings  # it knows of a table that is a parameter


def _head_bytes(config: ResolvedConfig, model: Architecture, target: Target) -> int:
    """Bytes that a value of the sampler's output table takes beside the model's in `model.dtype`.

    A tied model has a copy on a CPU, and in a dtype of its own anywhere.
    """
    itemsize = jnp.dtype(config.model.dtype).itemsize
    head = jnp.dtype(config.model.head_dtype or config.model.dtype).itemsize
    if not model.tie_embeddings:
        return head - itemsize
    return head if target.platform == "cpu" or config.model.head_dtype else 0


def _moment_bytes(config: ResolvedConfig, model: Architecture, mesh: Any, stage: str) -> int:
    """Bytes of the optimizer's state on one device: two values a parameter, one perhaps short."""
    itemsize = jnp.dtype(config.optimizer_section(stage).moments_dtype).itemsize
    num_moments = _num_moments(_trained(config, model), mesh)
    return 4 * num_moments - (4 - itemsize) * _policy_weights(config, model, mesh).trained


def _trained(config: ResolvedConfig, model: Architecture) -> Any:
    policy = policy_architecture(config, model)
    return policy.parts(frozen_entries(config, policy))[0]


@functools.cache
def _num_moments(trained: Declared, mesh: Any) -> int:
    """Values of the optimizer's state on one device; no setting changes how many there are."""
    optimizer = make_optimizer(
        optimizer_settings(resolve_names(default_config(), needs_data=False), "train")
    )
    moments = jax.eval_shape(optimizer.init, trained.abstract_params())
    return num_values(moments, state_shardings(mesh, trained, optimizer).opt_state)


def _shape(config: ResolvedConfig, model: Architecture, target: Target, stage: str) -> BatchShape:
    """Shapes of a stage's mini-batches, sft or train."""
    mesh = target_mesh(config, model, target)
    name = _kernels(config, model, target)
    shards = num_batch_shards(mesh) if SHARES_PROMPTS[name] else 0
    return batch_shape(config, stage, shards, mesh.shape["context"], model)


def _batch_bytes(config: ResolvedConfig, shape: BatchShape, shards: int, stage: str) -> int:
    """Bytes of a step's mini-batches: six arrays of four bytes, a mask, and the method's own."""
    tokens = shape.num_micro * shape.micro_rows * shape.row_tokens // shards
    of_token = 25 + (_bytes_of_token(shape.tower.arrays) if shape.tower else 0)
    if stage == "sft":
        return of_token * tokens
    num_more = len(token_fields(config.optimizer, config.filter, config.kl))
    of_token += _bytes_of_token(shape.token_arrays)
    return config.optimizer.num_minibatches * (of_token + 4 * num_more) * tokens


def _bytes_of_token(arrays: Mapping[str, TokenArray]) -> int:
    return sum(array.num_bytes for array in arrays.values())


def _nonzero(terms: dict[str, int]) -> dict[str, int]:
    return {name: size for name, size in terms.items() if size}


def _shapes(config: ResolvedConfig, model: Architecture, target: Target) -> dict[str, str]:
    """The largest shapes of the programs, over all devices."""
    rollout = config.rollout
    shapes = {}
    for stage in ("sft", "train"):
        if stage in config.stages:
            shape = _shape(config, model, target, stage)
            b, T = shape.micro_rows, shape.row_tokens
            _, chunk = chunks_of(b * T, config.model.logits_chunk_tokens)
            shapes[f"{stage} update"] = (
                f"{shape.num_micro} micro-batches of {b} rows x {T} tokens; logits of "
                f"{chunk} x {model.vocab_size}"
            )
    if {"train", "evaluate"} & set(config.stages):
        sizes = append_sizes(target.platform, config.context_tokens)
        page = page_tokens(config, model, target)
        shapes["rollout"] = (
            f"decode {rollout.chunk_tokens} steps of up to {rollout.num_rows} rows over up to "
            f"{config.context_tokens} tokens; read up to {sizes[-1]} tokens on a device; cache "
            f"{cache_pages(config, model, target)} pages x {page} tokens on a device"
        )
    return shapes

"""Compiled memory of a run's programs, to compare with the memory plan.

Nothing is allocated: the programs are compiled for abstract arrays. As a module it prints JSON by
model and mesh, for virtual CPU devices, or for absent TPUs if libtpu is installed:

    python -m tests.compiled_memory [--model=tiny,0.5b] [--mesh=1x1x1,2x2x2] [--layers=2]
        [--parts=update,score] [--keys model.remat=names] [--topology=v5p:2x2x2]
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import itertools
import json
import math
import re
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from jaxrl.builders.capacity import GIB
from jaxrl.builders.method import build_method, build_optimizer_settings, compute_batch_shape
from jaxrl.builders.method import build_policy_architecture as architecture_of
from jaxrl.builders.resolved import ResolvedConfig, resolve_names
from jaxrl.config import default_config
from jaxrl.extras.delta_net.qwen3_5 import Qwen35Config
from jaxrl.extras.hybrid_moe.qwen3_5_moe import Qwen35MoeConfig
from jaxrl.extras.plan import advice, memory
from jaxrl.models.attention.choice import select_kernels
from jaxrl.models.output import LOGIT_CAPACITIES
from jaxrl.models.policy import Model
from jaxrl.models.qwen import QwenConfig
from jaxrl.models.registry import read_architecture
from jaxrl.runtime import sharding
from jaxrl.sampling.buckets import list_prefill_buckets
from jaxrl.sampling.decode import Programs, should_scan_layers
from jaxrl.sampling.next_token import FULL
from jaxrl.training.method import has_kl_loss, needs_old_logprobs, uses_token_kl_weights
from jaxrl.training.optimizer import make_optimizer
from jaxrl.training.packing import BatchShape
from jaxrl.training.policy_loss import make_policy_loss
from jaxrl.training.update import ScoreStep, UpdateStep, init_state, make_state_shardings
from jaxrl.types import Batch
from tests.programs import make_batch, make_sampler_inputs

PARTS = ("update", "score", "decode", "prefill")


def qwen3(vocab_size: int, width: int, mlp_width: int, num_layers: int, heads: int) -> QwenConfig:
    """Return a Qwen3 with tied embeddings; narrow models have narrow heads."""
    return QwenConfig(
        vocab_size=vocab_size,
        width=width,
        mlp_width=mlp_width,
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=heads // 2,
        head_dim=128 if width >= 1024 else 32,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        tie_embeddings=True,
        qkv_bias=False,
        output_bias=False,
        qk_norm=True,
        max_positions=32768,
    )


MODELS = {
    "tiny": qwen3(4096, 256, 768, 4, 8),
    "0.5b": dataclasses.replace(
        qwen3(151_936, 896, 4864, 24, 14), num_kv_heads=2, head_dim=64, qk_norm=False, qkv_bias=True
    ),
    "0.6b": qwen3(151_936, 1024, 3072, 28, 16),
    "1.7b": qwen3(151_936, 2048, 6144, 28, 16),
    "7b": dataclasses.replace(
        qwen3(152_064, 3584, 18_944, 28, 28),
        num_kv_heads=4,
        qk_norm=False,
        qkv_bias=True,
        tie_embeddings=False,
    ),
}


def qwen3_5(dense: QwenConfig, **sizes: int) -> Qwen35Config:
    """Return a Qwen3.5 with three delta nets before each layer with attention."""
    return Qwen35Config(
        **vars(dense),
        attention_layers=tuple(range(3, dense.num_layers, 4)),
        rotary_fraction=0.25,
        conv_width=4,
        **sizes,
    )


MODELS["hybrid-tiny"] = qwen3_5(
    MODELS["tiny"], num_key_heads=4, num_value_heads=8, key_dim=32, value_dim=32
)
MODELS["hybrid-moe-tiny"] = Qwen35MoeConfig(
    **vars(MODELS["hybrid-tiny"]),
    **{"expert_width": 128, "num_experts": 8, "top_k": 2, "renormalize": True},
    **{"shared_width": 128, "expert_layers": (0, 1, 2, 3)},
)
MODELS["hybrid-0.8b"] = qwen3_5(
    dataclasses.replace(qwen3(248_320, 1024, 3584, 24, 8), num_kv_heads=2, head_dim=256),
    **{"num_key_heads": 16, "num_value_heads": 16, "key_dim": 128, "value_dim": 128},
)
MIXTURE = Path(__file__).parents[1] / "configs/models/qwen3-30b-a3b"
MODELS["30b-a3b"] = read_architecture(MIXTURE)
MODELS["4b"] = read_architecture(MIXTURE.with_name("qwen3-4b"))


def small_run(
    data: int, fsdp: int, tensor: int, context: int = 1, expert: int = 1
) -> ResolvedConfig:
    """Return the default configuration with a micro-batch that is whole on the mesh."""
    config = default_config()
    config.mesh.update(data=data, fsdp=fsdp, context=context, expert=expert, tensor=tensor)
    config.optimizer.micro_rows = 2 * data * fsdp * expert
    config.rollout.max_total_tokens = 1024
    config.rollout.max_prompt_tokens = 256
    config.rollout.max_num_seqs = 16 * data * fsdp * context * expert
    return resolve_names(config, needs_data=False)


def like(tree: Any, shardings: Any) -> Any:
    """Abstract arrays with their shardings."""
    return jax.tree.map(
        lambda leaf, s: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=s), tree, shardings
    )


def policy_of(config: ResolvedConfig, model: QwenConfig, mesh: Any) -> Model:
    """Return the policy of a run."""
    return Model(
        architecture_of(config, model).with_kernels(mesh, experts=config.model.experts),
        mesh,
        num_tokens=model.vocab_size,
        dtype=jnp.dtype(config.model.dtype),
        attention=select_kernels(config.model.attention, mesh, model),
        remat=config.model.remat,
        scan_layers=config.model.scan_layers,
        logits_chunk_tokens=config.model.logits_chunk_tokens,
    )


def trainer_programs(config: ResolvedConfig, policy: Model) -> dict[str, Any]:
    """Return functions that lower the train stage's gradients, optimizer and scoring."""
    method, trained, mesh = build_method(config), policy.trained, policy.mesh
    optimizer = make_optimizer(method.optimizer)
    step = UpdateStep(policy, make_policy_loss(method), optimizer)
    abstract = jax.eval_shape(
        lambda p: init_state(p, mesh, trained, optimizer), trained.make_abstract_params()
    )
    state = like(abstract, make_state_shardings(mesh, trained, optimizer))
    batch = abstract_batch(config, policy)
    whole, index = policy.architecture, jax.ShapeDtypeStruct((), jnp.int32)
    params = like(whole.make_abstract_params(), sharding.make_param_shardings(mesh, whole))
    sums = jax.eval_shape(
        step.gradient.init_sums.function, params, policy.without_attachments(batch)
    )
    sums = dataclasses.replace(
        sums, gradients=like(sums.gradients, sharding.make_param_shardings(mesh, trained))
    )
    logprobs = batch.rollout_logprobs
    # Unused arguments are on the device all the same.
    run = partial(jax.jit, donate_argnums=1, static_argnums=5, keep_unused=True)
    rest = (batch, index, index, max(LOGIT_CAPACITIES), abstract_patches(config, policy))
    add, score = step.gradient.loop.program, ScoreStep(policy, temperature=1.0).loop.program
    apply = jax.jit(step.apply.function, donate_argnums=0)
    return {
        "update": partial(run(add.function).lower, params, sums, *rest),
        "optimizer": partial(apply.lower, state, sums, None),
        "score": partial(run(score.function).lower, params, logprobs, *rest),
    }


def abstract_batch(config: ResolvedConfig, policy: Model) -> Batch:
    """Return an abstract mini-batch of the train stage."""
    shape = shape_of(config, policy)
    whole = shape.num_micro, shape.micro_rows, shape.row_tokens
    is_filled = {
        "old_logprobs": needs_old_logprobs(config.optimizer, config.filter, config.loss),
        "ref_logprobs": has_kl_loss(config.kl) and config.kl.anchor == "ref",
        "kl_weights": uses_token_kl_weights(config.kl),
    }
    fields = [name for name, is_used in is_filled.items() if is_used]
    given = {**shape.token_arrays, **(shape.tower.input_arrays if shape.tower else {})}
    batch = make_batch(
        whole,
        **dict.fromkeys(fields, jax.ShapeDtypeStruct(whole, jnp.float32)),
        token_arrays={
            name: jax.ShapeDtypeStruct((*whole, *spec.shape), spec.dtype)
            for name, spec in given.items()
        },
    )
    return like(batch, jax.tree.map(lambda _: sharding.make_batch_sharding(policy.mesh), batch))


def shape_of(config: ResolvedConfig, policy: Model) -> BatchShape:
    """Return the shape of the mini-batches of the train stage."""
    return compute_batch_shape(
        config, "train", policy.num_prompt_shards, policy.num_pieces, policy.architecture
    )


def abstract_patches(config: ResolvedConfig, policy: Model) -> Any:
    """Return abstract patches of a micro-batch and their coordinates, or None."""
    tower, shape = policy.architecture.tower, shape_of(config, policy)
    if tower is None:
        return None
    shards = sharding.count_batch_shards(policy.mesh)
    whole = (shards, shape.micro_rows // shards * shape.row_units * tower.num_patches_per_token)
    arrays = {
        "patches": jax.ShapeDtypeStruct((*whole, tower.num_values_per_patch), policy.dtype),
        "coords": jax.ShapeDtypeStruct((*whole, tower.num_coords), jnp.int32),
    }
    return like(arrays, jax.tree.map(lambda _: sharding.make_piece_sharding(policy.mesh), arrays))


def sampler_programs(
    config: ResolvedConfig, model: QwenConfig, devices: list[Any], target: memory.Target
) -> dict[str, Any]:
    """Return functions that lower the largest decode and prefill of one process."""
    rollout, dtype = config.rollout, jnp.dtype(config.model.dtype)
    sizes = dict(memory.make_target_mesh(config, model, target).shape)
    if target.num_processes > 1:
        sizes = {"data": -1, "fsdp": 1, "expert": sizes["expert"], "tensor": sizes["tensor"]}
    mesh, num_rows = sharding.make_mesh(**sizes, devices=devices), rollout.max_num_seqs
    num_rows //= target.num_processes
    kernels = select_kernels(config.model.attention, mesh, model)
    policy = architecture_of(config, model)
    sampler = Programs(
        architecture=policy.with_kernels(mesh, experts=config.model.experts),
        mesh=mesh,
        kernels=kernels,
        num_tokens=model.vocab_size,
        num_steps=config.rollout.chunk_tokens,
        num_rows=num_rows,
        dtype=dtype,
        scan_layers=should_scan_layers(
            config.model.scan_layers, target.platform, has_adapter=policy.wrapper is not None
        ),
    )
    declared = sampler.architecture
    shards = sharding.count_piece_shards(mesh)
    num_pages = shards * memory.count_cache_pages(config, model, target)
    by_row, by_page = sharding.make_piece_sharding(mesh), sharding.cache_sharding(mesh)
    whole = sharding.make_replicated_sharding(mesh)
    num_states = shards * memory._get_cache_sizes(config, model, target).num_states
    cache = jax.eval_shape(lambda: sampler.init_cache(num_pages, kernels.page_tokens, num_states))
    cache = like(cache, jax.tree.map(lambda _: by_page, cache))
    state = jax.eval_shape(sampler.init_decode_state)
    last = like(state, jax.tree.map(lambda _: by_row, state))
    shardings = sharding.decode_shardings(mesh, declared, scan_layers=sampler.scan_layers)
    abstract = jax.eval_shape(sampler.convert_params, declared.make_abstract_params())
    if model.tie_embeddings and target.platform != "cpu":
        abstract.pop("lm_head", None)  # a copy that only a CPU has
    weights = like(abstract, {name: shardings[name] for name in abstract})

    def on_all(dimensions: tuple[int, ...], dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dimensions, dtype, sharding=whole)

    read = list_prefill_buckets(target.platform, rollout.max_total_tokens)[-1]
    rows, blocks, stops = make_sampler_inputs(
        sampler,
        model.vocab_size,
        num_rows=num_rows,
        num_blocks=shards * read // sampler.block_tokens,
        num_pages=-(-rollout.max_total_tokens // kernels.page_tokens),
        num_stop_states=40,
        make=on_all,
    )
    decode = jax.jit(sampler.decode_chunk, donate_argnums=1, static_argnums=7)
    prefill = jax.jit(sampler.prefill, donate_argnums=1, keep_unused=True)
    scalar = on_all((), jnp.float32)
    return {
        "decode": partial(decode.lower, weights, cache, last, rows, stops, scalar, scalar, FULL),
        "prefill": partial(prefill.lower, weights, cache, blocks),
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
    """Bytes that a program needs of one device."""

    total: int  # arguments, results that alias no argument, temporaries
    arguments: int

    @property
    def temporaries(self) -> int:
        """Return the bytes besides the arguments."""
        return self.total - self.arguments


def compiled(program: Any, platform: str) -> Compiled:
    """Compile a lowered program.

    For a TPU, `memory_analysis` overestimates: one program of 1.47 GiB compiled for devices of 1.22
    and had a heap of 1.11. So the heap size is read from the report in the compiler's dumps.
    """
    if platform != "tpu":
        sizes = program.compile().memory_analysis()
        held = sizes.argument_size_in_bytes + sizes.output_size_in_bytes - sizes.alias_size_in_bytes
        return Compiled(
            total=held + sizes.temp_size_in_bytes, arguments=sizes.argument_size_in_bytes
        )
    with tempfile.TemporaryDirectory() as folder:
        sizes = program.compile(compiler_options={"xla_dump_to": folder}).memory_analysis()
        [report] = Path(folder).glob("*memory-usage-report.txt")
        total = re.match(r"Memory Space: default .*\nTotal bytes: (\d+)", report.read_text())
        assert total, f"{report} has another format"
        return Compiled(total=int(total[1]), arguments=sizes.argument_size_in_bytes)


def compiled_bytes(program: Any, platform: str) -> int:
    """Return the bytes that a lowered program needs on one device; see `compiled`."""
    return compiled(program, platform).total


def beside(config: ResolvedConfig, policy: Model) -> int:
    """Return the bytes on a device besides the arguments of scoring or adding gradients."""
    optimizer, trained = make_optimizer(build_optimizer_settings(config, "train")), policy.trained
    moments = jax.eval_shape(optimizer.init, trained.make_abstract_params())
    size = held_bytes(
        like(moments, make_state_shardings(policy.mesh, trained, optimizer).opt_state)
    )
    if config.kl.coef and config.kl.anchor == "ref":
        params = trained.make_abstract_params()
        size += held_bytes(like(params, sharding.make_param_shardings(policy.mesh, trained)))
    others = config.optimizer.num_minibatches - 1
    size += others * held_bytes(abstract_batch(config, policy))
    return size + held_bytes(abstract_patches(config, policy))  # of the next micro-batch


def held_bytes(tree: Any) -> int:
    """Return the bytes of abstract arrays on one device."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def programs_of(
    config: ResolvedConfig,
    model: QwenConfig,
    target: memory.Target,
    devices: Sequence[Any],
    part: str,
) -> dict[str, tuple[Any, int]]:
    """Return functions that lower the programs of a part, with bytes besides the arguments."""
    if part in ("decode", "prefill"):
        local = list(devices)[: target.num_local]
        return {part: (sampler_programs(config, model, local, target)[part], 0)}
    policy = policy_of(config, model, sharding.make_mesh(**config.mesh, devices=list(devices)))
    programs, more = trainer_programs(config, policy), beside(config, policy)
    if part == "score":
        return {part: (programs[part], more)}
    return {part: (programs[part], more), "optimizer": (programs["optimizer"], 0)}


def planned_bytes(
    config: ResolvedConfig, model: QwenConfig, target: memory.Target, part: str
) -> int:
    """Return the planned bytes of one device for one of `PARTS`."""
    if part in ("update", "score"):  # scoring needs less than an update
        return memory.plan_update(config, model, target, "train").peak_bytes
    rollout = memory.plan_rollout(config, model, target)
    names = ("decode weights", "KV cache", "states of recurrent layers")
    held = sum(rollout.persistent.get(name, 0) for name in names)
    return held + sum(rollout.moments[part].values())


def compare(
    config: ResolvedConfig,
    model: QwenConfig,
    target: memory.Target,
    devices: Sequence[Any],
    parts: Sequence[str] = PARTS,
) -> dict[str, tuple[int, int]]:
    """Return planned and compiled bytes of one device for each part."""
    sizes = {}
    for part in parts:
        programs = programs_of(config, model, target, devices, part).values()
        needed = max(compiled_bytes(lower(), target.platform) + more for lower, more in programs)
        sizes[part] = planned_bytes(config, model, target, part), needed
    return sizes


def shipped_on(
    name: str,
    folder: str,
    target: memory.Target,
    num_layers: int = 0,
    keys: Mapping[str, Any] | None = None,
) -> tuple[ResolvedConfig, QwenConfig]:
    """Return a shipped configuration with the micro-batch that fits, and its model.

    Args:
        name: Module in `configs`.
        folder: Folder of the model in `configs/models`.
        target: Devices of the run.
        num_layers: Number of layers if not that of the model.
        keys: Changed keys of the configuration.
    """
    config = importlib.import_module(f"configs.{name}").get_config()
    with config.unlocked():
        config.model.dtype = "bfloat16"
        config.search.engine = "local"  # dense search has its own programs
        config.update_from_flattened_dict(dict(keys or {}))
    model = _cut(
        read_architecture(Path(__file__).parents[1] / "configs/models" / folder), num_layers
    )
    resolved = resolve_names(config, needs_data=False)
    advice.choose_micro_rows(resolved, model, target, must_fit=False)
    return resolved, model


def _cut(model: Any, num_layers: int) -> Any:
    if not num_layers:
        return model
    changes: dict[str, Any] = {"num_layers": num_layers}
    if model.num_experts:
        changes["expert_layers"] = tuple(i for i in model.expert_layers if i < num_layers)
    if model.num_recurrent_layers:
        changes["attention_layers"] = tuple(i for i in model.attention_layers if i < num_layers)
    return dataclasses.replace(model, **changes)


def key_and_value(given: str) -> tuple[str, Any]:
    """Split `key=value`; a value that is not JSON is text."""
    key, _, value = given.partition("=")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value


def main(argv: Sequence[str] | None = None) -> None:
    """Print planned and compiled bytes of one device, by model, mesh and program."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="tiny", help=f"out of {', '.join(MODELS)}")
    parser.add_argument("--mesh", default="1x1x1", help="data x fsdp x tensor")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--layers", type=int, default=0, help="so many instead of the model's")
    parser.add_argument("--keys", nargs="*", default=(), help="of the configuration: key=value")
    parser.add_argument("--parts", default=",".join(PARTS), help="programs")
    parser.add_argument("--topology", help="TPUs to compile for, such as v5p:2x2x2; default: a CPU")
    flags = parser.parse_args(argv)
    meshes = {mesh: tuple(map(int, mesh.split("x"))) for mesh in flags.mesh.split(",")}
    if flags.topology:
        devices = topologies.get_topology_desc(platform="tpu", topology_name=flags.topology).devices
    else:
        jax.config.update("jax_num_cpu_devices", max(map(math.prod, meshes.values())))
        devices = jax.devices()
    sizes = {}
    for name, (mesh, shape) in itertools.product(flags.model.split(","), meshes.items()):
        model = _cut(MODELS[name], flags.layers)
        keys = {"model.dtype": flags.dtype, **dict(map(key_and_value, flags.keys))}
        if flags.topology:
            keys["rollout.cache_gib"] = 2.0  # not all that is left, so that temporaries show
        config = small_run(*shape).with_values(keys)
        target = memory.Target(
            platform=devices[0].platform, num_devices=math.prod(shape), memory_bytes=80 * GIB
        )
        local = list(devices)[: target.num_devices]
        for part, pair in compare(config, model, target, local, flags.parts.split(",")).items():
            sizes[f"{name} {mesh} {part}"] = pair
    print(json.dumps(sizes))


if __name__ == "__main__":
    main()

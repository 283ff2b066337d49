r"""The plan's figures beside those of the compiler's memory analysis of the same programs.

    python -m benchmarks.memory [--model=tiny,0.5b,0.6b,1.7b] [--mesh=1x1x1,2x2x2]
        [--dtype=float32,bfloat16] [--layers=2] [--parts=trainer,sampler] [--topology=v5p:2x2x2]
        [--json=FILE]

Nothing is allocated: the trainer's programs and the sampler's are compiled for shapes alone.
Devices of a CPU are made up, as many as the largest mesh needs. TPUs need not be there, but libtpu.
Their cache is of 2 GiB.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from ml_collections import ConfigDict
from rich.console import Console
from rich.table import Table

from jaxrl.config import default_config
from jaxrl.method import has_kl_loss, has_kl_weights
from jaxrl.models.attention.choice import choose
from jaxrl.models.output import QUARTERS
from jaxrl.models.policy import Model
from jaxrl.models.qwen import QwenConfig
from jaxrl.runtime import sharding
from jaxrl.runtime.plan import memory
from jaxrl.sampling.decode import BLOCK, Blocks, Rows, Sampler, StopTables, scans
from jaxrl.sampling.engine import append_sizes
from jaxrl.sampling.next_token import PLAIN
from jaxrl.training.minibatches import takes_own_logprobs
from jaxrl.training.optimizer import make_optimizer
from jaxrl.training.packing import train_shape
from jaxrl.training.policy_loss import make_policy_loss
from jaxrl.training.update import (
    ScoreStep,
    UpdateStep,
    batch_shardings,
    init_state,
    state_shardings,
)
from jaxrl.types import Batch

GIB = memory.GIB


PARTS = ("trainer", "sampler")


def qwen3(vocab_size: int, width: int, mlp_width: int, num_layers: int, heads: int) -> QwenConfig:
    """A Qwen3 with tied embeddings, heads half as wide as in the larger ones where it is tiny."""
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


def small_run(data: int, fsdp: int, tensor: int) -> ConfigDict:
    """The default configuration with a micro-batch that is whole on the mesh."""
    config = default_config()
    config.mesh.data, config.mesh.fsdp, config.mesh.tensor = data, fsdp, tensor
    config.optimizer.micro_rows = 2 * data * fsdp
    config.rollout.max_total_tokens = 1024
    config.rollout.max_prompt_tokens = 256
    config.rollout.num_rows = 16 * data * fsdp
    return config


def like(tree: Any, shardings: Any) -> Any:
    """Abstract arrays with their shardings."""
    return jax.tree.map(
        lambda leaf, s: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=s), tree, shardings
    )


def trainer_programs(config: ConfigDict, model: QwenConfig, mesh: Any) -> dict[str, Any]:
    """The train stage's update of micro-batches, its optimizer, and its scoring, compiled."""
    optimizer = make_optimizer(config.optimizer, 1)
    policy = Model(
        model,
        mesh,
        num_tokens=model.vocab_size,
        dtype=jnp.dtype(config.model.dtype),
        attention=choose(config.model.attention, mesh, model),
        remat=config.model.remat,
        scan_layers=config.model.scan_layers,
        logits_chunk_tokens=config.model.logits_chunk_tokens,
    )
    step = UpdateStep(policy, make_policy_loss(config), optimizer)
    abstract = jax.eval_shape(
        lambda p: init_state(p, mesh, model, optimizer), model.abstract_params()
    )
    state = like(abstract, state_shardings(mesh, model, optimizer))
    batch = abstract_batch(config, policy)
    params, index = state.params, jax.ShapeDtypeStruct((), jnp.int32)
    sums = jax.eval_shape(step.gradient.begin.function, params, batch)
    sums = dataclasses.replace(
        sums, gradients=like(sums.gradients, sharding.param_shardings(mesh, model))
    )
    logprobs = batch.rollout_logprobs
    # What a program does not need is on the device all the same.
    run = partial(jax.jit, donate_argnums=1, static_argnums=5, keep_unused=True)
    rest, room = (batch, index, index), max(QUARTERS)
    add, score = step.gradient.add.program, ScoreStep(policy, temperature=1.0).add.program
    apply = jax.jit(step.apply.function, donate_argnums=0)
    return {
        "update": run(add.function).lower(params, sums, *rest, room).compile(),
        "optimizer": apply.lower(state, sums).compile(),
        "score": run(score.function).lower(params, logprobs, *rest, room).compile(),
    }


def abstract_batch(config: ConfigDict, policy: Model) -> Batch:
    """A mini-batch of the train stage for shapes alone."""
    shape = train_shape(config, policy.shards_with_prompts)
    whole = (shape.num_micro, shape.micro_rows, shape.row_tokens)
    ints, floats = (jax.ShapeDtypeStruct(whole, dtype) for dtype in (jnp.int32, jnp.float32))
    batch = Batch(
        token_ids=ints,
        segment_ids=ints,
        positions=ints,
        loss_mask=jax.ShapeDtypeStruct(whole, jnp.bool_),
        token_weights=floats,
        advantages=floats,
        rollout_logprobs=floats,
        old_logprobs=None if takes_own_logprobs(config) else floats,
        ref_logprobs=floats if has_kl_loss(config) and config.kl.anchor == "ref" else None,
        kl_weights=floats if has_kl_weights(config) else None,
    )
    return like(batch, batch_shardings(policy.mesh, batch))


def sampler_programs(
    config: ConfigDict, model: QwenConfig, mesh: Any, target: memory.Target
) -> dict[str, Any]:
    """The sampler's chunk of decoding steps and its reading of tokens, in their largest shapes."""
    rollout, dtype = config.rollout, jnp.dtype(config.model.dtype)
    kernels = choose(config.model.attention, mesh, model)
    sampler = Sampler(
        config=model,
        mesh=mesh,
        kernels=kernels,
        num_tokens=model.vocab_size,
        num_steps=rollout.chunk_tokens,
        num_rows=rollout.num_rows,
        dtype=dtype,
        scan_layers=scans(config.model.scan_layers, target.platform),
    )
    shards = sharding.num_batch_shards(mesh)
    num_pages = shards * memory.cache_pages(config, model, target)
    by_row, by_page = sharding.batch_sharding(mesh), sharding.cache_sharding(mesh)
    whole = sharding.replicated(mesh)
    cache = jax.eval_shape(lambda: sampler.empty_cache(num_pages, kernels.page_tokens))
    cache = like(cache, jax.tree.map(lambda _: by_page, cache))
    state = jax.eval_shape(sampler.empty_state)
    last = like(state, jax.tree.map(lambda _: by_row, state))
    shardings = sharding.decode_shardings(mesh, model, scan_layers=sampler.scan_layers)
    abstract = jax.eval_shape(sampler.weights, model.abstract_params())
    weights = like(abstract, {name: shardings[name] for name in abstract})

    def on_all(dimensions: tuple[int, ...], dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dimensions, dtype, sharding=whole)

    stops = StopTables(
        next_state=on_all((40, model.vocab_size), jnp.int8),
        is_hit=on_all((40, model.vocab_size), jnp.bool_),
        is_end=on_all((model.vocab_size,), jnp.bool_),
    )
    pages = -(-rollout.max_total_tokens // kernels.page_tokens)
    rows = Rows(
        source=on_all((rollout.num_rows,)),
        state=like(state, jax.tree.map(lambda _: whole, state)),
        tables=on_all((rollout.num_rows, pages)),
        keys=on_all((rollout.num_rows, 2), jnp.uint32),
    )
    num_blocks = shards * append_sizes(target.platform, rollout.max_total_tokens)[-1] // BLOCK
    blocks = Blocks(
        token_ids=on_all((num_blocks, BLOCK)),
        start=on_all((num_blocks,)),
        counts=on_all((num_blocks,)),
        tables=on_all((num_blocks, pages)),
    )
    decode = jax.jit(sampler.decode_chunk, donate_argnums=1, static_argnums=7)
    append = jax.jit(sampler.append, donate_argnums=1, keep_unused=True)
    one = on_all((), jnp.float32)
    return {
        "decode": decode.lower(weights, cache, last, rows, stops, one, one, PLAIN).compile(),
        "reading": append.lower(weights, cache, blocks).compile(),
    }


def compiled_bytes(program: Any) -> int:
    """What a compiled program needs of one device, its arguments included."""
    sizes = program.memory_analysis()
    held = sizes.argument_size_in_bytes + sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    return held + sizes.temp_size_in_bytes


def beside(config: ConfigDict, model: QwenConfig, mesh: Any) -> int:
    """What lies on a device while it scores or adds up gradients, and is no argument of that."""
    optimizer = make_optimizer(config.optimizer, 1)
    moments = jax.eval_shape(optimizer.init, model.abstract_params())
    size = held_bytes(like(moments, state_shardings(mesh, model, optimizer).opt_state))
    if config.kl.coef and config.kl.anchor == "ref":
        params = model.abstract_params()
        size += held_bytes(like(params, sharding.param_shardings(mesh, model)))
    return size


def held_bytes(tree: Any) -> int:
    """What abstract arrays take of one device."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def compare(
    config: ConfigDict, model: QwenConfig, devices: Sequence[Any], *, parts: Sequence[str] = PARTS
) -> dict[str, tuple[int, int]]:
    """For each program the planned and the compiled bytes of one device."""
    target = memory.Target(
        platform=devices[0].platform, num_devices=len(devices), memory_bytes=80 * GIB
    )
    mesh = sharding.make_mesh(**config.mesh, devices=list(devices))
    found = {}
    if "trainer" in parts:
        programs = trainer_programs(config, model, mesh)
        more = beside(config, model, mesh)
        sizes = {name: compiled_bytes(program) for name, program in programs.items()}
        update = memory.update_phase(config, model, target, "train")
        # The plan has no phase for scoring: the update is to need more.
        found["update"] = (update.peak, max(sizes["update"] + more, sizes["optimizer"]))
        assert sizes["score"] < sizes["update"]
    if "sampler" in parts:
        rollout = memory.rollout_phase(config, model, target)
        held = sum(rollout.kept[name] for name in ("decode weights", "KV cache"))
        for name, program in sampler_programs(config, model, mesh, target).items():
            planned = held + sum(rollout.moments[name].values())
            found[name] = (planned, compiled_bytes(program))
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny,0.5b,0.6b", help=f"out of {', '.join(MODELS)}")
    parser.add_argument("--mesh", default="1x1x1,2x2x2", help="data x fsdp x tensor")
    parser.add_argument("--dtype", default="float32", help="float32,bfloat16")
    parser.add_argument("--layers", type=int, default=0, help="so many instead of the model's")
    parser.add_argument("--parts", default=",".join(PARTS), help="of the programs")
    parser.add_argument(
        "--topology", help="of TPUs to compile for, such as v5p:2x2x2, by libtpu; default: a CPU"
    )
    parser.add_argument("--json", help="file for the rows, sizes in bytes")
    flags = parser.parse_args(argv)
    meshes = [tuple(int(size) for size in mesh.split("x")) for mesh in flags.mesh.split(",")]
    if flags.topology:
        devices = topologies.get_topology_desc(platform="tpu", topology_name=flags.topology).devices
    else:
        if jax.config.jax_platforms == "cpu":
            jax.config.update("jax_num_cpu_devices", max(math.prod(mesh) for mesh in meshes))
        devices = jax.devices()
    rows = []
    columns = ("model", "mesh", "dtype", "program", "plan, GiB", "compiler, GiB", "ratio", "s")
    table = Table(*columns)
    for name, mesh, dtype in itertools.product(
        flags.model.split(","), meshes, flags.dtype.split(",")
    ):
        config = small_run(*mesh)
        config.model.dtype = dtype
        if flags.topology:
            config.rollout.cache_gib = 2.0  # not all that is left: so temporaries show
        started = time.perf_counter()
        model = MODELS[name]
        if flags.layers:
            model = dataclasses.replace(model, num_layers=flags.layers)
        parts = flags.parts.split(",")
        results = compare(config, model, devices[: math.prod(mesh)], parts=parts)
        seconds = time.perf_counter() - started
        for program, (planned, compiled) in results.items():
            sizes = [f"{planned / GIB:.3f}", f"{compiled / GIB:.3f}", f"{planned / compiled:.2f}"]
            labels = {"model": name, "mesh": "x".join(map(str, mesh)), "dtype": dtype}
            rows.append({**labels, "program": program, "plan": planned, "compiler": compiled})
            table.add_row(*labels.values(), program, *sizes, f"{seconds:.0f}")
    Console(width=100).print(table)
    if flags.json:
        Path(flags.json).write_text(json.dumps(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

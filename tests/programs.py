"""Device programs of a tiny model, with abstract arguments."""

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from benchmarks.common import make_libtpu_environment
from jaxrl.config import default_config
from jaxrl.extras.kernels import attention_gpu as gpu
from jaxrl.extras.kernels import attention_tpu as tpu
from jaxrl.models.attention.choice import shard_attention
from jaxrl.models.attention.kernels import PAGE_TOKENS, SHARES_PROMPTS, AttentionKernels
from jaxrl.models.attention.reference import XLA
from jaxrl.models.qwen import QwenConfig
from jaxrl.runtime import sharding
from jaxrl.sampling.decode import DecodeRows, PrefillBlocks, Programs, StopTables
from jaxrl.sampling.next_token import FULL
from jaxrl.training import update
from jaxrl.training.policy_loss import make_policy_loss
from jaxrl.types import Batch
from tests.helpers import method_of

CONFIG = QwenConfig(
    vocab_size=64,
    width=32,
    mlp_width=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rope_theta=1e4,
    rms_norm_eps=1e-6,
    tie_embeddings=True,
    qkv_bias=False,
    output_bias=False,
    qk_norm=True,
    max_positions=128,
)

CUSTOM_CALLS = [
    jax.export.DisabledSafetyCheck.custom_call(name)
    for name in ("triton_kernel_call", "__gpu$xla.gpu.triton", "mosaic_gpu_v2")
]
"""Custom calls that `jax.export` must accept."""

GPU = jax.sharding.AbstractDevice(device_kind="NVIDIA H100", num_cores=None, platform="gpu")
"""Abstract device for Triton kernels: since 0.12, JAX needs to know what they run on."""


def for_gpu(kernel):
    """Wrap a kernel so that it can be lowered for `GPU`."""
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.sharding.AbstractMesh((1,), ("gpu",), auto, abstract_device=GPU)
    return jax.shard_map(kernel, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)


class Hopper:
    """Fake device with the attributes that tokamax kernels query."""

    platform = "gpu"
    device_kind = "NVIDIA H100 80GB HBM3"
    compute_capability = "9.0"
    core_count = 132


def pretend_hopper(monkeypatch):
    """Replace JAX's devices by an H100, for kernels that choose their lowering by device."""
    from jax.extend import backend

    monkeypatch.setattr(backend, "get_default_device", Hopper)
    monkeypatch.setattr(jax, "devices", lambda *_: [Hopper()])


def lowered_for_gpu(function, *arguments):
    """Lower a function for GPUs to text; its kernels must be wrapped by `for_gpu`."""
    lower = jax.export.export(function, platforms=["cuda"], disabled_checks=CUSTOM_CALLS)
    return lower(*arguments).mlir_module()


def shape(dimensions: tuple[int, ...], dtype: Any = jnp.int32) -> Any:
    return jax.ShapeDtypeStruct(dimensions, dtype)


def make_batch(dimensions: tuple[int, ...], **fields: Any) -> Batch:
    """Return an abstract batch with arrays of these dimensions."""
    ints, floats = shape(dimensions), shape(dimensions, jnp.float32)
    return Batch(
        token_ids=ints,
        segment_ids=ints,
        positions=ints,
        loss_mask=shape(dimensions, jnp.bool_),
        token_weights=floats,
        advantages=floats,
        rollout_logprobs=floats,
        **fields,
    )


def make_sampler_inputs(
    sampler: Programs,
    vocab_size: int,
    *,
    num_rows: int,
    num_blocks: int,
    num_pages: int,
    num_stop_states: int,
    make: Callable[..., Any] = shape,
) -> tuple[DecodeRows, PrefillBlocks, StopTables]:
    """Return abstract rows to decode, blocks to prefill, and stop tables."""
    has_states = sampler.architecture.num_recurrent_layers > 0
    state = jax.tree.map(
        lambda x: make(x.shape, x.dtype), jax.eval_shape(sampler.init_decode_state)
    )
    rows = DecodeRows(
        source=make((num_rows,)),
        state=state,
        tables=make((num_rows, num_pages)),
        keys=make((num_rows, 2), jnp.uint32),
        state_slots=make((num_rows,)) if has_states else None,
    )
    blocks = PrefillBlocks(
        token_ids=make((num_blocks, sampler.block_tokens)),
        start=make((num_blocks,)),
        counts=make((num_blocks,)),
        tables=make((num_blocks, num_pages)),
        state_slots=make((num_blocks,)) if has_states else None,
    )
    stops = StopTables(
        next_state=make((num_stop_states, vocab_size), jnp.int8),
        is_hit=make((num_stop_states, vocab_size), jnp.bool_),
        is_eos=make((vocab_size,), jnp.bool_),
    )
    return rows, blocks, stops


def kernels_on(mesh, name):
    """Return the kernels of that name as on an accelerator."""
    if name == "xla":
        return replace(XLA, past=None)
    module, attend_pages = tpu, tpu.attend_pages
    if name == "triton":
        module, attend_pages = gpu, for_gpu(gpu.attend_pages)
        mesh = mesh.abstract_mesh.update(abstract_device=GPU)
    return AttentionKernels(
        name=name,
        reason="for a test",
        attend_packed=shard_attention(module.attend_packed, mesh),
        attend_pages=attend_pages,
        page_tokens=PAGE_TOKENS[name],
        shares_prompts=SHARES_PROMPTS[name],
    )


def sampler_programs(
    config=CONFIG, *, device=None, kernels="xla", kind=FULL, num_pages=32, dtype=jnp.bfloat16,
    scan_layers=False,
):  # fmt: skip
    """Return decode and append with abstract arguments; the second argument is donated."""
    mesh = sharding.make_mesh(data=1, fsdp=1, tensor=1, devices=[device or jax.devices()[0]])
    kernels = kernels_on(mesh, kernels) if isinstance(kernels, str) else kernels
    sampler = Programs(
        architecture=config, mesh=mesh, kernels=kernels, num_tokens=config.vocab_size - 4,
        num_steps=4, num_rows=8, dtype=dtype, scan_layers=scan_layers,
    )  # fmt: skip
    num_states = 16 if config.num_recurrent_layers else 0
    cache = jax.eval_shape(lambda: sampler.init_cache(num_pages, kernels.page_tokens, num_states))
    state = jax.eval_shape(sampler.init_decode_state)
    rows, blocks, stops = make_sampler_inputs(
        sampler,
        config.vocab_size,
        num_rows=8,
        num_blocks=8,
        num_pages=16,  # more than a CPU copies at once
        num_stop_states=5,
    )
    scalar = shape((), jnp.float32)
    weights = jax.eval_shape(sampler.convert_params, config.make_abstract_params())
    return {
        "decode": (
            partial(sampler.decode_chunk, kind=kind),
            (weights, cache, state, rows, stops, scalar, scalar),
        ),
        "prefill": (sampler.prefill, (weights, cache, blocks)),
    }


def trainer_programs(
    config=CONFIG, *, device=None, kernels="xla", rows=4, row_tokens=16, dtype=jnp.bfloat16,
    **settings,
):  # fmt: skip
    """Return a micro-batch's gradient and the optimizer step, with abstract arguments."""
    mesh = sharding.make_mesh(data=1, fsdp=1, tensor=1, devices=[device or jax.devices()[0]])
    model = update.Model(
        config, mesh, num_tokens=config.vocab_size - 4, dtype=dtype,
        attention=kernels_on(mesh, kernels), **settings,
    )  # fmt: skip
    optimizer = optax.adamw(1e-3)
    step = update.UpdateStep(model, make_policy_loss(method_of(default_config())), optimizer)
    trained = jax.eval_shape(
        lambda p: update.init_state(p, mesh, config, optimizer), config.make_abstract_params()
    )
    batch = make_batch((2, rows, row_tokens))
    sums = jax.eval_shape(step.gradient.init_sums.function, trained.params, batch)
    return {
        "update": (
            partial(step.gradient.loop.program.function, logit_capacity=3),
            (trained.params, sums, batch, shape(()), shape(())),
        ),
        "optimizer": (step.apply.function, (trained, sums)),
    }


def equations(jaxpr, *, in_kernels=True):
    """Yield all equations of a program, including loops, inner functions and kernels."""
    for equation in jaxpr.eqns:
        yield equation
        if equation.primitive.name == "pallas_call" and not in_kernels:
            continue
        is_inner = lambda value: hasattr(value, "eqns") or hasattr(value, "jaxpr")  # noqa: E731
        for value in jax.tree.leaves(equation.params, is_leaf=is_inner):
            if is_inner(value):
                yield from equations(getattr(value, "jaxpr", value), in_kernels=in_kernels)


def products(jaxpr, **settings):
    """Return all matrix products of a program."""
    return [eqn for eqn in equations(jaxpr, **settings) if eqn.primitive.name == "dot_general"]


def topology(name):
    """Return absent TPU devices, if libtpu is installed; see `libtpu_environment`."""
    os.environ.update(make_libtpu_environment())
    if folder := os.environ.get("LIBTPU_DIR"):
        sys.path.insert(0, folder)
    from jax.experimental import topologies

    return topologies.get_topology_desc(platform="tpu", topology_name=name).devices


def v6e_chip():
    """Return a v6e device to compile for; see `topology`."""
    return topology("v6e:2x2")[0]


def lower_for(device, function, arguments, **settings):
    """Lower a function for a device that need not exist."""
    layout = jax.sharding.SingleDeviceSharding(device)
    arguments = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout), arguments
    )
    return jax.jit(function, **settings).lower(*arguments)

"""The device programs lower for accelerators, checked without one."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import export

from jaxrl.config import default_config
from jaxrl.models import qwen
from jaxrl.models.attention.kernels import XLA
from jaxrl.runtime import sharding
from jaxrl.sampling.decode import BLOCK, Blocks, Rows, Sampler, StopTables
from jaxrl.sampling.next_token import PLAIN
from jaxrl.training import update
from jaxrl.training.policy_loss import make_policy_loss
from jaxrl.types import Batch

CONFIG = qwen.QwenConfig(
    vocab_size=64,
    width=32,
    mlp_width=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rope_theta=1e4,
    rms_norm_eps=1e-6,
    tie_embeddings=True,
    qkv_bias=False,
    output_bias=False,
    qk_norm=True,
    max_positions=128,
)


def shape(dimensions, dtype=jnp.int32):
    return jax.ShapeDtypeStruct(dimensions, dtype)


def programs():
    """Each program with abstract arguments, in bfloat16 as accelerators run it."""
    device = jax.devices()[:1]
    mesh = sharding.make_mesh(data=1, fsdp=1, tensor=1, devices=device)
    sampler = Sampler(
        config=CONFIG, mesh=mesh, kernels=replace(XLA, past=None), num_tokens=60, num_steps=4,
        num_rows=8, dtype=jnp.bfloat16,
    )  # fmt: skip
    cache = jax.eval_shape(lambda: sampler.empty_cache(32, 16))
    state = jax.eval_shape(sampler.empty_state)
    tables = shape((8, 4))
    chunk = Rows(source=shape((8,)), state=state, tables=tables, keys=shape((8, 2), jnp.uint32))
    blocks = Blocks(
        token_ids=shape((8, BLOCK)), start=shape((8,)), counts=shape((8,)), tables=tables
    )
    one = shape((), jnp.float32)
    params = CONFIG.abstract_params()
    weights = jax.eval_shape(lambda p: CONFIG.decode_weights(p, jnp.bfloat16), params)
    stops = StopTables(
        next_state=shape((5, 64), jnp.int8),
        is_hit=shape((5, 64), jnp.bool_),
        is_end=shape((64,), jnp.bool_),
    )
    model = update.Model(CONFIG, mesh, num_tokens=60, dtype=jnp.bfloat16)
    optimizer = optax.adamw(1e-3)
    config = default_config()
    step = update.UpdateStep(model, make_policy_loss(config), optimizer, temperature=1.0)
    trained = jax.eval_shape(lambda p: update.init_state(p, mesh, CONFIG, optimizer), params)
    whole, real = shape((2, 4, 16)), shape((2, 4, 16), jnp.float32)
    batch = Batch(
        token_ids=whole,
        segment_ids=whole,
        positions=whole,
        loss_mask=shape((2, 4, 16), jnp.bool_),
        token_weights=real,
        advantages=real,
        rollout_logprobs=real,
    )
    sums = jax.eval_shape(step.gradient.begin.function, trained.params, batch)
    return {
        "decode": (
            partial(sampler.decode_chunk, kind=PLAIN),
            (weights, cache, state, chunk, stops, one, one),
        ),
        "append": (sampler.append, (weights, cache, blocks)),
        "update": (
            partial(step.gradient.add.program.function, room=3),
            (trained.params, sums, batch, shape(()), shape(())),
        ),
        "optimizer": (step.apply.function, (trained, sums)),
    }


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
@pytest.mark.parametrize("name", ["decode", "append", "update", "optimizer"])
def test_lowers_for(name, platform):
    function, arguments = programs()[name]
    exported = export.export(jax.jit(function), platforms=[platform])(*arguments)
    assert exported.platforms == (platform,)
    assert ("dot_general" in exported.mlir_module()) == (name != "optimizer")

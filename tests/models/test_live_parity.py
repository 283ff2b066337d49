"""Parity with `transformers` on torch for random small models."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.extras.experts.qwen_moe import QwenMoeConfig
from jaxrl.models import kv_cache
from jaxrl.models.decoder import init_params
from jaxrl.models.hf_weights import load_hf, save_hf
from jaxrl.models.llama import LlamaConfig
from jaxrl.models.qwen import QwenConfig
from jaxrl.models.registry import read_architecture
from jaxrl.models.rope_scaling import LinearScaling, Llama3Scaling, YarnScaling
from tests.helpers import full_pass, read_tokens

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.torch
torch.set_num_threads(1)  # the models are too small to share


SCALED = (
    YarnScaling(
        factor=4.0, original_max_position_embeddings=16, attention_factor=1.2, beta_fast=4.0
    ),
    LinearScaling(factor=3.0),
    Llama3Scaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
    ),
)


def random_config(seed):
    """Return a small Qwen2 or Qwen3 with random settings that the family allows."""
    rng = np.random.default_rng(seed)
    is_qwen3 = bool(seed % 2)
    num_kv_heads = int(rng.integers(1, 4))
    num_heads = num_kv_heads * int(rng.integers(1, 4))
    # A Qwen2 config.json has no head_dim: the heads share the width.
    head_dim = 2 * int(rng.integers(2, 12))
    has_bias = bool(rng.integers(2))
    scaling = (None, *SCALED)[seed // 2 % 4]
    return QwenConfig(
        vocab_size=int(rng.integers(50, 300)),
        width=int(rng.integers(8, 70)) if is_qwen3 else num_heads * head_dim,
        mlp_width=int(rng.integers(8, 90)),
        num_layers=int(rng.integers(1, 5)),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rope_theta=float(rng.choice([1e4, 1e6, 5e6])),
        rms_norm_eps=float(rng.choice([1e-6, 1e-5])),
        tie_embeddings=bool(rng.integers(2)),
        qkv_bias=has_bias or not is_qwen3,
        output_bias=has_bias and is_qwen3,
        qk_norm=is_qwen3,
        max_positions=4096,
        rope_scaling=scaling,
    )


def random_llama(seed):
    """Return a small Llama with heads of any even size and biases on all of attention or none."""
    rng = np.random.default_rng(seed)
    dense = random_config(2 * seed + 1)  # a Qwen3, whose heads need not share the width
    has_bias = bool(rng.integers(2))
    width = dense.num_heads * int(rng.integers(2, 12))  # transformers requires a multiple
    changes = {"width": width, "qk_norm": False, "qkv_bias": has_bias, "output_bias": has_bias}
    return LlamaConfig(**vars(dense) | changes)


def random_moe(seed):
    """Return a small mixture of experts with any layers dense, weights normalized or not."""
    rng = np.random.default_rng(seed)
    dense = random_config(2 * seed + 1)
    expert_layers = tuple(i for i in range(dense.num_layers) if rng.integers(3)) or (0,)
    num_experts = int(rng.integers(2, 17))
    return QwenMoeConfig(
        **vars(dense),
        expert_width=int(rng.integers(4, 40)),
        num_experts=num_experts,
        top_k=int(rng.integers(1, min(num_experts, 5) + 1)),
        renormalize=bool(rng.integers(2)),
        expert_layers=expert_layers,
    )


def random_params(config, seed):
    """Return weights with no zero biases and no norm scales of one, so that all matter."""
    rng = np.random.default_rng(seed)

    def leaf(path, like):
        name = path[-1].key
        if name == "scale":
            return jnp.asarray(rng.uniform(0.5, 1.5, like.shape), jnp.float32)
        scale = {"bias": 0.5, "kernel": like.shape[-2] ** -0.5}.get(name, 1.0)
        return jnp.asarray(rng.normal(0.0, scale, like.shape), jnp.float32)

    return jax.tree_util.tree_map_with_path(leaf, init_params(config, seed=0))


def torch_model(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    # Torch's grouped products reject widths that are not multiples of 4.
    model.set_experts_implementation("eager")
    return model.eval()


def compute_logits(params, config, token_ids, offset=0):
    positions = jnp.broadcast_to(jnp.arange(token_ids.shape[1]), token_ids.shape) + offset
    row = (token_ids, positions, jnp.ones_like(positions))
    hidden = jax.jit(full_pass, static_argnums=0)(config, params, *row)
    return config.unembed(params, hidden, num_tokens=config.vocab_size)


@partial(jax.jit, static_argnums=(1, 3))
def greedy(params, config, prompts, num_tokens):
    """Return the most likely continuation of `prompts` `[B, T]`, one token at a time."""
    B, T = prompts.shape
    weights = config.prepare_decoding_weights(params, jnp.float32)

    def choose(hidden):
        return config.unembed(weights, hidden, num_tokens=config.vocab_size).argmax(axis=-1)

    pages = T + num_tokens
    tables = jnp.arange(B * pages).reshape(B, pages)  # pages of one token
    cache = kv_cache.allocate_pages(config, B * pages, 1, jnp.float32)
    start, counts = jnp.zeros(B, jnp.int32), jnp.full(B, T, jnp.int32)
    hidden, cache = read_tokens(config, weights, cache, tables, start, counts, prompts)

    def step(carry, index):
        token_ids, cache = carry
        hidden, cache = read_tokens(
            config, weights, cache, tables, start + T + index, jnp.ones_like(start),
            token_ids[:, None],
        )  # fmt: skip
        return (choose(hidden[:, -1]).astype(jnp.int32), cache), token_ids

    first = (choose(hidden[:, -1]).astype(jnp.int32), cache)
    _, token_ids = jax.lax.scan(step, first, jnp.arange(num_tokens))
    return token_ids.T


@pytest.mark.parametrize("make", [random_config, random_llama, random_moe])
@pytest.mark.parametrize("seed", range(8))
def test_exported_models_agree_with_transformers(tmp_path, seed, make):
    config = make(seed)
    params = random_params(config, seed)
    save_hf(params, config, tmp_path / "hf", max_shard_size=10**9 if seed % 4 else 50_000)
    assert read_architecture(tmp_path / "hf") == config
    jax.tree.map(np.testing.assert_array_equal, load_hf(tmp_path / "hf"), params)

    model = torch_model(tmp_path / "hf")
    token_ids = np.random.default_rng(seed).integers(0, config.vocab_size, (2, 33))
    with torch.no_grad():
        expected = model(torch.tensor(token_ids)).logits.numpy()
    actual = compute_logits(params, config, jnp.asarray(token_ids))
    np.testing.assert_allclose(actual, expected, atol=1e-4, rtol=0)

    prompts = token_ids[:, :9]
    generated = model.generate(
        torch.tensor(prompts),
        attention_mask=torch.ones(prompts.shape, dtype=torch.long),
        max_new_tokens=64,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    ours = greedy(params, config, jnp.asarray(prompts), 64)
    np.testing.assert_array_equal(ours, generated.numpy()[:, 9:])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_import_train_and_export_of_a_model_from_transformers(tmp_path, dtype):
    config = dataclasses.replace(random_config(5), tie_embeddings=False)
    fields = {**config.to_hf_config(), "dtype": dtype}
    fields.pop("torch_dtype")
    hf_config = transformers.Qwen3Config.from_dict(fields)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(hf_config, dtype=getattr(torch, dtype))
    model.save_pretrained(tmp_path / "source", max_shard_size="40KB")
    assert read_architecture(tmp_path / "source") == config

    params = load_hf(tmp_path / "source")
    token_ids = np.arange(40).reshape(2, 20)
    with torch.no_grad():
        expected = model.float()(torch.tensor(token_ids)).logits.numpy()
    np.testing.assert_allclose(
        compute_logits(params, config, jnp.asarray(token_ids)), expected, atol=1e-4, rtol=0
    )

    trained = jax.tree.map(lambda leaf: 1.25 * leaf, params)
    save_hf(trained, config, tmp_path / "export", source=tmp_path / "source")
    exported = load_hf(tmp_path / "export")  # rounded to the source's dtype
    with torch.no_grad():
        expected = torch_model(tmp_path / "export")(torch.tensor(token_ids)).logits.numpy()
    np.testing.assert_allclose(
        compute_logits(exported, config, jnp.asarray(token_ids)), expected, atol=1e-4, rtol=0
    )
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert loaded.dtype == getattr(torch, dtype)


@pytest.mark.parametrize("scaling", [None, *SCALED], ids=["default", "yarn", "linear", "llama3"])
def test_logits_at_far_positions(tmp_path, scaling):
    # Frequencies and angles are rounded to float32, which matters beyond some thousand tokens.
    config = dataclasses.replace(random_config(3), head_dim=64, rope_scaling=scaling)
    params = random_params(config, 3)
    save_hf(params, config, tmp_path / "hf")
    token_ids = np.random.default_rng(0).integers(0, config.vocab_size, (1, 40))
    positions = torch.arange(3000, 3040)[None]
    with torch.no_grad():
        out = torch_model(tmp_path / "hf")(torch.tensor(token_ids), position_ids=positions)
    actual = compute_logits(params, config, jnp.asarray(token_ids), offset=3000)
    np.testing.assert_allclose(actual, out.logits.numpy(), atol=1e-4, rtol=0)

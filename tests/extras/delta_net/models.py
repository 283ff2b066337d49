"""Small hybrid models."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.extras.delta_net.qwen3_5 import Qwen35Config
from jaxrl.models.hf_weights import save_hf

TINY_HYBRID = Qwen35Config(
    vocab_size=320,
    width=32,
    mlp_width=48,
    num_layers=5,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rope_theta=1e4,
    rms_norm_eps=1e-6,
    tie_embeddings=False,
    qkv_bias=False,
    output_bias=False,
    qk_norm=True,
    max_positions=4096,
    attention_layers=(1, 4),
    rotary_fraction=0.25,
    num_key_heads=2,
    num_value_heads=4,
    key_dim=8,
    value_dim=16,
    conv_width=4,
)
"""Two layers with attention; three with a delta net, of which two are consecutive."""


def random_params(config, seed):
    """Return numpy parameters in which every one matters, of the size of published models'."""
    rng = np.random.default_rng(seed)

    def fill(path, leaf):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        noise = rng.standard_normal(leaf.shape, np.float32)
        if name.endswith("log_rate"):
            return np.log(rng.uniform(0.01, 16.0, leaf.shape)).astype(np.float32)
        if name.endswith("decay/bias"):
            # Step sizes of about 0.05. Larger ones forget all but the last token, whose output is
            # then close to 0 for some tokens, and its normalization multiplies rounding errors.
            return 0.1 * noise - 3
        if name.endswith(("scale", "bias")):
            return np.float32("delta/norm" in name) + 0.1 * noise
        if "conv" in name:
            return 0.5 * noise
        is_table = "lm_head" in name or "embed" in name
        fan_in = leaf.shape[-1 if "embed" in name else -2]
        return noise * np.float32((1 if is_table else 0.5) / fan_in**0.5)

    return jax.tree_util.tree_map_with_path(fill, config.make_abstract_params())


def write_hybrid_world(world, folder):
    """Copy a tiny world, with a random hybrid in place of its model."""
    shutil.copytree(world, folder)
    fields = json.loads((folder / "model" / "config.json").read_text())
    config = dataclasses.replace(
        TINY_HYBRID,
        vocab_size=fields["vocab_size"],
        num_layers=3,
        attention_layers=(1,),
        tie_embeddings=True,
    )
    params = jax.tree.map(jnp.asarray, random_params(config, seed=0))
    save_hf(params, config, folder / "hybrid")
    for name in ("config.json", "model.safetensors"):
        (folder / "hybrid" / name).replace(folder / "model" / name)
    shutil.rmtree(folder / "hybrid")
    return folder

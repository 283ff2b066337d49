"""Qwen3-Next: like Qwen3.5 with experts, but with fused projections in delta nets.

The parameter tree is that of `qwen3_5_moe`, except that a delta net with N value heads and G key
heads has two projections. Their outputs are grouped by key head:

    blocks/delta/qkvz/kernel        [n, D, G * (2 * K + 2 * N / G * V)]     query, key, value, gate
    blocks/delta/ba/kernel          [n, D, G * (2 * N / G)]                 beta, decay
    blocks/delta/decay/{bias,log_rate}  [n, N]

Some layers may have an MLP instead of experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxrl.extras.delta_net.qwen3_5 import DeltaNet, Qwen35Config
from jaxrl.extras.experts.qwen_moe import QwenMoeConfig, read_expert_fields
from jaxrl.models.decoder import check_model_type, linear, make_linear_axes, read_positive_int
from jaxrl.models.defaults import fill_hf_defaults
from jaxrl.types import Params

_LAYER = "model.layers.{}.linear_attn."
HF_NAMES = {
    "blocks/delta/qkvz/kernel": _LAYER + "in_proj_qkvz.weight",
    "blocks/delta/ba/kernel": _LAYER + "in_proj_ba.weight",
}
"""HF names in addition to those of `qwen3_5_moe`."""


class FusedDeltaNet(DeltaNet):
    """Gated delta net weights with two fused projections."""

    def __init__(self, config: Qwen3NextConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        inner = config.num_value_heads * config.value_dim
        outputs = config.delta_channels + inner, 2 * config.num_value_heads
        for name in ("qkv", "gate", "beta"):
            delattr(self, name)
        del self.decay.kernel
        self.qkvz, self.ba = (
            nnx.Linear(config.width, size, use_bias=False, rngs=rngs) for size in outputs
        )


@dataclass(frozen=True, kw_only=True)
class Qwen3NextConfig(QwenMoeConfig, Qwen35Config):
    """Config of a Qwen3-Next model, read from its `config.json`."""

    @classmethod
    def from_dict(cls, fields: dict[str, Any], *, source: str = "config.json") -> Qwen3NextConfig:
        """Build the config from a `config.json`.

        Raises:
            ValueError: See `Qwen35Config.from_dict` and `read_expert_fields`.
        """
        check_model_type(fields, ["qwen3_next"], source)
        filled = fill_hf_defaults(fields, "qwen3_next", source=source)
        shared_width = read_positive_int(filled, "shared_expert_intermediate_size", source)
        hybrid = Qwen35Config.from_dict({**filled, "model_type": "qwen3_5_text"}, source=source)
        experts = read_expert_fields(fields, filled, source)
        return cls(**vars(hybrid), **experts, shared_width=shared_width)

    def to_hf_config(self) -> dict[str, Any]:
        """Return the `config.json` fields; the inverse of `from_dict`."""
        names = {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next"}
        return {**super().to_hf_config(), **names}

    def declare_mixers(self, rngs: nnx.Rngs) -> dict[str, nnx.Module]:
        """Declare gated attention and a delta net with fused projections."""
        return {**super().declare_mixers(rngs), "delta": FusedDeltaNet(self, rngs=rngs)}

    def get_mixer_axes(self) -> dict[str, Any]:
        """Return the axis names; `tensor` splits the outputs by key heads."""
        axes = super().get_mixer_axes()
        delta = {name: axes["delta"][name] for name in ("conv", "norm", "o")}
        decay = {name: axes["delta"]["decay"][name] for name in ("bias", "log_rate")}
        fused = dict.fromkeys(("qkvz", "ba"), make_linear_axes("width", "heads"))
        return {**axes, "delta": {**delta, **fused, "decay": decay}}

    def get_mixer_hf_names(self) -> dict[str, str]:
        """Return the HF names of the delta net's parameters."""
        return {**HF_NAMES, **super().get_mixer_hf_names()}

    def project_delta_net(
        self, weights: Params, x: Float[Array, "M D"]
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """See `Qwen35Config.project_delta_net`."""
        qkvz = checkpoint_name(linear(weights["qkvz"], x), "qkv")
        ba = checkpoint_name(linear(weights["ba"], x), "beta")
        # Split the outputs of each key head, then join each part over the key heads.
        inner = self.num_value_heads // self.num_key_heads * self.value_dim
        ends = self.key_dim, 2 * self.key_dim, 2 * self.key_dim + inner
        qkvz, ba = (y.reshape(len(x), self.num_key_heads, -1) for y in (qkvz, ba))
        parts = [*jnp.split(qkvz, ends, axis=-1), *jnp.split(ba, 2, axis=-1)]
        q, k, v, gate, beta, decay = (part.reshape(len(x), -1) for part in parts)
        return jnp.concatenate([q, k, v], axis=-1), gate, beta, decay

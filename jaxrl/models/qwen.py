"""Qwen2.5 and Qwen3 dense decoders: the shared decoder with a gated MLP.

Parameters in addition to those of `decoder`, with a leading layer axis L:

    blocks/mlp/{gate,up}/kernel     [L, D, F]
    blocks/mlp/down/kernel          [L, F, D]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxrl.models.architecture import MemoryTerms
from jaxrl.models.decoder import (
    Decoder,
    check_model_type,
    check_supported,
    linear,
    make_linear_axes,
    parse_common_fields,
    read_positive_int,
)
from jaxrl.models.defaults import fill_hf_defaults
from jaxrl.types import Params
from jaxrl.utils.json_io import drop_nulls


class MLP(nnx.Module):
    """SwiGLU weights."""

    def __init__(self, config: QwenConfig, *, rngs: nnx.Rngs):
        self.gate = nnx.Linear(config.width, config.mlp_width, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(config.width, config.mlp_width, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(config.mlp_width, config.width, use_bias=False, rngs=rngs)


@dataclass(frozen=True, kw_only=True)
class QwenConfig(Decoder):
    """Config of a dense Qwen2.5 or Qwen3 model."""

    mlp_width: int

    @classmethod
    def from_dict(cls, fields: dict[str, Any], *, source: str = "config.json") -> QwenConfig:
        """Create the config from a `config.json`, with old or new field names.

        Raises:
            ValueError: The file requires an architecture or feature that no parity test covers.
        """
        model_type = check_model_type(fields, ("qwen2", "qwen3"), source)
        fields = drop_nulls(fill_hf_defaults(fields, model_type, source=source))
        check_supported(fields, source)
        is_qwen3 = model_type == "qwen3"
        return cls(
            **parse_common_fields(fields, source=source),
            mlp_width=read_positive_int(fields, "intermediate_size", source),
            qkv_bias=bool(fields["attention_bias"]) if is_qwen3 else True,
            output_bias=bool(fields["attention_bias"]) if is_qwen3 else False,
            qk_norm=is_qwen3,
        )

    def to_hf_config(self) -> dict[str, Any]:
        """Return the `config.json` fields; the inverse of `from_dict`."""
        is_qwen3 = self.qk_norm
        fields = {
            "architectures": ["Qwen3ForCausalLM" if is_qwen3 else "Qwen2ForCausalLM"],
            "model_type": "qwen3" if is_qwen3 else "qwen2",
            "intermediate_size": self.mlp_width,
            **self.format_common_fields(),
        }
        return {**fields, "attention_bias": self.qkv_bias} if is_qwen3 else fields

    def declare_feed_forward(self, rngs: nnx.Rngs) -> dict[str, nnx.Module]:
        """Declare a gated MLP."""
        return {"mlp": MLP(self, rngs=rngs)}

    def apply_feed_forward(self, layer: Params, x: Float[Array, "M D"]) -> Float[Array, "M D"]:
        """Apply SwiGLU (https://arxiv.org/abs/2002.05202)."""
        mlp = layer["mlp"]
        gate, up = (checkpoint_name(linear(mlp[name], x), name) for name in ("gate", "up"))
        return linear(mlp["down"], jax.nn.silu(gate) * up)

    def get_feed_forward_axes(self) -> dict[str, Any]:
        """Return the axis names; the MLP's inner width is split over `tensor`."""
        return {
            "mlp": {
                "gate": make_linear_axes("width", "mlp"),
                "up": make_linear_axes("width", "mlp"),
                "down": make_linear_axes("mlp", "width"),
            }
        }

    def get_feed_forward_hf_names(self) -> dict[str, str]:
        """Return the HF names of the MLP's kernels: `gate_proj`, `up_proj` and `down_proj`."""
        return {
            f"blocks/mlp/{name}/kernel": f"model.layers.{{}}.mlp.{name}_proj.weight"
            for name in ("gate", "up", "down")
        }

    def estimate_layer_memory(self, tensor: int) -> MemoryTerms:
        """Return the memory of one layer; the MLP is split over `tensor` only if divisible."""
        inner = self.mlp_width if self.mlp_width % tensor else self.mlp_width // tensor
        attention_width = self.num_heads // tensor * self.head_dim
        kv_width = self.num_kv_heads // tensor * self.head_dim
        products = attention_width + 2 * kv_width + self.width + 2 * inner  # all but the last
        # The peak is during the gate and up projections, or after them if `tensor` splits only the
        # MLP.
        mlp = max(4 * inner + 4 * self.width, 2 * inner + 8 * self.width)
        return MemoryTerms(
            activations=mlp + 10 * attention_width + 8 * kv_width,
            saved_activations={
                "none": 6 * inner + 4 * attention_width + 4 * kv_width + 6 * self.width,
                "dots": products,
                "names": products + attention_width,
            },
            prefill_activations=inner + 2 * attention_width + 3 * self.width,
        )

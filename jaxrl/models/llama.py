"""Dense Llama and Mistral decoders: Qwen2.5's decoder, with either all biases or none.

SmolLM2, Llama 3.x and Mistral's dense models use this class. It shows how to derive an
architecture: it parses `config.json` differently and inherits all computation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxrl.models.decoder import (
    check_model_type,
    check_supported,
    parse_common_fields,
    read_positive_int,
    reject_unsupported_features,
)
from jaxrl.models.defaults import fill_hf_defaults
from jaxrl.models.qwen import QwenConfig
from jaxrl.utils.json_io import drop_nulls


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(QwenConfig):
    """Config of a dense Llama or Mistral model, without query and key norms."""

    @classmethod
    def from_dict(cls, fields: dict[str, Any], *, source: str = "config.json") -> LlamaConfig:
        """Create the config from a `config.json`; missing fields get transformers' defaults.

        Raises:
            ValueError: The file requires an architecture or feature that no parity test covers.
        """
        model_type = check_model_type(fields, ("llama", "mistral"), source)
        # In transformers a missing window means 4096 tokens, and null means no window.
        has_window = model_type == "mistral" and fields.get("sliding_window", 0) is not None
        derived = {"llama": ("head_dim", "num_key_value_heads"), "mistral": ("head_dim",)}
        fields = drop_nulls(
            fill_hf_defaults(fields, model_type, derived=derived[model_type], source=source)
        )
        check_supported(fields, source)
        has_bias = model_type == "llama" and bool(fields["attention_bias"])
        model = cls(
            **parse_common_fields(fields, source=source),
            mlp_width=read_positive_int(fields, "intermediate_size", source),
            qkv_bias=has_bias,
            output_bias=has_bias,
            qk_norm=False,
        )
        unsupported = {
            "mlp_bias": bool(fields.get("mlp_bias")),
            f"pretraining_tp {fields.get('pretraining_tp')}": fields.get("pretraining_tp", 1) > 1,
            # A window at least as long as the longest sequence masks nothing.
            f"a sliding window of {fields.get('sliding_window')} tokens": has_window
            and fields["sliding_window"] < model.max_positions,
        }
        reject_unsupported_features(unsupported, source)
        return model

    def to_hf_config(self) -> dict[str, Any]:
        """Return the `config.json` fields; a Mistral model is saved as a Llama without biases."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "intermediate_size": self.mlp_width,
            **self.format_common_fields(),
            "attention_bias": self.qkv_bias,
            "mlp_bias": False,
        }

"""Qwen3.5 with experts: mixers from `delta_net.qwen3_5` and experts from `experts.qwen_moe`.

This folder needs both `delta_net` and `experts`. Every layer has experts and a shared expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxrl.extras.delta_net.qwen3_5 import Qwen35Config
from jaxrl.extras.experts.qwen_moe import QwenMoeConfig, read_expert_fields
from jaxrl.models.decoder import check_model_type, read_positive_int
from jaxrl.models.defaults import fill_hf_defaults

DENSE_TYPES = {"qwen3_5_moe": "qwen3_5", "qwen3_5_moe_text": "qwen3_5_text"}
"""`model_type` of the dense model, by that of the mixture of experts."""

IMPLICIT_FIELDS = {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}
"""Fields that other mixtures state in `config.json`; constant in Qwen3.5."""


@dataclass(frozen=True, kw_only=True)
class Qwen35MoeConfig(QwenMoeConfig, Qwen35Config):
    """Config of the text part of a Qwen3.5 mixture of experts, read from its `config.json`."""

    @classmethod
    def from_dict(cls, fields: dict[str, Any], *, source: str = "config.json") -> Qwen35MoeConfig:
        """Build the config from the `config.json` of a model with or without a vision tower.

        Raises:
            ValueError: See `Qwen35Config.from_dict` and `read_expert_fields`.
        """
        model_type = check_model_type(fields, DENSE_TYPES, source)
        is_text = model_type == "qwen3_5_moe_text"
        text = fields if is_text else fields.get("text_config")
        if not isinstance(text, dict):
            raise ValueError(f"{source} lacks the field 'text_config', an object.")
        filled = fill_hf_defaults(text, "qwen3_5_moe_text", source=source) | IMPLICIT_FIELDS
        shared_width = read_positive_int(filled, "shared_expert_intermediate_size", source)
        dense = {**filled, "intermediate_size": shared_width, "model_type": "qwen3_5_text"}
        if not is_text:
            dense = {**fields, "text_config": dense, "model_type": DENSE_TYPES[model_type]}
        hybrid = Qwen35Config.from_dict(dense, source=source)
        experts = read_expert_fields(text, filled, source)
        return cls(**vars(hybrid), **experts, shared_width=shared_width)

    def to_hf_config(self) -> dict[str, Any]:
        """Return the `config.json` fields of a text model; the inverse of `from_dict`."""
        fields = {
            **super().to_hf_config(),
            "architectures": ["Qwen3_5MoeForCausalLM"],
            "model_type": "qwen3_5_moe_text",
        }
        absent = ("intermediate_size", *IMPLICIT_FIELDS)
        return {name: value for name, value in fields.items() if name not in absent}

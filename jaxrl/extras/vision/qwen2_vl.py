"""Qwen2-VL: Qwen2's decoder, with image tokens embedded by a vision tower.

The tower's parameters are those of Qwen3-VL (`qwen3_vl`) without `patch/bias`, `positions` and
`deepstack`. All layers attend over the complete image. Source: https://arxiv.org/abs/2409.12191.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
from jaxtyping import Array, Float

from jaxrl.extras.vision.qwen3_vl import Qwen3Vision
from jaxrl.extras.vision.qwen_vl import QwenVLConfig
from jaxrl.extras.vision.tower import VisionTower, make_linear_hf_names
from jaxrl.models.decoder import read_positive_int

_LAYER = "visual.blocks.{}."
HF_NAMES = {
    "patch/filter": "visual.patch_embed.proj.weight",
    **{
        f"{ours}/{part}": f"{theirs}.{their_part}"
        for ours, theirs in (
            ("blocks/norm1", _LAYER + "norm1"),
            ("blocks/norm2", _LAYER + "norm2"),
            ("merger/norm", "visual.merger.ln_q"),
        )
        for part, their_part in (("scale", "weight"), ("bias", "bias"))
    },
    **make_linear_hf_names(
        {
            "blocks/attention/qkv": _LAYER + "attn.qkv",
            "blocks/attention/o": _LAYER + "attn.proj",
            "blocks/mlp/up": _LAYER + "mlp.fc1",
            "blocks/mlp/down": _LAYER + "mlp.fc2",
            "merger/up": "visual.merger.mlp.0",
            "merger/down": "visual.merger.mlp.2",
        }
    ),
}
"""HF tensor name of each parameter; `{}` is the layer index."""


@dataclass(frozen=True, kw_only=True)
class Qwen2Vision(Qwen3Vision):
    """Vision tower of Qwen2-VL, built from a `vision_config`."""

    names = HF_NAMES
    activation = "quick_gelu"
    width_field = "embed_dim"
    out_width_field = "hidden_size"
    has_split_videos = False

    @classmethod
    def from_fields(cls, vision_fields: dict[str, Any], image_id: int, source: str) -> Qwen2Vision:
        """See `VisionTower.from_fields`. The MLP's width is a multiple of the tower's."""
        width, ratio = (
            read_positive_int(vision_fields, name, source) for name in ("embed_dim", "mlp_ratio")
        )
        fields = {**vision_fields, "intermediate_size": width * ratio}
        return cls(**cls.parse_common_fields(fields, source), token_id=image_id)

    def to_fields(self) -> dict[str, Any]:
        """Return the `vision_config` fields; the inverse of `from_fields`."""
        fields = VisionTower.to_fields(self)
        del fields["intermediate_size"]
        return {**fields, "mlp_ratio": self.mlp_width // self.width}

    def _activate(self, x: Float[Array, "M F"]) -> Float[Array, "M F"]:
        """Apply an approximate GELU (https://arxiv.org/abs/1606.08415, section 2)."""
        return x * jax.nn.sigmoid(1.702 * x)


@dataclass(frozen=True, kw_only=True)
class Qwen2VLConfig(QwenVLConfig):
    """Config of a Qwen2-VL model: like Qwen2.5-VL, with a different vision tower."""

    model_type = "qwen2_vl"
    hf_class = "Qwen2VLForConditionalGeneration"
    tower_class = Qwen2Vision

"""Qwen3.5's vision tower: that of Qwen3-VL (`qwen3_vl`) without DeepStack.

The text model is in `extras.delta_net`. This module does not import it; `models.registry` passes
its class to `add_tower`. As in Qwen3-VL, the rotated dimensions of each head alternate between
time, height and width.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from jaxrl.extras.vision import qwen3_vl
from jaxrl.extras.vision.qwen3_vl import Qwen3Vision, Qwen3VLConfig
from jaxrl.models.qwen import QwenConfig

HF_NAMES = {
    name: tensor for name, tensor in qwen3_vl.HF_NAMES.items() if not name.startswith("deepstack/")
}
"""HF tensor name of each parameter; `{}` is the layer index."""

HF_CLASSES = {
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
}
"""Class in transformers, by `model_type`."""


@dataclass(frozen=True, kw_only=True)
class Qwen35Vision(Qwen3Vision):
    """Vision tower of Qwen3.5, built from a `vision_config`."""

    names = HF_NAMES
    has_deepstack = False


@dataclass(frozen=True, kw_only=True)
class Qwen35VLConfig(Qwen3VLConfig):
    """Base class for configs of Qwen3.5 models with images; see `add_tower`."""

    tower_class = Qwen35Vision
    default_sections = (11, 11, 10)

    @classmethod
    def _get_text_fields(cls, fields: dict[str, Any], source: str) -> dict[str, Any]:
        """Return all fields of `config.json`; the text class selects its section."""
        return {**fields, "tie_word_embeddings": bool(fields.get("tie_word_embeddings"))}

    def get_hf_passthrough_prefixes(self) -> tuple[str, ...]:
        """Return the prefix of the unused multi-token prediction layer."""
        return ("mtp.",)


@cache
def add_tower(text_class: type[QwenConfig], model_type: str) -> type[Qwen35VLConfig]:
    """Return a config class that adds a vision tower to a text model's config class."""
    members = {
        "__module__": __name__,
        "model_type": model_type,
        "hf_class": HF_CLASSES[model_type],
        "text_class": text_class,
    }
    config_class = type(f"Vision{text_class.__name__}", (Qwen35VLConfig, text_class), members)
    return dataclass(frozen=True, kw_only=True)(config_class)

"""Qwen2.5-VL: Qwen2.5's decoder, with image tokens embedded by a vision tower.

The parameters are those of `models.qwen`, plus the tower's under `vision`. Rotary positions have
three axes: time, height and width (M-RoPE, https://arxiv.org/abs/2502.13923). For text, all three
are equal, so text without images is computed as in Qwen2.5.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxrl.extras.vision.qwen_vision import QwenVision
from jaxrl.extras.vision.tower import VisionTower
from jaxrl.models.architecture import Attend
from jaxrl.models.attachments import POSITIONS, UNITS
from jaxrl.models.attention import reference
from jaxrl.models.decoder import check_model_type
from jaxrl.models.defaults import fill_hf_defaults
from jaxrl.models.layers import LayerScan, SamplerLayerScan
from jaxrl.models.qwen import QwenConfig
from jaxrl.types import Params

PREFIX_MAP = {"model.language_model.": "model.", "model.visual.": "visual."}
"""Prefixes of parameter names in published checkpoints, by prefix in transformers 5."""


@dataclass(frozen=True, kw_only=True)
class QwenVLConfig(QwenConfig):
    """Config of a Qwen2.5-VL model, read from its `config.json`.

    Attributes:
        tower: Image encoder.
        mrope_section: Number of rotary pairs per head for time, height and width.
    """

    model_type: ClassVar[str] = "qwen2_5_vl"
    text_type: ClassVar[str] = "qwen2"  # the decoder's
    text_class: ClassVar[type[QwenConfig]] = QwenConfig
    hf_class: ClassVar[str] = "Qwen2_5_VLForConditionalGeneration"
    tower_class: ClassVar[type[VisionTower]] = QwenVision
    default_sections: ClassVar[tuple[int, ...]] = (16, 24, 24)
    is_interleaved: ClassVar[bool] = False  # True if time, height and width alternate over pairs
    ties_in_text: ClassVar[bool] = True  # `tie_word_embeddings` may also be in `text_config`

    tower: VisionTower = field()  # required here
    mrope_section: tuple[int, ...]

    @classmethod
    def from_dict(cls, fields: dict[str, Any], *, source: str = "config.json") -> QwenVLConfig:
        """Build the config from a `config.json`, with or without a nested `text_config`.

        Raises:
            ValueError: The file requires an unsupported architecture or feature.
        """
        check_model_type(fields, [cls.model_type], source)
        vision_fields = fields.get("vision_config")
        if vision_fields is None:
            raise ValueError(f"{source} lacks the field 'vision_config', an object.")
        filled = fill_hf_defaults(fields, cls.model_type, source=source)
        # Parse the decoder as a text model, without M-RoPE.
        text = cls.text_class.from_dict(cls._get_text_fields(fields, source), source=source)
        if text.rope_scaling is not None:
            raise ValueError(
                f"{source}: RoPE scaling {text.rope_scaling.rope_type!r} with images is not "
                "supported; no parity test covers it."
            )
        # M-RoPE: order of the axes, and pairs per axis.
        text_fields = fields.get("text_config") or fields
        rope = text_fields.get("rope_scaling") or text_fields.get("rope_parameters") or {}
        order = rope.get("mrope_interleaved", cls.is_interleaved)
        if order is not cls.is_interleaved:
            raise ValueError(
                f"{source}: 'mrope_interleaved' is {order!r:.80}; expected "
                f"{str(cls.is_interleaved).lower()} in {cls.model_type!r}."
            )
        sections = rope.get("mrope_section", [*cls.default_sections])
        is_valid = isinstance(sections, list) and all(type(n) is int and n >= 0 for n in sections)
        if not is_valid or len(sections) != 3 or 2 * sum(sections) != text.rotary_dim:
            raise ValueError(
                f"{source}: 'mrope_section' is {sections!r:.80}; expected three integers that "
                f"add up to the rotary pairs of a head, {text.rotary_dim // 2}."
            )
        # The tower's output must match the decoder.
        tower = fill_hf_defaults(vision_fields, cls.model_type, "vision_config", source=source)
        vision = cls.tower_class.from_fields(tower, filled["image_token_id"], source)
        if vision.out_width != text.width:
            raise ValueError(
                f"{source}: {vision.out_width_field!r} of 'vision_config' is {vision.out_width}; "
                f"expected the decoder's 'hidden_size', {text.width}."
            )
        if vision.num_deepstack_layers > text.num_layers:
            raise ValueError(
                f"{source}: 'deepstack_visual_indexes' feeds {vision.num_deepstack_layers} layers "
                f"of the decoder, but there are {text.num_layers}."
            )
        return cls(
            **vars(text),
            tower=dataclasses.replace(vision, video_id=filled["video_token_id"]),
            mrope_section=tuple(sections),
        )

    @classmethod
    def _get_text_fields(cls, fields: dict[str, Any], source: str) -> dict[str, Any]:
        """Return the fields of a text-only `config.json`, with or without `text_config`."""
        text_fields = fields.get("text_config") or {}
        text = fill_hf_defaults(
            {**fields, **text_fields}, cls.model_type, "text_config", source=source
        )
        text["model_type"] = cls.text_type
        text["tie_word_embeddings"] = bool(
            fields.get("tie_word_embeddings")
            or (cls.ties_in_text and text_fields.get("tie_word_embeddings"))
        )
        for name in ("rope_scaling", "rope_parameters"):
            rope = dict(text.get(name) or {})
            for mrope_name in ("mrope_section", "mrope_interleaved"):
                rope.pop(mrope_name, None)
            for kind in ("type", "rope_type"):
                if rope.get(kind) == "mrope":
                    rope[kind] = "default"
            text[name] = rope or None
        return text

    def to_hf_config(self) -> dict[str, Any]:
        """Return the `config.json` fields in the layout of transformers 5."""
        text = {**super().to_hf_config(), "model_type": f"{self.model_type}_text"}
        del text["architectures"], text["rope_theta"]
        text["rope_parameters"]["mrope_section"] = list(self.mrope_section)
        if self.is_interleaved:
            text["rope_parameters"]["mrope_interleaved"] = True
        vision = {"model_type": f"{self.model_type}_vision", **self.tower.to_fields()}
        return {
            "architectures": [self.hf_class],
            "model_type": self.model_type,
            "text_config": text,
            "vision_config": vision,
            "image_token_id": self.tower.token_id,
            "video_token_id": self.tower.video_id,
            "tie_word_embeddings": self.tie_embeddings,
            "torch_dtype": "float32",
        }

    def make_abstract_params(self) -> Params:
        """Return the parameters of the decoder and the tower."""
        return {**super().make_abstract_params(), "vision": self.tower.make_abstract_params()}

    def get_logical_axes(self) -> dict[str, Any]:
        """Return the axis names of the decoder and the tower."""
        return {**super().get_logical_axes(), "vision": self.tower.get_logical_axes()}

    def get_hf_names(self) -> dict[str, str]:
        """Return the HF names of the parameters, as in published checkpoints."""
        tower = {f"vision/{name}": tensor for name, tensor in self.tower.names.items()}
        return {**tower, **super().get_hf_names()}

    def get_hf_prefix_map(self) -> dict[str, str]:
        """Return the prefixes of transformers 5; see `PREFIX_MAP`."""
        return PREFIX_MAP

    def _get_pair_axes(self) -> np.ndarray:
        """Return the position axis of each rotary pair: time 0, height 1, width 2."""
        return np.repeat(np.arange(3), self.mrope_section)

    def _expand_to_pairs(self, rotary: Int[Array, "M 3"]) -> Int[Array, "M pairs"]:
        """Return the position of each rotary pair."""
        return rotary[:, self._get_pair_axes()]

    def compute_hidden_states(
        self,
        params: Params,
        token_ids: Int[Array, "R T"],
        positions: Int[Array, "R T"],
        attend: Attend,
        layer_scan: LayerScan,
    ) -> Float[Array, "R T D"]:
        """Compute the final hidden states. With images, positions are in `layer_scan.aux`."""
        inputs, images = layer_scan.aux.inputs, layer_scan.aux.attached
        if images is None:
            return super().compute_hidden_states(params, token_ids, positions, attend, layer_scan)
        x = self._embed_tokens(params["embed"], token_ids.reshape(-1))
        patches, coords = images["patches"], images["coords"]
        image_embeds = self.tower.encode(params["vision"], patches, coords, layer_scan)
        x, features = merge_image_embeds(x, image_embeds, inputs[UNITS])
        rotary = self._expand_to_pairs(inputs[POSITIONS])
        hidden = self._run_full_pass(params, x, rotary, attend, layer_scan, features)
        return hidden.reshape(*token_ids.shape, -1)

    def unembed(
        self, params: Params, hidden: Float[Array, "... D"], *, num_tokens: int
    ) -> Float[Array, "... V"]:
        """Compute the logits, with image and video tokens masked out.

        A sampled image token would have no image.
        """
        logits = super().unembed(params, hidden, num_tokens=num_tokens)
        token_ids = jnp.arange(self.vocab_size)
        return jnp.where(self.tower.is_placeholder(token_ids), reference.MASK_VALUE, logits)

    def compute_sampler_hidden_states(
        self,
        weights: Params,
        token_ids: Int[Array, " M"],
        positions: Int[Array, " M"],
        layer_scan: SamplerLayerScan,
    ) -> Float[Array, "M D"]:
        """Compute the final hidden states. Positions in `layer_scan.aux` replace `positions`."""
        x, features = weights["embed"]["embedding"][token_ids], None
        inputs, rotary = layer_scan.aux.inputs, positions
        if POSITIONS in inputs:
            rotary = self._expand_to_pairs(inputs[POSITIONS])
        if layer_scan.aux.attached is not None:
            x, features = merge_image_embeds(x, layer_scan.aux.attached, inputs[UNITS])
        return self._run_sampler_pass(weights, x, rotary, layer_scan, features)


def merge_image_embeds(
    x: Float[Array, "M D"], image_embeds: Float[Array, "S U E"], units: Int[Array, " M"]
) -> tuple[Float[Array, "M D"], Float[Array, "n M D"] | None]:
    """Replace the embeddings of image tokens with vision features from the same shard.

    Returns:
        The embeddings, and the DeepStack features to add after the first decoder layers. The
        features are zero for text tokens. They are None if the tower has no DeepStack layers.
    """
    shard_units = units.reshape(len(image_embeds), -1)
    vectors = jax.vmap(lambda image_embeds, units: image_embeds.at[units].get(mode="clip"))(
        image_embeds, shard_units
    )
    vectors = vectors.reshape(len(x), -1, x.shape[1]).swapaxes(0, 1).astype(x.dtype)
    is_placeholder = (units >= 0)[:, None]
    features = jnp.where(is_placeholder, vectors[1:], 0) if len(vectors) > 1 else None
    return jnp.where(is_placeholder, vectors[0], x), features

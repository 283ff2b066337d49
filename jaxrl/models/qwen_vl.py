"""Qwen2.5-VL: the decoder of Qwen2.5, whose image tokens are what a vision tower sees.

The parameters are those of `models.qwen`, and under `vision` those of `models.vision`. Rotary
positions have three rows, of time, height and width (M-RoPE, https://arxiv.org/abs/2502.13923); for
text they are equal, so that a text alone is computed as Qwen2.5 computes it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxrl.models.architecture import Attend
from jaxrl.models.attention import reference
from jaxrl.models.layers import SamplerThrough, Through
from jaxrl.models.qwen import QwenConfig
from jaxrl.models.vision import HF_NAMES as VISION_NAMES
from jaxrl.models.vision import QwenVision
from jaxrl.types import BatchImages, Params

RENAMED = {"model.language_model.": "model.", "model.visual.": "visual."}
"""Beginnings of names that transformers 5 gives tensors in memory, and those of published files."""


def _text_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """A `config.json` of the decoder alone, from either spelling."""
    own = fields.get("text_config") or {}
    text = {**fields, **own, "model_type": "qwen2"}
    text["tie_word_embeddings"] = bool(
        fields.get("tie_word_embeddings") or own.get("tie_word_embeddings")
    )
    for name in ("rope_scaling", "rope_parameters"):
        rope = dict(text.get(name) or {})
        rope.pop("mrope_section", None)
        for kind in ("type", "rope_type"):
            if rope.get(kind) == "mrope":
                rope[kind] = "default"
        text[name] = rope or None
    return text


def _whole(fields: dict[str, Any], name: str, default: int | None, source: str) -> int:
    """A field that is a whole number above 0."""
    value = fields.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{source}: {name!r} is {value!r}; expected a whole number above 0.")
    return value


def _vision(fields: dict[str, Any], source: str) -> QwenVision:
    """The tower of a `config.json`."""
    own = fields.get("vision_config")
    if not isinstance(own, dict):
        raise ValueError(f"{source} lacks the field 'vision_config', an object.")

    def whole(name: str, default: int | None = None) -> int:
        return _whole(own, name, default, source)

    patch, merge = whole("patch_size", 14), whole("spatial_merge_size", 2)
    width, heads, depth = whole("hidden_size"), whole("num_heads"), whole("depth")
    window = whole("window_size", 112) // merge // patch * merge
    full = own.get("fullatt_block_indexes", [7, 15, 23, 31])
    problems = {
        f"hidden_act {own.get('hidden_act')!r}": own.get("hidden_act", "silu") != "silu",
        f"a head of {width} / {heads}": width % heads != 0 or width // heads % 4 != 0,
        f"window_size {own.get('window_size')!r}": window < 1,
        f"fullatt_block_indexes {full!r}": not isinstance(full, list)
        or any(not isinstance(one, int) for one in full),
    }
    for feature, is_there in problems.items():
        if is_there:
            raise ValueError(f"{source}: {feature} in 'vision_config' is not supported.")
    return QwenVision(
        width=width,
        mlp_width=whole("intermediate_size"),
        num_layers=depth,
        num_heads=heads,
        out_width=whole("out_hidden_size"),
        channels=whole("in_channels", 3),
        patch=patch,
        temporal_patch=whole("temporal_patch_size", 2),
        merge=merge,
        window=window,
        full_layers=tuple(full),
        rope_theta=float((own.get("rope_parameters") or {}).get("rope_theta", 10_000.0)),
        image_id=_whole(fields, "image_token_id", 151_655, source),
    )


@dataclass(frozen=True, kw_only=True)
class QwenVLConfig(QwenConfig):
    """Every field of a Qwen2.5-VL `config.json` that changes the arithmetic.

    Attributes:
        vision: the tower.
        mrope_section: pairs of a head that turn by the position in time, in height and in width.
        video_id: the token of videos, which are not read.
    """

    vision: QwenVision = field()  # every one has it
    mrope_section: tuple[int, ...]
    video_id: int

    @classmethod
    def from_dict(cls, fields: dict[str, Any], *, source: str = "config.json") -> QwenVLConfig:
        """Both spellings: the decoder's fields in `text_config`, or as published beside it.

        Raises:
            ValueError: the file names an architecture or a feature without a parity test here.
        """
        if fields.get("model_type") != "qwen2_5_vl":
            raise ValueError(
                f"{source}: model_type {fields.get('model_type')!r} is not supported; expected "
                "'qwen2_5_vl'."
            )
        own = fields.get("text_config") or fields
        text = QwenConfig.from_dict(_text_fields(fields), source=source)
        if text.rope_scaling is not None:
            raise ValueError(
                f"{source}: RoPE scaling {text.rope_scaling.rope_type!r} with images is not "
                "supported; no parity test covers it."
            )
        rope = own.get("rope_scaling") or own.get("rope_parameters") or {}
        sections = rope.get("mrope_section", [16, 24, 24])
        if not isinstance(sections, list) or 2 * sum(sections) != text.head_dim:
            raise ValueError(
                f"{source}: 'mrope_section' is {sections!r}; expected whole numbers that add up to "
                f"half of a head, {text.head_dim // 2}."
            )
        vision = _vision(fields, source)
        if vision.out_width != text.width:
            raise ValueError(
                f"{source}: 'out_hidden_size' of 'vision_config' is {vision.out_width}; expected "
                f"the decoder's 'hidden_size', {text.width}."
            )
        return cls(
            **vars(text),
            vision=vision,
            mrope_section=tuple(sections),
            video_id=_whole(fields, "video_token_id", 151_656, source),
        )

    def hf_config(self) -> dict[str, Any]:
        """The inverse of `from_dict`, in the spelling of transformers 5."""
        text = {**super().hf_config(), "model_type": "qwen2_5_vl_text"}
        del text["architectures"], text["rope_theta"]
        text["rope_parameters"]["mrope_section"] = list(self.mrope_section)
        vision = self.vision
        return {
            "architectures": ["Qwen2_5_VLForConditionalGeneration"],
            "model_type": "qwen2_5_vl",
            "text_config": text,
            "vision_config": {
                "model_type": "qwen2_5_vl_vision",
                "depth": vision.num_layers,
                "hidden_size": vision.width,
                "hidden_act": "silu",
                "intermediate_size": vision.mlp_width,
                "num_heads": vision.num_heads,
                "in_channels": vision.channels,
                "patch_size": vision.patch,
                "spatial_merge_size": vision.merge,
                "temporal_patch_size": vision.temporal_patch,
                "window_size": vision.window * vision.patch,
                "out_hidden_size": vision.out_width,
                "fullatt_block_indexes": list(vision.full_layers),
                "rope_parameters": {"rope_type": "axial", "rope_theta": vision.rope_theta},
            },
            "image_token_id": vision.image_id,
            "video_token_id": self.video_id,
            "tie_word_embeddings": self.tie_embeddings,
            "torch_dtype": "float32",
        }

    def abstract_params(self) -> Params:
        """The decoder's and the tower's."""
        return {**super().abstract_params(), "vision": self.vision.abstract_params()}

    def logical_axes(self) -> dict[str, Any]:
        """The decoder's and the tower's."""
        return {**super().logical_axes(), "vision": self.vision.logical_axes()}

    def hf_names(self) -> dict[str, str]:
        """As published."""
        tower = {f"vision/{name}": tensor for name, tensor in VISION_NAMES.items()}
        return {**tower, **super().hf_names()}

    def hf_renamed(self) -> dict[str, str]:
        """Those of transformers 5."""
        return RENAMED

    def _by_pair(self, rotary: Int[Array, "M 3"]) -> Int[Array, "M pairs"]:
        """Of each pair of a head the position, in time, height or width, by which it turns."""
        sections = self.mrope_section
        return rotary[:, np.repeat(np.arange(len(sections)) % 3, sections)]

    def hidden_states(
        self,
        params: Params,
        token_ids: Int[Array, "R T"],
        positions: Int[Array, "R T"],
        attend: Attend,
        through: Through,
        images: BatchImages | None = None,
    ) -> Float[Array, "R T D"]:
        """Final normed hidden states of packed rows; `positions` are rotary without images."""
        if images is None:
            return super().hidden_states(params, token_ids, positions, attend, through)
        x = self._embed(params["embed"], token_ids.reshape(-1))
        seen = self.vision.embeddings(params["vision"], images.patches, images.places, through)
        x = put_images(x, seen, images.units.reshape(-1))
        rotary = self._by_pair(images.rotary.reshape(-1, 3))
        hidden = self._full_pass(params, x, rotary, attend, through)
        return hidden.reshape(*token_ids.shape, -1)

    def unembed(
        self, params: Params, hidden: Float[Array, "... D"], *, num_tokens: int
    ) -> Float[Array, "... V"]:
        """As Qwen's; tokens that stand for images and videos get the lowest value too.

        None can be written: there would be no image in its place.
        """
        logits = super().unembed(params, hidden, num_tokens=num_tokens)
        places = jnp.arange(self.vocab_size)
        is_seen = (places == self.vision.image_id) | (places == self.video_id)
        return jnp.where(is_seen, reference.LOWEST, logits)

    def sample_states(
        self,
        weights: Params,
        token_ids: Int[Array, " M"],
        positions: Int[Array, "*M"],
        through: SamplerThrough,
        images: tuple[jax.Array, jax.Array] | None = None,
    ) -> Float[Array, "M D"]:
        """Final normed hidden states.

        Args:
            weights: of `decode_weights`.
            token_ids: the tokens.
            positions: rotary ones, `[M]` or `[M, 3]`.
            through: goes through the layers.
            images: embeddings `[S, U, D]`, which lie on S shards as the tokens do, and of each
                token which of its shard's it is, int32 [M]; -1: a token of text.
        """
        x = weights["embed"]["embedding"][token_ids]
        if images is not None:
            x = put_images(x, *images)
        return self._sampler_pass(
            weights, x, self._by_pair(positions) if positions.ndim == 2 else positions, through
        )


def put_images(
    x: Float[Array, "M D"], seen: Float[Array, "S U D"], units: Int[Array, " M"]
) -> Float[Array, "M D"]:
    """Embeddings of tokens, those of images in their places; a token reads its own shard's."""
    apart = units.reshape(len(seen), -1)
    found = jax.vmap(lambda seen, units: seen.at[units].get(mode="clip"))(seen, apart)
    found = found.reshape(x.shape).astype(x.dtype)
    return jnp.where((units >= 0)[:, None], found, x)

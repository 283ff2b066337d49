"""Qwen3-VL: Qwen3's decoder with images injected at several depths (DeepStack).

The parameters are those of `models.qwen`, plus the tower's under `vision`. The tower has L layers.
Features from n of them are added to the hidden states after the decoder's first n layers:

    patch/{filter,bias}                           [D, C, temporal patch, patch, patch], [D]
    positions/embedding                           [side^2, D]
    blocks/{norm1,norm2}/{scale,bias}             [L, D]
    blocks/attention/qkv/{kernel,bias}            [L, D, 3 * D]
    blocks/attention/o/{kernel,bias}              [L, D, D]
    blocks/mlp/up/{kernel,bias}                   [L, D, F]
    blocks/mlp/down/{kernel,bias}                 [L, F, D]
    merger/norm/{scale,bias}                      [D]
    merger/up/{kernel,bias}                       [merge^2 * D, merge^2 * D]
    merger/down/{kernel,bias}                     [merge^2 * D, width of the decoder]
    deepstack/norm/{scale,bias}                   [n, merge^2 * D]
    deepstack/{up,down}/{kernel,bias}             like `merger`, with leading axis n

All layers attend over the complete image. In addition to rotary positions, each patch has a learned
position, interpolated between the four nearest points of a fixed grid.
Source: https://arxiv.org/abs/2511.21631.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from jaxrl.extras.vision.processor import Image
from jaxrl.extras.vision.qwen_vl import QwenVLConfig
from jaxrl.extras.vision.tower import (
    EPSILON,
    QUERY_BLOCK,
    VisionTower,
    attend_segments,
    make_linear_hf_names,
)
from jaxrl.models.architecture import MemoryTerms
from jaxrl.models.attachments import PatchBatch
from jaxrl.models.decoder import (
    layer_norm,
    linear,
    read_positive_int,
    reject_unsupported_features,
)
from jaxrl.models.layers import LayerScan
from jaxrl.types import Params

_TOWER = "model.visual."
_LAYER = _TOWER + "blocks.{}."
_DEEP = _TOWER + "deepstack_merger_list.{}."
HF_NAMES = {
    "patch/filter": _TOWER + "patch_embed.proj.weight",
    "patch/bias": _TOWER + "patch_embed.proj.bias",
    "positions/embedding": _TOWER + "pos_embed.weight",
    **{
        f"{ours}/{part}": f"{theirs}.{their_part}"
        for ours, theirs in (
            ("blocks/norm1", _LAYER + "norm1"),
            ("blocks/norm2", _LAYER + "norm2"),
            ("merger/norm", _TOWER + "merger.norm"),
            ("deepstack/norm", _DEEP + "norm"),
        )
        for part, their_part in (("scale", "weight"), ("bias", "bias"))
    },
    **make_linear_hf_names(
        {
            "blocks/attention/qkv": _LAYER + "attn.qkv",
            "blocks/attention/o": _LAYER + "attn.proj",
            "blocks/mlp/up": _LAYER + "mlp.linear_fc1",
            "blocks/mlp/down": _LAYER + "mlp.linear_fc2",
            "merger/up": _TOWER + "merger.linear_fc1",
            "merger/down": _TOWER + "merger.linear_fc2",
            "deepstack/up": _DEEP + "linear_fc1",
            "deepstack/down": _DEEP + "linear_fc2",
        }
    ),
}
"""HF tensor name of each parameter; `{}` is the layer index."""


@dataclass(frozen=True, kw_only=True)
class Qwen3Vision(VisionTower):
    """Vision tower of Qwen3-VL, built from a `vision_config`.

    Attributes:
        deepstack_layers: Sorted indices of the tower layers that output DeepStack features.
    """

    names = HF_NAMES
    activation = "gelu_pytorch_tanh"
    has_deepstack: ClassVar[bool] = True
    has_split_videos = True

    deepstack_layers: tuple[int, ...] = ()

    @classmethod
    def from_fields(cls, vision_fields: dict[str, Any], image_id: int, source: str) -> Qwen3Vision:
        """See `VisionTower.from_fields`."""
        common = cls.parse_common_fields(vision_fields, source)
        count = read_positive_int(vision_fields, "num_position_embeddings", source)
        side, deep = round(count**0.5), vision_fields.get("deepstack_visual_indexes", [])
        layers = range(common["num_layers"])
        has_valid_layers = set(deep) <= set(layers) and deep == sorted(set(deep))
        reject_unsupported_features(
            {
                f"num_position_embeddings {count} (not a square)": side**2 != count,
                f"deepstack_visual_indexes {deep} with {len(layers)} layers": not has_valid_layers
                or bool(deep) is not cls.has_deepstack,
            },
            f"{source}, 'vision_config'",
        )
        return cls(**common, token_id=image_id, side=side, deepstack_layers=tuple(deep))

    def to_fields(self) -> dict[str, Any]:
        """Return the `vision_config` fields; the inverse of `from_fields`."""
        return {
            **super().to_fields(),
            "num_position_embeddings": self.side**2,
            "deepstack_visual_indexes": list(self.deepstack_layers),
        }

    @property
    def num_deepstack_layers(self) -> int:
        """Number of initial decoder layers that get features from the tower."""
        return len(self.deepstack_layers)

    def estimate_layer_memory(self) -> MemoryTerms:
        """Estimate the memory of attention and the MLP, as if neither were split."""
        products = 4 * self.width + self.mlp_width  # all matmuls except the last
        return MemoryTerms(
            activations=4 * self.mlp_width + 22 * self.width,
            saved_activations={
                "none": 6 * self.mlp_width + 18 * self.width,
                "dots": products,
                "names": products + self.width,
            },
            prefill_activations=2 * self.mlp_width + 6 * self.width,
        )

    def count_attention_scores(self, num_patches: int) -> int:
        """Return the number of attention scores of a query block over all patches."""
        return self.num_heads * min(num_patches, QUERY_BLOCK) * num_patches

    def collate_frames(self, images: Sequence[Image]) -> PatchBatch:
        """Concatenate the patches of images.

        Each patch has four coords: the 1-based index of its image, the numbers of patch rows and
        patch columns in that image, and the index of the patch in the image.
        """
        patches = [np.zeros((0, self.num_values_per_patch), np.float32)]
        coords = [np.zeros((0, 4), np.int32)]
        for number, image in enumerate(images, start=1):
            (_, h, w), count = image.grid, image.num_patches
            image_coords = np.broadcast_to(np.array([number, h, w], np.int32), (count, 3))
            coords.append(np.column_stack([image_coords, np.arange(count, dtype=np.int32)]))
            patches.append(image.patches)
        ends = np.cumsum([image.num_patches // self.num_patches_per_token for image in images])
        units = np.split(np.arange(ends[-1], dtype=np.int32), ends[:-1]) if images else []
        return PatchBatch(
            patches=np.concatenate(patches), coords=np.concatenate(coords), units=tuple(units)
        )

    # On the device.

    def encode(
        self,
        params: Params,
        patches: Float[Array, "S P C"],
        coords: Int[Array, "S P W"],
        layer_scan: LayerScan,
    ) -> Float[Array, "S U E"]:
        """Compute embeddings and DeepStack features of each unit of `merge^2` patches.

        E is the decoder's width times `1 + num_deepstack_layers`.
        """
        S, P, _ = patches.shape
        patch_coords, sizes = self._compute_patch_coords(coords.reshape(S * P, 4))
        # Without the constraint, the compiler splits the width and replicates all patches.
        x = layer_scan.constrain_to_shards(self._embed_patches(params["patch"], patches))
        if self.side:
            x = x + self._interpolate_positions(
                params["positions"]["embedding"], patch_coords, sizes
            ).astype(x.dtype)
        angles, attend = (
            self._compute_rope_angles(patch_coords),
            partial(attend_segments, ids=coords[..., 0]),
        )

        def layer(x: jax.Array, weights: Params) -> jax.Array:
            normed = layer_norm(x, weights["norm1"], EPSILON)
            x = x + self._compute_attention(weights["attention"], normed, angles, attend, S)
            normed, mlp = layer_norm(x, weights["norm2"], EPSILON), weights["mlp"]
            up = checkpoint_name(linear(mlp["up"], normed), "up")
            return x + linear(mlp["down"], self._activate(up))

        if self.deepstack_layers:
            x, intermediates = layer_scan.run_with_intermediates(
                layer, x, params["blocks"], self.deepstack_layers
            )
            deep = jax.vmap(self._merge_patches)(params["deepstack"], intermediates)
            image_embeds = jnp.concatenate([self._merge_patches(params["merger"], x)[None], deep])
        else:
            x = layer_scan(layer, x, params["blocks"])
            image_embeds = self._merge_patches(params["merger"], x)[None]
        return layer_scan.constrain_to_shards(
            image_embeds.swapaxes(0, 1).reshape(S, P // self.num_patches_per_token, -1)
        )

    def _activate(self, x: Float[Array, "M F"]) -> Float[Array, "M F"]:
        """Apply the MLP's nonlinearity."""
        return jax.nn.gelu(x, approximate=True)

    def _merge_patches(self, weights: Params, x: Float[Array, "M D"]) -> Float[Array, "U W"]:
        """Project each unit of patches to the decoder's width, after a norm per patch or unit."""
        norm = weights["norm"]
        x = layer_norm(x.reshape(-1, len(norm["scale"])), norm, EPSILON)
        x = x.reshape(-1, self.num_patches_per_token * self.width)
        return linear(weights["down"], jax.nn.gelu(linear(weights["up"], x), approximate=False))

    def _compute_patch_coords(
        self, coords: Int[Array, "M 4"]
    ) -> tuple[Int[Array, "M 2"], Int[Array, "M 2"]]:
        """Return each patch's row and column, and the size of its image in patches."""
        sizes, (unit, within) = coords[:, 1:3], divmod(coords[:, 3], self.num_patches_per_token)
        units_in_row = jnp.maximum(sizes[:, 1] // self.merge, 1)  # padding has no rows
        unit_coords, offsets = divmod(unit, units_in_row), divmod(within, self.merge)
        return jnp.stack(unit_coords, axis=1) * self.merge + jnp.stack(offsets, axis=1), sizes

    def _interpolate_positions(
        self, table: Float[Array, "G D"], patch_coords: Int[Array, "M 2"], sizes: Int[Array, "M 2"]
    ) -> Float[Array, "M D"]:
        """Resize the grid of position embeddings bilinearly to each image, with aligned corners."""
        grid_coords = patch_coords.astype(jnp.float32) * (self.side - 1) / jnp.maximum(sizes - 1, 1)
        low = jnp.floor(grid_coords).astype(jnp.int32)
        fraction = grid_coords - low
        ends = low, jnp.minimum(low + 1, self.side - 1)
        weights = 1 - fraction, fraction

        def get_corner(i: int, j: int) -> jax.Array:
            vectors = table[ends[i][:, 0] * self.side + ends[j][:, 1]].astype(jnp.float32)
            return (weights[i][:, 0] * weights[j][:, 1])[:, None] * vectors

        return get_corner(0, 0) + get_corner(0, 1) + get_corner(1, 0) + get_corner(1, 1)


@dataclass(frozen=True, kw_only=True)
class Qwen3VLConfig(QwenVLConfig):
    """Config of a Qwen3-VL model.

    Unlike Qwen2.5-VL, it has query and key norms and interleaved rotary positions.
    """

    model_type = "qwen3_vl"
    text_type = "qwen3"
    hf_class = "Qwen3VLForConditionalGeneration"
    tower_class = Qwen3Vision
    default_sections = (24, 20, 20)
    is_interleaved = True
    ties_in_text = False

    def _get_pair_axes(self) -> np.ndarray:
        """Return the position axis of each rotary pair: time, height, width in turn, then time."""
        axes = np.zeros(self.rotary_dim // 2, np.int32)
        for axis in (1, 2):
            axes[axis : 3 * self.mrope_section[axis] : 3] = axis
        return axes

    def get_hf_names(self) -> dict[str, str]:
        """Return the HF names of the parameters, as in checkpoints and in transformers 5."""
        return {
            name: tensor
            if name.startswith("vision/")
            else tensor.replace("model.", "model.language_model.", 1)
            for name, tensor in super().get_hf_names().items()
        }

    def get_hf_prefix_map(self) -> dict[str, str]:
        """Return {}, since tensor names have no alternative prefixes."""
        return {}

"""Vision tower of Qwen2.5-VL, which encodes image patches into embeddings of image tokens.

The parameter tree, with leading axis L over the tower's layers:

    patch/filter                                  [D, C, temporal patch, patch, patch]
    blocks/{norm1,norm2}/scale                    [L, D]
    blocks/attention/qkv/{kernel,bias}            [L, D, 3 * D]
    blocks/attention/o/{kernel,bias}              [L, D, D]
    blocks/mlp/{gate,up}/{kernel,bias}            [L, D, F]
    blocks/mlp/down/{kernel,bias}                 [L, F, D]
    merger/norm/scale                             [D]
    merger/up/{kernel,bias}                       [merge^2 * D, merge^2 * D]
    merger/down/{kernel,bias}                     [merge^2 * D, width of the decoder]

Most layers attend within windows; the others attend over the complete image. The host sorts an
image's patches by window and labels each patch with its window, so the device never permutes
patches. Source: https://arxiv.org/abs/2502.13923.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from jaxrl.extras.vision.processor import Image
from jaxrl.extras.vision.tower import (
    EPSILON,
    QUERY_BLOCK,
    VisionTower,
    attend_segments,
    make_linear_hf_names,
    masked_attention,
)
from jaxrl.models.architecture import MemoryTerms
from jaxrl.models.attachments import PatchBatch
from jaxrl.models.decoder import (
    linear,
    read_positive_int,
    reject_unsupported_features,
    rms_norm,
)
from jaxrl.models.layers import LayerScan
from jaxrl.types import Params

_LAYER = "visual.blocks.{}."
HF_NAMES = {
    "patch/filter": "visual.patch_embed.proj.weight",
    "blocks/norm1/scale": _LAYER + "norm1.weight",
    "blocks/norm2/scale": _LAYER + "norm2.weight",
    **make_linear_hf_names(
        {
            "blocks/attention/qkv": _LAYER + "attn.qkv",
            "blocks/attention/o": _LAYER + "attn.proj",
            "blocks/mlp/gate": _LAYER + "mlp.gate_proj",
            "blocks/mlp/up": _LAYER + "mlp.up_proj",
            "blocks/mlp/down": _LAYER + "mlp.down_proj",
            "merger/up": "visual.merger.mlp.0",
            "merger/down": "visual.merger.mlp.2",
        }
    ),
    "merger/norm/scale": "visual.merger.ln_q.weight",
}
"""HF tensor name of each parameter; `{}` is the layer index."""


@dataclass(frozen=True, kw_only=True)
class QwenVision(VisionTower):
    """Vision tower of Qwen2.5-VL, built from a `vision_config`.

    Attributes:
        full_layers: Indices of the layers that attend over the complete image.
        window: Number of patches along each side of a window.
        tokens_per_second: Number of time positions per second of a video.
    """

    names = HF_NAMES
    activation = "silu"

    window: int
    full_layers: tuple[int, ...]
    tokens_per_second: int = 4

    @classmethod
    def from_fields(cls, vision_fields: dict[str, Any], image_id: int, source: str) -> QwenVision:
        """See `VisionTower.from_fields`."""
        common = cls.parse_common_fields(vision_fields, source)
        merge, patch = common["merge"], common["patch"]
        window = read_positive_int(vision_fields, "window_size", source) // merge // patch * merge
        reject_unsupported_features(
            {f"window_size {vision_fields['window_size']}": window < 1},
            f"{source}, 'vision_config'",
        )
        return cls(
            **common,
            token_id=image_id,
            window=window,
            full_layers=tuple(vision_fields["fullatt_block_indexes"]),
            tokens_per_second=read_positive_int(vision_fields, "tokens_per_second", source),
        )

    def to_fields(self) -> dict[str, Any]:
        """Return the `vision_config` fields; the inverse of `from_fields`."""
        return {
            **super().to_fields(),
            "window_size": self.window * self.patch,
            "fullatt_block_indexes": list(self.full_layers),
            "tokens_per_second": self.tokens_per_second,
        }

    def _compute_time_positions(self, image: Image) -> np.ndarray:
        """See `VisionTower._compute_time_positions`; the step depends on the frame rate."""
        interval = np.float32(image.times[1] if len(image.times) > 1 else 0)
        step = np.float32(self.tokens_per_second) * interval  # float32, as in transformers
        return (np.arange(image.grid[0], dtype=np.float32) * step).astype(np.int32)

    def estimate_layer_memory(self) -> MemoryTerms:
        """Estimate the memory of attention and the gated MLP, as if neither were split."""
        products = 4 * self.width + 2 * self.mlp_width  # all matmuls except the last
        return MemoryTerms(
            activations=4 * self.mlp_width + 22 * self.width,
            saved_activations={
                "none": 6 * self.mlp_width + 18 * self.width,
                "dots": products,
                "names": products + self.width,
            },
            prefill_activations=self.mlp_width + 6 * self.width,
        )

    def count_attention_scores(self, num_patches: int) -> int:
        """Return the number of attention scores of a full or windowed layer, the larger one."""
        block_scores = min(num_patches, QUERY_BLOCK) * num_patches
        return self.num_heads * max(block_scores, 3 * self.window**2 * num_patches)

    def collate_frames(self, images: Sequence[Image]) -> PatchBatch:
        """Concatenate the patches of images, sorted by window.

        Each patch has four coords: the 1-based index of its image, its window, row and column.
        """
        patches = [np.zeros((0, self.num_values_per_patch), np.float32)]
        coords = [np.zeros((0, 4), np.int32)]
        units, num_windows, num_units = [], 0, 0
        for number, image in enumerate(images, start=1):
            order, window_coords, token_units = _sort_by_window(image.grid, self.merge, self.window)
            patches.append(image.patches[order])
            coords.append(window_coords + np.array([number, num_windows, 0, 0], np.int32))
            units.append(token_units + num_units)
            num_windows = int(coords[-1][:, 1].max()) + 1
            num_units += len(token_units)
        return PatchBatch(
            patches=np.concatenate(patches), coords=np.concatenate(coords), units=tuple(units)
        )

    def encode(
        self,
        params: Params,
        patches: Float[Array, "S P C"],
        coords: Int[Array, "S P W"],
        layer_scan: LayerScan,
    ) -> Float[Array, "S U D"]:
        """Compute the embedding of each unit of `merge^2` patches."""
        S, P, _ = patches.shape
        # Without the constraint, the compiler splits the width and replicates all patches.
        x = layer_scan.constrain_to_shards(self._embed_patches(params["patch"], patches))
        angles = self._compute_rope_angles(coords.reshape(S * P, 4)[:, 2:])
        number, window = coords[..., 0], jnp.where(coords[..., 0] > 0, coords[..., 1], -1)

        def layer(x: jax.Array, inputs: Params) -> jax.Array:
            weights, is_full = inputs["weights"], inputs["is_full"] > 0
            normed = rms_norm(x, weights["norm1"]["scale"], EPSILON)
            attend = partial(
                jax.lax.cond,
                is_full,
                partial(attend_segments, ids=number),
                partial(attend_windows, ids=window, block_size=self.window**2),
            )
            x = x + self._compute_attention(weights["attention"], normed, angles, attend, S)
            normed, mlp = rms_norm(x, weights["norm2"]["scale"], EPSILON), weights["mlp"]
            gate, up = (checkpoint_name(linear(mlp[name], normed), name) for name in ("gate", "up"))
            return x + linear(mlp["down"], jax.nn.silu(gate) * up)

        # Floats instead of booleans, since layer inputs are differentiated.
        is_full = np.isin(np.arange(self.num_layers), self.full_layers).astype(np.float32)
        x = layer_scan(layer, x, {"weights": params["blocks"], "is_full": jnp.asarray(is_full)})
        merger = params["merger"]
        x = rms_norm(x, merger["norm"]["scale"], EPSILON).reshape(
            S * P // self.num_patches_per_token, -1
        )
        x = linear(merger["down"], jax.nn.gelu(linear(merger["up"], x), approximate=False))
        return layer_scan.constrain_to_shards(x.reshape(S, P // self.num_patches_per_token, -1))


@cache
def _sort_by_window(
    grid: tuple[int, int, int], merge: int, window: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sort the patches of an image by window.

    Args:
        grid: Number of patches in time, height and width; patches are ordered unit by unit.
        merge: Number of patches per side of a unit.
        window: Number of patches per side of a window.

    Returns:
        Indices of the patches in window order, their coords (0, window, row, column), and the
        position of each unit in that order.
    """
    _, h, w = grid
    rows, columns = np.indices((h, w)).reshape(2, h // merge, merge, w // merge, merge)
    rows, columns = (x.swapaxes(1, 2).reshape(-1, merge**2) for x in (rows, columns))
    window_ids = rows[:, 0] // window * -(-w // window) + columns[:, 0] // window
    order = np.argsort(window_ids, kind="stable")
    coords = np.zeros((h * w, 4), np.int32)
    coords[:, 1] = np.repeat(window_ids[order], merge**2)
    coords[:, 2], coords[:, 3] = rows[order].reshape(-1), columns[order].reshape(-1)
    patches = (order[:, None] * merge**2 + np.arange(merge**2)).reshape(-1)
    return patches, coords, np.argsort(order).astype(np.int32)


def attend_windows(
    q: Float[Array, "S P N H"],
    k: Float[Array, "S P N H"],
    v: Float[Array, "S P N H"],
    ids: Int[Array, "S P"],
    *,
    block_size: int,
) -> Float[Array, "S P N H"]:
    """Compute `attend_segments` for contiguous segments of at most `block_size` patches.

    A patch attends only to its block of `block_size` patches and the two neighboring blocks.
    """
    S, P, N, H = q.shape
    count = -(-P // block_size)

    def split_blocks(x: jax.Array, before: int, fill: int) -> jax.Array:
        pad = [(0, 0), (before * block_size, (count + before) * block_size - P)]
        x = jnp.pad(x, pad + [(0, 0)] * (x.ndim - 2), constant_values=fill)
        return x.reshape(S, -1, block_size, *x.shape[2:])

    def concat_neighbors(x: jax.Array, fill: int = 0) -> jax.Array:
        x = split_blocks(x, 1, fill)
        return jnp.concatenate([x[:, :-2], x[:, 1:-1], x[:, 2:]], axis=2)

    def merge_blocks(x: jax.Array) -> jax.Array:
        return x.reshape(S * count, *x.shape[2:])

    # Padding has a separate id and attends to itself, so that no softmax is empty.
    queries, query_ids = merge_blocks(split_blocks(q, 0, 0)), merge_blocks(split_blocks(ids, 0, -1))
    keys, values, key_ids = (
        merge_blocks(concat_neighbors(k)),
        merge_blocks(concat_neighbors(v)),
        merge_blocks(concat_neighbors(ids, -1)),
    )
    out = masked_attention(queries, keys, values, query_ids[:, :, None] == key_ids[:, None])
    return out.reshape(S, count * block_size, N, H)[:, :P]

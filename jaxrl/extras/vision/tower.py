"""Common parts of Qwen's vision towers: image tokens, attention and config parsing.

A tower encodes patches of images into embeddings of image tokens. Its parameter tree contains
`patch`, stacked `blocks` and `merger`. `qwen_vision.py` defines the tower of Qwen2.5-VL, and
`qwen3_vl.py` defines that of Qwen3-VL, the base class of the others.
"""

from __future__ import annotations

import dataclasses
import itertools
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from jaxrl.extras.vision.processor import Image
from jaxrl.models.attachments import PatchBatch, Tower
from jaxrl.models.attention.reference import MASK_VALUE
from jaxrl.models.decoder import (
    Angles,
    apply_rope,
    linear,
    read_positive_float,
    read_positive_int,
    reject_unsupported_features,
)
from jaxrl.models.layers import Attend
from jaxrl.types import Params

EPSILON = 1e-6
"""Epsilon of the norms, which `config.json` does not contain."""

QUERY_BLOCK = 256
"""Number of query patches whose scores are in memory at a time."""


LINEAR_AXES = {
    "qkv": ("width", None),  # heads share an axis, so `tensor` cannot split them
    "o": (None, "width"),
    "gate": ("width", "mlp"),
    "up": ("width", "mlp"),
    "down": ("mlp", "width"),
}
"""Axis names of the kernel of each linear layer. MLPs are tensor-parallel; attention is not."""


def make_linear_hf_names(names: Mapping[str, str]) -> dict[str, str]:
    """Return the HF names of the kernel and the bias of each linear layer in `names`."""
    parts = (("kernel", "weight"), ("bias", "bias"))
    return {f"{ours}/{suffix}": f"{names[ours]}.{part}" for ours in names for suffix, part in parts}


@dataclass(frozen=True, kw_only=True)
class VisionTower(Tower):
    """Base class of Qwen's vision towers, with their common `vision_config` fields.

    Attributes:
        merge: Number of patches along each side of a unit, which becomes one token.
        side: Number of positions along each side of the learned grid; 0 without learned positions.
    """

    has_split_videos: ClassVar[bool] = False  # True if text separates the frames of a video

    names: ClassVar[dict[str, str]]  # HF tensor name of each parameter; `{}` is the layer index
    activation: ClassVar[str]  # `hidden_act`
    width_field: ClassVar[str] = "hidden_size"
    out_width_field: ClassVar[str] = "out_hidden_size"
    entry: ClassVar[str] = "vision"

    width: int
    mlp_width: int
    num_layers: int
    num_heads: int
    out_width: int
    channels: int
    patch: int
    temporal_patch: int
    merge: int
    rope_theta: float
    side: int = 0
    token_id: int
    video_id: int = -1

    @classmethod
    @abstractmethod
    def from_fields(cls, vision_fields: dict[str, Any], image_id: int, source: str) -> VisionTower:
        """Build the tower, without `video_id`, from a `vision_config` after `fill_hf_defaults`.

        Raises:
            ValueError: The fields require an unsupported feature.
        """

    @classmethod
    def parse_common_fields(cls, vision_fields: dict[str, Any], source: str) -> dict[str, Any]:
        """Parse the common `vision_config` fields, except for `token_id`.

        Raises:
            ValueError: See `from_fields`.
        """

        def read_int_field(name: str) -> int:
            return read_positive_int(vision_fields, name, source)

        width, heads = read_int_field(cls.width_field), read_int_field("num_heads")
        activation = vision_fields["hidden_act"]
        rope = vision_fields.get("rope_parameters") or {}
        theta = read_positive_float({**vision_fields, **rope}, "rope_theta", source)
        sizes = {
            "width": width,
            "mlp_width": read_int_field("intermediate_size"),
            "num_layers": read_int_field("depth"),
            "num_heads": heads,
            "out_width": read_int_field(cls.out_width_field),
            "channels": read_int_field("in_channels"),
            "patch": read_int_field("patch_size"),
            "temporal_patch": read_int_field("temporal_patch_size"),
            "merge": read_int_field("spatial_merge_size"),
        }
        reject_unsupported_features(
            {
                f"hidden_act {activation!r:.80}": activation != cls.activation,
                f"a head of {width} / {heads}": width % heads != 0 or width // heads % 4 != 0,
            },
            f"{source}, 'vision_config'",
        )
        return sizes | {"rope_theta": theta}

    def to_fields(self) -> dict[str, Any]:
        """Return the `vision_config` fields; the inverse of `from_fields`."""
        return {
            "depth": self.num_layers,
            self.width_field: self.width,
            "hidden_act": self.activation,
            "intermediate_size": self.mlp_width,
            "num_heads": self.num_heads,
            "in_channels": self.channels,
            "patch_size": self.patch,
            "spatial_merge_size": self.merge,
            "temporal_patch_size": self.temporal_patch,
            self.out_width_field: self.out_width,
            "rope_parameters": {"rope_type": "axial", "rope_theta": self.rope_theta},
        }

    @property
    def num_values_per_patch(self) -> int:
        """Number of values per patch."""
        return self.channels * self.temporal_patch * self.patch**2

    @property
    def num_patches_per_token(self) -> int:
        """Number of patches per token."""
        return self.merge**2

    # On the host.

    def count_tokens(self, image: Image) -> int:
        """Return the number of tokens of an image; see `Tower.num_tokens`."""
        t, h, w = image.grid
        if t != max(len(image.times), 1) or h < 1 or w < 1 or h % self.merge or w % self.merge:
            raise ValueError(
                f"an image has a grid of {image.grid} patches; expected {max(len(image.times), 1)} "
                f"in time and multiples of {self.merge}."
            )
        if image.patches.shape != (t * h * w, self.num_values_per_patch):
            raise ValueError(
                f"an image with a grid of {image.grid} has patches {list(image.patches.shape)}; "
                f"expected {[t * h * w, self.num_values_per_patch]}. Use the image processor of "
                "the model."
            )
        return t * h * w // self.num_patches_per_token

    def find_attachment_tokens(
        self, token_ids: np.ndarray, attachments: Sequence[Image]
    ) -> list[np.ndarray]:
        """Return the indices of the tokens of each image or video.

        Raises:
            ValueError: The number or the kind of the tokens does not match the attachments.
        """
        token_ids = np.asarray(token_ids)
        indices = np.flatnonzero(self.is_placeholder(token_ids))
        counts = [self.count_tokens(image) for image in attachments]
        if sum(counts) != len(indices):
            raise ValueError(
                f"a prompt or an observation has {len(indices)} image tokens (id {self.token_id}, "
                f"or {self.video_id} for videos); expected {sum(counts)} for its {len(counts)} "
                f"images with grids {[image.grid for image in attachments]}."
            )
        token_runs = np.split(indices, np.cumsum(counts)[:-1]) if counts else []
        for image, run in zip(attachments, token_runs, strict=True):
            placeholder_id = self.video_id if image.times else self.token_id
            blocks = np.split(run, self._count_token_runs(image))
            if (token_ids[run] != placeholder_id).any() or any(
                b[-1] - b[0] >= len(b) for b in blocks
            ):
                raise ValueError(
                    f"the tokens of an image with a grid of {image.grid} are not all "
                    f"{placeholder_id}, or are not contiguous; expected runs of lengths {counts}, "
                    "one per image."
                )
        return token_runs

    def _count_token_runs(self, image: Image) -> int:
        """Return the number of contiguous runs of an image's tokens."""
        return image.grid[0] if self.has_split_videos else 1

    def _compute_time_positions(self, image: Image) -> np.ndarray:
        """Return the relative time position of each temporal patch, int [t]."""
        return np.arange(image.grid[0])

    def compute_positions(
        self, token_ids: np.ndarray, attachments: Sequence[Image], *, start: int = 0
    ) -> np.ndarray:
        """Compute M-RoPE positions (section 2.1 of https://arxiv.org/abs/2502.13923).

        An image starts at the position after the preceding text. Text continues after the image's
        highest row or column, as in transformers 5.24; in the paper, it continues after the highest
        position on any axis, including time.
        """
        out = np.zeros((3, len(token_ids)), np.int32)
        text_start, position = 0, start
        blocks = [
            (block, image)
            for run, image in zip(
                self.find_attachment_tokens(token_ids, attachments), attachments, strict=True
            )
            for block in np.split(run, self._count_token_runs(image))
        ]
        for block, image in blocks:
            first, count = int(block[0]), len(block)
            out[:, text_start:first] = np.arange(position, position + first - text_start)
            position += first - text_start
            h, w = (side // self.merge for side in image.grid[1:])
            coords = np.indices((count // (h * w), h, w)).reshape(3, -1)
            coords[0] = self._compute_time_positions(image)[coords[0]]
            out[:, first : first + count] = coords + position
            position += max(h, w)
            text_start = first + count
        out[:, text_start:] = np.arange(position, position + len(token_ids) - text_start)
        return out.T

    def collate(self, attachments: Sequence[Image]) -> PatchBatch:
        """Concatenate images and videos; the frames of a video are encoded like images."""
        frames = [
            Image(patches=patches, grid=(1, *image.grid[1:]))
            for image in attachments
            for patches in np.split(image.patches, image.grid[0])
        ]
        batch = self.collate_frames(frames)
        ends = np.cumsum([0, *(image.grid[0] for image in attachments)])
        units = [np.concatenate(batch.units[i:j]) for i, j in itertools.pairwise(ends)]
        return dataclasses.replace(batch, units=tuple(units))

    @abstractmethod
    def collate_frames(self, images: Sequence[Image]) -> PatchBatch:
        """Concatenate images with one temporal patch each; see `collate`."""

    # On the device.

    def _embed_patches(
        self, weights: Params, patches: Float[Array, "S P C"]
    ) -> Float[Array, "M D"]:
        """Embed the patches of all rows, and concatenate the rows: M = S * P."""
        kernel = weights["filter"].reshape(self.width, -1).T
        x = patches.reshape(-1, patches.shape[2]).astype(kernel.dtype) @ kernel
        if "bias" not in weights:
            return x
        return x + jnp.broadcast_to(weights["bias"], x.shape).astype(x.dtype)

    def _compute_rope_angles(self, indices: Int[Array, "M 2"]) -> Angles:
        """Compute rotary angles: half of the pairs rotate by row, half by column."""
        quarter = self.width // self.num_heads // 4
        frequency = self.rope_theta ** (-jnp.arange(quarter, dtype=jnp.float32) / quarter)
        angle = (indices[:, :, None].astype(jnp.float32) * frequency).reshape(len(indices), 1, -1)
        sin = jnp.sin(angle)
        return jnp.cos(angle)[:, :, None], jnp.stack([-sin, sin], axis=2)

    def _compute_attention(
        self, weights: Params, x: Float[Array, "M D"], angles: Angles, attend: Attend, num_rows: int
    ) -> Float[Array, "M D"]:
        """Compute the attention residual of patches.

        Args:
            weights: Attention weights of the layer.
            x: Normalized states of all patches.
            angles: Rotary angles of the patches.
            attend: Function that maps queries, keys and values `[S, P, N, H]` to outputs.
            num_rows: Number of rows S.
        """
        qkv = checkpoint_name(linear(weights["qkv"], x), "q")
        q, k, v = qkv.reshape(len(x), 3, self.num_heads, -1).swapaxes(0, 1)
        q, k, v = (
            heads.reshape(num_rows, -1, *heads.shape[1:])
            for heads in (apply_rope(q, angles), apply_rope(k, angles), v)
        )
        attended = checkpoint_name(attend(q, k, v), "attended").reshape(len(x), -1)
        return checkpoint_name(linear(weights["o"], attended), "o")

    # Parameters.

    def make_abstract_params(self) -> Params:
        """Return the parameters as `jax.ShapeDtypeStruct`s."""
        D, F, merged_width = self.width, self.mlp_width, self.num_patches_per_token * self.width
        linear_shapes = {
            "attention/qkv": (D, 3 * D),
            "attention/o": (D, D),
            "mlp/gate": (D, F),
            "mlp/up": (D, F),
            "mlp/down": (F, D),
            "up": (merged_width, merged_width),
            "down": (merged_width, self.out_width),
        }
        stacks = {"blocks": self.num_layers, "deepstack": self.num_deepstack_layers}
        shapes: dict[str, tuple[int, ...]] = {
            "patch/filter": (D, self.channels, self.temporal_patch, self.patch, self.patch),
            "patch/bias": (D,),
            "positions/embedding": (self.side**2, D),
        }
        for name in self.names.keys() - shapes.keys():
            entry, _, rest = name.partition("/")
            layer, _, leaf = rest.rpartition("/")
            norm_width = merged_width if entry == "deepstack" else D
            inputs, outputs = linear_shapes.get(layer, (norm_width, norm_width))
            shape = (inputs, outputs) if leaf == "kernel" else (outputs,)
            shapes[name] = (stacks[entry], *shape) if entry in stacks else shape
        leaves = {name: jax.ShapeDtypeStruct(shapes[name], jnp.float32) for name in self.names}
        return unflatten_dict(leaves, sep="/")

    def get_logical_axes(self) -> dict[str, Any]:
        """Return the axis names of each parameter."""
        axes: dict[str, tuple[str | None, ...]] = {
            "patch/filter": ("width", None, None, None, None),
            "patch/bias": (None,),
            "positions/embedding": (None, None),
        }
        for name in self.names.keys() - axes.keys():
            entry, *_, layer, leaf = name.split("/")
            inputs, outputs = LINEAR_AXES.get(layer, (None, None))  # norms are not split
            leaf_axes = (inputs, outputs) if leaf == "kernel" else (outputs,)
            axes[name] = ("layer", *leaf_axes) if entry in ("blocks", "deepstack") else leaf_axes
        return unflatten_dict({name: axes[name] for name in self.names}, sep="/")


def attend_segments(
    q: Float[Array, "S P N H"],
    k: Float[Array, "S P N H"],
    v: Float[Array, "S P N H"],
    ids: Int[Array, "S P"],
) -> Float[Array, "S P N H"]:
    """Compute bidirectional attention among the patches of a row that have the same id.

    Only the scores of `QUERY_BLOCK` queries are in memory at a time; the backward pass recomputes
    them.
    """
    S, P, N, H = q.shape
    count = -(-P // QUERY_BLOCK)
    size = -(-P // count)
    blocks, id_blocks = (
        jnp.pad(x, [(0, 0), (0, count * size - P)] + [(0, 0)] * (x.ndim - 2))
        .reshape(S, count, size, *x.shape[2:])
        .swapaxes(0, 1)
        for x in (q, ids)
    )

    @jax.checkpoint
    def attend_block(block: tuple[jax.Array, jax.Array]) -> jax.Array:
        queries, query_ids = block
        return masked_attention(queries, k, v, query_ids[:, :, None] == ids[:, None])

    return jax.lax.map(attend_block, (blocks, id_blocks)).swapaxes(0, 1).reshape(S, -1, N, H)[:, :P]


def masked_attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """Compute masked attention of queries `[s, q, N, H]` to keys `[s, p, N, H]` in float32."""
    product = partial(jnp.einsum, preferred_element_type=jnp.float32)
    scores = jnp.where(
        mask[:, None], product("sqnh,spnh->snqp", q, k) * q.shape[3] ** -0.5, MASK_VALUE
    )
    weights = jnp.exp(scores - scores.max(axis=-1, keepdims=True))
    total = weights.sum(axis=-1).swapaxes(1, 2)[..., None]
    return (product("snqp,spnh->sqnh", weights.astype(v.dtype), v) / total).astype(v.dtype)

"""The vision tower of Qwen2.5-VL: patches of images to what stands in the place of image tokens.

The parameter tree, with the leading axis L over the tower's layers:

    patch/filter                                  [D, C, temporal patch, patch, patch]
    blocks/{norm1,norm2}/scale                    [L, D]
    blocks/attention/qkv/{kernel,bias}            [L, D, 3 * D]
    blocks/attention/o/{kernel,bias}              [L, D, D]
    blocks/mlp/{gate,up}/{kernel,bias}            [L, D, F]
    blocks/mlp/down/{kernel,bias}                 [L, F, D]
    merger/norm/scale                             [D]
    merger/up/{kernel,bias}                       [merge^2 * D, merge^2 * D]
    merger/down/{kernel,bias}                     [merge^2 * D, width of the decoder]

Most layers attend within windows, some within the whole image. The host puts the patches of an
image in the order of its windows and says which window each is in, so the device permutes nothing.
Source: https://arxiv.org/abs/2502.13923.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from jaxrl.models.architecture import Arranged, MemoryTerms, Vision
from jaxrl.models.attention.reference import LOWEST
from jaxrl.models.decoder import linear, rms_norm, rope
from jaxrl.models.layers import Through
from jaxrl.types import Image, Params

EPSILON = 1e-6
"""Of the tower's norms; no config.json has it."""

QUERY_BLOCK = 256
"""Patches whose scores over a whole row are in memory at a time."""

_LAYER = "visual.blocks.{}."
HF_NAMES = {
    "patch/filter": "visual.patch_embed.proj.weight",
    "blocks/norm1/scale": _LAYER + "norm1.weight",
    "blocks/norm2/scale": _LAYER + "norm2.weight",
    **{
        f"{ours}/{part}": f"{theirs}.{their_part}"
        for ours, theirs in (
            ("blocks/attention/qkv", _LAYER + "attn.qkv"),
            ("blocks/attention/o", _LAYER + "attn.proj"),
            ("blocks/mlp/gate", _LAYER + "mlp.gate_proj"),
            ("blocks/mlp/up", _LAYER + "mlp.up_proj"),
            ("blocks/mlp/down", _LAYER + "mlp.down_proj"),
            ("merger/up", "visual.merger.mlp.0"),
            ("merger/down", "visual.merger.mlp.2"),
        )
        for part, their_part in (("kernel", "weight"), ("bias", "bias"))
    },
    "merger/norm/scale": "visual.merger.ln_q.weight",
}
"""Parameter to HF tensor, `{}` the layer."""


@dataclass(frozen=True, kw_only=True)
class QwenVision(Vision):
    """Every field of a `vision_config` that changes the arithmetic, and where images stand.

    Attributes:
        full_layers: indices of the layers that attend within the whole image.
        window: patches along a side of a window.
        merge: patches along a side of what becomes one token.
    """

    width: int
    mlp_width: int
    num_layers: int
    num_heads: int
    out_width: int
    channels: int
    patch: int
    temporal_patch: int
    merge: int
    window: int
    full_layers: tuple[int, ...]
    rope_theta: float
    image_id: int

    @property
    def patch_values(self) -> int:
        """Numbers of one patch."""
        return self.channels * self.temporal_patch * self.patch**2

    @property
    def unit(self) -> int:
        """Patches that become one token."""
        return self.merge**2

    def memory_terms(self) -> MemoryTerms:
        """Of attention and a gated MLP; nothing is split over devices."""
        products = 4 * self.width + 2 * self.mlp_width  # all but the last
        return MemoryTerms(
            activations=4 * self.mlp_width + 22 * self.width,
            saved_activations={
                "none": 6 * self.mlp_width + 18 * self.width,
                "dots": products,
                "names": products + self.width,
            },
            read_activations=self.mlp_width + 6 * self.width,
            inner=self.mlp_width,
        )

    def num_scores(self, num_patches: int) -> int:
        """Of a block of queries over all patches, or of windows over those beside them."""
        of_block = min(num_patches, QUERY_BLOCK) * num_patches
        return self.num_heads * max(of_block, 3 * self.window**2 * num_patches)

    # On the host.

    def num_tokens(self, image: Image) -> int:
        """Its units."""
        t, h, w = image.grid
        if t != 1 or h < 1 or w < 1 or h % self.merge or w % self.merge:
            raise ValueError(
                f"an image has a grid of {image.grid} patches; expected one moment in time and "
                f"multiples of {self.merge} (videos are not supported)."
            )
        if image.patches.shape != (h * w, self.patch_values):
            raise ValueError(
                f"an image with a grid of {image.grid} has patches {list(image.patches.shape)}; "
                f"expected {[h * w, self.patch_values]}. Is the processor that of the model?"
            )
        return h * w // self.unit

    def image_runs(self, token_ids: np.ndarray, images: Sequence[Image]) -> list[np.ndarray]:
        """Of each image the positions of its tokens.

        Raises:
            ValueError: as many tokens as the images take are not there.
        """
        found = np.flatnonzero(np.asarray(token_ids) == self.image_id)
        counts = [self.num_tokens(image) for image in images]
        if sum(counts) != len(found):
            raise ValueError(
                f"a prompt or an observation has {len(found)} image tokens (id {self.image_id}); "
                f"expected {sum(counts)} for its {len(counts)} images with grids "
                f"{[image.grid for image in images]}."
            )
        runs = np.split(found, np.cumsum(counts)[:-1]) if counts else []
        if any(run[-1] - run[0] >= len(run) for run in runs):
            raise ValueError(
                f"the image tokens (id {self.image_id}) of an image are not side by side; expected "
                f"runs of {counts}, one for each image."
            )
        return runs

    def rotary_positions(
        self, token_ids: np.ndarray, images: Sequence[Image], *, start: int = 0
    ) -> np.ndarray:
        """M-RoPE, section 2.1 of the source.

        An image begins where the text before it ends, and text goes on behind the highest of its
        positions.
        """
        out = np.zeros((3, len(token_ids)), np.int32)
        behind, position = 0, start
        for run, image in zip(self.image_runs(token_ids, images), images, strict=True):
            first, count = int(run[0]), len(run)
            out[:, behind:first] = np.arange(position, position + first - behind)
            position += first - behind
            _, h, w = (side // self.merge for side in image.grid)
            out[1:, first : first + count] = np.indices((h, w)).reshape(2, -1)
            out[:, first : first + count] += position
            position += max(h, w)
            behind = first + count
        out[:, behind:] = np.arange(position, position + len(token_ids) - behind)
        return out

    def arrange(self, images: Sequence[Image]) -> Arranged:
        """In the order of windows.

        The places of a patch are the number of its image, from 1, that of its window, its row and
        its column.
        """
        patches = [np.zeros((0, self.patch_values), np.float32)]
        places = [np.zeros((0, 4), np.int32)]
        units, num_windows, num_units = [], 0, 0
        for number, image in enumerate(images, start=1):
            order, of_patches, of_tokens = _layout(image.grid, self.merge, self.window)
            patches.append(image.patches[order])
            places.append(of_patches + np.array([number, num_windows, 0, 0], np.int32))
            units.append(of_tokens + num_units)
            num_windows = int(places[-1][:, 1].max()) + 1
            num_units += len(of_tokens)
        return Arranged(
            patches=np.concatenate(patches), places=np.concatenate(places), units=tuple(units)
        )

    # On the device.

    def embeddings(
        self,
        params: Params,
        patches: Float[Array, "S P C"],
        places: Int[Array, "S P 4"],
        through: Through,
    ) -> Float[Array, "S U D"]:
        """The tower's output, of the units of `merge^2` patches."""
        S, P, _ = patches.shape
        kernel = params["patch"]["filter"]
        x = patches.reshape(S * P, -1).astype(kernel.dtype) @ kernel.reshape(self.width, -1).T
        # Left alone, the compiler splits the width over devices, and all have the patches of all.
        x = through.on_shards(x)
        angles = self._angles(places.reshape(S * P, 4)[:, 2:])
        number, window = places[..., 0], jnp.where(places[..., 0] > 0, places[..., 1], -1)

        def by_row(x: jax.Array) -> jax.Array:
            return x.reshape(S, P, *x.shape[1:])

        def layer(x: jax.Array, given: Params) -> jax.Array:
            weights, is_full = given["weights"], given["is_full"] > 0
            normed = rms_norm(x, weights["norm1"]["scale"], EPSILON)
            qkv = checkpoint_name(linear(weights["attention"]["qkv"], normed), "q")
            q, k, v = qkv.reshape(S * P, 3, self.num_heads, -1).swapaxes(0, 1)
            q, k, v = map(by_row, (rope(q, angles), rope(k, angles), v))
            attended = jax.lax.cond(
                is_full,
                partial(attend_within, ids=number),
                partial(attend_windows, ids=window, most=self.window**2),
                *(q, k, v),
            )
            attended = checkpoint_name(attended, "attended").reshape(S * P, -1)
            x = x + checkpoint_name(linear(weights["attention"]["o"], attended), "o")
            normed, mlp = rms_norm(x, weights["norm2"]["scale"], EPSILON), weights["mlp"]
            gate, up = (checkpoint_name(linear(mlp[name], normed), name) for name in ("gate", "up"))
            return x + linear(mlp["down"], jax.nn.silu(gate) * up)

        # A number rather than a truth value: what layers are given is differentiated.
        is_full = np.isin(np.arange(self.num_layers), self.full_layers).astype(np.float32)
        x = through(layer, x, {"weights": params["blocks"], "is_full": jnp.asarray(is_full)})
        merger = params["merger"]
        x = rms_norm(x, merger["norm"]["scale"], EPSILON).reshape(S * P // self.unit, -1)
        x = linear(merger["down"], jax.nn.gelu(linear(merger["up"], x), approximate=False))
        return through.on_shards(x.reshape(S, P // self.unit, -1))

    def _angles(self, places: Int[Array, "M 2"]) -> tuple[jax.Array, jax.Array]:
        """Rotary angles: half of the pairs turn by a patch's row, half by its column."""
        quarter = self.width // self.num_heads // 4
        frequency = self.rope_theta ** (-jnp.arange(quarter, dtype=jnp.float32) / quarter)
        angle = (places[:, :, None].astype(jnp.float32) * frequency).reshape(len(places), 1, -1)
        sin = jnp.sin(angle)
        return jnp.cos(angle)[:, :, None], jnp.stack([-sin, sin], axis=2)

    # Parameters.

    def abstract_params(self) -> Params:
        """The parameters as `jax.ShapeDtypeStruct`s."""
        shapes: dict[str, tuple[int, ...]] = {
            "patch/filter": (
                *(self.width, self.channels, self.temporal_patch),
                *(self.patch, self.patch),
            ),
            "merger/norm/scale": (self.width,),
            "blocks/norm1/scale": (self.num_layers, self.width),
            "blocks/norm2/scale": (self.num_layers, self.width),
        }
        merged = self.unit * self.width
        for name, inputs, outputs in (
            ("blocks/attention/qkv", self.width, 3 * self.width),
            ("blocks/attention/o", self.width, self.width),
            ("blocks/mlp/gate", self.width, self.mlp_width),
            ("blocks/mlp/up", self.width, self.mlp_width),
            ("blocks/mlp/down", self.mlp_width, self.width),
            ("merger/up", merged, merged),
            ("merger/down", merged, self.out_width),
        ):
            stack = (self.num_layers,) if name.startswith("blocks/") else ()
            shapes[f"{name}/kernel"] = (*stack, inputs, outputs)
            shapes[f"{name}/bias"] = (*stack, outputs)
        leaves = {name: jax.ShapeDtypeStruct(shapes[name], jnp.float32) for name in HF_NAMES}
        return unflatten_dict(leaves, sep="/")

    def logical_axes(self) -> dict[str, Any]:
        """Inner widths over `tensor` where heads need not be apart, widths over `fsdp`."""

        def linear(inputs: str | None, outputs: str | None, *stack: str) -> dict[str, Any]:
            return {"kernel": (*stack, inputs, outputs), "bias": (*stack, outputs)}

        norm = {"scale": ("layer", None)}
        return {
            "patch": {"filter": ("width", None, None, None, None)},
            "blocks": {
                "norm1": norm,
                "norm2": norm,
                "attention": {
                    "qkv": linear("width", None, "layer"),
                    "o": linear(None, "width", "layer"),
                },
                "mlp": {
                    "gate": linear("width", "mlp", "layer"),
                    "up": linear("width", "mlp", "layer"),
                    "down": linear("mlp", "width", "layer"),
                },
            },
            "merger": {
                "norm": {"scale": (None,)},
                "up": linear("width", "mlp"),
                "down": linear("mlp", "width"),
            },
        }

    @property
    def num_params(self) -> int:
        """All numbers of the tower."""
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(self.abstract_params()))


@cache
def _layout(
    grid: tuple[int, int, int], merge: int, window: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """How the patches of an image are arranged.

    Args:
        grid: of patches, which come unit by unit.
        merge: patches along a side of a unit.
        window: patches along a side of a window.

    Returns:
        The patches in the order of their windows, of each 0, its window, row and column, and the
        place of each unit in that order.
    """
    _, h, w = grid
    rows, columns = np.indices((h, w)).reshape(2, h // merge, merge, w // merge, merge)
    rows, columns = (x.swapaxes(1, 2).reshape(-1, merge**2) for x in (rows, columns))
    of_unit = rows[:, 0] // window * -(-w // window) + columns[:, 0] // window
    order = np.argsort(of_unit, kind="stable")
    places = np.zeros((h * w, 4), np.int32)
    places[:, 1] = np.repeat(of_unit[order], merge**2)
    places[:, 2], places[:, 3] = rows[order].reshape(-1), columns[order].reshape(-1)
    patches = (order[:, None] * merge**2 + np.arange(merge**2)).reshape(-1)
    return patches, places, np.argsort(order).astype(np.int32)


def attend_within(
    q: Float[Array, "S P N H"],
    k: Float[Array, "S P N H"],
    v: Float[Array, "S P N H"],
    ids: Int[Array, "S P"],
) -> Float[Array, "S P N H"]:
    """Attention in both directions among the patches of a row that have the same number.

    The scores of `QUERY_BLOCK` patches are in memory at a time, computed again in the backward
    pass.
    """
    S, P, N, H = q.shape
    count = -(-P // QUERY_BLOCK)
    size = -(-P // count)
    blocks, of_blocks = (
        jnp.pad(x, [(0, 0), (0, count * size - P)] + [(0, 0)] * (x.ndim - 2))
        .reshape(S, count, size, *x.shape[2:])
        .swapaxes(0, 1)
        for x in (q, ids)
    )

    @jax.checkpoint
    def one(block: tuple[jax.Array, jax.Array]) -> jax.Array:
        queries, numbers = block
        return _attend(queries, k, v, numbers[:, :, None] == ids[:, None])

    return jax.lax.map(one, (blocks, of_blocks)).swapaxes(0, 1).reshape(S, -1, N, H)[:, :P]


def attend_windows(
    q: Float[Array, "S P N H"],
    k: Float[Array, "S P N H"],
    v: Float[Array, "S P N H"],
    ids: Int[Array, "S P"],
    *,
    most: int,
) -> Float[Array, "S P N H"]:
    """The same where patches of a number lie side by side, at most `most` of them.

    So those of a block of `most` patches, and of the blocks before and behind it, are all that a
    patch could read.
    """
    S, P, N, H = q.shape
    count = -(-P // most)

    def blocked(x: jax.Array, before: int, fill: int) -> jax.Array:
        pad = [(0, 0), (before * most, (count + before) * most - P)]
        x = jnp.pad(x, pad + [(0, 0)] * (x.ndim - 2), constant_values=fill)
        return x.reshape(S, -1, most, *x.shape[2:])

    def around(x: jax.Array, fill: int = 0) -> jax.Array:
        x = blocked(x, 1, fill)
        return jnp.concatenate([x[:, :-2], x[:, 1:-1], x[:, 2:]], axis=2)

    def merged(x: jax.Array) -> jax.Array:
        return x.reshape(S * count, *x.shape[2:])

    # Padding has a number of its own, which it reads: no softmax is over nothing.
    queries, numbers = merged(blocked(q, 0, 0)), merged(blocked(ids, 0, -1))
    keys, values, others = merged(around(k)), merged(around(v)), merged(around(ids, -1))
    out = _attend(queries, keys, values, numbers[:, :, None] == others[:, None])
    return out.reshape(S, count * most, N, H)[:, :P]


def _attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """Softmax attention of queries `[s, q, N, H]` over keys `[s, p, N, H]`, scores in float32."""
    product = partial(jnp.einsum, preferred_element_type=jnp.float32)
    scores = jnp.where(mask[:, None], product("sqnh,spnh->snqp", q, k) * q.shape[3] ** -0.5, LOWEST)
    weights = jnp.exp(scores - scores.max(axis=-1, keepdims=True))
    total = weights.sum(axis=-1).swapaxes(1, 2)[..., None]
    return (product("snqp,spnh->sqnh", weights.astype(v.dtype), v) / total).astype(v.dtype)

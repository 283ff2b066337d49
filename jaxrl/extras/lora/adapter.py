"""Low-rank adapters: a small number of trained values beside weights that stay as they are.

LoRA (https://arxiv.org/abs/2106.09685) computes a linear layer of weights W [in, out] as

    x W + s x A B,    A [in, r], B [r, out],    s = alpha / r, or alpha / sqrt(r)

and trains A and B alone. The second s is rsLoRA's (https://arxiv.org/abs/2312.03732), under which
the learning rate of one rank is that of another. B begins at zero: a new adapter changes nothing.

The parameters of a policy are then one tree of two parts, which `join` makes and `split` undoes:
the base, as the architecture has it, and in the layers with an adapter, beside `kernel`,

    blocks/.../kernel_a    float32 [L, in, r]
    blocks/.../kernel_b    float32 [L, r, out]

An int8 base has its linear layers as `kernel` int8 [L, in, out] and `kernel_scale` float32
[L, out]: the weight is the product of both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxrl.models.architecture import Architecture
from jaxrl.models.hf_weights import Progress
from jaxrl.models.params import ParamSpec, join, only, split_params
from jaxrl.models.wrapper import WrappedArchitecture
from jaxrl.runtime.sharding import param_shardings
from jaxrl.types import Params

ALL_LINEAR = "all-linear"
"""Target for every linear layer of the blocks."""

TRAINED = ("kernel_a", "kernel_b")
"""The parameters of an adapter, by their last name."""

QUANTISED = ("kernel", "kernel_scale")
"""Arrays of an int8 layer."""


def quantise(kernel: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Weights `[in, out]` as int8 and the scale of each output, whose largest becomes 127."""
    scale = scales(kernel)
    return rounded(kernel, scale), scale


def scales(kernel: np.ndarray) -> np.ndarray:
    """The scale of each output of weights `[in, out]`, float32; 1 where all are zero."""
    largest = np.abs(kernel).max(axis=0).astype(np.float32)
    return np.where(largest > 0, largest / np.float32(127), np.float32(1))


def rounded(kernel: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Weights `[in, out]` in steps of their output's scale, int8."""
    return np.clip(np.rint(kernel.astype(np.float32) / scale), -127, 127).astype(np.int8)


@dataclass(frozen=True, kw_only=True)
class Adapter(WrappedArchitecture):
    """A model with an adapter.

    Attributes:
        model: whose layers it adapts.
        rank: r.
        alpha: the numerator of s.
        targets: layers that have it, as `blocks/attention/q`; see `find_targets`.
        is_rank_stabilised: s has the root of the rank below alpha.
        base_dtype: of the base: a float dtype, or int8 for its linear layers.
        other_dtype: of an int8 base's other weights.
        is_merged: the sampler computes with `W + s A B`, in place of base and adapter apart.
        path: folder of the adapter to begin with, in PEFT's format; "": a new one.
    """

    model: Architecture
    rank: int
    alpha: float
    targets: tuple[str, ...]
    is_rank_stabilised: bool = False
    base_dtype: str = "float32"
    other_dtype: str = "float32"
    is_merged: bool = False
    path: str = ""

    @property
    def scaling(self) -> float:
        """The factor s of the product of both matrices."""
        return self.alpha / (self.rank**0.5 if self.is_rank_stabilised else self.rank)

    def parts(self, frozen: Sequence[str] = ()) -> tuple[ParamSpec, ParamSpec]:
        """The adapter's own parameters, and the base's, all of which are frozen."""
        return split_params(self, lambda path: path[-1] in TRAINED)

    def on_mesh(self, mesh: Mesh, *, experts: str, check_dtype: DTypeLike | None = None) -> Adapter:
        """See `WrappedArchitecture`."""
        return replace(
            self, model=self.model.on_mesh(mesh, experts=experts, check_dtype=check_dtype)
        )

    @property
    def plan(self) -> str:
        """See `WrappedArchitecture`."""
        return "jaxrl.extras.lora.memory"

    def check(self) -> None:
        """Refuses an adapter in `path` that is not the one that is configured."""
        from jaxrl.extras.lora import files  # late: it imports this module

        if self.path:
            files.check_adapter(self.path, self)

    def load_base(self, folder: str | Path, mesh: Mesh, progress: Progress) -> Params:
        """See `files.load_base`."""
        from jaxrl.extras.lora import files

        return files.load_base(folder, mesh, self, progress)

    def begin(self, mesh: Mesh, seed: int) -> Params:
        """The adapter of `path`, or a new one, which changes nothing yet; one of its seed."""
        from jaxrl.extras.lora import files

        if self.path:
            return files.load_adapter(self.path, self, mesh)
        layouts = param_shardings(mesh, self.parts()[0])
        return jax.jit(self.init, out_shardings=layouts)(jax.random.key(seed))

    def export(self, params: Params, parent: Path, source: str | Path) -> None:
        """Writes the adapter as PEFT has it, in `adapter`, and the merged model, in `export`."""
        from jaxrl.extras.lora import files

        files.save_adapter(params, self, parent / "adapter", source=source)
        files.save_merged(params, self, parent / "export", source=source)

    def is_quantised(self, path: tuple[str, ...]) -> bool:
        """True if a parameter of the architecture is int8 here."""
        is_kernel = path[-1] == "kernel" and "/".join(path[:-1]) in self.model.linear_layers()
        return is_kernel and self.base_dtype == "int8"

    def abstract_params(self) -> Params:
        """The parameters of base and adapter."""
        plain = self.other_dtype if self.base_dtype == "int8" else self.base_dtype
        shapes = {}
        for path, leaf in flatten_dict(self.model.abstract_params()).items():
            is_quantised, where = self.is_quantised(path), path[:-1]
            dtype = "int8" if is_quantised else plain
            shapes[path] = jax.ShapeDtypeStruct(leaf.shape, dtype)
            added = {}
            if is_quantised:
                added["kernel_scale"] = leaf.shape[-1:]
            if path[-1] == "kernel" and "/".join(where) in self.targets:
                added["kernel_a"] = (leaf.shape[-2], self.rank)
                added["kernel_b"] = (self.rank, leaf.shape[-1])
            for name, shape in added.items():
                shapes[*where, name] = jax.ShapeDtypeStruct((leaf.shape[0], *shape), jnp.float32)
        return unflatten_dict(shapes)

    def logical_axes(self) -> dict[str, Any]:
        """An adapter's matrices are split as the weights that they change; ranks are whole."""
        return self._with_own_axes(self.model.logical_axes())

    def decode_axes(self) -> dict[str, Any]:
        """Names of the axes of `decode_weights`."""
        axes = self._with_own_axes(self.model.decode_axes())

        def is_there(path: tuple[str, ...]) -> bool:
            is_kernel = path[-1] not in (*TRAINED, "kernel_scale")
            return is_kernel or not (self.is_merged and "/".join(path[:-1]) in self.targets)

        return only(axes, is_there)

    def _with_own_axes(self, axes: dict[str, Any]) -> dict[str, Any]:
        flat = flatten_dict(axes)
        for path in flatten_dict(self.abstract_params()):
            if path[-1] in (*TRAINED, "kernel_scale"):
                layer, inputs, outputs = flat[*path[:-1], "kernel"]
                flat[path] = {
                    "kernel_a": (layer, inputs, None),
                    "kernel_b": (layer, None, outputs),
                    "kernel_scale": (layer, outputs),
                }[path[-1]]
        return unflatten_dict(flat)

    def init(self, key: jax.Array) -> Params:
        """A new adapter: A uniform within 1 / sqrt(in), as PEFT draws it, and B zero."""
        drawn = {}
        for number, (path, leaf) in enumerate(
            flatten_dict(self.parts()[0].abstract_params()).items()
        ):
            drawn[path] = jnp.zeros(leaf.shape, leaf.dtype)
            if path[-1] == "kernel_a":
                bound = leaf.shape[-2] ** -0.5
                its_key = jax.random.fold_in(key, number)
                drawn[path] = jax.random.uniform(its_key, leaf.shape, leaf.dtype, -bound, bound)
        return unflatten_dict(drawn)

    def train_weights(self, policy: Params, dtype: DTypeLike) -> Params:
        """Weights of the architecture; int8 weights and their scales stay as they are."""
        return self._cast(self.model.train_weights, self._scaled(policy), dtype)

    def decode_weights(self, policy: Params, dtype: DTypeLike) -> Params:
        """Weights of the architecture, merged or not; int8 ones and their scales stay."""
        weights = self._merged(policy, dtype) if self.is_merged else self._scaled(policy)
        return self._cast(self.model.decode_weights, weights, dtype)

    def _cast(
        self, cast: Callable[[Params, DTypeLike], Params], weights: Params, dtype: DTypeLike
    ) -> Params:
        quantised = {path[:-1] for path in flatten_dict(weights) if path[-1] == "kernel_scale"}

        def is_kept(path: tuple[str, ...]) -> bool:
            return path[:-1] in quantised and path[-1] in QUANTISED

        floats = cast(only(weights, lambda path: not is_kept(path)), dtype)
        return join(floats, only(weights, is_kept))

    def _scaled(self, policy: Params) -> Params:
        """Puts s into B, so that a layer has all that it computes with."""
        flat = flatten_dict(policy)
        return unflatten_dict(
            {p: x * self.scaling if p[-1] == "kernel_b" else x for p, x in flat.items()}
        )

    def _merged(self, policy: Params, dtype: DTypeLike) -> Params:
        """The weights of the architecture alone, those of the targets in the dtype."""
        flat = flatten_dict(self._scaled(policy))
        for path in [path for path in flat if path[-1] == "kernel_a"]:
            where = path[:-1]
            layer = {
                name: flat.pop((*where, name))
                for name in (*QUANTISED, *TRAINED)
                if (*where, name) in flat
            }
            # One layer after another: the float32 product of all would take much memory at once.
            flat[*where, "kernel"] = jax.lax.map(lambda one: merged(one).astype(dtype), layer)
        return unflatten_dict(flat)


def merged(layer: Params) -> jax.Array:
    """The weights `[in, out]` of a layer with its adapter, whose B has the factor s, float32."""
    kernel = layer["kernel"].astype(jnp.float32)
    if "kernel_scale" in layer:
        kernel = kernel * layer["kernel_scale"]
    return kernel + layer["kernel_a"] @ layer["kernel_b"]


def find_targets(model: Architecture, names: Sequence[str]) -> tuple[str, ...]:
    """The layers that names stand for, in the model's order.

    Args:
        model: whose `linear_layers` they are among.
        names: `all-linear`; our names or the ends of them, as `attention/q` or `q`; those of HF's
            modules or the ends of them, as `q_proj`.

    Raises:
        ValueError: a name stands for none.
    """
    layers = {layer: module_of(model, layer) for layer in model.linear_layers()}
    if not layers:
        raise ValueError(
            "config.model.lora.rank asks for an adapter, but the architecture "
            f"{type(model).__name__} names no layers that may have one (linear_layers)."
        )
    chosen = set()
    for name in names:
        meant = {
            layer
            for layer, module in layers.items()
            if name == ALL_LINEAR
            or f"/{layer}".endswith(f"/{name}")
            or f".{module}".endswith(f".{name}")
        }
        if not meant:
            known = sorted({layer.rpartition("/")[2] for layer in layers})
            theirs = sorted({module.rpartition(".")[2] for module in layers.values()})
            raise ValueError(
                f"config.model.lora.targets has {name!r}, which is no linear layer of the model; "
                f"expected {ALL_LINEAR}, some of {', '.join(known)}, or of {', '.join(theirs)}."
            )
        chosen |= meant
    return tuple(layer for layer in layers if layer in chosen)


def module_of(model: Architecture, layer: str) -> str:
    """The HF module of a layer, `{}` for its number, as `model.layers.{}.self_attn.q_proj`."""
    return model.hf_names()[f"{layer}/kernel"].removesuffix(".weight")


def modules_of(model: Architecture, layer: str) -> list[str]:
    """The HF modules of a layer, in the order of its leading axis."""
    numbers = model.stacks.get(layer.split("/")[1]) or range(model.num_layers)
    return [module_of(model, layer).format(number) for number in numbers]


def around(keys: Mapping[str, Any], model: Architecture, dtype: str) -> Adapter:
    """The model with the adapter that the section `model.lora` asks for.

    Args:
        keys: of the section.
        model: that has none.
        dtype: `model.dtype`.

    Raises:
        ValueError: `model.lora.targets` names no layer of the model.
    """
    return Adapter(
        model=model,
        rank=keys["rank"],
        alpha=keys["alpha"],
        targets=find_targets(model, keys["targets"]),
        is_rank_stabilised=keys["rslora"],
        base_dtype=keys["base_dtype"],
        other_dtype=dtype,
        is_merged=keys["sampler"] == "merged",
        path=keys["path"],
    )

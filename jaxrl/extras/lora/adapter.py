"""LoRA adapters: small trainable matrices added to frozen weights.

LoRA (https://arxiv.org/abs/2106.09685) computes a linear layer with weights W [in, out] as

    x W + s x A B,    A [in, r], B [r, out],    s = alpha / r, or alpha / sqrt(r)

and trains only A and B. The second scale, of rsLoRA (https://arxiv.org/abs/2312.03732), allows the
same learning rate for all ranks. B is initialized to zero, so a new adapter does not change the
output.

A policy's parameter tree contains the architecture's parameters (the base) and, next to the
`kernel` of each layer with an adapter,

    blocks/.../kernel_a    float32 [L, in, r]
    blocks/.../kernel_b    float32 [L, r, out]

`merge_params` joins the two parts and `split_params` separates them.

An int8 base stores the weight of a linear layer as the product of `kernel`, int8 [L, in, out], and
`kernel_scale`, float32 [L, out].
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
from jaxrl.models.hf_weights import ProgressCallback
from jaxrl.models.params import ParamSpec, merge_params, select_params, split_param_specs
from jaxrl.models.wrapper import WrappedArchitecture
from jaxrl.runtime.sharding import make_param_shardings
from jaxrl.types import Params

ALL_LINEAR = "all-linear"
"""Target name for all linear layers of the blocks."""

TRAINED = ("kernel_a", "kernel_b")
"""Last path components of a layer's adapter arrays."""

QUANTIZED = ("kernel", "kernel_scale")
"""Names of the arrays of an int8 layer."""


def quantize_kernel(kernel: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Round weights `[in, out]` to int8; return the int8 kernel and the float32 scale per output.

    The scale is the output's largest absolute weight / 127, or 1 if all of its weights are 0.
    """
    largest = np.abs(kernel).max(axis=0).astype(np.float32)
    scale = np.where(largest > 0, largest / np.float32(127), np.float32(1))
    rounded = np.clip(np.rint(kernel.astype(np.float32) / scale), -127, 127)
    return rounded.astype(np.int8), scale


@dataclass(frozen=True, kw_only=True)
class Adapter(WrappedArchitecture):
    """Model with a LoRA adapter.

    Attributes:
        model: Model that the adapter modifies.
        rank: Rank r of A and B.
        alpha: Numerator of the scale s.
        targets: Paths of the layers with an adapter, such as `blocks/attention/q`.
        use_rslora: True to divide alpha by the square root of the rank.
        base_dtype: Dtype of the base. With int8, only its linear layers are int8.
        other_dtype: Dtype of the remaining weights of an int8 base.
        is_merged: True if the sampler uses the merged weights `W + s A B`.
        path: Folder of the initial adapter in PEFT format; "" initializes a new adapter.
    """

    model: Architecture
    rank: int
    alpha: float
    targets: tuple[str, ...]
    use_rslora: bool = False
    base_dtype: str = "float32"
    other_dtype: str = "float32"
    is_merged: bool = False
    path: str = ""

    @property
    def scaling(self) -> float:
        """Scale s of the adapter's output."""
        return self.alpha / (self.rank**0.5 if self.use_rslora else self.rank)

    def make_param_specs(self, frozen: Sequence[str] = ()) -> tuple[ParamSpec, ParamSpec]:
        """Return the specs of the trained adapter and of the frozen base."""
        return split_param_specs(self, lambda path: path[-1] in TRAINED)

    def with_kernels(
        self, mesh: Mesh, *, experts: str, check_dtype: DTypeLike | None = None
    ) -> Adapter:
        """See `Architecture.with_kernels`."""
        return replace(
            self, model=self.model.with_kernels(mesh, experts=experts, check_dtype=check_dtype)
        )

    @property
    def memory_module(self) -> str:
        """See `WrappedArchitecture.memory_module`."""
        return "jaxrl.extras.lora.memory"

    def check_files_and_settings(self) -> None:
        """Check that the adapter in `path` matches the configured adapter."""
        from jaxrl.extras.lora import files  # imported late, because it imports this module

        if self.path:
            files.check_adapter(self.path, self)

    def load_base(self, folder: str | Path, mesh: Mesh, progress: ProgressCallback) -> Params:
        """See `files.load_base`."""
        from jaxrl.extras.lora import files

        return files.load_base(folder, mesh, self, progress)

    def load_initial_params(self, mesh: Mesh, seed: int) -> Params:
        """Load the adapter in `path`, or initialize a new adapter from `seed`."""
        from jaxrl.extras.lora import files

        if self.path:
            return files.load_adapter(self.path, self, mesh)
        shardings = make_param_shardings(mesh, self.make_param_specs()[0])
        return jax.jit(self.init, out_shardings=shardings)(jax.random.key(seed))

    def export(self, params: Params, parent: Path, source: str | Path) -> None:
        """Write the adapter in PEFT format to `adapter`, and the merged model to `export`."""
        from jaxrl.extras.lora import files

        files.save_adapter(params, self, parent / "adapter", source=source)
        files.save_merged(params, self, parent / "export", source=source)

    def is_quantized(self, path: tuple[str, ...]) -> bool:
        """Return True if the parameter at `path` is stored as int8."""
        is_kernel = path[-1] == "kernel" and "/".join(path[:-1]) in self.model.list_linear_layers()
        return is_kernel and self.base_dtype == "int8"

    def make_abstract_params(self) -> Params:
        """Return the parameters of the base and the adapter as `jax.ShapeDtypeStruct`s."""
        float_dtype = self.other_dtype if self.base_dtype == "int8" else self.base_dtype
        shapes = {}
        for path, leaf in flatten_dict(self.model.make_abstract_params()).items():
            is_quantized, layer_path = self.is_quantized(path), path[:-1]
            dtype = "int8" if is_quantized else float_dtype
            shapes[path] = jax.ShapeDtypeStruct(leaf.shape, dtype)
            added = {}
            if is_quantized:
                added["kernel_scale"] = leaf.shape[-1:]
            if path[-1] == "kernel" and "/".join(layer_path) in self.targets:
                added["kernel_a"] = (leaf.shape[-2], self.rank)
                added["kernel_b"] = (self.rank, leaf.shape[-1])
            for name, shape in added.items():
                shapes[*layer_path, name] = jax.ShapeDtypeStruct(
                    (leaf.shape[0], *shape), jnp.float32
                )
        return unflatten_dict(shapes)

    def get_logical_axes(self) -> dict[str, Any]:
        """Return the axis names. A and B are sharded like the kernel; the rank is not sharded."""
        return self._add_adapter_axes(self.model.get_logical_axes())

    def get_decoding_axes(self) -> dict[str, Any]:
        """Return the axis names of `prepare_decoding_weights`."""
        axes = self._add_adapter_axes(self.model.get_decoding_axes())

        def is_included(path: tuple[str, ...]) -> bool:
            is_kernel = path[-1] not in (*TRAINED, "kernel_scale")
            return is_kernel or not (self.is_merged and "/".join(path[:-1]) in self.targets)

        return select_params(axes, is_included)

    def _add_adapter_axes(self, axes: dict[str, Any]) -> dict[str, Any]:
        flat = flatten_dict(axes)
        for path in flatten_dict(self.make_abstract_params()):
            if path[-1] in (*TRAINED, "kernel_scale"):
                layer, inputs, outputs = flat[*path[:-1], "kernel"]
                flat[path] = {
                    "kernel_a": (layer, inputs, None),
                    "kernel_b": (layer, None, outputs),
                    "kernel_scale": (layer, outputs),
                }[path[-1]]
        return unflatten_dict(flat)

    def init(self, key: jax.Array) -> Params:
        """Initialize A uniformly in ±1 / sqrt(in), as in PEFT, and B to zero."""
        params = {}
        for number, (path, leaf) in enumerate(
            flatten_dict(self.make_param_specs()[0].make_abstract_params()).items()
        ):
            params[path] = jnp.zeros(leaf.shape, leaf.dtype)
            if path[-1] == "kernel_a":
                bound = leaf.shape[-2] ** -0.5
                subkey = jax.random.fold_in(key, number)
                params[path] = jax.random.uniform(subkey, leaf.shape, leaf.dtype, -bound, bound)
        return unflatten_dict(params)

    def prepare_training_weights(self, policy: Params, dtype: DTypeLike) -> Params:
        """Cast the weights for training and multiply B by s. Int8 kernels keep their dtypes."""
        return self._cast_weights(
            self.model.prepare_training_weights, self._scale_adapter(policy), dtype
        )

    def prepare_decoding_weights(self, policy: Params, dtype: DTypeLike) -> Params:
        """Cast the sampler's weights, merged if `is_merged`. Int8 kernels keep their dtypes."""
        weights = (
            self._merge_adapter(policy, dtype) if self.is_merged else self._scale_adapter(policy)
        )
        return self._cast_weights(self.model.prepare_decoding_weights, weights, dtype)

    def _cast_weights(
        self, cast: Callable[[Params, DTypeLike], Params], weights: Params, dtype: DTypeLike
    ) -> Params:
        quantized = {path[:-1] for path in flatten_dict(weights) if path[-1] == "kernel_scale"}

        def keeps_dtype(path: tuple[str, ...]) -> bool:
            return path[:-1] in quantized and path[-1] in QUANTIZED

        floats = cast(select_params(weights, lambda path: not keeps_dtype(path)), dtype)
        return merge_params(floats, select_params(weights, keeps_dtype))

    def _scale_adapter(self, policy: Params) -> Params:
        """Multiply B by s, so that `linear` needs no scale."""
        flat = flatten_dict(policy)
        return unflatten_dict(
            {p: x * self.scaling if p[-1] == "kernel_b" else x for p, x in flat.items()}
        )

    def _merge_adapter(self, policy: Params, dtype: DTypeLike) -> Params:
        """Merge the adapter into the kernels of its targets, cast to `dtype`."""
        flat = flatten_dict(self._scale_adapter(policy))
        for path in [path for path in flat if path[-1] == "kernel_a"]:
            layer_path = path[:-1]
            layer = {
                name: flat.pop((*layer_path, name))
                for name in (*QUANTIZED, *TRAINED)
                if (*layer_path, name) in flat
            }
            # Merge one layer at a time: float32 kernels of all layers would need too much memory.
            flat[*layer_path, "kernel"] = jax.lax.map(
                lambda arrays: merge_layer(arrays).astype(dtype), layer
            )
        return unflatten_dict(flat)


def merge_layer(layer: Params) -> jax.Array:
    """Merge one layer's adapter, with B already scaled by s, into a float32 kernel `[in, out]`."""
    kernel = layer["kernel"].astype(jnp.float32)
    if "kernel_scale" in layer:
        kernel = kernel * layer["kernel_scale"]
    return kernel + layer["kernel_a"] @ layer["kernel_b"]


def find_targets(model: Architecture, names: Sequence[str]) -> tuple[str, ...]:
    """Resolve target names to layer paths, in the model's order.

    Args:
        model: Model with `list_linear_layers`.
        names: Target names: `all-linear`, or full names or suffixes of layer paths (`attention/q`,
            `q`) and of HF modules (`q_proj`).

    Raises:
        ValueError: A name matches no layer.
    """
    layers = {layer: get_hf_module_name(model, layer) for layer in model.list_linear_layers()}
    if not layers:
        raise ValueError(
            "config.model.lora.rank requires an adapter, but the architecture "
            f"{type(model).__name__} has no layers that support one (linear_layers)."
        )
    selected = set()
    for name in names:
        matches = {
            layer
            for layer, module in layers.items()
            if name == ALL_LINEAR
            or f"/{layer}".endswith(f"/{name}")
            or f".{module}".endswith(f".{name}")
        }
        if not matches:
            known = sorted({layer.rpartition("/")[2] for layer in layers})
            module_names = sorted({module.rpartition(".")[2] for module in layers.values()})
            raise ValueError(
                f"config.model.lora.targets has {name!r}, which matches no layer of the model; "
                f"expected {ALL_LINEAR}, some of {', '.join(known)}, or of "
                f"{', '.join(module_names)}."
            )
        selected |= matches
    return tuple(layer for layer in layers if layer in selected)


def get_hf_module_name(model: Architecture, layer: str) -> str:
    """Return the HF module name of a stacked layer, such as `model.layers.{}.self_attn.q_proj`."""
    return model.get_hf_names()[f"{layer}/kernel"].removesuffix(".weight")


def list_hf_module_names(model: Architecture, layer: str) -> list[str]:
    """Return the HF module names of a stacked layer, in the order of its leading axis."""
    numbers = model.partial_layer_indices.get(layer.split("/")[1]) or range(model.num_layers)
    return [get_hf_module_name(model, layer).format(number) for number in numbers]


def wrap_with_lora(settings: Mapping[str, Any], model: Architecture, dtype: str) -> Adapter:
    """Wrap a model with the adapter that the config section `model.lora` describes.

    Args:
        settings: Values of the `model.lora` section, by key.
        model: Model to wrap.
        dtype: Compute dtype, the value of `model.dtype`.

    Raises:
        ValueError: A target matches no layer of the model.
    """
    return Adapter(
        model=model,
        rank=settings["rank"],
        alpha=settings["alpha"],
        targets=find_targets(model, settings["targets"]),
        use_rslora=settings["rslora"],
        base_dtype=settings["base_dtype"],
        other_dtype=dtype,
        is_merged=settings["sampler"] == "merged",
        path=settings["path"],
    )

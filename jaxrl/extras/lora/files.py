"""Load adapters and base weights; save adapters in PEFT format, and merged models.

PEFT (https://github.com/huggingface/peft) stores an adapter in a folder with `adapter_config.json`
and `adapter_model.safetensors`, which contains A as [r, in] and B as [out, r] for each module.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.experimental import multihost_utils
from jax.sharding import Mesh, Sharding
from safetensors.numpy import save_file

from jaxrl.extras.lora.adapter import (
    Adapter,
    get_hf_module_name,
    list_hf_module_names,
    quantize_kernel,
)
from jaxrl.extras.lora.keys import TENSORS_FILE
from jaxrl.models.architecture import Architecture
from jaxrl.models.hf_weights import (
    ProgressCallback,
    canonicalize_name,
    gather_to_host,
    load_tensors,
    open_canonical_tensors,
    open_safetensors,
    open_validated_tensors,
    read_tensor_dtypes,
    write_hf,
    write_json,
)
from jaxrl.runtime import sharding
from jaxrl.types import Params
from jaxrl.utils.files import atomic_folder
from jaxrl.utils.json_io import read_object

CONFIG_FILE = "adapter_config.json"
PREFIX = "base_model.model."
"""Prefix that PEFT adds to module names."""

MATRICES = {"kernel_a": "lora_A", "kernel_b": "lora_B"}

UNSUPPORTED = (
    "use_dora",
    "bias",
    "lora_bias",
    "fan_in_fan_out",
    "modules_to_save",
    "layers_to_transform",
    "rank_pattern",
    "alpha_pattern",
    "target_parameters",
    "trainable_token_indices",
    "layer_replication",
    "alora_invocation_tokens",
    "use_qalora",
    "use_bdlora",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
)
"""PEFT fields that change the computation, except with a value that is empty, false or `none`."""

BASE_CHANGING_INITS = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Prefixes of `init_lora_weights` values for which PEFT also changes the base weights."""


def load_base(
    path: str | Path,
    mesh: Mesh,
    adapter: Adapter,
    progress: ProgressCallback = lambda done, total: None,
) -> Params:
    """Load the base weights of an adapter from a validated HF folder.

    Float weights are loaded as in `load_hf`. Every process reads each int8 layer in full, because
    its scales depend on all inputs.
    """
    model, stored = adapter.model, open_canonical_tensors(adapter.model, Path(path))
    shapes = flatten_dict(adapter.make_param_specs()[1].make_abstract_params(), sep="/")
    shardings = flatten_dict(
        sharding.make_param_shardings(mesh, adapter.make_param_specs()[1]), sep="/"
    )
    quantized = [p.removesuffix("_scale") for p in shapes if p.endswith("/kernel_scale")]
    floats = {
        p: leaf_sharding
        for p, leaf_sharding in shardings.items()
        if p.removesuffix("_scale") not in quantized
    }
    [dtype] = {shapes[param].dtype for param in floats}
    base = flatten_dict(
        load_tensors(model, stored, floats, dtype=dtype, progress=progress), sep="/"
    )
    for count, param in enumerate(quantized, start=1):
        modules = list_hf_module_names(model, param.removesuffix("/kernel"))
        tensors = (stored[f"{module}.weight"] for module in modules)
        layers = [quantize_kernel(np.asarray(t.data[:]).astype(np.float32).T) for t in tensors]
        for name, parts in zip((param, f"{param}_scale"), zip(*layers, strict=True), strict=True):
            base[name] = _shard_array(np.stack(parts), shardings[name])
        progress(count, len(quantized))
    return unflatten_dict(base, sep="/")


def _shard_array(array: np.ndarray, leaf_sharding: Sharding) -> jax.Array:
    """Shard an array that every process holds in full."""
    return jax.make_array_from_callback(array.shape, leaf_sharding, array.__getitem__)


def load_adapter(path: str | Path, adapter: Adapter, mesh: Mesh) -> Params:
    """Load the adapter in a validated folder onto the mesh."""
    stored = {tensor.name: tensor for tensor in open_safetensors(Path(path) / TENSORS_FILE)}
    shardings = flatten_dict(
        sharding.make_param_shardings(mesh, adapter.make_param_specs()[0]), sep="/"
    )
    params = {}
    for param, leaf_sharding in shardings.items():
        tensors = (stored[name] for name in _list_peft_tensor_names(adapter, param))
        parts = [np.asarray(tensor.data[:]).astype(np.float32).T for tensor in tensors]
        params[param] = _shard_array(np.stack(parts), leaf_sharding)
    return unflatten_dict(params, sep="/")


def _list_peft_tensor_names(adapter: Adapter, param: str) -> list[str]:
    """Return the PEFT tensor name of a stacked parameter for each layer."""
    layer_path, _, matrix = param.rpartition("/")
    modules = (
        _to_transformers_name(adapter.model, name)
        for name in list_hf_module_names(adapter.model, layer_path)
    )
    return [f"{PREFIX}{module}.{MATRICES[matrix]}.weight" for module in modules]


def _to_transformers_name(model: Architecture, name: str) -> str:
    """Convert a module's name in checkpoints to its name in transformers."""
    for canonical, prefix in model.get_hf_module_prefixes().items():
        if name.startswith(canonical):
            return prefix + name.removeprefix(canonical)
    return name


def check_adapter(path: str | Path, adapter: Adapter) -> None:
    """Check that the adapter in a folder matches the configured adapter.

    Raises:
        FileNotFoundError: The folder or one of its files does not exist.
        ValueError: The adapter is corrupt, or its rank, layers or base model differ.
    """
    folder = Path(path)
    for file in (folder / CONFIG_FILE, folder / TENSORS_FILE):
        if not file.is_file():
            raise FileNotFoundError(
                f"config.model.lora.path is {str(path)!r}, which has no {file.name}; expected a "
                f"folder with {CONFIG_FILE} and {TENSORS_FILE}, as PEFT writes it."
            )
    fields = read_object(folder / CONFIG_FILE)
    _check_fields(fields, adapter, folder / CONFIG_FILE)
    _check_tensors(fields, adapter, folder / TENSORS_FILE)


def _check_fields(fields: dict[str, Any], adapter: Adapter, file: Path) -> None:
    if fields.get("peft_type") != "LORA":
        raise ValueError(f"{file}: peft_type is {fields.get('peft_type')!r}; expected 'LORA'.")
    for name in UNSUPPORTED:
        if (value := fields.get(name)) and value != "none":
            raise ValueError(f"{file}: {name} is {value!r}, which is not supported.")
    init_method = fields.get("init_lora_weights")
    if str(init_method).lower().startswith(BASE_CHANGING_INITS):
        raise ValueError(
            f"{file}: init_lora_weights is {init_method!r}, so the adapter needs base weights that "
            "PEFT has changed; save it with path_initial_model_for_weight_conversion, which "
            "converts it to the original weights."
        )
    expected_fields = {
        "rank": ("r", adapter.rank),
        "alpha": ("lora_alpha", adapter.alpha),
        "rslora": ("use_rslora", adapter.use_rslora),
    }
    for key, (name, wanted) in expected_fields.items():
        value = fields.get(name, False)
        if value != wanted:
            raise ValueError(
                f"{file}: {name} is {value!r}, but config.model.lora.{key} is {wanted!r}; set the "
                "key to the adapter's value."
            )


def _check_tensors(fields: dict[str, Any], adapter: Adapter, file: Path) -> None:
    stored = {tensor.name: tensor for tensor in open_safetensors(file)}
    base_model = fields.get("base_model_name_or_path")
    # Name and shape of each PEFT tensor; ours [L, in, out] is stored as [out, in] per layer.
    shapes = {
        name: leaf.shape[:0:-1]
        for param, leaf in flatten_dict(
            adapter.make_param_specs()[0].make_abstract_params(), sep="/"
        ).items()
        for name in _list_peft_tensor_names(adapter, param)
    }
    # Report differing modules before missing tensors and shapes.
    actual, expected = (
        sorted({name.removeprefix(PREFIX).partition(".lora_")[0] for name in names})
        for names in (stored, shapes)
    )
    if actual != expected:
        [first, *_] = sorted({*actual} ^ {*expected})
        verb = "has" if first in actual else "lacks"
        raise ValueError(
            f"{file} {verb} {first!r}: its target_modules are {fields.get('target_modules')!r}, "
            f"for the model {base_model!r}; config.model.lora.targets is "
            f"{', '.join(adapter.targets)} of {adapter.model.num_layers} layers. Set targets to "
            "the adapter's, or model.path to the model that the adapter was trained for."
        )
    if unknown := sorted(stored.keys() - shapes.keys()):
        raise ValueError(f"{file} has {unknown[0]!r}, which is not supported.")
    for name, shape in shapes.items():
        if name not in stored or stored[name].shape != shape:
            actual_shape = list(stored[name].shape) if name in stored else "missing"
            raise ValueError(
                f"{file}: tensor {name!r} is {actual_shape}; config.model.path requires "
                f"{list(shape)}. The adapter was trained for {base_model!r}."
            )


def save_adapter(params: Params, adapter: Adapter, path: str | Path, *, source: str | Path) -> None:
    """Write an adapter in PEFT format, atomically. Every process must call this function.

    Args:
        params: Trained parameters.
        adapter: Adapter architecture of `params`.
        path: Output folder. An existing adapter is replaced.
        source: HF folder of the base model, recorded in the config file.
    """
    host = {p: gather_to_host(leaf) for p, leaf in flatten_dict(params, sep="/").items()}
    is_writer = jax.process_index() == 0
    with atomic_folder(Path(path), marker=CONFIG_FILE, is_writer=is_writer) as folder:
        if is_writer:
            write_json(folder / CONFIG_FILE, make_peft_config(adapter, source))
            tensors = {
                name: np.ascontiguousarray(part.T)
                for param, stacked in host.items()
                for name, part in zip(_list_peft_tensor_names(adapter, param), stacked, strict=True)
            }
            save_file(tensors, folder / TENSORS_FILE, metadata={"format": "pt"})
            # safetensors makes its files readable only by the owner.
            shutil.copymode(folder / CONFIG_FILE, folder / TENSORS_FILE)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("wrote an adapter")


def make_peft_config(adapter: Adapter, source: str | Path) -> dict[str, Any]:
    """Return the content of `adapter_config.json`."""
    alpha = adapter.alpha
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(source),
        "r": adapter.rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "use_rslora": adapter.use_rslora,
        "target_modules": _find_target_modules(adapter),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_dora": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "modules_to_save": None,
        "layers_to_transform": None,
        "rank_pattern": {},
        "alpha_pattern": {},
    }


def _find_target_modules(adapter: Adapter) -> list[str]:
    """Return the shortest module names for which PEFT selects exactly the targets.

    PEFT selects every module whose name ends with one of these names. The selection must not
    include modules that jaxrl does not adapt, such as a vision tower or experts.
    """
    model = adapter.model
    targets = {layer: get_hf_module_name(model, layer) for layer in adapter.targets}
    tensors = {name.removesuffix(".weight") for name in model.get_hf_names().values()}
    others = [f".{module}" for module in tensors - {*targets.values()}]
    modules: set[str] = set()
    for layer, module in targets.items():
        in_layer = module.rpartition("{}.")[2]
        names = (in_layer.rpartition(".")[2], in_layer)
        unique_names = (name for name in names if not any(o.endswith(f".{name}") for o in others))
        shortest = next(unique_names, None)
        full_names = (
            _to_transformers_name(model, name) for name in list_hf_module_names(model, layer)
        )
        modules |= {shortest} if shortest else {*full_names}
    return sorted(modules)


def save_merged(params: Params, adapter: Adapter, path: str | Path, *, source: str | Path) -> None:
    """Write the merged model as an HF folder. Every process must call this function.

    Each tensor is the source's tensor plus s A B, computed in float32 and stored in the source's
    dtype. PEFT gives the same result if it merges the saved adapter into the source, even if the
    base is int8.
    """
    host = {p: gather_to_host(leaf) for p, leaf in flatten_dict(params, sep="/").items()}
    model = adapter.model
    stored = open_validated_tensors(Path(source), model)
    added = {
        f"{module}.weight": (target, layer_index)
        for target in adapter.targets
        for layer_index, module in enumerate(list_hf_module_names(model, target))
    }

    def get_tensor(name: str, dtype: np.dtype) -> np.ndarray:
        tensor = np.asarray(stored[name].data[:])
        if (canonical := canonicalize_name(model, name)) in added:
            target, layer_index = added[canonical]
            a, b = (host[f"{target}/{matrix}"][layer_index] for matrix in MATRICES)
            tensor = tensor.astype(np.float32) + (a @ (b * np.float32(adapter.scaling))).T
        return np.ascontiguousarray(tensor.astype(dtype))

    write_hf(get_tensor, model, path, source=source, dtypes=read_tensor_dtypes(Path(source), model))

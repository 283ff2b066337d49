"""Loading and saving of adapters in PEFT format, their base weights, and merged models.

PEFT (https://github.com/huggingface/peft) stores an adapter in a folder with `adapter_config.json`
and `adapter_model.safetensors`, which holds A as [r, in] and B as [out, r] of each module.
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

from jaxrl.extras.lora.adapter import Adapter, module_of, modules_of, quantise
from jaxrl.extras.lora.keys import TENSORS_FILE
from jaxrl.models.architecture import Architecture
from jaxrl.models.hf_weights import (
    Progress,
    host_array,
    known_name,
    load_stored,
    open_checked,
    open_file,
    open_known,
    tensor_dtypes,
    write_hf,
    write_json,
)
from jaxrl.runtime import sharding
from jaxrl.types import Params
from jaxrl.utils.files import atomic_folder
from jaxrl.utils.json_io import read_object

CONFIG_FILE = "adapter_config.json"
PREFIX = "base_model.model."
"""Prefix of each module's name in PEFT's wrapped model."""

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
"""PEFT fields that change the computation, unless they are empty, false or `none`."""

CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Prefixes of `init_lora_weights` with which PEFT also changes the base weights."""


def load_base(
    path: str | Path,
    mesh: Mesh,
    adapter: Adapter,
    progress: Progress = lambda done, total: None,
) -> Params:
    """Load the base weights of an adapter from a validated HF folder.

    Floats are loaded as in `load_hf`. Every process reads all of a layer that becomes int8, since
    its scales depend on all inputs.
    """
    model, stored = adapter.model, open_known(adapter.model, Path(path))
    shapes = flatten_dict(adapter.parts()[1].abstract_params(), sep="/")
    layouts = flatten_dict(sharding.param_shardings(mesh, adapter.parts()[1]), sep="/")
    scaled = [p.removesuffix("_scale") for p in shapes if p.endswith("/kernel_scale")]
    floats = {p: layout for p, layout in layouts.items() if p.removesuffix("_scale") not in scaled}
    [dtype] = {shapes[param].dtype for param in floats}
    base = flatten_dict(load_stored(model, stored, floats, dtype=dtype, progress=progress), sep="/")
    for count, param in enumerate(scaled, start=1):
        modules = modules_of(model, param.removesuffix("/kernel"))
        tensors = (stored[f"{module}.weight"] for module in modules)
        layers = [quantise(np.asarray(t.data[:]).astype(np.float32).T) for t in tensors]
        for name, parts in zip((param, f"{param}_scale"), zip(*layers, strict=True), strict=True):
            base[name] = _put(np.stack(parts), layouts[name])
        progress(count, len(scaled))
    return unflatten_dict(base, sep="/")


def _put(array: np.ndarray, layout: Sharding) -> jax.Array:
    """Shard an array that every process has."""
    return jax.make_array_from_callback(array.shape, layout, array.__getitem__)


def load_adapter(path: str | Path, adapter: Adapter, mesh: Mesh) -> Params:
    """Load the adapter of a validated folder onto the mesh."""
    stored = {tensor.name: tensor for tensor in open_file(Path(path) / TENSORS_FILE)}
    layouts = flatten_dict(sharding.param_shardings(mesh, adapter.parts()[0]), sep="/")
    params = {}
    for param, layout in layouts.items():
        tensors = (stored[name] for name in _tensor_names(adapter, param))
        parts = [np.asarray(tensor.data[:]).astype(np.float32).T for tensor in tensors]
        params[param] = _put(np.stack(parts), layout)
    return unflatten_dict(params, sep="/")


def _tensor_names(adapter: Adapter, param: str) -> list[str]:
    """Return PEFT's tensor names of a parameter, one per layer."""
    where, _, matrix = param.rpartition("/")
    modules = (_in_memory(adapter.model, one) for one in modules_of(adapter.model, where))
    return [f"{PREFIX}{module}.{MATRICES[matrix]}.weight" for module in modules]


def _in_memory(model: Architecture, name: str) -> str:
    """Return a module's name in transformers if it differs from that in files."""
    for beginning, known in model.hf_renamed().items():
        if name.startswith(known):
            return beginning + name.removeprefix(known)
    return name


def check_adapter(path: str | Path, adapter: Adapter) -> None:
    """Raise if a folder's adapter does not match the configured one.

    Raises:
        FileNotFoundError: The folder or one of its files does not exist.
        ValueError: The adapter is damaged, or has another rank, other layers, or another base.
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
            raise ValueError(f"{file}: {name} is {value!r}, which is not computed here.")
    begun = fields.get("init_lora_weights")
    if str(begun).lower().startswith(CHANGED_BASE):
        raise ValueError(
            f"{file}: init_lora_weights is {begun!r}, so the adapter needs base weights that PEFT "
            "has changed; save it with path_initial_model_for_weight_conversion, which converts "
            "it to the original weights."
        )
    agreed = {
        "rank": ("r", adapter.rank),
        "alpha": ("lora_alpha", adapter.alpha),
        "rslora": ("use_rslora", adapter.is_rank_stabilised),
    }
    for key, (name, wanted) in agreed.items():
        value = fields.get(name, False)
        if value != wanted:
            raise ValueError(
                f"{file}: {name} is {value!r}, but config.model.lora.{key} is {wanted!r}; set it "
                "as the adapter has it."
            )


def _check_tensors(fields: dict[str, Any], adapter: Adapter, file: Path) -> None:
    stored = {tensor.name: tensor for tensor in open_file(file)}
    made_for = fields.get("base_model_name_or_path")
    # PEFT's name and shape of each tensor: one layer's [out, in] for our [L, in, out].
    shapes = {
        name: leaf.shape[:0:-1]
        for param, leaf in flatten_dict(adapter.parts()[0].abstract_params(), sep="/").items()
        for name in _tensor_names(adapter, param)
    }
    # Report differing modules before missing tensors and shapes.
    there, expected = (
        sorted({name.removeprefix(PREFIX).partition(".lora_")[0] for name in names})
        for names in (stored, shapes)
    )
    if there != expected:
        [first, *_] = sorted({*there} ^ {*expected})
        what = "has" if first in there else "lacks"
        raise ValueError(
            f"{file} {what} {first!r}: its target_modules are {fields.get('target_modules')!r}, "
            f"of the model {made_for!r}; config.model.lora.targets names "
            f"{', '.join(adapter.targets)} of {adapter.model.num_layers} layers. Set the targets "
            "as the adapter has them, or model.path to the model that it was made for."
        )
    if unknown := sorted(stored.keys() - shapes.keys()):
        raise ValueError(f"{file} has {unknown[0]!r}, which is not computed here.")
    for name, shape in shapes.items():
        if name not in stored or stored[name].shape != shape:
            held = list(stored[name].shape) if name in stored else "nothing"
            raise ValueError(
                f"{file}: tensor {name!r} is {held}; the model of config.model.path calls for "
                f"{list(shape)}. The adapter was made for {made_for!r}."
            )


def save_adapter(params: Params, adapter: Adapter, path: str | Path, *, source: str | Path) -> None:
    """Write an adapter in PEFT format, atomically. Every process must call this.

    Args:
        params: Trained parameters.
        adapter: Adapter of the parameters.
        path: Folder to write; an existing adapter there is replaced.
        source: HF folder of the base, recorded in the config file.
    """
    host = {p: host_array(leaf) for p, leaf in flatten_dict(params, sep="/").items()}
    is_writer = jax.process_index() == 0
    with atomic_folder(Path(path), marker=CONFIG_FILE, is_writer=is_writer) as folder:
        if is_writer:
            write_json(folder / CONFIG_FILE, peft_fields(adapter, source))
            tensors = {
                name: np.ascontiguousarray(part.T)
                for param, stacked in host.items()
                for name, part in zip(_tensor_names(adapter, param), stacked, strict=True)
            }
            save_file(tensors, folder / TENSORS_FILE, metadata={"format": "pt"})
            # safetensors makes its files readable by the owner only.
            shutil.copymode(folder / CONFIG_FILE, folder / TENSORS_FILE)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("wrote an adapter")


def peft_fields(adapter: Adapter, source: str | Path) -> dict[str, Any]:
    """Return the content of `adapter_config.json`."""
    alpha = adapter.alpha
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(source),
        "r": adapter.rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "use_rslora": adapter.is_rank_stabilised,
        "target_modules": _target_modules(adapter),
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


def _target_modules(adapter: Adapter) -> list[str]:
    """Return the shortest names with which PEFT selects exactly the targets.

    PEFT selects every module whose name ends with one of them, including modules that cannot have
    an adapter here, such as those of an image tower or of experts.
    """
    model = adapter.model
    targets = {layer: module_of(model, layer) for layer in adapter.targets}
    tensors = {name.removesuffix(".weight") for name in model.hf_names().values()}
    others = [f".{module}" for module in tensors - {*targets.values()}]
    modules: set[str] = set()
    for layer, module in targets.items():
        in_layer = module.rpartition("{}.")[2]
        names = (in_layer.rpartition(".")[2], in_layer)
        is_alone = (name for name in names if not any(o.endswith(f".{name}") for o in others))
        shortest = next(is_alone, None)
        whole = (_in_memory(model, one) for one in modules_of(model, layer))
        modules |= {shortest} if shortest else {*whole}
    return sorted(modules)


def save_merged(params: Params, adapter: Adapter, path: str | Path, *, source: str | Path) -> None:
    """Write the merged model as an HF folder. Every process must call this.

    Each tensor is the source's plus the adapter's product, summed in float32 and stored in the
    source's dtype. So an int8 base has no effect: the result equals what PEFT computes from the
    source and the folder written by `save_adapter`.
    """
    host = {p: host_array(leaf) for p, leaf in flatten_dict(params, sep="/").items()}
    model = adapter.model
    stored = open_checked(Path(source), model)
    added = {
        f"{module}.weight": (target, place)
        for target in adapter.targets
        for place, module in enumerate(modules_of(model, target))
    }

    def tensor_of(name: str, dtype: np.dtype) -> np.ndarray:
        tensor = np.asarray(stored[name].data[:])
        if (known := known_name(model, name)) in added:
            target, place = added[known]
            a, b = (host[f"{target}/{matrix}"][place] for matrix in MATRICES)
            tensor = tensor.astype(np.float32) + (a @ (b * np.float32(adapter.scaling))).T
        return np.ascontiguousarray(tensor.astype(dtype))

    write_hf(tensor_of, model, path, source=source, dtypes=tensor_dtypes(Path(source), model))

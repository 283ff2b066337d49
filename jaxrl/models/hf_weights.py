"""Bit-exact conversion between Hugging Face folders and parameters."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.experimental import multihost_utils
from jax.sharding import Mesh, Sharding, SingleDeviceSharding
from jax.typing import DTypeLike
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jaxrl.models.architecture import Architecture, FusedTensor
from jaxrl.models.layers import Stacks
from jaxrl.models.registry import read_architecture, read_hf_config
from jaxrl.runtime import sharding
from jaxrl.types import Params
from jaxrl.utils.files import atomic_folder
from jaxrl.utils.json_io import read_object

ProgressCallback = Callable[[int, int], None]
"""Callback with the number of finished units and the total."""

LogCallback = Callable[[str], None]
"""Callback for log lines."""

DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
"""Supported dtypes of weights, by their safetensors names; float32 holds each exactly."""

SIDE_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "vocab.*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "additional_chat_templates/*.jinja",
    "*processor_config.json",
    "LICENSE*",
)
"""Files that an export copies from its source, byte for byte."""

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


@dataclass(frozen=True)
class TensorLocation:
    """Location of an HF tensor in the parameter tree."""

    param: str
    index: tuple[int, ...]  # along the leading axes: (), (layer,) or (layer, expert)
    shape: tuple[int, ...]  # in HF's axis order

    @property
    def is_transposed(self) -> bool:
        """Return True if HF stores the axes in reverse order."""
        return self.param.endswith("/kernel")


@dataclass(frozen=True)
class StoredTensor:
    """Tensor in a safetensors file, read only when it is sliced."""

    name: str
    file: Path
    data: Any  # safetensors' lazy slice

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape in the file's header."""
        return tuple(self.data.get_shape())

    @property
    def dtype(self) -> str:
        """Return the dtype in the file's header, a key of `DTYPES`."""
        return self.data.get_dtype()


@dataclass(frozen=True)
class _MatrixSlice:
    """Matrix within a stored tensor, with the interface of a safetensors slice."""

    data: Any
    matrix_index: int  # index on the first axis
    rows: range  # range on the second axis

    def get_shape(self) -> list[int]:
        return [len(self.rows), self.data.get_shape()[2]]

    def get_dtype(self) -> str:
        return self.data.get_dtype()

    def __getitem__(self, index: Any) -> np.ndarray:
        first, *columns = index if isinstance(index, tuple) else (index,)
        rows: Any = self.rows[first]
        return self.data[(self.matrix_index, slice(rows.start, rows.stop), *columns)]


@runtime_checkable
class HasWeights(Protocol):
    """Part of the `Architecture` interface that loading uses."""

    def get_hf_names(self) -> dict[str, str]:
        """Return the HF tensor name of each parameter path."""
        ...

    @property
    def partial_layer_indices(self) -> Stacks:
        """Return the modules of `blocks` that only some layers have."""
        ...

    def make_abstract_params(self) -> Params:
        """Return the parameters as `jax.ShapeDtypeStruct`s."""
        ...


def locate_hf_tensors(config: HasWeights) -> dict[str, TensorLocation]:
    """Return the location of each HF tensor of the model, keyed by HF name."""
    leaves = flatten_dict(config.make_abstract_params(), sep="/")
    locations = {}
    for param, name in config.get_hf_names().items():
        axes, shape = name.count("{}"), leaves[param].shape
        hf_shape = shape[axes:][::-1] if param.endswith("/kernel") else shape[axes:]
        for index in np.ndindex(shape[:axes]):
            locations[_format_hf_name(config, param, name, index)] = TensorLocation(
                param, index, hf_shape
            )
    return locations


def _format_hf_name(config: HasWeights, param: str, name: str, index: Sequence[int]) -> str:
    """Return the HF name of a parameter's slice; `index[0]` is the layer's index in its stack."""
    layers = config.partial_layer_indices.get(param.split("/")[1]) if index else None
    return name.format(layers[index[0]], *index[1:]) if layers else name.format(*index)


def load_hf(
    path: str | Path,
    mesh: Mesh | None = None,
    *,
    architecture: str = "",
    entries: Sequence[str] | None = None,
    dtype: DTypeLike = jnp.float32,
    progress: ProgressCallback = lambda done, total: None,
    is_lazy: bool = False,
    log: LogCallback = lambda _: None,
) -> Params:
    """Load the parameters in an HF folder. Each device reads only its part of each tensor.

    Args:
        path: Folder with `config.json` and `model.safetensors`, or several safetensors files and
            their index.
        mesh: Mesh to shard the parameters over; None loads them to the first device.
        architecture: Architecture name or dotted path; see `read_architecture`.
        entries: Top-level modules of the parameters to load; None loads all.
        dtype: Dtype of the parameters; float32 represents every supported dtype exactly.
        progress: Callback that receives the loaded and the total MiB after each parameter.
        is_lazy: True to return, for each parameter, a function that loads it.
        log: Callback for the warning about ignored tensors.

    Raises:
        FileNotFoundError: The folder, its `config.json` or a weights file does not exist.
        ValueError: A file is corrupt, or its tensors do not match the config.
    """
    config, stored = open_hf(path, architecture, log)
    shapes = flatten_dict(config.make_abstract_params(), sep="/")
    if mesh is None:
        shardings = dict.fromkeys(shapes, SingleDeviceSharding(jax.local_devices()[0]))
    else:
        shardings = flatten_dict(sharding.make_param_shardings(mesh, config), sep="/")
    if entries is not None:
        shardings = {
            p: leaf_sharding for p, leaf_sharding in shardings.items() if p.split("/")[0] in entries
        }
    tensors = partial(open_canonical_tensors, config, Path(path)) if is_lazy else stored
    return load_tensors(config, tensors, shardings, dtype=dtype, progress=progress)


def load_tensors(
    config: HasWeights,
    stored: Mapping[str, StoredTensor] | Callable[[], Mapping[str, StoredTensor]],
    shardings: Mapping[str, Sharding],
    *,
    dtype: DTypeLike = jnp.float32,
    progress: ProgressCallback = lambda done, total: None,
) -> Params:
    """Load the parameters listed in `shardings` from tensors on disk.

    Args:
        config: Model that the tensors belong to.
        stored: Validated tensors by the names in `config.get_hf_names()`, or a function that opens
            them. With a function, nothing is loaded yet: each returned value is a function that
            opens the tensors and loads one parameter. safetensors keeps everything it has read from
            a file in memory until the file is closed.
        shardings: Sharding of each parameter, by path (keys joined by `/`).
        dtype: Dtype of the parameters.
        progress: See `load_hf`.
    """
    names, leaves = config.get_hf_names(), flatten_dict(config.make_abstract_params(), sep="/")
    shapes = {param: leaves[param] for param in leaves if param in shardings}

    item, done = jnp.dtype(dtype).itemsize, 0
    sizes = {param: math.prod(leaf.shape) * item for param, leaf in shapes.items()}
    total = sum(sizes.values())

    # Each device reads its slice of a parameter: one HF tensor per index on the leading axes.
    def load_leaf(param: str) -> jax.Array:
        tensors = stored() if callable(stored) else stored

        def read_slice(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None  # None only for scalars
            axes, shape = names[param].count("{}"), shapes[param].shape
            ranges = [range(size)[part] for size, part in zip(shape, index, strict=True)]
            lengths = [len(numbers) for numbers in ranges]
            array = np.empty(lengths, dtype)  # filled in place, to avoid a second copy
            locations = product(*map(range, lengths[:axes]))
            for location, i in zip(locations, product(*ranges[:axes]), strict=True):
                data = tensors[_format_hf_name(config, param, names[param], i)].data
                part = index[axes:]
                # HF stores kernels transposed.
                array[location] = data[part[::-1]].T if param.endswith("/kernel") else data[part]
            return array

        loaded = jax.make_array_from_callback(shapes[param].shape, shardings[param], read_slice)
        nonlocal done
        done += sizes[param]
        progress(-(-done // 2**20), -(-total // 2**20))
        return loaded

    return unflatten_dict(
        {p: partial(load_leaf, p) if callable(stored) else load_leaf(p) for p in shapes}, sep="/"
    )


def open_hf(
    path: str | Path, architecture: str = "", log: LogCallback = lambda _: None
) -> tuple[Architecture, dict[str, StoredTensor]]:
    """Open an HF folder and validate its config and tensor headers, without reading tensors.

    Raises:
        FileNotFoundError, ValueError: See `load_hf`.
    """
    config = read_architecture(path, architecture)
    return config, open_canonical_tensors(config, Path(path), log)


def open_validated_tensors(
    folder: Path, config: Architecture, log: LogCallback = lambda _: None
) -> dict[str, StoredTensor]:
    """Open and validate all tensors; return them by stored name, with fused tensors split."""
    stored = open_tensors(folder)
    for name, fused in _find_fused_tensors(config, stored).items():
        fused_tensor = stored.pop(name)
        check_shape(fused_tensor, TensorLocation(name, (), fused.shape))
        for part, (matrix_index, rows) in fused.slices.items():
            stored[part] = StoredTensor(
                part, fused_tensor.file, _MatrixSlice(fused_tensor.data, matrix_index, rows)
            )
    unused = _find_unused_tensors(config, stored)
    if ignored := unused - _find_copied_tensors(config, stored):
        tensors = "1 tensor" if len(ignored) == 1 else f"{len(ignored)} tensors"
        log(
            f"warning: {str(folder)!r} has {tensors} that the model does not use, such as "
            f"{min(ignored)!r}; they are ignored and not exported"
        )
    stored = {name: tensor for name, tensor in stored.items() if name not in unused}
    _check_tensors(
        {canonicalize_name(config, n): tensor for n, tensor in stored.items()}, config, folder
    )
    return stored


BUFFERS = re.compile(r"(^|\.)(rotary_(pos_)?emb\.\w+|position_ids|masked_bias)$")
"""Names of buffers in old checkpoints; their values are derived from the config."""


def _find_fused_tensors(config: Architecture, stored: Iterable[str]) -> dict[str, FusedTensor]:
    """Return stored tensors that fuse several of those in `get_hf_names`, by stored name."""
    fused = config.get_hf_fused_tensors()
    canonical = {name: canonicalize_name(config, name) for name in stored} if fused else {}
    return {name: fused[original] for name, original in canonical.items() if original in fused}


def _find_copied_tensors(config: Architecture, stored: Iterable[str]) -> set[str]:
    """Return the names of unused tensors that an export copies."""
    return {name for name in stored if name.startswith(config.get_hf_passthrough_prefixes())}


def _find_unused_tensors(config: Architecture, stored: Iterable[str]) -> set[str]:
    """Return the names of tensors that do not affect the model's output.

    Like transformers, this skips `BUFFERS` and modules outside the model, such as a value head.
    Unknown tensors within the model's modules are not skipped, since they might matter.
    """
    expected = {*locate_hf_tensors(config), *config.get_hf_tied_names()}
    modules = {name.partition(".")[0] for name in expected}
    unused = _find_copied_tensors(config, stored)
    for name in stored:
        canonical = canonicalize_name(config, name)
        is_outside = canonical.partition(".")[0] not in modules or BUFFERS.search(canonical)
        if is_outside and canonical not in expected:
            unused.add(name)
    return unused


def open_canonical_tensors(
    config: Architecture, folder: Path, log: LogCallback = lambda _: None
) -> dict[str, StoredTensor]:
    """Open and validate the tensors in an HF folder; return them keyed by name in `get_hf_names`.

    Raises the same errors as `load_hf`.
    """
    stored = open_validated_tensors(folder, config, log)
    return {canonicalize_name(config, name): tensor for name, tensor in stored.items()}


def canonicalize_name(config: Architecture, name: str) -> str:
    """Convert a tensor name with an alternative prefix to the name in `get_hf_names`."""
    for prefix, canonical in config.get_hf_prefix_map().items():
        if name.startswith(prefix):
            return canonical + name.removeprefix(prefix)
    return name


def open_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Open all tensors in an HF folder, keyed by name; read only the headers of its files.

    Raises:
        FileNotFoundError: The folder has no weights, or a file named by the index is missing.
        ValueError: The index or a safetensors file is corrupt.
    """
    if (folder / SINGLE_FILE).is_file():
        return {tensor.name: tensor for tensor in open_safetensors(folder / SINGLE_FILE)}
    index_file = folder / INDEX_FILE
    if not index_file.is_file():
        raise FileNotFoundError(
            f"{str(folder)!r} has neither {SINGLE_FILE} nor {INDEX_FILE}; only weights in the "
            "safetensors format are supported."
        )
    try:
        weight_map = read_object(index_file)["weight_map"]
        files = sorted({folder / file for file in weight_map.values()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{index_file} is damaged: expected a JSON object with a 'weight_map' of tensor to "
            f"file name ({type(error).__name__}: {error}); download it again."
        ) from error
    # Check names, not resolved paths, since downloaded files may be links to a cache.
    outside = [
        file for file in weight_map.values() if Path(file).name != file or file in ("", "..")
    ]
    if outside:
        raise ValueError(
            f"{index_file} names {outside[0]!r}; expected names of files in its folder, such as "
            "'model-00001-of-00002.safetensors'."
        )
    return {tensor.name: tensor for file in files for tensor in open_safetensors(file)}


def open_safetensors(file: Path) -> list[StoredTensor]:
    """Open the tensors of a safetensors file, reading only its header; see `open_tensors`."""
    if not file.is_file():
        raise FileNotFoundError(
            f"{file} is missing; {INDEX_FILE} names it, so the download is incomplete."
        )
    file.open("rb").close()  # safetensors reports an unreadable file as missing
    try:
        handle = safe_open(file, framework="np")
        return [StoredTensor(name, file, handle.get_slice(name)) for name in handle.keys()]  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(
            f"{file} ({file.stat().st_size} bytes) is not a complete safetensors file: {error}; "
            "download it again."
        ) from error


def _check_tensors(stored: Mapping[str, StoredTensor], config: Architecture, folder: Path) -> None:
    """Raise an error if a tensor is missing or unexpected, or its shape or dtype is wrong."""
    locations, copies = locate_hf_tensors(config), config.get_hf_tied_names()
    for name, location in locations.items():
        if name not in stored:
            raise make_missing_tensor_error(folder, name, location, stored)
    for name, tensor in stored.items():
        if name in copies:
            # A stored output layer of tied embeddings must equal the embedding.
            tied = stored[copies[name]]
            if tensor.shape != tied.shape or not np.array_equal(tensor.data[:], tied.data[:]):
                raise ValueError(
                    f"{tensor.file}: tensor {tensor.name!r} differs from {tied.name!r} although "
                    "config.json sets tie_word_embeddings; set it to false if both are needed."
                )
        elif name not in locations:
            raise ValueError(
                f"{tensor.file} has the tensor {name!r} {list(tensor.shape)}, which the model "
                "of config.json does not have."
            )
        else:
            check_shape(tensor, locations[name])
        if tensor.dtype not in DTYPES:
            raise ValueError(
                f"{tensor.file}: tensor {name!r} is stored as {tensor.dtype}; expected one of "
                f"{', '.join(DTYPES)}."
            )


def make_missing_tensor_error(
    folder: Path, name: str, location: TensorLocation, stored: Mapping[str, StoredTensor]
) -> ValueError:
    """Build the error for a tensor that the folder's config.json requires but no file contains."""
    files = sorted({tensor.file.name for tensor in stored.values()})
    return ValueError(
        f"{str(folder)!r} lacks the tensor {name!r} of shape {list(location.shape)} that its "
        f"config.json requires; looked in {', '.join(files) or 'no file'}."
    )


def check_shape(tensor: StoredTensor, location: TensorLocation) -> None:
    """Raise a ValueError if a tensor does not have the shape required by config.json."""
    if tensor.shape != location.shape:
        raise ValueError(
            f"{tensor.file}: tensor {tensor.name!r} has shape {list(tensor.shape)}; config.json "
            f"requires {list(location.shape)}."
        )


def save_hf(
    params: Params,
    config: Architecture,
    path: str | Path,
    *,
    source: str | Path | None = None,
    max_shard_size: int = 5 * 10**9,
) -> None:
    """Write parameters as an HF folder, atomically.

    Every process must call this; process 0 writes. An existing export at `path` is replaced.

    Args:
        params: Stacked parameters, on any devices.
        config: Architecture of the parameters.
        path: Folder to write.
        source: HF folder from which training started. Its config, tokenizer and generation settings
            are copied byte for byte. Tensors get the source's dtypes and are fused like the
            source's. None writes a new config.json and float32 tensors.
        max_shard_size: Maximum size of the tensors in a file, in bytes. A larger tensor gets its
            own file.

    Raises:
        ValueError: The source is a different model.
        FileExistsError: `path` exists and is not an export.
    """
    leaves = flatten_dict(params, sep="/")
    dtypes = dict.fromkeys(locate_hf_tensors(config), "F32")
    if source is not None:
        _check_export_source(config, Path(source), Path(path))
        dtypes = read_tensor_dtypes(Path(source), config)
    locations = _locate_exported_tensors(config, dtypes)

    def get_tensor(name: str, dtype: np.dtype) -> np.ndarray:
        location = locations[name]
        leaf = leaves[location.param]
        host = gather_to_host(leaf[location.index] if location.index else leaf)
        # Cast on the host: XLA may flush subnormal numbers to zero on a CPU. The result must be in
        # C order, since safetensors silently corrupts other orders.
        return np.ascontiguousarray((host.T if location.is_transposed else host).astype(dtype))

    write_hf(get_tensor, config, path, source=source, dtypes=dtypes, max_shard_size=max_shard_size)


def write_hf(
    get_tensor: Callable[[str, np.dtype], np.ndarray],
    config: Architecture,
    path: str | Path,
    *,
    source: str | Path | None,
    dtypes: Mapping[str, str],
    max_shard_size: int = 5 * 10**9,
) -> None:
    """Write tensors as an HF folder; see `save_hf`.

    Args:
        get_tensor: Function that maps a tensor's name and dtype to its value on the host; called
            for each tensor in order.
        config: Architecture of the tensors.
        path: Folder to write.
        source: HF folder whose small files are copied.
        dtypes: Dtype of each tensor, a key of `DTYPES`.
        max_shard_size: Maximum size of the tensors in a file, in bytes.
    """
    is_writer = jax.process_index() == 0
    stored = {} if source is None else open_tensors(Path(source))
    copied = {name: stored[name] for name in sorted(_find_copied_tensors(config, stored))}
    fused = _find_fused_tensors(config, stored)
    fused_names = {part: name for name, whole in fused.items() for part in whole.slices}
    sizes: dict[str, int] = {}
    for name, location in _locate_exported_tensors(config, dtypes).items():
        exported, size = fused_names.get(name, name), DTYPES[dtypes[name]].itemsize
        sizes[exported] = sizes.get(exported, 0) + math.prod(location.shape) * size
    sizes |= {name: math.prod(t.shape) * DTYPES[t.dtype].itemsize for name, t in copied.items()}

    def get_exported_tensor(name: str) -> np.ndarray:
        if name in copied:
            return copied[name].data[:]
        if name not in fused:
            return get_tensor(name, DTYPES[dtypes[name]])
        whole = np.empty(fused[name].shape, DTYPES[stored[name].dtype])
        for part, (matrix_index, rows) in fused[name].slices.items():
            whole[matrix_index, rows] = get_tensor(part, whole.dtype)
        return whole

    with atomic_folder(Path(path), marker="config.json", is_writer=is_writer) as folder:
        if is_writer:
            if source is None:
                write_json(folder / "config.json", config.to_hf_config())
            else:
                copy_non_weight_files(Path(source), folder)
        write_tensors(
            folder,
            sizes,
            get_exported_tensor,
            max_shard_size=max_shard_size,
            is_writer=is_writer,
        )
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("wrote an export")  # wait until the folder exists


def write_tensors(
    folder: Path,
    sizes: Mapping[str, int],
    get_tensor: Callable[[str], np.ndarray],
    *,
    max_shard_size: int = 5 * 10**9,
    is_writer: bool = True,
) -> None:
    """Write the safetensors files and index of an HF folder that already has a config.json.

    Args:
        folder: Folder to write to.
        sizes: Size of each tensor in bytes, by HF name.
        get_tensor: Function that maps a name to the tensor on the host; called in order.
        max_shard_size: Maximum size of the tensors in a file, in bytes.
        is_writer: True if this process writes to disk.
    """
    files = _assign_to_files(sizes, max_shard_size)
    for file, names in files.items():
        # Hold only one file's tensors on the host at a time.
        tensors = {name: get_tensor(name) for name in names}
        if is_writer:
            save_file(tensors, folder / file, metadata={"format": "pt"})
            # safetensors makes its files readable only by the owner.
            shutil.copymode(folder / "config.json", folder / file)
    if is_writer and len(files) > 1:
        weight_map = {name: file for file, names in files.items() for name in names}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        write_json(folder / INDEX_FILE, index)


def _locate_exported_tensors(
    config: Architecture, names: Iterable[str]
) -> dict[str, TensorLocation]:
    """Return the location of each of the source's tensors, by name, with tied copies last."""
    canonical, copies = locate_hf_tensors(config), config.get_hf_tied_names()
    source_names = {canonicalize_name(config, name): name for name in names}
    locations = {source_names[name]: location for name, location in canonical.items()}
    extra = {
        source_names[name]: canonical[copies[name]]
        for name in source_names
        if name not in canonical
    }
    return locations | extra


def _check_export_source(config: Architecture, source: Path, path: Path) -> None:
    """Raise a ValueError if `source` is a different model, or is the folder to export to."""
    fields, file = read_hf_config(source)
    origin = config.from_dict(fields, source=file)
    if config.head_dtype:  # not part of config.json
        config = config.with_head_dtype("")
    if origin != config:
        expected = vars(config)
        differing = [name for name, value in vars(origin).items() if value != expected[name]]
        raise ValueError(
            f"{str(source)!r} is not the model to export: its "
            f"{', '.join(differing)} differ; expected the model that training started from."
        )
    if path.exists() and path.samefile(source):
        raise ValueError(f"cannot export to the source folder {str(source)!r}; set another folder.")


def read_tensor_dtypes(source: Path, config: Architecture) -> dict[str, str]:
    """Return the dtype of each tensor in an HF folder of the model."""
    return {name: tensor.dtype for name, tensor in open_validated_tensors(source, config).items()}


def gather_to_host(array: jax.Array) -> np.ndarray:
    """Gather an array to the host. Every process must call this."""
    if getattr(array, "is_fully_addressable", True):
        return np.asarray(array)
    return multihost_utils.process_allgather(array, tiled=True)


def _assign_to_files(sizes: Mapping[str, int], max_shard_size: int) -> dict[str, list[str]]:
    """Assign tensors to files in order, each up to `max_shard_size` bytes."""
    groups: list[list[str]] = [[]]
    used = 0
    for name, size in sizes.items():
        if groups[-1] and used + size > max_shard_size:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += size
    if len(groups) == 1:
        return {SINGLE_FILE: groups[0]}
    count = len(groups)
    return {f"model-{i:05d}-of-{count:05d}.safetensors": g for i, g in enumerate(groups, start=1)}


def write_json(file: Path, content: dict[str, Any]) -> None:
    """Write an object as indented JSON with sorted keys."""
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def copy_non_weight_files(source: Path, folder: Path) -> None:
    """Copy the files that match `SIDE_FILES`: config, tokenizer and other non-weight files."""
    for pattern in SIDE_FILES:
        for file in sorted(source.glob(pattern)):
            if file.is_file():
                copy = folder / file.relative_to(source)
                copy.parent.mkdir(exist_ok=True)
                shutil.copyfile(file, copy)

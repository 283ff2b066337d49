"""Device mesh and array shardings.

Parameters name their axes (`Architecture.get_logical_axes`), and the rules below map those names to
mesh axes. Packed rows of tokens are split over data, fsdp and expert, and each row over context.
The sampler's rows, which are not packed, are split over all four axes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mesh_utils import create_device_mesh
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl.models.architecture import Architecture, is_axes_leaf
from jaxrl.models.layers import prepare_sampler_weights
from jaxrl.models.params import ParamSpec
from jaxrl.types import Params

BATCH_AXES = ("data", "fsdp", "expert")
"""Mesh axes that split packed rows."""

CONTEXT_AXIS = "context"
"""Mesh axis that splits each packed row into equally long pieces."""

PIECE_AXES = (*BATCH_AXES, CONTEXT_AXIS)
"""Mesh axes that split pieces of packed rows, and the sampler's rows and pages."""

LOGICAL_AXIS_RULES: dict[str | None, str | tuple[str, ...] | None] = {
    "layer": None,
    "vocab": "tensor",
    "width": ("fsdp", CONTEXT_AXIS, "expert"),
    "width of an expert": ("fsdp", CONTEXT_AXIS),
    "heads": "tensor",
    "mlp": "tensor",
    "expert": "expert",
    None: None,
}


def compute_mesh_sizes(
    num_devices: int,
    *,
    data: int,
    fsdp: int,
    tensor: int,
    context: int = 1,
    expert: int = 1,
    rollout_devices: int = 0,
    num_processes: int = 1,
) -> dict[str, int]:
    """Return the sizes of the mesh axes. One argument may be -1, for all remaining devices.

    The mesh excludes `rollout_devices` devices of each process.

    Raises:
        ValueError: The product of the sizes is not the number of devices, or a size is otherwise
            invalid.
    """
    num_local = num_devices // num_processes
    replica_size = max(tensor, 1) * max(expert, 1)
    if rollout_devices and (rollout_devices >= num_local or rollout_devices % replica_size):
        key = "mesh.tensor" if expert == 1 else "mesh.expert * mesh.tensor"
        raise ValueError(
            f"config.mesh.rollout_devices={rollout_devices} of each process's {num_local} devices; "
            f"expected a multiple of config.{key}={replica_size} that leaves devices to train on."
        )
    num_devices -= rollout_devices * num_processes
    sizes = {"data": data, "fsdp": fsdp, CONTEXT_AXIS: context, "expert": expert, "tensor": tensor}
    free_axes = [name for name, size in sizes.items() if size == -1]
    fixed_sizes = [size for size in sizes.values() if size != -1]
    fixed_product = math.prod(fixed_sizes)
    shape = ", ".join(f"{name}={size}" for name, size in sizes.items())
    is_valid = len(free_axes) <= 1 and min(fixed_sizes) >= 1 and num_devices % fixed_product == 0
    if not is_valid or (not free_axes and fixed_product != num_devices):
        raise ValueError(
            f"config.mesh ({shape}) does not fit the number of devices, {num_devices}"
            f"{' without those of rollout_devices' if rollout_devices else ''}; the sizes "
            "must be positive and multiply to it; one of them may be -1 (remaining devices)."
        )
    if free_axes:
        sizes[free_axes[0]] = num_devices // fixed_product
    return sizes


def make_mesh(*, rollout_devices: int = 0, devices: Any = None, **axes: int) -> Mesh:
    """Make a mesh over all devices except the last `rollout_devices` of each process.

    `axes` are the axis arguments of `compute_mesh_sizes`.
    """
    devices, count = jax.devices() if devices is None else devices, jax.process_count()
    sizes = compute_mesh_sizes(
        len(devices), **axes, rollout_devices=rollout_devices, num_processes=count
    )
    if rollout_devices:
        devices_by_process = [
            [d for d in devices if d.process_index == index] for index in range(count)
        ]
        devices = [device for part in devices_by_process for device in part[:-rollout_devices]]
    return Mesh(
        arrange_devices(devices, sizes, with_gaps=rollout_devices > 0),
        tuple(sizes),
        axis_types=(AxisType.Auto,) * len(sizes),
    )


def arrange_devices(
    devices: Sequence[Any], sizes: Mapping[str, int], *, with_gaps: bool = False
) -> Any:
    """Arrange devices in the shape of a mesh, with `expert` and `tensor` within one process.

    On a TPU, axes follow the links between chips if that keeps `expert` and `tensor` within a
    process; several axes may share a dimension of the torus. Otherwise, devices are in process
    order. `jax.make_mesh` does not suffice: it ignores processes, and supports neither GPUs on
    several hosts nor shared dimensions.

    Args:
        devices: Devices of the mesh.
        sizes: Sizes of the mesh axes, in order.
        with_gaps: True if some devices are excluded, so that the remaining devices do not form a
            torus.

    Raises:
        ValueError: A process's number of devices is not a multiple of `expert` times `tensor`.
    """
    shape, size = tuple(sizes.values()), count_devices_per_replica(sizes)

    def is_process_local(arranged: np.ndarray) -> bool:
        rows = arranged.reshape(-1, size)
        return all(len({device.process_index for device in row}) == 1 for row in rows)

    if not with_gaps and len({getattr(device, "slice_index", 0) for device in devices}) == 1:
        by_links = create_device_mesh(shape, devices, allow_split_physical_axes=True)
        if is_process_local(by_links):
            return by_links
    in_order = sorted(devices, key=lambda device: (device.process_index, device.id))
    by_process = np.array(in_order).reshape(shape)
    if not is_process_local(by_process):
        num_local = min(Counter(device.process_index for device in devices).values())
        raise make_process_span_error(sizes, num_local)
    return by_process


def count_devices_per_replica(sizes: Mapping[str, int]) -> int:
    """Return the number of devices that sample the same rows, `expert * tensor`."""
    return sizes["expert"] * sizes["tensor"]


def make_process_span_error(sizes: Mapping[str, int], num_local: int) -> ValueError:
    """Create the error for `expert` and `tensor` axes that do not fit in one process."""
    names = [name for name in ("expert", "tensor") if sizes[name] > 1]
    keys = " and ".join(f"config.mesh.{name}={sizes[name]}" for name in names)
    return ValueError(
        f"{keys} would span several processes, each of which samples on its "
        f"own {num_local} devices; set {'it to a divisor' if len(names) == 1 else 'them lower'}."
    )


def make_local_mesh(mesh: Mesh, rollout_devices: int = 0) -> Mesh:
    """Return the sampler's mesh over this process's devices, with rows split along `data`.

    Local meshes let processes sample without waiting for each other. If `rollout_devices` is set,
    the mesh has only those devices. Otherwise, a single process samples on `mesh` itself.
    """
    if rollout_devices:
        local_devices = [
            device for device in jax.local_devices() if device not in mesh.devices.flat
        ]
    elif jax.process_count() == 1:
        return mesh
    else:
        local_devices = [d for d in mesh.devices.flat if d.process_index == jax.process_index()]
    model_axes = {name: mesh.shape[name] for name in ("expert", "tensor")}
    sizes = dict.fromkeys(mesh.axis_names, 1) | {"data": -1} | model_axes
    devices = np.array(local_devices).reshape(tuple(sizes.values()))
    return Mesh(devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(sizes))


def move_to_local_mesh(array: jax.Array, sharding: NamedSharding, mesh: Mesh) -> jax.Array:
    """Move an array from the training mesh to this process's sampling devices.

    The array must be split only along `expert` and `tensor`, so that each process has all of it.
    """
    parts = [shard.data for shard in array.addressable_shards]
    local_sharding = NamedSharding(make_local_mesh(mesh), sharding.spec)
    local = jax.make_array_from_single_device_arrays(array.shape, local_sharding, parts)
    return jax.device_put(local, sharding)


def check_even_split(mesh: Mesh, config: Architecture) -> None:
    """Check that the mesh splits the model's experts and heads evenly.

    Raises:
        ValueError: A mesh axis does not divide the experts or heads evenly, or splits the sequences
            of a model with recurrent layers. The message names the axis.
    """
    pieces = mesh.shape[CONTEXT_AXIS]
    if config.state_specs and pieces > 1:
        raise ValueError(
            f"config.mesh.{CONTEXT_AXIS}={pieces} splits sequences, but the model has recurrent "
            "layers, which compute them in order; set it to 1."
        )
    counts = [
        ("expert", config.num_experts, "experts"),
        ("tensor", config.num_kv_heads, "key-value heads"),
        *(("tensor", spec.shape[0], "recurrent heads") for spec in config.state_specs.values()),
    ]
    for axis, count, label in counts:
        size = mesh.shape[axis]
        if size > 1 and (not count or count % size):
            raise ValueError(
                f"config.mesh.{axis}={size} does not divide the model's {count} {label}; set it to "
                "a divisor, or to 1."
            )


def count_batch_shards(mesh: Mesh) -> int:
    """Return the number of shards over which packed rows are split."""
    return math.prod(mesh.shape[axis] for axis in BATCH_AXES)


def count_piece_shards(mesh: Mesh) -> int:
    """Return the number of shards over which tokens and the sampler's rows are split."""
    return math.prod(mesh.shape[axis] for axis in PIECE_AXES)


def make_replicated_sharding(mesh: Mesh) -> NamedSharding:
    """Return the sharding that keeps a full copy on every device."""
    return NamedSharding(mesh, P())


def make_batch_sharding(mesh: Mesh) -> NamedSharding:
    """Return the sharding of mini-batches `[A, b, T]`: rows on `BATCH_AXES`, tokens on context."""
    return NamedSharding(mesh, P(None, BATCH_AXES, CONTEXT_AXIS))


def make_piece_sharding(mesh: Mesh) -> NamedSharding:
    """Return the sharding that splits the first axis over `PIECE_AXES`."""
    return NamedSharding(mesh, P(PIECE_AXES))


def split_into_pieces(mesh: Mesh, x: jax.Array) -> jax.Array:
    """Split rows `[b, T, ...]` into pieces `[C * b, T / C, ...]`; C is the size of `context`.

    For each shard of rows, all first pieces come first, then all second pieces, and so on, so that
    each piece stays on its device.
    """
    count = mesh.shape[CONTEXT_AXIS]
    if count == 1:
        return x
    size = x.shape[1] // count
    pieces = x.reshape(count_batch_shards(mesh), -1, count, size, *x.shape[2:]).swapaxes(1, 2)
    pieces = pieces.reshape(-1, size, *x.shape[2:])
    return jax.lax.with_sharding_constraint(pieces, make_piece_sharding(mesh))


def merge_pieces(mesh: Mesh, x: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """Invert `split_into_pieces` for one value per token; return rows `[b, T]`.

    `x` may have any sharding.
    """
    count, shards = mesh.shape[CONTEXT_AXIS], count_batch_shards(mesh)
    if count == 1:
        return x.reshape(shape)
    return x.reshape(shards, count, shape[0] // shards, -1).swapaxes(1, 2).reshape(shape)


def gather_rows(mesh: Mesh, x: jax.Array) -> jax.Array:
    """Replicate rows `[b, T]` over the context axis, so that devices hold complete rows."""
    if mesh.shape[CONTEXT_AXIS] == 1:
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(BATCH_AXES)))


def cache_sharding(mesh: Mesh) -> NamedSharding:
    """Return the sharding of `[pages, n * K, page, H]`: pages on `PIECE_AXES`, heads on tensor."""
    return NamedSharding(mesh, P(PIECE_AXES, "tensor", None, None))


def make_param_shardings(
    mesh: Mesh, spec: ParamSpec, *, for_decode: bool = False
) -> dict[str, Any]:
    """Return the sharding of every parameter in `spec`.

    A dimension is not split over mesh axes that do not divide it. With `for_decode`, weights are
    split only over `tensor` and, for experts, `expert`, so that a decode step gathers no weights.
    """
    return _make_shardings(mesh, spec.get_logical_axes(), spec.make_abstract_params(), for_decode)


def decode_shardings(mesh: Mesh, config: Architecture, *, scan_layers: bool) -> dict[str, Any]:
    """Return the sharding of every weight that `prepare_sampler_weights` returns."""
    stacked = jax.eval_shape(
        lambda params: config.prepare_decoding_weights(params, jnp.float32),
        config.make_abstract_params(),
    )
    stacks = config.partial_layer_indices
    weights = jax.eval_shape(
        partial(prepare_sampler_weights, scan=scan_layers, stacks=stacks), stacked
    )
    axes = config.get_decoding_axes()
    if isinstance(weights["blocks"], tuple):
        layer = jax.tree.map(lambda names: names[1:], axes["blocks"], is_leaf=is_axes_leaf)
        layers = tuple({name: layer[name] for name in block} for block in weights["blocks"])
        axes = {**axes, "blocks": layers}
    return _make_shardings(mesh, {name: axes[name] for name in weights}, weights, for_decode=True)


def _make_shardings(mesh: Mesh, axes: dict[str, Any], shapes: Params, for_decode: bool) -> Any:
    def make_leaf_sharding(
        axes: tuple[str | None, ...], shape: jax.ShapeDtypeStruct
    ) -> NamedSharding:
        names = [LOGICAL_AXIS_RULES[axis] for axis in axes]
        if for_decode:
            names = [name if name in ("tensor", "expert") else None for name in names]
        spec = [
            _find_dividing_axes(mesh, n, size) for n, size in zip(names, shape.shape, strict=True)
        ]
        return NamedSharding(mesh, P(*spec))

    return jax.tree.map(make_leaf_sharding, axes, shapes, is_leaf=is_axes_leaf)


def _find_dividing_axes(mesh: Mesh, names: str | tuple[str, ...] | None, size: int) -> Any:
    """Return the longest prefix of the mesh axes `names` that divides a dimension."""
    if names is None:
        return None
    first, *others = (names,) if isinstance(names, str) else names
    axes = (first, *(name for name in others if mesh.shape[name] > 1))
    while axes and size % math.prod(mesh.shape[name] for name in axes):
        axes = axes[:-1]
    return axes if len(axes) > 1 else next(iter(axes), None)


def make_restore_target(tree: Any, shardings: Any) -> Any:
    """Combine a tree's shapes and dtypes with shardings into a restore target."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        tree,
        shardings,
    )

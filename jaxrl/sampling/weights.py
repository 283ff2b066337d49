"""Conversion of the trainer's parameters to the sampler's weights."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict
from jax.extend.core import ClosedJaxpr
from jax.sharding import Mesh, NamedSharding

from jaxrl.models.architecture import Architecture
from jaxrl.runtime.compilation import cached_jit, join_keys
from jaxrl.runtime.host_memory import trim_memory
from jaxrl.runtime.sharding import decode_shardings, make_param_shardings, move_to_local_mesh
from jaxrl.types import Params


class WeightConverter:
    """Owner of the sampler's weights, converted from the parameters.

    Weights are copies, so later updates of the parameters do not affect them. A parameter is shared
    only if the architecture never trains it and the sampler uses it unchanged. Parameters frozen
    only by `config.model.freeze_tower` are copied. Donated parameters (see `donate`) belong to this
    object.
    """

    def __init__(
        self,
        prepare: Callable[[Params], Params],
        policy: Architecture,
        *,
        mesh: Mesh,
        train_mesh: Mesh,
        scan_layers: bool,
        key: Hashable = None,
    ):
        """Prepare the conversion, which is compiled on first use.

        Args:
            prepare: Function that converts parameters to weights.
            policy: Architecture of the policy.
            mesh: Mesh that holds the weights.
            train_mesh: Mesh that holds the parameters.
            scan_layers: See `decode.Programs`.
            key: Cache key of `prepare`; see `cached_jit`.
        """
        self._key = join_keys(key, train_mesh)
        self._prepare, self._mesh, self._train_mesh = prepare, mesh, train_mesh
        self._params = policy.make_abstract_params()
        self._abstract = jax.eval_shape(prepare, self._params)
        shardings, outputs = (
            {name: tree[name] for name in self._abstract}
            for tree in (
                decode_shardings(mesh, policy, scan_layers=scan_layers),
                decode_shardings(train_mesh, policy, scan_layers=scan_layers),
            )
        )
        self.shardings: Any = shardings
        self._output_shardings: list[NamedSharding] = jax.tree.leaves(outputs)
        self._unchanged = self._map_unchanged_weights(policy) if train_mesh == mesh else {}
        frozen = flatten_dict(policy.make_param_specs()[1].make_abstract_params())
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(self._params)]
        self._is_frozen = [tuple(entry.key for entry in path) in frozen for path in paths]
        # A training run needs one program; others compile on first use.
        self._program = functools.cache(self._make_program)
        self._owned: list[jax.Array] = []

    def make_abstract_weights(self) -> Params:
        """Return the shapes, dtypes and shardings of the weights."""
        return jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            self._abstract,
            self.shardings,
        )

    def _map_unchanged_weights(self, policy: Architecture) -> dict[int, int]:
        """Return the parameter index of each weight that equals a parameter, by weight index."""
        source_shardings = jax.tree.leaves(make_param_shardings(self._mesh, policy))
        program = jax.make_jaxpr(self._prepare)(self._params)
        indices = {id(variable): index for index, variable in enumerate(program.jaxpr.invars)}
        params = [indices.get(id(variable)) for variable in program.jaxpr.outvars]
        pairs = zip(params, program.out_avals, jax.tree.leaves(self.shardings), strict=True)
        return {
            index: param
            for index, (param, shape, sharding) in enumerate(pairs)
            if param is not None and source_shardings[param].is_equivalent_to(sharding, shape.ndim)
        }

    def _make_program(self, inputs: tuple[int, ...], targets: tuple[int, ...]) -> Any:
        """Return a function that maps the parameters at `inputs` to the weights at `targets`."""
        structure, shapes = jax.tree.structure(self._params), jax.tree.leaves(self._params)
        prepare = self._prepare

        def convert_selected(params: list[jax.Array]) -> list[jax.Array]:
            # The zeros are placeholders: no target weight depends on them.
            leaves = [jnp.zeros(x.shape, x.dtype) for x in shapes]
            for index, param in zip(inputs, params, strict=True):
                leaves[index] = param
            weights = jax.tree.leaves(prepare(jax.tree.unflatten(structure, leaves)))
            return [weights[index] for index in targets]

        return cached_jit(
            convert_selected,
            name="weights",
            key=join_keys(self._key, inputs, targets),
            out_shardings=[self._output_shardings[index] for index in targets],
        )

    def convert(self, params: Params) -> Params:
        """Free the previous weights, then convert training parameters to sampler weights.

        Donated parameters are read a few at a time, largest first, and freed once their weights
        exist. Parameters and weights are therefore never both completely in memory.
        """
        # Donated parameters are callables: convert each independent part separately.
        inputs, shardings = jax.tree.leaves(params), jax.tree.leaves(self.shardings)
        parts: list[tuple[Sequence[int], Sequence[int]]] = [
            (range(len(inputs)), range(len(shardings)))
        ]
        if any(map(callable, inputs)):
            shapes = jax.tree.leaves(self._params)
            program = jax.make_jaxpr(self._prepare)(self._params)
            parts = sorted(
                partition_program(program), key=lambda part: -sum(shapes[p].size for p in part[0])
            )

        # Share the weights that are unchanged parameters; compute the others.
        weights: dict[int, jax.Array] = {}
        for sources, indices in parts:
            arrays = {p: inputs[p]() if callable(inputs[p]) else inputs[p] for p in sources}
            donated = {p for p in sources if callable(inputs[p])}
            for index in indices:
                source = self._unchanged.get(index)
                if source is not None and (self._is_frozen[source] or source in donated):
                    weights[index] = arrays[source]
            targets = tuple(index for index in indices if index not in weights)
            outputs = self._program(tuple(sources), targets)(list(arrays.values()))
            if self._train_mesh != self._mesh:
                move = partial(move_to_local_mesh, mesh=self._train_mesh)
                outputs = [
                    move(leaf, shardings[p]) for p, leaf in zip(targets, outputs, strict=True)
                ]
            weights |= zip(targets, outputs, strict=True)
            self._owned += outputs
            if donated:
                jax.block_until_ready(outputs)
                # Keep donated arrays that are weights themselves; free the others.
                shared = {self._unchanged[index] for index in indices if index not in targets}
                self._owned += [arrays[p] for p in donated & shared]
                delete_arrays([arrays[p] for p in donated - shared])
        leaves = [weights[index] for index in range(len(shardings))]
        return jax.tree.unflatten(jax.tree.structure(self._abstract), leaves)

    def free(self) -> None:
        """Free the weights immediately, even if other references exist."""
        delete_arrays(self._owned)
        self._owned = []
        if self._mesh.devices.flat[0].platform == "cpu":
            trim_memory()


def donate(params: Params) -> Params:
    """Mark parameters that `WeightConverter.convert` may free after converting them.

    Each parameter becomes a function that returns the parameter, as in the result of `load_hf` with
    `is_lazy`.
    """
    return jax.tree.map(lambda leaf: leaf if callable(leaf) else lambda: leaf, params)


def partition_program(program: Any) -> list[tuple[list[int], list[int]]]:
    """Partition the input and output indices of a traced function into independent parts."""
    inputs = [{index} for index in range(len(program.jaxpr.invars))]
    parts: list[tuple[set[int], set[int]]] = []
    for index, dependencies in enumerate(_find_dependencies(program.jaxpr, inputs)):
        sources, indices = dependencies, {index}
        for other_sources, other_indices in parts:
            if other_sources & dependencies:
                sources, indices = sources | other_sources, indices | other_indices
        parts = [part for part in parts if not part[0] & dependencies] + [(sources, indices)]
    return [(sorted(sources), sorted(indices)) for sources, indices in parts]


def _find_dependencies(jaxpr: Any, inputs: Sequence[set[int]]) -> list[set[int]]:
    """Return, for each output of a jaxpr, the indices of the program inputs it depends on.

    `inputs` holds the same indices for each input of the jaxpr.
    """
    sources = {
        id(variable): dependencies
        for variable, dependencies in zip(jaxpr.invars, inputs, strict=True)
    }
    for equation in jaxpr.eqns:
        dependencies = [sources.get(id(variable), set()) for variable in equation.invars]
        outputs = [set[int]().union(*dependencies)] * len(equation.outvars)
        if equation.primitive.name in CALL_PRIMITIVES:
            [inner] = [x for x in equation.params.values() if isinstance(x, ClosedJaxpr)]
            outputs = _find_dependencies(inner.jaxpr, dependencies)
        sources |= zip(map(id, equation.outvars), outputs, strict=True)
    return [sources.get(id(variable), set()) for variable in jaxpr.outvars]


CALL_PRIMITIVES = {"jit", "pjit", "custom_vjp_call"}
"""Primitives that call an inner traced function with the same inputs and outputs."""


def delete_arrays(arrays: Any) -> None:
    """Free device arrays immediately, even if other references exist; skip donated arrays."""
    for array in jax.tree.leaves(arrays):
        if not array.is_deleted():
            array.delete()

"""Conversion of the trainer's parameters to the weights that the sampler's programs read."""

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
from jaxrl.runtime.compilation import compile_all, jitted, joined
from jaxrl.runtime.host_memory import give_back
from jaxrl.runtime.sharding import decode_shardings, on_local_mesh, param_shardings
from jaxrl.types import Params


class Weights:
    """Converter from parameters to sampler weights, which owns the weights' memory.

    Weights are copies, so later updates of the parameters do not affect them. There is one
    exception: a parameter that no run of the architecture trains is shared if the sampler reads it
    unchanged. Parameters frozen only by `config.model.freeze_tower` are copied. Donated parameters
    (see `donate`) belong to this object.
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
        """Declare the conversion program.

        Args:
            prepare: Function from parameters to weights.
            policy: Architecture of the parameters.
            mesh: Mesh of the weights.
            train_mesh: Mesh of the parameters.
            scan_layers: See `decode.Programs`.
            key: Key of `prepare`; see `jitted`.
        """
        self._key = joined(key, train_mesh)
        self._prepare, self._mesh, self._train_mesh = prepare, mesh, train_mesh
        self._params = policy.abstract_params()
        self._abstract = jax.eval_shape(prepare, self._params)
        layouts, made = (
            {name: tree[name] for name in self._abstract}
            for tree in (
                decode_shardings(mesh, policy, scan_layers=scan_layers),
                decode_shardings(train_mesh, policy, scan_layers=scan_layers),
            )
        )
        self.layouts: Any = layouts
        self._made: list[NamedSharding] = jax.tree.leaves(made)
        self._same = self._find_same(policy) if train_mesh == mesh else {}
        frozen = flatten_dict(policy.parts()[1].abstract_params())
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(self._params)]
        self._is_lent = [tuple(one.key for one in path) in frozen for path in paths]
        # A training run needs one program; others compile on first use.
        self._program = functools.cache(self._declare)
        self._own: list[jax.Array] = []

    def abstract(self) -> Params:
        """Return the shapes and shardings of the weights."""
        return jax.tree.map(
            lambda x, layout: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout),
            self._abstract,
            self.layouts,
        )

    def _find_same(self, policy: Architecture) -> dict[int, int]:
        """Map each weight that is an unchanged parameter to it, by index."""
        lie = jax.tree.leaves(param_shardings(self._mesh, policy))
        program = jax.make_jaxpr(self._prepare)(self._params)
        places = {id(variable): place for place, variable in enumerate(program.jaxpr.invars)}
        params = [places.get(id(variable)) for variable in program.jaxpr.outvars]
        pairs = zip(params, program.out_avals, jax.tree.leaves(self.layouts), strict=True)
        return {
            place: param
            for place, (param, shape, layout) in enumerate(pairs)
            if param is not None and lie[param].is_equivalent_to(layout, shape.ndim)
        }

    def _declare(self, given: tuple[int, ...], wanted: tuple[int, ...]) -> Any:
        """Return a program from the parameters at indices `given` to the weights at `wanted`."""
        structure, shapes = jax.tree.structure(self._params), jax.tree.leaves(self._params)
        prepare = self._prepare

        def make(params: list[jax.Array]) -> list[jax.Array]:
            # The zeros are placeholders: no wanted weight depends on them.
            leaves = [jnp.zeros(x.shape, x.dtype) for x in shapes]
            for place, param in zip(given, params, strict=True):
                leaves[place] = param
            weights = jax.tree.leaves(prepare(jax.tree.unflatten(structure, leaves)))
            return [weights[place] for place in wanted]

        program = jitted(
            make,
            name="weights",
            key=joined(self._key, given, wanted),
            out_shardings=[self._made[place] for place in wanted],
        )
        compiled: list[Any] = []

        def call(params: list[jax.Array]) -> list[jax.Array]:
            if not compiled:
                lowered = program.lower(params)
                compile_all([lambda: compiled.append(lowered.compile())])
            return compiled[0](params)

        return call

    def of(self, params: Params) -> Params:
        """Convert parameters to weights; previous weights must have been freed.

        Donated parameters are read a few at a time, the largest first, and freed once their weights
        exist. Parameters and weights are therefore never both complete in memory.
        """
        # Donated parameters are callables: convert each independent part separately.
        given, layouts = jax.tree.leaves(params), jax.tree.leaves(self.layouts)
        parts: list[tuple[Sequence[int], Sequence[int]]] = [
            (range(len(given)), range(len(layouts)))
        ]
        if any(map(callable, given)):
            shapes = jax.tree.leaves(self._params)
            program = jax.make_jaxpr(self._prepare)(self._params)
            parts = sorted(related(program), key=lambda part: -sum(shapes[p].size for p in part[0]))

        # Share the weights that are unchanged parameters; compute the others.
        weights: dict[int, jax.Array] = {}
        for sources, places in parts:
            arrays = {p: given[p]() if callable(given[p]) else given[p] for p in sources}
            is_free = {p for p in sources if callable(given[p])}
            for place in places:
                same = self._same.get(place)
                if same is not None and (self._is_lent[same] or same in is_free):
                    weights[place] = arrays[same]
            wanted = tuple(place for place in places if place not in weights)
            made = self._program(tuple(sources), wanted)(list(arrays.values()))
            if self._train_mesh != self._mesh:
                move = partial(on_local_mesh, mesh=self._train_mesh)
                made = [move(leaf, layouts[p]) for p, leaf in zip(wanted, made, strict=True)]
            weights |= zip(wanted, made, strict=True)
            self._own += made
            if is_free:
                jax.block_until_ready(made)
                # Keep donated arrays that are weights themselves; free the others.
                taken = {self._same[place] for place in places if place not in wanted}
                self._own += [arrays[p] for p in is_free & taken]
                delete([arrays[p] for p in is_free - taken])
        leaves = [weights[place] for place in range(len(layouts))]
        return jax.tree.unflatten(jax.tree.structure(self._abstract), leaves)

    def free(self) -> None:
        """Free the weights immediately, even if other references exist."""
        delete(self._own)
        self._own = []
        if self._mesh.devices.flat[0].platform == "cpu":
            give_back()


def donate(params: Params) -> Params:
    """Mark parameters as no longer needed once `Weights.of` has converted them.

    Each becomes a function that returns it, like a parameter that is still on disk (`load_hf`).
    """
    return jax.tree.map(lambda leaf: leaf if callable(leaf) else lambda: leaf, params)


def related(program: Any) -> list[tuple[list[int], list[int]]]:
    """Partition the input and output indices of a traced function into independent parts."""
    inputs = [{place} for place in range(len(program.jaxpr.invars))]
    parts: list[tuple[set[int], set[int]]] = []
    for place, needed in enumerate(_needs(program.jaxpr, inputs)):
        sources, places = needed, {place}
        for others, theirs in parts:
            if others & needed:
                sources, places = sources | others, places | theirs
        parts = [part for part in parts if not part[0] & needed] + [(sources, places)]
    return [(sorted(sources), sorted(places)) for sources, places in parts]


def _needs(jaxpr: Any, inputs: Sequence[set[int]]) -> list[set[int]]:
    """Return the sources that each output depends on, given those of each input."""
    sources = {id(variable): needed for variable, needed in zip(jaxpr.invars, inputs, strict=True)}
    for equation in jaxpr.eqns:
        needed = [sources.get(id(variable), set()) for variable in equation.invars]
        made = [set[int]().union(*needed)] * len(equation.outvars)
        if equation.primitive.name in CALLS:
            [inner] = [x for x in equation.params.values() if isinstance(x, ClosedJaxpr)]
            made = _needs(inner.jaxpr, needed)
        sources |= zip(map(id, equation.outvars), made, strict=True)
    return [sources.get(id(variable), set()) for variable in jaxpr.outvars]


CALLS = {"jit", "pjit", "custom_vjp_call"}
"""Primitives that call another traced function with the same inputs and outputs."""


def delete(arrays: Any) -> None:
    """Free device arrays immediately, even if other references exist; skip donated arrays."""
    for array in jax.tree.leaves(arrays):
        if not array.is_deleted():
            array.delete()

"""The trainer's parameters as the weights that the sampler's programs read."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh

from jaxrl.models.architecture import Architecture
from jaxrl.models.lora import TRAINED, Adapter
from jaxrl.runtime.sharding import decode_shardings, on_local_mesh, param_shardings
from jaxrl.types import Params


class Weights:
    """Makes weights of parameters, and frees them.

    They are copies: what becomes of the parameters does not touch them. But where an adapter's base
    has an array just as the sampler reads it, the base's own is read: it never changes.
    """

    def __init__(
        self,
        prepare: Callable[[Params], Params],
        policy: Architecture | Adapter,
        *,
        mesh: Mesh,
        train_mesh: Mesh,
        scan_layers: bool,
    ):
        """Declares the program.

        Args:
            prepare: parameters to weights.
            policy: whose parameters they are.
            mesh: where the weights lie.
            train_mesh: where the parameters lie.
            scan_layers: see `decode.Sampler`.
        """
        self._mesh, self._train_mesh = mesh, train_mesh
        self._abstract = jax.eval_shape(prepare, policy.abstract_params())
        layouts, made = (
            {name: tree[name] for name in self._abstract}
            for tree in (
                decode_shardings(mesh, policy, scan_layers=scan_layers),
                decode_shardings(train_mesh, policy, scan_layers=scan_layers),
            )
        )
        self.layouts: Any = layouts
        self._borrowed = self._find_borrowed(prepare, policy)

        def others(params: Params) -> list[jax.Array]:
            leaves = jax.tree.leaves(prepare(params))
            return [leaf for place, leaf in enumerate(leaves) if place not in self._borrowed]

        layouts_of_others = [
            layout for p, layout in enumerate(jax.tree.leaves(made)) if p not in self._borrowed
        ]
        self._make = jax.jit(others, out_shardings=layouts_of_others)
        self._own: list[jax.Array] = []

    def abstract(self) -> Params:
        """The weights' shapes and layouts."""
        return jax.tree.map(
            lambda x, layout: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout),
            self._abstract,
            self.layouts,
        )

    def _find_borrowed(
        self, prepare: Callable[[Params], Params], policy: Architecture | Adapter
    ) -> dict[int, int]:
        """Of each weight that is a parameter of the base, the places of both among the leaves."""
        if not isinstance(policy, Adapter) or self._train_mesh != self._mesh:
            return {}
        params = policy.abstract_params()
        names = [path[-1].key for path, _ in jax.tree_util.tree_leaves_with_path(params)]
        lie = jax.tree.leaves(param_shardings(self._mesh, policy))
        program = jax.make_jaxpr(prepare)(params)
        places = {id(variable): place for place, variable in enumerate(program.jaxpr.invars)}
        found = [places.get(id(variable)) for variable in program.jaxpr.outvars]
        pairs = zip(found, program.out_avals, jax.tree.leaves(self.layouts), strict=True)
        return {
            place: param
            for place, (param, shape, layout) in enumerate(pairs)
            if param is not None
            and names[param] not in TRAINED
            and lie[param].is_equivalent_to(layout, shape.ndim)
        }

    def of(self, params: Params) -> Params:
        """The weights of parameters; those made before must be freed."""
        own = self._make(params)
        if self._train_mesh != self._mesh:
            move = partial(on_local_mesh, mesh=self._train_mesh)
            own = [
                move(leaf, layout)
                for leaf, layout in zip(own, jax.tree.leaves(self.layouts), strict=True)
            ]
        self._own, leaves, given = own, list(own), jax.tree.leaves(params)
        for place, found in self._borrowed.items():  # in their order
            leaves.insert(place, given[found])
        return jax.tree.unflatten(jax.tree.structure(self._abstract), leaves)

    def free(self) -> None:
        """Gives back their memory at once, whoever still refers to them."""
        delete(self._own)
        self._own = []


def delete(arrays: Any) -> None:
    """Frees device arrays at once, whoever still refers to them; donated ones are gone already."""
    for array in jax.tree.leaves(arrays):
        if not array.is_deleted():
            array.delete()

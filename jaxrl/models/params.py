"""Parts of a policy's parameters: those that are trained, and those that stay as they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from flax.traverse_util import flatten_dict, unflatten_dict

from jaxrl.types import Params

if TYPE_CHECKING:
    from jaxrl.models.architecture import Architecture


@runtime_checkable
class ParamSpec(Protocol):
    """Part of a policy's parameters, or all: shapes, and how they lie on the mesh."""

    def abstract_params(self) -> Params:
        """The parameters as `jax.ShapeDtypeStruct`s."""
        ...

    def logical_axes(self) -> dict[str, Any]:
        """Names of axes in the shape of the parameters; see `Architecture.logical_axes`."""
        ...


@dataclass(frozen=True)
class Part:
    """The parameters of an architecture whose paths are named.

    Attributes:
        model: whose they are.
        paths: of these, as `flatten_dict` has them.
    """

    model: Architecture
    paths: frozenset[tuple[str, ...]]

    def abstract_params(self) -> Params:
        """The parameters as `jax.ShapeDtypeStruct`s."""
        return only(self.model.abstract_params(), self.paths.__contains__)

    def logical_axes(self) -> dict[str, Any]:
        """Names of axes in the shape of the parameters."""
        return only(self.model.logical_axes(), self.paths.__contains__)


def split_params(
    model: Architecture, is_trained: Callable[[tuple[str, ...]], bool]
) -> tuple[Part, Part]:
    """The trained parameters of an architecture, chosen by their paths, and the others."""
    paths = flatten_dict(model.abstract_params()).keys()
    trained = frozenset(path for path in paths if is_trained(path))
    return Part(model, trained), Part(model, frozenset(paths) - trained)


def only(tree: Params, is_in: Callable[[tuple[str, ...]], bool]) -> Params:
    """The parameters whose paths `is_in` takes."""
    return unflatten_dict({path: leaf for path, leaf in flatten_dict(tree).items() if is_in(path)})


def split(policy: Params, trained: ParamSpec) -> tuple[Params, Params]:
    """The parameters of a policy that are trained, and the others."""
    paths = flatten_dict(trained.abstract_params()).keys()
    return only(policy, paths.__contains__), only(policy, lambda path: path not in paths)


def join(one: Params, other: Params) -> Params:
    """One tree of two that have no parameter in common; the inverse of `split`."""
    joined = dict(one)
    for name, node in other.items():
        joined[name] = join(joined[name], node) if name in joined else node
    return joined

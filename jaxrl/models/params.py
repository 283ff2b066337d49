"""Split of a policy's parameters into trained and frozen ones."""

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
    """Shapes and mesh axes of all or some of a policy's parameters."""

    def abstract_params(self) -> Params:
        """Return the parameters as `jax.ShapeDtypeStruct`s."""
        ...

    def logical_axes(self) -> dict[str, Any]:
        """Return axis names as a tree like the parameters'; see `Architecture.logical_axes`."""
        ...


@dataclass(frozen=True)
class ParamSubset:
    """The parameters of an architecture at some paths.

    Attributes:
        model: Architecture that declares the parameters.
        paths: Paths of the selected parameters, as in `flatten_dict`.
    """

    model: Architecture
    paths: frozenset[tuple[str, ...]]

    def abstract_params(self) -> Params:
        """Return the parameters as `jax.ShapeDtypeStruct`s."""
        return select_params(self.model.abstract_params(), self.paths.__contains__)

    def logical_axes(self) -> dict[str, Any]:
        """Return axis names as a tree like the parameters'."""
        return select_params(self.model.logical_axes(), self.paths.__contains__)


def split_params(
    model: Architecture, is_trained: Callable[[tuple[str, ...]], bool]
) -> tuple[ParamSubset, ParamSubset]:
    """Return the trained parameters of an architecture, selected by path, and the others."""
    paths = flatten_dict(model.abstract_params()).keys()
    trained = frozenset(path for path in paths if is_trained(path))
    return ParamSubset(model, trained), ParamSubset(model, frozenset(paths) - trained)


def select_params(tree: Params, predicate: Callable[[tuple[str, ...]], bool]) -> Params:
    """Return the parameters at paths for which `predicate` is true."""
    return unflatten_dict(
        {path: leaf for path, leaf in flatten_dict(tree).items() if predicate(path)}
    )


def split(policy: Params, trained: ParamSpec) -> tuple[Params, Params]:
    """Return the trained parameters of a policy, and the others."""
    paths = flatten_dict(trained.abstract_params()).keys()
    return select_params(policy, paths.__contains__), select_params(
        policy, lambda path: path not in paths
    )


def merge_params(first: Params, second: Params) -> Params:
    """Merge two trees that share no parameter; the inverse of `split`."""
    merged = dict(first)
    for name, node in second.items():
        merged[name] = merge_params(merged[name], node) if name in merged else node
    return merged

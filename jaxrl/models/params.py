"""Split a policy's parameters into trained and frozen parameters."""

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
    """Shapes and logical axes of a subset of a policy's parameters."""

    def make_abstract_params(self) -> Params:
        """Return the parameters as `jax.ShapeDtypeStruct`s."""
        ...

    def get_logical_axes(self) -> dict[str, Any]:
        """Return a tree with each parameter's logical axes; see `Architecture.get_logical_axes`."""
        ...


@dataclass(frozen=True)
class ParamSubset:
    """Subset of an architecture's parameters, selected by path.

    Attributes:
        model: Architecture that declares the parameters.
        paths: Paths of the selected parameters, as in `flatten_dict`.
    """

    model: Architecture
    paths: frozenset[tuple[str, ...]]

    def make_abstract_params(self) -> Params:
        """Return the parameters as `jax.ShapeDtypeStruct`s."""
        return select_params(self.model.make_abstract_params(), self.paths.__contains__)

    def get_logical_axes(self) -> dict[str, Any]:
        """Return a tree with the logical axes of each parameter."""
        return select_params(self.model.get_logical_axes(), self.paths.__contains__)


def split_param_specs(
    model: Architecture, is_trained: Callable[[tuple[str, ...]], bool]
) -> tuple[ParamSubset, ParamSubset]:
    """Split an architecture's parameters by path into trained and frozen subsets."""
    paths = flatten_dict(model.make_abstract_params()).keys()
    trained = frozenset(path for path in paths if is_trained(path))
    return ParamSubset(model, trained), ParamSubset(model, frozenset(paths) - trained)


def select_params(tree: Params, predicate: Callable[[tuple[str, ...]], bool]) -> Params:
    """Return the subtree of parameters whose paths satisfy `predicate`."""
    return unflatten_dict(
        {path: leaf for path, leaf in flatten_dict(tree).items() if predicate(path)}
    )


def split_params(policy: Params, trained: ParamSpec) -> tuple[Params, Params]:
    """Split a policy's parameters into those in `trained` and the rest."""
    paths = flatten_dict(trained.make_abstract_params()).keys()
    return select_params(policy, paths.__contains__), select_params(
        policy, lambda path: path not in paths
    )


def merge_params(first: Params, second: Params) -> Params:
    """Merge two parameter trees without common leaves; the inverse of `split_params`."""
    merged = dict(first)
    for name, node in second.items():
        merged[name] = merge_params(merged[name], node) if name in merged else node
    return merged

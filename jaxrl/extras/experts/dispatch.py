"""Dispatch of tokens to experts: sorted by expert, dropless, no token x expert x width array.

If experts are split over the mesh axis `expert`, its devices gather each other's tokens, apply
their own experts, and reduce-scatter the results: each device gets the sums of its own tokens. The
time depends on the tokens that reach a device's experts; buffers are sized for the case that all
do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from jaxrl.extras.experts.products import Product, count_up_to, grouped_product
from jaxrl.models.architecture import KernelCheck

Weights = Mapping[str, jax.Array]
"""Weights of a layer's experts: `gate` and `up` `[E, D, F]`, `down` `[E, F, D]`."""


class Order(NamedTuple):
    """Sorting of the A = M * k token-expert pairs, and its inverse.

    There are C slots: as many pairs as can reach the local experts.
    """

    source: jax.Array  # int32 [C], pair of each slot
    is_taken: jax.Array  # bool [C], the slot holds a pair
    place: jax.Array  # int32 [A], slot of each pair
    is_here: jax.Array  # bool [A], the pair's expert is local
    sizes: jax.Array  # int32 [G], pairs of each local expert


def sort_pairs(chosen: Int[Array, "M k"], first: int | jax.Array, num_experts: int) -> Order:
    """Sort pairs by the `num_experts` experts from `first` on; the others are left out."""
    M, k = chosen.shape
    room = M * min(k, num_experts)
    experts = chosen.reshape(-1) - first
    is_here = (experts >= 0) & (experts < num_experts)
    experts = jnp.where(is_here, experts, num_experts)
    source = jnp.argsort(experts, stable=True).astype(jnp.int32)
    place = jnp.zeros(M * k, jnp.int32).at[source].set(jnp.arange(M * k, dtype=jnp.int32))
    ends = count_up_to(experts[source], jnp.arange(num_experts))
    is_taken = jnp.arange(room) < ends[-1]
    sizes = jnp.diff(ends, prepend=0)
    return Order(source[:room], is_taken, jnp.minimum(place, room - 1), is_here, sizes)


def _picked(x: jax.Array, index: jax.Array, is_valid: jax.Array) -> jax.Array:
    """Gather the rows at `index`, with 0 at invalid entries."""
    return jnp.where(is_valid[:, None], x.at[index].get(mode="promise_in_bounds"), 0)


@jax.custom_vjp
def _spread(x: Float[Array, "M D"], order: Order) -> Float[Array, "C D"]:
    """Copy tokens to their slots; the gradient is gathered too, not scattered."""
    num_chosen = len(order.place) // len(x)
    return _picked(x, order.source // num_chosen, order.is_taken)


def _spread_forward(x: jax.Array, order: Order) -> tuple[jax.Array, tuple[Order, int]]:
    return _spread(x, order), (order, len(x))


def _spread_backward(saved: tuple[Order, int], gradient: jax.Array) -> tuple[jax.Array, None]:
    order, num_tokens = saved
    pairs = _picked(gradient, order.place, order.is_here)
    pairs = pairs.reshape(num_tokens, -1, gradient.shape[-1])
    return pairs.sum(axis=1, dtype=jnp.float32).astype(gradient.dtype), None


_spread.defvjp(_spread_forward, _spread_backward)


@jax.custom_vjp
def _put_back(rows: Float[Array, "C D"], order: Order) -> Float[Array, "A D"]:
    """Gather each pair's row from its slot, 0 if its expert is not local."""
    return _picked(rows, order.place, order.is_here)


def _put_back_forward(rows: jax.Array, order: Order) -> tuple[jax.Array, Order]:
    return _put_back(rows, order), order


def _put_back_backward(order: Order, gradient: jax.Array) -> tuple[jax.Array, None]:
    return _picked(gradient, order.source, order.is_taken), None


_put_back.defvjp(_put_back_forward, _put_back_backward)


def mix(
    x: Float[Array, "M D"],
    weights: Weights,
    chosen: Int[Array, "M k"],
    shares: Float[Array, "M k"],
    *,
    product: Product,
    first: int | jax.Array = 0,
) -> Float[Array, "M D"]:
    """Apply the local experts to their tokens and sum by shares; float32.

    Args:
        x: Tokens.
        weights: Weights of the local experts.
        chosen: Experts of each token.
        shares: Weight of each chosen expert, float32.
        product: See `Product`.
        first: Index of the first local expert.
    """
    order = sort_pairs(chosen, first, len(weights["gate"]))
    rows = _spread(x, order)
    gate, up = (
        checkpoint_name(product(rows, weights[name], order.sizes), name) for name in ("gate", "up")
    )
    rows = product(jax.nn.silu(gate) * up, weights["down"], order.sizes)
    pairs = _put_back(rows, order).reshape(*chosen.shape, -1)
    return (shares[..., None] * pairs.astype(jnp.float32)).sum(axis=1)


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Computation of a layer's experts.

    Attributes:
        name: Kernel name, one of `config.EXPERTS`, never `auto`.
        reason: Reason for the selection, for the log.
        product: Product of sorted rows and their experts' weights.
        mesh: Mesh over which tokens are split, experts over `expert` and their inner width over
            `tensor`; None is one device.
        batch: Mesh axes over which tokens are split.
        kernel_checks: Self-test results; see `models.kernel_check`.
    """

    name: str
    reason: str
    product: Product
    mesh: Mesh | None = None
    batch: tuple[str, ...] = ()
    kernel_checks: tuple[KernelCheck, ...] = ()

    def __call__(
        self,
        x: Float[Array, "M D"],
        weights: Weights,
        chosen: Int[Array, "M k"],
        shares: Float[Array, "M k"],
    ) -> Float[Array, "M D"]:
        """Apply each token's experts and sum by shares."""
        if self.mesh is None or self.mesh.size == 1:
            return mix(x, weights, chosen, shares, product=self.product).astype(x.dtype)
        splits_width = weights["gate"].shape[-1] % self.mesh.shape["tensor"] == 0
        width = "tensor" if splits_width else None
        outwards, back = P("expert", None, width), P("expert", width, None)
        of_tokens = P(self.batch)
        return jax.shard_map(
            partial(self._on_device, sums_width=splits_width),
            mesh=self.mesh,
            in_specs=(of_tokens, {"gate": outwards, "up": outwards, "down": back})
            + (of_tokens,) * 2,
            out_specs=of_tokens,
            check_vma=False,
        )(x, {name: weights[name] for name in ("gate", "up", "down")}, chosen, shares)

    def _on_device(
        self,
        x: jax.Array,
        weights: Weights,
        chosen: jax.Array,
        shares: jax.Array,
        *,
        sums_width: bool,
    ) -> jax.Array:
        assert self.mesh is not None
        dtype, gathers = x.dtype, self.mesh.shape["expert"] > 1
        if gathers:
            x, chosen, shares = (
                jax.lax.all_gather(array, "expert", tiled=True) for array in (x, chosen, shares)
            )
        first = jax.lax.axis_index("expert") * len(weights["gate"])
        mixed = mix(x, weights, chosen, shares, product=self.product, first=first)
        if sums_width and self.mesh.shape["tensor"] > 1:
            mixed = jax.lax.psum(mixed, "tensor")
        if gathers:
            mixed = jax.lax.psum_scatter(mixed, "expert", tiled=True)
        return mixed.astype(dtype)


XLA = Experts(name="xla", reason="which every platform has", product=grouped_product)
"""XLA computation on one device of any platform."""

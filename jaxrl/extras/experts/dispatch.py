"""Tokens to their experts and back: sorted by expert, none dropped, no token x expert x width.

Where experts are split over the mesh axis `expert`, its devices gather each other's tokens, compute
those of their own experts, and add up: each device gets the sums of its own tokens. How long it
takes depends on the tokens that reach a device's experts; room is for the case that all do.
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
    """Order in which the A = M * k pairs of a token and an expert are sorted, and put back.

    Room is for C of them: as many as can reach the experts at hand.
    """

    source: jax.Array  # int32 [C], of each place its pair
    is_taken: jax.Array  # bool [C]
    place: jax.Array  # int32 [A], of each pair its place
    is_here: jax.Array  # bool [A], its expert is at hand
    sizes: jax.Array  # int32 [G], of each expert at hand its pairs


def sort_pairs(chosen: Int[Array, "M k"], first: int | jax.Array, num_experts: int) -> Order:
    """Sorts pairs by the experts from `first` on, `num_experts` of them; others are left out."""
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
    """The rows at `index`, 0 where that is not valid."""
    return jnp.where(is_valid[:, None], x.at[index].get(mode="promise_in_bounds"), 0)


@jax.custom_vjp
def _spread(x: Float[Array, "M D"], order: Order) -> Float[Array, "C D"]:
    """Copies each place its token; the gradient is gathered too, not scattered."""
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
    """Gathers each pair's row from its place, 0 where its expert is not at hand."""
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
    """Applies the experts at hand to their tokens and adds up by shares; float32.

    Args:
        x: the tokens.
        weights: of the experts at hand.
        chosen: experts of each token.
        shares: of each, float32.
        product: see `Product`.
        first: number of the first expert at hand.
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
    """Computation of the experts of a layer.

    Attributes:
        name: of the products, out of `config.EXPERTS`, never `auto`.
        reason: why these, for the log.
        product: of sorted rows and the weights of their experts.
        mesh: over which tokens are split, experts over `expert` and their inner width over
            `tensor`; None: of one device.
        batch: the axes of the mesh over which tokens are split.
        kernel_checks: what was found about kernels before the run; see `models.kernel_check`.
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
        """Applies each token's experts to it and adds up by their shares."""
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
"""Computation on one device of any platform."""

"""Dropless dispatch of tokens to experts, sorted by expert.

If experts are split over the `expert` mesh axis, the devices along that axis gather each other's
tokens, apply their local experts, and reduce-scatter the results. The time depends on the number of
tokens routed to a device's experts. Buffers have room for the worst case: all tokens are routed to
the experts of one device.
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

from jaxrl.extras.experts.products import GroupedMatmul, count_at_most, grouped_matmul
from jaxrl.models.architecture import KernelCheck

Weights = Mapping[str, jax.Array]
"""Weights of a layer's experts: `gate` and `up` `[E, D, F]`, `down` `[E, F, D]`."""


class DispatchOrder(NamedTuple):
    """Permutation that sorts the A = M * k token-expert pairs by expert, and its inverse.

    The number of slots C is the maximum number of pairs with local experts.
    """

    source: jax.Array  # int32 [C], index of the pair in each slot
    is_filled: jax.Array  # bool [C], the slot holds a pair
    slot: jax.Array  # int32 [A], slot of each pair
    is_local: jax.Array  # bool [A], the pair's expert is local
    sizes: jax.Array  # int32 [G], pairs of each local expert


def sort_by_expert(
    topk_ids: Int[Array, "M k"], first_expert: int | jax.Array, num_experts: int
) -> DispatchOrder:
    """Sort the pairs whose experts are local: the `num_experts` experts from `first_expert`."""
    M, k = topk_ids.shape
    capacity = M * min(k, num_experts)
    experts = topk_ids.reshape(-1) - first_expert
    is_local = (experts >= 0) & (experts < num_experts)
    experts = jnp.where(is_local, experts, num_experts)
    source = jnp.argsort(experts, stable=True).astype(jnp.int32)
    slot = jnp.zeros(M * k, jnp.int32).at[source].set(jnp.arange(M * k, dtype=jnp.int32))
    ends = count_at_most(experts[source], jnp.arange(num_experts))
    is_filled = jnp.arange(capacity) < ends[-1]
    sizes = jnp.diff(ends, prepend=0)
    return DispatchOrder(
        source[:capacity], is_filled, jnp.minimum(slot, capacity - 1), is_local, sizes
    )


def _gather_rows(x: jax.Array, index: jax.Array, is_valid: jax.Array) -> jax.Array:
    """Gather the rows at `index`, or zeros where the index is invalid."""
    return jnp.where(is_valid[:, None], x.at[index].get(mode="promise_in_bounds"), 0)


@jax.custom_vjp
def _permute(x: Float[Array, "M D"], order: DispatchOrder) -> Float[Array, "C D"]:
    """Copy tokens to their slots. The backward pass gathers instead of scattering."""
    top_k = len(order.slot) // len(x)
    return _gather_rows(x, order.source // top_k, order.is_filled)


def _permute_forward(
    x: jax.Array, order: DispatchOrder
) -> tuple[jax.Array, tuple[DispatchOrder, int]]:
    return _permute(x, order), (order, len(x))


def _permute_backward(
    saved: tuple[DispatchOrder, int], gradient: jax.Array
) -> tuple[jax.Array, None]:
    order, num_tokens = saved
    pairs = _gather_rows(gradient, order.slot, order.is_local)
    pairs = pairs.reshape(num_tokens, -1, gradient.shape[-1])
    return pairs.sum(axis=1, dtype=jnp.float32).astype(gradient.dtype), None


_permute.defvjp(_permute_forward, _permute_backward)


@jax.custom_vjp
def _unpermute(rows: Float[Array, "C D"], order: DispatchOrder) -> Float[Array, "A D"]:
    """Gather the row of each pair from its slot, or zeros if its expert is not local."""
    return _gather_rows(rows, order.slot, order.is_local)


def _unpermute_forward(rows: jax.Array, order: DispatchOrder) -> tuple[jax.Array, DispatchOrder]:
    return _unpermute(rows, order), order


def _unpermute_backward(order: DispatchOrder, gradient: jax.Array) -> tuple[jax.Array, None]:
    return _gather_rows(gradient, order.source, order.is_filled), None


_unpermute.defvjp(_unpermute_forward, _unpermute_backward)


def apply_experts(
    x: Float[Array, "M D"],
    weights: Weights,
    topk_ids: Int[Array, "M k"],
    topk_weights: Float[Array, "M k"],
    *,
    grouped_matmul: GroupedMatmul,
    first_expert: int | jax.Array = 0,
) -> Float[Array, "M D"]:
    """Apply the local experts to their tokens; return the router-weighted float32 sum.

    Args:
        x: Hidden states of the tokens.
        weights: Weights of the local experts.
        topk_ids: Top-k experts of each token.
        topk_weights: Router weight of each selected expert, float32.
        grouped_matmul: Grouped matmul kernel.
        first_expert: Index of the first local expert.
    """
    order = sort_by_expert(topk_ids, first_expert, len(weights["gate"]))
    rows = _permute(x, order)
    gate, up = (
        checkpoint_name(grouped_matmul(rows, weights[name], order.sizes), name)
        for name in ("gate", "up")
    )
    rows = grouped_matmul(jax.nn.silu(gate) * up, weights["down"], order.sizes)
    pairs = _unpermute(rows, order).reshape(*topk_ids.shape, -1)
    return (topk_weights[..., None] * pairs.astype(jnp.float32)).sum(axis=1)


@dataclass(frozen=True, kw_only=True)
class ExpertKernels:
    """Callable that applies the experts of a layer with the kernels selected for a mesh.

    Attributes:
        name: Kernel name, one of `config.EXPERTS` except `auto`.
        reason: Reason for the selection, for the log.
        grouped_matmul: Grouped matmul kernel.
        mesh: Mesh that splits tokens over `batch`, experts over `expert` and their inner width over
            `tensor`; None for one device.
        batch: Mesh axes over which tokens are split.
        kernel_checks: Self-test results; see `models.kernel_check`.
    """

    name: str
    reason: str
    grouped_matmul: GroupedMatmul
    mesh: Mesh | None = None
    batch: tuple[str, ...] = ()
    kernel_checks: tuple[KernelCheck, ...] = ()

    def __call__(
        self,
        x: Float[Array, "M D"],
        weights: Weights,
        topk_ids: Int[Array, "M k"],
        topk_weights: Float[Array, "M k"],
    ) -> Float[Array, "M D"]:
        """Apply each token's experts; return the router-weighted sum."""
        if self.mesh is None or self.mesh.size == 1:
            return apply_experts(
                x, weights, topk_ids, topk_weights, grouped_matmul=self.grouped_matmul
            ).astype(x.dtype)
        splits_width = weights["gate"].shape[-1] % self.mesh.shape["tensor"] == 0
        width = "tensor" if splits_width else None
        up_spec, down_spec = P("expert", None, width), P("expert", width, None)
        token_spec = P(self.batch)
        return jax.shard_map(
            partial(self._apply_local_experts, sums_width=splits_width),
            mesh=self.mesh,
            in_specs=(token_spec, {"gate": up_spec, "up": up_spec, "down": down_spec})
            + (token_spec,) * 2,
            out_specs=token_spec,
            check_vma=False,
        )(x, {name: weights[name] for name in ("gate", "up", "down")}, topk_ids, topk_weights)

    def _apply_local_experts(
        self,
        x: jax.Array,
        weights: Weights,
        topk_ids: jax.Array,
        topk_weights: jax.Array,
        *,
        sums_width: bool,
    ) -> jax.Array:
        assert self.mesh is not None
        dtype, needs_gather = x.dtype, self.mesh.shape["expert"] > 1
        if needs_gather:
            x, topk_ids, topk_weights = (
                jax.lax.all_gather(array, "expert", tiled=True)
                for array in (x, topk_ids, topk_weights)
            )
        first_expert = jax.lax.axis_index("expert") * len(weights["gate"])
        combined = apply_experts(
            x,
            weights,
            topk_ids,
            topk_weights,
            grouped_matmul=self.grouped_matmul,
            first_expert=first_expert,
        )
        if sums_width and self.mesh.shape["tensor"] > 1:
            combined = jax.lax.psum(combined, "tensor")
        if needs_gather:
            combined = jax.lax.psum_scatter(combined, "expert", tiled=True)
        return combined.astype(dtype)


XLA = ExpertKernels(name="xla", reason="available on every platform", grouped_matmul=grouped_matmul)
"""XLA implementation for one device of any platform."""

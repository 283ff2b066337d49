"""How a pass goes through the layers: the full one, and what it keeps of them; the sampler's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.types import Params

Layer = Callable[[jax.Array, Params], jax.Array]
"""Activations and one layer's parameters to the next activations."""

Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""Queries `[M, N, H]`, keys and values `[M, K, H]` of M tokens to outputs `[M, N, H]`."""

AttendInLayer = Callable[..., tuple[jax.Array, Any]]
"""The number of a layer, what the layers have in memory, and what `Attend` takes, to its outputs
and the memory with the layer's new keys and values."""

NAMES = ("q", "k", "v", "attended", "lse", "o", "gate", "up")
"""What `names` keeps, under these names of `jax.ad_checkpoint.checkpoint_name`.

An architecture names products before norms and rotations, the attention its result and the
log-sum-exp of its scores: all products but the scores' are then computed once.
"""

_POLICIES = jax.checkpoint_policies

REMAT: dict[str, Any] = {
    "none": None,
    "dots": _POLICIES.dots_with_no_batch_dims_saveable,
    "names": _POLICIES.save_only_these_names(*NAMES),
    "full": _POLICIES.nothing_saveable,
}
"""By `model.remat`: what of a layer is kept, all else being computed again; None keeps all.

`dots` keeps the products with weights, but neither scores nor what is made of them.
"""


@dataclass(frozen=True, kw_only=True)
class Through:
    """Goes through stacked layers.

    Attributes:
        remat: a name in `REMAT`.
        scan: as a loop, compiled once for all layers; else one layer after another, which a CPU
            computes faster.
    """

    remat: str = "none"
    scan: bool = True

    def __call__(self, layer: Layer, x: jax.Array, blocks: Params) -> jax.Array:
        """The activations after all layers.

        Args:
            layer: computes one.
            x: the activations before them.
            blocks: parameters, each with a leading axis over the layers.
        """
        policy = REMAT[self.remat]
        if policy is not None:
            # A loop keeps what is computed again apart by itself.
            layer = jax.checkpoint(layer, policy=policy, prevent_cse=not self.scan)
        if self.scan:
            return jax.lax.scan(lambda x, one: (layer(x, one), None), x, blocks)[0]
        for one in _unstack(blocks):
            x = layer(x, one)
        return x


@dataclass
class SamplerThrough:
    """Goes through the layers of `for_sampler`, which read and write what they have in memory.

    Attributes:
        attend: in a layer, whose number is an int where the layers are apart.
        memory: of all layers; after a call with what that added.
    """

    attend: AttendInLayer
    memory: Any

    def __call__(
        self, layer: Callable[[jax.Array, Params, Attend], jax.Array], x: jax.Array, blocks: Any
    ) -> jax.Array:
        """The activations after all layers."""

        def one(carry: tuple[jax.Array, Any], numbered: tuple[Any, Params]) -> tuple[Any, None]:
            (x, memory), (number, weights) = carry, numbered

            def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
                nonlocal memory
                out, memory = self.attend(number, memory, q, k, v)
                return out

            x = layer(x, weights, attend)
            return (x, memory), None

        carry = x, self.memory
        if isinstance(blocks, tuple):
            for numbered in enumerate(blocks):
                carry, _ = one(carry, numbered)
        else:
            count = len(jax.tree.leaves(blocks)[0])
            carry, _ = jax.lax.scan(one, carry, (jnp.arange(count), blocks))
        x, self.memory = carry
        return x


def for_sampler(weights: Params, *, scan: bool) -> Params:
    """The weights with their layers as they are; without `scan` apart, in a tuple."""
    return weights if scan else {**weights, "blocks": tuple(_unstack(weights["blocks"]))}


@jax.custom_vjp
def _unstack(blocks: Params) -> list[Params]:
    """One tree of parameters a layer; their gradients are stacked, rather than added up."""
    count = len(jax.tree.leaves(blocks)[0])
    return [jax.tree.map(lambda leaf, i=i: leaf[i], blocks) for i in range(count)]


def _unstack_forward(blocks: Params) -> tuple[list[Params], None]:
    return _unstack(blocks), None


def _unstack_backward(_: None, gradients: list[Any]) -> tuple[Params]:
    return (jax.tree.map(lambda *leaves: jnp.stack(leaves), *gradients),)


_unstack.defvjp(_unstack_forward, _unstack_backward)

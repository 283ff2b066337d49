"""Which attention kernels a run computes with: chosen once, on the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
from jax.sharding import Mesh
from jaxtyping import Array, Int

from jaxrl.models.architecture import Attend
from jaxrl.models.attention import reference


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """The attention functions of one kind.

    Attributes:
        name: out of `config.ATTENTION`, never `auto`.
        reason: why these, for the log.
        train: queries `[R, T, N, H]`, keys and values `[R, T, K, H]` and segment ids `[R, T]` of
            packed rows to outputs `[R, T, N, H]`; see `reference.train`.
    """

    name: str
    reason: str
    train: Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]

    def within(self, segment_ids: Int[Array, "R T"]) -> Attend:
        """Attention within the segments of packed rows, over their tokens one after another."""

        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            def by_row(x: jax.Array) -> jax.Array:
                return x.reshape(*segment_ids.shape, *x.shape[1:])

            return self.train(by_row(q), by_row(k), by_row(v), segment_ids).reshape(q.shape)

        return attend


XLA = Kernels(name="xla", reason="which every platform has", train=reference.train)
"""Plain XLA, on every platform."""


def choose(name: str, mesh: Mesh) -> Kernels:
    """The kernels that `config.model.attention` names, or with `auto` those of the platform."""
    reasons = {"auto": f"for a {mesh.devices.flat[0].platform}", "xla": "as configured"}
    return replace(XLA, reason=reasons[name])

"""Gated delta rule (https://arxiv.org/abs/2412.06464), in chunks and token by token.

Each head has a state S [K, V] that maps keys to values. A token decays the state, moves the value
stored at the token's key toward the token's value, and reads the state at the token's query:

    S = exp(log_decay) S
    S = S + beta k (v - S^T k)^T
    out = S^T q

Everything is computed in float32, with matmuls in full precision: rounding errors in the state
would add up over the tokens, and the sampler's steps must agree with the trainer's chunks.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

_einsum = partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def delta_rule(
    state: Float[Array, "b N K V"],
    q: Float[Array, "b C N K"],
    k: Float[Array, "b C N K"],
    v: Float[Array, "b C N V"],
    log_decay: Float[Array, "b C N"],
    beta: Float[Array, "b C N"],
    starts: Int[Array, "b C"],
) -> tuple[Float[Array, "b C N V"], Float[Array, "b N K V"]]:
    """Apply the gated delta rule to a chunk of C tokens; return outputs and the next state.

    A token with a `log_decay` and a `beta` of 0 leaves the state unchanged.

    Args:
        state: State before the chunk, float32.
        q: Queries, scaled.
        k: Keys with a norm of at most 1, so that the state does not grow.
        v: Values.
        log_decay: Logarithm of the state's decay, at most 0.
        beta: Learning rate in [0, 1].
        starts: Index, within the chunk, of the first token of each token's context; -1 if the
            context began before the chunk. A context starts from a state of zeros.
    """
    if q.shape[1] == 1:
        return _delta_rule_step(state, q, k, v, log_decay, beta, starts)
    q, k, v, log_decay, beta = (x.swapaxes(1, 2) for x in (q, k, v, log_decay, beta))
    C = q.shape[2]
    index = jnp.arange(C)
    is_after = index[:, None] > index
    # reads[t, s] is True if token t reads token s; from_state[t] if it reads the state.
    reads = (index[:, None] >= index) & (index >= starts[:, :, None])
    reads, from_state = reads[:, None], (starts < 0)[:, None]

    # Decay between two tokens, from sums of only the tokens between them: differences of sums over
    # the chunk would lose all digits after one token that clears the state.
    sums = jnp.cumsum(jnp.where(is_after, log_decay[..., None], 0.0), axis=-2)
    decay = jnp.exp(jnp.where(reads, sums, -jnp.inf))
    # Decay since the start of the chunk.
    state_decay = jnp.exp(jnp.where(from_state, jnp.cumsum(log_decay, axis=-1), -jnp.inf))

    # The change that each token makes to the state depends on the changes of earlier tokens. Solve
    # this triangular system for the changes from a state of zeros, and for their dependence on the
    # state.
    overlap = beta[..., None] * decay * _einsum("bntk,bnsk->bnts", k, k)
    system = jnp.where(is_after, overlap, 0.0) + jnp.eye(C)
    targets = jnp.concatenate([v, state_decay[..., None] * k], axis=-1) * beta[..., None]
    solved = _einsum("bnts,bnsv->bntv", invert_unit_triangular(system), targets)
    changes, state_weights = jnp.split(solved, [v.shape[-1]], axis=-1)
    changes = changes - _einsum("bntk,bnkv->bntv", state_weights, state)

    scores = decay * _einsum("bntk,bnsk->bnts", q, k)
    out = _einsum("bnts,bnsv->bntv", scores, changes)
    out = out + _einsum("bntk,bnkv->bntv", state_decay[..., None] * q, state)
    update = _einsum("bnsk,bnsv->bnkv", decay[..., -1, :, None] * k, changes)
    return out.swapaxes(1, 2), state_decay[..., -1, None, None] * state + update


def invert_unit_triangular(matrix: Float[Array, "... C C"]) -> Float[Array, "... C C"]:
    """Invert lower triangular matrices with ones on the diagonal, by blocks of doubling size.

    On a CPU, `jax.lax.linalg.triangular_solve` waits for threads of the pool that it runs on: two
    concurrent solves on two cores never ended, and a solve on a busy machine took 150 ms instead of
    0.4 ms.
    """
    index = jnp.arange(matrix.shape[-1])

    def select_corners(size: int) -> jax.Array:
        """Return the lower left corner of each pair of diagonal blocks; 0 elsewhere."""
        block = index // size
        is_corner = (block[:, None] == block + 1) & (block[:, None] % 2 == 1)
        return jnp.where(is_corner, jax.lax.stop_gradient(matrix), 0.0)

    # A product with the identity would crash the compiler for TPUs (libtpu 0.0.42).
    inverse, size = jnp.eye(len(index), dtype=matrix.dtype) - select_corners(1), 2
    while size < len(index):
        # `inverse` inverts the diagonal blocks. Add the corner of each pair of blocks.
        corners = select_corners(size)
        inverse = inverse - _einsum("...ij,...jk,...kl->...il", inverse, corners, inverse)
        size *= 2
    # A Newton step does not change the exact inverse, but makes it differentiable.
    return 2 * inverse - _einsum("...ij,...jk,...kl->...il", inverse, matrix, inverse)


def _delta_rule_step(
    state: Float[Array, "b N K V"],
    q: Float[Array, "b 1 N K"],
    k: Float[Array, "b 1 N K"],
    v: Float[Array, "b 1 N V"],
    log_decay: Float[Array, "b 1 N"],
    beta: Float[Array, "b 1 N"],
    starts: Int[Array, "b 1"],
) -> tuple[Float[Array, "b 1 N V"], Float[Array, "b N K V"]]:
    """Apply the gated delta rule to one token, without matmuls."""
    q, k, v, log_decay, beta = (x[:, 0] for x in (q, k, v, log_decay, beta))
    decay = jnp.where(starts < 0, jnp.exp(log_decay), 0.0)
    state = state * decay[..., None, None]
    stored = (state * k[..., None]).sum(axis=-2)
    state = state + k[..., None] * (beta[..., None] * (v - stored))[..., None, :]
    return (state * q[..., None]).sum(axis=-2)[:, None], state

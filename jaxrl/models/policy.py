"""Log-probabilities and entropies of packed rows: what scores and losses are made of."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl.models.architecture import Architecture
from jaxrl.models.attention.choice import XLA, Kernels
from jaxrl.runtime.sharding import batch_sharding, param_shardings
from jaxrl.types import Batch, Params


class Model:
    """What is known of the policy beside its parameters."""

    def __init__(
        self,
        config: Architecture,
        mesh: Mesh,
        *,
        num_tokens: int,
        dtype: Any = jnp.float32,
        attention: Kernels = XLA,
        remat: bool = True,
        logits_chunk_tokens: int = 2048,
    ):
        """Static settings.

        Args:
            config: of the model.
            mesh: rows are split over its data and fsdp axes.
            num_tokens: ids the tokenizer knows; larger ones have probability 0.
            dtype: of activations and matrix products; master weights stay float32.
            attention: the kernels.
            remat: recompute layers in the backward pass.
            logits_chunk_tokens: at most so many tokens have their logits in memory at a time.
        """
        self.config = config
        self.mesh = mesh
        self.num_tokens = num_tokens
        self.dtype = dtype
        self.attention = attention
        self.remat = remat
        self.logits_chunk_tokens = logits_chunk_tokens

    def token_logprobs(
        self,
        params: Params,
        batch: Batch,
        *,
        temperature: float | jax.Array,
        entropy_gradient: bool = False,
    ) -> tuple[jax.Array, jax.Array]:
        """Log-probability of each token given those before it, and the entropy it was drawn with.

        The one place of the shift: index t of the results is about token t, scored by the logits
        at t - 1. A trajectory's first token gets 0.

        Args:
            params: float32 master weights.
            batch: one micro-batch, `[b, T]`.
            temperature: the distribution is softmax(logits / temperature), as in the sampler.
            entropy_gradient: let gradients flow through the entropies.

        Returns:
            Log-probabilities and entropies, float32 [b, T], nats.
        """
        params = self._gather_tables(self.config.train_weights(params, self.dtype))
        hidden = self.config.hidden_states(
            params,
            batch.token_ids,
            batch.positions,
            self.attention.within(batch.segment_ids),
            remat=self.remat,
        )
        # Rows stay split over data and fsdp: left alone, the compiler splits the width of
        # activations over fsdp instead, and sums partial activations and logits across devices.
        hidden = jax.lax.with_sharding_constraint(hidden, batch_sharding(self.mesh))
        previous = jnp.pad(hidden[:, :-1], ((0, 0), (1, 0), (0, 0)))
        b, T = batch.token_ids.shape
        width = chunk_width(b, T, self.logits_chunk_tokens)

        def chunk(_: None, xs: tuple[jax.Array, jax.Array]) -> tuple[None, tuple[jax.Array, ...]]:
            hidden, targets = xs
            logits = self.config.unembed(params, hidden, num_tokens=self.num_tokens)
            return None, _logprobs_and_entropies(logits / temperature, targets, entropy_gradient)

        if width < T:
            # Keeping the logits of all chunks for the backward pass would undo the chunks.
            chunk = jax.checkpoint(chunk)

        def by_chunk(x: jax.Array) -> jax.Array:
            return x.reshape(b, T // width, width, *x.shape[2:]).swapaxes(0, 1)

        _, results = jax.lax.scan(chunk, None, (by_chunk(previous), by_chunk(batch.token_ids)))
        has_past = (batch.positions > 0) & (batch.segment_ids > 0)
        logprobs, entropies = (
            jnp.where(has_past, x.swapaxes(0, 1).reshape(b, T), 0.0) for x in results
        )
        return logprobs, entropies

    def _gather_tables(self, params: Params) -> Params:
        """Embedding and output layer whole along the width, as reading rows of tokens wants it."""
        whole = param_shardings(self.mesh, self.config, for_decode=True)
        tables = {}
        for name in params.keys() - {"blocks"}:
            first, *_ = whole[name].values()  # for what `train_weights` has put beside it too
            tables[name] = {
                leaf: jax.lax.with_sharding_constraint(array, whole[name].get(leaf, first))
                for leaf, array in params[name].items()
            }
        return {**params, **tables}


def chunk_width(num_rows: int, row_tokens: int, max_tokens: int) -> int:
    """The widest divisor of `row_tokens` for which a chunk holds at most `max_tokens` tokens."""
    widths = [w for w in range(1, row_tokens + 1) if row_tokens % w == 0]
    return max([w for w in widths if w * num_rows <= max_tokens], default=1)


def _logprobs_and_entropies(
    logits: jax.Array, targets: jax.Array, entropy_gradient: bool
) -> tuple[jax.Array, jax.Array]:
    """Of `[b, c, V]` logits; masked ids carry a huge negative logit and add exactly nothing."""
    centred = logits - jax.lax.stop_gradient(logits.max(axis=-1, keepdims=True))
    weights = jnp.exp(centred)
    total = weights.sum(axis=-1)
    # A sum over one-hot rather than a gather: it splits over a sharded vocabulary.
    is_target = jnp.arange(logits.shape[-1]) == targets[..., None]
    logprobs = jnp.where(is_target, centred, 0.0).sum(axis=-1) - jnp.log(total)
    products = jnp.where(weights > 0, weights * centred, 0.0)
    entropies = jnp.log(total) - products.sum(axis=-1) / total
    return logprobs, entropies if entropy_gradient else jax.lax.stop_gradient(entropies)

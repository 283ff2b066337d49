"""Log-probabilities and entropies of packed rows: what scores and losses are made of."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl.models.architecture import Architecture
from jaxrl.models.attention.kernels import Kernels
from jaxrl.models.aux_arrays import AuxArrays
from jaxrl.models.layers import LayerScan
from jaxrl.models.output import OutputLayer, block_tokens, find_places, put, take
from jaxrl.models.params import join, split
from jaxrl.runtime.compilation import joined
from jaxrl.runtime.sharding import (
    CONTEXT,
    in_pieces,
    in_rows,
    num_batch_shards,
    num_pieces,
    param_shardings,
    piece_sharding,
    whole_rows,
)
from jaxrl.types import Batch, Params


def entries_with_layers(model: Architecture) -> set[str]:
    """Entries of the parameters with layers of their own, by name.

    All others, embedding, final norm and output layer, are handed to the output layer.
    """
    return {"blocks", *([model.tower.entry] if model.tower else [])}


class Model:
    """The policy without its trained parameters: architecture, mesh, kernels, settings of passes.

    Attributes:
        base: the weights that are not trained, on the mesh; {} until they are loaded.
        trained, frozen: the declarations of both parts of the parameters.
    """

    def __init__(
        self,
        architecture: Architecture,
        mesh: Mesh,
        attention: Kernels,
        *,
        num_tokens: int,
        dtype: Any = jnp.float32,
        remat: str = "full",
        scan_layers: bool = True,
        logits_chunk_tokens: int = 2048,
        frozen: Sequence[str] = (),
    ):
        """Static settings.

        Args:
            architecture: of the policy.
            mesh: rows are split over its data, fsdp and expert axes, and each over context.
            attention: the kernels.
            num_tokens: ids the tokenizer knows; larger ones have probability 0.
            dtype: of activations and matrix products; master weights stay float32.
            remat: what of a layer is computed again in the backward pass; see `layers.REMAT`.
            scan_layers: compile one layer for all.
            logits_chunk_tokens: at most so many tokens have their logits in memory at a time.
            frozen: entries of the parameters that are not trained; see `Architecture.parts`.
        """
        passes = mesh, attention, num_tokens, dtype, remat, scan_layers, logits_chunk_tokens
        # Of what the passes compute; see `Architecture.program_key`.
        self.program_key = joined(architecture.program_key, passes, tuple(frozen))
        self.architecture = architecture
        self.base: Params = {}  # the weights that stay as they are, on the mesh
        self.mesh = mesh
        self.num_tokens = num_tokens
        self.dtype = dtype
        self.attention = attention
        self._through = LayerScan(remat=remat, scan=scan_layers)
        self.logits_chunk_tokens = logits_chunk_tokens
        self.trained, self.frozen = architecture.parts(frozen)
        self._with_layers = entries_with_layers(architecture)
        tables = self.trained.abstract_params().keys() - self._with_layers
        self._trains_tables = bool(tables)

    @property
    def without_base(self) -> Model:
        """A copy without weights, for programs that are kept; they get weights as arguments."""
        model = copy.copy(self)
        model.base = {}
        return model

    def whole(self, params: Params) -> Params:
        """All parameters of the policy, from those that are trained."""
        return join(self.base, params)

    def split(self, policy: Params) -> tuple[Params, Params]:
        """The inverse: those that are trained, and the others."""
        return split(policy, self.trained)

    @property
    def shards_with_prompts(self) -> int:
        """Devices that rows are split over, where segments may share prompts; else 0."""
        return num_batch_shards(self.mesh) if self.attention.shares_prompts else 0

    @property
    def num_pieces(self) -> int:
        """Number of pieces into which a row is cut; it divides the row's tokens."""
        return self.mesh.shape[CONTEXT]

    def of_text(self, batch: Batch) -> Batch:
        """The batch without attachments and their arrays; every token is read as text."""
        tower = self.architecture.tower
        kept = {n: x for n, x in batch.token_arrays.items() if not tower or n not in tower.arrays}
        return replace(batch, token_arrays=kept, attached=None)

    def without_recorded(self, batch: Batch) -> Batch:
        """The batch without what a sampler has recorded."""
        recorded = self.architecture.recorded
        kept = {name: x for name, x in batch.token_arrays.items() if name not in recorded}
        return replace(batch, token_arrays=kept)

    def beside(self, batch: Batch, *, counts: bool = True) -> AuxArrays:
        """The `AuxArrays` of a pass over a micro-batch.

        It asks for the model's statistics unless `counts` is False.
        """
        given = {name: in_pieces(self.mesh, x) for name, x in batch.token_arrays.items()}
        given = {name: x.reshape(-1, *x.shape[2:]) for name, x in given.items()}
        beside = AuxArrays(given=given, attached=batch.attached)
        if counts and self.architecture.statistics:
            is_token = in_pieces(self.mesh, batch.segment_ids > 0)
            beside.counted = is_token.reshape(-1).astype(jnp.float32)
        return beside

    def token_logprobs(
        self,
        params: Params,
        batch: Batch,
        *,
        temperature: float | jax.Array,
        entropy_gradient: bool = False,
        logit_capacity: int = 4,
        beside: AuxArrays | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Log-probability of each token given those before it, and the entropy it was drawn with.

        The one place of the shift: index t of the results is about token t, scored by the logits
        at t - 1. A token outside `loss_mask` gets 0, and a trajectory's first.

        Args:
            params: Parameters of the whole policy; trained ones are float32.
            batch: One micro-batch, `[b, T]`.
            temperature: The distribution is softmax(logits / temperature), as in the sampler.
            entropy_gradient: Let gradients flow through the entropies.
            logit_capacity: Quarters of each shard's tokens that have room in the output layer;
                `loss_mask` may have no more.
            beside: Auxiliary arrays of the pass, to read their outputs afterwards.

        Returns:
            Log-probabilities and entropies, float32 [b, T], nats.
        """
        params = self._gather_tables(self.architecture.train_weights(params, self.dtype))
        hidden = self._hidden_states(params, batch, beside or self.beside(batch, counts=False))
        (b, T), shards = batch.token_ids.shape, num_pieces(self.mesh)
        has_past = (batch.positions > 0) & (batch.segment_ids > 0)
        # Hidden states stay where they are, and what is about the next token moves to them.
        is_wanted, targets = (
            in_pieces(self.mesh, jnp.pad(x[:, 1:], ((0, 0), (0, 1))))
            for x in (batch.loss_mask & has_past, batch.token_ids)
        )
        places = find_places(is_wanted, shards, -(-b * T * logit_capacity // (4 * shards)))
        own_ids = -(-self.architecture.vocab_size // self.mesh.shape["tensor"])
        layer = OutputLayer(
            unembed=partial(self.architecture.unembed, num_tokens=self.num_tokens),
            mesh=self.mesh,
            chunk_tokens=max(self.logits_chunk_tokens // shards, 1),
            block_tokens=block_tokens(self.mesh.devices.flat[0].platform, own_ids),
            entropy_gradient=entropy_gradient,
            trains_tables=self._trains_tables,
        )
        logprobs, entropies = layer.logprobs_and_entropies(
            {name: table for name, table in params.items() if name not in self._with_layers},
            layer.on_shards(take(hidden.reshape(shards, b * T // shards, -1), places)),
            take(targets.reshape(shards, -1), places),
            temperature,
        )
        if not entropy_gradient:
            entropies = jax.lax.stop_gradient(entropies)
        of_next = (in_rows(self.mesh, put(x, places), (b, T)) for x in (logprobs, entropies))
        logprobs, entropies = (jnp.pad(x[:, :-1], ((0, 0), (1, 0))) for x in of_next)
        return logprobs, entropies

    def _hidden_states(self, params: Params, batch: Batch, beside: AuxArrays) -> jax.Array:
        """Hidden states of the last layer `[C * b, T / C, D]`; see `in_pieces`."""
        on_shards = partial(jax.lax.with_sharding_constraint, shardings=piece_sharding(self.mesh))
        hidden = self.architecture.hidden_states(
            params,
            in_pieces(self.mesh, batch.token_ids),
            in_pieces(self.mesh, batch.positions),
            self.attention.within(
                whole_rows(self.mesh, batch.segment_ids),
                whole_rows(self.mesh, batch.positions),
                self.num_pieces,
            ),
            replace(self._through, beside=beside, on_shards=on_shards),
        )
        # Rows stay split over data, fsdp and expert: left alone, the compiler splits the width of
        # activations over fsdp instead, and sums partial activations and logits across devices.
        return on_shards(hidden)

    def _gather_tables(self, params: Params) -> Params:
        """Embedding and output layer whole along the width, as reading rows of tokens wants it.

        Their gradients are split along it again, where they arise: each device adds up its part of
        the width for all tokens, rather than all of a table for its own tokens, to be added to the
        others' tables. With a `data` axis the compiler would copy all tokens to every device.
        """
        whole = param_shardings(self.mesh, self.architecture, for_decode=True)
        is_split = self.mesh.shape["data"] == 1
        back = param_shardings(self.mesh, self.architecture) if is_split else whole

        def gathered(name: str, leaf: str, array: jax.Array) -> jax.Array:
            # The first one's also for what `train_weights` has put beside it.
            pair = [of[name].get(leaf, next(iter(of[name].values()))) for of in (whole, back)]
            return _constrain(array, *pair)

        tables = {
            name: {leaf: gathered(name, leaf, array) for leaf, array in params[name].items()}
            for name in sorted(params.keys() - self._with_layers)
        }
        return {**params, **tables}


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _constrain(array: jax.Array, sharding: Any, of_gradient: Any) -> jax.Array:
    """The array, split in one way, and its gradient in another."""
    return jax.lax.with_sharding_constraint(array, sharding)


def _constrain_forward(array: jax.Array, sharding: Any, of_gradient: Any) -> tuple[jax.Array, None]:
    return _constrain(array, sharding, of_gradient), None


def _constrain_backward(
    sharding: Any, of_gradient: Any, _: None, gradient: jax.Array
) -> tuple[jax.Array]:
    return (jax.lax.with_sharding_constraint(gradient, of_gradient),)


_constrain.defvjp(_constrain_forward, _constrain_backward)

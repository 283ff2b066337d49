"""Log-probabilities and entropies of packed rows, used for scoring and losses."""

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
from jaxrl.models.attention.kernels import AttentionKernels, compute_key_ranges
from jaxrl.models.aux_arrays import AuxArrays
from jaxrl.models.layers import LayerScan
from jaxrl.models.output import (
    OutputLayer,
    assign_slots,
    choose_block_tokens,
    gather_tokens,
    scatter_tokens,
)
from jaxrl.models.params import merge_params, split_params
from jaxrl.models.recurrence import make_recurrence
from jaxrl.runtime.compilation import join_keys
from jaxrl.runtime.sharding import (
    CONTEXT_AXIS,
    count_batch_shards,
    count_piece_shards,
    gather_rows,
    make_param_shardings,
    make_piece_sharding,
    merge_pieces,
    split_into_pieces,
)
from jaxrl.types import Batch, Params


def get_stacked_modules(model: Architecture) -> set[str]:
    """Return the top-level modules whose parameters are stacked by layer.

    The other modules (embedding, final norm and output layer) are passed to the output layer.
    """
    return {"blocks", *([model.tower.entry] if model.tower else [])}


class Model:
    """Policy without its trained parameters: architecture, mesh, kernels and settings.

    Attributes:
        base: Frozen weights on the mesh; {} until they are loaded.
        trained, frozen: Specs of the trained and the frozen parameters.
    """

    def __init__(
        self,
        architecture: Architecture,
        mesh: Mesh,
        attention: AttentionKernels,
        *,
        num_tokens: int,
        dtype: Any = jnp.float32,
        remat: str = "full",
        scan_layers: bool = True,
        logits_chunk_tokens: int = 2048,
        frozen: Sequence[str] = (),
    ):
        """Initialize the model without loading weights.

        Args:
            architecture: Architecture of the policy.
            mesh: Device mesh. Its data, fsdp and expert axes split the batch by rows; its context
                axis splits each row.
            attention: Attention kernels.
            num_tokens: Number of token ids in the tokenizer; ids beyond it have probability 0.
            dtype: Dtype of activations and matmuls; master weights are float32.
            remat: Rematerialization mode, a key of `layers.REMAT`.
            scan_layers: True to compile layers of the same kind once, as a loop.
            logits_chunk_tokens: Maximum number of tokens whose logits are in memory at a time.
            frozen: Top-level modules that are not trained; see `Architecture.make_param_specs`.
        """
        pass_settings = mesh, attention, num_tokens, dtype, remat, scan_layers, logits_chunk_tokens
        # Identifies the compiled passes; see `Architecture.program_key`.
        self.program_key = join_keys(architecture.program_key, pass_settings, tuple(frozen))
        self.architecture = architecture
        self.base: Params = {}  # frozen weights, on the mesh
        self.mesh = mesh
        self.num_tokens = num_tokens
        self.dtype = dtype
        self.attention = attention
        self._layer_scan = LayerScan(remat=remat, scan=scan_layers)
        self.logits_chunk_tokens = logits_chunk_tokens
        self.trained, self.frozen = architecture.make_param_specs(frozen)
        self._stacked_modules = get_stacked_modules(architecture)
        tables = self.trained.make_abstract_params().keys() - self._stacked_modules
        self._trains_tables = bool(tables)

    @property
    def without_base(self) -> Model:
        """Return a copy without weights, for cached programs that take weights as arguments."""
        model = copy.copy(self)
        model.base = {}
        return model

    def merge(self, params: Params) -> Params:
        """Merge the trained and the frozen parameters."""
        return merge_params(self.base, params)

    def split(self, policy: Params) -> tuple[Params, Params]:
        """Return the trained and the frozen parameters; the inverse of `merge`."""
        return split_params(policy, self.trained)

    @property
    def num_prompt_shards(self) -> int:
        """Return the number of row shards if the sequences of a row can share a prompt, else 0.

        The number is 0 with recurrent layers, because every sample of a prompt would need its own
        copy of the state after the prompt.
        """
        shares = self.attention.shares_prompts and not self.architecture.num_recurrent_layers
        return count_batch_shards(self.mesh) if shares else 0

    @property
    def num_pieces(self) -> int:
        """Return the number of equal pieces that each row is split into."""
        return self.mesh.shape[CONTEXT_AXIS]

    def without_attachments(self, batch: Batch) -> Batch:
        """Return the batch without attachments and their arrays, so that all tokens are text."""
        tower = self.architecture.tower
        remaining = {
            n: x for n, x in batch.token_arrays.items() if not tower or n not in tower.input_arrays
        }
        return replace(batch, token_arrays=remaining, attached=None)

    def without_recorded_arrays(self, batch: Batch) -> Batch:
        """Return the batch without the arrays that the sampler recorded."""
        recorded = self.architecture.recorded_specs
        remaining = {name: x for name, x in batch.token_arrays.items() if name not in recorded}
        return replace(batch, token_arrays=remaining)

    def make_aux(self, batch: Batch, *, with_statistics: bool = True) -> AuxArrays:
        """Build the `AuxArrays` for a pass over a micro-batch."""
        inputs = {name: split_into_pieces(self.mesh, x) for name, x in batch.token_arrays.items()}
        inputs = {name: x.reshape(-1, *x.shape[2:]) for name, x in inputs.items()}
        aux = AuxArrays(inputs=inputs, attached=batch.attached)
        if with_statistics and self.architecture.statistics_reader:
            is_token = split_into_pieces(self.mesh, batch.segment_ids > 0)
            aux.statistics_weights = is_token.reshape(-1).astype(jnp.float32)
        return aux

    def compute_token_logprobs(
        self,
        params: Params,
        batch: Batch,
        *,
        temperature: float | jax.Array,
        entropy_gradient: bool = False,
        logit_capacity: int = 4,
        aux: AuxArrays | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Compute each token's log-probability given the tokens before it, and its entropy.

        This is the only place that shifts results: index t has the values of token t, which come
        from the logits at t - 1. Tokens outside `loss_mask` and a trajectory's first token get 0.

        Args:
            params: All parameters of the policy; the trained parameters are float32.
            batch: Micro-batch `[b, T]`.
            temperature: The distribution is softmax(logits / temperature), as in the sampler.
            entropy_gradient: True to let gradients flow through the entropies.
            logit_capacity: Maximum fraction of each shard's tokens that get logits, in quarters (4
                for all tokens). `loss_mask` must not select more.
            aux: Auxiliary inputs of the pass. The auxiliary outputs are stored in the same object.

        Returns:
            Log-probabilities and entropies, float32 [b, T], in nats.
        """
        params = self._gather_tables(self.architecture.prepare_training_weights(params, self.dtype))
        aux = aux or self.make_aux(batch, with_statistics=False)
        hidden = self._compute_hidden_states(params, batch, aux)
        (b, T), shards = batch.token_ids.shape, count_piece_shards(self.mesh)
        has_past = (batch.positions > 0) & (batch.segment_ids > 0)
        # Hidden states stay in place; targets and masks shift to the previous token.
        is_selected, targets = (
            split_into_pieces(self.mesh, jnp.pad(x[:, 1:], ((0, 0), (0, 1))))
            for x in (batch.loss_mask & has_past, batch.token_ids)
        )
        # Only selected tokens reach the output layer, compacted into slots.
        slots = assign_slots(is_selected, shards, -(-b * T * logit_capacity // (4 * shards)))
        local_vocab_size = -(-self.architecture.vocab_size // self.mesh.shape["tensor"])
        layer = OutputLayer(
            unembed=partial(self.architecture.unembed, num_tokens=self.num_tokens),
            mesh=self.mesh,
            chunk_tokens=max(self.logits_chunk_tokens // shards, 1),
            block_tokens=choose_block_tokens(self.mesh.devices.flat[0].platform, local_vocab_size),
            entropy_gradient=entropy_gradient,
            trains_tables=self._trains_tables,
        )
        logprobs, entropies = layer.compute_logprobs_and_entropies(
            {name: table for name, table in params.items() if name not in self._stacked_modules},
            layer.constrain_to_shards(
                gather_tokens(hidden.reshape(shards, b * T // shards, -1), slots)
            ),
            gather_tokens(targets.reshape(shards, -1), slots),
            temperature,
        )
        if not entropy_gradient:
            entropies = jax.lax.stop_gradient(entropies)
        # Move the results from the predicting position to the predicted token.
        shifted = (
            merge_pieces(self.mesh, scatter_tokens(x, slots), (b, T)) for x in (logprobs, entropies)
        )
        logprobs, entropies = (jnp.pad(x[:, :-1], ((0, 0), (1, 0))) for x in shifted)
        return logprobs, entropies

    def _compute_hidden_states(self, params: Params, batch: Batch, aux: AuxArrays) -> jax.Array:
        """Compute the final hidden states `[C * b, T / C, D]`; see `split_into_pieces`."""
        constrain_to_shards = partial(
            jax.lax.with_sharding_constraint, shardings=make_piece_sharding(self.mesh)
        )
        segments = (
            gather_rows(self.mesh, batch.segment_ids),
            gather_rows(self.mesh, batch.positions),
        )
        run_recurrence = None
        if specs := self.architecture.state_specs:
            run_recurrence = make_recurrence(specs, compute_key_ranges(*segments)[:, 0])
        hidden = self.architecture.compute_hidden_states(
            params,
            split_into_pieces(self.mesh, batch.token_ids),
            split_into_pieces(self.mesh, batch.positions),
            self.attention.make_attend(*segments, self.num_pieces),
            replace(
                self._layer_scan,
                aux=aux,
                run_recurrence=run_recurrence,
                constrain_to_shards=constrain_to_shards,
            ),
        )
        # Keep rows split over data, fsdp and expert: otherwise the compiler splits the width of
        # activations over fsdp instead, and sums partial activations and logits across devices.
        return constrain_to_shards(hidden)

    def _gather_tables(self, params: Params) -> Params:
        """Gather the embedding and output tables along the width, as row-sharded tokens require.

        Their gradients are split along the width: each device sums its part of the width over all
        tokens, which avoids an all-reduce of complete tables. With a `data` axis, gradients stay
        unsplit, since the compiler would copy all tokens to every device.
        """
        gathered = make_param_shardings(self.mesh, self.architecture, for_decode=True)
        is_split = self.mesh.shape["data"] == 1
        gradient_shardings = (
            make_param_shardings(self.mesh, self.architecture) if is_split else gathered
        )

        def gather_table(name: str, leaf: str, array: jax.Array) -> jax.Array:
            # Arrays added by `prepare_training_weights` are sharded like the first parameter.
            pair = [
                shardings[name].get(leaf, next(iter(shardings[name].values())))
                for shardings in (gathered, gradient_shardings)
            ]
            return _constrain_shardings(array, *pair)

        tables = {
            name: {leaf: gather_table(name, leaf, array) for leaf, array in params[name].items()}
            for name in sorted(params.keys() - self._stacked_modules)
        }
        return {**params, **tables}


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _constrain_shardings(array: jax.Array, sharding: Any, gradient_sharding: Any) -> jax.Array:
    """Constrain the shardings of an array and of its gradient."""
    return jax.lax.with_sharding_constraint(array, sharding)


def _constrain_shardings_forward(
    array: jax.Array, sharding: Any, gradient_sharding: Any
) -> tuple[jax.Array, None]:
    return _constrain_shardings(array, sharding, gradient_sharding), None


def _constrain_shardings_backward(
    sharding: Any, gradient_sharding: Any, _: None, gradient: jax.Array
) -> tuple[jax.Array]:
    return (jax.lax.with_sharding_constraint(gradient, gradient_sharding),)


_constrain_shardings.defvjp(_constrain_shardings_forward, _constrain_shardings_backward)

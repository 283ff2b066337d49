"""KL divergence of the policy from the reference, measured before each update."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl.objectives.kl import kl_estimate
from jaxrl.runtime.sharding import count_batch_shards, make_replicated_sharding
from jaxrl.training.method import Method
from jaxrl.training.minibatches import with_loss_mask
from jaxrl.training.packing import (
    BatchShape,
    PackedBatch,
    TokenSequence,
    pack_sequences,
    split_contexts,
)
from jaxrl.training.update import ScoreStep, shard_batch
from jaxrl.types import Batch, Divergence, Group, Params, Trajectory, flatten_groups, replace_fields


def make_kl_fn(
    score: ScoreStep, mesh: Mesh, shape: BatchShape, method: Method
) -> Callable[[Sequence[Group], Params, Params], list[Group]]:
    """Return a function that adds missing divergences from the reference policy to groups.

    Trajectories with environment errors are skipped. The others are packed into batches of
    `shape.num_sequences`; the program that scores mini-batches computes their log-probabilities.
    The last bits of a result may depend on which trajectories are packed together.
    """
    # Objectives take one micro-batch, so map over the leading axis.
    estimate_kl = jax.vmap(partial(kl_estimate, estimator=method.kl.estimator))

    def estimate_divergence(
        old: jax.Array, ref: jax.Array, mask: jax.Array
    ) -> tuple[jax.Array, ...]:
        return old, ref, estimate_kl(old, ref, mask)

    replicated = make_replicated_sharding(mesh)  # every process reads the complete arrays
    estimate_divergence = jax.jit(
        estimate_divergence, out_shardings=(replicated, replicated, replicated)
    )

    def add_divergences(groups: Sequence[Group], params: Params, ref_params: Params) -> list[Group]:
        def compute_batch_divergences(batch: Batch, packed: PackedBatch) -> tuple[jax.Array, ...]:
            old = score(params, batch, packed)
            ref = score(ref_params, score.model.without_recorded_arrays(batch), packed)
            return estimate_divergence(old, ref, batch.loss_mask)

        trajectories = flatten_groups(groups)
        divergences = [t.divergence for t in trajectories]
        missing = [i for i, t in enumerate(trajectories) if t.is_scored and t.divergence is None]
        trained = [with_loss_mask(trajectories[i], method.loss) for i in missing]
        pieces = map_packed(trained, mesh, shape, compute_batch_divergences)
        for index, trajectory, arrays in zip(missing, trained, pieces, strict=True):
            old_logprobs, ref_logprobs, per_token = arrays
            divergences[index] = Divergence(
                old_logprobs=old_logprobs,
                ref_logprobs=ref_logprobs,
                per_token=per_token,
                num_tokens=trajectory.num_sampled,
            )
        return replace_fields(groups, divergence=divergences)

    return add_divergences


def compute_logprobs(
    score: ScoreStep, params: Params, trajectories: Sequence[Trajectory], shape: BatchShape
) -> list[np.ndarray]:
    """Return the log-probabilities of each trajectory's sampled tokens, float32 `[L]`, in nats."""
    mesh = score.model.mesh
    replicate = jax.jit(lambda logprobs: logprobs, out_shardings=make_replicated_sharding(mesh))

    def compute_batch_logprobs(batch: Batch, packed: PackedBatch) -> tuple[jax.Array, ...]:
        return (replicate(score(params, batch, packed)),)

    return [
        logprobs for (logprobs,) in map_packed(trajectories, mesh, shape, compute_batch_logprobs)
    ]


def map_packed(
    trajectories: Sequence[Trajectory],
    mesh: Mesh,
    shape: BatchShape,
    compute: Callable[[Batch, PackedBatch], Sequence[jax.Array]],
) -> Iterator[tuple[np.ndarray, ...]]:
    """Pack trajectories, apply `compute` to each batch, and yield its arrays `[L]` for each."""
    for start in range(0, len(trajectories), shape.num_sequences):
        chunk = trajectories[start : start + shape.num_sequences]
        zeros = np.zeros(len(chunk), np.float32)
        packed = pack_sequences(chunk, zeros, shape, num_shards=count_batch_shards(mesh))
        arrays = [np.asarray(x) for x in compute(shard_batch(mesh, packed.batch), packed)]
        yield from zip(*(unpack_sequences(packed, array, chunk) for array in arrays), strict=True)


def unpack_sequences(
    packed: PackedBatch, values: np.ndarray, sequences: Sequence[TokenSequence]
) -> list[np.ndarray]:
    """Split values `[A, b, T]` into an array `[L]` per sequence, in packing order.

    Tokens that a context repeats from an earlier context have no loss and get 0.
    """
    segments, positions = (
        np.asarray(x).ravel() for x in (packed.batch.segment_ids, packed.batch.positions)
    )
    order = np.argsort(segments, kind="stable")[np.count_nonzero(segments == 0) :]
    counts = np.bincount(segments, minlength=len(sequences) + 1)[1:]
    arrays = []
    for indices, sequence in zip(np.split(order, np.cumsum(counts)[:-1]), sequences, strict=True):
        offsets = positions[indices]
        starts = [context.start for context in split_contexts(sequence)]
        # Index of each token's context: a new context begins where positions jump.
        context_index = np.cumsum(np.diff(offsets, prepend=offsets[:1] - 1) != 1)
        array = np.zeros(len(sequence.token_ids), values.dtype)
        array[np.array(starts)[context_index] + offsets] = values.ravel()[indices]
        arrays.append(array)
    return arrays

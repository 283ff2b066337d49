"""Trajectories to mini-batches on the devices, with the log-probabilities that the update needs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from jaxrl.config_checks import has_kl_loss
from jaxrl.objectives.kl import kl_estimate
from jaxrl.runtime.compilation import CompiledFunction
from jaxrl.runtime.sharding import num_batch_shards, replicated
from jaxrl.training.packing import BatchShape, Packed, pack
from jaxrl.training.update import put_batch
from jaxrl.types import Batch, Params, Trajectory


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """How far the policy before the update is from the reference, along one trajectory."""

    old_logprobs: np.ndarray  # float32 [L], nats
    ref_logprobs: np.ndarray  # float32 [L], nats
    per_token: np.ndarray  # float32 [L], nats, by `kl.estimator`; 0 where nothing is trained
    num_tokens: int  # that are trained on

    @property
    def total(self) -> float:
        """The sum over the trajectory, in nats."""
        return float(self.per_token.sum())

    @property
    def mean(self) -> float:
        """Nats a token; NaN where none is trained on."""
        return self.total / self.num_tokens if self.num_tokens else math.nan


def make_minibatches(
    trajectories: Sequence[Trajectory],
    advantages: np.ndarray,
    shape: BatchShape,
    config: ConfigDict,
    *,
    kl_weights: Sequence[np.ndarray] | None = None,
    divergences: Sequence[Divergence | None] | None = None,
    num_shards: int = 1,
) -> list[Packed]:
    """Whole groups in task order to mini-batches, each packed alone.

    Environment errors are left out. Trajectories without an advantage may be too
    (`optimizer.skip_signal_free`), where neither a KL nor an entropy term gives them a gradient;
    they still count in the loss's denominator.

    Args:
        trajectories: in groups of ids 0, 1, …
        advantages: float32 [N].
        shape: of every mini-batch.
        config: of the run.
        kl_weights: of each trajectory float32 [L], where tokens differ in them.
        divergences: measured before, so that log-probabilities need not be computed again.
        num_shards: devices that share the rows of a micro-batch.
    """
    num_minibatches = config.optimizer.num_minibatches
    has_other_terms = has_kl_loss(config) or config.loss.entropy_coef != 0
    needs_all = has_other_terms or not config.optimizer.skip_signal_free
    groups = config.rollout.tasks_per_step // num_minibatches
    fields = _token_fields(config, kl_weights, divergences)
    minibatches = []
    for index in range(num_minibatches):
        members = [
            i for i, t in enumerate(trajectories) if t.group_id // groups == index and t.is_scored
        ]
        kept = [i for i in members if needs_all or advantages[i] != 0]
        minibatches.append(
            pack(
                [as_trained(trajectories[i], config) for i in kept],
                np.array([advantages[i] for i in kept], np.float32),
                shape,
                aggregation=config.loss.aggregation,
                scale=config.rollout.max_response_tokens,
                counted=[as_trained(trajectories[i], config) for i in members],
                token_fields={name: [of[i] for i in kept] for name, of in fields.items()},
                num_shards=num_shards,
            )
        )
    return minibatches


def as_trained(trajectory: Trajectory, config: ConfigDict) -> Trajectory:
    """The trajectory with the mask of what is trained on; with observations, where asked for."""
    if config.loss.mask_observations:
        return trajectory
    mask = np.arange(len(trajectory.token_ids)) >= trajectory.prompt_length
    return dataclasses.replace(trajectory, loss_mask=mask)


def _token_fields(
    config: ConfigDict,
    kl_weights: Sequence[np.ndarray] | None,
    divergences: Sequence[Divergence | None] | None,
) -> dict[str, list[np.ndarray]]:
    fields: dict[str, list[np.ndarray]] = {}
    nothing = np.zeros(0, np.float32)  # of environment errors, which are not packed
    if kl_weights is not None:
        fields["kl_weights"] = list(kl_weights)
    if divergences is not None and not takes_own_logprobs(config):
        fields["old_logprobs"] = [d.old_logprobs if d else nothing for d in divergences]
    if divergences is not None and has_kl_loss(config):
        fields["ref_logprobs"] = [d.ref_logprobs if d else nothing for d in divergences]
    return fields


def takes_own_logprobs(config: ConfigDict) -> bool:
    """True where the old log-probabilities may be those of the update's own forward pass.

    That takes a single optimizer step per batch, and samples of the current policy only.
    """
    updates = config.optimizer.num_minibatches * config.optimizer.num_epochs
    return updates == 1 and not config.filter.carry_over


def add_logprobs(
    batch: Batch,
    packed: Packed,
    score: CompiledFunction,
    params: Params,
    ref_params: Params | None,
    *,
    needs_old: bool,
) -> Batch:
    """Old and reference log-probabilities, where they are needed and not there yet."""
    plain = dataclasses.replace(batch, old_logprobs=None, ref_logprobs=None, kl_weights=None)
    if needs_old and batch.old_logprobs is None:
        old = score(params, plain, packed.num_micro)
        batch = dataclasses.replace(batch, old_logprobs=old)
    if ref_params is not None and batch.ref_logprobs is None:
        ref = score(ref_params, plain, packed.num_micro)
        batch = dataclasses.replace(batch, ref_logprobs=ref)
    return batch


def make_measure(
    score: CompiledFunction, mesh: Mesh, shape: BatchShape, config: ConfigDict
) -> Callable[[Sequence[Trajectory], Params, Params], list[Divergence | None]]:
    """`measure(trajectories, params, ref_params)`, of each its divergence; None of failed ones.

    As many trajectories at a time as a mini-batch has rows, through the program that scores
    mini-batches.
    """
    # One micro-batch at a time, which is what objectives know.
    estimate = jax.vmap(partial(kl_estimate, estimator=config.kl.estimator))

    def compare(old: jax.Array, ref: jax.Array, mask: jax.Array) -> tuple[jax.Array, ...]:
        return old, ref, estimate(old, ref, mask)

    whole = replicated(mesh)  # of several processes, each reads all
    compare = jax.jit(compare, out_shardings=(whole, whole, whole))
    capacity = shape.num_micro * shape.micro_rows

    def measure(
        trajectories: Sequence[Trajectory], params: Params, ref_params: Params
    ) -> list[Divergence | None]:
        found: list[Divergence | None] = [None] * len(trajectories)
        scored = [i for i, t in enumerate(trajectories) if t.is_scored]
        for start in range(0, len(scored), capacity):
            chunk = scored[start : start + capacity]
            members = [as_trained(trajectories[i], config) for i in chunk]
            packed = pack(
                members,
                np.zeros(len(members), np.float32),
                shape,
                aggregation="token-mean",
                num_shards=num_batch_shards(mesh),
            )
            batch = put_batch(mesh, packed.batch)
            old = score(params, batch, packed.num_micro)
            ref = score(ref_params, batch, packed.num_micro)
            arrays = [np.asarray(x) for x in compare(old, ref, batch.loss_mask)]
            pieces = [
                unpack(packed, array, [len(t.token_ids) for t in members]) for array in arrays
            ]
            for index, member, *parts in zip(chunk, members, *pieces, strict=True):
                old_part, ref_part, per_token = parts
                found[index] = Divergence(
                    old_logprobs=old_part,
                    ref_logprobs=ref_part,
                    per_token=per_token,
                    num_tokens=member.num_sampled,
                )
        return found

    return measure


def unpack(packed: Packed, values: np.ndarray, lengths: Sequence[int]) -> list[np.ndarray]:
    """The values `[A, b, T]` of each sequence `[L]`, in the order in which they were packed."""
    segments = np.asarray(packed.batch.segment_ids).ravel()
    order = np.argsort(segments, kind="stable")[np.count_nonzero(segments == 0) :]
    return np.split(values.ravel()[order], np.cumsum(lengths)[:-1])

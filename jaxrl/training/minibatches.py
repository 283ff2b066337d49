"""Mini-batches, with the log-probabilities that the update needs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from jax.sharding import Mesh

from jaxrl.objectives.aggregation import token_weights
from jaxrl.objectives.entropy import kl_weights
from jaxrl.objectives.shaping import relaxed_kl_factors
from jaxrl.training.controllers import Controllers, KLBudget
from jaxrl.training.method import (
    FilterSettings,
    KLSettings,
    LossSettings,
    Method,
    has_kl_loss,
    needs_divergences,
    needs_old_logprobs,
    uses_token_kl_weights,
)
from jaxrl.training.packing import BatchShape, PackedBatch, pack_sequences
from jaxrl.training.update import ScoreStep, shard_batch
from jaxrl.types import Batch, Group, Params, Trajectory, flatten_groups
from jaxrl.utils.callables import wrap_user_code


def make_minibatch(
    groups: Sequence[Group],
    shape: BatchShape,
    method: Method,
    *,
    controllers: Controllers,
    num_shards: int = 1,
) -> PackedBatch:
    """Pack groups into a mini-batch on the host.

    Environment errors and trajectories that `filter.trajectories` drops are excluded; dropped
    trajectories still count toward their group's statistics. With `optimizer.skip_signal_free`,
    trajectories with an advantage of 0 go to `PackedBatch.rest`, unless another loss term gives
    them a gradient. The rest yields metrics but no gradient, and counts toward `loss.aggregation`.

    Args:
        groups: Groups with advantages, and with divergences if the method needs them.
        shape: Shape of the mini-batch.
        method: Training method.
        controllers: Controllers that set the KL coefficient of each token.
        num_shards: Number of devices that split the rows of a micro-batch.
    """
    trains_all = method.trains_on_zero_advantages or not method.optimizer.skip_signal_free
    selected, fields = select_trained_tokens(groups, controllers, method)
    scored = [*selected.values()]
    with_gradient = [i for i, t in enumerate(scored) if trains_all or t.has_signal]
    without_gradient = [i for i, t in enumerate(scored) if not (trains_all or t.has_signal)]
    packed, rest = (
        pack_sequences(
            [scored[i] for i in indices],
            [scored[i].token_advantages for i in indices],
            shape,
            token_fields={n: [values[i] for i in indices] for n, values in fields.items()},
            num_loss_tokens=sum(t.num_sampled for t in scored),
            num_shards=num_shards,
        )
        for indices in (with_gradient, without_gradient)
    )
    return dataclasses.replace(packed, rest=rest if rest.num_tokens else None)


def select_trained_tokens(
    groups: Sequence[Group], controllers: Controllers, method: Method
) -> tuple[dict[int, Trajectory], dict[str, list[np.ndarray]]]:
    """Return the trajectories of a mini-batch to train on, and their per-token fields.

    Trajectories are keyed by their index in `flatten_groups(groups)`.
    """
    selected = select_trained_trajectories(groups, method)
    trained = [*selected.values()]
    fields = {"token_weights": compute_loss_weights([t.loss_mask for t in trained], method.loss)}
    if uses_token_kl_weights(method.kl):
        fields["kl_weights"] = compute_token_kl_weights(trained, controllers, method.kl)
    if needs_divergences(method.kl):
        divergences = [t.require_field("divergence") for t in trained]
        if needs_old_logprobs(method.optimizer, method.filter, method.loss):
            fields["old_logprobs"] = [divergence.old_logprobs for divergence in divergences]
        if has_kl_loss(method.kl):
            fields["ref_logprobs"] = [divergence.ref_logprobs for divergence in divergences]
    return selected, fields


def divide_into_minibatches(groups: Sequence[Group], num_minibatches: int) -> list[Sequence[Group]]:
    """Divide groups into mini-batches of equal size; the last may be smaller."""
    size = -(-len(groups) // num_minibatches)
    return [groups[size * i : size * (i + 1)] for i in range(num_minibatches)]


def split_by_num_sequences(groups: Sequence[Group], max_sequences: int) -> list[list[Group]]:
    """Split groups into pieces of at most `max_sequences` trajectories, keeping groups whole."""
    pieces: list[list[Group]] = [[]]
    for group in groups:
        for start in range(0, len(group.trajectories), max_sequences):
            part = Group(trajectories=group.trajectories[start : start + max_sequences])
            size = len(flatten_groups(pieces[-1])) + len(part.trajectories)
            if pieces[-1] and size > max_sequences:
                pieces.append([])
            pieces[-1].append(part)
    return pieces


def select_trained_trajectories(groups: Sequence[Group], method: Method) -> dict[int, Trajectory]:
    """Return the trajectories to train on, keyed by their index in `flatten_groups(groups)`."""
    is_selected = make_trajectory_filter(method.filter)
    return {
        i: with_loss_mask(t, method.loss)
        for i, t in enumerate(flatten_groups(groups))
        if t.is_scored and is_selected(t)
    }


def make_trajectory_filter(filter: FilterSettings) -> Callable[[Trajectory], bool]:
    """Return a predicate for trajectories to train on; it may raise `UserCodeError`."""
    if (predicate := filter.trajectory_filter) is None:
        return lambda _: True

    def is_trained(trajectory: Trajectory) -> bool:
        answer = predicate(trajectory)
        if not isinstance(answer, bool | np.bool_):
            raise TypeError(f"it returned {answer!r:.80}; expected True or False")
        return bool(answer)

    return wrap_user_code(predicate.key, predicate.name, is_trained)


def compute_trajectory_filter_metrics(
    trajectories: Sequence[Trajectory], filter: FilterSettings
) -> dict[str, float]:
    """Return the fraction of trajectories that pass `filter.trajectories`; {} if it is not set."""
    selected = map(make_trajectory_filter(filter), trajectories)
    return (
        {}
        if filter.trajectory_filter is None
        else {"filter/trained_share": float(np.mean([*selected]))}
    )


def compute_loss_weights(masks: Sequence[np.ndarray], loss: LossSettings) -> list[np.ndarray]:
    """Compute token weights from loss masks with `loss.aggregation`.

    Raises:
        UserCodeError: A custom aggregation failed.
    """
    aggregation = loss.aggregation
    return wrap_user_code(aggregation.key, aggregation.name, token_weights)(masks, aggregation)


def with_loss_mask(trajectory: Trajectory, loss: LossSettings) -> Trajectory:
    """Unless `mask_observations`, add observations to the loss mask, except repeated tokens."""
    if loss.mask_observations:
        return trajectory
    is_response = np.arange(len(trajectory.token_ids)) >= trajectory.prompt_length
    mask = is_response & ~trajectory.is_repeated
    return dataclasses.replace(trajectory, loss_mask=mask)


def compute_token_kl_weights(
    trajectories: Sequence[Trajectory], controllers: Controllers, kl: KLSettings
) -> list[np.ndarray]:
    """Return the KL coefficient of each token, as a float32 array `[L]` per trajectory.

    Args:
        trajectories: Trajectories to train on, with `windows` if the coefficient depends on them.
        controllers: Controllers after the step, except for the KL state, which is from before the
            step.
        kl: Settings of the KL term.
    """
    scales = np.ones(len(trajectories))
    if isinstance(controllers.kl, KLBudget):
        multipliers = controllers.kl.multipliers
        scales *= [multipliers[controllers.get_bucket(t.task_id)] for t in trajectories]
    if kl.second_chance:
        scales *= relaxed_kl_factors(
            [controllers.get_bucket(t.task_id) for t in trajectories],
            np.array([t.is_correct for t in trajectories], bool),
            np.array([t.require_field("windows").excess for t in trajectories], np.float32),
        )
    coef = controllers.get_kl_coef(kl)
    masks = [
        np.zeros(len(t.token_ids), bool) if t.windows is None else t.windows.is_high
        for t in trajectories
    ]
    return [
        kl_weights(mask[None], kl_coef=coef, low_factor=kl.low_factor, bucket_scale=float(scale))[0]
        for mask, scale in zip(masks, scales, strict=True)
    ]


def shard_minibatch(
    packed: PackedBatch,
    mesh: Mesh,
    score: ScoreStep,
    params: Params,
    ref_params: Params | None,
    method: Method,
) -> Batch:
    """Shard a mini-batch over the devices; compute missing old and reference log-probabilities.

    `params` are the policy's parameters before the update.
    """
    batch = shard_batch(mesh, packed.batch)
    plain = dataclasses.replace(batch, old_logprobs=None, ref_logprobs=None, kl_weights=None)
    needs_old = needs_old_logprobs(method.optimizer, method.filter, method.loss)
    if needs_old and batch.old_logprobs is None:
        batch = dataclasses.replace(batch, old_logprobs=score(params, plain, packed))
    if has_kl_loss(method.kl) and ref_params is not None and batch.ref_logprobs is None:
        # The reference selects its own experts; it does not replay the sampler's experts.
        ref_batch = score.model.without_recorded_arrays(plain)
        batch = dataclasses.replace(batch, ref_logprobs=score(ref_params, ref_batch, packed))
    rest = packed.rest and shard_minibatch(packed.rest, mesh, score, params, ref_params, method)
    return dataclasses.replace(batch, rest=rest)

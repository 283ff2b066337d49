"""Groups to mini-batches on the devices, with the log-probabilities that the update needs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from jaxrl.choices import is_own, named
from jaxrl.method import aggregation_of, has_kl_loss, has_kl_weights, is_measured
from jaxrl.objectives.aggregation import token_weights
from jaxrl.objectives.entropy import kl_weights
from jaxrl.objectives.shaping import relaxed_kl
from jaxrl.training.controllers import Controllers, KLBudget
from jaxrl.training.packing import BatchShape, Packed, pack
from jaxrl.training.update import ScoreStep, put_batch
from jaxrl.types import Batch, Group, Params, Trajectory, members


def make_minibatches(
    groups: Sequence[Group],
    shape: BatchShape,
    config: ConfigDict,
    *,
    controllers: Controllers,
    num_shards: int = 1,
) -> list[Packed]:
    """Whole groups in task order to mini-batches on the host, each packed alone.

    Environment errors are left out. Trajectories without an advantage may be apart, as the `rest`
    (`optimizer.skip_signal_free`), where nothing else gives them a gradient; they still count in
    the weights of the others' tokens.

    Args:
        groups: with their advantages; with their divergences where these were measured.
        shape: of every mini-batch.
        config: says how many mini-batches there are and what is trained on.
        controllers: by which tokens differ in the coefficient of their KL term.
        num_shards: devices that share the rows of a micro-batch.
    """
    keeps_all = learns_from_all(config) or not config.optimizer.skip_signal_free
    size = config.rollout.tasks_per_step // config.optimizer.num_minibatches
    aggregation = aggregation_of(config)  # objectives/aggregation.py, by loss.aggregation
    weigh = named("loss.aggregation", config.loss.aggregation, token_weights)
    minibatches = []
    for start in range(0, size * config.optimizer.num_minibatches, size):
        part = members(groups[start : start + size])
        scored = [as_trained(t, config) for t in part if t.is_scored]
        fields = {"token_weights": weigh([t.loss_mask for t in scored], aggregation)}
        fields |= _measured_fields(scored, controllers, config)
        halves: list[list[int]] = [[], []]
        for index, trajectory in enumerate(scored):
            halves[not (keeps_all or trajectory.has_signal)].append(index)
        packed, rest = (
            pack(
                [scored[i] for i in chosen],
                [scored[i].token_advantages for i in chosen],
                shape,
                token_fields={n: [values[i] for i in chosen] for n, values in fields.items()},
                num_counted=sum(t.num_sampled for t in scored),
                num_shards=num_shards,
            )
            for chosen in halves
        )
        minibatches.append(dataclasses.replace(packed, rest=rest if rest.num_tokens else None))
    return minibatches


def learns_from_all(config: ConfigDict) -> bool:
    """True where a trajectory may have a gradient without an advantage.

    The KL and the entropy term, the balance of routers and, for all we know, a loss of one's own
    give it one.
    """
    others = config.loss.entropy_coef != 0 or config.model.router.balance_coef != 0
    return has_kl_loss(config) or others or is_own(config.loss.name)


def as_trained(trajectory: Trajectory, config: ConfigDict) -> Trajectory:
    """The trajectory with the mask of what is trained on; with observations, where asked for."""
    if config.loss.mask_observations:
        return trajectory
    mask = np.arange(len(trajectory.token_ids)) >= trajectory.prompt_length
    return dataclasses.replace(trajectory, loss_mask=mask)


def _measured_fields(
    trajectories: Sequence[Trajectory], controllers: Controllers, config: ConfigDict
) -> dict[str, list[np.ndarray]]:
    """What is known of every token beforehand: KL coefficients, and what was measured."""
    fields: dict[str, list[np.ndarray]] = {}
    if has_kl_weights(config):
        fields["kl_weights"] = token_kl_weights(trajectories, controllers, config)
    if is_measured(config):
        found = [t.required("divergence") for t in trajectories]
        if not takes_own_logprobs(config):
            fields["old_logprobs"] = [divergence.old_logprobs for divergence in found]
        if has_kl_loss(config):
            fields["ref_logprobs"] = [divergence.ref_logprobs for divergence in found]
    return fields


def token_kl_weights(
    trajectories: Sequence[Trajectory], controllers: Controllers, config: ConfigDict
) -> list[np.ndarray]:
    """The KL coefficient of every token, float32 `[L]` each.

    Args:
        trajectories: with their windows, where the coefficient depends on them.
        controllers: their KL state before the step, the others after it.
        config: its section `kl`.
    """
    kl = config.kl
    scales = np.ones(len(trajectories))
    if isinstance(controllers.kl, KLBudget):
        multipliers = controllers.kl.multipliers
        scales *= [multipliers[controllers.bucket(t.task_id)] for t in trajectories]
    if kl.second_chance:
        scales *= relaxed_kl(
            [controllers.bucket(t.task_id) for t in trajectories],
            np.array([t.is_correct for t in trajectories], bool),
            np.array([t.required("windows").excess for t in trajectories], np.float32),
        )
    coef = controllers.kl_coef(config)
    masks = [
        np.zeros(len(t.token_ids), bool) if t.windows is None else t.windows.is_high
        for t in trajectories
    ]
    return [
        kl_weights(mask[None], kl_coef=coef, low_factor=kl.low_factor, bucket_scale=float(scale))[0]
        for mask, scale in zip(masks, scales, strict=True)
    ]


def takes_own_logprobs(config: ConfigDict) -> bool:
    """True where the old log-probabilities may be those of the update's own forward pass.

    That takes a single optimizer step per batch, and samples of the current policy only.
    """
    updates = config.optimizer.num_minibatches * config.optimizer.num_epochs
    return updates == 1 and not config.filter.carry_over


def put_minibatches(
    minibatches: Sequence[Packed],
    mesh: Mesh,
    score: ScoreStep,
    params: Params,
    ref_params: Params | None,
    config: ConfigDict,
) -> list[Batch]:
    """Mini-batches on the devices; old and reference log-probabilities are computed if missing.

    Args:
        minibatches: on the host; log-probabilities that were measured are in them.
        mesh: rows are split over its data and fsdp axes.
        score: gives log-probabilities.
        params: the policy before the update.
        ref_params: the reference; None where there is none.
        config: says which log-probabilities the loss reads.
    """
    needs_old, needs_ref = not takes_own_logprobs(config), has_kl_loss(config)

    def put(packed: Packed) -> Batch:
        batch = put_batch(mesh, packed.batch)
        plain = dataclasses.replace(batch, old_logprobs=None, ref_logprobs=None, kl_weights=None)
        own_choice = dataclasses.replace(plain, routed_experts=None)  # the reference's experts
        if needs_old and batch.old_logprobs is None:
            batch = dataclasses.replace(batch, old_logprobs=score(params, plain, packed))
        if needs_ref and ref_params is not None and batch.ref_logprobs is None:
            found = score(ref_params, own_choice, packed)
            batch = dataclasses.replace(batch, ref_logprobs=found)
        return dataclasses.replace(batch, rest=packed.rest and put(packed.rest))

    return [put(packed) for packed in minibatches]

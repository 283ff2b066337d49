"""Where the policy wavers, and what difficulty makes of it: ARES on trajectories.

The windows come from the entropies that the sampler reported, which are those of the trainer to
rounding. First a batch moves the threshold, the buckets and the coefficients, then it is shaped
by them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from jaxrl.config_checks import has_kl_weights
from jaxrl.logs.metrics import mean
from jaxrl.objectives.controllers import BUCKETS, KLBudget
from jaxrl.objectives.entropy import high_window_entropy_mask, kl_weights, window_entropy
from jaxrl.objectives.shaping import entropy_reward, relaxed_kl
from jaxrl.training.collect import add_rewards, by_group
from jaxrl.training.method import Controllers
from jaxrl.types import Trajectory


@dataclass(frozen=True, kw_only=True)
class Windows:
    """What one trajectory's windows say."""

    values: np.ndarray  # float32 [L], nats; 0 where there is no whole window
    valid: np.ndarray  # bool [L]
    is_high: np.ndarray  # bool [L], at the threshold or above
    percentile: float  # of the values, nats; NaN without any
    excess: float  # the sum of what lies above the threshold, nats

    @property
    def count(self) -> int:
        """Tokens followed by a window of high entropy."""
        return int(self.is_high.sum())


def advance(
    trajectories: Sequence[Trajectory],
    config: ConfigDict,
    controllers: Controllers,
    is_trigger: np.ndarray | None,
) -> tuple[Controllers, list[Windows]]:
    """The controllers after a batch, and the windows of its trajectories.

    Args:
        trajectories: of whole groups.
        config: of the run.
        controllers: before the batch.
        is_trigger: bool [V], the ids that may count; None: all.
    """
    scored = by_group([t for t in trajectories if t.is_scored])
    task_ids = [group[0].task_id for group in scored]
    num_correct = [sum(t.is_correct for t in group) for group in scored]
    sizes = [len(group) for group in scored]
    if controllers.buckets is not None:
        buckets = controllers.buckets.update(task_ids, num_correct, sizes)
        controllers = dataclasses.replace(controllers, buckets=buckets)
    windows: list[Windows] = []
    if controllers.threshold is not None:
        controllers, windows = _move_threshold(trajectories, config, controllers, is_trigger)
    if controllers.coefficients is not None and controllers.level is not None:
        counts = {id(t): w.count for t, w in zip(trajectories, windows, strict=True)}
        coefficients = controllers.coefficients.update(
            [mean([counts[id(t)] for t in group]) for group in scored],
            [controllers.bucket(task_id) for task_id in task_ids],
            rate=config.shaping.alpha_step,
            max_alpha=config.shaping.alpha_max,
        )
        controllers = dataclasses.replace(controllers, coefficients=coefficients)
    return controllers, windows


def _move_threshold(
    trajectories: Sequence[Trajectory],
    config: ConfigDict,
    controllers: Controllers,
    is_trigger: np.ndarray | None,
) -> tuple[Controllers, list[Windows]]:
    shaping = config.shaping
    assert controllers.threshold is not None
    found = [_window_entropy(t, shaping.entropy_window) for t in trajectories]
    threshold = controllers.threshold.update(
        [
            values[valid]
            for t, (values, valid) in zip(trajectories, found, strict=True)
            if t.is_scored
        ],
        percentile=shaping.entropy_percentile,
        decay=shaping.entropy_decay,
    )
    windows = []
    for trajectory, (values, valid) in zip(trajectories, found, strict=True):
        is_high = high_window_entropy_mask(values[None], valid[None], threshold=threshold.value)[0]
        level = np.inf if threshold.value is None else threshold.value
        if is_trigger is not None:
            is_high = is_high & is_trigger[trajectory.token_ids]
        inside = values[valid].astype(np.float64)
        windows.append(
            Windows(
                values=values,
                valid=valid,
                is_high=np.asarray(is_high),
                percentile=(
                    float(np.percentile(inside, shaping.entropy_percentile))
                    if len(inside)
                    else float("nan")
                ),
                excess=float(np.maximum(inside - level, 0.0).sum()),
            )
        )
    return dataclasses.replace(controllers, threshold=threshold), windows


def _window_entropy(trajectory: Trajectory, window: int) -> tuple[np.ndarray, np.ndarray]:
    values, valid = window_entropy(
        trajectory.rollout_entropies[None],
        trajectory.loss_mask[None],
        np.ones((1, len(trajectory.token_ids)), np.int32),
        window=window,
    )
    return np.asarray(values[0], np.float32), np.asarray(valid[0])


def reward_entropy(
    trajectories: Sequence[Trajectory],
    windows: Sequence[Windows],
    config: ConfigDict,
    controllers: Controllers,
) -> list[Trajectory]:
    """Trajectories with the entropy reward; as they are before the threshold is known."""
    if controllers.coefficients is None:
        return list(trajectories)
    amounts = np.zeros(len(trajectories), np.float32)
    if controllers.level is not None:
        scored = [i for i, t in enumerate(trajectories) if t.is_scored]
        amounts[scored] = entropy_reward(
            np.array([windows[i].count for i in scored], np.int32),
            np.array([trajectories[i].is_correct for i in scored], bool),
            [controllers.bucket(trajectories[i].task_id) for i in scored],
            targets=controllers.coefficients.targets,
            coefficients=controllers.coefficients.alphas,
            centred_gain=config.shaping.centred_gain,
        )
    return add_rewards(trajectories, "entropy", amounts)


def token_kl_weights(
    trajectories: Sequence[Trajectory],
    windows: Sequence[Windows],
    config: ConfigDict,
    controllers: Controllers,
) -> list[np.ndarray] | None:
    """The KL coefficient of every token, float32 `[L]` each; None where all have `kl.coef`."""
    if not has_kl_weights(config):
        return None
    kl = config.kl
    scales = np.ones(len(trajectories))
    if isinstance(controllers.kl, KLBudget):
        multipliers = controllers.kl.multipliers
        scales *= [multipliers[controllers.bucket(t.task_id)] for t in trajectories]
    if kl.second_chance:
        scales *= relaxed_kl(
            [controllers.bucket(t.task_id) for t in trajectories],
            np.array([t.is_correct for t in trajectories], bool),
            np.array([w.excess for w in windows], np.float32),
        )
    coef = controllers.kl_coef(config)
    masks = [w.is_high for w in windows] or [np.zeros(len(t.token_ids), bool) for t in trajectories]
    return [
        kl_weights(mask[None], kl_coef=coef, low_factor=kl.low_factor, bucket_scale=float(scale))[0]
        for mask, scale in zip(masks, scales, strict=True)
    ]


def sample_fields(
    trajectories: Sequence[Trajectory], windows: Sequence[Windows], controllers: Controllers
) -> list[dict[str, Any]]:
    """What is kept of each trajectory beside itself, for the file of a step's trajectories."""
    fields: list[dict[str, Any]] = []
    for index, trajectory in enumerate(trajectories):
        found: dict[str, Any] = {
            "uid": trajectory.task_id,
            "global_id": f"{trajectory.task_id}/{trajectory.sample_index}",
            "ground_truth": list(trajectory.task.answers),
            "accuracy": float(trajectory.is_correct) if trajectory.is_scored else None,
        }
        if windows:
            window = windows[index]
            has_level = not np.isnan(window.percentile)
            found["high_entropy_token_num"] = window.count
            found["entropy_percentile_thresholds"] = window.percentile if has_level else None
            found["high_entropy_threshold"] = controllers.level
        if controllers.buckets is not None:
            found["difficulty"] = controllers.bucket(trajectory.task_id)
        if controllers.coefficients is not None:
            name = found["difficulty"]
            found["target_high_entropy_token_num"] = controllers.coefficients.targets.get(name)
            found["alpha_entropy"] = controllers.coefficients.alphas[name]
        fields.append(found)
    return fields


def window_metrics(
    trajectories: Sequence[Trajectory], windows: Sequence[Windows], controllers: Controllers
) -> dict[str, float]:
    """How many tokens waver, in all and by difficulty, and how long each difficulty thinks."""
    metrics: dict[str, float] = {}
    scored = [i for i, t in enumerate(trajectories) if t.is_scored]
    if windows:
        metrics["entropy/high_window_tokens"] = mean([windows[i].count for i in scored])
    if controllers.coefficients is not None:
        metrics["entropy/inversions"] = _inversions([trajectories[i] for i in scored])
    if controllers.buckets is None:
        return metrics
    for name in BUCKETS:
        members = [i for i in scored if controllers.bucket(trajectories[i].task_id) == name]
        metrics[f"difficulty/{name}/share"] = len(members) / max(len(scored), 1)
        metrics[f"difficulty/{name}/response_length"] = mean(
            [trajectories[i].num_sampled for i in members]
        )
        if windows:
            metrics[f"difficulty/{name}/high_window_tokens"] = mean(
                [windows[i].count for i in members]
            )
    return metrics


def _inversions(trajectories: Sequence[Trajectory]) -> float:
    """Of the groups with right and wrong answers, those where a wrong one earns as much; a share.

    NaN without such groups.
    """
    inverted = []
    for group in by_group(trajectories):
        right, wrong = ([t.reward for t in group if t.is_correct == x] for x in (True, False))
        if right and wrong:
            inverted.append(max(wrong) >= min(right))
    return mean(inverted)

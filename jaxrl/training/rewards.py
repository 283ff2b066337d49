"""Reward shaping: length, abstention, KL, entropy.

Each function returns groups with adjusted rewards, and records the adjustment in `reward_parts`.
Trajectories with environment errors have no reward and are left unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxrl.envs.rewards.qa import normalize_answer
from jaxrl.objectives.shaping import boundary_aware_rewards, entropy_reward, overlong_penalty
from jaxrl.training.controllers import Controllers
from jaxrl.training.method import Method, ShapingSettings
from jaxrl.types import Columns, Group, flatten_groups, replace_fields


def add_reward(groups: Sequence[Group], part: str, amounts: np.ndarray) -> list[Group]:
    """Add `amounts` [N], in the order of `flatten_groups`, to the rewards as `part`."""
    new_rewards = [
        (
            float(np.float32(t.reward) + np.float32(amount)),
            float(np.float32(t.rest_reward) + np.float32(amount)),
            {**t.reward_parts, part: float(amount)},
        )
        if t.is_scored
        else (t.reward, t.rest_reward, t.reward_parts)
        for t, amount in zip(flatten_groups(groups), amounts, strict=True)
    ]
    rewards, rest, parts = zip(*new_rewards, strict=True) if new_rewards else ((), (), ())
    return replace_fields(groups, reward=rewards, rest_reward=rest, reward_parts=parts)


def shape_rewards(
    groups: Sequence[Group], shaping: ShapingSettings, *, is_late: bool
) -> list[Group]:
    """Shape rewards by abstention and length, before groups are filtered.

    `is_late` is False only in the early stage of a method with a stage gate.
    """
    shaped = list(groups)
    if shaping.boundary_aware:
        columns = Columns(shaped)
        new_rewards, reasons = boundary_aware_rewards(
            columns.rewards,
            columns.is_abstention,
            columns.is_well_formed,
            [normalize_answer(t.final_answer) for t in flatten_groups(shaped)],
            columns.group_ids,
            is_late=is_late,
            sample_level=shaping.sample_level,
            bonus=shaping.abstention_bonus,
            max_rate=shaping.abstention_rate,
        )
        shaped = add_reward(shaped, "abstention", new_rewards - columns.rewards)
        shaped = replace_fields(shaped, reward_reason=reasons)
    if shaping.overlong_buffer:
        penalties = overlong_penalty(
            np.array([t.response_length for t in flatten_groups(shaped)]),
            max_length=shaping.overlong_limit,
            buffer=shaping.overlong_buffer,
            factor=shaping.overlong_factor,
        )
        shaped = add_reward(shaped, "overlong", penalties)
    return shaped


def compute_kl_penalties(groups: Sequence[Group], coef: float) -> np.ndarray:
    """Return `coef` times each trajectory's divergence, 0 for environment errors: float64 [N]."""
    return np.array(
        [
            coef * t.require_field("divergence").total if t.is_scored else 0.0
            for t in flatten_groups(groups)
        ]
    )


def apply_kl_penalty(
    groups: Sequence[Group], controllers: Controllers, method: Method
) -> list[Group]:
    """Subtract the KL penalty from rewards if `kl.apply_to` is `reward`."""
    if method.kl.apply_to != "reward":
        return list(groups)
    return add_reward(
        groups, "kl", -compute_kl_penalties(groups, controllers.get_kl_coef(method.kl))
    )


def add_entropy_reward(
    groups: Sequence[Group], controllers: Controllers, shaping: ShapingSettings
) -> list[Group]:
    """Add ARES's entropy reward to the rewards; 0 before the entropy threshold is known."""
    if controllers.coefficients is None:
        return list(groups)
    trajectories = flatten_groups(groups)
    amounts = np.zeros(len(trajectories), np.float32)
    if controllers.entropy_threshold is not None:
        scored = [i for i, t in enumerate(trajectories) if t.is_scored]
        counts = [trajectories[i].require_field("windows").num_high_entropy_windows for i in scored]
        amounts[scored] = entropy_reward(
            np.array(counts, np.int32),
            np.array([trajectories[i].is_correct for i in scored], bool),
            [controllers.get_bucket(trajectories[i].task_id) for i in scored],
            targets=controllers.coefficients.targets,
            coefficients=controllers.coefficients.alphas,
            margins=shaping.margins,
            huber_knees=shaping.huber_knees,
            sigmoid_temperatures=shaping.sigmoid_temperatures,
            centered_gain=shaping.centered_gain,
        )
    return add_reward(groups, "entropy", amounts)

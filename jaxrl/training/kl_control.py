"""How far the policy may stray from its reference: KL in the reward, and what moves coefficients.

The divergence is measured before the update, along the trajectories of the step, so that the
coefficients of a step depend on the steps before it alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from ml_collections import ConfigDict

from jaxrl.logs.metrics import mean
from jaxrl.objectives.controllers import AdaptiveKL, KLBudget, LogKL
from jaxrl.training.collect import add_rewards
from jaxrl.training.method import Controllers
from jaxrl.training.minibatches import Divergence
from jaxrl.types import Trajectory


def penalties(
    divergences: Sequence[Divergence | None] | None, controllers: Controllers, config: ConfigDict
) -> np.ndarray:
    """What the KL term takes off each trajectory's reward, float32 [N]."""
    assert divergences is not None
    return np.array([controllers.kl_coef(config) * d.total if d else 0.0 for d in divergences])


def penalize(
    trajectories: Sequence[Trajectory],
    divergences: Sequence[Divergence | None] | None,
    controllers: Controllers,
    config: ConfigDict,
) -> tuple[list[Trajectory], dict[str, float]]:
    """Trajectories with the KL term in their rewards, where it belongs there; its metrics."""
    if divergences is None:
        return list(trajectories), {}
    metrics = {
        "actor/kl_coef": controllers.kl_coef(config),
        "actor/kl_measured": mean(list(mean_divergences(divergences).values())),
    }
    if config.kl.place == "reward":
        taken = penalties(divergences, controllers, config)
        trajectories = add_rewards(trajectories, "kl", -taken)
    return list(trajectories), metrics


def mean_divergences(divergences: Sequence[Divergence | None]) -> dict[int, float]:
    """Nats a token, by the index of every trajectory that was measured and has tokens to train."""
    return {i: d.mean for i, d in enumerate(divergences) if d is not None and d.num_tokens}


def advance(
    controllers: Controllers,
    trajectories: Sequence[Trajectory],
    divergences: Sequence[Divergence | None] | None,
    config: ConfigDict,
) -> Controllers:
    """The controllers after a step, by the divergence that was measured at its start."""
    state, settings = controllers.kl, config.kl
    if state is None or divergences is None:
        return controllers
    found = mean_divergences(divergences)
    values = list(found.values())
    moved: AdaptiveKL | LogKL | KLBudget
    match state:
        case AdaptiveKL():
            moved = state.update(
                mean(values), len(values), target=settings.target, horizon=settings.horizon
            )
        case LogKL():
            moved = state.update(mean(values), target=settings.target)
        case KLBudget():
            by_bucket: dict[str, list[float]] = {}
            for index, value in found.items():
                name = controllers.bucket(trajectories[index].task_id)
                by_bucket.setdefault(name, []).append(value)
            moved = state.update(
                {name: mean(its) for name, its in by_bucket.items()},
                budgets=settings.budgets.to_dict(),
                rate=settings.budget_step,
            )
    return dataclasses.replace(controllers, kl=moved)

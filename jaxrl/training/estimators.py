"""Advantage estimation with the configured estimator."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxrl.objectives.turns import compute_turn_returns, estimate_by_turn
from jaxrl.runtime.compilation import cached_jit
from jaxrl.training.method import AdvantageSettings
from jaxrl.types import Columns, Group, flatten_groups, replace_fields
from jaxrl.utils.callables import UserCodeError, wrap_user_code


class AdvantageEstimator:
    """Configured advantage estimator. Advantages are 0 after environment errors."""

    def __init__(self, advantage: AdvantageSettings, seed: int):
        """Prepare the estimator, which compiles on first use. `seed` is for those that sample."""
        self._advantage, self._seed = advantage, seed
        estimator, function = advantage.estimator, advantage.estimator.function
        names = self._arrays = estimator.arguments

        # With one advantage per turn, the estimator is applied to each turn's column separately.
        def estimate(*arrays: Any, **settings: Any) -> jax.Array:
            columns = dict(zip(names, arrays, strict=True))
            return estimate_by_turn(partial(function, **settings), names, columns)

        # Settings are static: each new value compiles a program.
        compiled = cached_jit(
            estimate if advantage.by_turn else function,
            name=estimator.name,
            key=None if estimator.is_user_code else (function, advantage.by_turn, tuple(names)),
            static_argnames=tuple(estimator.settings),
        )
        self._function = wrap_user_code(estimator.key, estimator.name, compiled)

    def get_scheduled_settings(self, stage_step: int) -> dict[str, Any]:
        """Return the scheduled settings and their values after `stage_step` steps of the stage."""
        settings = {}
        for name, pairs in self._advantage.schedules.items():
            past_values = [value for step, value in pairs if step <= stage_step]
            settings[name] = (
                past_values[-1] if past_values else self._advantage.estimator.settings[name]
            )
        return settings

    def __call__(self, groups: Sequence[Group], step: int, stage_step: int) -> list[Group]:
        """Add advantages to groups.

        Args:
            groups: Groups with rewards.
            step: Global step, used in the random seed of estimators that sample.
            stage_step: Number of completed steps of the stage, for scheduled settings.
        """
        # Turn-level advantages compare the returns from each turn onward.
        columns = Columns(groups)
        offered: dict[str, Any] = {
            "key": lambda: jax.random.fold_in(jax.random.key(self._seed), step)
        }
        shape: tuple[int, ...] = columns.group_ids.shape
        if self._advantage.by_turn:
            offered["rewards"] = lambda: compute_returns(columns, self._advantage)
            offered["token_counts"] = lambda: columns.turn_token_counts
            shape = columns.turn_rewards.shape
        arrays = [
            offered[name]() if name in offered else getattr(columns, name) for name in self._arrays
        ]
        settings = {**self._advantage.estimator.settings, **self.get_scheduled_settings(stage_step)}
        advantages = np.asarray(self._function(*arrays, **settings), np.float32)
        if advantages.shape != shape or not np.isfinite(advantages).all():
            raise UserCodeError(
                f"config.advantage.name names {self._advantage.estimator.name!r}, which returned "
                f"{list(advantages.shape)} with {np.isfinite(advantages).sum()} finite numbers, "
                f"from {np.isfinite(columns.rewards).sum()} finite rewards; expected finite "
                f"{list(shape)}, one per trajectory{' and turn' * (len(shape) == 2)}."
            )
        if len(shape) == 1:
            return replace_fields(groups, advantage=[float(advantage) for advantage in advantages])
        # Average the advantages of a trajectory's turns over its sampled tokens.
        turns = [
            tuple(map(float, row[: max(len(t.turns), 1)]))
            for t, row in zip(flatten_groups(groups), advantages, strict=True)
        ]
        groups = replace_fields(groups, turn_advantages=turns)
        means = [
            float(t.token_advantages[t.loss_mask].mean()) if t.num_sampled else 0.0
            for t in flatten_groups(groups)
        ]
        return replace_fields(groups, advantage=means)

    def metrics(self, stage_step: int) -> dict[str, float]:
        """Return the scheduled settings as metrics."""
        settings = self.get_scheduled_settings(stage_step)
        return {f"advantage/{name}": value for name, value in settings.items()}


def compute_returns(columns: Columns, advantage: AdvantageSettings) -> np.ndarray:
    """Compute returns from each turn onward [N, K] if `advantage.by_turn`, else rewards [N, 1]."""
    if not advantage.by_turn:
        return columns.rewards[:, None]
    rest, turns = columns.outcome_rewards, columns.turn_rewards
    return compute_turn_returns(rest, turns, discount=advantage.turn_discount)

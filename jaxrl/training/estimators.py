"""From columns of a step's trajectories to their advantages, by the configured estimator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from jaxrl.choices import OwnCodeError, arrays_of, is_own, named, subsection
from jaxrl.method import estimator_of
from jaxrl.objectives.advantages import by_turn, turn_returns
from jaxrl.types import Columns, Group, Trajectory, members, with_fields


class Estimator:
    """The configured advantage estimator; an environment error is in no group and gets 0."""

    def __init__(self, config: ConfigDict):
        """Compiles nothing yet.

        Args:
            config: its section `advantage` names the estimator; `seed` is that of its draws.
        """
        function, self._settings = estimator_of(config)
        self._name, self._seed = config.advantage.name, config.seed
        keys = {} if is_own(self._name) else subsection(config.advantage)
        # By setting: pairs of a step of the stage and the value from then on.
        self._schedules = {
            name: keys[f"{name}_schedule"] for name in self._settings if f"{name}_schedule" in keys
        }
        self._arrays, self._config = arrays_of(function), config.advantage
        if config.advantage.by_turn:
            function = self._of_turns(function)
        # Of every value that a setting takes there is a program.
        compiled = jax.jit(function, static_argnames=tuple(self._settings))
        self._function = named("advantage.name", self._name, compiled)

    def scheduled(self, stage_step: int) -> dict[str, Any]:
        """The settings that have a schedule, after `stage_step` steps of the stage."""
        found = {}
        for name, pairs in self._schedules.items():
            begun = [value for step, value in pairs if step <= stage_step]
            found[name] = begun[-1] if begun else self._settings[name]
        return found

    def __call__(self, groups: Sequence[Group], step: int, stage_step: int) -> list[Group]:
        """Groups whose trajectories have their advantages.

        Args:
            groups: with their rewards.
            step: over all stages; seeds the estimators that draw.
            stage_step: steps of the stage that are done, for settings with a schedule.
        """
        _check_rewards(members(groups))
        columns = Columns(groups)
        offered: dict[str, Any] = {
            "key": lambda: jax.random.fold_in(jax.random.key(self._seed), step)
        }
        shape: tuple[int, ...] = columns.group_ids.shape
        if self._config.by_turn:
            offered["rewards"] = lambda: returns_of(columns, self._config)
            offered["token_counts"] = lambda: columns.turn_token_counts
            shape = columns.turn_rewards.shape
        arrays = [
            offered[name]() if name in offered else getattr(columns, name) for name in self._arrays
        ]
        settings = self._settings | self.scheduled(stage_step)
        found = np.asarray(self._function(*arrays, **settings), np.float32)
        if found.shape != shape or not np.isfinite(found).all():
            raise OwnCodeError(
                f"config.advantage.name names {self._name!r}, which returned {list(found.shape)} "
                f"with {np.isfinite(found).sum()} finite numbers; expected finite "
                f"{list(shape)}, one a trajectory{' and turn' * (len(shape) == 2)}."
            )
        if len(shape) == 2:
            return _with_turns(groups, found)
        return with_fields(groups, advantage=[float(advantage) for advantage in found])

    def _of_turns(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The estimator with an advantage for each turn, of columns that have one for each."""
        names = self._arrays

        def estimate(*arrays: Any, **settings: Any) -> jax.Array:
            columns = dict(zip(names, arrays, strict=True))
            return by_turn(partial(function, **settings), names, columns)

        return estimate

    def metrics(self, stage_step: int) -> dict[str, float]:
        """What the settings that have a schedule are, after `stage_step` steps of the stage."""
        found = self.scheduled(stage_step)
        return {f"advantage/{name}": value for name, value in found.items()}


def returns_of(columns: Columns, settings: ConfigDict) -> np.ndarray:
    """What trajectories earn from each turn on, float32 [N, K]; or their rewards, [N, 1].

    Args:
        columns: of the trajectories.
        settings: the section `advantage`, which says whether advantages are by turns.
    """
    if not settings.by_turn:
        return columns.rewards[:, None]
    rest, turns = columns.rest_rewards, columns.turn_rewards
    return turn_returns(rest, turns, discount=settings.turn_discount)


def _check_rewards(trajectories: Sequence[Trajectory]) -> None:
    largest = float(np.finfo(np.float32).max)
    for t in trajectories:
        if t.is_scored and not abs(t.reward) <= largest:
            odd = [f"'{n}' gave {x}" for n, x in t.reward_parts.items() if not abs(x) <= largest]
            raise OwnCodeError(
                f"the reward of the task {t.task_id!r} is {t.reward}: {', '.join(odd) or 'a sum'}; "
                "expected float32, so mend the part or its weight in config.reward.weights."
            )


def _with_turns(groups: Sequence[Group], found: np.ndarray) -> list[Group]:
    """Groups whose trajectories have an advantage for each of their turns."""
    trajectories = members(groups)
    turns = [
        tuple(map(float, row[: max(len(t.turns), 1)]))
        for t, row in zip(trajectories, found, strict=True)
    ]
    groups = with_fields(groups, turn_advantages=turns)
    means = [
        float(t.token_advantages[t.loss_mask].mean()) if t.num_sampled else 0.0
        for t in members(groups)
    ]
    return with_fields(groups, advantage=means)

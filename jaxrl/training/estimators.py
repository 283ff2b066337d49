"""Advantages from columns of a step's trajectories, by the configured estimator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.objectives.turns import by_turn, turn_returns
from jaxrl.own_code import OwnCodeError, failure_text, named
from jaxrl.training.settings import Advantage
from jaxrl.types import Columns, Group, Trajectory, members, with_fields


class Estimator:
    """The configured advantage estimator; an environment error is in no group and gets 0."""

    def __init__(self, advantage: Advantage, seed: int):
        """Compiles nothing yet; `seed` is that of an estimator's draws."""
        self._advantage, self._seed = advantage, seed
        chosen, function = advantage.estimator, advantage.estimator.function
        self._arrays = chosen.arguments
        if advantage.by_turn:
            function = self._of_turns(function)
        # Of every value that a setting takes there is a program.
        compiled = jax.jit(function, static_argnames=tuple(chosen.settings))
        self._function = named(chosen.key, chosen.name, compiled)

    def scheduled(self, stage_step: int) -> dict[str, Any]:
        """The settings that have a schedule, after `stage_step` steps of the stage."""
        found = {}
        for name, pairs in self._advantage.schedules.items():
            begun = [value for step, value in pairs if step <= stage_step]
            found[name] = begun[-1] if begun else self._advantage.estimator.settings[name]
        return found

    def check(self, count: int) -> None:
        """Refuses an estimator that gives no number a trajectory; it is traced for `count` of them.

        Raises:
            ValueError: names the key and, of what was raised, the place.
        """
        chosen, columns, shape = self._advantage.estimator, Columns(()), (count,)
        arrays = [
            jax.random.key(0)
            if name == "key"
            else jax.ShapeDtypeStruct(shape, getattr(columns, name).dtype)
            for name in self._arrays
        ]
        begin = f"config.{chosen.key} names {chosen.name!r}"
        try:
            found = jax.eval_shape(chosen, *arrays)
        except (Exception, SystemExit) as error:
            raise ValueError(f"{begin}, which JAX cannot trace: {failure_text(error)}.") from error
        is_array = isinstance(found, jax.ShapeDtypeStruct)
        if not (is_array and found.shape == shape and jnp.issubdtype(found.dtype, jnp.floating)):
            what = f"{found.dtype} {list(found.shape)}" if is_array else type(found).__name__
            raise ValueError(
                f"{begin}, which returned {what}; expected float32 {list(shape)}, one number a "
                "trajectory."
            )

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
        if self._advantage.by_turn:
            offered["rewards"] = lambda: returns_of(columns, self._advantage)
            offered["token_counts"] = lambda: columns.turn_token_counts
            shape = columns.turn_rewards.shape
        arrays = [
            offered[name]() if name in offered else getattr(columns, name) for name in self._arrays
        ]
        settings = {**self._advantage.estimator.settings, **self.scheduled(stage_step)}
        found = np.asarray(self._function(*arrays, **settings), np.float32)
        if found.shape != shape or not np.isfinite(found).all():
            raise OwnCodeError(
                f"config.advantage.name names {self._advantage.estimator.name!r}, which returned "
                f"{list(found.shape)} "
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
        """Values of the settings with a schedule, after `stage_step` steps of the stage."""
        found = self.scheduled(stage_step)
        return {f"advantage/{name}": value for name, value in found.items()}


def returns_of(columns: Columns, advantage: Advantage) -> np.ndarray:
    """Returns from each turn on, float32 [N, K], or rewards [N, 1] where nothing is by turns."""
    if not advantage.by_turn:
        return columns.rewards[:, None]
    rest, turns = columns.rest_rewards, columns.turn_rewards
    return turn_returns(rest, turns, discount=advantage.turn_discount)


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

"""From columns of a step's trajectories to one advantage each, by the configured estimator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from jaxrl.choices import arrays_of, failure_text, is_own, subsection
from jaxrl.method import estimator_of
from jaxrl.types import Columns, Group, with_fields


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
        self._arrays = arrays_of(function)
        # Of every value that a setting takes there is a program.
        self._function = jax.jit(function, static_argnames=tuple(self._settings))

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
        columns = Columns(groups)
        arrays = [
            jax.random.fold_in(jax.random.key(self._seed), step)
            if name == "key"
            else getattr(columns, name)
            for name in self._arrays
        ]
        settings = self._settings | self.scheduled(stage_step)
        found = np.asarray(self._function(*arrays, **settings), np.float32)
        if found.shape != columns.group_ids.shape or not np.isfinite(found).all():
            raise ValueError(
                f"config.advantage.name names {self._name!r}, which returned {list(found.shape)} "
                f"with {np.isfinite(found).sum()} finite numbers; expected finite "
                f"[{len(columns.group_ids)}], one a trajectory."
            )
        return with_fields(groups, advantage=[float(advantage) for advantage in found])

    def check(self, num_trajectories: int) -> None:
        """Refuses an estimator that JAX cannot trace, or that gives no number a trajectory.

        Computes nothing.

        Args:
            num_trajectories: N of a step.

        Raises:
            ValueError: names the key and, of what was raised, the place.
        """
        columns, shape = Columns(()), (num_trajectories,)
        arrays = [
            jax.random.key(0)
            if name == "key"
            else jax.ShapeDtypeStruct(shape, getattr(columns, name).dtype)
            for name in self._arrays
        ]
        begin = f"config.advantage.name names {self._name!r}"
        try:
            found = self._function.eval_shape(*arrays, **(self._settings | self.scheduled(0)))
        except (Exception, SystemExit) as error:
            raise ValueError(f"{begin}, which JAX cannot trace: {failure_text(error)}.") from error
        is_array = isinstance(found, jax.ShapeDtypeStruct)
        if not (is_array and found.shape == shape and jnp.issubdtype(found.dtype, jnp.floating)):
            what = f"{found.dtype} {list(found.shape)}" if is_array else type(found).__name__
            raise ValueError(
                f"{begin}, which returned {what}; expected float32 {list(shape)}, one "
                "number a trajectory."
            )

    def metrics(self, stage_step: int) -> dict[str, float]:
        """What the settings that have a schedule are, after `stage_step` steps of the stage."""
        found = self.scheduled(stage_step)
        return {f"advantage/{name}": value for name, value in found.items()}

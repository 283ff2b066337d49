"""From columns of a step's trajectories to one advantage each, by the configured estimator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from jaxrl.choices import OwnCodeError, arrays_of, is_own, named, subsection
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
            raise OwnCodeError(
                f"config.advantage.name names {self._name!r}, which returned {list(found.shape)} "
                f"with {np.isfinite(found).sum()} finite numbers; expected finite "
                f"[{len(columns.group_ids)}], one a trajectory."
            )
        return with_fields(groups, advantage=[float(advantage) for advantage in found])

    def metrics(self, stage_step: int) -> dict[str, float]:
        """What the settings that have a schedule are, after `stage_step` steps of the stage."""
        found = self.scheduled(stage_step)
        return {f"advantage/{name}": value for name, value in found.items()}

"""Rollouts that the processes of a job share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxrl.data import serialization
from jaxrl.envs.base import OutageError
from jaxrl.runtime.distributed import gather, share
from jaxrl.runtime.preemption import Interrupted
from jaxrl.sampling.interfaces import RolloutFunction, Sampling
from jaxrl.types import Draw, Group


def shared(
    rollout: RolloutFunction, restored: Callable[[list[Group]], list[Group]] = list
) -> RolloutFunction:
    """The rollout of all processes: each samples whole groups of its share of the tasks.

    Every process gets the trajectories of all, in task order; if one is interrupted, or finds what
    the environment asks out of reach, all are.

    Args:
        rollout: of one process.
        restored: puts into groups what does not travel, as images.
    """

    def everywhere(
        draws: Sequence[Draw], sampling: Sampling, **settings: Any
    ) -> Sequence[Group | None]:
        if jax.process_count() == 1:
            return rollout(draws, sampling, **settings)
        if sampling.unfinished:  # a task goes on where it was, but shares may be other ones then
            raise ValueError(
                f"config.filter.unfinished_tasks is {sampling.unfinished}, and the job has "
                f"{jax.process_count()} processes; expected 0, or one process."
            )
        mine = share(len(draws))
        own: Any = None
        try:
            sampled = rollout(draws[mine], sampling, **settings)
            own = serialization.groups_to_json(filter(None, sampled))  # none is unfinished
        except Interrupted:
            own = None
        except OutageError as error:
            own = str(error)
        parts = gather(own)
        outage = next((part for part in parts if isinstance(part, str)), None)
        if outage is not None:
            raise OutageError(outage)
        if any(part is None for part in parts):
            raise Interrupted("a rollout was asked to stop")
        return restored(
            [group for part in parts for group in serialization.groups_from_json(part or ())]
        )

    return everywhere

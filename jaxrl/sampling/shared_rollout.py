"""Rollouts split across the processes of a job."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxrl.data import serialization
from jaxrl.envs.base import OutageError
from jaxrl.runtime.distributed import gather, get_local_slice
from jaxrl.runtime.preemption import Interrupted
from jaxrl.sampling.interfaces import RolloutFunction, SamplingConfig
from jaxrl.types import Draw, Group


@dataclass(frozen=True)
class SharedRollout:
    """Rollout in which each process samples complete groups for its share of the tasks.

    Every process receives all trajectories, in task order. If one process is interrupted or loses
    its environment, all of them stop.

    Attributes:
        local: Rollout of this process.
        restore: Function that restores data that processes do not exchange, such as images.
    """

    local: RolloutFunction
    restore: Callable[[list[Group]], list[Group]] = list

    def __call__(
        self, draws: Sequence[Draw], sampling: SamplingConfig, **options: Any
    ) -> Sequence[Group | None]:
        """Sample a group for each draw; takes the arguments of `Rollout`."""
        if jax.process_count() == 1:
            return self.local(draws, sampling, **options)
        if sampling.max_unfinished:  # a task resumes in its process, but the shares may change
            raise ValueError(
                f"config.filter.unfinished_tasks is {sampling.max_unfinished}, and the job has "
                f"{jax.process_count()} processes; expected 0, or one process."
            )
        payload: Any = None
        try:
            sampled = self.local(draws[get_local_slice(len(draws))], sampling, **options)
            payload = serialization.serialize_groups(filter(None, sampled))
        except Interrupted:
            payload = None
        except OutageError as error:
            payload = str(error)
        parts = gather(payload)
        outage = next((part for part in parts if isinstance(part, str)), None)
        if outage is not None:
            raise OutageError(outage)
        if any(part is None for part in parts):
            raise Interrupted("a rollout was asked to stop")
        return self.restore([g for part in parts for g in serialization.deserialize_groups(part)])

"""Collection of the groups of each training step, in that step or during the previous one."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxrl.data.stream import FixedStream, Stream
from jaxrl.envs.base import Task
from jaxrl.logs.steps import compute_engine_metrics, compute_wait_metrics
from jaxrl.runtime import distributed
from jaxrl.runtime.preemption import Interrupted
from jaxrl.sampling.interfaces import SamplingConfig, Seeds
from jaxrl.training.collect import (
    FATAL_ERRORS,
    CollectedGroups,
    DivergenceFn,
    StepSampler,
    collect,
)
from jaxrl.training.controllers import Controllers
from jaxrl.training.method import Method
from jaxrl.training.run_state import Progress, RunState
from jaxrl.training.settings import STAGES
from jaxrl.training.usage import UsageStats


@dataclass(kw_only=True)
class Collector:
    """Group collector that samples each step's groups at the start of the step or one step ahead.

    Prefetched groups use the weights from before the current step's update, and the controllers
    that `update_controllers` returned in the current step. They use the old stage gate, because the
    evaluation that updates it comes later.
    """

    run_state: RunState
    stream: Stream[Task]
    add_divergences: DivergenceFn
    failure: Exception | None = None  # error during a prefetch; `collect_groups` raises it
    has_warned: bool = False  # True after the warning about idle devices

    def collect_groups(self, policy_version: int) -> CollectedGroups:
        """Return the groups of the current step, prefetched if available, else newly sampled."""
        run_state, progress = self.run_state, self.run_state.progress
        if self.failure is not None:
            raise self.failure
        collected = progress.prefetched
        if collected is None:
            collected = self._collect(progress, policy_version, run_state.should_stop)
        elif distributed.any_process(run_state.should_stop()):
            # Without a rollout here, nothing else checks for a stop request.
            raise Interrupted("the run was asked to stop between two steps")
        return collected

    def sample(
        self, tasks: Sequence[Task], *, first_index: int, group_size: int, policy_version: int
    ) -> CollectedGroups:
        """Sample a group for each of `tasks` in the current step, without a filter.

        `first_index` is the stream index of the first task. The samples' seeds depend on it.
        """
        method, progress = self.run_state.components.method, self.run_state.progress
        no_filter = dataclasses.replace(
            method.filter, group_filter=None, tasks_per_batch=0, max_batches=0, unfinished_tasks=0
        )
        method = dataclasses.replace(
            method, filter=no_filter, tasks_per_step=len(tasks), group_size=group_size
        )
        progress = dataclasses.replace(
            progress,
            items_taken=first_index,
            buffered_groups=[],
            in_flight_tasks=[],
            controllers=dataclasses.replace(progress.controllers, skipped=None),
        )
        return self._collect(
            progress,
            policy_version,
            self.run_state.should_stop,
            method,
            FixedStream(tasks, first_index),
        )

    def prefetch(
        self, collected: CollectedGroups, controllers: Controllers, policy_version: int
    ) -> CollectedGroups | None:
        """Collect the next step's groups; return None if that step must collect them itself.

        Stop requests are deferred until this returns, because the checkpoint does not contain the
        weights used for this rollout.

        Args:
            collected: Groups of the current step.
            controllers: Controllers that `update_controllers` returned in the current step.
            policy_version: Number of optimizer steps taken to reach the engine's weights.
        """
        if not self.should_prefetch:
            return None
        progress = dataclasses.replace(
            self.run_state.progress,
            step=self.run_state.progress.step + 1,
            items_taken=collected.num_tasks_taken,
            buffered_groups=collected.buffered_groups,
            in_flight_tasks=collected.in_flight_tasks,
            controllers=controllers,
        )
        try:
            return self._collect(progress, policy_version, lambda: False)
        except FATAL_ERRORS as error:
            self.failure = error  # raised once the current step is done and saved
            return None

    @property
    def should_prefetch(self) -> bool:
        """Return True if the next step's groups are collected during the current step."""
        components, stage_step = self.run_state.components, self.run_state.progress.stage_step
        is_async = bool(components.method.async_level)
        return is_async and stage_step + 1 < components.num_steps["train"]

    def _collect(
        self,
        progress: Progress,
        policy_version: int,
        should_stop: Callable[[], bool],
        method: Method | None = None,
        stream: Stream[Task] | FixedStream[Task] | None = None,
    ) -> CollectedGroups:
        """Collect a step's groups and metrics, starting from `progress`.

        `method` and `stream` replace the run's method and stream.
        """
        run_state, engine = self.run_state, self.run_state.components.engine
        method, stream = method or run_state.components.method, stream or self.stream
        started = time.perf_counter()
        before = dataclasses.replace(engine.counts)
        engine.wait_s.clear()
        pending_usage = run_state.pending_usage  # usage of the current step, if this is a prefetch
        sampler = make_sampler(
            run_state,
            method,
            progress.step,
            policy_version,
            should_stop,
            max_unfinished=method.filter.unfinished_tasks,
        )
        try:
            collected = collect(
                sampler,
                stream,
                method,
                num_tasks_taken=progress.items_taken,
                buffered_groups=progress.buffered_groups,
                in_flight_tasks=progress.in_flight_tasks,
                controllers=progress.controllers,
                add_divergences=self.add_divergences,
                failures=run_state.failures,
            )
        except (*FATAL_ERRORS, Interrupted):
            run_state.add_discarded_cost(sampler.usage)
            run_state.pending_usage = pending_usage
            raise
        metrics = (
            collected.metrics
            | compute_engine_metrics(engine, before)
            | compute_wait_metrics(engine)
        )
        self._warn_if_idle(metrics["timing_s/wait_lag"], time.perf_counter() - started)
        metrics |= stream.compute_metrics(collected.num_tasks_taken)
        engine.clear()  # each collection starts with an empty cache
        return dataclasses.replace(collected, metrics=metrics)

    def _warn_if_idle(self, idle_s: float, sampling_s: float) -> None:
        """Warn once if a fixed lag leaves devices idle for 10% of the sampling time and for 1 s."""
        if self.has_warned or idle_s < max(1.0, 0.1 * sampling_s):
            return
        self.has_warned = True
        self.run_state.display.log(
            f"warning: the devices were idle for {idle_s:.1f} of {sampling_s:.1f} s of sampling, "
            "because observations enter after a fixed number of chunks; set "
            "config.rollout.deterministic=False, or raise config.rollout.observation_lag_chunks"
        )


def make_sampler(
    run_state: RunState,
    method: Method,
    step: int,
    policy_version: int,
    should_stop: Callable[[], bool],
    max_unfinished: int = 0,
) -> StepSampler:
    """Return the sampler for a training step, which adds its usage to `run_state.pending_usage`.

    Args:
        run_state: State of the run.
        method: Training method.
        step: Global step, counted across all stages; part of the sampling seeds.
        policy_version: Number of optimizer steps taken to reach the engine's weights.
        should_stop: Function that returns True to interrupt the rollout.
        max_unfinished: Maximum number of groups that may be left for a later step to finish.
    """
    pending_usage = run_state.pending_usage
    sampling = SamplingConfig(
        group_size=method.group_size,
        temperature=method.temperature,
        top_p=method.top_p,
        seeds=Seeds(
            seed=run_state.settings.seed,
            # Sample differently after each rollback to an earlier checkpoint (`watch.action`).
            stage=STAGES.index("train") + len(STAGES) * run_state.progress.watched.num_roll_backs,
            step=step,
        ),
        policy_version=policy_version,
        keeps_arrays=method.replays,
        max_unfinished=max_unfinished,
    )

    def report_usage(usage: UsageStats) -> None:
        run_state.pending_usage = pending_usage + usage

    return StepSampler(
        rollout=run_state.components.rollout,
        sampling=sampling,
        should_stop=should_stop,
        progress=run_state.display.make_progress_callback("trajectories"),
        check_budget=run_state.check_budget,
        on_usage=report_usage,
        prices=run_state.settings.ledger.prices,
    )

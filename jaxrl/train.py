"""RL training loop: each step from tasks to metrics, in one function."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxrl.data.stream import Stream
from jaxrl.envs.base import Task
from jaxrl.logs.metrics import num_unscored_suites, plain_number, rollout_metrics
from jaxrl.logs.steps import (
    SHOWN,
    Clock,
    engine_metrics,
    kl_metrics,
    lag_metrics,
    memory_metrics,
    merge,
    packing_metrics,
    sample_fields,
    wait_metrics,
    window_metrics,
)
from jaxrl.runtime import distributed
from jaxrl.runtime.compilation import stopped_by
from jaxrl.runtime.preemption import Interrupted, update_best
from jaxrl.runtime.sharding import abstract, num_batch_shards
from jaxrl.sampling.interfaces import Sampling, Seeds
from jaxrl.training import rewards
from jaxrl.training.collect import (
    ENDING,
    Collected,
    Measure,
    StepSampler,
    collect,
    some_failed,
)
from jaxrl.training.controllers import Controllers, advance, advance_gate
from jaxrl.training.estimators import Estimator
from jaxrl.training.failures import has_learned, why_nothing
from jaxrl.training.method import is_measured
from jaxrl.training.minibatches import make_minibatches, shard_minibatches, trained_share
from jaxrl.training.reference_kl import make_kl_fn
from jaxrl.training.run_state import Progress, RunState
from jaxrl.training.settings import STAGES, Settings
from jaxrl.training.update import ScoreStep
from jaxrl.training.usage import UsageStats
from jaxrl.training.watch import (
    ACTIONS,
    RollBack,
    UnsoundError,
    action_on,
    check_step,
    rollback_target,
)
from jaxrl.types import Draw, Group, Params, TrainState, Trajectory, members


def train(run_state: RunState, params: Params) -> Params:
    """Run the RL stage and return the trained parameters."""
    components, progress = run_state.components, run_state.progress
    stage, method = components.stages["train"], components.method
    patience = run_state.settings.evaluation.patience
    if not run_state.begin("train"):
        run_state.note_steps_beyond(stage.num_steps)
        return params
    # Restore the reference and the training state, or create them.
    is_resumed = progress.stage_step > 0
    ref_params = run_state.ref_params = run_state.start_reference(params)
    state = run_state.state = run_state.start_state(params)
    score = ScoreStep(components.model, temperature=method.temperature)
    estimate = Estimator(method.advantage, method.seed)
    stream = Stream(components.tasks, seed=run_state.settings.seed)
    num_shards = num_batch_shards(components.mesh)
    divergences = make_kl_fn(score, components.mesh, stage.shape, method)

    def measure(groups: Sequence[Group]) -> list[Group]:
        """Add divergences to groups if the method uses them."""
        if not is_measured(method.kl):
            return list(groups)
        assert run_state.state is not None
        assert ref_params is not None
        components.engine.clear()  # scoring needs the cache's memory for activations
        return divergences(groups, run_state.state.params, ref_params)

    # Prepare the sampler. Per-token notes (log.tokens) are optional.
    take_notes = run_state.make_notes and run_state.make_notes(score, stage.shape, method)
    collector = Collector(run_state=run_state, stream=stream, measure=measure)
    run_state.compile_sampler()
    # A signal may abort a compilation here: no state changes before a step's first update.
    with stopped_by(run_state.should_stop):
        components.engine.set_weights(components.model.whole(state.params))
    # Evaluate first, or finish what the checkpoint left open.
    if not is_resumed:
        begin_training(run_state)
    elif count := len(progress.in_flight_tasks):
        run_state.display.log(
            f"train: {count} task{'s' * (count > 1)} were in flight when the run stopped; their "
            "episodes start again"
        )
    run_state.display.start("train", progress.stage_step, stage.num_steps)
    if progress.record is not None:
        finish_step(run_state)  # the run was stopped during this step's evaluation

    while progress.stage_step < stage.num_steps and not progress.is_out_of_patience(patience):
        run_state.check_budget()
        clock, policy_version = Clock(), int(state.num_updates)
        # Sample tasks, roll them out, shape rewards (training/rewards.py) and drop groups without
        # a learning signal (objectives/filters.py, selected by filter.name).
        with clock.sampling():
            collected = collector.take(policy_version)
        # Measure the divergence from the reference, advance the controllers, adjust rewards.
        with stopped_by(run_state.should_stop):
            groups = measure(collected.groups)
        moved, groups = advance(
            progress.controllers, groups, collected.sampled_stats, method, components.is_trigger
        )
        # The KL state lags one step: otherwise a step's divergence would set its own penalty.
        used = dataclasses.replace(moved, kl=progress.controllers.kl)
        groups = rewards.charge_kl(groups, used, method)
        groups = rewards.pay_entropy(groups, used, method.shaping)
        # Estimate an advantage for each trajectory or turn (objectives/advantages.py, selected by
        # advantage.name), then pack mini-batches with token weights and old and reference
        # log-probabilities.
        groups = estimate(groups, progress.step, progress.stage_step)
        minibatches = make_minibatches(
            groups, stage.shape, method, controllers=used, num_shards=num_shards
        )
        with stopped_by(run_state.should_stop):
            batches = shard_minibatches(
                minibatches, components.mesh, score, state.params, ref_params, method
            )
            noted = take_notes(groups, used, state.params, ref_params) if take_notes else None
        # Update. Without any learning signal the optimizer still steps, with a zero gradient.
        update_metrics: list[dict[str, Any]] = []
        scale = progress.watched.lr_scale
        # None, not 1.0: the compiled program then has no scale factor and rounds the same as a run
        # without a watch.
        lr_scale = None if scale == 1 else scale
        run_state.display.activity(
            f"update, {len(batches) * stage.settings.num_epochs} mini-batches"
        )
        for _ in range(stage.settings.num_epochs):
            for packed, batch in zip(minibatches, batches, strict=True):
                if packed.num_counted:  # skip mini-batches that hold only environment errors
                    # A stop may abort only the first update's compilation, before anything has
                    # changed. After that the old state is donated.
                    may_end = run_state.should_stop if not update_metrics else lambda: False
                    with stopped_by(may_end):
                        state, metrics = stage.update(state, batch, packed, lr_scale)
                    update_metrics.append(metrics)
        run_state.state = state
        # Updates are dispatched asynchronously. While the devices work, collect the groups of the
        # next step (rollout.async_level).
        with clock.sampling():
            pending = collector.prefetch(collected, moved, policy_version)
        update_metrics = jax.device_get(update_metrics)
        components.engine.set_weights(components.model.whole(state.params))
        clock.updated()
        # Advance the progress, then assemble the step's metrics.
        progress.controllers, progress.buffered_groups = moved, collected.buffered_groups
        progress.in_flight_tasks = collected.in_flight_tasks
        progress.prefetched, progress.ledger = pending, progress.ledger + collected.ledger
        run_state.uncounted = UsageStats()
        progress.step, progress.stage_step = progress.step + 1, progress.stage_step + 1
        progress.items_taken, progress.value = collected.num_tasks_taken, None
        progress.num_learned += has_learned(update_metrics) and stage.settings.lr > 0
        trajectories = members(groups)
        failed = some_failed(collected.sampled_stats, method.group_size)
        reasons = [why for why in (why_nothing(trajectories, update_metrics), failed) if why]
        if reasons:
            run_state.display.log(f"warning: train {progress.stage_step}: {'; '.join(reasons)}")
        progress.record = {
            **rollout_metrics(
                trajectories,
                run_state.settings.max_response_tokens,
                has_python=run_state.settings.evaluation.has_python,
            ),
            **merge(update_metrics),
            **collected.metrics,
            **(kl_metrics(groups, used, method.kl) if is_measured(method.kl) else {}),
            **window_metrics(groups, used),
            "actor/num_updates": int(state.num_updates),
            "actor/num_skipped": int(state.num_skipped),
            "actor/num_learned": progress.num_learned,
            "actor/lr": scale * stage.newest_rate(state),
            "rollout/tasks_taken": progress.items_taken,
            "rollout/informative_share": float(np.mean([t.has_signal for t in trajectories])),
            **trained_share(trajectories, method.filter),
            **clock.metrics(trajectories),
            **memory_metrics(),
            **packing_metrics(minibatches),
            **estimate.metrics(progress.stage_step - 1),
            **(lag_metrics(trajectories, policy_version) if method.has_lag else {}),
            **({"actor/lr_scale": scale} if scale != 1 else {}),
            "perf/num_compilations/sampler": components.engine.num_compilations,
            "perf/num_compilations/update": stage.update.num_programs,
        }
        if method.watch is not None:
            # Look for signs of collapse (watch.name). `finish_step` acts on them after the step is
            # recorded.
            progress.watched, marks = check_step(
                method, progress.watched, progress.record, groups, progress.stage_step
            )
            progress.record |= marks
        fields = sample_fields(groups, moved)
        if noted:  # scores on the devices, so every process must call it
            fields = [a | b for a, b in zip(fields, noted(state.params), strict=True)]
        log_trajectories(run_state, trajectories, fields)
        finish_step(run_state)
    progress.discard_prefetched()  # groups remain if the stage ends early
    if progress.stage_step < stage.num_steps:
        state = take_best(run_state, state)
    return run_state.end(state)


@dataclass(kw_only=True)
class Collector:
    """Collector of a step's groups, at its start or one step ahead.

    Prefetched groups are sampled with the weights from before the current step's update, and with
    its controllers after `advance`. The stage gate moves later, at that step's evaluation, so
    prefetched groups still see the old gate.
    """

    run_state: RunState
    stream: Stream[Task]
    measure: Measure
    failure: Exception | None = None  # raised by a prefetch; the next `take` raises it again
    has_warned: bool = False  # True after the warning about idle devices

    def take(self, policy_version: int) -> Collected:
        """Return the groups for the current step, prefetched or sampled now."""
        run_state, progress = self.run_state, self.run_state.progress
        if self.failure is not None:
            raise self.failure
        collected = progress.prefetched
        if collected is None:
            collected = self._collect(progress, policy_version, run_state.should_stop)
        elif distributed.any_process(run_state.should_stop()):
            # Without a rollout here, nothing else checks for a stop request.
            raise Interrupted("the run was asked to stop between two steps")
        if not self._looks_ahead:
            run_state.components.engine.release()  # the update needs its memory
        return collected

    def prefetch(
        self, collected: Collected, controllers: Controllers, policy_version: int
    ) -> Collected | None:
        """Collect the next step's groups; return None if that step must collect them itself.

        Stop requests wait until this returns, because the checkpoint does not contain the weights
        that sample here.

        Args:
            collected: Groups of the current step.
            controllers: Controllers after `advance` in the current step.
            policy_version: Number of optimizer steps that the engine's weights have seen.
        """
        if not self._looks_ahead:
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
        except ENDING as error:
            self.failure = error  # raised once the current step is done and saved
            return None

    @property
    def _looks_ahead(self) -> bool:
        """True if the next step's groups are collected during the current one."""
        components, stage_step = self.run_state.components, self.run_state.progress.stage_step
        is_ahead = bool(components.method.ahead)
        return is_ahead and stage_step + 1 < components.num_steps["train"]

    def _collect(
        self,
        progress: Progress,
        policy_version: int,
        should_stop: Callable[[], bool],
    ) -> Collected:
        """Collect a step's groups and metrics, starting from `progress`."""
        run_state, engine = self.run_state, self.run_state.components.engine
        started = time.perf_counter()
        before = dataclasses.replace(engine.counts)
        engine.waits.clear()
        uncounted = run_state.uncounted  # usage of the current step, if this is a prefetch
        sampler = make_sampler(
            run_state,
            progress.step,
            policy_version,
            should_stop,
            unfinished=run_state.components.method.filter.unfinished_tasks,
        )
        try:
            collected = collect(
                sampler,
                self.stream,
                run_state.components.method,
                num_tasks_taken=progress.items_taken,
                buffered_groups=progress.buffered_groups,
                in_flight_tasks=progress.in_flight_tasks,
                controllers=progress.controllers,
                measure=self.measure,
                failures=run_state.failures,
            )
        except (*ENDING, Interrupted):
            run_state.count_lost(sampler.usage)
            run_state.uncounted = uncounted
            raise
        metrics = collected.metrics | engine_metrics(engine, before) | wait_metrics(engine)
        self._warn_of_idling(metrics["timing_s/wait_lag"], time.perf_counter() - started)
        metrics |= self.stream.metrics(collected.num_tasks_taken)
        engine.clear()  # each collection counts its pages from an empty cache
        return dataclasses.replace(collected, metrics=metrics)

    def _warn_of_idling(self, idle_s: float, sampling_s: float) -> None:
        """Warn once if a fixed lag idles the devices for 10% of sampling, and at least 1 s."""
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
    step: int,
    policy_version: int,
    should_stop: Callable[[], bool],
    unfinished: int = 0,
) -> StepSampler:
    """Return the sampler of one training step. It adds its usage to `run_state.uncounted`.

    Args:
        run_state: State of the run.
        step: Step over all stages, part of the sampling seeds.
        policy_version: Number of optimizer steps that the engine's weights have seen.
        should_stop: Returns True once the rollout is to be interrupted.
        unfinished: Number of groups that may resume in a later step.
    """
    method, uncounted = run_state.components.method, run_state.uncounted
    sampling = Sampling(
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
        unfinished=unfinished,
    )

    def count(usage: UsageStats) -> None:
        run_state.uncounted = uncounted + usage

    return StepSampler(
        rollout=run_state.components.rollout,
        sampling=sampling,
        should_stop=should_stop,
        progress=run_state.display.counter("trajectories"),
        check_budget=run_state.check_budget,
        on_usage=count,
        prices=run_state.settings.ledger.prices,
    )


def begin_training(run_state: RunState) -> None:
    """Evaluate the initial policy and set up the controllers."""
    progress = run_state.progress
    evaluated = run_state.evaluate(run_state.settings.evaluation.suites)
    best_metric(run_state.settings, evaluated)  # raises now if the metric is missing
    update_gate(run_state, evaluated)
    bootstrap(run_state)
    metrics = evaluated | progress.controllers.metrics() | progress.ledger.metrics()
    run_state.metrics_log.write(progress.step, "train", metrics)


def bootstrap(run_state: RunState) -> None:
    """Roll out tasks once to set thresholds, difficulties and targets before the first step.

    Uses the first tasks of the file, with seeds that no step uses.
    """
    components, method = run_state.components, run_state.components.method
    count = method.shaping.bootstrap_tasks
    tasks = components.tasks[: count if count >= 0 else None]
    if not tasks:
        return
    run_state.display.log(f"train: one pass over {len(tasks)} tasks sets up the controllers")
    sampler = make_sampler(run_state, BOOTSTRAP_STEP, 0, run_state.should_stop)
    groups: list[Group] = []
    size = method.tasks_per_step
    for start in range(0, len(tasks), size):
        draws = [
            Draw(task=task, stream_index=start + i)
            for i, task in enumerate(tasks[start : start + size])
        ]
        sampled = sampler.sample(draws)
        run_state.failures.count(members(sampled))
        groups += sampled
    run_state.progress.ledger += sampler.usage
    run_state.uncounted = UsageStats()
    controllers, _ = advance(
        run_state.progress.controllers, groups, (), method, components.is_trigger
    )
    run_state.progress.controllers = controllers


BOOTSTRAP_STEP = 2**31 - 1
"""Step number in the sampling seeds of `bootstrap`; never a real step."""


def update_gate(run_state: RunState, evaluated: Mapping[str, float]) -> None:
    """Advance the method's stage gate, if any, by the accuracy of greedy answers."""
    if not evaluated:
        return
    part = run_state.settings.evaluation.correct
    head = "val-core/all/exact_match" if part == "exact_match" else f"val-aux/all/{part}"
    # If every search failed, nothing was scored and the metric is missing.
    correctness = evaluated.get(f"{head}/greedy", math.nan)
    progress = run_state.progress
    progress.controllers = advance_gate(
        progress.controllers, correctness, run_state.components.method.shaping
    )


def finish_step(run_state: RunState) -> None:
    """Finish a step: evaluate and save a checkpoint if due, and write the record."""
    # Evaluate if due. Greedy accuracy moves the stage gate.
    progress, is_last = run_state.progress, run_state.is_last_step
    settings = run_state.settings.evaluation
    every, evaluated = settings.every_steps, dict[str, float]()
    if is_last or (every and progress.stage_step % every == 0):
        evaluated = run_state.evaluate(settings.suites)
    update_gate(run_state, evaluated)
    # Complete the record. A checkpoint without one needs no further evaluation.
    assert progress.record is not None
    record = progress.record | evaluated | progress.controllers.metrics()
    record |= progress.ledger.metrics()
    progress.record = None
    show_step(run_state, record)
    # Compare with the best step so far.
    progress.value = best_metric(run_state.settings, evaluated)
    is_best = False
    if progress.value is not None:
        progress.best = update_best(
            progress.best, progress.step, progress.value, min_delta=settings.min_delta
        )
        is_best = progress.best.step == progress.step
    is_early = not is_last and progress.is_out_of_patience(settings.patience)
    mark = {"stopped_early": 1} if is_early else {}
    run_state.metrics_log.write(progress.step, "train", record | mark)
    act_on_signs(run_state)
    # `RunState.end` saves the last step. If patience ran out, the stage ends with the best
    # checkpoint, so this step is saved only if it is the best.
    if not is_last and (is_best or (run_state.is_checkpoint_due and not is_early)):
        run_state.save()


def act_on_signs(run_state: RunState) -> None:
    """Report the step's signs of collapse and apply `watch.action`.

    Raises:
        RollBack: The action is to restore an earlier checkpoint.
        UnsoundError: The action is to stop.
    """
    progress, watch = run_state.progress, run_state.components.method.watch
    signs = progress.watched.acting
    if watch is None or not signs:
        return
    for sign in signs:
        run_state.display.log(
            f"warning: train {progress.stage_step}: {sign['name']}: {sign['text']}"
        )
        run_state.metrics_log.mark(
            progress.step, "train", {**sign, "action": action_on(sign, watch)}
        )
    # The most severe action wins; ties go to the sign with the earliest last sound step.
    worst = max(signs, key=lambda s: (ACTIONS.index(action_on(s, watch)), -s["since"]))
    action = action_on(worst, watch)
    # Clear the signs first, so that a saved or resumed run does not act on them again.
    scale = progress.watched.lr_scale * watch.lr_factor
    progress.watched = dataclasses.replace(progress.watched, acting=())
    if action == "stop":
        raise UnsoundError(
            f"config.watch.action ends the run at train step {progress.stage_step}, which is "
            f"saved: {worst['name']}: {worst['text']} The same command resumes there."
        )
    if action == "lower_lr":
        progress.watched = dataclasses.replace(progress.watched, lr_scale=scale)
        run_state.display.log(
            f"train {progress.stage_step}: the learning rate is scaled by {scale:g} from now on"
        )
    if action == "roll_back":
        begun = progress.step - progress.stage_step  # number of steps in earlier stages
        steps = [s - begun for s in run_state.checkpointer.values() if begun <= s < progress.step]
        goal = begun + rollback_target(worst, watch, progress.watched, steps)
        raise RollBack(sign=worst["name"], from_step=progress.step, to_step=goal, lr_scale=scale)


def show_step(run_state: RunState, record: Mapping[str, Any]) -> None:
    """Show the main metrics of a step on the display."""
    numbers = {name: plain_number(record.get(key)) for name, key in SHOWN.items()}
    if not run_state.settings.ledger.prices:
        numbers.pop("spent")
    shown = {name: number for name, number in numbers.items() if number is not None}
    run_state.display.step(run_state.progress.stage_step, shown)


def best_metric(settings: Settings, evaluated: Mapping[str, float]) -> float | None:
    """Return the value of `eval.best_metric`; None if nothing was evaluated or scored.

    Raises:
        ValueError: The evaluation has no metric of that name.
    """
    if settings.checkpoint.keep_best == 0 or not evaluated:
        return None
    name = settings.evaluation.best_metric
    if name not in evaluated and num_unscored_suites(evaluated):
        return None  # every episode of a suite failed, so its metrics are missing
    if name not in evaluated:
        raise ValueError(
            f"config.eval.best_metric is {name!r}; expected one of the metrics of "
            f"config.eval.suites: {', '.join(evaluated)}."
        )
    return float(evaluated[name]) if math.isfinite(evaluated[name]) else None


def take_best(run_state: RunState, state: TrainState) -> TrainState:
    """Free the last state and return the best checkpoint's."""
    settings, progress = run_state.settings.evaluation, run_state.progress
    wanted = abstract(state, jax.tree.map(lambda leaf: leaf.sharding, state))
    run_state.checkpointer.wait()
    run_state.components.engine.release()
    run_state.state = None
    jax.tree.map(lambda leaf: leaf.delete(), state)  # the device has no room for two
    step, best = run_state.checkpointer.restore_best(wanted)
    progress.stopped_early, progress.weights_step = True, step
    progress.value = progress.best.value
    run_state.display.log(
        f"train {progress.stage_step}: {settings.best_metric} did not improve by more than "
        f"{settings.min_delta} in {settings.patience} evaluations; ending with the "
        f"checkpoint of step {step}, the best"
    )
    return best


def log_trajectories(
    run_state: RunState, trajectories: Sequence[Trajectory], fields: Sequence[Mapping[str, Any]]
) -> None:
    """Write the step's first trajectories to its file, up to the configured number."""
    if not distributed.is_main():
        return
    count = run_state.settings.trajectories
    count = len(trajectories) if count < 0 else count
    kept = trajectories[:count], fields[:count]
    run_state.write_samples(run_state.workdir, run_state.progress.step, *kept)

"""The reinforcement-learning loop, alone, top to bottom: each step from tasks to metrics."""

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
    """Reinforcement learning; returns the trained parameters."""
    components, progress = run_state.components, run_state.progress
    stage, method = components.stages["train"], components.method
    patience = run_state.settings.evaluation.patience
    if not run_state.begin("train"):
        run_state.note_steps_beyond(stage.num_steps)
        return params
    is_resumed = progress.stage_step > 0
    ref_params = run_state.ref_params = run_state.start_reference(params)
    state = run_state.state = run_state.start_state(params)
    score = ScoreStep(components.model, temperature=method.temperature)
    estimate = Estimator(method.advantage, method.seed)
    stream = Stream(components.tasks, seed=run_state.settings.seed)
    num_shards = num_batch_shards(components.mesh)
    divergences = make_kl_fn(score, components.mesh, stage.shape, method)

    def measure(groups: Sequence[Group]) -> list[Group]:
        """Adds divergences to groups, where the method has a use for them."""
        if not is_measured(method.kl):
            return list(groups)
        assert run_state.state is not None
        assert ref_params is not None
        components.engine.clear()  # the cache would lie beside the activations that scoring takes
        return divergences(groups, run_state.state.params, ref_params)

    take_notes = run_state.make_notes and run_state.make_notes(score, stage.shape, method)
    collector = Collector(run_state=run_state, stream=stream, measure=measure)
    run_state.compile_sampler()
    # A signal may break off a compilation within: nothing has changed until a step's first update.
    with stopped_by(run_state.should_stop):
        components.engine.set_weights(components.model.whole(state.params))
    if not is_resumed:
        begin_training(run_state)
    elif count := len(progress.in_flight_tasks):
        run_state.display.log(
            f"train: {count} task{'s' * (count > 1)} were under way when the run stopped; their "
            "episodes are played anew"
        )
    run_state.display.start("train", progress.stage_step, stage.num_steps)
    if progress.record is not None:
        finish_step(run_state)  # the run was stopped while it evaluated

    while progress.stage_step < stage.num_steps and not progress.is_out_of_patience(patience):
        run_state.check_budget()
        clock, policy_version = Clock(), int(state.num_updates)
        # Draw tasks, roll them out, shape rewards (training/rewards.py), keep the groups that
        # teach (objectives/filters.py, by filter.name).
        with clock.sampling():
            collected = collector.take(policy_version)
        # Measure the divergence from the reference, move the controllers, change rewards.
        with stopped_by(run_state.should_stop):
            groups = measure(collected.groups)
        moved, groups = advance(
            progress.controllers, groups, collected.sampled_stats, method, components.is_trigger
        )
        # This step uses the KL state from before it, and all other states as just advanced.
        used = dataclasses.replace(moved, kl=progress.controllers.kl)
        groups = rewards.charge_kl(groups, used, method)
        groups = rewards.pay_entropy(groups, used, method.shaping)
        # An advantage for each trajectory or turn (objectives/advantages.py, by advantage.name),
        # then mini-batches with a weight for each token, old and reference log-probabilities.
        groups = estimate(groups, progress.step, progress.stage_step)
        minibatches = make_minibatches(
            groups, stage.shape, method, controllers=used, num_shards=num_shards
        )
        with stopped_by(run_state.should_stop):
            batches = shard_minibatches(
                minibatches, components.mesh, score, state.params, ref_params, method
            )
            noted = take_notes(groups, used, state.params, ref_params) if take_notes else None
        # Update. If no trajectory has a signal, the optimizer still steps, with a gradient of zero.
        update_metrics: list[dict[str, Any]] = []
        scale = progress.watched.lr_scale
        # None, not 1.0: the compiled program then has no such factor and rounds as without a watch.
        lr_scale = None if scale == 1 else scale
        run_state.display.activity(
            f"update, {len(batches) * stage.settings.num_epochs} mini-batches"
        )
        for _ in range(stage.settings.num_epochs):
            for packed, batch in zip(minibatches, batches, strict=True):
                if packed.num_counted:  # else only environment errors: nothing to learn from
                    # A stop may interrupt the compilation of the step's first update, which has
                    # changed nothing yet. Later ones may not be: the old state is donated by then.
                    may_end = run_state.should_stop if not update_metrics else lambda: False
                    with stopped_by(may_end):
                        state, metrics = stage.update(state, batch, packed, lr_scale)
                    update_metrics.append(metrics)
        run_state.state = state
        # Nothing above has waited for the devices. While they work, collect the groups of the next
        # step (rollout.async_level).
        with clock.sampling():
            pending = collector.prefetch(collected, moved, policy_version)
        update_metrics = jax.device_get(update_metrics)
        components.engine.set_weights(components.model.whole(state.params))
        clock.updated()
        # Where the run stands now, and what the step was like.
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
            # Signs of collapse, by watch.name; acted on once the step is recorded.
            progress.watched, marks = check_step(
                method, progress.watched, progress.record, groups, progress.stage_step
            )
            progress.record |= marks
        fields = sample_fields(groups, moved)
        if noted:  # scores on the devices, so every process takes part
            fields = [a | b for a, b in zip(fields, noted(state.params), strict=True)]
        log_trajectories(run_state, trajectories, fields)
        finish_step(run_state)
    progress.discard_prefetched()  # where the stage ends early
    if progress.stage_step < stage.num_steps:
        state = take_best(run_state, state)
    return run_state.end(state)


@dataclass(kw_only=True)
class Collector:
    """Collect the groups of a step, at its start or, one step ahead, during the step before.

    Groups collected ahead are sampled with the weights from before the current step's update, and
    with its controllers after `advance`. The stage gate moves at that step's evaluation, after they
    are collected, so they still see the old gate.
    """

    run_state: RunState
    stream: Stream[Task]
    measure: Measure
    failure: Exception | None = None  # for which nothing could be collected ahead
    has_warned: bool = False  # of idle devices

    def take(self, policy_version: int) -> Collected:
        """Collects what the step that begins trains on."""
        run_state, progress = self.run_state, self.run_state.progress
        if self.failure is not None:
            raise self.failure
        collected = progress.prefetched
        if collected is None:
            collected = self._collect(progress, policy_version, run_state.should_stop)
        elif distributed.any_process(run_state.should_stop()):
            # Nothing is sampled here, where a rollout would notice the request.
            raise Interrupted("the run was asked to stop between two steps")
        if not self._looks_ahead:
            run_state.components.engine.release()  # its memory is the update's
        return collected

    def prefetch(
        self, collected: Collected, controllers: Controllers, policy_version: int
    ) -> Collected | None:
        """Collects what the next step trains on; None where that step must collect it itself.

        `controllers` are those after `advance` in the current step. A request to stop waits until
        this is done: the weights that sample here are not in the checkpoint.
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
            self.failure = error  # told once the step under way is done and saved
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
        """Collects the groups of a step from where the progress stands, with its metrics."""
        run_state, engine = self.run_state, self.run_state.components.engine
        started = time.perf_counter()
        before = dataclasses.replace(engine.counts)
        engine.waits.clear()
        uncounted = run_state.uncounted  # of the step during which this one's groups are collected
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
        engine.clear()  # each counts its pages from the first
        return dataclasses.replace(collected, metrics=metrics)

    def _warn_of_idling(self, idle_s: float, sampling_s: float) -> None:
        """Warn once if a fixed lag keeps the devices idle for a tenth of the sampling time.

        Less than a second is not worth a warning.
        """
        if self.has_warned or idle_s < max(1.0, 0.1 * sampling_s):
            return
        self.has_warned = True
        self.run_state.display.log(
            f"warning: the devices were idle for {idle_s:.1f} of {sampling_s:.1f} s of sampling, "
            "as replies of the environment enter after a fixed number of chunks; set "
            "config.rollout.deterministic=False, or raise config.rollout.observation_lag_chunks"
        )


def make_sampler(
    run_state: RunState,
    step: int,
    policy_version: int,
    should_stop: Callable[[], bool],
    unfinished: int = 0,
) -> StepSampler:
    """Return the sampler of one training step. What it uses is added to `run_state.uncounted`.

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
            # Other draws after each return to an earlier checkpoint (`watch.action`).
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
    """Evaluates the policy as it is, and sets up the controllers."""
    progress = run_state.progress
    evaluated = run_state.evaluate(run_state.settings.evaluation.suites)
    best_metric(run_state.settings, evaluated)  # refused now where it is missing
    update_gate(run_state, evaluated)
    bootstrap(run_state)
    metrics = evaluated | progress.controllers.metrics() | progress.ledger.metrics()
    run_state.metrics_log.write(progress.step, "train", metrics)


def bootstrap(run_state: RunState) -> None:
    """Rolls tasks out once, to set up thresholds, difficulties and targets before the first step.

    The tasks are the first ones in their file; they are sampled with seeds that no step uses.
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
"""Step number in the sampling seeds of `bootstrap`; no real step has it."""


def update_gate(run_state: RunState, evaluated: Mapping[str, float]) -> None:
    """Moves the stage gate, where the method has one, by how correct greedy answers are."""
    if not evaluated:
        return
    part = run_state.settings.evaluation.correct
    head = "val-core/all/exact_match" if part == "exact_match" else f"val-aux/all/{part}"
    # Where every search failed, nothing was scored and there is no such metric.
    correctness = evaluated.get(f"{head}/greedy", math.nan)
    progress = run_state.progress
    progress.controllers = advance_gate(
        progress.controllers, correctness, run_state.components.method.shaping
    )


def finish_step(run_state: RunState) -> None:
    """Ends a step: evaluates, writes the record and saves a checkpoint, each where it is due."""
    progress, is_last = run_state.progress, run_state.is_last_step
    settings = run_state.settings.evaluation
    every, evaluated = settings.every_steps, dict[str, float]()
    if is_last or (every and progress.stage_step % every == 0):
        evaluated = run_state.evaluate(settings.suites)
    update_gate(run_state, evaluated)
    assert progress.record is not None
    record = progress.record | evaluated | progress.controllers.metrics()
    record |= progress.ledger.metrics()
    progress.record = None
    show_step(run_state, record)
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
    # `RunState.end` saves the last step. A step at which patience ran out is saved only if it is
    # the best, since the stage then ends with the best checkpoint.
    if not is_last and (is_best or (run_state.is_checkpoint_due and not is_early)):
        run_state.save()


def act_on_signs(run_state: RunState) -> None:
    """Tells the signs of the step that was just recorded, and does what `watch.action` asks for.

    Raises:
        RollBack: the run is to go back to an earlier checkpoint.
        UnsoundError: it is to end.
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
    # Of those that ask for the same, the one whose last sound step is the earliest.
    worst = max(signs, key=lambda s: (ACTIONS.index(action_on(s, watch)), -s["since"]))
    action = action_on(worst, watch)
    scale = progress.watched.lr_scale * watch.lr_factor
    progress.watched = dataclasses.replace(progress.watched, acting=())
    if action == "stop":
        raise UnsoundError(
            f"config.watch.action ends the run at train step {progress.stage_step}, which is "
            f"saved: {worst['name']}: {worst['text']} The same command goes on from there."
        )
    if action == "lower_lr":
        progress.watched = dataclasses.replace(progress.watched, lr_scale=scale)
        run_state.display.log(
            f"train {progress.stage_step}: from here on with {scale:g} of the learning rate"
        )
    if action == "roll_back":
        begun = progress.step - progress.stage_step  # after the stages before
        steps = [s - begun for s in run_state.checkpointer.values() if begun <= s < progress.step]
        goal = begun + rollback_target(worst, watch, progress.watched, steps)
        raise RollBack(sign=worst["name"], from_step=progress.step, to_step=goal, lr_scale=scale)


def show_step(run_state: RunState, record: Mapping[str, Any]) -> None:
    """Shows the numbers of a step's record that a person follows."""
    numbers = {name: plain_number(record.get(key)) for name, key in SHOWN.items()}
    if not run_state.settings.ledger.prices:
        numbers.pop("spent")
    shown = {name: number for name, number in numbers.items() if number is not None}
    run_state.display.step(run_state.progress.stage_step, shown)


def best_metric(settings: Settings, evaluated: Mapping[str, float]) -> float | None:
    """The value that tells the best checkpoint; None where nothing was evaluated or scored.

    Raises:
        ValueError: the evaluation has no metric of that name.
    """
    if settings.checkpoint.keep_best == 0 or not evaluated:
        return None
    name = settings.evaluation.best_metric
    if name not in evaluated and num_unscored_suites(evaluated):
        return None  # where every episode failed there is no score by any name
    if name not in evaluated:
        raise ValueError(
            f"config.eval.best_metric is {name!r}; expected one of the metrics of "
            f"config.eval.suites: {', '.join(evaluated)}."
        )
    return float(evaluated[name]) if math.isfinite(evaluated[name]) else None


def take_best(run_state: RunState, state: TrainState) -> TrainState:
    """The state of the best checkpoint in place of the last one, which is freed."""
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
    """Writes the step's first trajectories to its file, as many as the configuration asks for."""
    if not distributed.is_main():
        return
    count = run_state.settings.trajectories
    count = len(trajectories) if count < 0 else count
    kept = trajectories[:count], fields[:count]
    run_state.write_samples(run_state.workdir, run_state.progress.step, *kept)

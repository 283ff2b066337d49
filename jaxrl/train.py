"""RL training loop: one function that runs each step, from sampling tasks to logging metrics."""

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
from jaxrl.logs.metrics import compute_rollout_metrics, count_unscored_suites, to_json_number
from jaxrl.logs.steps import (
    DISPLAYED_METRICS,
    StepTimer,
    collect_sample_fields,
    compute_engine_metrics,
    compute_kl_metrics,
    compute_lag_metrics,
    compute_memory_metrics,
    compute_packing_metrics,
    compute_wait_metrics,
    compute_window_metrics,
    merge_update_metrics,
)
from jaxrl.runtime import distributed
from jaxrl.runtime.compilation import interruptible
from jaxrl.runtime.preemption import Interrupted, update_best
from jaxrl.runtime.sharding import make_restore_target, num_batch_shards
from jaxrl.sampling.interfaces import SamplingConfig, Seeds
from jaxrl.training import rewards
from jaxrl.training.collect import (
    FATAL_ERRORS,
    CollectedGroups,
    DivergenceFn,
    StepSampler,
    collect,
    describe_failures,
)
from jaxrl.training.controllers import Controllers, update_controllers, update_stage_gate
from jaxrl.training.estimators import AdvantageEstimator
from jaxrl.training.failures import explain_no_learning, has_learned
from jaxrl.training.method import needs_divergences
from jaxrl.training.minibatches import (
    compute_trajectory_filter_metrics,
    make_minibatches,
    shard_minibatches,
)
from jaxrl.training.reference_kl import make_kl_fn
from jaxrl.training.run_state import Progress, RunState
from jaxrl.training.settings import STAGES, Settings
from jaxrl.training.update import ScoreStep
from jaxrl.training.usage import UsageStats
from jaxrl.training.watch import (
    ACTIONS,
    Rollback,
    UnsoundError,
    check_step,
    resolve_action,
    rollback_target,
)
from jaxrl.types import Draw, Group, Params, TrainState, Trajectory, flatten_groups


def train(run_state: RunState, params: Params) -> Params:
    """Run the RL stage and return the trained parameters."""
    components, progress = run_state.components, run_state.progress
    stage, method = components.stages["train"], components.method
    patience = run_state.settings.evaluation.patience
    if not run_state.begin_stage("train"):
        run_state.report_extra_steps(stage.num_steps)
        return params
    # Restore the reference and the training state, or create them.
    is_resumed = progress.stage_step > 0
    ref_params = run_state.ref_params = run_state.init_or_restore_reference(params)
    state = run_state.state = run_state.init_or_restore_state(params)
    score = ScoreStep(components.model, temperature=method.temperature)
    estimator = AdvantageEstimator(method.advantage, method.seed)
    stream = Stream(components.tasks, seed=run_state.settings.seed)
    num_shards = num_batch_shards(components.mesh)
    kl_fn = make_kl_fn(score, components.mesh, stage.shape, method)

    def add_divergences(groups: Sequence[Group]) -> list[Group]:
        """Add each trajectory's divergence from the reference, if the method uses it."""
        if not needs_divergences(method.kl):
            return list(groups)
        assert run_state.state is not None
        assert ref_params is not None
        components.engine.clear()  # scoring needs the cache's memory for activations
        return kl_fn(groups, run_state.state.params, ref_params)

    # Prepare the sampler. Per-token notes (log.tokens) are optional.
    token_logger = run_state.make_token_logger and run_state.make_token_logger(
        score, stage.shape, method
    )
    collector = Collector(run_state=run_state, stream=stream, add_divergences=add_divergences)
    run_state.compile_sampler()
    # A signal may abort a compilation here: no state changes before a step's first update.
    with interruptible(run_state.should_stop):
        components.engine.set_weights(components.model.merge(state.params))
    # Evaluate first, or finish the step that the checkpoint left unfinished.
    if not is_resumed:
        prepare_training(run_state)
    elif count := len(progress.in_flight_tasks):
        run_state.display.log(
            f"train: {count} task{'s' * (count > 1)} were in flight when the run stopped; their "
            "episodes start over"
        )
    run_state.display.start("train", progress.stage_step, stage.num_steps)
    if progress.record is not None:
        finish_step(run_state)  # the run was stopped during this step's evaluation

    while progress.stage_step < stage.num_steps and not progress.is_out_of_patience(patience):
        run_state.check_budget()
        clock, policy_version = StepTimer(), int(state.num_updates)
        # Sample tasks, roll them out, shape rewards (training/rewards.py) and drop groups without
        # a learning signal (objectives/filters.py, selected by filter.name).
        with clock.sampling():
            collected = collector.get_groups(policy_version)
        # Measure the divergence from the reference, advance the controllers, adjust rewards.
        with interruptible(run_state.should_stop):
            groups = add_divergences(collected.groups)
        next_controllers, groups = update_controllers(
            progress.controllers, groups, collected.sampled_stats, method, components.is_trigger
        )
        # The KL state lags one step: otherwise a step's divergence would set its own penalty.
        controllers = dataclasses.replace(next_controllers, kl=progress.controllers.kl)
        groups = rewards.apply_kl_penalty(groups, controllers, method)
        groups = rewards.add_entropy_reward(groups, controllers, method.shaping)
        # Estimate an advantage for each trajectory or turn (objectives/advantages.py, selected by
        # advantage.name), then pack mini-batches with token weights and old and reference
        # log-probabilities.
        groups = estimator(groups, progress.step, progress.stage_step)
        minibatches = make_minibatches(
            groups, stage.shape, method, controllers=controllers, num_shards=num_shards
        )
        with interruptible(run_state.should_stop):
            batches = shard_minibatches(
                minibatches, components.mesh, score, state.params, ref_params, method
            )
            finish_token_log = (
                token_logger(groups, controllers, state.params, ref_params)
                if token_logger
                else None
            )
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
                if packed.num_loss_tokens:  # skip mini-batches that hold only environment errors
                    # A stop may abort only the first update's compilation, before anything has
                    # changed. After that the old state is donated.
                    may_stop = run_state.should_stop if not update_metrics else lambda: False
                    with interruptible(may_stop):
                        state, metrics = stage.update(state, batch, packed, lr_scale)
                    update_metrics.append(metrics)
        run_state.state = state
        # Updates are dispatched asynchronously. While the devices work, collect the groups of the
        # next step (rollout.async_level).
        with clock.sampling():
            prefetched = collector.prefetch(collected, next_controllers, policy_version)
        update_metrics = jax.device_get(update_metrics)
        components.engine.set_weights(components.model.merge(state.params))
        clock.mark_updated()
        # Advance the progress, then assemble the step's metrics.
        progress.controllers, progress.buffered_groups = next_controllers, collected.buffered_groups
        progress.in_flight_tasks = collected.in_flight_tasks
        progress.prefetched, progress.ledger = prefetched, progress.ledger + collected.ledger
        run_state.pending_usage = UsageStats()
        progress.step, progress.stage_step = progress.step + 1, progress.stage_step + 1
        progress.items_taken, progress.value = collected.num_tasks_taken, None
        progress.num_learned += has_learned(update_metrics) and stage.settings.lr > 0
        trajectories = flatten_groups(groups)
        failed = describe_failures(collected.sampled_stats, method.group_size)
        reasons = [
            reason
            for reason in (explain_no_learning(trajectories, update_metrics), failed)
            if reason
        ]
        if reasons:
            run_state.display.log(f"warning: train {progress.stage_step}: {'; '.join(reasons)}")
        progress.record = {
            **compute_rollout_metrics(
                trajectories,
                run_state.settings.max_response_tokens,
                has_python=run_state.settings.evaluation.has_python,
            ),
            **merge_update_metrics(update_metrics),
            **collected.metrics,
            **(
                compute_kl_metrics(groups, controllers, method.kl)
                if needs_divergences(method.kl)
                else {}
            ),
            **compute_window_metrics(groups, controllers),
            "actor/num_updates": int(state.num_updates),
            "actor/num_skipped": int(state.num_skipped),
            "actor/num_learned": progress.num_learned,
            "actor/lr": scale * stage.last_lr(state),
            "rollout/tasks_taken": progress.items_taken,
            "rollout/informative_share": float(np.mean([t.has_signal for t in trajectories])),
            **compute_trajectory_filter_metrics(trajectories, method.filter),
            **clock.metrics(trajectories),
            **compute_memory_metrics(),
            **compute_packing_metrics(minibatches),
            **estimator.metrics(progress.stage_step - 1),
            **(compute_lag_metrics(trajectories, policy_version) if method.has_lag else {}),
            **({"actor/lr_scale": scale} if scale != 1 else {}),
            "perf/num_compilations/sampler": components.engine.num_compilations,
            "perf/num_compilations/update": stage.update.num_programs,
        }
        if method.watch is not None:
            # Look for signs of collapse (watch.name). `finish_step` acts on them after the step is
            # recorded.
            progress.watched, sign_metrics = check_step(
                method, progress.watched, progress.record, groups, progress.stage_step
            )
            progress.record |= sign_metrics
        fields = collect_sample_fields(groups, next_controllers)
        if finish_token_log:  # scores on the devices, so every process must call it
            fields = [a | b for a, b in zip(fields, finish_token_log(state.params), strict=True)]
        log_trajectories(run_state, trajectories, fields)
        finish_step(run_state)
    progress.discard_prefetched()  # groups remain if the stage ends early
    if progress.stage_step < stage.num_steps:
        state = restore_best_state(run_state, state)
    return run_state.end_stage(state)


@dataclass(kw_only=True)
class Collector:
    """Collector of the groups for each step, sampled when the step starts or one step ahead.

    Prefetched groups use the weights from before the current step's update, and the controllers
    that `update_controllers` returned in that step. The stage gate is updated later, by the step's
    evaluation, so prefetched groups use the old gate.
    """

    run_state: RunState
    stream: Stream[Task]
    add_divergences: DivergenceFn
    failure: Exception | None = None  # error of a prefetch; the next `get_groups` raises it
    has_warned: bool = False  # True after the warning about idle devices

    def get_groups(self, policy_version: int) -> CollectedGroups:
        """Return the groups for the current step: the prefetched ones, or else new samples."""
        run_state, progress = self.run_state, self.run_state.progress
        if self.failure is not None:
            raise self.failure
        collected = progress.prefetched
        if collected is None:
            collected = self._collect(progress, policy_version, run_state.should_stop)
        elif distributed.any_process(run_state.should_stop()):
            # Without a rollout here, nothing else checks for a stop request.
            raise Interrupted("the run was asked to stop between two steps")
        if not self._should_prefetch:
            run_state.components.engine.release()  # the update needs its memory
        return collected

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
        if not self._should_prefetch:
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
    def _should_prefetch(self) -> bool:
        """True if the next step's groups are collected during the current one."""
        components, stage_step = self.run_state.components, self.run_state.progress.stage_step
        is_async = bool(components.method.async_level)
        return is_async and stage_step + 1 < components.num_steps["train"]

    def _collect(
        self,
        progress: Progress,
        policy_version: int,
        should_stop: Callable[[], bool],
    ) -> CollectedGroups:
        """Collect a step's groups and metrics, starting from `progress`."""
        run_state, engine = self.run_state, self.run_state.components.engine
        started = time.perf_counter()
        before = dataclasses.replace(engine.counts)
        engine.wait_s.clear()
        pending_usage = run_state.pending_usage  # usage of the current step, if this is a prefetch
        sampler = make_sampler(
            run_state,
            progress.step,
            policy_version,
            should_stop,
            max_unfinished=run_state.components.method.filter.unfinished_tasks,
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
        metrics |= self.stream.metrics(collected.num_tasks_taken)
        engine.clear()  # each collection counts its pages from an empty cache
        return dataclasses.replace(collected, metrics=metrics)

    def _warn_if_idle(self, idle_s: float, sampling_s: float) -> None:
        """Warn once if a fixed lag leaves devices idle for 10% of sampling, and at least 1 s."""
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
    max_unfinished: int = 0,
) -> StepSampler:
    """Return the sampler for a training step, which adds its usage to `run_state.pending_usage`.

    Args:
        run_state: State of the run.
        step: Global step, counted over all stages; part of the sampling seeds.
        policy_version: Number of optimizer steps taken to reach the engine's weights.
        should_stop: Function that returns True to interrupt the rollout.
        max_unfinished: Maximum number of groups that may be left for a later step to finish.
    """
    method, pending_usage = run_state.components.method, run_state.pending_usage
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
        progress=run_state.display.counter("trajectories"),
        check_budget=run_state.check_budget,
        on_usage=report_usage,
        prices=run_state.settings.ledger.prices,
    )


def prepare_training(run_state: RunState) -> None:
    """Evaluate the initial policy and set up the controllers."""
    progress = run_state.progress
    eval_metrics = run_state.evaluate(run_state.settings.evaluation.suites)
    get_best_metric(run_state.settings, eval_metrics)  # raises now if the metric is missing
    update_gate(run_state, eval_metrics)
    bootstrap_controllers(run_state)
    metrics = eval_metrics | progress.controllers.metrics() | progress.ledger.metrics()
    run_state.metrics_log.write(progress.step, "train", metrics)


def bootstrap_controllers(run_state: RunState) -> None:
    """Set thresholds, difficulties and targets from a rollout before the first step.

    Uses the first `shaping.bootstrap_tasks` tasks (all if negative) and seeds that no step uses.
    """
    components, method = run_state.components, run_state.components.method
    count = method.shaping.bootstrap_tasks
    tasks = components.tasks[: count if count >= 0 else None]
    if not tasks:
        return
    run_state.display.log(f"train: setting up the controllers with a rollout of {len(tasks)} tasks")
    sampler = make_sampler(run_state, BOOTSTRAP_STEP, 0, run_state.should_stop)
    groups: list[Group] = []
    size = method.tasks_per_step
    for start in range(0, len(tasks), size):
        draws = [
            Draw(task=task, stream_index=start + i)
            for i, task in enumerate(tasks[start : start + size])
        ]
        sampled = sampler.sample(draws)
        run_state.failures.record_batch(flatten_groups(sampled))
        groups += sampled
    run_state.progress.ledger += sampler.usage
    run_state.pending_usage = UsageStats()
    controllers, _ = update_controllers(
        run_state.progress.controllers, groups, (), method, components.is_trigger
    )
    run_state.progress.controllers = controllers


BOOTSTRAP_STEP = 2**31 - 1
"""Step number in the sampling seeds of `bootstrap_controllers`; never a real step."""


def update_gate(run_state: RunState, eval_metrics: Mapping[str, float]) -> None:
    """Update the stage gate, if the method has one, with the accuracy of greedy decoding."""
    if not eval_metrics:
        return
    part = run_state.settings.evaluation.correct
    prefix = "val-core/all/exact_match" if part == "exact_match" else f"val-aux/all/{part}"
    # If every search failed, nothing was scored and the metric is missing.
    correctness = eval_metrics.get(f"{prefix}/greedy", math.nan)
    progress = run_state.progress
    progress.controllers = update_stage_gate(
        progress.controllers, correctness, run_state.components.method.shaping
    )


def finish_step(run_state: RunState) -> None:
    """Finish a step: evaluate if due, write the record, and save a checkpoint if due."""
    # Evaluate if due. Greedy accuracy moves the stage gate.
    progress, is_last = run_state.progress, run_state.is_stage_done
    settings = run_state.settings.evaluation
    every, eval_metrics = settings.every_steps, dict[str, float]()
    if is_last or (every and progress.stage_step % every == 0):
        eval_metrics = run_state.evaluate(settings.suites)
    update_gate(run_state, eval_metrics)
    # Complete the record. A checkpoint without a record has no evaluation left to do.
    assert progress.record is not None
    record = progress.record | eval_metrics | progress.controllers.metrics()
    record |= progress.ledger.metrics()
    progress.record = None
    show_step(run_state, record)
    # Compare with the best step so far.
    progress.value = get_best_metric(run_state.settings, eval_metrics)
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
    # `RunState.end_stage` saves the last step. If patience ran out, the stage ends with the best
    # checkpoint, so this step is saved only if it is the best.
    if not is_last and (is_best or (run_state.is_checkpoint_due and not is_early)):
        run_state.save()


def act_on_signs(run_state: RunState) -> None:
    """Report the step's signs of collapse and apply `watch.action`.

    Raises:
        Rollback: The action is `roll_back`.
        UnsoundError: The action is `stop`, or no rollback is possible.
    """
    progress, watch = run_state.progress, run_state.components.method.watch
    signs = progress.watched.acting
    if watch is None or not signs:
        return
    for sign in signs:
        run_state.display.log(
            f"warning: train {progress.stage_step}: {sign['name']}: {sign['text']}"
        )
        run_state.metrics_log.write_sign(
            progress.step, "train", {**sign, "action": resolve_action(sign, watch)}
        )
    # The most severe action wins; ties go to the sign with the earliest last sound step.
    worst = max(signs, key=lambda s: (ACTIONS.index(resolve_action(s, watch)), -s["since"]))
    action = resolve_action(worst, watch)
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
        num_earlier_steps = progress.step - progress.stage_step  # number of steps in earlier stages
        steps = [
            s - num_earlier_steps
            for s in run_state.checkpointer.values()
            if num_earlier_steps <= s < progress.step
        ]
        target_step = num_earlier_steps + rollback_target(worst, watch, progress.watched, steps)
        raise Rollback(
            sign=worst["name"], from_step=progress.step, to_step=target_step, lr_scale=scale
        )


def show_step(run_state: RunState, record: Mapping[str, Any]) -> None:
    """Show the main metrics of a step on the display."""
    values = {**record, "held_out": run_state.held_out}
    shown: dict[str, float] = {}
    for name, keys in DISPLAYED_METRICS.items():
        numbers = [to_json_number(values[key]) for key in keys if key in values]
        if numbers and numbers[0] is not None:
            shown[name] = numbers[0]
    if not run_state.settings.ledger.prices:
        shown.pop("spent", None)
    run_state.display.step(run_state.progress.stage_step, shown)


def get_best_metric(settings: Settings, eval_metrics: Mapping[str, float]) -> float | None:
    """Return the metric that selects the best checkpoint; None if unused, missing or not finite.

    Raises:
        ValueError: The evaluation has no metric of that name.
    """
    if settings.checkpoint.keep_best == 0 or not eval_metrics:
        return None
    name = settings.evaluation.best_metric
    if name not in eval_metrics and count_unscored_suites(eval_metrics):
        return None  # every episode of a suite failed, so its metrics are missing
    if name not in eval_metrics:
        raise ValueError(
            f"config.eval.best_metric is {name!r}; expected one of the metrics of "
            f"config.eval.suites: {', '.join(eval_metrics)}."
        )
    return float(eval_metrics[name]) if math.isfinite(eval_metrics[name]) else None


def restore_best_state(run_state: RunState, state: TrainState) -> TrainState:
    """Free `state` and return the state of the best checkpoint."""
    settings, progress = run_state.settings.evaluation, run_state.progress
    abstract_state = make_restore_target(state, jax.tree.map(lambda leaf: leaf.sharding, state))
    run_state.checkpointer.wait()
    run_state.components.engine.release()
    run_state.state = None
    jax.tree.map(lambda leaf: leaf.delete(), state)  # the device has no room for two
    step, best = run_state.checkpointer.restore_best(abstract_state)
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
    """Write the first `num_logged_trajectories` trajectories of the step to its file."""
    if not distributed.is_main():
        return
    count = run_state.settings.num_logged_trajectories
    count = len(trajectories) if count < 0 else count
    samples = trajectories[:count], fields[:count]
    run_state.write_samples(run_state.workdir, run_state.progress.step, *samples)

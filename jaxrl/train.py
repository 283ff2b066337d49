"""RL training loop: sample groups, estimate advantages, update the policy, log metrics."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxrl.data.stream import Stream
from jaxrl.envs.base import Task
from jaxrl.logs.metrics import (
    compute_environment_metrics,
    compute_rollout_metrics,
    count_unscored_suites,
    to_json_number,
)
from jaxrl.logs.steps import (
    DISPLAYED_METRICS,
    StepTimer,
    collect_sample_fields,
    compute_entropy_window_metrics,
    compute_kl_metrics,
    compute_lag_metrics,
    compute_memory_metrics,
    compute_packing_metrics,
    merge_update_metrics,
)
from jaxrl.logs.tokens import FinishTokenLog, make_token_logger
from jaxrl.runtime import distributed
from jaxrl.runtime.compilation import interruptible, is_out_of_memory
from jaxrl.runtime.preemption import update_best
from jaxrl.runtime.sharding import count_batch_shards, make_restore_target
from jaxrl.sampling.interfaces import SamplingConfig
from jaxrl.training import rewards
from jaxrl.training.collect import (
    CollectedGroups,
    describe_failures,
)
from jaxrl.training.collector import Collector, make_sampler
from jaxrl.training.controllers import Controllers, update_controllers, update_stage_gate
from jaxrl.training.estimators import AdvantageEstimator
from jaxrl.training.failures import explain_no_learning, has_updated_params
from jaxrl.training.gradients import AccumulatedGradients, MinibatchPiece
from jaxrl.training.method import Method, needs_divergences
from jaxrl.training.minibatches import (
    compute_trajectory_filter_metrics,
    divide_into_minibatches,
    make_minibatch,
    select_trained_trajectories,
    shard_minibatch,
    split_by_num_sequences,
)
from jaxrl.training.packing import PackedBatch
from jaxrl.training.policy_loss import make_update_step
from jaxrl.training.reference_kl import compute_logprobs, make_kl_fn
from jaxrl.training.run_state import RunState, Stage
from jaxrl.training.settings import Settings
from jaxrl.training.update import ScoreStep, UpdateStep
from jaxrl.training.usage import UsageStats
from jaxrl.training.watch import (
    ACTIONS,
    CollapseError,
    Rollback,
    check_step,
    resolve_action,
    rollback_target,
)
from jaxrl.types import Draw, Group, Params, TrainState, Trajectory, flatten_groups
from jaxrl.utils.callables import NamedFunction


def train(run_state: RunState, params: Params) -> Params:
    """Run the RL stage and return the trained parameters."""
    if not run_state.begin_stage("train"):
        return params
    learner = Learner(run_state, params)
    learner.start_stage()
    while not learner.is_done:
        run_state.check_budget()
        learner.step()
    return learner.end_stage()


class Learner:
    """Phases of an RL step: `train` runs them in order, and `api.Trainer` exposes them.

    A step is `collect` (or `rollout`), `compute_advantages`, `update` and `finish_step`. Only
    `update` changes the progress, so a run that stops earlier repeats the step. Every process of a
    job calls the same methods with the same arguments.
    """

    def __init__(self, run_state: RunState, params: Params):
        """Create the training state at the start of the stage; later in the stage, restore it.

        `params` are the policy's parameters, which the state owns from then on.
        """
        self.run_state = run_state
        components, self.method = run_state.components, run_state.components.method
        self._set_stage(components.stages["train"])
        self._is_resumed = run_state.progress.stage_step > 0
        run_state.ref_params = run_state.init_or_restore_reference(params)
        run_state.state = run_state.init_or_restore_state(params)
        rows = run_state.progress.micro_rows
        is_valid = rows % count_batch_shards(components.mesh) == 0  # on these devices
        if self.stage.halves_micro_rows and is_valid and 0 < rows < self.stage.shape.num_full_rows:
            self._set_micro_rows(rows)
        self._estimator = AdvantageEstimator(self.method.advantage, self.method.seed)
        self.stream = Stream(components.tasks, seed=run_state.settings.seed)
        self._collector = Collector(
            run_state=run_state, stream=self.stream, add_divergences=self.add_divergences
        )
        self._has_weights = False  # True if the sampler holds the current weights
        # True after an error, if the step can be neither repeated nor saved.
        self.is_partial = False
        self._discard_step_data()

    def _set_stage(self, stage: Stage) -> None:
        """Set the stage, and create the functions that are compiled for its shape."""
        run_state, components, method = self.run_state, self.run_state.components, self.method
        # `update` stores the sizes in the progress, so a repeated step starts with the same.
        self._compiled_sizes = dataclasses.replace(run_state.progress.compiled_sizes)
        shape = dataclasses.replace(stage.shape, sizes=self._compiled_sizes)
        self.stage = stage = dataclasses.replace(stage, shape=shape)
        self.score = ScoreStep(components.model, temperature=method.temperature)
        self._kl_fn = make_kl_fn(self.score, components.mesh, stage.shape, method)
        self._token_logger = None
        if run_state.settings.tokens:
            count = run_state.settings.num_logged_trajectories
            self._token_logger = make_token_logger(count, self.score, stage.shape, method)
        self._custom_losses: dict[Callable[..., Any], tuple[Method, UpdateStep]] = {}

    def _set_micro_rows(self, rows: int) -> None:
        """Set the number of full-length rows in a micro-batch. Results change only by rounding."""
        stage, model = self.stage, self.run_state.components.model
        update = make_update_step(model, self.method, stage.optimizer)
        shape = stage.shape.with_full_rows(rows)
        self._set_stage(dataclasses.replace(stage, shape=shape, update=update))

    def _discard_step_data(self) -> None:
        """Discard the groups and other data of the previous step."""
        self._timer = StepTimer()
        self._collected: CollectedGroups | None = None
        self._is_streamed = False  # True if `collect` took the tasks
        # Controllers for this step's loss, and for the next step; None until the step needs them.
        self._controllers: tuple[Controllers, Controllers] | None = None
        self._advanced_groups: list[Group] = []  # groups that the controllers have seen
        self._accumulated: AccumulatedGradients | None = None
        self._accumulated_update = self.stage.update  # update step of the accumulated loss
        self._accumulated_groups: list[Group] = []
        self._accumulated_pieces: list[MinibatchPiece] = []

    @property
    def state(self) -> TrainState:
        """Parameters and optimizer state after the latest update."""
        assert self.run_state.state is not None
        return self.run_state.state

    @property
    def is_done(self) -> bool:
        """Return True after `num_steps` steps or once evaluations no longer improve."""
        progress = self.run_state.progress
        is_early = progress.is_out_of_patience(self.run_state.settings.evaluation.patience)
        return progress.stage_step >= self.stage.num_steps or is_early

    def start_stage(self) -> None:
        """Load the sampler's weights; run the initial evaluation, or finish the restored step."""
        run_state = self.run_state
        run_state.compile_sampler()
        # A signal may abort a compilation here: no state changes before a step's first update.
        with interruptible(run_state.should_stop):
            self._load_weights()
        if not self._is_resumed:
            prepare_training(run_state)
        elif count := len(run_state.progress.in_flight_tasks):
            run_state.display.log(
                f"train: {count} task{'s' * (count > 1)} were in flight when the run stopped; "
                "their episodes start over"
            )
        run_state.display.start(
            "train",
            run_state.progress.stage_step,
            self.stage.num_steps,
            every_steps=run_state.settings.log_every_steps,
        )
        if run_state.progress.record is not None:
            self.finish_step()  # the run was stopped during this step's evaluation
        self._discard_step_data()

    def _load_weights(self) -> None:
        """Load the current weights into the sampler, unless it already has them."""
        components = self.run_state.components
        if not self._has_weights:
            components.engine.set_weights(components.model.merge(self.state.params))
        self._has_weights = True

    def _free_sampler(self) -> None:
        """Free the sampler's memory for the update, unless it samples during the update."""
        if not self._collector.should_prefetch:
            self.run_state.components.engine.release()
            self._has_weights = False

    def step(self) -> dict[str, Any]:
        """Run a step on the next tasks of the stream, and return its record."""
        groups = self.collect()
        groups = self.compute_advantages(groups)
        self.update(groups)
        return self.finish_step()

    def collect(self) -> list[Group]:
        """Sample the step's groups from the next tasks, and return those that pass the filter.

        Rewards are shaped (training/rewards.py). A filter in objectives/filters.py, selected by
        filter.name, drops groups without a learning signal.
        """
        if self._collected is not None:
            raise ValueError(
                "this step has sampled groups already; update on them first, or call "
                "rollout(next_tasks()) for more."
            )
        if self.run_state.progress.prefetched is None:
            self._load_weights()
        with self._timer.time_sampling():
            collected = self._collector.collect_groups(int(self.state.num_updates))
        self._collected, self._controllers, self._is_streamed = collected, None, True
        self._free_sampler()
        return collected.groups

    def next_tasks(self, count: int = 0) -> list[Task]:
        """Return the next `count` tasks of the stream, by default `rollout.tasks_per_step`.

        `rollout` with these tasks samples the groups that `collect` would sample and filter.
        """
        return self.stream.get_items(self._num_tasks_taken, count or self.method.tasks_per_step)

    @property
    def _num_tasks_taken(self) -> int:
        collected = self._collected
        return (
            self.run_state.progress.items_taken if collected is None else collected.num_tasks_taken
        )

    def rollout(self, tasks: Sequence[Task], group_size: int = 0) -> list[Group]:
        """Sample and score a group for each task, with shaped rewards and without a filter.

        Args:
            tasks: Tasks of any source. A task may occur several times.
            group_size: Number of trajectories per task; 0 for `rollout.group_size`.
        """
        if not tasks or group_size < 0:
            raise ValueError(
                f"rollout received {len(tasks)} tasks and group_size={group_size}; expected at "
                "least one task, and a group size of at least 0."
            )
        self._load_weights()
        progress, before = self.run_state.progress, self._collected
        with self._timer.time_sampling():
            sampled = self._collector.sample(
                tasks,
                first_index=self._num_tasks_taken,
                group_size=group_size or self.method.group_size,
                policy_version=int(self.state.num_updates),
            )
        # A step may have several rollouts; report the metrics of the last one.
        self._collected = dataclasses.replace(
            sampled,
            buffered_groups=before.buffered_groups if before else progress.buffered_groups,
            in_flight_tasks=before.in_flight_tasks if before else progress.in_flight_tasks,
            sampled_stats=[*(before.sampled_stats if before else ()), *sampled.sampled_stats],
            ledger=(before.ledger if before else UsageStats()) + sampled.ledger,
        )
        return sampled.groups

    def sample(self, draws: Sequence[Draw], sampling: SamplingConfig) -> list[Group]:
        """Sample groups with the current weights, without affecting the step or its usage."""
        self._load_weights()
        run_state = self.run_state
        groups = run_state.components.rollout(draws, sampling, should_stop=run_state.should_stop)
        return [group for group in groups if group is not None]

    def evaluate(self, suites: Sequence[str]) -> dict[str, float]:
        """Evaluate the current weights on the held-out tasks, and return the metrics."""
        self._load_weights()
        return self.run_state.evaluate(suites)

    def compute_logprobs(
        self, groups: Sequence[Group], *, use_reference: bool = False
    ) -> list[np.ndarray]:
        """Return the log-probability of each sampled token, float32 `[L]` per trajectory, in nats.

        Tokens that were not sampled get 0. Logits are divided by `rollout.temperature`.

        Args:
            groups: Groups to score, in `flatten_groups` order.
            use_reference: True for the reference of the KL term, False for the current policy.

        Raises:
            ValueError: The method has no reference.
        """
        params = self.run_state.ref_params if use_reference else self.state.params
        if params is None:
            raise ValueError(
                "there is no reference policy, because config.kl.coef is 0 or config.kl.anchor is "
                "'old'; set config.kl.coef above 0 and config.kl.anchor to 'ref'."
            )
        self._free_sampler()
        return compute_logprobs(self.score, params, flatten_groups(groups), self.stage.shape)

    def add_divergences(self, groups: Sequence[Group]) -> list[Group]:
        """Add each trajectory's divergence from the reference, if the method uses it."""
        if not needs_divergences(self.method.kl):
            return list(groups)
        assert self.run_state.ref_params is not None
        self.run_state.components.engine.clear()  # scoring needs its memory for activations
        return self._kl_fn(groups, self.state.params, self.run_state.ref_params)

    def compute_advantages(self, groups: Sequence[Group]) -> list[Group]:
        """Advance the controllers, adjust rewards, and estimate advantages.

        An estimator in objectives/advantages.py, selected by advantage.name, computes one advantage
        per trajectory or per turn.

        Raises:
            ValueError: A trajectory already has an advantage, so its reward would be adjusted
                twice.
        """
        if any(t.advantage is not None for t in flatten_groups(groups)):
            raise ValueError(
                "a trajectory has an advantage already; call compute_advantages once, on groups as "
                "they were sampled."
            )
        progress = self.run_state.progress
        controllers, groups = self._advance_controllers(groups)
        groups = rewards.apply_kl_penalty(groups, controllers, self.method)
        groups = rewards.add_entropy_reward(groups, controllers, self.method.shaping)
        return self._estimator(groups, progress.step, progress.stage_step)

    def _advance_controllers(self, groups: Sequence[Group]) -> tuple[Controllers, list[Group]]:
        """Measure divergences and advance the controllers.

        Returns the controllers that the step uses, and the groups with their measurements.
        """
        progress, collected = self.run_state.progress, self._collected
        with interruptible(self.run_state.should_stop):
            groups = self.add_divergences(groups)
        # Each call starts from the state before the step, with all groups of the step so far. A
        # trajectory counts once, even if several calls receive it.
        returning = {id(t.token_ids) for t in flatten_groups(groups)}
        earlier = [
            group
            for group in self._advanced_groups
            if returning.isdisjoint(id(t.token_ids) for t in group.trajectories)
        ]
        self._advanced_groups = [*earlier, *groups]
        advanced, advanced_groups = update_controllers(
            progress.controllers,
            self._advanced_groups,
            collected.sampled_stats if collected else (),
            self.method,
            self.run_state.components.is_trigger,
        )
        # The KL state lags one step: otherwise a divergence would determine its own penalty.
        used = dataclasses.replace(advanced, kl=progress.controllers.kl)
        self._controllers = used, advanced
        return used, advanced_groups[len(earlier) :]

    def update(
        self, groups: Sequence[Group], loss: Callable[..., Any] | None = None
    ) -> dict[str, Any]:
        """Update the policy on groups with advantages, and return the step's metrics.

        Packs mini-batches with token weights and old and reference log-probabilities, takes
        `optimizer.num_minibatches * optimizer.num_epochs` optimizer steps, and loads the new
        weights into the sampler. The progress then counts the step.

        Args:
            groups: Groups of any number and size. Every trajectory must have an advantage.
            loss: Policy loss for this call, with the interface of `loss.name`; None for the
                configured loss. Each function is compiled once.
        """
        progress, policy_version = self.run_state.progress, int(self.state.num_updates)
        if self._accumulated_groups:
            raise ValueError("there are accumulated gradients; call apply_gradients first.")
        groups = self._prepare_update(groups)
        while True:
            try:
                results = self._take_optimizer_steps(groups, loss)
                break
            except jax.errors.JaxRuntimeError as error:
                # The first optimizer step donates the state, so nothing can be repeated after it.
                rows = 0 if self.is_partial else self._reduced_micro_rows
                if not (rows and is_out_of_memory(error)):
                    raise
            # Outside of the handler, so that the arrays of the failed update are freed.
            self.run_state.display.log(
                f"train {progress.stage_step + 1}: a device is out of memory; repeating the update "
                f"with {rows} rows per micro-batch instead of {self.stage.shape.num_full_rows}"
            )
            progress.micro_rows = rows
            self._set_micro_rows(rows)
        return self._complete_update(groups, *results[:2], policy_version, results[2])

    @property
    def _reduced_micro_rows(self) -> int:
        """Half the rows of a micro-batch, at least one per shard; 0 if no reduction is possible.

        In a multi-process job no reduction is possible, because other processes may not have run
        out of memory.
        """
        num_shards = count_batch_shards(self.run_state.components.mesh)
        can_shrink = self.stage.halves_micro_rows and jax.process_count() == 1
        return self.stage.shape.num_full_rows // (2 * num_shards) * num_shards if can_shrink else 0

    def _take_optimizer_steps(
        self, groups: Sequence[Group], loss: Callable[..., Any] | None
    ) -> tuple[list[PackedBatch], list[dict[str, Any]], FinishTokenLog | None]:
        """Take the optimizer steps of an update; return its mini-batches and their metrics."""
        run_state, stage = self.run_state, self.stage
        scale = run_state.progress.watched.lr_scale
        method, update = self._select_loss(loss)
        minibatches = self._pack_minibatches(groups, method)
        finish_token_log = None
        if self._token_logger:
            assert self._controllers is not None
            with interruptible(run_state.should_stop):
                finish_token_log = self._token_logger(
                    groups, self._controllers[0], self.state.params, run_state.ref_params
                )
        # Update. Without any learning signal the optimizer still steps, with a zero gradient.
        update_metrics: list[dict[str, Any]] = []
        # Pass None instead of 1.0: the compiled program then has no scale factor, and rounds as in
        # a run without a watch.
        lr_scale = None if scale == 1 else scale
        num_updates = len(minibatches) * stage.settings.num_epochs
        run_state.display.show_activity(
            f"update, {num_updates} mini-batch{'es' * (num_updates > 1)}"
        )
        for _ in range(stage.settings.num_epochs):
            for pieces in minibatches:
                if not pieces:  # the mini-batch holds only environment errors
                    continue
                # A stop may abort only the first update's compilation, before anything has changed.
                # After that the old state is donated.
                may_stop = run_state.should_stop if not update_metrics else lambda: False
                with interruptible(may_stop):
                    gradients = self._compute_gradients(pieces, update, method)
                    if not update_metrics and self._reduced_micro_rows:
                        # Errors of devices may arrive late, after the state has been donated.
                        jax.block_until_ready(gradients.sums)
                    self.is_partial = True
                    run_state.state, metrics = update.apply_gradients(
                        self.state, gradients.sums, lr_scale
                    )
                update_metrics.append(metrics)
        packed = [piece.packed for pieces in minibatches for piece in pieces]
        return packed, update_metrics, finish_token_log

    def accumulate_gradients(
        self, groups: Sequence[Group], loss: Callable[..., Any] | None = None
    ) -> None:
        """Add the gradient of `groups` to the gradients accumulated by earlier calls in this step.

        `apply_gradients` then takes one optimizer step with the gradient of all groups in one
        mini-batch. For arguments, see `update`.

        Raises:
            ValueError: Adding groups changes the token weights of `loss.aggregation` by more than a
                common factor, or the loss has other metrics than in earlier calls.
        """
        method, update = self._select_loss(loss)
        single = dataclasses.replace(method.optimizer, num_minibatches=1, num_epochs=1)
        method = dataclasses.replace(method, optimizer=single)
        groups = self._prepare_update(groups)
        [pieces] = self._pack_minibatches(groups, method)
        if pieces:
            with interruptible(self.run_state.should_stop):
                gradients = self._compute_gradients(pieces, update, method)
            if self._accumulated is None:
                self._accumulated_update = update
            else:
                gradients = self._accumulated.combine(gradients, method.loss.aggregation)
            self._accumulated = gradients
        self._accumulated_groups += groups
        self._accumulated_pieces += pieces

    def apply_gradients(self) -> dict[str, Any]:
        """Take an optimizer step with the accumulated gradient, and return the step's metrics.

        Raises:
            ValueError: There is no accumulated gradient.
        """
        accumulated, groups = self._accumulated, self._accumulated_groups
        if not groups:
            raise ValueError("there are no gradients; call accumulate_gradients first.")
        policy_version, progress = int(self.state.num_updates), self.run_state.progress
        scale = progress.watched.lr_scale
        update_metrics: list[dict[str, Any]] = []
        if accumulated is not None:  # otherwise the groups hold only environment errors
            self.is_partial = True
            self.run_state.state, metrics = self._accumulated_update.apply_gradients(
                self.state, accumulated.sums, None if scale == 1 else scale
            )
            update_metrics.append(metrics)
        packed = [piece.packed for piece in self._accumulated_pieces]
        self._accumulated, self._accumulated_groups, self._accumulated_pieces = None, [], []
        return self._complete_update(groups, packed, update_metrics, policy_version)

    def _compute_gradients(
        self, pieces: Sequence[MinibatchPiece], update: UpdateStep, method: Method
    ) -> AccumulatedGradients:
        """Compute the gradient of a mini-batch from its pieces."""
        gradients: AccumulatedGradients | None = None
        for piece in pieces:
            sums = update.gradient(self.state.params, piece.batch, piece.packed)
            part = AccumulatedGradients(sums=sums, counts=piece.counts)
            gradients = gradients.combine(part, method.loss.aggregation) if gradients else part
        assert gradients is not None
        return gradients

    def _select_loss(self, loss: Callable[..., Any] | None) -> tuple[Method, UpdateStep]:
        """Return the method with the given or configured loss, and the update step for it."""
        if loss is None:
            return self.method, self.stage.update
        if loss not in self._custom_losses:
            named = NamedFunction.from_callable("loss.name", loss)
            method = dataclasses.replace(
                self.method, loss=dataclasses.replace(self.method.loss, policy_loss=named)
            )
            update = make_update_step(self.run_state.components.model, method, self.stage.optimizer)
            self._custom_losses[loss] = method, update
        return self._custom_losses[loss]

    def _prepare_update(self, groups: Sequence[Group]) -> list[Group]:
        """Check the groups to train on, and free the sampler's memory for the update."""
        if self.run_state.is_stage_done:
            raise ValueError(
                f"all config.num_steps={self.stage.num_steps} steps are done; raise it to continue."
            )
        groups = list(groups)
        if not groups:
            raise ValueError("an update needs at least one group; received none.")
        for trajectory in flatten_groups(groups):
            if trajectory.is_scored and trajectory.advantage is None:
                raise ValueError(
                    f"a trajectory of task {trajectory.task_id!r} has no advantage; call "
                    "compute_advantages or set_advantages before the update."
                )
        # If the caller set advantages, some groups may have skipped `compute_advantages`.
        seen = {id(t.token_ids) for t in flatten_groups(self._advanced_groups)}
        if self._controllers is None or not all(
            id(t.token_ids) in seen for t in flatten_groups(groups)
        ):
            _, groups = self._advance_controllers(groups)
        self._free_sampler()
        return groups

    def _pack_minibatches(
        self, groups: Sequence[Group], method: Method
    ) -> list[list[MinibatchPiece]]:
        """Pack groups into mini-batches; split large mini-batches into pieces of fixed shape."""
        run_state, mesh = self.run_state, self.run_state.components.mesh
        assert self._controllers is not None
        single = dataclasses.replace(method.optimizer, num_minibatches=1)
        minibatches = []
        for part in divide_into_minibatches(groups, method.optimizer.num_minibatches):
            pieces = []
            for piece_groups in split_by_num_sequences(part, self.stage.shape.num_sequences):
                packed = make_minibatch(
                    piece_groups,
                    self.stage.shape,
                    dataclasses.replace(method, optimizer=single),
                    controllers=self._controllers[0],
                    num_shards=count_batch_shards(mesh),
                )
                if not packed.num_loss_tokens:
                    continue
                with interruptible(run_state.should_stop):
                    batch = shard_minibatch(
                        packed, mesh, self.score, self.state.params, run_state.ref_params, method
                    )
                trained = select_trained_trajectories(piece_groups, method).values()
                counts = np.array([t.num_sampled for t in trained], int)
                pieces.append(MinibatchPiece(packed=packed, batch=batch, counts=counts))
            minibatches.append(pieces)
        return minibatches

    def _complete_update(
        self,
        groups: Sequence[Group],
        minibatches: Sequence[PackedBatch],
        update_metrics: list[dict[str, Any]],
        policy_version: int,
        finish_token_log: FinishTokenLog | None = None,
    ) -> dict[str, Any]:
        """Load the new weights into the sampler, advance the progress, and assemble the record."""
        run_state, components, stage = self.run_state, self.run_state.components, self.stage
        progress, collected = run_state.progress, self._collected
        scale = progress.watched.lr_scale
        assert self._controllers is not None
        controllers, next_controllers = self._controllers
        self.is_partial = True  # also if no optimizer step was taken
        # Updates are dispatched asynchronously. While the devices work, collect the groups of the
        # next step (rollout.async_level).
        prefetched = None
        if collected is not None and self._is_streamed:
            with self._timer.time_sampling():
                prefetched = self._collector.prefetch(collected, next_controllers, policy_version)
        update_metrics = jax.device_get(update_metrics)
        self._has_weights = False
        self._load_weights()
        self._timer.mark_updated()
        # Advance the progress, then assemble the step's metrics.
        progress.controllers = next_controllers
        if collected is not None:
            progress.buffered_groups = collected.buffered_groups
            progress.in_flight_tasks = collected.in_flight_tasks
            progress.items_taken = collected.num_tasks_taken
            progress.ledger += collected.ledger
        if not self._is_streamed:
            progress.discard_prefetched_groups()
        progress.prefetched = prefetched
        run_state.pending_usage = UsageStats()
        progress.step, progress.stage_step = progress.step + 1, progress.stage_step + 1
        progress.value = None
        progress.num_learned += has_updated_params(update_metrics) and stage.settings.lr > 0
        progress.compiled_sizes = dataclasses.replace(self._compiled_sizes)
        trajectories = flatten_groups(groups)
        failed = describe_failures(collected.sampled_stats) if collected else ""
        reasons = [*filter(None, (explain_no_learning(trajectories, update_metrics), failed))]
        if reasons:
            run_state.display.log(f"warning: train {progress.stage_step}: {'; '.join(reasons)}")
        progress.record = {
            **compute_rollout_metrics(
                trajectories,
                run_state.settings.max_response_tokens,
                has_python=run_state.settings.evaluation.has_python,
            ),
            **compute_environment_metrics(
                trajectories,
                collected.sampled_stats if collected else (),
                run_state.settings.max_response_tokens,
                has_python=run_state.settings.evaluation.has_python,
            ),
            **merge_update_metrics(update_metrics),
            **(collected.metrics if collected else {}),
            **(
                compute_kl_metrics(groups, controllers, self.method.kl)
                if needs_divergences(self.method.kl)
                else {}
            ),
            **compute_entropy_window_metrics(groups, controllers),
            "actor/num_updates": int(self.state.num_updates),
            "actor/num_skipped": int(self.state.num_skipped),
            "actor/num_learned": progress.num_learned,
            "actor/lr": scale * stage.get_last_lr(self.state),
            "rollout/tasks_taken": progress.items_taken,
            "rollout/informative_share": float(np.mean([t.has_signal for t in trajectories])),
            **compute_trajectory_filter_metrics(trajectories, self.method.filter),
            **self._timer.compute_metrics(trajectories),
            **compute_memory_metrics(),
            **compute_packing_metrics(minibatches),
            **self._estimator.metrics(progress.stage_step - 1),
            **(compute_lag_metrics(trajectories, policy_version) if self.method.has_lag else {}),
            **({"actor/lr_scale": scale} if scale != 1 else {}),
            "perf/micro_rows": stage.shape.num_full_rows,
            "perf/num_compilations/sampler": components.engine.num_compilations,
            "perf/num_compilations/update": stage.update.num_programs,
        }
        if self.method.watch is not None:
            # Look for signs of collapse (watch.name). `finish_step` acts on them after the step is
            # recorded.
            progress.watched, sign_metrics = check_step(
                self.method, progress.watched, progress.record, groups, progress.stage_step
            )
            progress.record |= sign_metrics
        fields = collect_sample_fields(groups, next_controllers)
        if finish_token_log:  # scores on the devices, so every process must call it
            notes = finish_token_log(self.state.params)
            fields = [a | b for a, b in zip(fields, notes, strict=True)]
        log_trajectories(run_state, trajectories, fields)
        self.is_partial = False
        return dict(progress.record)

    def finish_step(self) -> dict[str, Any]:
        """Finish a step: evaluate if due, write and return the record, checkpoint if due.

        Raises:
            ValueError: There is no update to finish.
        """
        run_state, progress = self.run_state, self.run_state.progress
        unfinished_record = progress.record
        if unfinished_record is None:
            raise ValueError("there is no update to finish; call update first.")
        # Evaluate if due. Greedy accuracy moves the stage gate.
        settings, is_last = run_state.settings.evaluation, run_state.is_stage_done
        every, eval_metrics = settings.every_steps, dict[str, float]()
        if is_last or (every and progress.stage_step % every == 0):
            eval_metrics = run_state.evaluate(settings.suites)
        self.is_partial = True  # until the record is written: a disk may be full
        update_gate(run_state, eval_metrics)
        # Complete the record. A checkpoint without a record has no pending evaluation.
        record = unfinished_record | eval_metrics | progress.controllers.metrics()
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
        self.is_partial = False
        self._discard_step_data()
        act_on_collapse_signs(run_state)
        # `end` saves the last step. If patience ran out, the stage ends with the best checkpoint,
        # so this step is saved only if it is the best.
        if not is_last and (is_best or (run_state.is_checkpoint_due and not is_early)):
            run_state.save()
            self._timer = StepTimer()  # times of a step exclude the checkpoint before it
        return record

    def end_stage(self) -> Params:
        """End the stage: export the parameters, save a checkpoint, and return the parameters.

        If patience ran out, the parameters are those of the best checkpoint.
        """
        run_state, progress = self.run_state, self.run_state.progress
        progress.discard_prefetched_groups()  # groups remain if the stage ends early
        state = self.state
        if progress.stage_step < self.stage.num_steps:
            state = restore_best_state(run_state, state)
        return run_state.end_stage(state)


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
    """Initialize the controllers' thresholds, difficulties and targets from a first rollout.

    Uses the first `shaping.bootstrap_tasks` tasks (all if negative) and seeds that no step uses.
    """
    components, method = run_state.components, run_state.components.method
    count = method.shaping.bootstrap_tasks
    tasks = components.tasks[: count if count >= 0 else None]
    if not tasks:
        return
    run_state.display.log(f"train: setting up the controllers with a rollout of {len(tasks)} tasks")
    sampler = make_sampler(run_state, method, BOOTSTRAP_STEP, 0, run_state.should_stop)
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
    """Update the method's stage gate, if any, with the accuracy of greedy decoding."""
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


def act_on_collapse_signs(run_state: RunState) -> None:
    """Report the step's signs of collapse and take `watch.action`.

    Raises:
        Rollback: The action is `roll_back`.
        CollapseError: The action is `stop`, or no rollback is possible.
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
        raise CollapseError(
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
            for s in run_state.checkpointer.read_scores()
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
    run_state.display.show_step(run_state.progress.stage_step, shown)


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
    """Log the step's first `num_logged_trajectories` trajectories to a file and the trackers."""
    if not distributed.is_main():
        return
    count = run_state.settings.num_logged_trajectories
    count = len(trajectories) if count < 0 else count
    samples = trajectories[:count], fields[:count]
    run_state.metrics_log.write_trajectories(run_state.progress.step, *samples)
    run_state.metrics_log.add_samples("train", samples[0])

"""State of a run: its components, its progress, and its checkpoints."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from jaxrl.data import serialization
from jaxrl.envs.base import Task
from jaxrl.logs.metrics import to_json_numbers
from jaxrl.models.layers import HOST_MEMORY
from jaxrl.models.policy import Model
from jaxrl.runtime.compilation import interruptible
from jaxrl.runtime.host_memory import trim_memory
from jaxrl.runtime.preemption import BestEvaluation
from jaxrl.sampling.interfaces import RolloutFunction
from jaxrl.training.collect import CollectedGroups
from jaxrl.training.controllers import Controllers
from jaxrl.training.failures import FailureCounter
from jaxrl.training.method import Method, OptimizerSettings
from jaxrl.training.packing import BatchShape, CompiledSizes, TokenSequence
from jaxrl.training.settings import STAGES, Settings
from jaxrl.training.update import UpdateStep, init_state, move_moments
from jaxrl.training.usage import UsageStats, check_budget
from jaxrl.training.watch import WatchState
from jaxrl.types import Group, Params, TrainState

if TYPE_CHECKING:  # keeps these modules out of the imports of `train`
    from jaxrl.logs.display import Display
    from jaxrl.logs.records import Record
    from jaxrl.logs.writers import MetricsLog
    from jaxrl.runtime.checkpoint import Checkpointer
    from jaxrl.sampling.engine import Engine


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Training stage, with its optimizer, batch shape and update step."""

    num_steps: int
    batch_size: int  # trajectories or demonstrations per mini-batch
    optimizer: optax.GradientTransformation
    schedule: optax.Schedule  # maps the number of earlier updates to the learning rate
    settings: OptimizerSettings
    shape: BatchShape  # shape of mini-batches
    update: UpdateStep
    halves_micro_rows: bool = False  # True if `shape` may shrink after an update runs out of memory

    def get_last_lr(self, state: TrainState) -> float:
        """Return the learning rate of the latest optimizer step, or of the first if none ran."""
        # Pass an array, as the update does: a custom schedule may require it.
        return float(self.schedule(jax.numpy.int32(max(int(state.num_updates) - 1, 0))))


@dataclass(frozen=True, kw_only=True)
class Components:
    """Objects built from the configuration, shared by all stages."""

    mesh: Mesh
    model: Model
    method: Method
    stages: Mapping[str, Stage]  # training stages by name
    tasks: Sequence[Task]  # a `Mixture`, which parses large sources on access
    eval_tasks: list[Task]
    demonstrations: Sequence[TokenSequence]
    sampler: Engine | None  # None if a model behind an endpoint samples
    rollout: RolloutFunction
    controls: Mapping[str, RolloutFunction]  # replacements for `rollout`, by control suite
    # Environments of each control suite. A suite without an entry uses all environments.
    control_environments: Mapping[str, Sequence[str]] = field(default_factory=dict)
    reward_weights: Mapping[str, float] = field(default_factory=dict)  # by reward part
    is_trigger: np.ndarray | None = None  # bool [V], ids that may start a high-entropy window
    prompt_time: str = ""  # time in the chat template's prompts; "" if it writes none
    notes: tuple[str, ...] = ()  # lines about the data, shown before the run begins
    external: str = ""  # description of the endpoint model that samples; "" for a local model
    export: Callable[[Params, Path], None]  # writes the policy below a path, also in HF format

    @property
    def num_steps(self) -> dict[str, int]:
        """Number of steps of each training stage."""
        return {name: stage.num_steps for name, stage in self.stages.items()}

    @property
    def engine(self) -> Engine:
        """Sampler of the policy. Not available if the policy is behind an endpoint."""
        assert self.sampler is not None, f"{self.external} samples"
        return self.sampler


@dataclass
class Progress:
    """State of a run other than the weights, as needed to resume it."""

    step: int = 0  # completed steps, over all stages
    stage: str = ""  # current stage, or the last completed one
    stage_step: int = 0  # completed steps of the stage
    items_taken: int = 0  # tasks or demonstrations taken from the stage's stream
    num_records: int = 0  # records in metrics.jsonl
    record: dict[str, Any] | None = None  # record of the last step, until its evaluation is done
    value: float | None = None  # `eval.best_metric` after exactly this step
    best: BestEvaluation = field(default_factory=BestEvaluation)  # best evaluation of the stage
    stopped_early: bool = False  # True if the stage ended because evaluations did not improve
    num_failed: int = 0  # consecutive batches in which every episode failed
    num_learned: int = 0  # train-stage steps with a gradient
    weights_step: int | None = None  # step of the final weights, if the stage stopped early
    micro_rows: int = 0  # rows per micro-batch after the train stage ran out of memory; else 0
    # Micro-batch sizes of the stage.
    compiled_sizes: CompiledSizes = field(default_factory=CompiledSizes)
    # The other fields belong to the train stage. Fields with arrays are not compared, because == of
    # arrays does not return a bool.
    watched: WatchState = field(default_factory=WatchState)
    controllers: Controllers = field(default_factory=Controllers)
    buffered_groups: list[Group] = field(default_factory=list, compare=False)
    in_flight_tasks: list[int] = field(default_factory=list)  # stream indices of tasks in flight
    # Groups of the next step. They cannot be resampled: the weights that sampled them are gone.
    prefetched: CollectedGroups | None = field(default=None, compare=False)
    # Usage of all samples, evaluations included.
    ledger: UsageStats = field(default_factory=UsageStats)

    def is_older_than(self, record: Record) -> bool:
        """Return True if a record in `metrics.jsonl` is newer than this progress."""
        checkpoint_position = (STAGES.index(self.stage) if self.stage else -1, self.step)
        stage = record.get("stage", "train")
        record_position = (STAGES.index(stage) if stage in STAGES else len(STAGES), record["step"])
        return record_position > checkpoint_position or (
            record_position == checkpoint_position and self.record is not None
        )

    def is_mid_stage(self, num_steps: Mapping[str, int]) -> bool:
        """Return True if a training stage is partly done, or if its last evaluation is due.

        `num_steps` is the number of steps by training stage.
        """
        if self.stage not in num_steps or self.stage_step == 0 or self.stopped_early:
            return False
        return self.record is not None or self.stage_step < num_steps[self.stage]

    def is_out_of_patience(self, patience: int) -> bool:
        """Return True after `patience` evaluations without improvement; 0 means no limit."""
        return 0 < patience <= self.best.num_stale

    @property
    def has_learned_nothing(self) -> bool:
        """Return True if no step of the train stage has had a gradient so far."""
        return self.stage == "train" and self.stage_step > 0 and self.num_learned == 0

    @property
    def label(self) -> str:
        """Stage and number of completed steps, such as `train 30`."""
        return f"{self.stage} {self.stage_step}"

    @property
    def effective_weights_step(self) -> int:
        """Step that produced the weights: the last step, or the best step after an early stop."""
        return self.step if self.weights_step is None else self.weights_step

    def restore_images(self, reload_images: Callable[[list[Group]], list[Group]]) -> None:
        """Reload the images of the groups; checkpoints store only their names."""
        self.buffered_groups = reload_images(self.buffered_groups)
        if (prefetched := self.prefetched) is not None:
            groups, buffered_groups = map(
                reload_images, (prefetched.groups, prefetched.buffered_groups)
            )
            self.prefetched = dataclasses.replace(
                prefetched, groups=groups, buffered_groups=buffered_groups
            )

    def discard_prefetched_groups(self) -> None:
        """Drop the prefetched groups of the next step, and add their usage to the ledger."""
        if self.prefetched is not None:
            self.ledger, self.prefetched = self.ledger + self.prefetched.ledger, None

    def to_json(self) -> dict[str, Any]:
        """Convert to plain JSON values."""
        buffered_groups = serialization.serialize_groups(self.buffered_groups)
        prefetched = None if self.prefetched is None else self.prefetched.to_json()
        record = None if self.record is None else to_json_numbers(self.record)
        plain = dataclasses.asdict(dataclasses.replace(self, buffered_groups=[], prefetched=None))
        return {
            **plain,
            "record": record,
            "buffered_groups": buffered_groups,
            "prefetched": prefetched,
        }

    @classmethod
    def from_json(cls, saved: dict[str, Any], method: Method) -> Progress:
        """Create an instance from the result of `to_json`; drop groups that do not fit `method`."""
        known = {field.name for field in dataclasses.fields(cls)}
        fields = {name: value for name, value in saved.items() if name in known}
        # With --accept_changes the method may have changed. Drop groups of another size. Without
        # `filter.carry_over`, drop all: the update would not compute old log-probabilities.
        size = method.group_size if method.filter.carry_over else None
        buffered_groups = [group for group in saved["buffered_groups"] if len(group) == size]
        fields |= {
            "best": BestEvaluation(**saved["best"]),
            "compiled_sizes": CompiledSizes.from_json(saved["compiled_sizes"]),
            "controllers": Controllers.from_json(saved["controllers"], method),
            "buffered_groups": serialization.deserialize_groups(buffered_groups),
            "prefetched": CollectedGroups.from_json(saved["prefetched"])
            if saved["prefetched"]
            else None,
            "ledger": UsageStats.from_json(saved["ledger"]),
            "watched": WatchState(**saved["watched"]),
        }
        progress = cls(**fields)
        if progress.prefetched is not None:
            sizes = [len(group.trajectories) for group in progress.prefetched.groups]
            if not method.async_level or sizes != [method.group_size] * method.tasks_per_step:
                progress.discard_prefetched_groups()
        return progress


USER_CODE_SUFFIX = "'s file"
"""Suffix of the fingerprint names of user code, such as `advantage.name's file`."""


RunSuites = Callable[["RunState", str, Sequence[str]], tuple[dict[str, float], dict[str, str]]]
"""See `evaluate.run_suites`."""


@dataclass(kw_only=True)
class RunState:
    """State of a run, shared by its stages."""

    settings: Settings
    workdir: Path
    components: Components
    checkpointer: Checkpointer
    metrics_log: MetricsLog
    display: Display
    progress: Progress
    restored: dict[str, Any]  # items of the restored checkpoint, which the stages pop
    should_stop: Callable[[], bool]
    run_suites: RunSuites  # an argument because `evaluate` imports this module
    origin: Mapping[str, Any]  # configuration and file fingerprints, compared on resume
    failures: FailureCounter  # counts consecutive batches in which every episode failed
    state: TrainState | None = None  # current state in the middle of a training stage
    ref_params: Params | None = None  # reference policy of the train stage's KL term
    saved: Progress | None = None  # progress in the newest checkpoint
    # Usage of the current step or evaluation, and of unfinished groups of the next step.
    pending_usage: UsageStats = field(default_factory=UsageStats)
    held_out: float | None = None  # score of the last evaluation; see `get_held_out_score`

    def begin_stage(self, stage: str) -> bool:
        """Begin a stage unless it has begun; return False if the stage is done."""
        progress = self.progress
        if progress.stage and STAGES.index(progress.stage) > STAGES.index(stage):
            return False
        if progress.stage == stage:
            return progress.is_mid_stage(self.components.num_steps)
        progress.stage, progress.stage_step, progress.items_taken = stage, 0, 0
        progress.value, progress.best, progress.num_learned = None, BestEvaluation(), 0
        progress.controllers = Controllers.init(self.components.method)
        progress.buffered_groups = []
        progress.compiled_sizes = CompiledSizes()
        progress.discard_prefetched_groups()
        progress.in_flight_tasks = []
        return True

    def init_or_restore_state(self, params: Params) -> TrainState:
        """Return the training state: new at the start of a stage, else restored."""
        if "optimizer" in self.restored:
            state = TrainState(params=params, **self.restored.pop("optimizer"))
        else:
            components = self.components
            optimizer = components.stages[self.progress.stage].optimizer
            state = init_state(params, components.mesh, components.model.trained, optimizer)
        offloads = self.components.stages[self.progress.stage].settings.offload
        return move_moments(state, HOST_MEMORY) if offloads else state

    def init_or_restore_reference(self, params: Params) -> Params | None:
        """Return the reference policy, a copy of the stage's initial policy; None if unused."""
        if not self.components.method.has_reference:
            return None
        if "ref_params" in self.restored:
            return self.restored.pop("ref_params")
        return jax.tree.map(jax.numpy.copy, params)

    def end_stage(self, state: TrainState) -> Params:
        """Export the parameters, then save a checkpoint that marks the stage as done."""
        self.display.stop()
        self.components.engine.release()
        self.state = state
        self.components.export(state.params, self.workdir)
        self.save()
        self.state = self.ref_params = None  # free memory for the next stage
        return state.params

    def evaluate(self, suites: Sequence[str]) -> dict[str, float]:
        """Evaluate the engine's weights on `suites` in stage `train`, and return the metrics."""
        metrics, _ = self.run_suites(self, "train", suites)
        return metrics

    def check_budget(self) -> None:
        """Raise a BudgetSpentError if the run, with prefetched groups, has spent its budget."""
        prefetched, limits = self.progress.prefetched, self.settings.ledger
        spent = (
            self.progress.ledger
            + self.pending_usage
            + (prefetched.ledger if prefetched else UsageStats())
        )
        check_budget(spent, max_cost=limits.max_cost, max_calls=limits.max_calls)

    def add_discarded_cost(self, discarded: UsageStats) -> None:
        """Add the cost of discarded groups, which will be resampled."""
        self.progress.ledger += UsageStats(usage=discarded.usage)

    @property
    def is_stage_done(self) -> bool:
        """Return True if all steps of the stage are done; `end_stage` then saves a checkpoint."""
        return self.progress.stage_step >= self.components.num_steps[self.progress.stage]

    @property
    def is_checkpoint_due(self) -> bool:
        """Return True every `checkpoint.every_steps` steps."""
        return self.progress.stage_step % self.settings.checkpoint.every_steps == 0

    def compile_sampler(self) -> None:
        """Compile the sampler in parallel before the first step, except on a CPU.

        On a CPU, programs compile on first use: a run may use only a few of them.
        """
        engine = self.components.engine
        if engine.device.platform == "cpu":
            return
        started = time.perf_counter()
        with interruptible(self.should_stop):
            engine.compile(self.display.show_activity)
        self.metrics_log.add_to_next_record("timing_s/compile", time.perf_counter() - started)

    def save(self) -> None:
        """Save a checkpoint of the state and progress."""
        assert self.state is not None
        started = time.perf_counter()
        self.progress.num_records = self.metrics_log.num_records
        self.progress.num_failed = self.failures.num_batches
        self.display.show_activity("saving a checkpoint")
        trim_memory()  # make room for the host copies of the save
        self.checkpointer.save(
            self.progress.step,
            self.state,
            {**self.progress.to_json(), **self.origin},
            self.ref_params,
            value=self.progress.value,
        )
        self.saved = dataclasses.replace(self.progress)
        self.metrics_log.add_to_next_record(
            "timing_s/save_checkpoint", time.perf_counter() - started
        )

    def save_progress(self) -> None:
        """Save the progress of an interrupted stage, unless it is already saved."""
        self.display.stop()
        self.add_discarded_cost(self.pending_usage)
        self.pending_usage = UsageStats()
        # The final evaluation has no state, and the newest checkpoint has everything else.
        has_state = self.state is not None and self.progress.stage_step > 0
        if has_state and self.progress != self.saved:
            self.save()
        self.display.show_activity("waiting for the checkpoint to be written")
        self.checkpointer.wait()

"""The loop: stages in order, each step from tasks to metrics, top to bottom."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from ml_collections import ConfigDict

from jaxrl import distributed, entropy_control, evaluate, kl_control, report, sft
from jaxrl.assemble import Parts, make_optimizer, sft_shape, train_shape
from jaxrl.batching import pack
from jaxrl.checkpoint import Checkpointer, abstract, optimizer_items
from jaxrl.collect import Collected, NotEnoughGroupsError, Tried, collect, some_failed
from jaxrl.collect import from_json as trajectory_from_json
from jaxrl.collect import to_json as trajectory_to_json
from jaxrl.config import STAGES, flatten
from jaxrl.data import Stream
from jaxrl.envs.base import Task
from jaxrl.learning import (
    Failures,
    NothingWorksError,
    first_error,
    has_learned,
    nothing_learned,
    why_nothing,
)
from jaxrl.method import Controllers, k_at, make_estimator, make_policy_loss
from jaxrl.metrics import (
    Display,
    MetricsLog,
    Record,
    open_log,
    plain_number,
    plain_numbers,
    rollout_metrics,
    write_trajectories,
)
from jaxrl.minibatches import (
    Divergence,
    add_logprobs,
    make_measure,
    make_minibatches,
    takes_own_logprobs,
)
from jaxrl.models import qwen
from jaxrl.models.hf_weights import load_hf, save_hf
from jaxrl.objectives.controllers import SkipSet
from jaxrl.rules import is_measured, is_pass_at_k
from jaxrl.sampling.engine import Counts, Engine
from jaxrl.sampling.rollout import Interrupted, Seeds
from jaxrl.sharding import num_batch_shards, param_shardings
from jaxrl.stopping import Best, update_best
from jaxrl.types import Draw, Params, TrainState, Trajectory
from jaxrl.update import (
    init_state,
    make_score_step,
    make_update_step,
    put_batch,
    state_shardings,
)
from jaxrl.versions import write_environment

SHOWN = {
    "reward": "critic/rewards/mean",
    "exact match": "reward/exact_match/mean",
    "searches": "num_searches/mean",
    "python calls": "num_python_calls/mean",
    "response": "response_length/mean",
    "tokens/s": "perf/throughput",
    "s/step": "timing_s/step",
    "GiB": "perf/max_memory_gib",
}
"""What the display shows of a training step, and the metric it is."""

SHOWN_OF_SFT = {"loss": "sft/loss"} | {name: SHOWN[name] for name in ("tokens/s", "s/step", "GiB")}


@dataclasses.dataclass
class Position:
    """Where a run stands; with the weights, all that a restart needs."""

    step: int = 0  # steps done, over all stages
    stage: str = ""  # the stage under way, or the last one done
    stage_step: int = 0  # its steps done
    items_taken: int = 0  # of its stream of tasks or demonstrations
    num_records: int = 0  # in metrics.jsonl
    record: dict[str, Any] | None = None  # of the last step, while its evaluation is to be done
    value: float | None = None  # of eval.best_metric after this very step
    best: Best = dataclasses.field(default_factory=Best)  # of the stage
    stopped_early: bool = False  # the stage ended for want of improvement
    num_failed: int = 0  # batches in a row of which every episode failed
    num_learned: int = 0  # the train stage's steps whose update had a gradient
    weights_step: int | None = None  # whose weights it ended with, where it stopped early
    # Of the train stage: the states of its controllers, and groups sampled beyond what was needed.
    controllers: Controllers = dataclasses.field(default_factory=Controllers)
    carried: list[list[Trajectory]] = dataclasses.field(default_factory=list, compare=False)

    def is_passed_by(self, record: Record) -> bool:
        """Whether a record of `metrics.jsonl` is of something that comes after this position."""
        here = (STAGES.index(self.stage) if self.stage else -1, self.step)
        stage = record.get("stage", "train")
        there = (STAGES.index(stage) if stage in STAGES else len(STAGES), record["step"])
        return there > here or (there == here and self.record is not None)

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        carried = [[trajectory_to_json(t) for t in group] for group in self.carried]
        record = None if self.record is None else plain_numbers(self.record)
        plain = dataclasses.asdict(dataclasses.replace(self, carried=[]))
        return {**plain, "record": record, "carried": carried}

    @classmethod
    def from_json(cls, saved: dict[str, Any], config: ConfigDict) -> Position:
        """The inverse of `to_json`, for a run of this configuration."""
        # Checkpoints from before there were these have none. Carried groups of another size, or
        # without the switch by which their old log-probabilities are computed, are of no use.
        size = config.rollout.group_size if config.filter.carry_over else None
        groups = [group for group in saved.get("carried", []) if len(group) == size]
        carried = [[trajectory_from_json(t) for t in group] for group in groups]
        controllers = Controllers.from_json(saved.get("controllers", {}), config)
        best = Best(**saved["best"])
        known = {field.name for field in dataclasses.fields(cls)}
        saved = {"num_learned": saved["stage_step"], **saved}  # older ones did not count
        kept = {name: value for name, value in saved.items() if name in known}
        return cls(**{**kept, "best": best, "controllers": controllers, "carried": carried})


@dataclasses.dataclass
class Run:
    """A run's parts, its place on disk, and where it stands."""

    config: ConfigDict
    workdir: Path
    parts: Parts
    checkpointer: Checkpointer
    log: MetricsLog
    display: Display
    position: Position
    restored: dict[str, Any]  # by the checkpoint that the run began with; each stage takes its own
    should_stop: Callable[[], bool]
    contents: Mapping[str, str]  # fingerprints of the files that the run reads
    failures: Failures  # batches in a row of which every episode failed
    state: TrainState | None = None  # at the position, in the middle of a stage that trains
    ref_params: Params | None = None
    saved: Position | None = None  # where the newest checkpoint stands

    def save(self) -> None:
        """Checkpoints the state at the position."""
        assert self.state is not None
        started = time.perf_counter()
        self.position.num_records = self.log.num_records
        self.position.num_failed = self.failures.num_batches
        self.saved = dataclasses.replace(self.position)
        self.checkpointer.save(
            self.position.step,
            self.state,
            self.position.to_json() | self._origin(),
            self.ref_params,
            value=self.position.value,
        )
        self.log.carry("timing_s/save_checkpoint", time.perf_counter() - started)

    def _origin(self) -> dict[str, Any]:
        """What the checkpoint was made with, by which a later start is measured."""
        return {"config": flatten(self.config), "contents": dict(self.contents)}


def run(
    config: ConfigDict,
    workdir: Path,
    parts: Parts,
    display: Display,
    should_stop: Callable[[], bool] = lambda: False,
    contents: Mapping[str, str] | None = None,
    adopt: Callable[[], None] = lambda: None,
) -> None:
    """Runs the configured stages, from where the workdir's newest checkpoint stands.

    Args:
        config: of the run.
        workdir: where it lives; it is there.
        parts: what the stages work with.
        display: progress.
        should_stop: true once the run is to save and end.
        contents: fingerprints of the files that the configuration names, for the checkpoints.
        adopt: called once the checkpoint to go on with, if any, is restored: from then on the run
            is one of this configuration.

    Raises:
        Interrupted: `should_stop` was true. The steps that were done are saved.
        NothingWorksError: every episode failed, several times in a row or in the last evaluation.
            Likewise.
        CheckpointError: there are checkpoints, but the one to go on with cannot be read.
    """
    with contextlib.ExitStack() as ending:
        checkpointer = Checkpointer(
            workdir / "checkpoints",
            keep=config.checkpoint.keep,
            keep_best=config.checkpoint.keep_best,
            say=display.say,
        )
        ending.callback(checkpointer.close)
        found = checkpointer.restore_newest(
            lambda saved: restore_targets(config, parts, Position.from_json(saved, config))
        )
        position, restored = Position(), {}
        if found:
            position, restored = Position.from_json(found[0], config), found[1]
        adopt()
        is_main = distributed.is_main()
        if is_main and (found or set(config.stages) != {"evaluate"}):
            remove_later_files(workdir, position.step)
        log = open_log(
            workdir,
            position.num_records,
            config,
            display.say,
            is_written=is_main,
            is_later=position.is_passed_by,
        )
        ending.callback(log.close)
        ending.callback(display.stop)
        if is_main:
            write_environment(workdir / "environment.json", position.step, parts, display.say)
        this = Run(
            config,
            workdir,
            parts,
            checkpointer,
            log,
            display,
            position,
            restored,
            should_stop,
            contents or {},
            Failures(
                limit=config.rollout.max_failed_steps,
                say=display.say,
                num_batches=position.num_failed,
            ),
        )
        display.say(f"sampler shapes: {parts.engine.shapes()}")
        if found:
            this.saved = dataclasses.replace(position)
            display.say(
                f"resuming after step {position.step} ({position.stage} {position.stage_step})"
            )
            params = restored.pop("params")
        else:
            display.say(f"no checkpoint in {workdir}: starting from {config.model.path}")
            params = load_hf(
                config.model.path, parts.mesh, progress=display.counter("loading weights, MiB")
            )
        run_stage = {"sft": run_sft, "train": run_train, "evaluate": run_evaluate}
        try:
            for stage in config.stages:
                params = run_stage[stage](this, params)
        except NotEnoughGroupsError:
            save_position(this)
            raise
        except NothingWorksError:
            save_position(this)
            if is_main:
                report.write_or_warn(workdir, display.say)
            raise
        except Interrupted:
            save_position(this)
            saved = f"step {position.step} is saved. The same command goes on from there"
            nothing = "there was nothing to save yet. The same command begins anew"
            display.say(f"stopped; {saved if this.saved else nothing}")
            if is_main:
                report.write_or_warn(workdir, display.say)
            raise
    if is_main:
        report.write_or_warn(workdir, display.say)
    paths = [path for path in workdir.iterdir() if not path.name.startswith(".")]
    names = sorted(path.name + "/" * path.is_dir() for path in paths)
    display.say(f"done; {workdir} holds {', '.join(names)}")
    if has_learned_nothing(position):
        display.say(nothing_learned(position.stage_step, config.optimizer.lr))


def has_learned_nothing(position: Position) -> bool:
    """True in or after a train stage no step of which had an update with a gradient."""
    return position.stage == "train" and position.stage_step > 0 and position.num_learned == 0


def save_position(this: Run) -> None:
    """Saves a stage that ends before its time, unless that is done."""
    this.display.stop()
    if this.position.stage_step > 0 and this.position != this.saved:
        this.save()
    this.checkpointer.wait()


def begin_stage(this: Run, stage: str) -> bool:
    """Moves the position to a stage; False when the checkpoint says it is done."""
    position = this.position
    if position.stage and STAGES.index(position.stage) > STAGES.index(stage):
        return False
    if position.stage == stage:
        return is_under_way(this.config, position)
    position.stage, position.stage_step, position.items_taken = stage, 0, 0
    position.value, position.best, position.num_learned = None, Best(), 0
    position.controllers, position.carried = Controllers.init(this.config), []
    return True


def is_under_way(config: ConfigDict, position: Position) -> bool:
    """True in the middle of a stage that trains: its steps are not all done and recorded."""
    if position.stage not in config.stages or position.stage_step == 0 or position.stopped_early:
        return False
    return position.record is not None or position.stage_step < num_stage_steps(config, position)


def num_stage_steps(config: ConfigDict, position: Position) -> int:
    """How many steps the position's stage has."""
    return config.num_steps if position.stage == "train" else config.sft.num_steps


def stage_optimizer(config: ConfigDict, stage: str) -> optax.GradientTransformation:
    """The optimizer of a stage."""
    if stage == "sft":
        return make_optimizer(config.sft.optimizer, config.sft.num_steps)
    updates_per_step = config.optimizer.num_minibatches * config.optimizer.num_epochs
    return make_optimizer(config.optimizer, config.num_steps * updates_per_step)


def restore_targets(config: ConfigDict, parts: Parts, position: Position) -> dict[str, Any]:
    """What of a checkpoint at this position the run goes on with, abstract."""
    shapes = qwen.abstract_params(parts.model_config)
    params = abstract(shapes, param_shardings(parts.mesh, parts.model_config))
    if not is_under_way(config, position):
        return {"params": params}
    optimizer = stage_optimizer(config, position.stage)
    fresh = jax.eval_shape(
        lambda params: init_state(params, parts.mesh, parts.model_config, optimizer), shapes
    )
    state = abstract(fresh, state_shardings(parts.mesh, parts.model_config, optimizer))
    targets = {"params": params, "optimizer": optimizer_items(state)}
    return targets | ({"ref_params": params} if has_reference(config, position.stage) else {})


def start_state(this: Run, params: Params, optimizer: optax.GradientTransformation) -> TrainState:
    """A fresh state at the start of a stage, the checkpoint's in its middle."""
    if this.position.stage_step > 0:
        return TrainState(params=params, **this.restored.pop("optimizer"))
    return init_state(params, this.parts.mesh, this.parts.model_config, optimizer)


def remove_later_files(workdir: Path, step: int) -> None:
    """Removes what a killed run wrote after the step it is resumed from."""
    for path in [*workdir.glob("trajectories/*"), *workdir.glob("eval/*")]:
        name = re.fullmatch(r"(?:step|sft|train|evaluate)_(\d+)\.\w+", path.name)
        if path.name.endswith(".unfinished") or (name and int(name[1]) > step):
            path.unlink()


def run_sft(this: Run, params: Params) -> Params:
    """Supervised warm start on demonstrations; returns the trained parameters."""
    config, parts, position = this.config, this.parts, this.position
    num_steps, batch_size = config.sft.num_steps, config.sft.batch_size
    if not begin_stage(this, "sft"):
        return params
    optimizer = stage_optimizer(config, "sft")
    state = this.state = start_state(this, params, optimizer)
    update_step = make_update_step(parts.model, sft.supervised_loss, optimizer)
    stream = Stream(parts.demonstrations, seed=config.seed)
    shape = sft_shape(config)
    this.display.start("sft", position.stage_step, num_steps)
    while position.stage_step < num_steps:
        if distributed.anywhere(this.should_stop()):
            raise Interrupted
        started = time.perf_counter()
        demonstrations = stream.take(position.items_taken, batch_size)
        packed = pack(
            demonstrations,
            np.ones(batch_size),
            shape,
            aggregation="token-mean",
            num_shards=num_batch_shards(parts.mesh),
        )
        batch = put_batch(parts.mesh, packed.batch)
        state, metrics = update_step(state, batch, packed.num_micro)
        this.state = state
        metrics = {name: float(value) for name, value in metrics.items()}
        step_s = time.perf_counter() - started
        position.step, position.stage_step = position.step + 1, position.stage_step + 1
        position.items_taken += batch_size
        record = {
            "sft/loss": metrics["sft/nll_loss"],
            "sft/entropy": metrics["sft/entropy"],
            "sft/grad_norm": metrics["grad_norm"],
            "sft/num_skipped": int(state.num_skipped),
            "sft/padding": packed.padding,
            "timing_s/step": step_s,
            "perf/throughput": packed.num_tokens / step_s,
            **memory_metrics(),
            "perf/num_compilations/update": update_step.num_traces,
        }
        this.log.write(position.step, "sft", record)
        this.display.step(
            position.stage_step,
            {name: record[key] for name, key in SHOWN_OF_SFT.items() if key in record},
        )
        if is_checkpoint_due(this, num_steps):
            this.save()
    return end_stage(this, state)


def end_stage(this: Run, state: TrainState) -> Params:
    """Exports the parameters, then checkpoints: that tells a restart that the stage is done."""
    this.display.stop()
    this.parts.engine.release()
    this.state = state
    export(this, state.params)
    this.save()
    this.state = None  # the next stage needs the room
    return state.params


def run_train(this: Run, params: Params) -> Params:
    """Reinforcement learning; returns the trained parameters."""
    config, parts, position = this.config, this.parts, this.position
    num_steps, rollout = config.num_steps, config.rollout
    if not begin_stage(this, "train"):
        if position.stage == "train" and position.stage_step > num_steps:
            this.display.say(
                f"train: {position.stage_step} steps are done, and config.num_steps is "
                f"{num_steps}: nothing is left to train"
            )
        return params
    optimizer = stage_optimizer(config, "train")
    resumed = position.stage_step > 0
    ref_params = this.ref_params = _reference(this, params)
    state = this.state = start_state(this, params, optimizer)
    update_step = make_update_step(
        parts.model,
        make_policy_loss(config.loss, config.kl),
        optimizer,
        temperature=rollout.temperature,
        entropy_gradient=config.loss.entropy_coef != 0,
    )
    score = make_score_step(parts.model, temperature=rollout.temperature)
    estimate = make_estimator(config)
    stream = Stream(parts.tasks, seed=config.seed)
    shape = train_shape(config)
    num_shards = num_batch_shards(parts.mesh)
    measure = make_measure(score, parts.mesh, shape, config) if is_measured(config) else None

    def divergences_of(trajectories: Sequence[Trajectory]) -> list[Divergence | None] | None:
        if measure is None:
            return None
        assert this.state is not None
        assert ref_params is not None
        return measure(trajectories, this.state.params, ref_params)

    parts.engine.temperature, parts.engine.top_p = rollout.temperature, rollout.top_p
    parts.engine.set_weights(state.params)
    if not resumed:
        before, _ = run_suites(this, "train", config.eval.suites)
        best_metric(config, before)  # refused now where it is missing
        open_gate(this, before)
        bootstrap(this)
        before |= position.controllers.metrics()
        this.log.write(position.step, "train", before)
    this.display.start("train", position.stage_step, num_steps)
    if position.record is not None:
        finish_step(this)  # the run was stopped while it evaluated
    while position.stage_step < num_steps and not is_out_of_patience(config, position):
        started = time.perf_counter()
        counts_before = dataclasses.replace(parts.engine.counts)
        collected = collect_step(this, stream, int(state.num_updates), divergences_of)
        parts.engine.release()  # its memory is the update's
        sampled = time.perf_counter()
        trajectories = collected.trajectories
        divergences = divergences_of(trajectories)
        trajectories, kl_metrics = kl_control.penalize(
            trajectories, divergences, position.controllers, config
        )
        controllers, windows = entropy_control.advance(
            trajectories, config, position.controllers, parts.is_trigger
        )
        trajectories = entropy_control.reward_entropy(trajectories, windows, config, controllers)
        k = k_at(config.advantage, position.stage_step)
        advantages = estimate(trajectories, position.step, k)
        trajectories = [
            dataclasses.replace(trajectory, advantage=float(advantage))
            for trajectory, advantage in zip(trajectories, advantages, strict=True)
        ]
        minibatches = make_minibatches(
            trajectories,
            advantages,
            shape,
            config,
            kl_weights=entropy_control.token_kl_weights(trajectories, windows, config, controllers),
            divergences=divergences,
            num_shards=num_shards,
        )
        batches = [
            add_logprobs(
                put_batch(parts.mesh, minibatch.batch),
                minibatch,
                score,
                state.params,
                ref_params if config.kl.place == "loss" else None,
                needs_old=not takes_own_logprobs(config),
            )
            for minibatch in minibatches
        ]
        measured = []
        this.display.part(f"update, {len(minibatches) * config.optimizer.num_epochs} mini-batches")
        for _ in range(config.optimizer.num_epochs):
            for minibatch, batch in zip(minibatches, batches, strict=True):
                if minibatch.num_counted == 0:
                    continue  # only environment errors: there is nothing to learn from
                # Without any signal left the optimizer still steps: as if all had been kept.
                state, metrics = update_step(state, batch, minibatch.num_micro)
                measured.append(metrics)
        this.state = state
        measured = jax.device_get(measured)
        metrics = merge(measured)
        parts.engine.set_weights(state.params)
        updated = time.perf_counter()
        controllers = kl_control.advance(controllers, trajectories, divergences, config)
        controllers = skip_solved(controllers, collected.tried, config)
        position.controllers, position.carried = controllers, collected.carried
        position.step, position.stage_step = position.step + 1, position.stage_step + 1
        position.items_taken = collected.items_taken
        position.value = None
        position.num_learned += has_learned(measured) and config.optimizer.lr > 0
        why = why_nothing(trajectories, measured), some_failed(collected.tried, rollout.group_size)
        if any(why):
            this.display.say(
                f"warning: train {position.stage_step}: {'; '.join(filter(None, why))}"
            )
        position.record = {
            **rollout_metrics(
                trajectories, rollout.max_response_tokens, has_python=config.env.python
            ),
            **metrics,
            **collected.metrics,
            **kl_metrics,
            **entropy_control.window_metrics(trajectories, windows, controllers),
            **({"advantage/k": k} if is_pass_at_k(config) else {}),
            "actor/num_updates": int(state.num_updates),
            "actor/num_skipped": int(state.num_skipped),
            "actor/num_learned": position.num_learned,
            "rollout/tasks_taken": position.items_taken,
            "rollout/informative_share": float(np.mean(advantages != 0)),
            "rollout/padding": float(np.mean([m.padding for m in minibatches])),
            "rollout/imbalance": float(np.mean([m.imbalance for m in minibatches])),
            **engine_metrics(parts.engine, counts_before),
            "perf/num_compilations/update": update_step.num_traces,
            "timing_s/gen": sampled - started,
            "timing_s/update_actor": updated - sampled,
            "timing_s/step": updated - started,
            "perf/throughput": sum(len(t.token_ids) for t in trajectories) / (updated - started),
            **memory_metrics(),
        }
        fields = entropy_control.sample_fields(trajectories, windows, controllers)
        log_trajectories(this, trajectories, fields)
        finish_step(this)
    if position.stage_step < num_steps:
        state = take_best(this, state)
    return end_stage(this, state)


def collect_step(
    this: Run,
    stream: Stream[Task],
    policy_version: int,
    divergences_of: Callable[[Sequence[Trajectory]], list[Divergence | None] | None],
) -> Collected:
    """The trajectories of the next step."""
    config, position, controllers = this.config, this.position, this.position.controllers

    def penalty(trajectories: Sequence[Trajectory]) -> np.ndarray:
        this.parts.engine.clear()  # the cache would lie beside the activations that scoring takes
        return kl_control.penalties(divergences_of(trajectories), controllers, config)

    return collect(
        make_generate(this, position.step, policy_version),
        lambda position, count: draw(stream, position, count, controllers.skipped),
        config,
        items_taken=position.items_taken,
        carried=position.carried,
        is_late=controllers.is_late,
        penalty=penalty if config.kl.place == "reward" else None,
        failures=this.failures,
    )


def make_generate(
    this: Run, step: int, policy_version: int
) -> Callable[[Sequence[Draw]], list[Trajectory]]:
    """`generate(draws)` samples a group of each with the engine's weights."""

    def generate(draws: Sequence[Draw]) -> list[Trajectory]:
        return this.parts.rollout(
            draws,
            group_size=this.config.rollout.group_size,
            seeds=Seeds(seed=this.config.seed, stage=STAGES.index("train"), step=step),
            policy_version=policy_version,
            should_stop=this.should_stop,
            progress=this.display.counter("trajectories"),
        )

    return generate


def bootstrap(this: Run) -> None:
    """Rolls tasks out once, to set up thresholds, difficulties and targets before the first step.

    The tasks are the first ones in their file; their samples are those of no step.
    """
    config, position, parts = this.config, this.position, this.parts
    count = config.shaping.bootstrap_tasks
    tasks = parts.tasks[: count if count >= 0 else None]
    if not tasks:
        return
    this.display.say(f"train: one pass over {len(tasks)} tasks sets up the controllers")
    generate = make_generate(this, BOOTSTRAP_STEP, policy_version=0)
    trajectories: list[Trajectory] = []
    size = config.rollout.tasks_per_step
    for start in range(0, len(tasks), size):
        batch = [
            Draw(task=t, position=start + i) for i, t in enumerate(tasks[start : start + size])
        ]
        sampled = generate(batch)
        this.failures.count(sampled)
        trajectories += [dataclasses.replace(t, group_id=t.group_id + start) for t in sampled]
    position.controllers, _ = entropy_control.advance(
        trajectories, config, position.controllers, parts.is_trigger
    )


BOOTSTRAP_STEP = 2**31 - 1
"""In the place of a step, in the seeds of what is sampled before the first one."""


def skip_solved(
    controllers: Controllers, tried: Sequence[Tried], config: ConfigDict
) -> Controllers:
    """The controllers with the tasks added that every sample of the step solved, surely.

    A group with environment errors says too little: one survivor would skip its task for good.
    """
    if controllers.skipped is None:
        return controllers
    tried = [group for group in tried if group.num_scored == config.rollout.group_size]
    skipped = controllers.skipped.update(
        [group.task_id for group in tried],
        [group.num_correct for group in tried],
        [group.num_scored for group in tried],
        [group.mean_entropy for group in tried],
        threshold=config.filter.skip_entropy,
    )
    return dataclasses.replace(controllers, skipped=skipped)


def open_gate(this: Run, evaluated: dict[str, float]) -> None:
    """Tells the stage gate of a method that has one how correct greedy answers are."""
    position, config = this.position, this.config
    gate = position.controllers.gate
    if gate is None or not evaluated:
        return
    part = config.reward.correct
    head = "val-core/all/exact_match" if part == "exact_match" else f"val-aux/all/{part}"
    # Where every search failed, nothing was scored and there is no such metric.
    correctness = evaluated.get(f"{head}/greedy", math.nan)
    moved = gate.update(correctness, max_tolerance=config.shaping.stage_tolerance)
    position.controllers = dataclasses.replace(position.controllers, gate=moved)


def finish_step(this: Run) -> None:
    """What follows an update: an evaluation, the record and a checkpoint, each where it is due."""
    config, position = this.config, this.position
    evaluated = periodic_evaluation(this, config.num_steps)
    open_gate(this, evaluated)
    assert position.record is not None
    record = position.record | evaluated | position.controllers.metrics()
    position.record = None
    numbers = {name: plain_number(record.get(key)) for name, key in SHOWN.items()}
    shown = {name: number for name, number in numbers.items() if number is not None}
    this.display.step(position.stage_step, shown)
    position.value = best_metric(config, evaluated)
    if position.value is not None:
        position.best = update_best(
            position.best, position.step, position.value, min_delta=config.eval.min_delta
        )
    is_best = position.value is not None and position.best.step == position.step
    is_early = position.stage_step < config.num_steps and is_out_of_patience(config, position)
    this.log.write(position.step, "train", record | ({"stopped_early": 1} if is_early else {}))
    is_due = is_checkpoint_due(this, config.num_steps) and not is_early
    # The stage's last step is saved at its end; one that ends it early is not, but may be the best.
    if position.stage_step < config.num_steps and (is_best or is_due):
        this.save()


def best_metric(config: ConfigDict, evaluated: dict[str, float]) -> float | None:
    """The value that tells the best checkpoint; None where nothing was evaluated or scored.

    Raises:
        ValueError: the evaluation has no metric of that name.
    """
    if config.checkpoint.keep_best == 0 or not evaluated:
        return None
    name = config.eval.best_metric
    if name not in evaluated and evaluate.num_unscored_suites(evaluated):
        return None  # where every episode failed there is no score by any name
    if name not in evaluated:
        raise ValueError(
            f"config.eval.best_metric is {name!r}; expected one of the metrics of "
            f"config.eval.suites: {', '.join(evaluated)}."
        )
    return float(evaluated[name]) if math.isfinite(evaluated[name]) else None


def is_out_of_patience(config: ConfigDict, position: Position) -> bool:
    """True when so many evaluations have not improved that the stage ends."""
    return 0 < config.eval.patience <= position.best.num_stale


def take_best(this: Run, state: TrainState) -> TrainState:
    """The state of the best checkpoint in place of the last one, which is freed."""
    config, position = this.config, this.position
    wanted = abstract(state, jax.tree.map(lambda leaf: leaf.sharding, state))
    this.checkpointer.wait()
    this.parts.engine.release()
    this.state = None
    jax.tree.map(lambda leaf: leaf.delete(), state)  # the device has no room for two
    step, best = this.checkpointer.restore_best(wanted)
    position.stopped_early, position.weights_step = True, step
    position.value = position.best.value
    this.display.say(
        f"train {position.stage_step}: {config.eval.best_metric} did not improve by more than "
        f"{config.eval.min_delta} in {config.eval.patience} evaluations; ending with the "
        f"checkpoint of step {step}, the best"
    )
    return best


def draw(
    stream: Stream[Task], position: int, count: int, skipped: SkipSet | None = None
) -> tuple[list[Draw], int]:
    """The next tasks of the stream that are not skipped, each with its place; where it then stands.

    Raises:
        NotEnoughGroupsError: a whole epoch is skipped.
    """
    draws: list[Draw] = []
    num_skipped = 0  # since the last that was not
    while len(draws) < count:
        [task] = stream.take(position, 1)
        if skipped is not None and task.id in skipped:
            num_skipped += 1
            if num_skipped > 2 * stream.num_items:
                raise NotEnoughGroupsError(
                    f"all {stream.num_items} tasks are solved and skipped "
                    "(config.filter.skip_solved); there is nothing left to train on. Set "
                    "config.num_steps to end here, or add tasks."
                )
        else:
            draws.append(Draw(task=task, position=position))
            num_skipped = 0
        position += 1
    return draws, position


def is_checkpoint_due(this: Run, num_steps: int) -> bool:
    """True every so many steps, but for the stage's last one, which ends with a checkpoint."""
    stage_step = this.position.stage_step
    return stage_step % this.config.checkpoint.every_steps == 0 and stage_step < num_steps


def log_trajectories(
    this: Run,
    trajectories: Sequence[Trajectory],
    fields: Sequence[dict[str, Any]],
) -> None:
    """Writes the step's first trajectories to its file, as many as the configuration asks for."""
    if not distributed.is_main():
        return
    count = this.config.log.trajectories
    count = len(trajectories) if count < 0 else count
    file = this.workdir / "trajectories" / f"step_{this.position.step:06d}.jsonl"
    write_trajectories(file, trajectories[:count], fields[:count])


def run_evaluate(this: Run, params: Params) -> Params:
    """Evaluates parameters with all final suites, unless that is done and on disk."""
    file = this.workdir / "eval" / f"evaluate_{this.position.step}.json"
    done = None
    if distributed.is_main():
        done = evaluate.read_metrics(file, weights_step(this.position), made_with(this))
    errors: dict[str, str] = {}
    metrics = distributed.from_main(done)
    if metrics is None:
        this.parts.engine.set_weights(params)
        metrics, errors = run_suites(this, "evaluate", this.config.eval.final_suites)
        this.parts.engine.release()
    else:
        this.display.say(f"evaluated before, with the same settings: {file.with_suffix('.txt')}")
    metrics["weights_step"] = weights_step(this.position)
    this.log.write(this.position.step, "evaluate", metrics)
    this.failures.check_suites(errors)
    return params


def made_with(this: Run) -> str:
    """A hash of what an evaluation depends on beside the weights: settings, questions, corpus."""
    sections = ("seed", "model", "env", "prompt", "search", "rollout", "reward", "eval")
    settings = {name: this.config.to_dict()[name] for name in sections}
    read = ("model.path/", "tasks.eval.source", "search.corpus")
    content = {name: digest for name, digest in this.contents.items() if name.startswith(read)}
    return hashlib.sha256(json.dumps([settings, content], sort_keys=True).encode()).hexdigest()


def weights_step(position: Position) -> int:
    """The step whose weights the run holds: the last one, unless the stage stopped early."""
    return position.step if position.weights_step is None else position.weights_step


def has_reference(config: ConfigDict, stage: str) -> bool:
    """True where a KL term needs the policy as it was at the start of the stage."""
    return stage == "train" and config.kl.coef != 0 and config.kl.anchor == "ref"


def _reference(this: Run, params: Params) -> Params | None:
    """A frozen copy of the policy at the start of the stage, where a KL term needs it."""
    if not has_reference(this.config, "train"):
        return None
    if this.position.stage_step > 0:
        return this.restored.pop("ref_params")
    return jax.tree.map(jnp.copy, params)


def merge(measured: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Metrics of a step from those of its updates: the largest of maxima, else the mean.

    An update in which nothing was measured is left out.
    """
    if not measured:
        return {}
    merged = {}
    for name in measured[0]:
        values = [float(metrics[name]) for metrics in measured]
        values = [value for value in values if not math.isnan(value)] or [math.nan]
        reduced = max(values) if name.endswith("_max") else float(np.mean(values))
        merged[name if "/" in name else f"actor/{name}"] = reduced
    if "rollout_corr/weight_mean" in merged:
        square = merged["rollout_corr/weight_square_mean"]
        merged["rollout_corr/effective_sample_share"] = (
            merged["rollout_corr/weight_mean"] ** 2 / square if square else math.nan
        )
    return merged


def memory_metrics() -> dict[str, float]:
    """The most memory that this process has held at once on one of its devices, where it is told.

    A CPU does not tell; then there is no such metric.
    """
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [found["peak_bytes_in_use"] for found in stats if "peak_bytes_in_use" in found]
    return {"perf/max_memory_gib": max(peaks) / 2**30} if peaks else {}


def engine_metrics(engine: Engine, before: Counts) -> dict[str, float]:
    """What the samplers of all processes did since this one's counters stood at `before`."""
    now, past = dataclasses.asdict(engine.counts), dataclasses.asdict(before)
    parts = distributed.gather({name: now[name] - past[name] for name in now})
    done = {name: sum(part[name] for part in parts) for name in now}
    return {
        "rollout/slot_occupancy": done["sampled"] / max(done["slot_steps"], 1),
        "rollout/prefilled_prompt_tokens": done["prefilled_prompt"],
        "rollout/prefilled_resume_tokens": done["prefilled_resume"],
        "rollout/sampled_tokens": done["sampled"],
        "perf/num_compilations/sampler": engine.num_compilations,
    }


def periodic_evaluation(this: Run, num_steps: int) -> dict[str, float]:
    """Evaluation metrics where one is due."""
    every, stage_step = this.config.eval.every_steps, this.position.stage_step
    if stage_step == num_steps or (every and stage_step % every == 0):
        return run_suites(this, "train", this.config.eval.suites)[0]
    return {}


def run_suites(
    this: Run, stage: str, suites: Sequence[str]
) -> tuple[dict[str, float], dict[str, str]]:
    """Evaluates the engine's weights and writes `eval/<stage>_<step>.json` and `.txt`.

    Returns:
        Metrics, and the first error of each suite of which every episode failed.
    """
    parts, step, settings = this.parts, this.position.step, this.config.eval
    seeds = Seeds(seed=this.config.seed, stage=STAGES.index("evaluate"), step=step)
    started = time.perf_counter()
    draws = [Draw(task=task, position=index) for index, task in enumerate(parts.eval_tasks)]
    played, summaries = {}, {}
    for suite in suites:
        is_greedy = suite == "greedy"
        num_samples = 1 if is_greedy else settings.samples
        played[suite] = evaluate.roll_out(
            parts.engine,
            parts.rollout_without_search if suite == "empty_search" else parts.rollout,
            draws,
            num_samples=num_samples,
            temperature=0.0 if is_greedy else settings.temperature,
            top_p=settings.top_p,
            seeds=seeds,
            should_stop=this.should_stop,
            progress=this.display.counter(f"evaluating {suite}, trajectories"),
        )
        summaries[suite] = evaluate.summarize(
            played[suite],
            num_samples=num_samples,
            has_python=this.config.env.python,
            ks=settings.ks,
            num_resamples=settings.resamples,
            seed=this.config.seed,
        )
    parts.engine.clear()  # the cache; the weights are the next rollout's
    weights = weights_step(this.position)
    record = evaluate.as_record(
        step,
        stage,
        settings.to_dict(),
        played,
        summaries,
        weights_step=weights,
        made_with=made_with(this),
    )
    text = evaluate.as_text(step, stage, summaries, weights_step=weights)
    if distributed.is_main():
        evaluate.write(this.workdir / "eval" / f"{stage}_{step}.json", record, text)
    unscored = [suite for suite, summary in summaries.items() if evaluate.is_unscored(summary)]
    errors = {suite: first_error(played[suite]) for suite in unscored}
    for suite, error in errors.items():
        this.display.say(
            f"warning: {stage} {step} {suite}: no question could be scored, since every "
            f"episode ended in an environment error; the first: {error}"
        )
    if stage == "evaluate":
        this.display.say(text)
    else:
        for suite, summary in summaries.items():
            this.display.say(f"{stage} {step} {evaluate.one_line(suite, summary)}")
    metrics = {"timing_s/testing": time.perf_counter() - started}
    for suite, summary in summaries.items():
        metrics |= evaluate.as_metrics(suite, summary)
    return metrics, errors


def export(this: Run, params: Params) -> None:
    """Writes the trained model as an HF folder that `transformers` loads."""
    save_hf(
        params,
        this.parts.model_config,
        this.workdir / "export",
        source=this.config.model.path,
    )

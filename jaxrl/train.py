"""The loop: stages in order, each step from tasks to metrics, top to bottom."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from ml_collections import ConfigDict

from jaxrl import evaluate, sft
from jaxrl.assemble import Parts, make_optimizer, sft_shape, train_shape
from jaxrl.batching import BatchShape, Packed, pack
from jaxrl.checkpoint import Checkpointer, abstract
from jaxrl.compilation import CompiledFunction
from jaxrl.config import STAGES
from jaxrl.data import Stream
from jaxrl.envs.base import Outcome, Task
from jaxrl.metrics import Display, MetricsLog, rollout_metrics, write_trajectories
from jaxrl.models import qwen
from jaxrl.models.hf_weights import load_hf, save_hf
from jaxrl.objectives.advantages import grpo
from jaxrl.objectives.kl import kl_estimate
from jaxrl.objectives.losses import clip_metrics, clipped_policy_loss
from jaxrl.sampling.engine import Counts, Engine
from jaxrl.sampling.rollout import Seeds
from jaxrl.sharding import param_shardings
from jaxrl.types import Batch, Draw, Params, TrainState, Trajectory
from jaxrl.update import (
    TokenLoss,
    init_state,
    make_score_step,
    make_update_step,
    put_batch,
    state_shardings,
)

SHOWN = {
    "reward": "critic/rewards/mean",
    "exact match": "reward/exact_match/mean",
    "searches": "num_searches/mean",
    "tokens/s": "perf/throughput",
}
"""What the display shows of a training step, and the metric it is."""


@dataclasses.dataclass
class Position:
    """Where a run stands; with the weights, all that a restart needs."""

    step: int = 0  # steps done, over all stages
    stage: str = ""  # the stage under way, or the last one done
    stage_step: int = 0  # its steps done
    items_taken: int = 0  # of its stream of tasks or demonstrations
    num_records: int = 0  # in metrics.jsonl


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

    def save(self, state: TrainState, ref_params: Params | None = None) -> None:
        """Checkpoints the state and the position."""
        self.position.num_records = self.log.num_records
        self.checkpointer.save(
            self.position.step, state, dataclasses.asdict(self.position), ref_params
        )


def run(config: ConfigDict, workdir: Path, parts: Parts, display: Display) -> None:
    """Runs the configured stages, from where the workdir's newest checkpoint stands."""
    checkpointer = Checkpointer(workdir / "checkpoints", keep=config.checkpoint.keep)
    saved = checkpointer.latest_position()
    position = Position(**saved) if saved else Position()
    log = MetricsLog(workdir / "metrics.jsonl", position.num_records)
    this = Run(config, workdir, parts, checkpointer, log, display, position)
    display.say(f"sampler shapes: {parts.engine.shapes()}")
    if saved:
        display.say(f"resuming after step {position.step} ({position.stage} {position.stage_step})")
    else:
        display.say(f"no checkpoint in {workdir}: starting from {config.model.path}")
    params = saved_params(this) if saved else load_hf(config.model.path, parts.mesh)
    run_stage = {"sft": run_sft, "train": run_train, "evaluate": run_evaluate}
    try:
        for stage in config.stages:
            params = run_stage[stage](this, params)
    finally:
        display.stop()
        checkpointer.close()
    names = sorted(path.name + "/" * path.is_dir() for path in workdir.iterdir())
    display.say(f"done; {workdir} holds {', '.join(names)}")


def begin_stage(this: Run, stage: str, num_steps: int) -> bool:
    """Moves the position to a stage; False when the checkpoint says it is done."""
    position = this.position
    if position.stage and STAGES.index(position.stage) > STAGES.index(stage):
        return False
    if position.stage == stage:
        return position.stage_step < num_steps
    position.stage, position.stage_step, position.items_taken = stage, 0, 0
    return True


def start_state(this: Run, params: Params, optimizer: optax.GradientTransformation) -> TrainState:
    """A fresh state at the start of a stage, the checkpoint's in its middle."""
    parts = this.parts
    if this.position.stage_step == 0:
        return init_state(params, parts.mesh, parts.model_config, optimizer)
    fresh = jax.eval_shape(
        lambda params: init_state(params, parts.mesh, parts.model_config, optimizer),
        qwen.abstract_params(parts.model_config),
    )
    shardings = state_shardings(parts.mesh, parts.model_config, optimizer)
    return this.checkpointer.restore(abstract(fresh, shardings))


def saved_params(this: Run) -> Params:
    """The newest checkpoint's parameters."""
    shardings = param_shardings(this.parts.mesh, this.parts.model_config)
    return this.checkpointer.restore_params(
        abstract(qwen.abstract_params(this.parts.model_config), shardings)
    )


def run_sft(this: Run, params: Params) -> Params:
    """Supervised warm start on demonstrations; returns the trained parameters."""
    config, parts, position = this.config, this.parts, this.position
    num_steps, batch_size = config.sft.num_steps, config.sft.batch_size
    if not begin_stage(this, "sft", num_steps):
        return params
    optimizer = make_optimizer(config.sft.optimizer, num_steps)
    state = start_state(this, params, optimizer)
    update_step = make_update_step(parts.model, sft.supervised_loss, optimizer)
    stream = Stream(parts.demonstrations, seed=config.seed)
    shape = sft_shape(config)
    this.display.start("sft", position.stage_step, num_steps)
    while position.stage_step < num_steps:
        started = time.perf_counter()
        demonstrations = stream.take(position.items_taken, batch_size)
        packed = pack(demonstrations, np.ones(batch_size), shape, aggregation="token-mean")
        batch = put_batch(parts.mesh, packed.batch)
        state, metrics = update_step(state, batch, packed.num_micro)
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
            "perf/num_compilations/update": update_step.num_traces,
        }
        this.log.write(position.step, "sft", record)
        this.display.step(
            position.stage_step,
            {"loss": record["sft/loss"], "tokens/s": record["perf/throughput"]},
        )
        if is_checkpoint_due(this, num_steps):
            this.save(state)
    this.display.stop()
    export(this, state.params)  # before the checkpoint that tells a restart the stage is done
    this.save(state)
    return state.params


def run_train(this: Run, params: Params) -> Params:
    """Reinforcement learning; returns the trained parameters."""
    config, parts, position = this.config, this.parts, this.position
    num_steps, rollout = config.num_steps, config.rollout
    if not begin_stage(this, "train", num_steps):
        return params
    single = config.optimizer.num_minibatches * config.optimizer.num_epochs == 1
    updates_per_step = config.optimizer.num_minibatches * config.optimizer.num_epochs
    optimizer = make_optimizer(config.optimizer, num_steps * updates_per_step)
    resumed = position.stage_step > 0
    ref_params = _reference(this, params, resumed)
    state = start_state(this, params, optimizer)
    update_step = make_update_step(
        parts.model,
        make_policy_loss(config.loss, config.kl),
        optimizer,
        temperature=rollout.temperature,
        entropy_gradient=config.loss.entropy_coef != 0,
    )
    score = make_score_step(parts.model, temperature=rollout.temperature)
    stream = Stream(parts.tasks, seed=config.seed)
    shape = train_shape(config)
    parts.engine.temperature = rollout.temperature
    parts.engine.set_weights(state.params)
    if not resumed:
        this.log.write(position.step, "train", run_suites(this, "train", config.eval.suites))
    this.display.start("train", position.stage_step, num_steps)
    while position.stage_step < num_steps:
        started = time.perf_counter()
        counts_before = dataclasses.replace(parts.engine.counts)
        trajectories = parts.rollout(
            draw(stream, position.items_taken, rollout.tasks_per_step),
            group_size=rollout.group_size,
            seeds=Seeds(seed=config.seed, stage=STAGES.index("train"), step=position.step),
            policy_version=int(state.num_updates),
        )
        parts.engine.release()  # its memory is the update's
        sampled = time.perf_counter()
        advantages = estimate(trajectories, config.advantage)
        minibatches = make_minibatches(trajectories, advantages, shape, config)
        batches = [
            add_logprobs(put_batch(parts.mesh, m.batch), m, score, state.params, ref_params, single)
            for m in minibatches
        ]
        measured = []
        for _ in range(config.optimizer.num_epochs):
            for minibatch, batch in zip(minibatches, batches, strict=True):
                if minibatch.num_counted == 0:
                    continue  # only environment errors: there is nothing to learn from
                # Without any signal left the optimizer still steps: as if all had been kept.
                state, metrics = update_step(state, batch, minibatch.num_micro)
                measured.append(metrics)
        metrics = merge(jax.device_get(measured))
        parts.engine.set_weights(state.params)
        updated = time.perf_counter()
        position.step, position.stage_step = position.step + 1, position.stage_step + 1
        position.items_taken += rollout.tasks_per_step
        record = {
            **rollout_metrics(trajectories, rollout.max_response_tokens),
            **metrics,
            "actor/num_updates": int(state.num_updates),
            "actor/num_skipped": int(state.num_skipped),
            "rollout/informative_share": float(np.mean(advantages != 0)),
            "rollout/padding": float(np.mean([m.padding for m in minibatches])),
            **engine_metrics(parts.engine, counts_before),
            "perf/num_compilations/update": update_step.num_traces,
            "timing_s/gen": sampled - started,
            "timing_s/update_actor": updated - sampled,
            "timing_s/step": updated - started,
            "perf/throughput": sum(len(t.token_ids) for t in trajectories) / (updated - started),
            **periodic_evaluation(this, num_steps),
        }
        this.log.write(position.step, "train", record)
        log_trajectories(this, trajectories, advantages)
        this.display.step(
            position.stage_step,
            {name: record[key] for name, key in SHOWN.items() if key in record},
        )
        if is_checkpoint_due(this, num_steps):
            this.save(state, ref_params)
    this.display.stop()
    parts.engine.release()
    export(this, state.params)  # before the checkpoint that tells a restart the stage is done
    this.save(state, ref_params)
    return state.params


def draw(stream: Stream[Task], position: int, count: int) -> list[Draw]:
    """The next tasks of the stream, each with its place in it."""
    tasks = stream.take(position, count)
    return [Draw(task=task, position=position + index) for index, task in enumerate(tasks)]


def is_checkpoint_due(this: Run, num_steps: int) -> bool:
    """True every so many steps, but for the stage's last one, which ends with a checkpoint."""
    stage_step = this.position.stage_step
    return stage_step % this.config.checkpoint.every_steps == 0 and stage_step < num_steps


def log_trajectories(this: Run, trajectories: Sequence[Trajectory], advantages: np.ndarray) -> None:
    """Writes the step's first trajectories to its file, as many as the configuration asks for."""
    count = this.config.log.trajectories
    count = len(trajectories) if count < 0 else count
    file = this.workdir / "trajectories" / f"step_{this.position.step:06d}.jsonl"
    write_trajectories(file, trajectories[:count], advantages[:count])


def run_evaluate(this: Run, params: Params) -> Params:
    """Evaluates parameters with all final suites."""
    this.parts.engine.set_weights(params)
    metrics = run_suites(this, "evaluate", this.config.eval.final_suites)
    this.parts.engine.release()
    this.log.write(this.position.step, "evaluate", metrics)
    return params


def _reference(this: Run, params: Params, resumed: bool) -> Params | None:
    """A frozen copy of the policy at the start of the stage, where a KL term needs it."""
    if this.config.kl.coef == 0 or this.config.kl.anchor != "ref":
        return None
    if not resumed:
        return jax.tree.map(jnp.copy, params)
    shardings = param_shardings(this.parts.mesh, this.parts.model_config)
    return this.checkpointer.restore_ref_params(
        abstract(qwen.abstract_params(this.parts.model_config), shardings)
    )


def estimate(trajectories: Sequence[Trajectory], settings: ConfigDict) -> np.ndarray:
    """Advantages, float32 [N]; an environment error is in no group and gets 0."""
    failed = np.array([t.outcome == Outcome.ENVIRONMENT_ERROR for t in trajectories])
    group_ids = np.array([t.group_id for t in trajectories], np.int32)
    advantages = _grpo(
        np.array([t.reward for t in trajectories], np.float32),
        np.where(failed, -1, group_ids).astype(np.int32),
        normalize_std=settings.normalize_std,
        ddof=settings.ddof,
        epsilon=settings.epsilon,
    )
    return np.asarray(advantages)


_grpo = jax.jit(grpo, static_argnames=("normalize_std", "ddof", "epsilon"))


def make_minibatches(
    trajectories: Sequence[Trajectory],
    advantages: np.ndarray,
    shape: BatchShape,
    config: ConfigDict,
) -> list[Packed]:
    """Whole groups in task order to mini-batches, each packed alone.

    Environment errors are left out. Trajectories without an advantage may be too
    (`optimizer.skip_signal_free`), where neither a KL nor an entropy term gives them a gradient;
    they still count in the loss's denominator.
    """
    num_minibatches = config.optimizer.num_minibatches
    has_other_terms = config.kl.coef != 0 or config.loss.entropy_coef != 0
    needs_all = has_other_terms or not config.optimizer.skip_signal_free
    groups = config.rollout.tasks_per_step // num_minibatches
    minibatches = []
    for index in range(num_minibatches):
        members = [
            (trajectory, advantage)
            for trajectory, advantage in zip(trajectories, advantages, strict=True)
            if trajectory.group_id // groups == index
            and trajectory.outcome != Outcome.ENVIRONMENT_ERROR
        ]
        kept = [(t, a) for t, a in members if needs_all or a != 0]
        minibatches.append(
            pack(
                [t for t, _ in kept],
                np.array([a for _, a in kept], np.float32),
                shape,
                aggregation=config.loss.aggregation,
                scale=config.rollout.max_response_tokens,
                counted=[t for t, _ in members],
            )
        )
    return minibatches


def add_logprobs(
    batch: Batch,
    packed: Packed,
    score: CompiledFunction,
    params: Params,
    ref_params: Params | None,
    single: bool,
) -> Batch:
    """Old and reference log-probabilities, where the update cannot take its own or needs none."""
    if not single:
        batch = dataclasses.replace(batch, old_logprobs=score(params, batch, packed.num_micro))
    if ref_params is not None:
        plain = dataclasses.replace(batch, old_logprobs=None)
        batch = dataclasses.replace(batch, ref_logprobs=score(ref_params, plain, packed.num_micro))
    return batch


def make_policy_loss(loss: ConfigDict, kl: ConfigDict) -> TokenLoss:
    """The clipped policy loss with its KL and entropy terms; a term that is off adds nothing."""
    clip: dict[str, Any] = {
        "clip_low": loss.clip_low,
        "clip_high": loss.clip_high,
        "dual_clip": loss.dual_clip or None,
    }
    entropy_coef, kl_coef = loss.entropy_coef, kl.coef
    estimator, anchor_name = kl.estimator, kl.anchor

    def policy_loss(
        logprobs: jax.Array, entropies: jax.Array, batch: Batch
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        current = jax.lax.stop_gradient(logprobs)
        # With one optimizer step a batch, the policy before the update is the current one.
        old = current if batch.old_logprobs is None else batch.old_logprobs
        arguments = (logprobs, old, batch.advantages, batch.loss_mask)
        values = clipped_policy_loss(*arguments, **clip)
        gap = jnp.where(batch.loss_mask, old - batch.rollout_logprobs, 0.0)
        metrics = {
            "actor/pg_loss": values,
            "actor/entropy": entropies,
            **{f"actor/{name}": x for name, x in clip_metrics(*arguments, **clip).items()},
            "rollout_corr/logprob_diff_mean": jnp.abs(gap),
            "rollout_corr/logprob_diff_max": jnp.abs(gap),
            "rollout_corr/k3_kl": kl_estimate(
                batch.rollout_logprobs, old, batch.loss_mask, estimator="k3"
            ),
        }
        if kl_coef:
            anchor = batch.ref_logprobs if anchor_name == "ref" else old
            assert anchor is not None
            divergence = kl_estimate(logprobs, anchor, batch.loss_mask, estimator=estimator)
            values = values + kl_coef * divergence
            metrics["actor/kl_loss"] = divergence
        if entropy_coef:
            values = values - entropy_coef * jnp.where(batch.loss_mask, entropies, 0.0)
        return values, metrics

    return policy_loss


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
    return merged


def engine_metrics(engine: Engine, before: Counts) -> dict[str, float]:
    """What the sampler did since its counters stood at `before`."""
    now = engine.counts
    return {
        "rollout/slot_occupancy": (now.sampled - before.sampled)
        / max(now.slot_steps - before.slot_steps, 1),
        "rollout/prefilled_prompt_tokens": now.prefilled_prompt - before.prefilled_prompt,
        "rollout/prefilled_resume_tokens": now.prefilled_resume - before.prefilled_resume,
        "rollout/sampled_tokens": now.sampled - before.sampled,
        "perf/num_compilations/sampler": engine.num_compilations,
    }


def periodic_evaluation(this: Run, num_steps: int) -> dict[str, float]:
    """Evaluation metrics where one is due."""
    every, stage_step = this.config.eval.every_steps, this.position.stage_step
    if stage_step == num_steps or (every and stage_step % every == 0):
        return run_suites(this, "train", this.config.eval.suites)
    return {}


def run_suites(this: Run, stage: str, suites: Sequence[str]) -> dict[str, float]:
    """Evaluates the engine's weights and writes `eval/<stage>_<step>.json`."""
    parts, step = this.parts, this.position.step
    settings: dict[str, tuple[Any, float]] = {
        "sampled": (parts.rollout, 1.0),
        "greedy": (parts.rollout, 0.0),
        "empty_search": (parts.rollout_without_search, 1.0),
    }
    seeds = Seeds(seed=this.config.seed, stage=STAGES.index("evaluate"), step=step)
    results = {}
    for suite in suites:
        rollout, temperature = settings[suite]
        results[suite] = evaluate.evaluate(
            parts.engine, rollout, parts.eval_tasks, temperature=temperature, seeds=seeds
        )
    path = this.workdir / "eval" / f"{stage}_{step}.json"
    summaries = evaluate.write_results(path, step, results)
    metrics: dict[str, float] = {}
    for suite, summary in summaries.items():
        metrics |= evaluate.as_metrics(suite, summary)
        scores = {name: m.get("exact_match", math.nan) for name, m in summary.items()}
        by_set = ", ".join(f"{name} {score:.3f}" for name, score in scores.items())
        searches = summary["all"]["searches"]
        this.display.say(f"{stage} {step} {suite}: exact match {by_set}; searches {searches:.2f}")
    return metrics


def export(this: Run, params: Params) -> None:
    """Writes the trained model as an HF folder that `transformers` loads."""
    save_hf(
        params,
        this.parts.model_config,
        this.workdir / "export",
        source=this.config.model.path,
    )

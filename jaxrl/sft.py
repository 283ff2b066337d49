"""Supervised warm start: train on demonstrations with the same update step as RL."""

from __future__ import annotations

import time
from dataclasses import replace

import jax
import numpy as np

from jaxrl.data.stream import Stream
from jaxrl.logs.steps import compute_memory_metrics
from jaxrl.objectives.aggregation import token_mean, token_weights
from jaxrl.objectives.losses import negative_log_likelihood
from jaxrl.objectives.metrics import Metric
from jaxrl.runtime import distributed
from jaxrl.runtime.compilation import interruptible
from jaxrl.runtime.preemption import Interrupted
from jaxrl.runtime.sharding import count_batch_shards
from jaxrl.training.packing import pack_sequences
from jaxrl.training.run_state import RunState
from jaxrl.training.update import shard_batch
from jaxrl.types import Batch, Params

SFT_DISPLAY_METRICS = {
    "loss": "sft/loss",
    "entropy": "sft/entropy",
    "grad norm": "sft/grad_norm",
    "lr": "sft/lr",
    "tokens/s": "perf/throughput",
}
"""Names of the metrics on the display, by label."""


def sft(run_state: RunState, params: Params) -> Params:
    """Train on demonstrations and return the trained parameters."""
    components, progress = run_state.components, run_state.progress
    stage = components.stages["sft"]
    num_steps, batch_size = stage.num_steps, stage.batch_size
    if not run_state.begin_stage("sft"):
        return params
    # Create the training state, or restore it in the middle of the stage.
    state = run_state.state = run_state.init_or_restore_state(params)
    stream = Stream(components.demonstrations, seed=run_state.settings.seed)
    shape = replace(stage.shape, sizes=(compiled_sizes := replace(progress.compiled_sizes)))
    num_shards = count_batch_shards(components.mesh)
    run_state.display.start(
        "sft", progress.stage_step, num_steps, every_steps=run_state.settings.log_every_steps
    )
    while progress.stage_step < num_steps:
        if distributed.any_process(run_state.should_stop()):
            raise Interrupted
        # Pack demonstrations. Each loss token has the same weight (token_mean).
        started = time.perf_counter()
        demonstrations = stream.get_items(progress.items_taken, batch_size)
        weights = token_weights(
            [demonstration.loss_mask for demonstration in demonstrations], token_mean
        )
        packed = pack_sequences(
            demonstrations,
            np.ones(batch_size),
            shape,
            token_fields={"token_weights": weights},
            num_shards=num_shards,
        )
        batch = shard_batch(components.mesh, packed.batch)
        # Update. Reading the metrics waits for the devices, so `step_s` includes the update.
        with interruptible(run_state.should_stop):
            state, update_metrics = stage.update(state, batch, packed)
        run_state.state = state
        metrics = {name: float(metric.value) for name, metric in update_metrics.items()}
        step_s = time.perf_counter() - started
        # Advance the progress, log, and save if due. `RunState.end_stage` saves the last step.
        progress.step, progress.stage_step = progress.step + 1, progress.stage_step + 1
        progress.items_taken += batch_size
        progress.compiled_sizes = replace(compiled_sizes)
        record = {
            "sft/loss": metrics["sft/nll_loss"],
            "sft/entropy": metrics["sft/entropy"],
            "sft/grad_norm": metrics["grad_norm"],
            "sft/num_skipped": int(state.num_skipped),
            "sft/lr": stage.get_last_lr(state),
            "sft/padding": packed.padding,
            "timing_s/step": step_s,
            "perf/throughput": packed.num_tokens / step_s,
            **compute_memory_metrics(),
            "perf/num_compilations/update": stage.update.num_programs,
        }
        run_state.metrics_log.write(progress.step, "sft", record)
        shown = {label: record[name] for label, name in SFT_DISPLAY_METRICS.items()}
        run_state.display.show_step(progress.stage_step, shown)
        if run_state.is_checkpoint_due and not run_state.is_stage_done:
            run_state.save()
    return run_state.end_stage(state)


def supervised_loss(
    logprobs: jax.Array, entropies: jax.Array, batch: Batch
) -> tuple[jax.Array, dict[str, Metric]]:
    """Compute the cross-entropy of the tokens in `loss_mask`. Implements `update.TokenLoss`."""
    loss = negative_log_likelihood(logprobs, batch.loss_mask)
    return loss, {"sft/nll_loss": Metric(loss, "loss"), "sft/entropy": Metric(entropies)}

"""The supervised warm start: demonstrations of the protocol, through the same update step."""

from __future__ import annotations

import time

import jax
import numpy as np

from jaxrl.logs.steps import SHOWN, memory_metrics
from jaxrl.objectives.aggregation import token_mean, token_weights
from jaxrl.objectives.losses import negative_log_likelihood
from jaxrl.objectives.metrics import Metric
from jaxrl.runtime import distributed
from jaxrl.runtime.compilation import stopped_by
from jaxrl.runtime.sharding import num_batch_shards
from jaxrl.runtime.stopping import Interrupted
from jaxrl.session import Session, stage_optimizer
from jaxrl.stream import Stream
from jaxrl.training.packing import pack, sft_shape
from jaxrl.training.update import UpdateStep, put_batch
from jaxrl.types import Batch, Params

SHOWN_OF_SFT = {"loss": "sft/loss"} | {name: SHOWN[name] for name in ("tokens/s", "s/step", "GiB")}
"""What the display shows of a step, and the metric it is."""


def sft(session: Session, params: Params) -> Params:
    """Trains on demonstrations; returns the trained parameters."""
    config, components, progress = session.config, session.components, session.progress
    num_steps, batch_size = config.sft.num_steps, config.sft.batch_size
    if not session.begin("sft"):
        return params
    optimizer = stage_optimizer(config, "sft")
    state = session.state = session.start_state(params, optimizer)
    update_step = UpdateStep(
        components.model,
        supervised_loss,
        optimizer,
        balance_coef=config.model.router.balance_coef,
        offload=config.sft.optimizer.offload,
    )
    stream = Stream(components.demonstrations, seed=config.seed)
    model = components.model
    shape = sft_shape(config, model.shards_with_prompts, model.num_pieces, model.config)
    num_shards = num_batch_shards(components.mesh)
    session.display.start("sft", progress.stage_step, num_steps)
    while progress.stage_step < num_steps:
        if distributed.anywhere(session.should_stop()):
            raise Interrupted
        started = time.perf_counter()
        taken = stream.take(progress.items_taken, batch_size)
        weights = token_weights([one.loss_mask for one in taken], token_mean)
        packed = pack(
            taken,
            np.ones(batch_size),
            shape,
            token_fields={"token_weights": weights},
            num_shards=num_shards,
        )
        batch = put_batch(components.mesh, packed.batch)
        with stopped_by(session.should_stop):
            state, measured = update_step(state, batch, packed)
        session.state = state
        metrics = {name: float(metric.value) for name, metric in measured.items()}
        step_s = time.perf_counter() - started
        progress.step, progress.stage_step = progress.step + 1, progress.stage_step + 1
        progress.items_taken += batch_size
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
        session.metrics_log.write(progress.step, "sft", record)
        shown = {name: record[key] for name, key in SHOWN_OF_SFT.items() if key in record}
        session.display.step(progress.stage_step, shown)
        if session.is_checkpoint_due and not session.is_last_step:
            session.save()
    return session.end(state)


def supervised_loss(
    logprobs: jax.Array, entropies: jax.Array, batch: Batch
) -> tuple[jax.Array, dict[str, Metric]]:
    """Cross-entropy of the demonstrations' assistant tokens; see `update.TokenLoss`."""
    loss = negative_log_likelihood(logprobs, batch.loss_mask)
    return loss, {"sft/nll_loss": Metric(loss, "loss"), "sft/entropy": Metric(entropies)}

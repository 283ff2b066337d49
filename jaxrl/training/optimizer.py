"""Optimizer and learning-rate schedules of a stage."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
import optax

from jaxrl.runtime.compilation import get_or_create
from jaxrl.training.method import OptimizerSettings


def make_schedule(settings: OptimizerSettings) -> optax.Schedule:
    """Return the learning-rate schedule: a linear warm-up followed by `settings.schedule`."""
    peak, warmup, schedule = settings.lr, settings.warmup_steps, settings.schedule
    offered = {
        "peak": peak,
        "final_fraction": settings.final_lr_fraction,
        "num_updates": max(settings.num_updates - warmup, 1),
    }
    main_schedule: optax.Schedule = schedule(*[offered[name] for name in schedule.arguments])
    # The first step uses 1 / warmup of the peak: a rate of exactly 0 would waste a batch.
    warmup_schedule = optax.linear_schedule(peak / max(warmup, 1), peak, max(warmup - 1, 1))
    return (
        optax.join_schedules([warmup_schedule, main_schedule], [warmup])
        if warmup
        else main_schedule
    )


def make_optimizer(settings: OptimizerSettings) -> optax.GradientTransformation:
    """Return AdamW with global-norm gradient clipping; equal settings share one object."""
    # A custom schedule may be edited between two runs in one process, so it is never shared.
    key = None if settings.schedule.is_user_code else settings
    return get_or_create(partial(_make_adamw, settings), name="optimizer", key=key)


def _make_adamw(settings: OptimizerSettings) -> optax.GradientTransformation:
    adamw = optax.adamw(
        make_schedule(settings),
        b1=settings.beta1,
        b2=settings.beta2,
        eps=settings.epsilon,
        weight_decay=settings.weight_decay,
        mu_dtype=jnp.dtype(settings.moments_dtype),
    )
    clip = optax.clip_by_global_norm(settings.grad_clip) if settings.grad_clip else optax.identity()
    return optax.chain(clip, adamw)


def constant_schedule(peak: float) -> optax.Schedule:
    """Return a schedule that is constant at `peak`."""
    return optax.constant_schedule(peak)


def linear_schedule(peak: float, final_fraction: float, num_updates: int) -> optax.Schedule:
    """Return a linear schedule from `peak` to `final_fraction * peak` over `num_updates` steps."""
    return optax.linear_schedule(peak, peak * final_fraction, num_updates)


def cosine_schedule(peak: float, final_fraction: float, num_updates: int) -> optax.Schedule:
    """Return a cosine schedule from `peak` to `final_fraction * peak` over `num_updates` steps."""
    return optax.cosine_decay_schedule(peak, num_updates, final_fraction)


SCHEDULES: dict[str, Callable[..., optax.Schedule]] = {
    "constant": constant_schedule,
    "linear": linear_schedule,
    "cosine": cosine_schedule,
}
"""Schedules by `optimizer.schedule` and `sft.optimizer.schedule`."""

ARGUMENTS = ("peak", "final_fraction", "num_updates")
"""Arguments that a schedule may take."""

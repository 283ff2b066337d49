"""The optimizer of a stage, from its section of the configuration."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
import optax
from ml_collections import ConfigDict

from jaxrl.choices import arrays_of
from jaxrl.method import schedule_of


def learning_rate(settings: ConfigDict, num_updates: int) -> optax.Schedule:
    """Linear warm-up, then `schedule` down to `final_lr_fraction` of the peak at the end."""
    peak, warmup = settings.lr, settings.warmup_steps
    schedule = schedule_of(settings)  # of those below, by its name
    offered = {
        "peak": peak,
        "final_fraction": settings.final_lr_fraction,
        "num_updates": max(num_updates - warmup, 1),
    }
    after = schedule(*[offered[name] for name in arrays_of(schedule)])
    # The first step is at 1 / warmup of the peak: a rate of exactly 0 would waste a whole batch.
    rise = optax.linear_schedule(peak / max(warmup, 1), peak, max(warmup - 1, 1))
    return optax.join_schedules([rise, after], [warmup]) if warmup else after


def num_updates(config: ConfigDict, stage: str) -> int:
    """How many optimizer steps a stage has."""
    updates_per_step = config.optimizer.num_minibatches * config.optimizer.num_epochs
    return int(config.sft.num_steps if stage == "sft" else config.num_steps * updates_per_step)


def make_optimizer(settings: ConfigDict, num_updates: int) -> optax.GradientTransformation:
    """AdamW behind global-norm clipping, over `num_updates` optimizer steps."""
    adamw = optax.adamw(
        learning_rate(settings, num_updates),
        b1=settings.beta1,
        b2=settings.beta2,
        eps=settings.epsilon,
        weight_decay=settings.weight_decay,
        mu_dtype=jnp.dtype(settings.moments_dtype),
    )
    clip = optax.clip_by_global_norm(settings.grad_clip) if settings.grad_clip else optax.identity()
    return optax.chain(clip, adamw)


def stage_settings(config: ConfigDict, stage: str) -> ConfigDict:
    """The section of a stage's optimizer."""
    return config.sft.optimizer if stage == "sft" else config.optimizer


def constant(peak: float) -> optax.Schedule:
    """The peak throughout."""
    return optax.constant_schedule(peak)


def linear(peak: float, final_fraction: float, num_updates: int) -> optax.Schedule:
    """A straight line.

    Args:
        peak: learning rate at the end of the warm-up.
        final_fraction: of the peak, at the end.
        num_updates: optimizer steps after the warm-up.
    """
    return optax.linear_schedule(peak, peak * final_fraction, num_updates)


def cosine(peak: float, final_fraction: float, num_updates: int) -> optax.Schedule:
    """Half a wave; arguments as of `linear`."""
    return optax.cosine_decay_schedule(peak, num_updates, final_fraction)


SCHEDULES: dict[str, Callable[..., optax.Schedule]] = {
    "constant": constant,
    "linear": linear,
    "cosine": cosine,
}
"""By name in `optimizer.schedule` and `sft.optimizer.schedule`."""

NUMBERS = ("peak", "final_fraction", "num_updates")
"""What a schedule may ask for."""

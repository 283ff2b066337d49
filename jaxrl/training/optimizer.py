"""The optimizer of a stage, from its section of the configuration."""

from __future__ import annotations

import jax.numpy as jnp
import optax
from ml_collections import ConfigDict


def learning_rate(settings: ConfigDict, num_updates: int) -> optax.Schedule:
    """Linear warm-up, then the schedule down to `final_lr_fraction` of the peak at the end."""
    peak, warmup = settings.lr, settings.warmup_steps
    rest = max(num_updates - warmup, 1)
    final = settings.final_lr_fraction
    after = {
        "constant": lambda: optax.constant_schedule(peak),
        "linear": lambda: optax.linear_schedule(peak, peak * final, rest),
        "cosine": lambda: optax.cosine_decay_schedule(peak, rest, final),
    }[settings.schedule]()
    # The first step is at 1 / warmup of the peak: a rate of exactly 0 would waste a whole batch.
    rise = optax.linear_schedule(peak / max(warmup, 1), peak, max(warmup - 1, 1))
    return optax.join_schedules([rise, after], [warmup]) if warmup else after


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

"""Builders of the training method, optimizer settings and batch shapes."""

from __future__ import annotations

import inspect
import math
import pkgutil
from collections.abc import Callable
from typing import Any, TypeVar

from ml_collections import ConfigDict

from jaxrl.builders.resolved import ADAPTERS, ResolvedConfig, get_adapter_key
from jaxrl.config.registry import select_settings
from jaxrl.models.architecture import Architecture
from jaxrl.training.method import (
    AdvantageSettings,
    FilterSettings,
    KLSettings,
    LossSettings,
    Method,
    OptimizerSettings,
    ShapingSettings,
    WatchSettings,
)
from jaxrl.training.packing import BatchShape

T = TypeVar("T")


def build_from_section(kind: Callable[..., T], section: ConfigDict, /, **values: Any) -> T:
    """Create a dataclass from a config section. `values` add or override fields."""
    fields = [name for name in inspect.signature(kind).parameters if name in section]
    return kind(**{name: section[name] for name in fields} | values)


def build_method(c: ResolvedConfig) -> Method:
    """Create the training method from the resolved functions and their settings."""
    rollout, kl = c.rollout, c.kl
    estimator_settings = {} if c.estimator.is_custom else select_settings(c.advantage)
    schedules = {
        name: estimator_settings[f"{name}_schedule"]
        for name in c.estimator.settings
        if f"{name}_schedule" in estimator_settings
    }
    return Method(
        seed=c.seed,
        tasks_per_step=rollout.tasks_per_step,
        group_size=rollout.group_size,
        async_level=rollout.async_level,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        replays=c.model.replay,
        advantage=build_from_section(
            AdvantageSettings, c.advantage, estimator=c.estimator, schedules=schedules
        ),
        loss=build_from_section(
            LossSettings,
            c.loss,
            policy_loss=c.policy_loss,
            term=c.loss_term,
            term_coef=c.loss.term.coef,
            token_filter=c.token_filter,
            aggregation=c.aggregation,
            correction=c.loss.correction.to_dict(),
        ),
        kl=build_from_section(
            KLSettings,
            kl,
            estimator=c.kl_estimator,
            adaptive=kl.adaptive.to_dict(),
            log=kl.log.to_dict(),
            budget={"budgets": kl.budget.budgets.to_dict(), "rate": kl.budget.step},
        ),
        filter=build_from_section(
            FilterSettings,
            c.filter,
            group_filter=c.group_filter,
            trajectory_filter=c.trajectory_filter,
        ),
        shaping=build_from_section(ShapingSettings, c.shaping, overlong_limit=c.overlong_limit),
        balance_coef=c.model.balance_coef,
        watch=build_from_section(WatchSettings, c.watch, detector=c.detector)
        if c.detector
        else None,
        optimizer=build_optimizer_settings(c, "train"),
    )


def build_optimizer_settings(c: ResolvedConfig, stage: str) -> OptimizerSettings:
    """Create the optimizer settings of the stage `sft` or `train`."""
    return build_from_section(
        OptimizerSettings,
        c.get_optimizer_section(stage),
        schedule=c.schedules[stage],
        num_updates=c.count_updates(stage),
    )


def compute_batch_shape(
    c: ResolvedConfig,
    stage: str,
    num_prompt_shards: int = 0,
    num_pieces: int = 1,
    model: Architecture | None = None,
) -> BatchShape:
    """Return the shape shared by all mini-batches of a stage; see `BatchShape.for_sequences`.

    The row length is `rollout.max_total_tokens`, rounded up to a multiple of 16 and of
    `num_pieces`, the number of context-parallel pieces of a row.
    """
    rollout, unit = c.rollout, math.lcm(16, num_pieces)
    num_sequences, max_image_tokens = c.sft.batch_size, rollout.max_image_tokens
    if stage == "train":
        num_groups = rollout.tasks_per_step // c.optimizer.num_minibatches
        num_sequences, max_image_tokens = num_groups * rollout.group_size, c.max_image_tokens
    replays = stage == "train" and c.model.replay
    return BatchShape.for_sequences(
        num_sequences,
        micro_rows=c.get_optimizer_section(stage).micro_rows,
        row_tokens=-(-rollout.max_total_tokens // unit) * unit,
        num_prompt_shards=num_prompt_shards,
        tower=model.tower if model else None,
        max_units=max_image_tokens,
        num_pieces=num_pieces,
        token_arrays=model.recorded_specs if model and replays else {},
    )


def build_policy_architecture(c: ResolvedConfig, model: Architecture) -> Architecture:
    """Apply `model.head_dtype` and the enabled adapter to the model.

    Raises:
        ValueError: The model lacks a layer that the adapter targets, or does not support
            `model.head_dtype`.
    """
    if c.model.head_dtype:
        model = model.with_head_dtype(c.model.head_dtype)
    key = get_adapter_key(c)
    if not key:
        return model
    settings = c[key.rpartition(".")[0]].to_dict()
    policy: Architecture = pkgutil.resolve_name(ADAPTERS[key])(settings, model, c.model.dtype)
    return policy


def find_frozen_entries(c: ResolvedConfig, model: Architecture) -> tuple[str, ...]:
    """Return the top-level parameter entries that `model.freeze_tower` freezes.

    Returns () with an adapter, which freezes all base weights anyway.
    """
    is_frozen = c.model.freeze_tower and not get_adapter_key(c)
    return (model.tower.entry,) if model.tower and is_frozen else ()

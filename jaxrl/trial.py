"""What the configuration names is tried once before the run: a mistake shows now, not in a step.

Functions that JAX traces are traced, at the shapes of a step; functions of NumPy arrays are called
on small ones that are made up. Ours go the same way as the user's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from ml_collections import ConfigDict

from jaxrl.choices import arrays_of, failure_text, named
from jaxrl.method import aggregation_of, estimator_of, filter_of, kl_estimator_of
from jaxrl.objectives.aggregation import token_weights
from jaxrl.objectives.kl import kl_estimate
from jaxrl.training.collect import filter_flags
from jaxrl.training.optimizer import learning_rate, num_updates
from jaxrl.training.packing import train_shape
from jaxrl.training.policy_loss import LossError, make_policy_loss
from jaxrl.types import Batch, Columns


def try_objectives(config: ConfigDict) -> None:
    """Refuses objectives and schedules that would fail in the first step.

    Raises:
        ValueError: names the key and, of what was raised, the place.
    """
    if "sft" in config.stages:
        try_schedule(config, "sft")
    if "train" in config.stages:
        try_schedule(config, "train")
        try_filter(config)
        try_estimator(config)
        try_aggregation(config)
        try_kl_estimator(config)
        try_policy_loss(config)


def try_estimator(config: ConfigDict) -> None:
    """Refuses an advantage estimator that gives no number a trajectory; computes nothing."""
    function, settings = estimator_of(config)
    shape, columns = (config.rollout.tasks_per_step * config.rollout.group_size,), Columns(())
    arrays = [
        jax.random.key(0)
        if name == "key"
        else jax.ShapeDtypeStruct(shape, getattr(columns, name).dtype)
        for name in arrays_of(function)
    ]
    begin = f"config.advantage.name names {config.advantage.name!r}"
    try:
        found = jax.eval_shape(partial(function, **settings), *arrays)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{begin}, which JAX cannot trace: {failure_text(error)}.") from error
    is_array = isinstance(found, jax.ShapeDtypeStruct)
    if not (is_array and found.shape == shape and jnp.issubdtype(found.dtype, jnp.floating)):
        what = f"{found.dtype} {list(found.shape)}" if is_array else type(found).__name__
        raise ValueError(
            f"{begin}, which returned {what}; expected float32 {list(shape)}, one number a "
            "trajectory."
        )


def try_filter(config: ConfigDict) -> None:
    """Refuses a filter that fails on a batch in which every second trajectory is right."""
    if filter_of(config) is None:
        return
    tasks = config.filter.tasks_per_batch or config.rollout.tasks_per_step
    size, columns = config.rollout.group_size, Columns(())
    index = np.arange(tasks * size)

    def column(name: str) -> np.ndarray:
        if name == "group_ids":
            return (index // size).astype(np.int32)
        kind = getattr(columns, name).dtype if hasattr(columns, name) else np.float32
        return (index % 2).astype(kind)

    filter_flags(config, column, len(index))


def try_aggregation(config: ConfigDict) -> None:
    """Refuses an aggregation that fails on a mini-batch of trajectories of 0, 1, … tokens, or none.

    None is longer than `rollout.max_response_tokens`, so it takes no more than a step does.
    """
    groups = config.rollout.tasks_per_step // config.optimizer.num_minibatches
    weigh = named("loss.aggregation", config.loss.aggregation, token_weights)
    for size in (groups * config.rollout.group_size, 1):
        counts = np.arange(size) % (config.rollout.max_response_tokens + 1)
        weigh([np.ones(count, bool) for count in counts], aggregation_of(config))


def try_schedule(config: ConfigDict, stage: str) -> None:
    """Refuses a schedule that fails in a step of the stage, or gives no rate of at least 0 there.

    Where there are very many steps, so many of them are tried, evenly spread.
    """
    section = "sft.optimizer" if stage == "sft" else "optimizer"
    key, count = f"{section}.schedule", num_updates(config, stage)
    settings = config.sft.optimizer if stage == "sft" else config.optimizer
    schedule = named(key, settings.schedule, learning_rate)(settings, count)
    steps = np.linspace(0, count - 1, min(count, _MOST_STEPS)).astype(np.int32)
    at_all = jax.jit(lambda steps: jax.lax.map(schedule, steps))
    rates = np.asarray(named(key, settings.schedule, at_all)(steps))
    is_rate = np.isfinite(rates) & (rates >= 0) & (rates.ndim == 1)
    if not is_rate.all():
        first = int(np.argwhere(~is_rate)[0, 0])
        raise ValueError(
            f"config.{key} names {settings.schedule!r}, which gave {rates[first].tolist()!r} at "
            f"step {steps[first]} of {count}; expected a finite number of at least 0."
        )


_MOST_STEPS = 100_000
"""At which a schedule is tried."""


def try_kl_estimator(config: ConfigDict) -> None:
    """Refuses a KL estimator that JAX cannot differentiate; computes nothing.

    Raises:
        LossError: names the key and, of what was raised, the place.
    """

    def divergence(logprobs: jax.Array, anchor: jax.Array) -> jax.Array:
        return kl_estimate(logprobs, anchor, estimator=kl_estimator_of(config)).sum()

    array = _token_array(config)
    try:
        jax.eval_shape(jax.grad(divergence), array(), array())
    except (Exception, SystemExit) as error:
        raise LossError(
            f"config.kl.estimator names {config.kl.estimator!r}, which JAX cannot differentiate: "
            f"{failure_text(error)}."
        ) from error


def try_policy_loss(config: ConfigDict) -> None:
    """Refuses a loss that JAX cannot trace or differentiate; computes nothing.

    Raises:
        LossError: names the key and, of what was raised, the place.
    """
    token_loss, array = make_policy_loss(config), _token_array(config)

    def total(logprobs: jax.Array, entropies: jax.Array, batch: Batch) -> jax.Array:
        values, _ = token_loss(logprobs, entropies, batch)
        return (values * batch.token_weights).sum()

    # All that a batch may have; what the configuration has no use for is not read.
    ids = dict.fromkeys(("token_ids", "segment_ids", "positions"), jnp.int32)
    others = {"loss_mask": jnp.bool_, **ids}
    names = [field.name for field in fields(Batch)]
    batch = Batch(**{name: array(others.get(name, jnp.float32)) for name in names})
    try:
        jax.eval_shape(jax.grad(total, argnums=(0, 1)), array(), array(), batch)
    except LossError:
        raise
    except Exception as error:
        raise LossError(
            f"config.loss.name names {config.loss.name!r}, which JAX cannot differentiate: "
            f"{failure_text(error)}."
        ) from error


def _token_array(config: ConfigDict) -> Callable[..., Any]:
    """Abstract arrays of a micro-batch, `[b, T]`, of any dtype."""
    shape = train_shape(config)

    def array(dtype: DTypeLike = jnp.float32) -> Any:
        return jax.ShapeDtypeStruct((shape.micro_rows, shape.row_tokens), dtype)

    return array

"""What a configuration makes of the method: the objectives it names, and what they ask for.

Objectives load JAX, so they are imported where their names are looked up: the report goes without,
and so does the refusal of a mistyped key.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ml_collections import ConfigDict

from jaxrl.choices import arrays_of, check_arrays, check_settings, chosen, settings_of


def estimator_of(config: ConfigDict) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The advantage estimator, and its settings.

    Raises:
        ValueError: `advantage.name` stands for nothing, or for a function of other arguments.
    """
    from jaxrl.objectives.advantages import COLUMNS, ESTIMATORS

    return _objective("advantage", config.advantage, ESTIMATORS, COLUMNS, "my_estimator.estimate")


def loss_of(config: ConfigDict) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The policy loss, and its settings; errors as of `estimator_of`."""
    from jaxrl.objectives.losses import ARRAYS, LOSSES

    loss = config.loss
    common = {"clip_low": loss.clip_low, "clip_high": loss.clip_high}
    return _objective("loss", loss, LOSSES, ARRAYS, "my_loss.policy_loss", **common)


def filter_of(config: ConfigDict) -> tuple[Callable[..., Any], dict[str, Any]] | None:
    """The filter of groups, and its settings; None without one. Errors as of `estimator_of`."""
    from jaxrl.objectives.filters import COLUMNS, FILTERS

    if config.filter.name == "none" and not config.filter.settings:
        return None
    table = {"none": None, **FILTERS}
    return _objective("filter", config.filter, table, COLUMNS, "my_filter.keep")


def aggregation_of(config: ConfigDict) -> Callable[..., Any]:
    """What weighs the tokens of a mini-batch, by their counts; errors as of `estimator_of`."""
    from jaxrl.objectives.aggregation import AGGREGATIONS, ARRAYS

    key, wanted = "loss.aggregation", "my_aggregation.by_root"
    longest = config.rollout.max_response_tokens
    name = config.loss.aggregation
    return _function(key, name, AGGREGATIONS, ARRAYS, wanted, max_response_tokens=longest)


def kl_estimator_of(config: ConfigDict) -> Callable[..., Any]:
    """What estimates the divergence from log-ratios; errors as of `estimator_of`."""
    from jaxrl.objectives.kl import ARRAYS, KL_ESTIMATORS

    name = config.kl.estimator
    return _function("kl.estimator", name, KL_ESTIMATORS, ARRAYS, "my_kl.estimate")


def schedule_of(settings: ConfigDict, section: str = "optimizer") -> Callable[..., Any]:
    """What makes the schedule of a learning rate; errors as of `estimator_of`.

    Args:
        settings: of an optimizer.
        section: that holds them, for messages.
    """
    from jaxrl.training.optimizer import NUMBERS, SCHEDULES

    key = f"{section}.schedule"
    return _function(key, settings.schedule, SCHEDULES, NUMBERS, "my_schedule.make")


def _function(
    key: str, name: str, table: Mapping[str, Any], offered: Sequence[str], wanted: str, **given: Any
) -> Callable[..., Any]:
    """What a name stands for whose settings no key holds.

    Args:
        key: that holds the name.
        name: an entry of the table, or a dotted name.
        table: what there is by name.
        offered: names of the arrays that it may ask for.
        wanted: a dotted name for the message.
        given: settings, for those that take them.
    """
    function = chosen(key, name, table, wanted=wanted)
    check_arrays(key, name, function, offered)
    parameters = inspect.signature(function).parameters.values()
    taken = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    for setting, default in taken.items():
        if default is inspect.Parameter.empty and setting not in given:
            raise ValueError(
                f"config.{key} names {name!r}, which asks for {setting!r}; expected a default "
                "for it, since no key holds such a setting."
            )
    return partial(function, **{setting: given[setting] for setting in given if setting in taken})


def _objective(
    key: str,
    section: ConfigDict,
    table: Mapping[str, Any],
    offered: Sequence[str],
    wanted: str,
    **common: Any,
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """What `section.name` stands for, and its settings.

    Args:
        key: of the section.
        section: with `name`, `settings` and the subsections.
        table: what there is by name.
        offered: names of the arrays that it may ask for.
        wanted: a dotted name for the message.
        common: settings that every choice may take.
    """
    check_settings(key, section, section.name)
    function = chosen(f"{key}.name", section.name, table, wanted=wanted)
    check_arrays(f"{key}.name", section.name, function, offered)
    return function, settings_of(key, section, function, **common)


def reads_rewards(config: ConfigDict) -> bool:
    """False for the estimators that read nothing but which answers are correct."""
    return "rewards" in arrays_of(estimator_of(config)[0])


def needs_windows(config: ConfigDict) -> bool:
    """True where windows of high entropy are looked for."""
    return config.shaping.entropy_reward or config.kl.low_factor != 1 or config.kl.second_chance


def needs_buckets(config: ConfigDict) -> bool:
    """True where the difficulty of tasks matters."""
    kl = config.kl
    return config.shaping.entropy_reward or kl.controller == "budget" or kl.second_chance


def records_experts(config: ConfigDict) -> bool:
    """Whether the sampler records the experts of tokens, for training to replay."""
    return config.model.router.replay and "train" in config.stages


def is_measured(config: ConfigDict) -> bool:
    """True where the divergence of every trajectory is measured before the update."""
    return config.kl.coef != 0 and (config.kl.place == "reward" or config.kl.controller != "fixed")


def has_kl_loss(config: ConfigDict) -> bool:
    """True where the loss of every token has a KL term."""
    return bool(config.kl.coef != 0 and config.kl.place == "loss")


def has_kl_weights(config: ConfigDict) -> bool:
    """True where tokens differ in the coefficient of their KL term, or it moves."""
    kl = config.kl
    is_plain = kl.controller == "fixed" and kl.low_factor == 1 and not kl.second_chance
    return has_kl_loss(config) and not is_plain


def has_gate(config: ConfigDict) -> bool:
    """True where training has an early and a late stage."""
    return config.shaping.boundary_aware and config.shaping.stage_level


def frozen_of(config: ConfigDict) -> tuple[str, ...]:
    """Entries of the parameters that are not trained, where there is no adapter."""
    return () if config.model.vision.train or config.model.lora.rank else ("vision",)


def adapter_of(config: ConfigDict, model: Any) -> Any:
    """The `lora.Adapter` of a model; None where all of it is trained.

    Raises:
        ValueError: `model.lora.targets` names no layer of the model.
    """
    from jaxrl.models.lora import Adapter, find_targets

    lora = config.model.lora
    if not lora.rank:
        return None
    return Adapter(
        model=model,
        rank=lora.rank,
        alpha=lora.alpha,
        targets=find_targets(model, lora.targets),
        is_rank_stabilised=lora.rslora,
        base_dtype=lora.base_dtype,
        other_dtype=config.model.dtype,
        is_merged=lora.sampler == "merged",
    )

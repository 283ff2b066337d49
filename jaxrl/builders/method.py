"""The method that a configuration names: its objectives, and what they ask for.

Objectives load JAX, so they are imported where their names are looked up: the report goes without,
and so does the refusal of a mistyped key.
"""

from __future__ import annotations

import inspect
import math
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from ml_collections import ConfigDict

from jaxrl.builders.environment import (
    ADAPTERS,
    adapter_key,
    has_tools,
    max_image_tokens,
    overlong_limit,
)
from jaxrl.config.keys import Rule
from jaxrl.config.registry import check_arrays, check_settings, chosen, settings_of, subsection
from jaxrl.training.method import (
    OptimizerSettings,
    has_gate,
    is_measured,
    needs_buckets,
    needs_windows,
)
from jaxrl.utils.callables import Chosen, is_own

if TYPE_CHECKING:
    from jaxrl.models.architecture import Architecture
    from jaxrl.training.method import Method
    from jaxrl.training.packing import BatchShape

Settings = TypeVar("Settings")


def estimator_of(config: ConfigDict) -> Chosen:
    """The advantage estimator.

    Raises:
        ValueError: `advantage.name` stands for nothing, or for a function of other arguments.
    """
    from jaxrl.objectives.advantages import COLUMNS, ESTIMATORS

    return _objective("advantage", config.advantage, ESTIMATORS, COLUMNS, "my_estimator.estimate")


def loss_of(config: ConfigDict) -> Chosen:
    """The policy loss; errors as of `estimator_of`."""
    from jaxrl.objectives.losses import ARRAYS, LOSSES

    loss = config.loss
    common = {"clip_low": loss.clip_low, "clip_high": loss.clip_high}
    return _objective("loss", loss, LOSSES, ARRAYS, "my_loss.policy_loss", **common)


def beside_loss(config: ConfigDict, part: str) -> Chosen | None:
    """The further `term` of the loss, or its `gate`; None without. Errors as of `estimator_of`."""
    from jaxrl.objectives.losses import ARRAYS, GATES, TERMS

    section, table = config.loss[part], {"term": TERMS, "gate": GATES}[part]
    if section.name == "none" and not section.settings:
        return None
    offered = {"none": None, **table}
    return _objective(f"loss.{part}", section, offered, ARRAYS, f"my_{part}.of_tokens")


def filter_of(config: ConfigDict) -> Chosen | None:
    """The filter of groups; None without one. Errors as of `estimator_of`."""
    from jaxrl.objectives.filters import COLUMNS, FILTERS

    if config.filter.name == "none" and not config.filter.settings:
        return None
    table = {"none": None, **FILTERS}
    return _objective("filter", config.filter, table, COLUMNS, "my_filter.keep")


def trajectory_filter_of(config: ConfigDict) -> Chosen | None:
    """The function that says whether a trajectory is trained on; None trains on all of them."""
    from jaxrl.objectives.filters import TRAJECTORIES

    key, name = "filter.trajectories", config.filter.trajectories
    if name == "none":
        return None
    return _function(key, name, TRAJECTORIES, ("trajectory",), "my_filter.is_sound")


def watch_of(config: ConfigDict) -> Chosen | None:
    """The function that looks at each step; None without one. Errors as of `estimator_of`."""
    from jaxrl.training.watch import ARGUMENTS, WATCHES

    if config.watch.name == "none" and not config.watch.settings:
        return None
    table = {"none": None, **WATCHES}
    judge = _objective("watch", config.watch, table, ARGUMENTS, "my_watch.judge")
    signs = getattr(judge.function, "signs", None)  # where it declares them
    unknown = sorted({*config.watch.actions} - {*(signs or config.watch.actions)})
    if unknown:
        raise ValueError(
            f"config.watch.actions names the sign {unknown[0]!r}; {config.watch.name!r} knows "
            f"{', '.join(signs or ())}."
        )
    return judge


def aggregation_of(config: ConfigDict) -> Chosen:
    """The function that weighs a mini-batch's tokens by counts; errors as of `estimator_of`."""
    from jaxrl.objectives.aggregation import AGGREGATIONS, ARRAYS

    key, wanted = "loss.aggregation", "my_aggregation.by_root"
    longest = config.rollout.max_response_tokens
    name = config.loss.aggregation
    return _function(key, name, AGGREGATIONS, ARRAYS, wanted, max_response_tokens=longest)


def kl_estimator_of(config: ConfigDict) -> Chosen:
    """The estimator of divergence from log-ratios; errors as of `estimator_of`."""
    from jaxrl.objectives.kl import ARRAYS, KL_ESTIMATORS

    name = config.kl.estimator
    return _function("kl.estimator", name, KL_ESTIMATORS, ARRAYS, "my_kl.estimate")


def schedule_of(settings: ConfigDict, section: str = "optimizer") -> Chosen:
    """The function that makes a learning rate's schedule; errors as of `estimator_of`.

    Args:
        settings: of an optimizer.
        section: that holds them, for messages.
    """
    from jaxrl.training.optimizer import NUMBERS, SCHEDULES

    key = f"{section}.schedule"
    return _function(key, settings.schedule, SCHEDULES, NUMBERS, "my_schedule.make")


def _function(
    key: str, name: str, table: Mapping[str, Any], offered: Sequence[str], wanted: str, **given: Any
) -> Chosen:
    """Resolves a name whose settings no key holds.

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
    settings = {setting: given[setting] for setting in given if setting in taken}
    return Chosen(key=key, name=name, function=function, settings=settings)


def _objective(
    key: str,
    section: ConfigDict,
    table: Mapping[str, Any],
    offered: Sequence[str],
    wanted: str,
    **common: Any,
) -> Chosen:
    """The function that `section.name` names, with its settings.

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
    settings = settings_of(key, section, function, **common)
    return Chosen(key=f"{key}.name", name=section.name, function=function, settings=settings)


def method_of(config: ConfigDict) -> Method:
    """The method as the loop works with it; errors as of `estimator_of`."""
    from jaxrl.training import method

    advantage, kl, rollout = config.advantage, config.kl, config.rollout
    estimator, judge = estimator_of(config), watch_of(config)
    keys = {} if estimator.is_own else subsection(advantage)
    schedules = {
        name: keys[f"{name}_schedule"] for name in estimator.settings if f"{name}_schedule" in keys
    }
    return method.Method(
        seed=config.seed,
        tasks_per_step=rollout.tasks_per_step,
        group_size=rollout.group_size,
        ahead=rollout.ahead,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        replays=config.model.replay,
        advantage=filled(method.Advantage, advantage, estimator=estimator, schedules=schedules),
        loss=filled(
            method.Loss,
            config.loss,
            policy_loss=loss_of(config),
            term=beside_loss(config, "term"),
            term_coef=config.loss.term.coef,
            gate=beside_loss(config, "gate"),
            aggregation=aggregation_of(config),
            correction=config.loss.correction.to_dict(),
        ),
        kl=filled(
            method.KL,
            kl,
            estimator=kl_estimator_of(config),
            adaptive=kl.adaptive.to_dict(),
            log=kl.log.to_dict(),
            budget={"budgets": kl.budget.budgets.to_dict(), "rate": kl.budget.step},
        ),
        filter=filled(
            method.Filter,
            config.filter,
            keep=filter_of(config),
            trains_on=trajectory_filter_of(config),
            metric=config.filter.varied.metric,
        ),
        shaping=filled(method.Shaping, config.shaping, overlong_limit=overlong_limit(config)),
        balance_coef=config.model.balance_coef,
        watch=filled(method.Watch, config.watch, judge=judge) if judge else None,
        optimizer=optimizer_of(config, "train"),
    )


def optimizer_of(config: ConfigDict, stage: str) -> OptimizerSettings:
    """The optimizer of a stage; errors as of `estimator_of`."""
    section = optimizer_section(config, stage)
    schedule = schedule_of(section, "optimizer" if stage == "train" else "sft.optimizer")
    num_updates = _num_updates(config, stage)
    return filled(OptimizerSettings, section, schedule=schedule, num_updates=num_updates)


def _num_updates(config: ConfigDict, stage: str) -> int:
    """Return the number of optimizer steps of a stage."""
    if stage == "sft":
        return int(config.sft.num_steps)
    optimizer = config.optimizer
    return int(config.num_steps * optimizer.num_minibatches * optimizer.num_epochs)


def _never_warms_up(config: ConfigDict, stage: str) -> bool:
    """Return True if a stage ends before its learning rate has reached the peak."""
    warmup_steps = optimizer_section(config, stage).warmup_steps
    return stage in config.stages and warmup_steps > _num_updates(config, stage)


def stage_steps(config: ConfigDict) -> dict[str, int]:
    """The number of steps of each configured stage that trains."""
    num_steps = {"sft": config.sft.num_steps, "train": config.num_steps}
    return {stage: num_steps[stage] for stage in config.stages if stage in num_steps}


def optimizer_section(config: ConfigDict, stage: str) -> ConfigDict:
    """The section of a stage's optimizer."""
    return config.sft.optimizer if stage == "sft" else config.optimizer


def filled(kind: Callable[..., Settings], section: ConfigDict, /, **given: Any) -> Settings:
    """A dataclass, with those of its fields that are not given from the section."""
    names = [name for name in inspect.signature(kind).parameters if name in section]
    return kind(**{name: section[name] for name in names} | given)


def batch_shape(
    config: ConfigDict,
    stage: str,
    shards_with_prompts: int = 0,
    num_pieces: int = 1,
    model: Architecture | None = None,
) -> BatchShape:
    """The shape of every mini-batch of the train stage, or batch of the sft stage.

    A row has room for the longest trajectory, in whole multiples of 16 and of the number of pieces
    into which rows are cut. See `BatchShape.for_sequences`.
    """
    from jaxrl.training.packing import BatchShape

    rollout, unit = config.rollout, math.lcm(16, num_pieces)
    replays = stage == "train" and config.model.replay
    num_sequences, image_tokens = config.sft.batch_size, rollout.max_image_tokens
    if stage == "train":
        num_groups = rollout.tasks_per_step // config.optimizer.num_minibatches
        num_sequences, image_tokens = num_groups * rollout.group_size, max_image_tokens(config)
    return BatchShape.for_sequences(
        num_sequences,
        micro_rows=optimizer_section(config, stage).micro_rows,
        row_tokens=-(-rollout.max_total_tokens // unit) * unit,
        shards_with_prompts=shards_with_prompts,
        tower=model.tower if model else None,
        max_units=image_tokens,
        num_pieces=num_pieces,
        token_arrays=model.recorded if model and replays else {},
    )


def _reads_sampler(config: ConfigDict) -> bool:
    """True where the loss weighs tokens by their ratio to the sampler."""
    return bool(config.loss.name == "dppo" and config.loss.dppo.anchor == "rollout")


def reads_rewards(config: ConfigDict) -> bool:
    """False for the estimators that read nothing but which answers are correct."""
    return "rewards" in estimator_of(config).arguments


def records_arrays(config: ConfigDict) -> bool:
    """True where the sampler records arrays by token, which training is given."""
    return config.model.replay and "train" in config.stages


def frozen_of(config: ConfigDict, model: Architecture) -> tuple[str, ...]:
    """Entries of the parameters that are not trained, where there is no adapter."""
    is_frozen = config.model.freeze_tower and not adapter_key(config)
    return (model.tower.entry,) if model.tower and is_frozen else ()


def policy_of(config: ConfigDict, model: Architecture) -> Architecture:
    """The model with the configured output layer, or the architecture around it that is trained.

    Raises:
        ValueError: an adapter is for a layer that the model does not have, or the model has no
            output layer in `model.head_dtype`.
    """
    if config.model.head_dtype:
        model = model.with_head(config.model.head_dtype)
    key = adapter_key(config)
    if not key:
        return model
    settings = config[key.rpartition(".")[0]].to_dict()
    policy: Architecture = pkgutil.resolve_name(ADAPTERS[key])(settings, model, config.model.dtype)
    return policy


def _is_never_overlong(config: ConfigDict) -> bool:
    """True where even the longest response, after a prompt of one token, costs nothing."""
    free = overlong_limit(config) - config.shaping.overlong_buffer
    longest = config.rollout.max_total_tokens - 1
    if not has_tools(config):
        longest = min(longest, config.rollout.max_response_tokens)
    return bool(free >= longest)


def _passable(config: ConfigDict) -> bool:
    """True where the accuracy of some group lies between the filter's bounds."""
    size, bounds = config.rollout.group_size, config.filter.accuracy_range
    return any(bounds.low < count / size < bounds.high for count in range(size + 1))


def _is_scheduled(config: ConfigDict) -> bool:
    """True where the estimator compares sets of k answers, and k changes by a schedule."""
    advantage = config.advantage
    return not is_own(advantage.name) and bool(subsection(advantage).get("k_schedule"))


def _largest_k(config: ConfigDict) -> int:
    """The largest set of answers that the estimator compares; 0 where it compares none."""
    if is_own(config.advantage.name):
        return 0
    settings = subsection(config.advantage)
    scheduled = [k for _, k in settings.get("k_schedule", ())]
    return max(scheduled, default=settings.get("k", 0))


def _drops_ratios(config: ConfigDict) -> bool:
    """Return True if tokens have no loss where their ratio is outside of the bounds."""
    correction = config.loss.correction
    return correction.level != "none" and correction.mode != "truncate"


def _tasks_per_batch(config: ConfigDict) -> int:
    return config.filter.tasks_per_batch or config.rollout.tasks_per_step


RULES = (
    # Advantages.
    Rule(
        "rollout.group_size",
        lambda c: (
            "train" in c.stages
            and c.rollout.group_size < 2
            and (
                c.advantage.name != "reinforce_plus_plus"
                or c.advantage.reinforce_plus_plus.baseline
            )
            and not is_own(c.advantage.name)
        ),
        "at least 2, since the estimator compares the trajectories of a group; only "
        "advantage.name='reinforce_plus_plus' without baseline does not",
    ),
    Rule(
        "advantage.pass_at_k.k",
        lambda c: not _is_scheduled(c) and _largest_k(c) >= c.rollout.group_size,
        "less than rollout.group_size: sets of k answers are compared, and the whole group is only "
        "one set",
    ),
    Rule(
        "advantage.pass_at_k.k",
        lambda c: (
            c.advantage.name == "pass_at_k_full_sampling"
            and not _is_scheduled(c)
            and c.rollout.group_size < 2 * _largest_k(c)
        ),
        "at most half of rollout.group_size: full sampling compares at least two sets of k",
    ),
    Rule(
        "advantage.pass_at_k.k_schedule",
        lambda c: _is_scheduled(c) and _largest_k(c) >= c.rollout.group_size,
        "every k less than rollout.group_size: sets of k answers are compared, and the whole group "
        "is only one set",
    ),
    Rule(
        "advantage.pass_at_k.k_schedule",
        lambda c: (
            c.advantage.name == "pass_at_k_full_sampling"
            and _is_scheduled(c)
            and c.rollout.group_size < 2 * _largest_k(c)
        ),
        "every k at most half of rollout.group_size: full sampling compares at least two sets of k",
    ),
    Rule(
        "shaping",
        lambda c: (
            (c.shaping.overlong_buffer or c.shaping.boundary_aware or c.shaping.entropy_reward)
            and not reads_rewards(c)
        ),
        "overlong_buffer=0, boundary_aware=False and entropy_reward=False with an advantage.name "
        "that reads only which answers are correct: no shaped reward would count",
    ),
    Rule(
        "kl.place",
        lambda c: c.kl.coef != 0 and c.kl.place == "reward" and not reads_rewards(c),
        "'loss' with an advantage.name that reads only which answers are correct: nothing in the "
        "reward would count",
    ),
    Rule(
        "advantage.by_turn",
        lambda c: c.advantage.by_turn and not reads_rewards(c),
        "False with an advantage.name that reads only which answers are correct: it has one number "
        "a trajectory to compare",
    ),
    Rule(
        "advantage.turn_discount",
        lambda c: c.advantage.turn_discount != 1 and not c.advantage.by_turn,
        "1 without advantage.by_turn: no reward would be discounted",
    ),
    # Losses.
    Rule(
        "loss.aggregation",
        lambda c: c.loss.name == "gspo" and c.loss.aggregation != "seq-mean-token-mean",
        "'seq-mean-token-mean' with loss.name='gspo': its ratio is a trajectory's, not a token's",
    ),
    Rule(
        "loss.correction.level",
        lambda c: c.loss.correction.level != "none" and not c.loss.mask_observations,
        "'none' where loss.mask_observations is False: nobody sampled what the search engine "
        "wrote, so there is no sampler's log-probability to correct by",
    ),
    Rule(
        "loss.mask_observations",
        lambda c: (
            not c.loss.mask_observations and (c.loss.gate.name == "off_policy" or _reads_sampler(c))
        ),
        "True with loss.gate.name='off_policy' or loss.dppo.anchor='rollout': of what the search "
        "engine wrote there is no sampler's log-probability",
    ),
    Rule(
        "loss.correction.level",
        lambda c: (
            _reads_sampler(c)
            and c.loss.correction.level != "none"
            and c.loss.correction.mode != "reject"
        ),
        "'none', or loss.correction.mode='reject', with loss.dppo.anchor='rollout': its weight is "
        "the sampler's correction already",
    ),
    Rule(
        "loss.correction.level",
        lambda c: (
            (c.rollout.ahead == 1 or c.filter.unfinished_tasks > 0)
            and c.loss.correction.level == "none"
            and not _reads_sampler(c)
        ),
        "'token' or 'sequence' with rollout.ahead=1 or filter.unfinished_tasks: older weights have "
        "sampled what is trained on",
    ),
    Rule(
        "loss.correction.mode",
        lambda c: c.loss.correction.level == "geometric" and c.loss.correction.mode != "reject",
        "'reject' with loss.correction.level='geometric': a mean is a measure of the gap and no "
        "importance weight",
    ),
    Rule(
        "loss.correction.low",
        lambda c: c.loss.correction.low >= c.loss.correction.high,
        "less than loss.correction.high",
    ),
    Rule(
        "loss.correction.low",
        lambda c: _drops_ratios(c) and c.loss.correction.low > 1,
        "at most 1 with loss.correction.mode='mask' or 'reject': ratios are near 1, and the loss "
        "leaves out those below",
    ),
    Rule(
        "loss.correction.high",
        lambda c: _drops_ratios(c) and c.loss.correction.high < 1,
        "at least 1 with loss.correction.mode='mask' or 'reject': ratios are near 1, and the loss "
        "leaves out those above",
    ),
    # The KL term.
    Rule(
        "kl.coef",
        lambda c: (
            c.kl.coef == 0
            and (
                c.kl.place == "reward"
                or c.kl.controller != "fixed"
                or c.kl.low_factor != 1
                or c.kl.second_chance
            )
        ),
        "above 0 with kl.place='reward', a kl.controller, kl.low_factor or kl.second_chance: there "
        "would be no term for them to change",
    ),
    Rule(
        "kl.anchor",
        lambda c: is_measured(c.kl) and c.kl.anchor == "old",
        "'ref' with kl.place='reward' or a kl.controller: before the update the policy is the old "
        "one, and the divergence always 0",
    ),
    Rule(
        "kl.estimator",
        lambda c: c.kl.coef != 0 and c.kl.place == "reward" and c.kl.estimator != "k1",
        "'k1' with kl.place='reward': its expected penalty has the gradient of the divergence",
    ),
    Rule(
        "kl.place",
        lambda c: (
            c.kl.place == "reward"
            and (c.kl.controller == "budget" or c.kl.low_factor != 1 or c.kl.second_chance)
        ),
        "'loss' with kl.controller='budget', kl.low_factor or kl.second_chance: they weigh the "
        "term token by token or by trajectory",
    ),
    Rule(
        "kl.adaptive.horizon",
        lambda c: (
            c.kl.controller == "adaptive"
            and c.kl.adaptive.horizon < c.rollout.tasks_per_step * c.rollout.group_size
        ),
        "at least rollout.tasks_per_step * rollout.group_size with kl.controller='adaptive': a "
        "step would move the coefficient by more than a fifth, at last below 0",
    ),
    Rule(
        "kl.coef",
        lambda c: c.kl.controller == "log" and not 1e-4 <= c.kl.coef <= 100,
        "1e-4 to 100 with kl.controller='log', which stays in these bounds",
    ),
    # Filters.
    Rule(
        "filter.name",
        lambda c: c.filter.name == "none" and (c.filter.carry_over or c.filter.tasks_per_batch),
        "'varied' or 'accuracy_range' with filter.carry_over or filter.tasks_per_batch; without a "
        "filter nothing is left over",
    ),
    Rule(
        "filter.accuracy_range.low",
        lambda c: c.filter.accuracy_range.low >= c.filter.accuracy_range.high,
        "less than filter.accuracy_range.high",
    ),
    Rule(
        "filter.accuracy_range.low",
        lambda c: c.filter.name == "accuracy_range" and not _passable(c),
        "bounds between which the accuracy of a group of rollout.group_size can lie, both ends "
        "out; no group could pass these",
    ),
    Rule(
        "filter.resample_early",
        lambda c: (
            c.filter.resample_early and not (c.filter.resample_attempts and has_gate(c.shaping))
        ),
        "False, unless filter.resample_attempts is above 0 and shaping.boundary_aware with "
        "shaping.stage_level has an early stage",
    ),
    Rule(
        "filter.varied.metric",
        lambda c: (
            c.filter.name == "varied"
            and c.filter.varied.metric == "seq_final_reward"
            and (c.kl.coef == 0 or c.kl.place != "reward")
        ),
        "'seq_reward', unless kl.place='reward': there is no KL term to take off",
    ),
    Rule(
        "filter.varied.metric",
        lambda c: (
            c.rollout.ahead == 1
            and c.filter.name == "varied"
            and c.filter.varied.metric == "seq_final_reward"
        ),
        "'seq_reward' with rollout.ahead=1: groups are filtered before there are the weights by "
        "which their KL term is measured",
    ),
    Rule(
        "filter.max_batches",
        lambda c: (
            c.filter.name != "none"
            and 0 < c.filter.max_batches * _tasks_per_batch(c) < c.rollout.tasks_per_step
        ),
        "enough batches of filter.tasks_per_batch to fill rollout.tasks_per_step, or 0 for no "
        "limit",
    ),
    Rule(
        "filter.varied.metric",
        lambda c: (
            c.shaping.boundary_aware
            and c.filter.name == "varied"
            and c.filter.varied.metric in ("acc", "score")
        ),
        "'seq_reward' with shaping.boundary_aware: by any measure before shaping the filter drops "
        "the groups whose abstentions it pays for",
    ),
    Rule(
        "filter.name",
        lambda c: c.shaping.boundary_aware and c.filter.name == "accuracy_range",
        "'varied' or 'none' with shaping.boundary_aware: accuracy_range drops the groups without "
        "a correct answer, whose abstentions it pays for",
    ),
    Rule(
        "filter.unfinished_tasks",
        lambda c: c.filter.unfinished_tasks > 0 and c.model.replay,
        "0 with model.replay: what goes on is read anew, by other experts maybe",
    ),
    Rule(
        "filter.unfinished_tasks",
        lambda c: c.filter.unfinished_tasks > 0 and c.filter.resample_attempts > 0,
        "0 with filter.resample_attempts: a group that goes on cannot be drawn again",
    ),
    # Shaping.
    Rule(
        "shaping.overlong_buffer",
        lambda c: c.shaping.overlong_buffer > max(0, overlong_limit(c)),
        "at most shaping.overlong_max_tokens; where that is 0, at most rollout.max_response_tokens "
        "with env.name='math', and else rollout.max_total_tokens - rollout.max_prompt_tokens",
    ),
    Rule(
        "shaping.overlong_max_tokens",
        lambda c: c.shaping.overlong_buffer > 0 and _is_never_overlong(c),
        "a length that, less shaping.overlong_buffer, a response can pass: else nothing would ever "
        "be charged",
    ),
    Rule(
        "shaping.boundary_aware",
        lambda c: c.shaping.boundary_aware and c.env.name == "math",
        "False where env.name='math': its problems have answers",
    ),
    Rule(
        "reward.weights",
        lambda c: (
            (c.shaping.boundary_aware or c.filter.resample_attempts > 0)
            and c.env.name == "search"
            and c.env.search.protocol == "search_r1"
            and bool(c.reward.weights.get("format") or c.reward.weights.get("answer"))
        ),
        "format=0 and answer=0 with shaping.boundary_aware or filter.resample_attempts: a group "
        "is without success where no reward is above 0, and these two pay for wrong answers",
    ),
    Rule(
        "shaping.stage_level",
        lambda c: c.shaping.boundary_aware and c.shaping.sample_level and not c.shaping.stage_level,
        "True with shaping.sample_level, which works in the late stage only",
    ),
    Rule(
        "eval.every_steps",
        lambda c: has_gate(c.shaping) and not (c.eval.every_steps and "greedy" in c.eval.suites),
        "above 0, and 'greedy' among eval.suites, with shaping.stage_level: evaluations end the "
        "early stage",
    ),
    Rule(
        "shaping.centred_gain",
        lambda c: c.shaping.centred_gain and not c.shaping.entropy_reward,
        "False without shaping.entropy_reward, whose gains it is about",
    ),
    Rule(
        "shaping.alpha_init",
        lambda c: c.shaping.alpha_init > c.shaping.alpha_max,
        "at most shaping.alpha_max",
    ),
    Rule(
        "shaping.bootstrap_tasks",
        lambda c: (
            c.shaping.bootstrap_tasks != 0
            and not (needs_windows(c.shaping, c.kl) or needs_buckets(c.shaping, c.kl))
        ),
        "0 without shaping.entropy_reward, kl.low_factor, kl.second_chance and "
        "kl.controller='budget': nothing would be set up",
    ),
    Rule(
        "shaping.trigger_words",
        lambda c: bool(c.shaping.trigger_words) and not needs_windows(c.shaping, c.kl),
        "() without shaping.entropy_reward, kl.low_factor and kl.second_chance: no window is "
        "looked for",
    ),
)
"""Combinations of keys that the method refuses."""

WARNINGS = (
    Rule(
        "loss.clip_low",
        lambda c: (
            "train" in c.stages and c.loss.name == "clip" and not 0.1 <= c.loss.clip_low <= 0.3
        ),
        "0.1 to 0.3 with loss.name='clip'",
    ),
    Rule(
        "loss.clip_high",
        lambda c: (
            "train" in c.stages and c.loss.name == "clip" and not 0.1 <= c.loss.clip_high <= 0.3
        ),
        "0.1 to 0.3 with loss.name='clip'",
    ),
    Rule(
        "filter.unfinished_tasks",
        lambda c: "train" in c.stages and c.filter.unfinished_tasks > c.rollout.tasks_per_step,
        "at most rollout.tasks_per_step: with more, a task waits for several steps, and old "
        "weights have sampled what is trained on",
    ),
    Rule(
        "optimizer.warmup_steps",
        lambda c: _never_warms_up(c, "train"),
        "at most num_steps * optimizer.num_minibatches * optimizer.num_epochs: the learning rate "
        "does not reach its peak",
    ),
    Rule(
        "sft.optimizer.warmup_steps",
        lambda c: _never_warms_up(c, "sft"),
        "at most sft.num_steps: the learning rate does not reach its peak",
    ),
)
"""Unusual settings of the method, which are not refused."""

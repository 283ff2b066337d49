"""Every refusal of a configuration: types, ranges, names, and choices that do not go together."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ml_collections import ConfigDict

from jaxrl.choices import check_settings, is_own, subsection
from jaxrl.config import (
    ATTENTION,
    DENSE_DTYPES,
    DTYPES,
    EXPERTS,
    FILTER_METRICS,
    KL_CONTROLLERS,
    LORA_BASE_DTYPES,
    LORA_SAMPLERS,
    ON_OUTAGE,
    OVERLONG_PROMPTS,
    OWN_MODEL,
    POLICIES,
    POOLINGS,
    REMAT,
    REPLAY,
    SUITES,
    default_config,
    refuse,
)
from jaxrl.environment import (
    CORPORA,
    NO_ENGINE,
    corpus_section,
    has_tools,
    longest_search_s,
    overlong_limit,
    searches,
    takes,
)
from jaxrl.envs.calls import MAX_S
from jaxrl.envs.json_http import check_url
from jaxrl.envs.payment import REWARD_PARTS
from jaxrl.envs.rewards import check_weights
from jaxrl.flat_config import MAPPINGS, STAGES, flatten
from jaxrl.method import (
    aggregation_of,
    estimator_of,
    filter_of,
    has_gate,
    is_measured,
    kl_estimator_of,
    loss_of,
    needs_buckets,
    needs_windows,
    reads_rewards,
    schedule_of,
)
from jaxrl.tasks import check_sources
from jaxrl.toolbox import (
    check_protocol,
    check_tools,
    engine,
    environment_parts,
    named_weights,
    own_parts,
)
from jaxrl.values import check_keys, check_type


@dataclass(frozen=True)
class Rule:
    """One combination that is refused, or warned of."""

    key: str  # what to change
    is_broken: Callable[[ConfigDict], bool]
    expected: str  # instead, and why


def check_environment(config: ConfigDict) -> None:
    """Refuses names that stand for nothing, and reward parts that are not measured.

    Raises:
        ValueError: names the key, what it holds and what is expected.
    """
    engine(config)
    check_protocol(config)
    check_tools(config)
    check_settings("env", config.env, config.env.name)
    check_settings("search", config.search, config.search.engine)
    theirs, own = environment_parts(config), own_parts(config)
    clash = next((name for name in own if name in theirs), None)
    if clash is not None:
        raise ValueError(
            f"config.reward.weights names a part {clash!r} of your own, and the environment has "
            "one of that name; call the function otherwise."
        )
    try:
        check_weights(named_weights(config), dict.fromkeys((*theirs, *own, *REWARD_PARTS)))
    except ValueError as error:
        raise ValueError(f"config.reward.weights is {config.reward.weights!r}: {error}") from None
    measures = [part for part in (*theirs, *own) if part != "format"]
    if config.reward.correct not in measures:
        raise ValueError(
            f"config.reward.correct is {config.reward.correct!r}; expected a part that is "
            f"measured: {', '.join(measures)}."
        )


def check_objectives(config: ConfigDict) -> None:
    """Refuses functions of the method that do not exist or ask for what there is not.

    Raises:
        ValueError: names the key, what it holds and what is expected.
    """
    estimator_of(config)
    loss_of(config)
    filter_of(config)
    aggregation_of(config)
    kl_estimator_of(config)
    schedule_of(config.optimizer)
    schedule_of(config.sft.optimizer, "sft.optimizer")


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
    """Of the sets of answers that the estimator compares; 0 where it compares none."""
    if is_own(config.advantage.name):
        return 0
    settings = subsection(config.advantage)
    scheduled = [k for _, k in settings.get("k_schedule", ())]
    return max(scheduled, default=settings.get("k", 0))


def _shapes(config: ConfigDict) -> bool:
    shaping = config.shaping
    return bool(shaping.overlong_buffer or shaping.boundary_aware or shaping.entropy_reward)


def _never_searches(config: ConfigDict) -> bool:
    """True where an environment of ours has no search engine."""
    return bool(config.env.name == "math" or config.search.engine == NO_ENGINE)


def _pays_tokens(config: ConfigDict) -> bool:
    """True where a model behind an endpoint is paid."""
    openai, is_asked = config.policy.openai, config.policy.name != OWN_MODEL
    return bool(is_asked and (openai.prompt_price or openai.completion_price))


def _tasks_per_batch(config: ConfigDict) -> int:
    return config.filter.tasks_per_batch or config.rollout.tasks_per_step


def _has_nothing_to_draw(config: ConfigDict) -> bool:
    """True where there is no corpus; of engines of the user's own it is not known yet."""
    if not searches(config):
        return True
    return not is_own(config.search.engine) and config.search.engine not in CORPORA


_NOTHING_TO_DRAW = (
    "where no corpus is searched: it draws documents from that of search.engine 'local', 'dense' "
    "or 'hybrid', or from `documents` of an engine of your own"
)


RULES = (
    # An external policy.
    Rule(
        "policy.name",
        lambda c: c.policy.name != OWN_MODEL and c.stages != ("evaluate",),
        f"{OWN_MODEL!r} unless stages is ('evaluate',): there are no weights of a model behind an "
        "endpoint to train, and no log-probabilities to train on",
    ),
    Rule(
        "rollout.overlong_prompts",
        lambda c: c.policy.name != OWN_MODEL and c.rollout.overlong_prompts == "truncate_left",
        "'refuse' or 'drop' with a policy behind an endpoint: messages are sent whole",
    ),
    Rule(
        "model.router.replay",
        lambda c: c.policy.name != OWN_MODEL and c.model.router.replay,
        "False with a policy behind an endpoint: it does not say which experts it has chosen",
    ),
    # An adapter.
    Rule(
        "model.lora.path",
        lambda c: c.model.lora.path and not c.model.lora.rank,
        "'' where model.lora.rank is 0: without a rank there is no adapter",
    ),
    Rule(
        "model.lora.targets",
        lambda c: c.model.lora.rank and not c.model.lora.targets,
        "at least one layer, as ('all-linear',)",
    ),
    # The environment.
    Rule(
        "images.max_pixels",
        lambda c: 0 < c.images.max_pixels < c.images.min_pixels,
        "at least images.min_pixels, or 0",
    ),
    Rule(
        "eval.suites",
        lambda c: _never_searches(c) and "empty_search" in c.eval.suites,
        "suites without empty_search where nothing is searched, as with env.name='math' or "
        "search.engine='none'",
    ),
    Rule(
        "eval.final_suites",
        lambda c: (
            _never_searches(c) and "evaluate" in c.stages and "empty_search" in c.eval.final_suites
        ),
        "suites without empty_search where nothing is searched, as with env.name='math' or "
        "search.engine='none'",
    ),
    Rule(
        "env.step_deadline_s",
        lambda c: searches(c) and 0 < c.env.step_deadline_s < longest_search_s(c),
        "0, or at least search.deadline_s + search.outage_deadline_s + rollout.num_rows / "
        "search.queries_per_second: else it ends episodes before search.on_outage can",
    ),
    Rule(
        "eval.suites",
        lambda c: "random_search" in c.eval.suites and _has_nothing_to_draw(c),
        f"suites without random_search {_NOTHING_TO_DRAW}",
    ),
    Rule(
        "eval.final_suites",
        lambda c: (
            "evaluate" in c.stages
            and "random_search" in c.eval.final_suites
            and _has_nothing_to_draw(c)
        ),
        f"suites without random_search {_NOTHING_TO_DRAW}",
    ),
    # Budgets.
    Rule(
        "rollout.max_cost",
        lambda c: (
            c.rollout.max_cost > 0
            and not any(p for name, p in c.ledger.prices.items() if name not in c.reward.judges)
        ),
        "0 without ledger.prices of tools: no call of a tool would cost anything",
    ),
    Rule(
        "rollout.max_cost",
        lambda c: c.rollout.max_cost > 0 and not takes(c, "budget"),
        "0 with an environment that does not ask for `budget`: no trajectory would be ended by it",
    ),
    Rule(
        "rollout.max_calls",
        lambda c: c.rollout.max_calls > 0 and not takes(c, "max_calls"),
        "0 with an environment that does not ask for `max_calls`: no call would be refused by it",
    ),
    Rule(
        "ledger.max_cost",
        lambda c: c.ledger.max_cost > 0 and not any((*c.ledger.prices.values(), _pays_tokens(c))),
        "0 without ledger.prices or prices of policy.openai: nothing would cost anything",
    ),
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
        lambda c: _shapes(c) and not reads_rewards(c),
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
        "loss.correction.level",
        lambda c: c.rollout.ahead == 1 and c.loss.correction.level == "none",
        "'token' or 'sequence' with rollout.ahead=1: weights one step older have sampled what is "
        "trained on",
    ),
    Rule(
        "loss.correction.low",
        lambda c: c.loss.correction.low >= c.loss.correction.high,
        "less than loss.correction.high",
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
        lambda c: is_measured(c) and c.kl.anchor == "old",
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
        lambda c: c.filter.resample_early and not (c.filter.resample_attempts and has_gate(c)),
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
        "mesh.rollout_devices",
        lambda c: c.mesh.rollout_devices > 0 and c.rollout.ahead == 0,
        "0 without rollout.ahead=1: devices that sample and those that train would wait for each "
        "other",
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
        lambda c: has_gate(c) and not (c.eval.every_steps and "greedy" in c.eval.suites),
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
        lambda c: c.shaping.bootstrap_tasks != 0 and not (needs_windows(c) or needs_buckets(c)),
        "0 without shaping.entropy_reward, kl.low_factor, kl.second_chance and "
        "kl.controller='budget': nothing would be set up",
    ),
    Rule(
        "shaping.trigger_words",
        lambda c: bool(c.shaping.trigger_words) and not needs_windows(c),
        "() without shaping.entropy_reward, kl.low_factor and kl.second_chance: no window is "
        "looked for",
    ),
)


def check_rules(config: ConfigDict) -> None:
    """Refuses the first broken rule.

    Raises:
        ValueError: names the key, what it holds, what is expected, and why.
    """
    for rule in RULES:
        if rule.is_broken(config):
            shown = _value(config, rule.key)
            raise ValueError(f"config.{rule.key} is {shown!r}; expected {rule.expected}.")


def _value(config: ConfigDict, key: str) -> Any:
    """What a key or a section holds, in plain types."""
    value: Any = config
    for name in key.split("."):
        value = value[name]
    return value.to_dict() if isinstance(value, ConfigDict) else value


WARNINGS = (
    Rule(
        "loss.clip_low",
        lambda c: c.loss.name == "clip" and not 0.1 <= c.loss.clip_low <= 0.3,
        "0.1 to 0.3 with loss.name='clip'",
    ),
    Rule(
        "loss.clip_high",
        lambda c: c.loss.name == "clip" and not 0.1 <= c.loss.clip_high <= 0.3,
        "0.1 to 0.3 with loss.name='clip'",
    ),
)
"""What is unusual, and not refused."""


def warnings(config: ConfigDict) -> list[str]:
    """A line for each choice that is unusual: the key, what it holds, what is usual."""
    return [
        f"warning: config.{rule.key} is {_value(config, rule.key)!r}; usual is {rule.expected}"
        for rule in WARNINGS
        if "train" in config.stages and rule.is_broken(config)
    ]


POSITIVE = [
    "num_steps", "policy.openai.max_concurrent", "policy.openai.deadline_s",
    "policy.openai.outage_deadline_s",
    "rollout.tasks_per_step", "rollout.group_size", "rollout.max_prompt_tokens",
    "rollout.max_response_tokens", "rollout.max_total_tokens", "rollout.num_rows",
    "rollout.chunk_tokens", "rollout.observation_lag_chunks", "optimizer.num_minibatches",
    "optimizer.num_epochs", "sft.num_steps", "sft.batch_size",
    "search.dense.topk", "search.dense.candidates", "search.dense.query_rows",
    "search.dense.max_tokens", "search.dense.batch_tokens", "search.dense.query_batch_tokens",
    "search.hybrid.topk", "search.hybrid.candidates",
    "search.local.topk", "env.search.tool_deadline_s",
    "search.deadline_s", "search.breaker_rest_s", "search.outage_deadline_s",
    "env.search.python.timeout_s", "env.search.python.memory_mib", "env.search.python.max_output",
    "search.http.topk", "search.http.timeout_s", "search.http.connections",
    "search.http.batch_size", "search.http.max_response_mib", "search.web.topk",
    "search.web.timeout_s", "search.web.connections", "search.web.max_response_mib",
    "search.opensearch.topk", "search.opensearch.timeout_s", "search.opensearch.connections",
    "search.opensearch.batch_size",
    "rollout.max_observation_tokens", "checkpoint.every_steps",
    "checkpoint.keep", "model.logits_chunk_tokens", "model.lora.alpha",
    "rollout.temperature", "rollout.top_p",
    "optimizer.epsilon", "sft.optimizer.epsilon", "eval.samples", "eval.temperature",
    "eval.resamples", "eval.top_p", "advantage.pass_at_k.k", "loss.correction.cap",
    "loss.correction.high", "kl.adaptive.target", "kl.log.target", "kl.adaptive.horizon",
    "kl.budget.budgets.easy", "reward.math_verify.deadline_s", "reward.math_verify.memory_mib",
    "reward.math_verify.workers",
    "kl.budget.budgets.medium", "kl.budget.budgets.hard", "shaping.entropy_window",
]  # fmt: skip
"""Keys whose numbers are above 0."""

NOT_NEGATIVE = [
    "model.router.balance_coef",
    "policy.openai.retries", "policy.openai.backoff_s", "model.lora.rank",
    "rollout.max_image_tokens",
    "images.min_pixels", "images.max_pixels", "images.cache_mib",
    "policy.openai.prompt_price", "policy.openai.completion_price",
    "env.step_deadline_s", "reward.deadline_s", "rollout.max_failed_steps", "search.hybrid.k",
    "search.cache_mib", "search.cache_ttl_s", "search.queries_per_second", "search.max_concurrent",
    "search.retries", "search.backoff_s", "search.breaker_failures",
    "rollout.max_turns", "rollout.max_calls", "rollout.cache_gib", "advantage.grpo.epsilon",
    "loss.clip_low", "loss.clip_high", "loss.correction.low", "kl.coef", "kl.budget.step",
    "filter.accuracy_range.low",
    "filter.tasks_per_batch", "filter.max_batches", "filter.resample_attempts",
    "filter.skip_entropy", "shaping.overlong_buffer", "shaping.overlong_max_tokens",
    "shaping.overlong_factor", "shaping.abstention_bonus", "shaping.stage_tolerance",
    "shaping.alpha_init", "shaping.alpha_step", "shaping.alpha_max",
    "optimizer.lr", "optimizer.warmup_steps", "optimizer.weight_decay", "optimizer.grad_clip",
    "optimizer.micro_rows", "sft.optimizer.micro_rows", "sft.optimizer.lr",
    "sft.optimizer.warmup_steps", "sft.optimizer.weight_decay",
    "sft.optimizer.grad_clip", "eval.every_steps", "eval.max_tasks", "seed",
    "rollout.max_cost", "ledger.max_cost", "ledger.max_calls",
    "eval.patience", "eval.min_delta", "checkpoint.keep_best", "mesh.rollout_devices",
]  # fmt: skip
"""Keys whose numbers are at least 0."""

SHARES = [
    *(
        f"{section}.{key}"
        for section in ("optimizer", "sft.optimizer")
        for key in ("final_lr_fraction", "beta1", "beta2")
    ),
    *("filter.accuracy_range.low", "filter.accuracy_range.high", "kl.low_factor"),
    *("rollout.top_p", "eval.top_p", "shaping.abstention_rate", "shaping.entropy_decay"),
    "advantage.turn_discount",
]
"""Keys whose numbers are from 0 to 1."""


def validate(config: ConfigDict, *, needs_data: bool = True) -> None:
    """Checks ranges and rules across keys, before any long work.

    Args:
        config: with all its values.
        needs_data: ask for the files of the configured stages, which a plan does not read.

    Raises:
        ValueError: names the key, what it holds and what is expected.
    """
    defaults, given = flatten(default_config()), flatten(config)
    check_keys(given)
    missing = next((key for key in defaults if key not in given), None)
    if missing is not None:
        raise ValueError(
            f"the configuration lacks config.{missing}; begin with jaxrl.config.default_config(), "
            "which has every key."
        )
    for key, value in given.items():
        check_type(key, value, defaults[key])
    _check_choices(config)
    _check_ranges(config)
    _check_values(config)
    check_environment(config)
    check_objectives(config)
    _check_rules(config)
    _check_paths(config, needs_data)


def _check_choices(config: ConfigDict) -> None:
    choices: dict[str, tuple[Any, tuple[str, ...]]] = {
        "policy.name": (config.policy.name, POLICIES),
        "model.dtype": (config.model.dtype, DTYPES),
        "model.attention": (config.model.attention, ATTENTION),
        "model.experts": (config.model.experts, EXPERTS),
        "model.remat": (config.model.remat, REMAT),
        "model.lora.base_dtype": (config.model.lora.base_dtype, LORA_BASE_DTYPES),
        "model.lora.sampler": (config.model.lora.sampler, LORA_SAMPLERS),
        "rollout.overlong_prompts": (config.rollout.overlong_prompts, OVERLONG_PROMPTS),
        "search.on_outage": (config.search.on_outage, ON_OUTAGE),
        "search.replay": (config.search.replay, REPLAY),
        "policy.openai.replay": (config.policy.openai.replay, REPLAY),
        "filter.varied.metric": (config.filter.varied.metric, FILTER_METRICS),
        "loss.correction.level": (config.loss.correction.level, ("none", "token", "sequence")),
        "loss.correction.mode": (config.loss.correction.mode, ("truncate", "mask")),
        "search.dense.dtype": (config.search.dense.dtype, DENSE_DTYPES),
        "search.dense.file_dtype": (config.search.dense.file_dtype, DTYPES),
        "search.dense.encoder_dtype": (config.search.dense.encoder_dtype, DTYPES),
        "search.dense.devices": (config.search.dense.devices, ("run", "cpu")),
        "search.dense.pooling": (config.search.dense.pooling, POOLINGS),
        "kl.anchor": (config.kl.anchor, ("ref", "old")),
        "kl.place": (config.kl.place, ("loss", "reward")),
        "kl.controller": (config.kl.controller, KL_CONTROLLERS),
        "optimizer.moments_dtype": (config.optimizer.moments_dtype, DTYPES),
        "sft.optimizer.moments_dtype": (config.sft.optimizer.moments_dtype, DTYPES),
    }
    for key, (value, allowed) in choices.items():
        if value not in allowed:
            refuse(key, value, "one of " + ", ".join(allowed))
    lists = {
        "stages": (config.stages, STAGES),
        "eval.suites": (config.eval.suites, SUITES),
        "eval.final_suites": (config.eval.final_suites, SUITES),
    }
    for key, (values, allowed) in lists.items():
        if not set(values) <= set(allowed):
            refuse(key, values, f"a tuple out of {allowed}")
    if not config.stages or (tuple(sorted(set(config.stages), key=STAGES.index)) != config.stages):
        refuse("stages", config.stages, f"each at most once, in the order of {STAGES}")


def _check_k_schedule(schedule: tuple[Any, ...]) -> None:
    key = "advantage.pass_at_k.k_schedule"
    for pair in schedule:
        is_pair = isinstance(pair, tuple) and [type(number) for number in pair] == [int, int]
        if not is_pair or pair[1] < 1:
            refuse(key, schedule, "pairs (step, k) of whole numbers, k at least 1, or ()")
    steps = [step for step, _ in schedule]
    if steps[:1] not in ([], [0]) or steps != sorted(set(steps)):
        refuse(key, schedule, "pairs (step, k) with the first at step 0 and steps rising")


def _check_rules(config: ConfigDict) -> None:
    rollout, optimizer = config.rollout, config.optimizer
    check_rules(config)
    if rollout.tasks_per_step % optimizer.num_minibatches:
        refuse(
            "optimizer.num_minibatches",
            optimizer.num_minibatches,
            f"a divisor of rollout.tasks_per_step={rollout.tasks_per_step}; groups stay whole",
        )
    if rollout.max_prompt_tokens >= rollout.max_total_tokens:
        refuse(
            "rollout.max_prompt_tokens",
            rollout.max_prompt_tokens,
            f"less than rollout.max_total_tokens={rollout.max_total_tokens}",
        )
    if "{question}" not in config.prompt.template:
        refuse("prompt.template", config.prompt.template, "text that contains {question}")
    for message in config.prompt.examples:
        if not isinstance(message, dict) or set(message) != {"role", "content"}:
            refuse("prompt.examples", message, "messages with 'role' and 'content'")
    if config.eval.patience and not (config.checkpoint.keep_best and config.eval.every_steps):
        refuse(
            "eval.patience",
            config.eval.patience,
            "0, unless checkpoint.keep_best and eval.every_steps are above 0: the stage ends with "
            "the best checkpoint, and only evaluations while training can find one",
        )
    # No other stage looks for the best: an evaluation alone may draw more samples.
    if config.checkpoint.keep_best and "train" in config.stages:
        _check_best_metric(config)


def _check_best_metric(config: ConfigDict) -> None:
    """Refuses a name that no evaluation will write, as far as that is known beforehand."""
    suites, samples = config.eval.suites, config.eval.samples
    parts = config.eval.best_metric.split("/")
    if "exact_match" in parts[2:]:  # a data set may be called openai/gsm8k
        at = parts.index("exact_match", 2)
        parts = [parts[0], "/".join(parts[1:at]), *parts[at:]]
    match parts:
        case ["val-core", _, "exact_match", suite, *_] if suite in SUITES and suite != "sampled":
            is_written = suite in suites
        case ["val-core", _, "exact_match", kind, *_]:
            is_written = "sampled" in suites and (
                kind == f"mean@{samples}" or kind.startswith(("best@", "maj@"))
            )
        case ["val-aux", _, *_, suite]:
            is_written = suite in suites
        case _:
            is_written = False
    if not is_written:
        refuse(
            "eval.best_metric",
            config.eval.best_metric,
            f"what an evaluation with eval.suites={suites} and eval.samples={samples} writes, as "
            f"val-core/all/exact_match/mean@{samples} or val-core/all/exact_match/greedy",
        )


def _check_paths(config: ConfigDict, needs_data: bool) -> None:
    needed = {"model.path": (config.model.path, True)}
    data = {
        "sft.source": (config.sft.source, "sft" in config.stages),
        "search.local.corpus": (config.search.local.corpus, corpus_section(config) == "local"),
        "search.dense.corpus": (config.search.dense.corpus, corpus_section(config) == "dense"),
    }
    is_dense = corpus_section(config) == "dense"
    needed["search.dense.encoder"] = (config.search.dense.encoder, is_dense)
    for key, (value, is_needed) in {**needed, **(data if needs_data else {})}.items():
        if is_needed and not value:
            demonstrations = (
                "a JSONL file of chats (docs/data.md), which the stage 'sft' learns from; or leave "
                "'sft' out of config.stages"
            )
            refuse(key, value, demonstrations if key == "sft.source" else "a path")
    if searches(config):
        _check_server(config)
    if config.policy.name != OWN_MODEL:
        expected = {"url": "the address of an endpoint, as http://127.0.0.1:8000/v1"}
        for key, what in (expected | {"model": "the name of a model there"}).items():
            if not config.policy.openai[key]:
                refuse(f"policy.openai.{key}", config.policy.openai[key], what)
    readers = {"train": {"train"}, "eval": {"train", "evaluate"}}
    for kind, stages in readers.items():
        if needs_data and stages & set(config.stages):
            check_sources(config, kind)


def _check_server(config: ConfigDict) -> None:
    """Refuses an engine that asks a server without saying which; the engine checks the rest."""
    engine, search = config.search.engine, config.search
    expected = "the address of a server, as http://127.0.0.1:8000"
    if engine in ("http", "opensearch") and not search[engine].url:
        refuse(f"search.{engine}.url", search[engine].url, expected)
    if engine in ("http", "opensearch", "web") and search[engine].url:
        keys_from = f"config.search.{engine}.{'auth' if engine == 'opensearch' else 'key_env'}"
        check_url(f"search.{engine}.url", search[engine].url, keys_from=keys_from)
    if engine == "opensearch" and not search.opensearch.index:
        refuse("search.opensearch.index", search.opensearch.index, "the name of an index")
    if engine == "web" and search.web.provider == "searxng" and not search.web.url:
        refuse("search.web.url", search.web.url, expected)


MIN_TEMPERATURE = 1e-3
"""Less draws the most likely token all but always, and far less makes logits infinite."""

MAX_CACHE_GIB = 2**20
"""More than any device has, in numbers that stay whole."""


def _check_ranges(config: ConfigDict) -> None:
    flat = flatten(config)
    for key in POSITIVE:
        if not flat[key] > 0:
            refuse(key, flat[key], "a number above 0")
    for key in NOT_NEGATIVE:
        if not flat[key] >= 0:
            refuse(key, flat[key], "a number of at least 0")
    for key, value in flat.items():
        if key.endswith("_s") and value > MAX_S:
            refuse(key, value, f"at most {MAX_S:g} seconds, which are 31 years")
    for key in SHARES:
        if not 0 <= flat[key] <= 1:
            refuse(key, flat[key], "a number from 0 to 1")
        if flat[key] == 1 and "beta" in key:
            refuse(key, flat[key], "a number below 1: the moment would never move")
    if config.seed >= 2**31:
        refuse("seed", config.seed, "a number below 2**31")


def _check_values(config: ConfigDict) -> None:
    flat = flatten(config)
    if not 0 <= config.shaping.entropy_percentile <= 100:
        refuse("shaping.entropy_percentile", config.shaping.entropy_percentile, "a number 0 to 100")
    if config.shaping.bootstrap_tasks < -1:
        refuse("shaping.bootstrap_tasks", config.shaping.bootstrap_tasks, "-1 (all) or more")
    if not all(isinstance(word, str) and word.strip() for word in config.shaping.trigger_words):
        refuse("shaping.trigger_words", config.shaping.trigger_words, "a tuple of words")
    for section in ("rollout", "eval"):
        if config[section].temperature < MIN_TEMPERATURE:
            expected = f"a number of at least {MIN_TEMPERATURE}; the suite 'greedy' is that of 0"
            refuse(f"{section}.temperature", config[section].temperature, expected)
    if config.rollout.chunk_tokens > config.rollout.max_total_tokens:
        expected = f"at most rollout.max_total_tokens={config.rollout.max_total_tokens}"
        refuse("rollout.chunk_tokens", config.rollout.chunk_tokens, expected)
    if config.rollout.cache_gib > MAX_CACHE_GIB:
        refuse("rollout.cache_gib", config.rollout.cache_gib, f"at most {MAX_CACHE_GIB}")
    if config.rollout.ahead not in (0, 1):
        refuse("rollout.ahead", config.rollout.ahead, "0 or 1")
    if config.log.trajectories < -1:
        refuse("log.trajectories", config.log.trajectories, "0 or more, or -1 for all")
    if (bound := config.loss.clip.dual_clip) and bound <= 1:
        refuse("loss.clip.dual_clip", bound, "a number above 1, or 0 for no bound")
    # A vote among more would overflow float64.
    if config.eval.samples > 256:  # votes over all subsets of more take seconds a question
        refuse("eval.samples", config.eval.samples, "at most 256")
    if not all(type(k) is int and 1 <= k <= config.eval.samples for k in config.eval.ks):
        expected = f"a tuple of whole numbers from 1 to eval.samples={config.eval.samples}"
        refuse("eval.ks", config.eval.ks, expected)
    _check_k_schedule(config.advantage.pass_at_k.k_schedule)
    named: dict[str, tuple[Any, str]] = {
        "model.eos_tokens": (config.model.eos_tokens, "<|im_end|>"),
        "model.lora.targets": (config.model.lora.targets, "all-linear"),
    }
    for key, (texts, shown) in named.items():
        if not all(isinstance(text, str) and text for text in texts):
            refuse(key, texts, f"a tuple of texts, as ({shown!r},)")
    for key, example in MAPPINGS.items():
        for name, value in flat[key].items():
            if not isinstance(name, str) or not _is_plain(value, is_flat=key not in NESTED):
                kinds = "true, false, a number or a text each"
                kinds += ", or lists of these" * (key in NESTED)
                refuse(key, flat[key], f"names with {kinds}, as {{'name': {example!r}}}")
    for key in ("reward.settings", "reward.judges"):
        if not all(isinstance(value, dict) for value in flat[key].values()):
            refuse(key, flat[key], "names with mappings, as {'name': {'setting': 50}}")
    for weight in config.reward.weights.values():
        if type(weight) not in (int, float) or not math.isfinite(weight):
            refuse("reward.weights", config.reward.weights, "a finite number for each part")
    for price in config.ledger.prices.values():
        if type(price) not in (int, float) or not 0 <= price < math.inf:
            refuse("ledger.prices", config.ledger.prices, "a price of at least 0 for each tool")
    if config.advantage.grpo.ddof not in (0, 1):
        refuse("advantage.grpo.ddof", config.advantage.grpo.ddof, "0 (population) or 1 (sample)")


NESTED = (
    *("env.settings", "search.settings", "reward.settings", "reward.judges"),
    "policy.openai.options",
    *("tasks.train.settings", "tasks.eval.settings"),
)
"""Mappings whose values may be lists and mappings themselves; the others are compiled in."""


def _is_plain(value: Any, *, is_flat: bool) -> bool:
    """Whether a value is such as JSON has, and can be read back."""
    if isinstance(value, dict) and not is_flat:
        return all(isinstance(k, str) and _is_plain(v, is_flat=False) for k, v in value.items())
    if isinstance(value, list | tuple) and not is_flat:
        return all(_is_plain(one, is_flat=False) for one in value)
    return value is None or isinstance(value, bool | int | float | str)

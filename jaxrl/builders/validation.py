"""Validation of a whole configuration: single values, names, and combinations of keys."""

from __future__ import annotations

import pkgutil
from typing import Any

from ml_collections import ConfigDict

from jaxrl.builders.resolved import CORPORA, NO_ENGINE, ResolvedConfig, resolve_names
from jaxrl.config.keys import Rule, refuse
from jaxrl.config.loading import check_keys
from jaxrl.config.schema import EXTRA_KEYS, KEYS, OWN_MODEL, SUITES, flatten
from jaxrl.envs.rewards.combiner import REWARD_PARTS
from jaxrl.envs.rewards.rules import check_weights
from jaxrl.envs.search_env import SearchEnv, check_spoken, with_tools
from jaxrl.training.method import has_gate, is_measured, needs_buckets, needs_windows
from jaxrl.utils.callables import UserCodeError, format_failure, is_dotted


def validate(config: ConfigDict, *, needs_data: bool = True) -> ResolvedConfig:
    """Check every key and the rules between them, and resolve the names.

    Args:
        config: Configuration with a value for every key.
        needs_data: Require the data files of the configured stages. A memory plan reads none.

    Raises:
        ValueError: A value, name or combination is wrong. The message names the key.
    """
    check_values(config)
    resolved = resolve_names(config, needs_data=needs_data)
    check_rules(resolved, needs_data=needs_data)
    return resolved


def check_values(config: ConfigDict) -> None:
    """Check every key by itself.

    Raises:
        ValueError: A key is missing or unknown, or its value is wrong. The message names the key.
    """
    values = flatten(config)
    check_keys(values)
    missing = next((key for key in KEYS if key not in values), None)
    if missing is not None:
        raise ValueError(
            f"the configuration lacks config.{missing}; start from jaxrl.config.default_config(), "
            "which has every key."
        )
    for name, key in KEYS.items():
        key.check(name, values[name])


def check_rules(resolved: ResolvedConfig, *, needs_data: bool = True) -> None:
    """Check the rules between keys.

    Args:
        resolved: Configuration whose values are checked.
        needs_data: Require the data files of the configured stages.

    Raises:
        ValueError: A combination is wrong. The message names the key.
    """
    config = resolved.config
    values = flatten(config)
    _check_tools(resolved)
    _check_rewards(resolved)
    _check_signs(resolved)
    for name, (condition, is_read) in UNUSED.items():
        default = KEYS[name].default
        if values[name] != default and not is_read(resolved):
            refuse(name, values[name], f"{default!r} unless {condition}; nothing reads it")
    for rule in RULES:
        if rule.is_broken(resolved):
            refuse(rule.key, _value(config, rule.key), rule.expected)
    _check_sizes(resolved)
    _check_best_metric(config)
    _check_required(resolved, needs_data=needs_data)


def warnings(resolved: ResolvedConfig) -> list[str]:
    """Return a line for each unusual setting: the key, its value, and what is usual."""
    return [
        f"warning: config.{rule.key} is {_value(resolved.config, rule.key)!r}; "
        f"usual is {rule.expected}"
        for rule in WARNINGS
        if rule.is_broken(resolved)
    ]


def _value(config: ConfigDict, key: str) -> Any:
    value: Any = config
    for name in key.split("."):
        value = value[name]
    return value.to_dict() if isinstance(value, ConfigDict) else value


def _check_tools(c: ResolvedConfig) -> None:
    """Refuse tools that the protocol cannot call, and a tool that is named twice."""
    key, names = "env.search.tools", c.env.search.tools
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        refuse(key, names, f"each tool once, not {twice[0]!r} twice")
    if servers := c.env.search.get("mcp"):
        pkgutil.resolve_name("jaxrl.extras.mcp.servers:check_servers")(servers)
    if not issubclass(c.env_class, SearchEnv):
        return
    protocol = c.protocol(())
    try:
        check_spoken(protocol)
    except ValueError as error:
        name = c.env.search.protocol
        raise ValueError(f"config.env.search.protocol names {name!r}: {error}.") from error
    engine = [] if c.search.engine == NO_ENGINE else ["search"]
    if not (engine or protocol.in_template):
        refuse(
            "search.engine",
            NO_ENGINE,
            "an engine such as 'local' or 'empty': only env.search.protocol='qwen' does without",
        )
    if servers and not engine and not c.tools:
        return  # the servers name their tools when they start
    try:
        with_tools(c.protocol, [*engine, *(tool.name for tool in c.tools)])
    except Exception as error:
        text = str(error) if isinstance(error, ValueError) else format_failure(error)
        raise UserCodeError(f"config.{key} is {names!r}: {text}") from error


def _check_rewards(c: ResolvedConfig) -> None:
    """Refuse weights of parts that nothing measures."""
    if not c.stages:
        return  # nothing is scored
    measured = (*c.environment_parts, *c.reward_parts)
    try:
        check_weights(c.reward_weights, dict.fromkeys((*measured, *REWARD_PARTS)))
    except ValueError as error:
        raise ValueError(f"config.reward.weights is {c.reward.weights!r}: {error}") from None
    choices = [part for part in measured if part != "format"]
    if c.reward.correct not in choices:
        refuse("reward.correct", c.reward.correct, f"one of {', '.join(choices)}")


def _check_signs(c: ResolvedConfig) -> None:
    """Refuse actions for signs that the watch does not know."""
    signs = getattr(c.watcher.function, "signs", None) if c.watcher else None
    unknown = sorted({*c.watch.actions} - {*(signs or c.watch.actions)})
    if unknown:
        refuse("watch.actions", c.watch.actions, f"some of {', '.join(signs or ())}")


def _reads_sampler(c: ResolvedConfig) -> bool:
    return bool(c.loss.name == "dppo" and c.loss.dppo.anchor == "rollout")


def _largest_k(c: ResolvedConfig) -> int:
    """Return the largest set of answers that the estimator compares; 0 if it compares none."""
    if not c.advantage.name.startswith("pass_at_k"):
        return 0
    settings = c.advantage.pass_at_k
    return max((k for _, k in settings.k_schedule), default=settings.k)


def _has_no_engine(c: ResolvedConfig) -> bool:
    return bool(c.env.name == "math" or c.search.engine == NO_ENGINE or c.has_custom_rollout)


def _has_no_corpus(c: ResolvedConfig) -> bool:
    """Return True if there is no corpus. Custom engines may have one."""
    if not c.searches:
        return True
    return not is_dotted(c.search.engine) and c.search.engine not in CORPORA


def _is_never_overlong(c: ResolvedConfig) -> bool:
    """Return True if even the longest response after a prompt of one token is not penalized."""
    longest = c.rollout.max_total_tokens - 1
    if not c.has_tools:
        longest = min(longest, c.rollout.max_response_tokens)
    return bool(c.overlong_limit - c.shaping.overlong_buffer >= longest)


def _no_group_passes(c: ResolvedConfig) -> bool:
    size, bounds = c.rollout.group_size, c.filter.accuracy_range
    return not any(bounds.low < count / size < bounds.high for count in range(size + 1))


def _drops_ratios(c: ResolvedConfig) -> bool:
    """Return True if tokens have no loss where their ratio is out of bounds."""
    correction = c.loss.correction
    return bool(correction.level != "none" and correction.mode != "truncate")


def _never_warms_up(c: ResolvedConfig, stage: str) -> bool:
    """Return True if a stage ends before its learning rate has reached the peak."""
    warmup_steps = c.optimizer_section(stage).warmup_steps
    return stage in c.stages and bool(warmup_steps > c.num_updates(stage))


def _costs_nothing(c: ResolvedConfig) -> bool:
    endpoint = c.policy.get(c.policy.name)
    tokens = endpoint and (endpoint.prompt_price or endpoint.completion_price)
    return not (tokens or any(c.ledger.prices.values()))


_KL_TERM = ("kl.coef is above 0", lambda c: c.kl.coef != 0)
_WINDOWS = (
    "shaping.entropy_reward, kl.low_factor or kl.second_chance is set",
    lambda c: needs_windows(c.shaping, c.kl),
)
_FILTER = ("filter.name is set", lambda c: c.filter.name != "none")

UNUSED = {
    "advantage.turn_discount": ("advantage.by_turn is True", lambda c: c.advantage.by_turn),
    "kl.place": _KL_TERM,
    "kl.controller": _KL_TERM,
    "kl.low_factor": _KL_TERM,
    "kl.second_chance": _KL_TERM,
    "filter.carry_over": _FILTER,
    "filter.tasks_per_batch": _FILTER,
    "filter.resample_early": (
        "filter.resample_attempts and shaping.stage_level are set",
        lambda c: c.filter.resample_attempts and has_gate(c.shaping),
    ),
    "shaping.centred_gain": (
        "shaping.entropy_reward is True",
        lambda c: c.shaping.entropy_reward,
    ),
    "shaping.trigger_words": _WINDOWS,
    "shaping.bootstrap_tasks": (
        "shaping.entropy_reward, kl.low_factor, kl.second_chance or kl.controller='budget' is set",
        lambda c: needs_windows(c.shaping, c.kl) or needs_buckets(c.shaping, c.kl),
    ),
    "rollout.context.max_tokens": (
        "rollout.context.name is set",
        lambda c: c.rollout.context.name != "none",
    ),
    "mesh.rollout_devices": ("rollout.ahead is 1", lambda c: c.rollout.ahead == 1),
    "ledger.max_cost": ("ledger.prices are set", lambda c: not _costs_nothing(c)),
    "rollout.max_calls": (
        "the environment takes `max_calls`",
        lambda c: c.accepts("max_calls"),
    ),
}
"""Keys that nothing reads unless a condition holds: the condition in words, and as a function.
Another value than the default is refused then, because it would silently do nothing."""


RULES = (
    # Models behind an endpoint.
    Rule(
        "policy.name",
        lambda c: c.policy.name != OWN_MODEL and c.stages != ("evaluate",),
        f"{OWN_MODEL!r} unless stages is ('evaluate',): a model behind an endpoint has no weights "
        "to train",
    ),
    Rule(
        "rollout.overlong_prompts",
        lambda c: c.policy.name != OWN_MODEL and c.rollout.overlong_prompts == "truncate_left",
        "'refuse' or 'drop' with a model behind an endpoint: messages are sent whole",
    ),
    Rule(
        "model.replay",
        lambda c: c.policy.name != OWN_MODEL and c.model.replay,
        "False with a model behind an endpoint: it does not report its experts",
    ),
    Rule(
        "model.head_dtype",
        lambda c: c.model.head_dtype == c.model.dtype,
        "'' if it equals model.dtype",
    ),
    # Advantages.
    Rule(
        "rollout.group_size",
        lambda c: (
            "train" in c.stages
            and c.rollout.group_size < 2
            and not is_dotted(c.advantage.name)
            and (
                c.advantage.name != "reinforce_plus_plus"
                or c.advantage.reinforce_plus_plus.baseline
            )
        ),
        "at least 2: the estimator compares the trajectories of a group. Only "
        "advantage.name='reinforce_plus_plus' without a baseline does not",
    ),
    Rule(
        "advantage.pass_at_k",
        lambda c: _largest_k(c) >= c.rollout.group_size,
        "every k less than rollout.group_size: a whole group is a single set of answers",
    ),
    Rule(
        "advantage.pass_at_k",
        lambda c: (
            c.advantage.name == "pass_at_k_full_sampling"
            and c.rollout.group_size < 2 * _largest_k(c)
        ),
        "every k at most half of rollout.group_size: full sampling compares at least two sets",
    ),
    Rule(
        "shaping",
        lambda c: (
            (c.shaping.overlong_buffer or c.shaping.boundary_aware or c.shaping.entropy_reward)
            and not c.reads_rewards
        ),
        "overlong_buffer=0, boundary_aware=False and entropy_reward=False with an advantage.name "
        "that reads only which answers are correct",
    ),
    Rule(
        "kl.place",
        lambda c: c.kl.coef != 0 and c.kl.place == "reward" and not c.reads_rewards,
        "'loss' with an advantage.name that reads only which answers are correct",
    ),
    Rule(
        "advantage.by_turn",
        lambda c: c.advantage.by_turn and not c.reads_rewards,
        "False with an advantage.name that reads only which answers are correct",
    ),
    # Losses.
    Rule(
        "loss.aggregation",
        lambda c: c.loss.name == "gspo" and c.loss.aggregation != "seq-mean-token-mean",
        "'seq-mean-token-mean' with loss.name='gspo', whose ratio belongs to a trajectory",
    ),
    Rule(
        "loss.mask_observations",
        lambda c: (
            not c.loss.mask_observations
            and (
                c.loss.gate.name == "off_policy"
                or _reads_sampler(c)
                or c.loss.correction.level != "none"
            )
        ),
        "True with loss.correction.level, loss.gate.name='off_policy' or "
        "loss.dppo.anchor='rollout': observations have no log-probability of the sampler",
    ),
    Rule(
        "loss.correction.level",
        lambda c: (
            _reads_sampler(c)
            and c.loss.correction.level != "none"
            and c.loss.correction.mode != "reject"
        ),
        "'none', or loss.correction.mode='reject', with loss.dppo.anchor='rollout', which corrects "
        "for the sampler itself",
    ),
    Rule(
        "loss.correction.level",
        lambda c: (
            (c.rollout.ahead == 1 or c.filter.unfinished_tasks > 0)
            and c.loss.correction.level == "none"
            and not _reads_sampler(c)
        ),
        "'token' or 'sequence' with rollout.ahead=1 or filter.unfinished_tasks: older weights "
        "sample the trajectories",
    ),
    Rule(
        "loss.correction.mode",
        lambda c: c.loss.correction.level == "geometric" and c.loss.correction.mode != "reject",
        "'reject' with loss.correction.level='geometric': a mean ratio is no importance weight",
    ),
    Rule(
        "loss.correction.low",
        lambda c: (
            c.loss.correction.low >= c.loss.correction.high
            or (_drops_ratios(c) and c.loss.correction.low > 1)
        ),
        "less than loss.correction.high, and at most 1 with loss.correction.mode='mask' or "
        "'reject': ratios are near 1, and the loss leaves out those below",
    ),
    Rule(
        "loss.correction.high",
        lambda c: _drops_ratios(c) and c.loss.correction.high < 1,
        "at least 1 with loss.correction.mode='mask' or 'reject': ratios are near 1, and the loss "
        "leaves out those above",
    ),
    # The KL term.
    Rule(
        "kl.anchor",
        lambda c: is_measured(c.kl) and c.kl.anchor == "old",
        "'ref' with kl.place='reward' or a kl.controller: before the update the divergence from "
        "the old policy is always 0",
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
        "'loss' with kl.controller='budget', kl.low_factor or kl.second_chance, which weigh single "
        "tokens or trajectories",
    ),
    Rule(
        "kl.adaptive.horizon",
        lambda c: (
            c.kl.controller == "adaptive"
            and c.kl.adaptive.horizon < c.rollout.tasks_per_step * c.rollout.group_size
        ),
        "at least rollout.tasks_per_step * rollout.group_size: otherwise a step moves the "
        "coefficient by more than a fifth",
    ),
    Rule(
        "kl.coef",
        lambda c: c.kl.controller == "log" and not 1e-4 <= c.kl.coef <= 100,
        "1e-4 to 100 with kl.controller='log'",
    ),
    # Filters.
    Rule(
        "filter.accuracy_range.low",
        lambda c: c.filter.name == "accuracy_range" and _no_group_passes(c),
        "bounds between which the accuracy of a group of rollout.group_size can lie, exclusive",
    ),
    Rule(
        "filter.varied.metric",
        lambda c: (
            c.filter.name == "varied"
            and c.filter.varied.metric == "seq_final_reward"
            and (c.kl.coef == 0 or c.kl.place != "reward" or c.rollout.ahead == 1)
        ),
        "'seq_reward', unless kl.place='reward' and rollout.ahead=0: groups are filtered without a "
        "KL term otherwise",
    ),
    Rule(
        "filter.max_batches",
        lambda c: (
            c.filter.name != "none"
            and 0
            < c.filter.max_batches * (c.filter.tasks_per_batch or c.rollout.tasks_per_step)
            < c.rollout.tasks_per_step
        ),
        "enough batches of filter.tasks_per_batch to fill rollout.tasks_per_step, or 0",
    ),
    Rule(
        "filter.name",
        lambda c: (
            c.shaping.boundary_aware
            and (
                c.filter.name == "accuracy_range"
                or (c.filter.name == "varied" and c.filter.varied.metric in ("acc", "score"))
            )
        ),
        "'none', or 'varied' with filter.varied.metric='seq_reward', with shaping.boundary_aware: "
        "other filters drop the groups whose abstentions it rewards",
    ),
    Rule(
        "filter.unfinished_tasks",
        lambda c: (
            c.filter.unfinished_tasks > 0 and (c.model.replay or c.filter.resample_attempts > 0)
        ),
        "0 with model.replay or filter.resample_attempts",
    ),
    # Shaping.
    Rule(
        "shaping.overlong_buffer",
        lambda c: c.shaping.overlong_buffer > max(0, c.overlong_limit),
        "at most shaping.overlong_max_tokens; if that is 0, at most rollout.max_response_tokens "
        "with env.name='math', else rollout.max_total_tokens - rollout.max_prompt_tokens",
    ),
    Rule(
        "shaping.overlong_max_tokens",
        lambda c: c.shaping.overlong_buffer > 0 and _is_never_overlong(c),
        "a length that a response can exceed, less shaping.overlong_buffer",
    ),
    Rule(
        "shaping.boundary_aware",
        lambda c: c.shaping.boundary_aware and c.env.name == "math",
        "False with env.name='math'",
    ),
    Rule(
        "reward.weights",
        lambda c: (
            (c.shaping.boundary_aware or c.filter.resample_attempts > 0)
            and c.env.name == "search"
            and c.env.search.protocol == "search_r1"
            and bool(c.reward.weights.get("format") or c.reward.weights.get("answer"))
        ),
        "format=0 and answer=0 with shaping.boundary_aware or filter.resample_attempts: these "
        "parts pay for wrong answers, and a group counts as failed if no reward is above 0",
    ),
    Rule(
        "shaping.stage_level",
        lambda c: c.shaping.boundary_aware and c.shaping.sample_level and not c.shaping.stage_level,
        "True with shaping.sample_level, which works in the late stage only",
    ),
    Rule(
        "eval.every_steps",
        lambda c: has_gate(c.shaping) and not (c.eval.every_steps and "greedy" in c.eval.suites),
        "above 0, with 'greedy' in eval.suites, with shaping.stage_level: evaluations end the "
        "early stage",
    ),
    Rule(
        "shaping.alpha_init",
        lambda c: c.shaping.alpha_init > c.shaping.alpha_max,
        "at most shaping.alpha_max",
    ),
    # Evaluation suites. Suites of a stage that does not run are not read.
    *(
        Rule(
            f"eval.{key}",
            lambda c, stage=stage, key=key, suite=suite, lacks=lacks: (
                stage in c.stages and suite in c.eval[key] and lacks(c)
            ),
            expected,
        )
        for key, stage in (("suites", "train"), ("final_suites", "evaluate"))
        for suite, lacks, expected in (
            (
                "empty_search",
                _has_no_engine,
                "suites without empty_search if nothing is searched",
            ),
            (
                "random_search",
                _has_no_corpus,
                "suites without random_search unless a corpus is searched: search.engine 'local', "
                "'dense' or 'hybrid', or a custom engine with `documents`",
            ),
        )
    ),
    # Deadlines and budgets.
    Rule(
        "env.step_deadline_s",
        lambda c: c.searches and 0 < c.env.step_deadline_s < _longest_search_s(c),
        "0, or at least search.deadline_s + search.outage_deadline_s + rollout.num_rows / "
        "search.queries_per_second: otherwise it ends episodes before search.on_outage can",
    ),
    Rule(
        "rollout.max_cost",
        lambda c: (
            c.rollout.max_cost > 0
            and not (
                c.accepts("budget")
                and any(p for tool, p in c.ledger.prices.items() if tool not in c.reward.judges)
            )
        ),
        "0 without ledger.prices of tools, and with an environment that does not take `budget`",
    ),
    *(rule for extra in EXTRA_KEYS.values() for rule in extra.rules),
)
"""Combinations of keys that are refused."""


def _longest_search_s(c: ResolvedConfig) -> float:
    """Return the seconds that a search may take, an outage and queueing included."""
    search, rows = c.search, c.rollout.num_rows
    queueing = rows / search.queries_per_second if search.queries_per_second else 0.0
    return float(search.deadline_s + search.outage_deadline_s + queueing)


WARNINGS = (
    *(rule for extra in EXTRA_KEYS.values() for rule in extra.warnings),
    *(
        Rule(
            f"loss.{key}",
            lambda c, key=key: (
                "train" in c.stages and c.loss.name == "clip" and not 0.1 <= c.loss[key] <= 0.3
            ),
            "0.1 to 0.3 with loss.name='clip'",
        )
        for key in ("clip_low", "clip_high")
    ),
    *(
        Rule(
            f"{key}.warmup_steps",
            lambda c, stage=stage: _never_warms_up(c, stage),
            f"at most {num_updates}: the learning rate does not reach its peak",
        )
        for stage, key, num_updates in (
            ("train", "optimizer", "num_steps * optimizer.num_minibatches * optimizer.num_epochs"),
            ("sft", "sft.optimizer", "sft.num_steps"),
        )
    ),
    Rule(
        "filter.unfinished_tasks",
        lambda c: "train" in c.stages and c.filter.unfinished_tasks > c.rollout.tasks_per_step,
        "at most rollout.tasks_per_step: with more, a task waits for several steps, and old "
        "weights have sampled what is trained on",
    ),
    Rule(
        "rollout.max_response_tokens",
        lambda c: c.rollout.max_response_tokens > c.rollout.max_total_tokens,
        "at most rollout.max_total_tokens, which also counts the prompt and observations",
    ),
)
"""Unusual settings, which are reported and not refused."""


def _check_sizes(c: ResolvedConfig) -> None:
    rollout, optimizer = c.rollout, c.optimizer
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
    if c.has_contexts:
        _check_contexts(c)
    if rollout.chunk_tokens > c.context_tokens:
        key = "context.max_tokens" if c.has_contexts else "max_total_tokens"
        refuse(
            "rollout.chunk_tokens",
            rollout.chunk_tokens,
            f"at most rollout.{key}={c.context_tokens}",
        )
    samples = c.eval.samples
    if not all(type(k) is int and 1 <= k <= samples for k in c.eval.ks):
        refuse("eval.ks", c.eval.ks, f"a tuple of integers from 1 to eval.samples={samples}")
    if c.eval.patience and not (c.checkpoint.keep_best and c.eval.every_steps):
        refuse(
            "eval.patience",
            c.eval.patience,
            "0, unless checkpoint.keep_best and eval.every_steps are above 0: the stage ends with "
            "the best checkpoint",
        )


def _check_contexts(c: ResolvedConfig) -> None:
    rollout, context = c.rollout, c.rollout.context
    least = rollout.max_prompt_tokens + context.turn_tokens
    if not least <= context.max_tokens <= rollout.max_total_tokens:
        refuse(
            "rollout.context.max_tokens",
            context.max_tokens,
            f"at least rollout.max_prompt_tokens + rollout.context.turn_tokens={least}, and at "
            f"most rollout.max_total_tokens={rollout.max_total_tokens}, which counts all contexts",
        )
    if c.shaping.overlong_buffer and not c.shaping.overlong_max_tokens:
        refuse(
            "shaping.overlong_max_tokens",
            c.shaping.overlong_max_tokens,
            "above 0 with rollout.context.name: rollout.max_total_tokens counts tokens again in "
            "each context",
        )
    if c.policy.name != OWN_MODEL:
        refuse(
            "rollout.context.name",
            context.name,
            "'none' with a policy.name other than 'model'",
        )


def _check_best_metric(config: ConfigDict) -> None:
    """Refuse a metric that no evaluation writes."""
    if not config.checkpoint.keep_best or "train" not in config.stages:
        return
    suites, samples = config.eval.suites, config.eval.samples
    parts = config.eval.best_metric.split("/")
    if "exact_match" in parts[2:]:  # the name of a data set may hold slashes: openai/gsm8k
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
        kinds = [f"mean@{samples}" if suite == "sampled" else suite for suite in suites]
        known = " or ".join(f"val-core/all/exact_match/{kind}" for kind in kinds) or "nothing"
        refuse(
            "eval.best_metric",
            config.eval.best_metric,
            f"a metric that eval.suites={suites} and eval.samples={samples} write, such as "
            f"{known}; or set checkpoint.keep_best to 0",
        )


def _check_required(c: ResolvedConfig, *, needs_data: bool) -> None:
    """Refuse empty texts in sections that the run reads, and malformed addresses."""
    if not c.model.path:
        refuse("model.path", "", "a path")
    if needs_data and "sft" in c.stages and not c.sft.source:
        refuse(
            "sft.source",
            "",
            "a JSONL file of chats (docs/data.md) for the stage 'sft'; or leave 'sft' out of "
            "config.stages",
        )
    sections = {f"policy.{c.policy.name}"}
    engine = c.search.engine
    if c.searches:
        # A recording may replace an engine with a corpus.
        section = c.corpus_section if engine in CORPORA else engine
        sections.add(f"search.{section}")
        settings = c.search.get(section)
        if settings and settings.get("url"):
            from jaxrl.utils.http_client import check_url  # imported late: it loads httpx

            secret = f"config.search.{section}.{'auth' if 'auth' in settings else 'key_env'}"
            check_url(f"search.{section}.url", settings.url, keys_from=secret)
    values = flatten(c.config)
    for name, key in KEYS.items():
        section, _, last = name.rpartition(".")
        is_read = section in sections and (needs_data or last != "corpus")
        if key.required and is_read and not values[name]:
            refuse(name, values[name], key.required)

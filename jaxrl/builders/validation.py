"""Validation of a configuration: values, names and combinations of keys."""

from __future__ import annotations

import itertools
import pkgutil
from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import Any

from ml_collections import ConfigDict

from jaxrl.builders.resolved import CORPUS_SECTIONS, NO_ENGINE, ResolvedConfig, resolve_names
from jaxrl.config.environments import add_environment_to_errors, split_config
from jaxrl.config.keys import reject_value
from jaxrl.config.loading import check_keys
from jaxrl.config.schema import EXTRA_KEYS, KEYS, LOCAL_MODEL, SUITES, flatten_config
from jaxrl.envs.rewards.combiner import REWARD_PARTS
from jaxrl.envs.rewards.rules import check_weights
from jaxrl.envs.search_env import SearchEnv, build_protocol, check_protocol
from jaxrl.logs.eval_summary import TOTAL_REWARD
from jaxrl.objectives.filters import KEYS as FILTER_KEYS
from jaxrl.training.method import (
    has_stage_gate,
    needs_divergences,
    uses_difficulty_buckets,
    uses_entropy_windows,
)
from jaxrl.utils.callables import UserCodeError, format_failure, is_dotted_path

Finding = tuple[str, str]
"""A key with an invalid value, and the expected value with the reason."""


def validate(config: ConfigDict, *, needs_data: bool = True) -> ResolvedConfig:
    """Check each key and all combinations of keys, and resolve all names.

    Args:
        config: Configuration with a value for every key.
        needs_data: True to require the data of the configured stages; False for a memory plan.

    Raises:
        ValueError: A value, name or combination is invalid. The message names the key.
    """
    check_values(config)
    resolved = resolve_names(config, needs_data=needs_data)
    check_rules(resolved, needs_data=needs_data)
    return resolved


def check_values(config: ConfigDict) -> None:
    """Check the value of each key, independently of other keys.

    Raises:
        ValueError: A key is missing or unknown, or its value is invalid. The message names it.
    """
    values = flatten_config(config)
    check_keys(values)
    missing = next((key for key in KEYS if key not in values), None)
    if missing is not None:
        raise ValueError(
            f"the configuration lacks config.{missing}; start from jaxrl.config.default_config(), "
            "which has every key."
        )
    for name, key in KEYS.items():
        key.check(name, values[name])
    split_config(config)


def check_rules(c: ResolvedConfig, *, needs_data: bool = True) -> None:
    """Check the rules that involve several keys.

    Args:
        c: Resolved configuration with valid values.
        needs_data: True to require the data of the configured stages.

    Raises:
        ValueError: The values of several keys conflict. The message names the key to change.
    """
    if c.members:
        _raise_first_finding(c, _find_environment_conflicts(c))
    # Each of several environments has a complete configuration.
    for name, environment in c.environments.items():
        with add_environment_to_errors(name):
            _check_tools(environment)
            _check_rewards(environment)
            _raise_first_finding(
                environment,
                _find_unused_keys(environment),
                _find_conflicts(environment),
                _find_limit_conflicts(environment),
                _find_missing_metric(environment),
            )
    _raise_first_finding(c, _find_suite_conflicts(c))
    for name, environment in c.environments.items():
        with add_environment_to_errors(name):
            _raise_first_finding(
                environment, _find_missing_values(environment, needs_data=needs_data)
            )


def _raise_first_finding(c: ResolvedConfig, *findings: Iterable[Finding]) -> None:
    for key, expected in itertools.chain(*findings):
        reject_value(key, _read_key(c, key), expected)


def _read_key(c: ResolvedConfig, key: str) -> Any:
    value = attrgetter(key)(c.config)
    return value.to_dict() if isinstance(value, ConfigDict) else value


def _check_tools(c: ResolvedConfig) -> None:
    """Raise a ValueError for duplicate tools and for tools that the protocol cannot call."""
    key, names = "env.search.tools", c.env.search.tools
    repeated = [name for name in names if names.count(name) > 1]
    if repeated:
        reject_value(key, names, f"each tool once, not {repeated[0]!r} twice")
    if servers := c.env.search.get("mcp"):
        pkgutil.resolve_name("jaxrl.extras.mcp.servers:check_servers")(servers)
    if not issubclass(c.env_class, SearchEnv):
        return
    protocol = c.protocol(())
    try:
        check_protocol(protocol)
    except ValueError as error:
        name = c.env.search.protocol
        raise ValueError(f"config.env.search.protocol names {name!r}: {error}.") from error
    engine = [] if c.search.engine == NO_ENGINE else ["search"]
    if not (engine or protocol.in_template):
        reject_value(
            "search.engine",
            NO_ENGINE,
            "an engine such as 'local' or 'empty': only env.search.protocol='qwen' needs none",
        )
    if servers and not engine and not c.tools:
        return  # the servers' tools are unknown until they start
    try:
        build_protocol(c.protocol, [*engine, *(tool.name for tool in c.tools)])
    except Exception as error:
        message = str(error) if isinstance(error, ValueError) else format_failure(error)
        raise UserCodeError(f"config.{key} is {names!r}: {message}") from error


def _check_rewards(c: ResolvedConfig) -> None:
    """Raise a ValueError for unknown reward parts in `reward` and for an invalid `filter.key`."""
    if not c.stages:
        return  # inference only: no rewards
    measured = (*c.environment_parts, *c.reward_parts)
    try:
        check_weights(c.reward_weights, dict.fromkeys((*measured, *REWARD_PARTS)))
    except ValueError as error:
        raise ValueError(f"config.reward.weights is {c.reward.weights!r}: {error}") from None
    choices = [part for part in measured if part != "format"]
    if c.reward.correct not in choices:
        reject_value("reward.correct", c.reward.correct, f"one of {', '.join(choices)}")
    if c.filter.key not in (*FILTER_KEYS, *measured):
        reject_value("filter.key", c.filter.key, f"one of {', '.join((*FILTER_KEYS, *measured))}")


def _find_unused_keys(c: ResolvedConfig) -> Iterator[Finding]:
    """Yield a finding for each key that is set but has no effect."""
    shaping, kl, endpoint = c.shaping, c.kl, c.policy.get(c.policy.name)
    prices = [*c.ledger.prices.values()]
    if endpoint:
        prices += [endpoint.prompt_price, endpoint.completion_price]
    has_windows = uses_entropy_windows(shaping, kl)
    has_gate = has_stage_gate(shaping)
    window_keys = "shaping.entropy_reward, kl.low_factor or kl.second_chance"
    # Columns: keys, whether the run reads them, and the condition under which it does.
    for keys, is_read, condition in (
        ("prompt.template", not c.prompt.template_file, "prompt.template_file is empty"),
        ("advantage.turn_discount", c.advantage.by_turn, "advantage.by_turn is True"),
        (
            "kl.apply_to kl.controller kl.low_factor kl.second_chance",
            kl.coef != 0,
            "kl.coef is above 0",
        ),
        (
            "filter.key filter.carry_over filter.tasks_per_batch",
            c.filter.name != "none",
            "filter.name is set",
        ),
        (
            "filter.resample_early",
            c.filter.resample_attempts and has_gate,
            "filter.resample_attempts and shaping.stage_level are set",
        ),
        ("shaping.centered_gain", shaping.entropy_reward, "shaping.entropy_reward is True"),
        ("shaping.trigger_words", has_windows, f"{window_keys} is set"),
        (
            "shaping.bootstrap_tasks",
            has_windows or uses_difficulty_buckets(shaping, kl),
            f"{window_keys} or kl.controller='budget' is set",
        ),
        ("rollout.context.max_tokens", c.has_contexts, "rollout.context.name is set"),
        ("mesh.rollout_devices", c.rollout.async_level == 1, "rollout.async_level is 1"),
        ("ledger.max_cost", any(prices), "ledger.prices are set"),
        ("rollout.max_calls", c.env_accepts("max_calls"), "the environment takes `max_calls`"),
    ):
        for key in keys.split():
            default = KEYS[key].default
            if not is_read and _read_key(c, key) != default:
                yield key, f"{default!r} unless {condition}, since the key has no effect"


def _find_conflicts(c: ResolvedConfig) -> Iterator[Finding]:
    """Yield a finding for each key that conflicts with other keys."""
    yield from _find_run_conflicts(c)
    yield from _find_method_conflicts(c)
    yield from _find_filter_conflicts(c)
    for extra in EXTRA_KEYS.values():
        yield from ((rule.key, rule.expected) for rule in extra.rules if rule.is_violated(c))


def _find_method_conflicts(c: ResolvedConfig) -> Iterator[Finding]:
    """Yield conflicts between settings of advantages, losses and the KL term."""
    # Advantage estimators: the groups and rewards that they require.
    rollout, advantage, loss, kl = c.rollout, c.advantage, c.loss, c.kl
    correction, shaping = loss.correction, c.shaping
    is_grouped = not is_dotted_path(advantage.name) and (
        advantage.name != "reinforce_plus_plus" or advantage.reinforce_plus_plus.baseline
    )
    if "train" in c.stages and rollout.group_size < 2 and is_grouped:
        yield "rollout.group_size", f"at least 2 with advantage.name={advantage.name!r}"
    if advantage.name.startswith("pass_at_k"):
        settings = advantage.pass_at_k
        largest_k = max((k for _, k in settings.k_schedule), default=settings.k)
        if largest_k >= rollout.group_size:
            yield "advantage.pass_at_k", "every k less than rollout.group_size"
        if advantage.name == "pass_at_k_full_sampling" and rollout.group_size < 2 * largest_k:
            yield "advantage.pass_at_k", "every k at most half of rollout.group_size"
    if "rewards" not in c.estimator.arguments:
        reason = "with an advantage.name that reads only which answers are correct"
        if shaping.overlong_buffer or shaping.boundary_aware or shaping.entropy_reward:
            expected = "overlong_buffer=0, boundary_aware=False and entropy_reward=False"
            yield "shaping", f"{expected} {reason}"
        if kl.coef != 0 and kl.apply_to == "reward":
            yield "kl.apply_to", f"'loss' {reason}"
        if advantage.by_turn:
            yield "advantage.by_turn", f"False {reason}"

    # The loss and its correction. Observations have no log-probability of the sampler.
    if loss.name == "gspo" and loss.aggregation != "seq-mean-token-mean":
        yield "loss.aggregation", "'seq-mean-token-mean' with loss.name='gspo'"
    loss_corrects = loss.name == "dppo" and loss.dppo.anchor == "rollout"
    is_corrected = correction.level != "none"
    is_old_sampler = loss.old_logprobs == "sampler"
    uses_rollout_logprobs = (
        loss.token_filter.name == "off_policy" or loss_corrects or is_corrected or is_old_sampler
    )
    if not loss.mask_observations and uses_rollout_logprobs:
        yield (
            "loss.mask_observations",
            "True with loss.correction.level, loss.token_filter.name='off_policy', "
            "loss.dppo.anchor='rollout' or loss.old_logprobs='sampler'",
        )
    if loss_corrects and is_corrected and correction.mode != "reject":
        yield (
            "loss.correction.level",
            "'none', or loss.correction.mode='reject', with loss.dppo.anchor='rollout'",
        )
    if is_old_sampler and is_corrected:
        yield "loss.correction.level", "'none' with loss.old_logprobs='sampler'"
    is_stale = rollout.async_level == 1 or c.filter.unfinished_tasks > 0
    if is_stale and not (is_corrected or loss_corrects or is_old_sampler):
        yield (
            "loss.correction.level",
            "'token' or 'sequence', or loss.old_logprobs='sampler', with rollout.async_level=1 or "
            "filter.unfinished_tasks, which train on trajectories of older weights",
        )
    if correction.level == "geometric" and correction.mode != "reject":
        yield "loss.correction.mode", "'reject' with loss.correction.level='geometric'"
    # Ratios are near 1, and these modes leave out those beyond the bounds.
    drops_ratios = is_corrected and correction.mode != "truncate"
    modes = "loss.correction.mode='mask' or 'reject'"
    if correction.low >= correction.high or (drops_ratios and correction.low > 1):
        yield "loss.correction.low", f"less than loss.correction.high, at most 1 with {modes}"
    if drops_ratios and correction.high < 1:
        yield "loss.correction.high", f"at least 1 with {modes}"

    # The KL term. Before an update, the divergence from the old policy is 0. In a reward, only the
    # expected penalty of k1 has the gradient of the divergence.
    if needs_divergences(kl) and kl.anchor == "old":
        yield "kl.anchor", "'ref' with kl.apply_to='reward' or a kl.controller"
    if kl.coef != 0 and kl.apply_to == "reward" and kl.estimator != "k1":
        yield "kl.estimator", "'k1' with kl.apply_to='reward'"
    is_weighted = kl.controller == "budget" or kl.low_factor != 1 or kl.second_chance
    if kl.apply_to == "reward" and is_weighted:
        yield "kl.apply_to", "'loss' with kl.controller='budget', kl.low_factor or kl.second_chance"
    num_trajectories = rollout.tasks_per_step * rollout.group_size
    if kl.controller == "adaptive" and kl.adaptive.horizon < num_trajectories:
        yield "kl.adaptive.horizon", "at least rollout.tasks_per_step * rollout.group_size"
    if kl.controller == "log" and not kl.log.min_coef <= kl.coef <= 100:
        yield "kl.coef", "kl.log.min_coef to 100 with kl.controller='log'"


def _find_filter_conflicts(c: ResolvedConfig) -> Iterator[Finding]:
    """Yield conflicts between settings of filters and reward shaping."""
    # Filters.
    rollout, kl, filter, shaping = c.rollout, c.kl, c.filter, c.shaping
    if filter.name == "range" and filter.range.low >= filter.range.high:
        yield "filter.range.low", "less than filter.range.high"
    has_kl_reward = kl.coef != 0 and kl.apply_to == "reward" and rollout.async_level == 0
    if filter.key == "seq_final_reward" and not has_kl_reward:
        yield (
            "filter.key",
            "'seq_reward' unless kl.apply_to='reward' and rollout.async_level=0",
        )
    max_tasks = filter.max_batches * (filter.tasks_per_batch or rollout.tasks_per_step)
    if filter.name != "none" and 0 < max_tasks < rollout.tasks_per_step:
        yield "filter.max_batches", "0, or enough batches to fill rollout.tasks_per_step"
    # Other filters drop the groups whose abstentions `boundary_aware` rewards.
    reads_rewards = filter.key in ("seq_reward", "seq_final_reward")
    drops_failures = filter.name == "range" or (filter.name == "varied" and not reads_rewards)
    if shaping.boundary_aware and drops_failures:
        yield (
            "filter.name",
            "'none', or 'varied' with filter.key='seq_reward', with shaping.boundary_aware",
        )
    if filter.unfinished_tasks > 0 and (c.model.replay or filter.resample_attempts > 0):
        yield "filter.unfinished_tasks", "0 with model.replay or filter.resample_attempts"

    # The overlong penalty.
    if shaping.overlong_buffer > max(0, c.overlong_limit):
        yield "shaping.overlong_buffer", f"at most the length limit, {c.overlong_limit}"

    # Rewards of abstentions, in groups where no reward is above 0.
    if shaping.boundary_aware and c.env.name == "math":
        yield "shaping.boundary_aware", "False with env.name='math'"
    needs_failures = shaping.boundary_aware or filter.resample_attempts > 0
    rewards_format = c.reward.weights.get("format") or c.reward.weights.get("answer")
    is_search_r1 = c.env.name == "search" and c.env.search.protocol == "search_r1"
    if needs_failures and is_search_r1 and rewards_format:
        yield (
            "reward.weights",
            "format=0 and answer=0, which reward wrong answers, with shaping.boundary_aware or "
            "filter.resample_attempts",
        )
    if shaping.boundary_aware and shaping.sample_level and not shaping.stage_level:
        yield "shaping.stage_level", "True with shaping.sample_level"
    if has_stage_gate(shaping) and not (c.eval.every_steps and "greedy" in c.eval.suites):
        yield "eval.every_steps", "above 0, and 'greedy' in eval.suites, with shaping.stage_level"
    if shaping.alpha_init > shaping.alpha_max:
        yield "shaping.alpha_init", "at most shaping.alpha_max"


def _find_run_conflicts(c: ResolvedConfig) -> Iterator[Finding]:
    """Yield conflicts between settings of the model, environment, budgets and watch."""
    if c.policy.name != LOCAL_MODEL:
        reason = "with a model behind an endpoint"
        if c.stages != ("evaluate",):
            yield "policy.name", f"{LOCAL_MODEL!r} unless stages is ('evaluate',)"
        if c.rollout.overlong_prompts == "truncate_left":
            yield "rollout.overlong_prompts", f"'refuse' or 'drop' {reason}"
        if c.model.replay:
            yield "model.replay", f"False {reason}"
    if "train" in c.stages and bool(c.num_steps) == bool(c.num_epochs):
        yield "num_epochs", "0 with num_steps above 0, or above 0 with num_steps=0"
    held_out = c.tasks.eval
    if held_out.holdout and (held_out.source or held_out.sources):
        yield "tasks.eval.holdout", "0 with tasks.eval.source or tasks.eval.sources"
    if c.model.head_dtype == c.model.dtype:
        yield "model.head_dtype", "'' if it equals model.dtype"

    # Deadlines, budgets and the watch.
    search, rows = c.search, c.rollout.max_num_seqs
    max_search_s = search.deadline_s + search.outage_deadline_s
    if search.queries_per_second:
        max_search_s += rows / search.queries_per_second
    if c.has_search and 0 < c.env.step_deadline_s < max_search_s:
        yield (
            "env.step_deadline_s",
            "0, or at least search.deadline_s + search.outage_deadline_s + rollout.max_num_seqs / "
            "search.queries_per_second",
        )
    prices = [price for tool, price in c.ledger.prices.items() if tool not in c.reward.judges]
    if c.rollout.max_cost > 0 and not (c.env_accepts("budget") and any(prices)):
        yield "rollout.max_cost", "0 unless ledger.prices has tools and the environment a `budget`"
    signs = getattr(c.detector.function, "signs", None) if c.detector else None
    if signs is not None and not {*c.watch.actions} <= {*signs}:
        yield "watch.actions", f"some of {', '.join(signs)}"


def _find_suite_conflicts(c: ResolvedConfig) -> Iterator[Finding]:
    """Yield a finding for each configured evaluation suite that no environment supports."""
    has_engine = has_corpus = False
    for each in c.environments.values():
        engine = each.search.engine
        has_engine |= each.env.name != "math" and engine != NO_ENGINE and not c.has_custom_rollout
        # A custom engine may have a corpus.
        has_corpus |= each.has_search and (is_dotted_path(engine) or engine in CORPUS_SECTIONS)
    for key, stage in (("eval.suites", "train"), ("eval.final_suites", "evaluate")):
        suites = _read_key(c, key) if stage in c.stages else ()
        if "empty_search" in suites and not has_engine:
            yield key, "suites without empty_search if there is no search"
        if "random_search" in suites and not has_corpus:
            engines = "'local', 'dense', 'hybrid' or a custom engine with `documents`"
            yield key, f"suites without random_search unless search.engine is {engines}"


def _find_environment_conflicts(c: ResolvedConfig) -> Iterator[Finding]:
    """Yield conflicts between multiple environments and the settings that they share."""
    for name, environment in c.members.items():
        section = f"environments.{name}"
        if environment.has_custom_rollout:
            value, expected = environment.env.name, "an environment without its own rollout"
            reject_value(f"{section}.env.name", value, expected)
        if TOTAL_REWARD in (*environment.environment_parts, *environment.reward_parts):
            expected = f"other names, since {TOTAL_REWARD!r} is the total; rename the function"
            reject_value(f"{section}.reward.weights", environment.reward.weights, expected)
    if c.sft.source:
        yield "sft.source", "'' with environments: each of them sets its own"
    # Methods that compare or average over groups would compare different environments.
    reason = "with environments, since it compares groups with each other"
    if c.advantage.name in ("reinforce_plus_plus", "pass_at_k_entropy_guided"):
        yield "advantage.name", f"another estimator {reason}"
    shaping, kl = c.shaping, c.kl
    if shaping.entropy_reward:
        yield "shaping.entropy_reward", f"False {reason}"
    if kl.controller == "budget":
        yield "kl.controller", f"another controller {reason}"
    for key, default in (("kl.low_factor", 1.0), ("kl.second_chance", False)):
        if _read_key(c, key) != default:
            yield key, f"{default} {reason}"
    if has_stage_gate(shaping):
        yield "shaping.stage_level", "False with environments: one accuracy ends the early stage"
    is_multi_turn = {environment.is_multi_turn for environment in c.members.values()}
    if shaping.overlong_buffer and not shaping.overlong_max_tokens and len(is_multi_turn) > 1:
        yield "shaping.overlong_max_tokens", "above 0 if only some environments have tools"
    if c.filter.get("unanswerable") == "drop":
        yield "filter.unanswerable", "'keep' with environments"


def _find_limit_conflicts(c: ResolvedConfig) -> Iterator[Finding]:
    """Yield a finding for each numeric setting that conflicts with another setting."""
    # Mini-batches and lengths.
    rollout, context, optimizer = c.rollout, c.rollout.context, c.optimizer
    total = f"rollout.max_total_tokens={rollout.max_total_tokens}"
    if rollout.tasks_per_step % optimizer.num_minibatches:
        divisor = f"a divisor of rollout.tasks_per_step={rollout.tasks_per_step}"
        yield "optimizer.num_minibatches", divisor
    if rollout.max_prompt_tokens >= rollout.max_total_tokens:
        yield "rollout.max_prompt_tokens", f"less than {total}"
    length_key = "rollout.max_total_tokens"
    if c.has_contexts:
        length_key = "rollout.context.max_tokens"
        min_tokens = rollout.max_prompt_tokens + context.turn_tokens
        if not min_tokens <= context.max_tokens <= rollout.max_total_tokens:
            yield (
                length_key,
                f"at least rollout.max_prompt_tokens + rollout.context.turn_tokens={min_tokens}, "
                f"and at most {total}, which counts all contexts",
            )
        if c.shaping.overlong_buffer and not c.shaping.overlong_max_tokens:
            yield "shaping.overlong_max_tokens", "above 0 with rollout.context.name"
        if c.policy.name != LOCAL_MODEL:
            yield "rollout.context.name", "'none' with a policy.name other than 'model'"
    if rollout.chunk_tokens > c.context_tokens:
        yield "rollout.chunk_tokens", f"at most {length_key}={c.context_tokens}"
    # Evaluations.
    samples = c.eval.samples
    if not all(type(k) is int and 1 <= k <= samples for k in c.eval.ks):
        yield "eval.ks", f"a tuple of integers from 1 to eval.samples={samples}"
    if c.eval.patience and not (c.checkpoint.keep_best and c.eval.every_steps):
        yield "eval.patience", "0, unless checkpoint.keep_best and eval.every_steps are above 0"


def _find_missing_metric(c: ResolvedConfig) -> Iterator[Finding]:
    """Yield a finding if no evaluation computes `eval.best_metric`."""
    if not c.checkpoint.keep_best or "train" not in c.stages:
        return
    suites, samples = c.eval.suites, c.eval.samples
    parts = c.eval.best_metric.split("/")
    if "exact_match" in parts[2:]:  # data set names may contain slashes: openai/gsm8k
        index = parts.index("exact_match", 2)
        parts = [parts[0], "/".join(parts[1:index]), *parts[index:]]
    match parts:
        case ["val-core", _, "exact_match", suite, *_] if suite in SUITES and suite != "sampled":
            is_computed = suite in suites
        case ["val-core", _, "exact_match", kind, *_]:
            is_computed = "sampled" in suites and (
                kind == f"mean@{samples}" or kind.startswith(("best@", "maj@"))
            )
        case ["val-aux", _, *_, suite]:
            is_computed = suite in suites
        case _:
            is_computed = False
    if not is_computed:
        kinds = [f"mean@{samples}" if suite == "sampled" else suite for suite in suites]
        known = " or ".join(f"val-core/all/exact_match/{kind}" for kind in kinds) or "nothing"
        expected = f"a metric of eval.suites={suites} and eval.samples={samples}, such as {known}"
        yield "eval.best_metric", f"{expected}; or set checkpoint.keep_best to 0"


def _find_missing_values(c: ResolvedConfig, *, needs_data: bool) -> Iterator[Finding]:
    """Yield a finding for each required key that is empty, and check the engine's URL."""
    if not c.model.path:
        yield "model.path", "a path"
    if needs_data and "sft" in c.stages and not c.sft.source:
        yield "sft.source", "a JSONL file of chats (docs/data.md) for the stage 'sft'"
    sections = {f"policy.{c.policy.name}"}
    engine = c.search.engine
    if c.has_search:
        # A corpus is not required if a recording replaces the engine.
        section = c.corpus_section if engine in CORPUS_SECTIONS else engine
        sections.add(f"search.{section}")
        settings = c.search.get(section)
        if settings and settings.get("url"):
            from jaxrl.utils.http_client import check_url  # imported late: it loads httpx

            secret = f"config.search.{section}.{'auth' if 'auth' in settings else 'key_env'}"
            check_url(f"search.{section}.url", settings.url, keys_from=secret)
    for name, key in KEYS.items():
        section, _, last = name.rpartition(".")
        is_read = section in sections and (needs_data or last != "corpus")
        if key.required and is_read and not _read_key(c, name):
            yield name, key.required

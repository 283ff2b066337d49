"""Every refusal of a configuration: single values, names, and choices that do not go together."""

from __future__ import annotations

from typing import Any

from ml_collections import ConfigDict

from jaxrl.builders import environment, method
from jaxrl.builders.environment import (
    CORPORA,
    context_tokens,
    corpus_section,
    has_contexts,
    searches,
)
from jaxrl.builders.method import (
    aggregation_of,
    beside_loss,
    estimator_of,
    filter_of,
    kl_estimator_of,
    loss_of,
    schedule_of,
    trajectory_filter_of,
    watch_of,
)
from jaxrl.builders.toolbox import (
    check_protocol,
    check_tools,
    engine,
    environment_parts,
    named_weights,
    own_parts,
)
from jaxrl.config.keys import Rule, refuse
from jaxrl.config.loading import check_keys
from jaxrl.config.registry import check_settings
from jaxrl.config.schema import BROUGHT, KEYS, OWN_MODEL, SUITES, flatten
from jaxrl.data.tasks import check_sources
from jaxrl.envs.rewards.combiner import REWARD_PARTS
from jaxrl.envs.rewards.rules import check_weights


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
    """Refuses functions of the method that do not exist, or ask for arrays that do not.

    Raises:
        ValueError: names the key, what it holds and what is expected.
    """
    estimator_of(config)
    loss_of(config)
    beside_loss(config, "term")
    beside_loss(config, "gate")
    filter_of(config)
    watch_of(config)
    trajectory_filter_of(config)
    aggregation_of(config)
    kl_estimator_of(config)
    schedule_of(config.optimizer)
    schedule_of(config.sft.optimizer, "sft.optimizer")


def _pays_tokens(config: ConfigDict) -> bool:
    """True where a model behind an endpoint is paid."""
    endpoint = config.policy.get(config.policy.name)
    return bool(endpoint and (endpoint.prompt_price or endpoint.completion_price))


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
        "model.replay",
        lambda c: c.policy.name != OWN_MODEL and c.model.replay,
        "False with a policy behind an endpoint: it does not say which experts it has chosen",
    ),
    Rule(
        "ledger.max_cost",
        lambda c: c.ledger.max_cost > 0 and not any((*c.ledger.prices.values(), _pays_tokens(c))),
        "0 without ledger.prices or prices of policy.openai: nothing would cost anything",
    ),
    # The output layer.
    Rule(
        "model.head_dtype",
        lambda c: c.model.head_dtype == c.model.dtype,
        "'' where it is model.dtype: the output layer is computed in that anyway",
    ),
    # Devices.
    Rule(
        "mesh.rollout_devices",
        lambda c: c.mesh.rollout_devices > 0 and c.rollout.ahead == 0,
        "0 without rollout.ahead=1: devices that sample and those that train would wait for each "
        "other",
    ),
    *(rule for one in BROUGHT.values() for rule in one.rules),
    *environment.RULES,
    *method.RULES,
)
"""Combinations that are refused; those of a feature stand beside it."""


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
    """The value of a key or a section, in plain types."""
    value: Any = config
    for name in key.split("."):
        value = value[name]
    return value.to_dict() if isinstance(value, ConfigDict) else value


WARNINGS = (
    *(rule for one in BROUGHT.values() for rule in one.warnings),
    *environment.WARNINGS,
    *method.WARNINGS,
)
"""Unusual settings, which are not refused; those of a feature stand beside it."""


def warnings(config: ConfigDict) -> list[str]:
    """Return a line for each unusual setting: the key, its value, and what is usual."""
    return [
        f"warning: config.{rule.key} is {_value(config, rule.key)!r}; usual is {rule.expected}"
        for rule in WARNINGS
        if rule.is_broken(config)
    ]


def validate(config: ConfigDict, *, needs_data: bool = True) -> None:
    """Checks every key and the rules between them, before any long work.

    Args:
        config: with all its values.
        needs_data: ask for the files of the configured stages, which a plan does not read.

    Raises:
        ValueError: names the key, what it holds and what is expected.
    """
    given = flatten(config)
    check_keys(given)
    missing = next((key for key in KEYS if key not in given), None)
    if missing is not None:
        raise ValueError(
            f"the configuration lacks config.{missing}; begin with jaxrl.config.default_config(), "
            "which has every key."
        )
    for name, key in KEYS.items():
        key.check(name, given[name])
    check_environment(config)
    check_objectives(config)
    check_rules(config)
    _check_sizes(config)
    _check_required(config, needs_data)


def _check_contexts(config: ConfigDict) -> None:
    rollout, context = config.rollout, config.rollout.context
    if not has_contexts(config):
        if context.max_tokens:
            refuse(
                "rollout.context.max_tokens",
                context.max_tokens,
                "0, unless rollout.context.name says how the next context begins",
            )
        return
    least = rollout.max_prompt_tokens + context.turn_tokens
    if not least <= context.max_tokens <= rollout.max_total_tokens:
        refuse(
            "rollout.context.max_tokens",
            context.max_tokens,
            f"at least rollout.max_prompt_tokens + rollout.context.turn_tokens={least}, and at "
            f"most rollout.max_total_tokens={rollout.max_total_tokens}, which counts all contexts",
        )
    if config.shaping.overlong_buffer and not config.shaping.overlong_max_tokens:
        refuse(
            "shaping.overlong_max_tokens",
            config.shaping.overlong_max_tokens,
            "above 0 with rollout.context.name: a response counts each token once, and "
            "rollout.max_total_tokens, which is its limit else, those of every context",
        )
    if config.policy.name != OWN_MODEL:
        refuse(
            "rollout.context.name",
            context.name,
            "'none' with a policy.name other than 'model': an endpoint keeps its contexts",
        )


def _check_sizes(config: ConfigDict) -> None:
    rollout, optimizer = config.rollout, config.optimizer
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
    _check_contexts(config)
    if rollout.chunk_tokens > (longest := context_tokens(config)):
        key = "context.max_tokens" if has_contexts(config) else "max_total_tokens"
        expected = f"at most rollout.{key}={longest}"
        refuse("rollout.chunk_tokens", rollout.chunk_tokens, expected)
    samples = config.eval.samples
    if not all(type(k) is int and 1 <= k <= samples for k in config.eval.ks):
        expected = f"a tuple of whole numbers from 1 to eval.samples={samples}"
        refuse("eval.ks", config.eval.ks, expected)
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
        kinds = [f"mean@{samples}" if suite == "sampled" else suite for suite in suites]
        known = " or ".join(f"val-core/all/exact_match/{kind}" for kind in kinds) or "nothing"
        refuse(
            "eval.best_metric",
            config.eval.best_metric,
            f"what an evaluation with eval.suites={suites} and eval.samples={samples} writes, as "
            f"{known}; or set checkpoint.keep_best to 0",
        )


def _check_required(config: ConfigDict, needs_data: bool) -> None:
    """Refuses empty texts in sections that the run reads, and addresses that are none."""
    if not config.model.path:
        refuse("model.path", "", "a path")
    if needs_data and "sft" in config.stages and not config.sft.source:
        refuse(
            "sft.source",
            "",
            "a JSONL file of chats (docs/data.md), which the stage 'sft' learns from; or leave "
            "'sft' out of config.stages",
        )
    sections = {f"policy.{config.policy.name}"}
    engine = config.search.engine
    if searches(config):
        # An engine with a corpus may be replaced by a recording.
        section = corpus_section(config) if engine in CORPORA else engine
        sections.add(f"search.{section}")
        settings = config.search.get(section)
        if settings and settings.get("url"):
            from jaxrl.utils.http_client import check_url  # late: it loads a client of HTTP

            keys_from = f"config.search.{section}.{'auth' if 'auth' in settings else 'key_env'}"
            check_url(f"search.{section}.url", settings.url, keys_from=keys_from)
    given = flatten(config)
    for name, key in KEYS.items():
        section, _, last = name.rpartition(".")
        is_asked = section in sections and (needs_data or last != "corpus")
        if key.required and is_asked and not given[name]:
            refuse(name, given[name], key.required)
    readers = {"train": {"train"}, "eval": {"train", "evaluate"}}
    for kind, stages in readers.items():
        if needs_data and stages & set(config.stages):
            check_sources(config, kind)

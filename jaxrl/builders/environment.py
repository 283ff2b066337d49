"""The environment that a configuration names, and what it asks for."""

from __future__ import annotations

import inspect

from ml_collections import ConfigDict

from jaxrl.config.keys import Rule
from jaxrl.config.registry import check_texts, chosen
from jaxrl.config.schema import KEYS
from jaxrl.envs.base import ENVS, Env
from jaxrl.utils.callables import is_own

NO_ENGINE = "none"
"""The name in `search.engine` of no search engine at all."""


def environment(config: ConfigDict) -> type[Env]:
    """The class of the configured environment."""
    cls = chosen("env.name", config.env.name, ENVS, wanted="my_env.MyEnv")
    declared = ("stop_strings", "reward_parts", "start", "step", "score")
    # What is inherited from `Env` itself is only declared.
    missing = [name for name in declared if getattr(cls, name, None) is getattr(Env, name, None)]
    if not isinstance(cls, type) or missing:
        kind = type(cls).__name__
        if isinstance(cls, type):
            kind = f"class without {', '.join(missing)}"
        raise ValueError(
            f"config.env.name names {config.env.name!r}, a {kind}; expected "
            f"a class with {', '.join(declared)}, as jaxrl/envs/base.py has them."
        )
    for name in ("stop_strings", "reward_parts"):
        check_texts("env.name", config.env.name, name, getattr(cls, name))
    return cls


def plays_itself(config: ConfigDict) -> bool:
    """True where the environment has a `rollout` of its own, which asks the engine."""
    return hasattr(environment(config), "rollout")


def searches(config: ConfigDict) -> bool:
    """True where the environment asks for the search engine, and there is one."""
    return takes(config, "engine") and config.search.engine != NO_ENGINE


def takes(config: ConfigDict, name: str) -> bool:
    """True where the environment has a parameter of this name, for what a run offers."""
    return name in inspect.signature(environment(config)).parameters


def suites_of(config: ConfigDict) -> set[str]:
    """The suites that the configured stages evaluate."""
    named = {"train": config.eval.suites, "evaluate": config.eval.final_suites}
    return {suite for stage in config.stages for suite in named.get(stage, ())}


def has_tools(config: ConfigDict) -> bool:
    """True where something can end a turn before the model does, and be answered."""
    return bool(environment(config).stop_strings)


def max_image_tokens(config: ConfigDict) -> int:
    """Image tokens of a trajectory, for which sampler and update have room.

    Where nothing answers a turn, all images stand in the prompt.
    """
    rollout = config.rollout
    most = rollout.max_total_tokens if has_tools(config) else rollout.max_prompt_tokens
    return int(min(rollout.max_image_tokens or most, most))


ADAPTERS = {"model.lora.rank": "jaxrl.extras.lora.adapter:around"}
"""Ranks of adapters, 0 for none, by their keys; and what wraps the model in such an adapter."""


def adapter_key(config: ConfigDict) -> str:
    """The key of `ADAPTERS` that is above 0; "" where the model itself is trained."""
    return next((key for key in ADAPTERS if key in KEYS and config[key]), "")


def leave_out_adapter(config: ConfigDict) -> None:
    """Sets the keys of an adapter to their defaults, as of a model that it is merged into."""
    section = adapter_key(config).rpartition(".")[0]
    defaults = {key: one.default for key, one in KEYS.items() if key.startswith(f"{section}.")}
    config.update_from_flattened_dict(defaults if section else {})


def has_contexts(config: ConfigDict) -> bool:
    """True where a trajectory may go through several contexts."""
    return bool(config.rollout.context.name != "none")


def context_tokens(config: ConfigDict) -> int:
    """Tokens that the sampler reads at once, at most."""
    rollout = config.rollout
    return int(rollout.context.max_tokens if has_contexts(config) else rollout.max_total_tokens)


def prompt_tokens(config: ConfigDict) -> int:
    """Tokens of a prompt of the sampler: of an episode's, or of all that is read at once."""
    goes_on = has_contexts(config) or config.filter.unfinished_tasks > 0
    whole = goes_on or plays_itself(config)
    return context_tokens(config) if whole else int(config.rollout.max_prompt_tokens)


CORPORA = {"local": "local", "dense": "dense", "hybrid": "dense"}
"""Engines that search a corpus, and the section of `config.search` that names it."""


def corpus_section(config: ConfigDict) -> str:
    """The section of `config.search` that names the searched corpus; "" where there is none."""
    return CORPORA.get(config.search.engine, "") if needs_engine(config) else ""


def needs_engine(config: ConfigDict) -> bool:
    """True where the search engine is made: a recording may answer alone, if none draws documents.

    The suite `random_search` draws them from the engine's.
    """
    is_asked = config.search.replay != "only" or "random_search" in suites_of(config)
    return searches(config) and is_asked


def longest_search_s(config: ConfigDict) -> float:
    """Seconds that a search may take at most, an outage and waiting in line included."""
    search = config.search
    limit, rows = search.queries_per_second, config.rollout.num_rows
    return float(search.deadline_s + search.outage_deadline_s + (rows / limit if limit else 0.0))


def overlong_limit(config: ConfigDict) -> int:
    """Tokens of a response from which on the whole overlong penalty is charged.

    What a search inserts counts as response, but not in `rollout.max_response_tokens`: by that
    limit, searching at all would be overlong.
    """
    rollout = config.rollout
    room = rollout.max_total_tokens - rollout.max_prompt_tokens
    limit = room if has_tools(config) else rollout.max_response_tokens
    return int(config.shaping.overlong_max_tokens or limit)


def _never_searches(config: ConfigDict) -> bool:
    """True where an environment of ours has no search engine."""
    has_none = config.env.name == "math" or config.search.engine == NO_ENGINE
    return bool(has_none or plays_itself(config))


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
    Rule(
        "eval.suites",
        lambda c: _never_searches(c) and "empty_search" in c.eval.suites,
        "suites without empty_search where nothing is searched, as with env.name='math', "
        "'agents' or search.engine='none'",
    ),
    Rule(
        "eval.final_suites",
        lambda c: (
            _never_searches(c) and "evaluate" in c.stages and "empty_search" in c.eval.final_suites
        ),
        "suites without empty_search where nothing is searched, as with env.name='math', "
        "'agents' or search.engine='none'",
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
)
"""Combinations of keys that the environment refuses."""

WARNINGS = (
    Rule(
        "rollout.max_response_tokens",
        lambda c: c.rollout.max_response_tokens > c.rollout.max_total_tokens,
        "at most rollout.max_total_tokens, which also counts the prompt and observations",
    ),
)
"""Unusual settings of the environment, which are not refused."""

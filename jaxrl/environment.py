"""What a configuration names around the environment: itself, its tools, its rewards."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ml_collections import ConfigDict

from jaxrl.choices import chosen, is_own, short_name
from jaxrl.envs.base import ENVS, Env
from jaxrl.envs.protocol import PROTOCOLS, Protocol
from jaxrl.envs.retrieval import ENGINES
from jaxrl.envs.rewards import RewardPart
from jaxrl.envs.tools import TOOLS, Tool


def environment(config: ConfigDict) -> type[Env]:
    """The class of the configured environment."""
    found = chosen("env.name", config.env.name, ENVS, wanted="my_env.MyEnv")
    declared = ("stop_strings", "reward_parts", "start", "step", "score")
    missing = [name for name in declared if not hasattr(found, name)]
    if not isinstance(found, type) or missing:
        lacks = f" without {', '.join(missing)}" if isinstance(found, type) else ""
        raise ValueError(
            f"config.env.name names {config.env.name!r}, a {type(found).__name__}{lacks}; expected "
            f"a class with {', '.join(declared)}, as jaxrl/envs/base.py has them."
        )
    return found


def searches(config: ConfigDict) -> bool:
    """True where the environment asks for the search engine."""
    return "engine" in inspect.signature(environment(config)).parameters


def has_tools(config: ConfigDict) -> bool:
    """True where something can end a turn before the model does, and be answered."""
    return bool(environment(config).stop_strings)


def needs_corpus(config: ConfigDict) -> bool:
    """True where a corpus is searched."""
    return searches(config) and config.search.engine == "local"


def protocol(config: ConfigDict) -> Callable[[Sequence[str]], Protocol]:
    """The configured protocol, as a function of the names of the tools beside the engine."""
    name = config.env.search.protocol
    make = chosen("env.search.protocol", name, PROTOCOLS, wanted="my_protocol.make")
    section = config.env.search.get(name)
    return partial(make, **(section.to_dict() if section else {}))


def engine(config: ConfigDict) -> type[Tool]:
    """The class of the configured search engine."""
    name = config.search.engine
    return _tool("search.engine", chosen("search.engine", name, ENGINES, wanted="my_engine.Engine"))


def tools(config: ConfigDict) -> list[type[Tool]]:
    """The classes of the tools that are offered beside the search engine."""
    key, wanted = "env.search.tools", "my_tool.Calculator"
    return [_tool(key, chosen(key, n, TOOLS, wanted=wanted)) for n in config.env.search.tools]


def _tool(key: str, found: Any) -> type[Tool]:
    if not (isinstance(found, type) and issubclass(found, Tool)) or inspect.isabstract(found):
        raise ValueError(
            f"config.{key} names {found!r}; expected a class of jaxrl.envs.tools.Tool, with name, "
            "blank and run."
        )
    lacking = [name for name in ("name", "blank") if not isinstance(getattr(found, name, 0), str)]
    if lacking:
        raise ValueError(f"config.{key} names {found!r}, without a text as its {lacking[0]}.")
    return found


def own_parts(config: ConfigDict) -> dict[str, RewardPart]:
    """Reward parts of the user's own, by the last piece of their dotted names."""
    found = {
        name: chosen("reward.weights", name, {}, wanted="my_reward.brevity")
        for name in config.reward.weights
        if is_own(name)
    }
    for name, part in found.items():
        if not callable(part):
            raise ValueError(
                f"config.reward.weights names {name!r}, a {type(part).__name__}; expected a "
                "function of a response and its accepted answers."
            )
    return {short_name(name): part for name, part in found.items()}


def reward_parts(config: ConfigDict) -> tuple[str, ...]:
    """The reward parts of the configured environment, and the user's own."""
    return (*environment_parts(config), *own_parts(config))


def environment_parts(config: ConfigDict) -> tuple[str, ...]:
    """The reward parts of the configured environment alone."""
    return environment(config).reward_parts or protocol(config)(()).reward_parts


def reward_weights(config: ConfigDict) -> dict[str, float]:
    """Weights by part, in the order of the parts, which is the order of their sum."""
    weights = named_weights(config)
    return {part: float(weights[part]) for part in reward_parts(config) if part in weights}


def named_weights(config: ConfigDict) -> dict[str, float]:
    """Weights by part; of the user's own, by the last piece of their dotted names."""
    named = config.reward.weights.items()
    return {short_name(name) if is_own(name) else name: weight for name, weight in named}


def overlong_limit(config: ConfigDict) -> int:
    """Tokens of a response from which on the whole overlong penalty is charged.

    What a search inserts counts as response, but not in `rollout.max_response_tokens`: by that
    limit, searching at all would be overlong.
    """
    rollout = config.rollout
    room = rollout.max_total_tokens - rollout.max_prompt_tokens
    limit = room if has_tools(config) else rollout.max_response_tokens
    return int(config.shaping.overlong_max_tokens or limit)

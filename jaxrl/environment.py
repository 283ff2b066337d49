"""What a configuration names around the environment: itself, its protocol, its rewards."""

from __future__ import annotations

import inspect
from functools import partial

from ml_collections import ConfigDict

from jaxrl.choices import (
    check_call,
    check_texts,
    chosen,
    failure_text,
    is_own,
    short_name,
)
from jaxrl.envs.base import ENVS, Env
from jaxrl.envs.protocol import PROTOCOLS, Protocol
from jaxrl.envs.rewards import RewardPart
from jaxrl.envs.search import SearchEnv, check_spoken


def environment(config: ConfigDict) -> type[Env]:
    """The class of the configured environment."""
    found = chosen("env.name", config.env.name, ENVS, wanted="my_env.MyEnv")
    declared = ("stop_strings", "reward_parts", "start", "step", "score")
    # What is inherited from `Env` itself is only declared.
    missing = [name for name in declared if getattr(found, name, None) is getattr(Env, name, None)]
    if not isinstance(found, type) or missing:
        kind = type(found).__name__
        if isinstance(found, type):
            kind = f"class without {', '.join(missing)}"
        raise ValueError(
            f"config.env.name names {config.env.name!r}, a {kind}; expected "
            f"a class with {', '.join(declared)}, as jaxrl/envs/base.py has them."
        )
    for name in ("stop_strings", "reward_parts"):
        check_texts("env.name", config.env.name, name, getattr(found, name))
    return found


def check_env(config: ConfigDict, env: Env) -> None:
    """Refuses an environment that a rollout could not ask, or that does not measure what is paid.

    Raises:
        ValueError: says what is wrong with it.
    """
    name, own = config.env.name, own_parts(config)
    check_texts("env.name", name, "stop_strings", env.stop_strings)
    check_texts("env.name", name, "reward_parts", env.reward_parts)
    check_call("env.name", f"{name}.start", env.start, tasks=())
    check_call("env.name", f"{name}.step", env.step, episodes=(), texts=())
    check_call("env.name", f"{name}.score", env.score, group=())
    for part in reward_weights(config):
        if part not in (*env.reward_parts, *own):
            raise ValueError(
                f"config.reward.weights names {part!r}, which {name!r} does not measure once it is "
                f"made; its reward_parts are {env.reward_parts!r}."
            )


def searches(config: ConfigDict) -> bool:
    """True where the environment asks for the search engine."""
    return "engine" in inspect.signature(environment(config)).parameters


def has_tools(config: ConfigDict) -> bool:
    """True where something can end a turn before the model does, and be answered."""
    return bool(environment(config).stop_strings)


def needs_corpus(config: ConfigDict) -> bool:
    """True where a corpus is searched."""
    return searches(config) and config.search.engine == "local"


def protocol(config: ConfigDict) -> partial[Protocol]:
    """The configured protocol, as a function of the names of the tools beside the engine."""
    name = config.env.search.protocol
    make = chosen("env.search.protocol", name, PROTOCOLS, wanted="my_protocol.make")
    check_call("env.search.protocol", name, make, tools=())
    section = config.env.search.get(name)
    return partial(make, **(section.to_dict() if section else {}))


def check_protocol(config: ConfigDict) -> None:
    """Refuses a protocol that cannot be made.

    Raises:
        ValueError: says why.
    """
    key, name, make = "env.search.protocol", config.env.search.protocol, protocol(config)
    try:
        spoken = make(())
    except Exception as error:
        raise ValueError(
            f"config.{key} names {name!r}, which failed: {failure_text(error)}."
        ) from error
    if not isinstance(spoken, Protocol):
        raise ValueError(
            f"config.{key} names {name!r}, which returned {type(spoken).__name__}; expected a "
            "jaxrl.envs.protocol.Protocol."
        )
    for what in ("tags", "tools", "stop_strings", "reward_parts"):
        check_texts(key, name, what, getattr(spoken, what))
    if issubclass(environment(config), SearchEnv):
        try:
            check_spoken(spoken)
        except ValueError as error:
            raise ValueError(f"config.{key} names {name!r}: {error}.") from error


def own_parts(config: ConfigDict) -> dict[str, RewardPart]:
    """Reward parts of the user's own, by the last piece of their dotted names."""
    found = {
        name: chosen("reward.weights", name, {}, wanted="my_reward.brevity")
        for name in config.reward.weights
        if is_own(name)
    }
    shorts = [short_name(name) for name in found]
    for name, part in found.items():
        check_call("reward.weights", name, part, response="", answers=())
        if shorts.count(short_name(name)) > 1:
            raise ValueError(
                f"config.reward.weights names {name!r} and another part that is called "
                f"{short_name(name)!r}; expected different last pieces, by which they are written."
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

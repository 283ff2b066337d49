"""Surroundings of the environment: protocol, search engine, tools, parts of the reward."""

from __future__ import annotations

import inspect
import pkgutil
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from ml_collections import ConfigDict

from jaxrl.builders.environment import NO_ENGINE, environment
from jaxrl.config.registry import check_call, check_texts, chosen, made
from jaxrl.envs.base import Env
from jaxrl.envs.protocol import PROTOCOLS, Protocol
from jaxrl.envs.rewards.combiner import JUDGE, REWARD_PARTS, RewardPart
from jaxrl.envs.search.base import ENGINES
from jaxrl.envs.search_env import SearchEnv, check_spoken, turn_ends, with_tools
from jaxrl.envs.tools.base import SANDBOXES, TOOLS, Tool
from jaxrl.utils.callables import failure_text, is_own, short_name


def protocol(config: ConfigDict) -> partial[Protocol]:
    """The configured protocol, as a function of the names of the tools beside the engine."""
    name = config.env.search.protocol
    make = chosen("env.search.protocol", name, PROTOCOLS, wanted="my_protocol.make")
    check_call("env.search.protocol", name, make, tools=())
    section = config.env.search.get(name)
    return partial(make, **(section.to_dict() if section else {}))


def engine(config: ConfigDict) -> type[Tool] | None:
    """The class of the configured search engine; None where there is to be none."""
    name = config.search.engine
    if name == NO_ENGINE:
        return None
    kind = chosen("search.engine", name, {**ENGINES, NO_ENGINE: ""}, wanted="my_engine.Engine")
    if (called := _tool("search.engine", name, kind).name) != "search":
        raise ValueError(
            f"config.search.engine names {name!r}, a tool called {called!r}; expected one called "
            "'search', as a jaxrl.envs.search.base.SearchEngine is."
        )
    return kind


@dataclass(frozen=True, kw_only=True)
class Offer:
    """A tool that can be made, and the name by which the model calls it."""

    name: str
    make: Callable[[], Tool]


def tools(config: ConfigDict) -> list[Offer]:
    """The tools that are offered beside the search engine: classes, and functions."""
    return [_offer(config, name) for name in config.env.search.tools]


def _offer(config: ConfigDict, name: str) -> Offer:
    key = "env.search.tools"
    if name == "python" and name in config.env.search:
        return _python(config.env.search.python)
    entry = chosen(key, name, TOOLS, wanted="my_tool.Calculator")
    if inspect.isfunction(entry):
        tool = function_tool(config, name, entry)
        return Offer(name=tool.name, make=lambda: tool)
    kind = _tool(key, name, entry)
    return Offer(name=kind.name, make=partial(made, key, kind, {}))


def mcp_tools(config: ConfigDict, log: Callable[[str], None]) -> list[Tool]:
    """Asks the MCP servers for their tools; `log` gets a line of each server's.

    Raises:
        ValueError: a server cannot be reached, or its entry needs what is not installed or set.
    """
    servers = config.env.search.get("mcp")
    if not servers:
        return []
    ask: Any = pkgutil.resolve_name("jaxrl.extras.mcp.servers:offered_tools")
    offered: list[Tool] = ask(servers, config.env.search.tool_deadline_s, log)
    return offered


def stop_strings(config: ConfigDict) -> tuple[str, ...]:
    """Strings that end a turn in the configured environment, which is not made for that.

    Those of tools of MCP servers are not among them: nobody has asked the servers.
    """
    kind = environment(config)
    if not issubclass(kind, SearchEnv):
        return tuple(kind.stop_strings)
    names = [offer.name for offer in tools(config)]
    return turn_ends(protocol(config)(names), names)


def _python(section: ConfigDict) -> Offer:
    """The tool `python`, in the sandbox that is configured."""
    key = "env.search.python.sandbox"
    kind = _tool(key, section.sandbox, chosen(key, section.sandbox, SANDBOXES, wanted="my_box.Box"))
    settings = {
        "timeout_s": section.timeout_s,
        "max_memory": int(section.memory_mib * 2**20),
        "max_output": section.max_output,
    }
    return Offer(name=kind.name, make=partial(made, "env.search.python", kind, settings))


def function_tool(config: ConfigDict, name: str, function: Callable[..., Any]) -> Tool:
    """A function as a tool.

    Raises:
        ValueError: it does not say how it is called.
    """
    kind: Any = pkgutil.resolve_name("jaxrl.envs.tools.functions:FunctionTool")
    try:
        return kind(function, deadline_s=config.env.search.tool_deadline_s)
    except (ValueError, ImportError) as error:
        raise ValueError(f"config.env.search.tools names {name!r}: {error}") from error


def _tool(key: str, name: str, kind: Any) -> type[Tool]:
    if not (isinstance(kind, type) and issubclass(kind, Tool)) or inspect.isabstract(kind):
        raise ValueError(
            f"config.{key} names {name!r}; expected a class of jaxrl.envs.tools.base.Tool, with "
            "name, blank and run" + ", or a function." * (key == "env.search.tools")
        )
    lacking = [text for text in ("name", "blank") if not isinstance(getattr(kind, text, 0), str)]
    if lacking:
        raise ValueError(f"config.{key} names {name!r}, without a text as its {lacking[0]}.")
    if inspect.isfunction(run := inspect.getattr_static(kind, "run")):
        check_call(key, f"{name}.run", run, self=None, call="")
    return kind


def check_tools(config: ConfigDict) -> None:
    """Refuses a tool that is named twice, or whose name cannot be a tag.

    Raises:
        ValueError: says which.
    """
    key, names = "env.search.tools", config.env.search.tools
    servers = config.env.search.get("mcp")
    if servers:
        pkgutil.resolve_name("jaxrl.extras.mcp.servers:check_servers")(servers)
    python = config.env.search.get("python")
    if python and python.sandbox not in SANDBOXES:  # whether or not `python` is offered
        _python(python)
    offers = tools(config)
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ValueError(f"config.{key} names {twice[0]!r} twice; expected each tool once.")
    if issubclass(environment(config), SearchEnv):
        engines = [] if config.search.engine == NO_ENGINE else ["search"]
        if servers and not engines and not offers:
            return  # the servers say what they are called
        if not (engines or protocol(config)(()).in_template):
            raise ValueError(
                f"config.search.engine is {NO_ENGINE!r}; expected an engine, as 'local' or "
                "'empty', with a protocol of tags: only config.env.search.protocol='qwen' does "
                "without one."
            )
        try:
            with_tools(protocol(config), [*engines, *(tool.name for tool in offers)])
        except Exception as error:
            text = str(error) if isinstance(error, ValueError) else failure_text(error)
            raise ValueError(f"config.{key} is {names!r}: {text}") from error


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
    """The reward parts that are not the environment's, by the names under which they are written.

    Raises:
        ValueError: one stands for nothing, or cannot be called.
    """
    names = part_names(config)
    for key in ("settings", "judges"):
        foreign = [name for name in config.reward[key] if name not in names]
        if foreign:
            raise ValueError(
                f"config.reward.{key} has {foreign[0]!r}, which config.reward.weights does not "
                "name."
            )
    theirs = environment_parts(config)
    parts: dict[str, RewardPart] = {}
    for name, part in names.items():
        if is_own(name):
            from jaxrl.envs.rewards.functions import part_of

            parts[part] = part_of(
                name,
                chosen("reward.weights", name, {}, wanted="my_reward.brevity"),
                part=part,
                settings=config.reward.settings.get(name, {}),
                answer_is_text=config.env.name == "math",
            )
        elif name in config.reward.judges:
            parts[part] = _judge(config, name)
        elif name in REWARD_PARTS and name not in theirs:
            parts[part] = _ready_made(config, name)
    return parts


def _judge(config: ConfigDict, name: str) -> RewardPart:
    key, settings = f"reward.judges[{name!r}]", config.reward.judges[name]
    if not re.fullmatch(r"[a-z]\w*", name) or name in REWARD_PARTS:
        raise ValueError(f"config.{key}: expected another name, of letters, digits and _.")
    try:
        judge, its_settings = map(pkgutil.resolve_name, JUDGE)
        part: RewardPart = judge(name, made(key, its_settings, settings))
        return part
    except TypeError as error:  # a text where a number is to be
        raise ValueError(f"config.{key}: {error}.") from error


def _ready_made(config: ConfigDict, name: str) -> RewardPart:
    kind = chosen("reward.weights", name, REWARD_PARTS, wanted="my_reward.brevity")
    try:
        part: RewardPart = made(f"reward.{name}", kind, config.reward[name].to_dict())
    except ImportError as error:
        raise ValueError(f"config.reward asks for {name!r}, but {error}") from error
    return part


def part_names(config: ConfigDict) -> dict[str, str]:
    """Names in `reward.weights` and `reward.correct`, and those of the parts that they stand for.

    One of the user's own is called by the last piece of its dotted name, or, where others end
    alike, by all of it.
    """
    own = [name for name in config.reward.weights if is_own(name)]
    shorts = [short_name(name) for name in own]
    is_known = config.reward.correct in {*REWARD_PARTS, *config.reward.judges}
    correct = [config.reward.correct] if is_known else []
    return {
        name: short_name(name) if name in own and shorts.count(short_name(name)) == 1 else name
        for name in (*config.reward.weights, *correct)
    }


def reward_parts(config: ConfigDict) -> tuple[str, ...]:
    """The reward parts of the configured environment, and the others that are measured."""
    return (*environment_parts(config), *own_parts(config))


def environment_parts(config: ConfigDict) -> tuple[str, ...]:
    """The reward parts of the configured environment alone."""
    return environment(config).reward_parts or protocol(config)(()).reward_parts


def reward_weights(config: ConfigDict) -> dict[str, float]:
    """Weights by part, in the order of the parts, which is the order of their sum."""
    weights = named_weights(config)
    return {part: float(weights[part]) for part in reward_parts(config) if part in weights}


def named_weights(config: ConfigDict) -> dict[str, float]:
    """Weights by part, as `part_names` calls them."""
    names = part_names(config)
    return {names[name]: weight for name, weight in config.reward.weights.items()}


def correct_by(config: ConfigDict) -> str:
    """The environment's part by which it takes an answer for correct.

    Where `reward.correct` names a part that is not the environment's, `payment.Payment` decides.
    """
    theirs = environment_parts(config)
    if config.reward.correct in theirs:
        return str(config.reward.correct)
    return "exact_match" if "exact_match" in theirs else theirs[-1]


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

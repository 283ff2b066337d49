"""Builders of environments, search engines, tools and rewards."""

from __future__ import annotations

import functools
import json
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from jaxrl.builders.method import build_from_section
from jaxrl.builders.recording import open_recording
from jaxrl.builders.resolved import ResolvedConfig
from jaxrl.config.environments import add_environment_to_errors
from jaxrl.config.registry import instantiate
from jaxrl.envs.base import Env, Prompt
from jaxrl.envs.prompt_file import PromptFile
from jaxrl.envs.rewards.combiner import RewardCombiner
from jaxrl.envs.search.base import DocumentSearch, EmptySearch
from jaxrl.envs.search.corpus import find_line_offsets
from jaxrl.envs.search.resilient import ResilientSearch, RetryConfig, health_check
from jaxrl.envs.tools.base import Tool
from jaxrl.envs.tools.budget import SEARCH, Budget
from jaxrl.utils.callables import is_dotted_path

Log = Callable[[str], None]


def build_tools(c: ResolvedConfig, log: Log) -> list[Tool]:
    """Create all tools except search, including tools from MCP servers.

    Raises:
        ValueError: A tool needs a package that is not installed, or an MCP server does not respond.
    """
    try:
        tools = [tool.make() for tool in c.tools]
    except ImportError as error:
        raise ValueError(f"config.env.search.tools is {c.env.search.tools!r}: {error}") from error
    servers = c.env.search.get("mcp")
    if servers:
        connect_tools: Any = pkgutil.resolve_name("jaxrl.extras.mcp.servers:connect_tools")
        tools += connect_tools(servers, c.env.search.tool_deadline_s, log)
    return tools


def build_prompt(c: ResolvedConfig) -> Prompt:
    """Create the prompt template, from a file if one is configured."""
    prompt = Prompt(**{key: c.prompt[key] for key in ("system", "template", "examples")})
    if not c.prompt.template_file:
        return prompt
    return replace(prompt, render=PromptFile(c.prompt.template_file).render)


def build_environment(c: ResolvedConfig, engine: Tool | None, tools: Sequence[Tool]) -> Env:
    """Instantiate the environment, injecting the objects that its constructor accepts.

    Raises:
        ValueError: `reward.weights` names an unknown part.
    """
    env: Env = instantiate(
        "env.settings",
        c.env_class,
        c.env.settings,
        engine=engine,
        tools=tools,
        prompt=build_prompt(c),
        protocol=c.protocol,
        **({"agents": c.env.agents.to_dict()} if "agents" in c.env else {}),
        max_turns=c.rollout.max_turns,
        max_calls=c.rollout.max_calls,
        correct_by=c.correctness_part,
        budget=Budget(prices=c.ledger.prices, max_cost=c.rollout.max_cost),
    )
    unknown_parts = {*c.reward_weights} - {*env.reward_parts, *c.reward_parts}
    if unknown_parts:
        raise ValueError(
            f"config.reward.weights names {unknown_parts.pop()!r}, which {c.env.name!r} does not "
            f"compute; its reward_parts are {env.reward_parts!r}."
        )
    return env


def build_environments(
    c: ResolvedConfig, engines: Mapping[str, Tool | None], tools: Mapping[str, Sequence[Tool]]
) -> dict[str, Env]:
    """Instantiate every environment named in `engines`.

    Args:
        c: Resolved configuration.
        engines: Search engine, or None, of each environment, keyed by the environment's name.
        tools: Other tools of each environment.
    """
    environments = {}
    for name, engine in engines.items():
        with add_environment_to_errors(name):
            environments[name] = build_environment(c.environments[name], engine, tools[name])
    return environments


def check_price_names(
    c: ResolvedConfig, tools_by_environment: Mapping[str, Sequence[Tool]]
) -> None:
    """Raise a ValueError if `ledger.prices` names neither a tool nor a judge."""
    names = (tool.name for tools in tools_by_environment.values() for tool in tools)
    tools = [SEARCH, *dict.fromkeys(names)]
    environments = c.environments.values()
    judges = [*dict.fromkeys(name for each in environments for name in each.reward.judges)]
    unknown = [name for name in c.ledger.prices if name not in (*tools, *judges)]
    # A custom environment may define further tools.
    if unknown and not any(is_dotted_path(each.env.name) for each in environments):
        raise ValueError(
            f"config.ledger.prices names {unknown[0]!r}; expected some of "
            f"{', '.join((*tools, *judges))}."
        )


def build_rewards(c: ResolvedConfig, workdir: Path | None, log: Log) -> RewardCombiner:
    """Create the reward combiner and open the recordings of its LLM judges."""
    for part in c.reward_parts.values():
        if open_part := getattr(part, "open", None):
            open_part(workdir, process=jax.process_index(), log=log)
    correct = c.reward.correct
    return RewardCombiner(
        weights=c.reward_weights,
        custom_parts=c.reward_parts,
        correct=correct if correct in c.reward_parts else "",
        deadline_s=c.reward.deadline_s,
    )


def build_search_engine(
    c: ResolvedConfig, show: Callable[[str], None], workdir: Path | None, log: Log
) -> ResilientSearch:
    """Create the search engine, wrapped with a cache, rate limits, retries and a recording.

    Raises:
        OutageError: The engine's server does not respond.
    """
    retry_config = build_from_section(RetryConfig, c.search)
    recording = None if c.search.replay == "off" else open_recording(c, workdir, log)
    is_replay = c.search.replay == "only"
    engine = _instantiate_search_engine(c, show, log)
    if getattr(engine, "needs_health_check", False) and not is_replay:
        key = "settings" if is_dotted_path(c.search.engine) else f"{c.search.engine}.url"
        show(f"connecting to the server of config.search.{key}")
        health_check(engine, retry_config, url_key=f"config.search.{key}", log=log)
    return ResilientSearch(engine, retry_config, recording=recording, is_replay=is_replay, log=log)


def build_search_engines(
    c: ResolvedConfig, show: Callable[[str], None], workdir: Path | None, log: Log
) -> dict[str, ResilientSearch]:
    """Create the search engine of each environment that searches.

    Environments with the same settings share an engine.
    """
    by_settings: dict[str, ResilientSearch] = {}
    searches = {}
    for name, environment in c.environments.items():
        if environment.has_search:
            settings = json.dumps(environment.search.to_dict(), sort_keys=True)
            with add_environment_to_errors(name):
                if settings not in by_settings:
                    by_settings[settings] = build_search_engine(environment, show, workdir, log)
            searches[name] = by_settings[settings]
    return searches


def _instantiate_search_engine(c: ResolvedConfig, show: Callable[[str], None], log: Log) -> Tool:
    assert c.engine_class is not None
    if not c.needs_live_engine:  # a recording answers all queries
        stand_in = EmptySearch()
        stand_in.blank = c.engine_class.blank
        return stand_in
    name = c.search.engine
    corpus = c.search[c.corpus_section].corpus if c.corpus_section else ""
    # Count the documents only if an index is built.
    total = functools.cache(lambda: len(find_line_offsets(Path(corpus))))
    sections = {
        key: section.to_dict()
        for key, section in c.search.items()
        if isinstance(section, ConfigDict)
    }
    key, settings = f"search.{name}", sections.get(name, {})
    if is_dotted_path(name):
        key, settings = "search.settings", dict(c.search.settings)
        sections = {key: sections[key] for key in ("local", "dense") if key in sections}
    return instantiate(
        key,
        c.engine_class,
        settings,
        progress=lambda n: show(f"building the index of {corpus}, documents {n:,}/{total():,}"),
        log=log,
        **sections,
    )


def build_random_search_engines(
    c: ResolvedConfig, searches: Mapping[str, ResilientSearch]
) -> dict[str, Tool]:
    """Create control engines that return random documents from the corpora of `searches`.

    Raises:
        ValueError: No configured engine provides `documents`.
    """
    from jaxrl.envs.search.random_search import RandomSearch  # imported late: few runs need it

    engines: dict[str, Tool] = {
        name: RandomSearch(search.engine, seed=c.seed)
        for name, search in searches.items()
        if isinstance(search.engine, DocumentSearch) and search.engine.documents is not None
    }
    if not engines:
        names = {c.environments[name].search.engine for name in searches}
        raise ValueError(
            f"config.search.engine is {', '.join(map(repr, sorted(names)))}, which has no "
            "documents to sample from; remove the suite 'random_search', or add `documents` to the "
            "engine (jaxrl.envs.search.base.DocumentSearch)."
        )
    return engines

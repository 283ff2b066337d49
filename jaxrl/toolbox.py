"""What a configuration gives a model to call: the search engine and the tools beside it."""

from __future__ import annotations

import inspect
from typing import Any

from ml_collections import ConfigDict

from jaxrl.choices import check_call, chosen, failure_text
from jaxrl.environment import environment, protocol
from jaxrl.envs.retrieval import ENGINES
from jaxrl.envs.search import SearchEnv, with_tools
from jaxrl.envs.tools import TOOLS, Tool


def engine(config: ConfigDict) -> type[Tool]:
    """The class of the configured search engine."""
    name = config.search.engine
    found = chosen("search.engine", name, ENGINES, wanted="my_engine.Engine")
    if (called := _tool("search.engine", name, found).name) != "search":
        raise ValueError(
            f"config.search.engine names {name!r}, a tool called {called!r}; expected one called "
            "'search', as a jaxrl.envs.retrieval.SearchEngine is."
        )
    return found


def tools(config: ConfigDict) -> list[type[Tool]]:
    """The classes of the tools that are offered beside the search engine."""
    key, wanted = "env.search.tools", "my_tool.Calculator"
    return [_tool(key, n, chosen(key, n, TOOLS, wanted=wanted)) for n in config.env.search.tools]


def _tool(key: str, name: str, found: Any) -> type[Tool]:
    if not (isinstance(found, type) and issubclass(found, Tool)) or inspect.isabstract(found):
        raise ValueError(
            f"config.{key} names {name!r}; expected a class of jaxrl.envs.tools.Tool, with name, "
            "blank and run."
        )
    lacking = [one for one in ("name", "blank") if not isinstance(getattr(found, one, 0), str)]
    if lacking:
        raise ValueError(f"config.{key} names {name!r}, without a text as its {lacking[0]}.")
    if inspect.isfunction(run := inspect.getattr_static(found, "run")):
        check_call(key, f"{name}.run", run, self=None, call="")
    return found


def check_tools(config: ConfigDict) -> None:
    """Refuses tools that are named twice, or by what cannot be their tag.

    Raises:
        ValueError: says which.
    """
    key, names = "env.search.tools", config.env.search.tools
    found = tools(config)
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ValueError(f"config.{key} names {twice[0]!r} twice; expected each tool once.")
    if issubclass(environment(config), SearchEnv):
        try:
            with_tools(protocol(config), ["search", *(tool.name for tool in found)])
        except Exception as error:
            text = str(error) if isinstance(error, ValueError) else failure_text(error)
            raise ValueError(f"config.{key} is {names!r}: {text}") from error

"""Tools, engines and more of installed packages, by the names of their entry points."""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from importlib.metadata import entry_points
from operator import attrgetter
from typing import Any

from ml_collections import ConfigDict

from jaxrl.config.schema import KEYS
from jaxrl.utils.callables import is_own


def name_installed(config: ConfigDict) -> None:
    """Puts dotted names in place of those of entry points, so that nothing else knows of them.

    A package registers an engine, say, in its pyproject.toml:

        [project.entry-points."jaxrl.engines"]
        mine = "my_package.engine:MyEngine"

    Keys that take such names have a `group` in `config.KEYS`. A name of ours keeps its meaning.

    Raises:
        ValueError: several packages have registered what a key names, or it names one thing twice.
    """
    for key, group in {key: one.group for key, one in KEYS.items() if one.group}.items():
        places = ("reward.weights", "reward.settings") if key == "reward.weights" else (key,)
        for place in places:
            section, _, last = place.rpartition(".")
            holder: Any = attrgetter(section)(config)
            renamed = _renamed(config, place, group, holder[last])
            if renamed != holder[last]:
                holder[last] = renamed


def _renamed(config: ConfigDict, key: str, group: str, value: Any) -> Any:
    """A name, or those in a tuple or of a mapping, dotted where it is an entry point's."""
    if isinstance(value, tuple):
        return tuple(_renamed(config, key, group, name) for name in value)
    if isinstance(value, Mapping):
        renamed: dict[str, Any] = {}
        for name, one in value.items():
            dotted = _renamed(config, key, group, name)
            if dotted in renamed:
                raise ValueError(
                    f"config.{key} has {dotted!r} twice, of which {name!r} is another name; leave "
                    "one out."
                )
            renamed[dotted] = one
        return renamed
    if not isinstance(value, str) or not value or is_own(value):
        return value
    targets = sorted({point.value for point in entry_points(group=group, name=value)})
    if not targets:
        return value
    ours = {*pkgutil.resolve_name(_TABLES[group])}
    if group == "jaxrl.rewards":
        from jaxrl.builders.toolbox import environment_parts

        ours |= {*environment_parts(config)}
    if value in ours:
        return value
    if len(targets) > 1:
        raise ValueError(
            f"config.{key} is {value!r}, which {len(targets)} packages have registered for "
            f"{group}: {', '.join(targets)}. Give the one that you mean by this name."
        )
    return targets[0]


_TABLES = {
    "jaxrl.tools": "jaxrl.envs.tools.base:TOOLS",
    "jaxrl.engines": "jaxrl.envs.search.base:ENGINES",
    "jaxrl.rewards": "jaxrl.envs.rewards.combiner:REWARD_PARTS",
    "jaxrl.environments": "jaxrl.envs.base:ENVS",
    "jaxrl.architectures": "jaxrl.models.registry:ARCHITECTURES",
}
"""Tables of jaxrl's own names, by group."""

"""Resolution of config names to objects: table entries, entry points or dotted paths."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from importlib.metadata import entry_points
from operator import attrgetter
from typing import Any

from ml_collections import ConfigDict

from jaxrl.config.keys import reject_value
from jaxrl.config.schema import KEYS
from jaxrl.utils.callables import format_failure, is_dotted_path, is_user_code


def resolve(key: str, name: str, table: Mapping[str, Any], *, example: str) -> Any:
    """Return the object that `config.<key>` refers to.

    Args:
        key: Full dotted key.
        name: Name in `table`, or dotted path of an object in a module on `sys.path`.
            `jaxrl.launch` adds the folder of the config file to `sys.path`.
        table: Objects by name. A string value is the dotted path of the object.
        example: Dotted path for the error message, such as `my_env.MyEnv`.

    Raises:
        ValueError: The name is unknown, or importing the object failed.
    """
    if not isinstance(name, str):
        raise ValueError(f"config.{key} is {name!r}; expected a name such as {example!r}.")
    entry = table.get(name, name if is_dotted_path(name) else None)
    if entry is None:
        group = KEYS[key].group if key in KEYS else ""
        installed = sorted(entry_points(group=group).names) if group else []
        close = get_close_matches(name, table, n=1, cutoff=0.7)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise ValueError(
            f"config.{key} is {name!r}{hint}; expected one of "
            f"{', '.join((*table, *installed))}, or a dotted path such as {example}."
        )
    if not isinstance(entry, str):
        return entry
    # With a colon before the object's name, `pkgutil` reports why a module failed to import.
    path = entry if ":" in entry else ":".join(entry.rsplit(".", 1))
    try:
        return pkgutil.resolve_name(path)
    except (Exception, SystemExit) as error:  # importing the module runs user code
        missing = str(error.name) if isinstance(error, ModuleNotFoundError) else ""
        if missing.startswith("jaxrl.extras."):
            raise ValueError(
                f"config.{key} is {name!r}, which needs the missing folder "
                f"jaxrl/extras/{missing.split('.')[2]}; restore the folder or choose another name."
            ) from error
        hint = ""
        if missing:
            hint = "; put its file next to the config file, or add its folder to PYTHONPATH"
        raise ValueError(f"config.{key} is {entry!r}: {format_failure(error)}{hint}.") from error


def instantiate(
    key: str, kind: Callable[..., Any], settings: Mapping[str, Any], **injected: Any
) -> Any:
    """Instantiate `kind` with `settings`, injecting the objects it accepts.

    Args:
        key: Config key of the settings, for messages.
        kind: Class or function.
        settings: Keyword arguments from the config. All of them are passed.
        injected: Objects that the run provides, by parameter name. Objects without a matching
            parameter of `kind` are not passed.

    Raises:
        ValueError: `kind` does not accept a setting, a required argument is missing, or user code
            raised an exception.
    """
    parameters = inspect.signature(kind).parameters
    arguments = {n: value for n, value in injected.items() if n in parameters} | dict(settings)
    name = getattr(kind, "__name__", str(kind))
    _check_arguments(key, name, [*parameters.values()], arguments)
    try:
        return kind(**arguments)
    except Exception as error:
        if isinstance(error, OSError | ValueError | ImportError) and not is_user_code(kind):
            raise  # built-in classes explain their own errors
        raise ValueError(f"config.{key}: {name} failed: {format_failure(error)}.") from error


def select_settings(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings for the function or class that `section.name` selects.

    The settings of a built-in name are in the subsection of that name or of its family. For
    example, `pass_at_k` contains the settings of `pass_at_k_bootstrap`. The settings of a dotted
    path are in `section.settings`.
    """
    if is_dotted_path(section["name"]):
        return dict(section["settings"])
    family = _find_settings_subsection(section, section["name"])
    return dict(section[family]) if family else {}


def _find_settings_subsection(section: Mapping[str, Any], name: str) -> str:
    families = [key for key in section if f"{name}_".startswith(f"{key}_")]
    return max(families, key=len, default="")


def check_settings(key: str, section: Mapping[str, Any], name: str) -> None:
    """Check that `settings` is empty if `name` is a built-in name, which does not read it.

    Raises:
        ValueError: `settings` is not empty. The message names the section to use instead.
    """
    if section["settings"] and not is_dotted_path(name):
        family = _find_settings_subsection(section, name)
        hint = f"; its keys are in config.{key}.{family}" if family else ""
        raise ValueError(
            f"config.{key}.settings is {section['settings']!r}; expected {{}} with the built-in "
            f"name {name!r}{hint}."
        )


def select_function_settings(
    key: str, name: str, function: Callable[..., Any], settings: Mapping[str, Any], **common: Any
) -> dict[str, Any]:
    """Select the values for the keyword-only parameters of a function.

    Args:
        key: Config key of the settings, for messages.
        name: Configured name of the function.
        function: Function whose keyword-only parameters are settings.
        settings: Values from the config. A built-in function may ignore some of them.
        common: Values for every function of this kind that accepts them.

    Raises:
        ValueError: A custom function does not accept a setting, or a required one is missing.
    """
    parameters = inspect.signature(function).parameters.values()
    accepted = {p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY}
    values = {n: value for n, value in {**common, **settings}.items() if n in accepted}
    if is_dotted_path(name):
        values |= settings
    _check_arguments(key, name, [*accepted.values()], values)
    return values


def _check_arguments(
    key: str, name: str, parameters: Sequence[inspect.Parameter], arguments: Mapping[str, Any]
) -> None:
    """Raise a ValueError for an unknown setting or a missing required argument."""
    try:
        inspect.Signature(parameters).bind(**arguments)
    except TypeError as error:
        names = ", ".join(parameter.name for parameter in parameters) or "nothing"
        raise ValueError(
            f"config.{key} does not fit {name}: {error}; expected some of {names}."
        ) from None


def resolve_aliases(config: ConfigDict, key: str, aliases: Mapping[str, Mapping[str, Any]]) -> None:
    """Replace an alias in the config with the values that it stands for.

    Args:
        config: Configuration, changed in place.
        key: Full dotted key that may hold an alias.
        aliases: Values by key, for each alias.

    Raises:
        ValueError: A key that the alias sets already has a different value.
    """
    name = attrgetter(key)(config)
    for changed, value in aliases.get(name, {}).items():
        current = attrgetter(changed)(config)
        if changed != key and current not in (KEYS[changed].default, value):
            reject_value(changed, current, f"{value!r} with {key}={name!r}")
        config.update_from_flattened_dict({changed: value})


REWARD_KEYS = ("reward.weights", "reward.settings")
"""Keys of mappings whose names may be entry points of rewards."""


def resolve_entry_points(config: ConfigDict) -> None:
    """Replace entry-point names in the config with dotted paths, except for rewards.

    A package registers, for example, an engine in its pyproject.toml:

        [project.entry-points."jaxrl.engines"]
        mine = "my_package.engine:MyEngine"

    Keys with a `group` accept these names. Built-in names take precedence.

    Raises:
        ValueError: Several packages register the name, or two names refer to the same object.
    """
    for key, entry in KEYS.items():
        if entry.group and key not in REWARD_KEYS:
            _replace_entry_point_names(config, key, entry.group, set())


def resolve_reward_entry_points(config: ConfigDict, environment_parts: Iterable[str]) -> None:
    """Replace entry-point names by dotted names, except the environment's reward parts."""
    for key in REWARD_KEYS:
        _replace_entry_point_names(
            config, key, KEYS["reward.weights"].group, set(environment_parts)
        )


def _replace_entry_point_names(
    config: ConfigDict, key: str, group: str, reserved: set[str]
) -> None:
    section, _, last = key.rpartition(".")
    parent: Any = attrgetter(section)(config)
    renamed = _replace_entry_points(key, group, parent[last], reserved)
    if renamed != parent[last]:
        parent[last] = renamed


def _replace_entry_points(key: str, group: str, value: Any, reserved: set[str]) -> Any:
    """Replace entry points in a name, a tuple of names, or the keys of a mapping."""
    if isinstance(value, tuple):
        return tuple(_replace_entry_points(key, group, name, reserved) for name in value)
    if isinstance(value, Mapping):
        pairs = [
            (_replace_entry_points(key, group, name, reserved), item)
            for name, item in value.items()
        ]
        renamed = dict(pairs)
        if len(renamed) < len(pairs):
            raise ValueError(f"config.{key} names the same object twice: {', '.join(value)}.")
        return renamed
    if not isinstance(value, str) or not value or is_dotted_path(value) or value in reserved:
        return value
    if value in pkgutil.resolve_name(_TABLES[group]):
        return value
    targets = sorted({point.value for point in entry_points(group=group, name=value)})
    if not targets:
        return value
    if len(targets) > 1:
        raise ValueError(
            f"config.{key} is {value!r}, which {len(targets)} packages register: "
            f"{', '.join(targets)}; name one of these paths."
        )
    return targets[0]


_TABLES = {
    "jaxrl.tools": "jaxrl.envs.tools.base:TOOLS",
    "jaxrl.engines": "jaxrl.envs.search.base:ENGINES",
    "jaxrl.rewards": "jaxrl.envs.rewards.combiner:REWARD_PARTS",
    "jaxrl.environments": "jaxrl.envs.base:ENVS",
    "jaxrl.architectures": "jaxrl.models.registry:ARCHITECTURES",
}
"""Dotted paths of the built-in tables, by entry-point group."""

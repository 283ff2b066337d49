"""Resolve config names to objects: built-in table entries, entry points or dotted paths."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from importlib.metadata import entry_points
from operator import attrgetter
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from jaxrl.config.keys import is_inside
from jaxrl.config.schema import KEYS
from jaxrl.utils.callables import format_failure, is_dotted, is_user_code

EXTRAS = Path(__file__).parents[1] / "extras"


def resolve(key: str, name: str, table: Mapping[str, Any], *, example: str) -> Any:
    """Return the object that `config.<key>` names.

    Args:
        key: Full key, with its sections.
        name: Entry of `table`, or a dotted path to a module on `sys.path`. `jaxrl.launch` adds the
            folder of the config file to that path.
        table: Objects by name. A text value is itself a dotted path.
        example: Dotted path for the error message, such as `my_env.MyEnv`.

    Raises:
        ValueError: The name resolves to nothing. The message lists the alternatives.
    """
    if not isinstance(name, str):
        raise ValueError(f"config.{key} is {name!r}; expected a name such as {example!r}.")
    entry = table.get(name, name if is_dotted(name) else None)
    if entry is None:
        group = KEYS[key].group if key in KEYS else ""
        installed = sorted(entry_points(group=group).names) if group else []
        raise ValueError(
            f"config.{key} is {name!r}{_suggestion(name, table)}; expected one of "
            f"{', '.join((*table, *installed))}, or a dotted path such as {example}."
        )
    if not isinstance(entry, str):
        return entry
    package, _, path = entry.partition(".extras.")
    folder = re.split("[.:]", path)[0]
    # Git removes the files of a deleted folder but leaves `__pycache__` behind.
    if package == "jaxrl" and not (EXTRAS / folder / "__init__.py").exists():
        raise ValueError(
            f"config.{key} is {name!r}, which needs the missing folder jaxrl/extras/{folder}; "
            "restore the folder or choose another name."
        )
    try:
        return pkgutil.resolve_name(entry)
    except (Exception, SystemExit) as error:  # importing the module runs user code
        raise ValueError(f"config.{key} is {entry!r}{_import_problem(entry, error)}.") from error


def _import_problem(path: str, error: BaseException) -> str:
    """Explain why a dotted path could not be imported."""
    if isinstance(error, ModuleNotFoundError) and is_inside(path, error.name or ""):
        modules = [module.name for module in pkgutil.iter_modules()]
        return (
            f", but there is no module {error.name!r} on sys.path"
            f"{_suggestion(str(error.name), modules)}; put its file beside the config file, or add "
            "its folder to PYTHONPATH"
        )
    frames = traceback.extract_tb(error.__traceback__)
    is_imported = not any("importlib" in frame.filename for frame in frames)
    if not (isinstance(error, AttributeError) and is_imported):
        return f": {format_failure(error)}"
    parent = max((name for name in sys.modules if is_inside(path, name)), key=len)
    missing, module = path[len(parent) + 1 :], sys.modules[parent]
    if hasattr(module, "__path__"):
        # `pkgutil` reports a submodule as missing when one of its own imports fails.
        submodule = f"{parent}.{re.split('[.:]', missing)[0]}"
        try:
            importlib.import_module(submodule)
        except (Exception, SystemExit) as inner:
            if getattr(inner, "name", None) != submodule:
                return f": {format_failure(inner)}"
    file = getattr(module, "__file__", None) or parent
    return f", but {file} does not define {missing!r}{_suggestion(missing, dir(module))}"


def _suggestion(name: str, names: Iterable[str]) -> str:
    """Return ` (did you mean ...?)` for a close match, else an empty text."""
    close = get_close_matches(name, list(names), n=1, cutoff=0.7)
    return f" (did you mean {close[0]!r}?)" if close else ""


def instantiate(
    key: str, kind: Callable[..., Any], settings: Mapping[str, Any], **injected: Any
) -> Any:
    """Instantiate `kind` with `settings`, injecting the objects it accepts.

    Args:
        key: Key of the settings, for messages.
        kind: Class or function. Parameters are matched by name.
        settings: Arguments from the config. All of them are passed.
        injected: Objects that the run provides. Each is passed if `kind` has a parameter for it.

    Raises:
        ValueError: A setting has no parameter, a required parameter has no value, or user code
            raised.
    """
    parameters = inspect.signature(kind).parameters
    named = [
        p.name for p in parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    arguments = {n: value for n, value in injected.items() if n in parameters} | dict(settings)
    name = getattr(kind, "__name__", str(kind))
    unknown = [setting for setting in settings if setting not in named]
    if unknown and not takes_any:
        raise ValueError(
            f"config.{key} has {unknown[0]!r}, which {name} does not accept; expected some of "
            f"{', '.join(named) or 'nothing'}."
        )
    required = [n for n in named if parameters[n].default is inspect.Parameter.empty]
    missing = [n for n in required if n not in arguments]
    if missing:
        raise ValueError(
            f"config.{key} lacks {missing[0]!r}, which {name} requires; a run provides "
            f"{', '.join(injected) or 'nothing'}."
        )
    try:
        return kind(**arguments)
    except Exception as error:
        if isinstance(error, OSError | ValueError | ImportError) and not is_user_code(kind):
            raise  # built-in classes explain their own errors
        raise ValueError(f"config.{key}: {name} failed: {format_failure(error)}.") from error


def subsection(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of what `section.name` names.

    A built-in name has a subsection of its own or shares that of its family: `pass_at_k` holds the
    settings of `pass_at_k_bootstrap`. A dotted path takes `section.settings`.
    """
    if is_dotted(section["name"]):
        return dict(section["settings"])
    family = _family(section, section["name"])
    return dict(section[family]) if family else {}


def _family(section: Mapping[str, Any], name: str) -> str:
    families = [key for key in section if f"{name}_".startswith(f"{key}_")]
    return max(families, key=len, default="")


def check_settings(key: str, section: Mapping[str, Any], name: str) -> None:
    """Refuse `settings` beside a built-in name.

    Raises:
        ValueError: `settings` is not empty. The message names the section to use instead.
    """
    if section["settings"] and not is_dotted(name):
        family = _family(section, name)
        hint = f"; its keys are in config.{key}.{family}" if family else ""
        raise ValueError(
            f"config.{key}.settings is {section['settings']!r}; expected {{}} with the built-in "
            f"name {name!r}{hint}."
        )


def function_settings(
    key: str, name: str, function: Callable[..., Any], settings: Mapping[str, Any], **common: Any
) -> dict[str, Any]:
    """Return the keyword-only arguments of a function.

    Args:
        key: Key of the settings, for messages.
        name: Name of the function, for messages.
        function: Function whose keyword-only parameters are settings.
        settings: Values from the config.
        common: Values that any function of this kind may take.

    Raises:
        ValueError: A custom function does not take a setting, or a setting is missing.
    """
    parameters = inspect.signature(function).parameters.values()
    accepted = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    unknown = [setting for setting in settings if is_dotted(name) and setting not in accepted]
    if unknown:
        raise ValueError(
            f"config.{key} has {unknown[0]!r}, which {name} does not accept; expected some of "
            f"{', '.join(accepted) or 'nothing'}."
        )
    values = {n: value for n, value in {**common, **settings}.items() if n in accepted}
    required = [n for n, default in accepted.items() if default is inspect.Parameter.empty]
    missing = [n for n in required if n not in values]
    if missing:
        raise ValueError(f"config.{key} lacks {missing[0]!r}, which {name} requires.")
    return values


REWARD_KEYS = ("reward.weights", "reward.settings")
"""Mappings whose names may be entry points of rewards."""


def resolve_entry_points(config: ConfigDict) -> None:
    """Replace entry-point names in the config with dotted paths, apart from those of rewards.

    A package registers an engine, say, in its pyproject.toml:

        [project.entry-points."jaxrl.engines"]
        mine = "my_package.engine:MyEngine"

    Keys that accept such names have a `group`. Built-in names win.

    Raises:
        ValueError: Several packages register the name, or a key names one object twice.
    """
    for key, entry in KEYS.items():
        if entry.group and key not in REWARD_KEYS:
            _replace(config, key, entry.group, set())


def resolve_reward_entry_points(config: ConfigDict, environment_parts: Iterable[str]) -> None:
    """Do the same for rewards. The names of the environment's own parts win."""
    for key in REWARD_KEYS:
        _replace(config, key, KEYS["reward.weights"].group, set(environment_parts))


def _replace(config: ConfigDict, key: str, group: str, reserved: set[str]) -> None:
    section, _, last = key.rpartition(".")
    holder: Any = attrgetter(section)(config)
    renamed = _renamed(key, group, holder[last], reserved)
    if renamed != holder[last]:
        holder[last] = renamed


def _renamed(key: str, group: str, value: Any, reserved: set[str]) -> Any:
    """Return a name, a tuple of names or a mapping of names with entry points replaced."""
    if isinstance(value, tuple):
        return tuple(_renamed(key, group, name, reserved) for name in value)
    if isinstance(value, Mapping):
        pairs = [(_renamed(key, group, name, reserved), item) for name, item in value.items()]
        renamed = dict(pairs)
        if len(renamed) < len(pairs):
            raise ValueError(f"config.{key} names one object twice: {', '.join(value)}.")
        return renamed
    if not isinstance(value, str) or not value or is_dotted(value) or value in reserved:
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
"""Built-in names by entry-point group."""

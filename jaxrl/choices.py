"""A name in the configuration, and what it stands for: an entry of a table, or one's own."""

from __future__ import annotations

import inspect
import pkgutil
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxrl.envs.calls import error_text


def is_own(name: str) -> bool:
    """Whether a name is a dotted one, as `my_env.MyEnv`, and no entry of a table."""
    return "." in name


def chosen(key: str, name: str, table: Mapping[str, Any], *, wanted: str) -> Any:
    """What the name that `config.<key>` holds stands for.

    Args:
        key: with its sections.
        name: an entry of `table`, or a dotted name, whose module is looked for on `sys.path`;
            `jaxrl.launch` adds the folder of the configuration file to it.
        table: what can be named without dots; its text values are dotted names too.
        wanted: a dotted name for the message, as `my_env.MyEnv`.

    Raises:
        ValueError: the name stands for nothing; says what there is.
    """
    found = table.get(name, name if is_own(name) else None)
    if found is None:
        names = ", ".join(table)
        raise ValueError(
            f"config.{key} is {name!r}; expected one of {names}, a dotted name, as {wanted}."
        )
    return _resolved(key, found) if isinstance(found, str) else found


def _resolved(key: str, name: str) -> Any:
    try:
        return pkgutil.resolve_name(name)
    except ModuleNotFoundError as error:
        if error.name and f"{name}.".startswith(f"{error.name}."):
            raise ValueError(
                f"config.{key} names {name!r}, but no module {error.name!r} is on sys.path; put "
                "its file beside the configuration file, or its folder on PYTHONPATH."
            ) from error
        raise ValueError(f"config.{key} names {name!r}: {error_text(error)}") from error
    except AttributeError as error:
        raise ValueError(
            f"config.{key} names {name!r}, which its module does not define ({error})."
        ) from error
    except (Exception, SystemExit) as error:  # of the module, while it is imported
        raise ValueError(f"config.{key} names {name!r}: {error_text(error)}") from error


def short_name(name: str) -> str:
    """The last piece of a dotted name."""
    return re.split(r"[.:]", name)[-1]


def made(key: str, kind: Callable[..., Any], settings: Mapping[str, Any], **offered: Any) -> Any:
    """What a choice makes of its settings, and of those of the offered things that it asks for.

    Args:
        key: where the settings are configured, for messages.
        kind: a class or a function; parameters are bound by their names.
        settings: all of these are given.
        offered: given where there is a parameter of that name.

    Raises:
        ValueError: there is no parameter for a setting, or nothing for a parameter.
    """
    parameters = inspect.signature(kind).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    given = {**{name: offered[name] for name in offered if name in parameters}, **settings}
    name = getattr(kind, "__name__", str(kind))
    known = [
        p.name for p in parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    unknown = [setting for setting in settings if setting not in known]
    if unknown and not takes_all:
        raise ValueError(
            f"config.{key} holds {unknown[0]!r}, which {name} does not take; it takes "
            f"{', '.join(known) or 'nothing'}."
        )
    missing = [
        p for p in known if p not in given and parameters[p].default is inspect.Parameter.empty
    ]
    if missing:
        raise ValueError(
            f"config.{key} lacks {missing[0]!r}, which {name} asks for; a run itself offers "
            f"{', '.join(offered) or 'nothing'}."
        )
    try:
        return kind(**given)
    except (OSError, ValueError, ImportError):
        raise  # these say what is wrong with what they were given
    except Exception as error:
        raise ValueError(f"config.{key}: {name} could not be made: {error_text(error)}.") from error


def arrays_of(function: Callable[..., Any]) -> list[str]:
    """The parameters of an objective that are not keyword-only: its arrays, by name."""
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]


def subsection(section: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of what `section.name` chooses.

    Those of an entry of a table stand in the subsection of its name, or of its family's: that of
    `pass_at_k_bootstrap` is `pass_at_k`. Those of one's own stand in `settings`.
    """
    name = section["name"]
    if is_own(name):
        return dict(section["settings"])
    families = [one for one in section if f"{name}_".startswith(f"{one}_")]
    return dict(section[max(families, key=len)]) if families else {}


def settings_of(
    key: str, section: Mapping[str, Any], function: Callable[..., Any], **common: Any
) -> dict[str, Any]:
    """The keyword-only arguments of a chosen objective, as `subsection` has them.

    Args:
        key: of the section, for messages.
        section: holds `name`, `settings` and the subsections.
        function: what the name stands for.
        common: settings that every choice of this kind may take.

    Raises:
        ValueError: one's own takes no such setting, or lacks one.
    """
    name, own = section["name"], subsection(section)
    parameters = inspect.signature(function).parameters.values()
    taken = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    unknown = [setting for setting in own if is_own(name) and setting not in taken]
    if unknown:
        raise ValueError(
            f"config.{key}.settings holds {unknown[0]!r}, which {name} does not take; it takes "
            f"{', '.join(taken) or 'nothing'}."
        )
    given = {one: value for one, value in {**common, **own}.items() if one in taken}
    required = [one for one, default in taken.items() if default is inspect.Parameter.empty]
    missing = [one for one in required if one not in given]
    if missing:
        raise ValueError(
            f"config.{key}.settings lacks {missing[0]!r}, which {name} asks for; set it there."
        )
    return given


def check_arrays(key: str, name: str, function: Callable[..., Any], offered: Sequence[str]) -> None:
    """Refuses an objective that asks for an array that there is not.

    Raises:
        ValueError: names the parameter, and what there is.
    """
    try:
        kinds = {p.kind for p in inspect.signature(function).parameters.values()}
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"config.{key} names {name!r}, a {type(function).__name__}; expected a function."
        ) from error
    odd = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY}
    if isinstance(function, type) or odd & kinds:
        raise ValueError(
            f"config.{key} names {name!r}; expected a function whose arrays are parameters by "
            "name, without * and /."
        )
    foreign = [array for array in arrays_of(function) if array not in offered]
    if foreign:
        raise ValueError(
            f"config.{key} names {name!r}, which asks for {foreign[0]!r}; expected some of "
            f"{', '.join(offered)}, and settings after a *."
        )

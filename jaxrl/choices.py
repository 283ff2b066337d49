"""A name in the configuration, and what it stands for: an entry of a table, or one's own."""

from __future__ import annotations

import inspect
import pkgutil
import re
from collections.abc import Callable, Mapping
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
    except Exception as error:  # of the module, while it is imported
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
    return kind(**given)

"""A name in the configuration, and what it stands for: an entry of a table, or one's own."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from jaxrl.config.keys import is_of
from jaxrl.config.schema import KEYS
from jaxrl.utils.callables import arguments_of, failure_text, is_own, own_module


def chosen(key: str, name: str, table: Mapping[str, Any], *, wanted: str) -> Any:
    """Looks up what the name that `config.<key>` holds stands for.

    Args:
        key: with its sections.
        name: an entry of `table`, or a dotted name, whose module is looked for on `sys.path`;
            `jaxrl.launch` adds the folder of the configuration file to it.
        table: what can be named without dots; its text values are dotted names too.
        wanted: a dotted name for the message, as `my_env.MyEnv`.

    Raises:
        ValueError: the name stands for nothing; says what there is.
    """
    if not isinstance(name, str):
        raise ValueError(f"config.{key} holds {name!r}; expected a name, as {wanted!r}.")
    entry = table.get(name, name if is_own(name) else None)
    if entry is None:
        group = KEYS[key].group if key in KEYS else ""
        installed = entry_points(group=group).names if group else ()
        names = ", ".join((*table, *sorted(installed)))
        raise ValueError(
            f"config.{key} is {name!r}{_meant(name, table)}; expected one of {names}, a dotted "
            f"name, as {wanted}."
        )
    if not isinstance(entry, str):
        return entry
    package, _, inside = entry.partition(".extras.")
    folder = re.split("[.:]", inside)[0]
    extras = Path(__file__).parents[1] / "extras"
    # A folder that git has emptied may hold Python's leavings.
    if package == "jaxrl" and not (extras / folder / "__init__.py").exists():
        raise ValueError(
            f"config.{key} asks for jaxrl/extras/{folder}, and that folder is not there; bring it "
            "back, or choose another."
        )
    try:
        return pkgutil.resolve_name(entry)
    except (Exception, SystemExit) as error:  # of the module too, while it is imported
        raise ValueError(f"config.{key} names {entry!r}{_why_not_found(entry, error)}.") from error


def _why_not_found(name: str, error: BaseException) -> str:
    """Says what is wrong with a dotted name, to be told behind it."""
    if isinstance(error, ModuleNotFoundError) and is_of(name, error.name or ""):
        meant = _meant(str(error.name), [module.name for module in pkgutil.iter_modules()])
        return (
            f", but no module {error.name!r} is on sys.path{meant}; put its file beside the "
            "configuration file, or its folder on PYTHONPATH"
        )
    frames = traceback.extract_tb(error.__traceback__)
    is_imported = not any("importlib" in frame.filename for frame in frames)
    if not (isinstance(error, AttributeError) and is_imported):
        return f": {failure_text(error)}"
    holder = max((one for one in sys.modules if is_of(name, one)), key=len)
    missing, module = name[len(holder) + 1 :], sys.modules[holder]
    if hasattr(module, "__path__"):
        # `pkgutil` takes a module of a package for missing that another import fails in.
        inside = f"{holder}.{re.split('[.:]', missing)[0]}"
        try:
            importlib.import_module(inside)
        except (Exception, SystemExit) as inner:
            if getattr(inner, "name", None) != inside:
                return f": {failure_text(inner)}"
    where = getattr(module, "__file__", None) or holder
    return f", but {where} does not define {missing!r}{_meant(missing, dir(module))}"


def _meant(name: str, names: Iterable[str]) -> str:
    """The name that a mistaken one is close to, as a question; "" where none is."""
    close = get_close_matches(name, list(names), n=1, cutoff=0.7)
    return f" (did you mean {close[0]!r}?)" if close else ""


def made(key: str, kind: Callable[..., Any], settings: Mapping[str, Any], **offered: Any) -> Any:
    """Makes a choice from its settings, and from those of the offered things that it asks for.

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
        thing = kind(**given)
    except Exception as error:
        if isinstance(error, OSError | ValueError | ImportError) and not own_module(kind):
            raise  # ours say what is wrong with what they were given
        raise ValueError(
            f"config.{key}: {name} could not be made: {failure_text(error)}."
        ) from error
    if isinstance(kind, type) and not isinstance(thing, kind):
        raise ValueError(f"config.{key}: {name} made a {type(thing).__name__}, not one of its own.")
    return thing


def subsection(section: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of what `section.name` chooses.

    Those of an entry of a table stand in the subsection of its name, or of its family's: that of
    `pass_at_k_bootstrap` is `pass_at_k`. Those of one's own stand in `settings`.
    """
    if is_own(section["name"]):
        return dict(section["settings"])
    family = _family(section, section["name"])
    return dict(section[family]) if family else {}


def _family(section: Mapping[str, Any], name: str) -> str:
    """The subsection of an entry of a table, or of its family; "" where there is none."""
    families = [one for one in section if f"{name}_".startswith(f"{one}_")]
    return max(families, key=len, default="")


def check_settings(key: str, section: Mapping[str, Any], name: str) -> None:
    """Refuses a mapping `settings` beside a choice that is none of the user's own.

    Raises:
        ValueError: says where the settings of that choice are.
    """
    if section["settings"] and not is_own(name):
        family = _family(section, name)
        where = f", whose keys are in config.{key}.{family}" if family else ""
        raise ValueError(
            f"config.{key}.settings is {section['settings']!r}; expected {{}}: they are for one of "
            f"your own, not for {name!r}{where}."
        )


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
    """Refuses an objective that asks for an array that does not exist.

    Raises:
        ValueError: names the parameter, and what there is.
    """
    try:
        kinds = {p.kind for p in inspect.signature(function).parameters.values()}
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"config.{key} names {name!r}, a {type(function).__name__}; expected a function."
        ) from error
    check_plain(key, name, function)
    odd = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY}
    if isinstance(function, type) or odd & kinds:
        raise ValueError(
            f"config.{key} names {name!r}; expected a function whose arrays are parameters by "
            "name, without * and /."
        )
    foreign = [array for array in arguments_of(function) if array not in offered]
    if foreign:
        raise ValueError(
            f"config.{key} names {name!r}, which asks for {foreign[0]!r}; expected some of "
            f"{', '.join(offered)}, and settings after a *."
        )


def check_plain(key: str, name: str, function: Callable[..., Any]) -> None:
    """Refuses async functions and generators, whose call gives no result yet.

    Raises:
        ValueError: names the key.
    """
    is_async = inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)
    if is_async or inspect.isgeneratorfunction(function):
        kind = "an async function" if is_async else "a generator"
        raise ValueError(f"config.{key} names {name!r}, {kind}; expected one that returns.")


def check_call(key: str, name: str, function: Any, **arguments: Any) -> None:
    """Refuses what cannot be called with these arguments, by their places.

    Args:
        key: with its sections.
        name: of the function, for the message.
        function: what is to be a function.
        arguments: examples, by what they are.

    Raises:
        ValueError: names the key.
    """
    expected = f"a function of ({', '.join(arguments)})"
    if not callable(function) or isinstance(function, type):
        kind = "class" if isinstance(function, type) else type(function).__name__
        raise ValueError(f"config.{key} names {name!r}, a {kind}; expected {expected}.")
    check_plain(key, name, function)
    try:
        inspect.signature(function).bind(*arguments.values())
    except (TypeError, ValueError) as error:
        raise ValueError(f"config.{key} names {name!r}: {error}; expected {expected}.") from error


def check_texts(key: str, name: str, what: str, texts: Any) -> None:
    """Refuses what is no tuple of texts.

    Raises:
        ValueError: names the key, and the comma that was forgotten.
    """
    if isinstance(texts, str):
        raise ValueError(
            f"config.{key} names {name!r}, whose {what} is {texts!r}; expected a tuple: "
            f"({texts!r},), with a comma."
        )
    if not isinstance(texts, tuple) or not all(isinstance(one, str) and one for one in texts):
        raise ValueError(
            f"config.{key} names {name!r}, whose {what} is {texts!r}; expected a tuple of texts."
        )

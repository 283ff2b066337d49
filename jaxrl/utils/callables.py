"""Functions that a configuration names, ours and the user's own, as the loop calls them."""

from __future__ import annotations

import inspect
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MAX_ERROR = 2000  # characters of an exception's first line; a library may write no other


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """A function that a key names, with its settings.

    Attributes:
        key: that holds the name, with its sections.
        name: an entry of a table, or a dotted name.
        function: what the name stands for.
        settings: its keyword-only arguments.
    """

    key: str
    name: str
    function: Callable[..., Any] = field(hash=False)  # either may have no hash
    settings: Mapping[str, Any] = field(hash=False)

    @property
    def arguments(self) -> list[str]:
        """The names of its other arguments."""
        return arguments_of(self.function)

    @property
    def is_own(self) -> bool:
        """True for one of the user's own."""
        return is_own(self.name)

    @property
    def is_users(self) -> bool:
        """True for the user's code, by a dotted name or put into a table."""
        return own_module(self.function)

    def __call__(self, *arguments: Any) -> Any:
        """Calls the function with its settings."""
        return self.function(*arguments, **self.settings)


class OwnCodeError(ValueError):
    """Failure of what a key names, or a result that cannot be used; the text names the key."""


def is_own(name: str) -> bool:
    """Returns True if a name is a dotted one, as `my_env.MyEnv`, and no entry of a table.

    A colon may stand before what the module defines, as `pkgutil.resolve_name` has it.
    """
    return "." in name or ":" in name


def own_module(thing: Any) -> bool:
    """Returns True if a class or a function is the user's."""
    return str(getattr(thing, "__module__", "")).partition(".")[0] != __name__.partition(".")[0]


def arguments_of(function: Callable[..., Any]) -> list[str]:
    """The names of the parameters of a function that are not keyword-only."""
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]


def failure_text(error: BaseException) -> str:
    """Describe what the user's code raised, in one line, and where in its files.

    Of a text of several lines this keeps the first: JAX goes on with how it got there. Secrets are
    redacted where it is printed.
    """
    try:
        text = str(error)
    except Exception:  # exceptions are classes of the user's too
        text = ""
    first, *_ = [*f"{type(error).__name__}: {text}".removesuffix(": ")[:MAX_ERROR].splitlines(), ""]
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_NOT_THEIRS)]
    return first.rstrip(".") + (f" ({own[-1].filename}:{own[-1].lineno})" if own else "")


def named(key: str, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, whose failures name their key and place; errors of ours keep their text."""

    def tried(*arguments: Any, **settings: Any) -> Any:
        try:
            return function(*arguments, **settings)
        except (Exception, SystemExit) as error:
            is_told = isinstance(error, ValueError) and f"config.{key}" in str(error)
            text = f"config.{key} names {name!r}, which failed: {failure_text(error)}."
            raise OwnCodeError(str(error) if is_told else text) from error

    return tried


_NOT_THEIRS = (
    "<",
    str(Path(__file__).parents[1]),
    *(sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib", "scripts")),
)
"""Beginnings of files that are not the user's: ours, Python's, those of packages."""


def code_folders() -> list[str]:
    """Return the folders of `sys.path` that hold the user's modules: not Python's or packages'."""
    folders = [str(Path(entry).absolute()) for entry in sys.path if Path(entry).is_dir()]
    return [folder for folder in folders if not folder.startswith(_NOT_THEIRS)]


def short_name(name: str) -> str:
    """The last piece of a dotted name."""
    return re.split(r"[.:]", name)[-1]

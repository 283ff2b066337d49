"""Callables named in the config, built-in or user-supplied, and their error messages."""

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

from jaxrl.utils.text import MAX_ERROR_CHARS


class UserCodeError(ValueError):
    """Error raised when user code fails or returns an invalid value. It names the config key."""


@dataclass(frozen=True, kw_only=True)
class NamedFunction:
    """Function named by a config key, with its settings.

    Attributes:
        key: Full key that holds the name, such as `loss.name`.
        name: Table entry or dotted path.
        function: The function that the name resolves to.
        settings: Keyword-only arguments from the config.
    """

    key: str
    name: str
    function: Callable[..., Any] = field(hash=False)  # may be unhashable, like `settings`
    settings: Mapping[str, Any] = field(hash=False)

    @classmethod
    def from_callable(cls, key: str, function: Callable[..., Any]) -> NamedFunction:
        """Wrap a function that is passed in instead of being named by the config key `key`."""
        owner = function if hasattr(function, "__qualname__") else type(function)
        name = f"{owner.__module__}.{owner.__qualname__}"
        return cls(key=key, name=name, function=function, settings={})

    @property
    def arguments(self) -> list[str]:
        """Names of the function's array arguments."""
        return list_argument_names(self.function)

    @property
    def is_custom(self) -> bool:
        """True if the config names the function by dotted path."""
        return is_dotted_path(self.name)

    @property
    def is_user_code(self) -> bool:
        """True if the function is defined outside jaxrl, even if a table contains it."""
        return is_user_code(self.function)

    def __call__(self, *arguments: Any) -> Any:
        """Call the function with its settings."""
        return self.function(*arguments, **self.settings)


def is_dotted_path(name: str) -> bool:
    """Return True if a name is a dotted path such as `my_env.MyEnv` or `my_env:MyEnv`."""
    return "." in name or ":" in name


def get_short_name(name: str) -> str:
    """Return the last part of a dotted path."""
    return re.split(r"[.:]", name)[-1]


def is_user_code(obj: Any) -> bool:
    """Return True if a class or function is defined outside jaxrl."""
    return str(getattr(obj, "__module__", "")).partition(".")[0] != __name__.partition(".")[0]


def list_argument_names(function: Callable[..., Any]) -> list[str]:
    """Return the names of a function's positional-or-keyword parameters."""
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]


def format_failure(error: BaseException) -> str:
    """Describe an exception in user code on one line, with file and line number.

    Only the first line of the message is used, since JAX appends its own traceback.
    """
    message = f"{type(error).__name__}: {error}".removesuffix(": ")[:MAX_ERROR_CHARS]
    first = (message.splitlines() or [""])[0].rstrip(".")
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(_LIBRARY_PATHS)
    ]
    return first + (f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else "")


_LIBRARY_PATHS = (
    "<",
    str(Path(__file__).parents[1]),
    *(sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib", "scripts")),
)
"""Path prefixes of files that are not user code: jaxrl, the standard library and packages."""


def list_user_code_folders() -> list[str]:
    """Return the folders in `sys.path` that may contain user code rather than libraries."""
    folders = [str(Path(entry).absolute()) for entry in sys.path if Path(entry).is_dir()]
    return [folder for folder in folders if not folder.startswith(_LIBRARY_PATHS)]


def wrap_user_code(key: str, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `function` to convert exceptions to a `UserCodeError` that names the key and line."""

    def wrapped(*arguments: Any, **settings: Any) -> Any:
        try:
            return function(*arguments, **settings)
        except (Exception, SystemExit) as error:
            if isinstance(error, ValueError) and f"config.{key}" in str(error):
                raise UserCodeError(str(error)) from error
            text = f"config.{key} names {name!r}, which failed: {format_failure(error)}."
            raise UserCodeError(text) from error

    return wrapped


def probe_function(
    key: str,
    name: str,
    function: Callable[..., Any],
    *example: Any,
    expected: str = "",
    is_valid: Callable[[Any], bool] = lambda result: True,
) -> Any:
    """Call user code once on example inputs, before the run starts.

    Args:
        key: Config key that names the code.
        name: Value of that key, for the error message.
        function: The code, or a wrapper such as `partial(jax.eval_shape, loss)`.
        example: Example inputs with the types and shapes of a real call.
        expected: Description of a valid result, for the error message.
        is_valid: Predicate that checks the result.

    Returns:
        The result.

    Raises:
        UserCodeError: The code raised an exception, or `is_valid` rejected its result.
    """
    result = wrap_user_code(key, name, function)(*example)
    if not wrap_user_code(key, name, is_valid)(result):
        shape = getattr(result, "shape", None)
        kind = type(result).__name__
        if shape is not None:
            kind = f"{result.dtype}{list(shape)}"
        elif isinstance(result, str | int | float | None):
            kind = f"{result!r:.80}"
        raise UserCodeError(
            f"config.{key} names {name!r}, which returned {kind}; expected {expected}."
        )
    return result

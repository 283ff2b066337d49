"""Tools made from Python functions, described to the model by type hints and docstrings."""

from __future__ import annotations

import importlib
import inspect
import json
import typing
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl.envs.base import ToolError
from jaxrl.envs.tools.base import InvalidCallError, JsonTool, check_argument_names
from jaxrl.utils.concurrency import DeadlineError, call_with_deadline, run_with_deadline
from jaxrl.utils.quiet_transformers import quiet_transformers


class FunctionTool(JsonTool):
    """Tool that calls a Python function, sync or async, with the model's arguments.

    Arguments must match the type hints. An `InvalidCallError` raised by the function is returned to
    the model; any other exception is a tool failure. Results that are not text are converted to
    JSON.
    """

    def __init__(self, function: Callable[..., Any], *, deadline_s: float = 60.0) -> None:
        """Build the JSON schema from the function's signature.

        Args:
            function: Function with type hints, and a Google-style docstring that describes each
                parameter.
            deadline_s: Timeout of a call in seconds. A coroutine that exceeds it is canceled; a
                thread is abandoned.

        Raises:
            ImportError: pydantic is not installed.
            ValueError: The function lacks type hints or descriptions.
        """
        try:
            self._pydantic: Any = importlib.import_module("pydantic")
        except ImportError as error:
            raise ImportError(
                "functions as tools need pydantic; pip install 'jaxrl[tools]'."
            ) from error
        self.name = function.__name__
        self._function, self._deadline_s = function, deadline_s
        try:
            self._schema = _build_schema(function)
            hints = typing.get_type_hints(function, include_extras=True)
            self._types = {
                name: self._pydantic.TypeAdapter(hints[name]) for name in self._schema["properties"]
            }
        except Exception as error:  # transformers and pydantic raise their own types
            raise ValueError(
                f"the function {self.name!r} cannot be a tool: {error}. Expected a type hint for "
                "each parameter, and a docstring that describes each below 'Args:'."
            ) from error

    @property
    def description(self) -> str:
        """The function's docstring without its sections."""
        return str(self._schema["description"])

    @property
    def parameters(self) -> Mapping[str, Any]:
        """JSON schema of the arguments."""
        return {name: value for name, value in self._schema.items() if name != "description"}

    def check_arguments(self, arguments: Mapping[str, Any]) -> None:
        """Validate arguments against the type hints.

        Raises:
            InvalidCallError: A name is unknown or missing, or a value has the wrong type.
        """
        self._parse_arguments(arguments)

    def _parse_arguments(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        check_argument_names(arguments, list(self._types), self._schema["required"])
        values = {}
        for name, value in arguments.items():
            try:
                # Strict validation of Python objects would require tuples and dates.
                text = json.dumps(value)
                values[name] = self._types[name].validate_json(text, strict=True)
            except self._pydantic.ValidationError as error:
                first = error.errors(include_url=False)[0]
                where = "".join(f"[{key!r}]" for key in first["loc"])
                raise InvalidCallError(f"argument '{name}'{where}: {first['msg']}") from error
        return values

    def run(self, call: str, /) -> str:
        """Call the function and return its result, as JSON unless it is text.

        Raises:
            ToolError: The call took too long, or the result is not JSON.
        """
        try:
            values = self._parse_arguments(json.loads(call))
            if inspect.iscoroutinefunction(self._function):
                result = run_with_deadline(self._deadline_s, self._function(**values))
            else:
                result = call_with_deadline(self._deadline_s, lambda: self._function(**values))
        except InvalidCallError as error:
            return f"error: {error}"
        except DeadlineError as error:
            raise ToolError(
                f"{self.name}: no answer within {self._deadline_s:g} s "
                "(config.env.search.tool_deadline_s)"
            ) from error
        if isinstance(result, str):  # or `TextWithImages`
            return result
        try:
            return json.dumps(result, ensure_ascii=False)
        except (TypeError, ValueError) as error:
            raise ToolError(
                f"{self.name} returned {type(result).__name__}; expected text or JSON values"
            ) from error


def _build_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the function's description and the JSON schema of its parameters."""
    with quiet_transformers():
        from transformers.utils import get_json_schema
    kinds = {p.kind for p in inspect.signature(function).parameters.values()}
    if kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}:
        raise TypeError("it takes *args or **kwargs")
    if inspect.Parameter.POSITIONAL_ONLY in kinds:
        raise TypeError("it has parameters before a /")
    schema = get_json_schema(function)["function"]
    parameters = {"type": "object", "properties": {}, "required": [], **schema["parameters"]}
    return {"description": schema["description"], **parameters}

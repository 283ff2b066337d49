"""Tool interface: text in, text out. Search engines are tools too."""

from __future__ import annotations

import abc
import functools
import inspect
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from jaxrl.envs.base import CallRecord, ToolError
from jaxrl.envs.images import TextWithImages
from jaxrl.utils.concurrency import format_error, parallel_map
from jaxrl.utils.secrets import redact

MAX_ERROR = 2_000  # maximum length of an error in characters


class InvalidCallError(ValueError):
    """Error for invalid arguments of a tool call. The model sees the message."""


class Tool(abc.ABC):
    """Base class of tools. `run` may be called from several threads."""

    name: str
    """Name of the tool in the model's calls."""

    blank: str
    """Result of a blank call, which never reaches the tool."""

    max_threads: ClassVar[int] = 32
    """Maximum number of concurrent calls."""

    argument: ClassVar[str] = "call"
    """Name of the argument in function calls."""

    @property
    def takes_text(self) -> bool:
        """True if a call can be plain text between tags."""
        return True

    @property
    def description(self) -> str:
        """Description for the model: the first paragraph of the class's docstring."""
        return (inspect.getdoc(type(self)) or "").partition("\n\n")[0]

    @property
    def parameters(self) -> Mapping[str, Any]:
        """JSON schema of the arguments."""
        texts = {self.argument: {"type": "string"}}
        return {"type": "object", "properties": texts, "required": [self.argument]}

    def encode_call(self, arguments: str | Mapping[str, Any]) -> str:
        """Convert plain text or JSON arguments to the `call` string of `run`.

        Raises:
            InvalidCallError: The arguments are invalid.
        """
        if isinstance(arguments, str):
            return arguments
        check_argument_names(arguments, [self.argument], [self.argument])
        text = arguments[self.argument]
        if not isinstance(text, str):  # report the JSON type
            kinds = {bool: "a boolean", list: "an array", dict: "an object", type(None): "null"}
            kind = kinds.get(type(text), "a number")
            raise InvalidCallError(f"argument '{self.argument}' is {kind}; expected a string")
        return text

    @abc.abstractmethod
    def run(self, call: str, /) -> str:
        """Run a call and return its result, which may describe an error in the model's call.

        Identical calls must return identical results of bounded length. The result may
        include images (`TextWithImages`), except from a search engine.

        Raises:
            ToolError: The tool failed, not the model's call.
        """

    def run_batch(self, calls: Sequence[str], /) -> Sequence[str | ToolError]:
        """Run several calls concurrently; return a result or a ToolError for each.

        An override that cannot determine which call failed should raise; each call is then retried
        alone.
        """
        return parallel_map(functools.partial(run_call, self), calls, max_threads=self.max_threads)

    def call_batch(self, calls: Sequence[str], /) -> list[CallResult]:
        """Run and record calls. Each failed call is retried once, separately.

        Retries run concurrently, since a dead server would otherwise cost one timeout per call.
        Permanent failures are not retried.
        """
        start = time.perf_counter()
        results = run_as_batch(self, calls)
        failed = [
            i for i, a in enumerate(results) if isinstance(a, ToolError) and not a.is_permanent
        ]
        retry_results = parallel_map(
            lambda i: run_call(self, calls[i]), failed, max_threads=self.max_threads
        )
        for i, answer in zip(failed, retry_results, strict=True):
            results[i] = answer
        waited_s = time.perf_counter() - start
        attempts = [1 + (i in failed) for i in range(len(calls))]
        return [
            CallResult.build(self, call, result, attempts=count, waited_s=waited_s)
            for call, result, count in zip(calls, results, attempts, strict=True)
        ]


def check_argument_names(
    arguments: Mapping[str, Any], known: Sequence[str], required: Sequence[str]
) -> None:
    """Check that all argument names are known and all required arguments are present.

    Raises:
        InvalidCallError: A name is unknown, or a required one is missing.
    """
    takes = f"it takes {', '.join(known)}" if known else "it takes none"
    for name in arguments:
        if name not in known:
            raise InvalidCallError(f"unknown argument '{name[:100]}'; {takes}")
    for name in required:
        if name not in arguments:
            raise InvalidCallError(f"argument '{name}' is missing; {takes}")


def build_chat_schema(tool: Tool) -> dict[str, Any]:
    """Return the JSON schema that describes a tool to chat templates."""
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


class JsonTool(Tool):
    """Tool with named arguments. A call is a JSON object with sorted keys."""

    blank = "error: the call is empty"

    @property
    @abc.abstractmethod
    def parameters(self) -> Mapping[str, Any]:
        """JSON schema of the arguments, with `properties` and `required`."""

    @abc.abstractmethod
    def check_arguments(self, arguments: Mapping[str, Any]) -> None:
        """Validate the arguments.

        Raises:
            InvalidCallError: The arguments are invalid.
        """

    @property
    def takes_text(self) -> bool:
        """True if the only required argument is a string."""
        return self._text_argument is not None

    @property
    def _text_argument(self) -> str | None:
        """Name of the only required argument if it is a string, or None."""
        properties = self.parameters["properties"]
        required = self.parameters["required"] or list(properties)
        kinds = [properties.get(name, {}).get("type") for name in required]
        return required[0] if kinds == ["string"] else None

    def encode_call(self, arguments: str | Mapping[str, Any]) -> str:
        """Return the arguments as JSON.

        Raises:
            InvalidCallError: The arguments are invalid.
        """
        if isinstance(arguments, str):
            if not arguments.strip():
                return ""
            arguments = {str(self._text_argument): arguments}
        self.check_arguments(arguments)
        return json.dumps(arguments, sort_keys=True, ensure_ascii=False)


@dataclass(frozen=True, kw_only=True)
class CallResult:
    """Result of a tool call, with a record of the call."""

    result: str | ToolError
    record: CallRecord

    @classmethod
    def build(
        cls, tool: Tool, call: str, result: str | ToolError, **record_fields: Any
    ) -> CallResult:
        """Wrap a tool's result. `record_fields` are the remaining fields of its `CallRecord`."""
        error = str(result) or type(result).__name__ if isinstance(result, ToolError) else None
        name = None if tool.name == "search" else tool.name
        return cls(
            result=result, record=CallRecord(call=call, tool=name, error=error, **record_fields)
        )


def run_as_batch(tool: Tool, calls: Sequence[str]) -> list[str | ToolError]:
    """Run calls as a batch. Any exception becomes a ToolError for every call."""
    try:
        answers = [_validate_result(tool, answer) for answer in tool.run_batch(calls)]
        if len(answers) != len(calls):
            raise ToolError(f"{len(calls)} calls of {tool.name} returned {len(answers)} results")
        return answers
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return [_to_tool_error(error)] * len(calls)


def run_call(tool: Tool, call: str) -> str | ToolError:
    """Run one call. Any exception becomes a ToolError."""
    try:
        return _validate_result(tool, tool.run(call))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # user code may raise anything
        return _to_tool_error(error)


def _validate_result(tool: Tool, answer: object) -> str | ToolError:
    """Return a redacted result, or a ToolError if it is not text."""
    if isinstance(answer, ToolError):
        return _to_tool_error(answer)
    if isinstance(answer, TextWithImages):
        if tool.name != "search":
            return TextWithImages(redact(answer), answer.images)
    elif isinstance(answer, str):
        return str(redact(answer))
    return ToolError(f"{tool.name} returned {type(answer).__name__}; expected text")


def _to_tool_error(error: BaseException) -> ToolError:
    """Convert an exception to a redacted ToolError."""
    if isinstance(error, ToolError):
        error.args = redact(error.args)
        if redact(str(error)) == str(error):
            return error
    return ToolError(format_error(error))


PYTHON_DESCRIPTION = "Runs Python code and returns what it prints. Every call starts afresh."


SANDBOXES = {
    "monty": "jaxrl.envs.tools.monty.MontyTool",
    "bubblewrap": "jaxrl.extras.sandbox.tools.BubblewrapTool",
}
"""Sandboxes for the tool `python`, by config name."""


TOOLS = {"python": "jaxrl.envs.tools.monty.MontyTool"}
"""Tools by config name."""

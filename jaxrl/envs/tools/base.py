"""Tools that a model can call: a text in, a text out. Search engines are tools, and Python is one.

A tool knows neither the tags around its calls nor what an episode is paid.
"""

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
from jaxrl.envs.images import Pictured
from jaxrl.utils.concurrency import error_text, side_by_side
from jaxrl.utils.secrets import redact

MAX_ERROR = 2_000  # characters of a snippet's error that are kept


class CallError(ValueError):
    """Raised where the model's arguments do not fit the tool; the text is shown to the model."""


class Tool(abc.ABC):
    """Answers calls; `run` may be called from several threads at once."""

    name: str
    """Name by which the model calls it: `<name>..</name>` around a call."""

    blank: str
    """Answer to a blank call, which does not reach the tool."""

    max_threads: ClassVar[int] = 32
    """Calls that run side by side at most."""

    argument: ClassVar[str] = "call"
    """Name of the text of a call where the model calls functions."""

    @property
    def takes_text(self) -> bool:
        """True if a text alone can be a call, as tags hold it."""
        return True

    @property
    def description(self) -> str:
        """Description for the model: the first paragraph of the class's docstring."""
        return (inspect.getdoc(type(self)) or "").partition("\n\n")[0]

    @property
    def parameters(self) -> Mapping[str, Any]:
        """The JSON schema of its arguments."""
        texts = {self.argument: {"type": "string"}}
        return {"type": "object", "properties": texts, "required": [self.argument]}

    def call_of(self, arguments: str | Mapping[str, Any]) -> str:
        """The call that the model means by a text, or by a function's arguments.

        Raises:
            CallError: they do not fit.
        """
        if isinstance(arguments, str):
            return arguments
        check_names(arguments, [self.argument], [self.argument])
        text = arguments[self.argument]
        if not isinstance(text, str):  # told in JSON's words, which are the model's
            kinds = {bool: "a boolean", list: "an array", dict: "an object", type(None): "null"}
            kind = kinds.get(type(text), "a number")
            raise CallError(f"argument '{self.argument}' is {kind}; expected a string")
        return text

    @abc.abstractmethod
    def run(self, call: str, /) -> str:
        """The answer to one call; what is wrong with the call itself is an answer too.

        The same call has the same answer, of bounded length. Images may stand behind it
        (`Pictured`), but not behind what a search engine finds.

        Raises:
            ToolError: the tool failed, not the model's call; trying again may help.
        """

    def run_batch(self, calls: Sequence[str], /) -> Sequence[str | ToolError]:
        """The answers to several calls, in their order, side by side.

        In place of an answer stands why there is none. A tool that cannot tell which call failed
        raises `ToolError`; then all are made again, each alone.
        """
        return side_by_side(functools.partial(run_one, self), calls, max_threads=self.max_threads)

    def answer_all(self, calls: Sequence[str], /) -> list[Answer]:
        """Answers each call, with the tool's failure where it raised anything.

        Calls that failed are made once more, each alone; side by side, or a dead server would cost
        one timeout a call. What would fail alike is left at that.
        """
        start = time.perf_counter()
        results = run_together(self, calls)
        failed = [
            i for i, a in enumerate(results) if isinstance(a, ToolError) and not a.is_permanent
        ]
        again = side_by_side(
            lambda i: run_one(self, calls[i]), failed, max_threads=self.max_threads
        )
        for i, answer in zip(failed, again, strict=True):
            results[i] = answer
        waited_s = time.perf_counter() - start
        attempts = [1 + (i in failed) for i in range(len(calls))]
        return [
            Answer.of(self, call, one, attempts=count, waited_s=waited_s)
            for call, one, count in zip(calls, results, attempts, strict=True)
        ]


def check_names(arguments: Mapping[str, Any], known: Sequence[str], needed: Sequence[str]) -> None:
    """Refuses unknown argument names, and missing ones that the function needs.

    Raises:
        CallError: says which.
    """
    takes = f"it takes {', '.join(known)}" if known else "it takes none"
    for name in arguments:
        if name not in known:
            raise CallError(f"unknown argument '{name[:100]}'; {takes}")
    for name in needed:
        if name not in arguments:
            raise CallError(f"argument '{name}' is missing; {takes}")


def chat_schema(tool: Tool) -> dict[str, Any]:
    """Schema of a tool as chat templates describe functions."""
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


class JsonTool(Tool):
    """A tool of several arguments, by name; a call is a JSON object of them, names in order."""

    blank = "error: the call is empty"

    @property
    @abc.abstractmethod
    def parameters(self) -> Mapping[str, Any]:
        """The JSON schema of its arguments, with `properties` and `required`."""

    @abc.abstractmethod
    def check(self, arguments: Mapping[str, Any]) -> None:
        """Refuses arguments that do not fit.

        Raises:
            CallError: says what is wrong.
        """

    @property
    def takes_text(self) -> bool:
        """True if one argument will do, and it is a text."""
        return self._text_argument is not None

    @property
    def _text_argument(self) -> str | None:
        """The argument that a text alone is meant for."""
        properties = self.parameters["properties"]
        needed = self.parameters["required"] or list(properties)
        kinds = [properties.get(name, {}).get("type") for name in needed]
        return needed[0] if kinds == ["string"] else None

    def call_of(self, arguments: str | Mapping[str, Any]) -> str:
        """The arguments as JSON.

        Raises:
            CallError: they do not fit.
        """
        if isinstance(arguments, str):
            if not arguments.strip():
                return ""
            arguments = {str(self._text_argument): arguments}
        self.check(arguments)
        return json.dumps(arguments, sort_keys=True, ensure_ascii=False)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer to a call, and what that took."""

    found: str | ToolError  # a text, maybe with images, or how the tool failed
    record: CallRecord

    @classmethod
    def of(cls, tool: Tool, call: str, found: str | ToolError, **took: Any) -> Answer:
        """Makes the answer of a tool to a call; `took` are further fields of the record."""
        error = str(found) or type(found).__name__ if isinstance(found, ToolError) else None
        name = None if tool.name == "search" else tool.name
        return cls(found=found, record=CallRecord(call=call, tool=name, error=error, **took))


def run_together(tool: Tool, calls: Sequence[str]) -> list[str | ToolError]:
    """Answers of a tool to a batch, or its failure for each call, whatever it raised."""
    try:
        answers = [_text_or_error(tool, answer) for answer in tool.run_batch(calls)]
        if len(answers) != len(calls):
            raise ToolError(f"{len(calls)} calls of {tool.name} got {len(answers)} answers.")
        return answers
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # as in `run_one`; of which call it does not say
        return [_as_tool_error(error)] * len(calls)


def run_one(tool: Tool, call: str) -> str | ToolError:
    """The answer of a tool to one call, or its failure, whatever it raised."""
    try:
        return _text_or_error(tool, tool.run(call))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a tool is the user's, and so is what it raises
        return _as_tool_error(error)


def _text_or_error(tool: Tool, answer: object) -> str | ToolError:
    """Checks a tool's answer: itself where it can be shown or is an error, else an error.

    Both are redacted.
    """
    if isinstance(answer, ToolError):
        return _as_tool_error(answer)
    if isinstance(answer, Pictured):
        if tool.name != "search":  # whose results are kept as texts
            return Pictured(redact(answer), answer.images)
    elif isinstance(answer, str):
        return str(redact(answer))
    return ToolError(f"{tool.name} gave {type(answer).__name__}; expected text")


def _as_tool_error(error: BaseException) -> ToolError:
    """Return an exception as the failure of a tool, redacted, with its type unless it is one."""
    if isinstance(error, ToolError):
        error.args = redact(error.args)
        if redact(str(error)) == str(error):
            return error
    return ToolError(error_text(error))


PYTHON_DESCRIPTION = "Runs Python code and returns what it prints. Every call starts afresh."


SANDBOXES = {
    "monty": "jaxrl.envs.tools.monty.MontyTool",
    "bubblewrap": "jaxrl.extras.sandbox.tools.BubblewrapTool",
}
"""Tools that the tool `python` can run code in."""


TOOLS = {"python": "jaxrl.envs.tools.monty.MontyTool"}
"""Tools that a search environment can offer beside its search engine."""

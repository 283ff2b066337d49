"""Python functions as tools."""

import asyncio
import contextlib
import sys
import threading
import time
from typing import Literal

import pytest

from jaxrl.envs.base import Episode, Prompt, Task, ToolError
from jaxrl.envs.protocol import search_r1
from jaxrl.envs.search.base import EmptySearch
from jaxrl.envs.search_env import SearchEnv
from jaxrl.envs.tools.base import InvalidCallError, build_chat_schema, run_call
from jaxrl.envs.tools.functions import FunctionTool


def add(
    a: int,
    b: float = 2.0,
    *,
    kind: Literal["plain", "loud"] = "plain",
    more: list[int] | None = None,
) -> str:
    """Adds numbers.

    All of them.

    Args:
        a: The first.
        b: The second.
        kind: Tone of the result.
        more: Further ones.
    """
    return f"{a + b + sum(more or [])}" + "!" * (kind == "loud")


def shout(text: str) -> str:
    """Says it loudly.

    Args:
        text: Any text.
    """
    return text.upper()


def test_hints_and_docstring_make_the_schema():
    function = build_chat_schema(FunctionTool(add))["function"]
    assert function["name"] == "add"
    assert function["description"] == "Adds numbers.\n\nAll of them."
    assert function["parameters"] == {
        "type": "object",
        "properties": {
            "a": {"type": "integer", "description": "The first."},
            "b": {"type": "number", "description": "The second."},
            "kind": {
                "type": "string",
                "enum": ["plain", "loud"],
                "description": "Tone of the result.",
            },
            "more": {
                "type": "array",
                "items": {"type": "integer"},
                "nullable": True,
                "description": "Further ones.",
            },
        },
        "required": ["a"],
    }


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        ({"a": 1}, "3.0"),
        ({"b": 1.5, "a": 1, "kind": "loud", "more": [3]}, "5.5!"),
        ({"a": "1"}, "argument 'a': Input should be a valid integer"),
        ({"a": True}, "argument 'a': Input should be a valid integer"),
        ({"a": 1, "kind": "low"}, "argument 'kind': Input should be 'plain' or 'loud'"),
        ({"a": 1, "more": [1, "2"]}, "argument 'more'[1]: Input should be a valid integer"),
        ({"a": 1, "c": 2}, "unknown argument 'c'; it takes a, b, kind, more"),
        ({"b": 1}, "argument 'a' is missing; it takes a, b, kind, more"),
    ],
)
def test_arguments_must_have_the_types_of_the_hints(arguments, answer):
    tool = FunctionTool(add)
    if answer[0].isdigit():
        assert tool.run(tool.encode_call(arguments)) == answer
    else:
        with pytest.raises(InvalidCallError) as raised:
            tool.encode_call(arguments)
        assert str(raised.value) == answer


@pytest.mark.parametrize(
    ("result", "shown"),
    [("é", "é"), (None, "null"), ({"a": ["é"]}, '{"a": ["é"]}')],
)
def test_results_are_text_or_json(result, shown):
    def give() -> None:
        """Gives."""
        return result

    assert FunctionTool(give).run("{}") == shown


def test_exceptions_are_tool_errors_except_call_errors():
    def fail(why: str) -> str:
        """Fails.

        Args:
            why: The reason.
        """
        if why == "wrong call":
            raise InvalidCallError("no such thing")
        if why == "slow server":
            raise TimeoutError(why)
        return object() if why == "odd" else 1 / 0

    tool = FunctionTool(fail)
    expected = {
        "wrong call": "error: no such thing",
        "bug": "ZeroDivisionError: division by zero",
        "slow server": "TimeoutError: slow server",
        "odd": "fail returned object; expected text or JSON values",
    }
    results = {why: run_call(tool, tool.encode_call({"why": why})) for why in expected}
    assert {why: str(result) for why, result in results.items()} == expected
    assert [why for why in expected if isinstance(results[why], str)] == ["wrong call"]


def test_a_call_beyond_the_deadline_fails():
    def sleep(seconds: float) -> str:
        """Sleeps.

        Args:
            seconds: How long.
        """
        time.sleep(seconds)
        return "slept"

    tool = FunctionTool(sleep, deadline_s=0.1)
    begin = time.monotonic()
    with pytest.raises(ToolError, match=r"no answer within 0.1 s \(config.env.search.tool_dea"):
        tool.run('{"seconds": 1.5}')
    assert time.monotonic() - begin < 1
    assert tool.run('{"seconds": 0.0}') == "slept"


RELEASE = threading.Event()


async def misbehave(how: str) -> str:
    """Does not end as a coroutine should.

    Args:
        how: Kind of misbehavior.
    """
    if how == "exit":
        sys.exit(1)
    if how == "block":
        RELEASE.wait(20)
    while how == "stay" and not RELEASE.is_set():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0.05)
    return how


@pytest.mark.parametrize(
    ("how", "error"), [("exit", "SystemExit: 1"), ("block", "no answer"), ("stay", "no answer")]
)
def test_a_coroutine_that_does_not_end_blocks_no_later_call(how, error):
    RELEASE.clear()
    tool = FunctionTool(misbehave, deadline_s=0.2)
    begin = time.monotonic()
    assert error in str(run_call(tool, f'{{"how": "{how}"}}'))
    assert time.monotonic() - begin < 5
    RELEASE.set()
    for _ in range(50):  # a blocked loop needs time to recover
        if (answer := run_call(tool, '{"how": "well"}')) == "well":
            break
    assert answer == "well"


def unhinted(a):
    """Repeats.

    Args:
        a: A value.
    """


def starred(*a: int):
    """Repeats."""


@pytest.mark.parametrize("function", [unhinted, starred])
def test_a_function_without_hints_for_its_parameters_is_refused(function):
    with pytest.raises(ValueError, match=f"'{function.__name__}' cannot be a tool: .* type hint"):
        FunctionTool(function)


TASK = Task(id="t", question="?", answers=("x",))
SETTINGS = {"prompt": Prompt(system="", template="{question}"), "max_turns": 2}


def test_a_function_of_one_text_can_be_called_by_tags():
    env = SearchEnv(EmptySearch(), tools=[FunctionTool(shout)], protocol=search_r1, **SETTINGS)
    shouted, blank = env.step(
        [Episode(task=TASK)] * 2, ["<shout> hey </shout>", "<shout> </shout>"]
    )
    assert (shouted.observation.body, shouted.tool) == ("HEY", "shout")
    assert shouted.tool_call == '{"text": "hey"}'
    assert blank.observation.body == "error: the call is empty"
    with pytest.raises(ValueError, match="the tool 'add' takes a, b, kind, more; expected"):
        SearchEnv(EmptySearch(), tools=[FunctionTool(add)], protocol=search_r1, **SETTINGS)

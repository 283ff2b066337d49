"""Python functions as tools."""

import asyncio
import contextlib
import sys
import threading
import time
from typing import Literal

import pytest

from jaxrl.envs.base import Episode, Outcome, Prompt, Task, ToolError
from jaxrl.envs.protocol import qwen, search_r1
from jaxrl.envs.search.base import EmptySearch
from jaxrl.envs.search_env import SearchEnv
from jaxrl.envs.tools.base import CallError, chat_schema, run_one
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
        kind: How it is said.
        more: Further ones.
    """
    return f"{a + b + sum(more or [])}" + "!" * (kind == "loud")


def shout(text: str) -> str:
    """Says it loudly.

    Args:
        text: What is said.
    """
    return text.upper()


async def wait(seconds: float) -> float:
    """Waits.

    Args:
        seconds: How long.
    """
    await asyncio.sleep(seconds)
    return seconds


def test_hints_and_docstring_make_the_schema():
    function = chat_schema(FunctionTool(add))["function"]
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
                "description": "How it is said.",
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
        ({"a": 2, "b": 3}, "5.0"),
        ({"a": "1"}, "argument 'a': Input should be a valid integer"),
        ({"a": True}, "argument 'a': Input should be a valid integer"),
        ({"a": 1.0}, "argument 'a': Input should be a valid integer"),
        ({"a": None}, "argument 'a': Input should be a valid integer"),
        ({"a": 1, "kind": "low"}, "argument 'kind': Input should be 'plain' or 'loud'"),
        ({"a": 1, "more": [1, "2"]}, "argument 'more'[1]: Input should be a valid integer"),
        ({"a": 1, "c": 2}, "unknown argument 'c'; it takes a, b, kind, more"),
        ({"b": 1}, "argument 'a' is missing; it takes a, b, kind, more"),
    ],
)
def test_arguments_are_of_the_types_that_the_hints_name(arguments, answer):
    tool = FunctionTool(add)
    if answer[0].isdigit():
        assert tool.run(tool.call_of(arguments)) == answer
    else:
        with pytest.raises(CallError) as raised:
            tool.call_of(arguments)
        assert str(raised.value) == answer


@pytest.mark.parametrize(
    ("result", "shown"),
    [("é", "é"), (3, "3"), (None, "null"), ({"a": ["é"]}, '{"a": ["é"]}')],
)
def test_a_text_is_the_result_and_all_else_is_json(result, shown):
    def give() -> None:
        """Gives."""
        return result

    assert FunctionTool(give).run("{}") == shown


def test_what_a_function_raises_is_its_failure_but_a_call_error():
    def fail(why: str) -> str:
        """Fails.

        Args:
            why: The reason.
        """
        if why == "theirs":
            raise CallError("no such thing")
        if why == "slow server":
            raise TimeoutError(why)
        return object() if why == "odd" else 1 / 0

    tool = FunctionTool(fail)
    ours, slow, odd, theirs = (
        run_one(tool, tool.call_of({"why": w})) for w in ("ours", "slow server", "odd", "theirs")
    )
    assert theirs == "error: no such thing"
    assert str(ours) == "ZeroDivisionError: division by zero"
    assert str(slow) == "TimeoutError: slow server"
    assert str(odd) == "fail returned object; expected text or JSON values"


def test_a_call_that_takes_too_long_has_failed():
    def sleep(seconds: float) -> str:
        """Sleeps.

        Args:
            seconds: How long.
        """
        time.sleep(seconds)
        return "slept"

    for function in (sleep, wait):
        tool = FunctionTool(function, deadline_s=0.1)
        begin = time.monotonic()
        with pytest.raises(ToolError, match=r"no answer within 0.1 s \(config.env.search.tool_dea"):
            tool.run('{"seconds": 1.5}')
        assert time.monotonic() - begin < 1
        assert tool.run('{"seconds": 0.0}') in ("slept", "0.0")


RELEASE = threading.Event()


async def misbehave(how: str) -> str:
    """Does not end as a coroutine should.

    Args:
        how: In which way.
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
    ("how", "told"), [("exit", "SystemExit: 1"), ("block", "no answer"), ("stay", "no answer")]
)
def test_a_coroutine_that_does_not_end_holds_up_nobody_for_ever(how, told):
    RELEASE.clear()
    tool = FunctionTool(misbehave, deadline_s=0.2)
    begin = time.monotonic()
    assert told in str(run_one(tool, f'{{"how": "{how}"}}'))
    assert time.monotonic() - begin < 5
    RELEASE.set()
    for _ in range(50):  # a loop that was blocked has to come back
        if (answer := run_one(tool, '{"how": "well"}')) == "well":
            break
    assert answer == "well"


def bare(a: int): ...


def unhinted(a):
    """Says.

    Args:
        a: It.
    """


def starred(*a: int):
    """Says."""


def odd(a: object()):
    """Says.

    Args:
        a: It.
    """


@pytest.mark.parametrize("function", [bare, unhinted, starred, odd])
def test_a_function_that_does_not_say_how_it_is_called_is_refused(function):
    with pytest.raises(ValueError, match=f"'{function.__name__}' cannot be a tool: .* type hint"):
        FunctionTool(function)


TASK = Task(id="t", question="?", answers=("x",))
SETTINGS = {"prompt": Prompt(system="", template="{question}"), "max_turns": 2}


def test_a_function_of_one_text_is_called_by_tags_too():
    env = SearchEnv(EmptySearch(), tools=[FunctionTool(shout)], protocol=search_r1, **SETTINGS)
    said, blank = env.step([Episode(task=TASK)] * 2, ["<shout> hey </shout>", "<shout> </shout>"])
    assert (said.observation.body, said.tool) == ("HEY", "shout")
    assert said.tool_call == '{"text": "hey"}'
    assert blank.observation.body == "error: the call is empty"
    with pytest.raises(ValueError, match="the tool 'wait' takes seconds; expected one that takes"):
        SearchEnv(EmptySearch(), tools=[FunctionTool(wait)], protocol=search_r1, **SETTINGS)


def test_a_function_answers_tool_calls():
    env = SearchEnv(None, tools=[FunctionTool(add)], protocol=qwen, **SETTINGS)
    call = '<tool_call>{"name": "add", "arguments": {"a": %s}}</tool_call>'
    right, wrong = env.step([Episode(task=TASK)] * 2, [call % 5 + call % 6, call % '"x"'])
    assert right.observation.bodies == ("7.0", "8.0")
    assert wrong.observation.bodies == ("error: argument 'a': Input should be a valid integer",)
    assert wrong.outcome != Outcome.ENVIRONMENT_ERROR

import builtins
import contextlib
import os
import shutil
import signal
import sys
import threading
from types import MappingProxyType

import pytest

from jaxrl.envs.base import CallRecord, Episode, Outcome, Prompt, Task, ToolError, Turn
from jaxrl.envs.protocol import bapo, search_r1
from jaxrl.envs.search_env import SearchEnv
from jaxrl.envs.tools.base import Tool
from jaxrl.envs.tools.budget import Budget, get_call_records
from jaxrl.envs.tools.monty import MontyTool
from tests.envs.contract import append_turn
from tests.servers import KeywordSearch

TASK = Task(id="t", question="What is 6 * 7?", answers=("42",))


class Echo(Tool):
    """Repeats the code; fails for code with "broken"."""

    name, blank = "python", "No output"

    def run(self, code):
        if "broken" in code:
            raise ToolError("no sandbox")
        return f"ran {code}"


DEFAULTS = {"protocol": bapo, "tools": [Echo()], "max_turns": 2}


def make_env(engine=MappingProxyType({"france": "Paris"}), **settings):
    return SearchEnv(
        KeywordSearch(engine),
        prompt=Prompt(system="", template="{question}"),
        **(DEFAULTS | settings),
    )


def test_only_temporary_failures_are_retried():
    class Locked(Echo):
        def run(self, code):
            if code == "a":
                raise ToolError("busy", retry_after_s=0.5)
            raise ToolError("wrong key", is_permanent=True)

    answers = Locked().call_batch(["a", "b"])
    records = [answer.record for answer in answers]
    assert [(r.call, r.tool, r.error, r.attempts) for r in records] == [
        ("a", "python", "busy", 2),
        ("b", "python", "wrong key", 1),
    ]
    busy, locked = (answer.result for answer in answers)
    assert (busy.retry_after_s, busy.is_permanent) == (0.5, False)
    assert (locked.retry_after_s, locked.is_permanent) == (None, True)


def test_each_call_goes_to_its_tool():
    env = make_env()
    texts = [
        "<python>\nprint(1)\n</python>",
        "<search>France</search>",
        "<python>broken</python>",
        "<python> </python>",
        "print(1)</python>",
        r"<answer>\boxed{42}</answer>",
    ]
    ran, searched, failed, blank, unopened, answered = env.step([Episode(task=TASK)] * 6, texts)
    assert ran.observation.text == " <result>\nran print(1)\n</result>"
    assert (ran.tool_call, ran.tool) == ("print(1)", "python")
    assert (searched.tool_call, searched.tool) == ("France", None)
    assert searched.observation.body == "Paris"
    assert failed.outcome == Outcome.ENVIRONMENT_ERROR
    assert failed.error == "no sandbox"
    assert blank.observation.body == "No output"
    assert unopened.observation is unopened.outcome is None
    assert answered.outcome == Outcome.ANSWERED


class Calculator(Tool):
    name, blank = "calc", "nothing to calculate"

    def run(self, call):
        return str(sum(map(int, call.split("+"))))


@pytest.mark.parametrize("protocol", [search_r1, bapo])
def test_a_custom_tool_has_a_tag_in_each_protocol(protocol):
    env = make_env(protocol=protocol, tools=[Calculator()], engine={"france": "<calc>1</calc>"})
    assert env.stop_strings == ("</search>", "</answer>", "</calc>")
    call = "<think>?</think><calc>40 + 2</calc>"
    [turn] = append_turn(env, TASK, [], call).turns
    assert (turn.tool, turn.tool_call) == ("calc", "40 + 2")
    # Its calls are part of the format, and results cannot write its tag.
    answer = Turn(text=r"<answer>\boxed{42}</answer>")
    answered = Episode(task=TASK, turns=[turn, answer])
    unanswered = Episode(task=TASK, turns=[Turn(text=call), answer])
    assert [r.is_well_formed for r in env.score([answered, unanswered])] == [True, False]
    [result] = env.step([Episode(task=TASK)], ["<search>France</search>"])
    assert result.observation.body == "‹calc›1‹/calc›"


@pytest.mark.parametrize("name", ["answer", "a b", "", "calc"])
def test_an_invalid_or_reserved_tool_name_is_refused(name):
    with pytest.raises(ValueError, match=f"the tool name '{name}' is invalid or reserved"):
        make_env(tools=[Calculator(), type("Other", (Calculator,), {"name": name})()])


# Records and budgets


def test_calls_of_a_turn():
    records = (CallRecord(call="a"), CallRecord(call="b", tool="echo", source="cache", attempts=0))
    assert get_call_records(Turn(text="x", tool_call="a", records=records)) == records
    # A custom environment need not keep records.
    searched = Turn(text="x", tool_call="q", observation="found", latency_s=0.5)
    assert get_call_records(searched) == (CallRecord(call="q", waited_s=0.5),)
    failed = Turn(text="x", tool_call="q", tool="echo", error="down")
    assert get_call_records(failed) == (CallRecord(call="q", tool="echo", error="down"),)
    # A reward that failed later is no failure of the call.
    scored = Turn(text="x", tool_call="q", observation="found", error="score: broken")
    [call] = get_call_records(scored)
    assert call.error is None
    assert get_call_records(Turn(text="<answer>x</answer>")) == ()


def test_a_budget_counts_each_call_once():
    hard = CallRecord(call="a", attempts=9)
    easy = CallRecord(call="a", source="cache", attempts=0)
    computed = CallRecord(call="1", tool="echo")
    turns = [Turn(text="", records=(hard,)), Turn(text="", records=(easy, computed))]
    episode = Episode(task=Task(id="t", question="?"), turns=turns)
    prices = {"search": 0.1, "echo": 0.05}  # 0.25 so far
    assert Budget(prices=prices, max_cost=0.35).allows(episode, ["search"])
    assert not Budget(prices=prices, max_cost=0.34).allows(episode, ["search"])
    assert Budget(prices=prices, max_cost=0.3).allows(episode, ["echo"])
    assert not Budget(prices=prices, max_cost=0.35).allows(episode, ["search", "echo"])
    assert Budget(prices=prices, max_cost=0.25).allows(episode, ["free"])
    assert Budget(prices=prices).allows(episode, ["search"] * 1000)


def test_a_call_beyond_the_budget_ends_the_episode():
    env = make_env(max_turns=9, budget=Budget(prices={"search": 1.0}, max_cost=2.0))
    episode = Episode(task=TASK)
    for text in ("<search>a</search>", "<search> </search>", "<search>b</search>"):
        episode = append_turn(env, TASK, episode.turns, text)
        assert episode.outcome is None  # a blank call costs nothing
    texts = ["<python>1</python>", "<search>c</search>", r"<answer>\boxed{42}</answer>"]
    outcomes = [env.step([episode], [text])[0].outcome for text in texts]
    assert outcomes == [None, Outcome.OUT_OF_BUDGET, Outcome.ANSWERED]


# The sandbox


@pytest.fixture(scope="module")
def tool():
    return MontyTool(timeout_s=0.8, max_memory=32 * 2**20, max_output=10_000, max_workers=2)


@pytest.mark.parametrize(
    ("code", "printed"),
    [
        ("print(6 * 7)\nprint('a', 'b')", "42\na b"),
        ("print(", "SyntaxError: unexpected EOF while parsing"),
        ("x = '\udc80'", "SyntaxError: source code is not valid UTF-8 (contains lone surrogates)"),
        ("while True: pass", "TimeoutError: time limit exceeded"),
        ("x = []\nwhile True: x.append('a' * 10**6)", "MemoryError: limit exceeded"),
        ("def f(): return f()\nf()", "RecursionError: maximum recursion depth exceeded"),
        ("import numpy", "ModuleNotFoundError: No module named 'numpy'"),
        ("import time\ntime.sleep(100)\nprint('slept')", "slept"),
        ("raise ValueError('a' * 10**6)", "ValueError: " + "a" * 1988 + " .."),
        ("print('x' * 10**6)", "MemoryError: limit exceeded"),
    ],
)
def test_results_of_snippets(tool, code, printed):
    assert tool.run(code) == printed


def test_snippets_cannot_reach_the_machine(tool, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("secret")
    for code in (
        f"print(open({str(secret)!r}).read())",
        f"open({str(secret)!r}, 'w').write('x')",
        f"import os\nos.remove({str(secret)!r})",
        "import os\nprint(os.listdir('/'))",
        "import socket\nprint(socket.gethostname())",
        "import subprocess\nprint(subprocess.run(['id']))",
        "import os\nos.system('id')",
        "import ctypes\nprint(ctypes)",
    ):
        kind = tool.run(code).partition(":")[0]
        error = getattr(builtins, kind, None)
        assert isinstance(error, type), (code, kind)
        assert issubclass(error, Exception), (code, kind)
    os.environ["JAXRL_TEST_SECRET"] = "secret"
    try:
        assert "secret" not in tool.run("import os\nprint(os.environ.get('JAXRL_TEST_SECRET'))")
    finally:
        del os.environ["JAXRL_TEST_SECRET"]
    assert secret.read_text() == "secret"


def test_snippets_share_no_state_and_are_deterministic(tool):
    assert tool.run("x = 5\nprint(x)") == "5"
    assert tool.run("print(x)") == "NameError: name 'x' is not defined"
    draw = "import random, time\nprint(random.random(), time.time())"
    assert tool.run(draw) == tool.run(draw)


def kill(pid):
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


class KillingPool:
    """A pool whose first workers are killed from outside during a call."""

    def __init__(self, pool, num_kills):
        self._pool = pool
        self.kills_left = num_kills

    @contextlib.contextmanager
    def checkout(self, **settings):
        with self._pool.checkout(**settings) as session:
            if self.kills_left:
                self.kills_left -= 1
                threading.Timer(0.05, kill, (session.worker_pid,)).start()
            yield session


SLOW = "total = 0\nfor i in range(10**9): total += 1"


@pytest.mark.parametrize(
    ("num_kills", "printed"),
    [(1, "TimeoutError: time limit exceeded"), (2, "SystemError: the interpreter crashed")],
)
def test_code_is_retried_once_after_its_worker_was_killed(tool, monkeypatch, num_kills, printed):
    """After one kill the cause may be external; after two, the code crashes the interpreter."""
    pool = KillingPool(tool._pool, num_kills)
    monkeypatch.setattr(tool, "_pool", pool)
    assert tool.run(SLOW) == printed
    assert pool.kills_left == 0
    assert tool.run("print(1)") == "1"


def test_a_sandbox_that_cannot_start_is_a_tool_error(tmp_path, monkeypatch):
    installed = shutil.which("monty", path=os.path.dirname(sys.executable)) or shutil.which("monty")
    binary = tmp_path / "monty"
    shutil.copy(installed, binary)
    monkeypatch.setenv("MONTY_BIN", str(binary))
    tool = MontyTool(max_workers=1)
    assert tool.run("print(1)") == "1"
    binary.unlink()
    with tool._pool.checkout() as session:
        os.kill(session.worker_pid, signal.SIGKILL)
    with pytest.raises(ToolError, match="the Python sandbox failed"):
        tool.run("print(1)")
    [outcome] = tool.run_batch(["print(1)"])
    assert isinstance(outcome, ToolError)

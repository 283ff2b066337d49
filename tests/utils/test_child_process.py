"""Children that are Python programs of a line or two."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from jaxrl.utils import child_process
from jaxrl.utils.child_process import ChildExitedError, ChildProcess, ChildTimeoutError

ECHO = "import sys\nfor line in sys.stdin: print(line, end='', flush=True)"


def child(program, **more):
    return ChildProcess([sys.executable, "-I", "-S", "-c", program], what="a child", **more)


def test_messages_come_back_one_at_a_time():
    with child(ECHO) as echo:
        long = {"b": "\n" + "x" * 200_000}
        for said in ({"a": 1}, long, {"c": None}):
            echo.send(said)
            assert echo.readline(20) == said
        echo.send({"a": 1})
        echo.send({"a": 2})
        assert [echo.readline(20), echo.readline()] == [{"a": 1}, {"a": 2}]


def test_the_end_is_told_with_its_status():
    with child("print('{}', flush=True); raise SystemExit(7)") as ended:
        assert ended.readline() == {}
        with pytest.raises(ChildExitedError, match=r"^a child ended with 7$"):
            ended.readline()
        with pytest.raises(ChildExitedError) as error:
            ended.send({"a": 1})
        assert error.value.status == 7
    with child(ECHO) as killed:
        killed.kill()
        assert killed.wait() == -signal.SIGKILL


@pytest.mark.parametrize(
    "program", ["input()", "while True: print(' ' * 99, end='')", "print('{}', end=''); input()"]
)
def test_what_gives_no_line_is_not_waited_for(program):
    started = time.monotonic()
    with child(program, max_unread_bytes=1000) as silent:
        with pytest.raises(ChildTimeoutError, match=r"a child was silent for 0.5 s"):
            silent.readline(0.5)
        assert len(silent.stdout_buffer) <= 1000 + 65536
        with pytest.raises(ChildTimeoutError, match=r"a child did not end in 0.1 s"):
            silent.wait(0.1)
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("act", [lambda one: one.readline(), lambda one: one.send({"a": 1})])
def test_a_child_that_goes_on_without_its_pipes_is_ended(act, monkeypatch):
    monkeypatch.setattr(child_process, "_EXIT_TIMEOUT_S", 0.2)
    program = "import os, time; os.close(0); os.close(1); time.sleep(60)"
    with child(program) as deaf:
        while os.path.exists(f"/proc/{deaf.pid}/fd/1"):
            time.sleep(0.01)
        with pytest.raises(ChildExitedError, match=r"^a child ended with -9$"):
            act(deaf)


def test_what_it_started_ends_with_it():
    program = (
        "import json, os, subprocess, time\n"
        "print(json.dumps({'pid': subprocess.Popen(['sleep', '600']).pid}), flush=True)\n"
        "time.sleep(600)"
    )
    with child(program) as parent:
        assert os.getsid(parent.pid) == parent.pid
        other = Path(f"/proc/{parent.readline()['pid']}/stat")
    ends = time.monotonic() + 10
    while other.exists() and other.read_text().split()[2] != "Z":
        assert time.monotonic() < ends, "it is still there"
        time.sleep(0.05)

"""Children that are Python programs of one or two lines."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from jaxrl.utils import child_process
from jaxrl.utils.child_process import ChildExitedError, ChildProcess, ChildTimeoutError

ECHO = "import sys\nfor line in sys.stdin: print(line, end='', flush=True)"


def start_child(program, **options):
    return ChildProcess(
        [sys.executable, "-I", "-S", "-c", program], description="a child", **options
    )


def test_messages_arrive_one_at_a_time():
    with start_child(ECHO) as child:
        messages = [{"a": 1}, {"b": "\n" + "x" * 200_000}, {"c": None}]
        for message in messages:
            child.send(message)
        assert [child.readline(20) for _ in messages] == messages


def test_the_end_of_a_child_is_reported_with_its_status():
    with start_child("print('{}', flush=True); raise SystemExit(7)") as child:
        assert child.readline() == {}
        with pytest.raises(ChildExitedError, match=r"^a child ended with 7$"):
            child.readline()
        with pytest.raises(ChildExitedError) as error:
            child.send({"a": 1})
        assert error.value.status == 7
    with start_child(ECHO) as child:
        child.kill()
        assert child.wait() == -signal.SIGKILL


@pytest.mark.parametrize("program", ["input()", "while True: print(' ' * 99, end='')"])
def test_a_child_that_completes_no_line_is_abandoned(program):
    started = time.monotonic()
    with start_child(program, max_unread_bytes=1000) as child:
        with pytest.raises(ChildTimeoutError, match=r"a child was silent for 0.5 s"):
            child.readline(0.5)
        assert len(child.stdout_buffer) <= 1000 + 65536
        with pytest.raises(ChildTimeoutError, match=r"a child did not end in 0.1 s"):
            child.wait(0.1)
    assert time.monotonic() - started < 5


def test_a_child_that_closed_its_pipes_is_killed(monkeypatch):
    monkeypatch.setattr(child_process, "_EXIT_TIMEOUT_S", 0.2)
    program = "import os, time; os.close(0); os.close(1); time.sleep(60)"
    for use in (lambda child: child.readline(), lambda child: child.send({"a": 1})):
        with start_child(program) as child:
            while os.path.exists(f"/proc/{child.pid}/fd/1"):
                time.sleep(0.01)
            with pytest.raises(ChildExitedError, match=r"^a child ended with -9$"):
                use(child)


def test_processes_that_a_child_started_end_with_it():
    program = (
        "import json, os, subprocess, time\n"
        "print(json.dumps({'pid': subprocess.Popen(['sleep', '600']).pid}), flush=True)\n"
        "time.sleep(600)"
    )
    with start_child(program) as child:
        grandchild = Path(f"/proc/{child.readline()['pid']}/stat")
    deadline = time.monotonic() + 10
    while grandchild.exists() and grandchild.read_text().split()[2] != "Z":
        assert time.monotonic() < deadline, "it still runs"
        time.sleep(0.05)

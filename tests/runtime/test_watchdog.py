"""Runs that do not move, with real threads and real time."""

import os
import signal
import subprocess
import sys
import time

from jaxrl.logs.display import Display
from jaxrl.runtime.watchdog import watchdog


def wait_for(condition):
    until = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_what_does_not_move_is_told_with_its_threads(capfd):
    display, err = Display(), []

    def num_warnings():
        err.append(capfd.readouterr().err)
        return "".join(err).count("no progress for")

    with watchdog(display, 0.2):
        display.activity("waiting for the search")
        began = time.monotonic()
        wait_for(lambda: num_warnings() == 1)
        assert time.monotonic() - began >= 0.19
        # Again after twice as long.
        wait_for(lambda: num_warnings() == 2)
        assert time.monotonic() - began >= 0.39
    err = "".join(err)
    assert err.count("last activity: waiting for the search. Stacks of all threads:") == 2


def test_what_moves_is_left_alone(capfd):
    display = Display()
    with watchdog(display, 0.5):
        for step in range(40):
            display.activity(f"step {step}")
            time.sleep(0.03)
    assert capfd.readouterr().err == ""


def test_what_never_moves_is_ended_at_its_deadline(capfd):
    display, ended = Display(), []
    with watchdog(display, 0.0, 0.3, exit_process=ended.append):
        for step in range(10):  # longer than the deadline, and moving
            display.activity(f"step {step}")
            time.sleep(0.05)
        display.activity("waiting for the search")
        began = time.monotonic()
        wait_for(lambda: ended)
        assert time.monotonic() - began >= 0.29
        time.sleep(0.3)  # it ends once
    assert ended == [76]
    err = capfd.readouterr().err
    assert "(config.watch.deadline_s); last activity: waiting for the search. The run ends" in err


STUCK = """
import threading
from jaxrl.logs.display import Display
from jaxrl.runtime.watchdog import dump_stacks_on_signal, watchdog

def the_call_that_never_returns():
    threading.Event().wait()

dump_stacks_on_signal()
with watchdog(Display(), {limit}, {deadline}):
    threading.Thread(target=the_call_that_never_returns, daemon=True).start()
    print("begun", flush=True)
    threading.Event().wait(60)
"""


def stacks_of(limit, ask):
    code = STUCK.format(limit=limit, deadline=0)
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "begun\n"
        time.sleep(0.1)
        ask(process.pid)
        text = ""
        while "the_call_that_never_returns" not in text:
            line = process.stderr.readline()
            assert line, text
            text += line
        return text
    finally:
        process.kill()
        process.communicate()


def test_the_stacks_are_printed_on_a_signal():
    assert "no progress" not in stacks_of(0.0, lambda pid: os.kill(pid, signal.SIGUSR1))

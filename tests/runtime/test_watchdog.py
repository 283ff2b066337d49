"""The watchdog of runs without progress, with real threads and real time."""

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


def test_stacks_are_printed_after_each_doubled_silence(capfd):
    display, outputs = Display(), []

    def num_warnings():
        outputs.append(capfd.readouterr().err)
        return "".join(outputs).count("no progress for")

    with watchdog(display, 0.2):
        display.show_activity("waiting for the search")
        began = time.monotonic()
        wait_for(lambda: num_warnings() == 1)
        assert time.monotonic() - began >= 0.19
        wait_for(lambda: num_warnings() == 2)
        assert time.monotonic() - began >= 0.39
    message = "last activity: waiting for the search. Stacks of all threads:"
    assert "".join(outputs).count(message) == 2


def test_only_a_run_without_progress_ends_at_the_deadline(capfd):
    display, exits = Display(), []
    with watchdog(display, 0.5, 0.5, exit_process=exits.append):
        for step in range(20):  # longer than the deadline, with progress
            display.show_activity(f"step {step}")
            time.sleep(0.05)
        assert capfd.readouterr().err == ""
        display.show_activity("waiting for the search")
        began = time.monotonic()
        wait_for(lambda: exits)
        assert time.monotonic() - began >= 0.49
        time.sleep(0.3)  # it ends once
    assert exits == [76]
    error = capfd.readouterr().err
    assert "(config.watch.deadline_s); last activity: waiting for the search. The run ends" in error


STUCK = """
import threading
from jaxrl.logs.display import Display
from jaxrl.runtime.watchdog import dump_stacks_on_signal, watchdog

def call_that_never_returns():
    threading.Event().wait()

dump_stacks_on_signal()
with watchdog(Display(), 0.0, 0):
    threading.Thread(target=call_that_never_returns, daemon=True).start()
    print("begun", flush=True)
    threading.Event().wait(60)
"""


def test_a_signal_prints_the_stacks():
    process = subprocess.Popen(
        [sys.executable, "-c", STUCK], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "begun\n"
        time.sleep(0.1)
        os.kill(process.pid, signal.SIGUSR1)
        lines = iter(process.stderr.readline, "")
        assert any("call_that_never_returns" in line for line in lines)
    finally:
        process.kill()
        process.communicate()

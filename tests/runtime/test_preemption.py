"""The best evaluation so far, and what signals do to a run."""

import contextlib
import io
import math
import os
import signal
import subprocess
import sys
import time

from jaxrl.runtime.preemption import (
    EXIT_INTERRUPTED,
    BestEvaluation,
    update_best,
    watch_stop_signals,
)


def test_best_and_patience_by_hand():
    best = BestEvaluation()
    values = [0.25, 0.25, 0.375, 0.4375, 0.375, math.nan, 0.4375, 0.75]
    history = []
    for step, value in enumerate(values, start=1):
        best = update_best(best, step, value, min_delta=0.125)
        history.append((best.value, best.step, best.mark, best.num_stale))
    assert history == [
        (0.25, 1, 0.25, 0),
        (0.25, 1, 0.25, 1),  # equal is not better
        (0.375, 3, 0.25, 2),  # better by exactly min_delta: patience is not reset
        (0.4375, 4, 0.4375, 0),  # two small improvements sum to more than min_delta
        (0.4375, 4, 0.4375, 1),
        (0.4375, 4, 0.4375, 1),  # nothing could be scored
        (0.4375, 4, 0.4375, 2),
        (0.75, 8, 0.75, 0),
    ]


WORK = """
import hashlib, sys
from jaxrl.runtime.preemption import watch_stop_signals
with watch_stop_signals(*map(eval, sys.argv[2:])) as should_stop:
    print("ready", flush=True)
    is_asked = False
    while not is_asked:
        # Python handles no signals in here, as in a compilation.
        hashlib.pbkdf2_hmac("sha256", b"", b"", int(sys.argv[1]))
        is_asked = should_stop()
    print("stopped", flush=True)
"""
LOAD = """
import runpy, sys, time
class Slow:
    def find_spec(self, name, *_):
        if name == "ml_collections":
            print("ready", flush=True)
            time.sleep(60)
sys.meta_path.insert(0, Slow())
runpy.run_module("jaxrl.launch", run_name="__main__")
"""
LONG = "500000000"


def start(code, *arguments):
    command = [sys.executable, "-c", code, *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    return process


def test_the_first_signal_asks_to_stop():
    process = start(WORK, "1000")
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=30)
    assert (process.returncode, output) == (0, "stopped\n")
    assert errors == "SIGTERM: stopping; send it again to exit immediately\n"


def test_output_of_another_thread_does_not_split_the_message():
    class Stream(io.StringIO):
        def write(self, text):
            return super().write(f"{text}saved\n")

    with contextlib.redirect_stderr(Stream()) as errors, watch_stop_signals():
        os.kill(os.getpid(), signal.SIGTERM)
        deadline = time.monotonic() + 30
        while errors.getvalue().count("\n") < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
    expected = ["SIGTERM: stopping; send it again to exit immediately", "saved"]
    assert errors.getvalue().splitlines() == expected


def test_the_second_signal_exits_even_in_native_code():
    process = start(WORK, LONG)
    process.send_signal(signal.SIGINT)
    assert process.stderr.readline().endswith("send it again to exit immediately\n")
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) == 128 + signal.SIGINT


def test_a_signal_before_the_first_step_exits_at_once():
    for process in (start(LOAD), start(WORK, LONG, "lambda: False")):
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=30)
        assert (process.returncode, output) == (EXIT_INTERRUPTED, "")
        assert errors == "SIGTERM: ended before the first step; there is nothing to save\n"

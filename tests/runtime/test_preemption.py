import math
import signal
import subprocess
import sys

import pytest

from jaxrl.runtime.preemption import EXIT_INTERRUPTED, Best, update_best


def test_best_and_patience_by_hand():
    best = Best()
    values = [0.25, 0.25, 0.375, 0.4375, 0.375, math.nan, 0.4375, 0.75]
    seen = []
    for step, value in enumerate(values, start=1):
        best = update_best(best, step, value, min_delta=0.125)
        seen.append((best.value, best.step, best.mark, best.num_stale))
    assert seen == [
        (0.25, 1, 0.25, 0),
        (0.25, 1, 0.25, 1),  # equal is not better
        (0.375, 3, 0.25, 2),  # better, by exactly min_delta: patience does not begin anew
        (0.4375, 4, 0.4375, 0),  # two small improvements made one of more than min_delta
        (0.4375, 4, 0.4375, 1),
        (0.4375, 4, 0.4375, 1),  # nothing could be scored
        (0.4375, 4, 0.4375, 2),
        (0.75, 8, 0.75, 0),
    ]


WORK = """
import hashlib, sys
from jaxrl.runtime.preemption import stop_on_signals
with stop_on_signals(*map(eval, sys.argv[2:])) as should_stop:
    print("ready", flush=True)
    is_asked = False
    while not is_asked:  # once at least, be it asked before
        # In here Python gets no turn, as in a compilation.
        hashlib.pbkdf2_hmac("sha256", b"", b"", int(sys.argv[1]))
        is_asked = should_stop()
    print("stopped", flush=True)
"""


def start_work(iterations, *is_begun):
    command = [sys.executable, "-c", WORK, str(iterations), *is_begun]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_asks(number):
    process = start_work(1000)
    process.send_signal(number)
    output, errors = process.communicate(timeout=30)
    assert (process.returncode, output) == (0, "stopped\n")
    assert errors == f"{number.name}: stopping; send it again to exit immediately\n"


LOAD = """
import runpy, sys, time
class Slow:
    def find_spec(self, name, *_):
        if name == sys.argv[2]:
            print("ready", flush=True)
            time.sleep(60)
sys.meta_path.insert(0, Slow())
runpy.run_module(sys.argv[1], run_name="__main__")
"""


def ended_while_loading(number, *names):
    command = [sys.executable, "-c", LOAD, *names]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    return process.returncode, errors


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_command_is_loaded(number):
    told = f"{number.name}: ended before the first step; there is nothing to save\n"
    assert ended_while_loading(number, "jaxrl.launch", "ml_collections") == (EXIT_INTERRUPTED, told)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_second_signal_ends_also_where_python_gets_no_turn(number):
    process = start_work(500_000_000)
    process.send_signal(number)
    assert process.stderr.readline().endswith("send it again to exit immediately\n")
    process.send_signal(number)
    assert process.wait(timeout=30) == 128 + number


def test_before_the_run_there_is_nothing_to_wait_for():
    # Also where Python gets no turn, as while a job's processes wait for each other.
    process = start_work(500_000_000, "lambda: False")
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=30)
    assert (process.returncode, output) == (EXIT_INTERRUPTED, "")
    assert errors == "SIGINT: ended before the first step; there is nothing to save\n"

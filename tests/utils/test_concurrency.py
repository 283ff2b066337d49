"""Code that fails in any way or never returns."""

import subprocess
import sys
import threading
import time

import pytest

from jaxrl.utils.concurrency import call_once, format_error, parallel_map, run_in_thread


class UnspeakableError(Exception):
    def __str__(self):
        raise RuntimeError("no text either")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("x"), "ValueError: x"),
        (ValueError(), "ValueError"),
        (SystemExit(3), "SystemExit: 3"),
        (UnspeakableError(), "UnspeakableError"),
    ],
)
def test_text_of_an_error(error, text):
    assert format_error(error) == text


def test_items_are_worked_on_side_by_side_in_so_many_threads():
    meeting = threading.Barrier(3, timeout=5)

    def work(item):
        meeting.wait()  # passes only when three are at it
        return 10 * item

    assert parallel_map(work, range(6), max_threads=3) == [0, 10, 20, 30, 40, 50]
    assert parallel_map(work, [], max_threads=3) == []


HANG = """
import time
from jaxrl.utils.concurrency import run_in_thread, parallel_map
run_in_thread(lambda: parallel_map(time.sleep, [600, 600], max_threads=2))
time.sleep(0.2)
print("done")
"""


def test_an_exit_does_not_wait_for_work_that_hangs():
    started = time.monotonic()
    command = [sys.executable, "-c", HANG]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "done\n")
    assert time.monotonic() - started < 60


def test_what_is_made_once_is_made_once_for_threads_that_come_together():
    """Two event loops, each with half of a client's connections, failed requests at random."""

    @call_once
    def thing():
        time.sleep(0.02)
        return object()

    found = [future.result() for future in [run_in_thread(thing) for _ in range(8)]]
    assert len(set(map(id, found))) == 1

"""Calls that fail in any way or never return."""

import subprocess
import sys
import threading
import time

from jaxrl.utils.concurrency import call_once, parallel_map, run_in_thread


def test_items_are_processed_concurrently_in_a_bounded_number_of_threads():
    barrier = threading.Barrier(3, timeout=5)

    def work(item):
        barrier.wait()  # passes only with three threads
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


def test_the_interpreter_exits_while_calls_hang():
    command = [sys.executable, "-c", HANG]
    process = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (process.returncode, process.stdout) == (0, "done\n")


def test_call_once_makes_one_object_for_concurrent_threads():
    """With two event loops for one HTTP client, requests fail at random."""

    @call_once
    def make_object():
        time.sleep(0.02)
        return object()

    results = [future.result() for future in [run_in_thread(make_object) for _ in range(8)]]
    assert len(set(map(id, results))) == 1

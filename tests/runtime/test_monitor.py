"""Monitors of jobs whose processes are `sleep`, with real processes, sockets and signals."""

import contextlib
import json
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from jaxrl.runtime import monitor

DEADLINE_S = 2.5


class Worker:
    """A process of a job and its monitor; the test sends its heartbeats."""

    def __init__(self, index, num, hub, hub_fd=-1, **changes):
        self.process = subprocess.Popen(["sleep", "600"])
        settings = {
            "index": index,
            "pid": self.process.pid,
            "names": [f"host{i}, pid {i}" for i in range(num)],
            "hub": hub,
            "hub_fd": hub_fd,
            "token": "secret",
            "deadline_s": DEADLINE_S,
            **changes,
        }
        self.monitor = subprocess.Popen(
            # -S: it must not depend on the start-up file of a package.
            [sys.executable, "-I", "-S", monitor.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=[] if hub_fd < 0 else [hub_fd],
            text=True,
        )
        self._is_silent = threading.Event()
        self.settings = settings
        self.write(**settings)
        self._heart = threading.Thread(target=self._beat, daemon=True)
        self._heart.start()

    def _beat(self):
        while not self._is_silent.wait(0.3):
            self.write(alive=True)

    def write(self, **line):
        self.monitor.stdin.write(json.dumps(line) + "\n")
        self.monitor.stdin.flush()

    def stop(self):
        """Send no more heartbeats, as after SIGSTOP."""
        self._is_silent.set()
        self._heart.join()

    def die(self):
        """Close the pipe too, as after SIGKILL."""
        self.stop()
        self.process.kill()
        self.monitor.stdin.close()

    def finish(self):
        self.stop()
        self.write(finished=True)

    def read_message(self):
        """Return the message of the monitor; the process then ends."""
        line = self.monitor.stdout.readline()
        self.die()
        return json.loads(line)

    def report(self):
        assert self.monitor.wait(20) == 0
        return self.monitor.stderr.read()


def kill_all(workers):
    for worker in workers:
        worker.stop()
        worker.process.kill()
        worker.monitor.kill()


@pytest.fixture
def job():
    workers = []

    def start(num):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.set_inheritable(True)
            hub = listener.getsockname()
            workers.append(Worker(0, num, hub, listener.fileno()))
        workers.extend(Worker(index, num, hub) for index in range(1, num))
        time.sleep(1.0)
        return workers

    yield start
    kill_all(workers)


@pytest.mark.parametrize("lost", [0, 2])
def test_all_name_the_killed_process(job, lost):
    workers = job(3)
    workers[lost].die()
    others = [worker for worker in workers if worker is not workers[lost]]
    assert [worker.read_message()["index"] for worker in others] == [lost, lost]
    for worker in workers:
        report = worker.report()
        assert f"error: process {lost} of 3 (host{lost}, pid {lost}) was lost" in report
        assert "Start the job again" in report


@pytest.mark.parametrize("lost", [0, 1])
def test_a_silent_process_is_named_and_killed(job, lost):
    workers = job(2)
    workers[lost].process.send_signal(signal.SIGSTOP)
    workers[lost].stop()
    started = time.monotonic()
    assert workers[1 - lost].read_message()["lost"] == f"it sent nothing for {DEADLINE_S:g} s"
    assert time.monotonic() - started < 3 * DEADLINE_S
    assert workers[lost].process.wait(20) == -signal.SIGKILL
    assert all(f"process {lost} of 2" in worker.report() for worker in workers)


def test_a_failure_after_a_killed_process_names_the_killed_one(job):
    workers = job(3)
    workers[0].write(failed="Connection closed by peer")
    workers[1].die()
    assert workers[0].read_message()["index"] == 1


def test_a_failure_is_reported_to_all_with_its_reason(job):
    workers = job(2)
    workers[1].write(failed="ValueError: no such file")
    wanted = {"index": 1, "lost": "it failed: ValueError: no such file", "failed": True}
    assert workers[0].read_message() == wanted
    assert workers[1].read_message()["index"] == 1


def test_a_process_that_ignores_the_message_is_killed(job):
    workers = job(2)
    workers[1].die()
    assert workers[0].process.wait(20) == -signal.SIGKILL


@pytest.fixture
def hub():
    """Yield the address where process 0 of two waits, and a function that starts process 1."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.set_inheritable(True)
        address = listener.getsockname()
        workers = [Worker(0, 2, address, listener.fileno(), deadline_s=30)]

    def join():
        workers.append(Worker(1, 2, address, deadline_s=30))
        return workers

    yield address, join
    kill_all(workers)


def assert_dropped(stranger):
    stranger.settimeout(20)
    with contextlib.suppress(ConnectionResetError):  # the hub had not read all
        assert stranger.recv(100) == b""


def finish(workers):
    time.sleep(0.5)
    for worker in workers:
        worker.finish()
    assert [worker.report() for worker in workers] == ["", ""]


def test_strangers_are_disconnected(hub):
    address, join = hub
    hellos = (b"guess 1", b"secret 7", b"secret 0", b"secret")
    framed = [len(hello).to_bytes(4, "big") + hello for hello in hellos]
    for line in (*framed, b"GET / HTTP/1.1\r\n\r\n", b"x" * 10**6):
        with socket.create_connection(address) as stranger:
            try:
                stranger.sendall(line)
            except ConnectionError:
                continue  # the hub closed the connection early
            assert_dropped(stranger)
    finish(join())


def test_the_hub_closes_once_all_have_joined(hub):
    address, join = hub
    workers = join()
    deadline = time.monotonic() + 20

    def keep_connecting():
        while time.monotonic() < deadline:
            socket.create_connection(address).close()
            time.sleep(0.1)

    with pytest.raises(ConnectionRefusedError):
        keep_connecting()
    finish(workers)


@pytest.mark.parametrize("index", [0, 2])
def test_all_stop_when_one_is_asked_to_stop(job, index):
    workers = job(3)
    workers[index].write(alive=True, stop=True)
    workers[index].write(alive=True, stop=True)
    assert [json.loads(worker.monitor.stdout.readline()) for worker in workers] == [
        {"stop": True}
    ] * 3
    for worker in workers:
        worker.finish()
    assert [worker.report() for worker in workers] == ["", "", ""]

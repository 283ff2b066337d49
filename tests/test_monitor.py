"""The monitors of a job whose processes are `sleep`s: real processes, sockets and signals."""

import json
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from jaxrl import monitor

DEADLINE_S = 2.5


class Worker:
    """A process of a job and its monitor; its signs of life are ours to give."""

    def __init__(self, index, num, listener):
        self.process = subprocess.Popen(["sleep", "600"])
        settings = {
            "index": index,
            "pid": self.process.pid,
            "names": [f"host{i}, pid {i}" for i in range(num)],
            "hub": listener.getsockname(),
            "hub_fd": listener.fileno() if index == 0 else -1,
            "token": "secret",
            "deadline_s": DEADLINE_S,
        }
        self.monitor = subprocess.Popen(
            # -S: no package's start-up file may be what makes it start.
            [sys.executable, "-I", "-S", monitor.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=[listener.fileno()] if index == 0 else [],
            text=True,
        )
        self._is_silent = threading.Event()
        self.settings = settings
        self.say(**settings)
        threading.Thread(target=self._beat, daemon=True).start()

    def _beat(self):
        while not self._is_silent.wait(0.3):
            self.say(alive=True)

    def say(self, **line):
        self.monitor.stdin.write(json.dumps(line) + "\n")
        self.monitor.stdin.flush()

    def stop(self):
        """As SIGSTOP: no more signs of life."""
        self._is_silent.set()

    def die(self):
        """As SIGKILL: the pipe is closed too."""
        self.stop()
        time.sleep(0.4)
        self.process.kill()
        self.monitor.stdin.close()

    def finish(self):
        self.stop()
        time.sleep(0.4)
        self.say(finished=True)

    def told(self):
        """What its process reads once the monitor has spoken; the process then ends."""
        line = self.monitor.stdout.readline()
        self.die()
        return json.loads(line)

    def report(self):
        assert self.monitor.wait(20) == 0
        return self.monitor.stderr.read()


@pytest.fixture
def job():
    made = []

    def start(num):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.set_inheritable(True)
            made.extend(Worker(index, num, listener) for index in range(num))
        time.sleep(1.0)
        return made

    yield start
    for worker in made:
        worker.stop()
        worker.process.kill()
        worker.monitor.kill()


@pytest.mark.parametrize("lost", [0, 2])
def test_all_name_the_killed_process(job, lost):
    workers = job(3)
    workers[lost].die()
    others = [worker for worker in workers if worker is not workers[lost]]
    assert [worker.told()["index"] for worker in others] == [lost, lost]
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
    assert workers[1 - lost].told()["lost"] == f"it gave no sign of life for {DEADLINE_S:g} s"
    assert time.monotonic() - started < 3 * DEADLINE_S
    assert workers[lost].process.wait(20) == -signal.SIGKILL
    assert all(f"process {lost} of 2" in worker.report() for worker in workers)


def test_a_failure_over_a_killed_process_names_the_killed_one(job):
    workers = job(3)
    workers[0].say(failed="Connection closed by peer")
    workers[1].die()
    assert workers[0].told()["index"] == 1


def test_a_failure_is_told_with_its_reason(job):
    workers = job(2)
    workers[1].say(failed="ValueError: no such file")
    wanted = {"index": 1, "lost": "it failed: ValueError: no such file", "failed": True}
    assert workers[0].told() == wanted
    assert workers[1].told()["index"] == 1


def test_a_process_that_does_not_end_when_told_is_killed(job):
    workers = job(2)
    workers[1].die()
    assert workers[0].process.wait(20) == -signal.SIGKILL


def test_finished_processes_alarm_nobody(job):
    workers = job(3)
    for worker in workers:
        worker.finish()
    assert [worker.report() for worker in workers] == ["", "", ""]


def test_strangers_are_not_heard(job):
    workers = job(2)
    for said in (
        b'{"hello": "guess", "index": 1}\n{"lost": "nothing", "index": 1}\n',
        b"GET / HTTP/1.1\r\n\r\n",
        b"1\n",
        b"[]\n",
        b"null\n",
        b"{}\n",
        b"\xff\n",
    ):
        with socket.create_connection(workers[0].settings["hub"]) as stranger:
            stranger.sendall(said)
            assert stranger.recv(100) == b""
    for worker in workers:
        worker.finish()
        assert worker.report() == ""


@pytest.mark.parametrize("asked", [0, 2])
def test_all_are_told_that_one_is_asked_to_stop(job, asked):
    workers = job(3)
    workers[asked].say(alive=True, stop=True)
    workers[asked].say(alive=True, stop=True)
    assert [json.loads(worker.monitor.stdout.readline()) for worker in workers] == [
        {"stop": True}
    ] * 3
    for worker in workers:
        worker.finish()
    assert [worker.report() for worker in workers] == ["", "", ""]


def test_a_hub_that_cannot_be_reached_is_told():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        worker = Worker(1, 2, listener)
        worker.stop()
        listener.close()
    assert "cannot reach its monitor at 127.0.0.1:" in worker.monitor.communicate(timeout=20)[1]
    worker.process.kill()

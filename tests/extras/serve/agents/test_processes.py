"""Agent processes, including agents that hang, die, print or cannot be loaded."""

import contextlib
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time

import pytest

from jaxrl.extras.serve.agents import processes
from jaxrl.extras.serve.agents.processes import AgentProcesses, AgentSettings
from jaxrl.extras.serve.agents.runner import wrap_program
from tests.helpers import cancelled, processes_with

AGENT = """
import asyncio, os, subprocess, sys, time
print("loaded")

def hang(name):
    open(name, "w").close()
    time.sleep(3600)

def plays(task, *, base_url, api_key, model, **settings):
    if task.endswith("hangs"):
        hang(task)
    if task == "prints":
        print("x" * 100_000)
        sys.stderr.write("y" * 100_000)
    return [task, base_url, api_key, model, os.getpid(), settings]

async def blocks(task, *, base_url, api_key, model):
    if task.endswith("hangs"):
        hang(task)
    return 1

def reads(task, *, base_url, api_key, model):
    import json, agents_sibling
    return json.loads(agents_sibling.TEXT)

def chatters(task, *, base_url, api_key, model):
    for _ in range(100):
        sys.stdout.write("x" * 1_000_000)
    return 1

def runs(task, *, base_url, api_key, model):
    child = subprocess.run(["cat"], capture_output=True, timeout=60)
    return [child.returncode, child.stdout.decode()]
"""

READ_FILE = f"""FILE=$({sys.executable} -c \
'import json, sys; print(json.load(sys.stdin)["reward"]["file"])')"""
"""Shell command that reads the name of the reward file from the program's input."""


@pytest.fixture
def play(tmp_path):
    """Return a function that makes processes of agents, and a queue of ended episodes."""
    (tmp_path / "agent.py").write_text(AGENT)
    with contextlib.ExitStack() as stack:

        def make(name="", count=1, **changes):
            ended = queue.Queue()
            if name:
                changes["function"] = f"{tmp_path}/agent.py:{name}"
            settings = AgentSettings(**changes, processes=count)
            agents = AgentProcesses(settings, lambda *end: ended.put(end))
            stack.callback(agents.close)
            return agents, ended

        yield make


def episode(name, task=""):
    model = {"base_url": "http://x/r/1/v1", "api_key": "k", "model": "m"}
    return {"episode": name, "task": task or name, **model, "reward_url": "http://x/r/1/reward"}


def program_episode(name, **task):
    """Return an episode of a program, whose task is an object."""
    return episode(name, {"id": name, **task})


def is_gone(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().split()[2] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_episodes_are_divided_among_processes_and_may_print(play):
    agents, ended = play("plays", 2, settings={"a": [1, {"b": None}]})
    names = ["one", "prints", "three", "four"]
    for name in names:
        agents.start_episode(episode(name))
    results = {name: (value, why) for name, value, why in (ended.get(timeout=60) for _ in names)}
    assert {why for _, why in results.values()} == {""}
    for name in names:
        *given, _, settings = results[name][0]
        assert given == [name, "http://x/r/1/v1", "k", "m"]
        assert settings == {"a": [1, {"b": None}]}
    assert len({value[4] for value, _ in results.values()} - {os.getpid()}) == 2


def test_subprocesses_of_a_function_have_an_empty_input(play):
    agents, ended = play("runs")
    for name in "ab":
        agents.start_episode(episode(name))
    assert sorted(ended.get(timeout=60) for _ in "ab") == [("a", [0, ""], ""), ("b", [0, ""], "")]


def test_a_process_that_ignores_a_stop_is_killed(play, monkeypatch, tmp_path):
    monkeypatch.setattr(processes, "STOP_TIMEOUT_S", 0.5)
    agents, ended = play("blocks")
    agents.start_episode(episode("a", f"{tmp_path}/hangs"))
    assert until((tmp_path / "hangs").exists)
    agents.start_episode(episode("b", "fine"))
    agents.stop("a")
    time.sleep(0.6)
    agents.kill_unresponsive()
    results = [ended.get(timeout=60) for _ in range(2)]
    assert sorted(name for name, _, _ in results) == ["a", "b"]
    assert all("its process is gone" in why for _, _, why in results)
    agents.start_episode(episode("c"))
    assert ended.get(timeout=60) == ("c", 1, "")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"function": "no_such_module.play"}, "No module named 'no_such_module'"),
        ({"function": "no/such/file.py:play"}, "no/such/file.py"),
        ({"command": ("no-such-program", "x")}, "there is no program no-such-program"),
        ({"function": "math.pi"}, "math.pi is a float; expected a function"),
        ({"function": "math.pi", "python": "/bin/false"}, "ended with 1"),
    ],
    ids=str,
)
def test_an_agent_that_cannot_be_loaded_is_an_error_at_once(play, changes, why):
    agents, _ = play(**changes)
    with pytest.raises(ValueError, match=r"config\.env\.agents: ") as caught:
        agents.open()
    assert why in str(caught.value)


def test_an_agent_imports_its_siblings_and_an_error_names_its_line(play, tmp_path):
    (tmp_path / "agents_sibling.py").write_text("TEXT = 'no JSON'")
    agents, ended = play("reads")
    agents.start_episode(episode("a"))
    _, _, why = ended.get(timeout=60)
    line = AGENT[: AGENT.index("return json.loads")].count("\n") + 1
    assert why.startswith("JSONDecodeError")
    assert why.endswith(f"agent.py, line {line})")


def read_pid(file):
    """Wait for a process id in a file."""
    assert until(lambda: file.exists() and file.read_text().strip())
    return int(file.read_text())


def test_programs_end_with_all_their_subprocesses(play, tmp_path):
    script = f"""{READ_FILE}; setsid sleep 3600 & echo $! > {tmp_path}/child
sleep 3600 & echo $! > {tmp_path}/other; echo $$ > {tmp_path}/shell"""
    files = [tmp_path / name for name in ("child", "other", "shell")]
    waits, waits_ended = play(command=("sh", "-c", f"{script}; wait"))
    ends, ends_ended = play(command=("sh", "-c", f"{script}; echo 1 > $FILE"))

    def is_stopped(agents):
        agents.stop("a")
        return waits_ended.get(timeout=60)[0] == "a"

    for agents, end in (
        (waits, is_stopped),
        (waits, lambda agents: agents.close() is None),  # as at the end of the run
        (ends, lambda _: ends_ended.get(timeout=60) == ("a", 1, "")),
    ):
        agents.start_episode(program_episode("a"))
        pids = list(map(read_pid, files))
        assert end(agents)
        assert until(lambda pids=pids: all(map(is_gone, pids)))
        for file in files:
            file.unlink()


@pytest.mark.parametrize("turns", range(4))
def test_a_program_that_is_stopped_while_it_starts_leaves_no_process(turns, tmp_path):
    play = wrap_program(["sh", "-c", "sleep 3600 & wait"], str(tmp_path))
    assert cancelled(play(program_episode("a")), turns, 1)
    assert not processes_with(tmp_path)


@pytest.mark.parametrize("where", ["program", "call", "import"])
def test_agents_end_when_the_run_is_killed(tmp_path, where):
    hang = f"open('{tmp_path}/pid', 'w').write(str(os.getpid())); time.sleep(3600)"
    lines = ["import os, time", "async def play(task, **others):", f"    {hang}"]
    lines += [hang] if where != "call" else []
    (tmp_path / "agent.py").write_text("\n".join(lines))
    is_program = where == "program"
    file = f"{tmp_path}/agent.py"
    agent = {"command": (sys.executable, file)} if is_program else {"function": f"{file}:play"}
    run = f"""
import time
from jaxrl.extras.serve.agents.processes import AgentProcesses, AgentSettings
agents = AgentProcesses(AgentSettings(**{agent!r}), print)
agents.start_episode({program_episode("a")!r})
time.sleep(3600)
"""
    process = subprocess.Popen([sys.executable, "-c", run])
    pid = read_pid(tmp_path / "pid")
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert until(lambda: is_gone(pid), 10)


def test_a_process_that_reads_nothing_does_not_block_the_run(play, tmp_path):
    agents, ended = play("blocks")
    agents.start_episode(episode("a", f"{tmp_path}/hangs"))
    assert until((tmp_path / "hangs").exists)

    def start_many():
        for number in range(40):
            agents.start_episode(episode(str(number), "x" * 10_000))
        agents.stop("a")

    thread = threading.Thread(target=start_many, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    start = time.monotonic()
    agents.close()
    assert time.monotonic() - start < 15
    assert ended.get(timeout=60)[1] is None


def test_output_of_agents_is_limited(play):
    agents, ended = play("chatters")
    agents.open()
    agents.start_episode(episode("a"))
    while ended.empty():
        assert len(agents._processes[0].stderr_buffer) < 1_000_000
        time.sleep(0.001)
    assert ended.get() == ("a", 1, "")


@pytest.mark.parametrize(
    ("script", "value", "why"),
    [
        ("mkfifo $FILE", None, ""),
        ("ln -s /dev/zero $FILE", None, ""),
        ("head -c 2000 /dev/zero > $FILE", None, "is not JSON"),
        ("setsid sleep 3600 & echo 1 > $FILE", 1, ""),
    ],
)
def test_reward_files_of_all_kinds(play, tmp_path, monkeypatch, script, value, why):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    # It prints much before it reads its input, which is long.
    agents, ended = play(command=("sh", "-c", f"yes | head -c 2000000; {READ_FILE}; {script}"))
    agents.start_episode(program_episode("a", question="x" * 2_000_000))
    name, reward, error = ended.get(timeout=30)
    assert (name, reward) == ("a", value)
    assert why in error if why else not error
    agents.close()
    assert not list(tmp_path.glob("jaxrl-agents-*"))


def until(condition, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not (is_true := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return is_true

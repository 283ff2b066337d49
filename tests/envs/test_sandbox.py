"""Code of a model against the sandboxes: what it may not do, and what is left of it.

Nothing here runs unconfined. What could harm this machine is tried only where a harmless form of it
was refused before.
"""

import glob
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time

import pytest

from configs import debug_tiny
from jaxrl import toolbox
from jaxrl.envs import sandbox_child
from jaxrl.envs.base import ToolError
from jaxrl.envs.sandbox import BubblewrapTool, SubprocessTool
from jaxrl.envs.tools import MontyTool, run_one

LIMITS = {"timeout_s": 10.0, "max_memory": 96 * 2**20, "max_output": 20_000}
KINDS = {"monty": MontyTool, "bubblewrap": BubblewrapTool, "subprocess": SubprocessTool}
PROCESSES = ("bubblewrap", "subprocess")


@pytest.fixture(scope="module")
def tools():
    made = {}

    def tool(name):
        if name not in made:
            try:
                made[name] = KINDS[name](**LIMITS)
            except (ImportError, ValueError) as error:
                made[name] = error
        if isinstance(made[name], Exception):
            pytest.skip(f"{name} does not work here: {made[name]}")
        return made[name]

    return tool


@pytest.fixture(params=KINDS)
def tool(tools, request):
    return tools(request.param)


@pytest.fixture(params=PROCESSES)
def process_tool(tools, request):
    return tools(request.param)


def is_refused(answer):
    """An answer that is an error, or says of each try that it was refused."""
    kind = answer.partition(":")[0]
    return kind.endswith(("Error", "Exception")) or set(answer.split()) == {"refused"}


def trying(*lines):
    """Code that tries each line and says what was refused."""
    return "\n".join(
        f"try:\n    {line}\n    print({line!r})\nexcept BaseException:\n    print('refused')"
        for line in lines
    )


@pytest.mark.parametrize(
    ("code", "answer"),
    [
        ("print(6 * 7)\nprint('a', 'é')", "42\na é"),
        ("6 * 7", "No output"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("raise ValueError('one\\ntwo\\n')", "ValueError: one\ntwo"),
        ("x = [0] * 10**9", "MemoryError: limit exceeded"),
        ("def f(): return f()\nf()", "RecursionError: maximum recursion depth exceeded"),
        ("for _ in range(100): print('x' * 5000)", "MemoryError: limit exceeded"),
    ],
)
def test_all_sandboxes_answer_alike(tool, code, answer):
    assert tool.run(code).startswith(answer)


@pytest.mark.parametrize("name", KINDS)
def test_endless_loops_end(tools, name):
    tools(name)  # skips where it does not work
    quick = KINDS[name](**{**LIMITS, "timeout_s": 1.0})
    begin = time.monotonic()
    assert quick.run("while True: pass") == "TimeoutError: time limit exceeded"
    if name in PROCESSES:
        answer = quick.run("import os\nos.closerange(0, 100)\nwhile True: pass")
        assert answer == "TimeoutError: time limit exceeded"
    assert time.monotonic() - begin < 8


def test_memory_that_grows_is_refused(tool):
    assert tool.run("x = []\nwhile True: x.append('a' * 10**6)") == "MemoryError: limit exceeded"
    assert tool.run("print(1)") == "1"


def test_there_is_no_environment(tool, monkeypatch):
    monkeypatch.setenv("JAXRL_TEST_SECRET", "hunter2")
    code = "import os\nprint(os.environ.get('JAXRL_TEST_SECRET'), dict(os.environ))"
    assert "hunter2" not in tool.run(code)


def test_there_is_no_network(tool):
    for line in ("socket.socket()", "socket.create_connection(('127.0.0.1', 22), 1)"):
        assert is_refused(tool.run(f"import socket\n{line}"))


def test_files_outside_cannot_be_read_or_written(tools, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("hunter2")
    for name in ("monty", "bubblewrap"):
        tool = tools(name)
        for code in (
            f"print(open({str(secret)!r}).read())",
            f"open({str(secret)!r}, 'w').write('x')",
            f"import os\nprint(os.listdir({str(tmp_path)!r}))",
            "print(open('/etc/passwd').read())",
            "print(open('/proc/1/environ').read())",
            f"open({os.path.join(sys.prefix, 'planted')!r}, 'w').write('x')",
            "open('/usr/planted', 'w').write('x')",
            "open('/planted', 'w').write('x')",
            "open('/dev/shm/planted', 'w').write('x')",
        ):
            assert is_refused(answer := tool.run(code)), (name, code, answer)
    assert secret.read_text() == "hunter2"


def test_a_scratch_folder_can_be_used_and_is_bounded(process_tool):
    code = "open('a', 'w').write('hey')\nprint(open('a').read(), __import__('os').listdir('.'))"
    assert process_tool.run(code) == "hey ['a']"
    assert process_tool.run("import os\nprint(os.listdir('.'))") == "[]"
    big = "with open('a', 'wb') as file:\n    for _ in range(300): file.write(bytes(10**6))"
    assert is_refused(process_tool.run(big))


def test_there_are_no_more_processes_nor_threads(process_tool):
    """One fork first: only where it is refused, more are tried."""
    once = "import os\ntry: os.fork(); print('forked')\nexcept OSError: print('refused')"
    assert process_tool.run(once) == "refused"
    bomb = "import os\nfor _ in range(200):\n    try: os.fork()\n    except OSError: pass\nprint(1)"
    assert process_tool.run(bomb) == "1"
    assert process_tool.run("import os\nwhile True: os.fork()").startswith("PermissionError")
    tries = trying(
        "import subprocess; subprocess.Popen(['/bin/sleep', '30'])",
        "import os; os.system('sleep 30') and 1 / 0",
        "import os; os.posix_spawn('/bin/sleep', ['sleep', '30'], {})",
        "import threading; threading.Thread(target=print).start()",
        "import multiprocessing; multiprocessing.Process(target=print).start()",
        "import ctypes; assert ctypes.CDLL(None).syscall(435, 0, 0) != -1",
        "import ctypes; assert ctypes.CDLL(None).vfork() != -1",
    )
    assert set(process_tool.run(tries).split()) == {"refused"}


def test_nobody_can_be_signalled(process_tool):
    before = os.getpid()
    code = trying(
        f"import os; os.kill({before}, 0)",
        "import os; os.kill(os.getppid(), 9)",
        "import os; os.kill(-1, 9)",
        "import os; os.killpg(0, 9)",
        f"import os; os.pidfd_open({before})",
        "import signal, threading; signal.pthread_kill(threading.get_ident(), 9)",
    )
    assert set(process_tool.run(code).split()) == {"refused"}


def test_nothing_is_inherited(process_tool):
    """Neither files that are open here nor what is on the standard input."""
    with tempfile.TemporaryFile() as file:
        os.set_inheritable(file.fileno(), True)
        code = (
            "import os, sys\nfound = []\nfor fd in range(5, 200):\n"
            "    try: os.fstat(fd)\n    except OSError: continue\n    found.append(fd)\n"
            "print(found, sys.stdin.read() == '')"
        )
        assert process_tool.run(code) == "[] True"


def test_limits_cannot_be_raised_again(process_tool):
    code = trying(
        "import resource as r; r.setrlimit(r.RLIMIT_AS, (2**40, 2**40))",
        "import resource as r; r.setrlimit(r.RLIMIT_CPU, (2**20, 2**20))",
    )
    is_root = os.geteuid() == 0 and isinstance(process_tool, SubprocessTool)
    if is_root:
        pytest.skip("needs a process that is not the system's administrator")
    assert set(process_tool.run(code).split()) == {"refused"}


def test_standard_streams_may_be_closed(process_tool):
    for line in ("os.close(1)", "os.close(2)", "os.closerange(0, 100)", "sys.stdout.close()"):
        answer = process_tool.run(f"import os, sys\nprint(5, flush=True)\n{line}\nx = 1")
        assert answer == "5", line


@pytest.mark.parametrize(
    ("code", "answer"),
    [
        (
            "import sys; sys.setrecursionlimit(10**9)\nx = []\n"
            "for _ in range(10**5): x = [x]\nrepr(x)",
            "SystemError: the interpreter crashed",
        ),
        ("import os; os._exit(7)", "SystemError: the interpreter crashed"),
        ("import ctypes; ctypes.string_at(0)", "SystemError: the interpreter crashed"),
        ("import sys; print(5); sys.exit(1)", "5"),
        ("import sys; print('w', file=sys.stderr)", "w"),
        ("print('\\udc80')", "\ufffd"),
        ("x = '\udc80'", "UnicodeDecodeError"),
        ("raise ValueError('a' * 10**6)", "ValueError: " + "a" * 1988 + " .."),
        ("import os; os.write(3, b'forged')\nprint(1)", "1"),
        ("import json; print(json.dumps([1]))", "[1]"),
        ("class E(Exception):\n    def __str__(self): return 1 / 0\nraise E", "E"),
    ],
)
def test_odd_ends(process_tool, code, answer):
    found = process_tool.run(code)
    assert found.startswith(answer), found
    assert process_tool.run("print(1)") == "1"


def processes():
    """Command lines of what runs here as a sandbox."""
    lines = []
    for path in glob.glob("/proc/[0-9]*/cmdline"):
        try:
            with open(path, "rb") as file:
                lines.append(file.read())
        except OSError:
            continue
    return [line for line in lines if b"sandbox_child" in line and str(os.getpid()).encode()]


def left_behind(root):
    return sorted(os.listdir(root)), processes()


def check_nothing_is_left(tool, count, root):
    codes = [
        "print(1)",
        "while True: pass",
        "open('a', 'w').write('x')",
        "1 / 0",
        "print('x' * 10**5)",
    ]
    before = left_behind(root)
    for number in range(count):
        tool.run(codes[number % len(codes)])
    ends = time.monotonic() + 5
    while left_behind(root) != before and time.monotonic() < ends:
        time.sleep(0.05)
    assert left_behind(root) == before


@pytest.mark.parametrize("kind", [BubblewrapTool, SubprocessTool])
def test_nothing_is_left(tools, kind, tmp_path, monkeypatch):
    name = next(name for name, one in KINDS.items() if one is kind)
    tools(name)  # skips where it does not work
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    check_nothing_is_left(kind(**{**LIMITS, "timeout_s": 0.5}), 5, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [BubblewrapTool, SubprocessTool])
def test_two_hundred_runs_leave_nothing(tools, kind, tmp_path, monkeypatch):
    tools(next(name for name, one in KINDS.items() if one is kind))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    check_nothing_is_left(kind(**{**LIMITS, "timeout_s": 0.5}), 200, tmp_path)


def test_a_sandbox_that_does_not_work_is_refused_with_the_reason(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ValueError, match=r"no program bwrap\. bubblewrap needs its .*monty"):
        BubblewrapTool()
    monkeypatch.setattr(shutil, "which", lambda name: "/bin/false")
    with pytest.raises(ValueError, match=r"sandbox failed: status 1\. bubblewrap needs its"):
        BubblewrapTool()


def test_a_sandbox_that_stops_working_is_a_failure_of_the_tool(tools, monkeypatch):
    tool = tools("bubblewrap")
    monkeypatch.setattr(shutil, "which", lambda name: "/nowhere/bwrap")
    answer = run_one(tool, "print(1)")
    assert isinstance(answer, ToolError)
    assert str(answer).startswith("the Python sandbox failed: [Errno 2]")


@pytest.mark.parametrize("machine", sandbox_child.DENIED)
def test_the_filter_by_an_interpreter_of_its_own(machine):
    """Each number's fate, walked through as the system does."""
    program = sandbox_child.filter_program(machine)
    steps = [struct.unpack_from("HBBI", program, at) for at in range(0, len(program), 8)]

    def fate(architecture, number):
        at = value = 0
        while True:
            code, if_true, if_false, k = steps[at]
            at += 1
            if code == 0x20:
                value = {0: number, 4: architecture}[k]
            elif code == 0x06:
                return k
            else:
                is_true = value == k if code == 0x15 else value >= k
                at += if_true if is_true else if_false

    denied = sandbox_child.DENIED[machine]
    assert len(set(denied)) == len(denied)
    own = sandbox_child.ARCHITECTURES[machine]
    for number in range(600):
        assert fate(own, number) == (0x00050001 if number in denied else 0x7FFF0000)
    assert fate(own, 0x40000000 + 1) == 0x00050001
    assert fate(0x40000003, 1) == 0x80000000


def test_packages_are_there(tools):
    tools("bubblewrap")
    roomy = BubblewrapTool(max_memory=2 * 2**30, timeout_s=20)
    assert roomy.run("import numpy\nprint(numpy.ones(3).sum())") == "3.0"


def test_the_child_says_what_limits_it_could_not_set():
    command = [sys.executable, "-I", sandbox_child.__file__, "{"]
    done = subprocess.run(command, input=b"print(1)", capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (1, b"")
    assert sandbox_child.READY not in done.stderr


@pytest.mark.parametrize("name", PROCESSES)
def test_the_configuration_names_sandbox_and_limits(tools, name):
    tools(name)  # skips where it does not work
    config = debug_tiny.get_config()
    settings = {"sandbox": name, "timeout_s": 1.5, "memory_mib": 200.0, "max_output": 1000}
    config.env.search.python.update(settings)
    config.env.search.tools = ("python",)
    [offer] = toolbox.tools(config)
    tool = offer.make()
    assert (offer.name, type(tool)) == ("python", KINDS[name])
    assert tool.run("print('x' * 900)") == "x" * 900
    assert tool.run("print('x' * 1100)") == "MemoryError: limit exceeded"
    assert tool.run("x = bytes(150 * 2**20)\nprint(1)") == "1"
    assert tool.run("x = bytes(210 * 2**20)\nprint(1)") == "MemoryError: limit exceeded"
    assert tool.run("while True: pass") == "TimeoutError: time limit exceeded"


def test_the_longest_time_that_a_setting_allows(tool):
    assert type(tool)(**{**LIMITS, "timeout_s": 1e9}).run("print(1 + 1)") == "2"

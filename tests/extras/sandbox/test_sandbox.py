"""Sandboxes for code written by a model: denied operations, limits, and cleanup.

All code runs in a sandbox. Harmful code runs only after the sandbox refused a harmless variant.
"""

import glob
import os
import platform
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import time

import pytest

from configs import debug_tiny
from jaxrl.envs.base import ToolError
from jaxrl.envs.tools.base import run_call
from jaxrl.envs.tools.monty import MontyTool
from jaxrl.extras.sandbox import child as sandbox_child
from jaxrl.extras.sandbox import tools as sandbox
from jaxrl.extras.sandbox.tools import BubblewrapTool
from tests.helpers import resolved

LIMITS = {"timeout_s": 10.0, "max_memory": 96 * 2**20, "max_output": 20_000}


class ChildAlone(BubblewrapTool):
    """The child process without bubblewrap, protected only by limits and the system-call filter."""

    child = sandbox_child.__file__

    def list_fds(self):
        return ()

    def build_command(self, program):
        return [sys.executable, *program]


KINDS = {"monty": MontyTool, "bubblewrap": BubblewrapTool, "child": ChildAlone}
PROCESSES = ("bubblewrap", "child")


@pytest.fixture(scope="module")
def tools():
    cache = {}

    def tool(name):
        if name not in cache:
            try:
                cache[name] = KINDS[name](**LIMITS)
            except (ImportError, ValueError) as error:
                if name == "child" and sys.platform == "linux":
                    raise  # it needs nothing that Linux does not have
                cache[name] = error
        if isinstance(cache[name], Exception):
            pytest.skip(f"{name} does not work here: {cache[name]}")
        return cache[name]

    return tool


@pytest.fixture(params=KINDS)
def tool(tools, request):
    return tools(request.param)


@pytest.fixture(params=PROCESSES)
def process_tool(tools, request):
    return tools(request.param)


def is_refused(answer):
    """Return True if the answer is an error, or reports that each attempt was refused."""
    kind = answer.partition(":")[0]
    return kind.endswith(("Error", "Exception")) or set(answer.split()) == {"refused"}


def trying(*lines):
    """Return code that tries each line and reports what was refused."""
    return "\n".join(
        f"try:\n    {line}\n    print({line!r})\nexcept BaseException:\n    print('refused')"
        for line in lines
    )


@pytest.mark.parametrize(
    ("code", "answer"),
    [
        ("print(6 * 7)\nprint('a', 'é')", "42\na é"),
        ("6 * 7", "No output"),
        ("raise ValueError('one\\ntwo\\n')", "ValueError: one\ntwo"),
        ("x = []\nwhile True: x.append('a' * 10**6)", "MemoryError: limit exceeded"),
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


def test_a_scratch_folder_can_be_used_and_is_bounded(tools):
    tool = tools("bubblewrap")
    code = """
import os, shutil
with open(os.devnull, "w") as file: file.write("x")
assert len(open("/dev/urandom", "rb").read(3)) == len(os.urandom(3)) == 3
open("a", "w").write("hey")
os.chmod("a", 0o700); os.mkdir("b"); shutil.copy2("a", "b/a"); shutil.move("a", "d")
print(open("d").read(), oct(os.stat("b/a").st_mode), sorted(os.listdir()))
"""
    assert tool.run(code) == "hey 0o100700 ['b', 'd']"
    assert tool.run("import os\nprint(os.listdir('.'))") == "[]"
    big = "with open('a', 'wb') as file:\n    for _ in range(300): file.write(bytes(10**6))"
    assert is_refused(tool.run(big))


def test_there_are_no_more_processes_nor_threads(process_tool):
    """Try one fork first; try more only if the first is refused."""
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


def test_what_all_users_of_a_machine_share_is_not_taken(process_tool):
    number = {"x86_64": 206, "aarch64": 0}[platform.machine()]  # of `io_setup`
    code = trying(
        "import fcntl, os; fcntl.flock(os.open('/usr/bin/env', os.O_RDONLY), fcntl.LOCK_EX)",
        "import ctypes; context = ctypes.c_ulong()\n"
        f"    assert ctypes.CDLL(None).syscall({number}, 1, ctypes.byref(context)) != -1",
    )
    assert set(process_tool.run(code).split()) == {"refused"}


def test_nothing_is_inherited(process_tool):
    """Neither open files nor the standard input are inherited."""
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
    is_root = os.geteuid() == 0 and isinstance(process_tool, ChildAlone)
    if is_root:
        pytest.skip("needs a process that is not the system's administrator")
    assert set(process_tool.run(code).split()) == {"refused"}


def test_standard_streams_may_be_closed(process_tool):
    for line in ("os.closerange(0, 100)", "sys.stdout.close()"):
        answer = process_tool.run(f"import os, sys\nprint(5, flush=True)\n{line}\nx = 1")
        assert answer == "5", line


@pytest.mark.parametrize(
    ("code", "answer"),
    [
        (
            "import sys; sys.setrecursionlimit(10**9)\nx = []\n"
            "for _ in range(10**5): x = [x]\nrepr(x)",
            # Since 3.12 Python watches the C stack itself.
            "RecursionError" if sys.version_info >= (3, 12) else "SystemError: the interpreter",
        ),
        ("import ctypes; ctypes.string_at(0)", "SystemError: the interpreter crashed"),
        ("print('\\udc80')", "\ufffd"),
        ("raise ValueError('a' * 10**6)", "ValueError: " + "a" * 1988 + " .."),
        ("import os; os.write(3, b'forged')\nprint(1)", "1"),
        ("class E(Exception):\n    def __str__(self): return 1 / 0\nraise E", "E"),
    ],
)
def test_odd_ends(process_tool, code, answer):
    printed = process_tool.run(code)
    assert printed.startswith(answer), printed


def processes():
    """Return the command lines of running sandbox processes."""
    lines = []
    for path in glob.glob("/proc/[0-9]*/cmdline"):
        try:
            with open(path, "rb") as file:
                lines.append(file.read())
        except OSError:
            continue
    return [
        line for line in lines if re.search(rb"sandbox.child", line) and str(os.getpid()).encode()
    ]


def left_behind(root):
    return sorted(os.listdir(root)), processes()


def test_nothing_is_left(tools, tmp_path, monkeypatch):
    tools("bubblewrap")  # skips where it does not work
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    tool = BubblewrapTool(**{**LIMITS, "timeout_s": 0.5})
    codes = [
        "print(1)",
        "while True: pass",
        "open('a', 'w').write('x')",
        "1 / 0",
        "print('x' * 10**5)",
    ]
    before = left_behind(tmp_path)
    for code in codes:
        tool.run(code)
    wait_until(lambda: left_behind(tmp_path) == before, seconds=5)


MARKS = """
import os, stat
def marks(path):
    found = os.stat(path)
    return stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid
"""

ON_ANY = (
    "os.chmod(path, marks(path)[0])",
    "os.fchmod(os.open(path, os.O_RDONLY), marks(path)[0])",
    "os.chown(path, *marks(path)[1:])",
    "os.chown(path, -1, -1)",
    "os.fchown(os.open(path, os.O_RDONLY), -1, -1)",
    "os.utime(path, ns=(os.stat(path).st_atime_ns, os.stat(path).st_mtime_ns))",
    "os.utime(path)",
    "os.utime(os.open(path, os.O_RDONLY))",
    "os.setxattr(path, 'user.jaxrl', b'')",
    "os.removexattr(path, 'system.posix_acl_access')",
    "import ctypes; assert not ctypes.CDLL(None).mount(None, path.encode(), None, 4096 | 32, None)",
    "import ctypes; assert not ctypes.CDLL(None).umount2(path.encode(), 2)",
)
"""Statements that write to `path`, but change at most its timestamps."""

ON_FILES = (
    "os.close(os.open(path, os.O_WRONLY | os.O_APPEND))",
    "os.truncate(path, os.stat(path).st_size)",
    "import fcntl; fcntl.fcntl(os.open(path, os.O_RDONLY), fcntl.F_SETLEASE, fcntl.F_RDLCK)",
    "import fcntl; f = os.open(path, 0); n = fcntl.ioctl(f, 0x80086601, bytes(8)); "
    "fcntl.ioctl(f, 0x40086602, n)",
)

ON_FOLDERS = (
    "os.mkdir(path + '/planted')",
    "os.mkfifo(path + '/planted')",
    "os.symlink('x', path + '/planted')",
    "open(path + '/planted', 'x')",
)

ON_THE_SYSTEM = (
    "os.setuid(0)",
    "os.setgid(0)",
    "os.setgroups([0])",
    "os.mknod('/tmp/device', 0o666 | stat.S_IFCHR, os.makedev(1, 3))",
    "import socket; socket.sethostname('sandbox')",
    "import time; time.clock_settime(0, time.clock_gettime(0))",
    "os.listdir('/proc')",
    "os.listdir('/sys')",
)


def state(path):
    """Return the metadata of a file that a write could change."""
    stat = os.stat(path)
    times = (stat.st_mtime_ns, stat.st_ctime_ns)
    return stat.st_mode, stat.st_uid, stat.st_gid, *times, os.listxattr(path)


@pytest.fixture
def as_root(tools, monkeypatch):
    """A sandbox started by root, and a world-writable folder of the host that the sandbox sees."""
    if not sandbox._is_host_root():
        pytest.skip("needs a process that is the system's administrator")
    tools("bubblewrap")
    folder = tempfile.mkdtemp(dir="/var/tmp", prefix="jaxrl-test-")  # /tmp inside is another
    try:
        monkeypatch.setattr(sys, "prefix", folder)
        monkeypatch.setattr(sys, "executable", os.path.realpath(sys.executable))
        for name, mode in (("open", 0o666), ("secret", 0o600)):
            with open(os.path.join(folder, name), "w") as file:
                file.write("hunter2")
            os.chmod(file.name, mode)
        os.chmod(folder, 0o777)
        yield BubblewrapTool(**LIMITS), folder
    finally:
        shutil.rmtree(folder)


def change_child(monkeypatch, folder, old, new):
    """Run a copy of the child in which `new` replaces `old`."""
    with open(sandbox_child.__file__) as file, open(os.path.join(folder, "child.py"), "w") as copy:
        text = file.read()
        assert text.count(old) == 1
        copy.write(text.replace(old, new))
    monkeypatch.setattr(sandbox, "CHILD", copy.name)


@pytest.mark.parametrize("filtered", [True, False])
def test_nothing_that_root_could_write_is_written(as_root, filtered, monkeypatch):
    """Check that all attempts to write are refused. Attempts that succeed do no harm.

    Without the system-call filter, mounts and permissions must suffice.
    """
    tool, folder = as_root
    if not filtered:
        change_child(monkeypatch, folder, "        deny_calls()\n", "")
    devices = ["/dev/null", "/dev/zero", "/dev/urandom"]
    files = [os.path.join(folder, "open"), os.__file__, tool.child]
    folders = [folder, "/usr", sys.base_prefix, "/", "/dev"]
    watched = [*devices, *files[:2], sandbox_child.__file__, *folders]
    before = {path: state(path) for path in watched}
    try:
        for path in (*devices, *files, *folders):
            tries = ON_ANY
            tries += ON_FILES if path in files else ON_FOLDERS if path in folders else ()
            answer = tool.run(f"{MARKS}path = {path!r}\n{trying(*tries)}")
            assert answer.split("\n") == ["refused"] * len(tries), (path, answer)
        answer = tool.run(MARKS + trying(*ON_THE_SYSTEM))
        assert answer.split("\n") == ["refused"] * len(ON_THE_SYSTEM), answer
        assert {path: state(path) for path in watched} == before
    finally:
        for path, (mode, user, group, *_) in before.items():
            if os.stat(path)[:1] + os.stat(path)[4:6] != (mode, user, group):
                os.chown(path, user, group)
                os.chmod(path, mode & 0o7777)


def test_root_keeps_what_only_it_may_read(as_root):
    tool, folder = as_root
    code = f"print(open({os.path.join(folder, 'open')!r}).read())"
    assert tool.run(code) == "hunter2"
    answer = tool.run(code.replace("/open'", "/secret'"))
    assert answer.startswith("PermissionError"), answer


def test_a_user_whom_a_container_calls_root_is_an_ordinary_user(monkeypatch):
    for user, owner, expected in ((0, 0, True), (0, 65534, False), (1000, 0, False)):
        found = os.stat_result((0o20666, 0, 0, 1, owner, owner, 0, 0, 0, 0))
        with monkeypatch.context() as patch:
            patch.setattr(os, "geteuid", lambda user=user: user)
            patch.setattr(os, "stat", lambda path, found=found: found)
            owns = sandbox._is_host_root()
        assert owns == expected


def test_root_is_refused_where_it_cannot_be_given_up(monkeypatch):
    """Code is never run as root instead."""
    monkeypatch.setattr(sandbox, "_is_host_root", lambda: True)
    monkeypatch.setattr(shutil, "which", lambda name: "/bin/false")
    monkeypatch.setattr(sandbox, "_open_root_namespace", lambda: os.open("/nowhere", os.O_RDONLY))
    with pytest.raises(ValueError, match=r"No such file.*As root it also needs .*another user"):
        BubblewrapTool()


def test_a_sandbox_dies_with_the_process_that_started_it(tools, tmp_path):
    tools("bubblewrap")
    code = (
        "from jaxrl.extras.sandbox.tools import BubblewrapTool\n"
        "tool = BubblewrapTool(timeout_s=60)\nprint('made', flush=True)\n"
        "tool.run('import time\\ntime.sleep(30)')"
    )
    before = len(processes())
    command = [sys.executable, "-c", code]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}  # nobody is left to clear it
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        try:
            assert process.stdout.readline() == b"made\n"
            wait_until(lambda: len(processes()) >= before + 3)  # two of bwrap's, and Python
        finally:
            process.kill()
    wait_until(lambda: len(processes()) == before)


def wait_until(is_so, seconds=10):
    ends = time.monotonic() + seconds
    while not is_so() and time.monotonic() < ends:
        time.sleep(0.05)
    assert is_so()


def test_a_sandbox_that_does_not_work_is_refused_with_the_reason(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ValueError, match=r"no program bwrap'.* bubblewrap needs its .*monty"):
        BubblewrapTool()


def test_a_sandbox_that_stops_working_is_a_failure_of_the_tool(tools, monkeypatch):
    tool = tools("bubblewrap")
    monkeypatch.setattr(shutil, "which", lambda name: "/nowhere/bwrap")
    answer = run_call(tool, "print(1)")
    assert isinstance(answer, ToolError)
    assert str(answer).startswith("the Python sandbox failed: [Errno 2]")


@pytest.mark.parametrize("machine", sandbox_child.DENIED_SYSCALLS)
def test_the_filter_by_an_interpreter_of_its_own(machine):
    """Each number's fate, walked through as the system does."""
    program = sandbox_child.build_seccomp_filter(machine)
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

    denied = sandbox_child.DENIED_SYSCALLS[machine]
    assert len(set(denied)) == len(denied)
    own = sandbox_child.ARCHITECTURES[machine]
    for number in range(600):
        assert fate(own, number) == (0x00050001 if number in denied else 0x7FFF0000)
    assert fate(own, 0x40000000 + 1) == 0x00050001
    assert fate(0x40000003, 1) == 0x80000000


def test_the_configuration_names_sandbox_and_limits(tools):
    tools("bubblewrap")  # skips where it does not work
    config = debug_tiny.get_config()
    settings = {"sandbox": "bubblewrap", "timeout_s": 1.5, "memory_mib": 200.0, "max_output": 1000}
    config.env.search.python.update(settings)
    config.env.search.tools = ("python",)
    [offer] = resolved(config).tools
    tool = offer.make()
    assert (offer.name, type(tool)) == ("python", BubblewrapTool)
    assert tool.run("print('x' * 1100)") == "MemoryError: limit exceeded"
    assert tool.run("x = bytes(150 * 2**20)\nprint(1)") == "1"
    assert tool.run("x = bytes(210 * 2**20)\nprint(1)") == "MemoryError: limit exceeded"
    assert tool.run("while True: pass") == "TimeoutError: time limit exceeded"

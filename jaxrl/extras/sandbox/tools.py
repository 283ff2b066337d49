"""Python tool that runs each snippet in a sandboxed process."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from jaxrl.envs.base import ToolError
from jaxrl.envs.tools.base import MAX_ERROR, PYTHON_DESCRIPTION, Tool
from jaxrl.extras.sandbox.child import EXCEPTION_STATUS, READY
from jaxrl.utils.child_process import ChildProcess, ChildTimeoutError

CHILD = Path(__file__).with_name("child.py")

TIMEOUT = "TimeoutError: time limit exceeded"
MEMORY = "MemoryError: limit exceeded"
_CRASH = "SystemError: the interpreter crashed"

_ENVIRONMENT = {
    **{"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0", "MPLBACKEND": "agg"},
    # Linear algebra libraries would start one thread per core.
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
}
"""All environment variables of the sandboxed process."""

NOBODY = 65534
"""User and group id under which the code runs in bubblewrap."""

_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")

_CLONE_NEWUSER = 0x10000000

_KILL_TIMEOUT_S = 5.0
"""Seconds to wait for a killed process to exit."""

_SETUP_HINT = (
    "bubblewrap needs its program bwrap and user namespaces (a container may forbid them, and so "
    "may the sysctls kernel.unprivileged_userns_clone and "
    "kernel.apparmor_restrict_unprivileged_userns); allow them, or set "
    "config.env.search.python.sandbox='monty'"
)
_ROOT_SETUP_HINT = (
    ". As root it also needs the capabilities CAP_SETUID, CAP_SETGID and CAP_SETFCAP, the user "
    f"{NOBODY}, and libraries that this user may read; or start the run as another user"
)


class BubblewrapTool(Tool):
    """Python tool for untrusted code, sandboxed by bubblewrap.

    Each snippet runs in a new process (https://github.com/containers/bubblewrap) with limits on
    time, memory and output. The code can read the system's programs and libraries, and this
    interpreter with its packages; it can write to a temporary folder in memory. It has no network,
    capabilities, open files or standard input, sees no other processes, and gets only the
    environment variables in `_ENVIRONMENT`. A seccomp filter denies new processes and threads,
    sockets, and signals to other processes.

    If root starts the run, root sets up the sandbox, makes its devices read-only, and switches to
    `NOBODY` before the code runs. The switch also applies on the host.
    """

    name = "python"
    blank = "No output"
    argument = "code"
    description = PYTHON_DESCRIPTION
    max_threads = 8
    child = "/sandbox_child.py"
    """Path of `CHILD` inside the sandbox."""

    def __init__(
        self,
        *,
        timeout_s: float = 5.0,
        max_memory: int = 64 * 2**20,
        max_output: int = 100_000,
    ) -> None:
        """Check that the sandbox works on this machine by running a snippet.

        Args:
            timeout_s: Time limit per snippet, in seconds.
            max_memory: Limit on a snippet's address space and on the size of its files, in bytes.
            max_output: Limit on a snippet's output, in bytes.

        Raises:
            ValueError: The sandbox does not work on this machine.
        """
        self._timeout_s, self._max_memory, self._max_output = timeout_s, max_memory, max_output
        try:
            output = self.run("print(6 * 7)")
        except ToolError as error:
            output = str(error)
        if output != "42":
            hint = _SETUP_HINT + _ROOT_SETUP_HINT * _is_host_root()
            raise ValueError(f"the sandbox returns {output!r} for print(6 * 7). {hint}")

    def list_fds(self) -> tuple[int, ...]:
        """Return the file descriptors that the command of `build_command` needs."""
        return (_open_root_namespace(),) if _is_host_root() else ()

    def build_command(self, program: list[str]) -> list[str]:
        """Build the command that runs a Python program in the sandbox.

        Args:
            program: Interpreter arguments, with paths inside the sandbox.
        """
        bwrap = shutil.which("bwrap")
        if bwrap is None:
            raise ToolError("the Python sandbox failed: there is no program bwrap")
        mounts = ["--ro-bind", "/usr", "/usr"]
        for path in ("/bin", "/sbin", "/lib", "/lib32", "/lib64"):
            if os.path.islink(path):
                mounts += ["--symlink", os.readlink(path), path]
            elif os.path.isdir(path):
                mounts += ["--ro-bind", path, path]
        for path in dict.fromkeys((sys.base_prefix, sys.prefix)):
            if not path.startswith("/usr"):
                # Without `--dir`, only root could enter the parent folders of a bind.
                mounts += ["--dir", os.path.dirname(path), "--ro-bind", path, path]
        mounts += ["--dir", "/dev"]
        for path in _DEVICES:
            mounts += ["--dev-bind", path, path]
        if _is_host_root():
            # The child makes the devices read-only, since devices in bwrap's read-only binds
            # cannot be opened. Then it switches to another user.
            user = ["--userns", str(_open_root_namespace())]
            for capability in ("CAP_SYS_ADMIN", "CAP_SETUID", "CAP_SETGID"):
                user += ["--cap-add", capability]
            program = [*program, json.dumps({"user": NOBODY, "devices": _DEVICES})]
        else:
            user = ["--unshare-user", "--uid", str(NOBODY), "--gid", str(NOBODY)]
        return [
            *(bwrap, "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"),
            *("--unshare-cgroup-try", "--die-with-parent", "--new-session"),
            *("--hostname", "sandbox", "--cap-drop", "ALL", *user),
            *("--clearenv", *(x for item in _ENVIRONMENT.items() for x in ("--setenv", *item))),
            *mounts,
            *("--ro-bind", str(CHILD), self.child),
            *("--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"),
            *("--perms", "1777", "--size", str(self._max_memory), "--tmpfs", "/tmp"),
            *("--remount-ro", "/"),
            *("--chdir", "/tmp", "--", sys.executable, *program),
        ]

    def run(self, code: str, /) -> str:
        """Run the code; return its output, or the type and message of its error.

        If the system kills the process, for example when memory runs out, the code runs again in
        the remaining time. A second kill counts as a crash.
        """
        deadline = time.monotonic() + self._timeout_s
        try:
            for is_retry in (False, True):
                output = self._run_once(code, deadline, is_retry)
                if output is not None:
                    return output
        except OSError as error:
            raise ToolError(f"the Python sandbox failed: {error}") from error
        return _CRASH

    def _run_once(self, code: str, deadline: float, is_retry: bool) -> str | None:
        """Run the code once; return its output, or None if the process was killed."""
        limits = {
            **{"AS": self._max_memory, "FSIZE": self._max_memory, "CORE": 0, "NPROC": 0},
            **{"CPU": int(self._timeout_s) + 2, "NOFILE": 64, "MSGQUEUE": 0, "MEMLOCK": 0},
        }
        with tempfile.TemporaryFile() as source:
            source.write(code.encode("utf-8", "surrogatepass"))
            source.seek(0)
            child = ChildProcess(
                self.build_command(["-I", self.child, json.dumps(limits)]),
                description="the process",
                max_unread_bytes=self._max_output,
                stdin=source,
                stderr=subprocess.PIPE,
                env=_ENVIRONMENT,
                pass_fds=self.list_fds(),
            )
        with child:
            return self._read_output(child, deadline, is_retry)

    def _read_output(self, child: ChildProcess, deadline: float, is_retry: bool) -> str | None:
        kill_reason = self._wait_or_kill(child, deadline)
        status = child.wait(_KILL_TIMEOUT_S)
        if kill_reason == TIMEOUT and is_retry:  # possibly before the code started
            return TIMEOUT
        # Text before `READY` is a sandbox error; text after it is an error of the code.
        before, _, error = child.stderr_buffer.partition(READY)
        if before or not child.stderr_buffer.startswith(READY):
            if kill_reason == TIMEOUT:
                raise ToolError("the Python sandbox failed: it did not start in time")
            startup_error = (
                child.stderr_buffer.decode("utf-8", "replace").strip() or f"status {status}"
            )
            raise ToolError(f"the Python sandbox failed: {startup_error[:MAX_ERROR]}")
        if kill_reason:
            return kill_reason
        text = child.stdout_buffer.decode("utf-8", "replace")
        if status == 0:
            return text.strip("\n") or self.blank
        if status in (-signal.SIGKILL, 128 + signal.SIGKILL):
            return None
        if status != EXCEPTION_STATUS:
            return _CRASH
        message = error.decode("utf-8", "replace").rstrip()
        message = message if len(message) <= MAX_ERROR else message[:MAX_ERROR] + " .."
        return MEMORY if message.startswith("MemoryError") else message or "SystemError"

    def _wait_or_kill(self, child: ChildProcess, deadline: float) -> str:
        """Wait for the process; kill it at time `deadline`, or if it prints too much.

        Returns:
            `TIMEOUT`, `MEMORY` (too much output), or "" if it was not killed.
        """
        kill_reason = MEMORY
        try:
            if not child.read_until(
                lambda: len(child.stdout_buffer) > self._max_output, deadline - time.monotonic()
            ):
                # The process may close both streams long before it exits.
                child.wait(max(deadline - time.monotonic(), 0))
                return ""
        except ChildTimeoutError:
            kill_reason = TIMEOUT
        child.kill()
        with contextlib.suppress(ChildTimeoutError):
            child.read_until(lambda: False, _KILL_TIMEOUT_S)
        return kill_reason


def _is_host_root() -> bool:
    """Return True if this process is root on the host, not only in a user namespace."""
    return os.geteuid() == 0 and os.stat(os.devnull).st_uid == 0


@functools.cache
def _open_root_namespace() -> int:
    """Create a user namespace with root and `NOBODY`; return its file descriptor.

    bwrap itself maps only the current user into its namespace. If root starts bwrap, the sandboxed
    process is the host's root, whatever its user id in the namespace, and so owns the host's
    devices and programs.

    Raises:
        OSError: Root is not allowed to create such a namespace on this machine.
    """
    program = (
        "import ctypes, json, os\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        f"failed = libc.unshare({_CLONE_NEWUSER})\n"
        "print(json.dumps({'failed': failed and os.strerror(ctypes.get_errno())}), flush=True)\n"
        "os.read(0, 1)"
    )
    command = [sys.executable, "-I", "-S", "-c", program]
    with ChildProcess(command, description="the user-namespace check", stderr=None) as child:
        if failed := child.readline()["failed"]:
            raise OSError(f"root may not make a user namespace: {failed}")
        try:
            for name in ("uid_map", "gid_map"):
                Path(f"/proc/{child.pid}/{name}").write_text(f"0 0 1\n{NOBODY} {NOBODY} 1\n")
        except OSError as error:
            raise OSError(f"root may not map users into a namespace: {error.strerror}") from error
        return os.open(f"/proc/{child.pid}/ns/user", os.O_RDONLY)

"""Sandbox entry point: set limits, then run the code from stdin.

The program writes `READY` to stderr once all limits are set, followed by the error message if the
code raises an exception.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import resource
import struct
import sys

READY = b"ready\n"

EXCEPTION_STATUS = 3
"""Exit status of code that raised an exception."""

DENIED_SYSCALLS = {
    # New processes and threads; signaling and inspecting other processes; sockets and their
    # substitutes; memory outside the limits; namespaces, mounts and keys; owners, extended
    # attributes and flags of files; device nodes and named pipes; the system log; locks on shared
    # files; asynchronous reads, which count against a limit that all users share.
    "x86_64": (
        *(56, 57, 58, 435, 62, 200, 234, 129, 297, 424, 434, 438, 101, 310, 311, 440),
        *(41, 53, 425, 426, 427, 319, 447, 29, 68, 64, 240),
        *(272, 308, 165, 166, 155, 161, 321, 298, 250, 248, 249, 323, 304),
        *(428, 429, 430, 431, 432, 433, 442, 467, 92, 93, 94, 260),
        *(188, 189, 190, 197, 198, 199, 463, 466, 469, 133, 259, 103, 73, 206),
    ),
    "aarch64": (
        *(220, 435, 129, 130, 131, 138, 240, 424, 434, 438, 117, 270, 271, 440),
        *(198, 199, 425, 426, 427, 279, 447, 194, 186, 190, 180),
        *(97, 268, 40, 39, 41, 51, 280, 241, 219, 217, 218, 282, 265),
        *(428, 429, 430, 431, 432, 433, 442, 467, 54, 55),
        *(5, 6, 7, 14, 15, 16, 463, 466, 469, 33, 116, 32, 0),
    ),
}
"""Numbers of the denied system calls by machine, from Linux's `asm/unistd.h`."""

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32 = 0x40000000  # lowest number of an x32 system call on x86_64


def build_seccomp_filter(machine: str) -> bytes:
    """Build a seccomp filter, a sequence of `struct sock_filter` (`linux/filter.h`).

    System calls of a different architecture kill the process; calls in `DENIED_SYSCALLS` fail with
    EPERM.
    """
    load, jump_equal, jump_greater_equal, ret = 0x20, 0x15, 0x35, 0x06
    allow, deny, kill = 0x7FFF0000, 0x00050000 | 1, 0x80000000
    numbers = DENIED_SYSCALLS[machine]
    instructions = [(load, 0, 0, 4), (jump_equal, 1, 0, ARCHITECTURES[machine]), (ret, 0, 0, kill)]
    instructions += [(load, 0, 0, 0), (jump_greater_equal, len(numbers) + 1, 0, _X32)]
    instructions += [(jump_equal, len(numbers) - i, 0, number) for i, number in enumerate(numbers)]
    instructions += [(ret, 0, 0, allow), (ret, 0, 0, deny)]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in instructions)


def install_seccomp_filter() -> None:
    """Install the seccomp filter for this process and its descendants.

    Raises:
        OSError: The kernel does not support the filter.
    """
    machine = platform.machine()
    if machine not in DENIED_SYSCALLS:
        raise OSError(f"no seccomp filter is known for {machine}")
    program = build_seccomp_filter(machine)
    data = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(data))
    libc = ctypes.CDLL(None, use_errno=True)
    set_no_new_privs, set_seccomp, mode_filter = 38, 22, 2
    for arguments in ((set_no_new_privs, 1, 0, 0, 0), (set_seccomp, mode_filter, header, 0, 0)):
        if libc.prctl(*arguments):
            raise OSError(ctypes.get_errno(), "the system rejects the seccomp filter")


def drop_privileges(user: int, devices: list[str]) -> None:
    """Make devices read-only and switch to `user`, dropping groups and capabilities.

    Raises:
        OSError: The system denies a change, or `user` is not allowed to read Python's library.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    read_only, no_suid, no_exec, remount, bind = 1, 2, 8, 32, 4096
    flags = read_only | no_suid | no_exec | remount | bind
    for device in devices:
        if libc.mount(None, device.encode(), None, flags, None):
            raise OSError(ctypes.get_errno(), f"{device} cannot be made read-only")
    library_paths = [path for path in (os.__file__, *sys.path) if os.path.exists(path)]
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    for path in library_paths:
        if not os.access(path, os.R_OK):
            raise OSError(f"user {user} may not read {path}")


def set_limits(limits: dict[str, int]) -> None:
    """Set soft and hard resource limits, which this process cannot raise again."""
    for name, value in limits.items():
        number = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(number)[1]
        limit = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(number, (limit, limit))


def main() -> None:
    """Run the code from stdin under the limits in the first command-line argument.

    An optional second argument holds the arguments of `drop_privileges`. Both are JSON.
    """
    code = sys.stdin.buffer.read()
    report_fd = os.dup(2)
    devnull = os.open(os.devnull, os.O_RDONLY)
    os.dup2(devnull, 0)
    os.dup2(1, 2)  # warnings are part of the output
    os.closerange(3, report_fd)
    os.closerange(report_fd + 1, 1024)
    try:
        if len(sys.argv) > 2:
            drop_privileges(**json.loads(sys.argv[2]))
        set_limits(json.loads(sys.argv[1]))
        install_seccomp_filter()
    except (OSError, ValueError) as error:
        os.write(report_fd, str(error).encode())
        os._exit(1)
    sys.argv = [""]
    os.write(report_fd, READY)
    os._exit(run_code(code, report_fd))


def run_code(code: bytes, report_fd: int) -> int:
    """Run the code, report its error to `report_fd`, and return the exit status."""
    status, error = 0, b""
    try:
        text = code.decode("utf-8")
        exec(compile(text, "<code>", "exec"), {"__name__": "__main__"})
    except SystemExit:
        pass
    except BaseException as exception:
        status = EXCEPTION_STATUS
        error = b"MemoryError"
        if not isinstance(exception, MemoryError):
            error = type(exception).__name__.encode("utf-8", "replace")
            with contextlib.suppress(BaseException):
                error += f": {exception}".removesuffix(": ").encode("utf-8", "replace")[:20_000]
    with contextlib.suppress(BaseException):
        sys.stdout.flush()
    with contextlib.suppress(BaseException):
        os.write(report_fd, error)
    return status


if __name__ == "__main__":
    main()

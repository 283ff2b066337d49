"""The memory of this host that a process can have, which is a CPU's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

NO_LIMIT = 2**60
"""Without a limit a control group of version 1 tells a little less than 2**63."""

VERSIONS = {
    # Files of the limit and of what is used; fields of memory.stat that the system can take back.
    1: (
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_inactive_file", "total_active_file"),
    ),
    2: ("memory.max", "memory.current", ("inactive_file", "active_file")),
}
"""Files and fields that are read, by version of control groups."""


def host_memory(root: Path = Path("/")) -> tuple[int | None, int | None]:
    """Bytes that a process may have here at all, and of these what is free now; None: not known.

    The least of what Linux has and of what the control groups of this process allow, as those of a
    container or of a job: `MemTotal` and `MemAvailable` of /proc/meminfo
    (https://docs.kernel.org/filesystems/proc.html), and limits of version 2
    (https://docs.kernel.org/admin-guide/cgroup-v2.html) and 1. What files have in memory counts as
    free: the system takes it back. Swap does not count.

    Args:
        root: of the file system.
    """
    try:
        lines = (root / "proc/meminfo").read_text(encoding="ascii").splitlines()
        kib = {name: int(rest.split()[0]) for name, _, rest in (x.partition(":") for x in lines)}
        limits = [(1024 * kib["MemTotal"], 1024 * kib["MemAvailable"])]
    except (OSError, ValueError, LookupError):  # another system than Linux, or one before 2014
        return None, None
    for folder, version in _groups(root):
        limit_file, usage_file, reclaimed = VERSIONS[version]
        try:
            limit, used = (int((folder / file).read_text()) for file in (limit_file, usage_file))
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            used -= sum(int(stat[name]) for name in reclaimed)
        except (OSError, ValueError, LookupError):  # "max", or a group that is not seen from here
            continue
        if limit < NO_LIMIT:
            limits.append((limit, max(limit - used, 0)))
    totals, free = zip(*limits, strict=True)
    return min(totals), min(free)


def _groups(root: Path) -> Iterator[tuple[Path, int]]:
    """Folders of this process's control groups and of those around them, each with its version.

    In a container the path that /proc tells may be the host's: then only the last, the root of what
    is mounted, is there, which is the container's own group.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    mounts = root / "sys/fs/cgroup"
    for line in lines:
        _, controllers, path = line.split(":", 2)
        within = PurePosixPath(path.lstrip("/"))
        # Version 2 alone, or beside controllers of version 1.
        bases = [mounts, mounts / "unified"] if not controllers else [mounts / "memory"]
        if controllers and "memory" not in controllers.split(","):
            continue
        for base in bases:
            for group in (within, *within.parents):
                yield base / group, 2 if not controllers else 1

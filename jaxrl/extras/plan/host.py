"""Host memory available to this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

NO_LIMIT = 2**60
"""Bytes from which a limit counts as unlimited; cgroup v1 then reports almost 2**63."""

CGROUP_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    2: ("memory.max", "memory.current", ""),
}
"""Limit file, usage file and prefix in memory.stat, by cgroup version."""


def read_host_memory(root: Path = Path("/")) -> tuple[int | None, int | None]:
    """Return the total and free memory available to this process in bytes; None if unknown.

    Both are the minimum of /proc/meminfo (`MemTotal`, `MemAvailable`,
    https://docs.kernel.org/filesystems/proc.html) and the cgroup limits, v1 or v2
    (https://docs.kernel.org/admin-guide/cgroup-v2.html), which containers and batch systems set.
    The page cache counts as free because the kernel can reclaim it; swap does not.

    Args:
        root: Root of the file system; tests replace it.
    """
    try:
        lines = (root / "proc/meminfo").read_text(encoding="ascii").splitlines()
        meminfo_kib = {
            name: int(rest.split()[0]) for name, _, rest in (x.partition(":") for x in lines)
        }
        limits = [(1024 * meminfo_kib["MemTotal"], 1024 * meminfo_kib["MemAvailable"])]
    except (OSError, ValueError, LookupError):  # not Linux, or Linux before 2014
        return None, None
    for folder, version in _list_cgroups(root):
        limit_file, usage_file, prefix = CGROUP_FILES[version]
        try:
            limit, used = (int((folder / file).read_text()) for file in (limit_file, usage_file))
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            used -= sum(int(stat[f"{prefix}{name}_file"]) for name in ("active", "inactive"))
        except (
            OSError,
            ValueError,
            LookupError,
        ):  # the limit is "max", or the cgroup is not visible
            continue
        if limit < NO_LIMIT:
            limits.append((limit, max(limit - used, 0)))
    totals, free = zip(*limits, strict=True)
    return min(totals), min(free)


def _list_cgroups(root: Path) -> Iterator[tuple[Path, int]]:
    """Yield the folders of this process's cgroups and their ancestors, with the version.

    In a container, /proc may show the host's path. In that case only the last folder exists: the
    root of the mount, which is the container's cgroup.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    mounts = root / "sys/fs/cgroup"
    for line in lines:
        _, controllers, path = line.split(":", 2)
        group_path = PurePosixPath(path.lstrip("/"))
        if not controllers:  # version 2, alone or next to version 1
            bases, version = [mounts, mounts / "unified"], 2
        elif "memory" in controllers.split(","):
            bases, version = [mounts / "memory"], 1
        else:
            continue
        for base in bases:
            yield from ((base / group, version) for group in (group_path, *group_path.parents))

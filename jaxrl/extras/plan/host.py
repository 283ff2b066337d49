"""Host memory available to this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def read_host_memory(root: Path = Path("/")) -> tuple[int | None, int | None]:
    """Return the total and free memory available to this process, in bytes; None if unknown.

    Both are the minimum of /proc/meminfo (`MemTotal`, `MemAvailable`,
    https://docs.kernel.org/filesystems/proc.html) and the limits of cgroup v2
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
    for folder in _list_cgroups(root):
        try:
            limit, used = (
                int((folder / f"memory.{name}").read_text()) for name in ("max", "current")
            )
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            used -= sum(int(stat[f"{name}_file"]) for name in ("active", "inactive"))
        except (OSError, ValueError, LookupError):  # no limit, or the cgroup is not visible
            continue
        limits.append((limit, max(limit - used, 0)))
    totals, free = zip(*limits, strict=True)
    return min(totals), min(free)


def _list_cgroups(root: Path) -> Iterator[Path]:
    """Yield the folders of this process's cgroup and its ancestors.

    In a container, /proc may show the host's path. In that case only the last folder exists: the
    root of the mount, which is the container's cgroup.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    path = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    group = PurePosixPath(path)
    for folder in (group, *group.parents):
        yield root / "sys/fs/cgroup" / folder

"""Free host memory, from files as Linux and its cgroups write them."""

import pytest

from jaxrl.extras.plan.host import read_host_memory

MIB = 2**20


@pytest.fixture
def system(tmp_path):
    """Return a function that writes the files of a system with 8 GiB, 6 of them free."""

    def write(**files):
        for name, text in files.items():
            file = tmp_path / name.replace("__", "/").replace("_dot_", ".")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        return read_host_memory(tmp_path)

    write(proc__meminfo="MemTotal: 8388608 kB\nMemFree: 1 kB\nMemAvailable: 6291456 kB\n")
    return write


def group(folder, *, limit, used, files=0):
    """Return the files of a cgroup; sizes are in MiB."""
    half = files * MIB // 2
    stat = f"anon 5\ninactive_file {half}\nactive_file {half}\n"
    at = f"sys__fs__cgroup__{folder}memory_dot_"
    size = f"{limit * MIB}" if limit else "max"
    return {f"{at}max": size, f"{at}current": f"{used * MIB}", f"{at}stat": stat}


def in_mib(sizes):
    return [size / MIB for size in sizes]


def test_without_control_groups(system, tmp_path):
    assert in_mib(system()) == [8192, 6144]
    (tmp_path / "proc/meminfo").write_text("MemTotal: 8388608 kB\n")
    assert system() == (None, None)
    (tmp_path / "proc/meminfo").unlink()  # as on macOS
    assert system() == (None, None)


def test_a_container(system):
    # 4096 of which 1536 are used, 512 of these by files that the system can take back.
    files = group("", limit=4096, used=1536, files=512)
    assert in_mib(system(proc__self__cgroup="0::/\n", **files)) == [4096, 3072]


def test_the_tightest_of_nested_groups(system):
    path = {"proc__self__cgroup": "0::/job/step\n"}
    system(**path, **group("job__step__", limit=0, used=100))
    assert in_mib(system()) == [8192, 6144]
    system(**group("job__", limit=5000, used=2000))
    assert in_mib(system()) == [5000, 3000]
    # Used up: more than the limit, for a moment.
    system(**group("job__step__", limit=100, used=101))
    assert in_mib(system()) == [100, 0]

"""Programs that are found again, and folders and entries that are not as they should be."""

import collections
import contextlib
import os
import resource
import subprocess
import sys
import threading

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import compilation_cache

from jaxrl.runtime import program_cache
from jaxrl.runtime.program_cache import keep_programs, processor_type
from tests.helpers import ROOT

EVENTS = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **_: EVENTS.update([event.split("/")[-1]]))


@pytest.fixture
def keep(monkeypatch, tmp_path):
    """`keep_programs` as in a process that has not called it yet; JAX's settings come back."""
    names = [
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_enable_xla_caches",
    ]
    before = {name: jax.config.values[name] for name in names}
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.setattr(program_cache, "MIN_COMPILE_S", 0.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    yield keep_programs
    compilation_cache.get_file_cache = program_cache._jax_store
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def compiled(size=3):
    """What a program computes, and how it came: compiled, or found."""
    before = EVENTS["cache_hits"]
    column = np.linspace(0, 1, size, dtype=np.float32)[:, None]  # of NumPy: no program makes it
    result = jax.jit(lambda x: jnp.tanh(x @ x.T) + 0.5)(column)
    np.testing.assert_allclose(result, np.tanh(column * column.T) + 0.5, rtol=1e-6)
    return "found" if EVENTS["cache_hits"] > before else "compiled"


def entries(folder):
    return sorted(folder.glob("*-cache"))


def start(keep, setting=""):
    """A start in a new process, as far as JAX's cache goes."""
    lines = []
    compilation_cache.get_file_cache = program_cache._jax_store
    jax.config.update("jax_compilation_cache_dir", None)
    folder = keep(setting, lines.append)
    return folder, lines


def test_a_second_start_finds_the_programs(keep, tmp_path):
    folder, lines = start(keep)
    assert lines == []
    assert folder.parent == tmp_path / "xdg" / "jaxrl"
    assert folder.name == f"jax-{jax.__version__}-{processor_type()}"
    assert folder.stat().st_mode & 0o777 == folder.parent.stat().st_mode & 0o777 == 0o700
    assert compiled() == "compiled"
    assert start(keep) == (folder, [])
    assert compiled() == "found"
    assert len(entries(folder)) == 1


def test_another_process_finds_them(tmp_path):
    code = (
        "import jax, jax.numpy as jnp\n"
        "from jaxrl.runtime import program_cache\n"
        "program_cache.MIN_COMPILE_S = 0.0\n"
        "found = []\n"
        "jax.monitoring.register_event_listener(lambda event, **_: found.append(event))\n"
        f"program_cache.keep_programs({str(tmp_path / 'mine')!r}, print)\n"
        "print(float(jax.jit(lambda x: jnp.sin(x) @ x)(jnp.arange(4.0))))\n"
        "print(found.count('/jax/compilation_cache/cache_hits') > 0)\n"
    )
    runs = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    (first, was_found), (second, is_found) = (run.stdout.split() for run in runs)
    assert (was_found, is_found, first) == ("False", "True", second)


def test_the_key_moves_the_cache_and_turns_it_off(keep, tmp_path):
    folder, _ = start(keep, str(tmp_path / "elsewhere"))
    assert folder.parent == tmp_path / "elsewhere"
    compiled()
    assert len(entries(folder)) == 1
    assert not (tmp_path / "xdg").exists()
    assert start(keep, "off") == (None, [])
    assert compiled() == "compiled"
    assert len(entries(folder)) == 1


def test_what_jax_was_given_stays_unless_the_key_names_another(keep, tmp_path):
    def given(setting):
        compilation_cache.get_file_cache = program_cache._jax_store
        jax.config.update("jax_compilation_cache_dir", str(tmp_path / "users"))
        return keep(setting, pytest.fail)

    assert given("") is None
    assert jax.config.values["jax_compilation_cache_dir"] == str(tmp_path / "users")
    assert not (tmp_path / "xdg").exists()
    folder = given(str(tmp_path / "named"))
    assert jax.config.values["jax_compilation_cache_dir"] == str(folder)
    assert given("off") is None
    assert jax.config.values["jax_compilation_cache_dir"] is None


def test_a_relative_folder_of_caches_counts_as_none(keep, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    folder, _ = start(keep)
    assert folder.parent == tmp_path / ".cache" / "jaxrl"
    assert not (tmp_path / "here").exists()


@pytest.mark.parametrize("place", [0, 0.3, 0.6, 0.999, "cut", "empty"])
def test_a_damaged_entry_is_compiled_again_and_mended(keep, place):
    folder, _ = start(keep)
    compiled()
    [entry] = entries(folder)
    whole = bytearray(entry.read_bytes())
    if isinstance(place, str):
        damaged = whole[: 0 if place == "empty" else len(whole) // 2]
    else:
        damaged = bytearray(whole)
        damaged[int(place * len(whole))] ^= 1
    entry.write_bytes(damaged)
    assert start(keep) == (folder, [])
    assert compiled() == "compiled"
    start(keep)
    assert compiled() == "found"


def test_what_a_killed_process_left_is_swept(keep):
    folder, _ = start(keep)
    compiled()
    (folder / "a-cache").write_bytes(b"half")
    (folder / "b-atime").write_bytes(bytes(8))
    start(keep)
    assert compiled() == "found"
    assert not {"a-cache", "b-atime"} & {path.name for path in folder.iterdir()}


def test_the_least_recently_used_make_room(keep, monkeypatch):
    folder, _ = start(keep)
    compiled(3)
    [first] = entries(folder)
    monkeypatch.setattr(program_cache, "MAX_BYTES", 3 * first.stat().st_size)
    start(keep)
    for size in range(4, 9):
        assert compiled(3) == "found"  # again and again: the others are used once
        compiled(size)
        total = sum(path.stat().st_size for path in folder.glob("*-cache"))
        assert total <= program_cache.MAX_BYTES
        start(keep)
    assert compiled(4) == "compiled"


def test_folders_for_other_versions_make_room_the_oldest_first(keep, monkeypatch, tmp_path):
    monkeypatch.setattr(program_cache, "MAX_BYTES", 100_000)
    monkeypatch.setattr(program_cache, "MAX_OTHER_BYTES", 50_000)
    base = tmp_path / "xdg" / "jaxrl"
    for age, name in enumerate(["jax-3", "jax-2", "jax-1"]):
        (base / name).mkdir(parents=True, mode=0o700)
        (base / name / "a-cache").write_bytes(bytes(20_000))
        os.utime(base / name / "a-cache", (10**9 - age, 10**9 - age))
    (base / "other").write_text("not ours")
    base.chmod(0o700)
    folder, lines = start(keep)
    assert lines == []
    assert {path.name for path in base.iterdir()} == {"jax-3", "jax-2", "other", folder.name}
    assert compiled() == "compiled"
    assert compilation_cache._cache.max_size == 60_000


def test_a_folder_that_is_a_file(keep, tmp_path):
    (tmp_path / "file").write_text("")
    folder, [line] = start(keep, str(tmp_path / "file"))
    assert folder is None
    assert f"programs are not kept in {tmp_path / 'file'}: " in line
    assert "config.compilation_cache names another folder" in line
    assert compiled() == "compiled"


@pytest.mark.parametrize("place", ["", "own"])
def test_a_folder_that_others_may_write(keep, tmp_path, place):
    folder, _ = start(keep)
    bad = folder if place else folder.parent
    bad.chmod(0o777)
    folder, [line] = start(keep)
    assert folder is None
    assert f"{bad} belongs to another user or can be written by others" in line


@contextlib.contextmanager
def file_limit(num_bytes):
    """Nothing this process writes may be longer, as on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_told_once_and_leaves_no_half_entry(keep):
    folder, lines = start(keep)
    with file_limit(100):
        assert [compiled(size) for size in (3, 4, 5)] == ["compiled"] * 3
    [line] = lines
    assert line.startswith(f"warning: the cache of compiled programs, {folder}, is not used any")
    assert list(folder.glob("*-*")) == []
    start(keep)
    assert compiled() == "compiled"
    assert len(entries(folder)) == 1


def test_a_lock_that_nobody_gives_back_is_told_once(keep, monkeypatch):
    import filelock

    folder, lines = start(keep)
    compiled()
    lines.clear()
    begun, done = threading.Event(), threading.Event()

    def hold():
        with filelock.FileLock(folder / ".lockfile"):
            begun.set()
            done.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    begun.wait(60)
    try:
        monkeypatch.setattr(program_cache, "LOCK_S", 0.05)
        _, lines = start(keep)
        assert [compiled(size) for size in (3, 4)] == ["compiled"] * 2
    finally:
        done.set()
        holder.join()
    assert len(lines) == 1
    assert "is not used any more: " in lines[0]


def test_a_folder_that_vanishes_ends_the_cache_not_the_run(keep):
    folder, lines = start(keep)
    compiled()
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    folder.write_text("")  # nor can it be made again
    assert compiled(4) == "compiled"
    assert len(lines) == 1


LOWERED = """
import hashlib
import jax
from tests.helpers import TINY, TINY_MOE
from tests.programs import sampler_programs, trainer_programs

for model in (TINY, TINY_MOE):
    programs = {**trainer_programs(model), **sampler_programs(model)}
    for name, (function, arguments) in programs.items():
        text = jax.jit(function).lower(*arguments).as_text()
        print(type(model).__name__, name, hashlib.sha256(text.encode()).hexdigest())
"""


def test_a_program_is_the_same_whatever_python_hashes_to():
    """Or a later start would compile it again, and processes of a job would run different ones."""
    printed = [
        subprocess.run(
            [sys.executable, "-c", LOWERED],
            env=os.environ | {"PYTHONHASHSEED": seed},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert printed[0].count("\n") == 8
    assert printed[0] == printed[1]

"""The compilation cache across starts, processes and unusable folders."""

import collections
import os
import subprocess
import sys
import warnings

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from jaxrl.runtime import compilation_cache
from jaxrl.runtime.compilation_cache import use_compilation_cache
from tests.helpers import ROOT, no_file_beyond
from tests.runs import free_port

EVENTS = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **_: EVENTS.update([event.split("/")[-1]]))


@pytest.fixture(autouse=True)
def new_process(monkeypatch, tmp_path):
    """Reset JAX's settings to those of a new process; restore them at the end."""
    names = [
        "jax_compilation_cache_dir",
        "jax_compilation_cache_max_size",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_enable_xla_caches",
    ]
    before = {name: jax.config.values[name] for name in names}
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.setattr(compilation_cache, "MIN_COMPILE_S", 0.0)
    monkeypatch.setattr(compilation_cache, "_folder_set_here", None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    reset_cache()


def run_program(size=3):
    """Run a program; return whether it was compiled or found in the cache."""
    before = EVENTS["cache_hits"]
    column = np.linspace(0, 1, size, dtype=np.float32)[
        :, None
    ]  # made by NumPy, which compiles nothing
    result = jax.jit(lambda x: jnp.tanh(x @ x.T) + 0.5)(column)
    np.testing.assert_allclose(result, np.tanh(column * column.T) + 0.5, rtol=1e-6)
    return "found" if EVENTS["cache_hits"] > before else "compiled"


def start(setting=""):
    """Configure the cache as a start does; return the lines shown."""
    lines = []
    use_compilation_cache(setting, lines.append)
    return lines


def list_programs(folder):
    return sorted(folder.glob("*-cache"))


def test_a_second_start_finds_the_programs(tmp_path):
    assert start() == []
    assert run_program() == "compiled"
    assert start() == []
    assert run_program() == "found"
    assert len(list_programs(tmp_path / "xdg" / "jaxrl" / "programs")) == 1


CHILD = """
import sys
import jax, jax.numpy as jnp
from jaxrl.runtime import compilation_cache
folder, coordinator, number = sys.argv[1:]
jax.distributed.initialize(coordinator, num_processes=2, process_id=int(number))
compilation_cache.MIN_COMPILE_S = 0.0
compilation_cache.use_compilation_cache(folder, print)
jax.jit(lambda x: jnp.sin(x) @ x)(jnp.arange(4.0))
"""


def run_children(*arguments):
    """Start processes at the same time and return the lines that they print."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", CHILD, *map(str, flags)], stdout=subprocess.PIPE, text=True
        )
        for flags in arguments
    ]
    printed = [process.communicate(timeout=300)[0].splitlines() for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes)
    return printed


def test_processes_of_a_job_must_share_a_folder(tmp_path):
    shared, apart = tmp_path / "shared", (tmp_path / "a", tmp_path / "b")
    address = f"127.0.0.1:{free_port()}"
    printed = run_children((shared, address, 0), (shared, address, 1))
    assert list_programs(shared)
    assert not any(line.startswith("warning") for lines in printed for line in lines)
    address = f"127.0.0.1:{free_port()}"
    for lines in run_children(*((folder, address, i) for i, folder in enumerate(apart))):
        assert "the processes of the job do not share this folder" in lines[-1]
    assert not list_programs(apart[0])


def test_the_setting_moves_the_cache_and_turns_it_off(tmp_path):
    folder = tmp_path / "elsewhere"
    assert start(str(folder)) == []
    run_program()
    assert len(list_programs(folder)) == 1
    assert not (tmp_path / "xdg").exists()
    assert start("off") == []
    assert run_program() == "compiled"
    assert start() == []  # a later run in this process has its own setting
    assert run_program() == "compiled"
    assert len(list_programs(folder)) == 1


def test_a_folder_that_cannot_be_written_gives_a_warning(tmp_path):
    (tmp_path / "file").write_text("")
    [line] = start(str(tmp_path / "file"))
    assert str(tmp_path / "file") in line
    assert "config.compilation_cache" in line
    assert run_program() == "compiled"


def test_a_full_disk_does_not_break_the_cache(tmp_path):
    start(str(tmp_path))
    with no_file_beyond(100), warnings.catch_warnings(record=True):
        assert [run_program(size) for size in (3, 4, 5)] == ["compiled"] * 3
    start(str(tmp_path))
    assert run_program() == "compiled"
    start(str(tmp_path))
    assert run_program() == "found"


LOWERED = """
import dataclasses
import hashlib
import jax
from tests.helpers import TINY_MOE
from tests.programs import sampler_programs, trainer_programs

config = dataclasses.replace(TINY_MOE, num_layers=2, expert_layers=(1,))
programs = {**trainer_programs(config, remat="none"), **sampler_programs(config)}
for name, (function, arguments) in programs.items():
    text = jax.jit(function).lower(*arguments).as_text()
    print(name, hashlib.sha256(text.encode()).hexdigest())
"""


def test_programs_do_not_depend_on_the_hash_seed():
    """Otherwise a later start compiles again, and the processes of a job run different programs."""
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
    assert printed[0].count("\n") == 4
    assert printed[0] == printed[1]

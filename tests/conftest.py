"""Checks array annotations in every test run, and what tests share."""

import gc
import os
import tempfile
from importlib.metadata import version
from pathlib import Path

import jax
import pytest
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from jaxtyping import install_import_hook

# Before the first array: the programs of tests are small, and are compiled in half the time in one
# piece and by the older emitters. jaxlib ends the process at a flag that it does not know, and only
# 0.10 knows the second one. With XLA_FLAGS set, be it to nothing, they are compiled as that says.
QUICK_FLAGS = ["--xla_cpu_parallel_codegen_split_count=1"]
if version("jaxlib").startswith("0.10."):
    QUICK_FLAGS.append("--xla_cpu_use_fusion_emitters=false")
os.environ.setdefault("XLA_FLAGS", " ".join(QUICK_FLAGS))

# No test asks where in the source an operation comes from, which takes a thirtieth of their time.
jax.config.update("jax_traceback_in_locations_limit", 0)
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")

# What a compilation frees is taken again by the next one. The C library reads this at its start, so
# it is for processes that this one starts, pytest's others among them.
os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(4 << 30))
os.environ.setdefault("MALLOC_TOP_PAD_", str(64 << 20))

# OpenBLAS's threads turn in wait for the next product. This process has numpy already, but those
# that it starts, pytest's others among them, have one thread each.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# Each process that tests start would compile jaxrl's modules anew, a sixth of its start.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Programs of tests do not stay with those of the user. Other processes of pytest take this one's.
if "PYTEST_XDIST_WORKER" not in os.environ:
    CACHES = tempfile.TemporaryDirectory(prefix="jaxrl-caches-")
    os.environ["XDG_CACHE_HOME"] = CACHES.name

# What is imported stays: until all is, the collector would go through it again and again in vain.
gc.disable()

# Before anything imports these: the hook rewrites modules as they load. The tower lets an int pass
# for a float, as it does for mypy.
install_import_hook(
    [
        *("jaxrl.objectives", "jaxrl.models", "jaxrl.extras.experts", "jaxrl.extras.kernels"),
        *("jaxrl.extras.vision", "jaxrl.extras.lora", "jaxrl.extras.dense"),
    ],
    "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))",
)


def pytest_collection_modifyitems(items):
    """Files with tests of minutes begin first, so that no process is left with one at the end.

    Of those, the last ones first: neighbours, which share a warm start, would begin at once.
    """
    files = list(dict.fromkeys(item.path for item in items))
    long = {item.path for item in items if item.get_closest_marker("minutes")}
    place = {path: -index if path in long else index for index, path in enumerate(files)}
    items.sort(key=lambda item: (item.path not in long, place[item.path]))


def pytest_collection_finish():
    """Nor need the collector go through it for what tracing makes."""
    gc.freeze()
    gc.set_threshold(200_000, 20, 20)
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def keeps_freed_memory():
    """No run gives memory back to the system, which takes longer the more tests a process has run.

    Processes that tests start do give it back.
    """
    from jaxrl.runtime import host_memory
    from jaxrl.sampling import weights
    from jaxrl.training import run_state  # after the hook

    with pytest.MonkeyPatch.context() as patch:
        for module in (run_state, weights, host_memory):
            patch.setattr(module, "give_back", lambda: None)
        yield


@pytest.fixture(scope="session")
def tiny_world(tmp_path_factory):
    """The folder of a quickstart world of forty people; not to be written to."""
    from examples import quickstart_world  # after the hook: it imports parts of jaxrl

    folder = tmp_path_factory.mktemp("world")
    sizes = ["--num_people=40", "--num_held_out=8", "--num_demonstrations=400"]
    quickstart_world.main([f"--out={folder}", *sizes])
    return folder


@pytest.fixture
def open_folder():
    """An empty folder that every user may enter; pytest's own are one user's."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.fixture(scope="session")
def cache_folder(tmp_path_factory, worker_id):
    """For compiled programs, which all whole runs share, those of the other processes too."""
    base = tmp_path_factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / "compiled"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def quick_compilation(cache_folder):
    """Less optimised machine code, of the same programs, kept for all who compile the same.

    For tests that compile for longer than they compute. Yields what sets it in the environment
    of another process.
    """
    settings = {
        "jax_compilation_cache_dir": str(cache_folder),
        "jax_compilation_cache_max_size": -1,
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    reset_cache()
    less = "jax_disable_most_optimizations"  # which cannot be read
    jax.config.update(less, True)
    yield {name.upper(): str(value) for name, value in (settings | {less: True}).items()}
    jax.config.update(less, False)
    for name, value in before.items():
        jax.config.update(name, value)
    reset_cache()


@pytest.fixture(scope="module")
def one_size():
    """Sampler and update have their largest shapes alone: each compiles for longer than a tiny run.

    For runs in this process that are about something else; `test_runs.py` has all shapes. Another
    process has them by `python -m tests.one_size` in place of `jaxrl.launch`.
    """
    from tests.one_size import take_the_largest

    with pytest.MonkeyPatch.context() as patch:
        take_the_largest(patch)
        yield


@pytest.fixture(scope="module")
def no_pictures():
    """Nobody draws pictures of a run: it takes as long as a tiny one, and has its own tests.

    Yields what would draw them.
    """
    from jaxrl.extras.view import report  # after the hook

    drawing = report.write_or_warn
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "write_or_warn", lambda *_: None)
        yield drawing

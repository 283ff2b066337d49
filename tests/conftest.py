"""Shared fixtures, and array annotation checks in every test run."""

import gc
import os
import tempfile
from importlib.metadata import version
from pathlib import Path

import jax
import pytest
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from jaxtyping import install_import_hook

# Set before the first array. Tests have small programs, which compile in half the time in one piece
# and with the older emitters. jaxlib aborts on unknown flags, and only 0.10 knows the second one.
# An XLA_FLAGS from outside, even an empty one, takes precedence.
QUICK_FLAGS = ["--xla_cpu_parallel_codegen_split_count=1"]
if version("jaxlib").startswith("0.10."):
    QUICK_FLAGS.append("--xla_cpu_use_fusion_emitters=false")
os.environ.setdefault("XLA_FLAGS", " ".join(QUICK_FLAGS))

# No test needs the source locations of operations, which take a thirtieth of the time.
jax.config.update("jax_traceback_in_locations_limit", 0)
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")

# Keep freed memory for the next compilation. The C library reads these at startup, so they affect
# only processes that this one starts, such as pytest's workers.
os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(4 << 30))
os.environ.setdefault("MALLOC_TOP_PAD_", str(64 << 20))

# OpenBLAS's threads spin while they wait. This process has loaded numpy already, but those that it
# starts, such as pytest's workers, get one thread each.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# Otherwise each process that tests start recompiles jaxrl's modules, a sixth of its start.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Keep the tests' compiled programs out of the user's cache. pytest's workers share this folder.
if "PYTEST_XDIST_WORKER" not in os.environ:
    CACHES = tempfile.TemporaryDirectory(prefix="jaxrl-caches-")
    os.environ["XDG_CACHE_HOME"] = CACHES.name

# Imported modules are never freed: no garbage collection until all are loaded.
gc.disable()

# Before anything imports these: the hook rewrites modules as they load. The numeric tower accepts
# an int for a float, as mypy does.
install_import_hook(
    [
        *("jaxrl.objectives", "jaxrl.models", "jaxrl.extras.experts", "jaxrl.extras.kernels"),
        *("jaxrl.extras.vision", "jaxrl.extras.lora", "jaxrl.extras.dense"),
    ],
    "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))",
)


def pytest_collection_modifyitems(items):
    """Run files with long tests first, so that no process is left with one at the end.

    They run in reverse order: adjacent files share a warm start and would all make it at once.
    """
    files = list(dict.fromkeys(item.path for item in items))
    long = {item.path for item in items if item.get_closest_marker("minutes")}
    rank = {path: -index if path in long else index for index, path in enumerate(files)}
    items.sort(key=lambda item: (item.path not in long, rank[item.path]))


def pytest_collection_finish():
    """Freeze what is loaded and collect rarely: tracing makes many long-lived objects."""
    gc.freeze()
    gc.set_threshold(200_000, 20, 20)
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def keeps_freed_memory():
    """Keep freed memory: returning it to the system takes longer with every test.

    Processes that tests start still return it.
    """
    from jaxrl.runtime import host_memory
    from jaxrl.sampling import weights
    from jaxrl.training import run_state  # after the hook

    with pytest.MonkeyPatch.context() as patch:
        for module in (run_state, weights, host_memory):
            patch.setattr(module, "trim_memory", lambda: None)
        yield


@pytest.fixture(scope="session")
def tiny_world(tmp_path_factory):
    """Return the read-only folder of a quickstart world with forty people."""
    from examples import quickstart_world  # imports parts of jaxrl, so after the hook

    folder = tmp_path_factory.mktemp("world")
    sizes = ["--num_people=40", "--num_held_out=8", "--num_demonstrations=400"]
    quickstart_world.main([f"--out={folder}", *sizes])
    return folder


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Return a server that stands in for the Hugging Face Hub; the cache is empty."""
    from tests.hub import serve_hub

    with serve_hub(tmp_path / "hub_cache", monkeypatch) as server:
        yield server


@pytest.fixture
def open_folder():
    """Yield an empty folder that every user may enter, unlike pytest's own."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.fixture(scope="session")
def cache_folder(tmp_path_factory, worker_id):
    """Return the compilation cache folder that complete runs of all processes share."""
    base = tmp_path_factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / "compiled"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def warm_model(tiny_world, cache_folder):
    """Return the weights of a short warm start, which search and answer."""
    from tests.runs import warm_start

    return warm_start(tiny_world, cache_folder)


@pytest.fixture(scope="module")
def quick_compilation(cache_folder):
    """Compile with fewer optimizations and a shared cache, for tests that mostly compile.

    Yields the environment that does the same in another process.
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
    less = "jax_disable_most_optimizations"  # write-only
    jax.config.update(less, True)
    yield {name.upper(): str(value) for name, value in (settings | {less: True}).items()}
    jax.config.update(less, False)
    for name, value in before.items():
        jax.config.update(name, value)
    reset_cache()


@pytest.fixture(scope="module")
def one_size():
    """Restrict sampler and update to their largest shapes, since each compiles for long.

    For runs that test something else; `test_runs.py` has all shapes. In another process, use
    `python -m tests.one_size MODULE` instead of `python -m MODULE`.
    """
    from tests.one_size import take_the_largest

    with pytest.MonkeyPatch.context() as patch:
        take_the_largest(patch)
        yield


@pytest.fixture(scope="module")
def no_pictures():
    """Disable the plots of a run, which take as long as a tiny run and have their own tests.

    Yields the function that draws them.
    """
    from jaxrl.extras.view import report  # after the hook

    drawing = report.write_report_or_warn
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "write_report_or_warn", lambda *_: None)
        yield drawing

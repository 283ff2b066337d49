"""What optional capabilities are to the core: folders that can be deleted."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from jaxrl.config.schema import EXTRA_KEYS, read_flat_config
from tests.helpers import ROOT
from tests.runs import METHOD_SIZES, records

EXTRAS = [f"extras/{path.parent.name}" for path in (ROOT / "jaxrl").glob("extras/*/__init__.py")]

NEEDED_BY = dict.fromkeys(("extras/delta_net", "extras/experts"), ("extras/hybrid_moe",))
"""Extras that import others; without these, only they cannot be imported."""

ALONE = """
import sys
sys.meta_path = [f for f in sys.meta_path if "editable" not in str(f)]  # which has all modules
"""
IMPORT_EVERY_MODULE_AND_LAUNCH = """
import importlib, pkgutil, jaxrl
for module in pkgutil.walk_packages(jaxrl.__path__, "jaxrl."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
print(jaxrl.__file__, flush=True)
from absl import app
from jaxrl import launch
app.run(launch.main, flags_parser=launch.parse_flags)
"""


def without(folder, *names):
    """A copy of the package in a folder, without these extras."""
    for part in ("jaxrl", "configs", "examples"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    for name in names:
        shutil.rmtree(folder / "jaxrl" / name)
    return folder


def train_two_steps(folder, world, compilation):
    """Import every module of this folder's jaxrl, train, and return what was printed."""
    (folder / "values.json").write_text(json.dumps(METHOD_SIZES | {"eval.suites": ["greedy"]}))
    flags = [f"--config={folder}/configs/debug_tiny.py:{world}"]
    flags += ["--values=values.json", "--workdir=run"]
    done = subprocess.run(
        [sys.executable, "-c", ALONE + IMPORT_EVERY_MODULE_AND_LAUNCH, *flags],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder)} | compilation,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert str(folder / "jaxrl" / "__init__.py") in done.stdout
    assert [record["step"] for record in records(folder / "run")] == [0, 1, 2]
    return done.stdout


def test_without_any_extra_a_text_run_trains(tiny_world, tmp_path, quick_compilation):
    printed = train_two_steps(without(tmp_path, *EXTRAS), tiny_world, quick_compilation)
    assert "no report: jaxrl/extras/view is missing" in printed
    assert "no plan of memory: jaxrl/extras/plan is missing" in printed
    # Their keys went with them.
    written = read_flat_config(tmp_path / "run" / "config.json")
    left = {key for extra in EXTRA_KEYS.values() for key in extra.keys} & {*written}
    assert (left, "model.path" in written) == (set(), True)


@pytest.mark.slow(instead="extras/test_removal.py::test_without_any_extra_a_text_run_trains")
@pytest.mark.parametrize("name", sorted(EXTRAS))
def test_without_one_extra_a_text_run_trains(tiny_world, tmp_path, quick_compilation, name):
    names = name, *NEEDED_BY.get(name, ())
    train_two_steps(without(tmp_path, *names), tiny_world, quick_compilation)

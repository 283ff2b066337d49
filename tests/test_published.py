"""Memory plans of the published configurations that a benchmark compiles for absent devices."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from benchmarks import published
from tests.helpers import ROOT


def test_every_case_has_a_plan_within_its_device():
    for case in published.CASES.values():
        config, model = case.build_model()
        for name in published.memory.PARTS:
            planned = published.memory.planned_bytes(config, model, case.target, name)
            assert 0 < planned <= case.target.limit_bytes, (case.name, name)


def test_a_refusal_of_the_compiler_has_the_size_it_needs():
    refusal = (
        "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space "
        "hbm. Used 45.21G of 31.25G hbm. Exceeded hbm capacity"
    )
    assert float(published.MEMORY_PATTERN.search(refusal)[1]) == 45.21


@pytest.mark.slow(
    instead="extras/plan/test_memory.py::TestAgainstTheCompiler::test_two_layers_on_one_device"
)
@pytest.mark.skipif(
    not (importlib.util.find_spec("libtpu") or os.environ.get("LIBTPU_DIR")),
    reason="libtpu is not installed; LIBTPU_DIR may name a folder of `pip install --target`",
)
def test_two_layers_compile_for_a_slice_of_v6e(tmp_path):
    flags = ["--cases=search_r1@v6e", "--parts=decode,score", "--num_layers=2"]
    command = [sys.executable, "-m", "benchmarks.published", f"--out={tmp_path}", *flags]
    subprocess.run(command, cwd=ROOT, check=True, timeout=1200)
    results = json.loads((tmp_path / "results.json").read_text())
    case = published.CASES["search_r1@v6e"]
    config, model = case.build_model(2)
    for result in results.values():
        [program] = result["programs"].values()
        planned = published.memory.planned_bytes(config, model, case.target, result["part"])
        assert program["total"] + program["beside"] == pytest.approx(planned, rel=0.1)

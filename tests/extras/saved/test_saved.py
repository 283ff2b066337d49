"""The commands `jaxrl evaluate` and `jaxrl export` on a saved run."""

import json
import os
import subprocess
import sys

import pytest

from jaxrl import run as stages
from jaxrl.config.schema import serialize_config
from jaxrl.extras.saved import evaluate, export
from jaxrl.logs.display import Display
from tests.helpers import build, settings_of
from tests.runs import run_settings


@pytest.fixture(scope="module")
def run(tiny_world, tmp_path_factory, quick_compilation, no_pictures, one_size):
    """Workdir of a run with two steps and a checkpoint of each step."""
    workdir = tmp_path_factory.mktemp("runs")
    changes = {"sft.num_steps": 2, "checkpoint.every_steps": 1, "eval.max_tasks": 2}
    config = run_settings(tiny_world, stages=("sft",), **changes)
    (workdir / "config.json").write_text(serialize_config(config))
    stages.run(settings_of(config), workdir, build(config), Display())
    return workdir


@pytest.mark.minutes
def test_export_writes_the_newest_or_an_earlier_checkpoint(run, tmp_path, capsys):
    export.main([str(run)])
    assert capsys.readouterr().out.splitlines()[-1] == str(run / "steps" / "2" / "export")
    for file in ("config.json", "model.safetensors"):
        exported = (run / "steps" / "2" / "export" / file).read_bytes()
        assert exported == (run / "export" / file).read_bytes()
    export.main([str(run), "--step=1", f"--out={tmp_path}"])
    earlier = (tmp_path / "export" / "model.safetensors").read_bytes()
    assert earlier != exported


@pytest.mark.minutes
def test_a_run_is_evaluated_with_other_settings(run, quick_compilation):
    module = [sys.executable, "-m", "jaxrl.extras.saved.evaluate"]
    settings = ["--config.eval.final_suites=('greedy',)", "--config.rollout.max_num_seqs=1"]
    done = subprocess.run(
        [*module, str(run), *settings],
        env=os.environ | quick_compilation, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert list(json.loads((run / "eval" / "evaluate_2.json").read_text())["summary"]) == ["greedy"]


@pytest.mark.parametrize("command", [export, evaluate])
def test_a_folder_without_a_run_is_rejected(command, tmp_path):
    with pytest.raises(SystemExit, match=f"^error: {tmp_path}"):
        command.main([str(tmp_path)])

"""The commands `jaxrl evaluate` and `jaxrl export` on a run that was saved."""

import json
import os
import subprocess
import sys

import pytest

from tests.runs import SIZES

SETTINGS = {
    **SIZES,
    "stages": "('sft',)",
    "sft.num_steps": 2,
    "checkpoint.every_steps": 1,
    "eval.max_tasks": 2,
}


@pytest.fixture(scope="module")
def command(quick_compilation):
    def start(module, *arguments):
        return subprocess.run(
            [sys.executable, "-m", module, *map(str, arguments)],
            env=os.environ | quick_compilation,
            capture_output=True,
            text=True,
            timeout=300,
        )

    return start


@pytest.fixture(scope="module")
def run(tiny_world, tmp_path_factory, command):
    workdir = tmp_path_factory.mktemp("runs") / "run"
    keys = [f"--config.{key}={value}" for key, value in SETTINGS.items()]
    config = f"--config=configs/debug_tiny.py:{tiny_world}"
    done = command("jaxrl.launch", config, f"--workdir={workdir}", *keys)
    assert done.returncode == 0, done.stderr
    return workdir


@pytest.mark.minutes
def test_the_newest_checkpoint_is_what_the_run_exported(run, command):
    done = command("jaxrl.extras.saved.export", run)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(run / "steps" / "2")
    for file in ("config.json", "model.safetensors"):
        exported = (run / "steps" / "2" / "export" / file).read_bytes()
        assert exported == (run / "export" / file).read_bytes()


@pytest.mark.minutes
def test_an_earlier_checkpoint_is_exported_elsewhere(run, command, tmp_path):
    done = command("jaxrl.extras.saved.export", run, "--step=1", f"--out={tmp_path}")
    assert done.returncode == 0, done.stderr
    exported = (tmp_path / "export" / "model.safetensors").read_bytes()
    assert exported != (run / "export" / "model.safetensors").read_bytes()


@pytest.mark.minutes
def test_a_run_is_evaluated_with_other_settings(run, command):
    done = command("jaxrl.extras.saved.evaluate", run, "--config.eval.final_suites=('greedy',)")
    assert done.returncode == 0, done.stderr
    assert list(json.loads((run / "eval" / "evaluate_2.json").read_text())["summary"]) == ["greedy"]


@pytest.mark.parametrize("module", ["export", "evaluate"])
def test_a_folder_without_a_run_is_refused(command, tmp_path, module):
    done = command(f"jaxrl.extras.saved.{module}", tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {tmp_path}")

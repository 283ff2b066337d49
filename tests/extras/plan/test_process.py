"""The plan of a whole process on a CPU, against what it took."""

import json
import shutil
import subprocess
import sys

import pytest

from jaxrl.models.decoder import init_params
from jaxrl.models.hf_weights import save_hf
from jaxrl.models.registry import read_architecture
from tests.extras.plan.cases import ROOT


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read as Linux tells it")
def test_a_warm_start_takes_what_is_planned(tiny_world, tmp_path):
    # 17 million parameters, so that not all of it is libraries.
    folder = shutil.copytree(tiny_world / "model", tmp_path / "model")
    (folder / "model.safetensors").unlink()
    fields = json.loads((folder / "config.json").read_text())
    fields |= {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4}
    fields |= {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64}
    (folder / "config.json").write_text(json.dumps(fields))
    model = read_architecture(folder)
    save_hf(init_params(model, 0), model, tmp_path / "larger", source=None)
    shutil.copy(tmp_path / "larger/model.safetensors", folder)
    keys = {"stages": "('sft',)", "sft.num_steps": 1, "model.path": folder}
    arguments = [f"--config.{key}={value}" for key, value in keys.items()]
    command = [sys.executable, "-m", "tests.extras.plan.host_memory"]
    config = f"--config={ROOT / 'configs/debug_tiny.py'}:{tiny_world}"
    done = subprocess.run(
        [*command, config, *arguments], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True
    )
    planned, seen = json.loads(done.stdout)
    assert planned == pytest.approx(seen, rel=0.1)

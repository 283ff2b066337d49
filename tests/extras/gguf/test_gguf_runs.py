"""The command with a GGUF file in place of a folder: plan, run, going on, export."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import tokenizers

pytest.importorskip("gguf", reason="the extra gguf is not installed")

from jaxrl.models.hf_weights import load_hf
from jaxrl.models.reading import read_model
from tests.extras.gguf.files import tensors_of, write_gguf


@pytest.mark.minutes
def test_a_run_begins_with_a_file_and_goes_on(tiny_world, tmp_path, quick_compilation):
    model = tiny_world / "model"
    settings = json.loads((model / "tokenizer_config.json").read_text())
    tokenizer = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    given = {
        "tokenizer": tokenizer,
        "tokenizer__chat_template": settings["chat_template"],
        "tokenizer__ggml__padding_token_id": tokenizer.token_to_id("<|endoftext|>"),
    }
    file = write_gguf(tmp_path / "tiny.gguf", model, **given)
    cache = tmp_path / "cache"
    environment = os.environ | quick_compilation | {"XDG_CACHE_HOME": str(cache)}
    workdir = tmp_path / "run"

    def launch(path, *arguments):
        command = [
            sys.executable,
            "-m",
            "jaxrl.launch",
            f"--config=configs/debug_tiny.py:{tiny_world}",
        ]
        command += [f"--workdir={workdir}", f"--config.model.path={path}"]
        command += ["--config.stages=('sft',)", "--config.sft.num_steps=1"]
        # Other merges than the folder's: some texts have more tokens.
        command += ["--config.rollout.max_total_tokens=256", *arguments]
        return subprocess.run(command, capture_output=True, text=True, env=environment)

    planned = launch(file, "--plan", "--plan_devices=1", "--plan_memory_gib=80")
    assert planned.returncode == 0, planned.stderr
    [made] = (cache / "jaxrl" / "models").glob("tiny-*")
    [line] = planned.stderr.splitlines()
    assert line.startswith(f"reading {file}, once; later starts find it in {made} (at most ")
    done = launch(file)
    assert done.returncode == 0, done.stderr
    assert "reading" not in done.stderr
    assert json.loads((workdir / "config.json").read_text())["model"]["path"] == str(file)
    export = workdir / "export"
    assert read_model(export) == read_model(model)
    assert (export / "tokenizer.json").read_bytes() == (made / "tokenizer.json").read_bytes()
    before, after = load_hf(model), load_hf(export)
    assert (before["norm"]["scale"] != after["norm"]["scale"]).any()

    # The same content elsewhere is the same model; another content here is told.
    (tmp_path / "moved").mkdir()
    moved = shutil.copy(file, tmp_path / "moved")
    again = launch(moved)
    assert again.returncode == 0, again.stderr
    tensors = tensors_of(model)
    tensors["output_norm.weight"] = tensors["output_norm.weight"] + 1
    other = launch(write_gguf(moved, model, tensors=tensors, **given))
    assert other.returncode == 1
    assert "config.model.path/model.safetensors (content): another one" in other.stderr

"""What a run was made with."""

import json
import subprocess
import sys

import jax
import pytest

from configs import debug_tiny
from jaxrl.assemble import assemble
from jaxrl.versions import commit, write_environment


@pytest.fixture(scope="module")
def parts(tiny_world):
    return assemble(debug_tiny.get_config(str(tiny_world)))


def test_every_start_is_kept(tmp_path, parts):
    path = tmp_path / "environment.json"
    write_environment(path, 0, parts)
    write_environment(path, 40, parts)
    first, second = json.loads(path.read_text())
    assert (first["step"], second["step"]) == (0, 40)
    assert first["versions"]["jax"] == jax.__version__
    assert first["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert first["machine"]["num_devices"] == jax.device_count()
    assert (first["num_eval_tasks"], first["num_demonstrations"]) == (8, 400)
    # Embedding (tied), 2 layers of attention and MLP with their norms, the last norm.
    model, parameters = parts.model_config, first["model"]["parameters"]
    width, head = model.width, model.head_dim
    block = 2 * width * model.num_heads * head + 2 * width * model.num_kv_heads * head
    block += 3 * width * model.mlp_width + 2 * width + 2 * head
    assert parameters == model.vocab_size * width + model.num_layers * block + width


def test_a_file_cut_by_a_kill_is_begun_anew(tmp_path, parts):
    path = tmp_path / "environment.json"
    path.write_text('[{"step": 0, ')
    write_environment(path, 3, parts)
    assert [start["step"] for start in json.loads(path.read_text())] == [3]


def git(folder, *arguments):
    identity = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
    command = ["git", *identity, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout


def test_the_commit_of_the_code(tmp_path):
    code = tmp_path / "package"
    code.mkdir()
    (code / "__init__.py").write_text("")
    assert commit(code) is None  # no repository
    git(tmp_path, "init")
    assert commit(code) is None  # installed inside a repository of something else
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "x")
    head = git(tmp_path, "rev-parse", "HEAD").strip()
    assert commit(code) == head
    (code / "__init__.py").write_text("changed = True")
    assert commit(code) == head + "+"

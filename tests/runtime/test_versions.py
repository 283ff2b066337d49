"""The record of versions, machine and code of each start of a run."""

import contextlib
import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from configs import debug_tiny
from jaxrl.builders import components
from jaxrl.builders.resolved import resolve_names
from jaxrl.launch import prepare_run
from jaxrl.logs.display import Display
from jaxrl.runtime.versions import find_commit, write_environment
from tests.helpers import build


@pytest.fixture(scope="module")
def parts(tiny_world):
    return build(debug_tiny.get_config(str(tiny_world)))


def test_every_start_is_recorded(tmp_path, parts):
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
    model, parameters = parts.model.architecture, first["model"]["parameters"]
    width, head = model.width, model.head_dim
    block = 2 * width * model.num_heads * head + 2 * width * model.num_kv_heads * head
    block += 3 * width * model.mlp_width + 2 * width + 2 * head
    assert parameters == model.vocab_size * width + model.num_layers * block + width


def test_a_damaged_or_lost_file_is_reported(tmp_path, parts):
    path, lines, damage = tmp_path / "environment.json", [], '[{"step": 0, '
    path.write_text(damage)
    write_environment(path, 3, parts, lines.append)
    assert [start["step"] for start in json.loads(path.read_text())] == [3]
    assert (tmp_path / "environment.json.damaged").read_text() == damage
    assert str(path) in lines[0]
    assert lines[0].endswith("renamed to environment.json.damaged")
    path.unlink()
    write_environment(path, 3, parts, lines.append)
    assert lines[1].endswith("environment.json is missing: the record of earlier starts is lost")


def git(folder, *arguments):
    identity = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
    command = ["git", *identity, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout


def test_find_commit_marks_uncommitted_changes(tmp_path):
    code = tmp_path / "package"
    code.mkdir()
    (code / "__init__.py").write_text("")
    assert find_commit(code) is None  # no repository
    git(tmp_path, "init")
    assert find_commit(code) is None  # installed inside a repository of something else
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "x")
    head = git(tmp_path, "rev-parse", "HEAD").strip()
    assert find_commit(code) == head
    (code / "__init__.py").write_text("changed = True")
    assert find_commit(code) == head + "+"


DATED = (
    "{% for m in messages %}{{ m.role ~ strftime_now(' on %d %b %Y: ') ~ m.content }}{% endfor %}"
)


def test_a_restart_keeps_the_time_in_prompts(tiny_world, parts, tmp_path, monkeypatch):
    config = debug_tiny.get_config(str(shutil.copytree(tiny_world, tmp_path / "world")))
    file = Path(config.model.path) / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": DATED}))
    for step, time in enumerate(("2024-02-29T23:59:00", "2030-01-01T00:00:00")):
        start = dataclasses.replace(parts, prompt_time=time)
        write_environment(tmp_path / "environment.json", step, start)
    built, messages = [], []
    original = components.build

    def record_build(*arguments, **settings):
        built.append(original(*arguments, **settings))
        return built[-1]

    monkeypatch.setattr("jaxrl.builders.components.build", record_build)
    display = Display()
    display.log = messages.append
    with contextlib.ExitStack() as stack:
        prepare_run(resolve_names(config), tmp_path, display, stack)
    tokenizer = built[0].tokenizer
    prompt = tokenizer.render_prompt([{"role": "user", "content": "Where?"}])
    assert tokenizer.decode(prompt) == "user on 29 Feb 2024: Where?"
    assert [line for line in messages if "2024-02-29 23:59" in line]
    assert built[0].prompt_time == "2024-02-29T23:59:00"

"""What a run was made with."""

import contextlib
import dataclasses
import json
import shutil
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import jax
import pytest

from configs import debug_tiny
from jaxrl.builders import components
from jaxrl.builders.resolved import resolve_names
from jaxrl.config.schema import flatten
from jaxrl.launch import make_ready
from jaxrl.logs.display import Display
from jaxrl.runtime import versions
from jaxrl.runtime.resume import RunRecord, as_json, find_changes
from jaxrl.runtime.versions import check_alike, commit, differences, fingerprints, write_environment
from tests.helpers import build


@pytest.fixture(scope="module")
def parts(tiny_world):
    return build(debug_tiny.get_config(str(tiny_world)))


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
    model, parameters = parts.model.architecture, first["model"]["parameters"]
    width, head = model.width, model.head_dim
    block = 2 * width * model.num_heads * head + 2 * width * model.num_kv_heads * head
    block += 3 * width * model.mlp_width + 2 * width + 2 * head
    assert parameters == model.vocab_size * width + model.num_layers * block + width


def test_folders_of_the_users_modules_are_kept(tmp_path, parts, monkeypatch):
    (folder := tmp_path / "mine").mkdir()
    installed = [path for path in sys.path if "site-packages" in path]
    assert installed
    monkeypatch.setattr(sys, "path", ["", *installed, str(tmp_path / "missing"), str(folder)])
    monkeypatch.chdir(tmp_path)
    write_environment(tmp_path / "environment.json", 0, parts)
    [start] = json.loads((tmp_path / "environment.json").read_text())
    assert start["code_folders"] == [str(tmp_path), str(folder)]


@pytest.mark.parametrize("damage", ['[{"step": 0, ', "{}", "[1]", "\xff"])
def test_a_damaged_file_is_told_and_kept_aside(tmp_path, parts, damage):
    path, said = tmp_path / "environment.json", []
    path.write_text(damage, encoding="latin-1")
    write_environment(path, 3, parts, said.append)
    assert [start["step"] for start in json.loads(path.read_text())] == [3]
    assert (tmp_path / "environment.json.damaged").read_text(encoding="latin-1") == damage
    [line] = said
    assert line.startswith(f"warning: {path} cannot be read (")
    assert line.endswith("kept as environment.json.damaged, and begun anew")


def test_a_lost_file_is_told(tmp_path, parts):
    said = []
    write_environment(tmp_path / "environment.json", 0, parts, said.append)
    assert said == []
    (tmp_path / "environment.json").unlink()
    write_environment(tmp_path / "environment.json", 3, parts, said.append)
    assert said[0].endswith("environment.json is missing: what earlier starts ran on is lost")


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


@pytest.fixture
def world(tiny_world, tmp_path):
    return shutil.copytree(tiny_world, tmp_path / "world")


def test_fingerprints_are_of_what_the_stages_read(tiny_world, world):
    config = debug_tiny.get_config(str(world))
    found = fingerprints(resolve_names(config))
    assert {"sft.source", "tasks.train.source", "tasks.eval.source", "search.local.corpus"} <= set(
        found
    )
    assert {"model.path/config.json", "model.path/model.safetensors"} <= set(found)
    # Neither the place nor the time of change matters.
    assert found == fingerprints(resolve_names(debug_tiny.get_config(str(tiny_world))))
    with config.unlocked():
        config.stages = ("evaluate",)
    assert not {"sft.source", "tasks.train.source"} & set(fingerprints(resolve_names(config)))


@pytest.mark.parametrize(
    "key", ["sft.source", "tasks.train.source", "tasks.eval.source", "search.local.corpus"]
)
def test_a_file_that_changed_has_another_fingerprint(world, key):
    config = debug_tiny.get_config(str(world))
    before = fingerprints(resolve_names(config))
    path = Path(flatten(config)[key])
    path.write_bytes(path.read_bytes() + b"\n")
    after = fingerprints(resolve_names(config))
    assert {name for name in before if before[name] != after[name]} == {key}
    path.unlink()
    assert before.keys() - fingerprints(resolve_names(config)).keys() == {key}


def test_an_adapter_has_a_fingerprint_wherever_it_lies(world, tmp_path):
    name = "model.lora.path/adapter_model.safetensors"
    config = debug_tiny.get_config(str(world))
    assert name not in fingerprints(resolve_names(config))
    found = []
    for folder, content in (("one", b"a"), ("two", b"a"), ("three", b"b")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "adapter_model.safetensors").write_bytes(content)
        config.model.lora.path = str(tmp_path / folder)
        found.append(fingerprints(resolve_names(config))[name])
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize(
    ("key", "argument"),
    [
        ("advantage.name", "rewards"),
        ("loss.aggregation", "token_counts"),
        ("kl.estimator", "log_ratios"),
        ("optimizer.schedule", "peak"),
        ("sft.optimizer.schedule", "peak"),
    ],
)
def test_code_of_ones_own_has_a_fingerprint(key, argument, world, tmp_path, monkeypatch):
    file = tmp_path / "mine_alone.py"
    file.write_text(f"def estimate({argument}):\n    return {argument}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mine_alone", raising=False)
    config = debug_tiny.get_config(str(world))
    before = fingerprints(resolve_names(config))
    config.update_from_flattened_dict({key: "mine_alone.estimate"})
    found = fingerprints(resolve_names(config))
    assert found.keys() - before.keys() == {f"{key}'s file"}
    file.write_text(f"def estimate({argument}):\n    return -{argument}\n")
    changed = fingerprints(resolve_names(config))
    assert {name for name in found if found[name] != changed[name]} == {f"{key}'s file"}
    [change] = find_changes(
        RunRecord(step=1, config=as_json(flatten(config)), contents=found),
        flatten(config),
        changed,
    )
    assert str(change) == f"config.{key}'s file (content): another one than before"
    assert not change.is_free


def test_one_changed_weight_block_changes_the_fingerprint(world):
    config = debug_tiny.get_config(str(world))
    before = fingerprints(resolve_names(config))
    weights = Path(config.model.path) / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    after = fingerprints(resolve_names(config))
    assert {n for n in before if before[n] != after[n]} == {"model.path/model.safetensors"}


def test_a_changed_chat_template_for_tools_changes_the_fingerprint(world):
    config = debug_tiny.get_config(str(world))
    file = Path(config.model.path) / "additional_chat_templates" / "tool_use.jinja"
    file.parent.mkdir()
    file.write_text("before")
    before = fingerprints(resolve_names(config))
    file.write_text("after")
    after = fingerprints(resolve_names(config))
    name = "model.path/additional_chat_templates/tool_use.jinja"
    assert {n for n in before if before[n] != after[n]} == {name}


def test_weights_are_sampled_from_their_start_to_their_end():
    size, header = 10**9, 1000
    [(start, length), *blocks] = versions._weight_blocks(size, header=header)
    assert (start, length) == (0, header)
    assert blocks[0][0] == header
    assert sum(blocks[-1]) == size
    assert len(blocks) == versions.WEIGHT_SAMPLES
    assert list(versions._weight_blocks(5000, header=1000)) == [(0, 1000), (1000, 4000)]


def test_processes_that_differ_are_told_apart_by_name():
    one = [{"config.lr": "0.1", "config.a": "1", "config.tasks": "'x'"}, {"config.tasks": "5f"}]
    assert differences([one, one, one]) == []
    other = [one[0] | {"config.lr": "0.2", "--workdir": "'y'"}, {"config.tasks": "60"}]
    assert differences([one, one, other]) == [
        "config.lr is 0.1 in process 0 and 0.2 in process 2",
        "--workdir is None in process 0 and 'y' in process 2",
        "the content of config.tasks differs between the processes 0 and 2",
    ]
    # The same content in another place is the same; a place without any content is compared.
    moved = [one[0] | {"config.tasks": "'z'"}, one[1]]
    assert differences([one, moved]) == []
    missing = ["the content of config.tasks is missing in process 1"]
    assert differences([one, [moved[0], {}]]) == missing
    assert len(differences([[one[0], {}], [moved[0], {}]])) == 1
    long = "the content of config.model/a is missing in process 0"
    assert differences(
        [[{"config.model": "'x'"}, {}], [{"config.model": "'y'"}, {"config.model/a": "1"}]]
    ) == [long]


def test_a_process_with_other_settings_is_refused(tiny_world, tmp_path, monkeypatch):
    config = debug_tiny.get_config(str(tiny_world))
    contents = {"sft.source": "1"}
    check_alike(resolve_names(config), tmp_path, contents)  # on its own

    def other(value):
        return [value, [value[0] | {"config.seed": "?"}, value[1]]]

    monkeypatch.setattr(versions, "gather", other)
    with pytest.raises(ValueError, match=r"config\.seed is 0 in process 0 and \? in process 1"):
        check_alike(resolve_names(config), tmp_path, contents)
    monkeypatch.setattr(versions, "gather", lambda value: [value, value])
    check_alike(resolve_names(config), tmp_path, contents)


NIGHT = datetime(2024, 2, 29, 23, 59)
DATED = (
    "{% for m in messages %}{{ m.role ~ strftime_now(' on %d %b %Y: ') ~ m.content }}{% endfor %}"
)


def test_a_run_keeps_the_time_of_its_first_prompts(world, tmp_path, monkeypatch):
    config = debug_tiny.get_config(str(world))
    file = Path(config.model.path) / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": DATED}))
    first = build(config, now=NIGHT)
    write_environment(tmp_path / "environment.json", 0, first)
    later = dataclasses.replace(first, prompt_time="2030-01-01T00:00:00")
    write_environment(tmp_path / "environment.json", 1, later)
    made, said = [], []
    original = components.build

    def spy(*arguments, **settings):
        made.append(original(*arguments, **settings))
        return made[-1]

    monkeypatch.setattr("jaxrl.builders.components.build", spy)
    display = Display()
    display.log = said.append
    with contextlib.ExitStack() as stack:
        make_ready(resolve_names(config), tmp_path, display, stack)
    tokenizer = made[0].tokenizer
    prompt = tokenizer.render_prompt([{"role": "user", "content": "Where?"}])
    assert tokenizer.decode(prompt) == "user on 29 Feb 2024: Where?"
    assert [line for line in said if "2024-02-29 23:59" in line]
    assert made[0].prompt_time == "2024-02-29T23:59:00"

"""Fingerprints of files, and processes that differ in them."""

import shutil
import sys
from pathlib import Path

import pytest

from configs import debug_tiny
from jaxrl.builders import fingerprints
from jaxrl.builders.fingerprints import (
    check_processes_agree,
    compute_fingerprints,
    describe_differences,
)
from jaxrl.builders.resolved import resolve_names
from jaxrl.config.schema import flatten_config
from jaxrl.runtime.resume import RunRecord, find_changes, normalize_json


@pytest.fixture
def world(tiny_world, tmp_path):
    return shutil.copytree(tiny_world, tmp_path / "world")


def test_fingerprints_cover_the_files_that_the_stages_read(tiny_world, world):
    config = debug_tiny.get_config(str(world))
    found = compute_fingerprints(resolve_names(config))
    assert {"sft.source", "tasks.train.source", "tasks.eval.source", "search.local.corpus"} <= set(
        found
    )
    assert {"model.path/config.json", "model.path/model.safetensors"} <= set(found)
    # Neither the place nor the time of change matters.
    assert found == compute_fingerprints(resolve_names(debug_tiny.get_config(str(tiny_world))))
    with config.unlocked():
        config.stages = ("evaluate",)
    assert not {"sft.source", "tasks.train.source"} & set(
        compute_fingerprints(resolve_names(config))
    )


@pytest.mark.parametrize(
    "key", ["tasks.train.source", "search.local.corpus", "prompt.template_file"]
)
def test_a_changed_file_has_another_fingerprint(world, key):
    config = debug_tiny.get_config(str(world))
    config.prompt.template_file = str(world / "prompt.jinja")
    (world / "prompt.jinja").write_text("{{ question }}")
    before = compute_fingerprints(resolve_names(config))
    path = Path(flatten_config(config)[key])
    path.write_bytes(path.read_bytes() + b"\n")
    after = compute_fingerprints(resolve_names(config))
    assert {name for name in before if before[name] != after[name]} == {key}


def test_an_adapters_fingerprint_follows_its_content(world, tmp_path):
    name = "model.lora.path/adapter_model.safetensors"
    config = debug_tiny.get_config(str(world))
    assert name not in compute_fingerprints(resolve_names(config))
    values = []
    for folder, content in (("first", b"a"), ("copy", b"a"), ("changed", b"b")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "adapter_model.safetensors").write_bytes(content)
        config.model.lora.path = str(tmp_path / folder)
        values.append(compute_fingerprints(resolve_names(config))[name])
    assert values[0] == values[1] != values[2]


@pytest.mark.parametrize(
    ("key", "argument"),
    [("advantage.name", "rewards"), ("sft.optimizer.schedule", "peak")],
)
def test_user_code_has_a_fingerprint(key, argument, world, tmp_path, monkeypatch):
    file = tmp_path / "mine_alone.py"
    file.write_text(f"def estimate({argument}):\n    return {argument}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mine_alone", raising=False)
    config = debug_tiny.get_config(str(world))
    before = compute_fingerprints(resolve_names(config))
    config.update_from_flattened_dict({key: "mine_alone.estimate"})
    found = compute_fingerprints(resolve_names(config))
    assert found.keys() - before.keys() == {f"{key}'s file"}
    file.write_text(f"def estimate({argument}):\n    return -{argument}\n")
    changed = compute_fingerprints(resolve_names(config))
    assert {name for name in found if found[name] != changed[name]} == {f"{key}'s file"}
    [change] = find_changes(
        RunRecord(step=1, config=normalize_json(flatten_config(config)), contents=found),
        flatten_config(config),
        changed,
    )
    assert str(change) == f"config.{key}'s file (content): changed"
    assert not change.is_free


def test_one_changed_weight_block_changes_the_fingerprint(world):
    config = debug_tiny.get_config(str(world))
    before = compute_fingerprints(resolve_names(config))
    weights = Path(config.model.path) / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    after = compute_fingerprints(resolve_names(config))
    assert {n for n in before if before[n] != after[n]} == {"model.path/model.safetensors"}


def test_large_weights_are_sampled_from_start_to_end():
    size, header_bytes = 10**9, 1000
    [(start, length), *samples] = fingerprints._iter_weight_blocks(size, header_bytes=header_bytes)
    assert (start, length) == (0, header_bytes)
    assert samples[0][0] == header_bytes
    assert sum(samples[-1]) == size
    assert len(samples) == fingerprints.NUM_WEIGHT_SAMPLES


def test_differences_between_processes_are_named():
    settings = {"config.lr": "0.1", "config.a": "1", "config.tasks": "'x'"}
    first = [settings, {"config.tasks": "5f"}]
    assert describe_differences([first, first, first]) == []
    changed = [settings | {"config.lr": "0.2", "--workdir": "'y'"}, {"config.tasks": "60"}]
    assert {*describe_differences([first, first, changed])} == {
        "config.lr is 0.1 in process 0 and 0.2 in process 2",
        "--workdir is None in process 0 and 'y' in process 2",
        "the content of config.tasks is 5f in process 0 and 60 in process 2",
    }
    # The same content in another path is the same; a path without any content is compared.
    moved = [settings | {"config.tasks": "'z'"}, first[1]]
    assert describe_differences([first, moved]) == []
    missing = ["the content of config.tasks is 5f in process 0 and None in process 1"]
    assert describe_differences([first, [moved[0], {}]]) == missing
    assert len(describe_differences([[settings, {}], [moved[0], {}]])) == 1


def test_a_process_with_other_settings_is_refused(tiny_world, tmp_path, monkeypatch):
    config = debug_tiny.get_config(str(tiny_world))
    contents = {"sft.source": "1"}
    check_processes_agree(resolve_names(config), tmp_path, contents)  # on its own

    def gather(value):
        return [value, [value[0] | {"config.seed": "?"}, value[1]]]

    monkeypatch.setattr(fingerprints, "gather", gather)
    with pytest.raises(ValueError, match=r"config\.seed is 0 in process 0 and \? in process 1"):
        check_processes_agree(resolve_names(config), tmp_path, contents)

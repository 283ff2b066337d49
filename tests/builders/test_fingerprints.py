"""Fingerprints of files, and processes that differ in them."""

import shutil
import sys
from pathlib import Path

import pytest

import jaxrl.builders.fingerprints as of_files
from configs import debug_tiny
from jaxrl.builders.fingerprints import check_alike, differences, fingerprints
from jaxrl.builders.resolved import resolve_names
from jaxrl.config.schema import flatten
from jaxrl.runtime.resume import RunRecord, find_changes, normalize_json


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
        RunRecord(step=1, config=normalize_json(flatten(config)), contents=found),
        flatten(config),
        changed,
    )
    assert str(change) == f"config.{key}'s file (content): changed"
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


def test_weights_are_sampled_from_their_start_to_their_end():
    size, header = 10**9, 1000
    [(start, length), *blocks] = of_files._weight_blocks(size, header=header)
    assert (start, length) == (0, header)
    assert blocks[0][0] == header
    assert sum(blocks[-1]) == size
    assert len(blocks) == of_files.WEIGHT_SAMPLES
    assert list(of_files._weight_blocks(5000, header=1000)) == [(0, 1000), (1000, 4000)]


def test_processes_that_differ_are_told_apart_by_name():
    one = [{"config.lr": "0.1", "config.a": "1", "config.tasks": "'x'"}, {"config.tasks": "5f"}]
    assert differences([one, one, one]) == []
    other = [one[0] | {"config.lr": "0.2", "--workdir": "'y'"}, {"config.tasks": "60"}]
    assert differences([one, one, other]) == [
        "config.lr is 0.1 in process 0 and 0.2 in process 2",
        "--workdir is None in process 0 and 'y' in process 2",
        "the content of config.tasks differs in process 2",
    ]
    # The same content in another place is the same; a place without any content is compared.
    moved = [one[0] | {"config.tasks": "'z'"}, one[1]]
    assert differences([one, moved]) == []
    missing = ["the content of config.tasks differs in process 1"]
    assert differences([one, [moved[0], {}]]) == missing
    assert len(differences([[one[0], {}], [moved[0], {}]])) == 1
    long = "the content of config.model/a differs in process 1"
    assert differences(
        [[{"config.model": "'x'"}, {}], [{"config.model": "'y'"}, {"config.model/a": "1"}]]
    ) == [long]


def test_a_process_with_other_settings_is_refused(tiny_world, tmp_path, monkeypatch):
    config = debug_tiny.get_config(str(tiny_world))
    contents = {"sft.source": "1"}
    check_alike(resolve_names(config), tmp_path, contents)  # on its own

    def other(value):
        return [value, [value[0] | {"config.seed": "?"}, value[1]]]

    monkeypatch.setattr(of_files, "gather", other)
    with pytest.raises(ValueError, match=r"config\.seed is 0 in process 0 and \? in process 1"):
        check_alike(resolve_names(config), tmp_path, contents)
    monkeypatch.setattr(of_files, "gather", lambda value: [value, value])
    check_alike(resolve_names(config), tmp_path, contents)

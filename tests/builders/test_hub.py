"""Names on the Hub in a configuration."""

import json
from pathlib import Path

import pytest

from jaxrl.builders.components import build_run_settings
from jaxrl.builders.fingerprints import compute_fingerprints
from jaxrl.builders.hub import download_files
from jaxrl.builders.resolved import resolve_names
from jaxrl.config.schema import flatten_config
from jaxrl.models.registry import read_architecture
from tests.runs import run_settings


@pytest.fixture
def world(hub, tiny_world):
    """Push the tiny world's model and questions; return the local folder."""
    model = {path.name: path.read_bytes() for path in (tiny_world / "model").iterdir()}
    hub.push("models/org/pocket", {**model, "model.bin": b"x"})
    names = ("questions_train", "questions_eval", "demonstrations")
    files = {f"{name}.jsonl": (tiny_world / f"{name}.jsonl").read_bytes() for name in names}
    hub.push("datasets/org/people", files)
    return tiny_world


def named(world, **changes):
    """Return the run's configuration with names on the hub."""
    data = "hf://datasets/org/people/"
    sources = ({"source": f"{data}questions_train.jsonl", "weight": 2.0},)
    return run_settings(
        world,
        **{
            **{"model.path": "hf://org/pocket", "sft.source": f"{data}demonstrations.jsonl"},
            **{"tasks.train.source": "", "tasks.train.sources": sources},
            "tasks.eval.source": f"{data}questions_eval.jsonl",
            **changes,
        },
    )


def recorded(c):
    """Return the configuration that a run's workdir records, as it is read on resume."""
    return json.loads(json.dumps(flatten_config(c.recorded_config)))


def test_the_run_reads_local_files_and_records_names_with_commits(hub, world):
    c = download_files(resolve_names(named(world)))
    local = resolve_names(run_settings(world))
    names = ("model.path/config.json", "model.path/model.safetensors", "tasks.eval.source")
    fingerprints, expected = compute_fingerprints(c), compute_fingerprints(local)
    assert [fingerprints[name] for name in names] == [expected[name] for name in names]
    assert fingerprints["sft.source"] == expected["sft.source"]
    assert Path(c.task_sources["train"][0].source).is_file()
    assert not (Path(c.model.path) / "model.bin").exists()
    model, data = (hub._find(f"{kind}", "main")[0] for kind in hub.commits)
    values = recorded(c)
    assert values["model.path"] == f"hf://org/pocket@{model}"
    assert values["tasks.train.sources"] == [
        {"source": f"hf://datasets/org/people@{data}/questions_train.jsonl", "weight": 2.0}
    ]
    assert build_run_settings(c).values == c.recorded_config.to_dict()  # in every checkpoint
    assert flatten_config(c.config)["model.path"] == c.model.path


def test_a_resumed_run_keeps_its_commits_when_main_has_moved(hub, world):
    first = download_files(resolve_names(named(world)))
    hub.push("models/org/pocket", {**hub.commits["models/org/pocket"][0], "config.json": b"{}"})
    hub.push("datasets/org/people", dict.fromkeys(hub.commits["datasets/org/people"][0], b"{}"))
    again = download_files(resolve_names(named(world)), recorded(first))
    assert recorded(again) == recorded(first)
    assert again.model.path == first.model.path
    # A revision in the configuration takes precedence.
    c = download_files(resolve_names(named(world, **{"model.path": "hf://org/pocket@main"})), {})
    assert c.model.path != first.model.path


def test_a_plan_downloads_config_json_only(hub, world):
    config = named(world)
    c = download_files(resolve_names(config, needs_data=False), for_plan=True)
    assert {path for path, _ in hub.downloads} == {"config.json"}
    assert read_architecture(c.model.path).num_layers


def test_a_model_behind_an_endpoint_needs_no_weights(hub, world):
    changes = {"policy.name": "openai", "stages": ("evaluate",)}
    download_files(resolve_names(named(world, **changes)))
    paths = {path for path, _ in hub.downloads}
    assert "tokenizer.json" in paths
    assert "model.safetensors" not in paths


def test_an_encoder_is_downloaded_if_the_run_searches_with_it(hub, world):
    changes = {"search.dense.encoder": "hf://org/pocket", "search.dense.corpus": "corpus.jsonl"}
    c = download_files(resolve_names(named(world, **changes)))
    assert c.search.dense.encoder == "hf://org/pocket"
    c = download_files(resolve_names(named(world, **changes, **{"search.engine": "dense"})))
    assert c.search.dense.encoder == c.model.path


def test_names_of_the_wrong_kind_and_bare_names_are_refused(hub, world):
    data = "hf://datasets/org/people/questions_eval.jsonl"
    for key, name in {"model.path": data, "tasks.eval.source": "hf://org/pocket"}.items():
        with pytest.raises(ValueError, match=rf"^config\.{key} is '{name}'; expected a [^\n]*$"):
            download_files(resolve_names(named(world, **{key: name})))
    with pytest.raises(FileNotFoundError, match=r"^[^\n]*write 'hf://Qwen/Qwen3-0\.6B'\.$"):
        read_architecture("Qwen/Qwen3-0.6B")


def test_environments_read_local_files_and_record_their_names(hub, world):
    config = named(world)
    moved = ("sft.source", "tasks.train.sources", "tasks.eval.source")
    search = {"weight": 0.5, **{key: flatten_config(config)[key] for key in moved}}
    config.update_from_flattened_dict({"sft.source": "", "tasks.train.sources": ()})
    config.tasks.eval.source = ""
    math = {"env.name": "math", **search, "tasks.train": {"split": "train"}}
    config.environments = {"search": search, "math": math}
    c = download_files(resolve_names(config))
    data = hub._find("datasets/org/people", "main")[0]
    for name, environment in c.members.items():
        [source] = environment.task_sources["train"]
        assert (Path(source.source).is_file(), source.environment) == (True, name)
        values = recorded(c)["environments"][name]
        assert values["sft.source"] == f"hf://datasets/org/people@{data}/demonstrations.jsonl"
        assert f"environments.{name}.sft.source" in compute_fingerprints(c)
    hub.push("datasets/org/people", dict.fromkeys(hub.commits["datasets/org/people"][0], b"{}"))
    again = download_files(resolve_names(config), recorded(c))
    assert recorded(again)["environments"] == recorded(c)["environments"]

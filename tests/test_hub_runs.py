"""A run whose model is on the Hub: it resumes with the same commit, and is loaded and shown."""

import json

import pytest

from jaxrl import api
from jaxrl.builders.saved_run import load_saved_run
from jaxrl.extras.serve import __main__ as serve
from jaxrl.extras.view.tokens import load_vocabulary
from jaxrl.logs.display import Display
from jaxrl.models.registry import read_architecture
from jaxrl.runtime.checkpoint import read_latest_position
from tests.runs import run_settings

pytestmark = [
    pytest.mark.minutes,
    pytest.mark.usefixtures("quick_compilation", "one_size", "no_pictures"),
]


def test_a_run_keeps_the_commit_of_its_model(hub, tiny_world, tmp_path):
    files = {path.name: path.read_bytes() for path in (tiny_world / "model").iterdir()}
    commit = hub.push("models/org/pocket", files)

    def config(name="hf://org/pocket", steps=4):
        changes = {"model.path": name, "stages": ("sft",), "sft.num_steps": steps}
        return run_settings(tiny_world, **changes, **{"checkpoint.every_steps": 2})

    run = tmp_path / "run"
    api.train(config(steps=2), run)
    (hidden := tmp_path / "hidden").mkdir()
    (run / "export").rename(hidden / "export")  # as if the run had been stopped
    # Other weights on main: a run that read them would be refused.
    weights = files["model.safetensors"]
    moved = hub.push("models/org/pocket", {**files, "model.safetensors": weights[:-64] + bytes(64)})
    with pytest.raises(ValueError, match=rf"config\.model\.path: .*{commit}.* -> .*{moved}"):
        api.train(config("hf://org/pocket@main"), run)
    api.train(config(), run)
    name = f"hf://org/pocket@{commit}"
    values = json.loads((run / "config.json").read_text())
    assert values["model"]["path"] == name
    step, position = read_latest_position(run / "checkpoints")
    assert (step, position["config"]["model.path"]) == (4, name)
    # Without a network, the saved run finds the files in the cache.
    hub.close()
    vocabulary, problem = load_vocabulary(tmp_path / "no_export", {"model.path": name})
    assert (len(vocabulary) > 256, problem) == (True, "")
    components, _ = load_saved_run(run, None, Display(), step=2)
    assert components.tokenizer.num_tokens == len(vocabulary)


def test_a_model_on_the_hub_is_served_under_its_name(hub, tiny_world, monkeypatch):
    files = {path.name: path.read_bytes() for path in (tiny_world / "model").iterdir()}
    commit = hub.push("models/org/pocket", files)

    def load_model(path, display, *, name, **_):
        raise ValueError(f"{name}: {path.name} {read_architecture(path).num_layers}")

    monkeypatch.setattr(serve, "load_model", load_model)
    with pytest.raises(SystemExit, match=rf"^error: org/pocket: {commit} 2$"):
        serve.main(["hf://org/pocket", "--port=0"])
    with pytest.raises(SystemExit, match=r"^error: RUN_OR_MODEL is 'hf://org/none'[^\n]*$"):
        serve.main(["hf://org/none", "--port=0"])

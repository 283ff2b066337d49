"""Which class computes a model, and that nothing else knows one by name."""

import json
import re
from pathlib import Path

import pytest

from jaxrl.models.architecture import ARCHITECTURES, find_architecture, read_model
from jaxrl.models.qwen import QwenConfig

PACKAGE = Path(__file__).parents[2] / "jaxrl"


def test_nothing_outside_the_room_knows_a_family_of_models():
    """Protocols and encoders have names of families; their code is in the room."""
    files = [path for path in PACKAGE.rglob("*.py") if path.parent.name != "models"]
    assert len(files) > 50
    family = "|".join({re.sub(r"\d.*", "", name) for name in ARCHITECTURES} | {"bert"})
    known = re.compile(rf"models\.({family})|models import .*({family})|({family})\d?Config", re.I)
    assert [path for path in files if known.search(path.read_text(encoding="utf-8"))] == []
    names = [path for path in files if re.search(family, path.read_text(encoding="utf-8"), re.I)]
    allowed = {"toolbox.py", "config.py", "protocol.py", "search.py", "engine.py", "encoder.py"}
    assert {path.name for path in names} <= allowed


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_config_names_its_architecture_unless_the_run_does(name):
    assert find_architecture({"model_type": name}, "", "config.json") is QwenConfig
    dotted = "jaxrl.models.qwen.QwenConfig"
    assert find_architecture({"model_type": "other"}, dotted, "config.json") is QwenConfig


def test_an_unknown_model_type_says_what_to_do(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    expected = "model_type 'mamba' is not supported; expected 'qwen2' or .*model.architecture"
    with pytest.raises(ValueError, match=expected):
        read_model(tmp_path)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("nowhere.to.be.Found", "no module 'nowhere' is on sys.path"),
        ("jaxrl.models.qwen.Llama", "qwen.py does not define 'Llama'"),
        ("no name", "expected one of qwen2, qwen3, a dotted name"),
        ("jaxrl.models.qwen.MLP", "is no subclass of jaxrl.models.architecture.Architecture"),
    ],
)
def test_a_name_of_no_architecture_is_refused(name, why):
    with pytest.raises(ValueError, match=why) as error:
        find_architecture({"model_type": "qwen3"}, name, "config.json")
    assert str(error.value).startswith("config.model.architecture ")

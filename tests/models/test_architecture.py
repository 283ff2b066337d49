"""Which class computes a model, and that nothing else knows one by name."""

import ast
import json
import re
from pathlib import Path

import pytest

from jaxrl.config.schema import KEYS
from jaxrl.models.qwen import QwenConfig
from jaxrl.models.registry import ARCHITECTURES, read_architecture, resolve_architecture

PACKAGE = Path(__file__).parents[2] / "jaxrl"


def names_and_texts(tree):
    """What code names: variables, attributes, arguments, imports, and texts but docstrings."""
    documented = ast.Module | ast.ClassDef | ast.FunctionDef
    docstrings = {
        node.body[0].value
        for node in ast.walk(tree)
        if isinstance(node, documented) and ast.get_docstring(node) is not None
    }
    docstrings |= {  # those of attributes
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node not in docstrings:
                yield node.value
        else:
            for field in ("id", "attr", "name", "arg", "module", "asname"):
                if isinstance(name := getattr(node, field, None), str):
                    yield name


EXAMPLES = "protocol='qwen'|as qwen2.5-vl|as in gpt-2 or llama 3"


def test_nothing_outside_the_room_knows_a_family_of_models():
    """A protocol of tool calls has the name of a family.

    Messages may give a model as an example. Extras know formats, in which families have names.
    """
    files = [path for path in PACKAGE.rglob("*.py") if path.parent.name != "models"]
    files = [path for path in files if path.relative_to(PACKAGE).parts[0] != "extras"]
    assert len(files) > 50
    family = re.compile("|".join({re.sub(r"\d.*", "", name) for name in ARCHITECTURES} | {"bert"}))
    found = {
        text
        for path in files
        for text in names_and_texts(ast.parse(path.read_text(encoding="utf-8")))
        if family.search(re.sub(EXAMPLES, "", text.lower()))
    }
    found -= {key.meaning for key in KEYS.values()}  # which name models as examples
    protocol = {name for name in KEYS if name.startswith("env.search.qwen.")}
    assert found == {"qwen", "follows_qwen_format", *protocol}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_config_names_its_architecture_unless_the_run_does(name):
    found = resolve_architecture({"model_type": name}, "", "config.json")
    assert f"{found.__module__}.{found.__name__}" == ARCHITECTURES[name]
    dotted = "jaxrl.models.qwen.QwenConfig"
    assert resolve_architecture({"model_type": "other"}, dotted, "config.json") is QwenConfig


def test_an_unknown_model_type_says_what_to_do(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    expected = "model_type 'mamba' is not supported; expected 'qwen2' or .*model.architecture"
    with pytest.raises(ValueError, match=expected):
        read_architecture(tmp_path)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("nowhere.to.be.Found", "nowhere"),
        ("jaxrl.models.qwen.Llama", "has no attribute 'Llama'"),
        ("no name", "expected one of qwen2"),
        ("jaxrl.models.qwen.MLP", "is not a subclass of jaxrl.models.architecture.Architecture"),
    ],
)
def test_a_name_of_no_architecture_is_refused(name, why):
    with pytest.raises(ValueError, match=why) as error:
        resolve_architecture({"model_type": "qwen3"}, name, "config.json")
    assert str(error.value).startswith("config.model.architecture ")

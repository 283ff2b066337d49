"""Names of a configuration: what they stand for, and what is said where they stand for nothing."""

import re

import pytest

from configs import debug_tiny
from jaxrl.builders.validation import validate
from jaxrl.config.keys import Key, optional
from jaxrl.config.registry import instantiate, resolve
from jaxrl.envs.base import ENVS
from jaxrl.envs.search_env import SearchEnv


def test_a_name_is_an_entry_of_the_table_or_a_dotted_one():
    assert resolve("env.name", "search", ENVS, example="x.Y") is SearchEnv
    assert resolve("env.name", "jaxrl.envs.search_env.SearchEnv", {}, example="x.Y") is SearchEnv


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (
            "env.name",
            "serch",
            "is 'serch' (did you mean 'search'?); expected one of search, math",
        ),
        ("env.name", "nowhere.Env", "nowhere"),
        ("env.name", "json.Env", "AttributeError: module 'json' has no attribute 'Env'"),
        ("env.name", "json.dumps", "json.dumps"),
        (
            "env.search.tools",
            ("json.JSONDecoder",),
            "json.JSONDecoder",
        ),
        (
            "env.search.protocol",
            "xml",
            "is 'xml'; expected one of search_r1, bapo, qwen",
        ),
        ("env.settings", {"a": 1}, "expected {}"),
        ("search.settings", {"a": 1}, "expected {}"),
        (
            "reward.weights",
            {"math": 1.0},
            "no reward part 'math'; did you mean 'format'? Known parts",
        ),
        ("reward.weights", {"my_reward.f1": 1.0}, "my_reward"),
        (
            "reward.weights",
            {"jaxrl.envs.rewards.rules.f1": 1.0},
            "'f1'",
        ),
        ("reward.correct", "bapo", "expected one of answer, exact_match"),
    ],
)
def test_what_stands_for_nothing_is_refused_with_its_key(key, value, message):
    config = debug_tiny.get_config()
    config.update_from_flattened_dict({key: value})
    with pytest.raises(ValueError, match=f"^config.{key}.*{re.escape(message)}"):
        validate(config)


def thing(engine, *, size, color="red"):
    return engine, size, color


def test_parameters_are_bound_by_name():
    assert instantiate("x.settings", thing, {"size": 2}, engine=1, other=0) == (1, 2, "red")
    with pytest.raises(ValueError, match=r"config.x.settings has 'sise'"):
        instantiate("x.settings", thing, {"sise": 2}, engine=1)
    with pytest.raises(ValueError, match=r"config.x.settings lacks 'size'"):
        instantiate("x.settings", thing, {}, engine=1)


def test_a_folder_with_nothing_but_pythons_leavings_is_not_there(tmp_path, monkeypatch):
    (tmp_path / "extras" / "kind" / "__pycache__").mkdir(parents=True)
    monkeypatch.setattr("jaxrl.config.registry.__file__", str(tmp_path / "config" / "registry.py"))
    with pytest.raises(ValueError, match=r"jaxrl/extras/kind"):
        resolve("env.name", "mine", {"mine": "jaxrl.extras.kind.thing:Env"}, example="x.Y")


def test_only_a_folder_that_is_missing_is_no_optional_one(tmp_path, monkeypatch):
    (tmp_path / "lame.py").write_text("import a_library_that_nobody_has")
    monkeypatch.syspath_prepend(tmp_path)
    assert optional("jaxrl.extras.gone.thing:function") is None
    assert optional("jaxrl.config.keys:Key") is Key
    with pytest.raises(ModuleNotFoundError, match="a_library_that_nobody_has"):
        optional("lame:function")

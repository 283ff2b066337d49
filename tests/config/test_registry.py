"""Names in a configuration: what they resolve to, and how unknown ones are refused."""

import re

import pytest

from configs import debug_tiny
from jaxrl.builders.validation import validate
from jaxrl.config.keys import Key, import_optional
from jaxrl.config.registry import instantiate, resolve
from jaxrl.envs.base import ENVS
from jaxrl.envs.search_env import SearchEnv


def test_names_resolve_by_table_or_dotted_path():
    assert resolve("env.name", "search", ENVS, example="x.Y") is SearchEnv
    assert resolve("env.name", "jaxrl.envs.search_env.SearchEnv", {}, example="x.Y") is SearchEnv


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("env.name", "serch", "is 'serch' (did you mean 'search'?); expected one of search,"),
        ("env.name", "json.Env", "AttributeError: module 'json' has no attribute 'Env'"),
        ("env.search.tools", ("json.JSONDecoder",), "json.JSONDecoder"),
        ("search.engine", "json.JSONDecoder", "a subclass of jaxrl.envs.search.base.SearchEngine"),
        ("env.settings", {"a": 1}, "expected {}"),
        ("reward.weights", {"math": 1.0}, "no reward part 'math'; did you mean 'format'?"),
        ("reward.weights", {"jaxrl.envs.rewards.rules.f1": 1.0}, "'f1'"),
        ("reward.correct", "bapo", "expected one of answer, exact_match"),
    ],
)
def test_an_unknown_name_is_refused_with_its_key(key, value, message):
    config = debug_tiny.get_config()
    config.update_from_flattened_dict({key: value})
    with pytest.raises(ValueError, match=f"^config.{key}.*{re.escape(message)}"):
        validate(config)


@pytest.mark.parametrize("section", ["env", "search"])
def test_an_unknown_name_is_refused_before_the_settings_meant_for_it(section):
    key = {"env": "env.name", "search": "search.engine"}[section]
    config = debug_tiny.get_config()
    config.update_from_flattened_dict({key: "mine", f"{section}.settings": {"a": 1}})
    with pytest.raises(ValueError, match=f"^config.{key} is 'mine'"):
        validate(config)


def build_thing(engine, *, size, color="red"):
    return engine, size, color


def test_settings_and_offered_objects_are_bound_by_name():
    assert instantiate("x.settings", build_thing, {"size": 2}, engine=1, other=0) == (1, 2, "red")
    with pytest.raises(ValueError, match=r"config\.x\.settings does not fit build_thing"):
        instantiate("x.settings", build_thing, {"sise": 2}, engine=1)
    with pytest.raises(ValueError, match=r"missing a required argument: 'size'; expected"):
        instantiate("x.settings", build_thing, {}, engine=1)


def test_a_deleted_extra_is_named():
    with pytest.raises(ValueError, match=r"jaxrl/extras/kind"):
        resolve("env.name", "mine", {"mine": "jaxrl.extras.kind.thing:Env"}, example="x.Y")


def test_an_optional_import_is_none_only_where_its_folder_is_missing(tmp_path, monkeypatch):
    (tmp_path / "broken.py").write_text("import a_library_that_nobody_has")
    monkeypatch.syspath_prepend(tmp_path)
    assert import_optional("jaxrl.extras.gone.thing:function") is None
    assert import_optional("jaxrl.config.keys:Key") is Key
    with pytest.raises(ModuleNotFoundError, match="a_library_that_nobody_has"):
        import_optional("broken:function")

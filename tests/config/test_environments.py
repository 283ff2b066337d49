"""The table `environments`: what it overrides, what it refuses, and its flat form."""

import pytest

from jaxrl.config.environments import (
    add_environment_to_errors,
    expand_environments,
    split_config,
    split_environment_key,
)
from jaxrl.config.schema import default_config, flatten_config


def configured(environments):
    config = default_config().lock()
    config.prompt.system = "shared"
    config.environments = environments
    return config


def test_an_environment_overrides_keys_of_the_run():
    config = configured(
        {
            "search": {"weight": 0.7, "tasks": {"train": {"source": "a"}}, "env.search.tools": []},
            "math": {"env.name": "math", "prompt.system": "its own", "rollout.max_turns": 1},
        }
    )
    (first, search), (second, math) = split_config(config).values()
    assert (first, second) == (0.7, 1.0)
    assert (search.tasks.train.source, math.tasks.train.source) == ("a", "")
    assert (search.env.name, math.env.name) == ("search", "math")
    assert (search.prompt.system, math.prompt.system) == ("shared", "its own")
    assert (search.env.search.tools, search.environments) == ((), {})
    assert config.env.name == "search"  # unchanged


@pytest.mark.parametrize(
    ("environments", "message"),
    [
        ({"all": {}}, "names such as 'search'"),
        ({"a": 3}, r"config.environments.a is 3; expected a mapping"),
        ({"a": {"weight": 0}}, "config.environments.a.weight is 0; expected a number above 0"),
        ({"a": {"optimizer.lr": 0.1}}, "config.environments.a sets optimizer.lr, which applies"),
        ({"a": {"tasks.trian": ""}}, "config.environments.a: there is no key config.tasks.trian"),
        ({"a": {"env.name": 3}}, "config.environments.a: config.env.name is 3; expected a value"),
        ({"a": {"env.name": "math", "env": {"name": "math"}}}, "env.name is set twice"),
    ],
)
def test_invalid_tables_are_refused(environments, message):
    with pytest.raises(ValueError, match=message):
        split_config(configured(environments))


def test_errors_name_the_environment():
    with (
        pytest.raises(ValueError, match=r"^config\.environments\.math: config\.seed is 0\.$"),
        add_environment_to_errors("math"),
    ):
        raise ValueError("config.seed is 0.")
    with pytest.raises(ValueError, match=r"^bad$"), add_environment_to_errors(""):
        raise ValueError("bad")


def test_the_flat_form_has_a_key_per_override():
    flat = flatten_config(configured({"a": {"weight": 2.0, "env": {"name": "math"}}}))
    expanded = expand_environments(flat)
    new = {"environments.a.weight": 2.0, "environments.a.env.name": "math"}
    assert expanded.items() >= new.items()
    assert expanded.keys() == flat.keys() - {"environments"} | new.keys()
    assert split_environment_key("environments.a.env.name's file") == ("a", "env.name's file")
    assert split_environment_key("env.name") == ("", "env.name")

"""What a configuration says of tools, and what is refused of it."""

import sys
from pathlib import Path

import pytest

from configs import debug_tiny
from jaxrl.builders.environment import build_tools
from jaxrl.builders.validation import validate
from jaxrl.config.schema import default_config, flatten, read_flat_config, to_json
from tests.helpers import ROOT, blocks

SERVER = str(Path(__file__).parents[1] / "extending" / "my_server.py")


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"command": "python server.py"},
        {"command": ("python",), "url": "http://localhost"},
        {"command": ("python",), "env": "KEY"},
        {"url": "http://localhost", "headers": {"Authorization": 3}},
    ],
)
def test_a_server_that_nobody_could_reach_is_refused(spec):
    config = debug_tiny.get_config()
    config.env.search.mcp = (spec,)
    with pytest.raises(ValueError, match=r"config\.env\.search\.mcp is .*; expected a tuple of"):
        validate(config)


def test_a_key_in_the_address_of_a_server_is_refused():
    config = debug_tiny.get_config()
    config.env.search.mcp = ({"url": "http://localhost/mcp?api_key=abc123"},)
    with pytest.raises(
        ValueError, match=r"env\.search\.mcp contains a parameter 'api_key'.*'headers'"
    ):
        validate(config)


def test_the_page_shows_a_configuration_with_tools_of_all_kinds():
    config = debug_tiny.get_config()
    [code] = [b for b in blocks(ROOT / "docs" / "environments.md", "python") if '"qwen"' in b]
    exec(code, {"config": config})
    config.rollout.max_total_tokens = 4096
    assert [tool.name for tool in validate(config).tools] == ["python"]


def test_servers_and_functions_make_the_tools():
    config = debug_tiny.get_config()
    config.env.search.protocol, config.search.engine = "qwen", "none"
    config.eval.final_suites = ("greedy",)
    config.env.search.mcp = ({"command": (sys.executable, SERVER)},)
    resolved, lines = validate(config), []
    assert [tool.name for tool in build_tools(resolved, lines.append)] == ["look_up"]
    assert lines == [f"the MCP server '{sys.executable} {SERVER}' offers look_up"]
    config.env.search.mcp = ({"command": (sys.executable, "-c", "pass")},)
    with pytest.raises(ValueError, match=r"config\.env\.search\.mcp holds .*Connection closed"):
        build_tools(resolved, print)
    config.env.search.mcp, config.env.search.tools = (), ("os.path.join",)
    with pytest.raises(ValueError, match=r"config\.env\.search\.tools names 'os\.path\.join'.*t"):
        validate(config)
    config.env.search.tools = ()
    with pytest.raises(
        ValueError, match=r"config\.env\.search\.tools is \(\): there is no tool to"
    ):
        validate(config)


def test_servers_read_from_a_workdir_are_as_they_were_written(tmp_path):
    config = default_config()
    config.env.search.mcp = (
        {"command": ("python", "server.py"), "env": ("KEY",)},
        {"url": "http://localhost:8000/mcp", "headers": {"Authorization": "KEY"}},
    )
    file = tmp_path / "config.json"
    file.write_text(to_json(config))
    assert read_flat_config(file) == flatten(config)

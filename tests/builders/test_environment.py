"""Tools that a configuration names: MCP servers and functions."""

import sys
from pathlib import Path

import pytest

from configs import debug_tiny
from jaxrl.builders.environment import build_tools
from jaxrl.builders.validation import validate
from jaxrl.config.schema import default_config, flatten_config, read_flat_config, serialize_config

SERVER = str(Path(__file__).parents[1] / "extending" / "my_server.py")


@pytest.mark.parametrize("spec", [{}, {"command": ("python",), "url": "http://localhost"}])
def test_a_malformed_mcp_server_is_refused(spec):
    config = debug_tiny.get_config()
    config.env.search.mcp = (spec,)
    with pytest.raises(ValueError, match=r"config\.env\.search\.mcp is .*; expected a tuple of"):
        validate(config)


def test_a_key_in_an_mcp_address_is_refused():
    config = debug_tiny.get_config()
    config.env.search.mcp = ({"url": "http://localhost/mcp?api_key=abc123"},)
    with pytest.raises(
        ValueError, match=r"env\.search\.mcp contains a parameter 'api_key'.*'headers'"
    ):
        validate(config)


def test_tools_come_from_servers_and_functions():
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


def test_mcp_servers_survive_the_workdirs_config_file(tmp_path):
    config = default_config()
    config.env.search.mcp = (
        {"command": ("python", "server.py"), "env": ("KEY",)},
        {"url": "http://localhost:8000/mcp", "headers": {"Authorization": "KEY"}},
    )
    file = tmp_path / "config.json"
    file.write_text(serialize_config(config))
    assert read_flat_config(file) == flatten_config(config)

"""Tools of real MCP servers, over standard streams and over HTTP."""

import gc
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxrl.envs.base import Episode, Outcome, Prompt, Task, ToolError
from jaxrl.envs.images import Picture, get_attached_images
from jaxrl.envs.protocol import qwen
from jaxrl.envs.search_env import SearchEnv
from jaxrl.envs.tools.base import InvalidCallError, run_call
from jaxrl.extras.mcp.servers import McpServer, McpTool

SERVER = Path(__file__).with_name("mcp_server.py")
COMMAND = (sys.executable, str(SERVER))


def by_name(tools):
    return {tool.name: tool for tool in tools}


@pytest.fixture(scope="module")
def stdio_tools():
    return by_name(McpServer({"command": COMMAND}, deadline_s=60).list_tools())


@pytest.fixture(scope="module")
def http_tools():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with subprocess.Popen([*COMMAND, str(port)], stderr=subprocess.DEVNULL) as process:
        assert until(lambda: accepts_connections(port), 60)
        server = McpServer({"url": f"http://127.0.0.1:{port}/mcp"}, deadline_s=60)
        yield by_name(server.list_tools())
        process.kill()


def accepts_connections(port):
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


def until(condition, seconds):
    deadline = time.monotonic() + seconds
    while not (is_true := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return is_true


@pytest.fixture(params=["stdio", "http"])
def tools(request):
    return request.getfixturevalue(f"{request.param}_tools")


def test_tools_are_listed_and_called(tools):
    assert set(tools) == {"add", "shout", "refuse", "wait", "die", "reveal", "several", "look"}
    add = tools["add"]
    assert add.description == "Adds two numbers."
    assert add.parameters["required"] == ["a"]
    assert add.parameters["properties"]["b"]["type"] == "integer"
    takes_text = [name for name, tool in tools.items() if tool.takes_text]
    assert takes_text == ["shout", "refuse", "reveal"]

    assert add.run(add.encode_call({"a": 1})) == "3"
    calls = [add.encode_call({"a": 1, "b": b}) for b in range(8)]
    assert add.run_batch(calls) == [str(1 + b) for b in range(8)]
    assert tools["shout"].run(tools["shout"].encode_call("hey")) == "HEY"
    assert tools["several"].run("{}").split("\n")[:2] == ["a", "b"]
    answer = run_call(tools["look"], "{}")
    assert answer == "a dot"
    assert get_attached_images(answer) == (Picture(data=b"\x89PNG of a dot"),)


def test_errors_of_a_tool_are_answers(tools):
    assert "no: reasons" in tools["refuse"].run('{"why": "reasons"}')
    assert "validation error" in tools["add"].run('{"a": "x"}')


def make_tool(properties, **schema):
    """Return a tool with a schema, without starting its server."""
    schema = {"type": "object", "properties": properties} | schema
    listed = SimpleNamespace(name="find", description="Finds.", title=None, input_schema=schema)
    return McpTool(McpServer({"command": COMMAND}), listed)


def test_nested_arguments_are_checked_to_their_depth():
    inner = {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}
    node = {"type": "object", "properties": {"in": inner}}
    tool = make_tool({"q": {"$ref": "#/$defs/n"}}, **{"$defs": {"n": node}})

    def nest(leaf):
        for _ in range(97):
            leaf = {"in": leaf}
        return {"q": leaf}

    assert tool.encode_call(nest(None))
    with pytest.raises(InvalidCallError, match=r"^arguments\['q'\]\['in'\]: "):
        tool.encode_call(nest(1))
    with pytest.raises(InvalidCallError, match="the call is nested too deeply"):
        tool.encode_call({"q": nest(nest(None))})


def test_a_call_has_a_deadline(tools):
    server = tools["wait"]._server
    deadline_s, server._deadline_s = server._deadline_s, 0.5
    try:
        with pytest.raises(ToolError, match=r"did not respond within 0\.5 s"):
            tools["wait"].run('{"seconds": 60}')
    finally:
        server._deadline_s = deadline_s
    assert tools["add"].run('{"a": 1}') == "3"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            {"command": (sys.executable, "-c", "import sys; sys.exit('no way')")},
            r"Connection closed \(its standard error ends: no way\)",
        ),
        ({"url": "http://127.0.0.1:9/mcp"}, "All connection attempts failed"),
    ],
)
def test_a_server_that_cannot_be_reached_is_an_error(spec, message):
    with pytest.raises(ToolError, match=message):
        McpServer(spec, deadline_s=60).list_tools()


def test_a_server_gets_only_named_environment_variables(monkeypatch):
    monkeypatch.setenv("JAXRL_TEST_KEY", "hunter2")
    monkeypatch.setenv("JAXRL_TEST_OTHER", "hidden")
    spec = {"command": COMMAND, "env": ("JAXRL_TEST_KEY",)}
    reveal = by_name(McpServer(spec, deadline_s=60).list_tools())["reveal"]
    assert reveal.run('{"name": "JAXRL_TEST_KEY"}') == "hunter2"
    assert reveal.run('{"name": "JAXRL_TEST_OTHER"}') == "None"
    monkeypatch.delenv("JAXRL_TEST_KEY")
    with pytest.raises(ValueError, match="names the environment variable 'JAXRL_TEST_KEY', which"):
        McpServer(spec)


HANGS = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(60)"


def test_a_server_that_does_not_start_is_killed(tmp_path):
    file = tmp_path / "pid"
    server = McpServer({"command": (sys.executable, "-c", HANGS, str(file))}, deadline_s=1)
    with pytest.raises(ToolError, match="did not respond within 1 s"):
        server.list_tools()
    assert until(lambda: not os.path.exists(f"/proc/{file.read_text()}"), 20)


SCRIPTED = """
import json, os, sys
code, message = sys.argv[1:]
for line in sys.stdin:
    request = json.loads(line)
    result = {"tools": [{"name": "t", "inputSchema": {"type": "object"}}]}
    if request["method"] == "initialize":
        version = request["params"]["protocolVersion"]
        about = {"name": "x", "version": "1"}
        result = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": about}
    answer = {"jsonrpc": "2.0", "id": request.get("id"), "result": result}
    if request["method"] == "tools/call":
        del answer["result"]
        answer["error"] = {"code": int(code), "message": message + os.environ["MCP_KEY"]}
    if "id" in request:
        print(json.dumps(answer), flush=True)
"""


@pytest.mark.parametrize(("code", "message"), [(-32000, "no access with "), (-32602, "x" * 1960)])
def test_an_error_of_a_server_is_redacted_before_it_is_cut(code, message, monkeypatch):
    monkeypatch.setenv("MCP_KEY", "sk-live-" + "0123456789abcdef" * 8)
    command = (sys.executable, "-c", SCRIPTED, str(code), message)
    [tool] = McpServer({"command": command, "env": ("MCP_KEY",)}, deadline_s=60).list_tools()
    answer = str(run_call(tool, "{}"))
    assert message[:9] in answer
    assert "012345" not in answer
    if message.startswith("no"):
        assert answer.endswith(": MCPError: no access with ***")


def test_patterns_are_not_checked():
    tool = make_tool({"x": {"type": "string", "pattern": "^(a+)+$"}})
    start = time.process_time()
    tool.check_arguments({"x": "a" * 60 + "b"})  # on which Python's `re` would not end
    assert time.process_time() - start < 5
    with pytest.raises(InvalidCallError, match="is not of type 'string'"):
        tool.check_arguments({"x": 1})


def test_no_server_process_outlives_its_tools(tmp_path):
    file = tmp_path / "pid"
    command = ("sh", "-c", 'echo $$ > "$0"; exec "$@"', str(file))
    server = McpServer({"command": (*command, sys.executable, "-c", SCRIPTED, "0", "")})
    assert len(server.list_tools()) == 1
    process = f"/proc/{file.read_text().strip()}"
    assert os.path.exists(process)
    del server
    gc.collect()
    assert until(lambda: not os.path.exists(process), 10)


TALKS = """
import os, sys
for _ in range({times}):
    print("no access with", os.environ["LONG_KEY"], file=sys.stderr)
sys.exit(1)
"""


@pytest.mark.parametrize("times", [1, 100])
def test_standard_error_shows_no_part_of_a_long_key(times, monkeypatch):
    monkeypatch.setenv("LONG_KEY", "eyJ" + "ab1Cd2Ef3" * 200)
    spec = {"command": (sys.executable, "-c", TALKS.format(times=times)), "env": ("LONG_KEY",)}
    with pytest.raises(ToolError) as raised:
        McpServer(spec, deadline_s=60).list_tools()
    assert "Cd2Ef" not in str(raised.value)
    assert times == 100 or "no access with ***" in str(raised.value)


def test_they_answer_tool_calls(stdio_tools):
    env = SearchEnv(
        None,
        tools=[stdio_tools[name] for name in ("add", "several", "die")],
        protocol=qwen,
        prompt=Prompt(system="", template="{question}"),
        max_turns=2,
    )
    assert [tool["function"]["name"] for tool in env.chat_tools] == ["add", "several", "die"]
    episode = Episode(task=Task(id="t", question="?", answers=("x",)))

    def call(name, arguments="{}"):
        return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'

    too_deep = '{"a": ' * 900 + "1" + "}" * 900
    arguments = ['{"a": 1}', '{"a": "x"}', "{}", '{"a": 1, "c": 2}', too_deep]
    turn = "".join(call("add", text) for text in arguments) + call("several")
    [reply] = env.step([episode], [turn])
    *answers, several = reply.observation.bodies
    assert answers == [
        "3",
        "error: arguments['a']: 'x' is not of type 'integer'",
        "error: argument 'a' is missing; it takes a, b",
        "error: unknown argument 'c'; it takes a, b",
        "error: the call is nested too deeply",
    ]
    assert "</tool_response>" not in several
    # A server that dies is an error of the environment, and is started again.
    [reply] = env.step([episode], [call("die")])
    assert reply.outcome == Outcome.ENVIRONMENT_ERROR
    assert stdio_tools["add"].run('{"a": 1}') == "3"

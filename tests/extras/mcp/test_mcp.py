"""Tools of real MCP servers: one on its standard streams, one over HTTP."""

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
from jaxrl.envs.images import Picture, attached_images
from jaxrl.envs.protocol import qwen
from jaxrl.envs.search_env import SearchEnv
from jaxrl.envs.tools.base import CallError, run_call
from jaxrl.extras.mcp.servers import McpServer, McpTool

SERVER = Path(__file__).with_name("mcp_server.py")
COMMAND = (sys.executable, str(SERVER))


def named(tools):
    return {tool.name: tool for tool in tools}


@pytest.fixture(scope="module")
def stdio():
    return named(McpServer({"command": COMMAND}, deadline_s=60).tools())


@pytest.fixture(scope="module")
def http_tools():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with subprocess.Popen([*COMMAND, str(port)], stderr=subprocess.DEVNULL) as process:
        ends = time.monotonic() + 60
        while time.monotonic() < ends:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                time.sleep(0.1)
        server = McpServer({"url": f"http://127.0.0.1:{port}/mcp"}, deadline_s=60)
        yield named(server.tools())
        process.kill()


@pytest.fixture(params=["stdio", "http"])
def tools(request):
    return request.getfixturevalue({"http": "http_tools"}.get(request.param, request.param))


def test_images_stand_behind_the_text(tools):
    answer = run_call(tools["look"], "{}")
    assert answer == "a dot"
    assert attached_images(answer) == (Picture(data=b"\x89PNG of a dot"),)


def test_tools_are_listed_with_their_schemas(tools):
    assert set(tools) == {"add", "shout", "refuse", "wait", "die", "reveal", "several", "look"}
    add = tools["add"]
    assert add.description == "Adds two numbers."
    assert add.parameters["required"] == ["a"]
    assert add.parameters["properties"]["b"]["type"] == "integer"
    assert [name for name, tool in tools.items() if tool.takes_text] == [
        *("shout", "refuse", "reveal"),
    ]


def test_calls_are_answered(tools):
    add = tools["add"]
    assert add.run(add.encode_call({"a": 1})) == "3"
    calls = [add.encode_call({"a": 1, "b": b}) for b in range(8)]
    assert add.run_batch(calls) == [str(1 + b) for b in range(8)]
    assert tools["shout"].run(tools["shout"].encode_call("hey")) == "HEY"
    assert tools["several"].run("{}").split("\n")[:2] == ["a", "b"]


def test_what_a_tool_calls_an_error_is_an_answer(tools):
    assert "no: reasons" in tools["refuse"].run('{"why": "reasons"}')


def listed(schema):
    return SimpleNamespace(name="find", description="Finds.", title=None, input_schema=schema)


@pytest.mark.parametrize(
    "reference", ["#/$defs/Missing", "http://127.0.0.1:1/schema.json", "other.json", "#nowhere"]
)
def test_a_missing_reference_is_an_error_of_the_server(reference):
    schema = {"type": "object", "properties": {"place": {"items": {"$ref": reference}}}}
    tool = McpTool(McpServer({"command": COMMAND}), listed(schema))
    with pytest.raises(ToolError, match="the tool 'find' with a schema that cannot be used"):
        tool.encode_call({"place": ["here"]})


def test_references_within_a_schema_are_followed():
    definitions = {
        "Place": {"enum": ["here", "there"]},
        "Places": {"items": {"$ref": "#/$defs/Place"}},
    }
    schema = {
        "type": "object",
        "properties": {"places": {"$ref": "#/$defs/Places"}, "$ref": {"type": "integer"}},
        "$defs": definitions,
    }
    tool = McpTool(McpServer({"command": COMMAND}), listed(schema))
    assert tool.encode_call({"places": ["here"], "$ref": 1})
    with pytest.raises(CallError, match=r"arguments\['places'\]\[0\]: 'nowhere' is not one of"):
        tool.encode_call({"places": ["nowhere"]})


def test_a_tree_of_arguments_is_checked_to_its_depth():
    inner = {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}
    node = {"type": "object", "properties": {"in": inner}}
    schema = {"type": "object", "properties": {"q": {"$ref": "#/$defs/n"}}, "$defs": {"n": node}}
    tool = McpTool(McpServer({"command": COMMAND}), listed(schema))

    def tree(leaf):
        for _ in range(97):
            leaf = {"in": leaf}
        return {"q": leaf}

    assert tool.encode_call(tree(None))
    with pytest.raises(CallError, match=r"^arguments\['q'\]\['in'\]: "):
        tool.encode_call(tree(1))
    with pytest.raises(CallError, match="the call is nested too deeply"):
        tool.encode_call({"q": tree(tree(None))})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"a": "x"}, "arguments['a']: 'x' is not of type 'integer'"),
        ({"a": 1.5}, "arguments['a']: 1.5 is not of type 'integer'"),
        ({}, "argument 'a' is missing; it takes a, b"),
        ({"a": 1, "c": 2}, "unknown argument 'c'; it takes a, b"),
    ],
)
def test_wrong_arguments_are_told_before_the_server_is_asked(stdio, arguments, message):
    with pytest.raises(CallError) as raised:
        stdio["add"].encode_call(arguments)
    assert str(raised.value) == message


def test_what_the_server_refuses_is_an_answer_too(tools):
    assert "validation error" in tools["add"].run('{"a": "x"}')


def test_a_call_that_takes_too_long_has_failed(tools):
    server = tools["wait"]._server
    deadline_s, server._deadline_s = server._deadline_s, 1.0
    try:
        begin = time.monotonic()
        with pytest.raises(
            ToolError, match=r"did not respond within 1 s \(config\.env\.search\.tool_de"
        ):
            tools["wait"].run('{"seconds": 60}')
        assert time.monotonic() - begin < 10
    finally:
        server._deadline_s = deadline_s
    assert tools["add"].run('{"a": 1}') == "3"


def test_a_server_that_dies_is_our_failure_and_is_started_again():
    tools = named(McpServer({"command": COMMAND}, deadline_s=60).tools())
    answer = run_call(tools["die"], "{}")
    assert isinstance(answer, ToolError)
    assert "mcp_server.py': " in str(answer)
    assert tools["add"].run('{"a": 1}') == "3"
    [answer] = tools["die"].answer_all(["{}"])
    assert (type(answer.result), answer.record.attempts) == (ToolError, 2)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"command": ("/nowhere/server",)}, "No such file or directory"),
        (
            {"command": (sys.executable, "-c", "import sys; sys.exit('no way')")},
            r"Connection closed \(its standard error ends: no way\)",
        ),
        ({"url": "http://127.0.0.1:9/mcp"}, "All connection attempts failed"),
    ],
)
def test_a_server_that_cannot_be_reached_is_refused(spec, message):
    with pytest.raises(ToolError, match=message):
        McpServer(spec, deadline_s=60).tools()


def test_environment_variables_are_given_by_their_names(monkeypatch):
    monkeypatch.setenv("JAXRL_TEST_KEY", "hunter2")
    monkeypatch.setenv("JAXRL_TEST_OTHER", "hidden")
    spec = {"command": COMMAND, "env": ("JAXRL_TEST_KEY",)}
    reveal = named(McpServer(spec, deadline_s=60).tools())["reveal"]
    assert reveal.run('{"name": "JAXRL_TEST_KEY"}') == "hunter2"
    assert reveal.run('{"name": "JAXRL_TEST_OTHER"}') == "None"
    talks = "import os, sys; sys.exit('key ' + os.environ['JAXRL_TEST_KEY'])"
    with pytest.raises(ToolError, match=r"ends: key \*\*\*"):
        McpServer({**spec, "command": (sys.executable, "-c", talks)}, deadline_s=60).tools()
    monkeypatch.delenv("JAXRL_TEST_KEY")
    with pytest.raises(ValueError, match="names the environment variable 'JAXRL_TEST_KEY', which"):
        McpServer(spec)


HANGS = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(60)"


def test_a_server_that_does_not_begin_is_ended(tmp_path):
    noted = tmp_path / "pid"
    server = McpServer({"command": (sys.executable, "-c", HANGS, str(noted))}, deadline_s=2)
    with pytest.raises(ToolError, match="did not respond within 2 s"):
        server.tools()
    ends = time.monotonic() + 20
    while os.path.exists(f"/proc/{noted.read_text()}") and time.monotonic() < ends:
        time.sleep(0.05)
    assert time.monotonic() < ends


SCRIPTED = """
import json, os, sys
code, message = sys.argv[1:]
for line in sys.stdin:
    asked = json.loads(line)
    result = {"tools": [{"name": "t", "inputSchema": {"type": "object"}}]}
    if asked["method"] == "initialize":
        version = asked["params"]["protocolVersion"]
        about = {"name": "x", "version": "1"}
        result = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": about}
    answer = {"jsonrpc": "2.0", "id": asked.get("id"), "result": result}
    if asked["method"] == "tools/call":
        del answer["result"]
        answer["error"] = {"code": int(code), "message": message + os.environ["MCP_KEY"]}
    if "id" in asked:
        print(json.dumps(answer), flush=True)
"""


@pytest.mark.parametrize(
    ("code", "message"), [(-32000, "no access with "), (-32000, "x" * 1960), (-32602, "x" * 1960)]
)
def test_an_error_of_a_server_is_redacted_before_it_is_cut(code, message, monkeypatch):
    monkeypatch.setenv("MCP_KEY", "sk-live-" + "0123456789abcdef" * 8)
    command = (sys.executable, "-c", SCRIPTED, str(code), message)
    [tool] = McpServer({"command": command, "env": ("MCP_KEY",)}, deadline_s=60).tools()
    answer = str(run_call(tool, "{}"))
    assert message[:9] in answer
    assert "012345" not in answer
    if message.startswith("no"):
        assert answer.endswith(": MCPError: no access with ***")


@pytest.mark.parametrize("properties", [None, {"x": {"type": "nonsense"}}])
def test_a_schema_that_cannot_be_read_is_refused_before_a_call(properties):
    with pytest.raises(ToolError, match="lists the tool 'find' with a schema that is not valid: "):
        McpTool(McpServer({"command": COMMAND}), listed({"properties": properties}))


def test_a_pattern_is_left_to_the_server():
    pattern = {"type": "string", "pattern": "^(a+)+$"}
    schema = {"type": "object", "properties": {"x": pattern}}
    tool = McpTool(McpServer({"command": COMMAND}), listed(schema))
    start = time.process_time()
    tool.check({"x": "a" * 60 + "b"})  # on which Python's `re` would not end
    assert time.process_time() - start < 5
    with pytest.raises(CallError, match="is not of type 'string'"):
        tool.check({"x": 1})


def test_arguments_too_deep_to_be_checked_are_the_models_mistake(stdio):
    prompt = Prompt(system="", template="{question}")
    env = SearchEnv(None, tools=[stdio["add"]], prompt=prompt, max_turns=5, protocol=qwen)
    deep = '{"x": ' * 900 + "1" + "}" * 900
    call = f'<tool_call>{{"name": "add", "arguments": {{"a": {deep}}}}}</tool_call>'
    [reply] = env.step([Episode(task=Task(id="t", question="?", answers=("x",)))], [call])
    assert reply.observation.bodies == ("error: the call is nested too deeply",)


def test_no_server_is_left(tmp_path):
    noted = tmp_path / "pid"
    script = 'echo $$ > "$0"; exec "$@"'
    server = McpServer({"command": ("sh", "-c", script, str(noted), *COMMAND)}, deadline_s=60)
    assert len(server.tools()) == 8
    process = f"/proc/{noted.read_text().strip()}"
    assert os.path.exists(process)
    del server
    gc.collect()
    ends = time.monotonic() + 10
    while os.path.exists(process) and time.monotonic() < ends:
        time.sleep(0.1)
    assert not os.path.exists(process)


def test_they_answer_tool_calls(stdio):
    settings = {"prompt": Prompt(system="", template="{question}"), "max_turns": 2}
    chosen = [stdio[name] for name in ("add", "several", "die")]
    env = SearchEnv(None, tools=chosen, protocol=qwen, **settings)
    assert [tool["function"]["name"] for tool in env.chat_tools] == ["add", "several", "die"]
    call = '<tool_call>{"name": "%s", "arguments": {%s}}</tool_call>'
    episode = Episode(task=Task(id="t", question="?", answers=("x",)))
    turn = call % ("add", '"a": 1') + call % ("add", '"a": "x"') + call % ("several", "")
    [right] = env.step([episode], [turn])
    [dead] = env.step([episode], [call % ("die", "")])
    added, wrong, several = right.observation.bodies
    assert (added, wrong) == ("3", "error: arguments['a']: 'x' is not of type 'integer'")
    assert "</tool_response>" not in several
    assert dead.outcome == Outcome.ENVIRONMENT_ERROR


TALKS = """
import os, sys
for _ in range({times}):
    print("no access with", os.environ["LONG_KEY"], file=sys.stderr)
sys.exit(1)
"""


@pytest.mark.parametrize("times", [1, 100])
def test_what_a_server_says_before_it_ends_shows_no_piece_of_a_long_key(times, monkeypatch):
    monkeypatch.setenv("LONG_KEY", "eyJ" + "ab1Cd2Ef3" * 200)
    spec = {"command": (sys.executable, "-c", TALKS.format(times=times)), "env": ("LONG_KEY",)}
    with pytest.raises(ToolError) as raised:
        McpServer(spec, deadline_s=60).tools()
    assert "Cd2Ef" not in str(raised.value)
    assert times == 100 or "no access with ***" in str(raised.value)

"""Tools from Model Context Protocol servers (https://modelcontextprotocol.io)."""

from __future__ import annotations

import asyncio
import atexit
import base64
import contextlib
import json
import logging
import os
import tempfile
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any, TextIO, cast

from jaxrl.config.keys import reject_value
from jaxrl.envs.base import ToolError
from jaxrl.envs.images import Picture, TextWithImages
from jaxrl.envs.tools.base import InvalidCallError, JsonTool, Tool, check_argument_names
from jaxrl.utils.concurrency import (
    DeadlineError,
    format_error,
    get_event_loop,
    run_with_deadline,
)
from jaxrl.utils.http_client import check_url
from jaxrl.utils.json_io import is_too_deep
from jaxrl.utils.secrets import redact, register_secret
from jaxrl.utils.text import MAX_ERROR_CHARS

_INVALID_PARAMS = -32602
"""JSON-RPC error code for invalid arguments."""

_CLOSE_S = 5.0
"""Seconds to wait for connections to close at exit."""

_STDERR_BYTES = 2**16
_STDERR_CHARS = 500
"""Maximum bytes to read from the end of stderr, and maximum characters to show in an error."""


def check_servers(specs: Sequence[Any]) -> None:
    """Validate the format of `config.env.search.mcp`.

    Raises:
        ValueError: An entry does not describe a server.
    """
    for spec in specs:
        if not _is_valid_spec(spec):
            reject_value(
                "env.search.mcp",
                specs,
                'a tuple of {"command": ("python", "server.py"), "env": ("MY_KEY",)} or '
                '{"url": "http://..", "headers": {"Authorization": "MY_KEY"}}; "env" and "headers" '
                "name environment variables and may be left out",
            )
        if "url" in spec:
            check_url("env.search.mcp", spec["url"], keys_from="the 'headers' of the same server")


def _is_valid_spec(spec: Any) -> bool:
    match spec:
        case {"command": [_, *_], **others}:
            return others.keys() <= {"env"}
        case {"url": str(), **others}:
            return others.keys() <= {"headers"}
    return False


def connect_tools(
    specs: Sequence[Mapping[str, Any]], deadline_s: float, log: Callable[[str], None]
) -> list[Tool]:
    """Connect to MCP servers and return their tools.

    Args:
        specs: One entry per server, checked by `check_servers`.
        deadline_s: Timeout per call and per connection attempt, in seconds.
        log: Callback that logs the tool names of each server.

    Raises:
        ValueError: A server cannot be reached, or the `mcp` package is not installed.
    """
    tools: list[Tool] = []
    for spec in specs:
        try:
            server = McpServer(spec, deadline_s=deadline_s)
            server_tools = server.list_tools()
        except (ImportError, ToolError) as error:
            raise ValueError(f"config.env.search.mcp holds {spec!r}: {error}.") from error
        names = ", ".join(tool.name for tool in server_tools)
        log(f"the MCP server {server.name!r} offers {names}")
        tools += server_tools
    return tools


class McpServer:
    """Client for an MCP server. It connects on first use, and reconnects if the server dies.

    Connections run on the event loop of `get_event_loop`. The public methods are thread-safe.
    """

    def __init__(self, spec: Mapping[str, Any], *, deadline_s: float = 60.0) -> None:
        """Read settings and secrets without connecting.

        Args:
            spec: `command` (a list of arguments) and `env` (names of environment variables to pass
                in addition to PATH, HOME and others) of a stdio server, or `url` and `headers`
                (name of the environment variable with the value of each HTTP header) of a
                streamable HTTP server.
            deadline_s: Timeout per call and per connection attempt, in seconds.

        Raises:
            ImportError: The `mcp` package is not installed.
            ValueError: An environment variable is not set.
        """
        try:
            import mcp  # noqa: F401
        except ImportError as error:
            raise ImportError("MCP servers need mcp; pip install 'jaxrl[mcp]'.") from error
        # The package logs messages of servers, which may contain secrets.
        logging.getLogger("mcp").setLevel(logging.CRITICAL)
        self._spec, self._deadline_s = spec, deadline_s
        self.name = " ".join(spec["command"]) if "command" in spec else str(spec["url"])
        self._env = {name: _read_secret(name) for name in spec.get("env", ())}
        self._headers = {
            header: _read_secret(name) for header, name in spec.get("headers", {}).items()
        }
        # The file is closed when this object is deleted.
        self._stderr = cast(TextIO, tempfile.TemporaryFile("w+", errors="replace"))  # noqa: SIM115
        self._connection: _Connection | None = None
        self._lock = asyncio.Lock()

    def list_tools(self) -> list[McpTool]:
        """Return the tools that the server lists.

        Raises:
            ToolError: The server cannot be reached.
        """
        return [McpTool(self, tool) for tool in self._run_coroutine(self._list_tools())]

    def call_tool(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Call a tool; return its text, which may be an error message.

        Raises:
            InvalidCallError: The server rejects the arguments.
            ToolError: The server cannot be reached, or does not respond in time.
        """
        return _extract_result_text(self._run_coroutine(self._call_tool(name, arguments)))

    def _run_coroutine(self, coroutine: Any) -> Any:
        try:
            return run_with_deadline(self._deadline_s, coroutine)
        except DeadlineError as error:
            self._disconnect()
            raise ToolError(
                f"the MCP server {self.name!r} did not respond within {self._deadline_s:g} s "
                "(config.env.search.tool_deadline_s)"
            ) from error
        except Exception as error:  # transports raise many types
            if getattr(error, "code", None) == _INVALID_PARAMS:
                raise InvalidCallError(redact(str(error))[:MAX_ERROR_CHARS]) from error
            stderr = self._read_stderr()
            self._disconnect()
            text = "; ".join(map(format_error, _flatten_error(error)))[:MAX_ERROR_CHARS]
            raise ToolError(f"the MCP server {self.name!r}: {text}{stderr}") from None

    async def _list_tools(self) -> list[Any]:
        client = await self._get_client()
        page = await client.list_tools()
        tools = [*page.tools]
        while page.next_cursor is not None:
            page = await client.list_tools(cursor=page.next_cursor)
            tools += page.tools
        return tools

    async def _call_tool(self, name: str, arguments: Mapping[str, Any]) -> Any:
        client = await self._get_client()
        return await client.call_tool(name, dict(arguments))

    async def _get_client(self) -> Any:
        async with self._lock:
            if self._connection is None or self._connection.task.done():
                arguments = self._spec, self._env, self._headers, self._stderr, self._deadline_s
                self._connection = _Connection(_open_client(*arguments))
                weakref.finalize(self, self._connection.close).atexit = False
            return await asyncio.shield(self._connection.client)

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _read_stderr(self) -> str:
        """Return the end of the server's stderr if it failed to start, for an error message."""
        connection = self._connection
        if connection is not None and connection.is_open:
            return ""
        size = os.fstat(self._stderr.fileno()).st_size
        data = os.pread(self._stderr.fileno(), _STDERR_BYTES, max(size - _STDERR_BYTES, 0))
        text = data.decode("utf-8", "replace")
        if size > _STDERR_BYTES:  # the first word may be part of a secret
            text = text.partition(" ")[2]
        stderr_tail = redact(text).strip()[-_STDERR_CHARS:]
        return f" (its standard error ends: {stderr_tail})" if stderr_tail else ""


@contextlib.asynccontextmanager
async def _open_client(
    spec: Mapping[str, Any],
    env: Mapping[str, str],
    headers: Mapping[str, str],
    stderr: TextIO,
    deadline_s: float,
) -> AsyncIterator[Any]:
    """Open a client with the transport that `spec` describes."""
    import httpx2
    import mcp
    from mcp.client.stdio import StdioServerParameters, stdio_client
    from mcp.client.streamable_http import streamable_http_client

    async with contextlib.AsyncExitStack() as stack:
        if "command" in spec:
            program, *arguments = spec["command"]
            parameters = StdioServerParameters(command=program, args=arguments, env=dict(env))
            transport: Any = stdio_client(parameters, errlog=stderr)
        else:
            http = httpx2.AsyncClient(headers=dict(headers), timeout=deadline_s)
            await stack.enter_async_context(http)
            transport = streamable_http_client(spec["url"], http_client=http)
        yield await stack.enter_async_context(mcp.Client(transport, cache=None))


class _Connection:
    """Open connection to a server. A single task opens and closes it, as anyio requires."""

    def __init__(self, client_context: contextlib.AbstractAsyncContextManager[Any]) -> None:
        """Start opening the client on the running event loop."""
        self.client: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._closing = asyncio.Event()
        self.task = asyncio.create_task(self._keep_open(client_context))
        _CONNECTIONS.add(self)

    @property
    def is_open(self) -> bool:
        """True once the client is connected."""
        return self.client.done() and self.client.exception() is None

    async def _keep_open(self, client_context: contextlib.AbstractAsyncContextManager[Any]) -> None:
        try:
            async with client_context as client:
                self.client.set_result(client)
                await self._closing.wait()
        except BaseException as error:
            if self.client.done():
                if not isinstance(error, Exception):
                    raise
                return
            is_cancelled = isinstance(error, asyncio.CancelledError)
            self.client.set_exception(ConnectionError("cancelled") if is_cancelled else error)
            self.client.exception()  # mark as retrieved, since nothing may await it

    def close(self) -> None:
        """Schedule closing the connection, even while it is opening. Thread-safe."""
        get_event_loop().call_soon_threadsafe(self._close)

    def _close(self) -> None:
        self._closing.set()
        if not self.client.done():
            self.task.cancel()


_CONNECTIONS: weakref.WeakSet[_Connection] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Close all connections at exit, so that servers do not keep running."""
    tasks = [connection.task for connection in _CONNECTIONS if not connection.task.done()]
    for connection in _CONNECTIONS:
        connection.close()

    async def wait_for_tasks() -> None:
        await asyncio.wait(tasks)

    if tasks:
        with contextlib.suppress(Exception):
            asyncio.run_coroutine_threadsafe(wait_for_tasks(), get_event_loop()).result(_CLOSE_S)


def _read_secret(name: str) -> str:
    """Read an environment variable and register its value as a secret."""
    value = os.environ.get(name)
    if not value:
        raise ValueError(
            f"config.env.search.mcp names the environment variable {name!r}, which is not set."
        )
    is_path = os.path.isabs(value) and os.path.exists(value)
    if not is_path:  # paths are not secrets and appear in results
        register_secret(value)
    return value


def _flatten_error(error: BaseException) -> Iterator[BaseException]:
    """Yield the leaf exceptions of an error, which may be an exception group."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _flatten_error(inner)
    else:
        yield error


def _extract_result_text(result: Any) -> str:
    """Extract the text and images of a result, or its JSON if it has no content."""
    texts, images = [], []
    for block in result.content:
        resource = getattr(block, "resource", None)
        text = getattr(block, "text", None) or getattr(resource, "text", None)
        if block.type == "image":
            images.append(Picture(data=base64.b64decode(block.data, validate=True)))
        else:
            texts.append(text if isinstance(text, str) else f"[{block.type}]")
    if not (texts or images) and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    text = "\n".join(texts)
    return TextWithImages(text, images) if images else text or "(nothing)"


class McpTool(JsonTool):
    """Tool from an MCP server, with arguments validated against the server's schema."""

    def __init__(self, server: McpServer, listing: Any) -> None:
        """Read the tool's name, description and schema from the server's listing."""
        import jsonschema
        import referencing

        self.name = redact(str(listing.name))
        self._server = server
        self._description = redact(str(listing.description or listing.title or self.name))
        self._schema = {"properties": {}, "required": [], **redact(listing.input_schema)}
        # Do not check patterns, which may use another regex dialect; the server does.
        validator_class = jsonschema.validators.extend(
            jsonschema.Draft202012Validator,
            dict.fromkeys(("pattern", "patternProperties"), lambda *_: None),
        )
        # With an empty registry, remote references are not fetched.
        self._validator = validator_class(self._schema, registry=referencing.Registry())

    @property
    def description(self) -> str:
        """The server's description of the tool."""
        return self._description

    @property
    def parameters(self) -> Mapping[str, Any]:
        """JSON schema of the arguments."""
        return self._schema

    def check_arguments(self, arguments: Mapping[str, Any]) -> None:
        """Validate arguments against the tool's schema.

        Raises:
            InvalidCallError: The arguments do not match the schema.
        """
        if not self._schema.get("additionalProperties"):  # most servers omit it
            check_argument_names(
                arguments, list(self._schema["properties"]), self._schema["required"]
            )
        if is_too_deep(json.dumps(arguments), arguments):
            raise InvalidCallError("the call is nested too deeply")
        error = next(self._validator.iter_errors(arguments), None)
        if error is not None:
            path = "".join(f"[{key!r}]" for key in error.absolute_path)
            raise InvalidCallError(f"arguments{path}: {error.message[:500]}")

    def run(self, call: str, /) -> str:
        """Call the tool on the server.

        Raises:
            ToolError: The server cannot be reached, or does not respond in time.
        """
        try:
            return self._server.call_tool(self.name, json.loads(call))
        except InvalidCallError as error:
            return f"error: {error}"

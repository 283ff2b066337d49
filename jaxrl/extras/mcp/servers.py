"""Tools of servers that speak the Model Context Protocol (https://modelcontextprotocol.io)."""

from __future__ import annotations

import asyncio
import atexit
import base64
import contextlib
import functools
import importlib
import json
import logging
import os
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any

from jaxrl.config.keys import refuse
from jaxrl.envs.base import ToolError
from jaxrl.envs.images import Picture, Pictured
from jaxrl.envs.tools.base import CallError, JsonTool, Tool, check_names
from jaxrl.extras.mcp.transport import MAX_ANSWER_MIB, MAX_TOLD, StdioServer, bounded_client
from jaxrl.utils.concurrency import MAX_ERROR, LateError, error_text, event_loop, within
from jaxrl.utils.http_client import check_url
from jaxrl.utils.json_io import is_too_deep
from jaxrl.utils.secrets import redact, register_secret
from jaxrl.utils.worker_pool import WorkerLostError, WorkerPool

_INVALID_PARAMS = -32602  # of JSON-RPC: the arguments are wrong
_CLOSING_S = 5.0
_MAX_TOOLS, _MAX_PAGES = 1_000, 100  # of a list, many times what any server has
_SHOWN = 500  # characters of what a server wrote on its standard error


def check_servers(specs: Sequence[Any]) -> None:
    """Refuses servers in `config.env.search.mcp` that do not say how to reach them.

    Raises:
        ValueError: says what is expected.
    """
    for spec in specs:
        if not _is_server(spec):
            refuse(
                "env.search.mcp",
                specs,
                'a tuple of {"command": ("python", "server.py"), "env": ("MY_KEY",)} or '
                '{"url": "http://..", "headers": {"Authorization": "MY_KEY"}}; "env" and "headers" '
                "name environment variables and may be left out",
            )
        if "url" in spec:
            check_url("env.search.mcp", spec["url"], keys_from="the 'headers' beside it")


def _is_server(spec: Any) -> bool:
    match spec:
        case {"command": list() | tuple() as command, **others} if command:
            names = others.pop("env", ())
            texts = (*command, *names) if isinstance(names, list | tuple) else (None,)
        case {"url": str() as url, **others} if url:
            headers = others.pop("headers", {})
            texts = (*headers, *headers.values()) if isinstance(headers, dict) else (None,)
        case _:
            return False
    return not others and all(isinstance(text, str) for text in texts)


def offered_tools(
    specs: Sequence[Mapping[str, Any]], deadline_s: float, log: Callable[[str], None]
) -> list[Tool]:
    """Asks servers, which were checked, for their tools.

    Args:
        specs: one for each server, see `McpServer`.
        deadline_s: seconds for a call, and for making the connection.
        log: told the names of each server's tools.

    Raises:
        ValueError: a server cannot be reached, or is configured by what there is not.
    """
    tools: list[Tool] = []
    for spec in specs:
        try:
            server = McpServer(spec, deadline_s=deadline_s)
            offered = server.tools()
        except (ImportError, ToolError) as error:
            raise ValueError(f"config.env.search.mcp holds {spec!r}: {error}.") from error
        names = ", ".join(tool.name for tool in offered)
        log(f"the MCP server {server.name!r} offers {names}")
        tools += offered
    return tools


class McpServer:
    """A connection to a server, made when it is needed and again after it has died.

    All of it lives in `event_loop`; `tools` and `call` may be called from any thread.
    """

    def __init__(self, spec: Mapping[str, Any], *, deadline_s: float = 60.0) -> None:
        """Connects to nothing yet.

        Args:
            spec: either `command`, the words of a command that serves on its standard streams, and
                `env`, names of environment variables that it gets beside PATH, HOME and the like;
                or `url`, of a server of streamable HTTP, and `headers`, names of environment
                variables that hold the values of HTTP headers.
            deadline_s: seconds for a call, and for making the connection.

        Raises:
            ImportError: the package mcp is not installed.
            ValueError: an environment variable is not set.
        """
        try:
            self._mcp: Any = importlib.import_module("mcp")
            # It logs what servers send, keys too; what is wrong with that, we are told anyway.
            logging.getLogger("mcp").setLevel(logging.CRITICAL)
        except ImportError as error:
            raise ImportError("MCP servers need mcp; pip install 'jaxrl[mcp]'.") from error
        self._spec, self._deadline_s = spec, deadline_s
        self.name = " ".join(spec["command"]) if "command" in spec else str(spec["url"])
        self._env = {name: _variable(name) for name in spec.get("env", ())}
        self._headers = {
            header: _variable(name) for header, name in spec.get("headers", {}).items()
        }
        self._stderr = bytearray()  # the end of what it wrote on its standard error
        self._held: _Held | None = None
        self._lock: asyncio.Lock | None = None

    def tools(self) -> list[McpTool]:
        """The tools that the server lists.

        Raises:
            ToolError: it cannot be reached, or lists none.
        """
        listed = self._ask(self._list())
        if not listed:
            raise ToolError(f"the MCP server {self.name!r} lists no tools")
        return [McpTool(self, tool) for tool in listed]

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Calls a tool of the server; an error that it reports is an answer too.

        Raises:
            CallError: the server does not take these arguments.
            ToolError: it cannot be reached, or does not answer in time.
        """
        return _text(self._ask(self._call(name, arguments)))

    def _ask(self, coroutine: Any) -> Any:
        try:
            return within(self._deadline_s, coroutine)
        except (ToolError, CallError):
            raise
        except LateError as error:
            self._drop()
            raise ToolError(
                f"the MCP server {self.name!r} gave no answer within {self._deadline_s:g} s "
                "(config.env.search.tool_deadline_s)"
            ) from error
        except Exception as error:  # of transports of several kinds
            if getattr(error, "code", None) == _INVALID_PARAMS:
                raise CallError(redact(str(error))[:MAX_ERROR]) from error
            told = self._told()
            self._drop()
            text = "; ".join(map(error_text, _leaves(error)))[:MAX_ERROR]
            raise ToolError(f"the MCP server {self.name!r}: {text}{told}") from None

    async def _list(self) -> list[Any]:
        client = await self._client()
        tools: list[Any] = []
        cursors: list[str | None] = [None]
        while len(tools) <= _MAX_TOOLS and len(cursors) <= _MAX_PAGES:
            page = await client.list_tools(cursor=cursors[-1])
            tools += page.tools
            if page.next_cursor is None and len(tools) <= _MAX_TOOLS:
                return tools
            if page.next_cursor in cursors[1:]:
                raise ToolError(
                    f"the MCP server {self.name!r} names the same page again of its tools"
                )
            cursors.append(page.next_cursor)
        raise ToolError(
            f"the MCP server {self.name!r} lists more than {_MAX_TOOLS} tools, or them on more "
            f"than {_MAX_PAGES} pages"
        )

    async def _call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        client = await self._client()
        return await client.call_tool(name, dict(arguments))

    async def _client(self) -> Any:
        if self._lock is None:
            self._lock = asyncio.Lock()
        async with self._lock:
            if self._held is None or self._held.task.done():
                self._held = held = _Held()
                held.task = asyncio.create_task(_hold(held, self._opener()))
                _OPEN.add(held)
                weakref.finalize(self, held.let_go).atexit = False  # `_end_all` waits for it then
            return await asyncio.shield(self._held.client)

    def _opener(self) -> Callable[[], Any]:
        """A function that opens a connection; it holds no reference to this object."""
        spec, env, headers, told = self._spec, self._env, self._headers, self._stderr
        mcp, deadline_s = self._mcp, self._deadline_s

        @contextlib.asynccontextmanager
        async def opened() -> AsyncIterator[Any]:
            async with contextlib.AsyncExitStack() as stack:
                if "command" in spec:
                    transport = StdioServer(spec["command"], env, told).opened()
                else:
                    client = bounded_client(headers, timeout_s=deadline_s)
                    await stack.enter_async_context(client)
                    streams = importlib.import_module("mcp.client.streamable_http")
                    transport = streams.streamable_http_client(
                        spec["url"], http_client=client, max_sse_event_size=MAX_ANSWER_MIB * 2**20
                    )
                yield await stack.enter_async_context(mcp.Client(transport, cache=None))

        return opened

    def _drop(self) -> None:
        """Drops a connection in an unknown state."""
        held, self._held = self._held, None
        if held is not None:
            held.let_go()

    def _told(self) -> str:
        """The end of what a server that could not be opened wrote on its standard error."""
        held = self._held
        if held is not None and held.client.done() and held.client.exception() is None:
            return ""
        text = self._stderr.decode("utf-8", "replace")
        if len(self._stderr) >= MAX_TOLD:  # its first word may be the end of a secret
            text = text.partition(" ")[2]
        shown = redact(text).strip()[-_SHOWN:]
        return f" (it says: {shown})" if shown else ""


class _Held:
    """A connection while it is open; it is opened and closed by one task, as it has to be."""

    def __init__(self) -> None:
        self.client: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.over = asyncio.Event()
        self.task: asyncio.Task[None]

    def let_go(self) -> None:
        """Has the connection closed, soon; one that is being opened too."""
        event_loop().call_soon_threadsafe(self._end)

    def _end(self) -> None:
        self.over.set()
        if not self.client.done():
            self.task.cancel()


_OPEN: weakref.WeakSet[_Held] = weakref.WeakSet()


async def _hold(held: _Held, open_client: Any) -> None:
    try:
        async with open_client() as client:
            held.client.set_result(client)
            await held.over.wait()
    except BaseException as error:
        if not held.client.done():
            is_given_up = isinstance(error, asyncio.CancelledError)
            held.client.set_exception(ConnectionError("given up") if is_given_up else error)
            held.client.exception()  # told to whoever waits; nobody may
        elif not isinstance(error, Exception):
            raise


@atexit.register
def _end_all() -> None:
    """Closes all connections before the process ends, so that no server is left."""
    tasks = [held.task for held in _OPEN if not held.task.done()]
    for held in _OPEN:
        held.let_go()

    async def ended() -> None:
        await asyncio.wait(tasks)

    if tasks:
        with contextlib.suppress(Exception):
            asyncio.run_coroutine_threadsafe(ended(), event_loop()).result(_CLOSING_S)


def _variable(name: str) -> str:
    value = os.environ.get(name)
    if not value:
        raise ValueError(
            f"config.env.search.mcp names the environment variable {name!r}, which is not set."
        )
    is_place = os.path.isabs(value) and os.path.exists(value)
    if not is_place:  # which is no secret, and answers speak of it
        register_secret(value)
    return value


def _leaves(error: BaseException) -> Iterator[BaseException]:
    """The exceptions in an error, without the groups around them."""
    if isinstance(error, BaseExceptionGroup):
        for one in error.exceptions:
            yield from _leaves(one)
    else:
        yield error


def _text(result: Any) -> str:
    """Text of a result, or its JSON where it has none; images behind it.

    Raises:
        ToolError: an image is none.
    """
    texts, images = [], []
    for block in result.content:
        resource = getattr(block, "resource", None)
        text = getattr(block, "text", None) or getattr(resource, "text", None)
        if block.type == "image":
            images.append(block.data)
        else:
            texts.append(text if isinstance(text, str) else f"[{block.type}]")
    if not (texts or images) and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    if not images:
        return "\n".join(texts) or "(nothing)"
    try:
        decoded = [base64.b64decode(data, validate=True) for data in images]
    except ValueError as error:
        raise ToolError(f"an image cannot be read: {error}") from error
    return Pictured("\n".join(texts), (Picture(data=data) for data in decoded))


_CHECK_S = 1.0
"""Computing time of one check by a schema; an ordinary one takes less than a thousandth of it."""


@functools.cache
def _checkers() -> WorkerPool:
    """The workers of all tools; none is started before a schema is listed."""
    return WorkerPool("schema", deadline_s=_CHECK_S, memory_mib=1024, size=4)


class McpTool(JsonTool):
    """A tool of a server; arguments are checked by the schema that the server gave."""

    def __init__(self, server: McpServer, listed: Any) -> None:
        """`listed` is the tool as the server lists it.

        Raises:
            ToolError: its schema is none, or cannot be read in time.
        """
        self.name = redact(str(listed.name))
        self._server = server
        self._description = redact(str(listed.description or listed.title or self.name))
        self._schema = {"properties": {}, "required": [], **redact(listed.input_schema)}
        self._schema_text = json.dumps(self._schema)
        if problem := self._problem({}):
            raise ToolError(
                f"the MCP server {server.name!r} lists the tool {self.name!r} with a schema that "
                f"cannot be read: {problem}"
            )

    @property
    def description(self) -> str:
        """The server's description."""
        return self._description

    @property
    def parameters(self) -> Mapping[str, Any]:
        """The JSON schema of its arguments."""
        return self._schema

    def check(self, arguments: Mapping[str, Any]) -> None:
        """Refuses arguments that are not as the schema has them.

        Raises:
            CallError: says what is wrong.
            ToolError: the schema makes the check too long.
        """
        if not self._schema.get("additionalProperties"):  # which most servers leave unsaid
            check_names(arguments, list(self._schema["properties"]), self._schema["required"])
        if is_too_deep(json.dumps(arguments), arguments):
            raise CallError("the call is nested too deeply")
        if problem := self._problem({"arguments": arguments}):
            raise CallError(problem)

    def _problem(self, question: Mapping[str, Any]) -> str | None:
        """Checks arguments in a worker: by a few lines of schema that may take hours.

        Raises:
            ToolError: it could not be done.
        """
        try:
            reply = _checkers().ask({"schema": self._schema_text, **question})
        except (WorkerLostError, TimeoutError) as error:
            raise ToolError(f"the arguments of {self.name!r} cannot be checked: {error}") from error
        if "error" in reply:
            raise ToolError(
                f"the MCP server {self._server.name!r} gives the tool {self.name!r} a schema by "
                f"which a check was not done after {_CHECK_S:g} s of computing ({reply['error']}); "
                "leave that tool out, or have its schema made simpler"
            )
        return reply["problem"]

    def run(self, call: str, /) -> str:
        """Calls the tool on the server.

        Raises:
            ToolError: see `McpServer.call`.
        """
        try:
            return self._server.call(self.name, json.loads(call))
        except CallError as error:
            return f"error: {error}"

"""Bounds on what an MCP server sends, over HTTP or its standard streams, before mcp has it."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import signal
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from typing import Any

import httpx2

from jaxrl.utils.child_process import signal_group

MAX_ANSWER_MIB = 16
"""Limit of an answer to one request, with all events before it."""


class AnswerError(httpx2.SSEError, httpx2.StreamError):
    """Raised for an answer beyond the bounds; mcp passes it on, be it JSON or events."""


class _Bounded(httpx2.AsyncByteStream):
    """The body of an answer, up to `MAX_ANSWER_MIB`; none of one that is packed."""

    def __init__(self, body: httpx2.AsyncByteStream, packed: str) -> None:
        self._body, self._packed = body, packed

    async def __aiter__(self) -> AsyncIterator[bytes]:
        if self._packed:  # of which a small piece may be any size when it is unpacked
            raise AnswerError(f"the answer is packed ({self._packed!r:.40}); expected it as it is")
        size = 0
        async for chunk in self._body:
            size += len(chunk)
            if size > MAX_ANSWER_MIB * 2**20:
                raise AnswerError(f"the answer has more than {MAX_ANSWER_MIB} MiB")
            yield chunk

    async def aclose(self) -> None:
        await self._body.aclose()


def bounded_client(headers: Mapping[str, str], *, timeout_s: float) -> httpx2.AsyncClient:
    """HTTP client that bounds the size of each answer.

    Headers are bounded by httpx2, the time of a call by whoever makes it.

    Args:
        headers: of each request.
        timeout_s: of each step of a request.
    """

    async def check_request(request: httpx2.Request) -> None:
        # The stream of what a server says unasked is not opened: nobody reads it. A request that
        # goes on with an answer after a failure says where it was.
        if request.method == "GET" and "last-event-id" not in request.headers:
            raise AnswerError("nobody listens to what was not asked for")

    async def bound_response(response: httpx2.Response) -> None:
        packed = response.headers.pop("content-encoding", "")
        packed = "" if packed.strip().lower() == "identity" else packed
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        response.stream = _Bounded(response.stream, packed)

    return httpx2.AsyncClient(
        headers={**headers, "Accept-Encoding": "identity"},
        timeout=timeout_s,
        event_hooks={"request": [check_request], "response": [bound_response]},
    )


_ENDING_S = 2.0  # in which a server ends whose input does, and then one that is asked to
MAX_TOLD = 2**16
"""Bytes of what it wrote on its standard error that are kept: the last ones."""


class StdioServer:
    """A server in a process of its own; the package mcp would take a line of any length from it."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], told: bytearray) -> None:
        """Starts nothing yet.

        Args:
            command: its words.
            env: variables beside PATH, HOME and the like.
            told: gets the end of what it writes on its standard error.
        """
        self._command, self._env, self._told = command, env, told

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[Any]:
        """Streams of its messages and of ours, as mcp's transports have them; ends it behind them.

        Raises:
            OSError: there is no such command.
        """
        anyio = importlib.import_module("anyio")
        defaults = importlib.import_module("mcp.client.stdio").get_default_environment()
        # Cancelled itself, a start may wait for ever for pipes that it has not made yet.
        process, is_given_up = await _whole(
            asyncio.create_subprocess_exec(
                *self._command,
                env={**defaults, **self._env},
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                limit=MAX_ANSWER_MIB * 2**20,
                start_new_session=True,
            )
        )
        if is_given_up:
            await _whole(_end(process))
            raise asyncio.CancelledError
        incoming, read = anyio.create_memory_object_stream(0)
        write, asked = anyio.create_memory_object_stream(0)
        pending: set[Any] = set()  # ids of requests without an answer

        async def keep_end() -> None:
            assert process.stderr is not None
            while chunk := await process.stderr.read(2**16):
                self._told += chunk
                del self._told[:-MAX_TOLD]

        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(keep_end)
                tasks.start_soon(_pass_on, process.stdout, incoming, pending)
                tasks.start_soon(_send, process.stdin, asked, pending, incoming)
                try:
                    yield read, write
                finally:
                    with anyio.CancelScope(shield=True):
                        read.close()
                        write.close()
                        await _end(process)
                    tasks.cancel_scope.cancel()
        finally:
            for stream in (incoming, read, write, asked):
                stream.close()


async def _whole(doing: Coroutine[Any, Any, Any]) -> tuple[Any, bool]:
    """The result of what must not be cancelled, and True if that was tried meanwhile."""
    task, is_given_up = asyncio.ensure_future(doing), False
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            is_given_up = True
    return task.result(), is_given_up


async def _pass_on(stdout: asyncio.StreamReader, incoming: Any, pending: set[Any]) -> None:
    """Passes a server's messages to the session; other lines are left out, but counted."""
    types = importlib.import_module("mcp_types")
    message_of = importlib.import_module("mcp.shared.message").SessionMessage
    anyio, size = importlib.import_module("anyio"), 0
    with contextlib.suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):
        async with incoming:
            while True:
                try:
                    line = await stdout.readline()
                except ValueError:  # it is longer than the reader's limit
                    size, line = MAX_ANSWER_MIB * 2**20, b" "
                size += len(line)
                if size > MAX_ANSWER_MIB * 2**20:
                    for number in pending:
                        error = types.ErrorData(
                            code=types.CONNECTION_CLOSED,
                            message=f"the answer has more than {MAX_ANSWER_MIB} MiB",
                        )
                        refusal = types.JSONRPCError(jsonrpc="2.0", id=number, error=error)
                        await incoming.send(message_of(refusal))
                    return
                if not line:
                    return
                try:
                    message = types.jsonrpc_message_adapter.validate_json(line, by_name=False)
                except ValueError:
                    continue
                if isinstance(message, types.JSONRPCResponse | types.JSONRPCError):
                    pending.discard(message.id)
                    size = 0
                await incoming.send(message_of(message))


async def _send(stdin: asyncio.StreamWriter, asked: Any, pending: set[Any], incoming: Any) -> None:
    """Sends the session's requests; closes the session where the server does not take them."""
    types = importlib.import_module("mcp_types")
    try:
        async with asked:
            async for one in asked:
                if isinstance(one.message, types.JSONRPCRequest):
                    pending.add(one.message.id)
                text = one.message.model_dump_json(by_alias=True, exclude_unset=True)
                stdin.write(text.encode() + b"\n")
                await stdin.drain()
    except OSError:
        incoming.close()


async def _end(process: asyncio.subprocess.Process) -> None:
    """Shuts a server down as the protocol has it: end of its input, then SIGTERM, then SIGKILL."""
    assert process.stdin is not None
    process.stdin.close()
    for number in (None, signal.SIGTERM, signal.SIGKILL):
        if number is not None:
            signal_group(process.pid, number)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ENDING_S):
                while process.returncode is None:  # `wait` also waits for whoever holds its pipes
                    await asyncio.sleep(0.01)
                return

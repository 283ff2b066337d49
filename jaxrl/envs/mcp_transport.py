"""How much an MCP server may send over HTTP: bounded before the package mcp has it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping

import httpx2

MAX_ANSWER_MIB = 16
"""Of an answer to one request, with all events before it."""


class AnswerError(httpx2.SSEError, httpx2.StreamError):
    """A server's answer is beyond the bounds; mcp tells whoever waits, be it JSON or events."""


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


async def _check_request(request: httpx2.Request) -> None:
    """Refuses to open the stream of what a server says unasked: nobody reads it.

    A request that goes on with an answer after a failure says where it was.
    """
    if request.method == "GET" and "last-event-id" not in request.headers:
        raise AnswerError("nobody listens to what was not asked for")


async def _bound_response(response: httpx2.Response) -> None:
    packed = response.headers.pop("content-encoding", "")
    packed = "" if packed.strip().lower() == "identity" else packed
    assert isinstance(response.stream, httpx2.AsyncByteStream)
    response.stream = _Bounded(response.stream, packed)


def bounded_client(headers: Mapping[str, str], *, timeout_s: float) -> httpx2.AsyncClient:
    """A client of which no answer is larger than it may be.

    Headers are bounded by httpx2, the time of a call by whoever makes it.

    Args:
        headers: of each request.
        timeout_s: of each step of a request.
    """
    return httpx2.AsyncClient(
        headers={**headers, "Accept-Encoding": "identity"},
        timeout=timeout_s,
        event_hooks={"request": [_check_request], "response": [_bound_response]},
    )

"""Client process of `benchmarks.endpoint`: runs sessions over HTTP, without JAX.

    python -m benchmarks.endpoint_client

Reads one JSON job per line from stdin and writes one line of results per job. Each session has a
persistent connection and requests a turn once it has the response to the previous turn. To simulate
lost responses, a proxy waits for the complete response and then closes the client's connection
instead of forwarding it. The client retries like OpenAI's library.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

MAX_MESSAGE_BYTES = 2**26
"""Maximum size of a response, in bytes."""

CHATS, IDS = "/v1/chat/completions", "/inference/v1/generate"


async def read_message(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """Read the header and body of an HTTP message that has a Content-Length."""
    head = await reader.readuntil(b"\r\n\r\n")
    _, _, length = head.lower().partition(b"content-length:")
    return head, await reader.readexactly(int(length.split(b"\r\n", 1)[0]))


class Proxy:
    """Proxy between clients and the server that drops some responses."""

    def __init__(self, port: int, drop_fraction: float, seed: int):
        """Store the settings.

        Args:
            port: Port of the server.
            drop_fraction: Fraction of the responses to drop, from 0 to 1.
            seed: Random seed for choosing responses to drop.
        """
        self._port, self._drop_fraction, self._random = port, drop_fraction, random.Random(seed)
        self._dropped: dict[bytes, bytes] = {}  # dropped responses, by path and body of the request
        self.counts = Counter(num_lost=0, num_different=0)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward requests until a response is dropped or the client disconnects."""
        server_reader, server_writer = await asyncio.open_connection(
            "127.0.0.1", self._port, limit=MAX_MESSAGE_BYTES
        )
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                request_head, body = await read_message(reader)
                server_writer.write(request_head + body)
                head, response = await read_message(server_reader)
                name = request_head.split(b" ", 2)[1] + body
                if first_response := self._dropped.pop(name, None):
                    self.counts["num_different"] += first_response != response
                elif self._random.random() < self._drop_fraction:
                    self._dropped[name] = response
                    self.counts["num_lost"] += 1
                    break
                writer.write(head + response)
        for one in (writer, server_writer):
            one.close()


class Connection:
    """HTTP connection that reopens itself after it is closed."""

    def __init__(self, port: int, host: str):
        """Store the address without connecting.

        Args:
            port: Port to connect to.
            host: Value of the Host header.
        """
        self._port, self._host = port, host
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def post(self, path: str, value: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request, retry after lost connections, and return the response.

        Raises:
            RuntimeError: The server rejected the request, or 100 attempts failed.
        """
        body = json.dumps(value).encode()
        for count in range(100):
            if self._streams is None:
                self._streams = await asyncio.open_connection(
                    "127.0.0.1", self._port, limit=MAX_MESSAGE_BYTES
                )
            reader, writer = self._streams
            retry_header = f"x-stainless-retry-count: {count}\r\n" if count else ""
            head = (
                f"POST {path} HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\n"
                f"{retry_header}Content-Length: {len(body)}\r\n\r\n"
            )
            try:
                writer.write(head.encode() + body)
                status, response = await read_message(reader)
            except (asyncio.IncompleteReadError, ConnectionError):
                self.close()
                continue
            if b" 200 " not in status.split(b"\r\n", 1)[0]:
                raise RuntimeError(f"{path} returned {status!r:.100} {response!r:.500}")
            return json.loads(response)
        raise RuntimeError(f"{path} returned no response after 100 attempts")

    def close(self) -> None:
        """Close the connection."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


async def run_chat_session(connection: Connection, session: Mapping[str, Any]) -> Counter[str]:
    """Run a session through the chat API; return request and token counts."""
    messages, counts = list(session["messages"]), Counter[str]()
    for turn in session["turns"]:
        if counts:
            messages.append({"role": "user", "content": turn["text"]})
        response = await connection.post(
            f"/r/{session['name']}{CHATS}",
            {
                "model": "any",
                "messages": messages,
                "temperature": 1.0,
                "max_tokens": turn["budget"],
                "seed": session["seed"],
            },
        )
        messages.append(
            {"role": "assistant", "content": response["choices"][0]["message"]["content"]}
        )
        _count(counts, response)
    return counts


async def run_ids_session(connection: Connection, session: Mapping[str, Any]) -> Counter[str]:
    """Run a session through the token-id API; return request and token counts."""
    token_ids, counts = list(session["token_ids"]), Counter[str]()
    for turn in session["turns"]:
        token_ids += turn["token_ids"]
        sampling = {
            "temperature": 1.0,
            "max_tokens": turn["budget"],
            "seed": session["seed"],
            "logprobs": 1,
        }
        body = {"model": "any", "token_ids": token_ids, "sampling_params": sampling}
        response = await connection.post(f"/r/{session['name']}{IDS}", body)
        token_ids += response["choices"][0]["token_ids"]
        _count(counts, response)
    return counts


def _count(counts: Counter[str], response: Mapping[str, Any]) -> None:
    usage = response["usage"]
    counts["requests"] += 1
    counts["sampled"] += usage["completion_tokens"]
    counts["longest"] = max(counts["longest"], usage["total_tokens"])


SESSION_RUNNERS = {"chats": run_chat_session, "ids": run_ids_session}


async def run_job(job: Mapping[str, Any]) -> dict[str, Any]:
    """Run all sessions of a job concurrently; return the summed counts.

    Args:
        job: Dict with the server's `port`, a `way` in `SESSION_RUNNERS`, the `sessions`, the
            fraction `lost` of responses to drop and the `seed` for choosing them.
    """
    started_at = time.process_time()
    host, port = f"127.0.0.1:{job['port']}", job["port"]
    proxy = Proxy(port, job["lost"], job["seed"])
    server = None
    if job["lost"]:
        server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0, limit=MAX_MESSAGE_BYTES)
        port = server.sockets[0].getsockname()[1]

    async def run_session(session: Mapping[str, Any]) -> Counter[str]:
        connection = Connection(port, host)
        try:
            return await SESSION_RUNNERS[job["way"]](connection, session)
        finally:
            connection.close()

    counts = await asyncio.gather(*map(run_session, job["sessions"]))
    if server is not None:
        server.close()
    return {
        "requests": sum(one["requests"] for one in counts),
        "sampled": sum(one["sampled"] for one in counts),
        "held": sum(one["longest"] for one in counts),
        "cpu_s": time.process_time() - started_at,
        **proxy.counts,
    }


def main() -> None:
    """Run jobs from stdin until it closes."""
    for line in sys.stdin:
        print(json.dumps(asyncio.run(run_job(json.loads(line)))), flush=True)


if __name__ == "__main__":
    main()

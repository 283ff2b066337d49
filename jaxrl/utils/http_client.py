"""A client of servers that answer JSON over HTTP: concurrent, bounded, with failures told apart.

One thread runs the event loop of all clients in a process; whoever asks waits for its answers, so
several threads may ask at once.
"""

from __future__ import annotations

import asyncio
import datetime
import email.utils
import functools
import json
import os
import re
import ssl
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2

from jaxrl.utils.concurrency import error_text, new_loop, once
from jaxrl.utils.errors import ToolError
from jaxrl.utils.json_io import parse_json
from jaxrl.utils.rate_limit import bounded_wait_s
from jaxrl.utils.secrets import redact, register_secret

MAX_SHOWN = 200  # characters of an answer that an error shows

MAY_PASS = frozenset({408, 425, 429})
"""Statuses below 500 after which another try may succeed."""

# Servers commonly close a connection that was idle for 5 s; one that is closed while it is used
# again costs the request.
KEEP_ALIVE_S = 3.0


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request: a POST with a body, or a GET without.

    Attributes:
        url: with scheme and path.
        params: go into the address.
        body: what is posted, as JSON unless it is bytes already; None for a GET.
        headers: beside those of the client.
    """

    url: str
    params: Mapping[str, str] = field(default_factory=dict)
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Limits of a client.

    Attributes:
        timeout_s: seconds from sending a request to the last byte of its answer.
        connections: requests in flight.
        max_mib: MiB of an answer, unpacked.
    """

    timeout_s: float
    connections: int
    max_mib: float

    def __post_init__(self) -> None:
        """Checks the numbers."""
        for name in ("timeout_s", "connections", "max_mib"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; expected a number above 0.")


class JsonClient:
    """Asks servers for JSON over pooled connections.

    Nothing is asked twice: what fails says whether and when to try again, as `ToolError` has it.
    Answers and errors are redacted.
    """

    def __init__(self, bounds: Bounds, *, headers: Mapping[str, str] | None = None) -> None:
        """Opens no connection yet."""
        self._bounds = bounds
        headers = {"Accept": "application/json", **(headers or {})}
        register_secret(headers.get("Authorization", "").partition(" ")[2])  # in base64, say
        limits = httpx2.Limits(
            max_connections=bounds.connections,
            max_keepalive_connections=bounds.connections,
            keepalive_expiry=KEEP_ALIVE_S,
        )
        # The whole request has one deadline below; one for each read would never end a drip.
        self._client = httpx2.AsyncClient(
            headers=headers,
            limits=limits,
            timeout=None,
            verify=_certificates(),
        )
        self._free = asyncio.Semaphore(bounds.connections)
        # Connections of a client that is gone are closed; those of the process when it ends.
        weakref.finalize(self, _close, self._client).atexit = False

    def ask(self, requests: Sequence[Request]) -> list[Any | ToolError]:
        """Sends requests; returns the JSON of each answer, or its error, in their order."""

        # A coroutine around it, since `gather` has to be called in the loop that runs it.
        async def fetch_all() -> list[bytes | ToolError]:
            return await asyncio.gather(*(self._fetch(request) for request in requests))

        future = asyncio.run_coroutine_threadsafe(fetch_all(), _loop())
        try:
            bodies = future.result()
        except BaseException:
            future.cancel()  # an interrupt ends what is under way
            raise
        answers: list[Any | ToolError] = []
        for request, body in zip(requests, bodies, strict=True):
            if isinstance(body, ToolError):
                answers.append(body)
                continue
            try:
                answers.append(redact(parse_json(body, "the answer")))
            except ValueError as error:
                what = f"{len(body)} bytes that are not JSON ({error_text(error)})"
                answers.append(self._error(request, f"gives {what}: {self._start(body)}"))
        return answers

    async def _fetch(self, request: Request) -> bytes | ToolError:
        limit_s = self._bounds.timeout_s
        async with self._free:
            try:
                async with asyncio.timeout(limit_s):
                    return await self._body(request)
            except ToolError as error:
                return error
            except TimeoutError:
                return self._error(request, f"gave no whole answer within {limit_s:g} s")
            except Exception as error:  # of the network, of the protocol, of an odd address
                return self._error(request, f"failed: {error_text(error)}")

    async def _body(self, request: Request) -> bytes:
        """Sends a request; returns the body of a successful answer.

        Raises:
            ToolError: the status is no success, or the body is too large.
        """
        headers = dict(request.headers)
        content = request.body
        if content is not None and not isinstance(content, bytes):
            content = json.dumps(content).encode()
            headers.setdefault("Content-Type", "application/json")
        method = "GET" if content is None else "POST"
        async with self._client.stream(
            method, request.url, params=request.params or None, content=content, headers=headers
        ) as response:
            most = int(self._bounds.max_mib * 2**20)
            chunks, size = [], 0
            async for chunk in response.aiter_bytes():
                chunks.append(chunk)
                size += len(chunk)
                if size > most:
                    raise self._error(
                        request, f"answers with more than {self._bounds.max_mib:g} MiB"
                    )
            body = b"".join(chunks)
            if response.is_success:
                return body
            status, places = response.status_code, response.headers.get_list("location")
            # Redacted before the address loses its parameters, which would cut a secret in two.
            elsewhere = " and ".join(shown_url(redact(place)) for place in places)
            redirects = f", redirecting to {elsewhere}" if places else ""
            raise self._error(
                request,
                f"answers with status {status}{redirects}: {self._start(body)}",
                retry_after_s=_retry_after_s(response.headers),
                is_permanent=status < 500 and status not in MAY_PASS,
                status=status,
            )

    def _start(self, body: bytes) -> str:
        """Return the beginning of an answer for a message, redacted before it is cut."""
        text = " ".join(redact(body.decode("utf-8", "replace")).split())
        return repr(text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + " ..")

    def _error(self, request: Request, text: str, **about: Any) -> ToolError:
        return ToolError(redact(f"{shown_url(request.url)} {text}"), **about)


def shown_url(url: str) -> str:
    """An address without what may be secret: user, password and parameters."""
    scheme, _, rest = url.partition("://")
    host, slash, path = rest.partition("?")[0].partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"


_SECRET = re.compile(
    r"(?i)(^|[^a-z]|api|access|auth)(key|token|secret|password|passwd|pwd|auth|sig|signature)$"
)
"""Names of parameters that commonly hold a key."""


def check_url(key: str, url: str, *, keys_from: str = "the key_env beside it") -> None:
    """Refuses what is no address of a server, and what holds a key.

    Args:
        key: of the configuration, for the message.
        url: with scheme, host, and where it is needed port and path.
        keys_from: what names the environment variable of a key, for the message.

    Raises:
        ValueError: says what is wrong with it.
    """
    expected = "expected the address of a server, as http://127.0.0.1:8000"
    try:
        parsed = httpx2.URL(url)
    except (httpx2.InvalidURL, ValueError) as error:
        raise ValueError(f"config.{key} is {url!r}: {error}; {expected}.") from None
    if parsed.userinfo:
        raise ValueError(
            f"config.{key} holds a user or a password, and a configuration is written to disk; "
            f"{expected}, without them."
        )
    secret = next((name for name in parsed.params if _SECRET.search(name)), None)
    if secret is not None:
        raise ValueError(
            f"config.{key} holds a parameter {secret!r}, and a configuration is written to disk; "
            f"{expected}, without it: {keys_from} names an environment variable for a key."
        )
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ValueError(f"config.{key} is {url!r}; {expected}.")


def key_of(key: str, variable: str) -> str:
    """Return the secret that an environment variable holds, and register it.

    Args:
        key: of the configuration, which names the variable.
        variable: its name.

    Raises:
        ValueError: it is not set, or empty, or no header could carry it.
    """
    if not re.fullmatch(r"[A-Za-z_]\w*", variable, re.ASCII):  # perhaps the key itself
        raise ValueError(
            f"config.{key} names no environment variable; expected the name of the one that holds "
            "the key, as SEARCH_API_KEY."
        )
    secret = os.environ.get(variable, "").strip()
    shown = f"{variable}, which config.{key} names,"
    if not variable.isupper():
        shown = f"that config.{key} names"
    if not secret:
        raise ValueError(
            f"the environment variable {shown} is not set; export it with the key of the service, "
            "or name another variable there."
        )
    if not (secret.isascii() and secret.isprintable()):
        raise ValueError(
            f"the environment variable {shown} holds characters that no HTTP header can; expected "
            "a key."
        )
    register_secret(secret)
    return secret


def plain_text(text: str) -> str:
    """Text that UTF-8 can hold: halves of surrogate pairs are joined, or replaced by U+FFFD."""
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Seconds that a server asks to wait, bounded; None where it does not.

    By Retry-After (RFC 9110, 10.2.3), or by the quotas that are used up: `X-RateLimit-Remaining`
    and `X-RateLimit-Reset` have a number for each window, as Brave's.
    """
    asked = headers.get("retry-after", "").strip()
    if asked.isdecimal():
        return bounded_wait_s(float(asked))
    try:
        until = email.utils.parsedate_to_datetime(asked).replace(tzinfo=datetime.UTC)
        return bounded_wait_s(until.timestamp() - time.time())  # an HTTP date is in GMT
    except (ValueError, OverflowError):
        pass
    left = _numbers(headers.get("x-ratelimit-remaining", ""))
    resets = _numbers(headers.get("x-ratelimit-reset", ""))
    waits = [reset for count, reset in zip(left, resets, strict=False) if count == 0]
    return bounded_wait_s(max(waits)) if waits else None


def _numbers(text: str) -> list[float]:
    parts = [part.strip() for part in text.split(",")]
    return [float(part) for part in parts] if all(p.isdecimal() for p in parts) else []


@functools.cache
def _certificates() -> ssl.SSLContext:
    """The TLS context of all clients; reading it takes longer than all else of a client."""
    return httpx2.create_ssl_context()


@once
def _loop() -> asyncio.AbstractEventLoop:
    """The event loop of this process' clients; code of the user's does not run in it."""
    return new_loop("json_http")


def _close(client: httpx2.AsyncClient) -> None:
    asyncio.run_coroutine_threadsafe(client.aclose(), _loop())  # it belongs to that loop

"""JSON-over-HTTP client with concurrent requests, limits and typed failures."""

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

from jaxrl.utils.concurrency import call_once, format_error, start_event_loop
from jaxrl.utils.errors import ToolError
from jaxrl.utils.json_io import parse_json
from jaxrl.utils.rate_limit import clip_wait_s
from jaxrl.utils.secrets import redact, register_secret

_MAX_BODY_CHARS = 200  # maximum length of a response in an error message
_RETRYABLE = frozenset({408, 425, 429})  # retryable statuses below 500

# Servers commonly close connections after 5 idle seconds. A request sent at that moment fails.
_KEEP_ALIVE_S = 3.0


@dataclass(frozen=True, kw_only=True)
class HttpRequest:
    """HTTP request: POST if it has a body, otherwise GET.

    Attributes:
        url: URL with scheme and path.
        params: Query parameters.
        body: Bytes, or a value that is sent as JSON; None for a GET.
        headers: Headers in addition to the client's.
    """

    url: str
    params: Mapping[str, str] = field(default_factory=dict)
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)


class JsonClient:
    """Thread-safe JSON client with pooled connections.

    Requests are not retried; a `ToolError` states whether and when a retry may succeed. Responses
    and errors are redacted.
    """

    def __init__(
        self,
        *,
        timeout_s: float,
        connections: int,
        max_mib: float,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Create the client. No request is sent yet.

        Args:
            timeout_s: Timeout of a request in seconds.
            connections: Maximum number of requests in flight.
            max_mib: Maximum size of a decompressed response in MiB.
            headers: Headers of every request.
        """
        self._timeout_s, self._max_mib = timeout_s, max_mib
        headers = {"Accept": "application/json", **(headers or {})}
        register_secret(headers.get("Authorization", "").partition(" ")[2])  # may be base64
        pool_limits = httpx2.Limits(
            max_connections=connections,
            max_keepalive_connections=connections,
            keepalive_expiry=_KEEP_ALIVE_S,
        )
        # `_fetch` limits the total time; httpx's timeout would limit each read.
        self._client = httpx2.AsyncClient(
            headers=headers, limits=pool_limits, timeout=None, verify=_make_ssl_context()
        )
        self._semaphore = asyncio.Semaphore(connections)
        weakref.finalize(self, _close_client, self._client).atexit = False

    def send_all(self, requests: Sequence[HttpRequest]) -> list[Any | ToolError]:
        """Send requests concurrently; return the JSON response or error of each, in order."""

        async def fetch_all() -> list[Any | ToolError]:
            return await asyncio.gather(*map(self._fetch, requests))

        future = asyncio.run_coroutine_threadsafe(fetch_all(), _get_loop())
        try:
            answers = future.result()
        except BaseException:
            future.cancel()  # on an interrupt, cancel the requests in flight
            raise
        return [
            self._parse_response(request, answer) if isinstance(answer, bytes) else answer
            for request, answer in zip(requests, answers, strict=True)
        ]

    def _parse_response(self, request: HttpRequest, body: bytes) -> Any | ToolError:
        try:
            return redact(parse_json(body, "the response"))
        except ValueError as error:
            problem = f"{len(body)} bytes that are not JSON ({format_error(error)})"
            return self._make_tool_error(request, f"gives {problem}: {_format_body(body)}")

    async def _fetch(self, request: HttpRequest) -> bytes | ToolError:
        async with self._semaphore:
            try:
                async with asyncio.timeout(self._timeout_s):
                    return await self._send(request)
            except ToolError as error:
                return error
            except TimeoutError:
                return self._make_tool_error(
                    request, f"gave no complete response within {self._timeout_s:g} s"
                )
            except Exception as error:  # network, protocol or address
                return self._make_tool_error(request, f"failed: {format_error(error)}")

    async def _send(self, request: HttpRequest) -> bytes:
        """Send a request and return the body of the response.

        Raises:
            ToolError: The status is not a success status, or the body is too large.
        """
        headers, content = dict(request.headers), request.body
        if content is not None and not isinstance(content, bytes):
            content = json.dumps(content).encode()
            headers.setdefault("Content-Type", "application/json")
        method = "GET" if content is None else "POST"
        async with self._client.stream(
            method, request.url, params=request.params or None, content=content, headers=headers
        ) as response:
            body = bytearray()
            async for chunk in response.aiter_bytes():
                body += chunk
                if len(body) > self._max_mib * 2**20:
                    text = f"responds with more than {self._max_mib:g} MiB"
                    raise self._make_tool_error(request, text)
            if response.is_success:
                return bytes(body)
            status, location = response.status_code, response.headers.get("location")
            # Redact first, since dropping the parameters could split a secret.
            redirect = f", redirecting to {redact_url(redact(location))}" if location else ""
            raise self._make_tool_error(
                request,
                f"responds with status {status}{redirect}: {_format_body(body)}",
                retry_after_s=_parse_retry_after_s(response.headers),
                is_permanent=status < 500 and status not in _RETRYABLE,
                status=status,
            )

    def _make_tool_error(self, request: HttpRequest, text: str, **fields: Any) -> ToolError:
        return ToolError(redact(f"{redact_url(request.url)} {text}"), **fields)


def _format_body(body: bytes | bytearray) -> str:
    """Format the start of a response for a message. Secrets are redacted before truncation."""
    text = " ".join(redact(body.decode("utf-8", "replace")).split())
    return repr(text if len(text) <= _MAX_BODY_CHARS else text[:_MAX_BODY_CHARS] + " ..")


def redact_url(url: str) -> str:
    """Return a URL without its user, password and query."""
    scheme, _, rest = url.partition("://")
    host, slash, path = rest.partition("?")[0].partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"


_SECRET = re.compile(
    r"(?i)(^|[^a-z]|api|access|auth)(key|token|secret|password|passwd|pwd|auth|sig|signature)$"
)
"""Names of query parameters that commonly contain a key."""


def check_url(key: str, url: str, *, keys_from: str = "the key_env next to it") -> None:
    """Check that the URL of a server is valid and contains no secret.

    Args:
        key: Config key of the URL.
        url: URL with scheme and host.
        keys_from: Description of the config key that names the environment variable for an API
            key, for the error message.

    Raises:
        ValueError: The URL is malformed, or contains a user, a password or a key.
    """
    expected = "expected a server URL, such as http://127.0.0.1:8000"
    try:
        parsed = httpx2.URL(url)
    except (httpx2.InvalidURL, ValueError) as error:
        raise ValueError(f"config.{key} is {url!r}: {error}; {expected}.") from None
    secret = "a user or a password" if parsed.userinfo else ""
    for name in filter(_SECRET.search, parsed.params):
        secret = f"a parameter {name!r}"
    if secret:
        raise ValueError(
            f"config.{key} contains {secret}, and the configuration is written to disk; "
            f"{expected}, without it: {keys_from} names an environment variable for a key."
        )
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ValueError(f"config.{key} is {url!r}; {expected}.")


def read_api_key(key: str, variable: str) -> str:
    """Return the secret in an environment variable, and register it for redaction.

    Args:
        key: Config key that names the variable.
        variable: Name of the variable.

    Raises:
        ValueError: The variable is not set, or its value is not valid in an HTTP header.
    """
    # A value that is not a variable name may be the secret itself, so it is not shown.
    is_name = re.fullmatch(r"[A-Z_][A-Z0-9_]*", variable)
    secret = os.environ.get(variable, "").strip()
    if not (secret and secret.isascii() and secret.isprintable()):
        label = f"{variable}, which config.{key} names," if is_name else f"that config.{key} names"
        problem = (
            "contains characters that are invalid in an HTTP header" if secret else "is not set"
        )
        raise ValueError(
            f"the environment variable {label} {problem}; export it with the key of the service, "
            "or name another variable, such as SEARCH_API_KEY."
        )
    register_secret(secret)
    return secret


def _parse_retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Return the clipped wait in seconds of a Retry-After header (RFC 9110, 10.2.3), or None."""
    value = headers.get("retry-after", "").strip()
    if value.isdecimal():
        return clip_wait_s(float(value))
    try:
        retry_at = email.utils.parsedate_to_datetime(value).replace(tzinfo=datetime.UTC)
    except (ValueError, OverflowError):
        return None
    return clip_wait_s(retry_at.timestamp() - time.time())  # an HTTP date is in GMT


@functools.cache
def _make_ssl_context() -> ssl.SSLContext:
    """Return the TLS context that all clients share, because loading one is slow."""
    return httpx2.create_ssl_context()


@call_once
def _get_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop that all clients share. No user code runs in it."""
    return start_event_loop("json_http")


def _close_client(client: httpx2.AsyncClient) -> None:
    asyncio.run_coroutine_threadsafe(client.aclose(), _get_loop())

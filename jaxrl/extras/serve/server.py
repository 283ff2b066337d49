"""HTTP endpoint: Starlette application, access checks and server thread.

Without a key, the server listens on the loopback interface only. On loopback, the `Host` header
must match the server, because another site's host name could resolve to 127.0.0.1 (DNS rebinding).
Requests from web pages are rejected.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import re
import socket
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from jaxrl.data.tokenizer import Tokenizer
from jaxrl.extras.serve import completions, messages
from jaxrl.extras.serve.chats import ChatHistory
from jaxrl.extras.serve.errors import RequestError
from jaxrl.extras.serve.generation import Completion, CompletionCache, Event, ServedModel
from jaxrl.extras.serve.schemas import CountTokensRequest
from jaxrl.extras.serve.worker import Worker

if TYPE_CHECKING:
    from jaxrl.extras.serve.agents.sessions import AgentSession

LOOPBACK = "127.0.0.1"
LOOPBACK_HOSTS = ("localhost", LOOPBACK, "::1")
MAX_BODY_BYTES = 16 * 2**20
MAX_CONNECTIONS = 4096
MESSAGES = "/v1/messages"
SHUTDOWN_TIMEOUT_S = 2
"""Time limit for closing connections after the last completion at shutdown, in seconds."""

SESSION_PATH = re.compile(r"/r/([A-Za-z0-9._~:@-]{1,128})(/.*)")
"""URL path that starts with the name of a session."""

DIALECTS: Mapping[str, tuple[Any, Any, Any]] = {
    "/v1/chat/completions": (
        completions.parse_chat_request,
        completions.build_chat_response,
        completions.stream_chat,
    ),
    "/inference/v1/generate": (
        completions.parse_generate_request,
        completions.build_generate_response,
        None,
    ),
    MESSAGES: (
        messages.parse_messages_request,
        messages.build_messages_response,
        messages.stream_messages,
    ),
}
"""Functions that parse a body, build a response and yield stream events, by URL path."""


class Endpoint:
    """ASGI application that passes requests to the worker, and the worker's output to clients."""

    def __init__(
        self,
        worker: Worker,
        tokenizer: Tokenizer,
        *,
        name: str,
        key: str = "",
        deadline_s: float = 600.0,
        max_cached: int = 512,
        stops: tuple[str, ...] = (),
        sessions: Mapping[str, AgentSession] | None = None,
    ):
        """Set up the routes.

        Args:
            worker: Worker that owns the engine.
            tokenizer: Tokenizer with the chat template.
            name: Model name in requests and responses.
            key: Required API key; "" for none.
            deadline_s: Time limit per completion, in seconds.
            max_cached: Number of completions to cache for repeated requests.
            stops: Default stop strings.
            sessions: Agent sessions by name. If given, only these are served, and a client's API
                key is the name of its session.
        """
        self.worker, self.sessions, self._key = worker, sessions, key
        self.hosts: list[str] | None = None  # accepted values of `Host`; None for any
        self.model = ServedModel(
            name=name,
            tokenizer=tokenizer,
            history=ChatHistory(tokenizer, max_prompt_tokens=worker.engine.max_total_tokens - 1),
            max_total_tokens=worker.engine.max_total_tokens,
            stops=stops,
        )
        self._cache = CompletionCache(worker, deadline_s=deadline_s, max_size=max_cached)
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        routes = [
            Route("/health", self._get_health),
            Route("/metrics", self._get_metrics),
            Route("/v1/models", self._get_models),
            Route(f"{MESSAGES}/count_tokens", self._count_tokens, methods=["POST"]),
        ]
        routes += [Route(path, self._build_completion_app, methods=["POST"]) for path in DIALECTS]
        if sessions is not None:
            routes.append(Route("/reward", self._post_reward, methods=["POST"]))
        self._app = Starlette(
            routes=routes,
            exception_handlers={
                RequestError: _build_error_response,
                ClientDisconnect: lambda request, error: Response(status_code=499),
                HTTPException: _build_error_response,
                Exception: _build_error_response,
            },
        )
        self._app.router.redirect_slashes = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve a request (https://asgi.readthedocs.io).

        Two keys are added to the scope: `session`, the session's name or "", and, if the endpoint
        serves agents, `agent`, the `AgentSession`.
        """
        match = SESSION_PATH.fullmatch(scope["path"])
        session, path = match.groups() if match else ("", scope["path"])
        request = Request({**scope, "path": path, "session": session, "agent": None})
        app: Any = self._app
        try:
            self._check_access(request)
            if self.sessions is not None and path != "/health":
                request.scope["agent"] = self._find_agent_session(request)
        except RequestError as error:
            app = _build_error_response(request, error)
        request.scope["session"] = session or request.headers.get("x-session-id", "")
        if request.scope["agent"] is not None:
            request.scope["session"] = request.scope["agent"].name
        await app(request.scope, receive, send)

    def _check_access(self, request: Request) -> None:
        """Check the host, origin and key of a request.

        Raises:
            RequestError: Access is denied.
        """
        hosts = [host.lower() for host in request.headers.getlist("host")]
        if self.hosts is not None and (len(hosts) != 1 or hosts[0] not in self.hosts):
            message = f"the Host is {', '.join(hosts)!r:.80}; expected {self.hosts[0]}."
            raise RequestError(403, message)
        origins = [
            origin.lower().partition("://")[2] for origin in request.headers.getlist("origin")
        ]
        site = request.headers.get("sec-fetch-site", "none")
        if site not in ("none", "same-origin") or any(origin not in hosts for origin in origins):
            raise RequestError(
                403, "the request comes from another site's page; expected a program."
            )
        keys = get_client_keys(request)
        is_key = any(hmac.compare_digest(key.encode(), self._key.encode()) for key in keys)
        if self._key and not is_key and request.scope["path"] != "/health":
            message = "the key is missing or wrong; expected the server's as a bearer token."
            raise RequestError(401, message)

    def _find_agent_session(self, request: Request) -> AgentSession:
        """Look up an agent session by the request's URL path or API key.

        Raises:
            RequestError: The session does not exist.
        """
        assert self.sessions is not None
        names = [request.scope["session"], *get_client_keys(request)]
        session = self.sessions.get(next(filter(None, names), ""))
        if session is None:
            message = "the episode does not exist; expected the URL or key of a running episode."
            raise RequestError(404, message, code="no_episode")
        return session

    async def _read_body(self, request: Request) -> bytes:
        """Read the body of a request.

        Raises:
            RequestError: The body is too large.
            ClientDisconnect: The client disconnected.
        """
        data = bytearray()
        async for chunk in request.stream():
            data += chunk
            if len(data) > MAX_BODY_BYTES:
                message = f"the body has more than {MAX_BODY_BYTES} bytes; send a shorter one."
                raise RequestError(413, message, headers={"Connection": "close"})
        return bytes(data)

    async def _build_completion_app(self, request: Request) -> Any:
        """Return an ASGI application that sends a completion until the client disconnects.

        Raises:
            RequestError: The request is rejected.
        """
        data = await self._read_body(request)

        async def respond(scope: Any, receive: Any, send: Any) -> None:
            response_task = asyncio.ensure_future(self._send_completion(request, data, send))
            disconnect_task = asyncio.ensure_future(_wait_for_disconnect(receive))
            disconnect_task.add_done_callback(lambda _: response_task.cancel())
            try:
                await response_task
            except asyncio.CancelledError:
                if not disconnect_task.done():
                    raise
            finally:
                disconnect_task.cancel()

        return respond

    async def _send_completion(self, request: Request, data: bytes, send: Any) -> None:
        """Sample a completion; send it as a stream or as a single response."""
        session, name = request.scope["agent"], request.scope["session"]
        path = request.scope["path"]
        (parse, response, events), prefix = DIALECTS[path], f"{name}\n{path}\n"
        keys = [hashlib.sha256(prefix.encode() + data).hexdigest()]
        if header := request.headers.get("idempotency-key"):
            keys.append(prefix + header)
        is_retry = request.headers.get("x-stainless-retry-count", "") not in ("", "0")
        with contextlib.ExitStack() as stack:
            # A repeated request waits until the first request is prepared.
            async with self._locks.setdefault(keys[-1], asyncio.Lock()):
                completion = self._cache.find(
                    keys, is_retry=is_retry, is_recorded=session is not None
                )
                if completion is None:
                    parsed = await asyncio.to_thread(parse, data, name, self.model)
                    sample_keys: Sequence[np.ndarray] = ()
                    if session is not None:
                        parsed, sample_keys = session.prepare_request(parsed)
                    completion = Completion(self.model, parsed, name, sample_keys)
                stack.enter_context(self._cache.attach_client(completion, keys))
            has_stream = completion.request.body.stream
            try:
                is_complete = True
                if has_stream:
                    event_stream = events(completion)
                    is_complete = await _send_events(
                        request, send, completion, event_stream, session
                    )
                else:
                    await completion.wait()
                    if session is not None:
                        session.record_completion(completion)
                    json_response = JSONResponse(response(completion))
                    await json_response(request.scope, request.receive, send)
            except BaseException:
                completion.is_undelivered = True  # another reader may reset this
                raise
            completion.is_undelivered = not is_complete
            # End the stream last, so that a client that receives the end has all events.
            if has_stream:
                await send({"type": "http.response.body", "body": b""})

    async def _count_tokens(self, request: Request) -> Response:
        data = await self._read_body(request)
        parse, session = messages.parse_messages_request, request.scope["session"]
        completion_request = await asyncio.to_thread(
            parse, data, session, self.model, CountTokensRequest
        )
        return JSONResponse({"input_tokens": len(completion_request.prompt_ids)})

    async def _post_reward(self, request: Request) -> Response:
        data = await self._read_body(request)
        request.scope["agent"].post_reward(get_client_keys(request), data)
        return JSONResponse({"status": "ok"})

    async def _get_health(self, request: Request) -> Response:
        status = "ok" if self.worker.is_alive else "ended"
        status = "ending" if self.worker.is_shutting_down else status
        return JSONResponse({"status": status}, 200 if status == "ok" else 503)

    async def _get_models(self, request: Request) -> Response:
        model = {"id": self.model.name, "object": "model", "created": 0, "owned_by": "jaxrl"}
        model["max_model_len"] = self.model.max_total_tokens
        return JSONResponse({"object": "list", "data": [model]})

    async def _get_metrics(self, request: Request) -> Response:
        return PlainTextResponse(
            format_metrics(self.worker), media_type="text/plain; version=0.0.4"
        )


def _build_error_response(request: Request, error: Exception) -> Response:
    """Build the response to a rejected or failed request, in the format of the requested API."""
    if isinstance(error, HTTPException):
        path = request.scope["path"]
        message = f"there is no {request.method} {path:.100} here; see docs/serve.md."
        error = RequestError(error.status_code, message, headers=error.headers)
    elif not isinstance(error, RequestError):
        error = RequestError(500, f"the server failed with {type(error).__name__}; see its log.")
    body = error.build_body(is_anthropic=_uses_anthropic_api(request))
    return JSONResponse(body, error.status, error.headers)


async def _send_events(
    request: Request,
    send: Any,
    completion: Completion,
    events: AsyncIterator[Event],
    session: AgentSession | None,
) -> bool:
    """Send events without ending the stream; return False after an error."""

    async def send_event(name: str, value: Any) -> None:
        data = value if isinstance(value, str) else json.dumps(value, allow_nan=False)
        text = f"event: {name}\ndata: {data}\n\n" if name else f"data: {data}\n\n"
        await send({"type": "http.response.body", "body": text.encode(), "more_body": True})

    headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
    headers.append((b"cache-control", b"no-store"))
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    try:
        async for name, value in events:
            if session is not None and completion.is_finished:
                session.record_completion(completion)
            await send_event(name, value)
    except RequestError as error:
        is_anthropic = _uses_anthropic_api(request)
        body = error.build_body(is_anthropic=is_anthropic)
        await send_event("error" if is_anthropic else "", body)
        return False
    return True


async def _wait_for_disconnect(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _uses_anthropic_api(request: Request) -> bool:
    return bool(request.scope["path"].startswith(MESSAGES))


def get_client_keys(request: Request) -> tuple[str, str]:
    """Return the API keys in OpenAI's and Anthropic's headers, "" for a missing header."""
    scheme, _, value = request.headers.get("authorization", "").partition(" ")
    bearer = value.strip() if scheme.lower() == "bearer" else ""
    return bearer, request.headers.get("x-api-key", "")


def format_metrics(worker: Worker) -> str:
    """Format the worker's metrics as Prometheus text.

    Format: https://prometheus.io/docs/instrumenting/exposition_formats.
    """
    counts = worker.engine.counts
    counters = {
        **worker.stats,
        "tokens_read_total": counts.prefilled_prompt + counts.prefilled_resume,
        "tokens_sampled_total": counts.sampled,
        "chunks_total": counts.chunks,
        "rows_swapped_total": counts.preemptions,
    }
    gauges = {
        "samples_running": worker.num_running,
        "samples_queued": worker.num_queued,
        "rows_kept": worker.num_cached_rows,
        "pages_free": worker.engine.num_free_pages,
    }
    lines = []
    for kind, values in (("counter", counters), ("gauge", gauges)):
        for name, value in values.items():
            lines += [f"# TYPE jaxrl_{name} {kind}", f"jaxrl_{name} {value}"]
    return "\n".join([*lines, ""])


def bind_port(host: str, port: int, key: str) -> socket.socket:
    """Bind a port without listening, so that clients fail instead of hanging during loading.

    Args:
        host: Address to listen on.
        port: Port number; 0 for any free port.
        key: API key that clients must send; "" for none.

    Raises:
        ValueError: Other machines can reach the address, and no key is set.
        OSError: The port is not available.
    """
    if host not in LOOPBACK_HOSTS and not key:
        raise ValueError(
            f"--host={host} can be reached from other machines; expected --key_env=NAME, the "
            "environment variable that holds a key."
        )
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(
            f"port {port} of {host} is not available: {error.strerror}; choose another port."
        ) from error
    return listener


class Server:
    """HTTP server that runs an endpoint in a thread."""

    def __init__(self, endpoint: Endpoint, host: str, listener: socket.socket):
        """Start listening and serving.

        Args:
            endpoint: ASGI application to serve.
            host: Address to listen on.
            listener: Socket from `bind_port`.

        Raises:
            OSError: Another process is listening on the port.
        """
        self.endpoint, self._socket = endpoint, listener
        self._socket.listen(1024)
        self.port = self._socket.getsockname()[1]
        if host in LOOPBACK_HOSTS:
            names = ("localhost", LOOPBACK, "[::1]")
            endpoint.hosts = [f"{name}:{self.port}" for name in names]
            endpoint.hosts += names if self.port == 80 else ()
        self.address = f"http://{f'[{host}]' if ':' in host else host}:{self.port}"
        config = uvicorn.Config(
            endpoint,
            http="h11",
            ws="none",
            lifespan="off",
            log_level="error",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=MAX_CONNECTIONS,
            timeout_graceful_shutdown=SHUTDOWN_TIMEOUT_S,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._socket]}, name="http", daemon=True
        )
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """True until the server or its engine stops."""
        return self._thread.is_alive() and self.endpoint.worker.is_alive

    def shutdown(self, timeout_s: float) -> bool:
        """Reject new requests, wait up to `timeout_s` seconds for running requests, then close.

        Returns:
            True if all completions finished in time.
        """
        is_done = self.endpoint.worker.shutdown(timeout_s)
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()
        return is_done

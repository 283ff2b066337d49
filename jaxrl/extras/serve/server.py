"""The endpoint over HTTP: a Starlette application, access checks and the server's thread.

A client may be any program, or any page in a browser on this machine. Hence the server listens on
the loopback interface unless a key is set, the `Host` there must name it (else another site's name
could resolve to it), and requests of other sites' pages are refused.
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
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
from jaxrl.extras.serve.errors import RequestError, anthropic_error, openai_error
from jaxrl.extras.serve.generation import (
    Completion,
    CompletionCache,
    ServedModel,
)
from jaxrl.extras.serve.worker import Worker

if TYPE_CHECKING:
    from jaxrl.extras.serve.agents.sessions import AgentSession, AgentSessions

LOOPBACK = "127.0.0.1"
LOCAL = ("localhost", "127.0.0.1", "::1")
"""Addresses that no other machine can reach."""

HOST_NAMES = ("localhost", "127.0.0.1", "[::1]")
"""Hosts by which a program on this machine calls the server."""

BODY_S = 60.0
"""Seconds for a request's body to arrive."""

MAX_CONNECTIONS, MAX_SESSION = 4096, 256
MESSAGES, COUNT, REWARD = "/v1/messages", "/v1/messages/count_tokens", "/reward"
MAX_INLINE_BODY = 2**15
"""Bytes of a body that is parsed on the event loop, where a thread would cost more."""

SHUTDOWN_S = 2
"""Seconds for connections to close at the end; completions have ended before."""

SESSION_PATH = re.compile(r"/r/([A-Za-z0-9._~:@-]{1,128})(/.*)")
"""Address that names a session."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a server.

    Attributes:
        name: Name of the model for clients.
        template_arguments: Arguments of its chat template.
        key: Key that clients must send; "" for none.
        deadline_s: Seconds that a completion may take.
        max_body_mib: Limit on a request's body.
        max_cached: Completions to remember for repeated requests.
        stops: Stop strings of requests that name none.
    """

    name: str
    template_arguments: Mapping[str, Any]
    key: str = ""
    deadline_s: float = 600.0
    max_body_mib: float = 16.0
    max_cached: int = 512
    stops: tuple[str, ...] = ()


class Endpoint:
    """The application: passes HTTP requests to the worker and its chunks to clients."""

    def __init__(
        self,
        worker: Worker,
        tokenizer: Tokenizer,
        settings: Settings,
        sessions: AgentSessions | None = None,
    ):
        """Set up the routes.

        Args:
            worker: Worker that owns the engine.
            tokenizer: Tokenizer with the chat template.
            settings: Settings of the server.
            sessions: The only sessions that are served, if given. A session's name is the key of
                its clients.
        """
        self.worker, self.settings, self.sessions = worker, settings, sessions
        self.hosts: list[str] | None = None  # accepted values of `Host`; None for any
        self.statuses: dict[int, int] = {}
        self.model = ServedModel(
            name=settings.name,
            history=ChatHistory(tokenizer, max_prompt_tokens=worker.max_total_tokens - 1),
            max_total_tokens=worker.max_total_tokens,
            template_arguments=settings.template_arguments,
            stops=settings.stops,
        )
        self.cache = CompletionCache(
            worker, deadline_s=settings.deadline_s, max_size=settings.max_cached
        )
        routes = [
            Route("/health", self._health),
            Route("/metrics", self._metrics),
            Route("/v1/models", self._models),
            self._route("/v1/chat/completions", completions.read_chat, completions.ChatWriter),
            self._route("/inference/v1/generate", completions.read_ids, completions.IdsWriter),
            self._route(MESSAGES, messages.read_messages, messages.MessagesWriter),
            Route(COUNT, self._count_tokens, methods=["POST"]),
        ]
        if sessions is not None:
            routes.append(Route(REWARD, self._post_reward, methods=["POST"]))
        self._paths = [route.path for route in routes]
        self._app = Starlette(
            routes=routes,
            exception_handlers={
                RequestError: self._refuse,
                HTTPException: self._refuse_route,
                Exception: self._report_fault,
            },
        )
        self._app.router.redirect_slashes = False

    def _route(self, path: str, read: Callable[..., Any], writer: Callable[..., Any]) -> Route:
        return Route(path, _Generate(self, read, writer), methods=["POST"])

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one request; see ASGI (https://asgi.readthedocs.io)."""
        status = 500

        async def count_status(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        match = SESSION_PATH.fullmatch(scope["path"])
        session, path = match.groups() if match else ("", scope["path"])
        scope = {**scope, "path": path, "session": session}
        request = Request(scope)
        app: Any = self._app
        try:
            self._check_access(request)
        except RequestError as error:
            app = self._refuse(request, error)
        try:
            await app(scope, receive, count_status)
        finally:
            status = 499 if scope.get("has_disconnected") else status
            self.statuses[status] = self.statuses.get(status, 0) + 1

    def _check_access(self, request: Request) -> None:
        """Check host, origin and key.

        Raises:
            RequestError: The client may not use the server.
        """
        hosts = [host.lower() for host in request.headers.getlist("host")]
        if self.hosts is not None and (len(hosts) != 1 or hosts[0] not in self.hosts):
            message = f"the Host is {', '.join(hosts)!r:.80}; expected {self.hosts[0]}."
            raise RequestError(403, message)
        origins = [_netloc(origin) for origin in request.headers.getlist("origin")]
        site = request.headers.get("sec-fetch-site", "none")
        if site not in ("none", "same-origin") or any(origin not in hosts for origin in origins):
            raise RequestError(403, "the request is of another site's page; expected a program.")
        if request.scope["path"] == "/health":
            return
        if self.settings.key and not any(map(self._is_key, keys_of(request))):
            raise RequestError(
                401,
                "the key is missing or wrong; expected the server's, as Authorization: Bearer.",
                headers={"WWW-Authenticate": "Bearer"},
                code="invalid_api_key",
            )
        if self.sessions is not None and self.hosts is None:
            self.session_of(request)

    def _is_key(self, value: str) -> bool:
        """Return True if a header holds the key, as UTF-8 or as latin-1."""
        key = self.settings.key.encode("utf-8", "surrogateescape")
        return any(hmac.compare_digest(value.encode(code), key) for code in ("latin-1", "utf-8"))

    def session_of(self, request: Request) -> AgentSession:
        """Return the recorded session of a request, by address or key.

        Raises:
            RequestError: There is none.
        """
        assert self.sessions is not None
        names = [request.scope["session"], *keys_of(request)]
        return self.sessions.get(next(filter(None, names), ""))

    async def read(self, request: Request) -> bytes:
        """Read the body of a request.

        Raises:
            RequestError: The server is ending, or the body is too large or too slow.
            ClientDisconnect: The client left.
        """
        if self.worker.is_ending:
            raise RequestError(503, "the server is ending; use another one.")
        limit, data = int(self.settings.max_body_mib * 2**20), bytearray()
        close = {"Connection": "close"}
        try:
            async with asyncio.timeout(BODY_S):
                async for piece in request.stream():
                    data += piece
                    if len(data) > limit:
                        message = f"the body has more than {limit} bytes; raise --max_body_mib."
                        raise RequestError(413, message, headers=close)
        except TimeoutError:
            message = f"the body did not arrive in {BODY_S:g} s."
            raise RequestError(408, message, headers=close) from None
        return bytes(data)

    async def _count_tokens(self, request: Request) -> Response:
        data = await self.read(request)
        name = self.session_name(request)
        built = await asyncio.to_thread(messages.read_count, data, name, self.model)
        return JSONResponse({"input_tokens": len(built.prompt_ids)})

    def session_name(self, request: Request) -> str:
        """Return the name of the session in which a request runs.

        Raises:
            RequestError: There is no such session, or the name is too long.
        """
        if self.sessions is not None:
            return self.session_of(request).name
        name: str = request.scope["session"] or request.headers.get("x-session-id", "")
        if len(name) > MAX_SESSION:
            message = f"X-Session-ID has {len(name)} characters; expected at most {MAX_SESSION}."
            raise RequestError(400, message, param="X-Session-ID")
        return name

    async def _post_reward(self, request: Request) -> Response:
        data = await self.read(request)
        self.session_of(request).post_reward(keys_of(request), data)
        return JSONResponse({"status": "ok"})

    async def _health(self, request: Request) -> Response:
        status = "damaged" if self.worker.is_damaged else "ok"
        status = status if self.worker.is_alive else "ended"
        status = "ending" if self.worker.is_ending else status
        return JSONResponse({"status": status}, 200 if status == "ok" else 503)

    async def _models(self, request: Request) -> Response:
        model = {
            "id": self.settings.name,
            "object": "model",
            "created": 0,
            "owned_by": "jaxrl",
            "max_model_len": self.worker.max_total_tokens,
        }
        return JSONResponse({"object": "list", "data": [model]})

    async def _metrics(self, request: Request) -> Response:
        text = metrics_text(self.worker, self.statuses)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    def _refuse(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestError)
        return JSONResponse(error_body(request, error), error.status, error.headers)

    def _refuse_route(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = (
            f"there is no {request.method} {request.scope['path']:.100} here; expected one of "
        )
        message += f"{', '.join(self._paths)}, or one behind /r/SESSION."
        headers = dict(error.headers or {})
        return self._refuse(request, RequestError(error.status_code, message, headers=headers))

    def _report_fault(self, request: Request, error: Exception) -> Response:
        message = f"the server failed with {type(error).__name__}; its log says why."
        return self._refuse(request, RequestError(500, message))


class _Generate:
    """ASGI endpoint that samples completions in one dialect."""

    def __init__(self, endpoint: Endpoint, read: Callable[..., Any], writer: Callable[..., Any]):
        self._endpoint, self._read, self._writer = endpoint, read, writer
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request, and cancel the work if the client leaves."""
        request = Request(scope, receive)
        try:
            data = await self._endpoint.read(request)
            work = asyncio.ensure_future(self._answer(request, data, send))
            leaving = asyncio.ensure_future(_wait_for_disconnect(receive))
            leaving.add_done_callback(lambda _: work.cancel())
            try:
                await work
            except asyncio.CancelledError:
                if leaving.done():
                    raise ClientDisconnect from None
                raise
            finally:
                leaving.cancel()
        except ClientDisconnect:
            scope["has_disconnected"] = True

    async def _answer(self, request: Request, data: bytes, send: Any) -> None:
        endpoint, scope = self._endpoint, request.scope
        session = None if endpoint.sessions is None else endpoint.session_of(request)
        name = endpoint.session_name(request)
        prefix = f"{name}\n{scope['path']}\n"
        digest = hashlib.sha256(prefix.encode() + data).hexdigest()
        header = request.headers.get("idempotency-key")
        keys = [digest, *([prefix + header] if header else [])]
        with contextlib.ExitStack() as reading:
            # A repeated request waits while the first one is prepared.
            async with self._locks.setdefault(keys[-1], asyncio.Lock()):
                completion = self._find(request, keys, session is not None)
                if completion is None:
                    completion = await self._prepare(data, name, session)
                reading.enter_context(endpoint.cache.reading(completion))
                for key in keys:
                    endpoint.cache.put(key, digest, completion)
            writer = self._writer(completion, endpoint.model)
            try:
                is_whole = True
                if writer.streams:
                    is_whole = await _send_events(request, send, writer, completion, session)
                else:
                    await completion.wait()
                    if session is not None:
                        session.record(completion)
                    await JSONResponse(writer.response())(scope, request.receive, send)
            except BaseException:
                completion.is_undelivered = True  # unless another client reads it
                raise
            completion.is_undelivered = not is_whole
            if writer.streams:  # the client has all of it before the end
                await send({"type": "http.response.body", "body": b""})

    def _find(self, request: Request, keys: Sequence[str], is_recorded: bool) -> Completion | None:
        """Return the completion that a repeated request had before."""
        cache, digest = self._endpoint.cache, keys[0]
        if keys[-1] != digest and (completion := cache.get(keys[-1], digest)) is not None:
            return completion
        is_retry = request.headers.get("x-stainless-retry-count", "") not in ("", "0")
        if not is_retry and not is_recorded:
            return None
        completion = cache.get(digest, digest)
        if completion is not None and (is_retry or completion.is_undelivered):
            return completion
        return None  # a new request that happens to be equal

    async def _prepare(self, data: bytes, name: str, session: AgentSession | None) -> Completion:
        model = self._endpoint.model
        if len(data) > MAX_INLINE_BODY:
            request = await asyncio.to_thread(self._read, data, name, model)
        else:
            request = self._read(data, name, model)
        random_keys: Sequence[np.ndarray] = ()
        if session is not None:
            request, random_keys = session.admit(request)
        return Completion(request, name, random_keys)


async def _send_events(
    request: Request, send: Any, writer: Any, completion: Completion, session: AgentSession | None
) -> bool:
    """Send a stream of server-sent events without its end; return False if it has an error."""

    async def send_event(name: str, value: Any) -> None:
        data = value if isinstance(value, str) else json.dumps(value, allow_nan=False)
        text = f"event: {name}\ndata: {data}\n\n" if name else f"data: {data}\n\n"
        await send({"type": "http.response.body", "body": text.encode(), "more_body": True})

    headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
    headers.append((b"cache-control", b"no-store"))
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    try:
        async for name, value in writer.events():
            if session is not None and completion.is_finished:
                session.record(completion)
            await send_event(name, value)
    except RequestError as error:
        name = "error" if request.scope["path"] == MESSAGES else ""
        await send_event(name, error_body(request, error))
        return False
    return True


async def _wait_for_disconnect(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def error_body(request: Request, error: RequestError) -> dict[str, Any]:
    """Return the body of an error in the dialect of the request's address."""
    is_anthropic = request.scope["path"].startswith(MESSAGES)
    return anthropic_error(error) if is_anthropic else openai_error(error)


def keys_of(request: Request) -> tuple[str, str]:
    """Return the keys that a client sends, as OpenAI's and as Anthropic's do; "" for none."""
    scheme, _, value = request.headers.get("authorization", "").partition(" ")
    bearer = value.strip() if scheme.lower() == "bearer" else ""
    return bearer, request.headers.get("x-api-key", "")


def _netloc(origin: str) -> str:
    """Return host and port of an `Origin`; "" if it names none."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:  # such as http://[
        return ""


def metrics_text(worker: Worker, statuses: Mapping[int, int]) -> str:
    """Return counts in Prometheus' text format.

    See https://prometheus.io/docs/instrumenting/exposition_formats.
    """
    stats, counts = worker.stats, worker.engine.counts
    counters = {
        "samples_total": stats.requests,
        "samples_finished_total": stats.finished,
        "samples_cancelled_total": stats.cancelled,
        "samples_late_total": stats.timed_out,
        "samples_failed_total": stats.failed,
        "refused_busy_total": stats.refused,
        "prompt_tokens_total": stats.prompt_tokens,
        "prompt_tokens_reused_total": stats.reused_tokens,
        "tokens_read_total": counts.prefilled_prompt + counts.prefilled_resume,
        "tokens_sampled_total": counts.sampled,
        "chunks_total": counts.chunks,
        "rows_released_total": stats.evicted_rows,
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
    name = "jaxrl_responses_total"
    lines.append(f"# TYPE {name} counter")
    lines += [f'{name}{{status="{status}"}} {count}' for status, count in sorted(statuses.items())]
    return "\n".join([*lines, ""])


def bind_port(host: str, port: int, key: str) -> socket.socket:
    """Bind a port without listening, so that no client waits while a model loads.

    Args:
        host: Address to listen on.
        port: Port; 0 for any free one.
        key: Key that clients must send; "" for none.

    Raises:
        ValueError: Other machines could reach the server, and no key is set.
        OSError: The port is not available.
    """
    if host not in LOCAL and not key:
        raise ValueError(
            f"--host={host} can be reached from other machines; expected --key_env=NAME, the "
            "environment variable that holds a key."
        )
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise OSError(
            f"--port={port} of --host={host} is not available: {error.strerror}; choose another."
        ) from error
    return bound


class Server:
    """The endpoint on a port, in a thread of its own."""

    def __init__(self, endpoint: Endpoint, host: str, bound: socket.socket):
        """Start to listen.

        Args:
            endpoint: The application.
            host: Address to listen on.
            bound: Socket from `bind_port`.

        Raises:
            OSError: Another process has started to listen there.
        """
        self.endpoint, self._socket = endpoint, bound
        self._socket.listen(1024)
        self.port = self._socket.getsockname()[1]
        if host in LOCAL:
            endpoint.hosts = [f"{name}:{self.port}" for name in HOST_NAMES]
            endpoint.hosts += HOST_NAMES if self.port == 80 else ()
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
            timeout_graceful_shutdown=SHUTDOWN_S,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._socket]}, name="http", daemon=True
        )
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Return False once the server or its engine has ended."""
        return self._thread.is_alive() and self.endpoint.worker.is_alive

    def shutdown(self, limit_s: float) -> bool:
        """Refuse new requests, let running ones end within a limit, and close the port.

        Returns:
            True if all completions ended in time.
        """
        is_done = self.endpoint.worker.shutdown(limit_s)
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()
        return is_done

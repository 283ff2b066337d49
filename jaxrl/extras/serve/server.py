"""The endpoint over HTTP: addresses, who may ask, bodies, streams, clients that go away.

A client may be a program that somebody else wrote, or any page in a browser on this machine. So:
the address is the loopback's unless a key is set, which is then asked for; on the loopback the
`Host` must name it, or another site could have its own name resolved to it; a request of another
site's page is refused. A body has a largest size and a time in which it must be there, and what is
written a time in which it must be read.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import logging
import re
import socket
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit
from weakref import WeakValueDictionary

import numpy as np
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from jaxrl.data.tokenizer import Tokenizer
from jaxrl.extras.serve import completions, generate, messages
from jaxrl.extras.serve.answers import Answer, Answers, Limits, Question
from jaxrl.extras.serve.chats import Chats
from jaxrl.extras.serve.fields import Fields, RefusedError, TooLongError, read_body
from jaxrl.extras.serve.worker import Worker
from jaxrl.utils.text import printable

LOOPBACK = "127.0.0.1"
LOCAL = ("localhost", "127.0.0.1", "::1")
"""Addresses that no other machine can reach."""

NAMES = ("localhost", "127.0.0.1", "[::1]")
"""Hosts by which a program on this machine calls the server."""

HEAD_S, BODY_S, WRITE_S = 30.0, 60.0, 60.0
"""Seconds for a request's head and its body to come, and for a client to read what is written."""

MAX_CONNECTIONS, MAX_SESSION = 4096, 256
MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
REWARD = "/reward"
READ_AT_ONCE = 2**15
"""Bytes of a body that is read on the event loop: to hand it to a thread would cost more."""

STOP_S = 2
"""Seconds in which connections may end when the server does; the answers have ended before."""

ROLLOUT = re.compile(r"/r/([A-Za-z0-9._~:@-]{1,128})(/.*)")
"""An address in a session of its own, which is a rollout's."""


class GoneError(Exception):
    """The client is away."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a server.

    Attributes:
        name: of the model, for clients.
        template_arguments: of its chat template.
        key: that clients must have; "" for none.
        deadline_s: seconds from a question to the end of its answer.
        max_body_mib: of a request.
        max_answers: that are kept for clients that ask again.
        stops: strings that end an answer where its request names none.
    """

    name: str
    template_arguments: Mapping[str, Any]
    key: str = ""
    deadline_s: float = 600.0
    max_body_mib: float = 16.0
    max_answers: int = 512
    stops: tuple[str, ...] = ()


class Play(Protocol):
    """A session whose answers are recorded, since a policy is trained on them.

    Attributes:
        name: of the session.
    """

    name: str

    def ask(self, question: Question) -> tuple[Question, Sequence[np.ndarray]]:
        """Returns the question as it is drawn here, and the keys of its samples.

        Raises:
            RefusedError: the session has ended, or has no tokens left for it.
        """
        ...

    def record(self, answer: Answer) -> None:
        """Records an answer, once it is whole and before it is sent; again counts once."""
        ...

    def post_reward(self, keys: Sequence[str], data: bytes) -> None:
        """Record a reward that was posted for the session.

        Args:
            keys: Keys that the request gives.
            data: Body of the request.

        Raises:
            RefusedError: No key is the session's reward key, the body is not a reward, the session
                has another reward, or it is over.
        """
        ...


class Plays(Protocol):
    """All sessions whose answers are recorded; others are refused."""

    def find(self, name: str) -> Play:
        """Returns the session of a name, which only its client knows.

        Raises:
            RefusedError: there is none.
        """
        ...


class Exchange:
    """A request and its answer."""

    def __init__(self, scope: Any, receive: Any, send: Any):
        """Reads the head; see ASGI (https://asgi.readthedocs.io)."""
        self.method: str = scope["method"]
        in_session = ROLLOUT.fullmatch(scope["path"])
        self.rollout, self.path = in_session.groups() if in_session else ("", scope["path"])
        self._headers: list[tuple[str, str]] = [
            (name.decode("latin-1").lower(), value.decode("latin-1"))
            for name, value in scope["headers"]
        ]
        self._receive, self._send = receive, send
        self.has_begun = False

    def headers(self, name: str) -> list[str]:
        """All values of a header."""
        return [value for one, value in self._headers if one == name]

    def header(self, name: str) -> str:
        """The first value of a header; "" without one."""
        return next(iter(self.headers(name)), "")

    @property
    def keys(self) -> tuple[str, str]:
        """The keys that a client gives, as OpenAI's and Anthropic's do; "" for none."""
        scheme, _, value = self.header("authorization").partition(" ")
        bearer = value.strip() if scheme.lower() == "bearer" else ""
        return bearer, self.header("x-api-key")

    async def body(self, most: int) -> bytes:
        """The body.

        Raises:
            RefusedError: it is larger, or takes too long.
            GoneError: the client left.
        """
        data = bytearray()
        try:
            async with asyncio.timeout(BODY_S):
                while True:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise GoneError
                    data += message.get("body", b"")
                    if len(data) > most:
                        raise RefusedError(
                            413,
                            f"the body has more than {most} bytes; send less, or raise "
                            "--max_body_mib.",
                            headers={"Connection": "close"},
                        )
                    if not message.get("more_body"):
                        return bytes(data)
        except TimeoutError:
            raise RefusedError(
                408,
                f"the body was not there after {BODY_S:g} s.",
                headers={"Connection": "close"},
            ) from None

    async def gone(self) -> None:
        """Returns when the client has left, after its body was read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def send(
        self, status: int, content: bytes, kind: str, headers: Mapping[str, str] | None = None
    ) -> None:
        """Sends a whole answer."""
        every = {"content-type": kind, "content-length": str(len(content)), **(headers or {})}
        await self._begin(status, every)
        body = b"" if self.method == "HEAD" else content
        await self._write({"type": "http.response.body", "body": body})

    async def send_json(
        self, value: Any, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        """Sends JSON."""
        content = json.dumps(value, allow_nan=False).encode()
        await self.send(status, content, "application/json", headers)

    async def begin_stream(self) -> None:
        """Begins server-sent events."""
        await self._begin(200, {"content-type": "text/event-stream; charset=utf-8"})

    async def event(self, name: str, value: Any) -> None:
        """Sends an event; `value` is JSON, or a text as it stands."""
        data = value if isinstance(value, str) else json.dumps(value, allow_nan=False)
        text = f"event: {name}\ndata: {data}\n\n" if name else f"data: {data}\n\n"
        await self._write({"type": "http.response.body", "body": text.encode(), "more_body": True})

    async def end_stream(self) -> None:
        """Ends the stream of events."""
        await self._write({"type": "http.response.body", "body": b""})

    async def _begin(self, status: int, headers: Mapping[str, str]) -> None:
        self.has_begun = True
        every = {"cache-control": "no-store", "x-content-type-options": "nosniff", **headers}
        raw = [(name.lower().encode(), value.encode("latin-1")) for name, value in every.items()]
        await self._write({"type": "http.response.start", "status": status, "headers": raw})

    async def _write(self, message: Mapping[str, Any]) -> None:
        try:
            async with asyncio.timeout(WRITE_S):  # which makes no task, as wait_for does
                await self._send(message)
        except TimeoutError:
            raise GoneError from None


Reader = Callable[[Fields, str], tuple[Question, Any]]
"""Reads a body of a session: the question, and what the dialect wants to know of it."""


class Endpoint:
    """The application: what is asked by HTTP goes to the worker, and comes back."""

    def __init__(
        self,
        worker: Worker,
        tokenizer: Tokenizer,
        settings: Settings,
        plays: Plays | None = None,
    ):
        """Answers nothing yet.

        Args:
            worker: that owns the engine.
            tokenizer: with the chat template.
            settings: of the server.
            plays: the sessions that are answered, where not anybody may ask; a session's name is
                its clients' key.
        """
        self.worker, self.settings, self.plays = worker, settings, plays
        self.hosts: list[str] | None = None  # values of `Host` that are answered; None: any
        self._chats = Chats(tokenizer, max_prompt_tokens=worker.max_total_tokens - 1)
        self._limits = Limits(
            max_total_tokens=worker.max_total_tokens,
            num_tokens=tokenizer.num_tokens,
            stops=settings.stops,
        )
        self._answers = Answers(
            worker, deadline_s=settings.deadline_s, max_kept=settings.max_answers
        )
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self.statuses: dict[int, int] = {}
        self._gets = {
            "/health": self._health,
            "/metrics": self._metrics,
            "/v1/models": self._models,
        }
        self._posts: dict[str, tuple[Reader, Callable[[Answer, Any], Any]]] = {
            "/v1/chat/completions": (self._read_chat, self._write_chat),
            "/inference/v1/generate": (self._read_ids, lambda answer, _: Ids(answer)),
            MESSAGES: (self._read_messages, self._write_messages),
            COUNT: (self._read_count, self._write_messages),
        }

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answers one request; see ASGI."""
        if scope["type"] != "http":
            return
        exchange = Exchange(scope, receive, send)
        status = 200
        try:
            await self._answer(exchange)
        except GoneError:
            status = 499
        except RefusedError as error:
            status = error.status
            await self._refuse(exchange, error)
        except Exception as error:  # a bug
            status = 500
            logging.getLogger("uvicorn.error").exception("a request failed")
            text = f"the server failed with {type(error).__name__}; its log says why."
            await self._refuse(exchange, RefusedError(500, text))
        self.statuses[status] = self.statuses.get(status, 0) + 1

    async def _refuse(self, exchange: Exchange, error: RefusedError) -> None:
        # The clients of each address read an error in their own dialect.
        is_anthropic = exchange.path.startswith(MESSAGES)
        text = printable(str(error))
        value: dict[str, Any]
        if is_anthropic:
            kind = error.kind if error.status != 500 else "api_error"
            text = error.short if isinstance(error, TooLongError) else text
            value = {"type": "error", "error": {"type": kind, "message": text}}
        else:
            fields = {"message": text, "type": error.kind, "param": error.param, "code": error.code}
            value = {"error": fields}
        try:
            if exchange.has_begun:
                await exchange.event("error" if is_anthropic else "", value)
                await exchange.end_stream()
            else:
                await exchange.send_json(value, error.status, error.headers)
        except GoneError:
            pass

    async def _answer(self, exchange: Exchange) -> None:
        self._check(exchange)
        if exchange.path in self._gets:
            if self.plays is not None and self.hosts is None and exchange.path != "/health":
                self._play(exchange)  # who has none has no business here
            if exchange.method not in ("GET", "HEAD"):
                raise RefusedError(405, f"{exchange.path} answers GET.", headers={"Allow": "GET"})
            await self._gets[exchange.path](exchange)
        elif exchange.path in self._posts or (self.plays and exchange.path == REWARD):
            if exchange.method != "POST":
                raise RefusedError(405, f"{exchange.path} answers POST.", headers={"Allow": "POST"})
            if self.worker.is_ending:
                raise RefusedError(503, "the server is ending; ask another one.")
            data = await exchange.body(int(self.settings.max_body_mib * 2**20))
            await self._while_there(exchange, self._post(exchange, data))
        else:
            known = ", ".join([*self._gets, *self._posts, *([REWARD] if self.plays else [])])
            twice = exchange.path.startswith("/v1/v1/")
            hint = " Anthropic's library takes the base URL without /v1." if twice else ""
            raise RefusedError(404, f"there is no {exchange.path[:100]} here.{hint} Expected "
                               f"{known}, or one behind /r/ROLLOUT.")  # fmt: skip

    def _check(self, exchange: Exchange) -> None:
        """Refuses who may not ask.

        Raises:
            RefusedError: says what is wrong.
        """
        hosts = exchange.headers("host")
        if self.hosts is not None and (len(hosts) != 1 or hosts[0].lower() not in self.hosts):
            given = ", ".join(hosts) or "nothing"
            raise RefusedError(403, f"the Host is {given!r:.80}; expected {self.hosts[0]}.")
        origins = [_site(one) for one in exchange.headers("origin")]
        site = exchange.header("sec-fetch-site") or "none"
        if site not in ("none", "same-origin") or any(
            one not in map(str.lower, hosts) for one in origins
        ):
            raise RefusedError(403, "the request is of another site's page; expected a program.")
        is_open = not self.settings.key or exchange.path == "/health"
        if not is_open and not any(map(self._is_key, exchange.keys)):
            raise RefusedError(
                401,
                "the key is missing or wrong; expected the server's, as Authorization: Bearer.",
                headers={"WWW-Authenticate": "Bearer"},
                code="invalid_api_key",
            )

    def _is_key(self, given: str) -> bool:
        """Return True if a header holds the key, in UTF-8 or in latin-1, as which it was read."""
        key = self.settings.key.encode("utf-8", "surrogateescape")
        return any(hmac.compare_digest(given.encode(code), key) for code in ("latin-1", "utf-8"))

    async def _while_there(self, exchange: Exchange, work: Any) -> None:
        """Does the work for a client, and breaks it off if the client leaves."""
        working = asyncio.ensure_future(work)
        leaving = asyncio.ensure_future(exchange.gone())
        leaving.add_done_callback(lambda _: working.cancel())
        try:
            await working
        except asyncio.CancelledError:
            if leaving.done():
                raise GoneError from None
            raise
        finally:
            leaving.cancel()

    def _play(self, exchange: Exchange) -> Play:
        """The recorded session that is asked for, by address or key.

        Raises:
            RefusedError: there is none.
        """
        assert self.plays is not None
        return self.plays.find(next(filter(None, (exchange.rollout, *exchange.keys)), ""))

    async def _post(self, exchange: Exchange, data: bytes) -> None:
        session = exchange.rollout or exchange.header("x-session-id")
        play = None
        if self.plays is not None:
            play = self._play(exchange)
            session = play.name
            if exchange.path == REWARD:
                play.post_reward(exchange.keys, data)
                await exchange.send_json({"status": "ok"})
                return
        reader, writer_of = self._posts[exchange.path]
        if len(session) > MAX_SESSION:
            # Cut, it could be the name of another session.
            raise RefusedError(
                400,
                f"X-Session-ID has {len(session)} characters; expected at most {MAX_SESSION}.",
                param="X-Session-ID",
            )
        place = f"{session}\n{exchange.path}\n"
        digest = hashlib.sha256(place.encode() + data).hexdigest()
        key = exchange.header("idempotency-key")
        names = [digest, *([f"{place}{key}"] if key else [])]
        # Who asks again while the first request is prepared waits for it.
        lock = self._locks.setdefault(names[-1], asyncio.Lock())
        with contextlib.ExitStack() as reading:
            async with lock:
                answer = self._answers.find(names[-1], digest) if key else None
                is_retry = exchange.header("x-stainless-retry-count") not in ("", "0")
                if answer is None and (is_retry or play is not None):
                    answer = self._answers.find(digest, digest)
                    if answer is not None and not (is_retry or answer.is_lost):
                        answer = None  # the same again, and not for want of a reply
                if answer is None:
                    if len(data) > READ_AT_ONCE:
                        question, shown = await asyncio.to_thread(
                            lambda: reader(read_body(data), session)
                        )
                    else:
                        question, shown = reader(read_body(data), session)
                    if exchange.path == COUNT:
                        await exchange.send_json({"input_tokens": len(question.prompt_ids)})
                        return
                    question, keys = play.ask(question) if play else (question, ())
                    answer = Answer(question, shown, session, keys)
                reading.enter_context(self._answers.reading(answer))
                for name in names:
                    self._answers.keep(name, digest, answer)
            writer = writer_of(answer, answer.shown)
            try:
                if writer.streams:
                    await exchange.begin_stream()
                    async for name, value in writer.events():
                        if play is not None and all(sample.end for sample in answer.samples):
                            play.record(answer)
                        await exchange.event(name, value)
                else:
                    for sample in answer.samples:
                        async for _ in sample.follow():
                            pass
                    if play is not None:
                        play.record(answer)
                    await exchange.send_json(writer.finished())
            except BaseException:
                answer.is_lost = True  # unless another client reads it
                raise
            answer.is_lost = False
            if writer.streams:  # of which a client has all it wants before the end
                await exchange.end_stream()

    def _read_chat(self, fields: Fields, session: str) -> tuple[Question, Any]:
        return completions.read(
            fields,
            session=session,
            model=self.settings.name,
            chats=self._chats,
            limits=self._limits,
            template_arguments=self.settings.template_arguments,
        )

    def _write_chat(self, answer: Answer, shown: Any) -> Any:
        return completions.Writer(answer=answer, shown=shown, chats=self._chats)

    def _read_messages(
        self, fields: Fields, session: str, counts: bool = False
    ) -> tuple[Question, Any]:
        return messages.read(
            fields,
            session=session,
            model=self.settings.name,
            chats=self._chats,
            limits=self._limits,
            counts=counts,
        )

    def _read_count(self, fields: Fields, session: str) -> tuple[Question, Any]:
        return self._read_messages(fields, session, counts=True)

    def _write_messages(self, answer: Answer, shown: Any) -> Any:
        return messages.MessageWriter(answer=answer, shown=shown, chats=self._chats)

    def _read_ids(self, fields: Fields, session: str) -> tuple[Question, Any]:
        return generate.read(fields, self._limits), None

    async def _health(self, exchange: Exchange) -> None:
        status = "damaged" if self.worker.is_damaged else "ok"
        status = status if self.worker.is_alive else "ended"
        status = "ending" if self.worker.is_ending else status
        await exchange.send_json({"status": status}, 200 if status == "ok" else 503)

    async def _models(self, exchange: Exchange) -> None:
        model = {
            "id": self.settings.name,
            "object": "model",
            "created": 0,
            "owned_by": "jaxrl",
            "max_model_len": self.worker.max_total_tokens,
        }
        await exchange.send_json({"object": "list", "data": [model]})

    async def _metrics(self, exchange: Exchange) -> None:
        text = metrics(self.worker, self.statuses)
        await exchange.send(200, text.encode(), "text/plain; version=0.0.4; charset=utf-8")


def _site(origin: str) -> str:
    """Host and port of an `Origin`; "" where it names none."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:  # as of http://[
        return ""


@dataclass(frozen=True)
class Ids:
    """Writes an answer as ids."""

    answer: Answer
    streams: bool = False

    def finished(self) -> dict[str, Any]:
        """The whole answer."""
        return generate.finished(self.answer)

    def events(self) -> AsyncIterator[Any]:
        """No stream is offered."""
        raise NotImplementedError


def metrics(worker: Worker, statuses: Mapping[int, int]) -> str:
    """Counts as Prometheus reads them.

    See https://prometheus.io/docs/instrumenting/exposition_formats.
    """
    totals, engine = worker.totals, worker.engine
    counts = engine.counts
    num_read = counts.prefilled_prompt + counts.prefilled_resume
    counters = {
        "samples_total": ("Samples that were asked for.", totals.requests),
        "samples_finished_total": ("Samples that ended.", totals.finished),
        "samples_cancelled_total": ("Samples whose clients left.", totals.cancelled),
        "samples_late_total": ("Samples that passed their deadline.", totals.late),
        "samples_failed_total": ("Samples that the engine failed.", totals.failed),
        "refused_busy_total": ("Requests refused for a full queue.", totals.refused_busy),
        "prompt_tokens_total": ("Tokens of prompts.", totals.prompt_tokens),
        "prompt_tokens_reused_total": ("Of these, not read again.", totals.reused_tokens),
        "tokens_read_total": ("Tokens that were read before sampling.", num_read),
        "tokens_sampled_total": ("Tokens that were sampled.", counts.sampled),
        "chunks_total": ("Chunks of decoding steps.", counts.chunks),
        "rows_released_total": ("Kept rows that were given up.", totals.released_rows),
        "rows_swapped_total": ("Rows whose pages went to the host.", counts.preemptions),
    }
    gauges = {
        "samples_running": ("Samples in the engine.", worker.num_running),
        "samples_queued": ("Samples without a row.", worker.num_queued),
        "rows_kept": ("Rows that wait for a next turn.", worker.num_kept),
        "pages_free": ("Pages of the cache that hold nothing.", engine.num_free_pages),
    }
    lines = []
    for kind, values in (("counter", counters), ("gauge", gauges)):
        for name, (meaning, value) in values.items():
            lines += [f"# HELP jaxrl_{name} {meaning}", f"# TYPE jaxrl_{name} {kind}"]
            lines.append(f"jaxrl_{name} {value}")
    name = "jaxrl_responses_total"
    lines += [f"# HELP {name} Responses by status.", f"# TYPE {name} counter"]
    lines += [f'{name}{{status="{status}"}} {count}' for status, count in sorted(statuses.items())]
    return "\n".join([*lines, ""])


class Http(H11Protocol):
    """Uvicorn's HTTP, which closes a connection that takes too long to send a request's head."""

    _waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Begins to wait."""
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        """Reads; a head that begins has so long to be there."""
        before = self.cycle
        if self._waiting is None and before.response_complete:
            self._wait()
        super().data_received(data)
        if self.cycle is not before:
            self._end_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends all waiting."""
        self._end_waiting()
        super().connection_lost(exc)

    def _wait(self) -> None:
        self._waiting = self.loop.call_later(HEAD_S, self.transport.close)

    def _end_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None


def take_port(host: str, port: int, key: str) -> socket.socket:
    """Binds a port, on which nothing listens yet, so that no client waits while a model is loaded.

    Args:
        host: address to listen at.
        port: 0 for any that is free.
        key: that clients must have; "" for none.

    Raises:
        ValueError: others could reach it, and no key is asked for.
        OSError: the port cannot be had.
    """
    if host not in LOCAL and not key:
        raise ValueError(
            f"--host={host} can be reached from other machines; expected a key beside it: "
            "name the environment variable that holds one by --key_env."
        )
    taken = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind((host, port))
    except OSError as error:
        taken.close()
        raise OSError(
            f"--port={port} of --host={host} cannot be had: {error.strerror}; choose another."
        ) from error
    return taken


class Server:
    """The endpoint on a port, in a thread of its own."""

    def __init__(self, endpoint: Endpoint, host: str, taken: socket.socket):
        """Listens.

        Args:
            endpoint: that answers.
            host: address to listen at.
            taken: bound to its port; see `take_port`.

        Raises:
            OSError: another has begun to listen there.
        """
        self.endpoint, self._socket = endpoint, taken
        self._socket.listen(1024)
        self.port = self._socket.getsockname()[1]
        if host in LOCAL:
            endpoint.hosts = [f"{name}:{self.port}" for name in NAMES]
            endpoint.hosts += NAMES if self.port == 80 else ()
        shown = f"[{host}]" if ":" in host else host
        self.address = f"http://{shown}:{self.port}"
        config = uvicorn.Config(
            endpoint,
            http=Http,
            ws="none",
            lifespan="off",
            log_level="error",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=MAX_CONNECTIONS,
            timeout_graceful_shutdown=STOP_S,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._socket]}, name="http", daemon=True
        )
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """False once it or its engine has ended, by itself too."""
        return self._thread.is_alive() and self.endpoint.worker.is_alive

    def end(self, limit_s: float) -> bool:
        """Refuses what is new, lets what runs end within a limit, and gives up the port.

        Returns:
            True where all answers had ended.
        """
        is_done = self.endpoint.worker.end(limit_s)
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()
        return is_done

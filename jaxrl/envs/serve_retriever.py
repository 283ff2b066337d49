"""A search engine as a server, for other trainers: Search-R1's protocol and FlashRAG's.

python -m jaxrl.envs.serve_retriever --corpus=corpus.jsonl --port=8000

`POST /retrieve` is Search-R1's (also verl's), `POST /search` and `POST /batch_search` are
FlashRAG's (also ReCall's and BAPO's); `docs/search.md` has their bodies. Needs the extra `serve`.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import inspect
import itertools
import json
import math
import pkgutil
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from jaxrl.envs.base import ToolError
from jaxrl.envs.calls import error_text
from jaxrl.envs.corpus import num_lines
from jaxrl.envs.json_text import parse_json
from jaxrl.envs.pacing import bounded_wait_s
from jaxrl.envs.retrieval import ENGINES, DocumentSearch, Hit
from jaxrl.envs.text import printable

MAX_TOPK = 1_000
"""Documents that one query may ask for."""

MAX_CALLS = 8
"""Calls of the engine that are under way at a time."""

MAX_QUERIES = 256
"""Queries of several requests that go into one call."""

STOP_S = 30
"""Seconds that requests in progress have to end in when the server is stopped."""

LOG_DOCUMENTS = 100_000
"""Documents between lines about an index that is built, where nobody watches a bar."""

BAD_REQUEST, TOO_LARGE, FAILED, UNAVAILABLE = 400, 413, 500, 503


class RefusedError(Exception):
    """A request that cannot be answered, with the status that says so."""

    def __init__(self, status: int, detail: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(detail)
        self.status, self.headers = status, headers


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """Fields of a protocol's requests, and the form of its answers.

    Attributes:
        queries: the field that holds them.
        is_batch: False where it is one query, without a list around it.
        topk: the field that says how many documents are wanted.
        scores: the field that says whether scores are.
        answer: renders the hits of each query, with scores where they are wanted.
    """

    queries: str
    is_batch: bool
    topk: str
    scores: str
    answer: Callable[[list[list[Hit]], bool], Any]


def _document(hit: Hit) -> dict[str, str]:
    return {"id": hit.document.id, "contents": hit.document.contents}


def _search_r1_answer(results: list[list[Hit]], with_scores: bool) -> Any:
    if with_scores:
        scored = [[{"document": _document(h), "score": h.score} for h in hits] for hits in results]
        return {"result": scored}
    return {"result": [[_document(hit) for hit in hits] for hits in results]}


def _flashrag_answer(results: list[list[Hit]], with_scores: bool) -> Any:
    documents = [[_document(hit) for hit in hits] for hits in results]
    return [documents, [[h.score for h in hits] for hits in results]] if with_scores else documents


def _flashrag_single_answer(results: list[list[Hit]], with_scores: bool) -> Any:
    answer = _flashrag_answer(results, with_scores)
    return [part[0] for part in answer] if with_scores else answer[0]


_FLASHRAG = {"queries": "query", "topk": "top_n", "scores": "return_score"}

DIALECTS = {
    "/retrieve": Dialect(
        queries="queries",
        is_batch=True,
        topk="topk",
        scores="return_scores",
        answer=_search_r1_answer,
    ),
    "/search": Dialect(is_batch=False, answer=_flashrag_single_answer, **_FLASHRAG),
    "/batch_search": Dialect(is_batch=True, answer=_flashrag_answer, **_FLASHRAG),
}
"""Dialects by the path at which each is spoken."""


def read_request(body: bytes, dialect: Dialect, topk: int) -> tuple[list[str], int, bool]:
    """Parses a request: its queries, the documents wanted of each, and whether scores are.

    Args:
        body: as it arrived.
        dialect: of the path that it was sent to.
        topk: documents where the request does not say.

    Raises:
        RefusedError: the body is not of the protocol; says what arrived.
    """
    try:
        fields = parse_json(body, "the body")
    except ValueError as error:
        raise RefusedError(BAD_REQUEST, str(error)) from None
    if not isinstance(fields, dict):
        raise RefusedError(
            BAD_REQUEST, f"the body is a {type(fields).__name__}; expected an object"
        )
    queries = fields.get(dialect.queries)
    if not dialect.is_batch:
        queries = [queries]
    if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
        wanted = "a list of texts" if dialect.is_batch else "a text"
        raise _wrong(dialect.queries, fields, wanted)
    wanted_topk = fields.get(dialect.topk)
    count = topk if wanted_topk is None else wanted_topk
    if type(count) is not int or not 1 <= count <= MAX_TOPK:
        raise _wrong(dialect.topk, fields, f"a whole number from 1 to {MAX_TOPK}, or null")
    with_scores = fields.get(dialect.scores, False)
    if not isinstance(with_scores, bool):
        raise _wrong(dialect.scores, fields, "true or false")
    return queries, count, with_scores


def _wrong(name: str, fields: Mapping[str, Any], expected: str) -> RefusedError:
    arrived = repr(fields[name])[:80] if name in fields else f"missing among {sorted(fields)[:8]}"
    return RefusedError(BAD_REQUEST, f"{name!r} is {arrived}; expected {expected}")


def search(engine: DocumentSearch, queries: list[str], topk: int) -> list[list[Hit]]:
    """The hits of each query.

    Raises:
        RefusedError: the engine failed, with when to ask again where it says so.
    """
    try:
        results = engine.retrieve(queries, topk) if queries else []
    except ToolError as error:
        raise _unavailable(error) from error
    except Exception as error:
        raise RefusedError(FAILED, error_text(error)) from error
    if len(results) != len(queries):
        raise RefusedError(FAILED, f"{len(queries)} queries got {len(results)} results")
    failed = next((one for one in results if isinstance(one, ToolError)), None)
    if failed is not None:
        raise _unavailable(failed)
    return [one for one in results if not isinstance(one, ToolError)]


def _unavailable(error: ToolError) -> RefusedError:
    wait_s = error.retry_after_s
    headers = {} if wait_s is None else {"Retry-After": str(math.ceil(bounded_wait_s(wait_s)))}
    return RefusedError(FAILED if error.is_permanent else UNAVAILABLE, str(error), headers)


def search_together(
    engine: DocumentSearch, requests: Sequence[list[str]], topk: int
) -> list[list[list[Hit]] | RefusedError]:
    """The hits of each request's queries, found in one call; or why there are none."""
    if len(requests) > 1:
        try:
            results = iter(search(engine, [query for one in requests for query in one], topk))
            return [list(itertools.islice(results, len(one))) for one in requests]
        except RefusedError:
            pass  # which of them failed, each says by itself
    answers: list[list[list[Hit]] | RefusedError] = []
    for queries in requests:
        try:
            answers.append(search(engine, queries, topk))
        except RefusedError as error:
            answers.append(error)
    return answers


@dataclass(frozen=True)
class Waiting:
    """A request that the engine has not been asked for yet."""

    queries: list[str]
    topk: int
    answer: asyncio.Future[list[list[Hit]]]


class Together:
    """Batches requests: one call of the engine for all that waited for it at the same time.

    Many clients send one query at a time, and an engine that encodes its queries does a hundred in
    little more than the time of one. Up to `MAX_CALLS` calls are under way in threads; a request
    waits only where all of them are.
    """

    def __init__(self, engine: DocumentSearch) -> None:
        self._engine = engine
        self._waiting: collections.deque[Waiting] = collections.deque()
        self._calls: set[asyncio.Task[None]] = set()
        self._threads = ThreadPoolExecutor(MAX_CALLS)

    async def search(self, queries: list[str], topk: int) -> list[list[Hit]]:
        """The hits of each query.

        Raises:
            RefusedError: as `search`.
        """
        answer = asyncio.get_running_loop().create_future()
        self._waiting.append(Waiting(queries, topk, answer))
        if len(self._calls) < MAX_CALLS:
            call = asyncio.create_task(self._work())
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)
        return await answer

    async def _work(self) -> None:
        while self._waiting:
            # The first that waits, and those directly behind it that want as many documents.
            batch = [self._waiting.popleft()]
            room = MAX_QUERIES - len(batch[0].queries)
            while self._waiting and self._waiting[0].topk == batch[0].topk:
                room -= len(self._waiting[0].queries)
                if room < 0:
                    break
                batch.append(self._waiting.popleft())
            requests = [one.queries for one in batch]
            results = await asyncio.get_running_loop().run_in_executor(
                self._threads, search_together, self._engine, requests, batch[0].topk
            )
            for one, result in zip(batch, results, strict=True):
                if one.answer.done():  # its client went away
                    continue
                if isinstance(result, RefusedError):
                    one.answer.set_exception(result)
                else:
                    one.answer.set_result(result)


def make_app(
    engine: DocumentSearch, name: str, *, max_request_mib: float, started: Callable[[], None]
) -> Any:
    """The server as an ASGI application of Starlette.

    Args:
        engine: answers; in threads, several requests side by side.
        name: of the engine, for `/health`.
        max_request_mib: MiB of a request's body at most.
        started: called once the server is about to answer.

    Raises:
        ImportError: the extra `serve` is not installed.
    """
    try:
        from starlette.applications import Starlette
        from starlette.exceptions import HTTPException
        from starlette.requests import ClientDisconnect, Request
        from starlette.responses import Response
        from starlette.routing import Route
    except ImportError as error:
        raise ImportError(
            "the server needs starlette and uvicorn; pip install 'jaxrl[serve]'."
        ) from error

    def as_json(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Any:
        body = json.dumps(content).encode()  # in ASCII, whatever is in a document
        return Response(body, status, headers, media_type="application/json")

    async def read_body(request: Request) -> bytes:
        most, body = int(max_request_mib * 2**20), bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > most:
                text = f"the body has more than {max_request_mib:g} MiB; send fewer queries at once"
                raise RefusedError(TOO_LARGE, text, {"Connection": "close"})
        return bytes(body)

    together = Together(engine)

    async def answer(dialect: Dialect, request: Request) -> Response:
        try:
            body = await read_body(request)
            queries, topk, with_scores = read_request(body, dialect, engine.topk)
            results = await together.search(queries, topk)
        except RefusedError as error:
            if error.status >= FAILED:
                print(printable(f"{request.url.path}: {error}"), file=sys.stderr, flush=True)
            return as_json({"detail": str(error)}, error.status, error.headers)
        except ClientDisconnect:
            return Response()  # which nobody reads
        return as_json(dialect.answer(results, with_scores))

    async def elsewhere(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else FAILED
        places = f"this server answers POST of {', '.join(DIALECTS)} and GET of /health"
        return as_json({"detail": f"{request.method} {request.url.path}: {places}"}, status)

    async def health(_: Request) -> Response:
        return as_json({"status": "ok", "engine": name, "topk": engine.topk})

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        started()
        yield

    routes = [
        Route(path, partial(answer, dialect), methods=["POST"])
        for path, dialect in DIALECTS.items()
    ]
    return Starlette(
        routes=[*routes, Route("/health", health)],
        exception_handlers={HTTPException: elsewhere},
        lifespan=lifespan,
    )


def make_engine(name: str, settings: Mapping[str, Any], **offered: Any) -> DocumentSearch:
    """Makes an engine by its name, or a dotted one, with these settings.

    Args:
        name: in `ENGINES`, or dotted, of one's own.
        settings: keyword arguments.
        offered: given where there is a parameter of that name.

    Raises:
        ValueError: there is no such engine, it takes other settings, or it has no documents.
        OSError: what it needs cannot be read or written.
    """
    place = ENGINES.get(name, name)
    if isinstance(place, str) and not {".", ":"} & set(place):
        raise ValueError(f"--engine is {name!r}; expected one of {', '.join(ENGINES)}, or a dotted "
                         "name, as my_engine.Engine.")  # fmt: skip
    try:
        kind = pkgutil.resolve_name(place) if isinstance(place, str) else place
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"--engine is {name!r}: {error_text(error)}") from error
    if not (isinstance(kind, type) and issubclass(kind, DocumentSearch)):
        raise ValueError(
            f"--engine is {name!r}, which has no documents to give; expected a "
            "jaxrl.envs.retrieval.DocumentSearch."
        )
    parameters = inspect.signature(kind).parameters
    keywords = {key: offered[key] for key in offered if key in parameters} | dict(settings)
    try:
        inspect.signature(kind).bind(**keywords)
        return kind(**keywords)
    except TypeError as error:
        raise ValueError(
            f"the settings of {name!r} are {dict(settings)}: {error}; it takes "
            f"{', '.join(parameters)}."
        ) from error


@contextlib.contextmanager
def shown_progress(corpus: Path) -> Iterator[Callable[[int], None]]:
    """Progress bar of indexed documents, on standard error; nothing where none are."""
    columns = (
        *(TextColumn("indexing"), BarColumn(), MofNCompleteColumn(), TextColumn("documents")),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=None, visible=False)

        def show(count: int) -> None:
            if not console.is_terminal and count % LOG_DOCUMENTS == 0:
                console.print(f"indexing {corpus}: {count:,} documents")
            if not bar.tasks[0].visible:
                bar.update(task, total=num_lines(corpus) or None, visible=True)
            bar.update(task, completed=count)

        yield show


def serve(app: Any, listener: socket.socket) -> None:
    """Answers requests until SIGTERM or SIGINT; those in progress may end."""
    import uvicorn

    settings = uvicorn.Config(
        app, log_level="warning", access_log=False, timeout_graceful_shutdown=STOP_S
    )
    # Uvicorn raises the signal that stopped it again; the process is to end as one that is done.
    signal.signal(signal.SIGTERM, lambda *_: None)
    with contextlib.suppress(KeyboardInterrupt):
        uvicorn.Server(settings).run(sockets=[listener])


ARGUMENTS = ("corpus", "index", "topk")
"""Settings of engines that are arguments of the command."""

_KEY = re.compile(r"config\.search\.(\w+)\.(\w+)")


def parse_arguments(argv: Sequence[str] | None) -> tuple[argparse.Namespace, dict[str, Any]]:
    """The arguments of the command, and the settings of the engine among them."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxrl.envs.serve_retriever", description="Serves a search engine."
    )
    parser.add_argument("--engine", default="local", help="as config.search.engine; default: local")
    parser.add_argument("--corpus", help="JSONL of documents")
    parser.add_argument("--index", help="folder of the index; default: beside the corpus")
    parser.add_argument("--topk", type=int, help="documents where a request does not say")
    parser.add_argument(
        "--settings",
        type=json.loads,
        default={},
        metavar="JSON",
        help="further settings of the engine, as {\"url\": \"http://..\"}",
    )  # fmt: skip
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0 for other machines")
    parser.add_argument("--port", type=int, default=8000, help="0: any that is free")
    parser.add_argument("--max_request_mib", type=float, default=16.0)
    arguments = parser.parse_args(argv)
    if not isinstance(arguments.settings, dict):
        parser.error(f"--settings is {arguments.settings!r}; expected an object")
    named = {name: getattr(arguments, name) for name in ARGUMENTS}
    named = {name: value for name, value in named.items() if value is not None}
    return arguments, {**arguments.settings, **named}


def log_line(text: str) -> None:
    """Print a line on standard error."""
    print(printable(text), file=sys.stderr, flush=True)


def in_arguments(text: str, engine: str) -> str:
    """Rewrites an engine's error: arguments of this command in place of a run's keys."""
    if engine == "hybrid":
        return _KEY.sub(r"'\2' of '\1' in --settings", text)
    return _KEY.sub(
        lambda key: f"--{key[2]}" if key[2] in ARGUMENTS else f"'{key[2]}' in --settings", text
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Makes the engine, with its index, then serves it."""
    arguments, settings = parse_arguments(argv)
    name = arguments.engine
    try:
        with shown_progress(Path(str(settings.get("corpus", "")))) as show:
            engine = make_engine(name, settings, progress=show, log=log_line)
        host, port = arguments.host, arguments.port
        try:
            listener = socket.create_server((host, port), backlog=1024)
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", None) or str(error)
            raise ValueError(
                f"--host={host} --port={port}: {why}; name a port that is free, or 0 for any."
            ) from error
        host, port = listener.getsockname()[:2]  # the free one, where 0 was asked for
        paths = ", ".join(DIALECTS)
        line = f"serving {name} at http://{host}:{port} ({paths}, /health)"
        app = make_app(
            engine,
            name,
            max_request_mib=arguments.max_request_mib,
            started=lambda: print(line, flush=True),
        )
        serve(app, listener)
    except (ValueError, OSError, ImportError) as error:
        sys.exit(printable(f"error: {in_arguments(str(error), name)}"))
    print("stopped", flush=True)


if __name__ == "__main__":
    main()

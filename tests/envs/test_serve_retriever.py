"""Our server: asked as other trainers ask, asked wrongly, overloaded, stopped."""

import asyncio
import http.client
import json
import signal
import threading
import time

import httpx2
import pytest

from jaxrl.envs.base import ToolError
from jaxrl.envs.http_retriever import HttpRetriever
from jaxrl.envs.local_search import LocalSearch
from jaxrl.envs.retrieval import Document, DocumentSearch, Hit
from jaxrl.envs.serve_retriever import (
    MAX_CALLS,
    MAX_QUERIES,
    MAX_TOPK,
    Together,
    main,
    make_app,
    make_engine,
)
from tests.helpers import ROOT
from tests.servers import retriever_command

DOCUMENTS = [
    Document("a", "Paris", "Paris is the capital of France."),
    Document("b", "Berlin", "Berlin is the capital of Germany."),
    Document("c", "北京", "北京市是首都。"),
]
PARIS = {"id": "a", "contents": '"Paris"\nParis is the capital of France.'}
BERLIN = {"id": "b", "contents": '"Berlin"\nBerlin is the capital of Germany.'}


class Engine(DocumentSearch):
    """Finds documents that hold the query, each with the score of its place; fails for some."""

    topk = 2

    def retrieve(self, queries, topk):
        if "crash" in queries:
            raise RuntimeError("out of luck")
        if "short" in queries:
            return []
        if "all down" in queries:
            raise ToolError("wrong key", is_permanent=True)
        return [self._hits(query, topk) for query in queries]

    def _hits(self, query, topk):
        if query == "down":
            return ToolError("no answer", retry_after_s=1.2)
        if query.startswith("wait "):
            return ToolError("no answer", retry_after_s=float(query.removeprefix("wait ")))
        found = [d for d in DOCUMENTS if query in d.title + d.text]
        return [Hit(d, 1 / place) for place, d in enumerate(found, start=1)][:topk]


def ask(path, body, method="POST"):
    """The status, headers and JSON of an answer."""
    app = make_app(Engine(), "mine", max_request_mib=1, started=list)

    async def answer():
        transport = httpx2.ASGITransport(app, raise_app_exceptions=False)
        async with httpx2.AsyncClient(transport=transport, base_url="http://server") as client:
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            return await client.request(method, path, content=content)

    reply = asyncio.run(answer())
    return reply.status_code, reply.headers, reply.json()


@pytest.mark.parametrize(
    ("path", "body", "answer"),
    [
        (
            "/retrieve",
            {"queries": ["capital", "?"], "topk": None, "return_scores": True},
            {"result": [[{"document": PARIS, "score": 1.0}, {"document": BERLIN, "score": 0.5}],
                        []]},
        ),
        (
            "/retrieve",
            {"queries": ["capital", "Germany"], "topk": 1, "return_scores": False},
            {"result": [[PARIS], [BERLIN]]},
        ),
        ("/retrieve", {"queries": ["Germany"]}, {"result": [[BERLIN]]}),
        ("/retrieve", {"queries": []}, {"result": []}),
        (
            "/batch_search",
            {"query": ["capital", "Germany"], "top_n": 2, "return_score": True},
            [[[PARIS, BERLIN], [BERLIN]], [[1.0, 0.5], [1.0]]],
        ),
        ("/batch_search", {"query": ["capital"], "top_n": 1}, [[PARIS]]),
        (
            "/search",
            {"query": "capital", "top_n": 2, "return_score": True},
            [[PARIS, BERLIN], [1.0, 0.5]],
        ),
        ("/search", {"query": "Germany"}, [BERLIN]),
        ("/search", {"query": "?"}, []),
    ],
)  # fmt: skip
def test_both_protocols(path, body, answer):
    assert ask(path, body)[::2] == (200, answer)


@pytest.mark.parametrize(
    ("path", "body", "detail"),
    [
        ("/retrieve", b"{", "the body is not valid JSON: Expecting property name"),
        ("/retrieve", b"[" * 200_000, "the body is nested too deeply"),
        ("/retrieve", [], "the body is a list; expected an object"),
        ("/retrieve", {"query": "x"}, "'queries' is missing among ['query']; expected a list of t"),
        ("/retrieve", {"queries": "x"}, "'queries' is 'x'; expected a list of texts"),
        ("/retrieve", {"queries": ["x", 1]}, "'queries' is ['x', 1]; expected a list of texts"),
        ("/search", {"query": ["x"]}, "'query' is ['x']; expected a text"),
        ("/search", {}, "'query' is missing among []; expected a text"),
        ("/retrieve", {"queries": ["x"], "topk": 0}, "'topk' is 0; expected a whole number from 1"),
        ("/retrieve", {"queries": ["x"], "topk": True}, "'topk' is True; expected a whole number"),
        ("/batch_search", {"query": ["x"], "top_n": MAX_TOPK + 1}, "'top_n' is 1001; expected a w"),
        (
            "/retrieve",
            {"queries": ["x"], "return_scores": 1},
            "'return_scores' is 1; expected true",
        ),
    ],
)
def test_what_is_no_request_is_told(path, body, detail):
    status, _, answer = ask(path, body)
    assert status == 400
    assert answer["detail"].startswith(detail)


def test_requests_are_bounded():
    status, headers, answer = ask("/retrieve", {"queries": ["x" * 2**20]})
    assert (status, headers["connection"]) == (413, "close")
    assert answer == {"detail": "the body has more than 1 MiB; send fewer queries at once"}


@pytest.mark.parametrize(
    ("query", "status", "detail", "wait"),
    [
        ("down", 503, "no answer", "2"),
        ("wait inf", 503, "no answer", "86400"),
        ("wait 1e300", 503, "no answer", "86400"),
        ("wait -3", 503, "no answer", "0"),
        ("wait nan", 503, "no answer", "0"),
        ("all down", 500, "wrong key", None),
        ("crash", 500, "RuntimeError: out of luck", None),
        ("short", 500, "2 queries got 0 results", None),
    ],
)
def test_an_engine_that_fails_is_told(capsys, query, status, detail, wait):
    got, headers, answer = ask("/retrieve", {"queries": ["Paris", query]})
    assert (got, answer) == (status, {"detail": detail})
    assert headers.get("retry-after") == wait
    assert capsys.readouterr().err == f"/retrieve: {detail}\n"


class Slow(Engine):
    """Waits until it is told; keeps the queries of each call."""

    def __init__(self):
        self.calls, self.go = [], threading.Event()

    def retrieve(self, queries, topk):
        self.calls.append((list(queries), topk))
        assert self.go.wait(10)
        return super().retrieve(queries, topk)


def test_requests_that_wait_at_the_same_time_are_one_call():
    engine = Slow()
    asked = [(["Paris"], 1)] * MAX_CALLS  # which keep all calls busy
    asked += [(["Germany"], 2), (["capital", "?"], 2), (["crash"], 2), (["down"], 1), (["x"], 1)]
    asked += [(["Berlin"] * MAX_QUERIES, 1), (["capital"], 1)]

    async def play():
        together = Together(engine)
        searches = []
        for one in asked:
            searches.append(asyncio.create_task(together.search(*one)))
            while len(engine.calls) < min(len(searches), MAX_CALLS):
                await asyncio.sleep(0.001)
        engine.go.set()
        return await asyncio.gather(*searches, return_exceptions=True)

    found = asyncio.run(play())
    shown = [
        str(one) if isinstance(one, Exception) else [[h.document.id for h in hits] for hits in one]
        for one in found
    ]
    assert shown[:MAX_CALLS] == [[["a"]]] * MAX_CALLS
    assert shown[MAX_CALLS:] == [
        *([["b"]], [["a", "b"], []], "RuntimeError: out of luck", "no answer", [[]]),
        *([["b"]] * MAX_QUERIES, [["a"]]),
    ]
    calls = engine.calls[MAX_CALLS:]
    # One that fails alone does so again without the others.
    for queries in (["Germany", "capital", "?", "crash"], ["Germany"], ["capital", "?"], ["crash"]):
        assert (queries, 2) in calls
    for queries in (["down", "x"], ["down"], ["x"], ["Berlin"] * MAX_QUERIES, ["capital"]):
        assert (queries, 1) in calls
    assert len(calls) == 9


def test_other_paths_and_health():
    assert ask("/health", b"", "GET")[::2] == (
        200,
        {"status": "ok", "engine": "mine", "topk": 2},
    )
    places = "this server answers POST of /retrieve, /search, /batch_search and GET of /health"
    assert ask("/retrieve", b"", "GET")[::2] == (405, {"detail": f"GET /retrieve: {places}"})
    assert ask("/query", {})[::2] == (404, {"detail": f"POST /query: {places}"})


def test_engines_by_name(tmp_path):
    write(tmp_path / "corpus.jsonl")
    settings = {"corpus": str(tmp_path / "corpus.jsonl")}
    assert isinstance(make_engine("local", settings), LocalSearch)
    [hits] = make_engine("http", {"url": "http://127.0.0.1:9", "timeout_s": 1}).retrieve(["x"], 1)
    assert isinstance(hits, ToolError)
    own = make_engine(f"{LocalSearch.__module__}.LocalSearch", settings)
    assert own.retrieve(["Paris"], 1)[0][0].document.id == "a"


@pytest.mark.usefixtures("quick_compilation")
def test_dense_engines_are_served_too(tmp_path):
    corpus = write(tmp_path / "corpus.jsonl")
    encoder = ROOT / "tests" / "golden" / "encoder_e5"
    prefixes = {"query_prefix": "query: ", "passage_prefix": "passage: "}
    settings = {"corpus": str(corpus), "encoder": str(encoder), **prefixes}
    dense = make_engine("dense", settings, progress=lambda _: None)
    [hits] = dense.retrieve(["paris"], 3)
    assert sorted(hit.document for hit in hits) == sorted(DOCUMENTS)
    hybrid = make_engine("hybrid", {"local": {}, "dense": settings}, progress=lambda _: None)
    assert hybrid.retrieve(["Paris"], 1)[0][0].document == DOCUMENTS[0]
    with pytest.raises(ValueError, match="of the settings of dense search 'k' is none"):
        make_engine("dense", settings | {"k": 5})


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("google", {}, "--engine is 'google'; expected one of local, "),
        ("no_module.Engine", {}, "--engine is 'no_module.Engine': ModuleNotFoundError"),
        ("empty", {}, "--engine is 'empty', which has no documents to give; expected a"),
        ("json.dumps", {}, "--engine is 'json.dumps', which has no documents to give"),
        ("local", {}, "the settings of 'local' are {}: missing a required argument: 'corpus'; it"),
        ("local", {"corpus": "x", "k": 1}, "got an unexpected keyword argument 'k'; it takes corp"),
        ("local", {"corpus": "no such"}, "there is no corpus at no such; expected a JSONL"),
        ("local", {"corpus": "no such"}, "Set --corpus to its path."),
        ("http", {"url": "x"}, "error: 'url' in --settings is 'x'; expected the address of a ser"),
        (
            "hybrid",
            {"local": {}, "dense": {"corpus": "no such", "encoder": "none"}},
            "'encoder' of 'dense' in --settings is 'none'",
        ),
    ],
)
def test_engines_that_cannot_be_made_are_told(name, settings, said):
    with pytest.raises(SystemExit) as raised:
        main([f"--engine={name}", f"--settings={json.dumps(settings)}"])
    assert said in str(raised.value)


def write(path):
    path.write_text("".join(json.dumps(d._asdict()) + "\n" for d in DOCUMENTS), encoding="utf-8")
    return path


def test_the_command_serves_what_local_search_finds_and_stops(tmp_path):
    local = LocalSearch(write(tmp_path / "corpus.jsonl"), topk=2)
    queries = ["capital of France", "首都", 'title:"x" ?', "\ud800", "Berlin " * 5_000]
    with retriever_command(tmp_path / "corpus.jsonl", "--topk=2") as (process, url):
        engines = [
            HttpRetriever(url, topk=2),
            HttpRetriever(url, topk=2, protocol="flashrag"),
            HttpRetriever(f"{url}/search", topk=2, protocol="flashrag"),
        ]
        wanted = local.retrieve(queries, 2)
        assert [engine.retrieve(queries, 2) for engine in engines] == [wanted] * 3
        assert [engine.run_batch(queries) for engine in engines] == [local.run_batch(queries)] * 3
        # A body of unknown length is bounded too, and a client that goes away harms nobody.
        host, port = url.removeprefix("http://").split(":")
        rude = http.client.HTTPConnection(host, int(port))
        rude.putrequest("POST", "/retrieve")
        rude.putheader("Content-Length", "100")
        rude.endheaders(b"{")
        rude.close()
        many = [threading.Thread(target=engines[0].run_batch, args=(queries,)) for _ in range(16)]
        for thread in many:
            thread.start()
        for thread in many:
            thread.join(20)
        assert engines[0].run("Berlin") == local.run("Berlin")
        start = time.monotonic()
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=10)
        assert time.monotonic() - start < 8
        assert (process.returncode, out) == (0, "stopped\n")
        assert "Traceback" not in err


def test_a_port_that_is_taken_is_told(tmp_path, capsys):
    with retriever_command(write(tmp_path / "corpus.jsonl")) as (_, url):
        with pytest.raises(SystemExit) as raised:
            main([f"--corpus={tmp_path / 'corpus.jsonl'}", f"--port={url.rpartition(':')[2]}"])
        port = url.rpartition(":")[2]
        assert str(raised.value).startswith(
            f"error: --host=127.0.0.1 --port={port}: Address already in use (while"
        )
    with pytest.raises(SystemExit, match=r"error: --host=127\.0\.0\.1 --port=99999: "):
        main([f"--corpus={tmp_path / 'corpus.jsonl'}", "--port=99999"])


def test_the_building_of_an_index_is_shown(tmp_path):
    with retriever_command(write(tmp_path / "corpus.jsonl")) as (process, _):
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=10)
    assert (process.returncode, out) == (0, "stopped\n")
    assert "indexing" in err
    assert "3/3 documents" in err

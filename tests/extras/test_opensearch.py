"""OpenSearchRetriever against a small server that plays a cluster."""

import base64
import json

import pytest

from jaxrl.envs.base import ToolError
from jaxrl.envs.retrieval import Document, Hit
from jaxrl.extras.opensearch.engine import MAX_WORDS, OpenSearchRetriever
from tests.servers import Reply, served, words

DOCUMENTS = [
    Document("1", "Paris", "Paris is the capital of France."),
    Document("2", "Berlin", "Berlin is the capital of Germany."),
    Document("3", "Rome", "Seven hills."),
]


class Cluster:
    """`_msearch` over documents, ranked by words in common, of the title twice.

    Knows the index `wiki`, whose documents have the fields `page.title` and `body`.
    """

    def __call__(self, request):
        if (request.method, request.path) != ("POST", "/es/_msearch"):
            return Reply({"error": "no handler found"}, 400)
        assert request.headers["content-type"] == "application/x-ndjson"
        assert request.body.endswith(b"\n")
        lines = [json.loads(line) for line in request.body.splitlines()]
        pairs = zip(lines[::2], lines[1::2], strict=True)
        return {"took": 1, "responses": [self.search(*pair) for pair in pairs]}

    def search(self, header, body):
        if header != {"index": "wiki"}:
            error = {"type": "index_not_found_exception", "reason": f"no such index {header}"}
            return {"error": error, "status": 404}
        match = body["query"].pop("multi_match")
        assert body["query"] == {}
        assert match["fields"] == ["page.title^2", "body"]
        assert match["type"] == "cross_fields"
        assert body["_source"] == ["page.title", "body"]
        wanted = words(match["query"])
        scores = [
            2 * (words(d.title) & wanted).total() + (words(d.text) & wanted).total()
            for d in DOCUMENTS
        ]
        best = sorted(((-s, d) for s, d in zip(scores, DOCUMENTS, strict=True) if s))
        hits = [
            {
                "_index": "wiki",
                "_id": d.id,
                "_score": float(-s),
                "_source": {"page": {"title": d.title}, "body": d.text},
            }
            for s, d in best[: body["size"]]
        ]
        return {
            "took": 1,
            "timed_out": False,
            "_shards": {"total": 1, "successful": 1, "skipped": 0, "failed": 0},
            "hits": {"total": {"value": len(best), "relation": "eq"}, "hits": hits},
            "status": 200,
        }


def make(url, **settings):
    return OpenSearchRetriever(
        **{"url": f"{url}/es/", "index": "wiki", "fields": ("page.title", "body"), **settings}
    )


def response(hits=(), **fields):
    return {"hits": {"hits": list(hits)}, "status": 200, **fields}


HIT = {"_id": "1", "_score": 2.0, "_source": {"title": "Paris", "text": "A city."}}


def read(*responses, queries=("q",), **settings):
    """What the retriever makes of a cluster that answers so."""
    with served(lambda _: {"responses": list(responses)}) as server:
        return OpenSearchRetriever(server.url, "wiki", **settings).retrieve(queries, 3)


def test_queries_go_together_and_documents_come_back():
    with served(Cluster()) as server:
        engine = make(server.url, topk=1, batch_size=2)
        asked = ["capital of Germany", "hills", "nothing"]
        assert engine.retrieve(asked, 2) == [
            [Hit(DOCUMENTS[1], 3.0), Hit(DOCUMENTS[0], 2.0)],
            [Hit(DOCUMENTS[2], 1.0)],
            [],
        ]
        assert len(server.requests) == 2
        assert engine.run("Paris") == "Doc 1(Title: Paris) Paris is the capital of France."
        assert engine.run("?") == "No information found"


@pytest.mark.parametrize(
    "query",
    [
        'title:x AND (Rome OR "',
        "Rome*~2^9 +\\ /a/ [a TO b]",
        "Rome\n{\"index\": \"other\"}\n",
        "Rome \ud800\0",
        "Rome " * 20_000,
        "Rome " + " ".join(f"w{i}" for i in range(20_000)),
    ],
)  # fmt: skip
def test_hostile_queries_stay_plain_text(query):
    with served(Cluster()) as server:
        [[hit]] = make(server.url).retrieve([query], 3)
        assert hit.document == DOCUMENTS[2]
        [_, body] = server.requests[0].body.splitlines()
        match = json.loads(body)["query"]["multi_match"]
        assert len(match["query"].split()) <= MAX_WORDS
        assert set(match) == {"query", "fields", "type"}


def test_text_alone_and_fields_that_are_null():
    hits = [{"_id": "1", "_source": {"a.b": " x "}}, {"_id": "2", "_source": {"a": {"b": None}}}]
    [found] = read(response(hits), fields=("a.b",))
    assert found == [Hit(Document("1", "", "x"), None), Hit(Document("2", "", ""), None)]


@pytest.mark.parametrize(
    ("answer", "said", "is_permanent"),
    [
        (
            {"error": {"type": "index_not_found_exception", "reason": "no such index"},
             "status": 404},
            "an error 404: index_not_found_exception: no such index", True,
        ),
        ({"error": "queue is full", "status": 429}, "an error 429: queue is full", False),
        ({"error": {"type": "x"}, "status": 503}, "an error 503: x: None", False),
        (response(timed_out=True), "what it found until its own time limit", False),
        (response(_shards={"failed": 2}), "an answer without 2 of its shards", False),
        ({"status": 200}, "a response with ['status']; expected \"hits\"", False),
        ("x", "a response with str; expected \"hits\"", False),
        (response(["x"]), 'a hit with str; expected "_id" and "_source"', False),
        (response([{"_id": "1"}]), 'a hit with [\'_id\']; expected "_id" and "_source"', False),
        (
            response([{"_id": "1", "_source": {"title": "a"}}]),
            "the document '1' with ['title']; expected the field 'text', which config.search."
            "opensearch.fields names", False,
        ),
        (
            response([{"_id": "1", "_source": {"title": "a", "text": ["b"]}}]),
            "a list in the field 'text' of '1'; expected text", False,
        ),
    ],
)  # fmt: skip
def test_a_response_that_fails_fails_alone(answer, said, is_permanent):
    good, error = read(response([HIT]), answer, queries=("p", "q"))
    assert good == [Hit(Document("1", "Paris", "A city."), 2.0)]
    assert str(error).endswith(f"/_msearch gives {said}")
    assert error.is_permanent == is_permanent


def test_answers_that_fail_fail_for_all():
    errors = read(response(), queries=("p", "q"))
    assert [str(e).partition(" gives ")[2] for e in errors] == ["1 of responses to 2 queries"] * 2
    with served(lambda _: Reply("no", 401)) as server:
        [error] = make(server.url).retrieve(["q"], 3)
    assert isinstance(error, ToolError)
    assert error.is_permanent


@pytest.mark.parametrize(
    ("auth", "header"),
    [
        ("basic:SECRET", "Basic " + base64.b64encode(b"user:pass").decode()),
        ("api_key:SECRET", "ApiKey user:pass"),
        ("bearer:SECRET", "Bearer user:pass"),
    ],
)
def test_secrets_come_from_the_environment_and_are_not_told(monkeypatch, auth, header):
    monkeypatch.setenv("SECRET", "user:pass")
    with served(lambda r: Reply(r.headers["authorization"], 403)) as server:
        [error] = make(server.url, auth=auth).retrieve(["q"], 3)
    assert server.requests[0].headers["authorization"] == header
    assert str(error).endswith(f"answers with status 403: '{header.split()[0]} ***'")
    monkeypatch.delenv("SECRET")
    with pytest.raises(ValueError, match="the environment variable SECRET, which config"):
        make("http://127.0.0.1:1", auth=auth)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"url": "127.0.0.1"}, "config.search.opensearch.url is '127.0.0.1/es/'; expected the ad"),
        ({"index": ""}, "config.search.opensearch.index is ''; expected the name of an index"),
        ({"index": "a/_delete"}, "config.search.opensearch.index is 'a/_delete'; expected"),
        ({"fields": ()}, "config.search.opensearch.fields is (); expected the fields of title"),
        (
            {"auth": "user:pass"},
            "config.search.opensearch.auth is no '' and none of basic:VARIABLE",
        ),
        (
            {"auth": "basic:user:pass"},
            "config.search.opensearch.auth names no environment variable",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, said):
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        make(**{"url": "http://127.0.0.1:1", **settings})
    assert str(raised.value).startswith(said)
    assert "pass" not in str(raised.value)

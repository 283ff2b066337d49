"""The OpenSearch engine, as a configuration names it, against a small server for a cluster."""

import json

import pytest

from configs import debug_tiny
from jaxrl.builders.validation import validate
from jaxrl.config.registry import instantiate
from jaxrl.envs.base import ToolError
from jaxrl.envs.search.base import Document, Hit
from tests.servers import Reply, served, words

DOCUMENTS = [
    Document("1", "Paris", "Paris is the capital of France."),
    Document("2", "Berlin", "Berlin is the capital of Germany."),
    Document("3", "Rome", "Seven hills."),
]


class Cluster:
    """Server of `_msearch` over the index `wiki`, by common words; the title counts twice."""

    def __call__(self, request):
        if (request.method, request.path) != ("POST", "/es/_msearch"):
            return Reply({"error": "no handler found"}, 400)
        assert request.headers["content-type"] == "application/x-ndjson"
        assert request.body.endswith(b"\n")
        lines = [json.loads(line) for line in request.body.splitlines()]
        pairs = zip(lines[::2], lines[1::2], strict=True)
        return {"responses": [self.search(*pair) for pair in pairs]}

    def search(self, header, body):
        if header != {"index": "wiki"}:
            return {"error": {"type": "index_not_found_exception"}, "status": 404}
        match = body["query"].pop("multi_match")
        assert body["query"] == {}
        assert match["fields"] == ["name^2", "body"]
        assert body["_source"] == ["name", "body"]
        query = words(match["query"])
        scores = [
            2 * (words(d.title) & query).total() + (words(d.text) & query).total()
            for d in DOCUMENTS
        ]
        best = sorted(((-s, d) for s, d in zip(scores, DOCUMENTS, strict=True) if s))
        hits = [
            {"_id": d.id, "_score": float(-s), "_source": {"name": d.title, "body": d.text}}
            for s, d in best[: body["size"]]
        ]
        return {"timed_out": False, "_shards": {"failed": 0}, "hits": {"hits": hits}}


def make(url, **settings):
    """Return the engine as a run builds it."""
    config = debug_tiny.get_config()
    config.search.engine = "examples.opensearch_engine.OpenSearch"
    config.search.local.corpus = ""
    fields = {"url": f"{url}/es/", "index": "wiki", "fields": ("name", "body")}
    config.search.settings = fields | settings
    resolved = validate(config, needs_data=False)
    return instantiate("search.settings", resolved.engine_class, config.search.settings)


def test_queries_go_together_and_documents_come_back():
    with served(Cluster()) as server:
        search = make(server.url, topk=1, batch_size=2)
        assert search.retrieve(["capital of Germany", "hills", "nothing"], 2) == [
            [Hit(DOCUMENTS[1], 3.0), Hit(DOCUMENTS[0], 2.0)],
            [Hit(DOCUMENTS[2], 1.0)],
            [],
        ]
        assert len(server.requests) == 2
        assert search.run("Paris") == "Doc 1(Title: Paris) Paris is the capital of France."
        assert search.run("?") == "No information found"


@pytest.mark.parametrize("query", ['title:x AND (Rome OR "', 'Rome\n{"index": "other"}\n'])
def test_hostile_queries_stay_plain_text(query):
    with served(Cluster()) as server:
        [[hit]] = make(server.url).retrieve([query], 3)
        assert hit.document == DOCUMENTS[2]
        [_, body] = server.requests[0].body.splitlines()
        assert len(json.loads(body)["query"]["multi_match"]["query"].split()) <= 500


@pytest.mark.parametrize(
    ("answer", "is_permanent"),
    [
        ({"error": {"type": "index_not_found_exception"}, "status": 404}, True),
        ({"_shards": {"failed": 2}, "hits": {"hits": []}}, False),
    ],
)
def test_a_response_that_fails_fails_alone(answer, is_permanent):
    hit = {"_id": "1", "_score": 2.0, "_source": {"name": "Paris", "body": None}}
    with served(lambda _: {"responses": [{"hits": {"hits": [hit]}}, answer]}) as server:
        good, error = make(server.url).retrieve(["p", "q"], 3)
    assert good == [Hit(Document("1", "Paris", ""), 2.0)]
    assert isinstance(error, ToolError)
    assert error.is_permanent == is_permanent


def test_the_password_comes_from_the_environment(monkeypatch):
    monkeypatch.setenv("SECRET", "user:pass")
    with served(lambda r: Reply(r.headers["authorization"], 403)) as server:
        [error] = make(server.url, password_env="SECRET").retrieve(["q"], 3)
    assert server.requests[0].headers["authorization"] == "Basic dXNlcjpwYXNz"
    assert error.is_permanent
    assert "dXNlcjpwYXNz" not in str(error)

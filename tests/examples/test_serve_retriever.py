"""The retriever as a process, queried in both protocols by the http engine."""

import json
import urllib.error
import urllib.request

import pytest

from jaxrl.envs.search.bm25 import LocalSearch
from jaxrl.envs.search.http_retriever import HttpRetriever
from tests.servers import retriever_command

DOCUMENTS = [
    {"id": "a", "title": "Paris", "text": "Paris is the capital of France."},
    {"id": "b", "title": "Berlin", "text": "Berlin is the capital of Germany."},
    {"id": "c", "title": "Łódź", "text": "A city."},
]
QUERIES = ["capital of Germany", "city", "nothing"]


def test_both_protocols_find_what_local_search_finds(tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS))
    wanted = LocalSearch(corpus).retrieve(QUERIES, 2)
    assert [[hit.document.id for hit in hits] for hits in wanted] == [["b", "a"], ["c"], []]
    with retriever_command(corpus) as (_, url):
        for protocol, path in (("search_r1", ""), ("flashrag", ""), ("flashrag", "/search")):
            engine = HttpRetriever(url + path, protocol=protocol)
            assert engine.retrieve(QUERIES, 2) == wanted
        for body in (b"{", b'{"queries": "x"}', b'{"queries": ["x"], "topk": 0}'):
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(f"{url}/retrieve", body, timeout=10)
            assert refused.value.code == 400

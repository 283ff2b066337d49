"""HttpRetriever with servers of the published protocols and with broken servers."""

import contextlib
import email.utils
import gzip
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.envs.base import ToolError
from jaxrl.envs.search.base import Document, Hit
from jaxrl.envs.search.http_retriever import (
    MAX_TEXT,
    PATHS,
    HttpRetriever,
    parse_hits,
    split_response,
)
from tests.envs.fault_server import FaultServer
from tests.servers import Reply, Retriever, served

PASSAGES = [
    {"id": "a", "contents": '"Paris"\nParis is the capital of France.'},
    {"id": "b", "contents": '"Berlin"\nBerlin is the capital of Germany.'},
    {"id": "c", "contents": '"Rome"\nRome lies in Italy,\non seven hills.'},
]
PARIS = Document("a", "Paris", "Paris is the capital of France.")
BERLIN = Document("b", "Berlin", "Berlin is the capital of Germany.")


def retrieve(answer, queries=("q",), topk=3, path="", **settings):
    """Return what the retriever reads from a server's answer."""
    with served(lambda _: answer) as server:
        return HttpRetriever(server.url + path, **settings).retrieve(queries, topk)


def retrieve_error(answer, queries=("q",), **settings):
    results = retrieve(answer, queries, **settings)
    assert len(results) == len(queries)
    assert all(result is results[0] for result in results)
    assert isinstance(results[0], ToolError)
    return results[0]


# Whole servers


@pytest.mark.parametrize(
    ("protocol", "path", "num_requests"),
    [
        ("search_r1", "", 2),
        ("search_r1", "/retrieve", 2),
        ("flashrag", "", 2),
        ("flashrag", "/batch_search", 2),
        ("flashrag", "/search", 4),
    ],
)
def test_both_protocols_as_published(protocol, path, num_requests):
    with served(Retriever(PASSAGES)) as server:
        engine = HttpRetriever(server.url + path, protocol=protocol, topk=2, batch_size=2)
        queries = ["capital of France", "seven hills", "?", "Germany"]
        paris, rome, none, berlin = engine.run_batch(queries)
        assert len(server.requests) == num_requests
        assert paris == (
            "Doc 1(Title: Paris) Paris is the capital of France.\n"
            "Doc 2(Title: Berlin) Berlin is the capital of Germany."
        )
        assert rome == "Doc 1(Title: Rome) Rome lies in Italy,\non seven hills."
        assert none == "No information found"
        assert berlin == engine.run("Germany") == "Doc 1(Title: Berlin) " + BERLIN.text
        assert engine.retrieve(["capital of France"], 1) == [[Hit(PARIS, 3.0)]]
        assert engine.run_batch([]) == []


def test_requests_follow_the_published_protocols():
    with served(Retriever(PASSAGES)) as server:
        HttpRetriever(server.url, topk=2).run_batch(["x", "y"])
        HttpRetriever(server.url, topk=2, protocol="flashrag").run_batch(["x", "y"])
        HttpRetriever(server.url + "/search", topk=2, protocol="flashrag").run("x")
    assert [(r.method, r.path, r.json) for r in server.requests] == [
        ("POST", "/retrieve", {"queries": ["x", "y"], "topk": 2, "return_scores": True}),
        ("POST", "/batch_search", {"query": ["x", "y"], "top_n": 2, "return_score": True}),
        ("POST", "/search", {"query": "x", "top_n": 2, "return_score": True}),
    ]
    assert all(r.headers["content-type"] == "application/json" for r in server.requests)


# Forms of an answer

SCORED = {"result": [[{"document": PASSAGES[0], "score": 0.5}, {"document": PASSAGES[1]}]]}
BARE = {"result": [PASSAGES[:2]]}


@pytest.mark.parametrize(
    ("protocol", "answer", "hits"),
    [
        ("search_r1", SCORED, [Hit(PARIS, 0.5), Hit(BERLIN, None)]),
        ("search_r1", BARE, [Hit(PARIS, None), Hit(BERLIN, None)]),
        ("search_r1", {"result": [[]]}, []),
        (
            "search_r1",
            {"result": [[{"document": {"id": 7, "title": "Rome", "text": " On hills. "}}]]},
            [Hit(Document("7", "Rome", "On hills."), None)],
        ),
        ("search_r1", {"result": [[{"contents": "No title"}]]}, [Hit(Document("", "No title", ""),
                                                                    None)]),
        ("flashrag", [[PASSAGES[:1]], [[2]]], [Hit(PARIS, 2.0)]),
        ("flashrag", [PASSAGES[:2]], [Hit(PARIS, None), Hit(BERLIN, None)]),
    ],
)  # fmt: skip
def test_every_form_of_an_answer(protocol, answer, hits):
    assert retrieve(answer, protocol=protocol) == [hits]


def test_forms_of_two_queries_are_distinguished():
    documents = [PASSAGES[:1], PASSAGES[1:2]]
    hits = [[Hit(PARIS, None)], [Hit(BERLIN, None)]]
    request = {"queries": ("p", "q"), "protocol": "flashrag"}
    assert retrieve(documents, **request) == hits
    assert retrieve([documents, [[1.0], [2.0]]], **request) == [[Hit(PARIS, 1)], [Hit(BERLIN, 2)]]
    assert retrieve([[], []], **request) == retrieve([[[], []], [[], []]], **request) == [[], []]


def test_texts_are_valid_unicode_of_bounded_length():
    odd = '{"result": [[{"id": null, "contents": "\\"A\\ud800\\"\\n\\ud83d\\ude00 \\u0000x"}]]}'
    assert retrieve(odd) == [[Hit(Document("", "A\ufffd", "😀 \0x"), None)]]
    [[giant]] = retrieve({"result": [[{"id": "g", "contents": '"G"\n' + "x" * 10**6}]]})
    assert len(giant.document.text) == MAX_TEXT - 4


def test_hostile_queries_arrive_unchanged():
    hostile = ['a "b" \\ \n\0', "\ud800x", "title:x AND (", "é" * 100_000]
    with served(Retriever(PASSAGES)) as server:
        assert len(HttpRetriever(server.url).run_batch(hostile)) == 4
    assert server.requests[0].json["queries"] == [hostile[0], "\ufffdx", *hostile[2:]]


# Answers with unreadable hits

BAD_HITS = [
    None,
    {"text": ["x"], "title": "t"},
    {"contents": "x", "id": [1]},
    {"contents": " \n "},
    {"document": PASSAGES[0], "score": "high"},
]


@pytest.mark.parametrize("bad", BAD_HITS)
def test_a_bad_hit_is_skipped(bad):
    good, paris = PASSAGES[0], [[Hit(PARIS, None)]]
    assert retrieve({"result": [[bad, good, bad]]}) == paris
    assert retrieve([[bad, good]], protocol="flashrag") == paris
    scored = [[[good, bad]], [[0.5, 0.1]]]
    assert retrieve(scored, protocol="flashrag")[0][0] == Hit(PARIS, 0.5)


@pytest.mark.parametrize(
    ("protocol", "answer"),
    [
        *(("search_r1", {"result": [bad, PASSAGES[:1]]}) for bad in ([None], "x")),
        ("flashrag", [[PASSAGES[:2], PASSAGES[:1]], [[1.0], [None]]]),
        ("flashrag", [[None, PASSAGES[:1]], [None, [None]]]),
    ],
)
def test_only_a_query_without_any_readable_hit_fails(protocol, answer):
    bad, good = retrieve(answer, queries=("p", "q"), protocol=protocol)
    assert isinstance(bad, ToolError)
    assert good == [Hit(PARIS, None)]


# Broken servers


@pytest.mark.parametrize(
    ("protocol", "answer", "message"),
    [
        ("search_r1", {"results": []}, "{'results': []}; expected an object with \"result\", a li"),
        ("search_r1", {"result": [["text"]]}, "'text'; expected a document with \"contents\""),
        ("flashrag", {"detail": "x"}, "{'detail': 'x'}; expected a list for each of 1 queries"),
        ("flashrag", [[PASSAGES[:1]], [[1.0], [2.0]]], "[[[{"),
    ],
)
def test_unreadable_answers_are_errors(protocol, answer, message):
    error = retrieve_error(answer, protocol=protocol)
    assert f" gives {message}" in str(error)
    assert str(error).startswith("http://127.0.0.1:")
    assert not error.is_permanent


@pytest.mark.parametrize("body", ["", "[" * 100_000, b"\xff\xfe{"])
def test_invalid_json_is_an_error(body):
    error = retrieve_error(Reply(body), queries=("p", "q"))
    assert f" gives {len(body)} bytes that are not JSON (" in str(error)
    assert len(str(error)) < 600
    assert not error.is_permanent


scalars = st.none() | st.booleans() | st.integers() | st.just(10**400) | st.floats() | st.text()
names = st.sampled_from(["result", "document", "score", "id", "contents", "title", "text", "x"])
anything = st.recursive(
    scalars | st.sampled_from(PASSAGES),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=50, deadline=None)
@given(anything, st.sampled_from(sorted(PATHS)), st.integers(1, 2))
def test_any_json_is_hits_or_an_error(answer, protocol, count):
    scored = {"document": PASSAGES[0], "score": answer}
    titled = {"title": answer, "text": "x", "id": answer}
    forms = [answer, {"result": answer}, [answer], [[answer]], [[titled]], [[PASSAGES], [answer]]]
    for form in [*forms, {"result": [[answer]]}, {"result": [[scored, titled]]}]:
        try:
            results = split_response(form, protocol, count)
        except ValueError:
            continue
        assert len(results) == count
        hits = []
        for result in results:
            with contextlib.suppress(ValueError):
                hits += parse_hits(result)
        for hit in hits:
            assert all(isinstance(text, str) for text in hit.document)
            assert hit.score is None or isinstance(hit.score, float)


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_body_beyond_the_limit_is_not_read(is_packed):
    content = b"x" * 3_000_000
    headers = {"Content-Encoding": "gzip"} if is_packed else {}
    body = gzip.compress(content) if is_packed else content
    error = retrieve_error(Reply(body, headers=headers), max_response_mib=1.5)
    assert str(error).endswith(" responds with more than 1.5 MiB")


@pytest.mark.parametrize(
    ("status", "is_permanent"),
    [
        *((400, True), (401, True), (307, True)),
        *((408, False), (429, False), (500, False), (503, False)),
    ],
)
def test_the_status_decides_whether_to_retry(status, is_permanent):
    error = retrieve_error(Reply({"detail": "no"}, status))
    assert f' responds with status {status}: \'{{"detail": "no"}}\'' in str(error)
    assert error.is_permanent == is_permanent
    assert error.retry_after_s is None


@pytest.mark.parametrize(
    ("headers", "wait_s"),
    [
        ({"Retry-After": "7"}, 7),
        ({"Retry-After": email.utils.formatdate(0, usegmt=True)}, 0),
        ({"Retry-After": "9" * 400}, 86_400),
        ({"Retry-After": "Fri, 32 Dec 99999 25:61:61 GMT"}, None),
    ],
)
def test_headers_tell_how_long_to_wait(headers, wait_s):
    assert retrieve_error(Reply("", 429, headers)).retry_after_s == wait_s


def test_only_the_queries_of_a_failed_request_fail():
    def answer(request):
        is_bad = "bad" in request.json["queries"]
        return Reply("", 500) if is_bad else Retriever(PASSAGES)(request)

    with served(answer) as server:
        results = HttpRetriever(server.url, batch_size=2).run_batch(["France", "", "bad", "Italy"])
    assert [isinstance(result, ToolError) for result in results] == [False, False, True, True]


def test_a_dripping_response_ends_at_the_deadline():
    with FaultServer({"drip": 1.0}) as server:
        start = time.monotonic()
        [error] = HttpRetriever(server.url, timeout_s=0.2).run_batch(["q"])
    assert time.monotonic() - start < 1
    assert str(error).endswith("/retrieve gave no complete response within 0.2 s")
    assert not error.is_permanent


def test_a_key_is_sent_and_never_shown(monkeypatch):
    monkeypatch.setenv("RETRIEVER_KEY", "abc123")
    with served(lambda request: Reply(request.headers.get("authorization", "none"), 403)) as server:
        [refused] = HttpRetriever(server.url, key_env="RETRIEVER_KEY").run_batch(["q"])
        [bare] = HttpRetriever(server.url).run_batch(["q"])
    assert "responds with status 403: 'Bearer ***'" in str(refused)
    assert "responds with status 403: 'none'" in str(bare)
    monkeypatch.delenv("RETRIEVER_KEY")
    with pytest.raises(ValueError, match="RETRIEVER_KEY"):
        HttpRetriever(server.url, key_env="RETRIEVER_KEY")


def test_urls_with_passwords_are_refused():
    with pytest.raises(ValueError, match=r"config.search.http.url contains a user") as raised:
        HttpRetriever("http://u:secret@x/")
    assert "secret" not in str(raised.value)

"""HttpRetriever against servers written from the published protocols, and against broken ones."""

import contextlib
import email.utils
import gzip
import json
import socket
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.envs.base import ToolError
from jaxrl.envs.search.base import Document, Hit, HitReader
from jaxrl.envs.search.http_retriever import (
    MAX_TEXT,
    PATHS,
    HttpRetriever,
    parse_hits,
    split_response,
)
from tests.servers import Reply, Retriever, served

PASSAGES = [
    {"id": "a", "contents": '"Paris"\nParis is the capital of France.'},
    {"id": "b", "contents": '"Berlin"\nBerlin is the capital of Germany.'},
    {"id": "c", "contents": '"Rome"\nRome lies in Italy,\non seven hills.'},
]
PARIS = Document("a", "Paris", "Paris is the capital of France.")
BERLIN = Document("b", "Berlin", "Berlin is the capital of Germany.")


def retrieve(answer, queries=("q",), topk=3, path="", **settings):
    """What the retriever makes of a server's answer."""
    with served(lambda _: answer) as server:
        return HttpRetriever(server.url + path, **settings).retrieve(queries, topk)


def failure(answer, queries=("q",), **settings):
    found = retrieve(answer, queries, **settings)
    assert len(found) == len(queries)
    assert all(one is found[0] for one in found)
    assert isinstance(found[0], ToolError)
    return found[0]


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


def test_what_is_asked_is_what_is_published():
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


def test_batches_go_side_by_side_over_kept_connections():
    meeting = threading.Barrier(3, timeout=5)

    def answer(request):
        meeting.wait()  # passes only where three are in flight
        return Retriever(PASSAGES)(request)

    with served(answer) as server:
        engine = HttpRetriever(server.url, batch_size=2, connections=3)
        for _ in range(3):
            assert len(engine.run_batch(["France"] * 18)) == 18
        assert len(server.requests) == 27
        assert server.most_at_once == 3
        assert server.num_connections == 3


# Every form of an answer

SCORED = {"result": [[{"document": PASSAGES[0], "score": 0.5}, {"document": PASSAGES[1]}]]}
BARE = {"result": [PASSAGES[:2]]}
SERPAPI = {"result": [[{"document": {"contents": PASSAGES[0]["contents"]}}]]}


@pytest.mark.parametrize(
    ("protocol", "answer", "hits"),
    [
        ("search_r1", SCORED, [Hit(PARIS, 0.5), Hit(BERLIN, None)]),
        ("search_r1", BARE, [Hit(PARIS, None), Hit(BERLIN, None)]),
        ("search_r1", SERPAPI, [Hit(PARIS._replace(id=""), None)]),
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
        ("flashrag", [[[]], [[]]], []),
        ("flashrag", [[]], []),
    ],
)  # fmt: skip
def test_every_form_of_an_answer(protocol, answer, hits):
    assert retrieve(answer, protocol=protocol) == [hits]


def test_forms_of_two_queries_are_told_apart():
    documents = [PASSAGES[:1], PASSAGES[1:2]]
    hits = [[Hit(PARIS, None)], [Hit(BERLIN, None)]]
    asked = {"queries": ("p", "q"), "protocol": "flashrag"}
    assert retrieve(documents, **asked) == hits
    assert retrieve([documents, [[1.0], [2.0]]], **asked) == [[Hit(PARIS, 1)], [Hit(BERLIN, 2)]]
    assert retrieve([[], []], **asked) == retrieve([[[], []], [[], []]], **asked) == [[], []]


def test_one_query_at_a_time_with_and_without_scores():
    asked = {"protocol": "flashrag", "path": "/search"}
    assert retrieve(PASSAGES[:1], **asked) == [[Hit(PARIS, None)]]
    assert retrieve([PASSAGES[:1], [1.5]], **asked) == [[Hit(PARIS, 1.5)]]
    assert retrieve([[], []], **asked) == retrieve([], **asked) == [[]]


def test_texts_are_such_that_a_tokenizer_takes_them():
    odd = '{"result": [[{"id": null, "contents": "\\"A\\ud800\\"\\n\\ud83d\\ude00 \\u0000x"}]]}'
    assert retrieve(odd) == [[Hit(Document("", "A\ufffd", "😀 \0x"), None)]]
    [[giant]] = retrieve({"result": [[{"id": "g", "contents": '"G"\n' + "x" * 10**6}]]})
    assert len(giant.document.text) == MAX_TEXT - 4


def test_hostile_queries_arrive_as_they_are():
    hostile = ['a "b" \\ \n\0', "\ud800x", "title:x AND (", "é" * 100_000]
    with served(Retriever(PASSAGES)) as server:
        assert len(HttpRetriever(server.url).run_batch(hostile)) == 4
    assert server.requests[0].json["queries"] == [hostile[0], "\ufffdx", *hostile[2:]]


# Answers with hits that cannot be read

BAD_HITS = [
    None,
    ["x"],
    {"document": None},
    {"contents": None},
    {"text": ["x"], "title": "t"},
    {"text": "x", "title": 5},
    {"contents": "x", "id": [1]},
    {"contents": " \n "},
    {"title": "", "text": " "},
    {"document": PASSAGES[0], "score": "high"},
]


@pytest.mark.parametrize("bad", BAD_HITS)
def test_a_bad_hit_is_skipped_and_counted(bad):
    log = []
    good, paris = PASSAGES[0], [[Hit(PARIS, None)]]
    assert retrieve({"result": [[bad, good, bad]]}, log=log.append) == paris
    assert "(2 so far)" in log[0]
    assert retrieve([[bad, good]], protocol="flashrag") == paris
    scored = [[[good, bad]], [[0.5, 0.1]]]
    assert retrieve(scored, protocol="flashrag")[0][0] == Hit(PARIS, 0.5)
    one_query = {"protocol": "flashrag", "path": "/search"}
    assert retrieve([bad, good], **one_query) == paris
    assert retrieve([[good, bad], [0.5, 0.1]], **one_query)[0][0] == Hit(PARIS, 0.5)


@pytest.mark.parametrize(
    ("protocol", "answer"),
    [
        *(("search_r1", {"result": [bad, PASSAGES[:1]]}) for bad in ([None], [["x"]], None, "x")),
        ("flashrag", [[PASSAGES[:2], PASSAGES[:1]], [[1.0], [None]]]),
        ("flashrag", [[None, PASSAGES[:1]], [None, [None]]]),
        ("flashrag", [[["x"], None], PASSAGES[:1]]),
    ],
)
def test_only_a_query_without_any_readable_hit_fails(protocol, answer):
    bad, good = retrieve(answer, queries=("p", "q"), protocol=protocol)
    assert isinstance(bad, ToolError)
    assert good == [Hit(PARIS, None)]


def test_skipped_hits_are_logged_at_powers_of_ten():
    log = []
    with served(lambda _: {"result": [[None, PASSAGES[0]]]}) as server:
        engine = HttpRetriever(server.url, log=log.append)
        for _ in range(25):
            engine.run("q")
    assert [line.partition("(")[2] for line in log] == ["1 so far)", "10 so far)"]


# Broken servers


@pytest.mark.parametrize(
    ("protocol", "answer", "said"),
    [
        ("search_r1", {"results": []}, "{'results': []}; expected an object with \"result\", a li"),
        ("search_r1", {"result": [[], []]}, "{'result': [[], []]}; expected an object with"),
        ("search_r1", {"result": ["text"]}, "'text'; expected a list of documents"),
        ("search_r1", {"result": [["text"]]}, "'text'; expected a document with \"contents\""),
        ("flashrag", {"detail": "x"}, "{'detail': 'x'}; expected a list for each of 1 queries"),
        ("flashrag", [PASSAGES, PASSAGES], "[[{"),
        ("flashrag", [[PASSAGES[:2]], [[1.0]]], "([{"),
        ("flashrag", [[PASSAGES[:1]], [[1.0], [2.0]]], "[[[{"),
    ],
)
def test_what_is_no_answer_is_told(protocol, answer, said):
    error = failure(answer, protocol=protocol)
    assert f" gives {said}" in str(error)
    assert str(error).startswith("http://127.0.0.1:")
    assert not error.is_permanent


@pytest.mark.parametrize(
    "body", ["", "<html>busy</html>", '{"result": [[', "[" * 100_000, b"\xff\xfe{"]
)
def test_what_is_not_json_is_told(body):
    error = failure(Reply(body), queries=("p", "q"))
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


@settings(max_examples=150, deadline=None)
@given(anything, st.sampled_from(sorted(PATHS)), st.integers(1, 2))
def test_whatever_arrives_is_hits_or_a_failure(answer, protocol, count):
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
                hits += parse_hits(result, HitReader("server", print))
        for hit in hits:
            assert all(isinstance(text, str) for text in hit.document)
            assert hit.score is None or isinstance(hit.score, float)


def test_a_truncated_body_is_told():
    content = json.dumps(SCORED)[:-20]
    error = failure(Reply(content, headers={"Content-Length": str(len(content) + 20),
                                            "Connection": "close"}))  # fmt: skip
    assert "RemoteProtocolError" in str(error)
    assert not error.is_permanent


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_body_beyond_the_limit_is_not_read(is_packed):
    content = b"x" * 3_000_000
    headers = {"Content-Encoding": "gzip"} if is_packed else {}
    body = gzip.compress(content) if is_packed else content
    error = failure(Reply(body, headers=headers), max_response_mib=1.5)
    assert str(error).endswith(" responds with more than 1.5 MiB")


@pytest.mark.parametrize(
    ("status", "is_permanent"),
    [
        *((400, True), (401, True), (403, True), (404, True), (422, True), (307, True)),
        *((408, False), (429, False), (500, False), (502, False), (503, False)),
    ],
)
def test_statuses_say_whether_to_ask_again(status, is_permanent):
    error = failure(Reply({"detail": "no"}, status))
    assert f' responds with status {status}: \'{{"detail": "no"}}\'' in str(error)
    assert error.is_permanent == is_permanent
    assert error.retry_after_s is None


@pytest.mark.parametrize(
    ("headers", "wait_s"),
    [
        ({"Retry-After": "7"}, 7),
        ({"Retry-After": email.utils.formatdate(0, usegmt=True)}, 0),
        ({"Retry-After": "soon"}, None),
        ({"X-RateLimit-Remaining": "0, 1500", "X-RateLimit-Reset": "2, 90000"}, 2),
        ({"X-RateLimit-Remaining": "5, 1500", "X-RateLimit-Reset": "2, 90000"}, None),
        ({"X-RateLimit-Remaining": "x", "X-RateLimit-Reset": "2"}, None),
        ({"Retry-After": "9" * 400}, 86_400),
        ({"Retry-After": "-5"}, None),
        ({"Retry-After": "Fri, 31 Dec 9999 23:59:59 GMT"}, 86_400),
        ({"Retry-After": "Fri, 32 Dec 99999 25:61:61 GMT"}, None),
        ({"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "9" * 400}, 86_400),
    ],
)
def test_a_server_says_how_long_to_wait(headers, wait_s):
    assert failure(Reply("", 429, headers)).retry_after_s == wait_s


def test_only_the_queries_of_a_failed_request_fail():
    def answer(request):
        is_bad = "bad" in request.json["queries"]
        return Reply("", 500) if is_bad else Retriever(PASSAGES)(request)

    with served(answer) as server:
        found = HttpRetriever(server.url, batch_size=2).run_batch(["France", "", "bad", "Italy"])
    assert [isinstance(one, ToolError) for one in found] == [False, False, True, True]


def test_a_slow_drip_ends_at_the_deadline():
    listener = socket.create_server(("127.0.0.1", 0))

    def drip():
        connection, _ = listener.accept()
        with connection:
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
            for _ in range(100):
                time.sleep(0.02)
                try:
                    connection.sendall(b"x")
                except OSError:
                    return

    threading.Thread(target=drip, daemon=True).start()
    engine = HttpRetriever(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout_s=0.2)
    start = time.monotonic()
    [error] = engine.run_batch(["q"])
    assert time.monotonic() - start < 1
    assert str(error).endswith("/retrieve gave no complete response within 0.2 s")
    listener.close()


def test_a_dead_server_and_a_reset_are_told():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    [dead] = HttpRetriever(f"http://127.0.0.1:{port}/retrieve").run_batch(["q"])
    assert str(dead).startswith(f"http://127.0.0.1:{port}/retrieve failed: ConnectError: ")
    assert not dead.is_permanent
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=lambda: listener.accept()[0].close(), daemon=True).start()
        engine = HttpRetriever(f"http://127.0.0.1:{listener.getsockname()[1]}")
        [reset] = engine.run_batch(["q"])
    assert "failed: R" in str(reset)  # a ReadError or RemoteProtocolError, as it happens
    assert not reset.is_permanent


def test_a_key_is_sent_and_never_shown(monkeypatch):
    monkeypatch.setenv("RETRIEVER_KEY", "abc123")
    with served(lambda request: Reply(request.headers.get("authorization", "none"), 403)) as server:
        [refused] = HttpRetriever(server.url, key_env="RETRIEVER_KEY").run_batch(["q"])
        [bare] = HttpRetriever(server.url).run_batch(["q"])
    assert "responds with status 403: 'Bearer ***'" in str(refused)
    assert "responds with status 403: 'none'" in str(bare)
    monkeypatch.delenv("RETRIEVER_KEY")
    with pytest.raises(
        ValueError, match=r"RETRIEVER_KEY, which config\.search\.http\.key_env names"
    ):
        HttpRetriever(server.url, key_env="RETRIEVER_KEY")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"url": ""}, "config.search.http.url is ''; expected the address of a server"),
        ({"url": "127.0.0.1:8000"}, "config.search.http.url is '127.0.0.1:8000'; expected"),
        ({"url": "ftp://x"}, "config.search.http.url is 'ftp://x'; expected the address"),
        ({"url": "http://u:secret@x/"}, "config.search.http.url contains a user or a password"),
        ({"protocol": "bm25"}, "config.search.http.protocol is 'bm25'; expected one of search_r1"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, said):
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        HttpRetriever(**{"url": "http://127.0.0.1:1", **settings})
    assert str(raised.value).startswith(said)
    assert "secret" not in str(raised.value)

"""WebSearch with servers that answer as the providers do."""

import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs import debug_tiny
from jaxrl.builders.validation import validate
from jaxrl.envs.base import ToolError
from jaxrl.envs.search.base import Document, Hit
from jaxrl.extras.web_search.engine import PROVIDERS, WebSearch
from tests.servers import Reply, served

KEY = "k3y-of-a-test"
PARIS = Document("https://paris.example/", "Paris", "The capital of France.")
ROME = Document("https://rome.example/", "Rome & its hills", "Seven of them.")

SERPER = {
    "searchParameters": {"q": "capital", "type": "search"},
    "organic": [
        {"title": "Paris", "link": PARIS.id, "snippet": "The capital of France.", "position": 1},
        {"title": "Rome & its hills", "link": ROME.id, "snippet": "Seven\n of  them."},
        {"title": "", "link": "https://blank.example/"},
    ],
}
BRAVE_RESULTS = [
    {"title": "Paris", "url": PARIS.id, "description": "The <strong>capital</strong> of France."},
    {
        "title": "Rome &amp; its hills",
        "url": ROME.id,
        "description": "Seven&nbsp; of <b></b> them.",
        "extra_snippets": ["x"],
    },
]
BRAVE = {"type": "search", "web": {"type": "search", "results": BRAVE_RESULTS}}
TAVILY = {
    "answer": None,
    "results": [
        {"title": "Paris", "url": PARIS.id, "content": "The capital of France.", "score": 0.9},
        {"title": "Rome & its hills", "url": ROME.id, "content": "Seven of them.", "score": 0.8},
    ],
}
SEARXNG = {
    "query": "capital",
    "number_of_results": 2,
    "results": [
        {"url": PARIS.id, "title": "Paris", "content": "The capital of France.", "score": 4.0,
         "engine": "mojeek", "parsed_url": ["https", "paris.example", "/", "", "", ""]},
        {"url": ROME.id, "title": "Rome & its hills", "content": "Seven of them.", "score": 1.0},
    ],
    "unresponsive_engines": [["other", "timeout"]],
}  # fmt: skip
ANSWERS = {"serper": SERPER, "brave": BRAVE, "tavily": TAVILY, "searxng": SEARXNG}
SCORES = {"tavily": [0.9, 0.8], "searxng": [4.0, 1.0]}


@pytest.fixture(autouse=True)
def keys(monkeypatch):
    for provider in PROVIDERS.values():
        if provider.key_env:
            monkeypatch.setenv(provider.key_env, f" {KEY}\n")


def search(provider, answer, queries=("capital",), topk=3, **settings):
    """Return the hits of a provider with this answer, and the requests to it."""
    with served(answer if callable(answer) else lambda _: answer) as server:
        engine = WebSearch(provider, url=server.url, **settings)
        return engine.retrieve(queries, topk), server.requests


@pytest.mark.parametrize("provider", PROVIDERS)
def test_results_of_each_provider(provider):
    [hits], _ = search(provider, ANSWERS[provider])
    scores = SCORES.get(provider, [None, None])
    assert hits == [Hit(PARIS, scores[0]), Hit(ROME, scores[1])]
    [hits], _ = search(provider, ANSWERS[provider], topk=1)
    assert hits == [Hit(PARIS, scores[0])]


def test_requests_to_each_provider():
    [serper] = search("serper", SERPER, ["a b"])[1]
    assert (serper.method, serper.json) == ("POST", {"q": "a b", "num": 3})
    assert serper.headers["x-api-key"] == KEY
    [brave] = search("brave", BRAVE, ["a b"])[1]
    params = {"q": "a b", "count": "3", "text_decorations": "false", "result_filter": "web"}
    assert (brave.method, brave.params) == ("GET", params)
    assert brave.headers["x-subscription-token"] == KEY
    [tavily] = search("tavily", TAVILY, ["a b"])[1]
    assert tavily.json == {"query": "a b", "max_results": 3, "search_depth": "basic"}
    assert tavily.headers["authorization"] == f"Bearer {KEY}"
    [searxng] = search("searxng", SEARXNG, ["a b"])[1]
    assert (searxng.path, searxng.params) == ("/search", {"q": "a b", "format": "json"})
    assert "authorization" not in searxng.headers


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"answer": "Paris"}, "Paris"),
        ({"answer": ["Paris"], "snippet": "Its capital."}, "Its capital."),
        ({"answer": 5}, None),
        ({}, None),
    ],
)
def test_an_answer_box_comes_first(fields, text):
    box = {"title": "France", "link": "https://box.example/", **fields}
    first = [Document("https://box.example/", "France", text)] if text else []
    [hits], _ = search("serper", {**SERPER, "answerBox": box})
    assert [hit.document for hit in hits] == [*first, PARIS, ROME]
    [hits], _ = search("serper", {"answerBox": box})
    assert [hit.document for hit in hits] == first


@pytest.mark.parametrize(
    ("provider", "answer"),
    [
        ("serper", {"searchParameters": {"q": "capital"}, "credits": 1}),
        ("brave", {"type": "search"}),
        ("tavily", {"results": []}),
        ("searxng", {"results": [], "unresponsive_engines": []}),
    ],
)
def test_no_results_are_no_failure(provider, answer):
    assert search(provider, answer)[0] == [[]]


@pytest.mark.parametrize("bad", [None, {}, {"title": "x", "link": {}, "url": {}}])
@pytest.mark.parametrize("provider", PROVIDERS)
def test_an_invalid_result_is_skipped(provider, bad):
    answer = copy.deepcopy(ANSWERS[provider])
    results = answer.get("organic") or answer.get("web", answer).get("results")
    results[1:] = [bad, results[1], bad]
    [hits], _ = search(provider, answer)
    assert [hit.document for hit in hits] == [PARIS, ROME]
    results[:] = [bad, bad]
    [[error], _] = search(provider, answer)
    assert isinstance(error, ToolError)


def test_unresponsive_engines_are_a_failure():
    answer = {"results": [], "unresponsive_engines": [["google", "timeout"]]}
    [[error], _] = search("searxng", answer)
    assert "its engines did not respond: [['google', 'timeout']]" in str(error)
    assert not error.is_permanent


@pytest.mark.parametrize(
    ("provider", "answer", "message"),
    [
        ("serper", [], "a list; expected an object"),
        ("serper", {"message": "x"}, "an object with ['message']; expected a list of 'organic'"),
        ("serper", {"organic": ["x"]}, "a result 'x'; expected an object with texts in ('link', "),
        ("brave", {"type": "ErrorResponse"}, "an object with ['type']; expected a list of 'resu"),
        ("searxng", {"results": None}, "an object with ['results']; expected a list of 'results'"),
    ],
)
def test_an_invalid_response_is_an_error(provider, answer, message):
    [[error], _] = search(provider, answer)
    assert isinstance(error, ToolError)
    assert f" gives {message}" in str(error)


scalars = st.none() | st.booleans() | st.just(10**400) | st.floats() | st.text()
results = st.dictionaries(
    st.sampled_from(["title", "link", "url", "snippet", "description", "content", "score"]), scalars
)
fields = st.sampled_from(["organic", "web", "results", "answerBox", "unresponsive_engines", "type"])
inner = scalars | results | st.lists(results | scalars, max_size=2)


@settings(max_examples=50, deadline=None)
@given(
    st.dictionaries(fields, inner | st.dictionaries(fields, inner)), st.sampled_from([*PROVIDERS])
)
def test_any_response_is_hits_or_an_error(answer, provider):
    try:
        hits = PROVIDERS[provider].parse_response(answer)
    except ValueError:
        return
    for hit in hits:
        assert all(isinstance(text, str) for text in hit.document)
        assert hit.score is None or isinstance(hit.score, float)


def test_queries_fail_one_by_one_and_blank_ones_send_nothing():
    def answer(request):
        return Reply({}, 500) if request.json["q"] == "bad" else SERPER

    results, requests = search("serper", answer, ["good", "bad", " \0 ", "good"])
    assert [isinstance(result, ToolError) for result in results] == [False, True, False, False]
    assert results[2] == []
    assert len(requests) == 3


@pytest.mark.parametrize("provider", PROVIDERS)
def test_queries_are_truncated_to_the_providers_limits(provider):
    queries = ["w " * 50_000, "x" * 100_000, "\ud800a\0b\nc"]
    _, requests = search(provider, ANSWERS[provider], queries)
    sent = [r.params.get("q") or r.json.get("q") or r.json.get("query") for r in requests]
    limits = PROVIDERS[provider]
    assert sorted(map(len, sent)) == sorted(
        [min(2 * limits.max_words - 1, limits.max_chars), limits.max_chars, len("\ufffda b c")]
    )
    assert "\ufffda b c" in sent


def test_searxng_syntax_is_removed():
    queries = ["!!g :fr <3 ?x what! a:b", "!images", "2 < 3"]
    _, requests = search("searxng", SEARXNG, queries)
    assert sorted(r.params["q"] for r in requests) == ["2 3", "g fr 3 x what! a:b", "images"]


def test_a_missing_or_invalid_key_is_named(monkeypatch):
    monkeypatch.setenv("BRAVE_API_KEY", " ")
    with pytest.raises(ValueError, match="the environment variable BRAVE_API_KEY, which config"):
        WebSearch("brave")
    monkeypatch.setenv("OTHER_KEY", "another-0123")
    WebSearch("brave", key_env="OTHER_KEY")
    monkeypatch.setenv("OTHER_KEY", "schlüssel")
    with pytest.raises(ValueError, match=r"OTHER_KEY, .* contains characters") as raised:
        WebSearch("brave", key_env="OTHER_KEY")
    assert "schl" not in str(raised.value)


@pytest.mark.parametrize("provider", ["serper", "brave", "tavily"])
def test_no_message_shows_a_key(provider, caplog):
    def answer(request):
        return Reply({"message": f"bad key {KEY}", "headers": request.headers}, 403)

    caplog.set_level("DEBUG")
    [[error], _] = search(provider, answer)
    assert "bad key ***" in str(error)
    assert error.is_permanent
    assert KEY not in str(error) + repr(error) + repr(error.__dict__) + caplog.text


@pytest.mark.parametrize("key", ["quote'back\\slash", "plain-and-long"])
@pytest.mark.parametrize("before", ["", "x" * 190, " " * 790])
def test_no_message_shows_a_part_of_a_key(monkeypatch, key, before):
    monkeypatch.setenv("SERPER_API_KEY", key)
    [[error], _] = search("serper", Reply(f"{before}{key} is wrong", 401))
    assert key[:5] not in str(error)
    [[error], _] = search("serper", Reply(f"{before}{key}"))
    assert key[:5] not in str(error)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"provider": "brave", "topk": 21}, "config.search.web.topk is 21; brave gives at most 20"),
        ({"key_env": f"{KEY}-1"}, "the environment variable that config.search.web.key_env names"),
        ({"url": f"http://{KEY}@host"}, "config.search.web.url contains a user or a password"),
    ],
)
def test_invalid_settings_are_rejected(settings, message):
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        WebSearch(**settings)
    assert str(raised.value).startswith(message)
    assert KEY not in str(raised.value)


def test_google_is_web_search_through_serper():
    config = debug_tiny.get_config()
    config.search.engine = "google"
    assert validate(config).engine_class is WebSearch
    assert (config.search.engine, config.search.web.provider) == ("web", "serper")
    config.search.engine, config.search.web.provider = "google", "brave"
    with pytest.raises(
        ValueError, match=r"provider is 'brave'; expected 'serper' with search\.eng"
    ):
        validate(config)

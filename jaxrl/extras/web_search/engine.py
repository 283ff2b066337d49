"""The web, through a provider of searches: Serper, Brave, Tavily, or a SearXNG of one's own."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxrl.envs.base import ToolError
from jaxrl.envs.search.base import Document, DocumentSearch, Hit, SkippedHits
from jaxrl.utils.http_client import (
    Bounds,
    JsonClient,
    Request,
    check_url,
    key_of,
    plain_text,
    shown_url,
)
from jaxrl.utils.json_io import number_of

MAX_TEXT = 10_000
"""Characters of a result that are kept."""


@dataclass(frozen=True, kw_only=True)
class Provider:
    """A provider's requests, limits and answers.

    Attributes:
        url: of its service; "" where everyone has their own.
        key_env: the environment variable that commonly holds its key; "" where it needs none.
        max_chars: of a query; what is beyond is left out, since the provider refuses more.
        max_words: of a query, likewise.
        max_topk: results that it gives at most.
        headers: of a request, by the key.
        request: by the address, the query and the number of results.
        results: the results in an answer, as they arrived; raises ValueError where it is none.
        read_one: reads one of them; raises ValueError where that cannot be read.
    """

    url: str
    key_env: str
    max_chars: int
    max_words: int
    max_topk: int
    headers: Callable[[str], Mapping[str, str]]
    request: Callable[[str, str, int], Request]
    results: Callable[[Mapping[str, Any]], list[Any]]
    read_one: Callable[[Any], Hit]

    def read(self, answer: Any, skipped: SkippedHits) -> list[Hit]:
        """Read an answer.

        Raises:
            ValueError: it is none, or none of its results can be read.
        """
        if not isinstance(answer, dict):
            raise ValueError(f"a {type(answer).__name__}; expected an object")
        return skipped.read(self.results(answer), self.read_one)


class WebSearch(DocumentSearch):
    """Searches the web by way of a provider, each query a request, several in flight.

    A result is a document: its address the id, its snippet the text. What a provider understands
    as an operator (quotes, `site:`) is left to it. The web changes, so a run repeats only by its
    record. The key is read from the environment when the engine is made and is nowhere else:
    neither in a configuration nor in a message.
    """

    def __init__(
        self,
        provider: str = "serper",
        *,
        url: str = "",
        topk: int = 3,
        key_env: str = "",
        timeout_s: float = 30.0,
        connections: int = 8,
        max_response_mib: float = 16.0,
        log: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Asks nothing yet; arguments are the keys of `config.search.web`.

        Args:
            provider: an entry of `PROVIDERS`.
            url: of a service of one's own; needed for `searxng` only.
            topk: results of an answer.
            key_env: the environment variable that holds the key; "" for the provider's usual one.
            timeout_s: of a request.
            connections: requests in flight at most.
            max_response_mib: MiB of an answer at most.
            log: Callback for warnings about results that are skipped.

        Raises:
            ValueError: a setting is none of these, or the variable is not set.
        """
        if provider not in PROVIDERS:
            names = ", ".join(PROVIDERS)
            raise ValueError(
                f"config.search.web.provider is {provider!r}; expected one of {names}."
            )
        self._provider = PROVIDERS[provider]
        if topk > self._provider.max_topk:
            raise ValueError(
                f"config.search.web.topk is {topk}; {provider} gives at most "
                f"{self._provider.max_topk}."
            )
        self.topk = topk
        self._url = (url or self._provider.url).rstrip("/")
        check_url("search.web.url", self._url)
        self._skipped = SkippedHits(shown_url(self._url), log)
        variable = key_env or self._provider.key_env
        key = key_of("search.web.key_env", variable) if variable else ""
        bounds = Bounds(timeout_s=timeout_s, connections=connections, max_mib=max_response_mib)
        self._client = JsonClient(bounds, headers=self._provider.headers(key))

    def retrieve(self, queries: Sequence[str], topk: int) -> list[list[Hit] | ToolError]:
        """The provider's results for each query."""
        count, most = min(topk, self._provider.max_topk), self._provider.max_words
        words = [plain_text(query).replace("\0", " ").split()[:most] for query in queries]
        asked = [" ".join(one)[: self._provider.max_chars] for one in words]
        numbers = [i for i, query in enumerate(asked) if query]
        answers = self._client.ask(
            [self._provider.request(self._url, asked[i], count) for i in numbers]
        )
        hits: list[list[Hit] | ToolError] = [[] for _ in queries]  # of a blank query nothing
        for i, answer in zip(numbers, answers, strict=True):
            hits[i] = self._hits(answer, topk)
        return hits

    def _hits(self, answer: Any, topk: int) -> list[Hit] | ToolError:
        if isinstance(answer, ToolError):
            return answer
        try:
            return self._provider.read(answer, self._skipped)[:topk]
        except ValueError as error:
            return ToolError(f"{shown_url(self._url)} gives {error}")


def _serper_results(answer: Mapping[str, Any]) -> list[Any]:
    """Serper's Google search, `POST https://google.serper.dev/search` (2025).

    An answer without `organic` found nothing, unless it is a `message`. An answer box, where Google
    shows one, comes first.
    """
    found_nothing = answer.get("organic") is None and "message" not in answer
    results = [] if found_nothing else _results(answer, "organic")
    box = answer.get("answerBox")
    if isinstance(box, dict):
        texts = [box.get(name) for name in ("answer", "snippet")]
        text = next((text for text in texts if text and isinstance(text, str)), "")
        results = [{**box, "snippet": text}, *results] if text else results
    return results


_BRAVE = {"text_decorations": "false", "result_filter": "web"}
_TAG = re.compile(r"</?\w[^<>]*>")


def _brave_results(answer: Mapping[str, Any]) -> list[Any]:
    """Brave's web search, `GET https://api.search.brave.com/res/v1/web/search` (v1).

    An answer without `web` found nothing.
    """
    web = answer.get("web")
    if web is None and answer.get("type") == "search":
        return []
    if not isinstance(web, dict):
        raise ValueError(f'an object with {sorted(answer)[:8]}; expected "web"')
    return _results(web, "results")


def _brave_hit(result: Any) -> Hit:
    """Read one of Brave's results, whose title and description are HTML."""
    if isinstance(result, dict):
        marked = {name: result.get(name) for name in ("title", "description")}
        texts = {n: html.unescape(_TAG.sub("", x)) for n, x in marked.items() if isinstance(x, str)}
        result = {**result, **texts}
    return _hit(result, "url", "description")


# What SearXNG would read at the beginning of a word: engines, languages, time limits.
_SEARXNG_SYNTAX = re.compile(r"(?<!\S)[!?:<]+")


def _searxng_request(url: str, query: str, topk: int) -> Request:
    plain = " ".join(_SEARXNG_SYNTAX.sub("", query).split())
    path = "" if url.endswith("/search") else "/search"
    return Request(url=url + path, params={"q": plain or "-", "format": "json"})


def _searxng_results(answer: Mapping[str, Any]) -> list[Any]:
    """SearXNG's search API, `GET /search?format=json` (2025), which `settings.yml` must allow.

    Where it found nothing since the engines behind it gave no answer, it failed.
    """
    results = _results(answer, "results")
    silent = answer.get("unresponsive_engines")
    if not results and silent:
        raise ValueError(f"nothing, as its engines did not respond: {str(silent)[:200]}")
    return results


def _results(fields: Mapping[str, Any], name: str) -> list[Any]:
    """The list of results.

    Raises:
        ValueError: there is none.
    """
    results = fields.get(name)
    if not isinstance(results, list):
        raise ValueError(f"an object with {sorted(fields)[:8]}; expected a list of {name!r}")
    return results


def _hit(result: Any, address: str, text: str) -> Hit:
    """Reads one result; a field that is missing is empty.

    Raises:
        ValueError: it is no object, a field is no text, or there is neither title nor text.
    """
    if not isinstance(result, dict):
        raise ValueError(f"a {type(result).__name__} as a result; expected an object")
    texts = []
    for name in (address, "title", text):
        value = result.get(name)
        if value is not None and not isinstance(value, str):
            raise ValueError(f"a {type(value).__name__} as {name!r} of a result; expected text")
        texts.append(" ".join(plain_text((value or "")[:MAX_TEXT]).split()))
    if not any(texts[1:]):
        raise ValueError(f"a result with {sorted(result)[:8]}; expected 'title' or {text!r}")
    return Hit(Document(*texts), number_of(result.get("score")))


PROVIDERS: Mapping[str, Provider] = {
    "serper": Provider(
        url="https://google.serper.dev/search",
        key_env="SERPER_API_KEY",
        max_chars=2_048,
        max_words=300,
        max_topk=100,
        headers=lambda key: {"X-API-KEY": key},
        request=lambda url, query, topk: Request(url=url, body={"q": query, "num": topk}),
        results=_serper_results,
        read_one=lambda result: _hit(result, "link", "snippet"),
    ),
    "brave": Provider(
        url="https://api.search.brave.com/res/v1/web/search",
        key_env="BRAVE_API_KEY",
        max_chars=400,
        max_words=50,
        max_topk=20,
        headers=lambda key: {"X-Subscription-Token": key},
        request=lambda url, query, topk: Request(
            url=url,
            params={"q": query, "count": str(topk), **_BRAVE},
        ),
        results=_brave_results,
        read_one=_brave_hit,
    ),
    "tavily": Provider(
        url="https://api.tavily.com/search",
        key_env="TAVILY_API_KEY",
        max_chars=400,
        max_words=400,
        max_topk=20,
        headers=lambda key: {"Authorization": f"Bearer {key}"},
        request=lambda url, query, topk: Request(
            url=url, body={"query": query, "max_results": topk, "search_depth": "basic"}
        ),
        # `POST https://api.tavily.com/search` with a bearer's key (2025).
        results=lambda answer: _results(answer, "results"),
        read_one=lambda result: _hit(result, "url", "content"),
    ),
    "searxng": Provider(
        url="",
        key_env="",
        max_chars=2_000,
        max_words=300,
        max_topk=100,
        headers=lambda key: {"Authorization": f"Bearer {key}"} if key else {},
        request=_searxng_request,
        results=_searxng_results,
        read_one=lambda result: _hit(result, "url", "content"),
    ),
}
"""Providers that a configuration can name."""

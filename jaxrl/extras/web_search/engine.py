"""The web, through a provider of searches: Serper, Brave, Tavily, or a SearXNG of one's own."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxrl.envs.base import ToolError
from jaxrl.envs.json_http import (
    Bounds,
    JsonClient,
    Request,
    check_url,
    key_of,
    plain_text,
    shown_url,
)
from jaxrl.envs.json_text import number_of
from jaxrl.envs.retrieval import Document, DocumentSearch, Hit

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
        read: the results in an answer; raises ValueError where it is none.
    """

    url: str
    key_env: str
    max_chars: int
    max_words: int
    max_topk: int
    headers: Callable[[str], Mapping[str, str]]
    request: Callable[[str, str, int], Request]
    read: Callable[[Mapping[str, Any]], list[Hit]]


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
            if not isinstance(answer, dict):
                raise ValueError(f"a {type(answer).__name__}; expected an object")
            hits = self._provider.read(answer)
        except ValueError as error:
            return ToolError(f"{shown_url(self._url)} gives {error}")
        return [hit for hit in hits if hit.document.title or hit.document.text][:topk]


def _read_serper(answer: Mapping[str, Any]) -> list[Hit]:
    """Serper's Google search, `POST https://google.serper.dev/search` (2025).

    An answer box, where Google shows one, comes first.
    """
    hits = [_hit(result, "link", "snippet") for result in _results(answer, "organic")]
    box = answer.get("answerBox")
    if isinstance(box, dict):
        told = next((box[name] for name in ("answer", "snippet") if box.get(name)), "")
        first = _hit({**box, "snippet": told}, "link", "snippet")
        hits = [first, *hits] if told else hits
    return hits


_BRAVE = {"text_decorations": "false", "result_filter": "web"}
_TAG = re.compile(r"</?\w[^<>]*>")


def _read_brave(answer: Mapping[str, Any]) -> list[Hit]:
    """Brave's web search, `GET https://api.search.brave.com/res/v1/web/search` (v1).

    An answer without `web` found nothing. Descriptions are HTML.
    """
    web = answer.get("web")
    if web is None and answer.get("type") == "search":
        return []
    if not isinstance(web, dict):
        raise ValueError(f'an object with {sorted(answer)[:8]}; expected "web"')
    hits = []
    for result in _results(web, "results"):
        marked = {name: result.get(name) for name in ("title", "description")}
        texts = {n: html.unescape(_TAG.sub("", x)) for n, x in marked.items() if isinstance(x, str)}
        hits.append(_hit({**result, **texts}, "url", "description"))
    return hits


# What SearXNG would read at the beginning of a word: engines, languages, time limits.
_SEARXNG_SYNTAX = re.compile(r"(?<!\S)[!?:<]+")


def _searxng_request(url: str, query: str, topk: int) -> Request:
    plain = " ".join(_SEARXNG_SYNTAX.sub("", query).split())
    path = "" if url.endswith("/search") else "/search"
    return Request(url=url + path, params={"q": plain or "-", "format": "json"})


def _read_searxng(answer: Mapping[str, Any]) -> list[Hit]:
    """SearXNG's search API, `GET /search?format=json` (2025), which `settings.yml` must allow.

    Where it found nothing since the engines behind it gave no answer, it failed.
    """
    results = _results(answer, "results")
    silent = answer.get("unresponsive_engines")
    if not results and silent:
        raise ValueError(f"nothing, as its engines did not respond: {str(silent)[:200]}")
    return [_hit(result, "url", "content") for result in results]


def _results(fields: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """The list of results.

    Raises:
        ValueError: there is none.
    """
    results = fields.get(name)
    if not isinstance(results, list) or not all(isinstance(one, dict) for one in results):
        raise ValueError(f"an object with {sorted(fields)[:8]}; expected a list of {name!r}")
    return results


def _hit(result: Mapping[str, Any], address: str, text: str) -> Hit:
    """Reads one result; a field that is missing is empty.

    Raises:
        ValueError: a field is no text.
    """
    texts = []
    for name in (address, "title", text):
        value = result.get(name)
        if value is not None and not isinstance(value, str):
            raise ValueError(f"a {type(value).__name__} as {name!r} of a result; expected text")
        texts.append(" ".join(plain_text((value or "")[:MAX_TEXT]).split()))
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
        read=_read_serper,
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
        read=_read_brave,
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
        read=lambda answer: [_hit(one, "url", "content") for one in _results(answer, "results")],
    ),
    "searxng": Provider(
        url="",
        key_env="",
        max_chars=2_000,
        max_words=300,
        max_topk=100,
        headers=lambda key: {"Authorization": f"Bearer {key}"} if key else {},
        request=_searxng_request,
        read=_read_searxng,
    ),
}
"""Providers that a configuration can name."""

"""Web search through Serper, Brave, Tavily or a self-hosted SearXNG."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxrl.envs.base import ToolError
from jaxrl.envs.search.base import Document, DocumentSearch, Hit, parse_valid_hits
from jaxrl.utils.http_client import (
    HttpRequest,
    JsonClient,
    check_url,
    read_api_key,
    redact_url,
)
from jaxrl.utils.json_io import to_finite_float
from jaxrl.utils.text import replace_surrogates

MAX_FIELD_CHARS = 10_000
"""Maximum length of each field of a result, in characters."""


@dataclass(frozen=True, kw_only=True)
class Provider:
    """Request builder, response parser and limits of a search provider.

    Attributes:
        url: URL of the service; "" for a self-hosted service.
        key_env: Default environment variable for the API key; "" if no key is required.
        max_chars: Maximum length of a query in characters; longer queries are truncated.
        max_words: Maximum number of words in a query, applied before `max_chars`.
        max_topk: Maximum number of results per query.
        make_headers: Function that returns the HTTP headers for an API key.
        build_request: Function that builds the request from URL, query and number of results.
        extract_results: Function that extracts the raw results of a response, or raises a
            ValueError.
        parse_hit: Function that parses a raw result, or raises a ValueError.
    """

    url: str
    key_env: str
    max_chars: int
    max_words: int
    max_topk: int
    make_headers: Callable[[str], Mapping[str, str]]
    build_request: Callable[[str, str, int], HttpRequest]
    extract_results: Callable[[Mapping[str, Any]], list[Any]]
    parse_hit: Callable[[Any], Hit]

    def parse_response(self, response: Any) -> list[Hit]:
        """Parse a response into hits, skipping invalid results.

        Raises:
            ValueError: The response is invalid, or all of its results are invalid.
        """
        if not isinstance(response, dict):
            raise ValueError(f"a {type(response).__name__}; expected an object")
        return parse_valid_hits(self.extract_results(response), self.parse_hit)


class WebSearch(DocumentSearch):
    """Web search engine that sends one request per query to a provider, concurrently.

    Each result becomes a document with the URL as its id and the snippet as its text. Query
    operators (quotes, `site:`) are passed to the provider. Results change over time, so a run can
    be reproduced only from its recording. The API key is read from the environment at construction
    and never appears in configs or messages.
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
        """Validate the settings of `config.search.web` without sending a request.

        Args:
            provider: Name in `PROVIDERS`.
            url: URL of a self-hosted service; required for `searxng` only.
            topk: Number of results per query.
            key_env: Environment variable with the API key; "" for the provider's default.
            timeout_s: Timeout per request, in seconds.
            connections: Maximum number of requests in flight.
            max_response_mib: Maximum size of a response, in MiB.

        Raises:
            ValueError: A setting is invalid, or the environment variable is not set.
        """
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
        key = read_api_key("search.web.key_env", variable) if variable else ""
        self._client = JsonClient(
            timeout_s=timeout_s,
            connections=connections,
            max_mib=max_response_mib,
            headers=self._provider.make_headers(key),
        )

    def retrieve(self, queries: Sequence[str], topk: int) -> list[list[Hit] | ToolError]:
        """Return the provider's results for each query."""
        num_results, max_words = min(topk, self._provider.max_topk), self._provider.max_words
        search_queries = []
        for query in queries:
            words = replace_surrogates(query).replace("\0", " ").split()[:max_words]
            search_queries.append(" ".join(words)[: self._provider.max_chars])
        numbers = [i for i, query in enumerate(search_queries) if query]
        responses = self._client.send_all(
            [
                self._provider.build_request(self._url, search_queries[i], num_results)
                for i in numbers
            ]
        )
        hits: list[list[Hit] | ToolError] = [[] for _ in queries]  # blank queries have no hits
        for i, response in zip(numbers, responses, strict=True):
            hits[i] = self._parse_hits(response, topk)
        return hits

    def _parse_hits(self, response: Any, topk: int) -> list[Hit] | ToolError:
        if isinstance(response, ToolError):
            return response
        try:
            return self._provider.parse_response(response)[:topk]
        except ValueError as error:
            return ToolError(f"{redact_url(self._url)} gives {error}")


def _extract_serper_results(response: Mapping[str, Any]) -> list[Any]:
    """Extract the results of Serper's Google API, `POST https://google.serper.dev/search` (2025).

    A response without `organic` is an error if it has a `message`; otherwise, the query has no
    results. Google's answer box, if present, is the first result.
    """
    is_empty = response.get("organic") is None and "message" not in response
    results = [] if is_empty else _get_result_list(response, "organic")
    box = response.get("answerBox")
    if isinstance(box, dict):
        texts = [box.get(name) for name in ("answer", "snippet")]
        text = next((text for text in texts if text and isinstance(text, str)), "")
        results = [{**box, "snippet": text}, *results] if text else results
    return results


_BRAVE = {"text_decorations": "false", "result_filter": "web"}
_TAG = re.compile(r"</?\w[^<>]*>")


def _extract_brave_results(response: Mapping[str, Any]) -> list[Any]:
    """Extract the results of Brave, `GET https://api.search.brave.com/res/v1/web/search` (v1).

    A response of type `search` without `web` has no results.
    """
    web = response.get("web")
    if web is None and response.get("type") == "search":
        return []
    return _get_result_list(web if isinstance(web, dict) else response, "results")


def _parse_brave_hit(result: Any) -> Hit:
    """Parse a Brave result, whose title and description are HTML."""
    if isinstance(result, dict):
        html_fields = {name: result.get(name) for name in ("title", "description")}
        texts = {
            n: html.unescape(_TAG.sub("", x)) for n, x in html_fields.items() if isinstance(x, str)
        }
        result = {**result, **texts}
    return _parse_hit(result, "url", "description")


# Prefixes that SearXNG would interpret: engines, languages, time limits.
_SEARXNG_SYNTAX = re.compile(r"(?<!\S)[!?:<]+")


def _build_searxng_request(url: str, query: str, topk: int) -> HttpRequest:
    plain = " ".join(_SEARXNG_SYNTAX.sub("", query).split())
    path = "" if url.endswith("/search") else "/search"
    return HttpRequest(url=url + path, params={"q": plain or "-", "format": "json"})


def _extract_searxng_results(response: Mapping[str, Any]) -> list[Any]:
    """Extract the results of SearXNG, `GET /search?format=json` (2025).

    SearXNG's `settings.yml` must enable JSON. A response without results is an error if any of
    SearXNG's engines did not respond.
    """
    results = _get_result_list(response, "results")
    unresponsive_engines = response.get("unresponsive_engines")
    if not results and unresponsive_engines:
        raise ValueError(
            f"nothing, as its engines did not respond: {str(unresponsive_engines)[:200]}"
        )
    return results


def _get_result_list(fields: Mapping[str, Any], name: str) -> list[Any]:
    """Return the results listed in the field `name` of a response.

    Raises:
        ValueError: The field is missing or not a list.
    """
    results = fields.get(name)
    if not isinstance(results, list):
        raise ValueError(f"an object with {sorted(fields)[:8]}; expected a list of {name!r}")
    return results


def _parse_hit(result: Any, address: str, text: str) -> Hit:
    """Parse a result. Missing fields count as empty.

    Raises:
        ValueError: The result is not an object of texts, or title and text are empty.
    """
    names = (address, "title", text)
    values = [result.get(name) for name in names] if isinstance(result, dict) else [result]
    texts = [
        " ".join(replace_surrogates((value or "")[:MAX_FIELD_CHARS]).split())
        for value in values
        if value is None or isinstance(value, str)
    ]
    if len(texts) < len(names) or not any(texts[1:]):
        raise ValueError(f"a result {result!r:.200}; expected an object with texts in {names}")
    return Hit(Document(*texts), to_finite_float(result.get("score")))


PROVIDERS: Mapping[str, Provider] = {
    "serper": Provider(
        url="https://google.serper.dev/search",
        key_env="SERPER_API_KEY",
        max_chars=2_048,
        max_words=300,
        max_topk=100,
        make_headers=lambda key: {"X-API-KEY": key},
        build_request=lambda url, query, topk: HttpRequest(url=url, body={"q": query, "num": topk}),
        extract_results=_extract_serper_results,
        parse_hit=lambda result: _parse_hit(result, "link", "snippet"),
    ),
    "brave": Provider(
        url="https://api.search.brave.com/res/v1/web/search",
        key_env="BRAVE_API_KEY",
        max_chars=400,
        max_words=50,
        max_topk=20,
        make_headers=lambda key: {"X-Subscription-Token": key},
        build_request=lambda url, query, topk: HttpRequest(
            url=url,
            params={"q": query, "count": str(topk), **_BRAVE},
        ),
        extract_results=_extract_brave_results,
        parse_hit=_parse_brave_hit,
    ),
    "tavily": Provider(
        url="https://api.tavily.com/search",
        key_env="TAVILY_API_KEY",
        max_chars=400,
        max_words=400,
        max_topk=20,
        make_headers=lambda key: {"Authorization": f"Bearer {key}"},
        build_request=lambda url, query, topk: HttpRequest(
            url=url, body={"query": query, "max_results": topk, "search_depth": "basic"}
        ),
        # `POST https://api.tavily.com/search` with a bearer token (2025).
        extract_results=lambda response: _get_result_list(response, "results"),
        parse_hit=lambda result: _parse_hit(result, "url", "content"),
    ),
    "searxng": Provider(
        url="",
        key_env="",
        max_chars=2_000,
        max_words=300,
        max_topk=100,
        make_headers=lambda key: {"Authorization": f"Bearer {key}"} if key else {},
        build_request=_build_searxng_request,
        extract_results=_extract_searxng_results,
        parse_hit=lambda result: _parse_hit(result, "url", "content"),
    ),
}
"""Providers for `config.search.web.provider`."""

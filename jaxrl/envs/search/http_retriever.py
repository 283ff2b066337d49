"""Client for retrieval servers with the APIs of Search-R1 and FlashRAG."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from jaxrl.envs.base import ToolError
from jaxrl.envs.search.base import Document, DocumentSearch, Hit, parse_valid_hits, split_batches
from jaxrl.utils.http_client import (
    HttpRequest,
    JsonClient,
    check_url,
    read_api_key,
    redact_url,
)
from jaxrl.utils.json_io import to_finite_float
from jaxrl.utils.text import replace_surrogates

MAX_TEXT = 100_000
"""Maximum length of a document in characters, far more than an observation shows."""

PATHS = {"search_r1": "/retrieve", "flashrag": "/batch_search"}
"""Default URL path of each protocol."""


class HttpRetriever(DocumentSearch):
    """Retrieval client with many queries per request and several requests in flight.

    The protocol `search_r1` is `POST /retrieve` of Search-R1 and verl, with `queries`, `topk` and
    `return_scores`; the response is `{"result": [[..]]}`. The protocol `flashrag` is
    `POST /batch_search` of FlashRAG, ReCall and BAPO, with `query`, `top_n` and `return_score`; the
    response has one list of documents per query, optionally paired with their scores. If a
    `flashrag` URL ends in `/search`, each query is sent as a separate request.

    Scores and ids are optional. Malformed documents are skipped; a query with only malformed
    documents gets a `ToolError`. If a request fails, each of its queries gets a `ToolError`.
    """

    needs_health_check = True

    def __init__(
        self,
        url: str,
        *,
        protocol: str = "search_r1",
        topk: int = 3,
        key_env: str = "",
        timeout_s: float = 30.0,
        connections: int = 16,
        batch_size: int = 64,
        max_response_mib: float = 64.0,
    ) -> None:
        """Validate and store the settings. No request is sent yet.

        Args:
            url: URL such as `http://127.0.0.1:8000/retrieve`. The protocol sets the default path.
            protocol: `search_r1` or `flashrag`.
            topk: Maximum number of documents per query.
            key_env: Name of the environment variable that contains the bearer token; "" for none.
            timeout_s: Timeout of a request in seconds.
            connections: Maximum number of requests in flight.
            batch_size: Maximum number of queries per request.
            max_response_mib: Maximum size of a response in MiB.

        Raises:
            ValueError: A setting is invalid, or the environment variable is not set.
        """
        # Fail now rather than at the first search.
        check_url("search.http.url", url, keys_from="config.search.http.key_env")
        secret = read_api_key("search.http.key_env", key_env) if key_env else ""
        # A single-query endpoint of FlashRAG takes one query per request.
        self.topk, self._protocol = topk, protocol
        path = urlsplit(url).path
        self._url = url if path.strip("/") else url.rstrip("/") + PATHS[protocol]
        if protocol == "flashrag" and path.rstrip("/").endswith("/search"):
            self._protocol = "flashrag_single"
        self._batch_size = 1 if self._protocol == "flashrag_single" else max(batch_size, 1)
        self._client = JsonClient(
            timeout_s=timeout_s,
            connections=connections,
            max_mib=max_response_mib,
            headers={"Authorization": f"Bearer {secret}"} if secret else {},
        )

    def retrieve(self, queries: Sequence[str], topk: int) -> list[list[Hit] | ToolError]:
        """Return the server's documents for each query, or the query's error."""
        groups = [
            list(b) for b in split_batches(list(map(replace_surrogates, queries)), self._batch_size)
        ]
        requests = [
            HttpRequest(url=self._url, body=self._make_request_body(group, topk))
            for group in groups
        ]
        results: list[list[Hit] | ToolError] = []
        for group, response in zip(groups, self._client.send_all(requests), strict=True):
            if isinstance(response, ToolError):
                results += [response] * len(group)
                continue
            try:
                parts = split_response(response, self._protocol, len(group))
            except ValueError as error:
                results += [self._make_tool_error(error)] * len(group)
                continue
            results += [self._parse_result(part, topk) for part in parts]
        return results

    def _make_request_body(self, queries: list[str], topk: int) -> dict[str, Any]:
        # Always request scores: Search-R1's published server fails otherwise.
        if self._protocol == "search_r1":
            return {"queries": queries, "topk": topk, "return_scores": True}
        query = queries[0] if self._protocol == "flashrag_single" else queries
        return {"query": query, "top_n": topk, "return_score": True}

    def _parse_result(self, result: Any, topk: int) -> list[Hit] | ToolError:
        try:
            return parse_hits(result)[:topk]
        except ValueError as error:
            return self._make_tool_error(error)

    def _make_tool_error(self, error: ValueError) -> ToolError:
        return ToolError(f"{redact_url(self._url)} gives {error}")


def _make_value_error(value: Any, expected: str) -> ValueError:
    return ValueError(f"{value!r:.200}; expected {expected}")


def split_response(response: Any, protocol: str, num_queries: int) -> list[Any]:
    """Split a response into one result for each of `num_queries` queries.

    A result is a list of documents, or a tuple of documents and scores. Results are not validated.

    Raises:
        ValueError: The response has an unexpected format.
    """
    match protocol, response:
        case "flashrag_single", [list() as documents, list() as scores]:
            return [(documents, scores)]
        case "flashrag_single", _:
            return [response]
        case "search_r1", {"result": list() as results} if len(results) == num_queries:
            return results
        case "flashrag", [list() as documents, list() as scores] if len(documents) == num_queries:
            # A response to two queries is also a list of two lists, but they contain objects.
            kinds = {type(item) for item in (*documents, *scores)}
            if list in kinds and dict not in kinds and len(scores) == num_queries:
                return list(zip(documents, scores, strict=True))
    if protocol == "flashrag" and isinstance(response, list) and len(response) == num_queries:
        return response
    form = 'an object with "result", ' if protocol == "search_r1" else ""
    raise _make_value_error(response, f"{form}a list for each of {num_queries} queries")


def parse_hits(result: Any) -> list[Hit]:
    """Parse the documents of one query.

    Raises:
        ValueError: The result has an unexpected format, or no document can be parsed.
    """
    match result:
        case list():
            return parse_valid_hits(result, _parse_hit)
        case [list() as documents, list() as scores] if len(documents) == len(scores):
            pairs = zip(documents, scores, strict=True)
            items = ({"document": document, "score": score} for document, score in pairs)
            return parse_valid_hits(items, _parse_hit)
    raise _make_value_error(result, "a list of documents, or documents and as many scores")


def _parse_hit(item: Any) -> Hit:
    """Parse one document, with or without its score.

    Raises:
        ValueError: The item is not a document.
    """
    document, key, score = None, None, None
    match item:
        case {"document": dict() as fields} | (dict() as fields):
            key, score = fields.get("id"), item.get("score")
            match fields:
                case {"contents": str() as contents}:
                    document = Document.from_contents("", replace_surrogates(contents[:MAX_TEXT]))
                case {"text": str() as text, **rest} if isinstance(rest.get("title") or "", str):
                    title, text = rest.get("title") or "", text[:MAX_TEXT]
                    title, text = replace_surrogates(title), replace_surrogates(text)
                    document = Document("", title.strip(), text.strip())
    are_scalars = not any(isinstance(value, bool) for value in (key, score))
    are_scalars &= isinstance(key, str | int | float | None) and isinstance(
        score, int | float | None
    )
    if document is None or not (document.title or document.text) or not are_scalars:
        raise _make_value_error(item, 'a document with "contents", or with "title" and "text"')
    return Hit(
        document._replace(id="" if key is None else replace_surrogates(str(key))),
        to_finite_float(score),
    )

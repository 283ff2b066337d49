"""A retriever on a port: the servers that Search-R1 and FlashRAG have made common."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from jaxrl.envs.base import ToolError
from jaxrl.envs.search.base import Document, DocumentSearch, Hit, SkippedHits, batches
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

MAX_TEXT = 100_000
"""Characters of a document that are kept: far more than an observation holds."""


class HttpRetriever(DocumentSearch):
    """Asks a retrieval server, many queries in a request and several requests in flight.

    `search_r1` is Search-R1's `POST /retrieve` (also verl's): `queries`, `topk`, `return_scores`;
    answered with `{"result": [[..]]}`. `flashrag` is FlashRAG's `POST /batch_search` (also
    ReCall's and BAPO's): `query`, `top_n`, `return_score`; answered with a list for each query, or
    a pair of those and their scores. At an address that ends in `/search` each query is a request.

    Documents come with or without scores and ids. Those that cannot be read are skipped. A query
    without a readable document among those it got is a `ToolError`. A server that fails, or gives
    what is none of these formats, is a `ToolError` of the queries that were in that request.
    """

    asks_server = True

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
        log: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Asks nothing yet; arguments are the keys of `config.search.http`.

        Args:
            url: of the server, `http://127.0.0.1:8000/retrieve`; without a path that of the
                protocol is meant.
            protocol: `search_r1` or `flashrag`.
            topk: documents of an answer.
            key_env: the environment variable that holds a key, sent as a bearer's; "" for none.
            timeout_s: of a request.
            connections: requests in flight at most.
            batch_size: queries of a request at most.
            max_response_mib: MiB of an answer at most.
            log: Callback for warnings about documents that are skipped.

        Raises:
            ValueError: a setting is none of these, or the variable is not set.
        """
        check_url("search.http.url", url, keys_from="config.search.http.key_env")
        secret = key_of("search.http.key_env", key_env) if key_env else ""
        if protocol not in PATHS:
            raise ValueError(
                f"config.search.http.protocol is {protocol!r}; expected one of {', '.join(PATHS)}."
            )
        self.topk = topk
        path = urlsplit(url).path
        self._url = url if path.strip("/") else url.rstrip("/") + PATHS[protocol]
        is_single = protocol == "flashrag" and path.rstrip("/").rpartition("/")[2] == "search"
        self._batch_size = 1 if is_single else max(batch_size, 1)
        self._skipped = SkippedHits(shown_url(self._url), log)
        self._body, self._split = FORMATS["flashrag_single" if is_single else protocol]
        self._client = JsonClient(
            Bounds(timeout_s=timeout_s, connections=connections, max_mib=max_response_mib),
            headers={"Authorization": f"Bearer {secret}"} if secret else {},
        )

    def retrieve(self, queries: Sequence[str], topk: int) -> list[list[Hit] | ToolError]:
        """The server's documents for each query."""
        asked = list(batches([plain_text(query) for query in queries], self._batch_size))
        requests = [Request(url=self._url, body=self._body(list(batch), topk)) for batch in asked]
        results: list[list[Hit] | ToolError] = []
        for batch, answer in zip(asked, self._client.ask(requests), strict=True):
            if isinstance(answer, ToolError):
                results += [answer] * len(batch)
                continue
            try:
                parts = self._split(answer, len(batch))
            except ValueError as error:
                results += [self._error(error)] * len(batch)
                continue
            results += [self._hits(part, topk) for part in parts]
        return results

    def _hits(self, result: Any, topk: int) -> list[Hit] | ToolError:
        try:
            return read_hits(result, self._skipped)[:topk]
        except ValueError as error:
            return self._error(error)

    def _error(self, error: ValueError) -> ToolError:
        return ToolError(f"{shown_url(self._url)} gives {error}")


@dataclass(frozen=True)
class _Scored:
    """Documents of one query and their scores, which FlashRAG gives side by side."""

    documents: Any
    scores: Any


def _split_search_r1(answer: Any, count: int) -> list[Any]:
    if not isinstance(answer, dict) or "result" not in answer:
        raise ValueError(f'{_kind(answer)}; expected an object with "result"')
    return _counted(answer["result"], count, "result")


def _split_flashrag(answer: Any, count: int) -> list[Any]:
    # An answer to two queries is a list of two as well, but its lists hold objects, not lists.
    match answer:
        case [list() as documents, list() as scores] if len(documents) == count:
            kinds = {type(one) for one in (*documents, *scores)}
            if list in kinds and dict not in kinds:
                pairs = zip(documents, _counted(scores, count, "the scores"), strict=True)
                return [_Scored(*pair) for pair in pairs]
    return _counted(answer, count, "the answer")


def _split_single(answer: Any, count: int) -> list[Any]:
    is_pair = isinstance(answer, list) and [type(one) for one in answer] == [list, list]
    return [_Scored(*answer) if is_pair else answer]


def read_hits(result: Any, skipped: SkippedHits) -> list[Hit]:
    """Read the documents that one query got.

    Raises:
        ValueError: this is no list of documents, or none of them can be read.
    """
    if not isinstance(result, _Scored):
        return skipped.read(_list(result, "the result of a query"), _hit)
    documents = _list(result.documents, "the documents")
    scores = _list(result.scores, "the scores")
    if len(documents) != len(scores):
        raise ValueError(f"{len(documents)} documents and {len(scores)} scores of a query")
    pairs = zip(documents, scores, strict=True)
    return skipped.read(({"document": one, "score": score} for one, score in pairs), _hit)


def _hit(item: Any) -> Hit:
    """Reads one document, alone or with its score.

    Raises:
        ValueError: it is no document.
    """
    match item:
        case {"document": dict() as fields}:
            return Hit(_document(fields), _score(item.get("score")))
        case {"contents": _} | {"text": _}:
            return Hit(_document(item), _score(item.get("score")))
    raise ValueError(f'{_kind(item)} as a document; expected "contents", or "title" and "text"')


def _document(fields: Mapping[str, Any]) -> Document:
    match fields:
        case {"contents": str() as contents}:
            key, contents = fields.get("id", ""), plain_text(contents[:MAX_TEXT])
            document = Document.of_contents("", contents)
        case {"text": str() as text}:
            key, title = fields.get("id", ""), fields.get("title") or ""
            if not isinstance(title, str):
                raise ValueError(f"{_kind(title)} as a title; expected text")
            document = Document("", plain_text(title).strip(), plain_text(text[:MAX_TEXT]).strip())
        case _:
            raise ValueError(
                f"a document with {sorted(map(str, fields))[:8]}; expected text as its "
                '"contents", or as its "title" and "text"'
            )
    if not (document.title or document.text):
        raise ValueError("a blank document; expected text")
    if isinstance(key, bool) or not isinstance(key, str | int | float | None):
        raise ValueError(f"{_kind(key)} as an id; expected text or a number")
    return document._replace(id="" if key is None else plain_text(str(key)))


def _score(score: Any) -> float | None:
    if score is None:
        return None
    if isinstance(score, bool) or not isinstance(score, int | float):
        raise ValueError(f"{_kind(score)} as a score; expected a number")
    return number_of(score)


def _counted(items: Any, count: int, what: str) -> list[Any]:
    if len(lists := _list(items, what)) != count:
        raise ValueError(f"{what} of {len(lists)} lists for {count} queries")
    return lists


def _list(items: Any, what: str) -> list[Any]:
    if not isinstance(items, list):
        raise ValueError(f"{_kind(items)} as {what}; expected a list")
    return items


def _kind(value: Any) -> str:
    """Describes a value that arrived, for a message."""
    if isinstance(value, dict):
        return f"an object with {sorted(map(str, value))[:8]}"
    return f"{type(value).__name__} {str(value)[:80]!r}"


PATHS = {"search_r1": "/retrieve", "flashrag": "/batch_search"}
"""Path at which a server of each protocol answers."""

Body, Split = Callable[[list[str], int], dict[str, Any]], Callable[[Any, int], list[Any]]

FORMATS: Mapping[str, tuple[Body, Split]] = {
    # With scores always: the published server fails without, and a copy of it pairs two wrongly.
    "search_r1": (
        lambda queries, topk: {"queries": queries, "topk": topk, "return_scores": True},
        _split_search_r1,
    ),
    "flashrag": (
        lambda queries, topk: {"query": queries, "top_n": topk, "return_score": True},
        _split_flashrag,
    ),
    "flashrag_single": (
        lambda queries, topk: {"query": queries[0], "top_n": topk, "return_score": True},
        _split_single,
    ),
}
"""The body of a request for queries, and the split of its answer into a result for each query."""

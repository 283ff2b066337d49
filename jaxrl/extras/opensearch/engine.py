"""OpenSearch and Elasticsearch, for a corpus that outgrows a machine."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl.envs.base import ToolError
from jaxrl.envs.json_http import (
    MAY_PASS,
    Bounds,
    JsonClient,
    Request,
    check_url,
    key_of,
    plain_text,
    shown_url,
)
from jaxrl.envs.json_text import number_of
from jaxrl.envs.retrieval import Document, DocumentSearch, Hit, batches

MAX_TEXT = 100_000
"""Characters of a field that are kept: far more than an observation holds."""

MAX_WORDS = 500
"""Different words of a query that are asked for; a cluster refuses queries of too many clauses."""

MAX_RESPONSE_MIB = 256
"""Limit of an answer; a cluster gives the whole of each document."""

AUTHS = {"basic": "Basic", "api_key": "ApiKey", "bearer": "Bearer"}
"""Ways to say who asks, and the schemes of HTTP that they are."""


class OpenSearchRetriever(DocumentSearch):
    """Asks an index of OpenSearch or Elasticsearch by `POST /_msearch`, many queries in a request.

    A query is a `multi_match`, which has no syntax, over the title, which counts twice, and the
    text, taken for one field (`cross_fields`). The format is that of OpenSearch 1 to 3 and
    Elasticsearch 7 to 9. An answer to which not all shards came is a failure.
    """

    asks_server = True

    def __init__(
        self,
        url: str,
        index: str,
        *,
        fields: Sequence[str] = ("title", "text"),
        topk: int = 3,
        auth: str = "",
        timeout_s: float = 30.0,
        connections: int = 8,
        batch_size: int = 64,
    ) -> None:
        """Asks nothing yet; arguments are the keys of `config.search.opensearch`.

        Args:
            url: of the cluster, `https://search:9200`.
            index: its name, an alias, or a pattern.
            fields: of a document, its title and its text; or its text alone.
            topk: documents of an answer.
            auth: "" for none; `basic:VARIABLE`, `api_key:VARIABLE` or `bearer:VARIABLE`, where the
                environment variable holds `user:password`, the encoded key, or the token.
            timeout_s: of a request.
            connections: requests in flight at most.
            batch_size: queries of a request at most.

        Raises:
            ValueError: a setting is none of these, or the variable is not set.
        """
        check_url("search.opensearch.url", url)
        if not index or set(index) & set('/?#" \\'):
            raise ValueError(
                f"config.search.opensearch.index is {index!r}; expected the name of an index."
            )
        if len(fields) not in (1, 2) or not all(fields):
            raise ValueError(
                f"config.search.opensearch.fields is {tuple(fields)!r}; expected the fields of "
                "title and text, as ('title', 'text'), or that of the text alone."
            )
        self.topk = topk
        self._url, self._index = f"{url.rstrip('/')}/_msearch", index
        self._title, self._text = fields[0] if len(fields) == 2 else "", fields[-1]
        self._batch_size = batch_size
        bounds = Bounds(timeout_s=timeout_s, connections=connections, max_mib=MAX_RESPONSE_MIB)
        headers = {}
        if auth:
            scheme, _, variable = auth.partition(":")
            if scheme not in AUTHS or not variable:
                raise ValueError(
                    "config.search.opensearch.auth is no '' and none of "
                    f"{', '.join(f'{one}:VARIABLE' for one in AUTHS)}, with the name of an "
                    "environment variable."
                )
            secret = key_of("search.opensearch.auth", variable)
            if scheme == "basic":
                secret = base64.b64encode(secret.encode()).decode()
            headers["Authorization"] = f"{AUTHS[scheme]} {secret}"
        self._client = JsonClient(bounds, headers=headers)

    def retrieve(self, queries: Sequence[str], topk: int) -> list[list[Hit] | ToolError]:
        """The documents of the index for each query."""
        asked, requests = list(batches(queries, self._batch_size)), []
        for batch in asked:
            lines: list[dict[str, Any]] = []
            for query in batch:
                words = list(dict.fromkeys(plain_text(query).split()))[:MAX_WORDS]
                match = {
                    "query": " ".join(words)[:MAX_TEXT],
                    "fields": [f"{self._title}^2", self._text] if self._title else [self._text],
                    "type": "cross_fields",
                }
                wanted = [self._title, self._text] if self._title else [self._text]
                search = {"query": {"multi_match": match}, "size": topk, "_source": wanted}
                lines += [{"index": self._index}, search]
            body = "".join(json.dumps(line) + "\n" for line in lines).encode()
            headers = {"Content-Type": "application/x-ndjson"}
            requests.append(Request(url=self._url, body=body, headers=headers))
        hits: list[list[Hit] | ToolError] = []
        for batch, answer in zip(asked, self._client.ask(requests), strict=True):
            hits += self._hits(answer, len(batch))
        return hits

    def _hits(self, answer: Any, count: int) -> Sequence[list[Hit] | ToolError]:
        if isinstance(answer, ToolError):
            return [answer] * count
        responses = answer.get("responses") if isinstance(answer, dict) else None
        if not isinstance(responses, list) or len(responses) != count:
            what = "no list" if not isinstance(responses, list) else f"{len(responses)}"
            return [self._error(f"{what} of responses to {count} queries")] * count
        return [self._read(response) for response in responses]

    def _read(self, response: Any) -> list[Hit] | ToolError:
        """The hits of one response, or the error in it."""
        match response:
            case {"error": error, **rest}:
                status = rest.get("status", 500)
                is_permanent = isinstance(status, int) and status < 500 and status not in MAY_PASS
                if isinstance(error, dict):
                    error = f"{error.get('type')}: {error.get('reason')}"
                return self._error(f"an error {status}: {str(error)[:300]}", is_permanent)
            case {"timed_out": True}:
                return self._error("what it found until its own time limit")
            case {"_shards": {"failed": int() as failed}} if failed:
                return self._error(f"an answer without {failed} of its shards")
            case {"hits": {"hits": list() as hits}}:
                try:
                    return [self._hit(hit) for hit in hits]
                except ValueError as error:
                    return self._error(str(error))
        kind = sorted(response)[:8] if isinstance(response, dict) else type(response).__name__
        return self._error(f'a response with {kind}; expected "hits"')

    def _hit(self, hit: Any) -> Hit:
        """Reads one document.

        Raises:
            ValueError: it has no text, or something else is wrong with it.
        """
        match hit:
            case {"_id": str() as key, "_source": dict() as source}:
                title = _field(source, self._title, key) if self._title else ""
                text = _field(source, self._text, key)
                return Hit(Document(key, title, text), number_of(hit.get("_score")))
        kind = sorted(hit)[:8] if isinstance(hit, dict) else type(hit).__name__
        raise ValueError(f'a hit with {kind}; expected "_id" and "_source"')

    def _error(self, what: str, is_permanent: bool = False) -> ToolError:
        return ToolError(f"{shown_url(self._url)} gives {what}", is_permanent=is_permanent)


def _field(source: Mapping[str, Any], name: str, key: str) -> str:
    """The text of a field, which may lie in an object, as `page.title`; "" where it is null.

    Raises:
        ValueError: there is no such field, or it is no text.
    """
    value: Any = source.get(name, source)
    if value is source:
        for part in name.split("."):
            if not isinstance(value, dict) or part not in value:
                raise ValueError(
                    f"the document {key!r} with {sorted(source)[:8]}; expected the field {name!r}, "
                    "which config.search.opensearch.fields names"
                )
            value = value[part]
    if value is not None and not isinstance(value, str):
        raise ValueError(
            f"a {type(value).__name__} in the field {name!r} of {key!r}; expected text"
        )
    return plain_text((value or "")[:MAX_TEXT]).strip()

"""Custom search engine for an index of OpenSearch or Elasticsearch.

    config.search.engine = "examples.opensearch_engine.OpenSearch"
    config.search.settings = {"url": "https://search:9200", "index": "wiki"}

The queries of a step are sent to `POST /_msearch`, many per request. Each is a `multi_match`, which
has no query syntax, over the title (weight 2) and the text. The format is that of OpenSearch 1 to 3
and Elasticsearch 7 to 9. It is tested against a small server, not against a cluster.
"""

import base64
import json
from collections.abc import Sequence
from typing import Any

from jaxrl.envs.base import ToolError
from jaxrl.envs.search.base import Document, DocumentSearch, Hit, split_batches
from jaxrl.utils.http_client import (
    HttpRequest,
    JsonClient,
    check_url,
    read_api_key,
)
from jaxrl.utils.text import replace_surrogates

MAX_WORDS = 500  # per query; a cluster rejects queries with too many clauses
PERMANENT = (400, 401, 403, 404)  # statuses for which a retry would not help


class OpenSearch(DocumentSearch):
    """Search engine for an index whose documents have a title and a text."""

    needs_health_check = True

    def __init__(
        self,
        *,
        url: str,
        index: str,
        fields: Sequence[str] = ("title", "text"),
        topk: int = 3,
        password_env: str = "",
        timeout_s: float = 30.0,
        batch_size: int = 64,
    ) -> None:
        """Store the settings without sending a request.

        Args:
            url: URL of the cluster.
            index: Name of the index or of an alias.
            fields: Names of the fields with the title and the text.
            topk: Number of documents per query.
            password_env: Environment variable that holds `user:password`; "" for none.
            timeout_s: Timeout per request, in seconds.
            batch_size: Maximum number of queries per request.
        """
        check_url("search.settings", url)
        headers = {}
        if password_env:
            password = read_api_key("search.settings", password_env)
            headers["Authorization"] = f"Basic {base64.b64encode(password.encode()).decode()}"
        self.topk = topk
        self._url, self._index = f"{url.rstrip('/')}/_msearch", index
        self._title, self._text = fields
        self._batch_size = batch_size
        self._client = JsonClient(timeout_s=timeout_s, connections=8, max_mib=256, headers=headers)

    def retrieve(self, queries: Sequence[str], topk: int) -> list[list[Hit] | ToolError]:
        """Return the documents for each query, or an error."""
        groups = list(split_batches(queries, self._batch_size))
        batch_responses = self._client.send_all(
            [self._build_request(group, topk) for group in groups]
        )
        results: list[list[Hit] | ToolError] = []
        for group, batch_response in zip(groups, batch_responses, strict=True):
            if isinstance(batch_response, ToolError):
                results += [batch_response] * len(group)
            else:
                results += [self._parse_hits(response) for response in batch_response["responses"]]
        return results

    def _build_request(self, queries: Sequence[str], topk: int) -> HttpRequest:
        lines: list[dict[str, Any]] = []
        for query in queries:
            words = list(dict.fromkeys(replace_surrogates(query).split()))[:MAX_WORDS]
            match = {"query": " ".join(words), "fields": [f"{self._title}^2", self._text]}
            search = {"query": {"multi_match": match | {"type": "cross_fields"}}, "size": topk}
            lines += [{"index": self._index}, search | {"_source": [self._title, self._text]}]
        body = "".join(json.dumps(line) + "\n" for line in lines).encode()
        return HttpRequest(
            url=self._url, body=body, headers={"Content-Type": "application/x-ndjson"}
        )

    def _parse_hits(self, response: dict[str, Any]) -> list[Hit] | ToolError:
        if "error" in response:
            status = response.get("status")
            text = f"the cluster responds with status {status}: {str(response['error'])[:300]}"
            return ToolError(text, is_permanent=status in PERMANENT)
        if response.get("timed_out") or response.get("_shards", {}).get("failed"):
            return ToolError("the cluster returned only part of the results")
        hits = []
        for hit in response["hits"]["hits"]:
            title, text = (
                replace_surrogates(hit["_source"][name] or "") for name in (self._title, self._text)
            )
            hits.append(Hit(Document(hit["_id"], title.strip(), text.strip()), hit.get("_score")))
        return hits

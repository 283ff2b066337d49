"""Search engine interface: query in, observation text out."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

from jaxrl.envs.base import NO_INFORMATION, ToolError
from jaxrl.envs.tools.base import Tool


class SearchEngine(Tool):
    """Base class of search engines. `run` returns the results for a query as text."""

    name = "search"
    blank = NO_INFORMATION
    argument = "query"
    description = "Searches a collection of documents and returns passages that fit a query."

    needs_health_check: ClassVar[bool] = False
    """True if a run sends a test query at startup to check that the server responds."""


class EmptySearch(SearchEngine):
    """Control engine that finds nothing, to measure the model without search."""

    def run(self, query: str, /) -> str:
        """Return `NO_INFORMATION`."""
        return NO_INFORMATION


class Document(NamedTuple):
    """Passage of a corpus. Documents with equal scores are ordered by these fields."""

    id: str
    title: str
    text: str

    @classmethod
    def from_contents(cls, id: str, contents: str) -> Document:
        r"""Parse Search-R1's `contents`, `"title"\ntext`."""
        title, _, text = contents.partition("\n")
        title = " ".join(title.split())
        is_quoted = len(title) > 1 and title[0] == title[-1] == '"'
        return cls(id, title[1:-1].strip() if is_quoted else title.strip('"'), text.strip())

    @property
    def contents(self) -> str:
        r"""Title and text in Search-R1's format, `"title"\ntext`."""
        return f'"{self.title}"\n{self.text}'


class Hit(NamedTuple):
    """Document and its score.

    Attributes:
        document: Retrieved document. Its id is "" if the server sends none.
        score: Relevance within the results of a query; higher is better. None if not available.
    """

    document: Document
    score: float | None


class Documents(Protocol):
    """Sequence of a corpus's documents."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Document: ...


def render_documents(documents: Iterable[Document]) -> str:
    """Render documents in Search-R1's format, one line `Doc i(Title: ..) text` each."""
    lines = [f"Doc {i}(Title: {d.title}) {d.text}" for i, d in enumerate(documents, start=1)]
    return "\n".join(lines) or NO_INFORMATION


class DocumentSearch(SearchEngine):
    """Base class of engines that return documents. Subclasses implement `retrieve`."""

    topk: int
    """Maximum number of documents per query."""

    documents: Documents | None = None
    """All documents in corpus order, or None if they are not available."""

    @abc.abstractmethod
    def retrieve(self, queries: Sequence[str], topk: int) -> Sequence[list[Hit] | ToolError]:
        """Return at most `topk` hits per query, best first, or the query's error.

        Called from several threads.

        Raises:
            ToolError: The search failed for all queries.
        """

    def run(self, query: str, /) -> str:
        """Return the rendered documents for one query."""
        [result] = self.run_batch([query])
        if isinstance(result, ToolError):
            raise result
        return result

    def run_batch(self, queries: Sequence[str], /) -> list[str | ToolError]:
        """Return the rendered documents for each query, or the query's error."""
        return [
            hits if isinstance(hits, ToolError) else render_documents(hit.document for hit in hits)
            for hits in self.retrieve(queries, self.topk)
        ]


def split_batches(queries: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    """Split queries into batches of at most `size`."""
    return (queries[start : start + size] for start in range(0, len(queries), size))


def parse_valid_hits(items: Iterable[Any], parse_hit: Callable[[Any], Hit]) -> list[Hit]:
    """Parse a server's hits for one query, skipping those for which `parse_hit` raises ValueError.

    Raises:
        ValueError: There are hits, but none can be parsed.
    """
    hits: list[Hit] = []
    errors: list[ValueError] = []
    for item in items:
        try:
            hits.append(parse_hit(item))
        except ValueError as error:
            errors.append(error)
    if errors and not hits:
        raise errors[0]
    return hits


Progress = Callable[[int], None]
"""Callback that receives the number of documents indexed so far."""


ENGINES: Mapping[str, str | type[SearchEngine]] = {
    "local": "jaxrl.envs.search.bm25.LocalSearch",
    "http": "jaxrl.envs.search.http_retriever.HttpRetriever",
    "dense": "jaxrl.extras.dense.engine.DenseSearch",
    "hybrid": "jaxrl.extras.dense.hybrid.HybridSearch",
    "web": "jaxrl.extras.web_search.engine.WebSearch",
    "mock": "jaxrl.envs.search.mock.MockSearch",
    "empty": EmptySearch,
}
"""Search engines by config name."""

ENGINE_ALIASES: Mapping[str, Mapping[str, str]] = {
    "google": {"search.engine": "web", "search.web.provider": "serper"},
}
"""Keys and values for each alias of an engine."""

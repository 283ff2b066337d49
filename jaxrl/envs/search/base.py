"""Search engines: a query in, the text of an observation out.

Those with documents give them too, with ids and scores. The mock and the empty engine serve tests
and the control evaluation.
"""

from __future__ import annotations

import abc
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

from jaxrl.envs.base import NO_INFORMATION, ToolError
from jaxrl.envs.tools.base import Tool


class SearchEngine(Tool):
    """The tool that `<search>` calls: `run` gives the text found for one query."""

    name = "search"
    blank = NO_INFORMATION
    argument = "query"
    description = "Searches a collection of documents and returns passages that fit a query."

    asks_server: ClassVar[bool] = False
    """True where a run asks once at its start, to see whether there is somebody who answers."""


class KeywordSearch(SearchEngine):
    """A mock: the text of the first keyword that occurs in the query, case aside."""

    def __init__(self, mapping: Mapping[str, str]) -> None:
        self._texts = {keyword.lower(): text for keyword, text in mapping.items()}

    def run(self, query: str, /) -> str:
        """The text of the first keyword, in the mapping's order, that `query` contains."""
        lowered = query.lower()
        texts = (text for keyword, text in self._texts.items() if keyword in lowered)
        return next(texts, f"{NO_INFORMATION} for: {query}")


class EmptySearch(SearchEngine):
    """Finds nothing, ever: a control, whose score is what the policy knew without searching."""

    def run(self, query: str, /) -> str:
        """Always `NO_INFORMATION`."""
        return NO_INFORMATION


class Document(NamedTuple):
    """One passage of a corpus. Equal scores are ranked in this order of fields."""

    id: str
    title: str
    text: str

    @classmethod
    def of_contents(cls, id: str, contents: str) -> Document:
        r"""Splits Search-R1's `contents`, `"title"\ntext`."""
        title, _, text = contents.partition("\n")
        title = " ".join(title.split())
        is_quoted = len(title) > 1 and title[0] == title[-1] == '"'
        return cls(id, title[1:-1].strip() if is_quoted else title.strip('"'), text.strip())

    @property
    def contents(self) -> str:
        r"""Title and text in one, as Search-R1 has them: `"title"\ntext`."""
        return f'"{self.title}"\n{self.text}'


class Hit(NamedTuple):
    """A document that was found, and how well it fits the query.

    Attributes:
        document: the id is "" where a server tells none.
        score: higher is better, and compares within one answer only; None where it is not told.
    """

    document: Document
    score: float | None


class Documents(Protocol):
    """The documents of a corpus by their places in it, as a list of them."""

    def __len__(self) -> int:
        """Number of documents."""
        ...

    def __getitem__(self, place: int, /) -> Document:
        """The document at a place, from 0."""
        ...


def render_documents(documents: Iterable[Document]) -> str:
    """Search-R1's rendering, one `Doc i(Title: ..) text` a line; `NO_INFORMATION` for none."""
    lines = [f"Doc {i}(Title: {d.title}) {d.text}" for i, d in enumerate(documents, start=1)]
    return "\n".join(lines) or NO_INFORMATION


class DocumentSearch(SearchEngine):
    """An engine that finds documents: `retrieve` gives them, `run` and `run_batch` their text."""

    topk: int
    """Documents that an answer shows at most."""

    documents: Documents | None = None
    """All that it searches, in the order of the corpus; None where they are not at hand."""

    @abc.abstractmethod
    def retrieve(self, queries: Sequence[str], topk: int) -> Sequence[list[Hit] | ToolError]:
        """The best documents for each query, best first, at most `topk` (1 or more) of each.

        In place of documents stands why there are none; called from several threads at once.

        Raises:
            ToolError: the search failed, and for which query is not known.
        """

    def run(self, query: str, /) -> str:
        """The best documents for a query, rendered."""
        [result] = self.run_batch([query])
        if isinstance(result, ToolError):
            raise result
        return result

    def run_batch(self, queries: Sequence[str], /) -> list[str | ToolError]:
        """The best documents for each query, rendered, or why there are none."""
        results = self.retrieve(queries, self.topk)
        return [
            one if isinstance(one, ToolError) else render_documents(hit.document for hit in one)
            for one in results
        ]


def batches(queries: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    """The queries in their order, at most `size` together."""
    return (queries[start : start + size] for start in range(0, len(queries), size))


class SkippedHits:
    """Count of the hits that a server gave and that cannot be read.

    A line of log reports the first one, and then each time the count has one more digit.
    """

    def __init__(self, server: str, log: Callable[[str], None]) -> None:
        """Start at zero.

        Args:
            server: Name of the server in messages.
            log: Callback for lines of log.
        """
        self.count = 0
        self._server, self._log = server, log
        self._lock = threading.Lock()

    def read(self, items: Iterable[Any], read_one: Callable[[Any], Hit]) -> list[Hit]:
        """Read the hits of one query and skip those that cannot be read.

        Args:
            items: Hits as they arrived.
            read_one: Function of one of them, which raises ValueError if it cannot be read.

        Raises:
            ValueError: no hit can be read, although there are some.
        """
        hits: list[Hit] = []
        errors: list[ValueError] = []
        for item in items:
            try:
                hits.append(read_one(item))
            except ValueError as error:
                errors.append(error)
        if errors and not hits:
            raise errors[0]
        with self._lock:
            before, self.count = self.count, self.count + len(errors)
        if errors and (not before or len(str(self.count)) > len(str(before))):
            self._log(
                f"warning: {self._server} gives {errors[-1]}. Hits that cannot be read are "
                f"skipped ({self.count:,} so far)"
            )
        return hits


Progress = Callable[[int], None]
"""Callback that is told how many documents of an index are done, while it is built."""


ENGINES: Mapping[str, str | type[SearchEngine]] = {
    "local": "jaxrl.envs.search.bm25.LocalSearch",
    "http": "jaxrl.envs.search.http_retriever.HttpRetriever",
    "dense": "jaxrl.extras.dense.engine.DenseSearch",
    "hybrid": "jaxrl.extras.dense.hybrid.HybridSearch",
    "web": "jaxrl.extras.web_search.engine.WebSearch",
    "empty": EmptySearch,
}
"""Search engines that a configuration can name; text says where one is."""

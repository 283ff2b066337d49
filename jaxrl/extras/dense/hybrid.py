"""Hybrid search: BM25 and dense retrieval, fused by reciprocal rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from jaxrl.envs.base import ToolError
from jaxrl.envs.search.base import Document, DocumentSearch, Hit, Progress
from jaxrl.envs.search.bm25 import LocalSearch
from jaxrl.extras.dense.engine import DenseSearch


def fuse_rankings(rankings: Sequence[Sequence[Hit]], *, k: float, topk: int) -> list[Hit]:
    """Fuse rankings by scoring each document with the sum of 1 / (k + rank) over rankings.

    Reciprocal rank fusion, equation 1 of Cormack, Clarke and Büttcher, SIGIR 2009
    (https://doi.org/10.1145/1571941.1572114), which uses k = 60. Ranks start at 1. Documents are
    identified by id. Sums are exact, and ties are ordered as in `LocalSearch`.

    Args:
        rankings: Rankings for one query, each best first.
        k: Constant of the formula. Larger values reduce the differences between ranks.
        topk: Maximum number of documents in the result.
    """
    documents: dict[str, Document] = {}
    scores: dict[str, Fraction] = {}
    exact_k = Fraction(k)
    for ranking in rankings:
        for rank, (document, _) in enumerate(ranking, start=1):
            documents.setdefault(document.id, document)
            scores[document.id] = scores.get(document.id, Fraction(0)) + 1 / (exact_k + rank)
    best = sorted(scores, key=lambda document_id: (-scores[document_id], documents[document_id]))[
        :topk
    ]
    return [Hit(documents[document_id], float(scores[document_id])) for document_id in best]


class HybridSearch(DocumentSearch):
    """Search engine that fuses BM25 and dense retrieval over the same corpus."""

    def __init__(
        self,
        *,
        local: Mapping[str, Any],
        dense: Mapping[str, Any],
        topk: int = 3,
        k: float = 60.0,
        candidates: int = 100,
        progress: Progress = lambda _: None,
    ) -> None:
        """Open both indexes, building them if necessary.

        Args:
            local: Settings of `LocalSearch`, except for the corpus, which is that of `dense`.
            dense: Settings of `DenseSearch`.
            topk: Maximum number of documents in a result.
            k: Constant of reciprocal rank fusion; see `fuse_rankings`.
            candidates: Number of documents to fuse from each engine, at least `topk`.
            progress: Callback that receives the number of documents in the index being built.

        Raises:
            FileNotFoundError, PermissionError, ValueError: See `LocalSearch` and `DenseSearch`.
        """
        self.topk, self._k, self._candidates = topk, k, candidates
        # Open the dense index first, so that errors name its corpus.
        dense_search = DenseSearch(**dense, progress=progress)
        bm25 = LocalSearch(**{**local, "corpus": dense["corpus"]}, progress=progress)
        self._engines: tuple[DocumentSearch, ...] = (bm25, dense_search)
        self.documents = dense_search.documents

    def retrieve(self, queries: Sequence[str], topk: int) -> list[list[Hit] | ToolError]:
        """Return the `topk` documents with the highest fused scores for each query."""
        num_candidates = max(topk, self._candidates)
        rankings = [engine.retrieve(queries, num_candidates) for engine in self._engines]
        return [
            fuse_rankings(query_rankings, k=self._k, topk=topk)
            for query_rankings in zip(*rankings, strict=True)
        ]

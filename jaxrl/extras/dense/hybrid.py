"""Fusion of several engines: documents that each of them ranks high come first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from jaxrl.envs.base import ToolError
from jaxrl.envs.search.base import Document, DocumentSearch, Hit, Progress
from jaxrl.envs.search.bm25 import LocalSearch
from jaxrl.extras.dense.engine import DenseSearch


def fuse(rankings: Sequence[Sequence[Hit]], *, k: float, topk: int) -> list[Hit]:
    """Reciprocal rank fusion: a document scores the sum of 1 / (k + rank) over rankings with it.

    Cormack, Clarke and Büttcher, Reciprocal Rank Fusion outperforms Condorcet and individual Rank
    Learning Methods, SIGIR 2009 (https://doi.org/10.1145/1571941.1572114), equation 1, with k = 60
    there. Ranks begin at 1. Documents are the same where their ids are. Sums are exact, so that
    what is equal is so whatever rounding would make of it; equal scores are broken by id, as in
    `LocalSearch`.

    Args:
        rankings: of one query, each best first.
        k: the larger, the less the first places count before those behind them.
        topk: documents of the result, at most.
    """
    documents: dict[str, Document] = {}
    scores: dict[str, Fraction] = {}
    exact_k = Fraction(k)
    for ranking in rankings:
        for rank, (document, _) in enumerate(ranking, start=1):
            documents.setdefault(document.id, document)
            scores[document.id] = scores.get(document.id, Fraction(0)) + 1 / (exact_k + rank)
    best = sorted(scores, key=lambda id: (-scores[id], documents[id]))[:topk]
    return [Hit(documents[id], float(scores[id])) for id in best]


class HybridSearch(DocumentSearch):
    """BM25 and dense retrieval over one corpus, fused by reciprocal rank."""

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
        """Opens both indexes, building what is missing.

        Args:
            local: settings of `LocalSearch`; its corpus is that of `dense`.
            dense: settings of `DenseSearch`.
            topk: documents that an answer shows at most.
            k: of `fuse`.
            candidates: documents of each engine that are fused, at least `topk`.
            progress: is told how many documents are done, of either index.

        Raises:
            FileNotFoundError, PermissionError, ValueError: as the engines.
        """
        self.topk, self._k, self._candidates = topk, k, candidates
        vectors = DenseSearch(**dense, progress=progress)  # whose corpus it is, so it looks first
        words = LocalSearch(**{**local, "corpus": dense["corpus"]}, progress=progress)
        self._engines: tuple[DocumentSearch, ...] = (words, vectors)
        self.documents = vectors.documents

    def retrieve(self, queries: Sequence[str], topk: int) -> list[list[Hit] | ToolError]:
        """The documents that are high in either ranking, higher in both."""
        count = max(topk, self._candidates)
        rankings = [engine.retrieve(queries, count) for engine in self._engines]
        return [fuse(each, k=self._k, topk=topk) for each in zip(*rankings, strict=True)]

"""Baseline search engine that returns random documents."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence

from jaxrl.envs.search.base import DocumentSearch, Hit


class RandomSearch(DocumentSearch):
    """Search engine that returns random documents, determined by the query and a seed."""

    def __init__(self, engine: DocumentSearch, *, seed: int) -> None:
        """Copy the settings of `engine`, which must provide `documents`."""
        assert engine.documents is not None
        self.topk, self.blank = engine.topk, engine.blank
        self._documents, self._seed = engine.documents, seed

    def retrieve(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """Sample `topk` distinct documents for each query."""
        size, results = len(self._documents), []
        for query in queries:
            indices: dict[int, None] = {}  # an ordered set
            for counter in itertools.count():
                if len(indices) == min(topk, size):
                    break
                data = f"{self._seed} {counter} {query}".encode("utf-8", errors="surrogatepass")
                indices[int.from_bytes(hashlib.sha256(data).digest()) % size] = None
            results.append([Hit(self._documents[index], None) for index in indices])
        return results

"""The control engine that finds documents drawn at random."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence

from jaxrl.envs.search.base import DocumentSearch, Hit


class RandomSearch(DocumentSearch):
    """Draws documents at random: a control, whose score was not learnt from results.

    The same query finds the same documents, each as likely as any other, whatever was asked before.
    """

    def __init__(self, engine: DocumentSearch, *, seed: int) -> None:
        """Takes the place of an engine.

        Args:
            engine: whose documents are drawn, as many as it shows.
            seed: with the query, what the draws depend on.

        Raises:
            ValueError: its documents are not at hand.
        """
        if engine.documents is None:
            raise ValueError(f"{type(engine).__name__} has no documents at hand to draw from.")
        self.topk, self.blank = engine.topk, engine.blank
        self._documents, self._seed = engine.documents, seed

    def retrieve(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """Documents drawn for each query, all different."""
        size, results = len(self._documents), []
        for query in queries:
            drawn: dict[int, None] = {}  # places, in the order in which they are drawn
            for number in itertools.count():
                if len(drawn) == min(topk, size):
                    break
                data = f"{self._seed} {number} {query}".encode("utf-8", errors="surrogatepass")
                drawn[int.from_bytes(hashlib.sha256(data).digest()) % size] = None
            results.append([Hit(self._documents[place], None) for place in drawn])
        return results

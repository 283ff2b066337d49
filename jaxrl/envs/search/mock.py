"""Mock search engine with fixed text for each keyword."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from jaxrl.envs.base import NO_INFORMATION
from jaxrl.envs.search.base import SearchEngine
from jaxrl.utils.json_io import read_object


class MockSearch(SearchEngine):
    """Search engine that returns a fixed text, on its own line, for each keyword in the query."""

    def __init__(self, *, documents: Mapping[str, str], path: str = "") -> None:
        """Store the text of each keyword. Either `documents` or `path` must be non-empty.

        Args:
            documents: Text by keyword.
            path: JSON file with an object of texts by keyword.

        Raises:
            OSError, ValueError: The file is missing or malformed, or the arguments conflict.
        """
        items = read_object(Path(path)) if path else documents
        is_valid = all(word.strip() and isinstance(text, str) for word, text in items.items())
        if bool(documents) == bool(path) or not is_valid:
            raise ValueError(
                f"config.search.mock.documents is {dict(documents)!r:.80} and "
                f"config.search.mock.path is {path!r}; set exactly one of them, with a text for "
                "each keyword, which must not be blank."
            )
        self._texts = {keyword.casefold(): text for keyword, text in items.items()}

    def run(self, query: str, /) -> str:
        """Return the texts whose keyword occurs in the query, ignoring case."""
        lowered = query.casefold()
        texts = [text for keyword, text in self._texts.items() if keyword in lowered]
        return "\n".join(texts) or f"{NO_INFORMATION} for: {query}"

"""Text of a sample while its tokens come, never more than what is sure to stay."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from jaxrl.extras.serve.worker import Piece


class Text:
    """Text of a sample's tokens, cut where a string stops it.

    What may be the beginning of a stop string is held back, and so are bytes of a character that
    is not whole yet.
    """

    def __init__(self, vocab_bytes: Sequence[bytes], stops: Sequence[str]):
        """Begins with none."""
        self._vocab_bytes = vocab_bytes
        self._held = max((len(stop.encode()) - 1 for stop in stops), default=0)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._data, self._num_told = bytearray(), 0

    def add(self, piece: Piece) -> str:
        """The text that has become sure with a piece."""
        self._data += b"".join(self._vocab_bytes[id] for id in piece.token_ids)
        # An id that stops the answer counts among its tokens, but is no text.
        end = piece.text_bytes if piece.end else max(len(self._data) - self._held, self._num_told)
        new = bytes(self._data[self._num_told : end])
        self._num_told = end
        return self._decoder.decode(new, final=bool(piece.end))

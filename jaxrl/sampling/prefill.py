"""Host-side batching of prefills: attachments to embed together, and tokens in blocks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxrl.models.attachments import POSITIONS, UNITS, Tower
from jaxrl.sampling.decode import Blocks
from jaxrl.sampling.scheduler import Row
from jaxrl.types import Attachment


class Piece(NamedTuple):
    """Up to `Programs.block` tokens of a row to prefill."""

    row: Row
    start: int  # position of the first token
    num_tokens: int  # n
    token_ids: list[int]  # n
    token_arrays: dict[str, np.ndarray]  # [n, ...] of `Tower.arrays`; {} without a tower


@dataclass(frozen=True, kw_only=True)
class PrefillBatcher:
    """Builder of the prefill programs' input arrays from rows with unread tokens.

    Attributes:
        tower: Encoder of attachments; None for a text-only model.
        num_shards: Number of shards of the mesh.
        block: Tokens per block, see `Programs.block`.
        max_units: Maximum number of attachment tokens per shard that are embedded together.
    """

    tower: Tower | None
    num_shards: int
    block: int
    max_units: int

    def check(self, token_ids: Sequence[int], attachments: Sequence[Attachment]) -> None:
        """Check that attachments match the tokens.

        Raises:
            ValueError: Tokens and attachments disagree.
        """
        if self.tower is not None:
            self.tower.positions(np.asarray(token_ids), attachments)
        else:
            assert not attachments, "rollouts refuse them if the model reads text alone"

    def place(
        self,
        row: Row,
        token_ids: Sequence[int],
        attachments: tuple[Attachment, ...],
        start: int,
    ) -> None:
        """Set a row's attachments, the arrays of its unread tokens, and its position offset.

        `start` is the number of tokens before them.
        """
        if self.tower is None:
            return
        arrays = self.tower.token_arrays(
            np.asarray(token_ids), attachments, start=start + row.offset
        )
        row.unread_attachments = attachments
        row.unread_arrays = {name: array[:-1] for name, array in arrays.items()}
        row.offset = int(arrays[POSITIONS][-1, 0]) - (start + len(token_ids) - 1)

    def next_rows(self, rows: deque[Row]) -> list[Row]:
        """Pop the next rows of a shard whose attachments fit together."""
        taken: list[Row] = []
        room = self.max_units
        while rows:
            if self.tower is not None:
                room -= sum(map(self.tower.num_tokens, rows[0].unread_attachments))
            if taken and room < 0:
                break
            taken.append(rows.popleft())
        return taken

    def patches(
        self, attached: Sequence[tuple[Attachment, ...]], size: int
    ) -> tuple[np.ndarray, np.ndarray, list[tuple[np.ndarray, ...]]]:
        """Arrange the attachments of each shard for the devices, padded to `size` patches.

        Returns:
            float32 `[S, size, values]`, int32 `[S, size, W]`, and for each shard the indices of
            each attachment's tokens in the output of `Programs.see`; see `Tower.arrange`.
        """
        assert self.tower is not None
        patches = np.zeros((len(attached), size, self.tower.patch_values), np.float32)
        places = np.zeros((len(attached), size, self.tower.place_values), np.int32)
        units = []
        for index, of_shard in enumerate(attached):
            arranged = self.tower.arrange(of_shard)
            patches[index, : len(arranged.patches)] = arranged.patches
            places[index, : len(arranged.places)] = arranged.places
            units.append(arranged.units)
        return patches, places, units

    def pieces(self, row: Row, units: Iterator[np.ndarray]) -> list[Piece]:
        """Split a row's unread tokens into pieces and mark them as read.

        `units` yields the token indices of each of the row's attachments.
        """
        count, arrays, block = len(row.unread), {}, self.block
        if self.tower is not None:
            arrays = {n: one.filled(count) for n, one in self.tower.arrays.items()}
            arrays |= row.unread_arrays
            if row.unread_attachments:
                places = np.concatenate([next(units) for _ in row.unread_attachments])
                arrays[UNITS][np.equal(row.unread, self.tower.token_id)] = places
        pieces = [
            Piece(
                row,
                row.length + start,
                min(count - start, block),
                row.unread[start : start + block],
                {n: x[start : start + block] for n, x in arrays.items()} if arrays else {},
            )
            for start in range(0, count, block)
        ]
        row.length += count
        row.unread, row.unread_attachments, row.unread_arrays = [], (), {}
        return pieces

    def blocks(
        self, pieces: Sequence[deque[Piece]], num_tokens: int, tables: np.ndarray
    ) -> tuple[Blocks, list[tuple[Piece, int]]]:
        """Pop the next pieces of each shard; return blocks, and each piece with its block index.

        Args:
            pieces: Pieces of each shard; () for padding only.
            num_tokens: Tokens per shard, including padding.
            tables: Block tables of all rows, by slot.
        """
        num_blocks, block = num_tokens // self.block, self.block
        total = self.num_shards * num_blocks

        # Start from padding; each shard fills the first of its blocks.
        token_ids = np.zeros((total, block), np.int32)
        start, counts, slots = np.zeros((3, total), np.int32)
        declared = self.tower.arrays if self.tower is not None else {}
        token_arrays = {name: one.filled(total, block) for name, one in declared.items()}
        members: list[tuple[Piece, int]] = []
        for shard, of_shard in enumerate(pieces):
            taken = [of_shard.popleft() for _ in range(min(num_blocks, len(of_shard)))]
            if not taken:
                continue
            first = shard * num_blocks
            here = slice(first, first + len(taken))
            start[here] = [piece.start for piece in taken]
            counts[here] = [piece.num_tokens for piece in taken]
            slots[here] = [piece.row.slot for piece in taken]
            is_read = np.arange(block) < counts[here, None]
            token_ids[here][is_read] = [id for piece in taken for id in piece.token_ids]
            members += zip(taken, range(first, first + len(taken)), strict=True)
            for index, piece in enumerate(taken, start=first):
                for name, values in piece.token_arrays.items():
                    token_arrays[name][index, : piece.num_tokens] = values
        blocks = Blocks(
            token_ids=token_ids,
            start=start,
            counts=counts,
            tables=tables[slots],
            token_arrays=token_arrays,
        )
        return blocks, members

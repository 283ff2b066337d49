"""Host-side batching of prefills: group attachments to embed, and split tokens into blocks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxrl.models.attachments import POSITIONS, UNITS, Tower
from jaxrl.sampling.decode import PrefillBlocks
from jaxrl.sampling.scheduler import Row
from jaxrl.types import Attachment


class PrefillPiece(NamedTuple):
    """Up to `Programs.block_tokens` tokens of a row to prefill."""

    row: Row
    start: int  # position of the first token
    num_tokens: int  # n
    token_ids: list[int]  # n
    token_arrays: dict[str, np.ndarray]  # [n, ...] of `Tower.arrays`; {} without a tower
    state_slot: int  # state to update, if there are recurrent layers


@dataclass(frozen=True, kw_only=True)
class PrefillBatcher:
    """Builder of the input arrays of the prefill programs, from rows with unread tokens.

    Attributes:
        tower: Encoder of attachments; None for a text-only model.
        num_states: Number of state slots per shard; 0 without recurrent layers.
        num_shards: Number of mesh shards.
        block_tokens: Tokens per block; see `Programs.block_tokens`.
        max_units: Maximum number of attachment tokens per shard that are embedded together.
    """

    tower: Tower | None
    num_shards: int
    block_tokens: int
    max_units: int
    num_states: int = 0

    def check_attachments(
        self, token_ids: Sequence[int], attachments: Sequence[Attachment]
    ) -> None:
        """Check that attachments match the tokens.

        Raises:
            ValueError: They do not match.
        """
        if self.tower is not None:
            self.tower.compute_positions(np.asarray(token_ids), attachments)
        else:
            assert not attachments, "rollouts reject attachments for a text-only model"

    def set_attachments(
        self,
        row: Row,
        token_ids: Sequence[int],
        attachments: tuple[Attachment, ...],
        start: int,
    ) -> None:
        """Set the attachments, per-token arrays and position offset of a row's unread tokens.

        `start` is the number of tokens in the row before `token_ids`.
        """
        if self.tower is None:
            return
        arrays = self.tower.compute_token_arrays(
            np.asarray(token_ids), attachments, start=start + row.offset
        )
        row.prefill_attachments = attachments
        row.prefill_arrays = {name: array[:-1] for name, array in arrays.items()}
        row.offset = int(arrays[POSITIONS][-1, 0]) - (start + len(token_ids) - 1)

    def pop_rows(self, rows: deque[Row]) -> list[Row]:
        """Pop the next rows of a shard whose attachments fit in `max_units`."""
        popped: list[Row] = []
        remaining_units = self.max_units
        while rows:
            if self.tower is not None:
                remaining_units -= sum(map(self.tower.count_tokens, rows[0].prefill_attachments))
            if popped and remaining_units < 0:
                break
            popped.append(rows.popleft())
        return popped

    def batch_patches(
        self, attached: Sequence[tuple[Attachment, ...]], size: int
    ) -> tuple[np.ndarray, np.ndarray, list[tuple[np.ndarray, ...]]]:
        """Batch the attachments of each shard for the devices, padded to `size` patches.

        Returns:
            float32 `[S, size, values]`, int32 `[S, size, W]`, and for each shard the indices of
            each attachment's tokens in the output of `Programs.embed`; see `Tower.collate`.
        """
        assert self.tower is not None
        patches = np.zeros((len(attached), size, self.tower.num_values_per_patch), np.float32)
        coords = np.zeros((len(attached), size, self.tower.num_coords), np.int32)
        units = []
        for index, attachments in enumerate(attached):
            collated = self.tower.collate(attachments)
            patches[index, : len(collated.patches)] = collated.patches
            coords[index, : len(collated.coords)] = collated.coords
            units.append(collated.units)
        return patches, coords, units

    def split_row(self, row: Row, units: Iterator[np.ndarray]) -> list[PrefillPiece]:
        """Split a row's unread tokens into pieces and mark them as read.

        `units` yields the token indices of each of the row's attachments.
        """
        count, arrays, block_tokens = len(row.prefill_ids), {}, self.block_tokens
        state_slot = row.state_slot if row.length else row.prefix.state_slot
        if self.tower is not None:
            arrays = {n: array.full(count) for n, array in self.tower.input_arrays.items()}
            arrays |= row.prefill_arrays
            if row.prefill_attachments:
                embed_indices = np.concatenate([next(units) for _ in row.prefill_attachments])
                has_unit = self.tower.is_placeholder(np.asarray(row.prefill_ids))
                arrays[UNITS][has_unit] = embed_indices
        pieces = [
            PrefillPiece(
                row,
                row.length + start,
                min(count - start, block_tokens),
                row.prefill_ids[start : start + block_tokens],
                {n: x[start : start + block_tokens] for n, x in arrays.items()} if arrays else {},
                state_slot,
            )
            for start in range(0, count, block_tokens)
        ]
        row.length += count
        row.prefill_ids, row.prefill_attachments, row.prefill_arrays = [], (), {}
        return pieces

    def make_blocks(
        self, pieces: Sequence[deque[PrefillPiece]], num_tokens: int, tables: np.ndarray
    ) -> tuple[PrefillBlocks, list[tuple[PrefillPiece, int]]]:
        """Build blocks from each shard's next pieces; also return (piece, block index) pairs.

        Args:
            pieces: Pieces of each shard; used pieces are popped. Pass () for padding only.
            num_tokens: Number of tokens per shard, including padding.
            tables: Block tables of all rows, indexed by slot.
        """
        num_blocks, block_tokens = num_tokens // self.block_tokens, self.block_tokens
        total = self.num_shards * num_blocks

        # Start from padding; each shard fills the first of its blocks.
        token_ids = np.zeros((total, block_tokens), np.int32)
        start, counts, slots = np.zeros((3, total), np.int32)
        specs = self.tower.input_arrays if self.tower is not None else {}
        token_arrays = {name: array.full(total, block_tokens) for name, array in specs.items()}
        state_slots = np.full(total, self.num_states, np.int32)
        members: list[tuple[PrefillPiece, int]] = []
        for shard, shard_pieces in enumerate(pieces):
            popped = [shard_pieces.popleft() for _ in range(min(num_blocks, len(shard_pieces)))]
            if not popped:
                continue
            first = shard * num_blocks
            shard_slice = slice(first, first + len(popped))
            start[shard_slice] = [piece.start for piece in popped]
            counts[shard_slice] = [piece.num_tokens for piece in popped]
            slots[shard_slice] = [piece.row.slot for piece in popped]
            if self.num_states:
                state_slots[shard_slice] = [piece.state_slot for piece in popped]
            is_token = np.arange(block_tokens) < counts[shard_slice, None]
            token_ids[shard_slice][is_token] = [id for piece in popped for id in piece.token_ids]
            members += zip(popped, range(first, first + len(popped)), strict=True)
            for index, piece in enumerate(popped, start=first):
                for name, values in piece.token_arrays.items():
                    token_arrays[name][index, : piece.num_tokens] = values
        blocks = PrefillBlocks(
            token_ids=token_ids,
            start=start,
            counts=counts,
            tables=tables[slots],
            token_arrays=token_arrays,
            state_slots=state_slots if self.num_states else None,
        )
        return blocks, members

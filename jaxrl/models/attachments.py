"""Attachments of a text, such as images, and the interface of the tower that encodes them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from jaxtyping import Array, Float, Int

from jaxrl.models.aux_arrays import TokenArraySpec
from jaxrl.models.layers import LayerScan
from jaxrl.types import Params

if TYPE_CHECKING:
    from jaxrl.models.architecture import MemoryTerms

POSITIONS, UNITS = "positions", "units"
"""Per-token arrays of a model with a tower: the position on each axis, and the index of the token's
unit among those of all attachments on its shard, -1 for text."""


@dataclass(frozen=True, kw_only=True)
class PatchBatch:
    """Attachments concatenated in the layout that the devices read.

    Attributes:
        patches: Patches in reading order, P of them.
        coords: Location of each patch, as `Tower.encode` reads it; 0 is padding.
        units: For each attachment, the indices of its tokens' units among all units.
    """

    patches: np.ndarray  # float32 [P, patch_values]
    coords: np.ndarray  # int32 [P, place_values]
    units: tuple[np.ndarray, ...]  # int32 [n]


class Tower(ABC):
    """Encoder of attachments; each unit of patches takes the place of one token.

    Attributes:
        token_id: Placeholder token.
        width: Width of the patches' hidden states.
        num_layers: Number of the tower's layers.
        num_axes: Number of axes of a token's position.
        num_coords: Number of values that locate a patch.
        entry: Entry of the model's parameters that holds the tower's.
    """

    token_id: int
    width: int
    num_layers: int
    num_axes: int = 3
    num_coords: int = 4
    entry: ClassVar[str]

    @property
    def input_arrays(self) -> Mapping[str, TokenArraySpec]:
        """Return the per-token arrays that passes take if there are attachments."""
        int32 = np.dtype(np.int32)
        return {
            POSITIONS: TokenArraySpec(shape=(self.num_axes,), dtype=int32, fill=0),
            UNITS: TokenArraySpec(shape=(), dtype=int32, fill=-1),
        }

    @property
    def num_deepstack_layers(self) -> int:
        """Return the number of first decoder layers after which the tower adds to hidden states."""
        return 0

    @abstractmethod
    def memory_terms(self) -> MemoryTerms:
        """Return a layer's memory terms per patch instead of per token."""

    @abstractmethod
    def num_scores(self, num_patches: int) -> int:
        """Return the number of attention scores in memory at a time, for `num_patches` patches."""

    @property
    @abstractmethod
    def patches_per_token(self) -> int:
        """Return the number of patches that become one token."""

    @property
    @abstractmethod
    def patch_values(self) -> int:
        """Return the number of values of one patch."""

    @abstractmethod
    def num_tokens(self, attachment: Any) -> int:
        """Return the number of tokens of an attachment.

        Raises:
            ValueError: The model does not support the attachment.
        """

    @abstractmethod
    def token_runs(self, token_ids: np.ndarray, attachments: Sequence[Any]) -> list[np.ndarray]:
        """Return the indices of each attachment's tokens; raises like `compute_positions`."""

    @abstractmethod
    def compute_positions(
        self, token_ids: np.ndarray, attachments: Sequence[Any], *, start: int = 0
    ) -> np.ndarray:
        """Compute token positions, int32 [L, num_axes]; text after an attachment follows all of it.

        Args:
            token_ids: Tokens of a sequence, or of a piece appended to one.
            attachments: Attachments that the tokens contain.
            start: Position of the first token.

        Raises:
            ValueError: Tokens and attachments disagree.
        """

    def token_arrays(
        self, token_ids: np.ndarray, attachments: Sequence[Any], *, start: int = 0
    ) -> dict[str, np.ndarray]:
        """Compute the entries of `input_arrays`, `[L, ...]`, except units."""
        return {POSITIONS: self.compute_positions(token_ids, attachments, start=start)}

    @abstractmethod
    def collate(self, attachments: Sequence[Any]) -> PatchBatch:
        """Concatenate attachments in the layout that the devices read."""

    @abstractmethod
    def encode(
        self,
        params: Params,
        patches: Float[Array, "S P C"],
        coords: Int[Array, "S P W"],
        layer_scan: LayerScan,
    ) -> Float[Array, "S U E"]:
        """Embed units of attachments as `1 + num_deepstack_layers` vectors of D values each.

        The first vector replaces the token's embedding. The others are added to its hidden state
        after the decoder's first layers, one each (DeepStack).

        Args:
            params: Entry `entry` of the model's parameters, in the compute dtype.
            patches: Patches of S independent rows; P is a multiple of `patches_per_token`.
            coords: Location of each patch, see `PatchBatch`.
            layer_scan: Iterates over the layers.
        """

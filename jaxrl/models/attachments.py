"""Attachments such as images, and the interface of the tower that encodes them."""

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
"""Per-token arrays of a model with a tower.

`POSITIONS` is the token's position on each axis. `UNITS` is the index of the token's unit among all
units on the shard, or -1 for text.
"""


@dataclass(frozen=True, kw_only=True)
class PatchBatch:
    """Attachments concatenated into arrays for the device.

    Attributes:
        patches: The P patches, in the order that `Tower.encode` expects.
        coords: Location of each patch, as defined by `Tower.encode`; 0 for padding.
        units: Indices of each attachment's units among all units, in token order.
    """

    patches: np.ndarray  # float32 [P, num_values_per_patch]
    coords: np.ndarray  # int32 [P, num_coords]
    units: tuple[np.ndarray, ...]  # int32 [n]


class Tower(ABC):
    """Encoder of attachments. Each unit, a group of patches, becomes one token.

    Attributes:
        token_id: Id of the placeholder token of an image.
        video_id: Id of the placeholder token of a video; -1 if there is none.
        width: Width of the patches' hidden states.
        num_layers: Number of layers in the tower.
        num_axes: Number of axes of a token's position.
        num_coords: Number of values that locate a patch.
        entry: Entry of the model's parameters that holds the tower's parameters.
    """

    token_id: int
    video_id: int = -1
    width: int
    num_layers: int
    num_axes: int = 3
    num_coords: int = 4
    entry: ClassVar[str]

    @property
    def input_arrays(self) -> Mapping[str, TokenArraySpec]:
        """Return specs of the per-token inputs of a forward pass with attachments."""
        int32 = np.dtype(np.int32)
        return {
            POSITIONS: TokenArraySpec(shape=(self.num_axes,), dtype=int32, fill=0),
            UNITS: TokenArraySpec(shape=(), dtype=int32, fill=-1),
        }

    def is_placeholder(self, token_ids: Any) -> Any:
        """Return a bool mask of the placeholder tokens of attachments, shaped like `token_ids`."""
        return (token_ids == self.token_id) | (token_ids == self.video_id)

    @property
    def num_deepstack_layers(self) -> int:
        """Return the number of leading decoder layers that receive features from the tower."""
        return 0

    @abstractmethod
    def estimate_layer_memory(self) -> MemoryTerms:
        """Return the memory of one layer, per patch instead of per token."""

    @abstractmethod
    def count_attention_scores(self, num_patches: int) -> int:
        """Return the number of attention scores in memory at a time, for `num_patches` patches."""

    @property
    @abstractmethod
    def num_patches_per_token(self) -> int:
        """Return the number of patches per token."""

    @property
    @abstractmethod
    def num_values_per_patch(self) -> int:
        """Return the number of values per patch."""

    @abstractmethod
    def count_tokens(self, attachment: Any) -> int:
        """Return the number of tokens of an attachment.

        Raises:
            ValueError: The model does not support the attachment.
        """

    @abstractmethod
    def find_attachment_tokens(
        self, token_ids: np.ndarray, attachments: Sequence[Any]
    ) -> list[np.ndarray]:
        """Return the indices of each attachment's tokens; see `compute_positions` for errors."""

    @abstractmethod
    def compute_positions(
        self, token_ids: np.ndarray, attachments: Sequence[Any], *, start: int = 0
    ) -> np.ndarray:
        """Compute token positions, int32 [T, num_axes]; they advance past each attachment.

        Args:
            token_ids: Tokens of a sequence, or of a piece to append to a sequence.
            attachments: Attachments that the tokens contain.
            start: Position of the first token.

        Raises:
            ValueError: The tokens do not match the attachments.
        """

    def compute_token_arrays(
        self, token_ids: np.ndarray, attachments: Sequence[Any], *, start: int = 0
    ) -> dict[str, np.ndarray]:
        """Compute the arrays in `input_arrays` except the unit indices, each `[T, ...]`."""
        return {POSITIONS: self.compute_positions(token_ids, attachments, start=start)}

    @abstractmethod
    def collate(self, attachments: Sequence[Any]) -> PatchBatch:
        """Concatenate attachments into arrays for the device."""

    @abstractmethod
    def encode(
        self,
        params: Params,
        patches: Float[Array, "S P C"],
        coords: Int[Array, "S P W"],
        layer_scan: LayerScan,
    ) -> Float[Array, "S U E"]:
        """Encode each unit of the attachments as `1 + num_deepstack_layers` vectors of width D.

        The first vector replaces the token's embedding. The others are added to the token's hidden
        state after the decoder's first layers, one per layer (DeepStack).

        Args:
            params: The tower's parameters, in the compute dtype.
            patches: Patches of S independent rows; P is a multiple of `num_patches_per_token`.
            coords: Location of each patch; see `PatchBatch`.
            layer_scan: Loop over the tower's layers.
        """

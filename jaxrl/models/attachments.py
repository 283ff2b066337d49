"""Attachments of a text, as images: a model's tower reads them into the place of tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from jaxtyping import Array, Float, Int

from jaxrl.models.aux_arrays import TokenArray
from jaxrl.models.layers import LayerScan
from jaxrl.types import Params

if TYPE_CHECKING:
    from jaxrl.models.architecture import MemoryTerms

POSITIONS, UNITS = "positions", "units"
"""Arrays by token of a model with a tower: the position on each axis, and the index of the token's
unit among those of all attachments on its shard, -1 for text."""


@dataclass(frozen=True, kw_only=True)
class Arranged:
    """Attachments one behind the other, as the devices read them.

    Attributes:
        patches: in the order in which they are read, P of them.
        places: of each patch where it is, as `Tower.embeddings` reads it; 0 is padding.
        units: of each attachment, the indices of its tokens' units among all that are arranged.
    """

    patches: np.ndarray  # float32 [P, patch_values]
    places: np.ndarray  # int32 [P, place_values]
    units: tuple[np.ndarray, ...]  # int32 [n]


class Tower(ABC):
    """Reader of attachments in a model: a token stands for each unit of patches of one.

    Attributes:
        token_id: the token.
        width: of the patches' hidden states.
        num_layers: that read them.
        num_axes: numbers of a token's position.
        place_values: numbers that say where a patch is.
        entry: of the model's parameters, under which the tower's are.
    """

    token_id: int
    width: int
    num_layers: int
    num_axes: int = 3
    place_values: int = 4
    entry: ClassVar[str]

    @property
    def arrays(self) -> Mapping[str, TokenArray]:
        """Arrays by token that passes are given where there are attachments."""
        int32 = np.dtype(np.int32)
        return {
            POSITIONS: TokenArray(shape=(self.num_axes,), dtype=int32, fill=0),
            UNITS: TokenArray(shape=(), dtype=int32, fill=-1),
        }

    @property
    def num_added(self) -> int:
        """The decoder's first layers to whose states something is added at attachments."""
        return 0

    @abstractmethod
    def memory_terms(self) -> MemoryTerms:
        """Terms of a patch in a layer, in place of a token."""

    @abstractmethod
    def num_scores(self, num_patches: int) -> int:
        """Values of attention scores that are in memory at a time, of so many patches."""

    @property
    @abstractmethod
    def unit(self) -> int:
        """Patches that become one token."""

    @property
    @abstractmethod
    def patch_values(self) -> int:
        """Numbers of one patch."""

    @abstractmethod
    def num_tokens(self, attachment: Any) -> int:
        """Tokens in whose place an attachment stands.

        Raises:
            ValueError: it is not one that this model reads.
        """

    @abstractmethod
    def runs(self, token_ids: np.ndarray, attachments: Sequence[Any]) -> list[np.ndarray]:
        """The places of each attachment's tokens; raises as `positions`."""

    @abstractmethod
    def positions(
        self, token_ids: np.ndarray, attachments: Sequence[Any], *, start: int = 0
    ) -> np.ndarray:
        """Positions of tokens, int32 [L, num_axes]; text behind an attachment goes on by axis.

        Args:
            token_ids: of a sequence, or of what is appended to one.
            attachments: whose tokens are in it.
            start: the position of the first token.

        Raises:
            ValueError: tokens and attachments disagree.
        """

    def token_arrays(
        self, token_ids: np.ndarray, attachments: Sequence[Any], *, start: int = 0
    ) -> dict[str, np.ndarray]:
        """The entries of `arrays`, `[L, ...]`, but for units; arguments as of `positions`."""
        return {POSITIONS: self.positions(token_ids, attachments, start=start)}

    @abstractmethod
    def arrange(self, attachments: Sequence[Any]) -> Arranged:
        """Attachments as the devices read them."""

    @abstractmethod
    def embeddings(
        self,
        params: Params,
        patches: Float[Array, "S P C"],
        places: Int[Array, "S P W"],
        through: LayerScan,
    ) -> Float[Array, "S U E"]:
        """Embeds units of attachments: `1 + num_added` times D numbers each.

        The first D stand in the place of the token. Each D behind them are added to its hidden
        state after a layer of the decoder, from the first on (DeepStack).

        Args:
            params: what is under `entry` of the model's, in the compute dtype.
            patches: of S rows that do not read each other; P is a multiple of `unit`.
            places: of each patch, see `Arranged`.
            through: goes through the layers.
        """

"""Frequencies of rotary embeddings for contexts beyond those that a model was pretrained on.

Each kind computes what `transformers` does for the `rope_type` of that name, in float32 and in the
same order, so that angles of far positions agree.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np


def default_frequencies(head_dim: int, theta: float) -> np.ndarray:
    """Turns of each pair of a head by one position, in radians, float32 `[H / 2]`."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    return np.float32(1.0) / np.float32(theta) ** exponents


class RopeScaling(ABC):
    """A kind of scaling and its settings."""

    rope_type: ClassVar[str]
    attention_factor: float = 1.0  # of cosines and sines

    @classmethod
    def read(cls, values: dict[str, Any], *, max_positions: int, source: str) -> RopeScaling:
        """Reads the settings of a `config.json`; arguments as of `Fields`.

        Raises:
            ValueError: one is missing or wrong; names the file.
        """
        return cls.from_fields(Fields(values=values, max_positions=max_positions, source=source))

    @classmethod
    @abstractmethod
    def from_fields(cls, fields: Fields) -> RopeScaling:
        """The settings of a `config.json`."""

    @abstractmethod
    def frequencies(self, head_dim: int, theta: float) -> np.ndarray:
        """Scaled `default_frequencies`."""

    @abstractmethod
    def hf_fields(self) -> dict[str, Any]:
        """The settings as a `config.json` has them."""

    def max_positions(self, given: int) -> int:
        """Tokens of the longest sequence, where `max_position_embeddings` is `given`."""
        return given


_LARGEST = 1e12


@dataclass(frozen=True, kw_only=True)
class Fields:
    """The RoPE settings of a `config.json`, read with errors that name it.

    Attributes:
        values: `rope_scaling`, or `rope_parameters` since transformers 5.
        max_positions: `max_position_embeddings`.
        source: the file, for errors.
    """

    values: dict[str, Any]
    max_positions: int
    source: str

    def number(self, name: str, default: float | None = None, *, above: float = 0.0) -> float:
        """A finite number greater than `above`.

        Raises:
            ValueError: it is something else, or is not there and has no default.
        """
        value: Any = self.values.get(name, default)
        is_number = type(value) in (int, float)
        if not is_number or not above < value < _LARGEST:
            raise ValueError(
                f"{self.source}: {name!r} of the RoPE scaling is {value!r:.80}; expected a number "
                f"greater than {above:g}, and less than {_LARGEST:g}."
            )
        return float(value)

    def factor(self) -> float:
        """Factor by which the context is longer: at least 1."""
        value = self.number("factor")
        if value < 1:
            raise ValueError(
                f"{self.source}: 'factor' of the RoPE scaling is {value:g}; expected at least 1."
            )
        return value

    def original_max_positions(self) -> float:
        """Tokens of the longest sequence in pretraining; by default `max_position_embeddings`."""
        return self.number("original_max_position_embeddings", self.max_positions)


@dataclass(frozen=True, kw_only=True)
class Linear(RopeScaling):
    """Positions divided by a factor (https://arxiv.org/abs/2306.15595)."""

    rope_type = "linear"
    factor: float

    @classmethod
    def from_fields(cls, fields: Fields) -> Linear:
        """Its only setting."""
        return cls(factor=fields.factor())

    def frequencies(self, head_dim: int, theta: float) -> np.ndarray:
        """All divided alike."""
        return default_frequencies(head_dim, theta) / np.float32(self.factor)

    def hf_fields(self) -> dict[str, Any]:
        """Its only setting."""
        return {"factor": self.factor}


@dataclass(frozen=True, kw_only=True)
class Llama3(RopeScaling):
    """Long waves divided by a factor, short ones as they are, smoothly between (Llama 3.1).

    Attributes:
        factor: of the frequencies of long waves.
        low_freq_factor: waves longer than `original_max_positions` over this are long.
        high_freq_factor: waves shorter than `original_max_positions` over this are short.
        original_max_positions: tokens of the longest sequence in pretraining.
    """

    rope_type = "llama3"
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: float

    @classmethod
    def from_fields(cls, fields: Fields) -> Llama3:
        """All are required but `original_max_position_embeddings`."""
        low = fields.number("low_freq_factor")
        return cls(
            factor=fields.factor(),
            low_freq_factor=low,
            high_freq_factor=fields.number("high_freq_factor", above=low),
            original_max_positions=fields.original_max_positions(),
        )

    def frequencies(self, head_dim: int, theta: float) -> np.ndarray:
        """Average between the two bounds, weighted by the number of waves in the context."""
        whole = default_frequencies(head_dim, theta)
        divided = whole / np.float32(self.factor)
        waves = np.float32(self.original_max_positions) / (np.float32(2 * math.pi) / whole)
        span = self.high_freq_factor - self.low_freq_factor
        share = (waves - np.float32(self.low_freq_factor)) / np.float32(span)
        between = (1 - share) * divided + share * whole
        return np.where(share < 0, divided, np.where(share > 1, whole, between))

    def hf_fields(self) -> dict[str, Any]:
        """Every setting."""
        return {
            "factor": self.factor,
            "low_freq_factor": self.low_freq_factor,
            "high_freq_factor": self.high_freq_factor,
            "original_max_position_embeddings": _whole(self.original_max_positions),
        }


@dataclass(frozen=True, kw_only=True)
class Yarn(RopeScaling):
    """YaRN (https://arxiv.org/abs/2309.00071): fast pairs as they are, slow ones divided.

    A pair that turns `beta_fast` times or more in the pretraining context keeps its frequency, one
    that turns `beta_slow` times or less has it divided by `factor`; between them, over the number
    of the pair, a straight line.

    Attributes:
        factor: by how much the context is longer.
        original_max_positions: tokens of the longest sequence in pretraining.
        attention_factor: of cosines and sines, so that its square scales the scores.
        beta_fast: turns.
        beta_slow: turns.
        truncate: the line begins and ends at whole numbers of pairs.
    """

    rope_type = "yarn"
    factor: float
    original_max_positions: float
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    @classmethod
    def from_fields(cls, fields: Fields) -> Yarn:
        """The settings; `attention_factor` may follow from `factor`, `mscale`, `mscale_all_dim`."""
        factor = fields.factor()
        attention_factor = _mscale(factor)
        if all(fields.values.get(name) not in (None, 0) for name in ("mscale", "mscale_all_dim")):
            of_all = _mscale(factor, fields.number("mscale_all_dim"))
            attention_factor = _mscale(factor, fields.number("mscale")) / of_all
        truncate = fields.values.get("truncate", True)
        if not isinstance(truncate, bool):
            raise ValueError(
                f"{fields.source}: 'truncate' of the RoPE scaling is {truncate!r:.80}; expected "
                "true or false."
            )
        return cls(
            factor=factor,
            original_max_positions=fields.original_max_positions(),
            attention_factor=fields.number("attention_factor", attention_factor),
            beta_fast=fields.number("beta_fast", 32.0),
            beta_slow=fields.number("beta_slow", 1.0),
            truncate=truncate,
        )

    def frequencies(self, head_dim: int, theta: float) -> np.ndarray:
        """Moves from pair to pair, from frequencies as they are to divided ones."""

        def pair_that_turns(times: float) -> float:
            turn = self.original_max_positions / (times * 2 * math.pi)
            return head_dim * math.log(turn) / (2 * math.log(theta))

        first, last = pair_that_turns(self.beta_fast), pair_that_turns(self.beta_slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, head_dim - 1)
        # Wide enough to divide by.
        span = last - first if last != first else 0.001
        pairs = np.arange(head_dim // 2, dtype=np.float32)
        kept = 1 - np.clip((pairs - np.float32(first)) / np.float32(span), 0, 1)
        whole = default_frequencies(head_dim, theta)
        divided = np.float32(1.0) / (np.float32(self.factor) / whole)
        return divided * (1 - kept) + whole * kept

    def hf_fields(self) -> dict[str, Any]:
        """Every setting, the attention factor as a number."""
        return {
            "factor": self.factor,
            "original_max_position_embeddings": _whole(self.original_max_positions),
            "attention_factor": self.attention_factor,
            "beta_fast": self.beta_fast,
            "beta_slow": self.beta_slow,
            "truncate": self.truncate,
        }

    def max_positions(self, given: int) -> int:
        """Published files leave `max_position_embeddings` at that of pretraining."""
        return max(given, int(self.original_max_positions * self.factor))


def _mscale(factor: float, mscale: float = 1.0) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _whole(value: float) -> float:
    """Returns a whole number where the value is one, as `transformers` wants it."""
    return int(value) if value == int(value) else value

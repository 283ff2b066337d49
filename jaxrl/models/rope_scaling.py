"""Rotary frequencies for contexts longer than those of pretraining.

Each class computes what `transformers` computes for the same `rope_type`, in float32 and in the
same order of operations, so that angles at distant positions agree.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

import numpy as np


def default_frequencies(head_dim: int, theta: float) -> np.ndarray:
    """Return the rotation of each pair of a head per position, in radians, float32 `[H / 2]`."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    return np.float32(1.0) / np.float32(theta) ** exponents


_MAX_VALUE = 1e12


@dataclass(frozen=True, kw_only=True)
class RopeScaling(ABC):
    """A RoPE scaling; its fields are the settings, named as in `config.json`.

    Attributes:
        rope_type: Name of the kind in `config.json`.
        attention_factor: Multiplier of cosines and sines; its square scales the scores.
        factor: Ratio of the longer context to the pretraining context, at least 1.
    """

    rope_type: ClassVar[str]
    attention_factor = 1.0
    factor: float

    @classmethod
    def from_fields(cls, values: dict[str, Any], *, max_positions: int, source: str) -> RopeScaling:
        """Parse the settings of a `config.json`.

        Args:
            values: `rope_scaling`, or `rope_parameters` since transformers 5.
            max_positions: `max_position_embeddings`, the default pretraining length.
            source: Name of the file, for errors.

        Raises:
            ValueError: A setting is missing or out of range.
        """
        values = {"original_max_position_embeddings": max_positions, **values}
        given = {f.name: values[f.name] for f in fields(cls) if f.name in values}
        mscales = {name: values[name] for name in _MSCALES if values.get(name)}
        numbers = [x for name, x in (given | mscales).items() if name != "truncate"]
        if (
            not all(type(x) in (int, float) and 0 < x < _MAX_VALUE for x in numbers)
            or not isinstance(given.get("truncate", True), bool)
            or given.get("factor", 0) < 1
            or given.get("low_freq_factor", 0) >= given.get("high_freq_factor", 1)
        ):
            raise ValueError(
                f"{source}: the RoPE scaling {cls.rope_type!r} has the settings {given!r:.300}; "
                "expected positive numbers, a 'factor' of at least 1, a 'low_freq_factor' below "
                "the 'high_freq_factor', and true or false for 'truncate'."
            )
        return cls(**cls.add_derived(given, mscales))

    @classmethod
    def add_derived(cls, given: dict[str, Any], mscales: dict[str, Any]) -> dict[str, Any]:
        """Return the settings with the derived ones added."""
        return given

    @abstractmethod
    def frequencies(self, head_dim: int, theta: float) -> np.ndarray:
        """Return the scaled `default_frequencies`."""

    def hf_fields(self) -> dict[str, Any]:
        """Return the settings as a `config.json` has them."""
        return asdict(self)

    def max_positions(self, given: int) -> int:
        """Return the length of the longest sequence if `max_position_embeddings` is `given`."""
        return given


@dataclass(frozen=True, kw_only=True)
class LinearScaling(RopeScaling):
    """Positions divided by a factor (https://arxiv.org/abs/2306.15595)."""

    rope_type = "linear"

    def frequencies(self, head_dim: int, theta: float) -> np.ndarray:
        """Divide all frequencies by `factor`."""
        return default_frequencies(head_dim, theta) / np.float32(self.factor)


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling(RopeScaling):
    """Long waves slowed by a factor, short ones unchanged, with a smooth transition (Llama 3.1).

    Attributes:
        low_freq_factor: Waves longer than the pretraining length divided by this are long.
        high_freq_factor: Waves shorter than the pretraining length divided by this are short.
        original_max_position_embeddings: Tokens of the longest sequence in pretraining.
    """

    rope_type = "llama3"
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def frequencies(self, head_dim: int, theta: float) -> np.ndarray:
        """Average between the two bounds, weighted by the number of waves in the context."""
        unscaled = default_frequencies(head_dim, theta)
        scaled = unscaled / np.float32(self.factor)
        length = np.float32(self.original_max_position_embeddings)
        waves = length / (np.float32(2 * math.pi) / unscaled)
        span = self.high_freq_factor - self.low_freq_factor
        smooth = (waves - np.float32(self.low_freq_factor)) / np.float32(span)
        blended = (1 - smooth) * scaled + smooth * unscaled
        return np.where(smooth < 0, scaled, np.where(smooth > 1, unscaled, blended))


_MSCALES = ("mscale", "mscale_all_dim")


@dataclass(frozen=True, kw_only=True)
class YarnScaling(RopeScaling):
    """YaRN (https://arxiv.org/abs/2309.00071): fast pairs unchanged, slow ones divided.

    A pair that turns at least `beta_fast` times in the pretraining context keeps its frequency; one
    that turns at most `beta_slow` times has it divided by `factor`. In between, the weight is
    linear in the index of the pair.

    Attributes:
        original_max_position_embeddings: Tokens of the longest sequence in pretraining.
        truncate: True to round the ends of the linear range to whole pairs.
    """

    rope_type = "yarn"
    original_max_position_embeddings: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    @classmethod
    def add_derived(cls, given: dict[str, Any], mscales: dict[str, Any]) -> dict[str, Any]:
        """Add `attention_factor`, which follows from `factor` or from the two `mscale` settings."""
        factor = given["factor"]
        attention_factor = _mscale(factor)
        if len(mscales) == 2:
            denominator = _mscale(factor, mscales["mscale_all_dim"])
            attention_factor = _mscale(factor, mscales["mscale"]) / denominator
        return {"attention_factor": attention_factor, **given}

    def frequencies(self, head_dim: int, theta: float) -> np.ndarray:
        """Interpolate from original to divided frequencies."""

        def find_correction_dim(num_rotations: float) -> float:
            turn = self.original_max_position_embeddings / (num_rotations * 2 * math.pi)
            return head_dim * math.log(turn) / (2 * math.log(theta))

        first, last = find_correction_dim(self.beta_fast), find_correction_dim(self.beta_slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, head_dim - 1)
        # Avoid division by zero.
        span = last - first if last != first else 0.001
        pairs = np.arange(head_dim // 2, dtype=np.float32)
        unscaled_weight = 1 - np.clip((pairs - np.float32(first)) / np.float32(span), 0, 1)
        unscaled = default_frequencies(head_dim, theta)
        scaled = np.float32(1.0) / (np.float32(self.factor) / unscaled)
        return scaled * (1 - unscaled_weight) + unscaled * unscaled_weight

    def max_positions(self, given: int) -> int:
        """Return the scaled length: published files give the pretraining length."""
        return max(given, int(self.original_max_position_embeddings * self.factor))


def _mscale(factor: float, mscale: float = 1.0) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


ROPE_SCALINGS: dict[str, type[RopeScaling]] = {
    "yarn": YarnScaling,
    "linear": LinearScaling,
    "llama3": Llama3Scaling,
}
"""Scalings by `rope_type`; others are refused because no parity test covers them.

Scalings that depend on the sequence length (`dynamic`, `longrope`) would have to rotate cached keys
again.
"""

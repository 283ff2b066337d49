"""RoPE scaling, for contexts longer than those in pretraining.

Each class computes the frequencies of its `rope_type` as transformers does, in float32 and in the
same order of operations. Angles at distant positions therefore agree.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import numpy as np


def compute_default_frequencies(head_dim: int, theta: float) -> np.ndarray:
    """Return the unscaled frequency of each pair, in radians per position, float32 `[H / 2]`."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    return np.float32(1.0) / np.float32(theta) ** exponents


_MAX_VALUE = 1e12


@dataclass(frozen=True, kw_only=True)
class RopeScaling(ABC):
    """RoPE scaling method. The fields are its settings, named as in `config.json`.

    Attributes:
        rope_type: Value of `rope_type` in `config.json`.
        attention_factor: Multiplier of cosines and sines; its square scales the scores.
        factor: Ratio of the extended context length to the pretraining length, at least 1.
    """

    rope_type: ClassVar[str]
    attention_factor = 1.0
    factor: float

    @classmethod
    def from_fields(cls, values: dict[str, Any], *, max_positions: int, source: str) -> RopeScaling:
        """Parse the RoPE settings of a `config.json`.

        Args:
            values: Value of `rope_scaling`, or of `rope_parameters` since transformers 5.
            max_positions: Value of `max_position_embeddings`, the default pretraining length.
            source: File name for error messages.

        Raises:
            ValueError: A setting is missing or out of range.
        """
        values = {"original_max_position_embeddings": max_positions, **values}
        settings = {f.name: values[f.name] for f in fields(cls) if f.name in values}
        mscales = {name: values[name] for name in _MSCALES if values.get(name)}
        numbers = [x for name, x in (settings | mscales).items() if name != "truncate"]
        if (
            not all(type(x) in (int, float) and 0 < x < _MAX_VALUE for x in numbers)
            or not isinstance(settings.get("truncate", True), bool)
            or settings.get("factor", 0) < 1
            or settings.get("low_freq_factor", 0) >= settings.get("high_freq_factor", 1)
        ):
            raise ValueError(
                f"{source}: the RoPE scaling {cls.rope_type!r} has the settings {settings!r:.300}; "
                "expected positive numbers, a 'factor' of at least 1, a 'low_freq_factor' below "
                "the 'high_freq_factor', and true or false for 'truncate'."
            )
        return cls(**cls.add_derived_settings(settings, mscales))

    @classmethod
    def add_derived_settings(
        cls, settings: dict[str, Any], mscales: dict[str, Any]
    ) -> dict[str, Any]:
        """Return `settings`, completed with those derived from others or from `mscales`."""
        return settings

    @abstractmethod
    def compute_frequencies(self, head_dim: int, theta: float) -> np.ndarray:
        """Return the scaled frequencies; see `compute_default_frequencies`."""

    def compute_max_positions(self, max_position_embeddings: int) -> int:
        """Return the maximum sequence length, given the value of `max_position_embeddings`."""
        return max_position_embeddings


@dataclass(frozen=True, kw_only=True)
class LinearScaling(RopeScaling):
    """Linear scaling, which divides positions by a factor (https://arxiv.org/abs/2306.15595)."""

    rope_type = "linear"

    def compute_frequencies(self, head_dim: int, theta: float) -> np.ndarray:
        """Divide all frequencies by `factor`."""
        return compute_default_frequencies(head_dim, theta) / np.float32(self.factor)


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling(RopeScaling):
    """Llama 3.1 scaling, which divides low frequencies, keeps high ones and interpolates between.

    Attributes:
        low_freq_factor: Frequencies are divided by `factor` if their wavelength is above the
            pretraining length / low_freq_factor.
        high_freq_factor: Frequencies are unchanged if their wavelength is below the pretraining
            length / high_freq_factor.
        original_max_position_embeddings: Context length in pretraining, in tokens.
    """

    rope_type = "llama3"
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def compute_frequencies(self, head_dim: int, theta: float) -> np.ndarray:
        """Divide low frequencies by `factor`, keep high frequencies, and interpolate in between."""
        unscaled = compute_default_frequencies(head_dim, theta)
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
    """YaRN scaling, which divides low frequencies only (https://arxiv.org/abs/2309.00071).

    A pair that rotates at least `beta_fast` times in the pretraining context keeps its frequency. A
    pair that rotates at most `beta_slow` times has its frequency divided by `factor`. In between,
    the result is interpolated linearly by the index of the pair.

    Attributes:
        original_max_position_embeddings: Context length in pretraining, in tokens.
        truncate: True to round the ends of the interpolation range to integer indices.
    """

    rope_type = "yarn"
    original_max_position_embeddings: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    @classmethod
    def add_derived_settings(
        cls, settings: dict[str, Any], mscales: dict[str, Any]
    ) -> dict[str, Any]:
        """Add `attention_factor`, derived from `factor` or from the two `mscale` settings."""
        factor = settings["factor"]
        attention_factor = _compute_mscale(factor)
        if len(mscales) == 2:
            denominator = _compute_mscale(factor, mscales["mscale_all_dim"])
            attention_factor = _compute_mscale(factor, mscales["mscale"]) / denominator
        return {"attention_factor": attention_factor, **settings}

    def compute_frequencies(self, head_dim: int, theta: float) -> np.ndarray:
        """Interpolate between the unscaled frequencies and those divided by `factor`."""

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
        unscaled = compute_default_frequencies(head_dim, theta)
        scaled = np.float32(1.0) / (np.float32(self.factor) / unscaled)
        return scaled * (1 - unscaled_weight) + unscaled * unscaled_weight

    def compute_max_positions(self, max_position_embeddings: int) -> int:
        """Return the extended length; published configs contain the pretraining length."""
        return max(
            max_position_embeddings, int(self.original_max_position_embeddings * self.factor)
        )


def _compute_mscale(factor: float, mscale: float = 1.0) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


ROPE_SCALINGS: dict[str, type[RopeScaling]] = {
    "yarn": YarnScaling,
    "linear": LinearScaling,
    "llama3": Llama3Scaling,
}
"""RoPE scalings by `rope_type`; others are rejected because no parity test covers them.

Scalings that depend on the sequence length (`dynamic`, `longrope`) would require cached keys to be
rotated again.
"""

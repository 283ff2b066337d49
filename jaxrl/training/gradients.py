"""Gradients of mini-batches, accumulated over several pieces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxrl.training.packing import PackedBatch
from jaxrl.training.update import GradAccumulator, combine_sums
from jaxrl.types import Batch


@dataclass(frozen=True, kw_only=True)
class MinibatchPiece:
    """Part of a mini-batch, padded to the stage's `BatchShape`, with its host and device copies."""

    packed: PackedBatch
    batch: Batch
    counts: np.ndarray  # int [N], trained tokens of each trajectory


@dataclass(frozen=True, kw_only=True)
class AccumulatedGradients:
    """Gradient accumulated over pieces; after the last one, it equals the mini-batch gradient."""

    sums: GradAccumulator
    counts: np.ndarray  # int [N], trained tokens of each trajectory

    def combine(
        self, other: AccumulatedGradients, aggregation: Callable[[np.ndarray], Any]
    ) -> AccumulatedGradients:
        """Add another piece's gradient, with the token weights of `aggregation` over both pieces.

        Raises:
            ValueError: The added piece changes the token weights by more than a common factor, or
                the losses of the pieces have different metrics.
        """
        metrics, other_metrics = sorted(self.sums.metrics), sorted(other.sums.metrics)
        if metrics != other_metrics:
            raise ValueError(
                f"gradients of losses with the metrics {metrics} and {other_metrics} cannot be "
                "accumulated; use the same loss in all calls."
            )
        counts = np.concatenate([self.counts, other.counts])
        joint = np.broadcast_to(np.asarray(aggregation(counts), np.float64), counts.shape)
        factors = []
        for part, mine in zip(
            np.split(joint, [len(self.counts)]), (self.counts, other.counts), strict=True
        ):
            alone = np.broadcast_to(np.asarray(aggregation(mine), np.float64), mine.shape)
            has_weight = (mine > 0) & (alone > 0)
            ratios = part[has_weight] / alone[has_weight]
            if len(ratios) and not np.allclose(ratios, ratios[0], rtol=1e-5):
                raise ValueError(
                    "config.loss.aggregation weighs tokens by the lengths of other trajectories, "
                    "so gradients cannot be accumulated; update on all groups at once."
                )
            factors.append(np.float32(ratios[0] if len(ratios) else 1.0))
        return AccumulatedGradients(
            sums=combine_sums(self.sums, other.sums, tuple(factors)),
            counts=counts,
        )

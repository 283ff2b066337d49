"""Protocols for checkpoints, metrics and progress; `run.py` passes the implementations in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from jaxrl.types import Params, TrainState, Trajectory

Record = Mapping[str, Any]
"""A line of `metrics.jsonl`: `step`, `stage` and numbers, with None for non-finite ones."""

WriteSamples = Callable[[Path, int, Sequence[Trajectory], Sequence[Mapping[str, Any]]], None]
"""See `writers.write_samples`."""

FinishTokenLog = Callable[[Params], list[dict[str, Any]]]
TokenLogger = Callable[..., FinishTokenLog]
"""See `logs.tokens.make_token_logger`."""


class CheckpointManager(Protocol):
    """See `runtime.checkpoint.Checkpointer`."""

    def save(
        self,
        step: int,
        state: TrainState,
        position: dict[str, Any],
        ref_params: Params | None,
        *,
        value: float | None = None,
    ) -> None:
        """Save the state after a step, with the value of its evaluation."""

    def restore_best(self, state: TrainState) -> tuple[int, TrainState]:
        """Return the step with the highest value, and its state."""

    def values(self) -> dict[int, float | None]:
        """Return the steps that have a checkpoint, each with its value."""

    def wait(self) -> None:
        """Wait until everything is on disk."""


class MetricWriter(Protocol):
    """See `logs.writers.MetricsLog`."""

    num_records: int

    def add_to_next(self, name: str, value: float) -> None:
        """Add to a metric of the next record."""

    def write(self, step: int, stage: str, metrics: Mapping[str, float]) -> None:
        """Append a record."""

    def write_sign(self, step: int, stage: str, sign: Mapping[str, Any]) -> None:
        """Record a sign of collapse."""

    def close(self) -> None:
        """Close the log."""


class ProgressBar(Protocol):
    """See `logs.display.Display`."""

    def log(self, text: str) -> None:
        """Print permanent lines."""

    def start(self, stage: str, first_step: int, num_steps: int) -> None:
        """Begin the progress line of a stage."""

    def step(self, step: int, numbers: Mapping[str, float]) -> None:
        """Show the numbers of a step."""

    def activity(self, text: str) -> None:
        """Show what the run is doing."""

    def counter(self, what: str) -> Callable[[int, int], None]:
        """Return a function to call with the number done and the total."""

    def stop(self) -> None:
        """End the progress line."""

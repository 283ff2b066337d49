"""Protocols for checkpoints, metrics and progress; `run.py` passes the implementations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from jaxrl.types import Params, TrainState, Trajectory

Record = Mapping[str, Any]
"""A line of `metrics.jsonl`: `step`, `stage` and numbers. A number that is not finite is None."""

WriteSamples = Callable[[Path, int, Sequence[Trajectory], Sequence[Mapping[str, Any]]], None]
"""See `writers.write_samples`."""

FinishTokenLog = Callable[[Params], list[dict[str, Any]]]
TokenLogger = Callable[..., FinishTokenLog]
"""See `logs.tokens.make_token_logger`."""


class CheckpointManager(Protocol):
    """Manager of a run's checkpoints, implemented by `runtime.checkpoint.Checkpointer`."""

    def save(
        self,
        step: int,
        state: TrainState,
        position: dict[str, Any],
        ref_params: Params | None,
        *,
        value: float | None = None,
    ) -> None:
        """Save the state after `step`; `value` is the score of its evaluation, if any."""

    def restore_best(self, state: TrainState) -> tuple[int, TrainState]:
        """Restore the checkpoint with the highest value; return its step and state."""

    def read_scores(self) -> dict[int, float | None]:
        """Return the evaluation score of each saved checkpoint, keyed by step."""

    def wait(self) -> None:
        """Wait until all checkpoints are on disk."""


class MetricWriter(Protocol):
    """Writer for `metrics.jsonl`, implemented by `logs.writers.MetricsLog`."""

    num_records: int

    def add_to_next_record(self, name: str, value: float) -> None:
        """Add `value` to the metric `name` of the next record."""

    def add_samples(self, name: str, trajectories: Sequence[Trajectory]) -> None:
        """Add a table of trajectories to the next record, for the trackers."""

    def write(self, step: int, stage: str, metrics: Mapping[str, float]) -> None:
        """Append a record with the metrics of a step."""

    def write_sign(self, step: int, stage: str, sign: Mapping[str, Any]) -> None:
        """Append a record of a sign of collapse."""

    def close(self) -> None:
        """Close the log."""


class ProgressBar(Protocol):
    """Progress display, implemented by `logs.display.Display`."""

    def log(self, text: str) -> None:
        """Print text that stays on screen."""

    def start(self, stage: str, first_step: int, num_steps: int, *, every_steps: int = 0) -> None:
        """Start the progress line of a stage."""

    def show_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the main metrics of a step."""

    def show_activity(self, text: str) -> None:
        """Show the run's current activity."""

    def make_progress_callback(self, label: str) -> Callable[[int, int], None]:
        """Return a callback `(done, total)` that shows progress."""

    def stop(self) -> None:
        """End the progress line."""

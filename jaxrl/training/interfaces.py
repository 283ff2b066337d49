"""Interfaces by which the stages of a run save, record and show; `run.py` hands these in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from jaxrl.types import Params, TrainState, Trajectory

Record = Mapping[str, Any]
"""A line of `metrics.jsonl`: `step`, `stage`, and numbers, None for those that are not finite."""

WriteSamples = Callable[[Path, int, Sequence[Trajectory], Sequence[Mapping[str, Any]]], None]
"""See `writers.write_samples`."""

Notes = Callable[[Params], list[dict[str, Any]]]
TakeNotes = Callable[..., Notes]
"""See `logs.tokens.make_notes`."""


class Checkpoints(Protocol):
    """Saves and restores; `runtime.checkpoint.Checkpointer` says what each does."""

    def save(
        self,
        step: int,
        state: TrainState,
        position: dict[str, Any],
        ref_params: Params | None,
        *,
        value: float | None = None,
    ) -> None:
        """Saves the state after a step; `value` is that of its evaluation."""

    def restore_best(self, state: TrainState) -> tuple[int, TrainState]:
        """The step with the highest value, and its state as the abstract one is."""

    def steps(self) -> list[int]:
        """The steps of which there are checkpoints."""

    def wait(self) -> None:
        """Returns once everything is on the disk."""


class Records(Protocol):
    """Takes metrics; `logs.writers.MetricsLog` says what each does."""

    num_records: int

    def carry(self, name: str, value: float) -> None:
        """Adds to a metric of the next record."""

    def write(self, step: int, stage: str, metrics: Mapping[str, float]) -> None:
        """Appends a record."""

    def mark(self, step: int, stage: str, sign: Mapping[str, Any]) -> None:
        """Writes down what was seen of a step that is not sound."""

    def close(self) -> None:
        """Closes the log."""


class Shown(Protocol):
    """Shows people how far a run is; `logs.display.Display` says what each does."""

    def log(self, text: str) -> None:
        """Prints lines that stay."""

    def start(self, stage: str, first_step: int, num_steps: int) -> None:
        """Begins the line of a stage."""

    def step(self, step: int, numbers: Mapping[str, float]) -> None:
        """Shows the numbers of a step."""

    def activity(self, text: str) -> None:
        """Shows what the run is doing."""

    def counter(self, what: str) -> Callable[[int, int], None]:
        """A function to call with how many are done, of how many."""

    def stop(self) -> None:
        """Ends the line."""
